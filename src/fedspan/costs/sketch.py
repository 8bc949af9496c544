"""What a local step is rehearsed on: a network without numbers, its loss, and the largest batch of any client.

A sketch holds shapes and types alone, so the problem it was made of may be let go.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fedspan.core.config import Engine, Settings, Training
from fedspan.costs.dry_run import NOWHERE, empty
from fedspan.huggingface.text_data import Texts
from fedspan.nn.batches import Batch, ClientData, Loss, batch_size_of
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import ProjectionRule


@dataclass(frozen=True, eq=False)
class Sketch:
    """A network's problem without its numbers."""

    model: nn.Module  # on torch's meta device
    choices: Sequence[ProjectionRule]
    loss: Loss  # of a model on a batch
    batch: Batch  # on the meta device
    training: Training = field(default_factory=Training)
    recompute: bool = False  # of fused layers, see `nn.recompute`

    def problem(self) -> TorchProblem:
        """A problem of one client with one batch; a rehearsal uses it up."""
        data = OneBatch(tree_map_only(torch.Tensor, empty, self.batch))
        engine = Engine(recompute=self.recompute)
        settings = Settings(
            batch_size=1, device=NOWHERE.type, training=self.training, engine=engine
        )
        problem = TorchProblem(
            without_numbers(self.model), [data], self.loss, self.choices, settings, on_client=True
        )
        problem.device = torch.device("cpu")  # steps are those of a CPU
        return problem


@dataclass(frozen=True, eq=False)
class OneBatch:
    """Data of a client that always draws the same batch."""

    batch: Batch

    def __len__(self) -> int:
        return 1

    def take(self, index: torch.Tensor) -> Batch:
        return self.batch

    def tensors(self) -> list[torch.Tensor]:
        """Those of the batch."""
        return [part for part in tree_leaves(self.batch) if isinstance(part, torch.Tensor)]


def sketched(problem: TorchProblem) -> Sketch | None:
    """A problem without its numbers; None where no client's data is here, or the model cannot be copied."""
    problem.release()
    batch = largest(problem)
    if batch is None:
        return None
    try:
        model = without_numbers(problem.model)
    except (
        RuntimeError,
        TypeError,
    ):  # such as a module that holds an open file, or a tensor that was computed
        return None
    batch = tree_map_only(torch.Tensor, empty, batch)
    return Sketch(
        model,
        problem.rules,
        problem.loss,
        batch,
        replace(problem.training, augment=None),
        problem.recompute,
    )


def without_numbers(model: nn.Module) -> nn.Module:
    """A copy on the meta device, for training. A tensor that is used in several places stays one tensor."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        new = empty(tensor)
        memo[id(tensor)] = (
            nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        )
    return copy.deepcopy(model, memo).train()


def largest(problem: TorchProblem) -> Batch | None:
    """The mini-batch that takes most: as many examples as any client's has, and its longest texts."""
    sources = problem.local_data
    if not sources:
        return None

    def size(source: ClientData) -> tuple[int, int]:
        return batch_size_of(source, problem.batch_size), int(source.lengths.max()) if isinstance(
            source, Texts
        ) else 0

    source = max(sources, key=size)
    first = (
        source.lengths.argsort(descending=True)
        if isinstance(source, Texts)
        else torch.arange(len(source))
    )
    return source.take(first[: batch_size_of(source, problem.batch_size)])
