"""`fit`: the front door for a torch model and its clients' data.

The user's module is copied, trained, and given back with the new weights under its own `state_dict` keys.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedspan.core import registry
from fedspan.core.config import Augment, Engine, Participation, Settings, Training
from fedspan.core.errors import SpecError, at_least, one_of
from fedspan.core.method import Method
from fedspan.core.task import Weights
from fedspan.engine.history import Line
from fedspan.engine.loop import Loop, Row, over_epochs
from fedspan.engine.run_dir import execute
from fedspan.engine.simulator import Simulate, Simulator
from fedspan.nn.client_data import Loss
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import MIN_NUMEL, ProjectionRule, projection_rules, summary
from fedspan.tasks._model_adapter import OutputLoss, model_adapter
from fedspan.theory.diagnostics import observe


@dataclass(frozen=True, eq=False)
class Fit:
    """What training came to."""

    model: nn.Module  # the caller's own module with the weights asked for by `keep`
    rows: list[Line]  # one a scored round, as in history.jsonl
    best: Line | None  # the row with the best score, where there is a test set
    finished: bool
    choices: list[ProjectionRule]

    def summary(self) -> str:
        """Which tensors were projected and which went whole."""
        return summary(self.choices)


def fit(
    model: nn.Module,
    clients: Sequence[Any],
    loss: OutputLoss | None = None,
    *,
    method: Method[Any, Any, Any, Any],
    rounds: int,
    batch: int = 32,
    epochs: float | None = None,
    clients_per_round: int | None = None,
    test: Any = None,
    eval_every: int = 1,
    weights: Weights = "uniform",
    seed: int = 0,
    weight_decay: float = 0.0,
    clip: float | None = None,
    augment: Augment | None = None,
    objective: Loss | None = None,
    whole: Sequence[str] = (),
    project: Sequence[str] = (),
    least: int = MIN_NUMEL,
    freeze: Sequence[str] = (),
    keep: Literal["last", "best"] = "last",
    patience: int | None = None,
    device: str = "cpu",
    recompute: bool = False,
    simulate: Simulate = "auto",
    states: Path | str | None = None,
    states_dtype: Literal["float32", "bfloat16"] = "float32",
    compact_states: bool = False,
    diagnostics: bool = False,
    out: Path | str | None = None,
    resume: bool = False,
    on_row: Callable[[Row], None] | None = None,
) -> Fit:
    """Train `model` over `clients`, each (inputs, targets), a Dataset or a DataLoader.

    `loss(outputs, targets)` scores a batch, cross-entropy unless it is given; `objective(model, batch)` replaces it
    where a batch is something else. A Hugging Face model with neither is trained by its own loss, on tokenized text:
    a mapping of columns such as input_ids, attention_mask and labels, a `datasets.Dataset`, or a list of rows.
    `epochs` sets the local steps to so many passes over the mean client's examples, the same number for all.
    `test` is scored every `eval_every` rounds: `loss`, and `accuracy` where targets are classes. `keep = "best"`
    returns the weights of the best-scored round; `patience` rows without a better one end the run. `whole` and
    `project` name tensors (patterns such as "blocks.*.weight") to train whole or inside the subspace, `freeze` those
    to leave as they are, as `requires_grad_(False)` does. `states` names a folder for the clients' states, so that
    memory holds only those of the cohort; in bfloat16 they take half the disk. `trail` keeps them in memory as the r
    numbers of each round a client took part in, as long as these are fewer than a state (`ssf`). `simulate` says how a
    cohort is worked through: client by client, batched, or on processes; `auto` times them where the run is long
    enough. `diagnostics` adds the gradient norm, drift and the controls' error to every row, at the price of a pass
    over all data a row. `recompute` makes outputs of covered layers again that the backward pass would keep: less
    memory for more time, and the same bits. With `out` the run is written to a folder as `fedspan run` does, and
    `resume` goes on with it.
    `on_row` is called with every row as it comes; a logger of `fedspan.callbacks.loggers` is such a function.
    """
    at_least("rounds", rounds, 1)
    at_least("batch", batch, 1)
    at_least("eval_every", eval_every, 1)
    one_of("keep", keep, ("last", "best"))
    if (keep == "best" or patience is not None) and test is None:
        raise SpecError("`keep = 'best'` and `patience` need a `test` set to score")
    trained = copy.deepcopy(model)
    settings = Settings(
        batch_size=batch,
        device=device,
        training=Training(weight_decay=weight_decay, clip=clip, augment=augment),
        participation=Participation(weights=weights),
        engine=Engine(recompute=recompute),
    )
    choices = projection_rules(trained, project, whole, freeze, least)
    adapter = model_adapter(trained, settings, loss, objective)
    sources = [adapter.client_data(data, f"client {number}") for number, data in enumerate(clients)]
    problem = TorchProblem(
        trained,
        sources,
        adapter.objective,
        choices,
        settings,
        seed=seed,
        evaluate=adapter.evaluator(test),
    )
    method = over_epochs(method, problem, epochs)
    one_of("states_dtype", states_dtype, ("float32", "bfloat16"))
    folder = None if states is None else Path(states)
    if compact_states and folder is not None:
        raise SpecError("`trail` keeps states in memory and `states` on disk; give one of them")
    clients_end = Simulator(method, problem, folder, states_dtype, resume, simulate, rounds, compact_states)
    watched = observe if diagnostics else None
    loop = Loop(method, problem, clients_end, (seed,), clients_per_round or problem.clients, observe=watched)
    watch = _Watch(loop, patience)
    table = {
        "rounds": rounds, "eval_every": eval_every, "seed": seed, "method": registry.describe(method),
        "model": {"layout": problem.layout.fingerprint, "numbers": problem.layout.size},
        "data": {"clients": problem.clients, "examples": sum(len(s) for s in sources), "batch": batch},
        "participation": {"clients_per_round": loop.clients_per_round, "weights": weights},
    }  # fmt: skip

    def seen(row: Row) -> None:
        watch(row)
        if on_row is not None:
            on_row(row)

    with tempfile.TemporaryDirectory() as nowhere, clients_end:
        result = execute(
            loop, table, Path(out) if out is not None else Path(nowhere) / "run", resume=resume, on_row=seen
        )
    x, buffers = (
        (watch.x, watch.buffers)
        if keep == "best" and watch.x is not None
        else (method.model(loop.server), loop.buffers)
    )
    problem.release()
    problem.module.load(x)
    problem.write_buffers(buffers)
    model.load_state_dict(problem.model.state_dict())
    return Fit(model, result.rows[0], watch.line(result.rows[0]), result.finished or watch.ended, choices)


class _Watch:
    """Remembers the best model and ends a run that no longer improves."""

    def __init__(self, loop: Loop, patience: int | None) -> None:
        self.loop, self.patience = loop, patience
        self.best, self.round, self.waited, self.ended = -float("inf"), -1, 0, False
        self.x: torch.Tensor | None = None
        self.buffers: torch.Tensor | None = None

    def __call__(self, row: Row) -> None:
        if "accuracy" not in row.metrics and "loss" not in row.metrics:
            return
        score = float(row.metrics["accuracy"][0] if "accuracy" in row.metrics else -row.metrics["loss"][0])
        if score > self.best:
            self.best, self.round, self.waited = score, row.round, 0
            self.x, self.buffers = self.loop.method.model(self.loop.server), self.loop.buffers
            return
        self.waited += 1
        if self.patience is not None and self.waited >= self.patience:
            self.loop.stop = self.ended = True

    def line(self, rows: list[Line]) -> Line | None:
        return next((row for row in rows if row["round"] == self.round), None)
