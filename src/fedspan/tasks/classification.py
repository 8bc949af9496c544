"""Classification: images by name or data of your own, a partition into clients, and a network."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan.core.errors import SpecError, at_least, one_of
from fedspan.core.registry import register
from fedspan.data import datasets
from fedspan.data.datasets import Split, first_examples
from fedspan.data.user_tables import Division, OwnData
from fedspan.nn.models import Norm
from fedspan.tasks._divided import DividedTask, scaled
from fedspan.tasks._module import Material


@register
@dataclass(frozen=True, kw_only=True)
class Classification(DividedTask):
    """Clients with examples of their own, evaluated on one test set."""

    data: (
        str | OwnData
    )  # mnist, fashion_mnist, cifar10, cifar100, cifar100_mini, digits; or a table with a `path`
    model: str = "mlp"  # linear, mlp, cnn, resnet8, resnet20, resnet56, resnet110; or your own as module:function
    norm: Norm = "group"  # of the ResNets
    classes: int | None = None  # only the first classes of a data set by name; None: all
    per_class: int | None = None  # training examples of each class that are used; None: all
    test_per_class: int | None = None  # test examples of each class that are used; None: all
    shrink: int = 1  # images are averaged over squares of this many pixels

    def __post_init__(self) -> None:
        at_least("shrink", self.shrink, 1)
        if isinstance(self.data, str):
            if "." in self.data or "/" in self.data:
                raise SpecError(
                    f'`task.data` {self.data!r} is a file; write data = {{path = "{self.data}", …}}'
                )
            one_of("task.data", self.data, datasets.IMAGES)
        for name in ("classes", "per_class", "test_per_class"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
                if isinstance(self.data, OwnData):
                    raise SpecError(f"`{name}` is for data sets by name; leave it out")

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The data, divided among clients, and the network."""
        found = self.division(seed)
        standardize = isinstance(self.data, str) or self.data.standardize == "pooled"
        x = scaled(found.train, found.test, dtype, standardize, self.shrink)
        return self.assemble(found, x, dtype, seed, norm=self.norm)

    def requires(self) -> list[str]:
        """The data set, if it has a name."""
        return [self.data] if isinstance(self.data, str) else []

    def division(self, seed: int) -> Division:
        """The examples that are used, and who has which."""
        if isinstance(self.data, OwnData):
            return self.data.divide("classes", self.partition, self.draw_seed(seed))
        train, test = (
            _some(split, self.classes, per_class)
            for split, per_class in zip(
                datasets.load(self.data), (self.per_class, self.test_per_class), strict=True
            )
        )
        parts = self.partition.split(train.y, self.draw_seed(seed), train.owner)
        names = [str(number) for number in range(len(parts))]
        return Division(
            train, test, parts, names, [str(number) for number in range(int(train.y.max()) + 1)]
        )


def _some(split: Split, classes: int | None, per_class: int | None) -> Split:
    """The first examples of the first classes, in the order of the file."""
    if classes is None and per_class is None:
        return split
    places = first_examples(split.y, classes, per_class)
    return Split(
        split.x[places], split.y[places], None if split.owner is None else split.owner[places]
    )
