"""What federated LoRA methods share: base weights that do not change, and small adapters that are trained.

A block W (its projected axis last: a convolution is (out · kh · kw) × in) becomes W + (α/r) B A, where A is r × in. A
starts with orthonormal rows that server and clients draw from the shared seed, B with zeros. u is all that is trained,
flat and block by block, as a change from that start. Only u is sent in each round; the base weights are sent once, to
a new client. Blocks without an adapter (biases, norms, heads) are trained in full or stay frozen.

Differences from LoRA (Hu et al. 2021, arXiv:2106.09685): its A has Kaiming-uniform entries, with nearly orthogonal
rows of norm 1/√3. Here the rows are orthonormal, so that the same α and step size go three times as far. There A acts
on a whole patch of a convolution, here on its channels.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedspan import Block, Bundle, Layout, Log, ModelSync, Round, Server, SpecError, Vector
from fedspan.core.errors import one_of, positive
from fedspan.core.footprint import Adapters, Footprint
from fedspan.core.linear_map import LinearMap
from fedspan.core.projector import Rank, draw
from fedspan.methods.base import LocalSteps
from fedspan.projectors.gaussian import Gaussian
from fedspan.servers.mean import Mean


@dataclass(frozen=True, kw_only=True)
class Adapted(LocalSteps):
    """Adapters on every projected block, averaged as they are."""

    rank: Rank = 0.1  # r: a number, a share of a block's inputs, or a table by name pattern
    alpha: float | None = None  # α of the scale α/r; none: r, so that the scale is 1
    others: Literal["trained", "frozen"] = "trained"  # what becomes of blocks without an adapter
    server: Server = Mean()  # what the server makes of the mean
    trains_a: ClassVar[bool] = True  # whether A is trained as well as B

    def __post_init__(self) -> None:
        super().__post_init__()
        Gaussian(rank=self.rank)  # checks the rank
        if self.alpha is not None:
            positive("alpha", self.alpha)
        one_of("others", self.others, ("trained", "frozen"))

    @property
    def plain_sum(self) -> bool:  # type: ignore[override]
        """Whether the server needs only the mean of the replies."""
        return not self.server.needs_each_reply

    def check(self, layout: Layout) -> None:
        """The rank must fit every block with an adapter, and something must be trained."""
        if not sum(self.sizes(layout)):
            raise SpecError(
                "`others` 'frozen' leaves nothing to train: no block of this model has an adapter; set it to 'trained'"
            )

    def footprint(self, layout: Layout) -> Footprint:
        """A step on adapters. The simulator forms the full gradient; a device that is short of memory runs PEFT."""
        ranks = {
            block.name: self.rank_of(block) for block in layout.blocks if block.axis is not None
        }
        trained = sum(self.sizes(layout))
        adapters = Adapters(ranks, self.trains_a, self.others == "trained")
        return Footprint(trained, self.local.size(trained), adapters)

    def start(self, rnd: Round) -> LinearMap:
        """A before round 0, the same for server and clients."""
        return draw(Gaussian(rank=self.rank), rnd.layout, rnd.seeds, 0)

    def rank_of(self, block: Block) -> int:
        """r of a block with an adapter."""
        return Gaussian(rank=self.rank).rank_of(block)

    def scale(self, block: Block) -> float:
        """α/r of a block with an adapter."""
        return 1.0 if self.alpha is None else self.alpha / self.rank_of(block)

    def sizes(self, layout: Layout) -> list[int]:
        """Trained numbers of each block."""
        whole = self.others == "trained"
        return [
            self.adapter(b) if b.axis is not None else b.size if whole else 0 for b in layout.blocks
        ]

    @abstractmethod
    def adapter(self, block: Block) -> int:
        """Trained numbers of a block with an adapter."""

    @abstractmethod
    def merged(self, base: Vector, u: Vector, rnd: Round) -> Vector:
        """The model that base weights and adapters make."""

    def origin(self, base: Vector, rnd: Round) -> Vector | None:
        """What u is a change from, for an optimizer with weight decay: zeros for B, the drawn A, W elsewhere."""
        if not self.local.decay:
            return None
        parts, sizes = base.split([b.size for b in rnd.layout.blocks], -1), self.sizes(rnd.layout)
        found = []
        for block, w, size, start in zip(
            rnd.layout.blocks, parts, sizes, self.start(rnd).factors, strict=True
        ):
            if start is not None:
                b = w.new_zeros(*w.shape[:-1], start.rank * block.rest)
                w = torch.cat(
                    [b, start.columns().mT.flatten(1).unsqueeze(1).expand(*w.shape[:-1], -1)], -1
                )
            found.append(w[..., :size])
        return torch.cat(found, -1)

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        u = x0.new_zeros(*x0.shape[:-1], sum(self.sizes(layout)))
        return Bundle(x=x0, base=x0, u=u, **self.server.init(u))

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle()

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        sync = ModelSync.of(server.base, Log(), rnd)
        return Bundle(sync=sync, u=server.u, probe=self.start(rnd).probe)  # 2 of both boxes

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        everything = LinearMap(Layout((), rnd.layout.dtype), (), server.u[..., :1])
        direction = -rnd.mean(up.du)
        move, moved = self.server.step(server, direction, everything, rnd, lambda: -up.du)
        u = server.u - move  # 4 of both boxes
        return server.replace(x=self.merged(server.base, u, rnd), u=u, **moved)


def of_cohort(v: Vector, rnd: Round) -> Vector:
    """What the server sent, once per client of the round."""
    return v.expand(*rnd.ids.shape, -1).contiguous()
