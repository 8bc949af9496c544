"""Signs of a running mean of the client's changes, as in FedSMU (Lu et al., ICML 2025) and Lion (arXiv:2302.06675).

    u ← sign(β₁ P m_i + (1 − β₁) v), sent;   P m_i ← β₂ P m_i + (1 − β₂) v        outside the subspace m_i stays

Every number counts ±1, so clients of any size have the same say, and the server's step size alone decides how far x
moves. m_i follows from the client's data: no server can keep a copy, and a client that loses it continues from zero.
"""

from dataclasses import dataclass

import torch

from fedspan import Bundle, LinearMap, Parts, Uplink, Vector, register
from fedspan.compressors.sign import Sign
from fedspan.core.errors import below_one


@register
@dataclass(frozen=True)
class SignMomentum(Uplink):
    """One bit per value, without sizes."""

    beta1: float = 0.9  # β₁: weight of the running mean in what is sent
    beta2: float = 0.9  # β₂: weight of the past in the running mean

    compressor = Sign(sizes=0)
    private = ("m",)
    needs_no_controls = (
        "controls are gradients, and signs have no size; use uplink = 'sign', or drift = 'none'"
    )

    def __post_init__(self) -> None:
        below_one("beta1", self.beta1)
        below_one("beta2", self.beta2)

    def init_client(self, x0: Vector) -> Parts:
        return {"m": torch.zeros_like(x0)}

    def send(self, v: Vector, client: Bundle, P: LinearMap) -> tuple[Vector, Parts]:
        m = P @ client.m
        mean = self.beta2 * m + (1 - self.beta2) * v
        return self.beta1 * m + (1 - self.beta1) * v, {"m": P.T.put(mean, client.m)}
