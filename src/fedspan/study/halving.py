"""Tuning stops the settings that are hopeless: those far behind the best one at a quarter and at half of their rounds.

Progress is how far the metric has come from its value before the first round. A setting is dropped if it has made less
than a share of the best one's progress, and would not even be where that one is now if it kept up its pace to the end.
The first leaves room for small steps, which begin slowly and may end better; the second for large ones, which may begin
by going astray. Who is dropped follows from the curves alone, whatever order the runs are made in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedspan.core.spec import Spec
from fedspan.study.curves import Curve, Floats
from fedspan.study.model import Part, Variant

STAGES = {0.25: 0.5, 0.5: 0.7}  # share of the rounds → share of the best one's progress
EVALUATIONS = 8  # of a whole run, below which it is not worth it


def stages(
    part: Part, variant: Variant, specs: Sequence[Spec]
) -> list[tuple[list[int], float, float]]:
    """(rounds of each point, share of the rounds, share of progress) of every stage.

    There are none, and all points run to the end, where there are few points or evaluations, where the whole grid is
    shown in a figure, and where the length of a run decides its numbers.
    """
    whole = len(specs) < 3 or not variant.grid.keys().isdisjoint(part.figure.get("x", ()))
    for spec in specs:
        whole |= (
            spec.length_decides
            or isinstance(spec.method.lr, str)
            or spec.rounds < EVALUATIONS * spec.eval_every
        )
    if whole:
        return []
    return [
        ([evaluated_round(spec.rounds, spec.eval_every, share) for spec in specs], share, behind)
        for share, behind in STAGES.items()
    ]


def hopeless(part: Part, curves: Mapping[int, Curve], share: float, behind: float) -> set[int]:
    """The points to drop, from their curves up to a share of the rounds. One that has diverged has ended anyway."""
    values = {n: _progress(part, curve) for n, curve in curves.items() if curve.tail(1).whole}
    best = max((float(made[-1]) for made in values.values()), default=0.0)
    return {
        n
        for n, made in values.items()
        if made[-1] < behind * best and _at_the_end(made, share) < best
    }


def _progress(part: Part, curve: Curve) -> Floats:
    """How much better the metric is than before the first round, at every evaluation; each is the mean of a few."""
    better = (1 if part.tune_goal == "max" else -1) * (curve.values - curve.values[:, :1]).mean(0)
    few = part.last(len(better))
    return np.array([better[max(0, n - few) : n].mean() for n in range(1, len(better) + 1)])


def _at_the_end(made: Floats, share: float) -> float:
    """The progress at the end of the run if the pace of the last third is kept up."""
    third = max(1, len(made) // 3)
    pace = (made[-1] - made[-1 - third]) / third
    return float(made[-1] + max(pace, 0.0) * (len(made) - 1) * (1 / share - 1))


def evaluated_round(rounds: int, eval_every: int, share: float) -> int:
    """The last round with an evaluation in a share of the rounds."""
    return max(1, int(share * rounds / eval_every)) * eval_every
