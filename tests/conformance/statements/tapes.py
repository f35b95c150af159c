"""None, identity, Variables, and what a tape does from its first entry to its last."""

from __future__ import annotations

import numpy as np

from statements.statement import raised, slope, states, value_and_slope

# ------------------------------------------------------------------------------------ None and zero


@states
def what_nothing_connects_is_none(lib):
    x, z = lib.constant(3.0), lib.constant(2.0)
    return slope(lib, lambda: 2 * z, [x, z])


@states
def what_is_behind_stop_gradient_is_none(lib):
    x = lib.constant(3.0)
    return slope(lib, lambda: lib.stop_gradient(x) * 2, x)


@states
def an_integer_source_is_none(lib):
    x, n = lib.constant(3.0), lib.constant(2, "int32")
    return slope(lib, lambda: x * lib.cast(n, "float32"), [x, n], watched=x)


@states
def what_is_watched_after_its_use_is_none(lib):
    x = lib.constant(3.0)
    with lib.GradientTape() as tape:
        y = x * x
        tape.watch(x)
    return tape.gradient(y, x)


@states
def what_is_computed_outside_the_block_is_none(lib):
    x = lib.constant(3.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch(x)
        inside = x * x
    outside = inside * x
    return [tape.gradient(inside, x), tape.gradient(outside, x)]


@states
def the_second_derivative_of_a_linear_function_is_none(lib):
    x = lib.constant(3.0)
    with lib.GradientTape() as outer:
        outer.watch(x)
        with lib.GradientTape() as inner:
            inner.watch(x)
            y = 2 * x
        first = inner.gradient(y, x)
    return [first, outer.gradient(first, x)]


@states
def zeros_can_be_asked_for_in_place_of_none(lib):
    x, z = lib.constant([3.0, 4.0]), lib.constant(2.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch([x, z])
        y = 2 * z
    return [
        tape.gradient(y, [x, z], unconnected_gradients=lib.UnconnectedGradients.ZERO),
        tape.gradient(y, [x, z], unconnected_gradients="zero"),
        tape.gradient(y, [x, z], unconnected_gradients="none"),
    ]


@states
def any_other_word_for_unconnected_raises(lib):
    x = lib.constant(3.0)
    return raised(lambda: slope(lib, lambda: x * x, x, unconnected_gradients="zeros"))


def _slope_of(lib, fun):
    x = lib.constant(2.5)
    return slope(lib, lambda: fun(x), x)


@states
def floor_ceil_round_and_integer_casts_cut(lib):
    def through_integers(x):
        return lib.cast(lib.cast(x, "int32"), "float32")

    return [_slope_of(lib, f) for f in (lib.floor, lib.ceil, lib.round, through_integers)]


@states(ours=None, because="the derivative of sign is as structurally zero as that of floor")
def sign_cuts(lib):
    return _slope_of(lib, lib.sign)


@states
def none_passes_through_a_function_argument_by_argument(lib):
    f = lib.function(lambda x, y: lib.stop_gradient(x) + y)
    x, y = lib.constant(3.0), lib.constant(2.0)
    return slope(lib, lambda: f(x, y), [x, y])


@states(ours=[[None, 1.0], [1.0, None]], because="a function is connected as its program is")
def none_passes_through_a_function_output_by_output(lib):
    f = lib.function(lambda x, y: (lib.stop_gradient(x) + y, x * 1.0))
    x, y = lib.constant(3.0), lib.constant(2.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch([x, y])
        first, second = f(x, y)
    return [tape.gradient(first, [x, y]), tape.gradient(second, [x, y])]


@states
def a_variable_of_the_branch_not_taken_of_a_traced_cond_is_zero(lib):
    v, w = lib.Variable(1.0, name="v"), lib.Variable(2.0, name="w")
    f = lib.function(lambda p: lib.cond(p > 0, lambda: v * 3, lambda: w * 5))
    return slope(lib, lambda: f(lib.constant(1.0)), [v, w], watched=[])


@states
def a_variable_of_the_branch_not_taken_is_none_eagerly(lib):
    v, w = lib.Variable(1.0), lib.Variable(2.0)
    p = lib.constant(1.0)
    return slope(lib, lambda: v * 3 if p > 0 else w * 5, [v, w], watched=[])


# ----------------------------------------------------------------------------------------- Identity


@states
def two_equal_constants_are_distinct(lib):
    x, z = lib.constant(3.0), lib.constant(3.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        tape.watch(z)
        y = x * x
    return tape.gradient(y, [x, z])


@states
def two_results_that_are_equal_to_their_operand_are_distinct(lib):
    x, same = lib.constant([3.0, 4.0]), lib.function(lambda x: x)
    with lib.GradientTape() as tape:
        tape.watch(x)
        first, second = same(x), same(x)
        y = first * 2
    return tape.gradient(y, [x, first, second])


@states
def two_variables_given_one_array_are_distinct(lib):
    x = lib.constant(3.0)
    v, w = lib.Variable(x), lib.Variable(x)
    with lib.GradientTape() as tape:
        y = v * v * w
    initial = tape.gradient(y, [v, w])
    v.assign(x)
    w.assign(x)
    with lib.GradientTape() as tape:
        y = v * v
    return [initial, tape.gradient(y, [v, w])]


@states
def after_an_update_the_name_means_another_array(lib):
    x0 = x = lib.constant(3.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        x += x**2
        y = 5 * x
    return tape.gradient(y, [x, x0])


@states
def only_arrays_are_watched(lib):
    with lib.GradientTape() as tape:
        return [raised(lambda: tape.watch(np.ones(2, "float32"))), raised(lambda: tape.watch(2.0))]


@states
def a_function_that_closes_over_a_watched_array_propagates_to_it(lib):
    x = lib.constant(3.0)
    f = lib.function(lambda z: x * x * z)
    results = []
    for _ in range(2):  # the second time from a cache
        z = lib.constant(2.0)
        results.append(slope(lib, lambda z=z: f(z), [x, z], watched=x))
    return results


# ---------------------------------------------------------------------------------------- Variables


@states
def trainable_variables_are_watched_at_their_first_read(lib):
    v, frozen = lib.Variable(3.0), lib.Variable(2.0, trainable=False)
    return slope(lib, lambda: v * v * frozen, [v, frozen], watched=[])


@states
def variables_are_not_watched_if_the_tape_is_told_so(lib):
    v, w = lib.Variable(3.0), lib.Variable(2.0)
    with lib.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(w)
        y = v * w
    return tape.gradient(y, [v, w])


@states
def each_read_has_its_own_value(lib):
    v = lib.Variable(3.0)
    with lib.GradientTape() as tape:
        first = v * v
        v.assign(5.0)
        y = first + v * v
    return tape.gradient(y, v)


@states
def assign_is_not_differentiated(lib):
    x, v = lib.constant(3.0), lib.Variable(0.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        v.assign(x * x)
        y = v * x
    return tape.gradient(y, [x, v])


@states
def assigning_after_the_block_changes_nothing(lib):
    v = lib.Variable(3.0)
    with lib.GradientTape() as tape:
        y = v * v
    v.assign(100.0)
    return tape.gradient(y, v)


@states
def watched_variables_answers_also_after_gradient(lib):
    v, w, frozen = lib.Variable(3.0), lib.Variable(2.0), lib.Variable(2.0, trainable=False)
    with lib.GradientTape() as tape:
        y = v * w * frozen

    def watched():
        return [any(v is seen for seen in tape.watched_variables()) for v in (v, w, frozen)]

    before = watched()
    tape.gradient(y, v)
    return [before, watched()]


@states
def a_traced_step_reads_and_assigns_variables(lib):
    v = lib.Variable(3.0)

    @lib.function
    def step(x):
        with lib.GradientTape() as tape:
            y = v * v * x
        v.assign_sub(0.1 * tape.gradient(y, v))
        return y

    values = [step(lib.constant(1.0)), step(lib.constant(1.0))]
    v.assign(1.0)
    return [*values, step(lib.constant(2.0)), v.numpy()]


@states
def a_variable_that_is_assigned_and_then_read_has_a_gradient_in_functions_too(lib):
    v, x = lib.Variable(1.0), lib.constant(3.0)

    def body(x):
        first = v * v
        v.assign(2 * x)
        second = v * v
        v.assign_add(x)
        return first + second + v * v * v

    found = []
    for fun in (body, lib.function(body)):
        v.assign(1.0)
        found.append(value_and_slope(lib, lambda fun=fun: fun(x), [v, x], watched=x))
    return found


@states
def a_variable_given_to_a_function_is_that_variable_inside(lib):
    v, w = lib.Variable(3.0), lib.Variable(4.0)

    @lib.function
    def step(tree, x):
        with lib.GradientTape() as tape:
            y = tree["variable"] * tree["variable"] * x
        slope = tape.gradient(y, tree["variable"])
        tree["variable"].assign_sub(slope / 4)
        return slope

    x = lib.constant(1.0)
    slopes = [step({"variable": each}, x) for each in (v, w, v)]
    return [*slopes, v.numpy(), w.numpy()]


@states
def gradients_of_a_variable_are_of_all_its_reads(lib):
    v = lib.Variable(1.0)

    @lib.function
    def inside(x):
        first = v * v
        v.assign(2 * x)
        return [*lib.gradients(first, v), *lib.gradients(first + v * v, v)]

    return inside(lib.constant(3.0))


# ---------------------------------------------------------------------------------------- Tape life


def _square(lib, **options):
    x = lib.constant(3.0)
    with lib.GradientTape(**options) as tape:
        tape.watch(x)
        y = x * x
    return tape, y, x


@states
def a_tape_gives_one_gradient(lib):
    tape, y, x = _square(lib)
    return [tape.gradient(y, x), raised(lambda: tape.gradient(y, x))]


@states
def a_jacobian_uses_a_tape_up_too(lib):
    tape, y, x = _square(lib)
    return [
        tape.jacobian(y, x),
        raised(lambda: tape.gradient(y, x)),
        raised(lambda: tape.jacobian(y, x)),
    ]


@states
def a_persistent_tape_gives_any_number(lib):
    tape, y, x = _square(lib, persistent=True)
    return [tape.gradient(y, x), tape.gradient(y, x)]


@states
def gradient_inside_the_block_ends_the_recording_and_the_block_runs_on(lib):
    x = lib.constant(3.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = x * x
        slope = tape.gradient(y, x)
        z = y * x
    return [slope, z, raised(lambda: tape.gradient(z, x))]


@states
def a_persistent_tape_records_its_own_gradient(lib):
    x = lib.constant(3.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x * x * x
        first = tape.gradient(y, x)
        second = tape.gradient(first, x)
        third = tape.gradient(second, x)
    return [first, second, third]


@states
def a_gradient_taken_outside_is_a_constant(lib):
    x = lib.constant(3.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x * x * x
        with tape.stop_recording():
            unrecorded = tape.gradient(y, x)
        suspended = tape.gradient(unrecorded, x)
    outside = tape.gradient(y, x)
    return [unrecorded, suspended, outside, tape.gradient(outside, x)]


@states
def entering_again_continues_the_recording(lib):
    x = lib.constant(3.0)
    tape = lib.GradientTape()
    with tape:
        tape.watch(x)
        y = x * x
    with tape:
        z = y * x
    return tape.gradient(z, x)


@states
def entering_twice_at_once_raises(lib):
    tape = lib.GradientTape()
    with tape:
        return raised(tape.__enter__)


@states
def an_exception_closes_the_tape_and_keeps_what_it_has(lib):
    x = lib.constant(3.0)
    with lib.GradientTape() as outer:
        outer.watch(x)
        try:
            with lib.GradientTape() as inner:
                inner.watch(x)
                y = x * x
                raise KeyError
        except KeyError:
            pass
        z = y * x
    return [inner.gradient(y, x), outer.gradient(z, x)]


@states
def tapes_may_close_out_of_order(lib):
    x = lib.constant(3.0)
    first, second = lib.GradientTape(), lib.GradientTape()
    first.__enter__()
    second.__enter__()
    first.watch(x)
    second.watch(x)
    y = x * x
    first.__exit__(None, None, None)
    z = y * x
    second.__exit__(None, None, None)
    return [first.gradient([y, z], x), second.gradient([y, z], x)]


@states
def stop_recording_concerns_its_own_tape(lib):
    x = lib.constant(3.0)
    with lib.GradientTape() as outer, lib.GradientTape() as inner:
        outer.watch(x)
        inner.watch(x)
        with inner.stop_recording():
            y = x * x
        z = x * x * x
    return [outer.gradient([y, z], x), inner.gradient([y, z], x)]


@states
def stop_recording_before_the_first_entry_raises(lib):
    return raised(lambda: lib.GradientTape().stop_recording().__enter__())


@states
def reset_forgets_what_was_watched(lib):
    x = lib.constant(3.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x * x
        tape.reset()
        z = x * x * x
        tape.watch(x)
        again = x * x
    return [tape.gradient(target, x) for target in (y, z, again)]


@states
def after_reset_variables_are_watched_at_the_next_read(lib):
    v, w = lib.Variable(3.0), lib.Variable(2.0)
    with lib.GradientTape(persistent=True) as tape:
        y = v * w
        tape.reset()
        z = v * v
    return [tape.gradient(y, [v, w]), tape.gradient(z, [v, w])]
