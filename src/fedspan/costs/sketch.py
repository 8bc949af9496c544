"""What a local step is rehearsed on: a network without numbers, its loss, and the largest batch that a client has.

A problem is sketched while it is in memory and may be let go then: a sketch holds shapes and types alone.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from fedspan.huggingface.text_data import Texts
from fedspan.nn.client_data import Batch, ClientData, Loss, placed
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import ProjectionRule

NOWHERE = torch.device("meta")


@dataclass(frozen=True, eq=False)
class Sketch:
    """Model and batch are made anew for every rehearsal: it uses the one up, and counts the other."""

    outline: Callable[[], nn.Module]  # on torch's meta device, in training mode
    choices: Sequence[ProjectionRule]
    loss: Loss  # of a model on a batch
    batch: Callable[[nn.Module], Batch]  # that the model takes
    recompute: bool = False  # of covered layers, see `nn.recompute`


def sketched(problem: TorchProblem) -> Sketch | None:
    """A network's problem without its numbers; None where no client's data is here, or the model cannot be copied."""
    problem.release()
    batch = largest(problem)
    if batch is None:
        return None
    try:
        model, empty = without_numbers(problem.model), placed(batch, NOWHERE)
    except (RuntimeError, TypeError):  # such as a module that holds an open file, or a tensor that was computed
        return None
    return Sketch(
        functools.partial(without_numbers, model),
        problem.rules,
        problem.loss,
        lambda _: tree_map_only(torch.Tensor, torch.empty_like, empty),
        problem.recompute,
    )


def without_numbers(model: nn.Module) -> nn.Module:
    """A copy on the meta device, for training. A tensor that is used in several places stays one tensor."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        empty = torch.empty_like(tensor, device=NOWHERE)
        trained = tensor.requires_grad
        memo[id(tensor)] = nn.Parameter(empty, trained) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo).train()


def largest(problem: TorchProblem) -> Batch | None:
    """The mini-batch that takes most: of as many examples as any client's has, and of its longest texts."""
    sources = problem.local_data
    if not sources:
        return None

    def size(source: ClientData) -> tuple[int, int]:
        return min(problem.batch_size, len(source)), int(source.lengths.max()) if isinstance(source, Texts) else 0

    source = max(sources, key=size)
    first = source.lengths.argsort(descending=True) if isinstance(source, Texts) else torch.arange(len(source))
    return source.take(first[: problem.batch_size])
