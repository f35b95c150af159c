"""Records what TensorFlow gives for each program of ``statements``, and for ``same_name``.

Run it in an environment of its own, where TensorFlow is installed; nothing else here needs it:

    pip install "tensorflow-cpu==2.21.*" flax
    python tests/conformance/record.py

It writes ``tensorflow.json``, beside this file, with the version of TensorFlow in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from same_name import NUMBERS
from statements import STATEMENTS, plain

RECORDED = Path(__file__).with_name("tensorflow.json")


def tensorflow_namespace() -> Any:
    """What the programs use, of TensorFlow."""
    import tensorflow as tf
    from tensorflow.python.ops import gradients_impl

    def warnings_of(run):
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        return len(caught)

    def has_scope(fun, argument, name):
        graph = tf.function(fun).get_concrete_function(argument).graph
        return any(name in operation.name.split("/") for operation in graph.get_operations())

    def to_dense(slices, dtype=None, run=True):
        if run:
            return tf.convert_to_tensor(slices, dtype=dtype)
        with tf.Graph().as_default():
            placed = tf.IndexedSlices(
                tf.constant(slices.values.numpy()),
                tf.constant(slices.indices.numpy()),
                tf.constant(slices.dense_shape.numpy()),
            )
            return tf.convert_to_tensor(placed)

    def gradient_override_map(names):
        return tf.compat.v1.get_default_graph().gradient_override_map(names)

    def numpy_function(func, inp, Tout, stateful=True):
        return tf.numpy_function(func, inp, Tout, stateful=stateful)

    return SimpleNamespace(
        constant=lambda value, dtype="float32": tf.constant(value, dtype),
        Variable=tf.Variable,
        GradientTape=tf.GradientTape,
        ForwardAccumulator=tf.autodiff.ForwardAccumulator,
        IndexedSlices=tf.IndexedSlices,
        UnconnectedGradients=tf.UnconnectedGradients,
        AggregationMethod=tf.AggregationMethod,
        function=lambda fun: tf.function(fun, autograph=False),
        gradients=tf.compat.v1.gradients,  # takes colocate_gradients_with_ops
        hessians=tf.hessians,
        hessian_vector_product=gradients_impl._hessian_vector_product,
        custom_gradient=tf.custom_gradient,
        stop_gradient=tf.stop_gradient,
        recompute_grad=tf.recompute_grad,
        grad_pass_through=tf.grad_pass_through,
        numpy_function=numpy_function,
        register_gradient=tf.RegisterGradient,
        gradient_override_map=gradient_override_map,
        SIN="Sin",
        float32=tf.float32,
        sparse={},
        dense_shape=lambda shape: tf.constant(shape, tf.int64),
        to_dense=to_dense,
        warnings_of=warnings_of,
        has_scope=has_scope,
        name_of=lambda variable: variable.name.removesuffix(":0"),
        tick=lambda runs: runs.append(None),
        finish=lambda: None,
        cond=tf.cond,
        cast=tf.cast,
        gather=tf.gather,
        sum=tf.reduce_sum,
        reshape=tf.reshape,
        sin=tf.sin,
        cosh=tf.cosh,
        exp=tf.exp,
        log=tf.math.log,
        floor=tf.floor,
        ceil=tf.math.ceil,
        round=tf.round,
        sign=tf.sign,
        real=tf.math.real,
        imag=tf.math.imag,
    )


def lines(table: dict[str, Any]) -> str:
    """In JSON, one program a line, so that a change is seen."""
    inner = [f"  {json.dumps(name)}: {json.dumps(result)}" for name, result in table.items()]
    return "{\n" + ",\n".join(inner) + "\n }"


def main() -> None:
    import tensorflow as tf

    lib = tensorflow_namespace()
    results = {
        name: plain(statement.program(lib))
        for name, statement in STATEMENTS.items()
        if statement.recorded
    }
    numbers = {name: np.ravel(number.tensorflow(tf)).tolist() for name, number in NUMBERS.items()}
    RECORDED.write_text(
        f'{{\n "tensorflow": {json.dumps(tf.__version__)},\n "results": {lines(results)},\n'
        f' "numbers": {lines(numbers)}\n}}\n'
    )
    print(f"recorded {len(results)} programs with TensorFlow {tf.__version__} in {RECORDED}")


if __name__ == "__main__":
    main()
