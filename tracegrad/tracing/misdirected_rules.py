"""Finds inner gradients that a rule for parameters misses, and gradients that it wrongly changes.

A rule for the parameter ``w`` misses the gradient with respect to a value that is computed from the
parameter: ``jax.grad(loss)([2 * w])``. The rule changes the wrong gradient if an inner jitted
function calls another parameter ``w``.

`mark_inputs` marks the differentiated inputs of a function by operations that compute nothing. When
the whole program is traced, `find_misdirected` follows each mark back to the program's inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from tracegrad.ir import Graph, Occurrence, Value
from tracegrad.ir.inlined import inside_result, is_loop, outside, region_calls
from tracegrad.ir.occurrence import Path, at
from tracegrad.ir.operations import BY_ELEMENT, VIEWS
from tracegrad.ir.parameters import Parameters
from tracegrad.ir.scopes import UNDER_RULES

_MARK, _AND = "tracegrad differentiates ", " alias "
# Operations whose result still counts as the parameter. Not a matrix product: activations are no
# parameters.
_OF_ONE_PARAMETER = BY_ELEMENT | VIEWS - {"broadcast_in_dim", "slice", "split"} | {"concatenate"}


def mark_inputs(
    inputs: Sequence[Any],
    paths: Sequence[tuple[str, ...]],
    differentiated: Sequence[bool],
    rules: Sequence[Any],
) -> list[Any]:
    """Marks the differentiated inputs with their paths, if one of the rules is for parameters.

    `paths`: for each input its path among the arguments of the traced function, if that path is
    known, and its path among the arguments of the function itself.
    """
    if not any(map(_selects_parameters, rules)):
        return list(inputs)
    names = [_MARK + _AND.join(dict.fromkeys(each)) for each in paths]
    with jax.named_scope(UNDER_RULES):
        return [
            checkpoint_name(value, name) if is_moved else value  # type: ignore[no-untyped-call]
            for value, name, is_moved in zip(inputs, names, differentiated, strict=False)
        ]


def _selects_parameters(rule: Any) -> bool:
    return isinstance(getattr(rule, "where", None), Parameters)


def find_misdirected(program: Graph, rule: Any) -> Iterator[str]:
    """Yields a sentence for each marked input whose gradient the rule misses or changes by mistake.

    The rule misses an input that it does not select, if the input is computed, element by element,
    from a selected parameter. The rule changes the wrong gradient if it selects an input by its
    name in an inner jitted function alone, and the input is computed from other parameters.
    """
    if not _selects_parameters(rule):
        return
    selected = rule.parameters_in(program)
    others = [value for value in program.inputs if value not in selected]
    for match in _walk_once(program) if selected else ():
        name = str(match.node.params.get("name", ""))
        if match.node.op != "name" or not name.startswith(_MARK):
            continue
        *_, path = paths = name.removeprefix(_MARK).split(_AND)
        place = f"a gradient{at(match.origin)} with respect to {path}"
        is_of_selected = _is_computed_from(program, match, selected)
        if not rule.where.fits(*paths):
            if is_of_selected:
                yield (
                    f"does not reach {place}, which is computed from a parameter that the rule "
                    f"selects: if the rule is meant for it, select match.param({path!r}) as well"
                )
        elif len(paths) == 1 and not is_of_selected and _is_computed_from(program, match, others):
            yield (
                f"acts on {place}, which is not the parameter that has this path in "
                f"{program.name}: give the argument of the inner function another name"
            )


def _walk_once(program: Graph) -> Iterator[Occurrence]:
    """Yields each node of a program and of its regions once, with one path of calls to the node."""
    paths: dict[Graph, Path] = {program: ()}
    waiting = [program]
    for region in waiting:  # grows
        for node in region.nodes:
            yield Occurrence(paths[region], node)
            for name, inner in node.regions.items():
                if inner not in paths:
                    paths[inner] = (*paths[region], (node, name))
                    waiting.append(inner)


def _is_computed_from(program: Graph, mark: Occurrence, parameters: Collection[Value]) -> bool:
    waiting: list[tuple[Path, Any]] = [(mark.path, mark.node.inputs[0])]
    seen = {*waiting}
    for path, value in waiting:  # grows
        node = (path[-1][0].region(path[-1][1]) if path else program).producers.get(value)
        if not path and value in parameters:
            return True
        more: list[tuple[Path, Any]] = []
        if node is None:
            more = outside(path, value) if path else []
        elif node.op in _OF_ONE_PARAMETER:
            more = [(path, operand) for operand in node.inputs]
        elif len(region_calls(node)) == 1 and not is_loop(node):
            more = [inside_result(Occurrence(path, node), value, region_calls(node)[0].name)]
        new = dict.fromkeys(each for each in more if isinstance(each[1], Value))
        waiting += [each for each in new if each not in seen]
        seen.update(new)
    return False
