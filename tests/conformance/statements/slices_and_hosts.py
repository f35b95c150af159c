"""Sparse gradients, functions of NumPy, and the registry of gradients."""

from __future__ import annotations

import numpy as np

from statements.statement import raised, slope, states, value_and_slope

# ------------------------------------------------------------------------------------ IndexedSlices


def _sparse(lib, use, rows=4):
    """The gradient of a table, of which `use` makes something."""
    table = lib.constant([[float(r), r + 0.5] for r in range(rows)])
    return slope(lib, lambda: use(table), table, **lib.sparse)


@states
def one_slice_for_each_lookup(lib):
    return _sparse(lib, lambda t: lib.gather(t, [0, 2, 0]) * lib.constant([[1.0], [2.0], [3.0]]))


@states
def two_gathers_of_one_table_stay_sparse(lib):
    return _sparse(lib, lambda t: lib.gather(t, [0, 2]) * 2 + lib.gather(t, [1, 0]) * 3)


@states
def a_gather_of_a_gather_stays_sparse(lib):
    return _sparse(lib, lambda t: lib.gather(lib.gather(t, [3, 1, 2]), [0, 2, 0]) * 2)


@states
def matrix_indices_are_flattened(lib):
    return _sparse(lib, lambda t: lib.gather(t, [[0, 2], [3, 0]]) * 2)


@states
def a_gather_mixed_with_a_dense_use_is_dense(lib):
    return _sparse(lib, lambda t: lib.sum(lib.gather(t, [0, 2]) * 2) + lib.sum(t * t))


@states
def a_gather_from_a_computed_table_is_dense(lib):
    return _sparse(lib, lambda t: lib.gather(t * 3, [0, 2]) * 2)


@states
def a_custom_gradient_may_return_slices(lib):
    @lib.custom_gradient
    def lookup(table):
        def grad_fn(dy):
            ids = lib.constant([1, 1], "int32")
            return lib.IndexedSlices(dy * 10, ids, lib.dense_shape((4, 2)))

        return lib.gather(table, [1, 1]), grad_fn

    return _sparse(lib, lookup)


@states
def slices_turn_dense(lib):
    slices = lib.IndexedSlices(
        lib.constant([[1.0], [2.0], [4.0]]),
        lib.constant([0, 2, 0], "int32"),
        lib.dense_shape((3, 1)),
    )
    return lib.to_dense(slices)


@states(
    ours=["TypeError", "ValueError"],
    because="a dtype that does not fit is a TypeError everywhere",
)
def slices_of_another_dtype_or_of_unknown_shape_do_not_turn_dense(lib):
    values, ids = lib.constant([[1.0]]), lib.constant([0], "int32")
    slices = lib.IndexedSlices(values, ids, lib.dense_shape((3, 1)))
    return [
        raised(lambda: lib.to_dense(slices, dtype="int32")),
        raised(lambda: lib.to_dense(lib.IndexedSlices(values, ids))),
    ]


@states
def turning_large_slices_dense_warns(lib):
    def dense():
        slices = lib.IndexedSlices(
            lib.constant([[1.0]]), lib.constant([0], "int32"), lib.dense_shape((200_000_000, 1))
        )
        return lib.to_dense(slices, run=False)

    return lib.warnings_of(dense) > 0


@states(
    recorded=False,
    ours=[[3, 4, 0], [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0], [2.0, 2.0]]],
    because="gathers in TensorFlow take no such ids; the index behind the last row is no row",
)
def ids_outside_of_the_table_are_dropped_and_negative_ones_normalised(lib):
    slices = _sparse(lib, lambda t: lib.gather(t, [-1, 7, 0]) * 2)
    return [slices.indices, lib.to_dense(slices)]


# ------------------------------------------------------------------ Host functions and the registry


def _on_the_host(lib, **options):
    x = lib.constant([1.0, 2.0])
    return value_and_slope(
        lib, lambda: lib.numpy_function(lambda x: np.sinh(x), [x], lib.float32, **options), x
    )


@states
def a_numpy_function_has_the_gradient_none_on_tapes(lib):
    return _on_the_host(lib)


@states(
    recorded=False,
    ours=[[1.1752012, 3.6268604], [1.5430807, 3.7621956]],
    because="tf.numpy_function takes no gradient",
)
def a_numpy_function_may_be_given_a_gradient(lib):
    return _on_the_host(lib, grad=lambda op, dy: dy * lib.cosh(op.inputs[0]))


@states
def a_numpy_function_is_run_with_each_call_and_not_while_tracing(lib):
    runs = []

    def host(x):
        runs.append(None)
        return x * np.float32(2)

    f = lib.function(lambda x: lib.numpy_function(host, [x], lib.float32, stateful=True) * 3)
    results = [f(lib.constant(1.0)), f(lib.constant(2.0))]
    return [results, len(runs)]


def _overridden(lib, *names):
    def f(x):
        outer = lib.gradient_override_map({lib.SIN: names[0]})
        inner = lib.gradient_override_map({lib.SIN: names[-1]})
        with outer, inner:
            y = lib.sin(x)
        return lib.gradients(y + lib.sin(x), x)[0]

    return lib.function(f)(lib.constant(0.5))


@states
def an_override_applies_to_operations_created_in_its_block(lib):
    lib.register_gradient("ConformanceTen")(lambda op, dy: dy * 10)
    return _overridden(lib, "ConformanceTen")


@states
def the_innermost_override_wins(lib):
    lib.register_gradient("ConformanceOuter")(lambda op, dy: dy * 100)
    lib.register_gradient("ConformanceInner")(lambda op, dy: dy * 1000)
    return _overridden(lib, "ConformanceOuter", "ConformanceInner")


@states
def an_unregistered_name_raises_when_a_gradient_is_asked_for(lib):
    def forward(x):
        with lib.gradient_override_map({lib.SIN: "ConformanceUnknown"}):
            return lib.sin(x)

    def backward(x):
        return lib.gradients(forward(x), x)[0]

    x = lib.constant(0.5)
    return [lib.function(forward)(x), raised(lambda: lib.function(backward)(x))]


@states
def registering_a_name_twice_raises(lib):
    lib.register_gradient("ConformanceTwice")(lambda op, dy: dy)
    return raised(lambda: lib.register_gradient("ConformanceTwice")(lambda op, dy: dy))
