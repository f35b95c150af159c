"""What `explain` says about gradients beyond the bugs of the gallery: numbers, forms, errors."""

from __future__ import annotations

import functools
import linecache
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import equinox as eqx
import healthy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import tracegrad as tg
from tests.derivatives import root
from tracegrad.insight import explain

X = jnp.array([0.3, -1.2, 2.0])
NAN = jnp.array([1.0, jnp.nan, 1.0])


def line_of(fun, offset):
    return fun.__code__.co_firstlineno + offset


@pytest.mark.parametrize("name", healthy.PROGRAMS)
def test_a_healthy_program_has_no_problem(name):
    fun, arguments = healthy.PROGRAMS[name]()
    explanation = explain(fun, *arguments)
    assert explanation.problems == ()
    assert bool(explanation.notes) == (name == "straight_through")  # deliberate, and told
    assert all(source.connected for source in explanation.sources)


# ------------------------------------------------------------------------------------ numbers


def program_of_everything(params, x):
    def step(carry, t):
        carry = jnp.tanh(carry @ params["w"] + t)
        return carry, jnp.sum(carry)

    carry, sums = jax.lax.scan(step, x[0], x)
    h = jax.checkpoint(lambda h: jnp.sin(h @ params["w"]))(jax.nn.relu(carry))
    h = jax.lax.cond(x[0, 0] > 0, lambda h: h * 2.0, lambda h: jnp.exp(h), h)
    h = jnp.concatenate([h, jax.jit(lambda b: jnp.where(b > 0, b, 0.0))(params["b"])])
    return jnp.sum(h) + jnp.sum(sums)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1.0, 1e22, 1e38])
@pytest.mark.parametrize("compiled", [False, True])
def test_norms_of_which_the_squares_are_out_of_range_are_told(size, compiled):
    def f(x):
        return jnp.sum(size * x[:4])

    elements = (1 << 20) + 1 if compiled else 9  # NumPy looks at those that are not many
    explanation = explain(f, jnp.zeros(elements))
    assert explanation["x"].norm == pytest.approx(2 * size, rel=1e-6)
    assert explanation["x"].zeros == pytest.approx(1 - 4 / elements)
    assert not [finding for finding in explanation.findings if "zero" in finding.cause]


def test_norms_and_zeros_are_those_of_jax():
    params = {"w": jnp.asarray(healthy.W), "b": jnp.array([1.0, -2.0, -3.0, 0.5])}
    explanation = explain(program_of_everything, params, healthy.X)
    want = jax.grad(program_of_everything)(params, healthy.X)
    for path, gradient in want.items():
        report = explanation[f"params.{path}"]
        np.testing.assert_allclose(report.norm, jnp.linalg.norm(gradient), rtol=1e-5)
        assert report.zeros == jnp.mean(gradient == 0)
        assert report.is_finite
        assert report.size == gradient.size


def explained(caplog, loss, *args):
    """And how many programs were compiled for it."""
    caplog.clear()
    with jax.log_compiles():
        explanation = explain(loss, *args)
    return explanation, caplog.text.count("Finished XLA compilation")


def layers_that_are_alike(layers, x):
    for w in layers:
        h = jax.nn.relu(jax.jit(jnp.dot)(x, w["in"]) + w["bias"])
        h = (h - jnp.mean(h, -1, keepdims=True)) * jax.lax.rsqrt(jnp.var(h, -1, keepdims=True) + 1)
        x = x + jnp.tanh(h) @ w["out"] * w["scale"]
    return jnp.mean(jax.nn.softplus(x))


def test_layers_that_are_alike_share_their_programs_and_the_next_call_has_them(caplog):
    first, second = jax.random.normal(jax.random.key(0), (2, 8, 8))
    one = {"in": first, "out": second, "bias": jnp.ones(8), "scale": jnp.float32(0.1)}
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)

    def compiled(count):
        gradients = jax.tree.leaves(jax.grad(layers_that_are_alike)([one] * count, x))
        found, programs = explained(caplog, layers_that_are_alike, [one] * count, x)
        assert found.problems == ()
        norms = sorted(source.norm for source in found.sources)
        np.testing.assert_allclose(norms, sorted(map(jnp.linalg.norm, gradients)), rtol=1e-5)
        return programs

    tg.clear_caches()
    assert compiled(12) <= compiled(6) + 8  # which have no more than the ends for themselves
    assert compiled(12) == 0


def layers_that_draw_random_numbers(layers, x, count):  # nothing uses the last count
    for w in layers:
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), count), x.shape)
        count = count + 1
        x = x + noise * jnp.tanh(x @ w) * jnp.cos(x) / jnp.cosh(x)
    return jnp.mean(x)


def layers_few_of_which_are_alike(layers, x):
    for w in layers:
        for _ in range(2):
            x = x + jnp.tanh(x @ w.T @ w) * jnp.cos(x) / jnp.cosh(x) + jnp.sin(x)
        x = jnp.pad(x, ((0, 0), (0, 1)))
    return jnp.mean(x)


ALIKE = [0.1 * jnp.eye(8)] * 6, jnp.ones((4, 8)), jnp.uint32(3)
OF_ALL_SIZES = [0.1 * jnp.eye(n) for n in range(4, 7)], jnp.ones((3, 4))


# Four: to go forward, to come back, to come back to the weights alone, and what follows the layers.
@pytest.mark.parametrize(
    ("loss", "args", "programs"),
    [(layers_that_draw_random_numbers, ALIKE, 4), (layers_few_of_which_are_alike, OF_ALL_SIZES, 1)],
)
def test_only_layers_that_are_alike_become_programs_of_their_own(caplog, loss, args, programs):
    tg.clear_caches()
    found, count = explained(caplog, loss, *args)
    assert (found.problems, count) == ((), programs)


def test_layers_that_are_cured_share_their_programs_and_the_next_problem_is_named(caplog):
    def loss(ws, x):
        for w in ws:
            h = x @ w
            x = x + 0.1 * jnp.where(h > 0, jnp.sqrt(h), 0.0) * jnp.tanh(h)
        return jnp.mean(x) + jnp.sqrt(jnp.sum(0 * x))  # the next one

    def compiled(count):
        tg.clear_caches()
        ws = list(jax.random.normal(jax.random.key(0), (count, 8, 8)) / 3)
        x, cured = jnp.linspace(-1, 1, 32).reshape(4, 8), tg.rewrite(loss, tg.rules.strong_zero())
        found, programs = explained(caplog, cured, ws, x)
        (finding,) = found.problems
        assert (finding.cause, finding.operation) == ("Inf in the reverse pass", "sqrt")
        assert finding.origin.line == line_of(loss, 4)
        return programs

    assert compiled(6) <= compiled(3) + 2


def test_numbers_that_single_precision_cannot_hold_are_told():
    count = 4097
    wide = explain(lambda x: jnp.sum(x * jnp.zeros(())), jnp.ones((count, count)))
    assert (wide["x"].gradient, wide["x"].zeros) == ("0", 1.0)
    one = explain(lambda x: jnp.sum(x[0]), jnp.ones((count, count)))
    assert one["x"].zeros < 1
    assert one["x"].norm == pytest.approx(count**0.5)
    large = explain(lambda x: jnp.sum(x * 3e38), jnp.zeros(100))
    assert large["x"].norm == pytest.approx(3e39, rel=1e-6)
    assert large.problems == ()
    with jax.enable_x64(True):
        double = explain(lambda x: jnp.sum(x * 3e200), jnp.ones(2))
        small = explain(lambda x: jnp.sum(x * 1e-200), jnp.ones(4))
    assert (double["x"].norm, double["x"].infs) == (pytest.approx(3e200 * 2**0.5), 0)
    assert double.problems == ()
    assert small["x"].norm == pytest.approx(2e-200)


@pytest.mark.parametrize("by_jax", [False, True], ids=["", "where JAX checks too"])
def test_nans_and_infs_are_counted(by_jax):
    with jax.debug_nans(by_jax), jax.debug_infs(by_jax):
        explanation = explain(lambda x: jnp.sum(jnp.sqrt(x)), jnp.array([0.0, 0.0, 1.0]))
    (report,) = explanation.sources
    assert (report.nans, report.infs, report.gradient) == (0, 2, "Inf (2 of 3)")
    assert explanation.findings[0].operands == (0.0,)


def test_a_dead_rectifier_that_a_weight_has_a_way_past_is_noted():
    def loss(w, x):
        h = jax.nn.relu(x @ w - 100.0)
        return jnp.mean((h @ w.T - x) ** 2) + jnp.sum(w**2)

    explanation = explain(loss, jnp.ones((3, 2)), jnp.ones((4, 3)))
    (note,) = explanation.findings
    assert (note.cause, note.problem, note.sources) == ("dead units", False, ("w",))
    assert note.origin.line == loss.__code__.co_firstlineno + 1
    assert not explain(lambda w, x: loss(w, x + 100), jnp.ones((3, 2)), jnp.ones((4, 3))).findings


def test_an_auxiliary_result_is_left_out():
    explanation = explain(lambda x: (jnp.sum(x), x > 0), X, has_aux=True)
    assert explanation.value == "1.1"
    assert not explanation.problems


def test_what_is_zero_by_structure_is_no_nan():
    """As arrays of zeros, what comes back through `floor` would be NaN at the root."""
    explanation = explain(lambda x: jnp.floor(jnp.sqrt(x)) + x, jnp.float32(0.0))
    assert explanation.findings == ()
    assert explanation["x"].norm == 1


def test_layers_that_are_multiplied_by_zeros_are_one_finding_and_so_is_their_batch():
    def net(layers, x):
        for layer in layers:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.sum((x - 1.0) ** 2)

    layers = [{"w": 0.5 * jnp.ones((3, 3)), "b": jnp.zeros(3)} for _ in range(6)]
    batch, note = explain(net, layers, jnp.zeros((2, 3)), wrt=0).findings
    assert (batch.problem, batch.sources) == (True, ("layers.0.w",))
    assert "multiplied by zeros" in batch.what
    assert (note.problem, note.sources) == (False, tuple(f"layers.{i}.w" for i in range(1, 6)))
    assert note.what.endswith("; the same in 4 more operations there, with other factors")


def test_a_gradient_that_dies_in_a_branch_that_runs_at_some_steps_is_followed():
    def loss(x, flags):
        def step(carry, flag):
            def inner(c):
                return jax.lax.cond(flag > 1.5, lambda c: c * 0.0, lambda c: c, c)

            return jax.lax.cond(flag > 0.5, inner, lambda c: c, carry), None

        return jnp.sum(jax.lax.scan(step, x, flags)[0])

    (finding,) = explain(loss, X, jnp.array([0.0, 1.0, 2.0])).findings
    assert (finding.cause, finding.operation) == ("multiplied by zero", "mul")
    assert finding.origin.line == line_of(loss, 3)


def test_a_branch_of_a_branch_is_gone_through_as_often_as_the_outer_one():
    """Each further level adds as much: it would double if a branch were traced twice."""

    def times_traced(depth):
        times = 0

        @jax.custom_vjp
        def square(x):
            return x * x

        def backward(x, ct):
            nonlocal times
            times += 1
            return (2 * x * ct,)

        square.defvjp(lambda x: (x * x, x), backward)

        def nested(x, depth):
            if depth == 0:
                return square(x)
            return jax.lax.cond(x > 0, lambda x: nested(x, depth - 1), lambda x: x, x)

        assert explain(lambda x: nested(x, depth), jnp.float32(1.0))["x"].norm == 2.0
        return times

    two, three, four = map(times_traced, (2, 3, 4))
    assert four - three == three - two


def test_a_rule_that_asks_what_varies_is_measured_as_the_program_differentiates_it():
    assert explain(lambda x: root(x, 2.0), 4.0).findings == ()
    (finding,) = explain(lambda x: root(x, 2.0), 0.0).problems
    assert finding.cause == "Inf in the reverse pass"
    assert "the derivative of root at 0, 2 is not finite" in finding.what


def test_what_a_function_uses_is_looked_at_anew():
    """A NumPy array, a Python number, a Variable, and another function's rule."""
    v, scale, weights = tg.Variable(1.0), [1.0], np.arange(1.0, 4.0, dtype=np.float32)

    def f(x):
        return jnp.sum(jnp.sin(x) * weights * v * scale[0])

    before = explain(f, X)["x"].norm
    weights *= 3.0
    assert explain(f, X)["x"].norm == pytest.approx(3 * before, rel=1e-5)
    scale[0] = 0.0
    assert explain(f, X)["x"].zeros == 1
    v.assign(float("nan"))
    assert explain(f, X).findings[0].cause == "NaN in an input"

    def loss_with(factor):
        square = jax.custom_vjp(lambda x: x**2)
        square.defvjp(lambda x: (x**2, x), lambda x, ct: (factor * ct * x,))
        return lambda x: jnp.sum(square(x))

    two, three = (explain(loss_with(factor), X)["x"].norm for factor in (2.0, 3.0))
    assert three == pytest.approx(1.5 * two)


WEIGHTS = jnp.array([1.0, 2.0, 3.0])


def uses_a_global(w, x):
    return jnp.sum(jax.jit(lambda x: x * WEIGHTS)(x))


def masks_a_nan(a, b):
    return jnp.sum(jnp.where(jnp.isnan(a), 0.0, a)) + jnp.sqrt(b)


def has_no_derivative(x):
    loop = jax.lax.while_loop(lambda c: c < 3.0, lambda c: c * 2, x)
    return jax.lax.scan(lambda c, _: (c + loop, None), 0.0, None, length=2)[0]


def product(a, b):
    return jnp.sum(a * b)


FINDINGS = {
    "a NaN in an argument that is no source": (
        lambda x, batch: jnp.sum(x * batch["scale"]),
        (X, {"scale": NAN}),
        ["NaN in an input of x: the argument batch.scale has 1 NaN already"],
    ),
    "a NaN in one source": (product, (X, NAN), ["NaN in an input of b: the argument b has 1 NaN"]),
    "a NaN in two": (product, (NAN, NAN), ["NaN in an input of a:", "NaN in an input of b:"]),
    "a NaN that is masked hides nothing": (
        masks_a_nan,
        (NAN[:2], jnp.float32(0.0)),
        ["NaN in an input of a:", "Inf in the reverse pass of b: the derivative of sqrt"],
    ),
    "a global for an argument": (uses_a_global, (WEIGHTS + 0, X), ["closed over of w:"]),
    "overwritten": (lambda x: jnp.sum((0 + x).at[:].set(1.0)), (X,), ["overwritten of x:"]),
    "not read": (lambda x: jnp.zeros(3).at[0].set(x[0])[1], (X,), ["not read of x:"]),
    "no derivative is not one of zero": (has_no_derivative, (1.0,), ["not differentiable of :"]),
    "a stop that JAX calls for its user": (
        lambda x: jnp.sum(jax.tree.map(jax.lax.stop_gradient, [x])[0]),
        (X,),
        ["stop_gradient of x: your own stop_gradient"],
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_names_the_cause_and_the_source(name):
    fun, args, expected = FINDINGS[name]
    findings = explain(fun, *args, wrt=(0, 1) if fun in (product, masks_a_nan) else 0).findings
    for finding, words in zip(findings, expected, strict=True):
        assert f"{finding.cause} of {', '.join(finding.sources)}: {finding.what}".startswith(words)
        if fun is uses_a_global:
            assert finding.origin.line == line_of(fun, 1)


def test_lines_are_those_of_the_function_that_is_asked_about():
    """Two functions of one program share what was compiled, not their lines."""

    def first(x):
        return jnp.round(x)

    def second(x):
        return jnp.round(x)

    lines = [explain(f, jnp.float32(0.3)).findings[0].origin.line for f in (first, second)]
    assert lines[1] == lines[0] + 3


def test_a_gradient_that_a_rule_returns_only_beside_another_has_a_cause():
    """A rule may ask which operands are differentiated, as the loops of equinox do."""

    @jax.custom_vjp
    def last(w, y):
        return y + 0 * w

    def forward(w, y):
        return y.value + 0 * w.value, y.perturbed

    def backward(is_perturbed, dy):
        return (jnp.zeros(()) if is_perturbed else None), dy

    last.defvjp(forward, backward, symbolic_zeros=True)
    explanation = explain(lambda w, y: 2 * last(w, y), 0.5, 3.0)
    assert not explanation["w"].connected
    assert [finding.sources for finding in explanation.problems] == [("w",)]
    both = explain(lambda w, y: 2 * last(w, y), 0.5, 3.0, wrt=(0, 1))
    assert both["w"].connected


# -------------------------------------------------------------------------------------- causes


class Attention(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x))
        x = jnp.tanh(x)
        return linen.Dense(1)(tg.stop_gradient(x[:, 0]))


def test_the_stop_before_the_head_is_blamed_and_none_inside_of_attention():
    """Of equal numbers normalised rows are zeros, and so are all scores: no maximum is blamed."""
    model = Attention()
    for tokens in (jnp.arange(24.0).reshape(2, 3, 4) / 10, jnp.ones((2, 3, 4))):
        params = model.init(jax.random.key(0), tokens)
        found = explain(lambda params, x: jnp.mean(model.apply(params, x) ** 2), params, tokens)
        (finding,) = found.findings
        assert finding.what == "your own stop_gradient"
        assert "tg.stop_gradient" in linecache.getline(finding.origin.file, finding.origin.line)
        assert len(finding.sources) == sum(not source.connected for source in found.sources)


@pytest.mark.parametrize("where", [tg.match.param("p.a"), tg.match.op("sin")])
def test_what_a_rule_stops_is_told_and_is_no_problem(where):
    def loss(p, x):
        return jnp.sum(jnp.sin(p["a"] * x) * p["b"])

    frozen = tg.rewrite(loss, tg.rules.stop_gradient(where))
    explanation = tg.explain(frozen, {"a": X, "b": X}, X)
    (finding,) = (each for each in explanation.findings if "p.a" in each.sources)
    assert explanation.problems == ()
    assert finding.cause == "stop_gradient"
    assert "rules.stop_gradient stops it" in str(explanation)


def test_all_cuts_of_the_likeliest_way_are_told():
    def loss(x):
        a = jnp.round(x)
        return jnp.sum(jax.lax.stop_gradient(jnp.sin(a)))

    found = [(f.cause, f.origin.line) for f in explain(loss, X).findings]
    line = loss.__code__.co_firstlineno
    assert found == [("rounding", line + 1), ("stop_gradient", line + 2)]

    def either(x):
        a = jnp.round(x)
        return jnp.sum(a + jax.lax.stop_gradient(x))

    (finding,) = explain(either, X).findings
    line = either.__code__.co_firstlineno
    assert (finding.what, finding.origin.line) == ("your own stop_gradient", line + 2)


def test_a_gradient_that_is_changed_on_demand_is_noted_with_by_how_much():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) * 3.0)

    @jax.custom_vjp
    def clip(x):
        return x

    clip.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.5, 0.5),))
    by_rule = tg.rules.clip_gradient(tg.match.op("tanh"), max_norm=0.5)
    (by_hand,) = explain(lambda x: jnp.sum(clip(x) * 3.0), jnp.ones(4)).findings
    (clipped,) = explain(tg.trace(loss, rules=[by_rule]), healthy.W, healthy.X).findings
    (through,) = explain(lambda x: jnp.sum(tg.grad_pass_through(jnp.round)(x)), X).findings
    for finding in (by_hand, clipped, through):
        assert (finding.cause, finding.problem) == ("changed by a rule", False)
    for words in ("norm 1;", "has 6", "difference 5"):
        assert words in by_hand.what
    assert clipped.origin.line == line_of(loss, 1)
    assert "norm 0.5;" in clipped.what


@pytest.mark.parametrize("reverse", [False, True])
def test_what_makes_nan_in_a_scan_is_named_with_the_first_step_that_did(reverse):
    def f(x, steps):
        def body(carry, t):
            return carry + jnp.log(t), carry

        last, sums = jax.lax.scan(body, jnp.sum(x), steps, reverse=reverse)
        return last + jnp.sum(sums)

    (finding,) = explain(f, X, jnp.array([1.0, -1.0, 2.0, -2.0, 1.0])).findings
    assert (finding.cause, finding.operation) == ("NaN in the forward pass", "log")
    assert finding.step == (3 if reverse else 1)


# -------------------------------------------------------------------------------------- forms


def test_text_has_the_worst_first():
    def loss(params, x):
        return jnp.sum(jnp.sqrt(params["w"] * x)) + jnp.round(params["<b>"])

    broken = explain(loss, {"w": jnp.ones(3), "<b>": jnp.float32(0.2)}, jnp.arange(3.0))
    text = str(broken)
    assert text.splitlines()[0] == "gradients of loss (value 2.414): 2 problems"
    assert text.index("Inf in the reverse pass") < text.index("rounding")
    assert re.search(r"rounding at test_explain.py:\d+", text)
    rows = text.splitlines()[-2:]
    assert rows[0].startswith("params.w")
    assert "None" in rows[1]
    assert text == repr(broken)
    assert "params.&lt;b&gt;" in broken._repr_html_()
    with pytest.raises(KeyError, match="the sources are"):
        broken["w"]


# -------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("fun", "x", "options", "error", "words"),
    [
        (lambda x: x * 2, X, {}, TypeError, r"returns f32\[3\].*Return a sum"),
        (lambda x: x.astype(int).sum(), X, {}, TypeError, "one float scalar"),
        (jnp.sum, X, {"wrt": X}, TypeError, "make it an argument"),
        (lambda weights: jnp.sum(weights), X, {"wrt": "weight"}, ValueError, "called with weights"),
        (lambda x: x, jax.ShapeDtypeStruct((), "float32"), {}, TypeError, "x is only a shape"),
        (jax.jit(lambda x: explain(jnp.sum, x) and x), X, None, TypeError, "outside of jit"),
        (
            lambda x: x if x > 0 else -x,
            jnp.float32(1.0),
            {},
            jax.errors.TracerBoolConversionError,
            "jnp.where",
        ),
    ],
)
def test_what_cannot_be_explained_is_refused(fun, x, options, error, words):
    with pytest.raises(error) as caught:
        fun(x) if options is None else explain(fun, x, **options)
    assert re.search(words, "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])]))


def test_a_donated_argument_is_named():
    w = {"kernel": jnp.ones(3)}
    jax.jit(lambda w: jax.tree.map(lambda a: a + 1, w), donate_argnums=0)(w)
    assert w["kernel"].is_deleted()
    with pytest.raises(ValueError, match=r"argument w\.kernel has been donated"):
        explain(lambda w: jnp.sum(w["kernel"]), w)


def test_a_function_that_fails_forward_raises_its_own_error():
    def broken(w, x):
        return jnp.sum(x @ w)

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions") as caught:
        explain(broken, jnp.ones((2, 3)), jnp.ones((4, 5)))
    frames = [entry.path for entry in caught.traceback]
    assert Path(__file__) in [Path(str(frame)) for frame in frames]


def test_a_reference_is_followed_inside_of_a_jitted_function_alone():
    def doubled(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return jnp.sum(ref[...])

    with pytest.raises(NotImplementedError, match=r"jax.Ref at test_explain.py:\d+.*under jax.jit"):
        explain(doubled, X)
    assert explain(jax.jit(doubled), X)["x"].norm == pytest.approx(2 * 3**0.5)


# --------------------------------------------------------------------------- models of frameworks


class Normalised(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(3, 4, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.blocks[0](x)))


def of_model(*paths):
    return {f"model.{path}" for path in paths}


def test_leaves_of_a_module_have_their_paths_and_its_state_is_no_problem_and_comes_last():
    x = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
    found = explain(lambda model: jnp.mean(model(x) ** 2), Normalised(nnx.Rngs(0)))
    trained = of_model("blocks.0.bias", "blocks.0.kernel", "norm.bias", "norm.scale")
    state = of_model("norm.mean", "norm.var", "dropout.rngs.count", "dropout.rngs.key")
    assert {source.path for source in found.sources if source.connected} == trained
    (finding,) = found.findings
    assert (finding.cause, finding.problem, set(finding.sources)) == ("state", False, state)
    rows = [line.split()[0] for line in str(found).splitlines()[-8:]]
    assert (set(rows[:4]), set(rows[4:])) == (trained, state)


def test_functions_of_a_model_are_no_sources_unless_they_are_asked_about():
    model = eqx.nn.MLP(3, 1, 4, 1, activation=jax.nn.tanh, key=jax.random.key(0))

    def loss(model):
        return jnp.sum(model(jnp.ones(3)))

    found = explain(loss, model)
    names = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")]
    assert [report.path for report in found.sources] == names
    assert not found.findings
    (asked,) = explain(loss, model, wrt=lambda path, _: path == "activation").findings
    assert asked.sources == ("model.activation",)


def test_masks_and_counts_in_a_model_are_no_problem_unless_they_are_asked_about():
    class Masked(eqx.Module):
        mask: jax.Array
        count: jax.Array
        w: jax.Array

    def loss(model):
        return jnp.sum(jnp.where(model.mask, model.w, 0.0)) * model.count

    model = Masked(jnp.array([True, False]), jnp.int32(2), jnp.ones(2))
    found = explain(loss, model)
    assert not found.problems
    assert [note.what for note in found.notes] == [
        "it is bool, which has no gradient",
        "it is int32, which has no gradient",
    ]
    rows = [line.split()[0] for line in str(found).splitlines()[-3:]]
    assert rows == ["model.w", "model.mask", "model.count"]
    for asked in ("mask", lambda path, _: path != "count"):
        (problem,) = explain(loss, model, wrt=asked).problems
        assert (problem.cause, problem.sources) == ("no gradient", ("model.mask",))


def test_collections_of_flax_that_are_not_trained_are_no_problem():
    def with_collections(variables, x):
        return jnp.sum(variables["params"]["w"] * x)

    collections = {"params": {"w": jnp.ones(3)}, "batch_stats": {"mean": jnp.zeros(3)}}
    (finding,) = explain(with_collections, collections, jnp.arange(3.0)).findings
    assert (finding.cause, finding.sources) == ("state", ("variables.batch_stats.mean",))


def test_threads_may_explain_the_same_program_at_the_same_time():
    def loss(x):
        for _ in range(4):
            x = jnp.sqrt(jnp.abs(x)) * jnp.where(x > 0, jnp.log(x), 0.0) + jnp.tanh(x)
        return jnp.sum(x)

    x = jnp.array([0.0, 2.0, 1.0])
    alone = str(explain(loss, x))
    assert "NaN in the reverse pass" in alone
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            texts = list(threads.map(lambda _: str(explain(loss, x)), range(12)))
    finally:
        sys.setswitchinterval(interval)
    assert set(texts) == {alone}


@pytest.mark.filterwarnings("ignore:the Variable 'total' is read after it was assigned")
@pytest.mark.parametrize("trainable", [True, False])
def test_a_gradient_that_ends_at_an_assignment_names_its_line_the_variable_and_the_cure(trainable):
    total = tg.Variable(0.0, name="total", trainable=trainable)

    def loss(w):
        total.assign(3 * w)
        return total * 2

    line = f"test_explain.py:{line_of(loss, 1)}"
    (finding,) = tg.explain(loss, jnp.float32(1.0)).findings
    named = "the Variable 'total'" if trainable else "a Variable"
    assert finding.cause == "assignment"
    assert finding.what.startswith(f"the assignment of {named} ({line}), which is not diff")
    assert "use the value itself" in finding.cure
    with pytest.raises(tg.UnconnectedError, match=rf"the assignment of {named} \({line}\)"):
        tg.grad(loss, unconnected="raise")(1.0)


def test_operations_that_differ_in_a_parameter_alone_have_their_own_derivatives():
    x, left, right = (jax.random.normal(jax.random.key(i), (9,)) for i in range(3))

    def loss(params):
        x, y, z = params
        sums = jax.lax.cumsum(x) * left + jax.lax.cumsum(y, reverse=True) * right
        return jnp.sum(sums) + jnp.sum(jax.lax.cumsum(z) * right) + jnp.sum(x**2 + y**3)

    found = explain(loss, [x, 2 * x, 3 * x])
    expected = [jnp.linalg.norm(g) for g in jax.grad(loss)([x, 2 * x, 3 * x])]
    np.testing.assert_allclose([source.norm for source in found.sources], expected, rtol=1e-5)


def test_an_array_in_nondiff_argnums_of_a_rule_is_named():
    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def take(x, index):
        return 3.0 * x[index]

    @take.defjvp
    def _(index, primals, tangents):
        return take(primals[0], index), 3.0 * tangents[0][index]

    def loss(x, index):
        return jnp.sum(jnp.sin(take(x, index)))

    explanation = tg.explain(loss, jnp.arange(10.0), jnp.array([1, 3, 5]))
    (problem,) = explanation.problems
    assert "nondiff_argnums" in str(problem)
    assert problem.origin.line == loss.__code__.co_firstlineno + 1


def test_a_rule_of_equinox_is_compared_too():
    @eqx.filter_custom_vjp
    def square(x):
        return x**2

    square.def_fwd(lambda perturbed, x: (x**2, None))
    square.def_bwd(lambda residuals, ct, perturbed, x: ct * x)  # twice that would be right

    def loss(x):
        return jnp.sum(square(x))

    (finding,) = explain(loss, X).findings
    assert (finding.cause, finding.problem) == ("changed by a rule", False)
    np.testing.assert_allclose(jax.grad(loss)(X), X, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(tg.rewrite(loss, finding.rule))(X), 2 * X, rtol=1e-6)


def test_a_rule_on_a_line_that_runs_twice_has_both_gradients():
    def loss(ws, x):
        for w in ws:
            x = x @ w
        return jnp.sum(jnp.sin(x))

    ws = list(jax.random.normal(jax.random.key(0), (2, 8, 8)))
    x = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
    found = explain(tg.rewrite(loss, tg.rules.strong_zero()), ws, x)
    norms = {report.path: report.norm for report in found.sources}
    for i, gradient in enumerate(jax.grad(loss)(ws, x)):
        np.testing.assert_allclose(norms[f"ws.{i}"], jnp.linalg.norm(gradient), rtol=1e-5)
