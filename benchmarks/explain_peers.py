"""What PyTorch's anomaly mode and TensorFlow's ``check_numerics`` say of the gallery's bugs.

Those of them that can be written in all three; run it where PyTorch or TensorFlow is installed
(JAX is not needed). Beside it, ``explain.py --bugs``. Each says what was told, and whether the line
of the bug (marked ``# here``) was among what was printed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINES = Path(__file__).read_text().splitlines()


def torch_bugs(torch: Any) -> dict[str, tuple[Callable[..., Any], Any]]:
    t = torch.tensor

    def norm_at_zero(a):
        square = torch.sum((a - 1.0) ** 2)
        return torch.sqrt(square) + torch.sum(a)  # here: norm_at_zero

    def single_where_around_a_log(p):
        return torch.where(p > 0, p * torch.log(p), 0.0).sum()  # here: single_where_around_a_log

    def log_one_plus_exp(x):
        return torch.log(1.0 + torch.exp(x)).sum()  # here: log_one_plus_exp

    def written_out_sigmoid(x):
        return (1.0 / (1.0 + torch.exp(-x))).sum()  # here: written_out_sigmoid

    def written_out_softmax(x):
        w = torch.exp(x)  # here: written_out_softmax
        return (w / w.sum()).sum()

    def division_that_is_masked_later(x):
        return torch.where(x > 0, 1.0 / x, 0.0).sum()  # here: division_that_is_masked_later

    def angle_of_parallel_vectors(a):
        return torch.arccos(a[0])  # here: angle_of_parallel_vectors

    def power_of_zero(x):
        return (x**0.45).mean()  # here: power_of_zero

    def row_masked_as_a_whole(x):
        mask = torch.tensor([[True, False], [False, False]])
        scores = torch.where(mask, x, -torch.inf)
        return torch.softmax(scores, -1).sum()  # here: row_masked_as_a_whole

    def quantised_weights(w):
        return torch.round(w * 8.0).sum()  # here: quantised_weights

    def indices_by_an_integer_cast(x):
        index = x.long()  # here: indices_by_an_integer_cast
        return torch.arange(3.0)[index].sum() + torch.ones((), requires_grad=True)

    def stop_gradient_on_the_wrong_side(w):
        stopped = w.detach()  # here: stop_gradient_on_the_wrong_side
        return stopped.sum() + torch.ones((), requires_grad=True)

    def dead_relu(w):
        return torch.relu(w - 30.0).sum()  # here: dead_relu

    def saturated_tanh(x):
        return torch.tanh(x * 100.0).sum()  # here: saturated_tanh

    def missing_value_in_the_data(w):
        return (w * t([1.0, float("nan"), 1.0])).sum()  # here: missing_value_in_the_data

    ones = t([1.0, 1.0, 1.0])
    return {
        "norm_at_zero": (norm_at_zero, ones),
        "single_where_around_a_log": (single_where_around_a_log, t([0.5, 0.5, 0.0])),
        "log_one_plus_exp": (log_one_plus_exp, t([300.0])),
        "written_out_sigmoid": (written_out_sigmoid, t([-100.0, 1.0])),
        "written_out_softmax": (written_out_softmax, t([200.0, 1.0])),
        "division_that_is_masked_later": (division_that_is_masked_later, t([1.0, 0.0])),
        "angle_of_parallel_vectors": (angle_of_parallel_vectors, t([1.0, 0.0])),
        "power_of_zero": (power_of_zero, t([0.0, 0.5])),
        "row_masked_as_a_whole": (row_masked_as_a_whole, t([[1.0, 2.0], [3.0, 4.0]])),
        "quantised_weights": (quantised_weights, t([0.3, -0.2])),
        "indices_by_an_integer_cast": (indices_by_an_integer_cast, t([0.3, 1.7])),
        "stop_gradient_on_the_wrong_side": (stop_gradient_on_the_wrong_side, ones),
        "dead_relu": (dead_relu, ones),
        "saturated_tanh": (saturated_tanh, ones),
        "missing_value_in_the_data": (missing_value_in_the_data, ones),
    }


def said_by_torch(torch: Any, bug: Callable[..., Any], x: Any) -> tuple[str, str]:
    x = x.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                bug(x).backward()
        except RuntimeError as error:
            found = re.search(r"Function '(\w+)' returned", str(error))
            words = found[1] if found else type(error).__name__
            return words, "\n".join([*(str(w.message) for w in caught), traceback.format_exc()])
    return ("None" if x.grad is None else "nothing"), ""


def tensorflow_bugs(tf: Any) -> dict[str, tuple[Callable[..., Any], Any]]:
    t = tf.constant

    def norm_at_zero(a):
        square = tf.reduce_sum((a - 1.0) ** 2)
        return tf.sqrt(square) + tf.reduce_sum(a)  # here: norm_at_zero

    def single_where_around_a_log(p):
        terms = tf.where(p > 0, p * tf.math.log(p), 0.0)  # here: single_where_around_a_log
        return tf.reduce_sum(terms)

    def log_one_plus_exp(x):
        return tf.reduce_sum(tf.math.log(1.0 + tf.exp(x)))  # here: log_one_plus_exp

    def written_out_sigmoid(x):
        return tf.reduce_sum(1.0 / (1.0 + tf.exp(-x)))  # here: written_out_sigmoid

    def written_out_softmax(x):
        w = tf.exp(x)  # here: written_out_softmax
        return tf.reduce_sum(w / tf.reduce_sum(w))

    def division_that_is_masked_later(x):
        mean = tf.where(x > 0, 1.0 / x, 0.0)  # here: division_that_is_masked_later
        return tf.reduce_sum(mean)

    def angle_of_parallel_vectors(a):
        return tf.acos(a[0])  # here: angle_of_parallel_vectors

    def power_of_zero(x):
        return tf.reduce_mean(x**0.45)  # here: power_of_zero

    def row_masked_as_a_whole(x):
        scores = tf.where([[True, False], [False, False]], x, -float("inf"))
        return tf.reduce_sum(tf.nn.softmax(scores))  # here: row_masked_as_a_whole

    def quantised_weights(w):
        return tf.reduce_sum(tf.round(w * 8.0))  # here: quantised_weights

    def indices_by_an_integer_cast(x):
        index = tf.cast(x, "int32")  # here: indices_by_an_integer_cast
        return tf.reduce_sum(tf.gather(t([0.0, 1.0, 2.0]), index))

    def stop_gradient_on_the_wrong_side(w):
        return tf.reduce_sum(tf.stop_gradient(w) * 2.0)  # here: stop_gradient_on_the_wrong_side

    def dead_relu(w):
        return tf.reduce_sum(tf.nn.relu(w - 30.0))  # here: dead_relu

    def saturated_tanh(x):
        return tf.reduce_sum(tf.tanh(x * 100.0))  # here: saturated_tanh

    def missing_value_in_the_data(w):
        return tf.reduce_sum(w * t([1.0, float("nan"), 1.0]))  # here: missing_value_in_the_data

    ones = t([1.0, 1.0, 1.0])
    return {
        "norm_at_zero": (norm_at_zero, ones),
        "single_where_around_a_log": (single_where_around_a_log, t([0.5, 0.5, 0.0])),
        "log_one_plus_exp": (log_one_plus_exp, t([300.0])),
        "written_out_sigmoid": (written_out_sigmoid, t([-100.0, 1.0])),
        "written_out_softmax": (written_out_softmax, t([200.0, 1.0])),
        "division_that_is_masked_later": (division_that_is_masked_later, t([1.0, 0.0])),
        "angle_of_parallel_vectors": (angle_of_parallel_vectors, t([1.0, 0.0])),
        "power_of_zero": (power_of_zero, t([0.0, 0.5])),
        "row_masked_as_a_whole": (row_masked_as_a_whole, t([[1.0, 2.0], [3.0, 4.0]])),
        "quantised_weights": (quantised_weights, t([0.3, -0.2])),
        "indices_by_an_integer_cast": (indices_by_an_integer_cast, t([0.3, 1.7])),
        "stop_gradient_on_the_wrong_side": (stop_gradient_on_the_wrong_side, ones),
        "dead_relu": (dead_relu, ones),
        "saturated_tanh": (saturated_tanh, ones),
        "missing_value_in_the_data": (missing_value_in_the_data, ones),
    }


def said_by_tensorflow(tf: Any, bug: Callable[..., Any], x: Any) -> tuple[str, str]:
    try:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = bug(x)
        gradient = tape.gradient(y, x)
    except tf.errors.InvalidArgumentError as error:
        text = str(error)
        found = re.search(r"executing op \"?(?:b')?(\w+)", text)
        return found[1] if found else type(error).__name__, text + traceback.format_exc()
    return ("None" if gradient is None else "nothing"), ""


def line_of(name: str, start: int) -> int:
    marked = [i for i, line in enumerate(LINES, 1) if line.endswith(f"# here: {name}")]
    return next(i for i in marked if i >= start)


def main() -> None:
    peers: list[tuple[str, Any, Any]] = []
    if importlib.util.find_spec("torch"):
        peers.append(("torch", torch_bugs, said_by_torch))
    if importlib.util.find_spec("tensorflow"):
        peers.append(("tensorflow", tensorflow_bugs, said_by_tensorflow))
    for name, bugs, said in peers:
        module = importlib.import_module(name)
        if name == "tensorflow":
            module.debugging.enable_check_numerics()
        print(f"{name} {module.__version__}\n")
        for bug, (function, x) in bugs(module).items():
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                words, text = said(module, function, x)
            line = line_of(bug, function.__code__.co_firstlineno)
            found = re.search(
                rf"{re.escape(Path(__file__).name)}\"?, line {line}\b|:{line}\b", text
            )
            where = "" if not text else ", the line" if found else ", no line"
            errors.close()
            print(f"| {bug.replace('_', ' '):32} | {words + where:40} |")


if __name__ == "__main__":
    main()
