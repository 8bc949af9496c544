"""Fed-Heart-Disease as FLamby trains on it: its model, loss, initial weights and normalization.

Each center normalizes its training rows by their own mean and standard deviation, and the pooled test is normalized by
those of all training rows. A federation of tables has the same as `standardize = "client"`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedspan import register
from fedspan.data import heart_disease, natural
from fedspan.tasks._module import Material, ModuleTask

CENTERS = ("Cleveland", "Hungarian", "Switzerland", "Long Beach")


@register
@dataclass(frozen=True, kw_only=True)
class FlambyHeart(ModuleTask):
    """A logistic regression on 13 clinical features, for the patients of four hospitals."""

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        train, test = heart_disease()
        assert train.owner is not None  # the patients' hospitals
        x, y, x_test, y_test = (
            torch.from_numpy(a).to(dtype) for a in (train.x, train.y, test.x, test.y)
        )
        clients = [(_scaled(x[own], x[own]), y[own]) for own in natural(train.owner).values()]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Linear(13, 1).to(dtype)
        known = _scaled(x_test, x), y_test
        return Material(model, clients, known, loss=nn.BCEWithLogitsLoss(), names=CENTERS)


def _scaled(x: Tensor, by: Tensor) -> Tensor:
    return (x - by.mean(0)) / (by.std(0) + 1e-9)
