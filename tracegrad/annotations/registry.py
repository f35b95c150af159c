"""Gradients by name: `register_gradient` stores them, `gradient_override_map` applies them.

An override is a rule. A derivative that is computed inside of a block applies the block's rules to
its graph (see `tracing.in_force`). A derivative that is computed after the block, by JAX, tracegrad
or an outer tape, needs the overrides in the operations themselves. So `_Overrides` is the current
trace in the block: it applies the same rules to each operation, and replaces an overridden
operation by a `jax.custom_vjp` with the registered gradient.
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
from tracegrad._jax.caches import clear_caches
from tracegrad.ir import Graph, GraphError, Occurrence, match, scopes
from tracegrad.ir.editing import Op
from tracegrad.ir.importer import graph_of
from tracegrad.ir.occurrence import calling_line, warn_where_called
from tracegrad.ir.program_keys import PROGRAMS, params_key
from tracegrad.ir.running import run_graph
from tracegrad.ir.wording import described
from tracegrad.rewriting.match_rule import MatchRule, edit_around, refusing_refs
from tracegrad.rewriting.overriding import overriding, require_gradient_function, with_gradient
from tracegrad.tracing.in_force import RuleSet, in_force
from tracegrad.tracing.overriding import OverridingTrace

_clear_jax_caches: Callable[[], None] = jax.clear_caches
G = TypeVar("G", bound=Callable[..., Any])

_lock = threading.Lock()
# Gradient functions by name, until the process ends (this is not a cache).
_registered: dict[str, Callable[..., Any]] = {}
_overridden: set[str] = set()  # names of operations that a block has overridden
_used: set[str] = set()  # names of gradients in a block, so that compiled programs may contain them


def register_gradient(name: str, *, replace: bool = False) -> Callable[[G], G]:
    """Registers a gradient function under a name, for `gradient_override_map`.

    Args:
      name: any name.
      replace: whether to replace a gradient of the same name, for example when the cell of a
        notebook is run again. If a block has used the name, compiled functions may contain the old
        gradient: then all compiled functions are compiled again at their next call
        (`jax.clear_caches` and `tracegrad.clear_caches`).

    Returns:
      A decorator for ``grad(op, *dys)``, of the form that `tracegrad.rules.override_gradient`
      describes; it returns the function.

    Raises:
      KeyError: the name is taken.
      TypeError: the decorated object is not a function.

    It corresponds to ``tf.RegisterGradient``.

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
        raise TypeError("register_gradient needs a name: @register_gradient('Guided')")

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
        if is_stale:
            # Programs with the operations of a block may have the old gradient.
            _clear_jax_caches()
            clear_caches()
        return grad

    return register


def registered_gradient(name: str) -> Callable[..., Any]:
    """Returns the gradient of this name; raises LookupError, with similar names, without one."""
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
    """A context manager that gives operations registered gradients, by the operations' names.

    Args:
      overrides: maps the name of a primitive (``"sin"``), of a jitted function or of a custom rule
        (``"relu"``) to the name of a registered gradient, which is looked up when a gradient is
        computed.

    The overrides apply to operations that are computed directly in the block, for any later
    differentiation; to traced functions, tapes and `tracegrad.gradients` that are entered in the
    block; and to functions that `tracegrad.grad`, `jax.grad` and the like differentiate in the
    block. The overrides also apply inside of jitted functions, loops and branches, but not inside
    of custom rules. Of nested blocks the innermost block wins. A block belongs to its thread: it
    also applies to other coroutines that run meanwhile.

    Warns, once per line, of names for which no operation was found in this or any earlier block.

    Raises:
      TypeError: `overrides` is not a mapping from names to names.
      GraphError: an overridden operation is differentiated inside the block by a `jax.grad` (or
        another function of JAX) that was imported by name or made before the block, and so does
        not see the override.
      LookupError: a gradient is computed, but its name is not registered.
      RuntimeError: the block is left before another block that was entered inside of it.

    It corresponds to TensorFlow 1's ``Graph.gradient_override_map``. See also `register_gradient`.

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
            "gradient_override_map needs a mapping from names of operations to names of "
            f"registered gradients, as {{'relu': 'Guided'}}; got {overrides!r}"
        )
    if not overrides:
        yield
        return
    grads = {name: _Registered(gradient) for name, gradient in overrides.items()}
    rules = [_make_override_rule(name, grad) for name, grad in grads.items()]
    with _lock:
        _used.update(overrides.values())
        key = frozenset((*each, _registered.get(each[1])) for each in overrides.items())
    rule_set = RuleSet(rules, acts_everywhere=True, key=("overrides", key))
    trace = _Overrides(_jax.current_trace(None), grads, rule_set)
    trace.begin()
    try:
        yield
    finally:
        trace.end()
    if unmet := [name for name in grads if name not in _overridden]:
        warn_where_called(
            f"no operation {' or '.join(map(repr, unmet))} was met in a block of "
            f"gradient_override_map({dict(overrides)!r}), which acts on operations inside of it, "
            "not on operations that a tape has recorded before. A name is the name of a primitive, "
            "a jitted function or a custom rule, as print(tracegrad.graph(fun, *args)) shows it",
            UserWarning,
        )


# -------------------------------------------------------------------------------- rules on graphs

_MARK = "overridden_"  # prefix of the names of overridden operations: no second override applies


@dataclass(frozen=True)
class _Registered:
    """A gradient function that calls the function registered under a name at the time."""

    name: str

    def __call__(self, op: Any, *dys: Any) -> Any:
        return registered_gradient(self.name)(op, *dys)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function whose line is in messages, and whose closure may hold tracers."""
        if self.name not in _registered:
            raise AttributeError("__wrapped__")
        return _registered[self.name]


def _make_override_rule(name: str, grad: _Registered) -> MatchRule:
    replaced = overriding(grad, f"{_MARK}{name}")

    def overridden(op: Op, *operands: Any) -> list[Any]:
        _overridden.add(name)
        return replaced(op, *operands)

    where = match.where(functools.partial(_is_named, name))
    text = f"gradient_override_map({name!r})"
    edit = refusing_refs(edit_around(overridden))
    return MatchRule("override_gradient", where, edit, missing_ok=True, text=text)


def _is_named(name: str, occurrence: Occurrence) -> bool:
    """Whether a node has this name and no enclosing node has it. A node in a custom rule does not
    count, because the rule replaces the derivatives of its operations."""
    fits = [name in (node.op, node.name) for node in occurrence.steps]
    return fits[-1] and not any(fits[:-1]) and occurrence.rule_around is None


# ------------------------------------------------------------------------- operation by operation


class _Overrides(OverridingTrace):
    """The trace of a block. The trace applies the block's rules to each operation, as to a program
    of one operation, and binds the result in its parent trace."""

    def __init__(self, parent: Any, overrides: Mapping[str, _Registered], rule_set: RuleSet):
        super().__init__(parent)
        self._overrides = overrides
        self.rule_set = rule_set
        self._differentiated = _times_differentiated()
        self._block = ExitStack()
        self._is_over = False

    def begin(self) -> None:
        self._block.enter_context(self.in_place())
        self._block.enter_context(in_force(self.rule_set))

    def end(self) -> None:
        """Ends the block. If an inner block or tape is still open, raises RuntimeError, and the
        block ends with the inner block or tape."""
        self._is_over = True
        self.leave()
        if self.is_installed:
            raise RuntimeError(
                f"the block of gradient_override_map({', '.join(map(repr, self._overrides))}) is "
                "left before another block, or a tape, that was entered inside of it: it continues "
                "until that has ended. A block belongs to its thread: a coroutine or a generator "
                "has to leave the block before another one runs"
            )

    def leave(self) -> None:
        if self._is_over and self.is_installed and _jax.current_trace(None) is self:
            self._block.close()

    def instead(
        self, primitive: Any, params: Mapping[str, Any], args: Sequence[Any]
    ) -> Callable[..., list[Any]] | None:
        """Returns a replacement of an operation; None runs the operation itself."""
        is_opaque = primitive.name in _jax.OPAQUE_PRIMITIVES
        programs = [] if is_opaque else [program for _, program in _jax.sub_programs(params)]
        if not programs and primitive.name not in self._overrides:
            return None
        name = str(params.get("name", primitive.name))
        # The parameters are in the key, since loops with the same body may differ in direction.
        key = (
            primitive,
            tuple(map(id, programs)),
            params_key(params),
            tuple(map(_jax.type_key, args)),
        )
        return self._apply_overrides(
            name, key, programs, lambda: _jax.program_of_one(primitive, params, args)
        )

    def rule_instead(
        self, primitive: Any, subfuns: Sequence[Any], params: Mapping[str, Any], args: Sequence[Any]
    ) -> Callable[..., list[Any]] | None:
        name = getattr(_jax.rule_functions(subfuns)[0][0], "__name__", "")
        key = next((each for each in (name, primitive.name) if each in self._overrides), None)
        if key is None:
            return None
        _overridden.add(key)
        self._refuse_differentiated(name)
        # Traced here, because JAX allows one run of the function, and then reads the structure of
        # its results. The rules on graphs do not apply: in the program, values that the function
        # closes over would be operands, for which a registered gradient has no gradient.
        program = jax.make_jaxpr(
            lambda *operands: primitive.bind(*operands, subfuns=tuple(subfuns), **params)
        )(*args)

        def primal(*operands: Any) -> list[Any]:
            return _jax.eval_program(program, operands)

        primal.__name__ = primal.__qualname__ = f"{_MARK}{name}"
        return with_gradient(primal, self._overrides[key], params, name, calling_line())

    def _apply_overrides(
        self, name: str, key: Any, keyed: Any, trace: Callable[[], Any]
    ) -> Callable[..., list[Any]] | None:
        """Returns an operation with the overrides applied; None if they change nothing. Raises
        GraphError if JAX is differentiating the operation, without the rules.

        `key` is equal for operations that compute the same. It contains the identities of the
        programs `keyed`, which the cache keeps alive. `trace` returns the operation's program.
        """
        line = str(calling_line()) if name in self._overrides else ""  # for errors
        key = "gradient_override_map", key, self.rule_set.key, line
        known: tuple[Any, Callable[..., list[Any]] | None] | None = PROGRAMS.get(key)
        if known is None:
            original = edited = graph_of(trace())
            for rule in self.rule_set.rules:
                edited = rule(edited)
            run: Any = None if edited is original else functools.partial(_run_program, edited)
            if run is not None and name not in self._overrides:
                run.__name__ = name
                run = jax.jit(run)  # compiled once, as the call or the loop is
            known = PROGRAMS.put(key, (keyed, run))
        _, replacement = known
        if replacement is not None:
            self._refuse_differentiated(name)
        return replacement

    def _refuse_differentiated(self, name: str) -> None:
        if _times_differentiated() > self._differentiated:
            raise GraphError(
                f"{name} is being differentiated by JAX inside of a gradient_override_map that "
                "overrides its gradient, and JAX does not see the override: use tracegrad.grad "
                "there, or enter the block inside of the function that is differentiated"
            )


def _run_program(program: Graph, *operands: Any) -> list[Any]:
    return run_graph(program, operands)


def _times_differentiated() -> int:
    """Counts the derivatives by JAX around the current line that do not see the rules."""
    stack = _jax.scopes_around(_jax.current_source_info())
    return 0 if scopes.is_under_rules(stack) else scopes.transformations(stack).count("jvp")
