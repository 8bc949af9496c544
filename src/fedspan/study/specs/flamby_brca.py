"""Fed-TCGA-BRCA as FLamby trains on it: its model, loss, initial weights and mini-batches, seed by seed.

FLamby's loaders shuffle with torch's global generator, so that the order of a client's patients depends on how often
every other loader has been shuffled. Their first pass is drawn when a strategy is created, with the generator as the
strategy before left it; only then the generator is seeded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedspan import register
from fedspan.data import natural, tcga_brca
from fedspan.tasks._module import Material, ModuleTask

ROUNDS, STEPS, BATCH = 5, 100, 8  # of every run in FLamby's benchmark


@register
@dataclass(frozen=True, kw_only=True)
class FlambyBrca(ModuleTask):
    """A linear Cox model on 39 clinical features, for the hospitals of six regions."""

    def material(self, seed: int, dtype: torch.dtype) -> Material:
        train, test = tcga_brca()
        assert train.owner is not None  # the patients' regions
        x, y = torch.from_numpy(train.x).to(dtype), torch.from_numpy(train.y).to(dtype)
        regions = natural(train.owner)
        batches = flamby_batches([len(rows) for rows in regions.values()], seed)
        pairs = zip(regions.items(), batches, strict=True)
        clients = [Hospital(x[rows], y[rows], own) for (_, rows), own in pairs]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Linear(39, 1).to(dtype)
        known = torch.from_numpy(test.x).to(dtype), torch.from_numpy(test.y).to(dtype)
        names = [str(name) for name in regions]
        return Material(model, clients, known, loss=cox, names=names)


def cox(risks: Tensor, targets: Tensor) -> Tensor:
    """Return the negative Cox partial likelihood of a mini-batch; a target is (time, event)."""
    order = torch.argsort(targets[:, 0], descending=True, stable=True)
    risks, event = risks.flatten()[order], targets[order, 1]
    return (event * (torch.logcumsumexp(risks, 0) - risks)).mean()


class Hospital:
    """A region's patients, given out in the mini-batches of FLamby's run."""

    def __init__(self, x: Tensor, y: Tensor, batches: Iterator[Tensor]) -> None:
        self.x, self.y, self.batches = x, y, batches

    def __len__(self) -> int:
        return len(self.x)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return FLamby's next mini-batch in place of one that is drawn; other numbers of patients are as asked."""
        rows = next(self.batches) if len(index) == BATCH else index
        return self.x[rows], self.y[rows]


def flamby_batches(sizes: list[int], seed: int) -> list[Iterator[Tensor]]:
    """Return the mini-batches of each client in FLamby's run of a strategy that follows another one."""

    def draw() -> int:
        return int(torch.empty((), dtype=torch.int64).random_())

    def shuffled(n: int) -> list[Tensor]:
        draw()  # the seed of the loader's processes
        return list(torch.randperm(n, generator=torch.Generator().manual_seed(draw())).split(BATCH))

    def one_run() -> list[list[Tensor]]:
        taken = [shuffled(n) for n in sizes]
        torch.manual_seed(seed)
        for done in range(STEPS, ROUNDS * STEPS + 1, STEPS):
            for n, batches in zip(sizes, taken, strict=True):
                while len(batches) < done:
                    batches.extend(shuffled(n))
        return taken

    with torch.random.fork_rng(devices=[]):
        one_run()
        for _ in range(len(sizes) + 1):  # the test sets' loaders: one per client, and one of all
            draw()
        return [iter(batches) for batches in one_run()]
