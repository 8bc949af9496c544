"""What federated LoRA methods share: base weights that stay where they began, and small adapters that are trained.

A block W (its projected axis last: a convolution is (out · kh · kw) × in) becomes W + (α/r) B A with A r × in. A starts
at orthonormal rows that both ends draw from the common seed, B at zero. u is all that is trained, flat and block by
block, as a change from that start: it begins at zero, and it alone travels. The base weights travel once, to a client
that is new. Blocks that are not adapted (biases, norms, heads) are trained whole beside them or stay frozen.

Differences from LoRA (Hu et al. 2021, arXiv:2106.09685): its A has Kaiming-uniform entries, rows nearly orthogonal and
of norm 1/√3; here they are orthonormal, so that the same α and step go three times as far. There A acts on a whole
patch of a convolution, here on its channels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedspan.core.errors import SpecError, one_of, positive
from fedspan.core.footprint import Adapters, Footprint
from fedspan.core.layout import Block, Layout, Vector
from fedspan.core.linear import LinearMap
from fedspan.core.method import Round
from fedspan.core.projector import draw
from fedspan.core.sync import Log, ModelSync
from fedspan.methods.base import LocalSteps
from fedspan.projectors.gaussian import Gaussian


@dataclass(frozen=True, eq=False)
class ServerState:
    """The merged model, the base weights, and what is trained."""

    x: Vector
    base: Vector
    u: Vector


@dataclass(frozen=True, eq=False)
class ClientState:
    """Clients remember nothing but their copy of the base weights."""


@dataclass(frozen=True, eq=False)
class Down:
    """The base weights for who is new, all that is trained, and one number to check A's start."""

    sync: ModelSync
    u: Vector
    probe: torch.Tensor


@dataclass(frozen=True, eq=False)
class Up:
    """The change of what is trained."""

    du: Vector


@dataclass(frozen=True, kw_only=True)
class Adapted(LocalSteps[ServerState, ClientState, Down, Up]):
    """Adapters on every projected block, averaged as they are."""

    rank: int | float | Mapping[str, int | float] = 0.1  # r: a number, a share of a block's inputs, or one by layer
    alpha: float | None = None  # α; None: that of each block is its r, so that the scale α/r is 1
    others: Literal["trained", "frozen"] = "trained"  # what becomes of blocks without adapters
    trains_a: ClassVar[bool] = True  # whether A is trained as well as B

    def __post_init__(self) -> None:
        super().__post_init__()
        Gaussian(rank=self.rank)  # refuses what is no rank
        if self.alpha is not None:
            positive("alpha", self.alpha)
        one_of("others", self.others, ("trained", "frozen"))

    def check(self, layout: Layout) -> None:
        """The rank must fit every adapted block, and something must be trained."""
        if not sum(self.sizes(layout)):
            raise SpecError("`others` 'frozen' leaves nothing to train: no block of this model is adapted")

    def footprint(self, layout: Layout) -> Footprint:
        """A step on adapters. The simulator forms the full gradient; a device that is short of memory runs PEFT."""
        ranks = {block.name: self.rank_of(block) for block in layout.blocks if block.axis is not None}
        trained = sum(self.sizes(layout))
        adapters = Adapters(ranks, self.trains_a, self.others == "trained")
        return Footprint(trained, self.solver.size(trained), adapters)

    def start(self, rnd: Round) -> LinearMap:
        """A as it starts, the same at both ends and in every round."""
        return draw(Gaussian(rank=self.rank), rnd.layout, rnd.seeds, 0)

    def rank_of(self, block: Block) -> int:
        """r of an adapted block."""
        return Gaussian(rank=self.rank).rank_of(block)

    def scale(self, block: Block) -> float:
        """α/r of an adapted block."""
        return 1.0 if self.alpha is None else self.alpha / self.rank_of(block)

    def sizes(self, layout: Layout) -> list[int]:
        """Numbers trained of each block."""
        whole = self.others == "trained"
        return [self.adapter(b) if b.axis is not None else b.size if whole else 0 for b in layout.blocks]

    @abstractmethod
    def adapter(self, block: Block) -> int:
        """Numbers trained of an adapted block."""

    @abstractmethod
    def merged(self, base: Vector, u: Vector, rnd: Round) -> Vector:
        """The model that base weights and adapters stand for."""

    def origin(self, base: Vector, rnd: Round) -> Vector | None:
        """What u is a change from, for an optimizer whose weights decay: no B, the A that was drawn, W elsewhere."""
        if not self.solver.decay:
            return None
        parts, sizes = base.split([b.size for b in rnd.layout.blocks], -1), self.sizes(rnd.layout)
        found = []
        for block, w, size, start in zip(rnd.layout.blocks, parts, sizes, self.start(rnd).factors, strict=True):
            if start is not None:
                b = w.new_zeros(*w.shape[:-1], start.rank * (block.size // block.inputs))
                w = torch.cat([b, start.columns().mT.flatten(1).unsqueeze(1).expand(*w.shape[:-1], -1)], -1)
            found.append(w[..., :size])
        return torch.cat(found, -1)

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0, x0, x0.new_zeros(*x0.shape[:-1], sum(self.sizes(layout))))

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState()

    def broadcast(self, server: ServerState, rnd: Round) -> Down:
        return Down(ModelSync(server.base, Log(), rnd.last_round), server.u, self.start(rnd).probe)  # 2 of both boxes

    def settle(self, client: ClientState, down: Down, up: Up, rnd: Round) -> ClientState:
        return client

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        u = server.u + self.server_lr * rnd.mean(up.du)  # 4 of both boxes
        return ServerState(self.merged(server.base, u, rnd), server.base, u)


def of_cohort(v: Vector, rnd: Round) -> Vector:
    """What the server sent, once for each client of a round."""
    return v.expand(*rnd.ids.shape, -1).contiguous()
