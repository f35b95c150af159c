"""`check_grads`: what is right passes, what is wrong is named, what is meant is listed."""

from __future__ import annotations

import importlib.util
import pickle

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracegrad as tg
from tests.derivatives import refuses_second
from tracegrad.insight import GradientError, check_grads

X = jnp.array([0.3, -1.2, 2.0])
REVERSE = {"order": 1, "modes": ["rev"]}


def refused(fun, *args, **choices):
    """The report of what is wrong."""
    with pytest.raises(GradientError) as caught:
        check_grads(fun, args, **choices)
    return caught.value.report


def statuses(checks):
    return [check.status for check in checks]


def line_of(function) -> int:
    return function.__code__.co_firstlineno


def rule(forward, backward):
    """A function of two arguments, x**2 * y, with the given rule."""

    @jax.custom_vjp
    def product(x, y):
        return x**2 * y

    product.defvjp(forward, backward)
    return product


def keep(x, y):
    return x**2 * y, (x, y)


def test_a_program_of_many_operations_is_right_at_both_orders_in_both_modes():
    def f(params, x):
        def step(h, t):
            h = jnp.tanh(h * params["w"] + t)
            return h, h**2

        h, squares = jax.lax.scan(step, x, jnp.array([0.1, -0.4]))
        return {"h": jnp.sort(h), "squares": jnp.sum(squares)}, jnp.argmax(h)

    report = check_grads(f, ({"w": X}, X))
    assert report.wrong == ()
    assert {c.mode for c in report.leaves if c.order == 2} == {
        "fwd of fwd",
        "rev of fwd",
        "fwd of rev",
        "rev of rev",
    }
    assert {c.what for c in report.leaves} == {"all leaves", "params.w", "x"}
    assert set(statuses(report.leaves)) == {"right"}


def test_the_numbers_are_derivatives():
    report = check_grads(lambda x: x**3, (2.0,), **REVERSE)
    weighed = check_grads(lambda x: x, (2.0,), **REVERSE)
    ratio = report.leaves[0].expected / weighed.leaves[0].expected
    np.testing.assert_allclose(ratio, 12.0, rtol=1e-9)


def test_a_wrong_rule_is_named_with_its_line_its_input_and_both_numbers():
    product = rule(keep, lambda r, ct: (ct * r[0] * r[1], ct * r[0] ** 2))

    def f(x, y):
        return jnp.sum(jax.jit(jax.vmap(lambda z, y: product(z, y)))(jnp.sin(x), y))

    with pytest.raises(GradientError) as caught:
        check_grads(f, (X, X), order=1)
    (wrong,) = [c for c in caught.value.report.rules if c.status == "wrong"]
    assert wrong.what == "product, input 0"
    assert wrong.origin.line == line_of(f) + 1
    assert wrong.origin.place.startswith("test_check_grads.py:")
    assert wrong.defined == f"test_check_grads.py:{line_of(rule) + 3}"
    np.testing.assert_allclose(wrong.got / wrong.expected, 0.5, rtol=1e-5)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), str(copy.report)) == (str(caught.value), str(caught.value.report))
    assert caught.value.report.wrong[0] is wrong
    assert {c.what for c in caught.value.report.leaves if c.status == "wrong"} >= {"x"}
    assert isinstance(caught.value, AssertionError)
    assert "product, input 0" in str(caught.value)


def test_the_gradient_of_a_numpy_function_is_checked_against_that_function():
    def sine(op, dy):
        return dy * jnp.cos(op.inputs[0]), None

    def f(x):  # np.sin gives float64 where it gets that
        y = tg.numpy_function(lambda x, n: np.sin(x), [x, 3], jax.typeof(x), grad=sine)
        return jnp.sum(tg.numpy_function(np.square, [y], "float32", grad=square))

    def square(op, dy):
        return (2 if is_right else 3) * dy * op.inputs[0]

    is_right = True
    report = check_grads(f, (X,), order=1)
    assert statuses(report.leaves) == ["right"] * 2
    assert not tg.explain(f, X).findings  # nobody knows the derivative that a rule changes
    is_right = False
    with pytest.raises(GradientError, match="x, order 1") as caught:
        check_grads(lambda x: f(x), (X,), **REVERSE)
    expected = [check.expected * 3 / 2 for check in caught.value.report.wrong]
    got = [check.got for check in caught.value.report.wrong]
    np.testing.assert_allclose(got, expected, rtol=1e-3)


def test_a_rule_that_forgets_an_input_is_wrong_and_one_of_zeros_too():
    for forgotten in (None, jnp.zeros(3)):
        product = rule(keep, lambda r, ct, f=forgotten: (2 * ct * r[0] * r[1], f))
        wrong = refused(lambda x, y, p=product: jnp.sum(p(x, y)), X, X, **REVERSE).wrong
        assert [c.what for c in wrong] == ["product, input 1", "y"]
        assert wrong[0].got == 0


@jax.custom_jvp
def a_hundredth_off(x):
    return x * x


a_hundredth_off.defjvp(lambda x, dx: (x[0] * x[0], 2.02 * x[0] * dx[0]))


def test_how_far_numbers_may_be_apart_and_along_what_they_are_taken_is_said_by_the_caller():
    def numbers(**choices):
        fun, x = lambda x: jnp.sum(a_hundredth_off(x)), jnp.ones(2)
        return str(check_grads(fun, (x,), **REVERSE, **choices))

    with pytest.raises(GradientError):
        numbers(rtol=0.005, atol=1e-5)
    assert numbers(rtol=0.02) == numbers(rtol=0.0, atol=10.0) != numbers(rtol=0.02, seed=1)


def test_a_rule_that_refuses_what_is_a_constant_is_checked_by_the_rest():
    def scaled(w, x):
        return jnp.sum(doubled(x, eqxi.nondifferentiable(jnp.ones(3))) * w)

    @eqx.filter_custom_vjp  # whose arguments but for the first may not be differentiated
    def doubled(x, c):
        return 2 * x * c

    doubled.def_fwd(lambda perturbed, x, c: (2 * x * c, None))
    doubled.def_bwd(lambda _, dy, perturbed, x, c: 2 * dy * c)
    report = check_grads(scaled, (jnp.ones(3), jnp.arange(3.0)), **REVERSE)
    assert any(check.what.startswith("fn_wrapped") for check in report.rules)


def test_a_rule_that_has_refused_an_operand_is_checked_by_the_others_as_before():
    fun = jax.jit(lambda x, y: jnp.sum(refuses_second(x, y) ** 2))
    x, y = jnp.arange(3.0), jnp.full(3, 2.0)
    check_grads(lambda x: fun(x, y), (x,), **REVERSE)
    with pytest.raises(GradientError, match="the second operand has no gradient"):
        check_grads(fun, (x, y), **REVERSE)
    assert not check_grads(lambda x: fun(x, y), (x,), **REVERSE).wrong


def test_a_rule_is_checked_by_what_the_program_perturbs_and_of_what_it_uses():
    @jax.custom_vjp
    def root(x, scale):
        return jnp.sqrt(x) * scale, x * x

    def forward(x, scale):
        if scale.perturbed:
            raise NotImplementedError("the scale has no gradient")
        return root(x.value, scale.value), (x.value, scale.value)

    def backward(kept, cts):
        x, scale = kept
        return cts[0] * scale * 0.5 / jnp.sqrt(x), None

    root.defvjp(forward, backward, symbolic_zeros=True)

    def loss(x, y):
        def step(carry, scale):
            new, squares = jax.jit(root)(carry, scale)
            new = jax.lax.cond(squares > 1e6, jnp.negative, lambda new: new, new)
            return new, jax.lax.stop_gradient(squares)

        last, squares = jax.lax.scan(step, x, jnp.array([2.0, 3.0]))
        return root(last, 2.5)[0] * y + jnp.sum(jnp.round(squares))

    report = check_grads(loss, (4.0, 2.5), order=1)
    assert {(c.what, c.status) for c in report.rules} == {("root, input 0", "right")}
    assert statuses(report.leaves) == ["right"] * 3
    with pytest.raises(GradientError, match="root, input 0"):  # its second result is used
        check_grads(lambda x: sum(root(x, 2.0)), (4.0,), **REVERSE)


def test_of_a_solver_what_nobody_differentiates_is_not_judged():
    @jax.custom_jvp
    def solve(a, guess):  # the root, the steps to it, and how far it is off
        def newton(state):
            y, steps = state
            return y - (y * y - a) / (2 * y), steps + 1.0

        y, steps = jax.lax.while_loop(
            lambda state: jnp.abs(state[0] ** 2 - a) > 1e-12, newton, (guess, 0.0 * a)
        )
        return y, steps, y * y * guess

    @solve.defjvp
    def _(primals, tangents):
        y, *statistics = solve(*primals)
        zeros = list(map(jnp.zeros_like, statistics))
        return (y, *statistics), (tangents[0] / (2 * y), *zeros)

    def loss(a):
        y, steps, off = solve(a, jnp.ones_like(a))
        return jnp.where(off < 100, y, jnp.nan) ** 3 + jnp.floor(steps)

    report = check_grads(loss, (2.0,), order=2)
    assert [(c.what, c.status) for c in report.rules] == [("solve, input 0", "right")]
    assert set(statuses(report.leaves)) == {"right"}
    with pytest.raises(GradientError, match="solve, input 0"):
        check_grads(lambda a: sum(solve(a, jnp.ones_like(a))), (2.0,), order=1)


def test_a_parameter_that_a_rule_freezes_is_named_as_a_stop_and_may_be_deliberate():
    frozen = tg.rewrite(lambda w: jnp.sum(jnp.sin(w)), tg.rules.stop_gradient(tg.match.param("w")))
    with pytest.raises(GradientError, match="Stopped values"):
        check_grads(frozen, (X,), order=1)
    assert not check_grads(frozen, (X,), order=1, deliberate="stop_gradient").wrong


@pytest.mark.parametrize("declared", ["product", "stop_gradient"])
def test_a_stop_in_the_function_of_a_rule_is_named_and_may_be_deliberate(declared):
    @jax.custom_vjp
    def product(x, y):
        return jnp.sin(x) * jax.lax.stop_gradient(y)

    product.defvjp(
        lambda x, y: (product(x, y), (x, y)),
        lambda kept, ct: (ct * jnp.cos(kept[0]) * kept[1], jnp.zeros_like(kept[1])),
    )

    def loss(x, y):
        return jnp.sum(product(x, y) ** 2)

    with pytest.raises(GradientError, match=r"product, input 1(.|\n)*Stopped .*: stop_gradient"):
        check_grads(loss, (X, X + 4), order=1)
    report = check_grads(loss, (X, X + 4), order=1, deliberate=declared)
    assert statuses(report.rules) == ["right", "deliberate"]
    assert statuses(report.leaves) == ["right"] * 3


def test_a_wrong_rule_in_a_loop_is_found_at_the_values_of_its_steps():
    """Right at the first step, where y is 1."""
    product = rule(keep, lambda r, ct: (2 * ct * r[0], ct * r[0] ** 2))

    def f(x):
        def step(h, y):
            return jnp.tanh(product(h, y)), None

        return jax.lax.scan(step, x, jnp.array([1.0, 3.0])[:, None] * jnp.ones(3))[0]

    rules = refused(f, X, **REVERSE).rules
    first, last = (c for c in rules if c.what == "product, input 0")
    assert (first.status, last.status) == ("right", "wrong")
    np.testing.assert_allclose(last.expected / last.got, 3.0, rtol=1e-5)


@pytest.mark.parametrize("declared", ["rounded", ["rounded"], lambda name: name[0] == "r"])
def test_deliberate_rules_are_listed_and_the_rest_is_checked_without_them(declared):
    @jax.custom_vjp
    def rounded(x):
        return jnp.round(x)

    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))

    def f(x):
        return jnp.sum(rounded(3 * x) * x)

    report = check_grads(f, (X,), **REVERSE, deliberate=declared)
    (rule,) = report.deliberate
    assert (rule.what, rule.expected) == ("rounded, input 0", 0)
    assert rule.got != 0
    assert statuses(report.leaves) == ["right"]
    with pytest.raises(GradientError):
        check_grads(f, (X,), **REVERSE)


def test_a_deliberate_rule_that_another_one_calls_is_left_out_too():
    @jax.custom_jvp
    def rounded(x):
        return jnp.round(x)

    rounded.defjvp(lambda x, dx: (jnp.round(x[0]), dx[0]))
    twice = jax.custom_vjp(lambda x: 2 * rounded(3 * x))
    twice.defvjp(lambda x: (2 * rounded(3 * x), None), lambda _, ct: (7 * ct,))

    def f(x):
        return jnp.sum(twice(x) * rounded(x) * x)

    for names in (["<lambda>", "rounded"], lambda name: True):
        report = check_grads(f, (X,), 1, ["rev"], deliberate=names)
        assert statuses(report.leaves) == ["right"]


def test_stops_are_named_with_their_lines_and_declared_ones_are_left_out():
    def loss(x):
        def step(h, _):
            return h + jax.lax.stop_gradient(jnp.tanh(h)) * x, None

        h = jax.lax.scan(step, x, None, length=2)[0]
        return jnp.sum((jnp.sin(x) - h) ** 2 * jax.nn.softmax(x) * ours(x))

    ours, line = jnp.sin, line_of(loss) + 2
    with pytest.raises(GradientError, match=rf"stop_gradient at {__name__[-16:]}.py:{line} ") as e:
        check_grads(loss, (X,), order=1)
    assert str(e.value).count("stop_gradient at") == 1  # that of softmax is JAX's
    report = check_grads(loss, (X,), deliberate="stop_gradient")
    assert set(statuses(report.leaves)) == {"right"}
    wrong = rule(keep, lambda r, ct: (ct * r[0] * r[1], ct * r[0] ** 2))
    ours = lambda x: wrong(x, 2 * x)  # noqa: E731
    with pytest.raises(GradientError, match="product, input 0"):
        check_grads(lambda x: loss(x), (X,), order=1, deliberate="stop_gradient")


def test_a_name_in_deliberate_that_no_rule_has_is_refused():
    with pytest.raises(ValueError, match=r"no rule called clips\. Did you mean product"):
        check_grads(clip, (X, X), order=1, deliberate=["product", "clips"])


def test_the_rest_of_a_function_of_samples_with_implicit_derivatives_is_judged():
    key = jax.random.key(0)

    def f(a, scale, function=jnp.sin):
        def step(total, key):
            return total + jax.random.gamma(key, a), None

        drawn = jax.random.beta(key, a, 2.0, (3,)) * jax.random.t(key, a, (3,))
        total = jax.lax.scan(step, 0 * a, jax.random.split(key, 3))[0]
        return jnp.sum(function(scale) * drawn + jax.random.dirichlet(key, a * scale**2)) * total

    report = check_grads(f, (1.5, X), order=1)
    assert set(statuses(report.leaves)) == {"right"}
    wrong = rule(keep, lambda r, ct: (ct * r[0] * r[1], ct * r[0] ** 2))
    with pytest.raises(GradientError, match="product, input 0"):
        check_grads(lambda a, s: f(a, s, lambda s: wrong(s, 2 * s)), (1.5, X), order=1)


@pytest.mark.both_jax
def test_a_rule_around_a_sample_with_an_implicit_derivative_is_not_judged():
    def draws(a, scale):
        return jax.random.gamma(jax.random.key(0), a) * scale**2

    right, wrong = jax.custom_vjp(draws), jax.custom_vjp(draws)
    right.defvjp(lambda *args: jax.vjp(draws, *args), lambda pull, ct: pull(ct))
    wrong.defvjp(lambda *args: (draws(*args), args), lambda args, ct: (None, ct * args[1]))
    report = check_grads(lambda a: jnp.sum(jnp.sin(right(a, 3.0))), (jnp.array([0.7, 2.3]),))
    assert statuses(report.rules) == ["not judged"]
    assert set(statuses(report.leaves)) == {"right"}
    assert "right, but 1 not judged" in str(report)
    assert "implicit derivative of samples of a gamma distribution [not judged]" in str(report)
    with pytest.raises(GradientError, match="draws, input 1"):  # only the scale is differentiated
        check_grads(lambda scale: wrong(2.3, scale), (3.0,), order=1)


def test_a_rule_that_repeats_the_mistake_of_a_rule_in_its_function_is_wrong():
    @jax.custom_vjp
    def doubled(x):
        return inner(x)

    inner = jax.custom_vjp(lambda x: 2 * x)
    inner.defvjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))
    doubled.defvjp(lambda x: (doubled(x), None), lambda _, ct: (3 * ct,))
    assert refused(doubled, X, **REVERSE).wrong[0].what == "doubled, input 0"


def test_a_gradient_of_zeros_for_a_host_function_is_wrong():
    def sine(x):
        return tg.numpy_function(np.sin, [x], "float32", grad=lambda op, dy: 0 * dy)

    with pytest.raises(
        GradientError, match=rf"x, .*\n.*: numpy_function at .*:{line_of(sine) + 1} "
    ):
        check_grads(sine, (X,), **REVERSE)


@pytest.mark.parametrize("name", ["rules", "pass_through", "custom_gradient"])
def test_a_wrong_rule_of_a_file_that_is_called_as_one_of_this_package_is_wrong(tmp_path, name):
    file = tmp_path / f"{name}.py"
    file.write_text(
        "import jax\n"
        "import tracegrad as tg\n"
        "@jax.custom_vjp\n"
        "def square(x):\n"
        "    return x**2\n"
        "square.defvjp(lambda x: (x**2, x), lambda x, ct: (ct * x,))\n"
        "@tg.custom_gradient\n"
        "def cube(x):\n"
        "    return x**3, lambda ct: ct * x\n"
        "def through(x):\n"
        "    return square(x) + cube(x)\n"
    )
    spec = importlib.util.spec_from_file_location(f"a_users_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    report = refused(module.through, X, **REVERSE)
    wrong = [c.what for c in report.rules if c.status == "wrong"]
    assert wrong == ["square, input 0", "cube, input 0"]


def waves(x):
    return jnp.sum(jnp.tanh(x) * jnp.sin(x) + jnp.round(x) * x)


ON = {name: tg.match.op(name) for name in ("tanh", "sin", "round")}


@pytest.mark.parametrize(
    ("changed", "name", "modes"),
    [
        (lambda x: jnp.sum(tg.grad_pass_through(jnp.round)(x) * x), "round", ["rev"]),
        (tg.rules.clip_gradient(ON["tanh"], max_norm=0.1), "clip_gradient", ["rev"]),
        (tg.rules.override_gradient(ON["sin"], lambda op, dy: 2 * dy), "sin", ["rev"]),
        (tg.rules.scale_gradient(ON["tanh"], 2.0), "scaled", ["fwd", "rev"]),
        (tg.rules.scale_gradient(ON["sin"], 3.0, inputs=0), "scaled", ["fwd", "rev"]),
        (tg.rules.straight_through(ON["round"]), "straight_through", ["fwd", "rev"]),
    ],
    ids=["pass through", "clip", "override", "scale", "scale an input", "straight through"],
)
def test_what_this_package_changes_on_demand_counts_as_deliberate(changed, name, modes):
    function = tg.rewrite(waves, changed) if isinstance(changed, tg.rules.MatchRule) else changed
    report = check_grads(function, (X,), order=1, modes=modes)
    assert [c.what for c in report.deliberate] == [f"{name}, input 0"]
    assert statuses(report.leaves) == ["right"] * len(modes)


def test_a_deliberate_rule_that_is_not_judged_at_a_jump_is_left_out_too():
    function, jump = tg.rewrite(waves, tg.rules.straight_through(ON["round"])), jnp.array([0.5])
    for seed in range(4):
        report = check_grads(function, (jnp.append(jump, X),), order=1, seed=seed)
        assert "wrong" not in statuses(report.leaves)
    assert statuses(check_grads(function, (jump,), order=1).rules) == ["not smooth"]


def test_a_users_rule_of_tangents_for_a_function_of_jax_is_checked():
    tangent = jax.custom_jvp(jnp.tanh)
    tangent.defjvp(lambda x, dx: (tangent(*x), dx[0]))
    by_defjvps = jax.custom_jvp(lambda x: jnp.sin(x))
    by_defjvps.defjvps(lambda dx, sine, x: dx)
    cube = jax.custom_jvp(lambda x: x**3)
    cube.defjvp(lambda x, dx: (cube(*x), x[0] ** 2 * dx[0]))
    for function, name in ((tangent, "tanh"), (by_defjvps, "<lambda>"), (cube, "<lambda>")):
        report = refused(lambda x, f=function: jnp.sum(f(x)), X, **REVERSE)
        assert report.wrong[0].what == f"{name}, input 0"
    check_grads(lambda x: jnp.sum(jax.nn.relu(x) + jax.nn.silu(x)), (X,), order=1)


def doubled_to_ten(x):
    return jax.lax.while_loop(lambda y: y < 10, lambda y: y * 2, x)


def a_long_loop(x):
    def body(state):
        i, y = state
        y = jax.lax.scan(lambda y, _: (jnp.sin(y) + x, None), y, length=2)[0]
        return i + 1, jax.lax.cond(i > 2000, jnp.tanh, lambda y: y, y)

    return jax.lax.while_loop(lambda state: state[0] < 3000, body, (0, x))[1]


def beside_a_string(z, n, name):
    assert name == "a string"
    return jnp.real(z * z * n), jnp.exp(z)


clip = rule(keep, lambda r, ct: (jnp.clip(ct, -0.1, 0.1), jnp.clip(ct, -0.1, 0.1)))
fails = jax.custom_vjp(lambda x: x)
fails.defvjp(lambda x: (x, None), lambda _, dy: (dy[:1],))
KINKS, TWO = jnp.array([0.0, 0.7, -0.4, 0.2, 1.0, 0.6]), jnp.array([0.3, 0.7])
NOT_JUDGED = [TWO], "none", "derivatives of <lambda>: not judged"

# The verdict on the leaf, and what the report says.
VERDICTS = {
    "beside a kink": (lambda x: jnp.abs(x) * x + jax.nn.relu(x), [KINKS], "right", "x"),
    "at a kink": (jax.nn.relu, [jnp.zeros(1)], "not smooth", "a kink"),
    "NaN at a kink": (lambda x: jnp.sqrt(jnp.sum(x**2)), [jnp.zeros(2)], "wrong", "got nan"),
    "no value": (jnp.log, [jnp.array([-1.0])], "not smooth", "log"),  # where 1 / x is -1
    "complex numbers": (beside_a_string, [jnp.array([1 + 2j]), 3, "a string"], "right", "right"),
    "no reverse mode": (doubled_to_ten, [3.0], "none", "Reverse-mode differentiation does not"),
    "a callback": (lambda x: jax.pure_callback(np.sin, jax.typeof(x), x), *NOT_JUDGED),
    "no rule": (lambda x: jax.scipy.special.betainc(x, x, 0.3), *NOT_JUDGED),
    "no rule of linalg": (lambda x: jax.lax.linalg.schur(jnp.outer(x, x))[0], *NOT_JUDGED),
    "a rule that clips": (lambda x: jnp.sum(clip(x, x)), [X], "wrong", "product, input 0"),
    "a rule that fails": (fails, [X], "wrong", "shape"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_in_reverse_mode(name):
    fun, args, verdict, words = VERDICTS[name]
    if verdict == "wrong":
        report = refused(fun, *args, **REVERSE)
    else:
        report = check_grads(fun, tuple(args), **REVERSE)
    assert statuses(report.leaves) == [verdict]
    assert words in str(report)


def test_a_rule_is_right_beside_results_that_are_huge_or_infinite():
    @jax.custom_jvp
    def both(x, large):
        return jnp.sin(x), large

    @both.defjvp
    def _(primals, tangents):
        return both(*primals), (jnp.cos(primals[0]) * tangents[0], tangents[1])

    def f(x):
        y, _ = both(x, jnp.array([1e14, jnp.inf]))
        return jnp.sum(jnp.floor(x) * y)

    report = check_grads(f, (X,), order=1)
    assert statuses(c for c in report.rules if c.what == "both, input 0") == ["right"]


def test_forward_mode_goes_through_loops_that_reverse_mode_does_not():
    for fun, x, order in ((doubled_to_ten, 3.0, 1), (a_long_loop, TWO, 2)):
        report = check_grads(fun, (x,), order=order, modes=["fwd"])
        assert statuses(report.leaves) == ["right"] * order


def test_a_loop_that_does_not_end_beside_the_arguments_gives_no_verdict():
    @jax.custom_vjp
    def power(x, n):
        def body(state):
            return state[0] - 0.25, state[1] * x

        return jax.lax.while_loop(lambda state: state[0] != 0, body, (n, x))[1]

    def backward(kept, ct):
        return 5 * ct * kept[0] ** 4, 0 * kept[1]

    power.defvjp(lambda x, n: (power(x, n), (x, n)), backward)
    report = check_grads(power, (1.5, 1.0), **REVERSE)
    assert {c.what: c.status for c in (*report.rules, *report.leaves)} == {
        "power, input 0": "right",
        "power, input 1": "not smooth",
        "x": "right",
        "n": "not smooth",
    }

    def nested(x):
        def body(s):
            inner = jax.lax.while_loop(lambda y: y != 0, lambda y: y - 0.25, s[0])
            return s[0] - 0.25, s[1] * 0.5 + inner

        return jax.lax.while_loop(lambda s: s[0] != 0, body, (x, x))[1]

    assert statuses(check_grads(nested, (1.0,), 1, ["fwd"]).leaves) == ["not smooth"]
    # In double precision this iteration never ends, not even at the argument.
    cosine = lambda s: (jnp.cos(0.8 * s[0] * s[2]), s[0], s[2])  # noqa: E731
    ends = lambda a: jax.lax.while_loop(lambda s: s[0] != s[1], cosine, (a, 0 * a, a))[0]  # noqa: E731
    report = check_grads(ends, (1.0,), order=2, modes=["fwd"])
    assert statuses(report.leaves) == ["not smooth"] * 2


def test_loops_that_end_one_by_one_under_vmap_are_judged_in_branches_and_scans():
    def doubled(x, row):
        def body(y):
            return y * 2 + x * row

        return jax.lax.while_loop(lambda y: jnp.sum(y) < 10, body, x * row)

    def f(x):
        def step(carry, _):
            branch = jax.checkpoint(
                jax.vmap(lambda x: jnp.tanh(doubled(x, jnp.ones(2)).sum() / 20))
            )
            return jax.lax.cond(carry[0] > 0, branch, jnp.sin, carry), None

        return jax.lax.scan(step, x, None, length=2)[0]

    x = jnp.array([0.3, 2.0])
    slope = jax.jvp(f, (x,), (jnp.ones(2),))[1]
    np.testing.assert_allclose(slope, (f(x + 1e-2) - f(x - 1e-2)) / 2e-2, rtol=1e-2)
    report = check_grads(f, (x,), order=1)
    assert statuses(report.leaves) == ["right", "none"]


def test_a_rule_whose_backward_calls_its_own_function_has_no_verdict_in_forward_mode():
    @jax.custom_vjp
    def solve(a, b):
        return jnp.linalg.solve(a, b)

    def backward(kept, ct):
        a, x = kept
        y = solve(a.T, ct)
        return -jnp.outer(y, x), y

    solve.defvjp(lambda a, b: ((x := solve(a, b)), (a, x)), backward)
    a = jnp.array([[2.0, 1.0], [0.5, 3.0]])
    report = check_grads(lambda a: solve(a, jnp.ones(2)), (a,), order=1)
    assert [c.status for c in (*report.rules, *report.leaves)] == ["right", "none", "right"]


def test_a_rule_without_a_verdict_in_forward_mode_is_named_by_the_line_of_its_call():
    a = jnp.diag(jnp.array([1.0, 2.0]))

    @tg.custom_gradient
    def solved(b):
        return b / jnp.diag(a), lambda ct: jax.scipy.sparse.linalg.cg(lambda v: a @ v, ct)[0]

    (leaf,) = check_grads(lambda b: jnp.sum(solved(b)), (jnp.ones(2),), 1, ["fwd"]).leaves
    assert leaf.status == "none"
    assert "the custom gradient solved at test_check_grads.py:" in leaf.note


def test_a_function_may_read_and_assign_variables():
    scale, seen = tg.Variable(3.0), tg.Variable(0)

    def f(x):
        seen.assign_add(1)
        return jnp.sum(scale * x**2)

    report = check_grads(f, (X,), **REVERSE)
    (check,) = report.leaves
    assert check.status == "right"
    unscaled = check_grads(lambda x: jnp.sum(x**2), (X,), **REVERSE).leaves[0]
    assert check.got == pytest.approx(3 * unscaled.got)


def test_precision_is_that_of_the_caller_again_afterwards():
    check_grads(jnp.sin, (1.0,), **REVERSE)
    assert jnp.ones(1).dtype == jnp.float32


def forgets(x):
    jnp.sin(x)


@pytest.mark.parametrize(
    ("fun", "args", "options", "error", "words"),
    [
        (jnp.sin, (1.0,), {"modes": ("reverse",)}, ValueError, "modes are of"),
        (jnp.sin, (1.0,), {"order": 0}, ValueError, "order is 1 or more"),
        (jnp.sin, (1,), {}, ValueError, "a floating leaf"),
        (jnp.sin, 1.0, {}, TypeError, "args is a tuple"),
        (3, (1.0,), {}, TypeError, "expected a function"),
        # Nothing is not right.
        (forgets, (1.0,), {}, ValueError, "forgets returns none"),
        (lambda x: x > 0, (1.0,), {}, ValueError, "returns none"),
    ],
)
def test_what_cannot_be_checked_is_refused(fun, args, options, error, words):
    with pytest.raises(error, match=words):
        check_grads(fun, args, **options)


def test_on_an_explicit_mesh():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=explicit)

    def split(array, *spec):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.device_put(array, sharding)

    x, w = split(jnp.ones((4, 2)), "x", None), split(jnp.ones((2, 6)), None, "y")
    with jax.set_mesh(mesh):
        report = check_grads(lambda x, w: jnp.sin(x @ w), (x, w))
    assert not report.wrong


def test_a_function_of_numpy_is_not_given_complex_numbers(capfd):
    def f(x):
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        gradient = lambda op, dy: dy * jnp.cos(op.inputs[0])  # noqa: E731
        return jnp.sum(tg.numpy_function(np.sin, [x], kind, grad=gradient, stateful=False))

    report = check_grads(f, (X,), **REVERSE)
    assert statuses(report.leaves) == ["right"]
    assert "pure_callback failed" not in capfd.readouterr().err


def test_a_rule_that_is_meant_and_raises_is_wrong_as_the_gradient_raises():
    def f(z, b):
        signs = tg.grad_pass_through(lambda z, b: b * jnp.sign(z))(z, b=b)
        return jnp.sum(signs**2 * z)

    with pytest.raises(ValueError, match="depends on keyword argument 'b'"):
        jax.grad(f, argnums=(0, 1))(X, X)
    with pytest.raises(GradientError, match="depends on keyword argument 'b'"):
        check_grads(f, (X, X), **REVERSE)
    # Without a gradient for b, the rule is what it is meant to be.
    report = check_grads(lambda z: f(z, X), (X,), **REVERSE)
    assert statuses(report.deliberate) == ["deliberate"]


def test_the_first_line_counts_derivatives_that_do_not_exist():
    def f(x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]

    report = check_grads(f, (X[0],), order=1)
    assert sorted(statuses(report.leaves)) == ["none", "right"]
    assert str(report).startswith("derivatives of f: right, but 1 not judged\n")
