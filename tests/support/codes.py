"""Every compressor with settings, and vectors that are compressed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.core import seeds, tables
from fedspan.core.compressor import Compressor

TOPK, QSGD = {"name": "topk", "k": 0.3}, {"name": "qsgd", "bits": 3, "bucket": 5}


# One or more settings of every registered compressor; one without an entry fails the suite.
COMPRESSORS: dict[str, list[dict[str, Any]]] = {
    "identity": [{}],
    "topk": [{"k": 0.3}, {"k": 1}, {"k": 0.3, "chunk": 9}, {"k": 1, "chunk": 4}],
    "randk": [{"k": 0.3}, {"k": 0.3, "unbiased": False}, {"k": 0.8}, {"k": 1.0}],
    "qsgd": [
        {},
        {"bits": 2, "bucket": 4},
        {"bits": 9, "bucket": 3},
        {"bits": 3, "unbiased": False},
    ],
    "sign": [{}, {"bucket": 3}, {"sizes": 2}, {"sizes": 2, "bucket": 3}, {"sizes": 0}],
    "compose": [
        {"outer": QSGD, "inner": TOPK},
        {"outer": {"name": "qsgd"}, "inner": {"name": "randk", "k": 0.5}},
        {"outer": {"name": "sign"}, "inner": TOPK},
        {"outer": {"name": "qsgd"}, "inner": {"name": "randk", "k": 2, "unbiased": False}},
        {
            "outer": {"name": "sign"},
            "inner": {"name": "randk", "k": 0.5},
        },  # neither unbiased nor contractive
    ],
}


EVERY = pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param(name, one, id=f"{name}-{i}")
        for name, some in COMPRESSORS.items()
        for i, one in enumerate(some)
    ],
)


DTYPES = [torch.float32, torch.float64]


def make(name: str, fields: dict[str, Any]) -> Compressor:
    return tables.build("compressor", {"name": name} | fields)


def keys(*shape: int, seed: int = 0) -> seeds.Keys:
    return np.arange(seed, seed + math.prod(shape), dtype=np.uint64).reshape(shape)


def there_and_back(compressor: Compressor, v: torch.Tensor, of: seeds.Keys) -> torch.Tensor:
    return compressor.decompress(compressor.compress(v, of), v.shape[-1], of, v.dtype)


def fits(compressor: Compressor, n: int) -> bool:
    k = getattr(compressor, "k", None) or getattr(getattr(compressor, "inner", None), "k", 1)
    return not isinstance(k, int) or k <= n
