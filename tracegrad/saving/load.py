"""`load`: a file that `save` wrote → functions which run and are differentiated without code."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracegrad import _jax
from tracegrad.saving import dimensions, documents, outside_calls, program, structure
from tracegrad.saving.calls import Step, differentiable
from tracegrad.saving.container import Container, open_container
from tracegrad.saving.errors import ArtefactError
from tracegrad.saving.manifest import (
    MANIFEST,
    VARIABLES,
    FunctionRecord,
    Manifest,
    ProgramRecord,
    VariableRecord,
    from_json,
)
from tracegrad.saving.tensors import read_tensors
from tracegrad.saving.variables import own_copy
from tracegrad.tracing.variable import Variable

_MOST_ORDERS = 1024  # trees of arguments that a function remembers
_WIDE = frozenset({"float64", "int64", "uint64", "complex128"})


def load(path: str | os.PathLike[str]) -> Any:
    """Reads what `save` wrote; nothing of it is executed before it is called.

    Arguments:
      path: the file.

    Returns:
      A `LoadedFunction`, or for several functions `LoadedFunctions`.

    Raises:
      ArtefactError: the file is damaged, or none that `save` wrote, or the JAX that runs cannot
        read what the one that wrote it has written; then both versions are named. Its checksums
        show damage, not malice: load files that you trust.
      OSError: there is no such file, or it may not be read.
      ValueError: the functions compute with 64 bits, and JAX is not set to.
      ImportError: a package is missing: ``pip install 'tracegrad[save]'``.

    See `save` for an example. As ``tf.saved_model.load``.
    """
    program.check_installed()
    with open_container(path) as container:
        return load_container(container)


def load_container(container: Container) -> Any:
    """What `load` returns, of an open file."""
    manifest = from_json(container.manifest)
    _check_width(manifest)
    variables = _variables(container, manifest.variables)
    functions = {
        record.name: _function(container, manifest, record, variables)
        for record in manifest.functions
    }
    if manifest.single:
        (function,) = functions.values()
        return function
    keys = [record.key for record in manifest.variables]
    return LoadedFunctions(functions, dict(zip(keys, variables, strict=True)))


# -------------------------------------------------------------------------------------- the file


def _check_width(manifest: Manifest) -> None:
    if jnp.result_type(float) == jnp.float64:  # JAX is set to 64 bits
        return
    leaves = [
        leaf["dtype"]
        for record in manifest.functions
        for tree in (*record.arguments, record.result)
        for leaf in structure.leaf_types(tree)
    ]
    wide = sorted(_WIDE & {*leaves, *(record.dtype for record in manifest.variables)})
    if wide:
        raise ValueError(
            f"the saved functions compute with {', '.join(wide)}, and JAX is set to 32 bits: "
            'call jax.config.update("jax_enable_x64", True) before'
        )


def _variables(container: Container, records: Sequence[VariableRecord]) -> list[Variable]:
    if not records:
        return []
    try:
        arrays = read_tensors(container.member(VARIABLES), VARIABLES)
        if set(arrays) != {record.key for record in records}:
            raise ArtefactError(VARIABLES, "its arrays are not the Variables of the manifest")
        return [_variable(record, arrays[record.key]) for record in records]
    except ArtefactError as error:
        raise ArtefactError(error.member, error.reason, container.path) from None


def _variable(record: VariableRecord, array: np.ndarray[Any, Any]) -> Variable:
    # Compared as it is stored: JAX would convert 64 bits to 32.
    if record.key_type is None and array.dtype.name != record.dtype:
        raise ArtefactError(VARIABLES, _other(record, array))
    value = own_copy(array)
    if record.key_type is not None:
        value = _keys(record, value)
    if str(value.dtype) != record.dtype or value.shape != record.shape:
        raise ArtefactError(VARIABLES, _other(record, value))
    return Variable(value, trainable=record.trainable, name=record.name)


def _other(record: VariableRecord, value: Any) -> str:
    return (
        f"the array {documents.show(record.key)} is {value.dtype}{list(value.shape)}, the "
        f"manifest says {documents.show(record.dtype)[1:-1]}{list(record.shape)}"
    )


def _keys(record: VariableRecord, words: Any) -> Any:
    try:
        return jax.random.wrap_key_data(words, impl=record.key_type)
    except Exception as error:
        raise ArtefactError(
            VARIABLES,
            f"the array {documents.show(record.key)} holds no random keys of the kind "
            f"{documents.show(record.key_type)}: {error}",
        ) from None


def _function(
    container: Container, manifest: Manifest, record: FunctionRecord, variables: list[Variable]
) -> LoadedFunction:
    contents = {each.member: bytes(container.member(each.member)) for each in record.programs}
    try:
        read = {
            each.member: read_program(each, contents[each.member], manifest)
            for each in record.programs
        }
        step = _step(record.program, read)
        _check_function(record, step, variables)
        _check_program(record, record.program, step, len(record.assigns), record.gradient_order)
        for constraint in record.constraints:
            if (why := dimensions.why_no_constraint(constraint)) is not None:
                reason = f"the constraint {documents.show(constraint)} is none: {why}"
                raise ArtefactError(MANIFEST, reason)
        try:
            text = bytes(container.member(record.graph)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArtefactError(record.graph, f"it is no text in UTF-8: {error}") from None
    except ArtefactError as error:
        raise ArtefactError(error.member, error.reason, container.path) from error.__cause__
    keys = [each.key for each in manifest.variables]
    return LoadedFunction(record, _Written(contents, step, text), variables, keys)


def _step(record: ProgramRecord, read: Mapping[str, Any]) -> Step:
    value = None if record.value is None else _step(record.value, read)
    gradient = None if record.gradient is None else _step(record.gradient, read)
    return Step(read[record.member], record.connected, record.refused, value, gradient)


def read_program(record: ProgramRecord, contents: bytes, manifest: Manifest) -> Any:
    """The `jax.export.Exported` of a program, which XLA can parse and which calls nothing outside
    of it but what the manifest says and may be called."""
    try:
        exported = program.read(contents)
        calls = _jax.outside_calls(exported)
    except Exception as error:
        raise ArtefactError(
            record.member,
            f"it was written by {manifest.written_by}, and JAX {_jax.versions()['jax']}, which "
            f"runs here, cannot read it: {_first_line(error)}. A newer JAX reads what an older one "
            "wrote; the other way it may fail: load it with the version that wrote it, or a newer "
            "one",
        ) from error
    if (unknown := outside_calls.unknown(calls)) is not None:
        raise ArtefactError(
            record.member,
            f"it calls {documents.show(unknown)} by a custom call of XLA, which could be any code "
            "of the process that loads it: none of the calls that `save` writes is of this name",
        )
    if calls != list(record.calls):
        raise ArtefactError(
            record.member, f"it calls {calls}, and by the manifest {list(record.calls)}"
        )
    return exported


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(" .:")


def _check_function(record: FunctionRecord, step: Step, variables: Sequence[Variable]) -> None:
    """The program of the function takes and returns what the manifest says."""
    leaves = [leaf for tree in record.arguments for leaf in structure.leaf_types(tree)]
    values = [{"dtype": str(v.dtype), "shape": list(v.shape)} for v in variables]
    operands = leaves + [values[i] for i in record.reads]
    results = structure.leaf_types(record.result) + [values[i] for i in record.assigns]
    _compare(record.program.member, "operand", operands, step.exported.in_avals)
    _compare(record.program.member, "result", results, step.exported.out_avals)


def _check_program(
    function: FunctionRecord, record: ProgramRecord, step: Step, assigned: int, left: int
) -> None:
    """Those below a program, of `left` orders, are there; they take and return what fits it."""
    exported = step.exported
    ins, outs = exported.in_avals, exported.out_avals
    flat = jax.tree.structure(((0,) * len(ins), {})), jax.tree.structure([0] * len(outs))
    if (exported.in_tree, exported.out_tree) != flat:
        raise ArtefactError(record.member, "it takes or returns a tree, where arrays should be")
    if exported.ordered_effects or exported.unordered_effects:
        raise ArtefactError(record.member, "it has effects, which no saved program has")
    named = [*(i for row in step.connected for i in row), *(i for i, _ in step.refused)]
    if len(step.connected) != len(outs) or any(i >= len(ins) for i in named):
        raise ArtefactError(
            MANIFEST, f"what is connected in {record.member} does not fit its operands and results"
        )
    if tuple(exported.platforms) != function.platforms:
        raise ArtefactError(
            record.member,
            f"it is for {list(exported.platforms)}, and not {list(function.platforms)}",
        )
    flowing, active = (
        program.has_cotangent(outs, assigned),
        program.gets_gradient(ins, record.refused),
    )
    if (record.gradient is None) == bool(left and flowing and active):
        fault = "has no gradient" if record.gradient is None else "has a gradient too many"
        raise ArtefactError(
            MANIFEST,
            f"{record.member} {fault}, where {function.name} can be differentiated "
            f"{function.gradient_order} times",
        )
    if record.value is not None and step.value is not None:
        same, member = step.value.exported, record.value.member
        _compare(member, "operand", list(map(_type, ins)), same.in_avals)
        _compare(member, "result", list(map(_type, outs)), same.out_avals)
        _check_program(function, record.value, step.value, assigned, left - 1)
    if record.gradient is not None and step.gradient is not None:
        given = [*ins, *(outs[j] for j in flowing)]
        wanted = [ins[i] for i in active]
        following, member = step.gradient.exported, record.gradient.member
        _compare(member, "operand", list(map(_type, given)), following.in_avals)
        _compare(member, "result", list(map(_type, wanted)), following.out_avals)
        _check_program(function, record.gradient, step.gradient, 0, left - 1)


def _type(aval: Any) -> dict[str, Any]:
    return {"dtype": str(aval.dtype), "shape": list(aval.shape)}


def _compare(
    member: str, what: str, types: Sequence[Mapping[str, Any]], avals: Sequence[Any]
) -> None:
    if len(types) != len(avals):
        raise ArtefactError(
            member, f"it has {len(avals)} {what}s where {len(types)} should be, by the manifest"
        )
    for i, (wanted, aval) in enumerate(zip(types, avals, strict=True)):
        # Versions of JAX may write the same symbolic size differently.
        fits = len(wanted["shape"]) == len(aval.shape) and all(
            a == b if isinstance(b, int) else not isinstance(a, int)
            for a, b in zip(wanted["shape"], aval.shape, strict=True)
        )
        if str(aval.dtype) != wanted["dtype"] or not fits:
            raise ArtefactError(
                member,
                f"its {what} {i} is {_jax.type_text(aval)} and should be "
                f"{wanted['dtype']}{dimensions.shown(wanted['shape'])}",
            )


# --------------------------------------------------------------------------------- what is loaded


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

    def __str__(self) -> str:
        given = (*self.args, *self.kwargs.values())
        shown = (f"{n}: {tree_text(t)}" for n, t in zip(self.parameters, given, strict=True))
        return f"{self.name}({', '.join(shown)}) -> {tree_text(self.result)}"


def tree_text(tree: Any) -> str:
    """A tree of types as it is printed, ``(f32[b,2], {'w': f32[2]})``."""
    if isinstance(tree, jax.ShapeDtypeStruct):
        return _jax.type_text(jax.core.ShapedArray(tree.shape, tree.dtype))
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{k!r}: {tree_text(v)}" for k, v in tree.items()) + "}"
    if structure.is_namedtuple(type(tree)):
        fields = ", ".join(f"{n}={tree_text(getattr(tree, n))}" for n in tree._fields)
        return f"{type(tree).__name__}({fields})"
    if isinstance(tree, (list, tuple)):
        inner = ", ".join(map(tree_text, tree))
        if isinstance(tree, list):
            return f"[{inner}]"
        return f"({inner},)" if len(tree) == 1 else f"({inner})"
    return str(tree)


@dataclass(frozen=True)
class _Mark:
    """What stands in a tree of arguments for the leaf at a position."""

    position: int


@dataclass(frozen=True)
class _Written:
    """What stands in the file of one function."""

    contents: Mapping[str, bytes]  # of the programs, by the names of their members
    step: Step
    graph: str


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
    """

    signature: Signature
    variables: Mapping[str, Variable]
    graph_text: str
    gradient_order: int
    platforms: tuple[str, ...]

    def __init__(
        self,
        record: FunctionRecord,
        written: _Written,
        variables: Sequence[Variable],
        keys: Sequence[str],
    ):
        self._record = record
        self._written = written
        self.reads = tuple(variables[i] for i in record.reads)
        self.assigns = tuple(variables[i] for i in record.assigns)
        used = sorted({*record.reads, *record.assigns})
        self.variables = MappingProxyType({keys[i]: variables[i] for i in used})
        self.graph_text = written.graph
        self.gradient_order = record.gradient_order
        self.platforms = record.platforms
        self.__name__ = self.__qualname__ = record.name
        self.__signature__ = record.signature()
        self.signature = _signature(record, written.step.exported)
        self._is_simple = all(kind != "keyword" for _, kind in record.parameters)
        self._places = [name for name, _ in record.parameters]
        self._orders: dict[Any, tuple[int, ...]] = {}
        self._flat = differentiable(written.step, len(record.assigns), self._beyond)
        self._compiled = jax.jit(_named(self._checked, record.name))

    def written(self) -> tuple[FunctionRecord, Mapping[str, bytes]]:
        """What was read: the record in the manifest, and the programs."""
        return self._record, self._written.contents

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        record = self._record
        flat = self._leaves(self._arguments(args, kwargs))
        values = [variable.value for variable in self.reads]
        try:
            results = self._compiled(*flat, *values)
        except TypeError:
            self._check_arrays(args, kwargs)
            raise
        except ValueError as error:
            if "was exported for" in str(error):
                error.add_note(
                    "It can be saved for several platforms at once, save(..., platforms=[...]). "
                    "What was traced for a mesh of devices (jax.shard_map) wants arguments that "
                    "lie on as many: jax.device_put(x, sharding)."
                )
            raise
        count = len(results) - len(self.assigns)
        for variable, value in zip(self.assigns, results[count:], strict=True):
            variable.assign(value)
        return structure.rebuild(record.result, iter(results[:count]))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments in the order of the parameters."""
        if not kwargs and self._is_simple and len(args) == len(self._places):
            return args
        try:
            bound = self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.signature}: {error}") from None
        return tuple(bound.arguments[name] for name in self._places)

    def _leaves(self, args: tuple[Any, ...]) -> list[Any]:
        """The leaves of the arguments, in the order in which the program takes them."""
        leaves, tree = jax.tree.flatten(args)
        try:
            order = self._orders.get(tree)
        except Exception:  # containers whose static fields cannot be hashed or compared
            return self._values(args)
        if order is None:
            values = self._values(args)
            order = self._order(tree)
            if order is None:
                return values
            if len(self._orders) < _MOST_ORDERS:
                self._orders[tree] = order
        return [leaves[i] for i in order]

    def _values(self, args: tuple[Any, ...]) -> list[Any]:
        found = (leaf for _, leaf in self._placed(args))
        return [leaf.value if isinstance(leaf, Variable) else leaf for leaf in found]

    def _order(self, tree: Any) -> tuple[int, ...] | None:
        """Where the leaves of a tree that fits stand among those that JAX finds in it: elsewhere
        for an `OrderedDict`. None for what JAX and we take apart differently.

        It is asked of the tree alone: of the arguments two may be the same object.
        """
        marks = [_Mark(i) for i in range(tree.num_leaves)]
        try:
            placed = [mark for _, mark in self._placed(jax.tree.unflatten(tree, marks))]
        except Exception:  # containers of the user's own, which may take nothing but arrays
            return None
        if len(placed) != len(marks) or not all(isinstance(mark, _Mark) for mark in placed):
            return None
        return tuple(mark.position for mark in placed)

    def _placed(self, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
        """The leaves of the arguments, each with its place. Raises where a tree does not fit."""
        try:
            return [
                pair
                for name, wanted, given in zip(
                    self._places, self._record.arguments, args, strict=True
                )
                for pair in structure.flatten_as(wanted, given, name)
            ]
        except TypeError as error:
            raise TypeError(f"{self.signature}: {error}") from None

    def _check_arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for place, leaf in self._placed(self._arguments(args, kwargs)):
            try:
                jax.typeof(leaf)
            except TypeError:
                raise TypeError(
                    f"{self.signature}: {place} should be an array and is of type "
                    f"{type(leaf).__name__}"
                ) from None

    def _checked(self, *flat: Any) -> list[Any]:
        """The program, after checking the types of its operands: once for each of them."""
        record = self._record
        places: list[str] = []
        types: list[Mapping[str, Any]] = []
        for name, tree in zip(self._places, record.arguments, strict=True):
            marks = structure.rebuild(tree, iter(range(len(structure.leaf_types(tree)))))
            places += [place for place, _ in structure.flatten_as(tree, marks, name)]
            types += structure.leaf_types(tree)
        operands = list(flat)
        for i, (place, wanted) in enumerate(zip(places, types, strict=True)):
            operands[i] = _of_dtype(self.signature, place, wanted["dtype"], flat[i])
        shapes = [
            (place, wanted["shape"], jnp.shape(value))
            for place, wanted, value in zip(places, types, operands, strict=False)
        ]
        dimensions.bind(shapes, record.constraints, record.name)
        return self._flat(*operands)

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
    def call(*flat: Any) -> Any:
        return fun(*flat)

    call.__name__ = call.__qualname__ = name
    return call


def _signature(record: FunctionRecord, exported: Any) -> Signature:
    def types(trees: Sequence[Any], avals: Iterator[Any]) -> list[Any]:
        structs = (_jax.struct(aval.shape, aval.dtype) for aval in avals)
        return [structure.rebuild(tree, structs) for tree in trees]

    given = types(record.arguments, iter(exported.in_avals))
    (result,) = types([record.result], iter(exported.out_avals))
    names = tuple(name for name, _ in record.parameters)
    split = sum(kind != "keyword" for _, kind in record.parameters)
    kwargs = dict(zip(names[split:], given[split:], strict=True))
    return Signature(record.name, names, tuple(given[:split]), MappingProxyType(kwargs), result)


def _of_dtype(signature: Signature, place: str, wanted: str, value: Any) -> Any:
    """A value of the dtype that was saved; Python's numbers are converted, as in arithmetic."""
    aval = jax.typeof(value)
    if str(aval.dtype) == wanted:
        return value
    if getattr(aval, "weak_type", False) and not wanted.startswith("key<"):
        dtype = jnp.dtype(wanted)
        if jnp.result_type(value, dtype) == dtype:
            return jax.lax.convert_element_type(value, dtype)
    raise TypeError(
        f"{signature}: {place} should be of dtype {wanted} and is {aval.dtype}; convert it with "
        f"`.astype({wanted!r})`"
    )


class LoadedFunctions(Mapping[str, LoadedFunction]):
    """Several functions from one file, which share their Variables; made by `load`.

    A mapping from their names; a name that is an identifier is an attribute too.

    Attributes:
      variables: the Variables of all of them, by name.
    """

    def __init__(self, functions: Mapping[str, LoadedFunction], variables: Mapping[str, Variable]):
        self._functions = dict(functions)
        self.variables: Mapping[str, Variable] = MappingProxyType(dict(variables))

    def __getitem__(self, name: str) -> LoadedFunction:
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
