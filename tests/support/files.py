"""Files as a failing disk, a careless person or the holder of a key leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_key(path: Path, key: Any = None) -> Path:
    """Writes a new Ed25519 key, or another one, and its public key beside it."""
    from cryptography.hazmat.primitives import serialization as pem
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = key or ed25519.Ed25519PrivateKey.generate()
    path.write_bytes(
        key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    )
    public = key.public_key().public_bytes(pem.Encoding.PEM, pem.PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)
    return path


def damage(path: Path, how: str) -> None:
    """Changes a file as a failing disk or a careless person does."""
    raw = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
    elif how == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "zeros":
        path.write_bytes(bytes(len(raw)))
    elif how == "double":
        path.write_bytes(raw + raw)
    else:
        for place in range(0, len(raw), max(1, len(raw) // 40)):
            raw[place] ^= 1 << (place % 8)
        path.write_bytes(raw)
