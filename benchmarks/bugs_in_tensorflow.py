"""The gallery's bugs in TensorFlow: functions of what gets the gradient, by the gallery's names.

As close to tests/insight/gallery as TensorFlow lets one write them, eagerly and in a
``tf.function``; the line of the bug ends with ``# here``, where it is on a line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

BUGS: dict[str, tuple[Callable[..., Any], Any]] = {}
ABSENT = {
    "dynamic_loop": "no bug there: loops are differentiated",
    "jvp_rule_without_a_tangent": "JAX alone: reverse mode from a JVP",
}

t = tf.constant
DATA = t([[1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]])


def at(x: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Name the function after itself as a bug, to be differentiated at x."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        BUGS[function.__name__] = (function, x)
        return function

    return add


# ------------------------------------------------------------------------------------ NaN and Inf


@at(t([1.0, 0.0]))
def angle_of_parallel_vectors(a):
    cosine = tf.reduce_sum(a * t([1.0, 0.0]))
    return tf.acos(cosine)  # here


@at(tf.ones((2, 3)))
def division_that_is_masked_later(x):
    count = tf.reduce_sum(t([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]) * x, 1)
    mean = tf.where(count > 0, 1.0 / count, 0.0)  # here
    return tf.reduce_sum(mean)


@at(tf.eye(2))
def equal_eigenvalues(a):
    values, vectors = tf.linalg.eigh(a)  # here
    return tf.reduce_sum(vectors[:, 0] ** 4) + tf.reduce_sum(values)


@at(100.0 * tf.ones((3, 2)))
def half_precision_overflow(w):
    h = tf.cast(tf.ones((2, 3)) @ w, tf.float16)
    return tf.reduce_sum(h * h)  # here


@at(t([[3.0, 4.0], [0.0, 0.0]]))
def linalg_norm_of_a_zero_vector(w):
    length = tf.norm(w, axis=1)  # here
    return tf.reduce_sum(length)


@at(t([[200.0, 0.0]]))
def log_of_a_softmax(logits):
    p = tf.nn.softmax(logits)
    return -tf.reduce_sum(t([[0.5, 0.5]]) * tf.math.log(p))  # here


@at(100.0 * tf.ones((3, 1)))
def log_one_plus_exp(w):
    z = tf.ones((2, 3)) @ w
    return tf.reduce_sum(tf.math.log(1.0 + tf.exp(z)))  # here


@at(tf.ones((3, 1)))
def missing_value_in_the_data(w):
    return tf.reduce_mean((DATA @ w) ** 2)


@at(tf.zeros(3))
def nan_in_a_rule(x):
    @tf.custom_gradient
    def length(x):
        y = tf.sqrt(tf.reduce_sum(x**2))

        def gradient(dy):
            return dy * x / y  # here

        return y, gradient

    return length(x) + tf.reduce_sum(x)


@at(tf.ones(3))
def norm_at_zero(a):
    square = tf.reduce_sum((a - tf.ones(3)) ** 2)
    return tf.sqrt(square) + tf.reduce_sum(a)  # here


@at(t([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0], [7.0, 8.0]]))
def one_step_of_a_scan(xs):
    h = total = tf.zeros(2)
    for i in range(4):
        h = h + tf.sqrt(xs[i])  # here
        total = total + h
    return tf.reduce_sum(total)


@at(t([[1.0, 1.0], [0.0, 0.0]]))
def polar_coordinates_of_the_origin(points):
    angle = tf.atan2(points[:, 1], points[:, 0])  # here
    return tf.reduce_sum(angle)


@at(t([0.0, 0.5]))
def power_of_zero(pixels):
    return tf.reduce_mean(pixels**0.45)  # here


@at(tf.eye(2))
def row_masked_as_a_whole(q):
    mask = t([[True, False], [False, False]])
    scores = tf.where(mask, q @ tf.eye(2), -float("inf"))
    return tf.reduce_sum(tf.nn.softmax(scores))  # here


@at(t([0.5, 0.5, 0.0]))
def single_where_around_a_log(p):
    entropy = tf.where(p > 0, p * tf.math.log(p), 0.0)  # here
    return -tf.reduce_sum(entropy)


@at(tf.ones((2, 2)))
def spread_of_a_constant_feature(w):
    h = tf.ones((4, 2)) @ w
    spread = tf.math.reduce_std(h, 0) + 1e-5  # here
    return tf.reduce_sum((h - tf.reduce_mean(h, 0)) / spread)


@at(t([-100.0, 1.0]))
def written_out_sigmoid(x):
    return tf.reduce_sum(1.0 / (1.0 + tf.exp(-x)))  # here


@at(t([[200.0, 1.0]]))
def written_out_softmax(logits):
    weights = tf.exp(logits)  # here
    p = weights / tf.reduce_sum(weights, -1, keepdims=True)
    return -tf.reduce_sum(t([[1.0, 0.0]]) * tf.math.log(p))


# ------------------------------------------------------------------------------------ no gradient


@at(tf.ones((2, 3)))
def binary_activation(w):
    h = tf.sign(tf.ones((4, 2)) @ w)  # here
    return tf.reduce_mean((h @ tf.ones((3, 1))) ** 2)


@at(t([0.1, 0.9]))
def bins_by_floor(x):
    bins = tf.floor(x / 0.5)  # here
    return tf.reduce_sum(bins)


@at(tf.ones(3))
def branch_not_taken(scale):
    training, x = t(False), tf.ones(3)
    y = tf.cond(training, lambda: x * scale, lambda: x * 2.0)  # here
    return tf.reduce_sum(y)


@at(tf.ones(2))
def global_instead_of_the_argument(bias):
    prediction = tf.ones((2, 3)) @ t([[0.5], [-1.5], [2.5]])  # here
    return tf.reduce_mean(prediction**2)


@at(tf.eye(3))
def greedy_decoding(w):
    logits = tf.eye(3)[:2] @ w
    token = tf.argmax(logits, -1)  # here
    return tf.reduce_sum(tf.one_hot(token, 3) @ tf.ones((3, 2)))


@at(t(0.5))
def hard_threshold(threshold):
    x = t([0.2, 0.7])
    kept = x > threshold  # here
    return tf.reduce_sum(tf.cast(kept, x.dtype) * x)


@at(t([0.3, 1.7]))
def indices_by_an_integer_cast(position):
    index = tf.cast(position, tf.int32)  # here
    return tf.reduce_sum(tf.gather(t([1.0, 2.0, 3.0]), index) ** 2)


@at(t([1.0, 0.0, 2.0]))
def mask_by_a_cast_to_bool(gate):
    mask = tf.cast(gate, tf.bool)  # here
    return tf.reduce_sum(tf.where(mask, tf.ones(3), 0.0))


@at(tf.ones(3))
def numpy_in_the_middle(w):
    h = w * t([0.0, 1.0, 2.0])
    smooth = tf.numpy_function(lambda a: a * a.dtype.type(0.5), [h], tf.float32)  # here
    return tf.reduce_sum(smooth)


@at(tf.ones((4, 2)))
def padding_index_out_of_bounds(table):
    rows = tf.gather(table, t([4, 5]))  # here
    return tf.reduce_sum(rows + 1.0)


@at(t(1.0))
def parameter_never_used(bias):
    return tf.reduce_mean((tf.ones((2, 3)) @ tf.ones((3, 1))) ** 2)


@at(t([[0.3], [-0.2]]))
def quantised_weights(weight):
    steps = tf.round(weight * 8.0)  # here
    return tf.reduce_mean((tf.ones((4, 2)) @ (steps / 8.0)) ** 2)


@at(t([0.2, 0.9, 0.4]))
def ranking_by_argsort(scores):
    ranks = tf.argsort(scores)  # here
    return tf.reduce_sum(t([1.0, 0.0, 2.0]) / (1.0 + tf.cast(ranks, tf.float32)))


@at(tf.ones((3, 4)))
def stop_gradient_left_in_a_module(encoder):
    features = tf.tanh(tf.ones((2, 3)) @ encoder)
    return tf.reduce_mean((tf.stop_gradient(features) @ tf.ones((4, 1))) ** 2)  # here


@at(tf.ones((3, 1)))
def stop_gradient_on_the_wrong_side(w):
    x = t([[1.0, 2.0, 3.0]])
    value = tf.stop_gradient(x @ w)  # here
    target = 1.0 + 0.9 * (x @ tf.ones((3, 1)))
    return tf.reduce_mean((target - value) ** 2)


# ------------------------------------------------------------------- gradients of zero, or too far


@at(tf.zeros((3, 2)))
def both_factors_start_at_zero(down):
    x = tf.ones((4, 3))
    y = (x @ down) @ tf.zeros((2, 3))  # here
    return tf.reduce_sum(y + x)


@at(10.0 * tf.ones((3, 2)))
def clipped_everywhere(w):
    logits = tf.clip_by_value(tf.ones((4, 3)) @ w, -1.0, 1.0)  # here
    return tf.reduce_sum(logits**2)


@at(tf.ones((3, 4)))
def dead_maximum(w):
    h = tf.maximum(-tf.exp(tf.ones((8, 3)) @ w), 0.0)  # here
    return tf.reduce_sum(h)


@at(tf.ones((3, 4)))
def dead_relu(w):
    h = tf.nn.relu(tf.ones((8, 3)) @ w - 30.0)  # here
    return tf.reduce_mean((h @ tf.ones((4, 1))) ** 2)


@at(0.5 * tf.eye(4))
def deep_sigmoids(first):
    x = tf.ones((2, 4))
    for w in [first, *(0.5 * tf.eye(4) for _ in range(11))]:
        x = tf.sigmoid(x @ w)  # here
    return tf.reduce_mean(x**2)


@at(tf.ones((3, 2)))
def dropout_scale_by_zero(w):
    x = tf.ones((4, 3)) @ w
    mask = tf.random.uniform((4, 2)) < 0.0
    return tf.reduce_sum(x * tf.cast(mask, x.dtype))  # here


@at(tf.ones(3))
def forgetting_recurrence(h):
    for _ in range(40):
        h = tf.tanh(0.2 * h + 0.1)  # here
    return tf.reduce_sum(h)


@at(tf.ones((3, 2)))
def saturated_tanh(w):
    h = tf.tanh(100.0 * tf.ones((4, 3)) @ w)  # here
    return tf.reduce_sum(h)


@at(40.0 * tf.eye(3))
def weights_too_large(first):
    x = tf.ones((2, 3))
    for w in [first, *(40.0 * tf.eye(3) for _ in range(7))]:
        x = tf.sin(x @ w)  # here
    return tf.reduce_mean(x)


@at(tf.ones(3))
def where_never_takes_it(late):
    long = tf.range(3) >= 3
    x = tf.ones(3)
    return tf.reduce_sum(tf.where(long, x * late, x))  # here


# ------------------------------------------------------------------------------ rules of one's own


@tf.custom_gradient
def clip_gradient(x):
    return tf.identity(x), lambda dy: tf.clip_by_value(dy, -0.01, 0.01)


@tf.custom_gradient
def scaled(x, scale):
    return x * scale, lambda dy: (dy * scale, None)


@tf.custom_gradient
def affine(x, w):
    return x * w, lambda dy: (dy * w, tf.zeros_like(w))


@tf.custom_gradient
def square(x):
    return x**2, lambda dy: dy * x


@at(tf.ones((3, 1)))
def rule_that_clips(w):
    h = clip_gradient(tf.ones((2, 3)) @ w)  # here
    return tf.reduce_sum(h**2)


@at(t(2.0))
def rule_that_returns_none(scale):
    y = scaled(tf.ones(3), scale)  # here
    return tf.reduce_sum(y**2)


@at(tf.ones(3))
def rule_that_returns_zeros(w):
    return tf.reduce_sum(affine(t([0.0, 1.0, 2.0]), w))  # here


@at(tf.ones((3, 1)))
def rule_with_a_wrong_factor(w):
    return tf.reduce_sum(square(tf.ones((2, 3)) @ w))  # here
