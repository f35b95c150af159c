"""What a user writes inside a function to say what its gradient is.

Each annotation lowers to its JAX primitive where it is called, so that annotated functions work in
plain JAX, with nothing of this package around them.
"""

from tracegrad.annotations.custom_gradient import custom_gradient as custom_gradient
from tracegrad.annotations.host_function import numpy_function as numpy_function
from tracegrad.annotations.pass_through import grad_pass_through as grad_pass_through
from tracegrad.annotations.recompute import recompute_grad as recompute_grad
from tracegrad.annotations.registry import gradient_override_map as gradient_override_map
from tracegrad.annotations.registry import register_gradient as register_gradient
from tracegrad.annotations.stop_gradient import stop_gradient as stop_gradient
