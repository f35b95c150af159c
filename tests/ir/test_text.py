"""The text form: what a reader sees, and that it is the same every time."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tracegrad as tg

pytestmark = pytest.mark.both_jax


@jax.custom_vjp
def clip(x):
    return x * 1.0


clip.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))


def model(params, x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(x @ params["w"])
    h = clip(h)
    h = jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.dots_saveable)(h)
    return jnp.sum(jax.lax.stop_gradient(h) * 2.0)


def model_text():
    params = {"w": jax.ShapeDtypeStruct((4, 2), "float32")}
    return str(tg.graph(model, params, jax.ShapeDtypeStruct((8, 4), "float32")))


def without_lines(text):
    return re.sub(r" +test_text\.py:\d+", "", text)


def test_every_annotation_stands_out_and_scopes_and_types_are_told():
    assert (
        without_lines(model_text())
        == """\
model(params.w: f32[4,2], x: f32[8,4]) -> f32[]
  # encoder
  dot_general = dot_general(x, params.w)      f32[8,2]
  tanh = tanh(dot_general)                    f32[8,2]
  # (no scope)
  clip = ◆ custom_gradient[vjp] clip(tanh)    f32[8,2]
  │ clip(arg: f32[8,2]) -> f32[8,2]
  │   mul = mul(arg, 1.0)  f32[8,2]
  │   return mul
  sin = ↻ recompute[dots_saveable] sin(clip)  f32[8,2]
  │ sin(x: f32[8,2]) -> f32[8,2]
  │   sin = sin(x)  f32[8,2]
  │   return sin
  stop_gradient = ■ stop_gradient(sin)        f32[8,2]
  mul = mul(stop_gradient, 2.0)               f32[8,2]
  reduce_sum = reduce_sum(mul) axes=(0, 1)    f32[]
  return reduce_sum"""
    )


def test_the_text_of_a_program_is_the_same_every_time():
    assert model_text() == model_text()
    assert "0x" not in model_text()


def test_a_product_tells_its_axes_unless_it_is_the_ordinary_one():
    def f(x, y):
        return jnp.einsum("bij,bkj->bik", x, y)

    text = str(tg.graph(f, jnp.ones((2, 3, 4)), jnp.ones((2, 5, 4))))
    assert "dot_general(x, y) contract=(2)·(2) batch=(0)·(0) " in text


def test_a_convolution_tells_its_layouts_and_what_is_not_ordinary():
    def f(x, w):
        y = jax.lax.conv(x, w, (1, 1), "VALID")
        return jax.lax.conv_transpose(y, jnp.ones((3, 3, 2, 4)), (2, 2), "VALID", (1, 1), (
            "NCHW", "HWIO", "NCHW"))  # fmt: skip

    plain, dilated = (
        line.partition("  f32")[0].split(" = ")[1]
        for line in str(tg.graph(f, jnp.ones((1, 3, 8, 8)), jnp.ones((2, 3, 3, 3)))).splitlines()
        if "conv_general_dilated(" in line
    )
    assert plain == "conv_general_dilated(x, w) dimension_numbers=bf01_oi01->bf01"
    assert dilated.endswith(
        "padding=((2, 2), (2, 2)) lhs_dilation=(2, 2) dimension_numbers=bf01_01io->bf01"
    )


def test_a_number_is_printed_as_it_was_written():
    def f(x, half):
        return 0.1 * x, 0.25 * half, x + jnp.float32(3), jnp.pad(x, 1), jnp.full(2, 0.7)

    text = str(tg.graph(f, jnp.ones(3), jnp.ones(3, "bfloat16")))
    for operation in ["mul(0.1, x)", "mul(0.25, half)", "add(x, 3.0)", "_pad(x, 0)"]:
        assert operation in text
    assert "broadcast_in_dim(0.7)" in text


def test_a_shared_region_is_printed_once():
    inner = jax.jit(lambda x: jnp.sin(x) * 3)
    text = str(tg.graph(lambda x: inner(x) + inner(x), 1.0))
    assert text.count("sin(") == 1
    assert text.count("(as above)") == 1


def test_a_function_traced_anew_for_each_call_is_printed_once_too():
    def block(x):
        return jax.checkpoint(lambda v: jnp.sin(v) * 3)(x)

    text = str(tg.graph(lambda x: block(block(block(x))), 1.0))
    assert text.count("sin(") == 1
    assert text.count("(as above)") == 2


def test_every_line_names_the_line_of_the_user():
    lines = model_text().splitlines()
    statements = [line for line in lines if " = " in line and "tanh(" in line]
    assert re.search(r"test_text\.py:\d+$", statements[0])


def test_names_are_unique_and_never_shadow_builtins():
    graph = tg.graph(
        lambda x, x_1: jnp.maximum(x, x_1).max() + x.sum() + (x_1 * x).sum(),
        jnp.ones(3),
        jnp.ones(3),
    )
    names = list(graph.names.values())
    assert len(set(names)) == len(names)
    assert not {"max", "sum"} & set(names)
    assert names[:2] == ["x", "x_1"]


def test_repr_tells_name_types_and_size():
    assert repr(tg.graph(lambda x: x + 1, jnp.ones(3))) == (
        "<Graph <lambda>(f32[3]) -> (f32[3]), 1 nodes>"
    )


def test_a_closed_over_array_is_told_as_a_constant():
    table = jnp.arange(1000.0)
    text = str(tg.graph(lambda i: table[i], 3))
    assert "const: f32[1000] is a constant" in text


def test_the_arrays_of_flax_are_named_as_the_variables_that_hold_them():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    graph = tg.graph(lambda model, x: model(x), model, jnp.ones((1, 2)))
    assert list(map(graph.names.get, graph.inputs)) == ["model.bias", "model.kernel", "x"]
