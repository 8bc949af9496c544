"""Checkpoints: safetensors with a checksum, written to a temporary file, synced, then renamed into place.

A reader therefore sees the old checkpoint or the new one, never half of one. Arrays are written from where they are in
memory and mapped when they are read, so that a large model is never in memory twice. Windows cannot replace a mapped
file: there they are read one by one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
import torch

from fedspan.core import system
from fedspan.core.digest import digest_of_arrays, raw
from fedspan.core.errors import CheckpointError
from fedspan.core.files import write_atomic
from fedspan.core.layout import Arrays

FORMAT = "fedspan-checkpoint-2"
KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip  # safetensors' names


def save(path: Path, arrays: Arrays, meta: dict[str, Any]) -> None:
    """Writes named arrays and a small JSON table."""
    text = json.dumps(meta)
    about = {"format": FORMAT, "meta": text, "checksum": digest_of_arrays(arrays, text, size=16)}
    write_tensors(path, arrays, about, private=True)


def write_tensors(
    path: Path,
    arrays: Arrays,
    about: dict[str, str] | None = None,
    private: bool = False,
) -> None:
    """Writes a safetensors file without a copy of the arrays; the library itself makes two."""
    ordered = sorted(arrays, key=lambda name: (-arrays[name].element_size(), name))  # aligned
    header: dict[str, Any] = {} if about is None else {"__metadata__": about}
    end, raws = 0, [raw(arrays[name]) for name in ordered]
    for name, part in zip(ordered, raws, strict=True):
        place = {"dtype": KINDS[arrays[name].dtype], "shape": list(arrays[name].shape)}
        header[name] = {**place, "data_offsets": [end, end + part.nbytes]}
        end += part.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_atomic(path, len(text).to_bytes(8, "little"), text, *raws, private=private)


def load(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Reads what `save` wrote; raises CheckpointError if the file is missing, truncated or altered."""
    if not path.is_file():
        raise CheckpointError(
            f"no checkpoint at {str(path)!r}; start the run without `resume=True`"
        )
    try:
        arrays, header = read_tensors(path)
        if header.get("format") != FORMAT:
            raise CheckpointError(
                f"{str(path)!r} is not a checkpoint of this fedspan ({header.get('format')!r}, not {FORMAT!r})"
            )
        if header["checksum"] != digest_of_arrays(arrays, header["meta"], size=16):
            raise CheckpointError(
                f"checkpoint {str(path)!r} fails its checksum; delete it and start again"
            )
        return arrays, json.loads(header["meta"])
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"checkpoint {str(path)!r} cannot be read ({reason}); delete it and start again"
        ) from None


def read_tensors(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Reads the arrays and the metadata of a safetensors file, which may then be deleted or replaced."""
    # opened once: a new checkpoint may replace the file at any moment
    with safetensors.safe_open(path, "pt") as file:
        arrays = {}
        for name in file.keys():  # noqa: SIM118
            mapped = file.get_tensor(name)
            arrays[name] = mapped.clone() if system.WINDOWS else mapped
        return arrays, file.metadata() or {}
