"""The table "Same name, other number" of docs/migration.md says what both compute."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from same_name import NUMBERS

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
RECORDED = json.loads(Path(__file__).with_name("tensorflow.json").read_text())["numbers"]
TABLE = PAGE[PAGE.index("| | TensorFlow | JAX, optax, flax |") :]
ROWS = {
    name: cells
    for name, *cells in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", TABLE, re.M)
}


def assert_says(cell: str, numbers) -> None:
    written = [float(number) for number in cell.split(",")]
    np.testing.assert_allclose(written, np.ravel(numbers), rtol=1e-4)


def test_every_number_has_its_row():
    assert NUMBERS.keys() == RECORDED.keys()
    assert NUMBERS.keys() <= ROWS.keys()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_row_says_what_both_compute_and_how_to_have_the_other(name):
    number = NUMBERS[name]
    theirs, ours, remedy = ROWS[name]
    assert_says(theirs, RECORDED[name])
    assert_says(ours, number.here(number.ours))
    assert not np.allclose(RECORDED[name], np.ravel(number.here(number.ours)), rtol=1e-4)
    if remedy.startswith("`"):  # an expression
        namespace = {"jax": jax, "jnp": jnp, "nnx": nnx}
        source = remedy.strip("`")
        other = eval(
            f"lambda {number.parameters}: {source}" if number.parameters else source, namespace
        )
        np.testing.assert_allclose(np.ravel(number.here(other)), RECORDED[name], rtol=1e-4)
