"""Predicting numbers from a table of your own, by squared error: features in, one or several numbers out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan.core.registry import register
from fedspan.data.user_tables import Division, OwnData
from fedspan.tasks._divided import DividedTask, scaled
from fedspan.tasks._module import Material


@register
@dataclass(frozen=True, kw_only=True)
class TabularRegression(DividedTask):
    """Clients with rows of their own, evaluated on one test set; the metrics mse, mae and r2 are of use."""

    data: OwnData  # a table with a `path`
    model: str = "linear"  # linear or mlp, or your own as module:function

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The rows, divided among clients, and the model."""
        found = self.division(seed)
        x = scaled(found.train, found.test, dtype, self.data.standardize == "pooled")
        return self.assemble(found, x, dtype, seed)

    def division(self, seed: int) -> Division:
        """The rows, and who has which."""
        return self.data.divide("numbers", self.partition, self.draw_seed(seed))
