"""JAX's own derivatives, whatever stands in their place in `jax` while rules are in force.

See `differentiation.jax_derivatives`: what a user differentiates goes by the rules, and what this
package differentiates was edited before.
"""

from __future__ import annotations

from jax import grad as grad
from jax import jacfwd as jacfwd
from jax import jacrev as jacrev
from jax import jvp as jvp
from jax import linearize as linearize
from jax import value_and_grad as value_and_grad
from jax import vjp as vjp
