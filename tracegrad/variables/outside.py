"""Modules of flax.nnx outside of a traced function: what it reads of them is an input.

A function may close over a module, or find it in a global or in `self`. JAX would take the arrays
in it for constants, and keep those of the first call. So while a function is traced, nnx.Variables
and modules say here that they are read. An array of one that was made outside of the function is a
Variable like others to whoever listens (`ModuleArray`). What else the modules are, classes,
settings, and which objects they hold, is a part of what the program is made for (`surroundings`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import jax
import jax.extend
import numpy as np

from tracegrad import _jax
from tracegrad.ir.occurrence import is_own_file
from tracegrad.variables.modules import Structure, read, structure_of
from tracegrad.variables.nnx_objects import find, is_module, nnx, path_text
from tracegrad.variables.statics import Static
from tracegrad.variables.trees import Fixed, is_whole_or_variable
from tracegrad.variables.variable import Variable

# Where flax keeps the array of an nnx.Variable, through which every way to it leads, in C too; and
# where nnx.Variables and modules keep the transformation that they were made in.
_VALUE = "_raw_value"
_MADE_IN = "_trace_state"
_STATE = "_pytree__state"


class ModuleArray(Variable):
    """An array in an nnx.Variable, as a Variable: its value is what the nnx.Variable has now.

    Attributes:
      is_alone: whether it is in no module that the function reads: then nobody else keeps this.
    """

    __slots__ = ("_leaf", "_made_in", "_variable", "is_alone")

    may_be_kept = True  # `jax.jit` and `nnx.jit` keep what they close over, also through us

    def __init__(self, variable: Any, leaf: int, name: str):
        self._variable = variable
        self._leaf = leaf
        self._made_in = getattr(variable, _MADE_IN).jax_trace
        self.is_alone = True
        self._name, self._trainable = name, False
        self._is_ours, self._is_handed, self._keepers = False, True, 0
        self._borrower = self._given = self._stand_in = None

    @property
    def _value(self) -> Any:
        with quietly():
            return jax.tree.leaves(self._variable.get_raw_value())[self._leaf]

    @property
    def _aval(self) -> Any:
        return jax.typeof(self._value)

    def is_outside(self, states: Sequence[Any]) -> bool:
        """Whether it was made in one of some transformations; see `states_around`."""
        return self._made_in in states


def is_param(variable: Variable) -> bool:
    """Whether a Variable is an array of an `nnx.Param`, which is trained."""
    return isinstance(variable, ModuleArray) and isinstance(variable._variable, nnx().Param)


class _Same:
    """An array of a module that is in no nnx.Variable: a constant of the program, by identity."""

    __slots__ = ("_hash", "_ref")

    def __init__(self, array: Any):
        self._ref, self._hash = weakref.ref(array), id(array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._ref() is other._ref() is not None

    def __hash__(self) -> int:
        return self._hash


class Surroundings:
    """What modules outside of a function are besides the arrays of their nnx.Variables.

    Attributes:
      structure: theirs.
    """

    __slots__ = ("_key", "structure")

    def __init__(self, modules: Sequence[Any]):
        with quietly():
            reading = read(modules)
            self.structure: Structure = structure_of(modules, reading)
        places = zip(self.structure.places, reading.arrays, strict=True)
        others = [_same(array) for place, array in places if place.owner is None]
        self._key = self.structure, tuple(map(id, reading.objects)), tuple(others)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Surroundings) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


Fixture = Fixed | Surroundings  # what a program is made for, besides the types of arrays


def _same(array: Any) -> _Same | Static:
    try:
        return _Same(array)
    except TypeError:  # a number
        return Static(array)


def surroundings(references: Sequence[weakref.ref[Any]]) -> tuple[Surroundings, ...]:
    """Those of the modules that are still there; nothing, if there are none.

    A function that is being traced around the call depends on these too.
    """
    modules = [module for ref in references if (module := ref()) is not None]
    for module in modules if _here.watches else ():
        _met(module)
    return (Surroundings(modules),) if modules else ()


# -------------------------------------------------------------------------------------- listening


class _Here(threading.local):
    watches: tuple[Outside, ...] = ()  # of this thread, the innermost last
    is_quiet = False  # what is read is read by this package


_here = _Here()


@contextmanager
def quietly() -> Iterator[None]:
    """A block in which this package itself reads modules."""
    before, _here.is_quiet = _here.is_quiet, True
    try:
        yield
    finally:
        _here.is_quiet = before


def states_around(trace: Any) -> list[Any]:
    """The transformations around a transformation, as flax tells them."""
    states = []
    for around in _jax.outward(trace)[1:]:
        with _jax.set_current_trace(around):
            states.append(jax.extend.core.get_opaque_trace_state(convention="nnx"))  # type: ignore[no-untyped-call]
    return states


class Outside:
    """What a function that is being traced meets of modules outside of it.

    Attributes:
      modules: by name, the outermost ones: each is in none that was met before.
    """

    def __init__(self) -> None:
        self.modules: dict[str, Any] = {}
        self._paths: dict[int, tuple[Any, str]] = {}  # of objects, by identity: in which, and where
        self._states: list[Any] = []
        self._frame: FrameType | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A block, inside of what is traced, in which reads are noted."""
        flax = nnx()
        if flax is None:
            yield
            return
        self._states = states_around(_jax.current_trace(None))
        self._frame = sys._getframe(2)
        before, _here.watches = _here.watches, (*_here.watches, self)
        places = ((flax.Variable, _VALUE, _Heard), (flax.Pytree, "__getattribute__", _telling))
        try:
            with _reads.in_place(places):
                yield
        finally:
            _here.watches = before
            self._frame = None

    def is_outside(self, made_in: Any) -> bool:
        return made_in.jax_trace in self._states

    def note(self, module: Any) -> None:
        """Hears of a module from outside."""
        if id(module) in self._paths:
            return
        with quietly():
            name = self._name(module)
            while name in self.modules:
                name += "'"
            self.modules[name] = module
            for path, node in nnx().iter_graph(module, graph=True):
                self._paths.setdefault(id(node), (module, name + path_text(path)))

    def value(self, variable: Any, raw: Any) -> Any:
        """What a reader gets of an nnx.Variable from outside."""
        leaves, structure = jax.tree.flatten(raw)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, (jax.Array, np.ndarray)):
                leaves[i] = self._array(variable, i).value
        return jax.tree.unflatten(structure, leaves)

    def _array(self, variable: Any, leaf: int) -> ModuleArray:
        known = _arrays.get((id(variable), leaf))
        root, name = self._paths.get(id(variable), (None, ""))
        if known is None:
            known = ModuleArray(variable, leaf, name or self._name(variable))
            _arrays[id(variable), leaf] = known
        if root is not None and known.is_alone:
            known.is_alone = False
            # The module keeps it as long as it lives: functions that JAX keeps have it too.
            weakref.finalize(root, _let_go, known).atexit = False
        return known

    def _name(self, module: Any) -> str:
        """How the function gets to a module, or to an nnx.Variable that is in none."""
        frames: list[FrameType] = []
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            if not is_own_file(frame.f_code.co_filename):
                frames.insert(0, frame)
            frame = frame.f_back
        with quietly():
            paths = (path for frame in frames for path in paths_in(frame, module))
            return next(paths, type(module).__name__)


# There is one of each, as long as a program or a module has it.
_arrays: weakref.WeakValueDictionary[tuple[int, int], ModuleArray] = weakref.WeakValueDictionary()


def _let_go(array: ModuleArray) -> None:
    """What is left to do for the array of a module that is gone: nothing."""


def _met(module: Any) -> None:
    made_in = object.__getattribute__(module, "__dict__").get(_STATE)
    if made_in is None:  # it is being made
        return
    for watch in reversed(_here.watches):  # what was made inside of one was so of those around it
        if not watch.is_outside(made_in.trace_state):
            return
        watch.note(module)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    """`__getattribute__` of modules."""

    def getattribute(self: Any, name: str) -> Any:
        if _here.watches and not _here.is_quiet:
            _met(self)
        return original(self, name)

    return getattribute


class _Heard:
    """The slot of an nnx.Variable in which its value is."""

    def __init__(self, slot: Any):
        self._slot = slot

    def __get__(self, variable: Any, kind: Any = None) -> Any:
        if variable is None:
            return self
        value = self._slot.__get__(variable, kind)
        if not _here.watches or _here.is_quiet or variable.ref:
            return value
        watch = _here.watches[-1]
        outside = watch.is_outside(getattr(variable, _MADE_IN))
        return watch.value(variable, value) if outside else value

    def __set__(self, variable: Any, value: Any) -> None:
        self._slot.__set__(variable, value)

    def __delete__(self, variable: Any) -> None:
        self._slot.__delete__(variable)


_reads = _jax.Replacement()


# ------------------------------------------------------------------------------------------- names


def paths_in(frame: FrameType, wanted: object) -> Iterator[str]:
    """By which names the code of a frame gets to an object in a module: ``self.model.linear``."""
    code = frame.f_code
    globals_ = {k: frame.f_globals[k] for k in code.co_names if k in frame.f_globals}
    for name, value in {**globals_, **frame.f_locals}.items():
        for prefix, tree in _trees(name, value):
            with suppress(TypeError, ValueError):  # JAX wants keys that it can sort
                leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_whole_or_variable)
                for path, leaf in leaves:
                    inner = find(wanted, leaf) if is_module(leaf) else None
                    if inner is not None:
                        yield f"{prefix}{jax.tree_util.keystr(path)}{inner}"


def _trees(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value, and if it is an object of the user's, its attributes."""
    if isinstance(value, (dict, list, tuple)) or is_module(value):
        yield name, value
    elif isinstance(getattr(value, "__dict__", None), Mapping) and not isinstance(value, type):
        yield from ((f"{name}.{k}", v) for k, v in vars(value).items() if is_module(v))
