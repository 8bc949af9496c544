"""The constants of a problem and the step sizes of a run, in the paper's notation.

L    smoothness of every f_i (A1)          ρ  r/d, the share of directions per round (A3)
σ²   variance of a stochastic gradient (A2)  N  clients of equal weight, all of which take part in every round
Δ_F  F(x⁰) − F*                            K  local steps per round,  T  rounds
C_0  mean_i ‖c_i − ∇f_i(x⁰)‖²              η_l local step,  η̃ = η_g η_l K  step per round

With S of N clients per round, `clients` is S, over which noise is averaged, and `share` is S/N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedspan.core.errors import SpecError, at_least, positive, positive_share


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A problem and a run of it, as the theorem sees them."""

    L: float
    sigma2: float
    gap: float  # Δ_F
    control: float  # C_0
    rho: float
    clients: int  # that take part in a round: N, or S of them
    local_steps: int  # K
    rounds: int  # T
    share: float = 1.0  # S/N

    def __post_init__(self) -> None:
        positive("L", self.L)
        for name in ("sigma2", "gap", "control"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise SpecError(f"`{name}` must be a number of at least 0, got {value!r}")
        for name in ("rho", "share"):
            positive_share(name, getattr(self, name))
        for name in ("clients", "local_steps", "rounds"):
            at_least(name, getattr(self, name), 1)

    @property
    def start(self) -> float:
        """Δ_F + C_0, as the paper adds them."""
        return self.gap + self.control


@dataclass(frozen=True, kw_only=True)
class Steps:
    """η_l and η̃ = η_g η_l K."""

    local: float
    effective: float

    @staticmethod
    def of(lr: float, server_lr: float, local_steps: int) -> Steps:
        """Steps from a method's `lr`, `server_lr` and `local_steps`."""
        return Steps(local=lr, effective=server_lr * lr * local_steps)

    def server(self, local_steps: int) -> float:
        """η_g = η̃ / (η_l K)."""
        return self.effective / (self.local * local_steps)
