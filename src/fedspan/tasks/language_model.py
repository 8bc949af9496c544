"""Language modeling: every role of Shakespeare's plays is a client, and a pre-trained model learns their words.

A role's text is cut into blocks of tokens. Its last part is not trained on; those parts of all roles are the test set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedspan.core.errors import DataError, SpecError, at_least, one_of, positive_share
from fedspan.core.registry import register
from fedspan.data.datasets import texts
from fedspan.huggingface.checkpoints import place_of, running
from fedspan.nn.batches import Clients
from fedspan.tasks._module import Material
from fedspan.tasks._text import TextTask

NAMES = ("shakespeare", "shakespeare_mini")
Block = list[int]


@register
@dataclass(frozen=True, kw_only=True)
class LanguageModel(TextTask):
    """Clients with texts of their own, evaluated on texts of all of them."""

    data: str = "shakespeare"  # shakespeare or shakespeare_mini
    model: str = "stories260k"  # stories260k, tiny, or the directory of a model
    clients: int | None = None  # those with most text; None: all with enough of it
    min_characters: int = 1000  # text that a client must have
    block: int = 128  # tokens of an example, including the mark of a beginning
    test_share: float = 0.1  # of each client's text, its end
    test_blocks: int | None = 256  # blocks to evaluate on, spread evenly over clients; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("task.data", self.data, NAMES)
        at_least("min_characters", self.min_characters, 1)
        at_least("block", self.block, 3)
        for name in ("clients", "test_blocks"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        positive_share("test_share", self.test_share)
        if self.test_share == 1:
            raise SpecError(f"`test_share` must be above 0 and below 1, got {self.test_share!r}")

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        """The roles, whose texts are cut into blocks, and the model."""
        roles = self._roles()

        def halves(ids: Sequence[int]) -> list[list[list[Block]]]:
            # blocks to train on and blocks to evaluate on, each after the mark of a beginning
            which = tuple(roles[i] for i in ids)
            begin, found = running(texts(self.data, "roles"), place_of(self.model), which)
            each, halved = self.block - len(begin), []
            for role in which:
                end = max(2, round(len(found[role]) * self.test_share))
                parts = found[role][:-end], found[role][-end:]
                cut = [
                    [begin + part[i : i + each] for i in range(0, len(part), each)]
                    for part in parts
                ]
                halved.append([[block for block in one if len(block) > 1] for one in cut])
            return halved

        def test() -> dict[str, Any]:
            scored = [block for _, end in halves(range(len(roles))) for block in end]
            if self.test_blocks is not None and self.test_blocks < len(scored):
                places = np.linspace(0, len(scored) - 1, self.test_blocks).round().astype(int)
                scored = [scored[i] for i in places]
            return {"input_ids": scored, "labels": scored}

        def read(ids: Sequence[int]) -> list[dict[str, Any]]:
            return [{"input_ids": own, "labels": own} for own, _ in halves(ids)]

        return Material(self.load("CausalLM", seed, dtype), Clients(len(roles), read), test)

    def _roles(self) -> list[int]:
        """The clients' numbers in the file."""
        sizes = np.array([len(text) for text in texts(self.data, "roles").x])
        enough = np.flatnonzero(sizes >= self.min_characters)
        if len(enough) < (self.clients or 1):
            raise DataError(
                f"`task.clients` is {self.clients or 1}, but {len(enough)} have {self.min_characters} characters to say"
            )
        most = enough[np.argsort(-sizes[enough], kind="stable")][: self.clients]
        return np.sort(most).tolist()  # type: ignore[no-any-return]
