"""The differences between JAX versions; no other module depends on a version.

Each difference has a name for its purpose, the reason, and the release at which it can be removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jaxlib.version
import numpy as np

VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3])

config: Any = jax.config  # only newer JAX annotates its settings with types


def versions() -> dict[str, str]:
    """For records in files."""
    return {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}


# The classes of jaxprs: one class from 0.12 on, two before.
PROGRAM_TYPES: tuple[type, ...] = (getattr(jex, "ClosedJaxpr"), jex.Jaxpr)  # noqa: B009


# The value of a call's parameter `inline` with which lowering inlines the call; None before 0.12.
INLINED_WHEN_LOWERED: Any = getattr(getattr(jax, "Inline", None), "JAX_LATE", None)

# The value of `inline` with which tracing inlines the call; before 0.12 a bool.
INLINED_WHEN_TRACED: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)


def constants_of(program: Any) -> Sequence[Any]:
    """The values of ``program.constvars``; an open program has none."""
    return getattr(program, "consts", ())


def opened(program: Any) -> Any:
    """The open form, which before 0.12 has no values of constants."""
    return program.jaxpr if hasattr(program, "jaxpr") else program


def parts_of(program: Any) -> tuple[Any, Sequence[Any]]:
    """Returns (open form, values of the constants)."""
    return (program.jaxpr, program.consts) if hasattr(program, "jaxpr") else (program, ())


def effects_of(equations: Sequence[Any], places: Mapping[Any, int]) -> set[Any]:
    """Returns the effects of a program with these equations. `places` maps inputs to positions: an
    effect on a reference names the position of the input, or on 0.10 the variable."""
    found = set[Any]()
    for equation in equations:
        for effect in equation.effects:
            if hasattr(effect, "input"):
                found |= {effect} if effect.input in places else set()
            elif hasattr(effect, "input_index"):
                place = places.get(equation.invars[effect.input_index])
                found |= set() if place is None else {effect.replace(input_index=place)}
            else:
                found.add(effect)
    return found


def of_operand(effect: Any, before: Sequence[Any], now: Sequence[Any]) -> Any:
    """An effect on a reference gets the reference's new position, after the operands of the
    equation have changed from `before` to `now`."""
    if not hasattr(effect, "input_index"):
        return effect
    reference = before[effect.input_index]
    return effect.replace(input_index=next(i for i, atom in enumerate(now) if atom is reference))


def is_of_reference(effect: Any) -> bool:
    """The effect reads or writes a `jax.Ref`."""
    return hasattr(effect, "input") or hasattr(effect, "input_index")


def scan_split(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns (number of loop constants, number of carries) of a scan.

    0.12 replaced ``num_consts`` and ``num_carry`` by a description of the operands' tree.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def wider_scan(equation: Any, constants: int, slices: int, stacked: int) -> dict[str, Any]:
    """Returns the parameters of a scan with more constants, scanned operands (`slices`) and stacked
    results.

    From 0.12 on, the parameters describe the operands by trees (see `scan_split`). This function
    traces a scan with as many operands and results, whose body forwards no input, and copies the
    trees.
    """
    params, (before, carried) = dict(equation.params), scan_split(equation.params)
    linear = params.get("linear")
    if linear is not None:
        more = ((False,) * constants, (False,) * slices)
        params["linear"] = (*linear[:before], *more[0], *linear[before:], *more[1])
    if "num_consts" in params:
        return params | {"num_consts": before + constants}
    scanned = len(equation.invars) - before - carried + slices
    results = len(equation.outvars) - carried + stacked

    def like(fixed: Any, carry: Any, xs: Any) -> Any:
        def body(carry: Any, xs: Any) -> Any:
            new = [sum(fixed, x * 2.0) for x in carry]
            return new, [sum(xs, sum(fixed, i + 2.0)) * 1.0 for i in range(results)]

        return jax.lax.scan(body, carry, xs, length=2)

    one, many = np.ones((), "float32"), np.ones(2, "float32")
    program = jax.make_jaxpr(like)([one] * (before + constants), [one] * carried, [many] * scanned)
    scan = next(each for each in program.eqns if each.primitive.name == "scan")
    return params | {"ft_in": scan.params["ft_in"], "ft_out": scan.params["ft_out"]}


def policy_name(policy: Any) -> str:
    """In 0.10 checkpoint policies are objects (``DotsSaveable(...)``), in 0.12 functions
    (``dots_saveable``)."""
    name = getattr(policy, "__name__", None) or type(policy).__name__
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name)).lower()


def shard_map_like(
    params: Mapping[str, Any],
    fun: Callable[..., Sequence[Any]],
    in_specs: Sequence[Any] | None = None,
    out_specs: Sequence[Any] | None = None,
) -> Callable[..., Sequence[Any]]:
    """Returns `fun`, which returns a list, in a `jax.shard_map` with the parameters of an equation;
    the specs are by default the equation's.

    The supported versions call the manual axes ``newly_manual_axes``.
    """
    mapped: Callable[..., Sequence[Any]] = jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"] if in_specs is None else in_specs),
        out_specs=list(params["out_specs"] if out_specs is None else out_specs),
        axis_names=params.get("newly_manual_axes", params.get("manual_axes", frozenset())),
        check_vma=params["check_vma"],
    )
    return mapped


# Whether XLA merges recomputed code with the original on some backend (`keep_recompute_options`).
MERGES_RECOMPUTED = VERSION < (0, 11, 2)


def keep_recompute_options(backend: str) -> dict[str, str] | None:
    """Returns the compiler options that keep XLA from merging recomputed code with the original;
    None if XLA does not merge.

    Before 0.11.2 XLA's CPU pipeline drops the barrier that `jax.checkpoint` emits before common
    subexpression elimination, which then merges both copies, so that every activation stays alive.
    If the barrier is kept, the pass that makes one kernel of a small loop aborts the process for a
    loop with a barrier, so that pass must be off as well. Without the pass, programs with small
    loops change: use the options only for programs that recompute.
    Can be removed when 0.11.2 is the oldest supported JAX.
    """
    if MERGES_RECOMPUTED and backend == "cpu":
        return {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"}
    return None


def quick_options(backend: str, *, same_buffers: bool = False) -> dict[str, Any]:
    """Returns the compiler options for a program that runs only a few times, whose main cost is
    compiling.

    On a CPU, most of the compile time goes into kernels made by MLIR, and each LLVM module costs
    20 ms. From JAX 0.11 on, a preset replaces the option that avoids these kernels.

    `same_buffers`: returns only options that do not change how many bytes XLA holds. (The preset
    changes the fusions: a program held up to a tenth more.)
    """
    if backend != "cpu":
        return {}
    options = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    if VERSION < (0, 11):
        return options | {"xla_cpu_use_fusion_emitters": False}
    return options if same_buffers else options | {"xla_cpu_opt_preset": _FAST_COMPILE}


_FAST_COMPILE = "CPU_OPT_PRESET_FAST_COMPILE"


# Whether reverse mode of a scan replaces `jax.custom_jvp` functions in its body by their plain
# code, so that the second derivative ignores the rule. Can be removed when 0.12 is the oldest.
SCANS_DROP_RULES = VERSION < (0, 12)


def with_compiler_options(options: Mapping[str, Any], extra: Mapping[str, str]) -> dict[str, Any]:
    """Adds compiler options to options of `jax.jit`; joins two values of one option by a comma."""
    own = options.get("compiler_options") or {}
    joined = {key: ",".join(filter(None, (own.get(key), value))) for key, value in extra.items()}
    return {**options, "compiler_options": {**own, **joined}}
