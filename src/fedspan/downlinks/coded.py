"""Compressed moves with error feedback on the server, as in DoubleSqueeze (Tang et al. 2019, arXiv:1905.05957).

    w ← move + P e;   Q ← C(w), sent;   P e ← w − Q;   x ← x − Pᵀ Q            outside the subspace e stays

The server itself moves x by what was sent, so that x is the same at both ends. C must be contractive. A control P c
that clients need is sent in few unbiased bits: each client subtracts the copy that it was sent, so its error cancels
in a_i = P ḡ_i − P c_i, and local paths shift by the same vector for everyone.
"""

from dataclasses import dataclass
from typing import Any

import torch

from fedspan import Bundle, Compressor, LinearMap, Parts, Round, Vector, register
from fedspan.compressors.qsgd import QSGD
from fedspan.compressors.topk import TopK
from fedspan.core.refusals import needs_contractive, needs_unbiased
from fedspan.core.tables import accept_choices
from fedspan.downlinks.changes import Changes

TENTH, TWO_BITS = TopK(k=0.1), QSGD(bits=2, bucket=64)


@register
@dataclass(frozen=True)
class Coded(Changes):
    """Few bits for each missed round."""

    compressor: Compressor = TENTH  # C: how moves are compressed
    control: Compressor = TWO_BITS  # how P c is compressed; unbiased

    def __post_init__(self) -> None:
        accept_choices(self)

    def check(self, n: int) -> None:
        needs_contractive("downlink", self.compressor, n)
        needs_unbiased("downlink.control", self.control, n)

    def init(self, x0: Vector) -> Parts:
        return {**super().init(x0), "e": torch.zeros_like(x0)}

    def send(self, server: Bundle, move: Vector, P: LinearMap, rnd: Round) -> tuple[Vector, Parts]:
        w = move + P @ server.e
        Q = self.entry(w, rnd)
        sent = self.opened(Q, P, rnd)
        return sent, {**self.push(server.log, Q, rnd), "e": P.T.put(w - sent, server.e)}

    def opened(self, entry: Any, P: LinearMap, rnd: Round) -> Vector:
        keys = self.compressor.server_keys(rnd)
        return self.compressor.decompress(entry, P.rank, keys, rnd.layout.dtype)

    def entry(self, move: Vector, rnd: Round) -> Any:
        return self.compressor.compress(move, self.compressor.server_keys(rnd))
