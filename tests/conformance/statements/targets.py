"""Targets, sources and seeds, of tapes and of ``gradients``; complex numbers."""

from __future__ import annotations

from statements.statement import raised, slope, states

# ------------------------------------------------------------------------------ Targets and sources


@states
def several_targets_are_summed(lib):
    x = lib.constant(2.0)
    return slope(lib, lambda: {"square": x**2, "cube": [x**3]}, x)


@states
def the_elements_of_a_target_are_summed(lib):
    x = lib.constant(2.0)
    return slope(lib, lambda: x * lib.constant([3.0, 4.0]), x)


@states
def a_target_that_is_a_source_adds_its_seed(lib):
    x = lib.constant(2.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = x**2
    return tape.gradient([x, y], x)


@states
def the_same_target_twice_doubles(lib):
    x = lib.constant(2.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = x**2
    return tape.gradient([y, y], x)


@states
def intermediates_are_sources_without_watch(lib):
    x = lib.constant(2.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = x * x
        z = y * y
    return tape.gradient(z, [x, y])


@states
def the_answer_has_the_structure_of_the_sources(lib):
    x, z = lib.constant(2.0), lib.constant(5.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch([x, z])
        y = x * x * z
    return [
        tape.gradient(y, {"x": x, "deep": [z, {"again": x}]}),
        tape.gradient(y, [x]),
        tape.gradient(y, (z, x)),
    ]


@states
def a_jacobian_has_the_structure_of_the_sources(lib):
    x, z = lib.constant([1.0, 2.0]), lib.constant(5.0)
    with lib.GradientTape() as tape:
        tape.watch([x, z])
        y = x * x * z
    return tape.jacobian(y, {"x": x, "deep": [z]})


@states
def gradients_always_returns_a_list(lib):
    f = lib.function(lambda x: lib.gradients(x**2, x))
    return [isinstance(f(lib.constant(3.0)), (list, tuple)), f(lib.constant(3.0))]


@states
def any_value_computed_so_far_is_an_x_of_gradients(lib):
    def f(x):
        y = x * x
        return lib.gradients(y * y, [x, y])

    return lib.function(f)(lib.constant(2.0))


@states
def gradients_of_what_nothing_connects_are_none(lib):
    def f(x, z):
        return lib.gradients(x**2, [x, z]), lib.gradients(x**2, z, unconnected_gradients="zero")

    return lib.function(f)(lib.constant(2.0), lib.constant(3.0))


@states
def a_none_in_grad_ys_means_ones(lib):
    def f(x):
        return lib.gradients([x**2, x**3], x, grad_ys=[None, lib.constant(10.0)])

    return lib.function(f)(lib.constant(2.0))


def _raised_by_gradients(lib, **options):
    def f(x):
        return lib.gradients([x**2, x**3], x, **options)[0]

    return raised(lambda: lib.function(f)(lib.constant(2.0)))


@states
def grad_ys_of_a_wrong_length_raise(lib):
    return _raised_by_gradients(lib, grad_ys=[lib.constant(1.0)])


@states
def grad_ys_of_a_wrong_dtype_raise(lib):
    return _raised_by_gradients(lib, grad_ys=[lib.constant(1, "int32"), None])


@states
def grad_ys_may_be_indexed_slices(lib):
    def f(x):
        seed = lib.IndexedSlices(
            lib.constant([[10.0], [5.0]]), lib.constant([2, 0], "int32"), lib.dense_shape((3, 1))
        )
        return lib.gradients(x * x, x, grad_ys=[seed])[0]

    return lib.function(f)(lib.constant([[1.0], [2.0], [3.0]]))


def _raised_by_seeds(lib, *seeds):
    x = lib.constant(2.0)
    return raised(lambda: slope(lib, lambda: [x**2, x**3], x, output_gradients=list(seeds)))


@states
def output_gradients_are_seeds(lib):
    x = lib.constant(2.0)
    return slope(
        lib, lambda: [x**2, x**3], x, output_gradients=[lib.constant(10.0), lib.constant(1.0)]
    )


@states(ours=52.0, because="the tape takes its seeds as gradients() does")
def a_none_in_output_gradients_means_ones(lib):
    x = lib.constant(2.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        ys = [x**2, x**3]
    try:
        return tape.gradient(ys, x, output_gradients=[lib.constant(10.0), None])
    except ValueError:
        return "ValueError"


@states(ours="ValueError", because="the tape checks its seeds as gradients() does")
def output_gradients_of_a_wrong_length_raise(lib):
    return _raised_by_seeds(lib, lib.constant(1.0))


@states(ours="TypeError", because="the tape checks its seeds as gradients() does")
def output_gradients_of_a_wrong_dtype_raise(lib):
    return _raised_by_seeds(lib, lib.constant(1, "int32"), lib.constant(1.0))


@states
def a_complex_y_without_a_seed_raises(lib):
    z = lib.constant(1 + 2j, "complex64")
    return raised(lambda: lib.function(lambda z: lib.gradients(z * z, z)[0])(z))


@states(ours="TypeError", because="a tape is no less strict than gradients()")
def a_complex_target_without_a_seed_raises(lib):
    z = lib.constant(1 + 2j, "complex64")
    with lib.GradientTape() as tape:
        tape.watch(z)
        y = z * z
    return raised(lambda: tape.gradient(y, z))


@states
def stop_gradients_make_derivatives_partial(lib):
    def f(a):
        c = 2 * a
        y = a + c
        return lib.gradients(y, [a, c]), lib.gradients(y, [a, c], stop_gradients=[a, c])

    return lib.function(f)(lib.constant(1.0))


@states
def stop_gradients_outside_xs_count_too(lib):
    def f(a):
        b = 3 * a
        return lib.gradients(a + b * b, a), lib.gradients(a + b * b, a, stop_gradients=b)

    return lib.function(f)(lib.constant(1.0))


@states
def hessians_are_the_diagonal_blocks(lib):
    def f(x, z):
        return lib.hessians(lib.sum(x**3 * z) + lib.sum(z**2), [x, z])

    return lib.function(f)(lib.constant([1.0, 2.0]), lib.constant([3.0, 4.0]))


@states
def a_hessian_vector_product_is_of_all_xs_together(lib):
    def f(x, z):
        v = [lib.constant([1.0, -1.0]), lib.constant([0.5, 2.0])]
        return lib.hessian_vector_product(lib.sum(x**2 * z), [x, z], v)

    return lib.function(f)(lib.constant([1.0, 2.0]), lib.constant([3.0, 4.0]))


@states
def the_vector_of_a_hessian_vector_product_is_a_constant(lib):
    def f(x):
        return lib.hessian_vector_product(x**3, [x], [x * x])

    return lib.function(f)(lib.constant(2.0))


@states
def a_hessian_vector_product_for_an_unconnected_x_is_none(lib):
    def f(x, z):
        return lib.hessian_vector_product(x**3, [x, z], [lib.constant(1.0), lib.constant(1.0)])

    return lib.function(f)(lib.constant(2.0), lib.constant(3.0))


@states
def a_hessian_vector_product_of_unequal_lengths_raises(lib):
    def f(x, z):
        return lib.hessian_vector_product(x * z, [x, z], [lib.constant(1.0)])[0]

    return raised(lambda: lib.function(f)(lib.constant(2.0), lib.constant(3.0)))


@states
def a_batch_jacobian_has_one_jacobian_for_each_example(lib):
    x = lib.constant([[1.0, 2.0], [3.0, 4.0]])
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = x**2 * x[:, :1]
    return tape.batch_jacobian(y, x)


@states
def a_batch_jacobian_for_an_unconnected_source_is_zeros(lib):
    x, z = lib.constant([[1.0, 2.0], [3.0, 4.0]]), lib.constant([[1.0], [2.0]])
    with lib.GradientTape() as tape:
        tape.watch([x, z])
        y = x**2
    return tape.batch_jacobian(y, z)


@states
def a_batch_jacobian_of_rank_below_two_or_unequal_batches_raises(lib):
    def attempt(x, reshape):
        with lib.GradientTape() as tape:
            tape.watch(x)
            y = lib.reshape(x * x, reshape)
        return raised(lambda: tape.batch_jacobian(y, x))

    matrix = lib.constant([[1.0, 2.0], [3.0, 4.0]])
    return [
        attempt(lib.constant([1.0, 2.0]), (2, 1)),
        attempt(matrix, (4,)),
        attempt(matrix, (4, 1)),
    ]


@states
def a_name_is_a_scope_of_the_backward_operations(lib):
    def f(x):
        return lib.gradients(lib.sin(x) * x, x, name="backwards")[0]

    return lib.has_scope(f, lib.constant(1.0), "backwards")


@states
def every_aggregation_method_gives_the_same_value(lib):
    methods = lib.AggregationMethod
    return [
        lib.function(
            lambda x, method=method: lib.gradients(
                lib.sin(x) + lib.sin(2 * x) + x * x, x, aggregation_method=method
            )
        )(lib.constant(0.5))
        for method in (
            methods.DEFAULT,
            methods.ADD_N,
            methods.EXPERIMENTAL_TREE,
            methods.EXPERIMENTAL_ACCUMULATE_N,
        )
    ]


@states
def an_unknown_aggregation_method_raises(lib):
    def f(x):
        return lib.gradients(lib.sin(x) + lib.sin(2 * x), x, aggregation_method=1789)[0]

    return raised(lambda: lib.function(f)(lib.constant(2.0)))


@states
def gated_and_colocated_gradients_have_the_same_values(lib):
    def f(x, z):
        y = lib.sin(x * z) * x
        return (
            lib.gradients(y, [x, z]),
            lib.gradients(y, [x, z], gate_gradients=True),
            lib.gradients(y, [x, z], colocate_gradients_with_ops=True),
        )

    return lib.function(f)(lib.constant(2.0), lib.constant(0.5))


@states
def gradients_outside_of_a_traced_function_and_of_a_tape_raises(lib):
    x = lib.constant(2.0)
    return raised(lambda: lib.gradients(x * x, x))


# ---------------------------------------------------------------------------------- Complex numbers


@states(ours={"real": 2.0, "imag": 4.0}, because="JAX's convention, the conjugate of TensorFlow's")
def complex_gradients_are_the_conjugates_of_tensorflows(lib):
    z = lib.constant(1 + 2j, "complex64")
    return slope(lib, lambda: z * z, z, output_gradients=lib.constant(1 + 0j, "complex64"))


@states(ours={"real": 2.0, "imag": -4.0}, because="JAX's convention: ∂/∂re − i ∂/∂im")
def the_gradient_of_a_real_function_of_a_complex_one_too(lib):
    z = lib.constant(1 + 2j, "complex64")
    return slope(lib, lambda: lib.real(z) ** 2 + lib.imag(z) ** 2, z)
