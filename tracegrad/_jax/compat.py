"""Where JAX's versions differ: nothing else looks at a version.

Each difference has a name that says what is wanted, the reason, and the release at which it can go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jaxlib.version
import numpy as np

VERSION: tuple[int, ...] = tuple(int(part) for part in jax.__version__.split(".")[:3])

config: Any = jax.config  # whose settings have types on newer JAX alone


def versions() -> dict[str, str]:
    """What is running, to be written down."""
    return {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__}


# One class from 0.12 on, two before.
PROGRAM_TYPES: tuple[type, ...] = (getattr(jex, "ClosedJaxpr"), jex.Jaxpr)  # noqa: B009


# How a call is bound that stands in no lowered program; JAX before 0.12 has none.
INLINED_WHEN_LOWERED: Any = getattr(getattr(jax, "Inline", None), "JAX_LATE", None)


def constants_of(program: Any) -> Sequence[Any]:
    """The values of ``program.constvars``; an open program has none."""
    return getattr(program, "consts", ())


def opened(program: Any) -> Any:
    """The open form of a program: where the two forms differ, the one that holds no values."""
    return program.jaxpr if hasattr(program, "jaxpr") else program


def parts_of(program: Any) -> tuple[Any, Sequence[Any]]:
    """The open form of a program, and the values of its constants."""
    return (program.jaxpr, program.consts) if hasattr(program, "jaxpr") else (program, ())


def effects_of(equations: Sequence[Any], places: Mapping[Any, int]) -> set[Any]:
    """The effects of a program of equations. An effect on a reference says which input that is, or
    on 0.10 which variable. `places` are the inputs' positions."""
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
    """An effect of an equation whose operands were replaced: an effect on a reference gets the
    position that the reference has now."""
    if not hasattr(effect, "input_index"):
        return effect
    reference = before[effect.input_index]
    return effect.replace(input_index=next(i for i, atom in enumerate(now) if atom is reference))


def is_of_reference(effect: Any) -> bool:
    """Whether an effect is that of reading or writing a `jax.Ref`."""
    return hasattr(effect, "input") or hasattr(effect, "input_index")


def scan_split(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are loop constants, and how many are the carry.

    0.12 replaced ``num_consts`` and ``num_carry`` by a description of the operands' tree.
    """
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def wider_scan(equation: Any, constants: int, slices: int, stacked: int) -> dict[str, Any]:
    """The parameters of a scan with so many more constants, scanned operands and stacked results.

    Where they are described by the trees of the operands (from 0.12 on, see `scan_split`), the
    description is that of a scan which JAX writes for as many, and in which nothing is forwarded.
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
    """The name of a checkpoint policy; 0.10 has objects (``DotsSaveable(...)``) where 0.12 has
    functions (``dots_saveable``)."""
    name = getattr(policy, "__name__", None) or type(policy).__name__
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name)).lower()


def shard_map_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords with which `jax.shard_map` makes such an equation again, but for mesh and specs.

    Its manual axes are called ``newly_manual_axes`` in the versions that we know.
    """
    axes = params.get("newly_manual_axes", params.get("manual_axes", frozenset()))
    return {"axis_names": axes, "check_vma": params["check_vma"]}


def keep_recompute_options(backend: str) -> dict[str, str] | None:
    """The compiler options without which XLA merges recomputed code with the original, or None.

    Before 0.11.2 XLA's CPU pipeline drops the barrier that `jax.checkpoint` emits ahead of common
    subexpression elimination, which then merges both copies, so that every activation stays
    alive. With the barrier kept, the pass that makes one kernel of a small loop aborts the process
    when it meets one in the loop, so it must be off as well. That changes programs with small
    loops: the options are for programs that recompute, and for no others.
    Can go when 0.11.2 is the oldest supported JAX.
    """
    if VERSION < (0, 11, 2) and backend == "cpu":
        return {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"}
    return None


def quick_options(backend: str, *, same_buffers: bool = False) -> dict[str, Any]:
    """The compiler options for a program that runs a few times, so that compiling is what it costs.

    On a CPU most of the time goes into kernels by MLIR, and each LLVM module costs 20 ms. JAX 0.12
    has a preset in the place of the option that avoids these kernels.

    `same_buffers`: only those with which XLA holds as many bytes as without; the preset fuses
    otherwise, by which a program held up to a tenth more.
    """
    if backend != "cpu":
        return {}
    options = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    if VERSION < (0, 11):
        return options | {"xla_cpu_use_fusion_emitters": False}
    return options if same_buffers else options | {"xla_cpu_opt_preset": _FAST_COMPILE}


_FAST_COMPILE = "CPU_OPT_PRESET_FAST_COMPILE"


# Reverse mode of a scan takes the functions with a rule of `jax.custom_jvp` in it for what they
# compute, so that the second derivative is not by that rule. Can go when 0.12 is the oldest.
SCANS_DROP_RULES = VERSION < (0, 12)


def with_compiler_options(options: Mapping[str, Any], extra: Mapping[str, str]) -> dict[str, Any]:
    """Options of `jax.jit` with more compiler options; lists of XLA's passes are joined."""
    own = options.get("compiler_options") or {}
    joined = {key: ",".join(filter(None, (own.get(key), value))) for key, value in extra.items()}
    return {**options, "compiler_options": {**own, **joined}}
