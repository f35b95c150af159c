"""Programs with a seeded bug each, whose cause and line `explain` has to name: `BUGS`, by name."""

from . import cut, lost_on_the_way, not_finite, wrong_rules
from .bug import BUGS, Bug

__all__ = ["BUGS", "Bug", "cut", "lost_on_the_way", "not_finite", "wrong_rules"]
