"""C(α v) in place of v, and what C leaves out is lost, unless controls remember it.

With controls, c_i moves by what was sent, so what C left out of a_i is part of the client's next a_i: c_i is the memory
of an error feedback, and C may be biased if it is contractive. Without controls a biased C such as top-k leads to a
wrong model; `feedback` is for it. α < 1 makes controls running means. SCALLION takes α = 1/(1 + ω), which shrinks the
error of c_i most: it is multiplied by 1 − 2α + α²(1 + ω) on average.
"""

from dataclasses import dataclass
from typing import Any, Literal

from fedspan import Bundle, Drift, LinearMap, Parts, SpecError, Vector, register
from fedspan.core.errors import positive_share, shown
from fedspan.core.refusals import needs_contractive, needs_unbiased
from fedspan.uplinks._compressed import Compressed


@register
@dataclass(frozen=True)
class Code(Compressed):
    """One compressed vector per reply."""

    alpha: float | Literal["unbiased"] = 1.0  # α: share of v that is sent; "unbiased": 1/(1 + ω)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.alpha, str):
            positive_share("alpha", self.alpha)
        elif self.alpha != "unbiased":
            raise SpecError(f"`alpha` must be a share or 'unbiased', got {shown(self.alpha)}")

    def check(self, n: int, drift: Drift) -> None:
        if self.alpha == "unbiased" or (drift.controls and self.alpha < 1):
            needs_unbiased("uplink", self.compressor, n)
        elif drift.controls:
            needs_contractive("uplink", self.compressor, n)
        else:
            self.compressor.omega(n), self.compressor.delta(n)  # both refuse too large a k

    def send(self, v: Vector, client: Bundle, P: LinearMap) -> tuple[Vector, Parts]:
        alpha: Any = self.alpha
        if alpha == "unbiased":
            alpha = 1 / (1 + (self.compressor.omega(P.rank) or 0.0))
        return v if alpha == 1 else alpha * v, {}
