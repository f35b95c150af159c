"""`GradientTape`: gradients of whatever ran inside a ``with`` block, in TensorFlow's manner."""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad.differentiation.pull_back import running_sum
from tracegrad.ir import Graph
from tracegrad.tape.backward import seeds_for, trace_backward
from tracegrad.tape.record import Block, Record, block_between, graph_of
from tracegrad.tape.recorder import Recorder, recorder_here
from tracegrad.tracing.variable import Variable, start_listening, stop_listening


class UnconnectedGradients(enum.Enum):
    """What a tape answers for a source that nothing connects to the target."""

    NONE = "none"
    ZERO = "zero"


class GradientTape:
    """Records what is done to watched arrays, and gives gradients of it.

    Arrays stay ordinary arrays: ``if``, ``print`` and NumPy work inside the block. A tape follows
    array *objects*, not values: two equal constants are two sources, and after ``x += 1`` the name
    means another array. Complex numbers follow JAX's convention (the conjugate of TensorFlow's).

    Not seen: functions compiled ahead of time (``.lower().compile()``), other threads, and what
    NumPy computes (``np.asarray(x)`` ends the gradient: None).

    Args:
      persistent: whether `gradient` and `jacobian` may be called more than once.
      watch_accessed_variables: watch every trainable `Variable` when it is first read.

    The semantics are those of ``tf.GradientTape``.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> x = jnp.float32(3.0)
    >>> with tg.GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = x * x if x > 0 else -x
    >>> print(tape.gradient(y, x))
    6.0
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True):
        self._persistent = persistent
        self._watch_accessed = watch_accessed_variables
        self._record = Record()
        self._recorder: Recorder | None = None
        self._recording = False
        self._entered = False  # ever
        self._used = False

    # ----------------------------------------------------------------------------------- block

    def __enter__(self) -> GradientTape:
        if self._recorder is not None:
            raise ValueError("this tape is recording already: it cannot be entered twice at once")
        if self._used:
            raise RuntimeError(_USED)
        self._entered = True
        self._recorder = recorder_here()
        self._thread = threading.get_ident()
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()
        self._recorder = None

    def _start(self) -> None:
        assert self._recorder is not None
        self._recording = True
        self._recorder.add(self._record)
        start_listening(self)

    def _stop(self) -> None:
        if self._recording and self._recorder is not None:
            self._recording = False
            stop_listening(self)
            self._recorder.remove(self._record)

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """Follows a Variable that is read, if it is watched or to be watched. (A `Listener`.)"""
        value = outside()
        known = variable in self._record.reads
        if known or (self._watch_accessed and variable.trainable):
            self._record.watch_read(variable, value)
        return value

    def on_assign(self, variable: Variable, value: Any, outside: Callable[[Any], None]) -> None:
        """An assignment is not differentiated: the next read is another value. (A `Listener`.)"""
        outside(value)

    def watched_variables(self) -> tuple[Variable, ...]:
        """The Variables that the tape watches, in the order in which it began to."""
        return tuple(self._record.reads)

    def watch(self, tensor: Any) -> None:
        """Follows an array or a `Variable`, or every one of a tree, from now on.

        Raises ValueError for what is not a JAX array (a NumPy array, a Python number: they have
        no identity that JAX would keep), or is of a dtype that has no gradient.
        """
        for leaf in jax.tree.leaves(tensor, is_leaf=_is_variable):
            if isinstance(leaf, Variable):
                self._record.watch_variable(leaf)
                continue
            if not isinstance(leaf, jax.Array):
                raise ValueError(
                    f"a tape watches JAX arrays; it was given {leaf!r} of type "
                    f"{type(leaf).__name__}. Make it one by jnp.asarray, and use the result"
                )
            if not _jax.has_gradient(leaf):
                raise ValueError(
                    f"a tape watches arrays of a float or complex dtype; this one is {leaf.dtype}"
                )
            self._record.watch(leaf)

    @contextmanager
    def stop_recording(self) -> Any:
        """Suspends this tape (others go on) inside a ``with`` block.

        Raises RuntimeError if the tape is not recording.
        """
        if not self._recording:
            raise RuntimeError("stop_recording is for inside the tape's block: it is not recording")
        self._stop()
        try:
            yield
        finally:
            if self._recorder is not None:
                self._start()

    def reset(self) -> None:
        """Forgets everything, what is watched too; inside the block recording goes on."""
        self._record.clear()
        self._used = False

    def graph(self) -> Graph:
        """What was recorded, as a `Graph`: print it to see what the tape saw."""
        operations = self._record.operations
        arrays = {id(a): a for o in operations for a in (*o.args, *o.results)}
        slots = {identity: i for i, identity in enumerate(arrays)}
        graph, _ = graph_of(operations, list(arrays.values()), slots)
        return graph

    # -------------------------------------------------------------------------------- gradients

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: UnconnectedGradients | str = UnconnectedGradients.NONE,
    ) -> Any:
        """The gradient of a target with respect to sources.

        Args:
          target: an array or a tree of arrays, which are summed.
          sources: a tree of arrays that were watched, or computed from watched ones.
          output_gradients: a tree like `target` of cotangents, each of its target's shape and
            dtype (None: ones).
          unconnected_gradients: what stands for a source that nothing connects: ``NONE``, or
            ``ZERO`` for zeros of the source's shape; the enum or its value.

        Returns:
          A tree like `sources`: of each source's shape and dtype, or None.

        Raises:
          RuntimeError: a tape that is not persistent was used before.
          ValueError: an unknown `unconnected_gradients`, or `output_gradients` of another
            structure or shape.
          TypeError: `output_gradients` of another dtype, or a complex target without any.
        """
        unconnected = UnconnectedGradients(unconnected_gradients)
        self._use()
        targets = [_value_read(leaf) for leaf in jax.tree.leaves(target, is_leaf=_is_variable)]
        leaves, tree = jax.tree.flatten(sources, is_leaf=_is_variable)
        seeds = seeds_for(targets, output_gradients)
        # A Variable is all its reads: each is a value of its own, the more so after an assignment.
        reads = [self._record.reads_of(leaf) for leaf in leaves]
        each = iter(self._pull_back(targets, [array for of in reads for array in of], seeds))
        found = [_sum([next(each) for _ in of]) for of in reads]
        if not self._persistent:
            self._record.forget_operations()
        if unconnected is UnconnectedGradients.ZERO:
            found = [
                jnp.zeros(leaf.shape, leaf.dtype) if ct is None else ct
                for ct, leaf in zip(found, leaves, strict=True)
            ]
        return jax.tree.unflatten(tree, found)

    def _use(self) -> None:
        if self._used:
            raise RuntimeError(_USED)
        if not self._persistent:
            self._used = True
            self._stop()

    def _pull_back(
        self, targets: Sequence[Any], sources: Sequence[Any], seeds: Sequence[Any]
    ) -> list[Any]:
        inside = [t for t in targets if id(t) in self._record.tracked]
        given = [s for t, s in zip(targets, seeds, strict=True) if id(t) in self._record.tracked]
        tracked = {id(s): s for s in sources if id(s) in self._record.tracked}
        known = list(tracked.values())
        if not inside or not known:
            return [None] * len(sources)
        block = block_between(self._record, known, inside)
        program, connected = _program(block, known, inside)
        results = iter(program(block.arrays, given) if any(connected) else ())
        by_source = {
            id(source): next(results) if linked else None
            for source, linked in zip(known, connected, strict=True)
        }
        return [by_source.get(id(source)) for source in sources]


def _is_variable(leaf: object) -> bool:
    return isinstance(leaf, Variable)


def _value_read(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, Variable) else leaf


def _sum(cotangents: Sequence[Any]) -> Any:
    known = [ct for ct in cotangents if ct is not None]
    return running_sum(known) if known else None


_USED = (
    "this tape has been used up: a tape gives one gradient or jacobian, unless it is made with "
    "GradientTape(persistent=True)"
)


# ----------------------------------------------------------------------------- compiled backwards

_programs: OrderedDict[Any, tuple[Callable[..., Any], tuple[bool, ...]]] = OrderedDict()
_lock = threading.Lock()
_REMEMBERED = 256


def _program(
    block: Block, sources: Sequence[Any], targets: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[bool, ...]]:
    """The compiled backward of a block's structure, and which sources it has a gradient for."""
    with _lock:
        if block.key in _programs:
            _programs.move_to_end(block.key)
            return _programs[block.key]
    program = _compile(block, sources, targets)
    with _lock:
        _programs[block.key] = program
        if len(_programs) > _REMEMBERED:
            _programs.popitem(last=False)
    return program


def _compile(
    block: Block, sources: Sequence[Any], targets: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[bool, ...]]:
    program, connected = trace_backward(block, sources, targets)
    run = jax.extend.core.jaxpr_as_fun(program)

    def backward(arrays: Sequence[Any], seeds: Sequence[Any]) -> list[Any]:
        found = run(*arrays, *seeds)
        return [ct for ct, linked in zip(found, connected, strict=True) if linked]

    return jax.jit(backward), connected
