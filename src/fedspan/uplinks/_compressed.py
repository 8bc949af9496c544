"""What uplinks with a compressor share. Both ends use C(v) as decoded, never v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedspan import Compressor, Encoded, Round, Uplink, Vector
from fedspan.compressors.topk import TopK
from fedspan.core.linear_map import LinearMap
from fedspan.core.refusals import needs_contractive
from fedspan.core.tables import accept_choices

TENTH = TopK(k=0.1)


@dataclass(frozen=True)
class Compressed(Uplink):
    """An uplink that compresses one vector per reply."""

    compressor: Compressor = TENTH  # C: how uploads are compressed

    def __post_init__(self) -> None:
        accept_choices(self)

    def check(self, n: int, drift: Any) -> None:
        needs_contractive("uplink", self.compressor, n)

    def encode(self, v: Vector, rnd: Round) -> Encoded:
        """Compress v, for each client with its own key of the round."""
        return self.compressor.compress(v, self.compressor.keys(rnd))

    def receive(self, sent: Any, P: LinearMap, rnd: Round) -> Vector:
        return self.compressor.decompress(sent, P.rank, self.compressor.keys(rnd), rnd.layout.dtype)
