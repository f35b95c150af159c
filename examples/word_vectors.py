"""Learns vectors for the words of Python's own language reference, row by row.

Skip-gram with negative sampling: the vector of a word learns to tell the word's neighbours in the
text from words drawn at random. A step looks up the rows of its batch in two tables. With
``sparse=True`` the gradient of a table has only these rows (`IndexedSlices`), and `apply_rows` runs
the optimiser, adagrad with one number for each row, on these rows only. The cost of a step does not
depend on the size of the vocabulary.

The text is the module ``pydoc_data.topics``, which ``help("lists")`` and similar calls print. Words
with a similar use get similar vectors. The example prints some of them, checks pairs that a reader
would expect, and saves a picture. See ``--help``.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

import tracegrad as tg
from tracegrad import apply_rows

RAREST = 10  # rarer words are left out
WINDOW = 4  # the largest distance of a neighbour, in words
BATCH, NEGATIVES = 512, 8
DIMENSIONS, RATE = 48, 0.1
NEAR = 10

# Pairs that a reader of the language reference expects to have a similar use.
PAIRS = [
    ("true", "false"),
    ("list", "tuple"),
    ("try", "finally"),
    ("lists", "tuples"),
    ("integer", "floating"),
    ("global", "nonlocal"),
    ("typeerror", "valueerror"),
    ("__add__", "__radd__"),
    ("__getattr__", "__getattribute__"),
    ("__setitem__", "__delitem__"),
    ("positional", "keyword"),
    ("left", "right"),
]
GOAL = 7  # the number of pairs that must be among each other's nearest


# ------------------------------------------------------------------------------------------ text


class Corpus(NamedTuple):
    words: list[str]  # the vocabulary, the most frequent first
    counts: np.ndarray  # i64[words]
    centres: np.ndarray  # i32[pairs]
    contexts: np.ndarray  # i32[pairs]: a neighbour of the centre


def read_corpus(seed):
    """Returns each word with each neighbour. Most occurrences of the commonest words are left out
    first, as in Mikolov et al. (2013), because they say little about their neighbours."""
    text = " . ".join(topics[name] for name in sorted(topics))
    tokens = re.findall(r"[a-z_]+", text.lower())
    counted = collections.Counter(token for token in tokens if len(token) > 1)
    words = [word for word, count in counted.most_common() if count >= RAREST]
    number = {word: i for i, word in enumerate(words)}
    ids = np.array([number[token] for token in tokens if token in number], np.int32)
    counts = np.bincount(ids)

    random = np.random.default_rng(seed)
    keep = np.sqrt(1e-3 * len(ids) / counts)
    ids = ids[random.random(len(ids)) < keep[ids]]
    pairs = [(ids[:-distance], ids[distance:]) for distance in range(1, WINDOW + 1)]
    pairs += [(later, earlier) for earlier, later in pairs]
    centres, contexts = (np.concatenate(side) for side in zip(*pairs))
    return Corpus(words, counts, centres, contexts)


# -------------------------------------------------------------------------------------- training


def loss(tables, centres, contexts, negatives):
    """Returns the mean cross-entropy of telling each word's neighbour from the drawn words.

    `centres` and `contexts` are i32[batch], `negatives` i32[batch, drawn].
    """
    word = tables["words"][centres]
    candidates = tables["contexts"][jnp.concatenate([contexts[:, None], negatives], axis=1)]
    scores = jnp.einsum("bd,bcd->bc", word, candidates)
    signs = jnp.ones(scores.shape).at[:, 0].set(-1)  # column 0 is the neighbour
    return jnp.mean(jnp.sum(jax.nn.softplus(signs * scores), axis=1))


def adagrad(rows, gradients):
    """Returns rows and sums of squared gradients after a step, with one number for each row."""
    vectors, sums = rows
    sums = sums + jnp.mean(gradients**2, axis=1)
    return vectors - RATE * gradients / jnp.sqrt(sums + 1e-10)[:, None], sums


@tg.trace(donate_argnums=(0, 1))  # so that XLA writes the tables in place
def step(tables, sums, centres, contexts, negatives):
    value, slices = tg.value_and_grad(loss, sparse=True)(tables, centres, contexts, negatives)
    new = {name: apply_rows((tables[name], sums[name]), slices[name], adagrad) for name in tables}
    tables = {name: vectors for name, (vectors, _) in new.items()}
    sums = {name: row_sums for name, (_, row_sums) in new.items()}
    return tables, sums, value


def train(corpus, epochs, seed, progress):
    """Returns the vectors of the words, f32[words, dimensions], and the loss of every step."""
    random = np.random.default_rng(seed)
    count = len(corpus.words)
    tables = {
        "words": jnp.float32(random.uniform(-0.5, 0.5, (count, DIMENSIONS)) / DIMENSIONS),
        "contexts": jnp.zeros((count, DIMENSIONS)),
    }
    sums = {name: jnp.zeros(count) for name in tables}
    # Words are drawn in proportion to frequency to the power of 3/4, as in Mikolov et al.
    share = np.cumsum(corpus.counts**0.75)
    steps = len(corpus.centres) // BATCH  # an epoch
    losses = []
    for _ in (bar := tqdm(range(epochs), unit="epoch", disable=not progress)):
        order = random.permutation(len(corpus.centres))[: steps * BATCH].reshape(steps, BATCH)
        drawn = np.searchsorted(share, random.random((steps, BATCH, NEGATIVES)) * share[-1])
        for batch, negatives in zip(order, np.int32(drawn)):
            centres, contexts = corpus.centres[batch], corpus.contexts[batch]
            tables, sums, value = step(tables, sums, centres, contexts, negatives)
            losses.append(value)
        bar.set_postfix(loss=f"{np.mean(losses[-steps:]):.3f}")
    return np.asarray(tables["words"]), np.array(losses)


# --------------------------------------------------------------------------------------- results


def nearest(vectors, count):
    """Returns for each word the nearest words by cosine, nearest first: i64[words, count]."""
    # The mean of all vectors makes all cosines similar, so it is removed.
    centred = vectors - vectors.mean(0)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    return np.argsort(-unit @ unit.T, axis=1)[:, 1 : count + 1]


def pairs_found(words, near):
    """Returns in how many of the expected pairs one word is near the other word."""
    number = {word: i for i, word in enumerate(words)}
    known = [(number[a], number[b]) for a, b in PAIRS if a in number and b in number]
    return sum(b in near[a] or a in near[b] for a, b in known)


def save_picture(path, words, vectors, losses, epochs):
    """Plots the loss, and the vectors of the pairs in their two principal directions."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.4])
    by_epoch = losses.reshape(epochs, -1).mean(1)
    left.plot(np.linspace(0, epochs, losses.size), losses, color="0.85", label="step")
    left.plot(np.arange(epochs) + 0.5, by_epoch, "C0.-", label="mean of an epoch")
    left.set(xlabel="epoch", ylabel="cross-entropy (nats)", title="Training loss")
    left.legend(frameon=False)

    shown = [pair for pair in PAIRS if set(pair) <= set(words)]
    rows = np.array([[words.index(word) for word in pair] for pair in shown])
    points = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    points = points[rows] - points[rows].mean((0, 1))
    axes = np.linalg.svd(points.reshape(-1, DIMENSIONS), full_matrices=False)[2][:2]
    for i, (pair, ends) in enumerate(zip(shown, points @ axes.T)):
        right.plot(*ends.T, ".-", color=f"C{i % 10}", linewidth=1)
        for word, end in zip(pair, ends):
            right.annotate(word, end, xytext=(3, 3), textcoords="offset points", fontsize=8)
    right.set(xticks=[], yticks=[], title="Words that are used alike (two principal directions)")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10, help="passes over the text (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the first vectors and the draws")
    parser.add_argument(
        "--out", type=Path, default=Path("word_vectors.png"), help="where the picture goes"
    )
    parser.add_argument("--no-progress", action="store_true", help="without a progress bar")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs must be at least 1, not {arguments.epochs}")
    if not arguments.out.parent.is_dir():  # fail now, not after the training
        parser.error(f"--out: there is no folder {arguments.out.parent}")
    if arguments.out.suffix not in (".pdf", ".png", ".svg"):
        parser.error(f"--out must end in .png, .pdf or .svg, not {arguments.out.name}")
    return arguments


def main():
    arguments = read_arguments()
    corpus = read_corpus(arguments.seed)
    words = corpus.words
    print(f"{len(words)} words, {len(corpus.centres)} pairs of neighbours.")
    vectors, losses = train(corpus, arguments.epochs, arguments.seed, not arguments.no_progress)

    near = nearest(vectors, NEAR)
    print("\nUsed alike:")
    for word in ("true", "integer", "typeerror", "import", "class", "tuple"):
        others = [words[i] for i in near[words.index(word)][:5]]
        print(f"  {word:10} {', '.join(others)}")

    replaced = " (in place of the one that was there)" if arguments.out.exists() else ""
    save_picture(arguments.out, words, vectors, losses, arguments.epochs)
    print(f"\nPicture: {arguments.out}{replaced}")

    found = pairs_found(words, near)
    print(f"Of {len(PAIRS)} expected pairs {found} are among each other's {NEAR} nearest.")
    if found < GOAL:
        sys.exit(f"That is below the goal of {GOAL}: more epochs?")


if __name__ == "__main__":
    main()
