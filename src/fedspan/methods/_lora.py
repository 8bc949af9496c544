"""What federated LoRA methods share: base weights that do not change, and small adapters that are trained.

     1  A, B ← orthonormal rows by the shared seed, 0               before round 0
     2  send the base weights W to new clients, and the adapters u
     3  local steps on u                                            K times;  send what u_i changed by
     4  u ← u + η_g mean_S (u_i − u)

A block W (its projected axis last: a convolution is (out · kh · kw) × in) becomes W + B A, where A is r × in. A starts
with orthonormal rows that server and clients draw from the shared seed, B with zeros. u is all that is trained, flat
and block by block, as a change from that start. Blocks without an adapter (biases, norms, heads) are trained in
full, unless they are frozen by `frozen_modules` of the projection.

Differences from LoRA (Hu et al. 2021, arXiv:2106.09685): its A has Kaiming-uniform entries, with nearly orthogonal
rows of norm 1/√3, and W becomes W + (α/r) B A. Here the rows are orthonormal and the scale is 1. There A acts on a
whole patch of a convolution, here on its channels.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedspan import Block, Bundle, Layout, Log, ModelSync, Objective, Round, Server, Vector
from fedspan.core.method import Footprint
from fedspan.core.objective import Direction
from fedspan.core.projector import LinearMap, Rank, draw
from fedspan.methods.base import LocalSteps
from fedspan.projectors.gaussian import Gaussian
from fedspan.servers.mean import Mean


@dataclass(frozen=True, kw_only=True)
class Adapted(LocalSteps):
    """Adapters on every projected block, averaged as they are."""

    rank: Rank = 0.1  # r: a number, a share of a block's inputs, or a table by name pattern
    server: Server = Mean()  # what the server makes of the mean
    trains_a: ClassVar[bool] = True  # whether A is trained as well as B

    def __post_init__(self) -> None:
        super().__post_init__()
        Gaussian(rank=self.rank)  # checks the rank

    @property
    def plain_sum(self) -> bool:  # type: ignore[override]
        """Whether the server needs only the mean of the replies."""
        return not self.server.needs_each_reply

    def check(self, layout: Layout) -> None:
        """Raise SpecError if the rank does not fit every block with an adapter."""
        self.sizes(layout)

    def footprint(self, layout: Layout) -> Footprint:
        """A step on adapters. The simulator forms the full gradient; a device that is short of memory runs PEFT."""
        ranks = {
            block.name: self.rank_of(block) for block in layout.blocks if block.axis is not None
        }
        trained = sum(self.sizes(layout))
        return Footprint(trained, self.local.size(trained), ranks, self.trains_a)

    def start(self, rnd: Round) -> LinearMap:
        """Return A before round 0, the same for server and clients."""
        return draw(Gaussian(rank=self.rank), rnd.layout, rnd.seeds, 0)

    def rank_of(self, block: Block) -> int:
        """Return r of a block with an adapter."""
        return Gaussian(rank=self.rank).rank_of(block)

    def sizes(self, layout: Layout) -> list[int]:
        """Return the number of trained values of each block."""
        return [
            b.size if b.axis is None else self.rank_of(b) * (b.rest + self.trains_a * b.inputs)
            for b in layout.blocks
        ]

    @abstractmethod
    def merged(self, base: Vector, u: Vector, rnd: Round) -> Vector:
        """Return the model that base weights and adapters make."""

    @abstractmethod
    def direction(self, f: Objective, base: Vector, rnd: Round) -> Direction:
        """Return the gradient for the adapters as a function of them."""

    def origin(self, base: Vector, rnd: Round) -> Vector | None:
        """Return what u is a change from, for an optimizer with weight decay: 0 for B, the drawn A, W elsewhere."""
        if not self.local.decay:
            return None
        found = []
        for first, block, w in self.start(rnd).by_block(base.split(rnd.layout.sizes, -1)):
            if first is not None:
                b = w.new_zeros(*w.shape[:-1], first.rank * block.rest)
                a = first.columns().mT.flatten(1).unsqueeze(1).expand(*w.shape[:-1], -1)
                w = torch.cat([b, a], -1) if self.trains_a else b
            found.append(w)
        return torch.cat(found, -1)

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        u = x0.new_zeros(*x0.shape[:-1], sum(self.sizes(layout)))
        return Bundle(x=x0, base=x0, u=u, **self.server.init(u))

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle()

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        sync = ModelSync.of(server.base, Log(), rnd)
        return Bundle(sync=sync, u=server.u, probe=self.start(rnd).probe)  # 2

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        base, u = down.sync.model, down.u.expand(*rnd.ids.shape, -1).contiguous()
        self.start(rnd).agree(down.get("probe"))
        along = self.direction(f, base, rnd)
        end = self.descend(u, along, self.rate(rnd), self.origin(base, rnd))  # 3
        return client, Bundle(du=end - u)

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        everything = LinearMap(Layout((), rnd.layout.dtype), ())  # the adapters, in full
        direction = -rnd.mean(up.du)
        each = -up.du if self.server.needs_each_reply else direction
        move, moved = self.server.step(server, direction, everything, rnd, each)
        u = server.u - move  # 4
        return server.replace(x=self.merged(server.base, u, rnd), u=u, **moved)
