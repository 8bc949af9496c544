"""Whether drawing coordinates by importance pays: MNIST, ten clients with two digits each, as in the study `options`.

    python benchmarks/importance.py [--seeds 3] [--rounds 120] [--share 0.3]

A coordinate of a network is an input of a layer, with a whole column of weights, so a server could afford to name the
drawn ones: one index per column. It would draw input j with probability (1 − κ) ‖c_:j‖ / Σ + κ/d, where c_:j is the
input's column of the server's control, and κ is `--share`. That keeps E[PᵀP] ⪰ κρI. Here the simulator names them
without counting the indices. Prints the accuracy of uniform and of important coordinates at several learning rates.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import bench
import numpy as np
import torch

import fedspan
from fedspan.core.bundle import Bundle
from fedspan.core.projector import Factor, LinearMap
from fedspan.core.round import Round
from fedspan.core.spec import Spec
from fedspan.methods.ssf import SSF
from fedspan.projectors.coordinate import Picked
from fedspan.servers import Momentum

TAIL = 3  # evaluations whose mean is the result
TASK = {
    "name": "classification",
    "data": "mnist",
    "model": "mlp",
    "partition": {"name": "classes", "clients": 10, "classes_per_client": 2},
}
named: dict[tuple[int, ...], LinearMap] = {}  # the P of the current round, which both ends know


@dataclass(frozen=True, kw_only=True)
class ImportantSSF(SSF):
    """SSF whose server names the coordinates of each round."""

    kappa: float = 0.3  # κ: share of the probability that is uniform

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        named.clear()
        factors: list[Factor | None] = []
        rng, parts = (
            np.random.default_rng([*rnd.seeds, rnd.t]),
            server.c.split([b.size for b in rnd.layout.blocks], -1),
        )
        for block, part in zip(rnd.layout.blocks, parts, strict=True):
            if block.axis is None:
                factors.append(None)
                continue
            norms = block.rows(part)[0].norm(dim=0).double().numpy()
            p = np.full(block.inputs, 1 / block.inputs)
            if norms.any():
                p = (1 - self.kappa) * norms / norms.sum() + self.kappa * p
            index = np.sort(
                rng.choice(block.inputs, self.space.rank_of(block), replace=False, p=p / p.sum())
            )
            factors.append(
                Picked(torch.from_numpy(index)[None, None], block.inputs, rnd.layout.dtype)
            )
        probe = sum(
            (f.probe() for f in factors if f is not None),
            start=torch.zeros(1, 1, 1, dtype=torch.float64),
        )
        named[rnd.t, *rnd.seeds] = LinearMap(rnd.layout, tuple(factors), probe)
        return super().broadcast(server, rnd)

    def subspace(self, rnd: Round) -> LinearMap:
        return named[rnd.t, *rnd.seeds]


def accuracies(method: SSF, seeds: int, rounds: int) -> list[float]:
    """The mean of the last evaluations of each seed."""
    plain: dict[str, Any] = {
        "rounds": rounds,
        "eval_every": 5,
        "task": TASK,
        "participation": {"weights": "uniform"},
    }
    found = []
    for seed in range(seeds):
        spec = Spec.from_table(
            plain | {"seed": seed, "engine": {"simulate": "loop"}, "method": {"name": "ssf"}}
        )
        history = fedspan.run(dataclasses.replace(spec, method=method), progress=False).history
        found.append(float(np.mean([row["accuracy"] for row in history[-TAIL:]])))
    return found


def main() -> None:
    """All learning rates of both."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--share", type=float, default=0.3)
    args = parser.parse_args()
    if args.short:
        args.seeds, args.rounds = 1, 5
    torch.set_num_threads(1)
    shared: dict[str, Any] = {"rank": 0.2, "server": Momentum(0.5)}
    for lr in (0.1, 0.2, 0.3):
        for name, method in (
            ("uniform", SSF(lr=lr, **shared)),
            ("important", ImportantSSF(lr=lr, kappa=args.share, **shared)),
        ):
            found = 100 * np.array(accuracies(method, args.seeds, args.rounds))
            print(
                f"lr {lr:<4} {name:10} {found.mean():.2f} ± {found.std(ddof=args.seeds > 1):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    bench.start(main)
