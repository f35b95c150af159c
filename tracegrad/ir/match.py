"""Selectors find places of a program by operation, call, scope or source line.

A selector finds *matches*. A match is an `Occurrence` (one node and the calls that lead to it) or a
`Fragment` (several nodes of one region that belong together: the nodes of an inlined call, of a
scope or of a source line). The same selector works on a traced graph and on a recorded tape, and
also searches the bodies of loops, branches and calls.

>>> import jax, jax.numpy as jnp, tracegrad as tg
>>> def f(x):
...     with jax.named_scope("block_0"):
...         x = jax.nn.softmax(jnp.sin(x))
...     return jax.nn.relu(x)
>>> g = tg.graph(f, jnp.ones(3))
>>> [str(m.node.op) for m in g.find(tg.match.op("sin", "exp"))]
['sin', 'exp']
>>> len(g.find(tg.match.call("softmax"))), len(g.find(tg.match.scope("block_*")))
(1, 1)
>>> [m.node.op for m in g.find(tg.match.op("exp") & ~tg.match.call("softmax"))]
[]

Selecting by name is an idea of TensorFlow's ``gradient_override_map``, selecting by place an idea
of ``torch.fx``'s subgraph matching.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from tracegrad.ir.executions import CallOf, SourceOf
from tracegrad.ir.nodes import Node
from tracegrad.ir.occurrence import Occurrence, Path
from tracegrad.ir.parameters import Parameters as Parameters
from tracegrad.ir.scopes import around, scopes
from tracegrad.ir.selector import Group, Grouping, Selection, covered_by, fits_any
from tracegrad.ir.selector import Selector as Selector

if TYPE_CHECKING:
    from tracegrad.ir.graph import Graph


__all__ = [
    "Selector",
    "call",
    "op",
    "param",
    "scope",
    "source",
    "where",
]


def op(*names: str) -> Selector:
    """Selects single operations by the names of their primitives.

    Args:
      *names: names of JAX primitives (``"dot_general"``, ``"exp"``); ``*`` stands for any letters.

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> [m.node.op for m in tg.graph(lambda x: jnp.exp(x) @ x, jnp.ones(2)).find(
    ...     tg.match.op("dot*"))]
    ['dot_general']
    """
    return _Op(*_require_names(names, "match.op", "dot_general"))


def call(*names: str) -> Selector:
    """Selects calls of functions by the functions' names.

    The selector finds a call that JAX keeps in the program (of a jitted function, or of a function
    with a custom rule) by its name. It finds a call that JAX inlines (most calls, also calls of
    `jax.nn.softmax` and `jax.nn.gelu`) by the traceback of each operation; the operations of the
    call are one match, a `Fragment`. Of nested calls only the outermost call matches.

    Args:
      *names: the name of a function (``"softmax"``), of a method (``"Attention.__call__"``) or, if
        an object is called, of its class (``"Attention"``); ``*`` stands for any letters.

    Finding raises GraphError if successive inlined calls cannot be told apart: calls in a loop of a
    function that contains a loop itself. Put a named scope around each call then.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def twice(x):
    ...     return jax.nn.softmax(jax.nn.softmax(x))
    >>> len(tg.graph(twice, jnp.ones(2)).find(tg.match.call("softmax")))
    2
    """
    return CallOf(*_require_names(names, "match.call", "relu"))


def scope(*globs: str) -> Selector:
    """Selects the operations in a named scope: `jax.named_scope`, or the call of a module.

    flax.linen names the scopes of its modules. For modules of flax.nnx and of equinox, tracegrad
    names the scope of each call of a module (its ``__call__``) while it traces: by the class of the
    outermost called module, and by the paths of the other modules in it:
    ``Model/blocks.0/attention``. The operations of other methods of a module belong to the scope
    around the call; `match.param` selects a module's parameters wherever they are used.

    Each entry of the scope is one match, a `Fragment` if the entry contains several operations. Two
    entries with no operation between them are one match.

    Args:
      *globs: patterns for successive components of the scope path: ``"block_*"``,
        ``"block_*/attention"``. ``*`` stands for any letters in one component. Names of
        transformations around a scope (``vmap(block_0)``) are ignored.

    Raises ValueError for ``**`` and for a leading ``/``: give one pattern for each depth.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def f(x):
    ...     for i in range(3):
    ...         with jax.named_scope(f"block_{i}"):
    ...             x = jnp.cos(jnp.sin(x))
    ...     return x
    >>> g = tg.graph(f, 1.0)
    >>> [m.name for m in g.find(tg.match.scope("block_[12]"))]
    ['block_1', 'block_2']
    """
    for pattern in _require_names(globs, "match.scope", "block_*/attention"):
        if pattern.startswith("/") or "**" in pattern.split("/"):
            raise ValueError(
                "match.scope takes no ** and no leading /: give one pattern for each depth, "
                f'match.scope("a/c", "a/*/c"); got {pattern!r}'
            )
    return _Scope(*globs)


def param(*globs: str) -> Parameters:
    """Selects parameters of the differentiated function by their paths.

    Use it in rules that act on the gradients of parameters (`rules.clip_gradient`,
    `scale_gradient`, `tap_gradient`, `stop_gradient`), and as the ``wrt`` of gradient functions.

    A path is the name of a leaf of an argument in messages:
    ``model.blocks.0.attention.query.kernel``, whether the argument is a module of flax.nnx or of
    equinox, a dict or a list. A rule acts where the parameter enters the function, on the sum of
    the gradients from all its uses.

    A rule acts on every gradient with respect to the parameter, as code after each call of
    `jax.grad` would. If a function that computes such a gradient is differentiated again
    (meta-learning, a penalty on the gradient), the outer gradient is the derivative of the inner
    gradient after the rule, and then the rule acts on the outer gradient as well. To select only
    the inner gradient, give the argument another name in the inner function, and select that name.
    Forward mode over a gradient (a Hessian-vector product) has no outer gradient:
    `rules.clip_gradient` and `rules.tap_gradient` act on the inner gradient, and the other two
    rules on the tangents too.

    In a function under `jax.jit`, paths begin with the names of its own arguments. The paths of the
    sources of a tape begin with ``sources``, unless the sources are arguments of the step. A rule
    reaches no inner gradient by a name that was imported from jax (``from jax import grad``), or
    that was made before the trace: call ``jax.grad`` in the traced function.

    Args:
      *globs: patterns for paths; ``*`` stands for any letters, also dots. A glob may omit the
        argument's name (``"blocks.*"``), and may end before the leaf (``"blocks.0"``: all leaves
        below ``blocks.0``). The path of a Variable is its name.

    >>> import jax, jax.numpy as jnp, tracegrad as tg
    >>> def loss(params, x):
    ...     return jnp.sum(x @ params["encoder"]["w"] @ params["head"]["w"])
    >>> frozen = tg.rewrite(loss, tg.rules.stop_gradient(tg.match.param("encoder.*")))
    >>> params = {"encoder": {"w": jnp.ones((2, 2))}, "head": {"w": jnp.ones((2, 1))}}
    >>> gradient = jax.grad(frozen)(params, jnp.ones((1, 2)))
    >>> print(gradient["encoder"]["w"].ravel(), gradient["head"]["w"].ravel())
    [0. 0. 0. 0.] [2. 2.]
    """
    return Parameters(_require_names(globs, "match.param", "blocks.*.kernel"))


def source(*places: str) -> Selector:
    """Selects the operations that a line, a function or a file of the user's code computes.

    Each execution of the line or the function is one match, a `Fragment` if the execution made
    several operations. An operation belongs to the innermost line of the user's own code that led
    to the operation, not to lines of installed libraries.

    Args:
      *places: ``"model.py:42"`` (in a notebook ``"In[3]:42"``), ``"model.py"``, or the name of a
        function (``"Block.__call__"``); ``*`` stands for any letters.
    """
    return SourceOf(*_require_names(places, "match.source", "model.py:42"))


def where(predicate: Callable[[Occurrence], object]) -> Selector:
    """Selects single nodes for which a predicate is true.

    If such a node is a call, a loop or a branch, the operations in its body lie within the match:
    ``match.op("exp") & match.where(p)`` finds them, too. A predicate that also tests
    ``.node.op == "exp"`` finds operations alone.

    Args:
      predicate: a function of an `Occurrence` (``.node``, ``.scope``, ``.origin``, ``.path``,
        ``.rule_around``).

    >>> import jax.numpy as jnp, tracegrad as tg
    >>> big = tg.match.where(lambda o: any(v.aval.size > 5 for v in o.node.outputs))
    >>> [m.node.op for m in tg.graph(lambda x: jnp.sin(jnp.outer(x, x)), jnp.ones(3)).find(big)]
    ['mul', 'sin']
    """
    if not callable(predicate):
        raise TypeError(f"expected a selector or a function of an Occurrence, not {predicate!r}")
    return _Where(predicate)


def _require_names(names: tuple[str, ...], function: str, example: str) -> tuple[str, ...]:
    if not names or "" in names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{function} takes names, as in {function}({example!r}); it was given "
            f"{', '.join(map(repr, names)) or 'nothing'}"
        )
    return names


# ------------------------------------------------------------------------------------ single nodes


class _Op(Selector):
    made_by = "match.op"

    def select_in(self, graph: Graph) -> Selection:
        matches = [o for o in graph.walk() if fits_any(o.node.op, self.patterns)]
        return Selection(matches, covered_by(matches))

    def names(self, graph: Graph) -> list[str]:
        return list(dict.fromkeys(o.node.op for o in graph.walk()))


class _Where(Selector):
    def __init__(self, predicate: Callable[[Occurrence], object]) -> None:
        self.predicate = predicate

    def select_in(self, graph: Graph) -> Selection:
        matches = [o for o in graph.walk() if self.predicate(o)]
        return Selection(matches, covered_by(matches))

    def __repr__(self) -> str:
        return f"match.where({self.predicate!r})"


# ------------------------------------------------------------------------------------------- scopes


class _Scope(Grouping):
    made_by = "match.scope"

    def _groups(self, graph: Graph, path: Path) -> dict[Node, Group]:
        outer = [part for node, _ in path for part in scopes(around(node))]
        groups: dict[Node, Group] = {}
        last: tuple[str, ...] | None = None
        shortest_match = functools.cache(self._shortest_match)  # most nodes share their scope
        for node in graph.nodes:
            matched = shortest_match((*outer, *scopes(around(node))))
            if matched is not None:
                if matched != last:
                    group: tuple[str, list[Node]] = ("/".join(matched), [])
                group[1].append(node)
                groups[node] = group
            last = matched
        return groups

    def _shortest_match(self, parts: tuple[str, ...]) -> tuple[str, ...] | None:
        """Returns the shortest beginning of a scope path that a pattern matches."""
        ends = [end for p in self.patterns if (end := _shortest_match_length(p, parts)) is not None]
        return parts[: min(ends)] if ends else None

    def names(self, graph: Graph) -> list[str]:
        paths = dict.fromkeys("/".join(o.scopes) for o in graph.walk())
        parts = [part for path in paths for part in path.split("/")]
        return [name for name in dict.fromkeys([*paths, *parts]) if name]


def _shortest_match_length(pattern: str, parts: tuple[str, ...]) -> int | None:
    """Returns the number of components after which a pattern first matches; None if never."""
    globs = pattern.split("/")
    ends = range(len(globs), len(parts) + 1)
    return next(
        (end for end in ends if all(map(fnmatchcase, parts[end - len(globs) : end], globs))), None
    )
