"""A client's local step by each kind of training, and what it holds in memory: measured on a model, or rehearsed.

    SSF             steps inside x + range(Pᵀ): z, the correction u and where x began, r numbers each
    SubAvg          the same without u
    LoRA, FFA-LoRA  adapters of PEFT on the layers that SSF would cover (`hub.lora`); what it trains whole is, too
    FedAvg          every weight that is trained, its gradient, and the optimizer's state
    SCAFFOLD        the same and the correction c − c_i, d numbers

The functions make such a client from a model and a loss, be it a real one or an outline without numbers. Neither counts
what lies on disk: the client's controls, and its copy of x beside the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fedspan.core import seeds
from fedspan.core.layout import Block, Layout
from fedspan.core.projector import LinearMap, Projector
from fedspan.costs.dry_run import peak_of, rehearsal
from fedspan.nn.module import FlatModule, Loss, Restricted
from fedspan.nn.projection_rules import ProjectionRule, kept_in, layout_of

OptimizerName = Literal["sgd", "momentum", "adamw"]
# numbers that an optimizer keeps for each one that is trained
STATES: dict[OptimizerName, int] = {"sgd": 0, "momentum": 1, "adamw": 2}
RATE = 1e-6  # of the steps; nothing depends on it


@dataclass(frozen=True, eq=False)
class Client:
    """One way of training: a local step, and the tensors that are there before it."""

    step: Callable[[], Any]
    model: nn.Module
    trained: int  # numbers
    gradients: int  # bytes
    optimizer: int
    controls: int  # what the method holds beside: subspace and corrections
    settled: bool = True  # whether all that lasts is there before the first step


@dataclass(frozen=True)
class Memory:
    """Bytes in a client's memory at the peak of a local step."""

    trained: int  # numbers
    weights: int
    gradients: int
    activations: int  # what autograd keeps, and the values in between
    optimizer: int
    controls: int

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.activations + self.optimizer + self.controls


def rehearsed(model: nn.Module, make: Callable[[nn.Module], Client]) -> Memory:
    """The memory of a client on a model that has no numbers; the model is used up."""
    with rehearsal() as live:
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            live.count(tensor)
        client = make(model)
        if not client.settled:
            client.step()
        peak = peak_of(client.step, live)
    weights = sum(_bytes(t) for t in itertools.chain(client.model.parameters(), client.model.buffers()))
    rest = weights + client.gradients + client.optimizer + client.controls
    return Memory(client.trained, weights, client.gradients, peak - rest, client.optimizer, client.controls)


def ssf(
    model: nn.Module,
    loss: Loss,
    choices: Sequence[ProjectionRule],
    projector: Projector,
    optimizer: OptimizerName = "sgd",
    recompute: bool = False,
    controls: bool = True,
) -> Client:
    """Local steps of SSF; without `controls` those of SubAvg."""
    module = _flat(model, choices)
    module.checked = True
    P = _drawn(projector, module.layout, module.flat.device)
    x = module.flat.detach().to(module.layout.dtype).view(1, 1, -1)
    inside = Restricted(module, choices, x, P, recompute).__enter__()
    z, *moments = (torch.zeros(1, 1, P.rank, dtype=x.dtype) for _ in range(1 + STATES[optimizer]))
    u = torch.zeros_like(z) if controls else None

    def step() -> None:
        nonlocal z
        if module.in_place:
            z = inside.walk(z, u, itertools.repeat(loss), RATE, 1)
        else:
            g = inside.grad(z, loss)
            z = torch.add(z, g if u is None else g + u, alpha=-RATE)
        assert all(m.shape == z.shape for m in moments)

    starts = sum(piece.start.numel() for piece in inside.pieces if piece.start is not None)
    indices = sum(8 * piece.index.numel() for piece in inside.pieces if piece.index is not None)
    held = (2 + controls) * P.rank + starts  # z before and after a step, u, and where x began
    size, rank = x.element_size(), P.rank
    return Client(step, model, rank, size * rank, size * rank * len(moments), size * held + indices)


def plain(model: nn.Module, loss: Loss, optimizer: OptimizerName = "sgd") -> Client:
    """Local steps of torch's own optimizer on whatever requires a gradient."""
    params = [p for p in model.parameters() if p.requires_grad]
    kind: Any = torch.optim.AdamW if optimizer == "adamw" else torch.optim.SGD
    chosen = kind(params, lr=RATE, **({"momentum": 0.9} if optimizer == "momentum" else {}))

    def step() -> None:
        chosen.zero_grad()
        loss(model).backward()
        chosen.step()

    trained, size = sum(p.numel() for p in params), sum(_bytes(p) for p in params)
    return Client(step, model, trained, size, size * STATES[optimizer], 0, settled=optimizer == "sgd")


def whole(
    model: nn.Module,
    loss: Loss,
    choices: Sequence[ProjectionRule],
    optimizer: OptimizerName = "sgd",
    controls: bool = False,
) -> Client:
    """Local steps of FedAvg; with `controls` those of SCAFFOLD."""
    module = _flat(model, choices)
    d, kind = module.layout.size, module.layout.dtype
    moments = [torch.zeros(d, dtype=kind) for _ in range(STATES[optimizer])]
    u = torch.zeros(1, 1, d, dtype=kind) if controls else None
    y = None if module.in_place else module.flat.to(kind).view(1, 1, -1)  # with more digits than the weights have

    def step() -> None:
        nonlocal y
        if y is None:
            module.walk(module.flat, u, itertools.repeat(loss), RATE, 1)
        else:
            g = module.grad(y, loss)
            y = torch.add(y, g if u is None else g.add_(u), alpha=-RATE)
        assert all(len(m) == d for m in moments)

    size, long = module.flat.element_size(), kind.itemsize
    own, states = (size, len(moments)) if y is None else (size + long, len(moments) + 1)  # gradient and y in full too
    return Client(step, model, d, d * own, long * d * states, long * d if controls else 0)


def numbers(blocks: Sequence[Block], rank: float) -> int:
    """What SSF trains of projected blocks at a share of their inputs."""
    return sum(block.size // block.inputs * max(1, round(rank * block.inputs)) for block in blocks)


def share_for(blocks: Sequence[Block], trained: int) -> float:
    """The share of the inputs at which SSF trains as near as can be to so many numbers."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if numbers(blocks, middle) <= trained else (low, middle)
    return min((max(low, 1e-9), high), key=lambda share: abs(numbers(blocks, share) - trained))


def _flat(model: nn.Module, choices: Sequence[ProjectionRule]) -> FlatModule:
    """The model as a problem holds it."""
    weights = next(p.dtype for p in model.parameters() if p.requires_grad)
    return FlatModule(model, layout_of(choices, kept_in(weights)))


def _drawn(projector: Projector, layout: Layout, here: torch.device) -> LinearMap:
    """A P of its own, drawn unseen: what is in a cache would be counted in one rehearsal and not in the next."""
    with _disable_current_modes(), torch.device("cpu"):
        drawn = projector.sample(layout, seeds.keys((0,), "projector", 0))
    P = drawn.cut(slice(None))  # and is seen from here on
    return LinearMap(layout, tuple(factor and factor.to(here) for factor in P.factors), P.probe)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
