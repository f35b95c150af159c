"""Derivatives of functions: gradients, Jacobians, Hessians, and what is connected to what."""

from tracegrad.differentiation import jax_derivatives as jax_derivatives  # put in place under rules
from tracegrad.differentiation.connectivity import UnconnectedError as UnconnectedError
from tracegrad.differentiation.forward import jvp as jvp
from tracegrad.differentiation.indexed_slices import IndexedSlices as IndexedSlices
from tracegrad.differentiation.reverse import grad as grad
from tracegrad.differentiation.reverse import jacobian as jacobian
from tracegrad.differentiation.reverse import value_and_grad as value_and_grad
from tracegrad.differentiation.row_updates import apply_rows as apply_rows
from tracegrad.differentiation.second_order import hessian as hessian
from tracegrad.differentiation.second_order import hvp as hvp
from tracegrad.differentiation.selection import select as select
