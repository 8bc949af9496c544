"""`fit`: a torch model and its clients' data to a result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from fedspan.api.run import run
from fedspan.core import registry, tables
from fedspan.core.callback import Callback
from fedspan.core.config import Engine, Participation, Projection, Training
from fedspan.core.errors import SpecError, did_you_mean, shown
from fedspan.core.federation import Federation
from fedspan.core.method import Method
from fedspan.core.privacy import Privacy
from fedspan.core.spec import Spec
from fedspan.engine.result import Result
from fedspan.nn.batches import Loss
from fedspan.nn.problem_kind import OutputLoss
from fedspan.tasks._module import Material
from fedspan.tasks.custom import Custom

CONFIGS: dict[str, type] = {
    "training": Training, "participation": Participation, "projection": Projection, "engine": Engine,
    "privacy": Privacy, "federation": Federation,
}  # fmt: skip
NOT_NONE = ("method", "rounds", "metrics", "callbacks")


def check_names(given: Mapping[str, Any], known: Collection[str], method: Method) -> None:
    """Refuses arguments that do not exist, and names the place of a setting that belongs elsewhere."""
    more = [name for name in given if name not in known]
    for place, home in {"": type(method), **CONFIGS}.items():
        own = {field.name for field in registry.settings(home)}
        if more and more[0] in own:
            both = ", ".join(f"{key}={shown(given[key])}" for key in more if key in own)
            where = f"`{place}`: give {place}=" if place else "the method: give "
            raise SpecError(f"`{more[0]}` is a setting of {where}{home.__name__}({both})")
    for name in more[:1]:
        raise SpecError(f"there is no argument {name!r}{did_you_mean(name, known)}")


def fit(
    model: nn.Module,
    clients: Sequence[Any] | Mapping[str, Any],
    loss: OutputLoss | None = None,
    *,
    method: Method | str | Mapping[str, Any] = "ssf",
    rounds: int = 100,
    batch_size: int | Literal["full"] | None = None,
    epochs: float | None = None,
    clients_per_round: int | None = None,
    device: str = "auto",
    seed: int = 0,
    seeds: int = 1,
    test: Any = None,
    validation: Any = None,
    metrics: Sequence[Any] | Callable[..., Any] | str = (),
    eval_every: int = 1,
    eval_clients_every: int | None = None,
    objective: Loss | None = None,
    training: Training | None = None,
    participation: Participation | None = None,
    projection: Projection | None = None,
    engine: Engine | None = None,
    privacy: Privacy | None = None,
    federation: Federation | None = None,
    callbacks: Sequence[Callback | str] | Callback | str = (),
    run_dir: Path | str | None = None,
    resume: bool = False,
    progress: bool = True,
    **unknown: Any,
) -> Result:
    """Trains a model over clients.

    Args:
        model: Any `torch.nn.Module` or Hugging Face model. It gets the trained weights.
        clients: The data of each client, as a list or as a dictionary of name → data. Data is a pair
            (inputs, targets) of tensors, arrays or lists, a table with a target column, a Dataset or a DataLoader; for
            a Hugging Face model a mapping of token columns, a `datasets.Dataset`, a table, or a list of rows. A client
            may be a dictionary with "train" and "test" (or "validation"), each of them such data. Of more than 10,000
            clients each one's data is read and checked when it first takes part. They may be any sequence; its
            attribute `sizes`, the numbers of examples, spares reading all of it where these are needed as weights.
        loss: `loss(outputs, targets)`, the mean over a batch. By default, integer targets are classes (cross-entropy),
            or yes and no where the model has one output per target (binary cross-entropy with logits). A Hugging Face
            model uses its own.
        method: A method such as `SSF(rank=0.2)`, or its name.
        rounds: Number of rounds.
        batch_size: Examples per local step, or "full"; 32 by default. A DataLoader keeps its own batches.
        epochs: Local steps as passes over the mean client's examples, or over each client's own with
            `training=Training(per_client=True)`; replaces the method's `local_steps`.
        clients_per_round: Clients that take part in a round; by default all.
        device: "auto", "cpu", or a torch device such as "cuda:0".
        seed: Decides every random draw.
        seeds: Number of runs, with consecutive seeds; the model gets the weights of the first.
        test: Data that the model is evaluated on.
        validation: Data by which the best model, early stopping and `lr = "search"` are chosen, so that `test` stays
            clean. Without it the first two go by `test`, and the search by the clients' training loss. Its metrics are
            reported as `validation_…`.
        metrics: Names of metrics such as "accuracy" or "auroc", or functions of (outputs, targets); one or several.
        eval_every: Rounds between two evaluations.
        eval_clients_every: Rounds between two evaluations of every client, on its own test data where it has some and
            on its training data otherwise; `result.per_client` has them. None does not evaluate clients.
        objective: `objective(model, batch)` in place of `loss`, where a batch is not (inputs, targets).
        training: Weight decay, clipping and augmentation.
        participation: How clients are weighted.
        projection: Which modules are projected, sent in full or frozen.
        engine: How the run is computed: processes, states on disk, recomputation.
        privacy: Differential privacy, `Privacy(epsilon=8, delta=1e-5, clip=1.0)`, or secure aggregation,
            `Privacy(secure=True)`, or both. None trains without.
        federation: The clients' links and devices, such as `Federation(preset="hospitals")`, by which every row of the
            history has `hours`. None counts no hours.
        callbacks: What follows the run, such as `EarlyStopping("accuracy")` or its name.
        run_dir: A directory for history, checkpoints and the model. None writes nothing.
        resume: Continue the run in `run_dir`, also a finished one to more rounds, and with another `lr`.
        progress: Print the settings and every evaluation, with a progress bar on a terminal.
        unknown: Arguments that do not exist, which are refused; the error names the place of a method's setting.

    Returns:
        The result; `result.model` is `model`.

    Raises:
        FedspanError: An argument cannot be used.
        KeyboardInterrupt: The run was interrupted by Ctrl-C; what was done so far is in `run_dir`.
        Terminated: The run was interrupted by SIGTERM in a notebook, or where SIGTERM has a handler of your own that
            returns. Otherwise the process ends by the signal.
    """
    settings = dict(locals())
    check_names(settings.pop("unknown"), settings, as_method(method))
    how = {name: settings.pop(name) for name in ("run_dir", "seeds", "resume", "progress")}
    spec, last = spec_of(**settings), _LastWeights(seed)
    # with a directory the model must be able to begin the run when it is resumed
    more = [last] if run_dir is None else []
    try:
        result = run(spec, callbacks=more, **how)
        last.weights = result.weights[0]
    finally:  # after the last seed: each of them begins with the weights that were given
        if last.weights:
            model.load_state_dict(last.weights)
    result.module = model.eval()
    return result


class _LastWeights(Callback):
    """Holds what the first seed has trained, also when an error ends its run."""

    def __init__(self, seed: int) -> None:
        self.seed, self.weights = seed, dict[str, torch.Tensor]()

    def on_run_end(self, run: Any, result: Result | None = None) -> None:
        weights = run.state_dict() if result is None else result.weights[0]
        finite = all(torch.isfinite(value).all() for value in weights.values())
        if run.seeds[0] == self.seed and (result is not None or (run.t and finite)):
            self.weights = weights

    on_run_error = on_run_end


def spec_of(
    model: nn.Module,
    clients: Sequence[Any] | Mapping[str, Any],
    loss: OutputLoss | None = None,
    *,
    test: Any = None,
    validation: Any = None,
    objective: Loss | None = None,
    **settings: Any,
) -> Spec:
    """The spec of a call of `fit`; `settings` are fields of `Spec`, of which None takes the default."""
    own = {name: one for name, one in settings.items() if one is not None or name in NOT_NONE}
    if loss is not None and objective is not None:
        raise SpecError(
            "`loss` and `objective` are two ways to say what is minimized; give one of them"
        )
    given = Material.of(
        model, clients, test=test, validation=validation, loss=loss, objective=objective
    )
    usual: dict[str, Any] = {"method": "ssf", "rounds": 100}
    spec = Spec(**usual | own | {"task": Custom(objects=given)})
    if (spec.clients_per_round or 0) > len(given.clients):
        raise SpecError(
            f"`clients_per_round` is {spec.clients_per_round}, but there are {len(given.clients)} clients"
        )
    if spec.metrics and test is None and validation is None:
        parts = [set(data) for data in given.at_hand if isinstance(data, Mapping)]
        if not any("train" in one and one & {"test", "validation"} for one in parts):
            raise SpecError("`metrics` need data to be measured on; give `test` or `validation`")
        if spec.eval_clients_every is None:
            raise SpecError(
                "`metrics` need `eval_clients_every` to be measured on the clients' own test data; give it, or `test`"
            )
    for number, data in enumerate(given.at_hand if "batch_size" in own else ()):
        data = data.get("train") if isinstance(data, Mapping) else data
        size = data.batch_size if isinstance(data, DataLoader) else None
        if size not in (None, spec.batch_size):
            raise SpecError(
                f"`batch_size` is {spec.batch_size!r}, but the DataLoader of {given.who(number)} has {size}; leave out "
                "`batch_size` to keep the loader's"
            )
    return spec


def as_method(given: Method | str | Mapping[str, Any]) -> Method:
    """A method from what a user gives: a value, a name, or a table with a name."""
    made: Method = tables.build("method", given)
    return made
