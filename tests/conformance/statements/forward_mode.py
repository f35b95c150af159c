"""Forward mode."""

from __future__ import annotations

from statements.statement import raised, states

# ------------------------------------------------------------------------------------- Forward mode


@states
def an_accumulator_follows_by_identity_and_gives_none_for_the_rest(lib):
    x, other = lib.constant(3.0), lib.constant(3.0)
    with lib.ForwardAccumulator(x, lib.constant(1.0)) as accumulator:
        y, z = x * x, other * other
    return [accumulator.jvp(y), accumulator.jvp(z), accumulator.jvp(x)]


@states
def an_accumulator_gives_zeros_where_they_are_asked_for(lib):
    x, other = lib.constant(3.0), lib.constant([3.0, 4.0])
    with lib.ForwardAccumulator(x, lib.constant(1.0)) as accumulator:
        z = other * other
    return accumulator.jvp(z, unconnected_gradients=lib.UnconnectedGradients.ZERO)


@states
def an_accumulator_can_be_entered_again(lib):
    x = lib.constant(3.0)
    accumulator = lib.ForwardAccumulator(x, lib.constant(1.0))
    with accumulator:
        y = x * x
    with accumulator:
        z = y * x
    return [accumulator.jvp(y), accumulator.jvp(z)]


@states
def an_accumulator_works_over_a_tape(lib):
    x = lib.constant([1.0, 2.0])
    with lib.ForwardAccumulator(x, lib.constant([1.0, 10.0])) as accumulator:
        with lib.GradientTape() as tape:
            tape.watch(x)
            y = lib.sum(x**3)
        slope = tape.gradient(y, x)
    return [slope, accumulator.jvp(slope)]


@states
def an_accumulator_works_under_a_tape(lib):
    x = lib.constant([1.0, 2.0])
    with lib.GradientTape() as tape:
        tape.watch(x)
        with lib.ForwardAccumulator(x, lib.constant([1.0, 10.0])) as accumulator:
            y = lib.sum(x**3)
        moved = accumulator.jvp(y)
    return [moved, tape.gradient(moved, x)]


@states
def an_accumulator_works_over_another(lib):
    x = lib.constant(2.0)
    with lib.ForwardAccumulator(x, lib.constant(1.0)) as outer:
        with lib.ForwardAccumulator(x, lib.constant(1.0)) as inner:
            y = x**3
        first = inner.jvp(y)
    return [inner.jvp(y), outer.jvp(y), outer.jvp(first)]


@states
def the_same_primal_twice_raises(lib):
    x, one = lib.constant(2.0), lib.constant(1.0)
    return raised(lambda: lib.ForwardAccumulator([x, x], [one, one]))


@states(
    ours=50.0,
    because="what was declared is the derivative; eagerly TensorFlow follows the function itself",
)
def the_jvp_of_a_custom_gradient_is_its_transpose(lib):
    f = lib.custom_gradient(lambda x, z: (x * z, lambda dy: (dy * 10, dy * 20)))
    x, z = lib.constant(2.0), lib.constant(3.0)
    with lib.ForwardAccumulator([x, z], [lib.constant(1.0), lib.constant(2.0)]) as accumulator:
        y = f(x, z)
    return accumulator.jvp(y)


@states
def a_tangent_of_the_wrong_shape_raises(lib):
    x = lib.constant([1.0, 2.0])

    def attempt():
        with lib.ForwardAccumulator(x, lib.constant([1.0, 2.0, 3.0])) as accumulator:
            y = x * 2
        accumulator.jvp(y)

    return raised(attempt)


@states
def variables_are_primals_too(lib):
    v = lib.Variable(3.0)
    with lib.ForwardAccumulator(v, lib.constant(1.0)) as accumulator:
        y = v * v
    return accumulator.jvp(y)
