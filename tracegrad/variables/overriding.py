"""JAX traces that stand on top of another one, whose values they leave as they are."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.extend

from tracegrad import _jax
from tracegrad.variables.nnx_objects import nnx

Instead = Callable[..., list[Any]]


def _of_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.extend.core.get_opaque_trace_state`, by which flax tells whether a module is changed in
    the transformation that it was made in: that to which the values belong."""

    @functools.wraps(original)
    def get_opaque_trace_state(*args: Any, **kwargs: Any) -> Any:
        with _jax.set_current_trace(_jax.current_trace_outside_of(ForwardingTrace)):
            return original(*args, **kwargs)

    return get_opaque_trace_state


_trace_states = _jax.Replacement()
_PLACES = ((jax.extend.core, "get_opaque_trace_state", _of_values),)


class ForwardingTrace(jax.core.Trace):
    """Sees every operation, and lets it go on to `parent_trace`.

    A subclass has `process_primitive` for ordinary operations, and `run_rule` for functions with
    rules of their own.

    Attributes:
      is_installed: whether it stands on its parent.
    """

    force: Any = None  # the rules in force that it applies to each operation, if any

    def __init__(self, parent: Any):
        super().__init__()  # type: ignore[no-untyped-call]
        self.parent_trace = parent
        # Operations with rules of their own (`jax.experimental.hijax`, in JAX 0.12 `jnp.ldexp`) are
        # seen as they are, not as what they compute, which is differentiated otherwise.
        self.requires_low = False
        self.is_installed = False
        self._as_current: AbstractContextManager[None] | None = None
        self._is_hidden = False  # from flax

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """What is inside it goes by this trace; what changes state sees the one below it."""
        self.install()
        try:
            yield
        finally:
            self.uninstall()

    def install(self) -> None:
        """Begins what `in_place` is for a block."""
        # Without flax nobody asks, and a tape is entered in half the time.
        self._is_hidden = nnx() is not None
        if self._is_hidden:
            _trace_states.put(_PLACES)
        self._as_current = _jax.set_current_trace(self)
        self._as_current.__enter__()
        self.is_installed = True

    def uninstall(self) -> None:
        """Ends it, where it is the current trace."""
        assert self._as_current is not None
        self._as_current.__exit__(None, None, None)
        self._as_current, self.is_installed = None, False
        if self._is_hidden:
            _trace_states.put_back()
        below = _jax.current_trace(None)
        if isinstance(below, ForwardingTrace):
            below.leave()

    def leave(self) -> None:
        """Ends it if what it was for is over, and nothing stands on it."""

    @abstractmethod
    def run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Runs a function with a rule: `subfuns` are the function and its rule, as JAX has them."""

    @property
    def gives_back(self) -> bool:
        """Whether what it keeps of Variables it was shown is given back (see `lending.show`)."""
        return False

    def call_jitted(
        self, jitted: Any, forms: dict[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of a jitted function.

        Args:
          jitted: made without options; nobody but the trace is handed its arguments.
          forms: where the trace may keep what it makes of the function.
          args, kwargs: the arguments.
        """
        return jitted(*args, **kwargs)

    def stage_value(self, value: Any) -> Any:
        with _jax.set_current_trace(self.parent_trace):
            return self.parent_trace.stage_value(value)

    def process_call(
        self, primitive: Any, fun: Any, args: Sequence[Any], params: Mapping[str, Any], /
    ) -> list[Any]:
        """Runs a call in which JAX (before 0.11) puts the known part of a checkpointed loop."""
        with _jax.set_current_trace(self):
            return list(fun.call_wrapped(*args))

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, args: Sequence[Any], /, **params: Any
    ) -> list[Any]:
        return self.run_rule(primitive, (fun, jvp), args, params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, args: Sequence[Any], /, **params: Any
    ) -> list[Any]:
        return self.run_rule(primitive, (fun, fwd, bwd), args, params)

    def process_shard_map(
        self, primitive: Any, fun: Any, args: Sequence[Any], /, **params: Any
    ) -> Any:
        """Runs a `jax.shard_map` that is called directly: as a jitted function, in whose program
        it is an operation like any other, and what it closes over shows."""
        if not self.sees(args):
            with _jax.set_current_trace(self.parent_trace):
                return self.parent_trace.process_shard_map(primitive, fun, args, **params)
        found: list[Any] = []

        def shard_map(*operands: Any) -> list[Any]:
            found.append(primitive.bind(*operands, subfuns=(fun,), **params))
            return list(found[0])

        with jax.disable_jit(False):
            with _jax.set_current_trace(self.parent_trace):
                program = jax.make_jaxpr(jax.jit(shard_map))(*args)
            with _jax.set_current_trace(self):
                results = _jax.eval_program(program, args)
        return found[0].update(results)  # in the tree of the function's results

    def sees(self, args: Sequence[Any]) -> bool:
        """Whether it looks at a function of these operands, which may close over others."""
        return True


class OverridingTrace(ForwardingTrace):
    """Asks about each operation what is to run `instead`.

    A tape that is entered inside asks it too, since it sees operations first.
    """

    @abstractmethod
    def instead(
        self, primitive: Any, params: Mapping[str, Any], args: Sequence[Any]
    ) -> Instead | None:
        """What runs in the place of an operation; None: the operation itself."""

    @abstractmethod
    def rule_instead(
        self, primitive: Any, subfuns: Sequence[Any], params: Mapping[str, Any], args: Sequence[Any]
    ) -> Instead | None:
        """What runs in the place of a function with a rule of its own; None: that function."""

    def process_primitive(
        self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /
    ) -> Any:
        with _jax.set_current_trace(self.parent_trace):
            run = self.instead(primitive, params, args)
            if run is None:
                return primitive.bind(*args, **params)
            results = run(*args)
        return results if primitive.multiple_results else results[0]

    def run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        with _jax.set_current_trace(self.parent_trace):
            run = self.rule_instead(primitive, subfuns, params, args)
            if run is None:
                return list(primitive.bind(*args, subfuns=subfuns, **params))
            return run(*args)
