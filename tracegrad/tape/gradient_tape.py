"""`GradientTape`: gradients through the operations of a ``with`` block, as in TensorFlow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from tracegrad import _jax
from tracegrad.ir.occurrence import warn_where_called
from tracegrad.ir.wording import brief
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
    are_known_arrays,
    arrays_of,
    cure_of,
    must_be_arrays,
    one_array,
    require_arrays,
    require_batches,
    require_real,
    seeds_for,
)
from tracegrad.tape.record import Record
from tracegrad.tape.recorders import Recording
from tracegrad.tape.sources import before_calls, differentiate, warn_of_unseen, warn_of_unwatched
from tracegrad.tracing.leaves import leaves_of
from tracegrad.tracing.statics import is_none
from tracegrad.variables.kept_programs import note_reads_change
from tracegrad.variables.lending import is_only_shown
from tracegrad.variables.trees import is_variable
from tracegrad.variables.variable import Variable


class GradientTape(Recording):
    """Records the operations on watched arrays, and computes gradients through them.

    Arrays stay ordinary arrays: ``if``, ``print`` and NumPy work inside the block. A tape follows
    array *objects*, not values: two equal constants are two sources, and after ``x += 1`` the name
    denotes another array. Complex numbers follow JAX's convention (the conjugate of TensorFlow's).

    Functions run as they are, compiled ones too, and their effects happen once. Only functions with
    a `jax.custom_vjp` or `jax.custom_jvp` are traced at each call. No argument is donated inside
    the block, since the tape still needs the arguments.

    The tape does not see functions compiled ahead of time (``.lower().compile()``), other threads,
    and NumPy (``np.asarray(x)``, ``float(x)``): gradients through them are None. If an operation
    returns its operand itself (``x[:]``, ``jnp.asarray(x)``), there is one array, not two.

    Modules of ``flax.nnx`` run as without a tape, and keep the state that they assign: statistics,
    counts of random numbers. A call of `nnx.jit`, `nnx.remat` or `nnx.custom_vjp` puts copies of
    unchanged arrays into its modules; as a source, a module still stands for the arrays before the
    call. (A module that assigns its weights when it is called stands for the new arrays.)

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
        """Stops recording. Until recording starts again, values of `constants` are not followed."""
        if self._recording and self._recorder is not None:
            self._recording = False
            self._recorder.remove(self._record)
            for variable in constants:
                self._renew(variable)
            self._stop_listening()

    def on_read(self, variable: Variable, outside: Callable[[], Any]) -> Any:
        """Follows the value if the tape watches the Variable. (See `Listener`.)"""
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
        """Returns the watched Variables, in the order in which the tape began to watch them."""
        return tuple(self._record.reads)

    def watch(self, tensor: Any) -> None:
        """Follows an array, a `Variable`, or all arrays and Variables of a tree, from now on.

        Skips arrays whose dtype has no gradient (integers, booleans, random keys); if `tensor`
        itself is such an array, it warns (`UserWarning`). In a model, it also skips functions and
        attributes of objects that are not arrays. Raises ValueError for any other leaf that is not
        a JAX array (a NumPy array, a Python number): JAX would not keep its identity.
        """
        self._check_thread()
        leaves = jax.tree.leaves(tensor, is_leaf=is_variable)
        if not all(isinstance(leaf, (jax.Array, Variable)) for leaf in leaves):
            leaves = list(itertools.compress(leaves, must_be_arrays(tensor)))
        for leaf in leaves:
            if isinstance(leaf, Variable):
                self._record.watch_variable(leaf)
                note_reads_change()
                continue
            if not isinstance(leaf, jax.Array):
                raise ValueError(
                    f"a tape watches JAX arrays; it was given {brief(leaf)} "
                    f"({type(leaf).__name__}). {cure_of(leaf)}"
                )
            if _jax.has_gradient(leaf):
                self._record.watch(leaf)
            elif leaf is tensor:
                warn_where_called(
                    f"a tape watches an array of dtype {leaf.dtype}, which has no gradient: its "
                    "gradient will be None. Convert it to a float dtype first",
                    UserWarning,
                )

    @contextmanager
    def stop_recording(self) -> Any:
        """Suspends this tape inside a ``with`` block; other tapes go on recording.

        Raises RuntimeError if the tape is not recording.
        """
        self._check_thread()
        if not self._recording:
            raise RuntimeError("this tape is not recording: use stop_recording in its block")
        self._stop(constants=self._has_read)
        try:
            yield
        finally:
            if self._recorder is not None:
                self._start()

    def reset(self) -> None:
        """Forgets all operations and all watched arrays; inside the block, recording goes on."""
        self._check_thread()
        self._record.forget()
        self._record.reads.clear()
        self._has_read.clear()
        note_reads_change()
        self._used = False

    # -------------------------------------------------------------------------------- gradients

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Unconnected = UnconnectedGradients.NONE,
        sparse: bool = False,
    ) -> Any:
        """Returns the gradient of a target with respect to sources.

        Args:
          target: an array or a tree of arrays, which are summed.
          sources: a tree of arrays that were watched, or computed from watched arrays.
          output_gradients: a tree like `target` of cotangents, each an array (or `IndexedSlices`)
            with the shape and dtype of its target; None means ones.
          unconnected_gradients: the result for a source that is not connected to the target:
            ``NONE``, or ``ZERO`` for zeros of the source's shape; the enum or its value.
          sparse: whether a table that is only used through lookups by axis 0 (``table[ids]``,
            `jax.numpy.take`) gets `IndexedSlices`: one slice for each lookup.

        Returns:
          A tree like `sources`: for each source a gradient of its shape and dtype, or None.
          Functions and settings of models get None. A `UserWarning` says if a gradient is None
          since its array was used while the tape did not watch the array.

        Raises:
          RuntimeError: a tape that is not persistent was used before.
          ValueError: an unknown `unconnected_gradients`, or `output_gradients` of another
            structure or shape.
          TypeError: a target or source that is no array and no Variable; `output_gradients` of
            another dtype, or a complex target without any. This does not use the tape up.
        """
        unconnected = UnconnectedGradients(unconnected_gradients)
        self._check_usable()
        targets, variables = arrays_of(target)
        seeds = seeds_for(target, targets, output_gradients)
        derivative = SPARSE_GRADIENT if sparse else GRADIENT
        return self._differentiate(targets, variables, sources, unconnected, derivative, seeds)

    def jacobian(
        self,
        target: Any,
        sources: Any,
        unconnected_gradients: Unconnected = UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the derivative of each element of a target in each element of the sources.

        Args:
          target: one array, of any shape.
          sources: a tree of arrays that were watched, or computed from watched arrays.
          unconnected_gradients: as for `gradient`.

        Returns:
          A tree like `sources`: for each source an array ``target.shape + source.shape``, or None.

        Raises:
          RuntimeError: a tape that is not persistent was used before.
          ValueError: an unknown `unconnected_gradients`, or a target that is not one array.
          TypeError: a complex target; a target or source that is no array and no Variable.

        Runs one vectorised backward pass.

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
        return self._differentiate([require_real(one)], variables, sources, unconnected, JACOBIAN)

    def batch_jacobian(
        self,
        target: Any,
        source: Any,
        unconnected_gradients: Unconnected = UnconnectedGradients.ZERO,
    ) -> Any:
        """Returns the Jacobian of ``target[i]`` with respect to ``source[i]`` for each example i.

        Each ``target[i]`` must depend on ``source[i]`` alone. If examples mix, as in a batch norm,
        the result sums the derivatives of all rows of the target in ``source[i]``.

        Args:
          target: an array ``[batch, ...]``.
          source: an array ``[batch, ...]``, watched, or computed from a watched array.
          unconnected_gradients: as for `gradient`, but the default is ``ZERO``.

        Returns:
          An array ``[batch, ..., ...]``: the batch, the rest of the target's shape, and the rest of
          the source's shape.

        Raises:
          RuntimeError: a tape that is not persistent was used before.
          ValueError: fewer than two axes, batches of different sizes, or not one array.
          TypeError: a complex target; a target or source that is no array and no Variable.

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
        return self._differentiate(
            [require_real(one)], variables, source, unconnected, BATCH_JACOBIAN
        )

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
            wanted = must_be_arrays(sources)
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
        with _jax.enable_x64_for(targets):
            found = differentiate(record, leaves, targets, variables, derivative, seeds, sources)
        if any(map(is_none, found)):
            each_leaf = itertools.compress(leaves_of(sources), wanted or itertools.repeat(True))
            if self._recorder and any(map(self._is_further_inside, targets)):
                warn_of_unseen()
            warn_of_unwatched(record, leaves, list(each_leaf), found)
        if not self._persistent:
            record.forget()
        if unconnected is UnconnectedGradients.ZERO:
            with _jax.enable_x64_for(leaves):
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
