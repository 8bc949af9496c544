"""What tasks share whose examples are divided among clients by a partition: by name, or your own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.core.errors import SpecError
from fedspan.core.partition import Partition
from fedspan.core.task import Holdings
from fedspan.data.datasets import Split
from fedspan.data.partitions.natural import Natural
from fedspan.data.user_tables import Division, OwnData
from fedspan.nn.client_data import narrowed
from fedspan.nn.models import Norm, build
from fedspan.tasks._imports import model_from
from fedspan.tasks._module import Material, ModuleTask

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class DividedTask(ModuleTask):
    """Clients with rows of a data set, evaluated on one test set."""

    data: Any
    partition: Partition = field(default_factory=Natural)  # who has which examples
    data_seed: int | None = None  # of the partition and the test share; None: the run's seed
    module_dir: str | None = (
        None  # where your own model is looked for; by default the directory of the spec file
    )

    @abstractmethod
    def division(self, seed: int) -> Division:
        """The examples, and who has which."""

    def holdings(self, seed: int) -> Holdings:
        """How many examples of each class every client has."""
        return self.division(seed).holdings()

    def fingerprint(self) -> dict[str, Any]:
        """A hash of the files in place of their paths."""
        return {"module_dir": None} | (
            {} if not isinstance(self.data, OwnData) else {"data": self.data.decisions()}
        )

    def draw_seed(self, seed: int) -> int:
        """The seed of the partition."""
        return seed if self.data_seed is None else self.data_seed

    def assemble(
        self,
        found: Division,
        x: tuple[Tensor, Tensor | None],
        dtype: torch.dtype,
        seed: int,
        **of_model: Any,
    ) -> Material:
        """The model, the clients' examples and the test set."""
        every = [torch.from_numpy(one.y) for one in (found.train, found.test) if one is not None]
        y, *held = [
            narrowed(one, dtype, "`task.data.target`") if one.is_floating_point() else one
            for one in every
        ]
        test = (x[1], held[0]) if held else None
        outputs = len(found.classes) or y.shape[1]
        model = self._model(tuple(x[0].shape[1:]), outputs, seed, **of_model).to(dtype)
        return Material(
            model,
            len(found.parts),
            lambda ids: ((x[0][found.parts[i]], y[found.parts[i]]) for i in ids),
            lambda: test,
            None if found.classes else F.mse_loss,
            sizes=lambda: [len(part) for part in found.parts],
        )

    def _model(
        self, shape: tuple[int, ...], outputs: int, seed: int, norm: Norm = "group"
    ) -> nn.Module:
        name: str = self.model  # type: ignore[attr-defined]
        if ":" in name:
            return model_from(name, self.module_dir, seed)
        return build(name, shape, outputs, norm, seed)


def scaled(
    train: Split, test: Split | None, dtype: torch.dtype, standardize: bool = True, shrink: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Inputs as tensors, each column or channel with mean 0 and deviation 1 over the training examples."""
    both = [train.x] if test is None else [train.x, test.x]
    made = (
        _images(both, shrink, dtype)
        if train.x.dtype == np.uint8 and train.x.ndim > 2
        else _numbers(both, dtype)
    )
    if standardize:
        axes = [axis for axis in range(made[0].dim()) if axis != 1]
        mean, deviation = made[0].mean(axes, keepdim=True), made[0].std(axes, keepdim=True)
        deviation = torch.where(
            deviation > 0, deviation, torch.ones_like(deviation)
        )  # a constant column
        made = [(one - mean) / deviation for one in made]
    return made[0], made[1] if len(made) > 1 else None


def _numbers(both: list[npt.NDArray[Any]], dtype: torch.dtype) -> list[Tensor]:
    return [
        narrowed(torch.from_numpy(one.astype(np.float64)), dtype, "`task.data`") for one in both
    ]


def _images(both: list[npt.NDArray[Any]], shrink: int, dtype: torch.dtype) -> list[Tensor]:
    """Images as (n, channels, height, width), from 0 to 1."""
    if min(both[0].shape[1:3]) < shrink:
        raise SpecError(
            f"`task.shrink` {shrink} is larger than the images, {both[0].shape[1]} × {both[0].shape[2]}"
        )
    made = [torch.from_numpy(a.copy()).to(dtype).div_(255) for a in both]
    made = [a.unsqueeze(1) if a.dim() == 3 else a.permute(0, 3, 1, 2).contiguous() for a in made]
    return [F.avg_pool2d(a, shrink) for a in made] if shrink > 1 else made
