"""A running mean of what controls lack, compressed: momentum for error feedback (Fatkhullin et al. 2023, 2305.15155).

Near the optimum a_i is mostly the noise of this round's mini-batches, and so is what C leaves out of it. The client
keeps the running mean v_i of its gradients, as u_i = v_i − c_i, and compresses that:

    P u_i ← (1 − β) P u_i + β a_i;   q ← C(P u_i), sent;   u_i ← u_i − Pᵀ q        outside the subspace u_i stays

c_i, c and, with plain steps, the direction of x are then running means of gradients. With P = I it is SCAFCOM. Without
a compressor u_i is always 0: β a_i is sent, and nothing is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedspan import Compressor, Encoded, Round, Uplink, Vector, register
from fedspan.core.axes import Drift, Parts
from fedspan.core.bundle import Bundle
from fedspan.core.errors import positive_share
from fedspan.core.linear_map import LinearMap
from fedspan.core.refusals import needs_contractive, needs_controls
from fedspan.core.tables import accept_choices


@register
@dataclass(frozen=True)
class RunningMean(Uplink):
    """Controls that are running means of gradients."""

    beta: float = 0.2  # β: weight of this round's gradient in the running mean
    compressor: Compressor | None = None  # C: how uploads are compressed; none: values as they are

    def __post_init__(self) -> None:
        accept_choices(self)
        positive_share("beta", self.beta)

    @property
    def plain_sum(self) -> bool:  # type: ignore[override]
        """Without a compressor."""
        return self.compressor is None

    @property
    def private(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the client has not sent yet."""
        return () if self.compressor is None else ("u",)

    def check(self, n: int, drift: Drift) -> None:
        needs_controls("uplink", self, drift)
        if self.compressor is not None:
            needs_contractive("uplink", self.compressor, n)

    def init_client(self, x0: Vector) -> Parts:
        return {} if self.compressor is None else {"u": torch.zeros_like(x0)}

    def send(
        self, v: Vector, client: Bundle, P: LinearMap, rnd: Round
    ) -> tuple[Vector | Encoded, Parts]:
        if self.compressor is None:
            return self.beta * v, {}
        w = (1 - self.beta) * (P @ client.u) + self.beta * v
        q = self.compressor.compress(w, self.compressor.keys(rnd))
        return q, {"u": P.T.put(w, client.u)}

    def receive(self, sent: Any, P: LinearMap, rnd: Round) -> Vector:
        if self.compressor is None:
            plain: Vector = sent
            return plain
        keys = self.compressor.keys(rnd)
        return self.compressor.decompress(sent, P.rank, keys, rnd.layout.dtype)

    def after(self, client: Bundle, v: Vector, P: LinearMap) -> Parts:
        return {} if self.compressor is None else {"u": P.T.plus(v, client.u, sign=-1)}
