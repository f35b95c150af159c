"""Notes on errors are short, say the user's line, and are all added in one place."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracegrad as tg
from tracegrad.ir.notes import NOTE, add_note
from tracegrad.ir.occurrence import Origin

PACKAGE = pathlib.Path(tg.__file__).parent


def test_notes_are_added_in_one_place():
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            adds = isinstance(node, ast.Attribute) and node.attr == "add_note"
            assert not adds or file == PACKAGE / "ir" / "notes.py", file


@pytest.mark.parametrize("length", [1, 300, 5_000])
def test_a_note_has_its_line_and_the_ends_of_its_text_once(length):
    text = "<" + "x" * (length - 2) + ">" * (length > 1)
    error = ValueError()
    for _ in range(2):
        add_note(error, text, Origin("/a/model.py", 12, "loss"))
    (note,) = error.__notes__
    place, shown = note.split("\n")
    assert place.startswith("/a/model.py:12 in loss")
    assert len(shown) == min(length, NOTE)
    assert (shown[0], shown[-1]) == (text[0], text[-1])


def branching(x):
    return x if x > 0 else -x


def long_names(x):
    return lax.while_loop(lambda c: c < 9, lambda c: c * x, x)


def an_array(x):
    return np.sin(x)


def masked(x):
    return jnp.sum(x[x > 0])


def sliced(x):
    return x[: jnp.argmax(x)]


def shaped(x):
    return jnp.zeros(jnp.argmax(x)) * x


def counting(x):
    return [x for _ in range(jnp.argmax(x))]


def measuring_itself(x):
    return float(x) * x


# With the words of the advice that belongs to each.
REFUSED = {
    branching: "jnp.where",
    long_names: "checkpointed_loop",
    an_array: "jax.numpy",
    masked: "by a mask",
    sliced: "a Python integer",
    shaped: "a Python integer",
    counting: "a Python integer",
    measuring_itself: "static_argnames",
}
WAYS = {
    "trace": lambda f, x: tg.trace(jax.grad(f))(x),
    "graph": lambda f, x: tg.graph(jax.grad(f), x),
    "explain": lambda f, x: tg.explain(f, x),
    "save": lambda f, x: tg.save(jax.grad(f), "never written", [x]),
    "recompute": lambda f, x: tg.trace(jax.grad(tg.recompute_grad(f)))(x),
}


@pytest.mark.both_jax
@pytest.mark.parametrize("fun", REFUSED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_refused_has_the_line_and_what_to_write(fun, way):
    if fun is long_names and way == "explain":
        pytest.skip("it goes past a loop without reverse mode and says so in its report")
    x = jnp.float32(1.5) if fun in (branching, long_names, measuring_itself) else jnp.arange(3.0)
    with pytest.raises(Exception) as caught:
        WAYS[way](fun, x)
    notes = caught.value.__notes__
    assert all(len(note.split("\n")[-1]) <= NOTE for note in notes), notes
    (note,) = [note for note in notes if REFUSED[fun] in note]
    assert f"test_notes.py:{fun.__code__.co_firstlineno + 1} in {fun.__name__}" in note
