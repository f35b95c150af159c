"""The gallery's bugs in PyTorch: functions of what gets the gradient, by the gallery's names.

As close to tests/insight/gallery as PyTorch lets one write them; the line of the bug ends with
``# here``, where it is on a line. What else gets a gradient there is a leaf here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

BUGS: dict[str, tuple[Callable[..., Any], Any]] = {}
ABSENT = {
    "dynamic_loop": "no bug there: loops are differentiated",
    "jvp_rule_without_a_tangent": "JAX alone: reverse mode from a JVP",
}

t = torch.tensor
DATA = t([[1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]])


def leaf(*shape: int) -> Any:
    return torch.ones(shape, requires_grad=True)


def at(x: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Name the function after itself as a bug, to be differentiated at x."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        BUGS[function.__name__] = (function, x)
        return function

    return add


# ------------------------------------------------------------------------------------ NaN and Inf


@at(t([1.0, 0.0]))
def angle_of_parallel_vectors(a):
    cosine = (a * t([1.0, 0.0])).sum()
    return torch.arccos(cosine)  # here


@at(t([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]))
def division_that_is_masked_later(x):
    count = (t([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]) * x).sum(1)
    mean = torch.where(count > 0, 1.0 / count, 0.0)  # here
    return mean.sum()


@at(torch.eye(2))
def equal_eigenvalues(a):
    values, vectors = torch.linalg.eigh(a)  # here
    return (vectors[:, 0] ** 4).sum() + values.sum()


@at(100.0 * torch.ones(3, 2))
def half_precision_overflow(w):
    h = (torch.ones(2, 3) @ w).to(torch.float16)
    return (h * h).sum()  # here


@at(t([[3.0, 4.0], [0.0, 0.0]]))
def linalg_norm_of_a_zero_vector(w):
    length = torch.linalg.norm(w, dim=1)  # here
    return length.sum()


@at(t([[200.0, 0.0]]))
def log_of_a_softmax(logits):
    p = torch.softmax(logits, -1)
    return -(t([[0.5, 0.5]]) * torch.log(p)).sum(-1).mean()  # here


@at(100.0 * torch.ones(3))
def log_one_plus_exp(w):
    z = torch.ones(2, 3) @ w
    return torch.log(1.0 + torch.exp(z)).sum()  # here


@at(torch.ones(3))
def missing_value_in_the_data(w):
    return ((DATA @ w) ** 2).mean()


@at(torch.zeros(3))
def nan_in_a_rule(x):
    class Length(Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.sqrt((x**2).sum())
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, ct):
            x, y = ctx.saved_tensors
            return ct * x / y  # here

    return Length.apply(x) + x.sum()


@at(torch.ones(3))
def norm_at_zero(a):
    square = ((a - torch.ones(3)) ** 2).sum()
    return torch.sqrt(square) + a.sum()  # here


@at(t([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0], [7.0, 8.0]]))
def one_step_of_a_scan(xs):
    h = total = torch.zeros(2)
    for x in xs:
        h = h + torch.sqrt(x)  # here
        total = total + h
    return total.sum()


@at(t([[1.0, 1.0], [0.0, 0.0]]))
def polar_coordinates_of_the_origin(points):
    angle = torch.arctan2(points[:, 1], points[:, 0])  # here
    return angle.sum()


@at(t([0.0, 0.5]))
def power_of_zero(pixels):
    return (pixels**0.45).mean()  # here


@at(torch.eye(2))
def row_masked_as_a_whole(q):
    mask = t([[True, False], [False, False]])
    scores = torch.where(mask, q @ torch.eye(2).T, -torch.inf)
    return torch.softmax(scores, -1).sum()  # here


@at(t([0.5, 0.5, 0.0]))
def single_where_around_a_log(p):
    entropy = torch.where(p > 0, p * torch.log(p), 0.0)  # here
    return -entropy.sum()


@at(torch.ones(2, 2))
def spread_of_a_constant_feature(w):
    h = torch.ones(4, 2) @ w
    spread = h.std(0, correction=0) + 1e-5  # here
    return ((h - h.mean(0)) / spread).sum()


@at(t([-100.0, 1.0]))
def written_out_sigmoid(x):
    return (1.0 / (1.0 + torch.exp(-x))).sum()  # here


@at(t([[200.0, 1.0]]))
def written_out_softmax(logits):
    weights = torch.exp(logits)  # here
    p = weights / weights.sum(-1, keepdim=True)
    return -(t([[1.0, 0.0]]) * torch.log(p)).sum()


# ------------------------------------------------------------------------------------ no gradient


@at(torch.ones(2, 3))
def binary_activation(w):
    h = torch.sign(torch.ones(4, 2) @ w)  # here
    return ((h @ leaf(3)) ** 2).mean()


@at(t([0.1, 0.9]))
def bins_by_floor(x):
    bins = torch.floor(x / 0.5)  # here
    return (leaf(2) * bins).sum()


@at(torch.ones(3))
def branch_not_taken(scale):
    training = False
    x = torch.ones(3)
    y = x * scale if training else x * 2.0  # here
    return (y * leaf(3)).sum()


@at(torch.ones(2))
def global_instead_of_the_argument(bias):
    prediction = torch.ones(2, 3) @ leaf(3)  # here
    return (prediction**2).mean()


@at(torch.eye(3))
def greedy_decoding(w):
    logits = torch.eye(3)[:2] @ w
    token = torch.argmax(logits, -1)  # here
    return (torch.nn.functional.one_hot(token, 3).float() @ leaf(3, 2)).sum()


@at(t(0.5))
def hard_threshold(threshold):
    x = t([0.2, 0.7])
    kept = x > threshold  # here
    return (kept * x).sum()


@at(t([0.3, 1.7]))
def indices_by_an_integer_cast(position):
    index = position.long()  # here
    return (t([1.0, 2.0, 3.0])[index] ** 2).sum()


@at(t([1.0, 0.0, 2.0]))
def mask_by_a_cast_to_bool(gate):
    mask = gate.bool()  # here
    return torch.where(mask, torch.ones(3), 0.0).sum()


@at(torch.ones(3))
def numpy_in_the_middle(w):
    smooth = (w * torch.arange(3.0)).numpy() * 0.5  # here
    return torch.from_numpy(smooth).sum()


@at(torch.ones(4, 2))
def padding_index_out_of_bounds(table):
    rows = table[t([4, 5])]  # here
    return (rows + 1.0).sum()


@at(t(1.0))
def parameter_never_used(bias):
    return ((torch.ones(2, 3) @ leaf(3)) ** 2).mean()


@at(t([0.3, -0.2]))
def quantised_weights(weight):
    steps = torch.round(weight * 8.0)  # here
    return ((torch.ones(4, 2) @ (steps / 8.0)) ** 2).mean()


@at(t([0.2, 0.9, 0.4]))
def ranking_by_argsort(scores):
    ranks = torch.argsort(scores)  # here
    return (t([1.0, 0.0, 2.0]) / (1.0 + ranks)).sum()


@at(torch.ones(4, 3))
def stop_gradient_left_in_a_module(encoder):
    features = torch.tanh(torch.ones(2, 3) @ encoder.T)
    return ((features.detach() @ leaf(4)) ** 2).mean()  # here


@at(torch.ones(3))
def stop_gradient_on_the_wrong_side(w):
    x = t([[1.0, 2.0, 3.0]])
    value = (x @ w).detach()  # here
    target = 1.0 + 0.9 * (x @ leaf(3))
    return ((target - value) ** 2).mean()


# ------------------------------------------------------------------- gradients of zero, or too far


@at(torch.zeros(3, 2))
def both_factors_start_at_zero(down):
    x = torch.ones(4, 3)
    y = (x @ down) @ torch.zeros(2, 3)  # here
    return (y + x).sum()


@at(10.0 * torch.ones(3, 2))
def clipped_everywhere(w):
    logits = torch.clip(torch.ones(4, 3) @ w, -1.0, 1.0)  # here
    return (logits**2).sum()


@at(torch.ones(3, 4))
def dead_maximum(w):
    h = torch.maximum(-torch.exp(torch.ones(8, 3) @ w), t(0.0))  # here
    return h.sum()


@at(torch.ones(3, 4))
def dead_relu(w):
    h = torch.relu(torch.ones(8, 3) @ w - 30.0)  # here
    return ((h @ leaf(4)) ** 2).mean()


@at(0.5 * torch.eye(4))
def deep_sigmoids(first):
    x = torch.ones(2, 4)
    for w in [first, *(0.5 * leaf(4, 4) * torch.eye(4) for _ in range(11))]:
        x = torch.sigmoid(x @ w)  # here
    return (x**2).mean()


@at(torch.ones(3, 2))
def dropout_scale_by_zero(w):
    x = torch.ones(4, 3) @ w
    mask = torch.rand(x.shape) < 0.0
    return (x * mask).sum()  # here


@at(torch.ones(3))
def forgetting_recurrence(h):
    for x in 0.1 * torch.ones(40, 3):
        h = torch.tanh(0.2 * h + x)  # here
    return h.sum()


@at(torch.ones(3, 2))
def saturated_tanh(w):
    h = torch.tanh(100.0 * torch.ones(4, 3) @ w)  # here
    return h.sum()


@at(40.0 * torch.eye(3))
def weights_too_large(first):
    x = torch.ones(2, 3)
    for w in [first, *(40.0 * leaf(3, 3) * torch.eye(3) for _ in range(7))]:
        x = torch.sin(x @ w)  # here
    return x.mean()


@at(torch.ones(3))
def where_never_takes_it(late):
    long = torch.arange(3) >= 3
    x = torch.ones(3)
    return torch.where(long, x * late, x * leaf(3)).sum()  # here


# ------------------------------------------------------------------------------ rules of one's own


class ClipGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, ct):
        return ct.clip(-0.01, 0.01)


class Scaled(Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, ct):
        return ct * ctx.saved_tensors[0], None


class Affine(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, ct):
        w = ctx.saved_tensors[0]
        return ct * w, torch.zeros_like(w)


class Square(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, ct):
        return ct * ctx.saved_tensors[0]


@at(torch.ones(3))
def rule_that_clips(w):
    h = ClipGradient.apply(torch.ones(2, 3) @ w)  # here
    return (h**2).sum()


@at(t(2.0))
def rule_that_returns_none(scale):
    y = Scaled.apply(torch.ones(3), scale)  # here
    return (y**2).sum()


@at(torch.ones(3))
def rule_that_returns_zeros(w):
    return Affine.apply(torch.arange(3.0), w).sum()  # here


@at(torch.ones(3))
def rule_with_a_wrong_factor(w):
    return Square.apply(torch.ones(2, 3) @ w).sum()  # here
