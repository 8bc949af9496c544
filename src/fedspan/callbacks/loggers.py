"""Rows to a tracker while a run goes on: TensorBoard, or Weights & Biases in its offline mode.

A logger is something to call with every row, so it serves as `on_row` anywhere:

    with loggers.opened("tensorboard", Path("out/fit")) as log:
        fedspan.fit(model, clients, method=method, rounds=100, test=test, on_row=log)

`fedspan run --log tensorboard` does the same. Nothing is imported or written before the first row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

from fedspan.core.errors import one_of
from fedspan.core.extras import needs
from fedspan.engine.history import line_of
from fedspan.engine.loop import Row

Values = dict[str, float]


class Sink(Protocol):
    """Where the rows of one seed go."""

    def log(self, values: Values, t: int) -> None:
        """Take in the numbers of round t."""

    def close(self) -> None:
        """No more will come."""


class TensorBoard:
    """Scalars in an event file; `tensorboard --logdir` shows them."""

    def __init__(self, folder: Path, name: str, table: Mapping[str, Any]) -> None:
        self.folder, self.writer = folder / "tensorboard" / name, cast(Any, None)

    def log(self, values: Values, t: int) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # What an earlier part of the run has logged beyond its checkpoint is hidden: it comes again.
            self.writer = SummaryWriter(str(self.folder), purge_step=t)
        for name, value in values.items():
            self.writer.add_scalar(name, value, t)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class Wandb:
    """A W&B run kept on disk, which `wandb sync` uploads; the environment's WANDB_MODE goes before."""

    def __init__(self, folder: Path, name: str, table: Mapping[str, Any]) -> None:
        self.folder, self.name, self.table, self.run = folder, name, table, cast(Any, None)

    def log(self, values: Values, t: int) -> None:
        if self.run is None:
            import wandb

            self.run = wandb.init(
                project="fedspan",
                name="/".join((self.folder / self.name).parts[-2:]),
                dir=str(self.folder),
                config=dict(self.table),
                mode=os.environ.get("WANDB_MODE", "offline"),
                reinit="create_new",  # seeds of one batched computation are runs side by side
            )
        self.run.log(values, step=t)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


SINKS: dict[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb}


class Logger:
    """Gives each seed's part of a row to its sink; a seed that has diverged gets no more."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = dict(enumerate(sinks))

    def __call__(self, row: Row) -> None:
        for run, sink in list(self.sinks.items()):
            line = line_of(row, run)
            names = [name for name in line if name not in ("round", "events", "diverged")]
            sink.log({name: line[name] for name in names if line[name] is not None}, row.round)
            if line.get("diverged"):
                self.sinks.pop(run).close()

    def close(self) -> None:
        for sink in self.sinks.values():
            sink.close()


def check(names: Sequence[str]) -> None:
    """Refuse a logger that is unknown or not installed, before anything runs."""
    for name in names:
        one_of("log", name, SINKS)
        needs(name, name)


@contextmanager
def opened(
    name: str, folder: Path, table: Mapping[str, Any] | None = None, seeds: Sequence[int] = (0,)
) -> Iterator[Logger]:
    """A logger into `folder`, closed at the end; `table` is what a tracker keeps of the spec."""
    check([name])
    labels = [f"seed-{seed}" if len(seeds) > 1 else "" for seed in seeds]
    logger = Logger(
        [SINKS[name](folder, label, {**(table or {}), "seed": s}) for label, s in zip(labels, seeds, strict=True)]
    )
    try:
        yield logger
    finally:
        logger.close()


@contextmanager
def every(
    names: Sequence[str],
    folder: Path,
    table: Mapping[str, Any],
    seeds: Sequence[int],
    own: Callable[[Row], None] | None,
) -> Iterator[Callable[[Row], None]]:
    """One `on_row` for several loggers and the caller's own."""
    with ExitStack() as stack:
        found: list[Callable[[Row], None]] = [stack.enter_context(opened(n, folder, table, seeds)) for n in names]
        found += [] if own is None else [own]

        def seen(row: Row) -> None:
            for each in found:
                each(row)

        yield seen
