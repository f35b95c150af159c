"""What this package needs of JAX that differs between its versions or has no public documentation.

`compat` is the only module that knows how JAX versions differ. Everything here is probed by
``tests/test_jax.py`` on the oldest and on the newest supported JAX. The other rooms call all of it
by the name of this package, ``_jax.has_gradient``: each name without an underscore is offered.
"""

from tracegrad._jax.arrays import *
from tracegrad._jax.compat import *
from tracegrad._jax.custom_derivatives import *
from tracegrad._jax.derivatives import *
from tracegrad._jax.devices import *
from tracegrad._jax.exports import *
from tracegrad._jax.primitives import *
from tracegrad._jax.program_facts import *
from tracegrad._jax.programs import *
from tracegrad._jax.provenance import *
from tracegrad._jax.replacement import *
from tracegrad._jax.returned import *
from tracegrad._jax.rules import *
from tracegrad._jax.traces import *
