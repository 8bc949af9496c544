"""What projectors and compressors must keep to, one function per law."""

from __future__ import annotations

import numpy as np
import torch

from fedspan.checks import aggregator_laws
from fedspan.checks.bench import Law, hold, near, random
from fedspan.core.compressor import Compressor
from fedspan.core.layout import Block, Layout
from fedspan.core.projector import LinearMap, Projector
from fedspan.core.seeds import Keys

DRAWS = 2000
KEYS = np.arange(DRAWS, dtype=np.uint64)


def _drawn(projector: Projector, inputs: int = 12, runs: int = 1) -> LinearMap:
    blocks = Block("w", (2, inputs), 1), Block("b", (3,), None)
    return projector.sample(Layout(blocks, torch.float64), KEYS[:runs])


def orthonormal(projector: Projector) -> None:
    """P Pᵀ = I: the rows of P are orthonormal, for widths that are no powers of two as well."""
    for inputs in (12, 17, 64):
        P = _drawn(projector, inputs)
        z = random(1, 2, P.rank)
        near(P @ (P.T @ z), z, 1e-10, f"P Pᵀz is not z for {inputs} inputs")


def adjoint(projector: Projector) -> None:
    """Pᵀ is the transpose of P, and `columns` writes it out."""
    P = _drawn(projector)
    v, z = random(1, 2, P.layout.size), random(1, 2, P.rank)
    near(((P @ v) * z).sum(-1), (v * (P.T @ z)).sum(-1), 1e-10, "⟨P v, z⟩ is not ⟨v, Pᵀz⟩")
    factor, block = P.factors[0], v[..., :24].reshape(1, 4, 12)
    if factor is not None:
        near(
            factor.down(block),
            block @ factor.columns(),
            1e-10,
            "`columns` is another matrix than `down` applies",
        )


def spread(projector: Projector) -> None:
    """E[PᵀP] = (r/d) I: every direction is as likely as any other."""
    P = projector.sample(Layout((Block("w", (1, 8), 1),), torch.float64), KEYS)
    eye = torch.eye(8, dtype=torch.float64)
    mean = (P.T @ (P @ eye.expand(DRAWS, -1, -1).contiguous())).mean(0)
    share = P.rank / 8
    wrong = float((mean - share * eye).abs().max())
    hold(
        wrong < 6 * DRAWS**-0.5,
        f"the mean of PᵀP over {DRAWS} draws is off by {wrong:.2g} from {share:.2g} I",
    )


def from_the_key(projector: Projector) -> None:
    """The same key draws the same P, alone or among others, and the probe tells different P apart."""
    alone, again, several = _drawn(projector), _drawn(projector), _drawn(projector, runs=3)
    v = random(1, 1, alone.layout.size)
    for other in (again, several.cut(slice(0, 1))):
        hold(
            torch.equal(alone @ v, other @ v),
            "one key draws two different P; draw by fedspan.core.seeds",
        )
    if several.probe is not None and alone.rank < alone.layout.size:
        probes = set(several.probe.flatten().tolist())
        hold(len(probes) == 3, "the probe is the same for different P")


def _back(compressor: Compressor, v: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Compress vectors and decompress them."""
    return compressor.decompress(compressor.compress(v, keys), v.shape[-1], keys, v.dtype)


def round_trip(compressor: Compressor) -> None:
    """What is compressed can be decompressed: same shape, zeros stay zero, and the length depends on n only."""
    keys, some, sizes = KEYS[:6].reshape(2, 3), random(2, 3, 40), set()
    for v in (some, torch.zeros_like(some), 1e3 * some):
        sizes.add(compressor.compress(v, keys).bytes)
        back = _back(compressor, v, keys)
        hold(back.shape == v.shape, f"decompress returns {tuple(back.shape)} for {tuple(v.shape)}")
        hold(v.any() or not back.any(), "zeros do not come back as zeros")
    hold(
        len(sizes) == 1,
        f"what is sent has different lengths for vectors of one size: {sorted(sizes)} bytes",
    )


def one_by_one(compressor: Compressor) -> None:
    """A batch equals its members one by one, and a key decides everything."""
    v, keys = random(2, 3, 40), KEYS[:6].reshape(2, 3)
    whole = _back(compressor, v, keys)
    words = "a vector alone is compressed in another way than in a batch, or twice in two ways"
    for run, client in np.ndindex(2, 3):
        one = slice(run, run + 1), slice(client, client + 1)
        hold(torch.equal(_back(compressor, v[one], keys[one]), whole[one]), words)


def as_promised(compressor: Compressor) -> None:
    """It is unbiased with `omega`, or contractive with `delta`, as it says."""
    n = 40
    v, keys = random(1, 1, n).expand(1, DRAWS, n).contiguous(), KEYS[None]
    back = _back(compressor, v, keys)
    norm, errors = float(v[0, 0].square().sum()), (back - v).square().sum(-1).flatten()
    mean = float(errors.mean())
    most = norm * (1 + 6 * float(errors.std()) / max(mean, 1e-300) * DRAWS**-0.5)
    omega, delta = compressor.omega(n), compressor.delta(n)
    if omega is not None:
        bias = float((back.mean(1) - v[:, 0]).square().sum())
        hold(
            bias <= 40 * mean / DRAWS + 1e-20,
            f"it says omega = {omega:.3g}, and its mean is biased",
        )
        hold(
            mean <= omega * most + 1e-12,
            f"it says omega = {omega:.3g}, and its error is {mean / norm:.3g} of ‖v‖²",
        )
    if delta is not None:
        hold(
            mean <= (1 - delta) * most + 1e-12,
            f"it says delta = {delta:.3g}, and its error is {mean / norm:.3g} of ‖v‖²",
        )


def not_finite(compressor: Compressor) -> None:
    """Values that are not finite do not come back as finite ones, so that divergence is noticed."""
    for bad in (float("nan"), float("inf")):
        back = _back(compressor, torch.full((1, 1, 40), bad, dtype=torch.float64), KEYS[:1, None])
        hold(not torch.isfinite(back).all(), f"a vector of {bad} comes back finite")


LAWS: dict[str, tuple[Law, ...]] = {
    "projector": (orthonormal, adjoint, spread, from_the_key),
    "compressor": (round_trip, one_by_one, as_promised, not_finite),
    "aggregator": aggregator_laws.LAWS,
}
