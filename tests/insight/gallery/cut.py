"""No gradient can arrive: something on the way has none, or nothing leads there."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .bug import Bug, bug


@bug
def binary_activation():
    """A binary network: `sign` has a derivative of zero everywhere."""

    def layer(w, x):
        return jnp.sign(x @ w)  # cause: rounding

    def loss(params, x):
        h = layer(params["first"], x)
        return jnp.mean((h @ params["second"]) ** 2)

    def repaired(params, x):
        h = x @ params["first"]
        h = h + jax.lax.stop_gradient(jnp.sign(h) - h)
        return jnp.mean((h @ params["second"]) ** 2)

    return Bug(
        loss,
        ({"first": jnp.ones((2, 3)), "second": jnp.ones(3)}, jnp.ones((4, 2))),
        repaired=repaired,
    )


@bug
def bins_by_floor():
    """A histogram by `floor`: no gradient to what is sorted into the bins."""

    def soft_bin(x):
        return jnp.floor(x / 0.5)  # cause: rounding

    def loss(x, weights):
        return jnp.sum(weights * soft_bin(x))

    def repaired(x, weights):
        x = x / 0.5
        return jnp.sum(weights * (x + jax.lax.stop_gradient(jnp.floor(x) - x)))

    return Bug(loss, (jnp.array([0.1, 0.9]), jnp.ones(2)), repaired=repaired)


@bug
def branch_not_taken():
    """A weight is used only in the branch that this call does not take."""

    def loss(params, x, training):
        y = jax.lax.cond(  # cause: untaken branch
            training > 0,
            lambda x: x * params["dropout_scale"],
            lambda x: x * 2.0,
            x,
        )
        return jnp.sum(y * params["w"])

    return Bug(
        loss,
        ({"dropout_scale": jnp.ones(3), "w": jnp.ones(3)}, jnp.ones(3), jnp.int32(0)),
        is_curable=False,
    )


@bug
def dynamic_loop():
    """A loop until convergence has no reverse-mode derivative."""

    def loss(a):
        def unfinished(state):
            return jnp.abs(state**2 - a) > 1e-3

        def step(x):
            return 0.5 * (x + a / x)

        root = jax.lax.while_loop(unfinished, step, a)  # cause: not differentiable
        return root**2

    def repaired(a):
        root = a
        for _ in range(3):
            root = 0.5 * (root + a / root)
        return root**2

    return Bug(loss, (jnp.float32(2.0),), repaired=repaired)


params = {"w": jnp.array([0.5, -1.5, 2.5])}


@bug
def global_instead_of_the_argument():
    """The loss uses the parameters of the module, not those it is given."""

    def loss(weights, x):
        prediction = x @ params["w"]  # cause: closed over
        return jnp.mean(prediction**2) + 0.0 * jnp.sum(weights["b"])

    return Bug(loss, ({"w": params["w"], "b": jnp.ones(2)}, jnp.ones((2, 3))))


@bug
def greedy_decoding():
    """The embedding of the most likely token: `argmax` has no gradient."""

    def loss(params, x):
        logits = x @ params["logits"]
        token = jnp.argmax(logits, axis=-1)  # cause: argmax
        return jnp.sum(jax.nn.one_hot(token, 3) @ params["embedding"])

    return Bug(loss, ({"logits": jnp.eye(3), "embedding": jnp.ones((3, 2))}, jnp.eye(3)[:2]))


@bug
def hard_threshold():
    """A learned threshold that is only compared with."""

    def loss(threshold, x):
        kept = x > threshold  # cause: comparison
        return jnp.sum(kept * x)

    return Bug(loss, (jnp.float32(0.5), jnp.array([0.2, 0.7])))


@bug
def bins_of_a_feature():
    """A feature is looked up by its bin, so nothing before the binning is trained."""

    def loss(w, x, values):
        bins = jnp.digitize(x @ w, jnp.array([0.0, 1.0]))  # cause: comparison
        return jnp.mean(values[bins])

    return Bug(loss, (jnp.ones(2), jnp.eye(2), jnp.arange(3.0)))


@bug
def indices_by_an_integer_cast():
    """A position is cast to an integer to look a table up: the position gets no gradient."""

    def loss(position, table):
        index = position.astype(jnp.int32)  # cause: cast
        return jnp.sum(table[index] ** 2)

    return Bug(loss, (jnp.array([0.3, 1.7]), jnp.array([1.0, 2.0, 3.0])))


@bug
def mask_by_a_cast_to_bool():
    """A learned gate is cast to bool to serve as a mask."""

    def loss(gate, x):
        mask = gate.astype(bool)  # cause: cast
        return jnp.sum(jnp.where(mask, x, 0.0))

    return Bug(loss, (jnp.array([1.0, 0.0, 2.0]), jnp.ones(3)))


@bug
def numpy_in_the_middle():
    """A step of the model is computed by NumPy, on the host."""

    def smooth(x):
        return np.asarray(x) * 0.5

    def loss(w, x):
        shape = jax.ShapeDtypeStruct((3,), "float32")
        h = jax.pure_callback(smooth, shape, w * x)  # cause: host conversion
        return jnp.sum(h)

    return Bug(loss, (jnp.ones(3), jnp.arange(3.0)))


@bug
def padding_index_out_of_bounds():
    """Token numbers beyond the end of the table: such lookups are filled, and get no gradient."""

    def loss(table, tokens):
        rows = table.at[tokens].get(mode="fill", fill_value=0.0)  # cause: index out of bounds
        return jnp.sum(rows + 1.0)

    return Bug(loss, (jnp.ones((4, 2)), jnp.array([4, 5])), is_curable=False)


@bug
def parameter_never_used():
    """A bias that no line uses."""

    def loss(params, x):  # cause: unused, on no line
        return jnp.mean((x @ params["w"]) ** 2)

    return Bug(loss, ({"w": jnp.ones(3), "bias": jnp.ones(())}, jnp.ones((2, 3))), is_curable=False)


@bug
def quantised_weights():
    """Weights are rounded to steps without a straight-through gradient (equinox)."""

    class Quantised(eqx.Module):
        weight: jax.Array
        scale: float = 8.0

        def __call__(self, x):
            steps = jnp.round(self.weight * self.scale)  # cause: rounding
            return x @ (steps / self.scale)

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    def repaired(model, x):
        steps = model.weight * model.scale
        steps = steps + jax.lax.stop_gradient(jnp.round(steps) - steps)
        return jnp.mean((x @ (steps / model.scale)) ** 2)

    return Bug(
        loss,
        (Quantised(jnp.array([0.3, -0.2])), jnp.ones((4, 2))),
        wrt=lambda path, leaf: path == "weight",
        repaired=repaired,
    )


@bug
def ranking_by_argsort():
    """Scores are turned into ranks."""

    def loss(scores, relevance):
        ranks = jnp.argsort(scores)  # cause: argmax
        return jnp.sum(relevance / (1.0 + ranks))

    return Bug(loss, (jnp.array([0.2, 0.9, 0.4]), jnp.array([1.0, 0.0, 2.0])))


@bug
def stop_gradient_left_in_a_module():
    """An encoder that was frozen once, in the module's own code (flax.nnx)."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.encoder = nnx.Linear(3, 4, rngs=rngs)
            self.head = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, x):
            features = jnp.tanh(self.encoder(x))
            return self.head(jax.lax.stop_gradient(features))  # cause: stop_gradient

    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def loss(state, x):
        return jnp.mean(nnx.merge(graph, state)(x) ** 2)

    def repaired(state, x):
        model = nnx.merge(graph, state)
        return jnp.mean(model.head(jnp.tanh(model.encoder(x))) ** 2)

    return Bug(loss, (state, jnp.ones((2, 3))), repaired=repaired)


@bug
def stop_gradient_on_the_wrong_side():
    """The target of a value function is to be constant, but the prediction was stopped."""

    def loss(params, x, reward):
        value = jax.lax.stop_gradient(x @ params["value"])  # cause: stop_gradient
        target = reward + 0.9 * (x @ params["target"])
        return jnp.mean((target - value) ** 2)

    return Bug(
        loss,
        (
            {"value": jnp.ones(3), "target": jnp.ones(3)},
            jnp.array([[1.0, 2.0, 3.0]]),
            jnp.ones(1),
        ),
    )


@bug
def where_never_takes_it():
    """The mask of a `where` is false everywhere."""

    def loss(params, x):
        long = jnp.arange(3) >= 3
        h = jnp.where(long, x * params["late"], x * params["early"])  # cause: untaken branch
        return jnp.sum(h)

    return Bug(loss, ({"late": jnp.ones(3), "early": jnp.ones(3)}, jnp.ones(3)), is_curable=False)
