"""The function that `load` returns: it runs saved programs, also for its derivatives."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.export
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.saving.calls import differentiable
from tracegrad.saving.manifest import KINDS, FunctionRecord
from tracegrad.variables.variable import Variable

# (arguments, values of the Variables that are read) -> flat results + new values of Variables
Compiled = Callable[[tuple[Any, ...], list[Any]], list[Any]]

_NO_FORWARD_MODE = (
    "A file has no forward-mode derivative, which jax.jvp, tracegrad.jvp, hvp and hessian ask for; "
    "jax.jacrev(jax.grad(...)) uses reverse mode only."
)


class LoadedFunction:
    """A function from a file; made by `load`.

    Call it like the original, positionally or by name, but without default values, and with arrays
    of the types that it was saved for. It runs the saved program with the Variables of the file. It
    can be compiled, traced and recorded on tapes. It can be differentiated `gradient_order` times,
    in reverse mode only; its derivatives include its custom gradients. `jax.vmap` runs it once for
    each element; for fast batches, save it for batches, with a symbolic size. If a compiled
    function calls a loaded function with Variables, compile with `tracegrad.trace`, not `jax.jit`.
    `copy.deepcopy` also copies its Variables. It cannot be pickled: load the file in each process.

    If a function has several float results, each result has its own gradient program. A result
    without a cotangent thus does not contribute: an infinite derivative of it makes no NaN, and its
    custom gradients are not called. There are two exceptions. If some results, but not all, have
    cotangents, and the function has custom gradients, these are called with zeros for the other
    results. And a function of more than 16 float results, or with large programs, has one gradient
    program for all results, which gets zeros for results without a cotangent.

    Attributes:
      signature: the types of its arguments and its result, as text: ``score(x: f32[2]) -> f32[]``.
      variables: the Variables that it reads or assigns, by name. They can be assigned. To save the
        function with new values: ``save(loaded, path, loaded.specs)``.
      gradient_order: how many times it can be differentiated.
      platforms: the platforms on which it can run.

    >>> import os, tempfile
    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> path = os.path.join(tempfile.mkdtemp(), "square.tracegrad")
    >>> tg.save(lambda x: x**2, path, [jnp.float32(0)])
    >>> square = tg.load(path)
    >>> print(square(3.0), jax.grad(square)(3.0), square.gradient_order)
    9.0 6.0 1
    """

    signature: str
    variables: Mapping[str, Variable]
    gradient_order: int
    platforms: tuple[str, ...]

    def __init__(
        self,
        record: FunctionRecord,
        exported: Mapping[str, Any],
        shared: Sequence[tuple[str, Variable]],
    ):
        self._record = record
        self.reads = tuple(shared[i][1] for i in record.reads)
        self.assigns = tuple(shared[i][1] for i in record.assigns)
        used = sorted({*record.reads, *record.assigns})
        self.variables = dict(shared[i] for i in used)
        self.gradient_order = record.gradient_order
        self.platforms = record.platforms
        self.__name__ = self.__qualname__ = record.name
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, KINDS[kind]) for name, kind in record.parameters]
        )
        program = exported[record.program.array]
        (self._structure, _), _ = (each.children() for each in program.in_tree.children())
        self._avals = program.in_avals[: self._structure.num_leaves]
        # The constraints between symbolic sizes, which `jax.export` does not write.
        scope = jax.export.SymbolicScope(record.constraints)
        self._specs = [_jax.struct(_in_scope(a.shape, scope), a.dtype) for a in self._avals]
        self._out_tree = program.out_tree
        self.signature = record.signature
        self._flat = differentiable(record.program, exported, record, self._error_for_order)
        self._compiled: Compiled = jax.jit(_name_function(self._check_and_run, record.name))

    @property
    def specs(self) -> list[Any] | dict[str, Any]:
        """The types of the arguments, as `save` takes them. Open sizes are symbolic."""
        arguments = zip(self.__signature__.parameters, self._unflatten_specs())
        bound = inspect.BoundArguments(self.__signature__, dict(arguments))
        return dict(bound.arguments) if bound.kwargs else list(bound.args)

    def _unflatten_specs(self) -> tuple[Any, ...]:
        return tuple(jax.tree.unflatten(self._structure, self._specs))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        arguments = self._bind_arguments(args, kwargs)
        results = self._run(arguments, [variable.value for variable in self.reads])
        result, assigned = jax.tree.unflatten(self._out_tree, results)
        for variable, value in zip(self.assigns, assigned, strict=True):
            variable.assign(value)
        return result

    def _bind_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.signature}: {error}") from None
        bound.apply_defaults()  # only *args and **kwargs have defaults, which are empty
        return tuple(bound.arguments.values())

    def _run(self, arguments: tuple[Any, ...], values: list[Any]) -> list[Any]:
        """Returns the flat results, then the new values of the Variables in `assigns`."""
        try:
            return self._compiled(arguments, values)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            text = f"{self.__name__} was loaded from a file. {_NO_FORWARD_MODE}"
            raise TypeError(text) from error

    def _check_and_run(self, arguments: tuple[Any, ...], values: list[Any]) -> list[Any]:
        """Checks and runs the call; JAX traces this once for each type of arguments."""
        leaves, structure = jax.tree.flatten(arguments)
        fits = structure == self._structure
        if fits:
            leaves = list(map(_convert_weak_type, leaves, self._avals))
            types = [(aval.shape, aval.dtype) for aval in self._avals]
            fits = [(jnp.shape(leaf), jax.typeof(leaf).dtype) for leaf in leaves] == types
            arguments = jax.tree.unflatten(structure, leaves)
        if not fits:
            self._check_types(arguments)  # raises, unless only symbolic sizes differ and they fit
        return self._flat(*leaves, *values)

    @functools.cached_property
    def _type_checker(self) -> Any:
        """An exported program with the types of the arguments and no results. Calling this program
        checks trees, dtypes, shapes and the constraints between symbolic sizes, with errors that
        name the argument."""
        specs = dict(zip(self.__signature__.parameters, self._unflatten_specs()))
        return jax.export.export(jax.jit(lambda **arguments: ()))(**specs)

    def _check_types(self, arguments: tuple[Any, ...]) -> None:
        try:
            names = self.__signature__.parameters
            jax.eval_shape(self._type_checker.call, **dict(zip(names, arguments)))
        except Exception as error:
            # JAX writes kwargs['x']['w'].shape[0], and refers to its manual: both are removed.
            text = re.sub(r"kwargs\['(\w+)'\]", r"\1", str(error))
            manual = r"(?s)( Obtained dimension variables:)?[.,:\s]*(Please see https?://.*)?$"
            text = re.sub(manual, "", text)
            text = text.replace("a <class 'int'>", "an array")  # JAX's word for a leaf
            raise TypeError(f"{self.signature}: {text}") from None

    def _error_for_order(self, order: int) -> Exception:
        return ValueError(
            f"{self.__name__} was saved with gradient_order={self.gradient_order}, but a "
            f"derivative of order {order} is needed: save it with gradient_order={order}. "
            f"({_NO_FORWARD_MODE})"
        )

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be pickled: call tracegrad.load in the other process")

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = object.__new__(type(self))
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    def __repr__(self) -> str:
        return f"<loaded {self.signature}>"


def _in_scope(shape: Sequence[Any], scope: Any) -> Sequence[Any]:
    is_fixed = all(isinstance(size, int) for size in shape)
    return shape if is_fixed else jax.export.symbolic_shape(",".join(map(str, shape)), scope=scope)


def _name_function(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(args: tuple[Any, ...], values: list[Any]) -> Any:
        return fun(args, values)

    call.__name__ = call.__qualname__ = name
    return call


def _convert_weak_type(leaf: Any, aval: Any) -> Any:
    """Converts a Python number, or another weak type, to the saved dtype as arithmetic would."""
    is_weak = getattr(jax.typeof(leaf), "weak_type", False)
    if is_weak and jnp.result_type(leaf, aval.dtype) == aval.dtype:
        return jax.lax.convert_element_type(leaf, aval.dtype)
    return leaf
