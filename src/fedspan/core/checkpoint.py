"""A run on disk: safetensors with a checksum, written to a side file, synced, then renamed into place.

A reader therefore sees the old checkpoint or the new one, never half of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from fedspan.core.errors import CheckpointError

FORMAT = "fedspan-checkpoint-1"


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file in one step that survives a crash at any moment."""
    side = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with side.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(side, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            side.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save(path: Path, arrays: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    """Write named arrays and a small JSON table."""
    whole = {name: array.contiguous().clone() for name, array in arrays.items()}
    header = {"format": FORMAT, "meta": json.dumps(meta), "checksum": _checksum(whole)}
    write_atomic(path, safetensors.torch.save(whole, header))


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read what `save` wrote; a file that is missing, cut short or altered is refused."""
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {str(path)!r}; start the run without --resume")
    try:
        data = path.read_bytes()  # once: a new checkpoint may take the file's place at any moment
        arrays = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        if header.get("format") != FORMAT:
            raise CheckpointError(
                f"{str(path)!r} is not a checkpoint of this fedspan ({header.get('format')!r}, not {FORMAT!r})"
            )
        if header["checksum"] != _checksum(arrays):
            raise CheckpointError(f"checkpoint {str(path)!r} fails its checksum; delete it and start again")
        return arrays, json.loads(header["meta"])
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"checkpoint {str(path)!r} cannot be read ({reason}); delete it and start again"
        ) from None


def _checksum(arrays: dict[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        digest.update(array.contiguous().view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    return digest.hexdigest()
