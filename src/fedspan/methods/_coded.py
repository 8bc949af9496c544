"""What methods with compressed uploads share: the compressor, and what theory needs of it.

Server and client both use C(v) as decoded, never v: what the server adds to x is what the client subtracts from what
it still has to send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedspan import Compressor, Encoded, Layout, Objective, Round, SpecError, Vector
from fedspan.compressors.topk import TopK
from fedspan.core.method import ClientState, Down, ServerState
from fedspan.core.registry import name_of
from fedspan.methods.base import LocalSteps

TENTH = TopK(k=0.1)


@dataclass(frozen=True, eq=False)
class Up:
    """One compressed vector."""

    q: Encoded


@dataclass(frozen=True, kw_only=True)
class Coded(LocalSteps[ServerState, ClientState, Down, Up]):
    """A method with local steps whose clients send one compressed vector."""

    compressor: Compressor = TENTH  # C: how uploads are compressed
    needs: ClassVar[Literal["unbiased", "contractive"] | None] = None

    def check(self, layout: Layout) -> None:
        """The compressor must be what the method needs for a model of this size."""
        omega, _ = (
            self.compressor.omega(layout.size),
            self.compressor.delta(layout.size),
        )  # both refuse too large a k
        if self.needs == "unbiased" and omega is None:
            raise SpecError(
                f"`compressor` {name_of(self.compressor)!r} is biased with these settings, and {name_of(self)} needs "
                "an unbiased one; use randk, qsgd or natural with unbiased = true"
            )
        if self.needs == "contractive":
            self.needs_contractive(self.compressor, layout.size)

    def moved(self, x: Vector, f: Objective, rnd: Round, plus: Vector | None = None) -> Vector:
        """D_i = x − y after K local steps along g_i + plus."""
        return x - self.descend(x, f.direction(plus), self.rate(rnd))

    def encode(self, v: Vector, rnd: Round) -> Encoded:
        """v compressed, for each client with its own key of the round."""
        return self.compressor.compress(v, self.compressor.keys(rnd))

    def decode(self, encoded: Encoded, rnd: Round) -> Vector:
        """C(v)."""
        return self.compressor.decompress(
            encoded, rnd.layout.size, self.compressor.keys(rnd), rnd.layout.dtype
        )
