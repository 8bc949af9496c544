"""Scoring a Hugging Face model on a test set.

Texts are scored in the order of their length, so that little is padding, and in parts small enough for their logits.
Losses of parts are weighted by what each is a mean of: the examples of a classifier, the predicted tokens of a language
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.huggingface.models import Pretrained
from fedspan.huggingface.text_data import NO_LABEL
from fedspan.nn.client_data import ClientData, placed

AT_ONCE = 128  # texts scored at a time
LOGITS = 1 << 26  # and at most so many logits of tokens: 256 MB


def text_scorer(
    test: ClientData, about: Pretrained, device: torch.device
) -> Callable[[nn.Module], Mapping[str, float]]:
    """A function that scores a model: its loss, and what its kind is judged by."""
    parts = _parts(test, about)

    def score(model: nn.Module) -> dict[str, float]:
        tally = _Tally(about)
        for part in parts:
            tally.add(model, placed(test.take(part), device))
        return tally.metrics()

    return score


def macro_f1(predicted: torch.Tensor, actual: torch.Tensor) -> float:
    """The mean over classes, seen or predicted, of 2 · right / (predicted + actual)."""
    classes = int(torch.cat([predicted, actual]).max()) + 1
    right = torch.bincount(actual[predicted == actual], minlength=classes).double()
    both = torch.bincount(predicted, minlength=classes) + torch.bincount(actual, minlength=classes)
    return float((2 * right[both > 0] / both[both > 0]).mean())


class _Tally:
    """Sums over the parts of a test set."""

    def __init__(self, about: Pretrained) -> None:
        self.about, self.loss, self.count, self.right = about, 0.0, 0, 0
        self.predicted: list[torch.Tensor] = []
        self.actual: list[torch.Tensor] = []

    def add(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
        """One part."""
        found, labels = model(**batch), batch["labels"]
        count, loss = len(labels), found.loss
        if self.about.kind == "classes":
            loss = F.cross_entropy(found.logits.float(), labels)  # its own, with digits enough for bfloat16 weights
            self.predicted.append(found.logits.argmax(-1).cpu())
            self.actual.append(labels.cpu())
        elif self.about.by_token:
            predicted = found.logits.argmax(-1)
            if self.about.kind == "causal":
                predicted, labels = predicted[:, :-1], labels[:, 1:]
            counted = labels != NO_LABEL
            count = int(counted.sum())
            self.right += int((predicted == labels)[counted].sum())
        self.loss += float(loss.detach()) * count
        self.count += count

    def metrics(self) -> dict[str, float]:
        """Means over the whole test set."""
        loss = self.loss / self.count
        if self.about.kind == "classes":
            predicted, actual = torch.cat(self.predicted), torch.cat(self.actual)
            accuracy = float((predicted == actual).double().mean())
            return {"loss": loss, "accuracy": accuracy, "f1": macro_f1(predicted, actual)}
        if self.about.by_token:
            shown = {"perplexity": math.exp(min(loss, 700.0))} if self.about.labels == self.about.vocabulary else {}
            return {"loss": loss, **shown, "token_accuracy": self.right / self.count}
        return {"loss": loss}


def _parts(test: ClientData, about: Pretrained) -> list[torch.Tensor]:
    """Numbers of the examples that are scored together."""
    lengths = getattr(test, "lengths", torch.ones(len(test), dtype=torch.int64))
    order = torch.argsort(lengths, stable=True)
    each = int(lengths.max()) * (about.labels if about.by_token else 1)
    return list(order.split(max(1, min(AT_ONCE, LOGITS // each))))
