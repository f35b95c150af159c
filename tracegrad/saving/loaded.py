"""What `load` returns: functions that run saved programs, and are differentiated by them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.ir.notes import add_note
from tracegrad.saving.calls import differentiable
from tracegrad.saving.manifest import KINDS, FunctionRecord
from tracegrad.saving.trees import is_original, of_types, original_form, written_form
from tracegrad.saving.variables import HasVariables
from tracegrad.variables.variable import Variable

# Of the arguments and the values of Variables: the flat results and new values of Variables.
Compiled = Callable[[tuple[Any, ...], list[Any]], list[Any]]

_NO_FORWARD_MODE = (
    "A file has no forward-mode derivative, which jax.jvp, tracegrad.jvp, hvp and hessian ask for; "
    "jax.jacrev(jax.grad(...)) is reverse mode throughout."
)
_OTHER_DEVICES = (
    "It can be saved for several platforms at once, save(..., platforms=[...]). What was traced "
    "for a mesh (jax.shard_map) wants arguments and Variables on as many devices: "
    "jax.device_put(x, sharding), load(path, sharding=...)."
)


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


class LoadedFunction(HasVariables):
    """A function from a file; made by `load`.

    Call it as the original, with arrays of the types that it was saved for: positionally or by
    name, without default values. It runs the saved program, on the Variables of the file. It can
    be compiled, traced and recorded on tapes, and differentiated in reverse mode (not in forward
    mode) as often as it was saved for, by its own rules. `jax.vmap` runs it for one element after
    the other; what is to be fast in batches is saved for batches, with an open size. Called in a
    function that JAX compiles, a function with Variables wants `tracegrad.trace`, as Variables
    always do.

    Of a function with several float results each has a gradient of its own: a result without a
    cotangent takes no part, so that its infinite derivative makes no NaN and its rules are not
    asked. There are two exceptions. Where some of many results have cotangents, but not all, and
    the function has rules of the user's, these are asked with zeros for the other results. And of
    a function of more than 16 float results, or of large programs, all results have one gradient,
    with zeros for those without a cotangent.

    Attributes:
      signature: a `Signature`.
      variables: the Variables that it reads or assigns, by name. They can be assigned, and saved
        again: ``save(loaded, path)``.
      graph_text: the program that was saved, as `print` shows a `Graph`.
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
        contents: Mapping[str, Any],
        exported: Mapping[str, Any],
        text: str,
        shared: Sequence[tuple[str, Variable]],
    ):
        self._record = record
        self._contents = contents
        self.reads = tuple(shared[i][1] for i in record.reads)
        self.assigns = tuple(shared[i][1] for i in record.assigns)
        used = sorted({*record.reads, *record.assigns})
        self.variables = dict(shared[i] for i in used)
        self.graph_text = text
        self.gradient_order = record.gradient_order
        self.platforms = record.platforms
        self.__name__ = self.__qualname__ = record.name
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, KINDS[kind]) for name, kind in record.parameters]
        )
        self._is_simple = all(kind in ("positional", "either") for _, kind in record.parameters)
        program = exported[record.program.array]
        (self._structure, _), _ = (each.children() for each in program.in_tree.children())
        self._avals = program.in_avals[: self._structure.num_leaves]
        self._out_tree = program.out_tree
        self.signature = self._described(program)
        self._is_plain = is_original(self._structure)
        self._returns_plain = is_original(self._out_tree)
        self._flat = differentiable(record.program, exported, record, self._beyond)
        self._compiled: Compiled = jax.jit(_named(self._checked, record.name))

    def _described(self, program: Any) -> Signature:
        names = tuple(self.__signature__.parameters)
        arguments = zip(names, original_form(of_types(self._structure, self._avals)))
        bound = inspect.BoundArguments(self.__signature__, dict(arguments))
        result, _ = original_form(of_types(self._out_tree, program.out_avals))
        kwargs = MappingProxyType(bound.kwargs)
        return Signature(self.__name__, names, bound.args, kwargs, result, self._record.signature)

    def written(self) -> tuple[FunctionRecord, Mapping[str, Any]]:
        """What was read: the record in the manifest, and the programs."""
        return self._record, self._contents

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        arguments = self._arguments(args, kwargs)
        results = self._run(arguments, [variable.value for variable in self.reads])
        result, assigned = jax.tree.unflatten(self._out_tree, results)
        for variable, value in zip(self.assigns, assigned, strict=True):
            variable.assign(value)
        return result if self._returns_plain else original_form(result)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The argument for each parameter."""
        if not kwargs and self._is_simple and len(args) == len(self.signature.parameters):
            return args
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.signature}: {error}") from None
        bound.apply_defaults()  # of *args and **kwargs; others have none
        return tuple(bound.arguments.values())

    def _run(self, arguments: tuple[Any, ...], values: list[Any]) -> list[Any]:
        """The flat results, and behind them the new values of the Variables that it assigns."""
        if self._is_plain:
            with contextlib.suppress(TypeError, ValueError):
                return self._compiled(arguments, values)
        # JAX takes some container for something else; or what is wrong is said here.
        try:
            return self._compiled(written_form(_in_dictionaries(arguments)), values)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            text = f"{self.__name__} was loaded from a file. {_NO_FORWARD_MODE}"
            raise TypeError(text) from error
        except ValueError as error:
            if "was exported for" in str(error):
                add_note(error, _OTHER_DEVICES)
            raise

    def _checked(self, arguments: tuple[Any, ...], values: list[Any]) -> list[Any]:
        """The program, after checking its arguments: once for arguments of each type."""
        arguments = written_form(arguments)
        leaves, structure = jax.tree.flatten(arguments)
        fits = structure == self._structure
        if fits:
            leaves = list(map(_of_dtype, leaves, self._avals))
            types = [(aval.shape, aval.dtype) for aval in self._avals]
            fits = [(jnp.shape(leaf), jax.typeof(leaf).dtype) for leaf in leaves] == types
            arguments = jax.tree.unflatten(structure, leaves)
        if not fits:
            self._check_types(arguments)  # raises, but for open sizes that fit
        return self._flat(*leaves, *values)

    @functools.cached_property
    def _of_types(self) -> Any:
        """A program without results, exported here for the types of the arguments: its call checks
        trees, dtypes, shapes and the constraints between open sizes, and names the argument.
        (`jax.export` writes no constraints, which so are in the manifest.)"""
        scope = jax.export.SymbolicScope(self._record.constraints)
        structs = [
            _jax.struct(
                jax.export.symbolic_shape(",".join(map(str, aval.shape)), scope=scope), aval.dtype
            )
            for aval in self._avals
        ]
        specs = jax.tree.unflatten(self._structure, structs)
        names = self.signature.parameters
        return jax.export.export(jax.jit(lambda **arguments: ()))(**dict(zip(names, specs)))

    def _check_types(self, arguments: tuple[Any, ...]) -> None:
        try:
            jax.eval_shape(self._of_types.call, **dict(zip(self.signature.parameters, arguments)))
        except Exception as error:
            # As JAX calls them: kwargs['x']['w'].shape[0]. What it says of its manual is left out.
            text = re.sub(r"kwargs\['(\w+)'\]", r"\1", str(error))
            text = re.sub(r"[.,]* *Please see https?://.*", "", text, flags=re.DOTALL)
            text = text.replace("a <class 'int'>", "an array")  # what JAX puts for each
            text = text.replace("a <class 'tracegrad.saving.trees.Text'>", "a string")
            raise TypeError(f"{self.signature}: {text}") from None

    def _beyond(self, order: int) -> Exception:
        return ValueError(
            f"{self.__name__} was saved with gradient_order={self.gradient_order}, and a "
            f"derivative of order {order} is asked for: save it with gradient_order={order}. "
            f"({_NO_FORWARD_MODE})"
        )

    def __repr__(self) -> str:
        return f"<loaded {self.signature}>"


def _named(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(args: tuple[Any, ...], values: list[Any]) -> Any:
        return fun(args, values)

    call.__name__ = call.__qualname__ = name
    return call


def _of_dtype(leaf: Any, aval: Any) -> Any:
    """A leaf of the dtype that was saved; only Python's numbers are converted, as in arithmetic."""
    found = jax.typeof(leaf)
    if getattr(found, "weak_type", False) and jnp.result_type(leaf, aval.dtype) == aval.dtype:
        return jax.lax.convert_element_type(leaf, aval.dtype)
    return leaf


def _in_dictionaries(tree: Any) -> Any:
    """A tree with a dictionary in the place of each other mapping."""

    def is_mapping(node: Any) -> bool:
        return isinstance(node, Mapping)

    def convert(node: Any) -> Any:
        if not is_mapping(node):
            return node
        return {key: _in_dictionaries(part) for key, part in node.items()}

    return jax.tree.map(convert, tree, is_leaf=is_mapping)


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
