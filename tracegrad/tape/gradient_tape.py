"""`GradientTape`: gradients of whatever ran inside a ``with`` block, in TensorFlow's manner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir import Graph
from tracegrad.ir.engine import engine
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.tape.cotangents import (
    BATCH_JACOBIAN,
    GRADIENT,
    JACOBIAN,
    SPARSE_GRADIENT,
    Derivative,
)
from tracegrad.tape.leaves import (
    Unconnected,
    UnconnectedGradients,
    are_arrays,
    are_known_arrays,
    arrays_of,
    one_array,
    real,
    require_arrays,
    require_batches,
    seeds_for,
)
from tracegrad.tape.record import Record
from tracegrad.tape.recorders import Recording
from tracegrad.tape.sources import (
    before_calls,
    cotangents_of,
    warn_of_unseen,
    warn_of_unwatched,
)
from tracegrad.tape.under_rules import graph_of
from tracegrad.variables.kept_programs import reads_change
from tracegrad.variables.leaves import leaves_of
from tracegrad.variables.lending import is_only_shown
from tracegrad.variables.statics import is_none, is_variable
from tracegrad.variables.variable import Variable


class GradientTape(Recording):
    """Records what is done to watched arrays, and gives gradients of it.

    Arrays stay ordinary arrays: ``if``, ``print`` and NumPy work inside the block. A tape follows
    array *objects*, not values: two equal constants are two sources, and after ``x += 1`` the name
    means another array. Complex numbers follow JAX's convention (the conjugate of TensorFlow's).

    Functions run as they are, compiled ones too, and their effects happen once. No argument is
    donated inside the block, since a tape still needs it.

    Not seen, so that the gradient is None: what a function compiled ahead of time
    (``.lower().compile()``) computes, what other threads do, and what NumPy computes
    (``np.asarray(x)``, ``float(x)``). An operation that returns the very array it was given
    (``x[:]``, ``jnp.asarray(x)``) leaves one array, not two.

    Modules of ``flax.nnx`` run as they do without a tape, and keep what they assign: statistics,
    counts of random numbers. A module that `nnx.jit`, `nnx.remat` or `nnx.custom_vjp` was given has
    other arrays afterwards, and as a source it is still the one that was watched.

    Args:
      persistent: whether `gradient` and `jacobian` may be called more than once.
      watch_accessed_variables: watch every trainable `Variable` when it is first read.

    Raises RuntimeError when another thread uses the tape while its block runs, and
    NotImplementedError for a `jax.Ref` that is used directly in the block rather than in a compiled
    function.

    The semantics are those of ``tf.GradientTape``.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> x = jnp.float32(3.0)
    >>> with tg.GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = x * x if x > 0 else -x
    >>> print(tape.gradient(y, x))
    6.0
    """

    _name = "tape"

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True):
        super().__init__()
        self._persistent = persistent
        self._watch_accessed = watch_accessed_variables
        self._record = Record(orders=2 if persistent else 1)
        self._recording = False
        self._used = False

    def __repr__(self) -> str:
        state = "used up" if self._used else "recording" if self._recording else "not recording"
        return f"<GradientTape{', persistent' * self._persistent}: {state}>"

    # ----------------------------------------------------------------------------------- block

    def __enter__(self) -> GradientTape:
        if self._used:
            raise RuntimeError(_USED)
        self._begin()
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._check_thread()
        self._stop()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.leave()

    def _start(self) -> None:
        assert self._recorder is not None
        self._recording = True
        self._recorder.add(self._record)
        self._start_listening()

    def _stop(self, constants: Iterable[Variable] = ()) -> None:
        """Records no more; of these Variables what is read meanwhile is not followed."""
        if self._recording and self._recorder is not None:
            self._recording = False
            self._recorder.remove(self._record)
            for variable in constants:
                self._renew(variable)
            self._stop_listening()

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """Follows a Variable that is read, if it is watched or to be watched. (A `Listener`.)"""
        record = self._record
        is_watched = (self._watch_accessed and variable.trainable) or variable in record.reads
        if is_watched and variable not in self._has_read:
            self._has_read.add(variable)
            self._renew(variable)
        value = outside()
        if is_only_shown(variable, value):
            record.shown.append((variable, value))
        if is_watched:
            record.watch_read(variable, value)
        return value

    def watched_variables(self) -> tuple[Variable, ...]:
        """The Variables that the tape watches, in the order in which it began to."""
        return tuple(self._record.reads)

    def watch(self, tensor: Any) -> None:
        """Follows an array or a `Variable`, or every one of a tree (a model), from now on.

        Arrays of a dtype that has no gradient (integers, booleans, random keys) are passed over;
        one that is not a part of a tree with a `UserWarning`; and so is what models have beside
        arrays: functions, and attributes of objects that are none. Raises ValueError for what else
        is not a JAX array (a NumPy array, a Python number: they have no identity that JAX would
        keep).
        """
        self._check_thread()
        leaves = jax.tree.leaves(tensor, is_leaf=is_variable)
        if not all(isinstance(leaf, (jax.Array, Variable)) for leaf in leaves):
            leaves = list(itertools.compress(leaves, are_arrays(tensor)))
        for leaf in leaves:
            if isinstance(leaf, Variable):
                self._record.watch_variable(leaf)
                reads_change()
                continue
            if not isinstance(leaf, jax.Array):
                raise ValueError(
                    f"a tape watches JAX arrays; it was given {leaf!r} of type "
                    f"{type(leaf).__name__}. Make it one by jnp.asarray, and use the result"
                )
            if _jax.has_gradient(leaf):
                self._record.watch(leaf)
            elif leaf is tensor:
                warn_where_called(
                    f"a tape watches an array of dtype {leaf.dtype}, which has no gradient: the "
                    "answer for it will be None. Convert it to a float dtype first",
                    UserWarning,
                )

    @contextmanager
    def stop_recording(self) -> Any:
        """Suspends this tape (others go on) inside a ``with`` block.

        Raises RuntimeError if the tape is not recording.
        """
        self._check_thread()
        if not self._recording:
            raise RuntimeError("stop_recording is for inside the tape's block: it is not recording")
        self._stop(constants=self._has_read)
        try:
            yield
        finally:
            if self._recorder is not None:
                self._start()

    def reset(self) -> None:
        """Forgets everything, what is watched too; inside the block recording goes on."""
        self._check_thread()
        self._record.clear()
        self._has_read.clear()
        reads_change()
        self._used = False

    def graph(self) -> Graph:
        """What was recorded, as a `Graph`: print it to see what the tape saw."""
        record = self._record
        return graph_of(record.entries, record.arrays, (), runs_rules=False).graph

    def explain(self, target: Any, sources: Any, output_gradients: Any = None) -> Any:
        """Why the gradients of a target are what they are: None, zero, NaN, or far too large.

        Takes what `gradient` takes, and uses nothing up: ask before `gradient`, or of a persistent
        tape. Prints the worst first, each with the line of the code that did it.

        Returns:
          A `tracegrad.insight.Explanation`; see `tracegrad.explain`.

        >>> import jax.numpy as jnp, tracegrad as tg
        >>> x = jnp.array(2.0)
        >>> with tg.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = jnp.round(x) * 3
        >>> [finding.cause for finding in tape.explain(y, x).findings]
        ['rounding']
        """
        return engine.explain_tape(self, target, sources, output_gradients)

    # -------------------------------------------------------------------------------- gradients

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Unconnected = UnconnectedGradients.NONE,
        sparse: bool = False,
    ) -> Any:
        """The gradient of a target with respect to sources.

        Args:
          target: an array or a tree of arrays, which are summed.
          sources: a tree of arrays that were watched, or computed from watched ones.
          output_gradients: a tree like `target` of cotangents, each of its target's shape and
            dtype (None: ones); `IndexedSlices` count as one.
          unconnected_gradients: what stands for a source that nothing connects: ``NONE``, or
            ``ZERO`` for zeros of the source's shape; the enum or its value.
          sparse: whether a table that is only used through lookups by axis 0 (``table[ids]``,
            `jax.numpy.take`) gets `IndexedSlices`: one slice for each lookup.

        Returns:
          A tree like `sources`: of each source's shape and dtype, or None. What models have beside
          arrays gets None; and with a `UserWarning` an array that was used when it was not watched.

        Raises:
          RuntimeError: a tape that is not persistent was used before.
          ValueError: an unknown `unconnected_gradients`, or `output_gradients` of another
            structure or shape.
          TypeError: a target or source that is no array and no Variable; `output_gradients` of
            another dtype, or a complex target without any. The tape is not used up then.
        """
        unconnected = UnconnectedGradients(unconnected_gradients)
        self._check_usable()
        targets, variables = arrays_of(target)
        seeds = seeds_for(targets, output_gradients)
        derivative = SPARSE_GRADIENT if sparse else GRADIENT
        return self._differentiate(targets, variables, sources, unconnected, derivative, seeds)

    def jacobian(
        self,
        target: Any,
        sources: Any,
        unconnected_gradients: Unconnected = UnconnectedGradients.NONE,
    ) -> Any:
        """The derivative of every element of a target with respect to every element of sources.

        Args:
          target: one array, of any shape.
          sources: a tree of arrays that were watched, or computed from watched ones.
          unconnected_gradients: as for `gradient`.

        Returns:
          A tree like `sources`: of the shape ``target.shape + source.shape`` each, or None.

        Raises:
          RuntimeError: a tape that is not persistent was used before.
          ValueError: an unknown `unconnected_gradients`, or a target that is not one array.
          TypeError: a complex target; a target or source that is no array and no Variable.

        As ``tf.GradientTape.jacobian``; one vectorised backward pass for all of the target.

        >>> import jax.numpy as jnp
        >>> from tracegrad import GradientTape
        >>> x = jnp.array([1.0, 2.0])
        >>> with GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = x**3
        >>> print(tape.jacobian(y, x))
        [[ 3.  0.]
         [ 0. 12.]]
        """
        unconnected = UnconnectedGradients(unconnected_gradients)
        self._check_usable()
        one, variables = one_array(target)
        return self._differentiate([real(one)], variables, sources, unconnected, JACOBIAN)

    def batch_jacobian(
        self,
        target: Any,
        source: Any,
        unconnected_gradients: Unconnected = UnconnectedGradients.ZERO,
    ) -> Any:
        """The Jacobian of each example of a batch: ``target[i]`` with respect to ``source[i]``.

        Each ``target[i]`` must depend on ``source[i]`` alone: where examples mix, as in a batch
        norm, what the other rows of the target depend on is added in.

        Args:
          target: an array ``[batch, ...]``.
          source: an array ``[batch, ...]``, watched, or computed from what is.
          unconnected_gradients: as for `gradient`, but zeros unless ``NONE`` is asked for.

        Returns:
          An array ``[batch, ..., ...]``: the batch, the rest of the target's shape, the rest of
          the source's.

        Raises:
          RuntimeError: a tape that is not persistent was used before.
          ValueError: fewer than two axes, batches of different sizes, or not one array.
          TypeError: a complex target; a target or source that is no array and no Variable.

        As ``tf.GradientTape.batch_jacobian``.

        >>> import jax.numpy as jnp
        >>> from tracegrad import GradientTape
        >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
        >>> with GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = x**2
        >>> print(tape.batch_jacobian(y, x)[1])
        [[6. 0.]
         [0. 8.]]
        """
        unconnected = UnconnectedGradients(unconnected_gradients)
        self._check_usable()
        one, variables = one_array(target)
        require_batches(one, one_array(source, "source")[0])
        return self._differentiate([real(one)], variables, source, unconnected, BATCH_JACOBIAN)

    def _check_usable(self) -> None:
        self._check_thread()
        if self._used:
            raise RuntimeError(_USED)

    def _differentiate(
        self,
        targets: Sequence[Any],
        variables: Mapping[Variable, Any],
        sources: Any,
        unconnected: UnconnectedGradients,
        derivative: Derivative,
        seeds: Sequence[Any] = (),
    ) -> Any:
        leaves, tree = jax.tree.flatten(sources, is_leaf=is_variable)
        wanted = None
        if not are_known_arrays(leaves):
            require_arrays("source", sources, leaves, settings=True)
            wanted = are_arrays(sources)
            leaves = list(itertools.compress(leaves, wanted))
        if not self._persistent:
            self._used = True
            self._stop()
        record = self._record
        before = before_calls(record, sources)
        if before:
            leaves = [before.get(id(leaf), leaf) for leaf in leaves]
        if not _jax.is_top_level():
            record.hand_out()
        with _jax.as_computed(targets):
            found = cotangents_of(record, leaves, targets, variables, derivative, seeds)
        if any(map(is_none, found)):
            each_leaf = itertools.compress(leaves_of(sources), wanted or itertools.repeat(True))
            if self._recorder and any(map(self._is_further_inside, targets)):
                warn_of_unseen()
            warn_of_unwatched(record, leaves, list(each_leaf), found)
        if not self._persistent:
            record.forget_arrays()
        if unconnected is UnconnectedGradients.ZERO:
            with _jax.as_computed(leaves):
                found = [
                    derivative.zeros(targets, leaf) if ct is None else ct
                    for ct, leaf in zip(found, leaves, strict=True)
                ]
        if wanted is not None:
            each = iter(found)
            found = [next(each) if is_array else None for is_array in wanted]
        return jax.tree.unflatten(tree, found)


_USED = (
    "this tape has been used up: a tape gives one gradient or jacobian, unless it is made with "
    "GradientTape(persistent=True)"
)
