"""How far two models are apart, and clients of different sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

ROUNDS = 30


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def unequal(tmp_path: Any) -> dict[str, Any]:
    """Clients of 2 to 9 rows."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(7, 9, 12)), rng.normal(size=(7, 9, 2))
    path = tmp_path / "unequal.npz"
    np.savez(path, A=a, B=b, n=np.array([2, 3, 9, 4, 8, 5, 6]))
    return {"data": str(path)}
