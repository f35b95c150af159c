"""Gradients by name: `register_gradient` keeps them, `gradient_override_map` puts them in place.

An override is a rule. What is differentiated inside of a block is edited by the block's rules (see
`tracing.in_force`). For what is differentiated after the block, by JAX, tracegrad or a tape around
it, a trace of our own stands on top of whatever is going on in the block: it applies the same rules
to each operation, which goes on as a function with the registered gradient, a `jax.custom_vjp`.
"""

from __future__ import annotations

import difflib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from tracegrad import _jax
from tracegrad.ir import Graph, GraphError, Occurrence, match, scopes
from tracegrad.ir.editing import Op
from tracegrad.ir.importer import graph_of
from tracegrad.ir.occurrence import calling_line, warn_where_called
from tracegrad.ir.program_keys import PROGRAMS, params_key
from tracegrad.ir.running import run_graph
from tracegrad.ir.wording import code_of, described
from tracegrad.rewriting.match_rule import MatchRule, around, of_arrays
from tracegrad.rewriting.overriding import overriding, require_gradient_function, with_gradient
from tracegrad.tracing.in_force import Force, in_force
from tracegrad.variables.overriding import OverridingTrace

_forget_compiled: Callable[[], None] = jax.clear_caches
G = TypeVar("G", bound=Callable[..., Any])

_lock = threading.Lock()
# By name, for as long as the process lives: no cache.
_registered: dict[str, Callable[..., Any]] = {}
_met: set[str] = set()  # names of operations that some block has overridden
_used: set[str] = set()  # names that some block has had, so that compiled programs may hold them


def register_gradient(name: str, *, replace: bool = False) -> Callable[[G], G]:
    """Keeps a gradient function under a name, for `gradient_override_map`.

    Args:
      name: any name.
      replace: whether to put it in the place of one of that name, as when the cell of a notebook
        is run again. If a block has had that name, compiled functions may hold the gradient that it
        meant: all are compiled anew when they are called next (`jax.clear_caches`).

    Returns:
      A decorator for ``grad(op, *dys)``, of the form that `tracegrad.rules.override_gradient`
      describes; it returns the function.

    Raises:
      KeyError: the name is taken.
      TypeError: what it decorates is no function.

    As ``tf.RegisterGradient``.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> @tg.register_gradient("TwiceTheGradient", replace=True)
    ... def twice(op, dy):
    ...     return 2 * dy * jnp.cos(op.inputs[0])
    >>> def f(x):
    ...     with tg.gradient_override_map({"sin": "TwiceTheGradient"}):
    ...         return jnp.sin(x)
    >>> print(jax.grad(f)(0.0))
    2.0
    """
    if callable(name):
        raise TypeError("register_gradient wants a name: @register_gradient('Guided')")

    def register(grad: G) -> G:
        require_gradient_function(grad)
        with _lock:
            old = _registered.get(name)
            if old is not None and not replace:
                raise KeyError(
                    f"the gradient {name!r} is registered already, as "
                    f"{described(old)}: choose another name, or pass replace=True"
                )
            _registered[name] = grad
            is_stale = name in _used and old is not None and old is not grad
        if is_stale and not (_jax.under_jit() and _is_made_again(grad, old)):
            _forget_compiled()  # a jitted function with a block in it does not look here again
        return grad

    return register


def _is_made_again(grad: Callable[..., Any], old: Any) -> bool:
    """Whether a gradient function is an old one that the next trace of one function has made again:
    of the same code, and over the same values but for traced ones."""
    cells, cells_of_old = (getattr(each, "__closure__", None) or () for each in (grad, old))
    contents = (map(_jax.cell_content, pair) for pair in zip(cells, cells_of_old))
    is_same = all(new is before or _jax.is_tracer(new) for new, before in contents)
    return is_same and code_of(grad) is code_of(old) is not None


def registered_gradient(name: str) -> Callable[..., Any]:
    """The gradient function of a name.

    Raises LookupError for one that is not registered, with the nearest names.
    """
    try:
        return _registered[name]
    except KeyError:
        near = difflib.get_close_matches(name, _registered, 3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise LookupError(
            f"no gradient is registered under {name!r}{hint}: "
            f"put @tracegrad.register_gradient({name!r}) on a function grad(op, *dys)"
        ) from None


@contextmanager
def gradient_override_map(overrides: Mapping[str, str]) -> Iterator[None]:
    """A block in which operations of some names have registered gradients.

    Args:
      overrides: by the name of a primitive (``"sin"``), of a jitted function or of a custom rule
        (``"relu"``) the name of a registered gradient: of that which has it when the block is
        entered or, if none has, when a gradient is taken.

    In a block it acts on what is computed directly in it, whoever differentiates that afterwards;
    on the traced functions, tapes and `tracegrad.gradients` that are entered in it; and on what
    `tracegrad.grad`, `jax.grad` and their like differentiate in it. It also reaches into jitted
    functions, loops and branches, but not into custom rules. Of several blocks the innermost wins.
    A block is that of its thread: what other coroutines compute meanwhile is in it as well.

    Warns, once per place, of names of which no operation was met in this block or any before.

    Raises:
      TypeError: `overrides` is no mapping from names to names.
      GraphError: such an operation is differentiated inside the block by a `jax.grad` (or another
        of JAX's own) that was imported by name or made before, and does not see the override.
      LookupError: a gradient is taken, and none of that name is registered.
      RuntimeError: the block is left before another one that was entered inside of it.

    As TensorFlow 1's ``Graph.gradient_override_map``; see `register_gradient` for an example.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> @tg.register_gradient("OfOne", replace=True)
    ... def of_one(op, dy):
    ...     return dy
    >>> def f(x):
    ...     with tg.gradient_override_map({"cos": "OfOne"}):
    ...         return jnp.cos(x)
    >>> print(jax.grad(f)(0.0))
    1.0
    """
    names = [name for pair in dict(overrides).items() for name in pair]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            "gradient_override_map wants a mapping from names of operations to names of "
            f"registered gradients, as {{'relu': 'Guided'}}; got {overrides!r}"
        )
    if not overrides:
        yield
        return
    named = {name: _Registered.now(gradient) for name, gradient in overrides.items()}
    rules = [_override(name, grad) for name, grad in named.items()]
    force = Force(rules, everywhere=True, key=("overrides", frozenset(named.items())))
    trace = _Overrides(_jax.current_trace(None), named, force)
    trace.begin()
    try:
        yield
    finally:
        trace.end()
    if unmet := [name for name in named if name not in _met]:
        warn_where_called(
            f"no operation {' or '.join(map(repr, unmet))} was met in a block of "
            f"gradient_override_map({dict(overrides)!r}), which acts on what is computed in it, "
            "not on what a tape has recorded before. Names are those of primitives, jitted "
            "functions and custom rules, as print(tracegrad.graph(fun, *args)) shows them",
            UserWarning,
        )


# ------------------------------------------------------------------------------ as rules on graphs

_MARK = "overridden_"  # in front of the name of what has an override: it gets no second one


@dataclass(frozen=True, eq=False)
class _Registered:
    """What a name means: the same as another of that name only if that means the same function.

    `function` is None if nothing is registered yet: then a call looks the name up.
    """

    name: str
    function: Callable[..., Any] | None

    @classmethod
    def now(cls, name: str) -> _Registered:
        with _lock:
            _used.add(name)
            return cls(name, _registered.get(name))

    def __call__(self, op: Any, *dys: Any) -> Any:
        return (self.function or registered_gradient(self.name))(op, *dys)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Where messages find its line."""
        function = self.function or _registered.get(self.name)
        if function is None:
            raise AttributeError("__wrapped__")
        return function

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Registered):
            return False
        return self.name == other.name and self.function is other.function

    def __hash__(self) -> int:
        return hash((self.name, id(self.function)))


def _override(name: str, grad: _Registered) -> MatchRule:
    replaced = overriding(grad, f"{_MARK}{name}")

    def overridden(op: Op, *operands: Any) -> list[Any]:
        _met.add(name)
        return replaced(op, *operands)

    where = match.where(functools.partial(_is_named, name))
    text = f"gradient_override_map({name!r})"
    edit = of_arrays(around(overridden))
    return MatchRule("override_gradient", where, edit, missing_ok=True, text=text)


def _is_named(name: str, found: Occurrence) -> bool:
    """Whether a node is the outermost of a name, outside of custom rules: those replace the
    derivative of what is in them."""
    fits = [name in (node.op, node.name) for node in found.steps]
    return fits[-1] and not any(fits[:-1]) and found.rule_around is None


# ------------------------------------------------------------------------- operation by operation


class _Overrides(OverridingTrace):
    """Applies the rules of a block to every operation in it, as to a program of one operation, and
    lets what they write go to its parent."""

    def __init__(self, parent: Any, overrides: Mapping[str, _Registered], force: Force):
        super().__init__(parent)
        self._overrides = overrides
        self.force = force
        self._differentiated = _times_differentiated()
        self._block = ExitStack()
        self._is_over = False

    def begin(self) -> None:
        self._block.enter_context(self.in_place())
        self._block.enter_context(in_force(self.force))

    def end(self) -> None:
        """Ends the block, or raises RuntimeError and leaves that to what stands on it."""
        self._is_over = True
        self.leave()
        if self.is_installed:
            raise RuntimeError(
                f"the block of gradient_override_map({', '.join(map(repr, self._overrides))}) is "
                "left before another one, or a tape, that was entered inside of it: it goes on "
                "until that has ended. A block is that of a thread, so that a coroutine or a "
                "generator has to leave it before another one takes its turn"
            )

    def leave(self) -> None:
        if self._is_over and self.is_installed and _jax.current_trace(None) is self:
            self._block.close()

    def instead(
        self, primitive: Any, params: Mapping[str, Any], args: Sequence[Any]
    ) -> Callable[..., list[Any]] | None:
        """What is to run in the place of an operation; None: the operation itself."""
        is_opaque = primitive.name in _jax.OPAQUE_PRIMITIVES
        programs = [] if is_opaque else [program for _, program in _jax.sub_programs(params)]
        if not programs and primitive.name not in self._overrides:
            return None
        name = str(params.get("name", primitive.name))
        # Two loops of one body may run round in different directions.
        key = (
            primitive,
            tuple(map(id, programs)),
            params_key(params),
            tuple(map(_jax.type_key, args)),
        )
        return self._edited(
            name, key, programs, lambda: _jax.program_of_one(primitive, params, args)
        )

    def rule_instead(
        self, primitive: Any, subfuns: Sequence[Any], params: Mapping[str, Any], args: Sequence[Any]
    ) -> Callable[..., list[Any]] | None:
        """The same for a function with a rule of its own."""
        name = getattr(_jax.rule_functions(subfuns)[0][0], "__name__", "")
        found = [each for each in (name, primitive.name) if each in self._overrides]
        if not found:
            return None
        _met.add(found[0])
        self._refuse_differentiated(name)
        # Traced here: JAX lets the function that it hands over run once, and asks it for the tree
        # of its results then. In the program what the function closes over would be operands, of
        # which a registered gradient knows nothing: so this is no case of the rules.
        program = jax.make_jaxpr(
            lambda *operands: primitive.bind(*operands, subfuns=tuple(subfuns), **params)
        )(*args)

        def primal(*operands: Any) -> list[Any]:
            return _jax.eval_program(program, operands)

        primal.__name__ = primal.__qualname__ = f"{_MARK}{name}"
        return with_gradient(primal, self._overrides[found[0]], params, name, calling_line())

    def _edited(
        self, name: str, key: Any, keyed: Any, trace: Callable[[], Any]
    ) -> Callable[..., list[Any]] | None:
        """What an operation is with the overrides in it; None if they change nothing.

        Args:
          name: of the operation.
          key: equal for operations that compute the same.
          keyed: the programs whose identities are in the key.
          trace: gives the program of the operation.

        Raises GraphError if JAX is differentiating the operation, without the rules.
        """
        line = str(calling_line()) if name in self._overrides else ""  # for errors
        key = "gradient_override_map", key, self.force.key, line
        known: tuple[Any, Callable[..., list[Any]] | None] | None = PROGRAMS.get(key)
        if known is None:
            original = edited = graph_of(trace())
            for rule in self.force.rules:
                edited = rule(edited)
            run: Any = None if edited is original else functools.partial(_run, edited)
            if run is not None and name not in self._overrides:
                run.__name__ = name
                run = jax.jit(run)  # compiled once, where the call or the loop would have been
            known = PROGRAMS.put(key, (keyed, run))
        if known[1] is not None:
            self._refuse_differentiated(name)
        return known[1]

    def _refuse_differentiated(self, name: str) -> None:
        if _times_differentiated() > self._differentiated:
            raise GraphError(
                f"{name} is being differentiated by JAX inside of a gradient_override_map that "
                "overrides its gradient, and JAX does not see the override: use tracegrad.grad "
                "there, or enter the block inside of the function that is differentiated"
            )


def _run(program: Graph, *operands: Any) -> list[Any]:
    return run_graph(program, operands)


def _times_differentiated() -> int:
    """How many times JAX is differentiating what is computed now, without rules in force."""
    stack = _jax.scopes_around(_jax.current_source_info())
    return 0 if scopes.is_under_rules(stack) else scopes.transformations(stack).count("jvp")
