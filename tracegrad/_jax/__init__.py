"""The parts of JAX that this package needs and that differ between versions or are undocumented.

`compat` is the only module that knows how JAX versions differ. ``tests/test_jax.py`` tests every
module here on the oldest and on the newest supported JAX. Other rooms use the functions by the name
of this package, ``_jax.has_gradient``, which exports each name without an underscore.
"""

from tracegrad._jax.arrays import *
from tracegrad._jax.compat import *
from tracegrad._jax.custom_derivatives import *
from tracegrad._jax.derivatives import *
from tracegrad._jax.devices import *
from tracegrad._jax.evaluation import *
from tracegrad._jax.exports import *
from tracegrad._jax.primitives import *
from tracegrad._jax.program_facts import *
from tracegrad._jax.programs import *
from tracegrad._jax.provenance import *
from tracegrad._jax.replacement import *
from tracegrad._jax.returned import *
from tracegrad._jax.rules import *
from tracegrad._jax.traces import *
