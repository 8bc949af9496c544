"""Files as a failing disk or a careless person leaves them."""

from __future__ import annotations

from pathlib import Path


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
