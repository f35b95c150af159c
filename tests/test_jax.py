"""Everything that `tracegrad._jax` takes from JAX without a public promise, probed one by one."""

import os
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback

import tracegrad as tg
from tests.compilation import compiled_to
from tracegrad import _jax
from tracegrad.ir.scopes import text as scopes_text
from tracegrad.planning.compiled import written_by
from tracegrad.planning.hlo import module_of

pytestmark = [pytest.mark.both_jax, pytest.mark.usefixtures("compiled_fully")]


def equation(fun, *args):
    return jax.make_jaxpr(fun)(*args).jaxpr.eqns[-1]


def test_every_primitive_that_we_know_by_identity_is_bound_by_its_function():
    one = jnp.ones(3)

    @jax.custom_vjp
    def vjp(x):
        return x

    vjp.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
    jvp = jax.custom_jvp(lambda x: x)
    jvp.defjvp(lambda p, t: (p[0], t[0]))
    assert equation(jax.jit(jnp.sin), one).primitive is _jax.JIT
    assert equation(jax.checkpoint(jnp.sin), one).primitive is _jax.REMAT
    assert equation(lambda x: jax.lax.scan(lambda c, y: (c, y), 0.0, x), one).primitive is _jax.SCAN
    assert (
        equation(lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), one).primitive is _jax.COND
    )
    loop = equation(lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: c + 1, x), one)
    assert loop.primitive is _jax.WHILE
    assert equation(jax.lax.stop_gradient, one).primitive is _jax.STOP_GRADIENT
    assert equation(vjp, one).primitive is _jax.CUSTOM_VJP
    assert equation(jvp, one).primitive is _jax.CUSTOM_JVP


def test_folders_can_be_left_out_of_programs():
    def exported():
        return bytes(jax.export.export(jax.jit(lambda x: jnp.sin(x)))(jnp.ones(3)).serialize())

    folder, name = (part.encode() for part in os.path.split(__file__))
    assert folder in exported()
    with _jax.without_folders():
        inside = exported()
    assert name in inside
    assert folder not in inside
    assert folder in exported()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_devices_are_taken_out_of_a_type_that_does_not_say_how_values_are_split(kind):
    axes = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((4,), ("i",), axis_types=axes)
    spread = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, jax.P("i")))
    taken = _jax.without_devices(jax.typeof(spread))
    exported = jax.export.export(jax.jit(lambda x: x * 2))(taken)
    assert exported.nr_devices == {"Auto": 1, "Explicit": 4}[kind]
    assert jax.make_jaxpr(lambda x: x)(_jax.without_devices(jax.typeof(2.0))).in_avals[0].weak_type


def test_the_constraints_on_symbolic_dimensions_can_be_told():
    free, tied = (
        jax.export.symbolic_shape("b, 2*b"),
        jax.export.symbolic_shape("b, c", constraints=["b >= 4", "c <= 2*b"]),
    )
    of = lambda shape: _jax.symbolic_constraints([_jax.struct((3, *shape), "float32")])  # noqa: E731
    assert of(free) == []
    assert of(tied) == ["b >= 4", "c <= 2*b"]


def test_what_a_written_program_calls_is_listed():
    def exported(fun, *platforms):
        return jax.export.export(jax.jit(fun), platforms=platforms)(jnp.eye(3))

    assert _jax.outside_calls(exported(jnp.sin, "cpu", "tpu")) == []
    qr = exported(
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: jnp.linalg.qr(x)[0], jnp.sin, x), "tpu"
    )
    assert _jax.outside_calls(qr) == ["ProductOfElementaryHouseholderReflectors", "Qr"]


def test_remat_binds_an_open_program():
    assert equation(jax.checkpoint(jnp.sin), 1.0).primitive.name in _jax.OPEN_PROGRAM_PRIMITIVES


def test_a_scans_operands_are_split_into_constants_and_carry():
    constant = jnp.ones(3)

    def f(a, b, xs):
        return jax.lax.scan(lambda c, x: ((c[0] + x * constant.sum() * b, -c[1]), x), (a, a), xs)

    eqn = equation(lambda a, b, xs: f(a, b, xs), 1.0, 2.0, jnp.ones(4))
    constants, carry = _jax.scan_split(eqn.params)
    assert carry == 2
    assert constants + carry + 1 == len(eqn.invars)


def test_the_second_derivative_through_a_scan_is_by_a_rule_too():
    match, rules = tg.match, tg.rules
    x = jnp.array([0.7, 1.2])
    sin, cos, tanh, rounded = jnp.sin(x), jnp.cos(x), jnp.tanh(jnp.sin(x)), jnp.round(3 * x * x)
    slope = 1 / jnp.cosh(rounded) ** 2
    cases = [
        (
            lambda z: jnp.tanh(jnp.sin(z)),
            rules.scale_gradient(match.op("sin"), 0.5),
            (1 - tanh**2) * (-2 * tanh * (0.5 * cos) ** 2 - 0.5 * sin),
        ),
        (
            lambda z: jnp.tanh(jnp.round(3 * z * z)),
            rules.straight_through(match.call("round")),
            slope * (-2 * jnp.tanh(rounded) * (6 * x) ** 2 + 6),
        ),
        (
            lambda z: jnp.where(z > 1, z, jnp.sqrt(1 - z)) ** 2,
            rules.finite_derivative(match.op("sqrt")),
            jnp.array([0.0, 2.0]),
        ),
    ]
    for fun, rule, expected in cases:
        looped = tg.rewrite(
            lambda z, f=fun: jax.lax.scan(lambda c, _: (f(c), c), z, length=1)[0], rule
        )
        second = jax.jit(jax.vmap(jax.grad(jax.grad(looped))))(x)
        np.testing.assert_allclose(second, expected, rtol=1e-3, atol=1e-6)


def test_a_program_evaluates_with_its_constants():
    table = jnp.arange(4.0)
    program = jax.make_jaxpr(lambda i: table[i] * 2)(1)
    (result,) = _jax.eval_program(program, [3])
    assert result == 6.0


def test_a_program_is_differentiated_to_the_same_program_as_its_function():
    def fun(x):
        for i in range(4):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.sin(x) * 2.0 + x**3
        return jnp.sum(x)

    x = jnp.ones(3)
    program = jax.make_jaxpr(fun)(x)

    def evaluated(x):
        return _jax.eval_program(program, [x])[0]

    ours, plain = (jax.make_jaxpr(jax.grad(f))(x) for f in (evaluated, fun))
    assert str(ours) == str(plain)
    stacks = [[str(e.source_info.name_stack) for e in p.eqns] for p in (ours, plain)]
    assert [text.count("layer_3") for text in stacks[0]] == [t.count("layer_3") for t in stacks[1]]


def test_scopes_are_told_from_transformations_of_the_same_name():
    def f(x):
        with jax.named_scope("jvp(x)"), jax.named_scope("my_jvp(x)"):
            return jnp.sin(x)

    scopes = (("jvp(x)", False), ("my_jvp(x)", False))
    assert _jax.scopes_around(equation(f, 1.0).source_info) == scopes
    backward = jax.make_jaxpr(jax.vmap(jax.grad(f)))(jnp.ones(2)).eqns[-1].source_info
    through = (("vmap", True), ("transpose", True), ("jvp", True))
    assert _jax.scopes_around(backward) == (*through, *scopes)
    assert scopes_text(_jax.scopes_around(backward)) == "vmap(transpose(jvp(jvp(x))))/my_jvp(x)"


def test_an_equation_binds_under_its_own_scope_and_line():
    def f(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    eqn = equation(f, 1.0)

    def again(x):
        with jax.named_scope("outer"):
            scope, settings = _jax.equation_context(eqn.source_info, eqn.ctx)
            with scope, settings:
                return _jax.bind(eqn.primitive, [x], eqn.params)[0]

    new = equation(again, 1.0)
    assert _jax.scopes_around(new.source_info) == (("outer", False), ("inner", False))
    lines = [(f.file_name, f.function_name) for f in _jax.frames(new.source_info)]
    assert any(file == __file__ and name.endswith("<locals>.f") for file, name in lines)


def test_functions_and_arguments_of_a_program_have_names():
    def loss(params, x):
        return params["w"] * x

    program = jax.make_jaxpr(loss)({"w": 1.0}, 2.0)
    function = _jax.traced_from(program)
    assert function.name == "loss"
    assert function.source.endswith(f"{__file__}:{loss.__code__.co_firstlineno}")
    assert function.arguments == ("params['w']", "x")


def test_types_print_with_their_weakness():
    assert _jax.type_text(jax.typeof(jnp.ones((2, 3), "bfloat16"))) == "bf16[2,3]"
    assert _jax.type_text(jax.typeof(1.0)) == "~f32[]"


def test_typing_rules_give_results_for_one_and_for_many():
    (one,) = _jax.abstract_eval(
        equation(jnp.sin, 1.0).primitive, [jax.typeof(jnp.ones(3))], {"accuracy": None}
    )
    assert one.shape == (3,)
    top_k = equation(lambda x: jax.lax.top_k(x, 2), jnp.ones(3))
    many = _jax.abstract_eval(top_k.primitive, [v.aval for v in top_k.invars], top_k.params)
    assert [aval.dtype for aval in many] == [np.float32, np.int32]


def test_the_policies_of_recompute_have_one_name_on_every_version():
    assert _jax.policy_name(jax.checkpoint_policies.dots_saveable) == "dots_saveable"


def test_it_knows_which_transformations_are_around():
    """Whether none is, whether a program is being made that is compiled, and any at all."""
    found = {}

    def look(name, x=0.0):
        found[name] = _jax.is_top_level(), _jax.under_jit(), _jax.staging_trace() is not None
        return x

    def looking(name):
        return lambda x: look(name, x)

    one, two = jnp.float32(1), jnp.ones(2)
    look("nothing")
    jax.jit(looking("jit"))(one)
    jax.vmap(looking("vmap"))(two)
    jax.grad(looking("grad"))(one)
    jax.jit(jax.vmap(looking("jit of vmap")))(two)
    jax.make_jaxpr(jax.vmap(looking("program")))(two)
    jax.checkpoint(looking("checkpoint"))(one)
    thread = threading.Thread(target=look, args=("thread",))
    thread.start()
    thread.join()
    assert found == {
        "nothing": (True, False, False),
        "jit": (False, True, True),
        "vmap": (False, False, False),
        "grad": (False, False, False),
        "jit of vmap": (False, True, True),
        "program": (False, True, True),
        "checkpoint": (False, True, True),
        "thread": (True, False, False),
    }


def test_compiler_options_that_keep_recompute_are_asked_for_only_where_they_are_needed():
    options = _jax.keep_recompute_options("cpu")
    assert (options is None) == (_jax.VERSION >= (0, 11, 2))
    assert _jax.keep_recompute_options("gpu") is None


@pytest.mark.xfail(
    _jax.VERSION >= (0, 12),
    reason="XLA writes over an operand that it reads: docs/sharp-edges.md says when. Both can go "
    "when this passes on the newest JAX",
    strict=True,
)
def test_xla_reads_all_of_a_view_that_a_recomputed_function_takes_before_it_writes_over_it():
    product = jax.checkpoint(lambda a, b: a * b)

    def loss(x, product):
        y = jax.lax.cond(x[0] < x[1], lambda x: x + 1, lambda x: x + 1, x)
        return jnp.sum(product(y[:, None], jnp.cos(y)[None]) @ y * jnp.arange(1.0, 4.0))

    x = jnp.array([0.3, -1.2, 0.7])
    found = [jax.jit(jax.grad(loss), static_argnums=1)(x, f) for f in (product, jnp.multiply)]
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "has_gradient"),
    [
        *[(dtype, True) for dtype in ("float32", "bfloat16", "complex64")],
        *[(dtype, False) for dtype in ("int32", "bool", "uint8")],
    ],
)
def test_floats_have_cotangents_and_integers_empty_ones(dtype, has_gradient):
    x = jnp.ones(3, dtype)
    aval = jax.typeof(x)
    assert _jax.has_gradient(aval) == has_gradient
    if not has_gradient:
        (ct,) = jax.vjp(lambda x: x.astype(jnp.float32), x)[1](jnp.ones(3))
        empty = _jax.no_cotangent(aval)
        assert (ct.dtype, ct.shape) == (empty.dtype, empty.shape)


def test_a_placeholder_becomes_a_constant_also_of_programs_that_jax_keeps():
    checks = []
    value = _jax.Placeholder(jax.typeof(jnp.ones(3)), "w", lambda: not checks.append(1))

    @jax.jit
    def inner(x):
        return value * x

    for _ in range(2):
        program = jax.make_jaxpr(lambda x: inner(x) + value)(1.0)
        assert [c is value for c in _jax.constants_of(program)] == [True]
    assert checks


def test_a_placeholder_that_is_computed_with_outside_asks_its_check():
    def refuse():
        raise RuntimeError("mine")

    value = _jax.Placeholder(jax.typeof(1.0), "w", refuse)
    with pytest.raises(RuntimeError, match="mine"):
        jnp.sin(value)


def test_an_alias_is_another_object_over_the_same_buffer():
    x = jnp.ones(3)
    alias = _jax.fresh_alias(x)
    assert alias is not x
    assert alias.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    assert alias.committed == x.committed


def test_a_row_of_aliases_of_aliases_comes_to_an_end():
    """JAX frees it by recursion: some ten thousand of them are more than a stack holds."""
    x = alias = jnp.arange(3.0)
    for _ in range(150):
        alias = _jax.fresh_alias(alias)
    assert alias.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
    assert alias.tolist() == x.tolist()


def test_a_trace_is_handed_functions_with_rules_in_a_form_that_we_know():
    class Spy(jax.core.Trace):
        def process_primitive(self, primitive, args, params, /):
            with _jax.set_current_trace(top):
                return primitive.bind(*args, **params)

        def process_custom_jvp_call(self, primitive, fun, jvp, args, /, **params):
            met.append(_jax.rule_functions((fun, jvp)))
            assert not _jax.has_run(fun)
            with _jax.set_current_trace(top):
                results = fun.call_wrapped(*args)
            assert _jax.has_run(fun)
            trees = _jax.result_trees(fun)
            _jax.forget_result_trees(fun)
            assert not _jax.has_run(fun)
            _jax.leave_result_trees(fun, trees)
            assert _jax.has_run(fun)
            return results

    @jax.custom_jvp
    def double(x):
        return {"y": x * 2}

    rule = lambda p, t: (double(*p), {"y": t[0] * 2})  # noqa: E731
    double.defjvp(rule)
    met = []
    top = _jax.current_trace(None)
    with _jax.set_current_trace(Spy()):
        assert float(double(jnp.float32(2))["y"]) == 4.0
    ((functions, trees),) = met
    assert functions == (double.fun, rule)
    assert trees is not None


@pytest.mark.parametrize("around", [lambda f: f, jax.vmap, lambda f: jax.vmap(jax.vmap(f))])
def test_the_users_functions_are_found_in_a_rule_that_stands_in_a_program(around):
    def forward(x):
        return x * 2, None

    def backward(residuals, dy):
        return (dy * 2,)

    def rule(primals, tangents):
        return primals[0] * 2, tangents[0] * 2

    by_vjp = jax.custom_vjp(lambda x: x * 2)
    by_vjp.defvjp(forward, backward)
    by_jvp = jax.custom_jvp(lambda x: x * 2)
    by_jvp.defjvp(rule)
    x = jnp.ones((2, 3))

    for fun, parameter, function in (
        (by_vjp, "bwd", backward),
        (by_jvp, "jvp_jaxpr_fun", rule),
    ):
        program = jax.make_jaxpr(around(fun))(x)
        # Bound once more as it stands in a program, JAX puts something around it.
        again = jax.make_jaxpr(lambda *xs: _jax.eval_program(program, xs))(x)  # noqa: B023
        for each in (program, again):
            assert _jax.users_function(each.eqns[0].params[parameter]) is function


def test_an_identity_primitive_may_be_neither_differentiated_nor_exported():
    primitive = _jax.identity_primitive(
        "test_identity",
        lambda name: ValueError(f"differentiated {name}"),
        lambda name: TypeError(f"exported {name}"),
        lambda name: LookupError(f"mapped {name}") if name == "another" else None,
    )

    def f(x):
        return primitive.bind(x, name="it") * 2

    one = jnp.ones(3)
    assert equation(lambda x: primitive.bind(x, name="it"), one).primitive is primitive
    for transform in (lambda f: f, jax.jit, jax.vmap, jax.checkpoint):
        np.testing.assert_array_equal(transform(f)(one), 2 * one)
        with pytest.raises(ValueError, match="differentiated it"):
            jax.grad(lambda x, wrapped=transform: wrapped(f)(x).sum())(one)
    stopped = jax.grad(lambda x: (f(jax.lax.stop_gradient(x)) * x).sum())
    np.testing.assert_array_equal(stopped(one), 2 * one)
    assert "test_identity" not in jax.jit(f).lower(one).as_text()
    with pytest.raises(TypeError, match="exported it"):
        jax.export.export(jax.jit(f))(one)
    with pytest.raises(LookupError, match="mapped another"):
        jax.vmap(lambda x: primitive.bind(x, name="another"))(one)


def test_a_primitive_hands_on_one_operand_and_is_differentiated_as_the_other():
    lost = []
    primitive = _jax.standing_in_primitive("test_standing_in", lambda name: lost.append(name))

    def f(x, y):
        return jnp.sum(primitive.bind(jnp.sin(x), y, name="it") ** 2)

    x, y = jnp.arange(3.0), jnp.ones(3)
    for transform in (lambda f: f, jax.jit, jax.checkpoint):
        of_x, of_y = jax.grad(lambda *args, wrapped=transform: wrapped(f)(*args), (0, 1))(x, y)
        np.testing.assert_array_equal(of_x, jnp.zeros(3))
        np.testing.assert_allclose(of_y, 2 * jnp.sin(x))
    two = jnp.stack([x, x + 1])
    for axes, args in (((0, None), (two, y)), ((None, 0), (x, two)), ((0, 1), (two, two.T))):
        rows = jax.vmap(jax.grad(f, 1), axes)(*args)
        values = two if axes[0] == 0 else jnp.stack([x, x])
        np.testing.assert_allclose(rows, 2 * jnp.sin(values), rtol=1e-6)
        of_sum = jax.grad(lambda *args, axes=axes: jnp.sum(jax.vmap(f, axes)(*args)), 1)(*args)
        given = args[1]
        assert of_sum.shape == given.shape
    np.testing.assert_allclose(jax.jacfwd(f, 1)(x, y), 2 * jnp.sin(x))
    assert not lost  # where the other one, too, or alone has a tangent
    np.testing.assert_array_equal(jax.grad(f, 0)(x, y), jnp.zeros(3))
    assert lost == ["it"]
    assert "test_standing_in" not in jax.jit(f).lower(x, y).as_text()
    assert jax.export.export(jax.jit(f))(x, y).call(x, y) == f(x, y)


def test_the_frames_of_an_operation_tell_calls_on_one_line_apart():
    def f(x):
        return jnp.sin(x) + jnp.sin(x)

    first, second = (e for e in jax.make_jaxpr(f)(1.0).jaxpr.eqns if e.primitive.name == "sin")
    at = []
    for sine in (first, second):
        codes, offsets = _jax.frame_positions(sine.source_info)
        at.append(dict(zip(codes, offsets, strict=True))[f.__code__])
    assert 0 <= at[0] < at[1] < len(f.__code__.co_code)


def test_kept_traces_are_told_apart_by_a_context_of_ours():
    within = _jax.user_context()
    traced = []

    @jax.jit
    def f(x):
        traced.append(x)
        return x

    for value in ((), (1,), (), (1,)):
        with within(value):
            f(1.0)
            jax.jit(lambda x: f(x))(1.0)
    assert len(traced) == 2


def test_a_jitted_call_without_options_is_told_from_others():
    def params(**options):
        return equation(jax.jit(lambda x, y: (x * 2, y), **options), 1.0, 2.0).params

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert _jax.is_plain_jit(params())
    assert _jax.is_plain_jit(params(donate_argnums=0))
    assert not _jax.is_plain_jit(params(in_shardings=device))
    assert not _jax.is_plain_jit(params(out_shardings=device))
    settings = _jax.jit_settings
    assert settings(params()) == settings(params())
    assert settings(params()) != settings(params(donate_argnums=0))
    assert settings(params()) != settings(params(out_shardings=device))


def test_a_jitted_call_is_known_where_jit_is_disabled_too():
    with jax.disable_jit():
        *_, call = _jax.programs._equations()
    assert _jax.jit_settings(call.params)


def test_primitives_that_jax_compiles_alone_are_told_from_others():
    assert _jax.runs_compiled(equation(jnp.sin, 1.0).primitive)
    assert _jax.runs_compiled(equation(lambda x: jax.lax.add(x, x), 1.0).primitive)
    assert not _jax.runs_compiled(_jax.JIT)
    assert not _jax.runs_compiled(equation(jax.device_put, 1.0).primitive)


def test_calls_of_the_host_are_told_by_their_names():
    like = jax.ShapeDtypeStruct((), jnp.float32)
    ways = [
        lambda x: jax.pure_callback(np.sin, like, x),
        lambda x: io_callback(np.sin, like, x),
        lambda x: jax.debug.callback(print, x),
        lambda x: jax.debug.print("{}", x),
        lambda x: jax.ffi.ffi_call("target", like)(x),
        lambda x: checkify.check(x > 0, "positive"),
    ]
    for way in ways:
        assert _jax.calls_host([equation(way, 1.0).primitive.name])
    assert not _jax.calls_host([equation(jnp.sin, 1.0).primitive.name])


def test_the_facts_of_a_program_are_those_of_the_programs_in_it_too():
    array, numpy_array = jnp.arange(3.0), np.arange(3.0, dtype=np.float32)

    @jax.jit
    def inner(x):
        return jnp.sin(x) + array - numpy_array

    def twice(x):
        return jax.lax.scan(lambda carry, _: (inner(inner(carry)), None), x, length=2)[0]

    facts = _jax.program_facts(jax.make_jaxpr(twice)(array))
    assert {primitive.name for primitive in facts.primitives} == {
        "scan",
        "jit",
        "sin",
        "add",
        "sub",
    }
    assert facts.operations == 6
    assert [each is array for each in facts.arrays] == [True]
    assert [each.tolist() for each in facts.numpy_arrays] == [[0.0, 1.0, 2.0]]
    assert (facts.has_effects, facts.closes_over) == (False, False)

    def closing_over(x):
        rule = jax.custom_jvp(lambda y: y * x)
        rule.defjvp(lambda primals, tangents: (rule(*primals), tangents[0]))
        jax.debug.print("{}", x)
        return jax.jit(rule)(x)

    facts = _jax.program_facts(jax.make_jaxpr(closing_over)(1.0))
    assert (facts.has_effects, facts.closes_over) == (True, True)
    assert _jax.facts_below({"name": "sin"}) == _jax.ProgramFacts()


def test_a_compiled_program_says_what_it_writes_and_where_that_was_traced():
    def f(w, x):
        with jax.named_scope("first"):
            y = jnp.exp(x @ w)
        with jax.named_scope("second"):
            return y @ w, y

    w, x = jnp.ones((64, 64)), jnp.ones((512, 64), jnp.float32)
    found = written_by(module_of(jax.jit(f).lower(w, x).compile()))
    products = [each for each in found if any("second" in scope for scope in each.scopes)]
    assert products[-1].size == 4 * 512 * 64
    (read,) = products[-1].reads
    assert any("first" in scope and "exp" in scope for scope in found[read].scopes)
    assert sum(each.size for each in found) >= 2 * 4 * 512 * 64


ANEW = """HloModule jit_f, is_scheduled=true

%first (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %q = f32[8,8] parameter(1)
  %e = f32[8,8] exponential(%p), metadata={op_name="jit(f)/exp"}
  ROOT %m = f32[8,8] multiply(%e, %q), metadata={op_name="jit(f)/mul"}
}

%again (p.1: f32[8,8], q.1: f32[8,8]) -> f32[8,8] {
  %p.1 = f32[8,8] parameter(0)
  %q.1 = f32[8,8] parameter(1)
  %e.1 = f32[8,8] exponential(%p.1), metadata={op_name="jit(f)/exp"}
  ROOT %s = f32[8,8] subtract(%e.1, %q.1), metadata={op_name="jit(f)/sub"}
}

%one (p.3: f32[8,8]) -> f32[4,8] {
  %p.3 = f32[8,8] parameter(0)
  %c = f32[8,8] cosine(%p.3), metadata={op_name="jit(f)/cos"}
  ROOT %o = f32[4,8] slice(%c), slice={[0:4], [0:8]}, metadata={op_name="jit(f)/parts"}
}

%two (p.4: f32[8,8]) -> f32[4,8] {
  %p.4 = f32[8,8] parameter(0)
  %c.1 = f32[8,8] cosine(%p.4), metadata={op_name="jit(f)/cos"}
  ROOT %t = f32[4,8] slice(%c.1), slice={[4:8], [0:8]}, metadata={op_name="jit(f)/parts"}
}

%half (p.2: f32[8,8]) -> f32[4,8] {
  %p.2 = f32[8,8] parameter(0)
  ROOT %h = f32[4,8] slice(%p.2), slice={[4:8], [0:8]}, metadata={op_name="jit(f)/split"}
}

ENTRY %main (x: f32[8,8]) -> (f32[8,8], f32[4,8], f32[4,8], f32[4,8], f32[4,8]) {
  %x = f32[8,8] parameter(0)
  %sin = f32[8,8] sine(%x), metadata={op_name="jit(f)/sin"}
  %mul = f32[8,8] fusion(%sin, %x), kind=kLoop, calls=%first
  %low = f32[4,8] slice(%mul), slice={[0:4], [0:8]}, metadata={op_name="jit(f)/split"}
  %sub = f32[8,8] fusion(%sin, %mul), kind=kLoop, calls=%again
  %high = f32[4,8] fusion(%mul), kind=kLoop, calls=%half
  %tanh = f32[8,8] tanh(%x), metadata={op_name="jit(f)/tanh"}
  %top = f32[4,8] fusion(%tanh), kind=kLoop, calls=%one
  %bottom = f32[4,8] fusion(%tanh), kind=kLoop, calls=%two
  ROOT %all = (f32[8,8], f32[4,8], f32[4,8], f32[4,8], f32[4,8]) tuple(%sub, %low, %high, %top, %bottom)
}
"""  # noqa: E501


def test_what_is_computed_anew_does_not_say_how_long_its_operand_is_needed():
    sin, mul, low, sub, high, tanh, *_ = written_by(compiled_to(ANEW))
    assert sub.reads == (0, 1)
    assert sin.until == 1  # for its exponential, which the third computes once more
    assert mul.until == 4  # one half of it was taken before, and now the other
    assert tanh.until == 7  # for its cosine, of which one half was written before
    assert (low.until, sub.until, high.until) == (2, 3, 4)  # results


def test_a_replacement_that_could_not_be_made_is_made_for_the_next_user():
    class Layer:
        def call(self):
            return "original"

    def refused(original):
        raise ValueError("not now")

    def replaced(original):
        return lambda self: f"replaced {original(self)}"

    replacement = _jax.Replacement()
    for places in ([(Layer, "call", refused)], [(Layer, "call", replaced), (Layer, "x", refused)]):
        with pytest.raises(ValueError if len(places) == 1 else AttributeError):
            replacement.put(places)
        assert Layer().call() == "original"
    with replacement.in_place([(Layer, "call", replaced)]):
        assert Layer().call() == "replaced original"
    assert Layer().call() == "original"
