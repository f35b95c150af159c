"""JAX's own collection of small programs, one group a primitive, and what is asked of each.

`harnesses()` lists them (some 5,500, in 130-odd groups); `check` compares one as JAX has it with
what tracegrad makes of it, every region of it and of its derivative rebuilt. Where JAX lowers both
to one program, there is nothing more to compare; where it does not, both run, and every bit of
their results is compared.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.internal_test_util import test_harnesses

import tracegrad
from tracegrad import _jax
from tracegrad.ir.editing import around_each

Harness = test_harnesses.Harness

# "same": the derivative was compared as well. "no floats": nothing to differentiate.
# "jax cannot": JAX raises on the derivative of the plain function (see `REFUSED`).
Derivative = Literal["same", "no floats", "jax cannot"]

# How many programs of a group JAX refuses to differentiate, at most: some primitives have no
# derivative, or one for some parameters or dtypes only, and some programs bind a primitive without
# a parameter that its derivative needs (`mul`, `conj`, `reduce_max`).
REFUSED = {
    "clamp": 7,
    "conj": 3,
    "cummax": 2,
    "cummin": 2,
    "custom_linear_solve": 1,
    "eig": 18,
    "max": 6,
    "min": 6,
    "mul": 6,
    "nextafter": 5,
    "reduce": 4,
    "reduce_max": 4,
    "reduce_min": 4,
    "reduce_window_add": 7,
    "reduce_window_max": 8,
    "reduce_window_min": 3,
    "reduce_window_mul": 12,
    "regularized_incomplete_beta": 3,
    "scatter_mul": 70,
    "select_and_gather_add": 2,
    "svd": 6,
}

# Both sides alike: most of the time goes to optimising machine code that runs once.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Mismatch(AssertionError):
    """tracegrad's answer is not JAX's."""


def harnesses() -> dict[str, list[Harness]]:
    """By group, all that JAX says run on the CPU, sorted: their order differs between runs."""
    groups = defaultdict(list)
    for harness in test_harnesses.all_harnesses:
        if harness.filter("cpu"):
            groups[harness.group_name].append(harness)
    return {name: sorted(groups[name], key=lambda h: h.fullname) for name in sorted(groups)}


def sample(group: Sequence[Harness], count: int) -> list[Harness]:
    """At most `count` of a group, evenly spread: the same ones in every run."""
    count = min(count, len(group))
    return [group[i * len(group) // count] for i in range(count)]


def arguments(harness: Harness) -> list[Any]:
    """The arguments of `harness.dyn_fun`, the same numbers in every run."""
    seed = zlib.crc32(harness.fullname.encode())
    return list(harness.dyn_args_maker(np.random.RandomState(seed)))


def is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, np.inexact)


def cotangent(out: Any) -> Any:
    """A cotangent whose entries differ; float0 zeros for what has no gradient."""
    if not is_inexact(out):
        return np.zeros(out.shape, jax.dtypes.float0)
    entries = np.linspace(0.5, 1.5, out.size).reshape(out.shape)
    return jnp.asarray(entries).astype(out.dtype)


def with_pullback(fun: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any] | None:
    """`fun` that returns ``(outputs, cotangents of the inexact args)``; None without floats."""
    where = [i for i, arg in enumerate(args) if is_inexact(arg)]
    if not where or not any(map(is_inexact, jax.tree.leaves(jax.eval_shape(fun, *args)))):
        return None

    def run(*args: Any) -> Any:
        def of_floats(*floats: Any) -> Any:
            every = list(args)
            for i, x in zip(where, floats, strict=True):
                every[i] = x
            return fun(*every)

        out, pullback = jax.vjp(of_floats, *(args[i] for i in where))
        return out, pullback(jax.tree.map(cotangent, out))

    return run


def rebuilt(fun: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """The function as an edit of everything leaves it: each operation is written anew in its place,
    and with them all regions around. What a rule replaces when it is differentiated stays."""
    graph = tracegrad.graph(fun, *args)
    everywhere = [
        found
        for found in graph.walk()
        if not (found.node.regions or found.rule_around or found.node.has_references)
        if not any(node.op in _jax.CALLS_WITH_RULES for node, _ in found.path)
    ]
    anew = around_each(graph, everywhere, lambda op, *operands: op.results(*operands)).graph
    return anew.to_callable()


def same_program(ours: jax.stages.Lowered, theirs: jax.stages.Lowered) -> bool:
    """Whether XLA gets one program twice, but for its name, and its results mean the same.

    Compiled with the same options it gives the same bits then; unless it calls back into Python,
    since the text does not say which function it calls.
    """
    if ours.out_tree != theirs.out_tree or avals_of(ours) != avals_of(theirs):
        return False
    text = without_name(ours.as_text())
    return text == without_name(theirs.as_text()) and "callback" not in text


def avals_of(lowered: jax.stages.Lowered) -> list[tuple[Any, ...]]:
    """Shape, dtype and weak type of each result."""
    outputs = jax.tree.leaves(lowered.out_info)
    return [(x.shape, x.dtype, getattr(x, "weak_type", None)) for x in outputs]


def without_name(stable_hlo: str) -> str:
    return re.sub(r"^module @\S+", "module", stable_hlo, count=1)


def check(harness: Harness) -> Derivative:
    """Compares one harness under jit, forward and, where JAX can, its VJP.

    Raises `Mismatch` if a type, a shape or a bit differs. What JAX raises on the plain function
    is raised: no harness that JAX lists for the CPU fails there.
    """
    args = arguments(harness)
    plain, ours = harness.dyn_fun, rebuilt(harness.dyn_fun, args)
    differentiated = with_pullback(plain, args)
    derivative: Derivative = "no floats"
    theirs = None
    if differentiated is not None:
        try:
            theirs = jitted(differentiated).lower(*args)
            derivative = "same"
        except Exception:  # whatever JAX raises: the question is only whether it does
            derivative = "jax cannot"
    if theirs is None:
        theirs = jitted(plain).lower(*args)
    else:
        # Also the transposed program is rebuilt.
        ours = rebuilt(with_pullback(ours, args), args)
    lowered = jitted(ours).lower(*args)
    if not same_program(lowered, theirs):
        got, expected = lowered.compile()(*args), theirs.compile()(*args)
        assert_bits_equal(got, expected, harness.fullname)
    return derivative


def jitted(fun: Callable[..., Any]) -> Any:
    return jax.jit(fun, compiler_options=QUICK)


def assert_bits_equal(got: Any, expected: Any, name: str) -> None:
    if jax.tree.structure(got) != jax.tree.structure(expected):
        raise Mismatch(f"{name}: {jax.tree.structure(got)} != {jax.tree.structure(expected)}")
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for ours, theirs in pairs:
        if jax.typeof(ours) != jax.typeof(theirs):
            raise Mismatch(f"{name}: {jax.typeof(ours)} != {jax.typeof(theirs)}")
        if bits(ours) != bits(theirs):
            raise Mismatch(f"{name}: {ours} != {theirs}")


def bits(x: Any) -> bytes:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()
