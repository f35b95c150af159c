"""The page for those who come from elsewhere: its programs run, and it leaves no name out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "migration.md").read_text(encoding="utf-8")
BLOCKS = [
    (PAGE[: match.start()].count("\n") + 2, match[1])
    for match in re.finditer(r"^```python.*\n((?:.*\n)*?)```$", PAGE, re.M)
]

# What TensorFlow's guides to automatic differentiation and its own sources of 2016 and 2017 use.
TENSORFLOW = """
    tf.GradientTape tape.watch tape.gradient tape.jacobian tape.batch_jacobian tape.stop_recording
    tape.reset tape.watched_variables persistent watch_accessed_variables output_gradients=
    unconnected_gradients= tf.Variable tf.constant tf.Tensor tf.IndexedSlices tf.function
    tf.TensorSpec tf.get_default_graph tf.Session tf.initialize_all_variables tf.gradients grad_ys
    stop_gradients gate_gradients colocate_gradients_with_ops tf.AggregationMethod ADD_N
    EXPERIMENTAL_TREE EXPERIMENTAL_ACCUMULATE_N _hessian_vector_product tf.control_dependencies
    tf.print tf.custom_gradient variables=None tf.stop_gradient tf.recompute_grad
    tf.grad_pass_through tf.math.log tf.exp tf.math.sin tf.math.round tf.neg tf.floordiv
    tf.reduce_sum tf.reduce_mean tf.reduce_max tf.reduce_prod tf.norm tf.reshape tf.transpose
    tf.stack tf.pad tf.einsum tf.ones tf.eye tf.linspace tf.linalg.solve tf.random.normal
    tf.random.shuffle tf.nn.relu tf.nn.elu tf.nn.sigmoid tf.clip_by_value tf.clip_by_norm tf.AddN
    tf.py_func tf.RegisterGradient gradient_override_map tf.saved_model.save tf.saved_model.load
    tf.saved_model.SaveOptions experimental_custom_gradients tf.Module tf.keras.Sequential
    tf.keras.layers.Dense BatchNormalization Lambda tf.cond tf.case tf.range tf.while_loop
    tf.TensorArray tf.random.set_seed tf.random.Generator tf.random.stateless_normal tf.nn.dropout
    trainable_variables apply_gradients minimize tf.train.ExponentialMovingAverage
    tf.train.Checkpoint model.fit break continue
""".split()  # noqa: SIM905
JAX = """
    jax.jit jax.make_jaxpr jax.grad jax.value_and_grad jax.jacobian jax.jacrev jax.jacfwd
    jax.hessian jax.jvp jax.vjp jax.vmap jax.lax.scan jax.lax.cond jax.lax.stop_gradient
    jax.custom_vjp jax.custom_jvp jax.checkpoint jax.remat jax.pure_callback nondiff_argnums
    jax_debug_nans check_grads check_numerics
""".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def namespace():
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile("\n" * (BLOCKS[0][0] - 1) + BLOCKS[0][1], "migration.md", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("line", "block"), BLOCKS[1:], ids=[f"line_{line}" for line, _ in BLOCKS[1:]]
)
def test_the_programs_run_and_assert_what_they_say(namespace, line, block):
    exec(compile("\n" * (line - 1) + block, "migration.md", "exec"), dict(namespace))


@pytest.mark.parametrize("names", [TENSORFLOW, JAX], ids=["tensorflow", "jax"])
def test_no_name_is_left_out(names):
    assert [name for name in names if name not in PAGE] == []
