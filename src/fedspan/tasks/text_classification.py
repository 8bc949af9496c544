"""Text classification: customers' questions or texts of your own, and a pre-trained encoder with a new head."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from fedspan.core.errors import at_least, one_of
from fedspan.core.partition import Partition
from fedspan.core.registry import register
from fedspan.data.datasets import Split, Splits, texts
from fedspan.data.partitions.dirichlet import Dirichlet
from fedspan.data.user_tables import Kind, OwnData
from fedspan.huggingface.checkpoints import place_of, sentences
from fedspan.nn.batches import Clients
from fedspan.tasks._divided import DividedTask
from fedspan.tasks._module import Material
from fedspan.tasks._text import TextTask

NAMES = ("banking77", "banking77_mini")


@register
@dataclass(frozen=True, kw_only=True)
class TextClassification(DividedTask, TextTask):
    """Clients with texts of their own, evaluated on one test set."""

    data: str | OwnData = "banking77"  # banking77_mini, or a table with a `path`: text and label
    model: str = "minilm"  # minilm, tiny, or the directory of a model
    partition: Partition = field(
        default_factory=lambda: Dirichlet(clients=20, alpha=0.1)
    )  # who has which examples
    data_seed: int | None = None  # of the partition; None: the run's seed
    classes: int | None = None  # only the first classes of the data set; None: all
    per_class: int | None = None  # training examples of each class that are used; None: all
    test_per_class: int | None = None  # test examples of each class; None: all
    max_length: int = 64  # tokens of a text; longer texts are cut
    kind: ClassVar[Kind] = "texts"
    frozen_modules: ClassVar[tuple[str, ...]] = (
        "*embed*",
    )  # half of MiniLM, of which a client's few texts use little

    def __post_init__(self) -> None:
        TextTask.__post_init__(self)
        if isinstance(self.data, str):
            one_of("task.data", self.data, NAMES)
        at_least("max_length", self.max_length, 2)
        DividedTask.__post_init__(self)

    def splits(self) -> Splits:
        """The training and the test texts of a data set by name."""
        assert isinstance(self.data, str)
        return texts(self.data, "train"), texts(self.data, "test")

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The texts, split over clients, and the model with a new head."""
        found = self.division(seed)
        labels = len(found.classes)
        model = self.load("SequenceClassification", seed, dtype, num_labels=labels)

        def examples(split: Split, parts: Sequence[Any]) -> list[dict[str, Any]]:
            rows = np.sort(np.concatenate(parts)).tolist()  # whoever has them: one key for all
            ids = sentences(split, place_of(self.model), self.max_length, tuple(rows))
            return [
                {"input_ids": [ids[row] for row in part.tolist()], "labels": split.y[part]}
                for part in parts
            ]

        def test() -> dict[str, Any]:
            assert found.test is not None
            return examples(found.test, [np.arange(len(found.test.y))])[0]

        def read(ids: Sequence[int]) -> list[dict[str, Any]]:
            return examples(found.train, [found.parts[i] for i in ids])

        return Material(
            model, Clients(len(found.parts), read), test if found.test is not None else None
        )
