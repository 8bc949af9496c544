"""Random numbers that nobody else can know: the server's coins and noise, from a key that never leaves it.

A round's numbers follow from the key and the number of the round alone, so that a resumed run continues to the same
bits. The key is 32 bytes of the operating system's generator; the stream is ChaCha20.

Gaussian numbers in floating point are not ideal: which values can occur depends on the sum they are added to, and this
has been used to break published noise (Mironov 2012; Jin et al. 2022). Two precautions: each number is half the sum of
four independent ones (Holohan and Braghin 2021), and what is released is rounded to a grid of 2^-20 of the noise, far
coarser than the spacing of float64. This is no proof for floating point.
"""

from __future__ import annotations

import hashlib
import math
import secrets

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.extras import needs

KEY_BYTES = 32
SUMMED = 4  # Gaussian numbers per number of noise
GRID = 2.0**-20  # of the standard deviation


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
