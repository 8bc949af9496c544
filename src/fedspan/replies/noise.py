"""The server's end of differential privacy: who takes part, what is released of a round, and ε so far.

    cohort      every client with probability q, by a coin of the server's secret key
    release     (Σ_S ã_i + N(0, σ²C² I)) / (qN), whatever the number of replies: the divisor tells nothing
    c           moves by q times the release, so that without noise c = mean_i c_i holds for any cohort

A round without a client releases noise alone. x, c and all that follows are computed from releases only.

The noise of the release is in c, but in no c_i: their difference is a random walk. It cannot be had for nothing. If
clients added noise to their own ã_i and c_i, c = mean_i c_i would hold, but their next a_i = P ḡ_i − P c_i would
subtract the noise of the round before, and the sum of two releases would have the noise of one: the audit refutes the
ε of such a run (tests/replies). So c_i never holds noise. With `leak` λ the server's c and every c_i shrink by 1 − λ in
each round. A client shrinks its c_i when it next takes part, once for every round since, so that c − mean_i c_i is
1 − λ times the one before plus the new noise, for any cohort; its variance stays below 1/(2λ) times that of one round.

With `quantile` γ clients say whether their norm was within the clip, as ±1/2. The count gets noise as well, and C is
multiplied by exp(−0.2 (share within − γ)) (Andrew et al. 2021).

Coins and noise follow from a key that never leaves the server, and from the number of the round, so that a resumed run
continues to the same bits. The key is 32 bytes of the operating system's generator; the stream is ChaCha20.

Gaussian numbers in floating point are not ideal: which values can occur depends on the sum they are added to, and this
has been used to break published noise (Mironov 2012; Jin et al. 2022). Two precautions: each number is half the sum of
four independent ones (Holohan and Braghin 2021), and what is released is rounded to a grid of 2^-20 of the noise, far
coarser than the spacing of float64. This is no proof for floating point.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.bundle import payload
from fedspan.core.errors import CheckpointError, SpecError
from fedspan.core.extras import needs
from fedspan.core.layout import Vector
from fedspan.core.privacy import Privacy
from fedspan.core.round import Round, Terms
from fedspan.replies import accountant

KEY_BYTES = 32
SUMMED = 4  # Gaussian numbers per number of noise
GRID = 2.0**-20  # of the standard deviation
STEP = 0.2  # of the adapted clip
COUNT_NOISE = 20.0  # qN divided by this is the noise of the count of clients within the clip


def new_key() -> bytes:
    """A secret key."""
    return secrets.token_bytes(KEY_BYTES)


def uniform(key: bytes, purpose: str, t: int, n: int) -> npt.NDArray[np.float64]:
    """n numbers in (0, 1), of 53 random bits each."""
    needs("privacy", "cryptography")
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    own = hashlib.blake2b(
        t.to_bytes(8, "little"), digest_size=KEY_BYTES, key=key, person=purpose.encode()
    ).digest()
    stream = Cipher(algorithms.ChaCha20(own, bytes(16)), mode=None).encryptor().update(bytes(8 * n))
    return ((np.frombuffer(stream, np.uint64) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(key: bytes, purpose: str, t: int, n: int) -> torch.Tensor:
    """n standard normal numbers in float64."""
    u = torch.from_numpy(uniform(key, purpose, t, SUMMED * n)).reshape(SUMMED, n)
    return (2.0 * u - 1.0).erfinv_().sum(0).mul_(math.sqrt(2.0 / SUMMED))


def rounded(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Values on a grid of GRID times the power of two below the noise's standard deviation."""
    step = 2.0 ** math.floor(math.log2(scale)) * GRID
    return (values / step).round_().mul_(step)


class Mechanism:
    """The private sum of a run's rounds; `key` is for tests only."""

    def __init__(
        self,
        settings: Privacy,
        clients: int,
        clients_per_round: int,
        rounds: int,
        key: bytes | None = None,
    ) -> None:
        assert settings.clip is not None
        accountant.check_delta(settings.delta, clients, "clients")
        self.settings, self.clients, self.q = settings, clients, clients_per_round / clients
        self.clip = settings.clip  # C of the next round
        self.key = key or new_key()
        self.noise = settings.noise or 0.0  # σ of all that a round releases
        if settings.epsilon is not None:
            self.noise = accountant.noise_for(settings.epsilon, self.q, rounds, settings.delta)
        if self.noise and settings.quantile is not None and self.noise >= 2 * self.count_noise:
            raise SpecError(
                f"`quantile` needs more clients per round than {clients_per_round}: the count of those within the clip "
                "would take the whole budget; leave it out"
            )

    @property
    def expected(self) -> float:
        """qN, the divisor."""
        return self.q * self.clients

    @property
    def count_noise(self) -> float:
        """Standard deviation of the noise on the count of clients within the clip."""
        return max(self.expected / COUNT_NOISE, 1.0)

    @property
    def vector_noise(self) -> float:
        """σ of the vectors: with an adapted clip more than `noise`, so that both together cost what `noise` does.

        The count is of ±1/2, so its multiplier is twice its noise (Andrew et al. 2021, thm. 1).
        """
        if self.settings.quantile is None or not self.noise:
            return self.noise
        return 1 / math.sqrt(self.noise**-2 - (2 * self.count_noise) ** -2)

    @property
    def per_number(self) -> float:
        """Standard deviation of the noise of each number of the mean, in units of the clip."""
        return self.vector_noise / self.expected

    def signal_to_noise(self, numbers: int, rounds: int = 1) -> float:
        """Norm of the mean over norm of the noise, if all clients sent the same vector of norm C in all rounds."""
        if not self.vector_noise:
            return math.inf
        return math.sqrt(rounds) / (self.per_number * math.sqrt(numbers))

    def terms(self) -> Terms:
        """What clients are told of a round in which the clip is not adapted."""
        assert self.settings.clip is not None
        return Terms(self.settings.clip, self.settings.leak)

    def sent(self, like: Vector) -> Vector | None:
        """What is sent beside the model: the clip, if it is adapted."""
        adapted = self.settings.quantile is not None
        return like.new_full((like.shape[0], 1, 1), self.clip) if adapted else None

    def cohort(self, t: int, runs: int) -> npt.NDArray[np.int64]:
        """Who takes part in round t, (runs, S)."""
        if self.q == 1:
            return np.tile(np.arange(self.clients), (runs, 1))
        return np.flatnonzero(uniform(self.key, "cohort", t, self.clients) < self.q)[None]

    def release(self, up: Any, within: Vector | None, rnd: Round) -> tuple[Any, Round]:
        """The private mean of the replies of a round, and the round with the share q; adapts the clip for the next."""
        count, parts = rnd.ids.shape[1], payload(up)
        sizes = [part.shape[0] * part.shape[-1] for part in parts.values()]
        scale = self.vector_noise * self.clip
        noise = normal(self.key, "noise", rnd.t, sum(sizes)).split(sizes)
        for (name, part), own in zip(parts.items(), noise, strict=True):
            total = part.double().sum(1, keepdim=True)
            if part.shape[1] == 1 < count:  # one row for several clients is their mean
                total = total * count
            if scale:
                total = rounded(total + scale * own.reshape(total.shape), scale)
            up = up.replace(**{name: (total / self.expected).to(part.dtype)})
        if self.settings.quantile is not None:
            # moves the clip towards the quantile, by the noised share of clients within it
            inside = 0.0 if within is None else float(within.double().clamp(-0.5, 0.5).sum())
            if self.noise:
                inside += self.count_noise * float(normal(self.key, "count", rnd.t, 1))
            self.clip *= math.exp(-STEP * (inside / self.expected + 0.5 - self.settings.quantile))
        return up, replace(rnd, q=self.q)

    def epsilon(self, rounds: int) -> float:
        """ε after so many rounds."""
        return accountant.epsilon(self.noise, self.q, rounds, self.settings.delta)

    def measures(self, rounds: int, runs: int) -> dict[str, npt.NDArray[np.float64]]:
        """What a row of the history tells: ε so far, and the clip if it is adapted."""
        told = {"epsilon": self.epsilon(rounds)}
        if self.settings.quantile is not None:
            told["clip"] = self.clip
        return {name: np.full(runs, value) for name, value in told.items()}

    def save(self) -> dict[str, torch.Tensor]:
        """What a checkpoint of the server holds: the secret key, and the clip."""
        key = torch.frombuffer(bytearray(self.key), dtype=torch.uint8)
        return {"key": key, "clip": torch.tensor([self.clip, self.noise], dtype=torch.float64)}

    def load(self, arrays: dict[str, torch.Tensor]) -> None:
        """Continues from what `save` gave."""
        clip, noise = arrays["clip"].tolist()
        adapted = self.settings.quantile is not None and 0 < clip < math.inf
        if not math.isclose(noise, self.noise, rel_tol=1e-3) or not (adapted or clip == self.clip):
            raise CheckpointError(
                "the checkpoint is damaged: its noise or clip is not that of its settings"
            )
        self.key, self.clip, self.noise = arrays["key"].numpy().tobytes(), clip, noise
