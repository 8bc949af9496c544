"""The tuner: a grid and successive halving. A study's grids and `lr = "search"` are tuned by it.

`halve` drops the candidates of a given grid that are hopeless: at a quarter and at half of their rounds, those that are
far behind the best one. Progress is how far the measure has come from its value before the first round. A candidate is
dropped if it has made less than a share of the best one's progress, and would not even be where that one is now if it
kept up its pace to the end. The first leaves room for small steps, which begin slowly and may end better; the second
for large ones, which may begin by going astray.

`find_lr` has a grid without ends. Trials of a few rounds halve or double the rate until the best one lies inside the
grid, or below a rate that diverges. Longer trials follow from the best rate downward: it may turn out to be unstable,
and small rates are ahead later. A rate that diverges falls out, and the next smaller one takes its place.

1. Where only a loss is known, the lowest rate wins that lowers it about as far as any other, among rates of at most a
   third of the lowest one that diverged: a few rounds do not show the instability of rates that are near it.
2. Where the error itself is known, the rate is made smaller for the run, which is longer than its trials. Errors fall
   with the time ηt and stop at a floor that grows with η: a trial shows at which time η₁t₁ its error had almost stopped
   falling, and a run of T rounds needs about log(T/t₁) decay times τ more. So η = (η₁t₁ + τ log(c T/t₁)) / T.
3. A server that scales its own steps (FedAdam) moves about as far at every local rate. There the lowest rate wins whose
   pace comes far within the run, because its noise is lowest.

Both see runs only as functions from a candidate and a number of rounds to the values of a measure, of which less is
better. What they choose follows from these values alone, whatever order the runs are made in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import SpecError

Floats = npt.NDArray[np.float64]
STAGES = {0.25: 0.5, 0.5: 0.7}  # share of the rounds → share of the best one's progress
ALIKE = 0.85  # a trial that falls this share of the largest fall is as fast
MARGIN = 3.0  # factor from the lowest rate that diverged, where only a loss is known
DEEP = 8.0  # decrease of an error's logarithm that ends in noise
DEEPER = 16.0  # factor by which a transient ends below its floor: too small a rate costs more than too large a one


# ---- a given grid


def halve(
    lengths: Sequence[int],
    evaluated: Sequence[int],
    values: Callable[[int, int], Floats | None],
    last: Callable[[int], int] = lambda _: 1,
    stages: Mapping[float, float] = STAGES,
) -> list[int]:
    """Return the rounds that each candidate is run for, as far as this is known by now.

    Args:
        lengths: The rounds of each candidate's whole run.
        evaluated: The rounds between two of its evaluations.
        values: What candidate n has measured up to a round, (seeds, evaluations) with nan after it diverged; None while
            its run is not made.
        last: How many of so many evaluations make up a result.
        stages: Share of the rounds → share of the best one's progress below which a candidate may be dropped.
    """
    found, left = list(lengths), set(range(len(lengths)))
    for share, behind in stages.items():
        ends = [stage_end(*one, share) for one in zip(lengths, evaluated, strict=True)]
        made: dict[int, list[float]] = {}  # how far the measure has come; each is the mean of a few
        for n in sorted(left):
            known = values(n, ends[n])
            if known is None:
                return [ends[n] if n in left else rounds for n, rounds in enumerate(found)]
            if np.isfinite(known[:, -1]).all():  # if not, its run has ended
                better = (known[:, :1] - known).mean(0)
                few, count = last(len(better)), range(1, len(better) + 1)
                made[n] = [float(better[max(0, end - few) : end].mean()) for end in count]
        best = max((one[-1] for one in made.values()), default=0.0)
        for n, one in made.items():
            third = max(1, len(one) // 3)
            pace = max(0.0, (one[-1] - one[-1 - third]) / third)
            at_the_end = one[-1] + pace * (len(one) - 1) * (1 / share - 1)
            if one[-1] < behind * best and at_the_end < best:
                found[n] = ends[n]
                left.remove(n)
    return found


def stage_end(rounds: int, evaluated: int, share: float) -> int:
    """Return the last round with an evaluation in a share of the rounds."""
    return max(1, int(share * rounds / evaluated)) * evaluated


# ---- a learning rate


@dataclass(frozen=True)
class Trial:
    """One learning rate and the values measured with it."""

    lr: float
    rounds: int  # rounds run
    at: list[int]  # rounds of the evaluations
    values: list[float]  # the measure at these rounds
    diverged: bool
    bytes: int = 0  # sent up and down by all clients

    def fall(self, evaluations: int | None = None) -> float:
        """Decrease of the logarithm of the measure, from the first value to the mean of the last sixth."""
        if self.diverged:
            return -math.inf
        seen = self.values[:evaluations]
        tail = float(np.mean(seen[-max(1, len(seen) // 6) :]))
        return math.log(self.values[0] / max(tail, 1e-300))


def find_lr(
    run: Callable[[float, int, bool], Trial],
    rounds: int,
    budget: int,
    start: float,
    measure: str,
    known: bool,
) -> float:
    """Return the learning rate for a run.

    Args:
        run: Makes a trial of a rate for some rounds. With True, a trial that has not fallen counts as diverged.
        rounds: The rounds of the run.
        budget: The rounds that all trials may take.
        start: The first rate.
        measure: What is measured, in words.
        known: Whether it is the error itself.
    """
    # short trials, until the best rate lies inside the grid
    short, lr, left = min(rounds, max(2, budget // 30)), start, budget
    grid: dict[float, Trial] = {}
    while left >= max(short, budget / 2):
        grid[lr] = run(lr, short, False)
        left -= grid[lr].rounds
        best = _lowest(grid.values())
        if best.fall() <= 0 or best.lr == min(grid):
            lr = min(grid) / 2
        elif best.lr == max(grid):
            lr = max(grid) * 2
        else:
            break
    if all(one.diverged for one in grid.values()):
        raise SpecError(
            f"every rate down to {min(grid):g} diverged in the search; set `search.start` lower"
        )
    lr = _lowest(grid.values()).lr
    edge = _lowest_diverged(grid.values())
    # whether the server scales its own steps: none diverges, and a four times larger one does no more
    scaled = edge == math.inf and 4 * lr in grid and grid[4 * lr].fall() >= ALIKE * grid[lr].fall()
    while not known and lr > edge / MARGIN:
        lr /= 2
    # longer trials, downward until they are behind
    long = max(short, min(rounds, left // (4 if known else 3)))
    longer: list[Trial] = []
    while left >= long:
        longer.append(run(lr, long, True))
        left -= longer[-1].rounds
        most = max(one.fall() for one in longer)
        least = min(ALIKE * most, DEEP * long / rounds if known and scaled else math.inf)
        if most > 0 and longer[-1].fall() < least:
            break
        lr /= 4 if known else 2
    stable = [one for one in longer if not one.diverged]
    if not stable:
        raise SpecError(
            f"no rate down to {longer[-1].lr:g} lowers the {measure}; set `search.start` lower"
        )
    if not known:
        edge = _lowest_diverged([*grid.values(), *longer])
        return _lowest([one for one in stable if one.lr <= edge / MARGIN] or stable).lr
    if not scaled:
        return _for_longer(_lowest(stable), rounds)
    enough = [one for one in stable if one.fall() >= least] or stable
    # between the lowest rate that comes far enough and the next one
    chosen, below = min(enough, key=lambda one: one.lr), stable[-1]
    if 0 < below.fall() < least:
        share = math.log(least / below.fall()) / math.log(chosen.fall() / below.fall())
        return float(below.lr * (chosen.lr / below.lr) ** share)
    return chosen.lr


def _lowest(trials: Iterable[Trial]) -> Trial:
    """The lowest rate that falls about as far as any."""
    trials = list(trials)
    most = max(one.fall() for one in trials)
    least = ALIKE * most if most > 0 else most
    return min((one for one in trials if one.fall() >= least), key=lambda one: one.lr)


def _lowest_diverged(trials: Iterable[Trial]) -> float:
    return min((one.lr for one in trials if one.diverged), default=math.inf)


def _for_longer(trial: Trial, rounds: int) -> float:
    """The rate for a run of `rounds` rounds, from a trial that falls fast in fewer."""
    falls = [math.log(trial.values[0] / max(one, 1e-300)) for one in trial.values]
    end = next(n for n, fall in enumerate(falls) if fall >= 0.9 * trial.fall() and n)
    time, decays = trial.lr * trial.at[end], 2 * falls[end]
    third = len(falls) // 3
    late = 3 * (1 - trial.fall(len(falls) - third) / trial.fall()) if third else 1.0
    late = min(max(late, 0.5), 0.9)  # share of the squared error that still falls
    more = math.log(max(1.0, DEEPER * decays * rounds / trial.at[end] * late / (1 - late)))
    return min(trial.lr, time * (1 + more / decays) / rounds)
