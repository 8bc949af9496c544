"""Qsparse-local-SGD: error feedback with quantized top-k (Basu et al. 2019, arXiv:1906.02367).

The box is that of `ef` with C = quantize ∘ top-k: the k largest numbers of e_i + D_i, each randomly rounded to s levels
of the norm of its bucket. Any `compose` compressor can be given; its k matters most.

Differences from the paper: those of `ef`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan import Compressor, register
from fedspan.compressors.compose import Compose
from fedspan.compressors.qsgd import QSGD
from fedspan.methods._coded import TENTH
from fedspan.methods._feedback import ErrorFeedback

FIVE_BITS = Compose(outer=QSGD(levels=15, bucket=64), inner=TENTH)  # ω = 64/15² < 1: contractive


@register
@dataclass(frozen=True, kw_only=True)
class Qsparse(ErrorFeedback):
    """Few numbers, with few bits each."""

    compressor: Compressor = FIVE_BITS  # C: how uploads are compressed
