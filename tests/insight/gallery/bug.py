"""What a bug of the gallery is: a loss and its arguments, the cause that is right, and its line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import tracegrad as tg


@dataclass(frozen=True)
class Bug:
    """``loss(*arguments)`` whose gradient in `wrt` is not what somebody wanted.

    `step`: in which step of a scan it goes wrong. `cure`: what the advice has to mention.
    `repaired`: a function of the same arguments without the bug, if a rule can do what it does.
    `is_curable`: whether the program is to be mended at all, and not what it is given or asked.
    """

    loss: Callable[..., Any]
    arguments: tuple[Any, ...]
    wrt: Any = 0
    step: int | None = None
    cure: str = ""
    repaired: Callable[..., Any] | None = None
    is_curable: bool = True

    def gradients(self, rule: Any) -> tuple[Any, Any]:
        """What the loss has by a rule, and what the repaired function has."""
        functions = tg.rewrite(self.loss, rule), self.repaired
        return jax.jit(lambda: [tg.grad(f, wrt=self.wrt)(*self.arguments) for f in functions])()


@dataclass(frozen=True)
class Seeded:
    """A function that builds a bug, and what is marked in it.

    The line that is to blame ends in ``# cause: <class>``, several separated by ``|`` where the
    numbers decide which it is; with ``, on no line`` where nothing stands that could be blamed.
    """

    build: Callable[[], Bug]
    file: Path
    causes: tuple[str, ...]
    line: int | None


BUGS: dict[str, Seeded] = {}


def bug(build: Callable[[], Bug]) -> Callable[[], Bug]:
    """Adds a bug to `BUGS`, by the name of the function that builds it."""
    lines, first = inspect.getsourcelines(build)
    ((number, marked),) = [
        (number, found[1])
        for number, line in enumerate(lines, first)
        if (found := re.search(r"# cause: (.+)$", line))
    ]
    causes, on_no_line, _ = marked.partition(", on no line")
    file = Path(inspect.getfile(build))
    line = None if on_no_line else number
    BUGS[build.__name__] = Seeded(build, file, tuple(causes.split(" | ")), line)
    return build
