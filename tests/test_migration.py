"""The pages for those who come from elsewhere: their programs run, and they leave no name out.

Each section stands alone: its programs run after the first block of the page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {name: (DOCS / name).read_text("utf-8") for name in ("migration.md", "frameworks.md")}
BLOCK = re.compile(r"^```python.*\n((?:.*\n)*?)```$", re.M)
TITLE = re.compile(r"^###? (.*)$", re.M)


def sections(page):
    """For each section with programs, these, in front of the shared one; and the lines they are on.
    The shared block stands above the first title."""
    text = PAGES[page]
    titles = list(TITLE.finditer(text))
    found = {}
    for block in BLOCK.finditer(text):
        above = [title[1] for title in titles if title.start() < block.start()]
        line = text[: block.start()].count("\n") + 2
        found.setdefault(above[-1] if above else "shared", []).append((line, block[1]))
    (shared,) = found.pop("shared")
    return {title: [shared, *blocks] for title, blocks in found.items()}


MARKS = {"migration.md": [], "frameworks.md": [pytest.mark.both_jax]}


@pytest.mark.parametrize(
    ("page", "section", "blocks"),
    [
        pytest.param(page, section, blocks, id=f"{page}: {section}", marks=MARKS[page])
        for page in PAGES
        for section, blocks in sections(page).items()
    ],
)
def test_the_programs_of_a_section_run_and_assert_what_they_say(page, section, blocks):
    if section == "haiku":
        pytest.importorskip("haiku", reason="dm-haiku is in the extra `test`")
    names: dict[str, object] = {"__name__": "__main__"}
    for line, source in blocks:
        exec(compile("\n" * (line - 1) + source, page, "exec"), names)


@pytest.mark.both_jax
def test_every_framework_of_the_table_has_a_section():
    names = re.findall(r"^\| \[(.*?)\]\(#.*?\)", PAGES["frameworks.md"], re.M)
    assert names == [title[0].lower() + title[1:] for title in sections("frameworks.md")]


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


@pytest.mark.parametrize("names", [TENSORFLOW, JAX], ids=["tensorflow", "jax"])
def test_no_name_is_left_out(names):
    assert [name for name in names if name not in PAGES["migration.md"]] == []
