"""The floating point operations of a node are those that are counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tracegrad as tg
from tracegrad.planning.costs import node_flops

pytestmark = pytest.mark.both_jax

M, K, N, GROUPS = 64, 128, 32, 2
LHS, RHS = jnp.ones((M, K)), jnp.ones((GROUPS, K, N))
SIZES = jnp.array([10, M - 10])
COMPLEX = jnp.ones((M, M), "complex64")


def ragged(lhs, rhs):
    return lax.ragged_dot(lhs, rhs, SIZES)


def batches(a, b):
    return jnp.einsum("bij,bkj->bik", a, b)


def grouped(x, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", feature_group_count=2, dimension_numbers=numbers
    )


def reduced(x):
    return lax.reduce(x, jnp.float32(0), lambda a, b: jnp.maximum(a, 2 * b + 1), (1,))


def windows(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 4), (1, 4), "VALID")


@pytest.mark.parametrize(
    ("fun", "args", "op", "flops"),
    [
        (ragged, (LHS, RHS), "ragged_dot_general", 2 * M * K * N),
        (jnp.matmul, (LHS, RHS[0]), "dot_general", 2 * M * K * N),
        (batches, (RHS, RHS), "dot_general", 2 * GROUPS * K * N * K),
        (
            grouped,
            (jnp.ones((2, 12, 12, 8)), jnp.ones((3, 3, 4, 16))),
            "conv_general_dilated",
            2 * (2 * 10 * 10 * 16) * (3 * 3 * 4),
        ),
        (lambda z: z @ z, (COMPLEX,), "dot_general", 8 * M**3),
        (lambda z: z * z, (COMPLEX,), "mul", 6 * M**2),
        (lambda z: z + z, (COMPLEX,), "add", 2 * M**2),
        (lambda z: z.real, (COMPLEX,), "real", M**2),
        # A product, a sum and a maximum for each element.
        (reduced, (LHS,), "reduce", 3 * M * K),
        (windows, (LHS,), "reduce_window_sum", M * K),
        # Its length times its body.
        (
            lambda x: lax.scan(lambda c, _: (c @ c, None), x, None, length=7),
            (jnp.ones((16, 16)),),
            "scan",
            7 * 2 * 16**3,
        ),
        # Twenty rounds of five operations, for two words of 32 bits; and the keys.
        (lambda key: jax.random.bits(key, (1000,)), (jax.random.key(0),), "random_bits", 58_500),
        (
            lambda key: jax.random.bits(key, (1000,), "uint8"),
            (jax.random.key(0),),
            "random_bits",
            58_500 // 4,
        ),
        (lambda x: lax.fft(x, "RFFT", (K,)), (LHS,), "fft", 2.5 * M * K * 7),
    ],
)
def test_flops_by_hand(fun, args, op, flops):
    (node,) = [place.node for place in tg.graph(fun, *args).walk() if place.node.op == op]
    assert node_flops(node, {}) == flops


@pytest.mark.parametrize("argnum", [0, 1])
def test_each_gradient_of_a_ragged_product_costs_what_it_does(argnum):
    graph = tg.graph(jax.grad(lambda *args: jnp.sum(ragged(*args)), argnum), LHS, RHS)
    nodes = [place.node for place in graph.walk() if place.node.op == "ragged_dot_general"]
    assert [node_flops(node, {}) for node in nodes] == [2 * M * K * N] * 2
