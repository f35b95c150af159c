"""What each rule does to gradients, where it may act, and what it says when it cannot."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tracegrad as tg
from tracegrad import match, rules

X = jnp.array([-1.0, 0.5, 2.0])


def weighted_sin(x):
    return jnp.sum(jnp.sin(x) * jnp.array([1.0, 10.0, 100.0]))


SIN = match.op("sin")
COS = jnp.cos(X)
ARRIVING = jnp.array([1.0, 10.0, 100.0])


# ------------------------------------------------------------------------------------ the rules


def in_a_scan(x):
    return jnp.sum(jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0])


def in_a_branch(x):
    return jnp.sum(jax.lax.cond(x[0] < 0, jnp.sin, jnp.cos, x))


def in_a_shard_map(x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    inner = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    return jnp.sum(inner(x) * ARRIVING)


def straight_through(op, x):
    return x + jax.lax.stop_gradient(op(x) - x)


def all_sines_are_straight_through(graph):
    found = graph.find(SIN)
    return tg.edit(match.where(found.__contains__), straight_through)(graph)


UNIT = ARRIVING / np.linalg.norm(ARRIVING)
TRIPLE, AT_MOST_5 = rules.scale_gradient(SIN, 3.0), rules.clip_gradient(SIN, max_value=5.0)
LIMITS_OUT_OF_REACH = rules.clip_gradient(SIN, max_norm=200.0, max_value=200.0)
GRADIENTS = {
    "scaled": (weighted_sin, rules.scale_gradient(SIN, -0.5), -0.5 * ARRIVING * COS),
    "clipped by value": (weighted_sin, AT_MOST_5, jnp.array([1.0, 5.0, 5.0]) * COS),
    "clipped by norm": (weighted_sin, rules.clip_gradient(SIN, max_norm=1.0), UNIT * COS),
    "below the limits": (weighted_sin, LIMITS_OUT_OF_REACH, ARRIVING * COS),
    "stopped at one of two uses": (
        lambda x: jnp.sum(x * x),
        rules.stop_gradient(match.op("mul"), inputs=0),
        X,
    ),
    # The gradient meets what was written first last: it stands next to the sine.
    "scaled, then clipped": (
        weighted_sin,
        [TRIPLE, AT_MOST_5],
        jnp.minimum(3 * ARRIVING, 5.0) * COS,
    ),
    "clipped, then scaled": (
        weighted_sin,
        [AT_MOST_5, TRIPLE],
        3 * jnp.minimum(ARRIVING, 5.0) * COS,
    ),
    "in a scan": (in_a_scan, TRIPLE, 9 * jnp.cos(jnp.sin(X)) * COS),
    "in the branch that is taken": (in_a_branch, TRIPLE, 3 * COS),
    "in the other branch": (lambda x: in_a_branch(-x), TRIPLE, -jnp.sin(X)),
    "in a shard_map": (in_a_shard_map, TRIPLE, 3 * ARRIVING * COS),
    "an edit of one's own": (weighted_sin, tg.edit(SIN, straight_through), ARRIVING),
    "a rule of one's own": (weighted_sin, all_sines_are_straight_through, ARRIVING),
}


@pytest.mark.parametrize(("fun", "rule", "expected"), GRADIENTS.values(), ids=GRADIENTS)
def test_a_rule_changes_the_gradient_and_not_the_value(fun, rule, expected):
    edited = tg.rewrite(fun, rule)
    np.testing.assert_allclose(edited(X), fun(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(edited)(X), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(edited))(X), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("fun", "expected"),
    [(weighted_sin, 3 * ARRIVING * COS), (in_a_scan, 9 * jnp.cos(jnp.sin(X)) * COS)],
)
def test_a_factor_may_be_traced(fun, expected):
    @jax.jit
    def scaled(factor, x):
        return jax.grad(tg.rewrite(fun, rules.scale_gradient(SIN, factor)))(x)

    np.testing.assert_allclose(scaled(3.0, X), expected, rtol=1e-6)


@pytest.mark.parametrize("limit", [{"max_norm": jnp.inf}, {"max_norm": 1e39}, {"max_value": 1e39}])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_limit_beyond_all_numbers_keeps_second_derivatives(limit, dtype):
    def loss(x):
        return jnp.sum(jnp.abs(jnp.sin(x.astype(dtype))) ** 2)

    def slope(f):
        return jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))

    x = jnp.array([0.3, 1.2])
    clipped = tg.rewrite(loss, rules.clip_gradient(SIN, **limit))
    np.testing.assert_allclose(slope(clipped)(x), slope(loss)(x), rtol=1e-5)


def test_the_norm_that_several_matches_are_clipped_to_is_lowered_once():
    """The limit of a norm is forty operations, and a model may have hundreds of matches."""

    def chain(x):
        for _ in range(5):
            x = jnp.sin(x)
        return jnp.sum(x)

    clip = rules.clip_gradient(SIN, max_norm=1.0)
    program = jax.jit(jax.grad(tg.rewrite(chain, clip))).lower(X).as_text()
    assert program.count("stablehlo.sqrt") == 1


def clipped(cotangent, **limits):
    """What a rule that clips makes of a cotangent, in a compiled function."""
    f = tg.rewrite(jnp.sin, rules.clip_gradient(SIN, **limits))
    at_zero = jnp.zeros(cotangent.shape, cotangent.dtype)  # there the derivative of sin is 1
    return jax.jit(lambda ct: jax.vjp(f, at_zero)[1](ct)[0])(cotangent)


INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_values_are_clipped_as_jax_clips_them(dtype):
    cotangent = jnp.array([INF, -INF, NAN, 6e4, -6e4, 0.25, 0.0], dtype)
    got = clipped(cotangent, max_value=0.5)
    expected = np.asarray(jnp.clip(cotangent, -0.5, 0.5), np.float32)
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected)
    assert got.dtype == dtype
    # A limit that the type does not reach.
    beyond = clipped(jnp.array([INF, -INF], dtype), max_value=1e300)
    most = float(jnp.finfo(dtype).max)
    np.testing.assert_array_equal(np.asarray(beyond, np.float64), [most, -most])
    unlimited = np.asarray(clipped(cotangent, max_value=INF), np.float32)
    np.testing.assert_array_equal(unlimited, np.asarray(cotangent, np.float32))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_norms_are_clipped_where_squares_are_out_of_range(dtype):
    finfo = jnp.finfo(dtype)
    most, tiny = float(finfo.max), float(finfo.tiny)
    root = 2**0.5
    cases = {
        2.0: [
            ([300, 400, 0], [1.2, 1.6, 0]),
            ([3e4, 4e4, 0], [1.2, 1.6, 0]),
            ([most, most, 0], [root, root, 0]),
            ([0.5, 1.0, 1.5], [0.5, 1.0, 1.5]),
            ([0, 0, 0], [0, 0, 0]),
            ([INF, 4e4, -INF], [root, 0, -root]),
            ([NAN, 3e4, 0], [NAN, 3e4, 0]),
            ([NAN, INF, 0], [NAN, INF, 0]),
        ],
        5e-5: [([6e-5, 8e-5, 0], [3e-5, 4e-5, 0])],
        20 * tiny: [([30 * tiny, 40 * tiny, 0], [12 * tiny, 16 * tiny, 0])],
        1e300: [([most, 1, 0], [most, 1, 0]), ([INF, 1, 0], [most, 0, 0])],
        INF: [(row, row) for row in ([INF, 1, 0], [1, -2, 0], [most, 1, NAN])],
    }
    for limit, rows in cases.items():
        cotangents, expected = zip(*rows, strict=True)
        batch = jnp.array(cotangents, dtype)
        got = jax.vmap(lambda ct, limit=limit: clipped(ct, max_norm=limit))(batch)
        assert got.dtype == dtype
        # What is near the smallest normal number loses bits.
        close = {"rtol": 30 * float(finfo.eps), "atol": tiny * float(finfo.eps)}
        np.testing.assert_allclose(np.asarray(jnp.real(got), np.float64), expected, **close)


def test_nothing_is_left_of_nothing():
    assert clipped(jnp.zeros((0,)), max_norm=1.0, max_value=1.0).shape == (0,)


def test_the_second_derivative_of_what_is_clipped_is_that_of_the_clipped_function():
    for limits, by_hand in [
        ({"max_norm": 1.0}, lambda ct: ct / jnp.linalg.norm(ct)),
        ({"max_value": 1.0}, lambda ct: jnp.clip(ct, -1, 1)),
    ]:
        ct = jnp.array([0.3, -7.0, 2.0])
        derivative = jax.jit(jax.jacobian(lambda ct, limits=limits: clipped(ct, **limits)))
        np.testing.assert_allclose(derivative(ct), jax.jit(jax.jacobian(by_hand))(ct), atol=1e-6)
        np.testing.assert_array_equal(derivative(jnp.zeros(3)), np.eye(3))


def test_loss_scaling_does_not_leave_the_range_of_half_precision():
    x = jnp.float16(0.0)
    for factor, arriving, expected in [(2.0**16, 2.0**-10, 64), (2.0**16, 0, 0), (1e-9, 6e4, 6e-5)]:
        f = tg.rewrite(jnp.sin, rules.scale_gradient(SIN, factor))
        got = jax.vjp(f, x)[1](jnp.float16(arriving))[0]
        assert got.dtype == jnp.float16
        np.testing.assert_allclose(got, expected, rtol=2e-3)


def test_complex_values_are_clipped_to_the_limit_and_keep_their_phase():
    big = 3e38
    cotangent = [3 + 4j, 1.5 + 2j, 0.3j, complex(INF, 3), complex(INF, -INF)]
    cotangent += [complex(big, big), 0]
    got = clipped(jnp.array(cotangent, jnp.complex64), max_value=2.0)
    root = 2**0.5
    expected = [1.2 + 1.6j, 1.2 + 1.6j, 0.3j, 2, complex(root, -root), complex(root, root), 0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    nan = clipped(jnp.array([complex(NAN, 1), complex(INF, NAN)], jnp.complex64), max_value=2.0)
    assert jnp.isnan(nan).all()


TEMPERATURES = [2.0, jnp.float32(2.0), jnp.bfloat16(2)]
TEMPERATURES += [2 * jnp.ones(shape) for shape in ((3,), (4, 1), (4, 3))]


@pytest.mark.parametrize("temperature", TEMPERATURES, ids=lambda x: str(jnp.asarray(x).aval))
def test_the_inputs_of_a_call_have_one_order_whatever_their_types_are(temperature):
    def head(features, temperature):
        return jnp.sum(features / temperature)

    def f(features, temperature):
        return head(features, temperature)

    def one_and_two(op, dy):
        return [0 * op.inputs[0] + 1, 0 * op.inputs[1] + 2]

    features, where = jax.random.normal(jax.random.key(0), (4, 3)), match.call("head")
    reverse = rules.scale_gradient(where, -1.0, inputs=0)
    override = rules.override_gradient(where, one_and_two)
    plain, reversed_, overridden = (
        jax.grad(fun, (0, 1))(features, temperature)
        for fun in (f, tg.rewrite(f, reverse), tg.rewrite(f, override))
    )
    np.testing.assert_allclose(reversed_[0], -plain[0])
    np.testing.assert_allclose(reversed_[1], plain[1])
    assert jnp.all(overridden[0] == 1)
    assert jnp.all(overridden[1] == 2)


def test_overriding_gives_operands_outputs_and_parameters():
    def grad(op, dy):
        assert (op.name, len(op.inputs), op.params["axes"]) == ("reduce_sum", 1, (1,))
        return jnp.broadcast_to(dy[..., None], op.inputs[0].shape) * op.outputs[0][..., None]

    inner_sum = match.where(lambda found: found.node.params.get("axes") == (1,))
    f = tg.rewrite(lambda x: jnp.sum(jnp.sum(x, axis=1)), rules.override_gradient(inner_sum, grad))
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.grad(f)(x), [[3.0] * 3, [12.0] * 3])


def test_the_second_derivative_goes_by_the_override_too():
    def grad(op, dy):
        return dy * op.outputs[0]  # as if sin were exp

    edited = tg.rewrite(jnp.sin, rules.override_gradient(SIN, grad))
    for order in range(1, 4):
        f = edited
        for _ in range(order):
            f = jax.grad(f)
        np.testing.assert_allclose(f(0.5), jnp.sin(0.5), rtol=1e-6)


def test_scalars_in_the_program_are_inputs_of_a_single_operation():
    def grad(op, dy):
        assert [jnp.shape(x) for x in op.inputs] == [(3,), ()]
        return 7 * dy, None

    f = tg.rewrite(lambda x: jnp.sum(x * 2.0), rules.override_gradient(match.op("mul"), grad))
    np.testing.assert_allclose(jax.grad(f)(X), 7.0)


def layer(x):
    with jax.named_scope("layer"):
        return jax.nn.relu(3.0 * x)


@pytest.mark.parametrize(
    "where",
    [
        match.call("relu"),
        match.op("custom_jvp_call"),
        match.call("layer"),
        match.scope("layer"),
        match.source("layer") & match.call("relu"),
        match.where(
            lambda found: found.scope == "layer" and not found.path and found.name != "mul"
        ),
    ],
    ids=["call", "op", "inlined", "scope", "source", "where"],
)
def test_rules_at_one_place_compose_in_order_and_act_once(where):
    """The code of a rule is a custom gradient itself, in the scope and line of its match."""
    seen = []
    tap = rules.tap_gradient(where, lambda place, g: seen.append(np.asarray(g)))
    double, clip = rules.scale_gradient(where, 2.0), rules.clip_gradient(where, max_value=30.0)
    edited = tg.rewrite(
        lambda x: jnp.sum(layer(x) * ARRIVING), [double, rules.recompute(where), clip, tap, double]
    )
    gradient = jax.grad(edited)(X)
    jax.effects_barrier()
    tapped = jnp.minimum(2 * ARRIVING, 30.0)
    np.testing.assert_allclose(seen, [tapped])
    np.testing.assert_allclose(gradient, 2 * tapped * 3.0 * (X > 0))
    assert edited(X) == jnp.sum(layer(X) * ARRIVING)


# --------------------------------------------------------------------- what stays, and where


def test_calls_of_one_function_have_names_of_their_own():
    @jax.jit
    def layer(x):
        return jnp.sin(jnp.sin(x))

    def f(x):
        with jax.named_scope("first"):
            x = layer(x)
        with jax.named_scope("second"):
            return layer(2 * x)

    names, shown = [], {}

    def named(op, dy):
        names.append(op.name)
        return dy

    jax.grad(tg.rewrite(f, rules.override_gradient(match.scope("*"), named)))(0.5)
    assert sorted(names) == ["first", "second"]
    jax.jit(jax.grad(tg.rewrite(f, rules.tap_gradient(SIN, shown.__setitem__))))(0.5)
    jax.effects_barrier()
    _, gradients = tg.intermediate_gradients(f, 0.5, where=SIN)
    assert len(gradients) == 4
    assert shown.keys() == gradients.keys()
    for place, gradient in gradients.items():
        np.testing.assert_allclose(shown[place], gradient, rtol=1e-5)
    np.testing.assert_allclose(gradients["second/sin_1"], 1.0)


def test_an_edited_function_is_exported_and_mapped():
    edited = tg.rewrite(weighted_sin, rules.scale_gradient(SIN, 2.0))
    exported = jax.export.export(jax.jit(jax.grad(edited)))(X)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(X), 2 * ARRIVING * COS, rtol=1e-6)
    mapped = jax.vmap(jax.grad(edited))(jnp.stack([X, 2 * X]))
    np.testing.assert_allclose(mapped[1], 2 * ARRIVING * jnp.cos(2 * X), rtol=1e-6)


def test_variables_are_read_and_assigned_by_an_edited_function():
    v = tg.Variable(2.0)

    def f(x):
        v.assign_add(1.0)
        return jnp.sin(x) * v

    edited = tg.rewrite(f, rules.scale_gradient(SIN, 0.0))
    np.testing.assert_allclose(edited(1.0), 3 * jnp.sin(1.0), rtol=1e-6)
    assert float(v.value) == 3.0


def test_a_graph_that_a_rule_makes_anew_reads_the_variables_too():
    v = tg.Variable(2.0)

    def ten_times(graph):
        program = jaxpr_as_fun(graph.program)
        return tg.graph(lambda *args: 10 * program(*args)[0], *graph.in_avals)

    f = tg.trace(lambda x: x * v, rules=[ten_times])
    assert f(3.0) == 60.0
    v.assign(5.0)
    assert f(3.0) == 150.0


@pytest.mark.parametrize(
    "name", ["my_jvp(x)", "jvp(x)", "transpose(jvp(x))", "jvp(", "my_tracegrad.rules"]
)
def test_scopes_called_like_transformations_are_only_scopes(name):
    def f(x):
        with jax.named_scope(name):
            return jnp.sum(jnp.sin(x))

    for rule in (rules.scale_gradient(SIN, 3.0), rules.scale_gradient(match.scope(name), 3.0)):
        np.testing.assert_allclose(jax.grad(tg.rewrite(f, rule))(X), 3 * COS, rtol=1e-6)
        step = tg.trace(tg.grad(f), rules=[rule])
        np.testing.assert_allclose(step(X), 3 * COS, rtol=1e-6)
        with pytest.raises(tg.GraphError, match="JAX has differentiated already, where"):
            tg.rewrite(jax.grad(f), rules.scale_gradient(match.op("cos"), 3.0))(X)
    _, values = tg.intermediates(f, X, where=SIN)
    assert list(values) == [f"{name}/sin"]


# --------------------------------------------------------------------------------- bad input


NEAREST = [
    (match.op("mull"), "'mul'"),
    (match.scope("layr"), "'layer'"),
    (match.source("layerr"), "'layer'"),
    (match.scope("layer") & match.op("mull"), "'mul'"),
    (match.op("mull") | match.scope("layr"), "'mul', 'layer'"),
]


@pytest.mark.parametrize(("where", "names"), NEAREST, ids=lambda x: repr(x))
def test_a_selector_that_matches_nothing_lists_near_names(where, names):
    with pytest.raises(
        tg.NoMatchError, match=rf"nearest names: {names}\..*missing_ok=True"
    ) as error:
        tg.rewrite(layer, rules.stop_gradient(where))(X)
    assert isinstance(error.value, LookupError)
    allowed = tg.rewrite(layer, rules.stop_gradient(where, missing_ok=True))
    np.testing.assert_array_equal(allowed(X), layer(X))


def test_names_of_jax_itself_are_not_near():
    with pytest.raises(tg.NoMatchError, match=r"nearest names: '<lambda>', 'softmax'") as error:
        tg.rewrite(lambda x: jax.nn.softmax(x), rules.stop_gradient(match.call("xyz")))(X)
    assert "process_primitive" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda dy: (dy, dy), ValueError, r"returned 2 gradients for 1 input"),
        (lambda dy: dy[:2], ValueError, r"f32\[2\].*f32\[3\]"),
        (lambda dy: dy.astype("int32"), TypeError, r"i32\[3\].*f32\[3\]"),
        (lambda dy: "no", TypeError, "'no'"),
    ],
)
def test_a_wrong_gradient_names_the_operation_and_its_line(answer, error, message):
    edited = tg.rewrite(weighted_sin, rules.override_gradient(SIN, lambda op, dy: answer(dy)))
    with pytest.raises(error, match=message) as raised:
        jax.grad(edited)(X)
    assert "of sin at test_rules.py" in str(raised.value)


def test_an_edit_inside_a_custom_gradient_is_refused():
    @tg.custom_gradient
    def clipped(x):
        return jnp.sin(x), lambda dy: jnp.clip(dy, -1, 1)

    with pytest.raises(tg.GraphError, match=r"inside of the custom gradient clipped.*vanish"):
        tg.rewrite(lambda x: jnp.sum(clipped(x)), rules.scale_gradient(SIN, 2.0))(X)
    outside = SIN & ~match.call("clipped")
    f = tg.rewrite(lambda x: jnp.sum(clipped(x) + jnp.sin(x)), rules.scale_gradient(outside, 2.0))
    np.testing.assert_allclose(jax.grad(f)(X), 1 + 2 * COS, rtol=1e-6)


def test_a_rule_for_what_an_earlier_rule_overrides_is_to_be_given_first():
    seen = []
    override = rules.override_gradient(SIN, lambda op, dy: 3 * dy)
    tap = rules.tap_gradient(SIN, lambda place, g: seen.append(np.asarray(g)))
    with pytest.raises(tg.GraphError, match=r"match of an earlier rule, .*give this rule before"):
        tg.rewrite(weighted_sin, [override, tap])(X)
    gradient = jax.grad(tg.rewrite(weighted_sin, [tap, override]))(X)
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [ARRIVING])
    np.testing.assert_allclose(gradient, 3 * ARRIVING)


def test_an_edit_inside_a_solve_is_refused():
    matrix, multiply = jnp.array([[2.0, 0.0], [0.0, 4.0]]), match.op("dot_general")

    def solved(matrix):  # the diagonal's inverses
        return jnp.sum(jax.scipy.sparse.linalg.cg(lambda x: matrix @ x, jnp.ones(2))[0])

    with pytest.raises(tg.GraphError, match=r"inside of the operation custom_linear_solve.*vanish"):
        tg.rewrite(solved, rules.scale_gradient(multiply, 2.0))(matrix)
    outside = multiply & ~match.where(lambda found: found.rule_around)
    expected = -np.outer([1 / 2, 1 / 4], [1 / 2, 1 / 4])
    # The loops of a solve are not differentiated either.
    for rule, factor in ((rules.scale_gradient(outside, 2.0), 2), (rules.checkpointed_loop(), 1)):
        gradient = jax.grad(tg.rewrite(solved, rule))(matrix)
        np.testing.assert_allclose(gradient, factor * expected, rtol=1e-5)


def test_an_edit_of_what_is_written_to_a_ref_is_refused():
    def f(x):  # sin(x) ** 2
        with jax.named_scope("all"):
            ref = jax.new_ref(jnp.zeros_like(x))
            with jax.named_scope("write"):
                ref[...] = jnp.sin(x)
            return jnp.sum(ref[...] ** 2)

    everything, write = match.op("*"), match.scope("*/write")
    for rule in (
        rules.stop_gradient(write),
        rules.recompute(write),
        rules.clip_gradient(everything, max_norm=1.0),
        rules.scale_gradient(everything, 1.0),
        rules.tap_gradient(everything, print),
        rules.override_gradient(write, lambda op, *dys: [None for _ in op.inputs]),
    ):
        with pytest.raises(tg.GraphError, match=r"jax\.Ref or writes to one"):
            jax.grad(tg.rewrite(f, rule))(X)
    with pytest.raises(tg.GraphError, match=r"jax\.Ref or writes to one"):
        tg.intermediate_gradients(f, X, where=everything)
    arrays = everything & ~match.where(lambda found: any(n.has_references for n in found.nodes))
    for where in (arrays & SIN, match.op("get"), match.scope("all")):  # `get` only reads
        doubled = jax.grad(tg.rewrite(f, rules.scale_gradient(where, 2.0)))(X)
        np.testing.assert_allclose(doubled, 4 * np.sin(X) * COS, rtol=1e-6)
    values = tg.intermediates(jax.jit(f), X, where=everything)[1]
    np.testing.assert_allclose(values["all/write/sin"], np.sin(X), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rules.stop_gradient("sin"), TypeError, "expected a selector"),
        (lambda: tg.rewrite(jnp.sin, rules.stop_gradient(SIN, 1))(X), IndexError, "has 1 input"),
        (lambda: rules.stop_gradient(SIN, "w"), TypeError, r"inputs is .* input .* given 'w'"),
        (lambda: rules.override_gradient(SIN, None), TypeError, "gradient function"),
        (lambda: rules.override_gradient(SIN, lambda dy: dy), TypeError, r"takes \(dy\)"),
        (lambda: tg.register_gradient("of one")(lambda dy: dy), TypeError, r"takes \(dy\)"),
        (lambda: rules.clip_gradient(SIN), ValueError, "max_norm, max_value"),
        (lambda: rules.clip_gradient(SIN, max_norm=0.0), ValueError, "positive max_norm"),
        (lambda: rules.clip_gradient(SIN, max_norm="1"), ValueError, "positive max_norm, not '1'"),
        (lambda: rules.scale_gradient(SIN, X), ValueError, "scalar factor"),
        (lambda: rules.scale_gradient(SIN, "2"), ValueError, "scalar factor, not a str: '2'"),
        (lambda: rules.recompute(SIN, policy="dots"), TypeError, "policy of jax.checkpoint_pol"),
        (
            lambda: jax.grad(tg.rewrite(jnp.sin, rules.scale_gradient(SIN, 1j)))(1.0),
            TypeError,
            r"a complex factor for the gradient of a ~f32\[\]",
        ),
        (lambda: rules.tap_gradient(SIN, 3), TypeError, "callback"),
        (lambda: rules.tap_gradient(SIN, lambda g: g), TypeError, r"callback.* takes \(g\)"),
        (lambda: tg.rewrite(3, []), TypeError, "a function and rules"),
        (lambda: tg.rewrite(jnp.sin, 3), TypeError, "Graph -> Graph"),
        (lambda: tg.rewrite(jnp.sin, lambda g: None)(1.0), TypeError, "returned NoneType"),
    ],
)
def test_what_is_no_rule_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# ----------------------------------------------------------------------------- intermediates


def test_intermediates_of_branches_loops_and_calls():
    def f(x):
        y = jax.lax.cond(x[0] < 0, jnp.sin, lambda v: 2 * jnp.cos(v), x)
        return after(y)

    def after(y):
        return jnp.sum(jax.checkpoint(lambda v: jnp.exp(jax.jit(jnp.tanh)(v)))(y))

    for x, y, slope in ((X, jnp.sin(X), 1), (-X, 2 * jnp.cos(X), 2)):
        taken, other = ("sin", "cos") if slope == 1 else ("cos", "sin")
        out, values = tg.intermediates(f, x, where=match.op("sin", "cos", "tanh"))
        np.testing.assert_allclose(out, f(x), rtol=1e-6)
        np.testing.assert_allclose(values[taken], y / slope, rtol=1e-6)
        np.testing.assert_allclose(values["tanh"], jnp.tanh(y), rtol=1e-6)
        gradients = tg.intermediate_gradients(f, x, where=match.op("sin", "cos"))[1]
        np.testing.assert_allclose(gradients[taken], slope * jax.grad(after)(y), rtol=1e-5)
        assert not values[other].any()  # of the branch that was not taken
        assert not gradients[other].any()
        for op in ("sin", "cos"):  # of one branch alone
            found = tg.intermediates(f, x, where=match.op(op))[0]
            np.testing.assert_allclose(found, f(x), rtol=1e-6)


def test_a_loop_and_what_is_in_it_are_led_out_together():
    def loss(x):
        def step(carry, t):
            with jax.named_scope("cell"):
                carry = jax.lax.cond(t > 0.5, lambda c: jnp.sin(c) * t, lambda c: c * c, carry)
            return carry, carry

        last, carries = jax.lax.scan(step, 1.0, x)
        return last + jnp.sum(carries)

    places = [match.op("scan"), match.scope("cell"), SIN]
    scan, cell, sin = places
    together = scan | cell | sin

    def values(where):
        return tg.intermediates(loss, X, where=where)[1]

    def gradients(where):
        return tg.intermediate_gradients(loss, X, where=where)[1]

    for led_out in (values, gradients):
        alone = {name: value for place in places for name, value in led_out(place).items()}
        jax.tree.map(np.testing.assert_array_equal, led_out(together), alone)


def sines_in_a_loop_and_a_branch(x):
    last, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=2)
    return jnp.sum(jax.lax.cond(jnp.sum(x) > 1.0, jnp.sin, jnp.cos, last) * jnp.arange(2.0))


@pytest.mark.both_jax
def test_gradients_within_a_shard_map_are_those_of_each_shard():
    mesh, x = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,)), jnp.arange(8.0) / 7

    def of_shard(x):
        _, gradients = tg.intermediate_gradients(sines_in_a_loop_and_a_branch, x, where=SIN)
        return jnp.stack([*gradients["sin"], gradients["sin_1"]])

    spec = PartitionSpec("d")
    of_shards = jax.shard_map(of_shard, mesh=mesh, in_specs=spec, out_specs=spec)
    expected = jnp.concatenate([of_shard(shard) for shard in jnp.split(x, 4)])
    np.testing.assert_allclose(of_shards(x), expected, rtol=1e-6)


@pytest.mark.both_jax
def test_gradients_are_split_over_devices_as_their_values():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(jnp.arange(2.0), NamedSharding(mesh, PartitionSpec("d")))
    with jax.set_mesh(mesh):
        _, values = tg.intermediates(sines_in_a_loop_and_a_branch, x, where=SIN)
        _, gradients = tg.intermediate_gradients(sines_in_a_loop_and_a_branch, x, where=SIN)
        with tg.GradientTape() as tape:
            tape.watch(x)
            y = jnp.sum(jnp.round(x))
        unconnected = tape.gradient(y, x, unconnected_gradients="zero")
    assert [str(g.sharding.spec[-1]) for g in gradients.values()] == ["d", "d"]
    assert jax.tree.map(jax.typeof, gradients) == jax.tree.map(jax.typeof, values)
    assert jax.typeof(unconnected) == jax.typeof(x)


def marked_in_two_branches_of_three(which, x, y):
    def floats(x, y):
        with jax.named_scope("marked"):
            n = jnp.sin(x)
        return n * y - 46.0

    def integers(x, y):
        with jax.named_scope("marked"):
            n = (x > y).astype(jnp.int32)
        return n * y + 5.0 * x

    def shown(x, y):
        with jax.named_scope("marked"):
            jax.debug.callback(lambda x: None, x)
        return y - x

    return jax.lax.switch(which, [floats, integers, shown], x, y)


@pytest.mark.parametrize(
    ("which", "value", "arriving"), [(0, 3 * np.sin(2.0) - 46, 3.0), (1, 10.0, 0.0), (2, 1.0, 0.0)]
)
def test_where_branches_have_no_value_to_lead_out_or_another_all_compute_what_they_did(
    which, value, arriving
):
    fun, marked = marked_in_two_branches_of_three, match.scope("marked")
    result, _ = tg.intermediates(fun, which, 2.0, 3.0, where=marked)
    np.testing.assert_allclose(result, value, rtol=1e-6)
    _, gradients = tg.intermediate_gradients(fun, which, 2.0, 3.0, where=marked)
    np.testing.assert_allclose(jax.tree.leaves(gradients), [arriving], rtol=1e-6)


def test_a_scope_and_a_call_that_begin_with_one_operation_have_values_of_their_own():
    def f(x):
        with jax.named_scope("head"):
            y = jax.nn.softmax(x)
            z = 3 * y
        return jnp.sum(z**2)

    y, both = jax.nn.softmax(X), match.scope("head") | match.call("softmax")
    values = tg.intermediates(f, X, where=both)[1]
    gradients = tg.intermediate_gradients(f, X, where=both)[1]
    for found, head, softmax in ((values, 3 * y, y), (gradients, 6 * y, 18 * y)):
        assert list(found) == ["head", "head/softmax"]
        np.testing.assert_allclose(found["head"], head, rtol=1e-6)
        np.testing.assert_allclose(found["head/softmax"], softmax, rtol=1e-6)


def test_intermediates_are_differentiable_and_have_names_of_their_own():
    def f(x):
        return jnp.sin(jnp.sin(x))

    def second(x):
        values = tg.intermediates(f, x, where=SIN)[1]
        assert list(values) == ["sin", "sin_1"]
        return values["sin_1"]

    np.testing.assert_allclose(jax.grad(second)(0.5), jax.grad(f)(0.5), rtol=1e-6)


def test_the_output_comes_beside_the_gradients_with_its_auxiliary_results():
    def f(x):
        y = jnp.sin(x)
        return jnp.sum(y), {"doubled": 2 * y}

    (value, aux), gradients = tg.intermediate_gradients(f, X, where=SIN, has_aux=True)
    np.testing.assert_allclose(gradients["sin"], 1.0)
    np.testing.assert_allclose(value, jnp.sum(jnp.sin(X)), rtol=1e-6)
    np.testing.assert_allclose(aux["doubled"], 2 * jnp.sin(X), rtol=1e-6)


def test_what_cannot_be_led_out_is_refused():
    def loop(x):
        return jax.lax.while_loop(lambda c: jnp.all(c < 1), lambda c: jnp.sin(c) + 1, x)

    with pytest.raises(tg.GraphError, match="no place for more inputs and outputs"):
        tg.intermediates(loop, X, where=SIN)
    with pytest.raises(tg.NoMatchError, match="'sin'"):
        tg.intermediates(jnp.sin, X, where=match.op("sinh"))
    assert tg.intermediates(jnp.sin, X, where=match.op("sinh"), missing_ok=True)[1] == {}
    with pytest.raises(TypeError, match=r"wants a float scalar.*f32\[3\]"):
        tg.intermediate_gradients(jnp.sin, X, where=SIN)
    with pytest.raises(TypeError, match=r"wants a float scalar; .* returned a NoneType"):
        tg.intermediate_gradients(lambda x: None, X, where=SIN, missing_ok=True)
    with pytest.raises(TypeError, match=r"is to return a pair \(value, aux\), not f32\[\]"):
        tg.intermediate_gradients(lambda x: jnp.sum(jnp.sin(x)), X, where=SIN, has_aux=True)
    with pytest.raises(TypeError, match="expected a selector"):
        tg.intermediates(jnp.sin, X, where="sin")


def test_the_program_is_that_of_the_same_edit_by_hand():
    def f(w, x, stop):
        for _ in range(2):
            x = jnp.tanh(x @ stop(w))
        return jnp.sum(x)

    edited = tg.rewrite(
        lambda w, x: f(w, x, lambda w: w), rules.stop_gradient(match.op("dot_general"), inputs=1)
    )
    w, x = jnp.eye(3), jnp.ones((2, 3))
    texts = [
        jax.jit(jax.grad(g, 1)).lower(w, x).compile().as_text()
        for g in (edited, lambda w, x: f(w, x, jax.lax.stop_gradient))
    ]
    ours, by_hand = (operations(text) for text in texts)
    assert ours == by_hand


def operations(text):
    """Of an optimised program what is computed: without names and source lines."""
    kinds = re.findall(r"= (\S+) ([a-z-]+)\(", text)
    assert kinds
    return sorted(kinds)


def test_places_whose_names_could_be_taken_for_one_another_are_kept_apart():
    def f(x):
        with jax.named_scope("layer"):  # entered twice, apart
            a, b = jnp.sin(x), jnp.cos(x)
        c = a * 5
        with jax.named_scope("layer"):
            c = jnp.cos(c)
        d = c * 3
        with jax.named_scope("layer_1"):
            return jnp.sum(jnp.tanh(d) * b)

    (_, values), (_, gradients) = (
        tool(f, X, where=match.scope("layer*"))
        for tool in (tg.intermediates, tg.intermediate_gradients)
    )
    assert len(values) == len(gradients) == 3
    (a, b), c, e = values.values()
    np.testing.assert_allclose([a, b, c], [jnp.sin(X), COS, jnp.cos(5 * jnp.sin(X))], rtol=1e-5)
    np.testing.assert_allclose(e, jnp.sum(jnp.tanh(3 * c) * b), rtol=1e-5)
    (of_a, of_b), of_c, of_e = gradients.values()
    of_tanh = b * (1 - jnp.tanh(3 * c) ** 2)
    np.testing.assert_allclose([of_b, of_c], [jnp.tanh(3 * c), 3 * of_tanh], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_a, 3 * of_tanh * -jnp.sin(5 * a) * 5, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_e, 1.0)


def test_matches_that_overlap_are_named_where_one_takes_the_place_of_the_other():
    def loss(x):
        with jax.named_scope("block"):
            return jnp.cos(jnp.sin(x))

    scope, sine = tg.match.scope("block"), tg.match.op("sin")
    with pytest.raises(tg.GraphError, match=r"Apply sin.* in common with <block: 2 nodes"):
        tg.rewrite(loss, tg.rules.recompute(scope | sine))(1.0)
    both = tg.rewrite(loss, [tg.rules.recompute(sine), tg.rules.recompute(scope)])
    np.testing.assert_allclose(jax.grad(both)(1.0), jax.grad(loss)(1.0), rtol=1e-6)


def test_a_value_that_is_only_broadcast_or_cast_in_a_call_comes_last():
    def spread(x, y, scale):
        return jnp.broadcast_to(x, (2, 3)).astype(jnp.bfloat16), y * scale

    def f(x, y, scale):
        a, b = spread(x, y, scale)
        return jnp.sum(a.astype(jnp.float32)) + jnp.sum(b)

    def in_order(op, *dys):
        return [0 * each + i for i, each in enumerate(op.inputs)]

    edited = tg.rewrite(f, rules.override_gradient(match.call("spread"), in_order))
    x, y, scale = jnp.ones(3), jnp.ones((4, 2)), jnp.ones(2)
    of_x, of_y, of_scale = jax.grad(edited, (0, 1, 2))(x, y, scale)
    assert jnp.all(of_x == 2)
    assert jnp.all(of_y == 0)
    assert jnp.all(of_scale == 1)
