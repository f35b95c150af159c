"""Measures the bytes that XLA holds for the gradient of a program, by compiling it.

The compiled gradient is never run: the user's first call compiles another program, which also
returns the value, differentiates with respect to other arguments, or applies an optimizer.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tracegrad import _jax
from tracegrad._jax.caches import Cache
from tracegrad.ir import Graph, Value, dtype_of, has_gradient
from tracegrad.ir.running import run_graph
from tracegrad.planning.activity import active_values, traced_constants
from tracegrad.planning.compiled import account_of, saying_why_not
from tracegrad.planning.fusion import Fusion, evaluate_in_scopes, read_fates
from tracegrad.planning.hlo import module_of
from tracegrad.tracing.statics import are_traced

# Caches the bytes that XLA holds, by the program's text and the compiler's target and options. This
# saves seconds: a function that is traced again, or planned for another budget, has the same
# gradient with nothing recomputed, and often the same planned gradients.
_FOUND: Cache[Any, Any] = Cache(512)


def shardings_of(program: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """None for an input on one device."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    found = [*map(_jax.sharding_of, itertools.compress(leaves, are_traced(leaves, structure)))]
    others = len(program.inputs) - len(found)  # inputs that are Variables
    return [*found, *[None] * others] if others >= 0 else [None] * len(program.inputs)


def held_by_program(program: Graph) -> int:
    """Returns the peak of XLA's temporary memory for a program, without arguments and results.
    Raises NotMeasuredError if the program cannot be compiled alone."""
    device = _jax.device_of(())
    with saying_why_not():
        traced = traced_constants(program)
        shapes = [_jax.placed(value.aval) for value in (*program.inputs, *traced)]
        run = jax.jit(
            _make_constants_arguments(program, traced),
            compiler_options=_compiler_options(program, device) or None,
        )
        account = account_of(run.lower(shapes).compile(), device)
        return int(account.temp_size_in_bytes)


def _compiler_options(program: Graph, device: Any) -> dict[str, Any]:
    options: dict[str, Any] = _jax.quick_options(device.platform, same_buffers=True)
    if program.recomputes:
        options.update(_jax.keep_recompute_options(device.platform) or {})
    return options


class MeasuredGradient:
    """Measures the gradients of a program, and of programs that compute the same.

    `measured_on` names the backend and the JAX version that compile the gradients. The enclosing
    `jax.vmap`s compute `examples` examples together. With the `shardings` of the inputs, bytes are
    for one device.
    """

    def __init__(self, program: Graph, shardings: Sequence[Any] | None = None, examples: int = 1):
        placed = zip(program.inputs, shardings or [None] * len(program.inputs), strict=True)
        operands, active = [*program.inputs, *traced_constants(program)], active_values(program)
        self._active = [i for i, value in enumerate(operands) if value in active]
        self._shapes = [_jax.placed(v.aval, sharding) for v, sharding in placed]
        self._cotangents = [_jax.placed(v.aval) for v in program.outputs if has_gradient(v)]
        self._examples = examples
        self._devices = _jax.device_count(shardings or ())
        self._device = _jax.device_of(shardings or ())
        self.measured_on = _jax.compiled_by(self._device, self._devices)
        self._is_loss = [shape.shape for shape in self._cotangents] == [()]

    def held(self, program: Graph) -> int:
        """Returns the peak of XLA's temporary memory for the gradient, without arguments and
        results. Raises NotMeasuredError if the gradient cannot be compiled alone."""
        return self._measure(program, run_graph)[0]

    def held_and_fusion(self, program: Graph) -> tuple[int, Fusion]:
        """Like `held`, for a program with nothing recomputed; also returns the fusion."""
        held, fusion = self._measure(program, evaluate_in_scopes)
        assert fusion is not None
        return held, fusion

    def _measure(self, program: Graph, run: Callable[..., Any]) -> tuple[int, Fusion | None]:
        """The fusion is None unless `run` is `evaluate_in_scopes`."""
        options = _compiler_options(program, self._device)
        with saying_why_not():
            traced = traced_constants(program)
            shapes = [*self._shapes, *(_jax.placed(v.aval) for v in traced)]
            given = [] if self._is_loss else self._cotangents
            gradient = _make_gradient(program, traced, self._active, run)
            if self._examples > 1:
                gradient = jax.vmap(gradient)
                shapes, given = jax.tree.map(
                    lambda shape: _jax.struct((self._examples, *shape.shape), shape.dtype),
                    (shapes, given),
                )
            lowered = jax.jit(gradient, compiler_options=options or None).lower(shapes, given)
            text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            key = text, f"{self.measured_on} {options}"
            known: tuple[int, Fusion | None] | None = _FOUND.get(key)
            if known is None:
                compiled = lowered.compile()
                held, fusion = int(account_of(compiled, self._device).temp_size_in_bytes), None
                if run is evaluate_in_scopes:
                    module = module_of(compiled)
                    fusion = read_fates(program, module, self._examples, self._devices)
                known = _FOUND.put(key, (held, fusion))
        return known


def _make_constants_arguments(
    program: Graph, constants: Sequence[Value], run: Callable[..., Any] = run_graph
) -> Callable[[Sequence[Any]], Any]:
    """Makes some constants of a program arguments behind its inputs; `run` runs a graph on its
    inputs."""
    count = len(program.inputs)

    def with_constants(operands: Sequence[Any]) -> Any:
        given = dict(zip(constants, operands[count:], strict=True))
        here = program.replace(constants={**program.constants, **given}) if given else program
        return run(here, operands[:count])

    return with_constants


def _make_gradient(
    program: Graph,
    constants: Sequence[Value],
    active: Sequence[int],
    run: Callable[..., Any] = run_graph,
) -> Callable[[list[Any], list[Any]], Any]:
    """Returns a function of all operands of `_make_constants_arguments`, and of cotangents. The
    function computes the gradients for the `active` operands. The cotangents may be empty for a
    scalar loss, as in `jax.grad`."""
    flowing = [i for i, value in enumerate(program.outputs) if has_gradient(value)]

    def gradient(operands: list[Any], given: list[Any]) -> Any:
        given_all = _make_constants_arguments(program, constants, run)
        _, pull = _jax.vjp_of_some(given_all, operands, active, flowing)
        return pull(given or [jnp.ones((), dtype_of(program.outputs[i])) for i in flowing])

    name = program.name
    if run is not run_graph:  # the caches of JAX and of this module ignore scopes
        operations = " ".join(node.op for node in program.nodes)
        name = f"{name}_in_scopes_{hashlib.sha256(operations.encode()).hexdigest()[:16]}"
    gradient.__name__ = gradient.__qualname__ = name
    return gradient
