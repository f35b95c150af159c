"""Rules that keep NaN and Inf out of gradients, and those that mend what has no gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import root
from tracegrad import match, rules
from tracegrad.ir import CustomGradient, operations

pytestmark = pytest.mark.both_jax

# Programs of strangers: each with its argument, and what its author meant, written without the
# trap: the argument is made safe before the operation.
MASKED = {}


def masked(x, meant):
    def register(fun):
        MASKED[fun.__name__] = fun, meant, jnp.asarray(x)
        return fun

    return register


@masked(
    [[0.1, 0.2], [1.0, 1.3], [2.4, -0.2]],
    lambda x: 2 * sum(1 / jnp.linalg.norm(x[i] - x[j]) for i in range(3) for j in range(i)),
)
def charges_of_pairs(x):
    keep = 1 - jnp.eye(3)
    d = jnp.where(keep, jnp.linalg.norm(x[:, None] - x[None], axis=-1), 0.0)
    return jnp.sum(jnp.where(keep, 1 / d, 0.0))


@masked([200.0, -1.0], lambda x: x[0] + jnp.expm1(x[1]))
def exponential_that_overflows(x):
    return jnp.sum(jnp.where(x > 0, x, jnp.expm1(x)))


@masked([0.5, 0.5, 0.0], lambda p: jnp.sum(p[:2] * jnp.log(p[:2])))
def entropy(p):
    return jnp.sum(jnp.where(p > 0, p * jnp.log(p), 0.0))


@masked([0.0, 1.5], lambda x: jnp.sin(1 / x[1]))
def sine_of_infinity(x):
    return jnp.sum(jnp.where(x > 0, jnp.sin(1 / x), 0.0))


@masked([-jnp.inf, 1.0], lambda x: jnp.logaddexp(x[1], 2 * x[1]))
def rule_of_jaxs_own(x):
    return jnp.sum(jnp.where(x > -9, jnp.logaddexp(x, 2 * x), 0.0))


@masked([[1.0, 2.0], [3.0, 4.0]], lambda x: jnp.sum(jax.nn.softmax(x[0]) * x[0]))
def softmax_of_a_masked_row(x):
    rows = jnp.array([[True], [False]])
    p = jax.nn.softmax(jnp.where(rows, x, -jnp.inf))
    return jnp.sum(jnp.where(rows, p * x, 0.0))


@masked(0.0, lambda x: x)
def root_of_large_numbers(x):
    return jnp.where(x < 1.0, x, jnp.sqrt(x))


@masked(2.0, lambda x: x / jnp.array(0.5) - x)
def quotients_of_one_number(x):
    return jnp.sum(jnp.nan_to_num(x / jnp.array([0.5, 0.0, -1.0]), posinf=0.0))


def _normalised(x):
    p = jax.nn.softmax(x)
    return p * jnp.sum(p) ** -1


@masked([1.0, -2.0, 0.5], lambda x: jnp.sum(_normalised(x[:2]) * -jnp.log2(_normalised(x[:2]))))
def entropy_of_a_masked_softmax(x):
    some = jnp.array([True, True, False])
    p = jax.nn.softmax(x, where=some)
    p = p * jnp.sum(p) ** -1
    return jnp.sum(p * -jnp.log2(p), where=some)


@masked([0.0, 2.0], lambda x: x[1] ** -2 + x[1] ** 3)
def integer_powers(x):
    return jnp.sum(jnp.where(x > 0, x**-2 + jax.lax.pow(x, jnp.array([-1, 3])), 0.0))


@masked([0.0, 2.0], lambda x: 3 * jnp.log(x[1]) + jnp.log(jnp.sqrt(x[1])))
def loops_branches_and_batches(x):
    def add(total, weight):
        return total + jnp.where(x > 0, weight * jnp.log(x), 0.0), None

    def root(x):
        return jax.vmap(lambda v: jnp.where(v > 0, jnp.log(jnp.sqrt(v)), 0.0))(x)

    total, _ = jax.lax.scan(add, jnp.zeros(2), jnp.arange(3.0))
    return jnp.sum(total + jax.lax.cond(x[0] < 1, jax.checkpoint(root), jnp.sin, x))


def _attention(x, mask):
    return jax.nn.softmax(jnp.where(mask, x @ x.T, -jnp.inf)) @ x


@masked([[1.0, 2.0], [0.5, -1.0], [0.3, 0.1]], lambda x: jnp.sum(_attention(x, True)[::2] ** 2))
def attention_of_a_masked_row(x):
    row = jnp.arange(3)[:, None] == 1
    return jnp.sum(jnp.where(row, 0.0, _attention(x, ~row)) ** 2)


@masked([1.0, 2.0], lambda x: x[0] * np.log(3.0) + x[1] * np.log(4.0))
def convolution_at_the_ends_of_a_signal(x):
    found = jnp.convolve(jnp.log(jnp.array([0.0, 4.0, 3.0, 0.0])), x)
    return jnp.sum(jnp.where(jnp.isfinite(found), found, 0.0))


@masked(
    np.array([0.0, 1.0 + 1.0j], np.complex64),
    lambda z: jnp.log(z[1]).real + jnp.sqrt(z[1]).imag + jnp.abs(z[1]),
)
def complex_numbers(z):
    terms = jnp.log(z).real + jnp.sqrt(z).imag + jnp.abs(z)
    return jnp.sum(jnp.where(jnp.abs(z) > 0, terms, 0.0))


def test_zeros_stay_zeros_whatever_the_derivative_is_and_finite_gradients_keep_their_bits():
    @jax.jit
    def gradients(arguments):
        found = {}
        for name, (fun, meant, _) in MASKED.items():
            strong = tg.rewrite(fun, rules.strong_zero())
            x = arguments[name]
            found[name] = [jax.grad(f)(x) for f in (fun, strong, meant)]
        return found

    for name, found in gradients({name: x for name, (*_, x) in MASKED.items()}).items():
        plain, strong, meant = map(np.asarray, found)
        assert np.isnan(plain).any() or name == "softmax_of_a_masked_row", name
        np.testing.assert_allclose(strong, meant, rtol=1e-5, err_msg=name)
        finite = np.isfinite(plain)
        assert plain[finite].tobytes() == strong[finite].tobytes(), name


def test_second_derivatives_keep_zeros_too_forward_over_reverse_and_reverse_over_reverse():
    def fun(x):
        return jnp.sum(jnp.where(x > 0, x**1.5 * jnp.log(jnp.sqrt(x)) / x, 0.0))

    strong = tg.rewrite(fun, rules.strong_zero())
    x = jnp.array([0.0, 2.0])

    @jax.jit
    def hessians(x):
        found = [tg.hessian(strong)(x), jax.jacrev(jax.grad(strong))(x)]
        return found, jax.hessian(fun)(x[1:])

    found, right = hessians(x)
    for hessian in found:
        np.testing.assert_allclose(hessian, np.diag([0.0, right[0, 0]]), rtol=1e-5)


def test_values_and_forward_mode_are_what_they_were():
    fun, strong = entropy, tg.rewrite(entropy, rules.strong_zero())
    x, t = jnp.array([0.5, 2.0, 0.0]), jnp.array([1.0, -1.0, 0.5])

    @jax.jit
    def both(x, t):
        return [(f(x), jvp(f, (x,), (t,))) for f, jvp in ((fun, jax.jvp), (strong, tg.jvp))]

    before, after = map(jax.tree.leaves, both(x, t))
    assert [np.asarray(a).tobytes() for a in before] == [np.asarray(a).tobytes() for a in after]


def test_a_healthy_program_has_the_same_gradient_up_to_rounding():
    def loss(w, x):
        h = jax.nn.gelu(x @ w) / jnp.linalg.norm(x, axis=1, keepdims=True)
        return -jnp.mean(jax.nn.log_softmax(h * jax.nn.softmax(h))[:, 0] ** 3)

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 7), (9, 5)))
    strong = tg.rewrite(loss, rules.strong_zero())
    for each_alone in (False, True):
        with jax.disable_jit(each_alone):
            plain, kept = (jax.jit(jax.grad(f, (0, 1)))(w, x) for f in (loss, strong))
        for found, expected in zip(kept, plain, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_only_operations_are_touched_whose_derivative_may_be_no_number():
    def fun(x, y):
        z = 2.0 * x - jnp.maximum(x, y) / 4.0 + jnp.where(x > 0, -x, y).astype(jnp.bfloat16)
        return jax.nn.relu(z) * jnp.exp(jax.lax.stop_gradient(x)) + 1.0 / y + jnp.abs(y)

    program = tg.graph(tg.rewrite(fun, rules.strong_zero()), jnp.ones(2), jnp.ones(2))
    rule = [o.node.name for o in program.walk() if isinstance(o.node, CustomGradient)]
    assert rule == ["relu", "exp", "mul", "div"]  # relu has a rule by itself


def test_a_matrix_product_keeps_the_zeros_of_masked_rows_and_no_others():
    def loss(w, x):
        rows = jnp.array([True, True, False])[:, None]
        return jnp.sum(jnp.where(rows, (x @ w) ** 2, 0.0))

    w, x = jnp.array([[2.0], [3.0]]), jnp.array([[1.0, 2.0], [3.0, 4.0], [jnp.nan, jnp.inf]])
    strong = tg.rewrite(loss, rules.strong_zero())
    right = jax.grad(loss)(w, x.at[2].set(0.0))
    for each in (jax.grad(strong), jax.jit(jax.grad(strong)), lambda w, x: tg.grad(strong)(w, x)):
        np.testing.assert_allclose(each(w, x), right, rtol=1e-6)
    batched = jax.vmap(jax.grad(strong), (None, 0))(w, jnp.stack([x, x.at[2].set(1.0)]))
    np.testing.assert_allclose(batched, jnp.stack([right, right]), rtol=1e-6)
    np.testing.assert_allclose(tg.hessian(strong)(w, x), jax.hessian(loss)(w, x.at[2].set(0.0)))
    assert not np.isfinite(jax.grad(strong)(w, x.at[0, 0].set(jnp.nan))).all()


def test_second_derivatives_of_a_matrix_product_are_jaxs_where_no_cotangent_is_zero():
    def loss(x, w):
        return jnp.sum((x @ w) * jnp.array([[1.0, 2.0], [3.0, 4.0]]))

    x, w = jnp.array([[1.0, jnp.inf], [3.0, 4.0]]), jnp.array([[1.0, 2.0], [3.0, 5.0]])
    strong = tg.rewrite(loss, rules.strong_zero())
    for first, second in ((0, 1), (1, 0)):
        of = [jax.jacrev(jax.grad(f, first), second)(x, w) for f in (strong, loss)]
        np.testing.assert_array_equal(*of)


def test_the_table_of_bounded_derivatives_is_jaxs():
    """At zeros, infinities and NaNs, by JAX's own derivative."""
    points = jnp.array([0.0, 1.0, -1.0, jnp.inf, -jnp.inf, jnp.nan])
    x, y = (v.reshape(-1) for v in jnp.meshgrid(points, points))
    functions = {
        "max": jnp.maximum,
        "min": jnp.minimum,
        "clamp": lambda x, y: jax.lax.clamp(-0.5, x, 0.5),
        "select_n": lambda x, y: jax.lax.select(x > 0, x, y),
        "sign": lambda x, y: jnp.sign(x),
    }
    assert set(functions) == operations.BOUNDED

    @jax.jit
    def derivatives(x, y):
        return {name: jax.vjp(f, x, y)[1](jnp.ones_like(x)) for name, f in functions.items()}

    assert all(bool(jnp.isfinite(ct).all()) for ct in jax.tree.leaves(derivatives(x, y)))


@pytest.mark.parametrize("under", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_one_program_is_differentiated_by_one_operand_after_the_other(under):
    """JAX keeps one tree of residuals for a rule in a program, whatever is differentiated."""

    def product(x, w):
        return jnp.sum(jnp.sin(x @ w))

    x, w = jnp.linspace(-1.0, 1.0, 24).reshape(2, 4, 3), jnp.arange(12.0).reshape(2, 3, 2)
    strong = tg.rewrite(product, rules.strong_zero(match.op("dot_general")))
    program = tg.graph(strong, x[0], w[0]).to_callable()
    at = (x, w) if under is jax.vmap else (x[0], w[0])

    def gradients(f):
        return [jax.grad(f, argnums) for argnums in ((0, 1), 1, (0, 1), 0, (0, 1))]

    for found, want in zip(gradients(program), gradients(product), strict=True):
        pairs = zip(
            jax.tree.leaves(under(found)(*at)), jax.tree.leaves(under(want)(*at)), strict=True
        )
        for one, other in pairs:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_selector_says_where_zeros_are_kept():
    x = jnp.array([0.5, 0.0])
    only_log = tg.rewrite(entropy, rules.strong_zero(match.op("log")))
    touched = [o.node for o in only_log.graph(x).walk() if isinstance(o.node, CustomGradient)]
    assert [node.name for node in touched] == ["log"]
    assert repr(rules.strong_zero(match.op("log"))) == "rules.strong_zero(match.op('log'))"
    with pytest.raises(tg.NoMatchError):  # its derivative is 1
        tg.rewrite(lambda x: x + x, rules.strong_zero(match.op("add")))(x)
    with pytest.raises(TypeError, match="selector"):
        rules.strong_zero("log")
    unmasked = tg.rewrite(lambda x: jnp.sum(jnp.log(x)), rules.strong_zero())
    np.testing.assert_array_equal(jax.grad(unmasked)(x), [2.0, np.inf])


@pytest.mark.parametrize("rule", [tg.rules.strong_zero, tg.rules.finite_derivative])
def test_of_a_scope_each_operation_is_mended_also_where_all_of_them_have_to_be(rule):
    def loss(x):
        with jax.named_scope("both"):
            y = jnp.log(jnp.sqrt(x))
        return jnp.sum(jnp.where(x > 0, y, 0.0))

    x = jnp.array([0.0, 2.0])
    assert jnp.isnan(jax.grad(loss)(x)[0])
    for where in (tg.match.scope("both"), tg.match.scope("both") & tg.match.source("loss")):
        np.testing.assert_allclose(jax.grad(tg.rewrite(loss, rule(where)))(x), [0, 0.25])


def test_a_derivative_that_is_not_finite_becomes_zero_where_asked():
    @jax.custom_vjp
    def length(x):
        return jnp.sqrt(jnp.sum(x**2))

    length.defvjp(lambda x: (length(x), x), lambda x, ct: (ct * x / length(x),))

    def fun(x):
        return jnp.arccos(x[0]) + jnp.arctan2(x[1], x[2]) + length(x[1:]) + x[1] ** 0.5

    where = match.op("acos", "atan2", "pow") | match.call("length")
    safe = tg.rewrite(fun, rules.finite_derivative(where))
    points = jnp.array([[1.0, 0.0, 0.0], [0.5, 3.0, 4.0]])
    plain, found = (jax.jit(jax.vmap(jax.grad(f)))(points) for f in (fun, safe))
    np.testing.assert_array_equal(found[0], np.zeros(3))
    np.testing.assert_array_equal(found[1], plain[1])
    scaled = jax.vjp(safe, points[1])[1](jnp.float32(np.inf))[0]
    assert not np.isfinite(scaled).any()  # what came in so is none of its business


def test_a_gradient_goes_straight_through_a_rounding_and_a_stopped_gradient():
    def fun(x):
        return jnp.sum(jnp.clip(jnp.round(x), -1, 1) * 3 + jax.lax.stop_gradient(x) * 5)

    where = match.op("round", "stop_gradient") | match.call("clip")
    through = tg.rewrite(fun, rules.straight_through(where))
    x = jnp.array([0.4, 2.6])
    assert fun(x) == through(x)
    np.testing.assert_array_equal(jax.grad(through)(x), [8.0, 8.0])
    assert jax.jvp(through, (x,), (jnp.ones(2),))[1] == 16
    with pytest.raises(tg.GraphError, match="no float input of the type"):
        tg.rewrite(lambda x: x @ x, rules.straight_through(match.op("dot_general")))(x)


def test_a_gradient_that_could_go_straight_to_two_inputs_is_refused():
    def quantised(scale, x):
        return jnp.round(scale * x)

    rule = rules.straight_through(match.call("quantised"))
    f = tg.rewrite(lambda scale, x: quantised(scale, x).sum(), rule)
    with pytest.raises(tg.GraphError, match="2 float inputs of the type of its one result"):
        jax.grad(f)(jnp.ones(2), jnp.ones(2))
    of_scalar = jax.grad(f, (0, 1))(2.0, jnp.array([1.2, 2.3]))  # the scale has another type
    np.testing.assert_array_equal(of_scalar[1], [1, 1])
    assert of_scalar[0] == 0


def test_what_is_bounded_gets_the_gradient_and_not_its_bounds():
    low, high = jnp.zeros(2), jnp.ones(2)
    programs = [
        (lambda x: 3 * jax.lax.clamp(0.0, x, 1.0), -1.0),
        (lambda x: 3 * jnp.maximum(0.0, x), -1.0),
        (lambda x: jnp.sum(3 * jax.lax.max(low, jax.lax.min(high, x))), jnp.array([-1.0, 2.0])),
        (lambda x: jnp.sum(3 * jax.lax.clamp(x - 2.0, x, x + 2.0)), jnp.array([-1.0, 2.0])),
        (
            lambda x: jax.lax.scan(lambda c, b: (jax.lax.max(b, c), 0), 3 * x, jnp.ones(2))[0],
            -1.0,
        ),
    ]
    for fun, x in programs:
        through = tg.rewrite(fun, rules.straight_through(match.op("clamp", "max", "min")))
        np.testing.assert_array_equal(jax.grad(through)(x), np.full(np.shape(x), 3.0))
    cured = tg.rewrite(programs[0][0], tg.explain(programs[0][0], -1.0).cures(changing=True))
    assert jax.grad(cured)(-1.0) == 3


def test_what_prints_is_mended_and_prints_once(capfd):
    @jax.custom_jvp
    def log(x):
        jax.debug.print("log")
        return jnp.log(x)

    @log.defjvp
    def _(primals, tangents):
        return log(*primals), tangents[0] / primals[0]

    @jax.jit
    def rounded(x):
        jax.debug.print("round")
        return jnp.round(x)

    def fun(x):
        return jnp.where(x > 0, log(x), 0.0) + 2 * rounded(x)

    where = match.call("rounded")
    mended = tg.rewrite(fun, [rules.strong_zero(), rules.straight_through(where)])
    assert jax.grad(mended)(0.0) == 2
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()) == ["log", "round"]


def test_a_rule_of_kind_vjp_keeps_its_forward_mode_and_happens_once():
    @tg.custom_gradient
    def root(x):
        return jnp.sqrt(x), lambda dy: dy * 0.5 / jnp.sqrt(x)

    safe = tg.rewrite(root, rules.finite_derivative(match.call("root")))
    assert jax.grad(safe)(0.0) == 0
    assert tg.jvp(safe, (4.0,), (1.0,)) == tg.jvp(root, (4.0,), (1.0,)) == (2.0, 0.25)

    @tg.custom_gradient
    def counted(x):
        jax.debug.print("here")
        return jnp.sqrt(x), lambda dy: dy * 0.5 / jnp.sqrt(x)

    with pytest.raises(tg.GraphError, match="has effects, which would happen again"):
        tg.rewrite(counted, rules.finite_derivative(match.call("counted")))(1.0)
    assert tg.explain(counted, 0.0).cures(changing=True) == ()


def test_a_rule_that_asks_what_varies_is_told_what_the_program_differentiates():
    safe = tg.rewrite(root, rules.finite_derivative(match.call("root")))
    assert (jax.grad(safe)(4.0, 3.0), jax.grad(safe)(0.0, 3.0)) == (0.75, 0.0)
    with pytest.raises(NotImplementedError, match="the scale has no gradient"):
        jax.grad(safe, argnums=1)(4.0, 3.0)


def test_what_a_rule_closes_over_is_left_out_of_its_repair():
    factor = jnp.array([3.0, 4.0])

    @jax.custom_jvp
    def by_jvp(x):
        return jnp.log(x) * factor

    @by_jvp.defjvp
    def _(primals, tangents):
        return by_jvp(*primals), tangents[0] / primals[0] * factor

    @jax.custom_vjp
    def by_vjp(x):
        return jnp.log(x) * factor

    by_vjp.defvjp(lambda x: (by_vjp(x), x), lambda x, dy: (dy / x * factor,))
    repairs = {
        by_jvp: [rules.strong_zero(), rules.finite_derivative(match.call("by_jvp"))],
        by_vjp: [rules.finite_derivative(match.call("by_vjp"))],
    }
    x = jnp.array([2.0, 0.0])
    for function, its_rules in repairs.items():
        for rule in its_rules:
            mended = tg.rewrite(lambda x, f=function: jnp.where(x > 0, f(x), 0.0).sum(), rule)
            np.testing.assert_array_equal(jax.grad(mended)(x), [1.5, 0.0])

    def rounded(x, scale):
        return jax.jit(lambda x: jnp.round(x) * scale)(x).sum()

    through = tg.rewrite(rounded, rules.straight_through(match.call("<lambda>")))
    np.testing.assert_array_equal(jax.grad(through, (0, 1))(x, factor), [[1, 1], [0, 0]])


def test_zeros_are_kept_along_each_direction():
    def fun(x):
        return jnp.log(x) * jnp.arange(2.0)

    for rule in (rules.strong_zero(), rules.finite_derivative(match.op("log"))):
        strong = tg.rewrite(fun, rule)
        np.testing.assert_array_equal(jax.jacrev(strong)(2.0), [0, 0.5])
        np.testing.assert_array_equal(tg.jvp(strong, (2.0,), (1.0,))[1], [0, 0.5])
        np.testing.assert_array_equal(
            jax.jacrev(strong)(0.0), [0, np.inf if rule.name == "strong_zero" else 0]
        )


def root_in_a_shard_map(x, axes):
    kind, spec = jax.sharding.AxisType.Auto, jax.sharding.PartitionSpec("a")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    root = jax.shard_map(jnp.sqrt, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes)
    return jnp.sum(jnp.where(x > 0, root(x), 0.0))


@pytest.mark.parametrize("axes", [{"a", "b"}, {"a"}])
def test_zeros_are_kept_in_a_shard_map_also_where_an_axis_is_automatic(axes):
    kept = tg.rewrite(lambda x: root_in_a_shard_map(x, axes), rules.strong_zero())
    x = jnp.array([0.0, 1.0, 4.0, 16.0])
    np.testing.assert_allclose(jax.jit(jax.grad(kept))(x), [0.0, 0.5, 0.25, 0.125])


def test_a_function_gets_its_own_derivative_back():
    @jax.custom_jvp
    def product(x, y):
        return x * y

    @product.defjvp
    def _(primals, tangents):
        return product(*primals), tangents[0] * primals[1]

    mended = tg.rewrite(product, rules.own_derivative(match.call("product")))
    assert jax.grad(mended, (0, 1))(2.0, 3.0) == (3.0, 2.0)
    with pytest.raises(tg.GraphError, match="no call of a function with a custom gradient"):
        tg.rewrite(jnp.sin, rules.own_derivative(match.op("sin")))(1.0)
