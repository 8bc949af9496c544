"""Hospitals of six regions learn who survives breast cancer longest, without sharing a patient: Fed-TCGA-BRCA.

A linear Cox model on 39 clinical features of 866 patients, 5 rounds of 100 local steps; the C-index is measured on 222
other patients of all regions. FLamby (Ogier du Terrail et al. 2022) published its results for FedAvg, SCAFFOLD and
FedAdam. The initial weights and the mini-batches are FLamby's own, so that the numbers can be compared seed by seed.

    python examples/hospitals.py        # one to two minutes; the data come with fedspan
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch

import fedspan
from fedspan import Engine, Participation, Projection
from fedspan.methods import SSF, FedAdam, FedAvg, Scaffold
from fedspan.servers import Adam

SEEDS, ROUNDS, STEPS, BATCH = range(42, 47), 5, 100, 8
METHODS = {  # the settings of FLamby, and what it published
    "FedAvg": (FedAvg(lr=0.1, local_steps=STEPS), "0.735 ± 0.157"),
    "SCAFFOLD": (Scaffold(lr=0.01, local_steps=STEPS), "0.699 ± 0.031"),
    "FedAdam": (
        FedAdam(lr=0.01, server=Adam(lr=0.1, beta2=0.999, tau=1e-8), local_steps=STEPS),
        "0.842 ± 0.015",
    ),
    "SSF, rank 1/2": (SSF(rank=0.5, lr=0.01, local_steps=STEPS), "-"),
}


def cox(risks: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The negative Cox partial likelihood of a mini-batch; a target is (time, event)."""
    order = torch.argsort(targets[:, 0], descending=True, stable=True)
    risks, event = risks.flatten()[order], targets[order, 1]
    return (event * (torch.logcumsumexp(risks, 0) - risks)).mean()


class Hospital:
    """A region's patients, given out in the mini-batches of FLamby's run."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, batches: Iterator[torch.Tensor]) -> None:
        self.x, self.y, self.batches = x, y, batches

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """FLamby's next mini-batch in place of one that is drawn; a look at other numbers of patients is what it is."""
        rows = next(self.batches) if len(index) == BATCH else index
        return self.x[rows], self.y[rows]


def flamby_batches(sizes: list[int], seed: int, rounds: int) -> list[Iterator[torch.Tensor]]:
    """The mini-batches of each client. FLamby's loaders draw from torch's global generator, client by client.

    A loader's first pass is drawn before the generator is seeded for the run: after the run of another strategy.
    """

    def draw() -> int:
        return int(torch.empty((), dtype=torch.int64).random_())

    def shuffled(n: int) -> list[torch.Tensor]:
        draw()  # the seed of the loader's processes
        return list(torch.randperm(n, generator=torch.Generator().manual_seed(draw())).split(BATCH))

    def one_run() -> list[list[torch.Tensor]]:
        taken = [shuffled(n) for n in sizes]
        torch.manual_seed(seed)
        for done in range(STEPS, rounds * STEPS + 1, STEPS):
            for n, batches in zip(sizes, taken, strict=True):
                while len(batches) < done:
                    batches.extend(shuffled(n))
        return taken

    one_run()
    for _ in range(len(sizes) + 1):  # the test sets' loaders: one per client, and one of all
        draw()
    return [iter(batches) for batches in one_run()]


def train(method: fedspan.Method, seed: int, rounds: int = ROUNDS) -> fedspan.Result:
    """One run, with a region per client; clients count by their number of patients."""
    known, test = fedspan.data.tcga_brca()
    x, y = torch.from_numpy(known.x), torch.from_numpy(known.y)
    regions = fedspan.data.natural(known.owner)
    batches = flamby_batches([len(rows) for rows in regions.values()], seed, rounds)
    clients = {
        name: Hospital(x[rows], y[rows], own)
        for (name, rows), own in zip(regions.items(), batches, strict=True)
    }
    torch.manual_seed(seed)
    model = torch.nn.Linear(39, 1)
    return fedspan.fit(
        model, clients, cox, method=method, rounds=rounds, batch_size=BATCH, seed=seed, eval_every=rounds,
        test=(test.x, test.y), metrics="c_index", participation=Participation(weights="examples"),
        projection=Projection(project_modules=["weight"]), engine=Engine(simulate="loop"),  # batches in their order
    )  # fmt: skip


def main() -> None:
    """Prints the C-index of each method over the seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), choices=range(1, len(SEEDS) + 1))
    options = parser.parse_args()
    print(f"{'method':14} {'C-index':>15} {'FLamby':>15} {'sent up':>9}")
    for name, (method, published) in METHODS.items():
        results = [train(method, seed, options.rounds) for seed in SEEDS[: options.seeds]]
        scores = [result.history[-1]["c_index"] for result in results]
        sent = results[0].up_bytes / 1000
        print(
            f"{name:14} {np.mean(scores):7.3f} ± {np.std(scores):.3f} {published:>15} {sent:6.2f} kB"
        )


if __name__ == "__main__":
    main()
