"""tracegrad: see, edit and compile the gradient of any JAX function."""

import os as _os
from pkgutil import resolve_name as _resolve_name
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

if _TYPE_CHECKING:  # some names are also names of files, so import each from its file
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
    from tracegrad.differentiation.sparse_optimizers import global_norm as global_norm
    from tracegrad.differentiation.sparse_optimizers import sparse_adagrad as sparse_adagrad
    from tracegrad.differentiation.sparse_optimizers import sparse_adam as sparse_adam
    from tracegrad.differentiation.sparse_optimizers import sparse_sgd as sparse_sgd
    from tracegrad.differentiation.wrt import select as select
    from tracegrad.insight.check_grads import check_grads as check_grads
    from tracegrad.insight.explain import explain as explain
    from tracegrad.insight.memory import memory as memory
    from tracegrad.insight.show import show as show
    from tracegrad.planning.plan_recompute import plan_recompute as plan_recompute
    from tracegrad.rewriting import rules as rules
    from tracegrad.rewriting.intermediates import intermediate_gradients as intermediate_gradients
    from tracegrad.rewriting.intermediates import intermediates as intermediates
    from tracegrad.rewriting.rewrite import edit as edit
    from tracegrad.rewriting.rewrite import rewrite as rewrite
    from tracegrad.saving.checkpoints import load_variables as load_variables
    from tracegrad.saving.checkpoints import save_variables as save_variables
    from tracegrad.saving.errors import ArtefactError as ArtefactError
    from tracegrad.saving.load import load as load
    from tracegrad.saving.loaded import LoadedFunction as LoadedFunction
    from tracegrad.saving.loaded import LoadedFunctions as LoadedFunctions
    from tracegrad.saving.save import save as save
    from tracegrad.saving.variables import variables_of as variables_of
    from tracegrad.tape.forward_accumulator import ForwardAccumulator as ForwardAccumulator
    from tracegrad.tape.gradient_tape import GradientTape as GradientTape
    from tracegrad.tape.gradients import AggregationMethod as AggregationMethod
    from tracegrad.tape.gradients import gradients as gradients
    from tracegrad.tape.gradients import hessian_vector_product as hessian_vector_product
    from tracegrad.tape.gradients import hessians as hessians
    from tracegrad.tape.leaves import UnconnectedGradients as UnconnectedGradients

# The modules that tracing needs are imported at once: they create user contexts of JAX, and after
# each new one JAX compiles everything again. The other modules create none. Each is imported when
# one of its names is first used, as importing all of them would take several times as long.
_LATER = {
    "annotations.custom_gradient": "custom_gradient",
    "annotations.host_function": "numpy_function",
    "annotations.pass_through": "grad_pass_through",
    "annotations.recompute": "recompute_grad",
    "annotations.registry": "gradient_override_map register_gradient",
    "annotations.stop_gradient": "stop_gradient",
    "differentiation.connectivity": "UnconnectedError",
    "differentiation.forward": "jvp",
    "differentiation.indexed_slices": "IndexedSlices",
    "differentiation.reverse": "grad jacobian value_and_grad",
    "differentiation.row_updates": "apply_rows",
    "differentiation.second_order": "hessian hvp",
    "differentiation.wrt": "select",
    "differentiation.sparse_optimizers": "global_norm sparse_adagrad sparse_adam sparse_sgd",
    "insight.check_grads": "check_grads",
    "insight.explain": "explain",
    "insight.memory": "memory",
    "insight.show": "show",
    "planning.plan_recompute": "plan_recompute",
    "rewriting.intermediates": "intermediate_gradients intermediates",
    "rewriting.rewrite": "edit rewrite",
    "saving.errors": "ArtefactError",
    "saving.load": "load",
    "saving.loaded": "LoadedFunction LoadedFunctions",
    "saving.save": "save",
    "saving.checkpoints": "load_variables save_variables",
    "saving.variables": "variables_of",
    "tape.forward_accumulator": "ForwardAccumulator",
    "tape.gradient_tape": "GradientTape",
    "tape.gradients": "AggregationMethod gradients hessian_vector_product hessians",
    "tape.leaves": "UnconnectedGradients",
}
_ROOMS = {file.partition(".")[0] for file in _LATER}
_MODULES = [*_ROOMS, "rewriting.rules"]  # modules that are public under their own names
_PLACES = {name: f"{file}:{name}" for file, names in _LATER.items() for name in names.split()}
_PLACES |= {module.rpartition(".")[2]: f"{module}:" for module in _MODULES}


def __getattr__(name: str) -> _Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _resolve_name(f"tracegrad.{_PLACES[name]}")
    return found


def __dir__() -> list[str]:
    promised = {*globals(), *_PLACES} - _ROOMS - {"ir", "tracing", "variables"}
    return sorted(name for name in promised if not name.startswith("_") or name == "__version__")


_jax.hide_frames(_os.path.dirname(__file__))
