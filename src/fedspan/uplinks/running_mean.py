"""A running mean of what controls lack, compressed: momentum for error feedback (Fatkhullin et al. 2023, 2305.15155).

Near the optimum a_i is mostly the noise of this round's mini-batches, and so is what C leaves out of it. The client
keeps the running mean v_i of its gradients, as u_i = v_i − c_i, and compresses that:

    P u_i ← (1 − β) P u_i + β a_i;   q ← C(P u_i), sent;   u_i ← u_i − Pᵀ q        outside the subspace u_i stays

c_i, c and, with plain steps, the direction of x are then running means of gradients. With P = I it is SCAFCOM. Without
a compressor u_i is always 0: β a_i is sent, and nothing is kept.
"""

from dataclasses import dataclass

import torch

from fedspan import Bundle, Compressor, Drift, LinearMap, Parts, Uplink, Vector, register
from fedspan.core.errors import positive_share
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
    def private(self) -> tuple[str, ...]:  # type: ignore[override]
        """What the client has not sent yet."""
        return () if self.compressor is None else ("u",)

    def check(self, n: int, drift: Drift) -> None:
        needs_controls("uplink", self, drift)
        needs_contractive("uplink", self.compressor, n)

    def init_client(self, x0: Vector) -> Parts:
        return {name: torch.zeros_like(x0) for name in self.private}

    def send(self, v: Vector, client: Bundle, P: LinearMap) -> tuple[Vector, Parts]:
        if self.compressor is None:
            return self.beta * v, {}
        w = (1 - self.beta) * (P @ client.u) + self.beta * v
        return w, {"u": P.T.put(w, client.u)}

    def after(self, client: Bundle, v: Vector, P: LinearMap) -> Parts:
        return {} if self.compressor is None else {"u": P.T.plus(v, client.u, sign=-1)}
