"""What is computed on meshes: the same numbers however many processes their devices belong to.

Each row takes a mesh of four devices, "data" × "model", and returns arrays that lie on it; beside
it stands what that should be, by JAX alone, of whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tracegrad as tg
from tracegrad.variables.lending import peek

X = np.cos(np.arange(32, dtype=np.float32)).reshape(8, 4)
W = np.sin(np.arange(16, dtype=np.float32)).reshape(4, 4)
IDS = np.array([1, 3, 1], np.int32)


class Row(NamedTuple):
    on_mesh: Callable[[Mesh], Any]
    expected: Callable[[Any, Any], Any]


ROWS: dict[str, Row] = {}


def row(expected: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        ROWS[function.__name__] = Row(function, expected)
        return function

    return add


def mesh_of(kind: str) -> Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(getattr(AxisType, kind),) * 2)


def on(mesh: Mesh, array: Any, *spec: str | None) -> Any:
    """An array on a mesh; each process has the whole, and puts its part on its devices."""
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def inputs(mesh: Mesh) -> tuple[Any, Any]:
    return on(mesh, W, None, "model"), on(mesh, X, "data", None)


def told(results: Any) -> Any:
    """What this process has of arrays: of each its shape, and where which numbers are."""
    return [
        (
            array.shape,
            [
                (
                    [each.indices(size)[:2] for each, size in zip(shard.index, array.shape)],
                    np.asarray(shard.data).tolist(),
                )
                for shard in array.addressable_shards
            ],
        )
        for array in map(jnp.asarray, jax.tree.leaves(results))
    ]


def put_together(processes: Any) -> list[np.ndarray[Any, Any]]:
    """The arrays of which each process has told its part."""
    found = []
    for parts in zip(*processes, strict=True):
        array = np.full(parts[0][0], np.nan)
        for _, shards in parts:
            for bounds, numbers in shards:
                array[tuple(slice(*each) for each in bounds)] = numbers
        found.append(array)
    return found


def compute(mesh: Mesh, which: list[str] | None = None) -> dict[str, Any]:
    with jax.set_mesh(mesh):
        return {name: told(ROWS[name].on_mesh(mesh)) for name in which or ROWS}


# ------------------------------------------------------------------------------------- the rows


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def plain_derivatives(w, x):
    value, (dw, dx) = jax.value_and_grad(loss, argnums=(0, 1))(w, x)
    product = jax.jvp(lambda w: jax.grad(loss)(w, x), (w,), (w,))[1]
    return value, dw, dx, product


@row(plain_derivatives)
def derivatives(mesh):
    def all_of_them(w, x):
        value, (dw, dx) = tg.value_and_grad(loss, wrt=(0, 1))(w, x)
        return value, dw, dx, tg.hvp(loss, (w, x), w)

    return tg.trace(all_of_them)(*inputs(mesh))


def clipped_tanh(w, x, limit=0.02):
    hidden = jnp.tanh(x @ w)
    cotangent = jnp.clip(2 * hidden / hidden.size, -limit, limit) * (1 - hidden**2)
    return x.T @ cotangent, hidden, 2 * hidden / hidden.size


@row(clipped_tanh)
def rules_taps_and_a_budget(mesh):
    tanh = tg.match.op("tanh")

    def step(w, x):
        return jax.grad(loss)(w, x)

    w, x = inputs(mesh)
    rule = tg.rules.clip_gradient(tanh, max_value=0.02)
    clipped = tg.trace(step, rules=[rule], memory_budget="1GiB")(w, x)
    _, values = tg.intermediates(loss, w, x, where=tanh)
    gradients = tg.intermediate_gradients(loss, w, x, where=tanh)[1]
    return clipped, values["tanh"], gradients["tanh"]


def halved_and_normalised(w, x):
    """The gradients of the two functions below, by hand."""
    hidden = x @ w
    outside = x.T @ (0.5 * jnp.cos(hidden))
    return outside, x.T @ (3.0 * hidden * jnp.sum(hidden)), jnp.sum(hidden)


@row(halved_and_normalised)
def custom_gradients_and_recompute(mesh):
    @tg.custom_gradient
    def half(h):  # of a function on the whole mesh
        return jnp.sin(h), lambda dy: 0.5 * dy * jnp.cos(h)

    @tg.custom_gradient
    def total(h):  # of one that each device runs on its part
        return jax.lax.psum(
            jnp.sum(h), ("data", "model")
        ), lambda dy: 3.0 * h * jax.lax.psum(dy * jnp.sum(h), ("data", "model"))

    @tg.recompute_grad
    def recomputed(w, x):
        return jnp.sum(half(x @ w))

    parts = P("data", "model")
    summed = jax.shard_map(total, mesh=mesh, in_specs=parts, out_specs=P())

    def all_of_them(w, x):
        value, inside = tg.value_and_grad(lambda w: summed(x @ w))(w)
        return tg.grad(recomputed)(w, x), inside, value

    return tg.trace(all_of_them)(*inputs(mesh))


@row(lambda w, x: (jax.grad(loss)(w, x), 2 * jax.grad(loss)(w, x)))
def tapes(mesh):
    w, x = inputs(mesh)
    with tg.GradientTape() as eager:
        eager.watch(w)
        value = loss(w, x)
    traced_loss = tg.trace(loss)
    with tg.GradientTape() as over:
        over.watch(w)
        value_2 = 2 * traced_loss(w, x)
    return eager.gradient(value, w), over.gradient(value_2, w)


def two_steps(w, x):
    for _ in range(2):
        w = w - 0.5 * jax.grad(loss)(w, x)
    return w, jnp.float32(2)


@row(two_steps)
def assigned_variables(mesh):
    w, x = inputs(mesh)
    weights, count = tg.Variable(w, name="weights"), tg.Variable(on(mesh, np.float32(0)))

    @tg.trace
    def step(x):
        weights.assign_sub(0.5 * tg.grad(loss)(weights.value, x))
        count.assign_add(1)

    step(x)
    (before,) = peek([weights])
    step(x)
    assert before.is_deleted()  # the new value was written over it
    assert weights.value.sharding.is_equivalent_to(w.sharding, 2)
    return weights.value, count.value


@row(lambda w, x: jax.grad(lambda w: jnp.sum(w[IDS] ** 2))(w))
def sparse_gradients(mesh):
    table = on(mesh, W, "data", None)
    is_explicit = mesh.axis_types[0] == AxisType.Explicit  # where a look-up says how it is split
    where = {"out_sharding": P(None, None)} if is_explicit else {}
    slices = tg.grad(lambda table: jnp.sum(table.at[IDS].get(**where) ** 2), sparse=True)
    found = tg.trace(slices)(table)
    assert isinstance(found, jax.Array if is_explicit else tg.IndexedSlices)
    return jax.jit(tg.IndexedSlices.to_dense)(found) if not is_explicit else found


@row(lambda w, x: ())
def insight(mesh):
    w, x = inputs(mesh)
    told = str(tg.explain(lambda w, x: loss(jax.lax.stop_gradient(w), x), w, x))
    assert "stop_gradient" in told, told
    tg.check_grads(loss, (w, x), order=1, modes=["rev"])
    return ()
