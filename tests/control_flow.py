"""Programs with regions, of every kind that JAX has: what `test_control_flow` runs through."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Case:
    """A function, its arguments, and the transformations of it that JAX itself refuses."""

    name: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    refused: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []


def case(*args: Any, refused: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a function to `CASES`, with these arguments."""

    def add(fun: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(fun.__name__, fun, args, frozenset(refused.split())))
        return fun

    return add


VECTOR = np.linspace(-1.0, 2.0, 6, dtype=np.float32)
MATRIX = np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(4, 4)
POSITIVE = MATRIX @ MATRIX.T + 3 * np.eye(4, dtype=np.float32)
INDEX = np.int32(2)


# -------------------------------------------------------------------------------------------- jit


@case(VECTOR)
def jit_called_twice(x):
    f = jax.jit(lambda x: jnp.sin(x) * 2)
    return f(f(x)) + f(x)


@case(VECTOR)
def jit_in_jit_with_constants(x):
    table = jnp.asarray(np.arange(6, dtype=np.float32))
    inner = jax.jit(lambda x: x * table)
    return jax.jit(lambda x: inner(x) + table)(x)


@case(VECTOR)
def jit_that_captures(x):
    y = jnp.cos(x)
    return jax.jit(lambda z: z * y)(x)


@case(VECTOR)
def jit_inlined_static_and_scoped(x):
    @functools.partial(jax.jit, static_argnames="n", inline=True)
    def power(x, *, n):
        with jax.named_scope("power"):
            return x**n

    return power(x, n=3) - power(x, n=2)


@case(VECTOR)
def jit_that_returns_an_input(x):
    a, b = jax.jit(lambda x: (x, x + 1))(x)
    return a * b, a


# ------------------------------------------------------------------------------------------- loops


@case(VECTOR, MATRIX)
def scan(x, m):
    return lax.scan(lambda c, row: (jnp.tanh(c + row.sum()), c * row[0]), x, m)


@case(VECTOR, MATRIX)
def scan_reversed_unrolled(x, m):
    scale = jnp.exp(m[0, 0])
    return lax.scan(
        lambda c, row: (c * scale + row.mean(), {"y": c.sum()}), x, m, reverse=True, unroll=2
    )


@case(VECTOR)
def scan_without_inputs(x):
    return lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=5)


@case(VECTOR, MATRIX)
def scan_of_scan(x, m):
    def outer(c, row):
        c, ys = lax.scan(lambda d, e: (d * jnp.cos(e), d.sum()), c, row)
        return c + 1, ys

    return lax.scan(outer, x, m)


@case(MATRIX)
def map_in_batches(m):
    return lax.map(lambda row: jnp.sort(row) * row.sum(), m, batch_size=3)


@case(VECTOR, refused="grad")
def while_loop(x):
    limit = jnp.abs(x).sum() * 4

    return lax.while_loop(lambda c: c[1] < limit, lambda c: (c[0] * 1.5, c[1] + 1.0), (x, 0.0))


@case(VECTOR, INDEX, refused="grad")
def fori_loop_dynamic(x, n):
    return lax.fori_loop(0, n, lambda i, c: jnp.sin(c) + i, x)


@case(VECTOR)
def fori_loop(x):
    return lax.fori_loop(0, 4, lambda i, c: c * jnp.cos(c[i]), x)


@case(MATRIX)
def associative_scan(m):
    return lax.associative_scan(jnp.matmul, jnp.stack([m, m.T, m + 1]))


@case(MATRIX)
def cumulative(m):
    return jnp.cumsum(m, axis=0) * lax.cummax(m, axis=1) + lax.cumlogsumexp(m)


# ---------------------------------------------------------------------------------------- branches


@case(VECTOR)
def cond(x):
    scale = jnp.sin(x[0])
    return lax.cond(x.sum() > 0, lambda y: y * scale, jnp.exp, x)


@case(VECTOR, INDEX)
def switch(x, i):
    return lax.switch(i, [jnp.sin, lambda x: x * 2, lambda x: lax.cumsum(x)], x)


@case(VECTOR, MATRIX)
def cond_in_scan_in_cond(x, m):
    def step(c, row):
        return lax.cond(row[0] > 0, lambda c: (c * 2, row), lambda c: (jnp.sin(c), -row), c)

    return lax.cond(x[0] < 0, lambda: lax.scan(step, x, m), lambda: (x, m * x[0]))


@case(VECTOR)
def platform_dependent(x):
    return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)


# ------------------------------------------------------------------------------------ custom rules


@jax.custom_jvp
def softplus(x, scale):
    return jnp.log1p(jnp.exp(x * scale))


@softplus.defjvp
def softplus_jvp(primals, tangents):
    (x, scale), (dx, dscale) = primals, tangents
    y = softplus(x, scale)
    return y, jax.nn.sigmoid(x * scale) * (dx * scale + x * dscale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled_gradient(factor, x):
    return x


scaled_gradient.defvjp(lambda factor, x: (x, None), lambda factor, _, ct: (factor * ct,))


@functools.partial(jax.custom_vjp)
def straight_through(tree):
    return jax.tree.map(jnp.round, tree)


straight_through.defvjp(lambda t: (jax.tree.map(jnp.round, t), None), lambda _, ct: (ct,))


@case(VECTOR)
def custom_jvp(x):
    return softplus(x, 2.0) * softplus(1.0, x[0])


@case(VECTOR)
def custom_jvp_in_jit_in_scan(x):
    step = jax.jit(lambda c: softplus(c, 0.5))
    return lax.scan(lambda c, _: (step(c), c[0]), x, None, length=3)


@case(VECTOR)
def library_custom_jvp(x):
    return jax.nn.relu(x) + jax.nn.silu(x) * jax.nn.relu6(x) + jax.scipy.special.logsumexp(x)


@case(VECTOR)
def custom_vjp(x):
    return scaled_gradient(3.0, jnp.sin(x)) * straight_through({"a": x, "b": [x * 2]})["b"][0]


@case(VECTOR)
def custom_vjp_that_closes_over(x):
    # A rule may close over what is traced outside of it, as long as that is not differentiated.
    offset = lax.stop_gradient(x).sum()

    @jax.custom_vjp
    def f(y):
        return y * 2

    f.defvjp(lambda y: (y * 2, jnp.cos(y)), lambda cos, ct: (ct * cos,))
    return f(x) + offset


@case(VECTOR)
def custom_vjp_in_control_flow(x):
    def step(c, i):
        return lax.cond(i > 1, lambda c: scaled_gradient(0.5, c), jnp.sin, c), c

    return lax.scan(step, x, jnp.arange(4))


@jax.custom_vjp
def product(a, b):
    return a * b, b


def product_forward(a, b):
    return (a.value * b.value, b.value), (a.value, b.value if a.perturbed else None)


def product_backward(residuals, cotangents):
    a, b = residuals
    dy, _ = cotangents
    return None if b is None else dy * b, dy * a


product.defvjp(product_forward, product_backward, symbolic_zeros=True)


@case(VECTOR)
def custom_vjp_with_symbolic_zeros(x):
    return product(x, 3.0 * x)[0] + product(jnp.float32(2), x)[0]


@case(VECTOR, refused="grad")
def custom_vmap_rule(x):
    @custom_vmap
    def f(x):
        return jnp.sin(x)

    @f.def_vmap
    def _(axis_size, in_batched, x):
        return jnp.sin(x) + 2.0 * axis_size, in_batched[0]

    return f(x) * 2


@case(VECTOR)
def stop_gradients(x):
    return lax.stop_gradient(x) * x + jnp.floor(x) * lax.stop_gradient(jnp.sin(x)) + x**2


# ----------------------------------------------------------------------------------------- remat


def two_layers(m, x):
    h = checkpoint_name(jnp.sin(m @ x), "hidden")
    return jnp.cos(m @ h) * h


POLICIES = {
    "nothing": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "no_batch_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "any_but_names": jax.checkpoint_policies.save_anything_except_these_names("hidden"),
}


def add_remat(name: str, policy: Any, prevent_cse: bool = True) -> None:
    def remat(m, x):
        return jax.checkpoint(two_layers, policy=policy, prevent_cse=prevent_cse)(m, x)

    remat.__name__ = f"remat_{name}"
    case(MATRIX, MATRIX[0])(remat)


for policy_name, policy in POLICIES.items():
    add_remat(policy_name, policy)
add_remat("without_barrier", None, prevent_cse=False)


@case(MATRIX, MATRIX[0])
def remat_in_remat_in_scan(m, x):
    inner = jax.checkpoint(two_layers)
    outer = jax.checkpoint(lambda c: inner(m, inner(m, c)))
    return lax.scan(lambda c, _: (outer(c), c.sum()), x, None, length=3)


@case(MATRIX, MATRIX[0])
def remat_with_constants_and_control_flow(m, x):
    table = jnp.asarray(MATRIX[1])

    @jax.checkpoint
    def f(x):
        x, _ = lax.scan(lambda c, row: (c + row * table, None), x, m)
        return lax.cond(x[0] > 0, jnp.sin, lambda y: softplus(y, 1.0), x)

    return f(x) * 2


# ------------------------------------------------------------------------------------ linear, roots


@case(POSITIVE, MATRIX[0])
def custom_linear_solve(m, b):
    def solve(matvec, b):
        return jnp.linalg.solve(jax.jacobian(matvec)(b), b)

    return lax.custom_linear_solve(lambda x: m @ x, b, solve, transpose_solve=solve)


@case(POSITIVE, MATRIX[0])
def conjugate_gradients(m, b):
    return jax.scipy.sparse.linalg.cg(lambda x: m @ x, b, maxiter=20)[0]


@case(np.float32(2.0))
def custom_root(a):
    def newton(f, x):
        return lax.fori_loop(0, 20, lambda _, x: x - f(x) / jax.grad(f)(x), x)

    return lax.custom_root(lambda x: x**3 - a, 1.0, newton, lambda g, y: y / g(1.0))


@case(POSITIVE, MATRIX[0])
def linear_algebra(m, b):
    q, r = jnp.linalg.qr(m)
    return jnp.linalg.solve(m, b) + jnp.linalg.eigvalsh(m), q, r, jnp.linalg.cholesky(m)


# ---------------------------------------------------------------------------------------- devices


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@case(MATRIX)
def shard_map(m):
    def body(block):
        total = lax.psum(block, ("x", "y"))
        turned = lax.ppermute(block, "y", [(0, 1), (1, 0)])
        return jnp.sin(block) * total + turned * lax.axis_index("x")

    return jax.shard_map(body, mesh=mesh(), in_specs=P("x", "y"), out_specs=P("x", "y"))(m)


@case(MATRIX, np.float32(0.5))
def shard_map_with_control_flow(m, scale):
    def body(block, scale):
        def step(c, _):
            return lax.cond(scale > 0, jnp.sin, jnp.cos, c) * scale, None

        rows = lax.all_gather(lax.scan(step, block, None, length=2)[0], "x", axis=0, tiled=True)
        return lax.psum_scatter(rows, "x", scatter_dimension=0, tiled=True)

    specs = (P("x", None), P())
    return jax.shard_map(body, mesh=mesh(), in_specs=specs, out_specs=P("x", None))(m, scale) * 2


@case(MATRIX)
def shard_map_over_one_axis_in_jit(m):
    def body(block):
        return lax.pmean(jax.checkpoint(jnp.tanh)(block), "x")

    mapped = jax.shard_map(
        body, mesh=mesh(), in_specs=P("x"), out_specs=P(), axis_names={"x"}, check_vma=True
    )
    return jax.jit(mapped)(m)


@case(MATRIX)
def sharding_constraint(m):
    spec = jax.sharding.NamedSharding(mesh(), P("x", None))
    return lax.with_sharding_constraint(jnp.sin(m), spec) * 2


# ------------------------------------------------------------------------------- callbacks, Refs


@case(VECTOR, refused="grad")
def pure_callback(x):
    return jax.pure_callback(
        lambda x: np.sin(x).astype(x.dtype), x, x * 2, vmap_method="sequential"
    )


@case(VECTOR)
def pure_callback_with_a_rule(x):
    @jax.custom_vjp
    def host_sin(x):
        return jax.pure_callback(np.sin, x, x, vmap_method="expand_dims")

    host_sin.defvjp(
        lambda x: (host_sin(x), x),
        lambda x, ct: (ct * jax.pure_callback(np.cos, x, x, vmap_method="expand_dims"),),
    )
    return lax.scan(lambda c, _: (host_sin(c), c[0]), x, None, length=2)


@case(VECTOR)
def reference(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] += jnp.sin(x)
    ref[1] = x[0] * 3
    return jax.freeze(ref) * x


@case(VECTOR)
def reference_in_loop(x):
    ref = jax.new_ref(jnp.zeros(()))

    def body(i, _):
        ref[...] += x[i] * jnp.cos(x[i])

    lax.fori_loop(0, 6, body, None)
    return ref[...]


# --------------------------------------------------------------------------------- random, dtypes


@case(jax.random.key(7), VECTOR)
def random_keys(key, x):
    first, second = jax.random.split(key)
    noise = jax.random.normal(first, x.shape)
    keep = jax.random.bernoulli(jax.random.fold_in(second, 3), 0.5, x.shape)
    return jnp.where(keep, x * noise, x), jax.random.key_data(second)


@case(jax.random.key(7, impl="rbg"), VECTOR)
def random_keys_carried(key, x):
    def step(carry, _):
        key, x = carry
        key, sub = jax.random.split(key)
        return (key, x * jax.random.uniform(sub)), jax.random.permutation(sub, x)

    (_, x), ys = lax.scan(step, (key, x), None, length=3)
    return x, ys


@case(np.arange(1, 7, dtype=np.int32), VECTOR)
def mixed_dtypes(i, x):
    y = x.astype(jnp.bfloat16) * i
    z = lax.complex(x, -x)
    return y, jnp.abs(z * 2j), i // 2, x > 0, x.astype(jnp.float16) @ x.astype(jnp.float16)


@case(np.linspace(0.1, 1.0, 6).astype(np.complex64))
def complex_numbers(z):
    return jnp.abs(jnp.fft.ifft(jnp.fft.fft(z) * jnp.exp(1j * z))) ** 2


@case(VECTOR)
def derivatives_inside(x):
    def f(x):
        return jnp.sum(jnp.sin(x) * softplus(x, 1.0))

    y, dy = jax.jvp(f, (x,), (jnp.ones_like(x),))
    return y * dy + jax.hessian(f)(x).sum() + jax.vmap(jax.grad(jnp.tanh))(x)


@case(VECTOR)
def barrier(x):
    y, z = lax.optimization_barrier((x * 2, jnp.sin(x)))
    return y + z


@case(VECTOR)
def weak_types_and_literals(x):
    n = 2.0 * jnp.float32(1).astype(float)
    return lax.cond(x[0] > 0, lambda: 1.0, lambda: n * 3.0) * x, 1, 2.5, None, x
