"""What methods with compressed uploads share: the compressor, what theory needs of it, and codes of local work.

Both ends go by C(v) as the code gives it back, never by v: what the server adds to x is what the client takes off its
own account.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedspan.compressors.topk import TopK
from fedspan.core.compressor import Compressor
from fedspan.core.encoded import Encoded
from fedspan.core.errors import SpecError
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import ClientState, Down, Round, ServerState
from fedspan.core.objective import Objective
from fedspan.core.registry import name_of
from fedspan.methods.base import LocalSteps

TENTH = TopK(k=0.1)


@dataclass(frozen=True, eq=False)
class Model:
    """d numbers: what the server holds and sends."""

    x: Vector


@dataclass(frozen=True, eq=False)
class Up:
    """The code of one vector."""

    q: Encoded


@dataclass(frozen=True, kw_only=True)
class Coded(LocalSteps[ServerState, ClientState, Down, Up]):
    """A method of local steps whose clients send one compressed vector."""

    compressor: Compressor = TENTH  # C
    needs: ClassVar[Literal["unbiased", "contractive"] | None] = None

    def check(self, layout: Layout) -> None:
        """The compressor must be what the method needs on this many numbers."""
        n, name, compressor = layout.size, name_of(self), name_of(self.compressor)
        omega, delta = self.compressor.omega(n), self.compressor.delta(n)
        if self.needs == "unbiased" and omega is None:
            raise SpecError(
                f"{name} needs an unbiased compressor, and {compressor} is not as it stands; "
                "use randk, qsgd or natural, with unbiased = true"
            )
        if self.needs == "contractive" and delta is None:
            raise SpecError(
                f"{name} needs a contractive compressor, and {compressor} is not on {n} numbers as it stands; "
                "use topk or sign, or set its unbiased = false"
            )

    def moved(self, x: Vector, f: Objective, rnd: Round, plus: Vector | None = None) -> Vector:
        """D_i = x − y after K local steps along g_i + plus."""
        return x - self.descend(x, f.direction(plus), self.rate(rnd.t))

    def encode(self, v: Vector, rnd: Round) -> Encoded:
        """The code of C(v), for each client with its own key of the round."""
        return self.compressor.compress(v, self.compressor.keys(rnd))

    def decode(self, code: Encoded, rnd: Round) -> Vector:
        """C(v)."""
        return self.compressor.decompress(code, rnd.layout.size, self.compressor.keys(rnd), rnd.layout.dtype)
