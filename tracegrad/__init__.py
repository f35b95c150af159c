"""tracegrad: see, edit and compile the gradient of any JAX function."""

import importlib as _importlib
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from tracegrad import _jax as _jax
from tracegrad import ir as ir
from tracegrad._jax.caches import clear_caches as clear_caches
from tracegrad._version import __version__ as __version__
from tracegrad.ir import Graph as Graph
from tracegrad.ir import GraphError as GraphError
from tracegrad.ir import NoMatchError as NoMatchError
from tracegrad.ir import match as match
from tracegrad.tracing import RetraceWarning as RetraceWarning
from tracegrad.tracing import TracedFunction as TracedFunction
from tracegrad.tracing import graph as graph
from tracegrad.tracing import trace as trace
from tracegrad.variables import Variable as Variable
from tracegrad.variables import as_variables as as_variables
from tracegrad.variables import assign_values as assign_values
from tracegrad.variables import values_of as values_of

if _TYPE_CHECKING:  # from their files: some of these have the name of one
    from tracegrad.annotations.custom_gradient import custom_gradient as custom_gradient
    from tracegrad.annotations.host_function import numpy_function as numpy_function
    from tracegrad.annotations.pass_through import grad_pass_through as grad_pass_through
    from tracegrad.annotations.recompute import recompute_grad as recompute_grad
    from tracegrad.annotations.registry import gradient_override_map as gradient_override_map
    from tracegrad.annotations.registry import register_gradient as register_gradient
    from tracegrad.annotations.stop_gradient import stop_gradient as stop_gradient
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
    from tracegrad.insight.check_grads import check_grads as check_grads
    from tracegrad.insight.check_processes import check_processes as check_processes
    from tracegrad.insight.explain import explain as explain
    from tracegrad.insight.memory import memory as memory
    from tracegrad.insight.show import show as show
    from tracegrad.planning.plan_recompute import plan_recompute as plan_recompute
    from tracegrad.rewriting import rules as rules
    from tracegrad.rewriting.intermediates import intermediate_gradients as intermediate_gradients
    from tracegrad.rewriting.intermediates import intermediates as intermediates
    from tracegrad.rewriting.rewrite import rewrite as rewrite
    from tracegrad.saving.errors import ArtefactError as ArtefactError
    from tracegrad.saving.load import load as load
    from tracegrad.saving.loaded import LoadedFunction as LoadedFunction
    from tracegrad.saving.loaded import LoadedFunctions as LoadedFunctions
    from tracegrad.saving.save import save as save
    from tracegrad.saving.variables import load_variables as load_variables
    from tracegrad.saving.variables import save_variables as save_variables
    from tracegrad.saving.variables import variables_of as variables_of
    from tracegrad.tape.forward_accumulator import ForwardAccumulator as ForwardAccumulator
    from tracegrad.tape.gradient_tape import GradientTape as GradientTape
    from tracegrad.tape.gradients import AggregationMethod as AggregationMethod
    from tracegrad.tape.gradients import gradients as gradients
    from tracegrad.tape.gradients import hessian_vector_product as hessian_vector_product
    from tracegrad.tape.gradients import hessians as hessians
    from tracegrad.tape.leaves import UnconnectedGradients as UnconnectedGradients

# What tracing a function needs is imported at once: it makes contexts of JAX, and each new one has
# JAX compile anew all that it has compiled. The other rooms make none, and are imported when one
# of their names is first asked for, since together they take several times as long.
_LATER = {
    "annotations": "custom_gradient grad_pass_through gradient_override_map numpy_function "
    "recompute_grad register_gradient stop_gradient",
    "differentiation": "IndexedSlices UnconnectedError apply_rows grad hessian hvp jacobian jvp "
    "select value_and_grad",
    "insight": "check_grads check_processes explain memory show",
    "planning": "plan_recompute",
    "rewriting": "intermediate_gradients intermediates rewrite rules",
    "saving": "ArtefactError LoadedFunction LoadedFunctions load load_variables save "
    "save_variables variables_of",
    "tape": "AggregationMethod ForwardAccumulator GradientTape UnconnectedGradients gradients "
    "hessian_vector_product hessians",
}
_ROOMS = {name: room for room, names in _LATER.items() for name in (room, *names.split())}


def __getattr__(name: str) -> _Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = _importlib.import_module(f"tracegrad.{_ROOMS[name]}")
    found = globals()[name] = room if name == _ROOMS[name] else getattr(room, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})


_jax.hide_frames(_os.path.dirname(__file__))
