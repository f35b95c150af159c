"""Functions with gradients of their own, recomputed ones, those passed through."""

from __future__ import annotations

import numpy as np

from statements.statement import raised, slope, states, value_and_slope

# ---------------------------------------------------------------------------------- custom_gradient


def _log1pexp(lib):
    @lib.custom_gradient
    def log1pexp(x):
        e = lib.exp(x)
        return lib.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))

    return log1pexp


def _twice(lib, fun, at):
    x = lib.constant(at)
    with lib.GradientTape() as outer:
        outer.watch(x)
        with lib.GradientTape() as inner:
            inner.watch(x)
            y = fun(x)
        first = inner.gradient(y, x)
    return [first, outer.gradient(first, x)]


@states
def the_gradient_function_is_differentiable_through_what_it_closes_over(lib):
    log1pexp = _log1pexp(lib)
    return [
        _twice(lib, log1pexp, 0.0),
        _twice(lib, log1pexp, 100.0)[0],
        bool(np.isnan(_twice(lib, lambda x: lib.log(1 + lib.exp(x)), 100.0)[0])),
    ]


@states
def leaves_of_nested_positional_arguments_are_inputs(lib):
    @lib.custom_gradient
    def f(pair, z):
        x, y = pair
        return x * y * z, lambda dy: (dy * 10, dy * 20, dy * 30)

    x, y, z = lib.constant(2.0), lib.constant(3.0), lib.constant(4.0)
    return slope(lib, lambda: f((x, y), z), [x, y, z])


@states
def what_is_closed_over_gets_none_on_a_tape(lib):
    x, z = lib.constant(2.0), lib.constant(3.0)

    @lib.custom_gradient
    def f(x):
        return x * z, lambda dy: dy * 10

    return slope(lib, lambda: f(x), [x, z])


@states(recorded=False, ours=["ValueError", 10.0], because="TensorFlow has no functional gradients")
def what_is_closed_over_raises_under_a_functional_gradient(lib):
    def loss(x, z):
        @lib.custom_gradient
        def f(x):
            return x * z, lambda dy: dy * 10

        return f(x)

    x, z = lib.constant(2.0), lib.constant(3.0)
    return [raised(lambda: lib.grad(loss, (0, 1))(x, z)), lib.grad(loss, 0)(x, z)]


@states
def keyword_arguments_get_no_gradient_slot(lib):
    @lib.custom_gradient
    def f(x, *, scale):
        return x * scale, lambda dy: dy * 10

    x = lib.constant(2.0)
    return value_and_slope(lib, lambda: f(x, scale=3.0), x)


@states
def it_works_on_methods(lib):
    class Scale:
        factor = 10.0

        @lib.custom_gradient
        def apply(self, x):
            return x * self.factor, lambda dy: dy * self.factor * 2

    x, scale = lib.constant(2.0), Scale()
    return value_and_slope(lib, lambda: scale.apply(x), x)


def _with_variables(lib, *variables, given=(), traced=False):
    """A custom gradient that reads Variables; its gradients for them are 100, 200, ..."""
    seen = []

    @lib.custom_gradient
    def f(x, *given):
        for v in (*variables, *variables):
            x = x * v

        def grad_fn(dy, variables=None):
            seen.append(None if variables is None else [lib.name_of(v) for v in variables])
            mine = [dy * 10 for _ in range(1 + len(given))]
            mine = mine[0] if not given else mine
            return mine, [dy * 100.0 * (i + 1) for i in range(len(variables))]

        return x, grad_fn

    def both(x):
        with lib.GradientTape() as tape:
            tape.watch(x)
            y = f(x, *given)
        return y, tape.gradient(y, [x, *variables])

    y, slopes = (lib.function(both) if traced else both)(lib.constant(2.0))
    return [y, slopes, seen[-1]]


@states
def variables_read_are_listed_once_sorted_by_name(lib):
    v, w = lib.Variable(3.0, name="b"), lib.Variable(5.0, name="a")
    return _with_variables(lib, v, w, traced=True)  # TensorFlow sorts them in functions only


@states
def untrainable_variables_are_not_listed(lib):
    v, w = lib.Variable(3.0, name="b"), lib.Variable(5.0, name="a", trainable=False)
    return _with_variables(lib, v, w)


@states
def variables_passed_as_arguments_are_not_listed(lib):
    v, w = lib.Variable(3.0, name="b"), lib.Variable(5.0, name="a")
    return _with_variables(lib, v, w, given=(w,))


@states
def the_variables_may_be_taken_in_any_manner(lib):
    v = lib.Variable(3.0, name="v")
    results = []
    for grad_fn in (
        lambda dy, variables: (dy * 10, [dy * 100]),
        lambda dy, *, variables: (dy * 10, [dy * 100]),
        lambda dy, **kwargs: (dy * 10, [dy * 100 for _ in kwargs["variables"]]),
    ):
        f = lib.custom_gradient(lambda x, grad_fn=grad_fn: (x * v, grad_fn))
        x = lib.constant(2.0)
        results.append(slope(lib, lambda f=f, x=x: f(x), [x, v], watched=x))
    return results


@states
def a_gradient_function_without_variables_raises_at_the_forward_call(lib):
    v, x = lib.Variable(3.0), lib.constant(2.0)
    f = lib.custom_gradient(lambda x: (x * v, lambda dy: dy * 10))
    with lib.GradientTape():
        return raised(lambda: f(x))


@states
def a_wrong_count_of_variable_gradients_raises(lib):
    v, x = lib.Variable(3.0), lib.constant(2.0)
    f = lib.custom_gradient(lambda x: (x * v, lambda dy, variables: (dy * 10, [dy, dy])))

    return raised(lambda: slope(lib, lambda: f(x), x))


@states
def variables_is_not_passed_when_none_was_read(lib):
    seen = []

    @lib.custom_gradient
    def f(x):
        def grad_fn(dy, **kwargs):
            seen.append(sorted(kwargs))
            return dy * 10

        return x * 2, grad_fn

    x = lib.constant(2.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return [tape.gradient(y, x), seen[-1]]


@states
def cotangents_arrive_flat_and_unused_ones_are_zeros(lib):
    shapes = []

    @lib.custom_gradient
    def f(x):
        def grad_fn(*dys):
            shapes.append([list(dy.shape) for dy in dys])
            return 10 * dys[0] + lib.sum(dys[1])

        return {"a": x * 2, "b": x * lib.constant([1.0, 2.0])}, grad_fn

    x = lib.constant(2.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = f(x)["a"]
    return [tape.gradient(y, x), shapes[-1]]


@states
def none_for_one_input_is_allowed(lib):
    f = lib.custom_gradient(lambda x, z: (x * z, lambda dy: (None, dy * 10)))
    x, z = lib.constant(2.0), lib.constant(3.0)
    return slope(lib, lambda: f(x, z), [x, z])


@states
def returned_gradients_may_be_nested(lib):
    @lib.custom_gradient
    def f(pair, z):
        return pair[0] * pair[1] * z, lambda dy: ((dy * 10, dy * 20), dy * 30)

    x, y, z = lib.constant(2.0), lib.constant(3.0), lib.constant(4.0)
    return slope(lib, lambda: f((x, y), z), [x, y, z])


@states
def a_wrong_count_of_gradients_raises(lib):
    f = lib.custom_gradient(lambda x, z: (x * z, lambda dy: dy * 10))
    x, z = lib.constant(2.0), lib.constant(3.0)

    return raised(lambda: slope(lib, lambda: f(x, z), [x, z]))


@states
def on_the_gradient_function_it_is_the_derivative_by_dy(lib):
    @lib.custom_gradient
    def f(x):
        @lib.custom_gradient
        def grad_fn(dy):
            return dy * 5.0, lambda ddy: ddy * 7.0

        return x * 2.0, grad_fn

    x, seed = lib.constant(3.0), lib.constant(1.0)
    with lib.GradientTape() as outer:
        outer.watch([x, seed])
        with lib.GradientTape() as inner:
            inner.watch(x)
            y = f(x)
        first = inner.gradient(y, x, output_gradients=seed)
    return [first, outer.gradient(first, [seed, x])]


@states
def the_wrapped_form_defines_the_second_derivative(lib):
    @lib.custom_gradient
    def f(x):
        def first_order(dy):
            @lib.custom_gradient
            def slope(x):
                return lib.constant(-1.1), lambda ddy: ddy * -2.1

            return dy * slope(x)

        return x + 10, first_order

    return _twice(lib, lambda x: f(x) ** 4, 1.0)


# ------------------------------------------------------------- recompute_grad and grad_pass_through


@states
def recomputed_functions_run_once_more_in_the_backward_pass(lib):
    runs: list[int] = []

    @lib.recompute_grad
    def f(x):
        lib.tick(runs)
        return lib.sin(x)

    x = lib.constant(0.5)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = f(f(f(f(x))))
    lib.finish()
    forward = len(runs)
    slope = tape.gradient(y, x)
    lib.finish()
    return [slope, forward, len(runs)]


@states
def an_unused_argument_of_a_recomputed_function_gets_zero(lib):
    f = lib.recompute_grad(lambda x, z: x * x)
    x, z = lib.constant(2.0), lib.constant(3.0)
    return slope(lib, lambda: f(x, z), [x, z])


@states
def recomputed_functions_take_keywords_and_nested_arguments(lib):
    f = lib.recompute_grad(lambda pair, *, power: pair[0] ** power * pair[1])
    x, z = lib.constant(2.0), lib.constant(3.0)
    return value_and_slope(lib, lambda: f((x, z), power=3), [x, z])


@states
def recomputed_functions_read_variables(lib):
    v, x = lib.Variable(3.0), lib.constant(2.0)
    f = lib.recompute_grad(lambda x: x * v * v)
    return slope(lib, lambda: f(x), [x, v], watched=x)


@states
def recomputed_functions_nest_and_keep_the_original(lib):
    def g(x):
        return lib.sin(x) * x

    inner = lib.recompute_grad(g)
    f = lib.recompute_grad(lambda x: inner(inner(x)))
    x = lib.constant(0.5)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return [tape.gradient(y, x), inner.__wrapped__ is g]


@states
def reverse_over_reverse_works_through_recomputed_functions(lib):
    return _twice(lib, lib.recompute_grad(lambda x: lib.sin(x) * x), 0.5)


@states(
    ours=0.9182168,  # sin 0.5 + 0.5 cos 0.5
    because="forward mode works through recomputed functions",
)
def forward_mode_works_through_recomputed_functions(lib):
    f = lib.recompute_grad(lambda x: lib.sin(x) * x)
    x = lib.constant(0.5)
    try:
        with lib.ForwardAccumulator(x, lib.constant(1.0)) as accumulator:
            y = f(x)
        return accumulator.jvp(y)
    except NotImplementedError:
        return "NotImplementedError"


@states
def grad_pass_through_leaves_the_gradient_unchanged(lib):
    f = lib.grad_pass_through(lib.round)
    x = lib.constant(1.7)
    return value_and_slope(lib, lambda: f(x) ** 2, x)


@states
def a_variable_read_inside_grad_pass_through_gets_none(lib):
    v, x = lib.Variable(3.0), lib.constant(2.0)
    f = lib.grad_pass_through(lambda x: x * v)
    return value_and_slope(lib, lambda: f(x), [x, v], watched=x)


@states
def a_variable_assigned_inside_grad_pass_through_gets_none(lib):
    v, x = lib.Variable(3.0), lib.constant(2.0)

    @lib.grad_pass_through
    def f(x):
        v.assign(x * 5)
        return x * 2

    with lib.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return [v.numpy(), y, tape.gradient(y, [x, v])]


@states
def assigning_inside_grad_pass_through_works_in_traced_functions(lib):
    v, x = lib.Variable(3.0), lib.constant(2.0)

    @lib.grad_pass_through
    def f(x):
        v.assign(x * 5)
        return x * 2

    traced = lib.function(f)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = traced(x)
    slope = tape.gradient(y, x)
    traced(lib.constant(3.0))
    return [y, slope, v.numpy()]


@states
def assign_itself_may_be_passed_through(lib):
    found = []
    for wrap in (lambda f: f, lib.function):
        v, z = lib.Variable(5.0), lib.constant(3.0)
        with lib.GradientTape() as tape:
            tape.watch(z)
            y = wrap(lambda z, v=v: lib.grad_pass_through(v.assign)(z**2))(z)
        found.append([y, tape.gradient(y, z), v.numpy()])
    return found


@states
def a_function_returns_the_value_of_a_variable(lib):
    v = lib.Variable(1.0)
    count = lib.function(lambda: v.assign_add(1.0))
    values = [count(), count()]
    with lib.GradientTape() as tape:
        y = count()
    return [*values, y, tape.gradient(y, v), isinstance(y, lib.Variable)]


@states
def grad_pass_through_has_as_many_outputs_as_inputs(lib):
    f = lib.grad_pass_through(lambda x, z: (lib.round(x), lib.floor(z)))
    x, z = lib.constant(1.7), lib.constant(2.2)
    with lib.GradientTape() as tape:
        tape.watch([x, z])
        a, b = f(x, z)
        y = a * b
    return [y, tape.gradient(y, [x, z])]


@states(recorded=False, ours="ValueError", because="as JAX does; TensorFlow has no io_callback")
def an_io_callback_inside_a_recomputed_function_raises(lib):
    f = lib.recompute_grad(lambda x: lib.io_callback(x) * x)
    return raised(lambda: lib.grad(f)(lib.constant(2.0)))
