"""Masks: uniform whole numbers that follow from a seed of 32 bytes, by AES-256 in counter mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

Numbers = npt.NDArray[np.unsignedinteger[Any]]  # modulo 2^32 or 2^64
CHUNK = 1 << 18  # bytes that are drawn at once; they stay in the cache
ZEROS = bytes(CHUNK)


def add_mask(total: Numbers, seed: bytes, sign: int = 1) -> None:
    """Adds the mask of a seed to `total` in place, or subtracts it; a seed is used for one mask."""
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    step = CHUNK // total.itemsize
    drawn = np.empty(min(step, total.size), total.dtype)
    for start in range(0, total.size, step):
        part = total[start : start + step]
        mask = drawn[: part.size]
        stream.update_into(memoryview(ZEROS)[: part.nbytes], mask.view(np.uint8).data)
        if sign > 0:
            part += mask
        else:
            part -= mask
