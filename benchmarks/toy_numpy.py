"""The toy problem in plain NumPy, one process and one thread: what benchmarks/toy.py compares fedspan with.

    python benchmarks/toy_numpy.py ssf --het 2 --lr 0.001 --rounds 1000

The clients of a round are computed together, as (clients, rows, columns) arrays in float32. There are no messages, no
ledger and no checkpoints: it is the arithmetic of a round and nothing else.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

CLIENTS, COHORT, EXAMPLES, INPUTS, OUTPUTS = 20, 10, 50, 100, 10
STEPS, BATCH, RIDGE, NOISE = 5, 20, 0.1, 0.01
METHODS = ("fedavg", "scaffold", "ssf")


class Problem(NamedTuple):
    """Ridge regressions of all clients."""

    inputs: np.ndarray  # (clients, examples, inputs)
    targets: np.ndarray  # (clients, examples, outputs)
    optimum: np.ndarray  # (inputs, outputs), of the mean of the clients' losses


def problem(het: float, seed: int = 0) -> Problem:
    """Draw data whose means differ by `het` between clients, and solve for the optimum."""
    rng = np.random.default_rng(seed)
    shift = het * rng.standard_normal((CLIENTS, 1, INPUTS))
    inputs = shift + rng.standard_normal((CLIENTS, EXAMPLES, INPUTS))
    truth = rng.standard_normal((INPUTS, OUTPUTS))
    targets = inputs @ truth + NOISE * rng.standard_normal((CLIENTS, EXAMPLES, OUTPUTS))
    rows, goals = inputs.reshape(-1, INPUTS), targets.reshape(-1, OUTPUTS)
    optimum = np.linalg.solve(
        rows.T @ rows / len(rows) + RIDGE * np.eye(INPUTS), rows.T @ goals / len(rows)
    )
    return Problem(*(array.astype(np.float32) for array in (inputs, targets, optimum)))


def subspace(rng: np.random.Generator, rank: int) -> np.ndarray:
    """Draw `rank` orthonormal rows, uniformly among all subspaces."""
    q, r = np.linalg.qr(rng.standard_normal((INPUTS, rank)))
    return np.ascontiguousarray((q * np.sign(r.diagonal())).T, np.float32)


def error(x: np.ndarray, optimum: np.ndarray) -> float:
    """Return the relative distance to the optimum."""
    return float(np.linalg.norm(x - optimum) / np.linalg.norm(optimum))


def run(
    data: Problem, method: str, lr: float, rounds: int, rank: int = 20, seed: int = 1
) -> list[float]:
    """Train, and return the error at every hundredth round and at the end."""
    rng, errors = np.random.default_rng(seed), []
    x = np.zeros((INPUTS, OUTPUTS), np.float32)
    c, own = np.zeros_like(x), np.zeros((CLIENTS, *x.shape), np.float32)
    for t in range(rounds):
        if t % 100 == 0:
            errors.append(error(x, data.optimum))
        ids = rng.permutation(CLIENTS)[:COHORT]
        P = subspace(rng, rank) if method == "ssf" else None
        inside, outside = (
            (P.__matmul__, P.T.__matmul__) if P is not None else (np.asarray, np.asarray)
        )
        control = inside(own[ids])
        correction = inside(c) - control if method != "fedavg" else np.float32(0)
        moved = np.zeros((COHORT, INPUTS if P is None else rank, OUTPUTS), np.float32)
        gradients = np.zeros_like(moved)
        inputs, targets = data.inputs[ids], data.targets[ids]
        for _ in range(STEPS):
            batch = rng.integers(0, EXAMPLES, (COHORT, BATCH))[:, :, None]
            a, b = np.take_along_axis(inputs, batch, 1), np.take_along_axis(targets, batch, 1)
            y = x + outside(moved)
            gradient = inside(a.transpose(0, 2, 1) @ (a @ y - b) / BATCH + RIDGE * y)
            gradients += gradient
            moved = moved - lr * (gradient + correction)
        x = x + outside(moved.mean(0))
        if method != "fedavg":
            change = gradients / STEPS - control
            own[ids] += outside(change)
            c = c + outside(change.sum(0) / CLIENTS)
    return [*errors, error(x, data.optimum)]


def main() -> None:
    """Time one run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=METHODS, nargs="?", default="ssf")
    parser.add_argument("--het", type=float, default=2.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--short", action="store_true", help="100 rounds")
    given = parser.parse_args()
    data, rounds = problem(given.het), 100 if given.short else given.rounds
    began = time.process_time()
    errors = run(data, given.method, given.lr, rounds)
    seconds = time.process_time() - began
    print(
        f"{given.method}: {1e6 * seconds / rounds:.0f} µs of CPU time per round, error {errors[-1]:.3e}"
    )


if __name__ == "__main__":
    main()
