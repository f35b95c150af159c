"""What people write with JAX and its libraries, run as it is in the block of an accumulator."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from tracegrad import jvp
from tracegrad.tape.forward_accumulator import ForwardAccumulator

PROGRAMS = (
    programs.mlp_sgd_step,
    programs.scan_rnn,
    programs.checkpointed_scan,
    programs.linen_mlp,
    programs.equinox_conv_net,
    programs.nnx_transformer,
)
SLOW = (programs.mlp_sgd_step, programs.equinox_conv_net, programs.nnx_transformer)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            build,
            marks=[pytest.mark.slow] * (build in SLOW),
            id=build.__name__,
        )
        for build in PROGRAMS
    ],
)
def test_a_program_moves_as_under_jvp(build):
    function, args = build()
    leaves, tree = jax.tree.flatten(args)
    moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    directions = [jnp.cos(jnp.arange(leaves[i].size)).reshape(leaves[i].shape) for i in moving]
    with ForwardAccumulator([leaves[i] for i in moving], directions) as accumulator:
        results = jax.tree.leaves(function(*args))

    def of_moving(*chosen):
        changed = list(leaves)
        for i, leaf in zip(moving, chosen):
            changed[i] = leaf
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, changed)))

    compiled = jax.jit(lambda primals, tangents: jvp(of_moving, primals, tangents))
    _, expected = compiled([leaves[i] for i in moving], directions)
    found = accumulator.jvp(results, unconnected_gradients="zero")
    assert any(map(jnp.any, found))
    for one, other in zip(found, expected, strict=True):
        if other.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
