"""Language modelling: every role of Shakespeare's plays is a client, and a pre-trained model learns to speak like them.

A role's text is cut into blocks of tokens. Its last part is not trained on; those parts of all roles are the test set.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from fedspan.core.errors import DataError, SpecError, at_least, one_of
from fedspan.core.registry import register
from fedspan.core.task import Weights
from fedspan.nn.problem import TorchProblem
from fedspan.tasks._text import TextTask, file, load_model, place_of, rows, running

FILES = {"shakespeare": "shakespeare_roles.jsonl.gz"}
Block = list[int]


@register
@dataclass(frozen=True, kw_only=True)
class LanguageModel(TextTask):
    """Clients with words of their own, scored on words of all of them."""

    several_seeds: ClassVar[bool] = False

    data: str = "shakespeare"  # one JSON object a line: text
    model: str = "stories260k"  # stories260k, tiny, or the folder of a model
    clients: int | None = None  # those who speak most; None: all with enough to say
    min_characters: int = 1000  # what is enough
    block: int = 128  # tokens of an example, the mark of a beginning included
    test_share: float = 0.1  # of each client's text, its end
    test_blocks: int | None = 256  # scored at most, spread evenly over the clients; None: all

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("task.data", self.data, FILES)
        at_least("min_characters", self.min_characters, 1)
        at_least("block", self.block, 3)
        for name in ("clients", "test_blocks"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        if not 0 < self.test_share < 1:
            raise SpecError(f"`task.test_share` must be above 0 and below 1, got {self.test_share!r}")

    def build(self, seeds: tuple[int, ...], dtype: torch.dtype, weights: Weights = "uniform") -> TorchProblem:
        """Load the roles, cut their texts into blocks, and load the model."""
        (seed,) = seeds
        begin, texts = self._texts()
        halves = [self._blocks(begin, ids) for ids in texts]
        model = load_model(self.model, "CausalLM", seed, self.dropout)
        scored = list(itertools.chain.from_iterable(end for _, end in halves))
        if self.test_blocks is not None and self.test_blocks < len(scored):
            scored = [scored[i] for i in np.linspace(0, len(scored) - 1, self.test_blocks).round().astype(int)]
        return self.problem(model, [_examples(own) for own, _ in halves], _examples(scored), seed, dtype, weights)

    def _texts(self) -> tuple[list[int], list[list[int]]]:
        """The mark of a beginning, and the tokens of each client's text."""
        path = file(FILES[self.data])
        sizes = np.array([len(row["text"]) for row in rows(path)])
        enough = np.flatnonzero(sizes >= self.min_characters)
        if len(enough) < (self.clients or 1):
            raise DataError(
                f"`task.clients` is {self.clients or 1}, but {len(enough)} have {self.min_characters} characters to say"
            )
        most = enough[np.argsort(-sizes[enough], kind="stable")][: self.clients]
        begin, ids = running(path, place_of(self.model))
        return begin, [ids[i] for i in np.sort(most)]

    def _blocks(self, begin: list[int], ids: list[int]) -> tuple[list[Block], list[Block]]:
        """Blocks to train on and blocks to be scored on, each behind the mark of a beginning."""
        end = max(2, round(len(ids) * self.test_share))
        parts = ids[:-end], ids[-end:]
        each = self.block - len(begin)
        train, test = ([begin + part[i : i + each] for i in range(0, len(part), each)] for part in parts)
        return [b for b in train if len(b) > 1], [b for b in test if len(b) > 1]


def _examples(blocks: list[Block]) -> dict[str, Any]:
    return {"input_ids": blocks, "labels": blocks}
