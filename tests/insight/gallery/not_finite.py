"""NaN and Inf, in the forward pass or in the reverse pass alone."""

import jax
import jax.numpy as jnp
from flax import nnx

from .bug import Bug, bug


@bug
def angle_of_parallel_vectors():
    """arccos at 1 has an infinite derivative."""

    def loss(a, b):
        cosine = jnp.sum(a * b)
        return jnp.arccos(cosine)  # cause: NaN in the reverse pass | Inf in the reverse pass

    def repaired(a, b):
        return jnp.arccos(jnp.clip(jnp.sum(a * b), -1 + 1e-6, 1 - 1e-6))

    return Bug(loss, (jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0])), cure="clip", repaired=repaired)


@bug
def division_that_is_masked_later():
    """A mean over no elements is masked after the division."""

    def loss(x, mask):
        count = jnp.sum(mask * x, axis=1)
        mean = jnp.where(count > 0, 1.0 / count, 0.0)  # cause: NaN in the reverse pass
        return jnp.sum(mean)

    def repaired(x, mask):
        count = jnp.sum(mask * x, axis=1)
        return jnp.sum(jnp.where(count > 0, 1.0 / jnp.where(count > 0, count, 1.0), 0.0))

    return Bug(
        loss,
        (jnp.ones((2, 3)), jnp.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])),
        cure="choose twice",
        repaired=repaired,
    )


@bug
def equal_eigenvalues():
    """Eigenvectors of a matrix with equal eigenvalues."""

    def loss(a):
        values, vectors = jnp.linalg.eigh(a)  # cause: NaN in the reverse pass
        return jnp.sum(vectors[:, 0] ** 4) + jnp.sum(values)

    return Bug(loss, (jnp.eye(2),))


@bug
def half_precision_overflow():
    """The sum of squares does not fit float16."""

    def loss(w, x):
        h = (x @ w).astype(jnp.float16)
        return jnp.sum(h * h)  # cause: Inf in the forward pass

    return Bug(loss, (100.0 * jnp.ones((3, 2)), jnp.ones((2, 3))))


@bug
def linalg_norm_of_a_zero_vector():
    """Weight normalisation of a row of zeros."""

    def loss(w, x):
        norms = jnp.linalg.norm(w, 2, 1)  # cause: NaN in the reverse pass | Inf in the reverse pass
        return jnp.sum(norms * x)

    def repaired(w, x):
        squares = jnp.sum(w**2, axis=1)
        norms = jnp.sqrt(jnp.where(squares > 0, squares, 1.0))
        return jnp.sum(jnp.where(squares > 0, norms, 0.0) * x)

    return Bug(
        loss,
        (jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.ones(2)),
        cure="safe norm",
        repaired=repaired,
    )


@bug
def log_of_a_softmax():
    """A probability that underflows to zero before its log is taken."""

    def loss(logits, labels):
        p = jax.nn.softmax(logits)
        return -jnp.mean(jnp.sum(labels * jnp.log(p), axis=-1))  # cause: Inf in the forward pass

    return Bug(loss, (jnp.array([[200.0, 0.0]]), jnp.array([[0.5, 0.5]])), cure="log_softmax")


@bug
def log_one_plus_exp():
    """softplus written out: exp overflows, and its log is Inf."""

    def loss(w, x):
        z = x @ w
        return jnp.sum(jnp.log(1.0 + jnp.exp(z)))  # cause: Inf in the forward pass

    return Bug(loss, (100.0 * jnp.ones(3), jnp.ones((2, 3))), cure="softplus")


@bug
def missing_value_in_the_data():
    """A NaN among the training data."""

    def loss(w, x):  # cause: NaN in an input, on no line
        return jnp.mean((x @ w) ** 2)

    return Bug(
        loss,
        (jnp.ones(3), jnp.array([[1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]])),
        is_curable=False,
    )


@bug
def nan_in_a_rule():
    """A rule divides by what may be zero."""

    @jax.custom_vjp
    def length(x):
        return jnp.sqrt(jnp.sum(x**2))

    def forward(x):
        y = length(x)
        return y, (x, y)

    def backward(residuals, ct):
        x, y = residuals
        return (ct * x / y,)  # cause: NaN in the reverse pass

    length.defvjp(forward, backward)

    def loss(x):
        return length(x) + jnp.sum(x)

    def repaired(x):
        square = jnp.sum(x**2)
        safe = jnp.sqrt(jnp.where(square > 0, square, 1.0))
        return jnp.where(square > 0, safe, 0.0) + jnp.sum(x)

    return Bug(loss, (jnp.zeros(3),), repaired=repaired)


@bug
def norm_at_zero():
    """The distance of a point from itself: the derivative of the root at zero."""

    def distance(a, b):
        square = jnp.sum((a - b) ** 2)
        return jnp.sqrt(square)  # cause: NaN in the reverse pass | Inf in the reverse pass

    def loss(a, b):
        return distance(a, b) + jnp.sum(a)

    def repaired(a, b):
        square = jnp.sum((a - b) ** 2)
        safe = jnp.sqrt(jnp.where(square > 0, square, 1.0))
        return jnp.where(square > 0, safe, 0.0) + jnp.sum(a)

    return Bug(loss, (jnp.ones(3), jnp.ones(3)), cure="safe norm", repaired=repaired)


@bug
def one_step_of_a_scan():
    """A recurrence whose root meets zero in its third step."""

    def cell(h, x):
        h = h + jnp.sqrt(x)  # cause: NaN in the reverse pass | Inf in the reverse pass
        return h, h

    def loss(x):
        _, hs = jax.lax.scan(cell, jnp.zeros(2), x)
        return jnp.sum(hs)

    def repaired(x):
        root = jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0)
        return jnp.sum(jnp.cumsum(root, axis=0))

    return Bug(
        loss,
        (jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0], [7.0, 8.0]]),),
        step=2,
        repaired=repaired,
    )


@bug
def polar_coordinates_of_the_origin():
    """atan2(0, 0)."""

    def loss(points):
        angle = jnp.arctan2(points[:, 1], points[:, 0])  # cause: NaN in the reverse pass
        return jnp.sum(angle)

    def repaired(points):
        x = jnp.where(jnp.all(points == 0, axis=1), 1.0, points[:, 0])
        return jnp.sum(jnp.arctan2(jnp.where(x == points[:, 0], points[:, 1], 0.0), x))

    return Bug(loss, (jnp.array([[1.0, 1.0], [0.0, 0.0]]),), repaired=repaired)


@bug
def power_of_zero():
    """A root by a fractional power, at zero."""

    def loss(pixels):
        return jnp.mean(pixels**0.45)  # cause: Inf in the reverse pass

    def repaired(pixels):
        safe = jnp.where(pixels > 0, pixels, 1.0)
        return jnp.mean(jnp.where(pixels > 0, safe**0.45, 0.0))

    return Bug(loss, (jnp.array([0.0, 0.5]),), repaired=repaired)


@bug
def row_masked_as_a_whole():
    """Attention over nothing: every score of a row is -inf."""

    def loss(q, k, mask):
        scores = jnp.where(mask, q @ k.T, -jnp.inf)
        return jnp.sum(jax.nn.softmax(scores))  # cause: NaN in the forward pass

    return Bug(
        loss,
        (jnp.eye(2), jnp.eye(2), jnp.array([[True, False], [False, False]])),
        cure="masked as a whole",
    )


@bug
def single_where_around_a_log():
    """One `where` hides the log of zero from the value, not from the gradient."""

    def loss(p):
        entropy = jnp.where(p > 0, p * jnp.log(p), 0.0)  # cause: NaN in the reverse pass
        return -jnp.sum(entropy)

    def repaired(p):
        return -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0))

    return Bug(loss, (jnp.array([0.5, 0.5, 0.0]),), cure="choose twice", repaired=repaired)


@bug
def spread_of_a_constant_feature():
    """The standard deviation of a feature that does not vary (flax.nnx)."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 2, use_bias=False, rngs=rngs)

        def __call__(self, x):
            h = self.linear(x)
            spread = h.std(0) + 1e-5  # cause: NaN in the reverse pass | Inf in the reverse pass
            return (h - h.mean(0)) / spread

    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def loss(state, x):
        return jnp.sum(nnx.merge(graph, state)(x))

    def repaired(state, x):
        h = nnx.merge(graph, state).linear(x)
        variance = h.var(0)
        spread = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
        return jnp.sum((h - h.mean(0)) / (spread + 1e-5))

    return Bug(loss, (state, jnp.ones((4, 2))), repaired=repaired)


@bug
def written_out_sigmoid():
    """1 / (1 + exp(-x)) is right at -100, and its gradient is not."""

    def sigmoid(x):
        return 1.0 / (1.0 + jnp.exp(-x))  # cause: NaN in the reverse pass

    def loss(x):
        return jnp.sum(sigmoid(x))

    def repaired(x):
        return jnp.sum(jax.nn.sigmoid(x))

    return Bug(loss, (jnp.array([-100.0, 1.0]),), cure="sigmoid", repaired=repaired)


@bug
def written_out_softmax():
    """A softmax that does not subtract the maximum."""

    def softmax(logits):
        weights = jnp.exp(logits)  # cause: Inf in the forward pass
        return weights / jnp.sum(weights, axis=-1, keepdims=True)

    def loss(logits, labels):
        return -jnp.sum(labels * jnp.log(softmax(logits)))

    return Bug(loss, (jnp.array([[200.0, 1.0]]), jnp.array([[1.0, 0.0]])), cure="softmax")


@bug
def variance_of_one_element():
    """The variance of a sample of one divides by zero: JAX writes NaN into the program."""

    def loss(x):
        return jnp.sum(x) + jnp.var(x[:1], ddof=1)  # cause: NaN in an input

    return Bug(loss, (jnp.ones(3),), cure="ddof")


@bug
def nan_that_becomes_minus_infinity():
    """A log density is -inf where it is no number, as samplers ask for."""

    def loss(w):
        unit = w / jnp.linalg.norm(w)  # cause: NaN in the forward pass
        density = jnp.sum(unit[:2])
        density = jnp.where(jnp.isfinite(density), density, -jnp.inf * (w[0] == 0))
        return jnp.where(w[0] >= 0, density, -jnp.inf)  # not chosen

    return Bug(loss, (jnp.zeros(3),), cure="eps")


@bug
def inverse_of_a_singular_matrix():
    """A solution of a linear system without one."""

    def loss(a):
        return jnp.sum(jnp.linalg.inv(a))  # cause: NaN in the forward pass

    return Bug(loss, (jnp.zeros((3, 3)),), cure="jnp.eye")
