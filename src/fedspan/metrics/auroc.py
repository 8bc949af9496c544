"""AUROC: the probability that a random positive example is scored above a random negative one; a tie counts half."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from fedspan.core.metric import IGNORED
from fedspan.core.registry import register
from fedspan.metrics._collected import Collected, by_class, one_score

Tensor = torch.Tensor
BINS = 8192  # of scores, in a client's summary


@register
class AUROC(Collected):
    """Of one score, or the mean over the classes or labels that occur and are not all, each against the others.

    Clients send how many examples of each kind have a score in each bin.
    """

    needs = "examples of at least two classes"  # where it is not NaN

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric of what was kept."""
        counts = []
        for column, inside in ranked(outputs, targets):
            _, place, count = column.unique(return_inverse=True, return_counts=True)
            positives = torch.bincount(place, weights=inside.double(), minlength=len(count))
            counts.append((ordered(column, positives), count - positives))
        return mean(counts)

    def summary(self) -> Tensor:
        """Return for each class the examples in it, and not in it, by bins of their scores."""
        found = []
        for column, inside in ranked(*self.tensors()):
            squeezed = column / (1 + column.abs())  # between −1 and 1, in the same order
            bins = ((squeezed + 1) / 2 * BINS).nan_to_num().clamp(0, BINS - 1).long()
            counts = [torch.bincount(bins[part], minlength=BINS) for part in (inside, ~inside)]
            found += [ordered(column, one.double()) for one in counts]
        return torch.cat(found)

    @classmethod
    def pooled(cls, total: Tensor) -> float:
        """Return the metric of the bins."""
        return mean(both[:, both.any(0)] for both in total.reshape(-1, 2, BINS))


def mean(counts: Iterable[Sequence[Tensor]]) -> float:
    """Return the mean over classes, from the examples in each and not in it at each score, lowest first."""
    found = []
    for positives, negatives in counts:
        if positives.any() and negatives.any():
            below = negatives.cumsum(0) - negatives / 2
            found.append(float((positives * below).sum() / (positives.sum() * negatives.sum())))
    return sum(found) / len(found) if found else math.nan


def ranked(outputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return for each class or label the scores of the examples, and which of them are in it.

    Only the order of scores counts. Where the model has an output per class, a class is ranked by its log-odds
    z_k - log Σ_{j≠k} exp(z_j), which order examples as softmax does and never saturate.
    """
    if by_class(outputs, targets):
        scores, targets = outputs.double().movedim(1, -1).flatten(0, -2), targets.flatten()
        scores, targets = scores[targets != IGNORED], targets[targets != IGNORED]
        classes = range(scores.shape[1])
        sums = scores.sum(1)
        probabilities = (scores >= 0).all() and torch.allclose(
            sums, torch.ones_like(sums), atol=1e-5
        )
        if not probabilities:
            rest = [torch.cat([scores[:, :k], scores[:, k + 1 :]], 1) for k in classes]
            scores = scores - torch.stack([others.logsumexp(1) for others in rest], 1)
        there = torch.stack([targets == k for k in classes], 1)
    else:
        scores = one_score(outputs, targets).double().reshape(len(targets), -1)
        there = (targets > 0.5).reshape(len(targets), -1)
    return list(zip(scores.T, there.T, strict=True))


def ordered(scores: Tensor, counts: Tensor) -> Tensor:
    """Return counts of examples, which are NaN if not all scores are finite: those have no order."""
    return counts.where(torch.isfinite(scores).all(), math.nan)
