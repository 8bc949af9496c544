"""Image classification: a data set by name, a partition into clients, and a network by name."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812

from fedspan.core.errors import SpecError, at_least, one_of
from fedspan.core.partition import Indices, Partition
from fedspan.core.registry import register
from fedspan.data import datasets
from fedspan.data.datasets import Split, first_examples
from fedspan.data.partitions.natural import Natural
from fedspan.nn.models import Norm, build
from fedspan.tasks._module import Material, ModuleTask


@register
@dataclass(frozen=True, kw_only=True)
class Classification(ModuleTask):
    """Clients with images of their own, evaluated on one test set."""

    data: str  # mnist, fashion_mnist, cifar10, cifar100, cifar100_mini or digits
    model: str = "mlp"  # mlp, cnn, resnet8, resnet20, resnet56, resnet110
    norm: Norm = "group"  # of the ResNets
    partition: Partition = field(default_factory=Natural)  # who has which examples
    data_seed: int | None = None  # of the partition; None: the run's seed
    classes: int | None = None  # only the first classes of the data set; None: all
    per_class: int | None = None  # training examples of each class that are used; None: all
    test_per_class: int | None = None  # test examples of each class that are used; None: all
    shrink: int = 1  # images are averaged over squares of this many pixels

    def __post_init__(self) -> None:
        one_of("task.data", self.data, datasets.IMAGES)
        at_least("shrink", self.shrink, 1)
        for name in ("classes", "per_class", "test_per_class"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The data, divided among clients, and the network."""
        train, test = (
            _some(split, self.classes, per_class)
            for split, per_class in zip(datasets.load(self.data), (self.per_class, self.test_per_class), strict=True)
        )
        images = _normalized(train.x, test.x, self.shrink, dtype)
        x, y = images[0], torch.from_numpy(train.y)
        channels, height, width = x.shape[1:]
        model = build(self.model, (channels, height, width), int(train.y.max()) + 1, self.norm, seed).to(dtype)
        parts = self._parts(train, seed)
        return Material(
            model,
            len(parts),
            lambda ids: ((x[parts[i]], y[parts[i]]) for i in ids),
            lambda: (images[1], test.y),
        )

    def counts(self, seed: int) -> npt.NDArray[np.int64]:
        """The number of examples of each class that each client has: (clients, classes)."""
        train = _some(datasets.load(self.data)[0], self.classes, self.per_class)
        classes = int(train.y.max()) + 1
        return np.stack([np.bincount(train.y[part], minlength=classes) for part in self._parts(train, seed)])

    def _parts(self, train: Split, seed: int) -> list[Indices]:
        return self.partition.split(train.y, seed if self.data_seed is None else self.data_seed, train.owner)


def _some(split: Split, classes: int | None, per_class: int | None) -> Split:
    """The first examples of the first classes, in the order of the file."""
    if classes is None and per_class is None:
        return split
    places = first_examples(split.y, classes, per_class)
    return Split(split.x[places], split.y[places], None if split.owner is None else split.owner[places])


def _normalized(
    train: npt.NDArray[np.uint8], test: npt.NDArray[np.uint8], shrink: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images as (n, channels, height, width), each channel with the mean 0 and deviation 1 of the training images."""
    if min(train.shape[1:3]) < shrink:
        raise SpecError(f"`task.shrink` {shrink} is larger than the images, {train.shape[1]} × {train.shape[2]}")
    both = [torch.from_numpy(a.copy()).to(dtype).div_(255) for a in (train, test)]
    both = [a.unsqueeze(1) if a.dim() == 3 else a.permute(0, 3, 1, 2).contiguous() for a in both]
    if shrink > 1:
        both = [F.avg_pool2d(a, shrink) for a in both]
    mean, deviation = both[0].mean((0, 2, 3), keepdim=True), both[0].std((0, 2, 3), keepdim=True)
    return (both[0] - mean) / deviation, (both[1] - mean) / deviation
