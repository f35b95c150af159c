"""How hard a plan is looked for: the numbers that no theory gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """What is tried for a plan. More takes longer, and finds plans of somewhat fewer FLOPs.

    Attributes:
      cuts: places where a program may be cut.
      sideways: bytes across that a cut may have more for a byte nearer to the middle.
      longest: cuts that one recomputed segment may span.
      large: operations of a program for which less is tried: segments that span
        `longest_in_large` cuts.
      save_sets: for each segment, on the hull of bytes and FLOPs.
      most_in_pieces: operations of a segment whose backward pass goes piece by piece, with
        `sets_in_pieces` of the save sets by which a share of FLOPs of at most `cheap` is run again.
      labels: ways to a cut that are followed further.
      tries: values that local search tries to save.
      scan_save_sets: for the body of a scan.
      scan_options: ways to run the scans of a program.
      moments: steps of the backward pass that the bound of FLOPs is looked for at.
      rounds: plans that are compiled; where none of them is within the budget, up to two more.
      close: a plan that holds so much of the budget is not made cheaper,
      free: nor is one that costs so little of the forward pass.
      careful: of what is planned for next, for each plan that was not within the budget.
    """

    cuts: int = 64
    sideways: float = 0.05
    longest: int = 20
    large: int = 500
    longest_in_large: int = 9
    save_sets: int = 7
    most_in_pieces: int = 200
    sets_in_pieces: int = 2
    cheap: float = 0.2
    labels: int = 150
    tries: int = 400
    scan_save_sets: int = 4
    scan_options: int = 8
    moments: int = 4
    rounds: int = 2
    close: float = 0.97
    free: float = 0.002
    careful: float = 0.97


TUNING = Tuning()
