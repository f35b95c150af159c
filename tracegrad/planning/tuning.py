"""How hard a plan is looked for: the numbers that no theory gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """What is tried for a plan. More takes longer, and finds plans of somewhat fewer FLOPs.

    Attributes:
      cuts: places where a program may be cut. Half of them cost up to 3 points of extra FLOPs.
      sideways: bytes across that a cut may have more for a byte nearer to the middle. With none up
        to 4 points are lost, with a quarter of it 2.5, before fusion.
      longest: cuts that one segment may span. Half of them cost 1 point on average, 31 at most;
        twice as many spare 1 in one program and take twice the time.
      save_sets: for each segment, and for the body of a scan, on the hull of bytes and FLOPs. With
        3 up to 4 points are lost, with 14 nothing is won.
      labels: ways to a cut that are followed further. Half of them cost up to 0.6 points, twice as
        many spare 0.2.
      scan_options: ways to run a scan. Half of them lose up to 13 points, twice as many win none.
      in_turn: of how many iterations some may keep more than others, where they divide the length.
      plans: compiled if nobody says how many, beside the program with nothing recomputed.
      careful: the share of the budget that is planned for first, and of what is planned for where
        XLA held more, and its square that above which a segment is near to the budget, without
        which 0.3 points are lost. XLA's bytes of like plans differ by a twentieth.
      spared, spared_of_it: the share of the forward pass, and of the cheapest plan that was within
        the budget, that a further plan must spare to be compiled.
      ahead: the share of the bytes that seem to be left of the budget by which the next plan is
        larger. With all of them one in four was too large, and with .6 up to 4 points are lost.
      fewest: how many times the fewest bytes that there is a plan for are planned for instead of
        those. With 1 a program had no plan of which XLA held less of the next, with 1.08 another.
      terms: how many times the bytes of what is copied into regions may have to be there for it.
        With 1 a program has no plan at 45 %, and without a bound sums of a chain keep all terms.
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
