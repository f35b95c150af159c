"""The empirical constants of the planner, which decide how much it tries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """The limits of the search for a plan. Larger limits take longer, and find better plans.

    The effects below were measured; a *point* is 1 % of the forward pass, in extra FLOPs.

    Attributes:
      cuts: the number of places where a program may be cut. Half as many cost up to 3 points.
      sideways: a cut that is nearer to the middle by one byte may have this many more bytes
        crossing it. 0 costs up to 4 points, a quarter of the value 2.5 (before fusion).
      longest: the number of cuts that one segment may span. Half as many cost 1 point on average,
        and 31 at most; twice as many save 1 point in one program, and take twice the time.
      save_sets: the number of save sets for each segment, and for the body of a scan, on the hull
        of bytes and FLOPs. 3 cost up to 4 points, 14 save nothing.
      labels: the number of labels at a cut that are extended. Half as many cost up to 0.6 points,
        twice as many save 0.2.
      scan_options: the number of ways to run a scan. Half as many cost up to 13 points, twice as
        many save none.
      in_turn: the group sizes in which some iterations of a scan may keep more than others, if the
        size divides the length.
      plans: the default number of compiled plans, besides the program with nothing recomputed.
      careful: the first target, as a share of the budget; the factor of the next target if XLA held
        more than the budget. Segments above `careful` ** 2 × budget are near to the budget, and
        break ties between plans; without this rule 0.3 points are lost. XLA's bytes of similar
        plans differ by 5 %.
      spared, spared_of_it: to be compiled, a further plan must save this share of the forward pass,
        and this share of the cheapest plan within the budget.
      ahead: after a plan that fits, the share of the way to peak × budget / held that the next
        target goes. With 1, one plan in four was too large; 0.6 costs up to 4 points.
      fewest: the lowest target, as a multiple of the model's lowest peak. With 1, no plan was found
        for one program; with 1.08, none for another.
      terms: regions copy an inlined node only if the buffers that it is computed from have at most
        `terms` times the bytes of its result. With 1, one program has no plan at 45 %; without a
        limit, a chain of sums keeps all its terms.
    """

    cuts: int = 64
    sideways: float = 0.2
    longest: int = 20
    save_sets: int = 7
    labels: int = 150
    scan_options: int = 16
    in_turn: tuple[int, ...] = (2, 3, 4)
    plans: int = 2
    careful: float = 0.93
    spared: float = 0.01
    spared_of_it: float = 0.03
    ahead: float = 0.75
    fewest: float = 1.05
    terms: int = 2


TUNING = Tuning()
