"""What `load` returns: functions that run saved programs, and are differentiated by them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.notes import add_note
from tracegrad.saving import dimensions
from tracegrad.saving.calls import differentiable
from tracegrad.saving.manifest import FunctionRecord
from tracegrad.saving.program_tree import ProgramTree
from tracegrad.saving.structure import Leaf, flatten_as
from tracegrad.variables.statics import has_statics, with_statics
from tracegrad.variables.variable import Variable

# Of the arguments and the values of Variables: the result and the new values of Variables.
Compiled = Callable[[tuple[Any, ...], list[Any]], tuple[Any, list[Any]]]


@dataclass(frozen=True)
class Signature:
    """What a loaded function takes and returns.

    Attributes:
      name: of the function.
      parameters: the names of its arguments.
      args: a tuple with one entry for each positional argument: a pytree of
        `jax.ShapeDtypeStruct`s, with symbolic sizes where they were left open.
      kwargs: a dictionary of those that are given by name.
      result: the pytree of what it returns.

    As text it is one line: ``score(x: f32[b,2]) -> f32[b]``.
    """

    name: str
    parameters: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    _text: str = field(repr=False)

    def __str__(self) -> str:
        return self._text


class LoadedFunction:
    """A function from a file; made by `load`.

    Call it as the original, with arrays of the types that it was saved for: positionally or by
    name, without default values. It runs the saved program, on the Variables of the file. It can
    be compiled, traced and recorded on tapes, and differentiated in reverse mode (not in forward
    mode) as often as it was saved for, by its own rules. `jax.vmap` runs it for one element after
    the other; what is to be fast in batches is saved for batches, with an open size. Called in a
    function that JAX compiles, a function with Variables wants `tracegrad.trace`, as Variables
    always do.

    Attributes:
      signature: a `Signature`.
      variables: the Variables that it reads or assigns, by name. They can be assigned, and saved
        again: ``save(loaded, path)``.
      graph_text: what ``print(tracegrad.graph(fun)(...))`` showed when it was saved.
      gradient_order: how many times it can be differentiated.
      platforms: where it runs.

    >>> import os, tempfile
    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> path = os.path.join(tempfile.mkdtemp(), "square.tracegrad")
    >>> tg.save(lambda x: x**2, path, [jnp.float32(0)])
    >>> square = tg.load(path)
    >>> print(square(3.0), jax.grad(square)(3.0), square.gradient_order)
    9.0 6.0 1
    """

    signature: Signature
    variables: Mapping[str, Variable]
    graph_text: str
    gradient_order: int
    platforms: tuple[str, ...]

    def __init__(
        self,
        record: FunctionRecord,
        contents: Sequence[bytes],
        tree: ProgramTree[Any],
        text: str,
        variables: Mapping[str, Variable],
    ):
        self._record = record
        self._contents = contents
        shared = list(variables.items())
        self.reads = tuple(shared[i][1] for i in record.reads)
        self.assigns = tuple(shared[i][1] for i in record.assigns)
        used = sorted({*record.reads, *record.assigns})
        self.variables = dict(shared[i] for i in used)
        self.graph_text = text
        self.gradient_order = record.gradient_order
        self.platforms = record.platforms
        self.__name__ = self.__qualname__ = record.name
        self.__signature__ = record.signature()
        self.signature = _signature(record, tree.program)
        self._is_simple = all(kind != "keyword" for _, kind in record.parameters)
        self._has_statics = has_statics(jax.tree.structure(record.arguments))
        self._result = jax.tree.structure(record.result)
        self._flat = differentiable(tree, len(record.assigns), self._beyond)
        self._compiled: Compiled = jax.jit(_named(self._checked, record.name))

    def written(self) -> tuple[FunctionRecord, Sequence[bytes]]:
        """What was read: the record in the manifest, and the programs."""
        return self._record, self._contents

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        given = self._arguments(args, kwargs)
        values = [variable.value for variable in self.reads]
        result, assigned = self._run(given, values)
        for variable, value in zip(self.assigns, assigned, strict=True):
            variable.assign(value)
        return result

    def _run(self, args: tuple[Any, ...], values: list[Any]) -> tuple[Any, list[Any]]:
        """The result, and the new values of the Variables that it assigns."""
        if not self._has_statics:
            with contextlib.suppress(TypeError, ValueError):
                return self._compiled(args, values)
        # JAX takes some container for something else; or what is wrong is said here.
        try:
            return self._compiled(self._rebuilt(args), values)
        except ValueError as error:
            if "was exported for" in str(error):
                add_note(
                    error,
                    "It can be saved for several platforms at once, save(..., platforms=[...]). "
                    "What was traced for a mesh (jax.shard_map) wants arguments and Variables on "
                    "as many devices: jax.device_put(x, sharding), load(path, sharding=...).",
                )
            raise

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments in the order of the parameters."""
        if not kwargs and self._is_simple and len(args) == len(self.signature.parameters):
            return args
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.signature}: {error}") from None
        return tuple(bound.arguments[name] for name in self.signature.parameters)

    def _placed(self, args: tuple[Any, ...]) -> list[tuple[str, Leaf, Any]]:
        """The leaves of the arguments, each with its place and what was saved there. Raises where
        a tree does not fit."""
        try:
            return [
                pair
                for name, wanted, given in zip(
                    self.signature.parameters, self._record.arguments, args, strict=True
                )
                for pair in flatten_as(wanted, given, name)
            ]
        except TypeError as error:
            raise TypeError(f"{self.signature}: {error}") from None

    def _rebuilt(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments in containers that JAX knows. Raises where a leaf is no array."""
        placed = self._placed(args)
        for place, _, leaf in placed:
            if not isinstance(leaf, Variable):
                self._type_of(place, leaf)
        structure = jax.tree.structure(self._record.arguments)
        return with_statics(jax.tree.unflatten(structure, [leaf for *_, leaf in placed]))

    def _type_of(self, place: str, leaf: Any) -> Any:
        try:
            return jax.typeof(leaf)
        except TypeError:
            what = type(leaf).__name__
            raise TypeError(
                f"{self.signature}: {place} should be an array and is of type {what}"
            ) from None

    def _checked(self, args: tuple[Any, ...], values: list[Any]) -> tuple[Any, list[Any]]:
        """The program, after checking its arguments: once for arguments of each type."""
        placed, record = self._placed(args), self._record
        operands = [self._of_dtype(place, saved.dtype, value) for place, saved, value in placed]
        shapes = [(place, saved.shape, jnp.shape(value)) for place, saved, value in placed]
        dimensions.bind(shapes, record.constraints, record.name)
        results = self._flat(*operands, *values)
        count = len(results) - len(self.assigns)
        result = with_statics(jax.tree.unflatten(self._result, results[:count]))
        return result, results[count:]

    def _of_dtype(self, place: str, wanted: str, value: Any) -> Any:
        """A value of the dtype that was saved; Python's numbers are converted, as in arithmetic."""
        aval = self._type_of(place, value)
        if str(aval.dtype) == wanted:
            return value
        if getattr(aval, "weak_type", False) and not wanted.startswith("key<"):
            dtype = jnp.dtype(wanted)
            if jnp.result_type(value, dtype) == dtype:
                return jax.lax.convert_element_type(value, dtype)
        raise TypeError(
            f"{self.signature}: {place} should be of dtype {wanted} and is {aval.dtype}; convert "
            f"it with `.astype({wanted!r})`"
        )

    def _beyond(self, order: int) -> Exception:
        saved = self.gradient_order
        return ValueError(
            f"{self.__name__} was saved with gradient_order={saved}, and a derivative of order "
            f"{order} is asked for: save it with gradient_order={order}. (Derivatives in forward "
            "mode, such as tracegrad.jvp, hvp and hessian use, are not saved; "
            "jax.jacrev(jax.grad(...)) is reverse mode throughout.)"
        )

    def __repr__(self) -> str:
        return f"<loaded {self.signature}>"


def _named(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(args: tuple[Any, ...], values: list[Any]) -> Any:
        return fun(args, values)

    call.__name__ = call.__qualname__ = name
    return call


def _signature(record: FunctionRecord, exported: Any) -> Signature:
    def types(tree: Any, avals: Sequence[Any]) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        structs = [_jax.struct(aval.shape, aval.dtype) for aval in avals[: len(leaves)]]
        return jax.tree.unflatten(structure, structs)

    given = types(record.arguments, exported.in_avals)
    names = tuple(name for name, _ in record.parameters)
    split = sum(kind != "keyword" for _, kind in record.parameters)
    kwargs = MappingProxyType(dict(zip(names[split:], given[split:], strict=True)))
    result = types(record.result, exported.out_avals)
    return Signature(record.name, names, given[:split], kwargs, result, str(record))


class LoadedFunctions(Mapping[str, LoadedFunction]):
    """Several functions from one file, which share their Variables; made by `load`.

    A mapping from their names; a name that is an identifier is an attribute too.

    Attributes:
      variables: the Variables of all of them, by name.

    >>> import os, tempfile
    >>> import jax.numpy as jnp, tracegrad as tg
    >>> path = os.path.join(tempfile.mkdtemp(), "both.tracegrad")
    >>> specs = [jnp.float32(0)]
    >>> functions = {"twice": (lambda x: 2 * x, specs), "half": (lambda x: x / 2, specs)}
    >>> tg.save(functions, path, gradient_order=0)
    >>> both = tg.load(path)
    >>> print(sorted(both), both.twice(3.0), both["half"](3.0))
    ['half', 'twice'] 6.0 1.5
    """

    def __init__(self, functions: Mapping[str, LoadedFunction], variables: Mapping[str, Variable]):
        self._functions = dict(functions)
        self.variables: Mapping[str, Variable] = dict(variables)

    def __getitem__(self, name: str) -> LoadedFunction:
        if name not in self._functions:
            raise KeyError(f"no function {name!r} was saved; there are {', '.join(self)}")
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __getattr__(self, name: str) -> LoadedFunction:
        functions = self.__dict__.get("_functions", {})
        if name in functions:
            found: LoadedFunction = functions[name]
            return found
        raise AttributeError(f"no function {name!r} was saved; there are {', '.join(functions)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._functions]

    def __repr__(self) -> str:
        return "\n".join(["<loaded functions", *(f"  {f.signature}" for f in self.values())]) + ">"
