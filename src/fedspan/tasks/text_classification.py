"""Text classification: customers' questions or texts of your own, and a pre-trained encoder with a new head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.errors import SpecError, at_least, one_of
from fedspan.core.partition import Partition
from fedspan.core.registry import register
from fedspan.core.task import Holdings
from fedspan.data.datasets import Split, first_examples, texts
from fedspan.data.partitions.dirichlet import Dirichlet
from fedspan.data.user_tables import OwnData
from fedspan.huggingface.checkpoints import load_model, place_of
from fedspan.huggingface.checkpoints import sentences as tokens
from fedspan.tasks._module import Material
from fedspan.tasks._text import TextTask, sentences

Numbers = npt.NDArray[np.int64]
Examples = dict[str, Any]
NAMES = ("banking77", "banking77_mini")


@register
@dataclass(frozen=True, kw_only=True)
class TextClassification(TextTask):
    """Clients with texts of their own, evaluated on one test set."""

    data: str | OwnData = (
        "banking77"  # banking77_mini, or a table with a `path`: a .csv, .jsonl … with text and label
    )
    model: str = "minilm"  # minilm, tiny, or the directory of a model
    partition: Partition = field(
        default_factory=lambda: Dirichlet(clients=20, alpha=0.1)
    )  # who has which examples
    data_seed: int | None = None  # of the partition; None: the run's seed
    classes: int | None = None  # only the first classes of the data set; None: all
    per_class: int | None = None  # training examples of each class that are used; None: all
    test_per_class: int | None = None  # test examples of each class; None: all
    max_length: int = 64  # tokens of a text; longer texts are cut
    frozen_modules: ClassVar[tuple[str, ...]] = (
        "*embed*",
    )  # half of MiniLM, of which a client's few texts use little

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.data, str):
            one_of("task.data", self.data, NAMES)
        at_least("max_length", self.max_length, 2)
        for name in ("classes", "per_class", "test_per_class"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
                if isinstance(self.data, OwnData):
                    raise SpecError(f"`{name}` is for data sets by name; leave it out")

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The texts, split over clients, and the model with a new head."""
        if isinstance(self.data, OwnData):
            return self._own(self.data, seed, dtype)
        labels, places = self._labels("train")
        parts = self._cut(labels, seed)
        model = load_model(
            self.model,
            "SequenceClassification",
            seed,
            self.dropout,
            num_labels=int(labels.max()) + 1,
        )

        def examples(ids: Sequence[int]) -> list[Examples]:
            found = self._sentences("train", np.concatenate([places[parts[i]] for i in ids]))
            return [_examples(found, labels[parts[i]], places[parts[i]]) for i in ids]

        def test() -> Examples:
            scored, where = self._labels("test")
            return _examples(self._sentences("test", where), scored, where)

        return Material(self.prepared(model, dtype), len(parts), examples, test)

    def _own(self, data: OwnData, seed: int, dtype: torch.dtype) -> Material:
        found = data.divide(
            "texts", self.partition, seed if self.data_seed is None else self.data_seed
        )
        model = load_model(
            self.model, "SequenceClassification", seed, self.dropout, num_labels=len(found.classes)
        )

        def examples(split: Split, part: Numbers) -> Examples:
            ids = tokens(place_of(self.model), split.x[part].tolist(), self.max_length)
            return {"input_ids": ids, "labels": split.y[part]}

        return Material(
            self.prepared(model, dtype),
            len(found.parts),
            lambda ids: [examples(found.train, found.parts[i]) for i in ids],
            lambda: (
                None if found.test is None else examples(found.test, np.arange(len(found.test.y)))
            ),
        )

    def fingerprint(self) -> dict[str, Any]:
        """A hash of the files in place of their paths."""
        return {} if isinstance(self.data, str) else {"data": self.data.decisions()}

    def holdings(self, seed: int) -> Holdings:
        """How many examples of each class every client has."""
        if isinstance(self.data, OwnData):
            seed = seed if self.data_seed is None else self.data_seed
            return self.data.divide("texts", self.partition, seed).holdings()
        labels = self._labels("train")[0]
        classes = [str(number) for number in range(int(labels.max()) + 1)]
        parts = self._cut(labels, seed)
        counts = np.stack([np.bincount(labels[part], minlength=len(classes)) for part in parts])
        return Holdings(counts, [str(number) for number in range(len(parts))], classes)

    def _sentences(self, part: Literal["train", "test"], places: Numbers) -> dict[int, list[int]]:
        which = tuple(np.sort(places).tolist())  # whoever has them: one key for all of a file's
        assert isinstance(self.data, str)
        return sentences(texts(self.data, part), place_of(self.model), self.max_length, which)

    def _labels(self, part: Literal["train", "test"]) -> tuple[Numbers, Numbers]:
        """The labels of the examples that are used, and their numbers in the file."""
        assert isinstance(self.data, str)
        labels = texts(self.data, part).y
        places = first_examples(
            labels, self.classes, self.per_class if part == "train" else self.test_per_class
        )
        return labels[places], places

    def _cut(self, labels: Numbers, seed: int) -> list[Numbers]:
        return self.partition.split(labels, seed if self.data_seed is None else self.data_seed)


def _examples(found: dict[int, list[int]], labels: Numbers, places: Numbers) -> Examples:
    return {"input_ids": [found[i] for i in places.tolist()], "labels": labels}
