"""What federated training of a Hugging Face model will cost a client, from its config alone: bytes, memory and disk.

Messages are the methods' own, made of tensors without numbers and counted as the ledger counts them; memory is that of
a rehearsed local step (`hub.memory`). So a model of any size can be planned on any machine. All methods train the
same tensors: the layers that SSF covers get LoRA's adapters, and what SSF trains whole LoRA trains whole.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedspan.core import wire
from fedspan.core.errors import SpecError, at_least, count_or_ratio, one_of
from fedspan.core.layout import Block, Layout
from fedspan.core.sync import Log, ModelSync
from fedspan.costs import memory as footprint
from fedspan.costs.client_memory import memory
from fedspan.costs.memory import Memory, OptimizerName
from fedspan.costs.sketch import Sketch
from fedspan.costs.traffic import WALKED
from fedspan.engine.loop import cohort_of
from fedspan.huggingface.models import own_loss
from fedspan.huggingface.outline import batch_of, outline
from fedspan.methods import _averaging, _lora, scaffold, ssf
from fedspan.methods.fedavg import FedAvg
from fedspan.methods.fedit import FedIT
from fedspan.methods.ffalora import FFALoRA
from fedspan.nn.projection_rules import layout_of, projection_rules
from fedspan.optimizers.adamw import AdamW
from fedspan.projectors.coordinate import Coordinate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A model, how it is trained, and over whom."""

    model: Path
    rank: float | None = None  # of SSF: directions, or a share of them
    trained: int | None = None  # numbers trained; None: as many as LoRA at `lora_rank`
    lora_rank: int = 8
    batch: int = 16
    length: int = 64
    dtype: str = "float32"  # of the weights; x and what is sent are float32
    clients: int = 10
    clients_per_round: int | None = None
    freeze: tuple[str, ...] = ()
    optimizer: OptimizerName = "sgd"
    labels: int | None = None
    checkpointing: bool = False
    recompute: bool = False  # of SSF's layers, see `nn.recompute`

    def __post_init__(self) -> None:
        if self.rank is not None and self.trained is not None:
            raise SpecError("`rank` and `trained` both say how much SSF trains; give one of them")
        if self.rank is not None:
            count_or_ratio("rank", self.rank)
        for name in ("lora_rank", "batch", "length", "clients"):
            at_least(name, getattr(self, name), 1)
        one_of("dtype", self.dtype, DTYPES)
        one_of("optimizer", self.optimizer, footprint.STATES)
        if self.clients_per_round is not None and not 1 <= self.clients_per_round <= self.clients:
            raise SpecError(
                f"`clients_per_round` must be from 1 to the {self.clients} clients, got {self.clients_per_round}"
            )

    def outline(self) -> nn.Module:
        """The model without numbers, some of it frozen."""
        model = outline(self.model, DTYPES[self.dtype], self.labels, self.checkpointing)
        projection_rules(model, frozen_modules=self.freeze)
        return model

    def steps(self) -> dict[str, Any]:
        """The local steps, as methods are told of them."""
        if self.optimizer == "adamw":
            return {"lr": footprint.RATE, "optimizer": AdamW()}
        return {"lr": footprint.RATE, "momentum": 0.9 if self.optimizer == "momentum" else 0.0}


@dataclass(frozen=True)
class Line:
    """What one method costs one client: bytes."""

    method: str
    up: float  # a round
    down: float  # a round, once everybody has the model
    memory: Memory
    disk: int


@dataclass(frozen=True)
class ModelPlan:
    """A line for each method."""

    parameters: int
    layout: Layout  # of what is trained
    share: float  # SSF's r over the inputs of a projected block, or directions
    ranks: tuple[int, int]  # of LoRA and FFA-LoRA
    lines: tuple[Line, ...]


def plan_model(asked: ModelRequest) -> ModelPlan:
    """SSF, LoRA and FFA-LoRA at equal trained numbers, FedAvg and SCAFFOLD."""
    model = asked.outline()
    choices = projection_rules(model)
    layout = layout_of(choices)
    share, ranks = _ranks(asked, layout)
    d, steps = layout.size, asked.steps()
    made: dict[str, tuple[int, Any, int]] = {  # numbers that travel, the method, numbers on disk
        "ssf": (inside(layout, Coordinate(rank=share)), ssf.SSF(rank=share, **steps), 2 * d),
        "lora": (adapters(layout, ranks[0], True), FedIT(rank=ranks[0], **steps), d),
        "ffa-lora": (adapters(layout, ranks[1], False), FFALoRA(rank=ranks[1], **steps), d),
        "fedavg": (d, FedAvg(**steps), 0),
        "scaffold": (d, scaffold.Scaffold(**steps), d),
    }
    over = asked.clients, asked.clients_per_round or asked.clients, asked.optimizer != "sgd"
    sketch = Sketch(asked.outline, choices, own_loss, lambda m: batch_of(m, asked.batch, asked.length), asked.recompute)
    lines = [
        Line(name, *traffic(name, d, sent, *over), memory(method, sketch), 2 * 4 * kept)
        for name, (sent, method, kept) in made.items()
    ]
    return ModelPlan(sum(p.numel() for p in model.parameters()), layout, share, ranks, tuple(lines))


def inside(layout: Layout, projector: Coordinate) -> int:
    """r: numbers that SSF trains and sends."""
    parts = ((b.size, b.inputs, projector.rank_of(b)) if b.axis is not None else (b.size, 1, 1) for b in layout.blocks)
    return sum(size // inputs * rank for size, inputs, rank in parts)


def adapters(layout: Layout, rank: int, both: bool) -> int:
    """Numbers that LoRA trains: B and A of each projected block, or B alone, and the other blocks whole."""
    return sum(b.size if b.axis is None else rank * _sides(b, both) for b in layout.blocks)


def traffic(
    method: str, d: int, sent: int, clients: int, clients_per_round: int, moved: bool = False, seed: int = 0
) -> tuple[float, float]:
    """Bytes (up, down) of one client and round: the mean over the later half of a run's first rounds."""
    rounds = max(WALKED, 2 * clients // clients_per_round)
    spent = walked(method, d, sent, clients, clients_per_round, rounds, moved, seed)
    up, down = np.mean(spent[rounds - rounds // 2 :], 0) / clients_per_round
    return float(up), float(down)


def walked(
    method: str,
    d: int,
    sent: int,
    clients: int,
    clients_per_round: int,
    rounds: int,
    moved: bool = False,
    seed: int = 0,
) -> list[tuple[int, int]]:
    """Bytes (up, down) of all clients in each of the first rounds.

    `moved`: the local optimizer has a memory, so that the end point no longer tells the mean gradient.
    """
    last_round, log, x, part = np.full((1, clients), -1, np.int64), Log(), _numbers(d), _numbers(sent)
    spent = []
    for t in range(rounds):
        ids = cohort_of((seed,), clients, clients_per_round, t)
        down, up = _messages(method, x, part, ModelSync(x, log, last_round[:, ids[0]]), moved)
        spent.append((int(wire.sizes(up, ids.shape).sum()), int(wire.sizes(down, ids.shape).sum())))
        last_round[:, ids[0]] = t
        log = log.push(part, max(1, d // sent)) if method == "ssf" else log
    return spent


def _messages(method: str, x: torch.Tensor, part: torch.Tensor, sync: ModelSync, moved: bool) -> tuple[Any, Any]:
    """What goes down and comes up in a round."""
    probe = _numbers(1, torch.float64)
    if method == "ssf":
        return ssf.Down(sync, part, probe), ssf.Up(part, z=part if moved else None)
    if method == "fedavg":
        return _averaging.Down(x), _averaging.Up(x)
    if method == "scaffold":
        return scaffold.Down(x, x), scaffold.Up(x, x if moved else None)
    return _lora.Down(sync, part, probe), _lora.Up(part)


def _ranks(asked: ModelRequest, layout: Layout) -> tuple[float, tuple[int, int]]:
    """SSF's rank, and those of LoRA and FFA-LoRA that train about as many numbers."""
    blocks = [b for b in layout.blocks if b.axis is not None]
    if not blocks:
        raise SpecError("nothing of this model is projected: every large tensor is frozen; freeze less")
    rest = sum(b.size for b in layout.blocks if b.axis is None)
    wanted = sum(asked.lora_rank * _sides(b, True) for b in blocks)
    share = asked.rank
    if asked.trained is not None:
        wanted, least = asked.trained - rest, footprint.numbers(blocks, 1e-9)
        if wanted < least:
            raise SpecError(f"`trained` {asked.trained:,} is too few: rank 1 trains {least + rest:,} here; freeze more")
    if share is None:
        share = footprint.share_for(blocks, wanted)
    else:
        projector = Coordinate(rank=share)
        wanted = inside(layout, projector) - rest
    told = asked.trained is not None or asked.rank is not None
    first = max(1, round(wanted / sum(_sides(b, True) for b in blocks))) if told else asked.lora_rank
    second = max(1, round(wanted / sum(_sides(b, False) for b in blocks)))
    for rank, b in itertools.product((first, second), blocks):
        if rank > min(b.shape[:2]):
            raise SpecError(f"LoRA at rank {rank} is too large for {b.name!r}, {b.shape[0]} × {b.shape[1]}; train less")
    return share, (first, second)


def _sides(block: Block, both: bool) -> int:
    return block.size // block.inputs + (block.inputs if both else 0)


def _numbers(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(1, 1, n, dtype=dtype, device="meta")
