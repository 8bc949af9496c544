"""Numbers as a few levels of a scale: buckets, scales that neither overflow nor vanish, and random rounding."""

import torch

from fedspan import Vector
from fedspan.core import seeds

PIECE = 1 << 16  # random numbers drawn at once, so that they stay in the processor's cache


def buckets(v: Vector, size: int | None) -> torch.Tensor:
    """(…, n) as (…, ⌈n / size⌉, size), padded with zeros; None: one bucket of n."""
    n = v.shape[-1]
    if size is None or size >= n:
        return v.unsqueeze(-2)
    padded: torch.Tensor = torch.nn.functional.pad(v, (0, -n % size))
    return padded.view(*v.shape[:-1], -1, size)


def over(v: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return v divided by its scale; zeros where the scale is zero, as v is then."""
    return v / torch.where(scale == 0, torch.ones_like(scale), scale)


def norm(v: torch.Tensor) -> torch.Tensor:
    """Return ‖v‖ along the last axis, which is kept.

    v is divided by the power of two at or below max |v|. This is exact and gives numbers in (−2, 2), whose squares are
    safe to sum.
    """
    top = v.abs().amax(-1, keepdim=True)
    mantissa, _ = torch.frexp(top)
    scale = torch.where(top == 0, top, top / (2 * mantissa))
    safe: torch.Tensor = torch.linalg.vector_norm(over(v, scale), dim=-1, keepdim=True)
    return scale * safe


def chance(p: Vector, keys: seeds.Keys) -> torch.Tensor:
    """True with probability p for each number; never if p is zero."""
    n = p.shape[-1]
    out = torch.empty(p.shape, dtype=torch.bool, device=p.device)
    if p.is_meta:  # a dry run: only the shape matters
        return out
    for start in range(0, n, PIECE):
        u = torch.from_numpy(seeds.uniform(seeds.later(keys, start), min(PIECE, n - start)))
        out[..., start : start + PIECE] = p[..., start : start + PIECE] > u.to(p.device)
    return out
