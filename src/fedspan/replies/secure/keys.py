"""Keys of a secure sum: X25519 pairs, keys that two clients agree on, sealed messages between them, and masks.

Every key is derived for one purpose, one roster and one pair, so that no key of an earlier round is of any use, and two
clients to whom the server names different keys, weights or clients agree on nothing. Masks are uniform whole numbers
that follow from a seed of 32 bytes, by AES-256 in counter mode.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedspan.core.errors import ProtocolError
from fedspan.replies.fixed_point import Numbers

KEY = 32  # bytes of a private key, a public key, a seed and a commitment
NONCE, TAG = 12, 16
SESSION = 16  # bytes that name a session
CHUNK = 1 << 18  # bytes that are drawn at once; they stay in the cache
ZEROS = bytes(CHUNK)


def new_key() -> bytes:
    """A private key or a seed, from the generator of the operating system."""
    return secrets.token_bytes(KEY)


def public_key(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed_key(private: bytes, public: bytes, purpose: str, roster: bytes, *clients: int) -> bytes:
    """The key of 32 bytes that two clients agree on for one purpose, where both were given the same roster."""
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError:  # a point of low order, with which everybody would agree on zero
        raise ProtocolError("a public key is not usable") from None
    return HKDF(SHA256(), KEY, None, _context(purpose, roster, *clients)).derive(secret)


def commitment(seed: bytes, session: bytes, client: int) -> bytes:
    """By which the server knows a seed when it has recovered it; it tells nothing of the seed before."""
    return hashlib.sha256(_context("self mask", session, client) + seed).digest()


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypted and authenticated."""
    nonce = secrets.token_bytes(NONCE)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, None)


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """What `seal` closed; None where the key or a byte differs."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE], sealed[NONCE:], None)
    except InvalidTag:
        return None


def _context(purpose: str, where: bytes, *clients: int) -> bytes:
    return f"fedspan secure sum 2 {purpose} {where.hex()} {clients}".encode()


def add_mask(total: Numbers, seed: bytes, sign: int = 1) -> None:
    """Adds the mask of a seed to `total` in place, or subtracts it; a seed is used for one mask."""
    stream = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    step = CHUNK // total.itemsize
    drawn = np.empty(min(step, total.size), total.dtype)
    for start in range(0, total.size, step):
        part = total[start : start + step]
        mask = drawn[: part.size]
        stream.update_into(memoryview(ZEROS)[: part.nbytes], mask.view(np.uint8).data)
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)
