"""Qsparse-local-SGD: error feedback with quantized top-k (Basu et al. 2019, arXiv:1906.02367).

The box is that of `ef` with C = quantize ∘ top-k: the k largest numbers of e_i + D_i, each randomly rounded to s levels
of the norm of its bucket. Any `compose` compressor can be given; its k matters most.

Differences from the paper: those of `ef`.
"""

from dataclasses import dataclass

from fedspan import Uplink, register
from fedspan.compressors.compose import Compose
from fedspan.compressors.qsgd import QSGD
from fedspan.compressors.topk import TopK
from fedspan.methods.box import Box
from fedspan.uplinks.feedback import Feedback


@register
@dataclass(frozen=True, kw_only=True)
class Qsparse(Box):
    """Few values, with few bits each."""

    uplink: Uplink = Feedback(  # ω = 64/15² < 1: contractive
        Compose(outer=QSGD(bits=5, bucket=64), inner=TopK(k=0.1))
    )
