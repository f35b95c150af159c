"""JAX traces without tracers of their own: each sees every operation above another trace."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import jax.extend

from tracegrad import _jax
from tracegrad.tracing.nnx_objects import nnx

Instead = Callable[..., list[Any]]


def _of_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `jax.extend.core.get_opaque_trace_state`, by which flax tells whether a module changes
    in the trace that made it. The `ForwardingTrace`s above that trace do not count: values belong
    to the trace below."""

    @functools.wraps(original)
    def get_opaque_trace_state(*args: Any, **kwargs: Any) -> Any:
        with _jax.set_current_trace(_jax.current_trace_outside_of(ForwardingTrace)):
            return original(*args, **kwargs)

    return get_opaque_trace_state


_trace_states = _jax.Replacement()
_PLACES = ((jax.extend.core, "get_opaque_trace_state", _of_values),)


class ForwardingTrace(jax.core.Trace):
    """Sees every operation, and passes it on to `parent_trace`.

    A subclass defines `process_primitive` for ordinary operations, and `run_rule` for functions
    with derivative rules of their own.

    Attributes:
      is_installed: whether this is a current trace, above its parent.
    """

    rule_set: Any = None  # the rules that this trace applies to each operation, if any

    def __init__(self, parent: Any):
        super().__init__()  # type: ignore[no-untyped-call]
        self.parent_trace = parent
        # JAX must not first lower operations with derivative rules (`jax.experimental.hijax`, in
        # JAX 0.12 `jnp.ldexp`): the lowered operations have other derivatives.
        self.requires_low = False
        self.is_installed = False
        self._as_current: AbstractContextManager[None] | None = None
        self._is_hidden = False  # from flax

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block whose operations this trace sees. flax sees the trace below."""
        self.install()
        try:
            yield
        finally:
            self.uninstall()

    def install(self) -> None:
        # Without flax, nobody asks for trace states, and entering a tape takes half the time.
        self._is_hidden = nnx() is not None
        if self._is_hidden:
            _trace_states.put(_PLACES)
        self._as_current = _jax.set_current_trace(self)
        self._as_current.__enter__()
        self.is_installed = True

    def uninstall(self) -> None:
        """Ends `install`; this must be the current trace."""
        assert self._as_current is not None
        self._as_current.__exit__(None, None, None)
        self._as_current, self.is_installed = None, False
        if self._is_hidden:
            _trace_states.put_back()
        below = _jax.current_trace(None)
        if isinstance(below, ForwardingTrace):
            below.leave()

    def leave(self) -> None:
        """Called when the trace above was uninstalled: this trace ends now, if its block is over
        but it could not end before."""

    @abstractmethod
    def run_rule(
        self, primitive: Any, subfuns: tuple[Any, ...], args: Sequence[Any], params: dict[str, Any]
    ) -> list[Any]:
        """Runs a function with a derivative rule. `subfuns`: the function and its rule, in JAX's
        form."""

    @property
    def gives_back(self) -> bool:
        """Whether `call_jitted` serves, with `lending.give_back` for values of `show_values`."""
        return False

    def call_jitted(
        self, jitted: Any, forms: dict[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls a jitted function.

        Args:
          jitted: a jitted function without options.
          forms: a cache for the forms that the trace makes of the function.
          args, kwargs: the arguments; nobody else gets them.
        """
        return jitted(*args, **kwargs)

    def stage_value(self, value: Any) -> Any:
        with _jax.set_current_trace(self.parent_trace):
            return self.parent_trace.stage_value(value)

    def process_call(
        self, primitive: Any, fun: Any, args: Sequence[Any], params: Mapping[str, Any], /
    ) -> list[Any]:
        """JAX before 0.11 binds a call for the known part of a checkpointed loop."""
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
        """Runs a direct call of `jax.shard_map` as the program of a jitted function: there, the
        shard_map is an operation whose operands include the values that it closes over."""
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
        return found[0].update(results)  # with the tree of the function's results

    def sees(self, args: Sequence[Any]) -> bool:
        """Whether the trace must see the operations of a function with these operands. (The
        function may close over other values.)"""
        return True


class OverridingTrace(ForwardingTrace):
    """Replaces operations by the functions that `instead` returns.

    A tape above this trace sees operations first, and also asks `instead`.
    """

    @abstractmethod
    def instead(
        self, primitive: Any, params: Mapping[str, Any], args: Sequence[Any]
    ) -> Instead | None:
        """Returns the function to run instead of an operation; None to run the operation."""

    @abstractmethod
    def rule_instead(
        self, primitive: Any, subfuns: Sequence[Any], params: Mapping[str, Any], args: Sequence[Any]
    ) -> Instead | None:
        """Like `instead`, for a function with a derivative rule."""

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
