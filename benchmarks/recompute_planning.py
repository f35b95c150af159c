"""What planned recompute costs, beside the other ways to save as much memory.

Five programs: a transformer of twelve layers, a ResNet, a U-Net, an MLP-mixer of twelve layers, of
the sizes that they were published with, and a GRU of 64 unrolled steps; then three of them smaller.
For each budget the extra FLOPs, in percent of the forward pass, of

- the plan,
- `jax.checkpoint` around parts of the program, cut evenly at its cheapest places, which saves
  nothing inside them (Chen et al. 2016) or what one of JAX's policies names; the best number of
  parts and the best policy,
- minimum cuts of the whole program and, as in PyTorch's partitioner with a memory budget, knapsacks
  of the values that the cheapest of them saves; run again on demand, value by value.

All are simulated by the same model. A budget is a share of the peak of the program with everything
kept, counted as XLA holds it; or, with ``--before-fusion``, as JAX hands it from the forward to the
backward pass, which is what other planners count.

``--xla`` plans by what XLA holds instead, beside these programs scans in scans and six others, and
the models as equinox and flax write them, and compares with plans by the model alone; or, with
``--plans 3``, with the best of so many plans; with ``--target`` for a GPU or a TPU, which need not
be here. ``--time`` measures planning for programs of 2,000 and 20,000 operations, without XLA's
part in it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformer
from jax.experimental import topologies
from report import print_table

import tracegrad
from tracegrad.ir import Graph
from tracegrad.planning import BudgetTooSmall, plan_recompute
from tracegrad.planning.cuts import Network, find_hulls
from tracegrad.planning.flatten import flatten
from tracegrad.planning.fusion import Fusion
from tracegrad.planning.measuring import MeasuredGradient
from tracegrad.planning.model import MemoryModel
from tracegrad.planning.modelling import model
from tracegrad.planning.options import Measure
from tracegrad.planning.planner import Planner, crossing_bytes
from tracegrad.planning.simulation import Segment, keep_all, simulate

EXAMPLES = Path(__file__).parents[1] / "examples"
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# --------------------------------------------------------------------------------------- programs


def transformer_program(
    layers: int = 12, width: int = 768, heads: int = 12, tokens: int = 512, batch: int = 8
) -> Program:
    """The blocks of BERT-base and GPT-2 small."""
    params = jax.eval_shape(lambda: transformer.init(layers, width, 512))
    block = functools.partial(transformer.block, heads=heads)
    text = jax.ShapeDtypeStruct((batch, tokens + 1), jnp.int32)
    return transformer.loss_with(block), (params, text)


def norm_shapes(width: int) -> dict[str, Any]:
    return {"scale": f32(width), "bias": f32(width)}


def mixer_program(
    layers: int = 12, width: int = 768, hidden: tuple[int, int] = (384, 3072), tokens: int = 196
) -> Program:
    """Mixer-B/16. `hidden`: the inner widths of its two MLPs, over tokens and over channels."""

    def mlp(p: Any, x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]

    def loss(blocks: Any, head: jax.Array, x: jax.Array) -> jax.Array:
        for p in blocks:
            mixed = mlp(p["tokens"], jnp.swapaxes(transformer.layer_norm(p["norm_1"], x), 1, 2))
            x = x + jnp.swapaxes(mixed, 1, 2)
            x = x + mlp(p["channels"], transformer.layer_norm(p["norm_2"], x))
        return jnp.mean((x.mean(1) @ head) ** 2)

    def mlp_shapes(size: int, hidden: int) -> dict[str, Any]:
        return {
            "up": f32(size, hidden),
            "up_bias": f32(hidden),
            "down": f32(hidden, size),
            "down_bias": f32(size),
        }

    block = {
        "norm_1": norm_shapes(width),
        "norm_2": norm_shapes(width),
        "tokens": mlp_shapes(tokens, hidden[0]),
        "channels": mlp_shapes(width, hidden[1]),
    }
    return loss, ([block] * layers, f32(width, 10), f32(16, tokens, width))


def gru_program(
    steps: int = 64, batch: int = 2048, width: int = 128, features: int = 16
) -> Program:
    """The GRU of Cho et al. 2014, whose inputs are about a tenth of its width."""

    def loss(p: Any, xs: jax.Array, h: jax.Array) -> jax.Array:
        for t in range(steps):
            zx, rx, cx = jnp.split(xs[t] @ p["w"] + p["b"], 3, axis=-1)
            zh, rh = jnp.split(h @ p["u"], 2, axis=-1)
            z, r = jax.nn.sigmoid(zx + zh), jax.nn.sigmoid(rx + rh)
            h = (1 - z) * h + z * jnp.tanh(cx + (r * h) @ p["v"])
        return jnp.mean(h**2)

    params = {
        "w": f32(features, 3 * width),
        "b": f32(3 * width),
        "u": f32(width, 2 * width),
        "v": f32(width, width),
    }
    return loss, (params, f32(steps, batch, features), f32(batch, width))


def reset_after_gru(steps: int = 64, batch: int = 2048, width: int = 128) -> Program:
    """The GRU of cuDNN, which resets after the product, on inputs of its own width."""

    def loss(p: Any, xs: jax.Array, h: jax.Array) -> jax.Array:
        for t in range(steps):
            zx, rx, cx = jnp.split(xs[t] @ p["w"] + p["b"], 3, axis=-1)
            zh, rh, ch = jnp.split(h @ p["u"], 3, axis=-1)
            z, r = jax.nn.sigmoid(zx + zh), jax.nn.sigmoid(rx + rh)
            h = (1 - z) * h + z * jnp.tanh(cx + r * ch)
        return jnp.mean(h**2)

    params = {"w": f32(width, 3 * width), "b": f32(3 * width), "u": f32(width, 3 * width)}
    return loss, (params, f32(steps, batch, width), f32(batch, width))


def convolution(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers
    )


def batch_norm(p: Any, x: jax.Array) -> jax.Array:
    centred = x - x.mean((0, 1, 2))
    variance = jnp.mean(centred**2, (0, 1, 2))
    return centred * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def two_convolutions(fan_in: int, fan_out: int) -> dict[str, Any]:
    return {
        "first": f32(3, 3, fan_in, fan_out),
        "second": f32(3, 3, fan_out, fan_out),
        "norm_1": norm_shapes(fan_out),
        "norm_2": norm_shapes(fan_out),
    }


def resnet_program(
    stages: Sequence[int] = (3, 4, 6, 3), size: int = 56, width: int = 64, batch: int = 8
) -> Program:
    """ResNet-34, on what its stem makes of an image of 224 x 224. `stages`: blocks of each."""
    plan = [
        (width * 2**stage, 2 if k == 0 and stage else 1)
        for stage, count in enumerate(stages)
        for k in range(count)
    ]
    blocks, fan_in = [], width
    for features, _ in plan:
        block = two_convolutions(fan_in, features)
        if fan_in != features:
            block["skip"] = f32(1, 1, fan_in, features)
        blocks.append(block)
        fan_in = features
    strides = [stride for _, stride in plan]

    def loss(stem: jax.Array, blocks: Any, head: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(convolution(x, stem))
        for p, stride in zip(blocks, strides, strict=True):
            y = jax.nn.relu(batch_norm(p["norm_1"], convolution(x, p["first"], stride)))
            y = batch_norm(p["norm_2"], convolution(y, p["second"]))
            x = jax.nn.relu(y + (convolution(x, p["skip"], stride) if "skip" in p else x))
        return jnp.mean((x.mean((1, 2)) @ head) ** 2)

    return loss, (f32(3, 3, 3, width), blocks, f32(fan_in, 10), f32(batch, size, size, 3))


def unet_program(batch: int = 4, size: int = 256, width: int = 64, depth: int = 4) -> Program:
    """The widths of the first U-Net, with same-padded convolutions and batch norms."""
    widths = [width * 2**level for level in range(depth)]
    down = [two_convolutions(a, b) for a, b in zip([3, *widths], widths, strict=False)]
    middle = two_convolutions(widths[-1], 2 * widths[-1])
    up = [
        {"reduce": f32(1, 1, 2 * w, w), "pair": two_convolutions(2 * w, w)}
        for w in reversed(widths)
    ]

    def pair(p: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(batch_norm(p["norm_1"], convolution(x, p["first"])))
        return jax.nn.relu(batch_norm(p["norm_2"], convolution(x, p["second"])))

    def loss(down: Any, middle: Any, up: Any, head: jax.Array, x: jax.Array) -> jax.Array:
        skipped = []
        for p in down:
            x = pair(p, x)
            skipped.append(x)
            n, rows, columns, features = x.shape
            x = x.reshape(n, rows // 2, 2, columns // 2, 2, features).mean((2, 4))
        x = pair(middle, x)
        for p, skip in zip(up, reversed(skipped), strict=True):
            x = convolution(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), p["reduce"])
            x = pair(p["pair"], jnp.concatenate([x, skip], -1))
        return jnp.mean(convolution(x, head) ** 2)

    return loss, (down, middle, up, f32(1, 1, width, 1), f32(batch, size, size, 3))


def small_transformer(layers: int = 12) -> Program:
    return transformer_program(layers, width=256, heads=4, tokens=256)


def small_mixer(layers: int = 12) -> Program:
    return mixer_program(layers, width=256, hidden=(512, 1024), tokens=256)


def small_resnet() -> Program:
    return resnet_program((3, 3, 3, 3), size=32, width=32, batch=16)


def gated_step(p: Any, h: jax.Array, x: jax.Array) -> jax.Array:
    zx, rx, cx = jnp.split(x @ p["w"], 3, axis=-1)
    zh, rh, ch = jnp.split(h @ p["u"], 3, axis=-1)
    z, r = jax.nn.sigmoid(zx + zh), jax.nn.sigmoid(rx + rh)
    return (1 - z) * h + z * jnp.tanh(cx + r * ch)


def gated_shapes(width: int, *layers: int) -> dict[str, Any]:
    return {"w": f32(*layers, width, 3 * width), "u": f32(*layers, width, 3 * width)}


def scanned_layers(layers: int = 8, steps: int = 64, batch: int = 256, width: int = 128) -> Program:
    """Recurrent layers: a scan over time in a scan over layers."""

    def layer(xs: jax.Array, p: Any) -> tuple[jax.Array, None]:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = gated_step(p, h, x)
            return h, h

        return jnp.tanh(xs + jax.lax.scan(step, jnp.zeros_like(xs[0]), xs)[1]), None

    def loss(ps: Any, xs: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(layer, xs, ps)[0] ** 2)

    return loss, (gated_shapes(width, layers), f32(steps, batch, width))


def scanned_chunks(
    chunks: int = 32, steps: int = 32, batch: int = 128, width: int = 128
) -> Program:
    """A recurrent layer on a long sequence: a scan over time in a scan over chunks of it."""

    def loss(p: Any, xs: jax.Array, h: jax.Array) -> jax.Array:
        def chunk(h: jax.Array, xs: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.scan(lambda h, x: (gated_step(p, h, x), None), h, xs)

        return jnp.mean(jax.lax.scan(chunk, h, xs)[0] ** 2)

    return loss, (gated_shapes(width), f32(chunks, steps, batch, width), f32(batch, width))


def gated_mlp(layers: int = 6, batch: int = 2048, width: int = 128, hidden: int = 384) -> Program:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
        return jnp.mean(x**2)

    w = {"gate": f32(width, hidden), "up": f32(width, hidden), "down": f32(hidden, width)}
    return loss, ([w] * layers, f32(batch, width))


def long_attention(layers: int = 3, tokens: int = 512, width: int = 64, batch: int = 2) -> Program:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            scores = jnp.einsum("bqd,bkd->bqk", x @ w["q"], x @ w["k"]) / 8.0
            x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x @ w["v"]) @ w["o"]
        return jnp.mean(x**2)

    w = {name: f32(width, width) for name in "qkvo"}
    return loss, ([w] * layers, f32(batch, tokens, width))


def normed_convolutions(layers: int = 6) -> Program:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            y = transformer.layer_norm(w["norm"], convolution(x, w["kernel"]))
            x = x + jax.nn.gelu(y)
        return jnp.mean(x**2)

    w = {"kernel": f32(3, 3, 16, 16), "norm": norm_shapes(16)}
    return loss, ([w] * layers, f32(4, 32, 32, 16))


def scanned_blocks(layers: int = 8, batch: int = 512, width: int = 128) -> Program:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(block, x, ws)[0] ** 2)

    ws = {"up": f32(layers, width, 2 * width), "down": f32(layers, 2 * width, width)}
    return loss, (ws, f32(batch, width))


def dense_blocks(layers: int = 8, growth: int = 12) -> Program:
    """A DenseNet, whose norms take JAX's variance, which has a mean of its own."""

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            normed = (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * w["scale"]
            x = jnp.concatenate([x, convolution(jax.nn.relu(normed), w["kernel"])], -1)
        return jnp.mean(x**2)

    widths = [16 + growth * k for k in range(layers)]
    ws = [{"scale": f32(width), "kernel": f32(3, 3, width, growth)} for width in widths]
    return loss, (ws, f32(8, 16, 16, 16))


def experts(layers: int = 4, count: int = 4, batch: int = 1024, width: int = 64) -> Program:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            gate = jax.nn.softmax(x @ w["gate"])
            hidden = jax.nn.gelu(jnp.einsum("bd,edh->ebh", x, w["up"]))
            x = x + jnp.einsum("ebd,be->bd", jnp.einsum("ebh,ehd->ebd", hidden, w["down"]), gate)
        return jnp.mean(x**2)

    w = {
        "gate": f32(width, count),
        "up": f32(count, width, 2 * width),
        "down": f32(count, 2 * width, width),
    }
    return loss, ([w] * layers, f32(batch, width))


def written_with_a_library(name: str) -> Program:
    """A model of ``examples/recompute_models.py``: the five as equinox and flax write them."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # they are modules of no package
    task = importlib.import_module("recompute_models").MODELS[name]()

    def loss(params: Any, *batch: Any) -> Any:
        found = task.loss(params, *batch)
        return found[0] if task.has_aux else found

    return loss, (task.params, *task.batch)


LIBRARIES: dict[str, Callable[[], Program]] = {
    f"{library}-{name}": functools.partial(written_with_a_library, name)
    for name, library in [
        ("mixer", "equinox"),
        ("transformer", "nnx"),
        ("resnet", "linen"),
        ("unet", "equinox"),
        ("gru", "linen"),
    ]
}
HELD_OUT: dict[str, Callable[[], Program]] = {
    "gated-mlp": gated_mlp,
    "attention": long_attention,
    "normed-convolutions": normed_convolutions,
    "scanned-blocks": scanned_blocks,
    "dense-blocks": dense_blocks,
    "experts": experts,
}
SCANNED: dict[str, Callable[[], Program]] = {
    "scanned-layers": scanned_layers,
    "scanned-chunks": scanned_chunks,
}
PROGRAMS: dict[str, tuple[Callable[[], Program], list[float]]] = {
    "transformer": (transformer_program, [0.6, 0.4, 0.3, 0.25, 0.15]),
    "resnet": (resnet_program, [0.6, 0.4, 0.3, 0.25]),
    "unet": (unet_program, [0.6, 0.5, 0.4, 0.3]),
    "mixer": (mixer_program, [0.6, 0.4, 0.25, 0.2]),
    "gru": (gru_program, [0.7, 0.5, 0.3]),
    "reset-after-gru": (reset_after_gru, [0.7, 0.5, 0.3]),
    "small-transformer": (small_transformer, [0.3, 0.25, 0.15]),
    "small-mixer": (small_mixer, [0.25, 0.2]),
    "small-resnet": (small_resnet, [0.3, 0.25]),
}

MEASURED: dict[str, Callable[[], Program]] = {
    "transformer": functools.partial(transformer_program, 4),
    "resnet": resnet_program,
    "unet": unet_program,
    "mixer": functools.partial(mixer_program, 4),
    "small-transformer": functools.partial(small_transformer, 4),
    "small-mixer": functools.partial(small_mixer, 4),
    "small-resnet": small_resnet,
    "gru": functools.partial(gru_program, 16),
    "reset-after-gru": functools.partial(reset_after_gru, 16),
    "small-unet": functools.partial(unet_program, 2, 64, 16, 3),
    **SCANNED,
    **HELD_OUT,
    **LIBRARIES,
}


# ------------------------------------------------------------------------------------ other plans


def parts(m: MemoryModel, count: int) -> list[tuple[int, int]]:
    """So many parts of about equal bytes, cut at the cheapest place near each even one."""
    crossing, total = crossing_bytes(m), sum(m.sizes)
    edges, seen, window = [0], 0, total / count / 2
    bytes_before = [seen := seen + size for size in [0, *m.sizes[:-1]]]
    for k in range(1, count):
        near = [
            i
            for i in range(edges[-1] + 1, len(m))
            if abs(bytes_before[i] - total * k / count) < window
        ]
        if near:
            edges.append(min(near, key=lambda i: crossing[i]))
    return list(zip(edges, [*edges[1:], len(m)], strict=True))


def policies(m: MemoryModel) -> dict[str, list[tuple[int, int]]]:
    """Peak and extra FLOPs of `jax.checkpoint` around every part, and around all but the last."""
    products = {i for i, n in enumerate(m.nodes) if n.op in ("dot_general", "conv_general_dilated")}
    dots = {i for i in products if m.nodes[i].op == "dot_general"}
    no_batch = {i for i in dots if not any(m.nodes[i].params["dimension_numbers"][1])}
    saved_by: dict[str, list[set[int]]] = {"Chen": [set()], "policies": [products, dots, no_batch]}
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in saved_by}
    for name, sets in saved_by.items():
        for saved, count in itertools.product(sets, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)):
            cut = parts(m, count)
            for kept in (0, 1):
                plan = [
                    Segment(a, b, k < len(cut) - kept, frozenset(saved & set(range(a, b))))
                    for k, (a, b) in enumerate(cut)
                ]
                result = simulate(m, plan)
                found[name].append((result.peak, result.flops))
    return found


def on_demand(m: MemoryModel, saved: frozenset[int]) -> tuple[int, int]:
    """Peak and FLOPs if each value that is not saved runs again when it is first read."""
    needed = {v for found in m.needs for v in found}
    again, pending = set(), [v for v in needed if v not in saved]
    pending += [i for i, size in enumerate(m.extra) if size]
    while pending:
        i = pending.pop()
        if i not in again:
            again.add(i)
            pending += [v for v in m.args[i] if v not in saved]
    reads = [0] * len(m)
    for found in [*m.needs, *(m.args[i] for i in again)]:
        for v in found:
            reads[v] += 1
    there = {v for v in range(len(m)) if reads[v] and v not in again}
    live, peak = sum(m.sizes[v] for v in there), 0
    for step in reversed(range(len(m))):
        missing, stack = [], [v for v in m.needs[step] if v not in there]
        while stack:
            i = stack.pop()
            if i not in there:
                there.add(i)
                missing.append(i)
                stack += m.args[i]
        for i in sorted(missing):
            live += m.sizes[i]
            peak = max(peak, live)
            for v in m.args[i]:
                reads[v] -= 1
                live -= 0 if reads[v] else m.sizes[v]
        peak = max(peak, live + m.cotangents[step])
        for v in m.needs[step]:
            reads[v] -= 1
            live -= 0 if reads[v] else m.sizes[v]
    return peak, sum(m.flops[i] for i in again)


def minimum_cuts(m: MemoryModel) -> list[tuple[int, int]]:
    """Peak and extra FLOPs of minimum cuts at many prices, and of knapsacks of what they save."""
    needed = {v for found in m.needs for v in found}
    must_run = [i for i, size in enumerate(m.extra) if size]
    (hull,) = find_hulls([Network(m.sizes, m.flops, m.args, needed, must_run)], 40)
    cuts = [cut.saved for cut in hull]
    plans = [on_demand(m, saved) for saved in cuts]
    # The smallest of those that compute next to nothing again.
    cheap = [c for c, (_, flops) in zip(cuts, plans, strict=True) if flops <= 0.03 * m.total_flops]
    few: frozenset[int] = min(cheap, key=len, default=frozenset())
    return plans + [on_demand(m, saved) for saved in knapsacks(m, few)]


def knapsacks(m: MemoryModel, saved: frozenset[int], count: int = 40) -> Iterator[frozenset[int]]:
    """The best subsets of `saved` in so many sizes, each value being worth the FLOPs that it takes
    to compute it from the others."""
    values = sorted(v for v in saved if m.sizes[v])
    worth = []
    for v in values:
        again, pending = set(), [v]
        while pending:
            i = pending.pop()
            if i not in again:
                again.add(i)
                pending += [a for a in m.args[i] if a not in saved]
        worth.append(sum(m.flops[i] for i in again))
    total, steps = sum(m.sizes[v] for v in values), 2000
    weights = [-(-m.sizes[v] * steps // total) for v in values]
    best = np.zeros(steps + 1)
    taken = np.zeros((len(values), steps + 1), bool)
    for k, (weight, gain) in enumerate(zip(weights, worth, strict=True)):
        with_it = np.concatenate([np.full(weight, -1.0), best[: steps + 1 - weight] + gain])
        taken[k] = with_it > best
        best = np.maximum(best, with_it)
    for room in range(0, steps + 1, steps // count):
        chosen, left = [], room
        for k in reversed(range(len(values))):
            if taken[k, left]:
                chosen.append(values[k])
                left -= weights[k]
        yield frozenset(chosen)


def best(points: Sequence[tuple[int, int]], budget: int, m: MemoryModel) -> str:
    fits = [flops for peak, flops in points if peak <= budget]
    return f"{100 * min(fits) / m.total_flops:.1f}" if fits else "-"


# ----------------------------------------------------------------------------------------- tables


def fusion_of(graph: Graph) -> Fusion:
    """As XLA was seen to fuse the gradient of a program."""
    return MeasuredGradient(graph).held_and_fusion(graph)[1]


def repeated(fusion: Fusion, short: int, long: int, times: int) -> Fusion:
    """That of a program with a layer in its middle so many times more; `short`, `long`: nodes."""
    middle, layer = short // 2, (long - short) // times
    places = [
        i
        if i < middle
        else i - long + short
        if i >= long - middle
        else middle + (i - middle) % layer
        for i in range(long)
    ]
    return tuple(fusion[place] for place in places)


def plan_rows(fused: bool, only: str | None) -> Iterator[list[str]]:
    for name, (build, shares) in PROGRAMS.items():
        if only not in (None, name):
            continue
        fun, shapes = build()
        graph = flatten(tracegrad.graph(fun, *shapes))
        m = model(graph, fusion_of(graph) if fused else None)
        whole = keep_all(m).peak
        planner, peers, cuts = Planner(m), policies(m), minimum_cuts(m)
        for share in shares:
            budget = int(share * whole)
            found = planner.find(budget)
            if found is None:
                ours, peak = "-", f"({planner.lowest_peak() / whole:.3f})"
            else:
                simulation = simulate(m, found)
                ours = f"{100 * simulation.flops / m.total_flops:.1f}"
                peak = f"{simulation.peak / whole:.3f}"
            yield [
                f"{name} {share:.2f}",
                peak,
                ours,
                best(peers["Chen"], budget, m),
                best(peers["policies"], budget, m),
                best(cuts, budget, m),
            ]


# What LLVM does with a kernel's code is half of compiling, and changes neither bytes nor FLOPs.
NO_LLVM = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def device_elsewhere(target: str) -> Any:
    """A device that programs are compiled for and not run on: of a topology of TPUs, such as
    ``v5e:2x2``, or of a GPU of which there is XLA's description (a ``.txtpb`` file)."""
    if target.endswith(".txtpb"):
        return topologies.get_topology_desc(
            "1x1x1", platform="cuda", topology="1x1x1", target_config=Path(target).read_text()
        ).devices[0]
    return topologies.get_topology_desc(target, platform="tpu").devices[0]


def xla_rows(only: str | None, ways: Sequence[Measure], device: Any) -> Iterator[list[str]]:
    sharding = jax.sharding.SingleDeviceSharding(device)
    for name, build in MEASURED.items():
        if only not in (None, name):
            continue
        fun, shapes = build()
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
        )
        floats = [
            i
            for i, arg in enumerate(shapes)
            if all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(arg))
        ]

        def measured(
            f: Callable[..., Any], floats: Any = floats, shapes: Any = shapes
        ) -> tuple[int, float]:
            lowered = tracegrad.trace(jax.grad(lambda *a: f(*a), floats)).lower(*shapes)
            on_cpu = device.platform == "cpu"
            step = lowered.compile(compiler_options=NO_LLVM) if on_cpu else lowered.compile()
            cost = step.cost_analysis() or {"flops": math.nan}  # not said for a GPU elsewhere
            flops = (cost[0] if isinstance(cost, list) else cost)["flops"]
            return step.memory_analysis().temp_size_in_bytes, flops

        whole, flops_before = measured(fun)
        whole = whole or 1  # all fits into a TPU's inner memory
        known: dict[Any, tuple[int, float]] = {}
        for share in (0.7, 0.5, 0.35, *([0.1] if name in SCANNED else [])):
            row = [f"{name} {share:.2f}"]
            for measure in ways:
                try:
                    plan = plan_recompute(fun, *shapes, memory_budget=share, measure=measure)
                except BudgetTooSmall as error:
                    row += [f"({error.lowest / whole:.3f})" if measure else "-", "-", "-"]
                    continue
                key = plan.scans, plan.segments
                held, flops = known[key] = known.get(key) or measured(plan.apply())
                row += [
                    f"{held / whole:.3f}",
                    f"{100 * plan.flops / plan.forward_flops:.1f}",
                    # XLA counts one iteration of a loop.
                    "-"
                    if plan.scans or math.isnan(flops)
                    else f"{100 * (flops - flops_before) / plan.forward_flops:.1f}",
                ]
            yield row


def time_rows() -> Iterator[list[str]]:
    fusion, short = None, 0
    for layers in (26, 262):
        fun, shapes = small_transformer(layers)
        graph = tracegrad.graph(fun, *shapes)
        flat = flatten(graph)
        if fusion is None:
            fusion, short = fusion_of(flat), len(flat.nodes)
        else:  # XLA takes more than ten minutes for so many: its layers are as those in the middle
            fusion = repeated(fusion, short, len(flat.nodes), layers - 26)
        seconds = []
        for _ in range(3 if layers < 100 else 1):
            began = time.process_time()
            m = model(flatten(graph), fusion)
            planner = Planner(m)
            planner.find(int(0.3 * keep_all(m).peak))
            seconds.append(time.process_time() - began)
        yield [f"{len(flat.nodes):,} nodes", f"{len(m):,}", f"{statistics.median(seconds):.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before-fusion", action="store_true")
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--plans", type=int)
    parser.add_argument("--target", help=device_elsewhere.__doc__)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--only", choices=list(PROGRAMS | MEASURED))
    options = parser.parse_args()
    if options.xla:
        ways: dict[str, Measure] = {"by the model": False, "measured": True}
        if options.plans:
            ways = {"measured": True, f"of {options.plans} plans": options.plans}
        header = ["program, budget"]
        for way in ways:
            header += [f"{way}: XLA", "extra FLOPs %", "XLA's"]
        device = device_elsewhere(options.target) if options.target else jax.local_devices()[0]
        rows = list(xla_rows(options.only, list(ways.values()), device))
        kind = device.device_kind
        print_table(f"Bytes, share of everything kept, compiled for {kind}", header, rows)
    elif options.time:
        header = ["transformer", "buffers", "CPU seconds"]
        print_table("Planning for 30 % of the peak", header, list(time_rows()))
    else:
        header = [
            "program, budget",
            "peak",
            "planned %",
            "Chen %",
            "policies %",
            "cuts, knapsack %",
        ]
        rows = list(plan_rows(not options.before_fusion, options.only))
        print_table("Extra FLOPs in percent of the forward pass", header, rows)


if __name__ == "__main__":
    main()
