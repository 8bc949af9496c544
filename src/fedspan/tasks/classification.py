"""Classification: images by name or data of your own, a partition into clients, and a network."""

from dataclasses import dataclass
from typing import ClassVar

from fedspan.core.errors import SpecError, at_least, one_of
from fedspan.core.registry import register
from fedspan.data import datasets
from fedspan.data.user_tables import Kind, OwnData
from fedspan.nn.models import Norm
from fedspan.tasks._divided import NetworkTask


@register
@dataclass(frozen=True, kw_only=True)
class Classification(NetworkTask):
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
    kind: ClassVar[Kind] = "classes"

    def __post_init__(self) -> None:
        at_least("shrink", self.shrink, 1)
        if isinstance(self.data, str):
            if "." in self.data or "/" in self.data:
                raise SpecError(
                    f'`task.data` {self.data!r} is a file; write data = {{path = "{self.data}", …}}'
                )
            one_of("task.data", self.data, datasets.IMAGES)
        super().__post_init__()

    def splits(self) -> datasets.Splits:
        """The training and the test images."""
        assert isinstance(self.data, str)
        return datasets.load(self.data)

    def requires(self) -> list[str]:
        """The data set, if it has a name."""
        return [self.data] if isinstance(self.data, str) else []
