"""Arguments of a wrong type or size end in one line that names them, before anything is computed or written."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedspan
from fedspan.core import config, registry
from fedspan.core.errors import FedspanError
from fedspan.data.user_tables import OwnData

NAN = float("nan")
SPEC: dict[str, Any] = {
    "rounds": 2,
    "batch_size": "full",
    "method": {"name": "fedavg", "lr": 0.01},
    "task": {"name": "regression", "dim": 6, "clients": 4, "samples": 8},
}


def spec(**changes: Any) -> dict[str, Any]:
    table = copy.deepcopy(SPEC)
    for key, value in changes.items():
        table[key] = table[key] | value if key == "task" else value
    return table


def data(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(8, 3, generator=draw) for _ in range(3)]
    return [(one, (one[:, 0] > 0).long()) for one in inputs]


def run(*given: Any, **settings: Any) -> Any:
    return fedspan.run(*given, progress=False, **settings)


def fit(**settings: Any) -> Any:
    usual: dict[str, Any] = {
        "method": {"name": "fedavg", "lr": 0.1},
        "rounds": 2,
        "test": data(1)[0],
    }
    return fedspan.fit(nn.Linear(3, 2), data(), **{"progress": False} | usual | settings)


def compare(**settings: Any) -> Any:
    return fedspan.compare(["fedavg"], spec(), **{"seeds": 1} | settings)


def tune(grid: Any) -> Any:
    return fedspan.tune("fedavg", spec(), tune=grid)


def propose(**settings: Any) -> Any:
    return fedspan.tune("fedavg", spec(), **{"budget": "rounds=9"} | settings)


class Unshown:
    """An object whose own repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError


def refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(FedspanError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    assert words in text
    assert not list(Path.cwd().iterdir())


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


CALLS: list[tuple[Callable[[Any], Any], list[Any], str]] = [
    (fedspan.diagnose, [None, 3, [], b"x"], "`spec` must be"),
    (fedspan.plan, [None, 3, [], b"x"], "`source` must be"),
    (lambda v: fedspan.plan(spec(), methods=v), ["ssf", [], 3, [3], ["nope"]], "`methods`"),
    (lambda v: fedspan.plan(spec())[v], ["nope", 3], "`method` must be one of"),
    (lambda v: compare(tail=v), ["a", NAN, -1, 0, 2.5, True, None, []], "`tail`"),
    (
        lambda v: compare(budget=v),
        [1, 0, True, [1], {"up": 1}, b"up=1MB", [[]]],
        "`budget` must be a text",
    ),
    (
        lambda v: compare(budget=v),
        ["rounds=٣", "rounds=0", "rounds=10000000000", "rounds=1.5"],
        "rounds",
    ),
    (lambda v: compare(budget=v), ["up=1_0MB", "up=1e400GB", "up=nanMB"], ", got '"),
    (lambda v: compare(budget=v), [["up=1MB", "up=2MB"]], "given twice"),
    (lambda v: compare(seeds=v), [0, 1.5, "a", None, True, 10**9, [1]], "`seeds`"),
    (lambda v: compare(jobs=v), [0, "a", None, 10**9], "`jobs`"),
    (lambda v: compare(tune_seeds=v), [0, "a", None, 10**9], "`tune_seeds`"),
    (lambda v: compare(goal=v), ["x", 3, []], "`goal`"),
    (lambda v: compare(metric=v), ["nope", 3, [], ""], "`metric`"),
    (lambda v: compare(training=v), [3, "a", {"nope": 1}], "training"),
    (lambda v: compare(callbacks=v), [[3], 3, "nope"], "`callbacks`"),
    (lambda v: compare(engine=v), ["pool", 3], "`engine`"),
    (
        lambda v: fedspan.compare(["fedavg"], v, seeds=1),
        [None, 3, [], nn.Linear],
        "`model` must be",
    ),
    (
        lambda v: fedspan.compare(v, spec(), seeds=1),
        [{"": "ssf"}, {"a\nb": "ssf"}, {"a" * 5000: "ssf"}],
        "label",
    ),
    (tune, [None, 1, [], {}, "lr", {1: [1]}, {"lr": None}, {"lr": b"1"}, {"fedavg": 3}], "`tune`"),
    (tune, [{"lr": range(10**6)}, {"lr": []}, {"nope": [1]}], "`tune`"),
    (lambda v: fit(device=v), [np.array([1, 2]), torch.zeros(0)], "`device`"),
    (
        lambda v: fit(engine={"simulate": v}),
        [np.array([1, 2]), Unshown(), None, 3],
        "`engine.simulate`",
    ),
    (lambda v: fit(privacy={"secure_bits": v}), [None, 16, "32"], "`privacy.secure_bits` must be"),
    (
        lambda v: fit(method={"name": "fedavg", "local_steps": v}),
        [2**70],
        "`method.local_steps` must be at most",
    ),
    (
        lambda v: fit(test=v),
        [(torch.zeros(4, 3, dtype=torch.complex64), torch.zeros(4).long())],
        "complex numbers",
    ),
    (lambda v: fit(batch_size=v), [np.array([1, 2]), torch.zeros(0), Unshown()], "`batch_size`"),
    (lambda v: fit(loss=v), [Unshown()], "`loss` must be a function"),
    (lambda v: fit(objective=v), [Unshown()], "`objective` must be a function"),
    (lambda v: compare(tune_seeds=v), [np.array([1, 2]), Unshown()], "`tune_seeds`"),
    (lambda v: compare(goal=v), [Unshown()], "`goal`"),
    (lambda v: propose(budget=v), [True, b"x", torch.zeros(0), np.array([1, 2]), [3]], "`budget`"),
    (tune, [torch.zeros(0), np.array([1, 2])], "`tune`"),
    (
        lambda v: fit(device=v),
        ["mps", "meta", [], 1, b"cpu", "cuda:99", "", "tpu", torch.device("meta")],
        "`device`",
    ),
    (lambda v: run(spec(device=v)), ["mps", "meta", [], 1, "cuda", "hpu", "auto "], "`device`"),
    (
        lambda v: fit(run_dir=v),
        [1, b"x", [], True, "", "a\0b", "x" * 5000, "x" * 300, {}],
        "`run_dir`",
    ),
    (lambda v: run(spec(), v), [1, b"x", [], True, "", "a\0b", "x" * 5000], "`run_dir`"),
    (lambda v: compare(run_dir=v), [1, b"x", "", "x" * 300], "`run_dir`"),
    (fedspan.load, [None, 1, b"x", [], "", "a\0b", "x" * 5000], "`run_dir`"),
    (fedspan.load, ["nothere", "y" * 200], "holds no run"),
    (lambda v: fit(resume=v), ["yes", 1, None], "`resume` must be True or False"),
    (lambda v: fit(progress=v), ["yes", 1, None], "`progress` must be True or False"),
    (lambda v: run(spec(batch_size=v)), [10**20, 10**12 + 1, "a", "", True, 0], "`batch_size`"),
    (lambda v: run(spec(batch_size=v)), [10**11], "needs"),
    (lambda v: run(spec(task={"clients": v})), [10**9, 10**20, 10**400], "memory"),
    (lambda v: run(spec(task={"dim": v})), [10**7, 10**9, 10**20], "memory"),
    (lambda v: fedspan.plan(spec(task={"dim": v})), [10**9], "memory"),
    (lambda v: run(spec(metrics=v)), [["accuracy"]], "`metrics` is for tasks with a torch model"),
    (
        lambda v: run(spec(training=v)),
        [{"clip": 1.0}],
        "`training` is for tasks with a torch model",
    ),
    (lambda v: fedspan.compressors.QSGD(bits=v), [10**20, 1e20, 0, 1, 2**24], "`bits`"),
    (lambda v: fedspan.optimizers.AdamW(decay=v), [1e300, -1, NAN], "`decay`"),
    (lambda v: fit(engine=fedspan.Engine(states_dir=v)), [3, [], {}], "`states_dir`"),
    (lambda v: fit(callbacks=fedspan.callbacks.EarlyStopping(v)), [3, ["a"]], "`metric`"),
    (lambda v: fit(method=v), [fedspan.methods.FedAvg], "; write FedAvg(…)"),
    (lambda v: fit(clients_per_round=v), ["a", 2.5, 0, 4, True], "`clients_per_round`"),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_wrong_arguments_are_named_in_one_line(number: int) -> None:
    call, values, words = CALLS[number]
    for value in values:
        refused(lambda value=value: call(value), words)  # type: ignore[misc]


WRONG = [None, True, "a", "", b"x", [], {}, (), 3, -1, 0.5, 1e300, NAN, 10**400, object(), ["a"], {"a": 1}, "x" * 5000,
         {"name": "nope"}, {"name": 3}, [[1]], print, type, torch.tensor(1.0), np.float64("nan"), np.int64(3)
]  # fmt: skip
CONFIGS = [config.Training, config.Participation, config.Projection, config.Engine, config.Search]
NEEDED = {"path": "a.csv", "rank": 0.5, "k": 0.5, "clients": 3, "alpha": 0.5, "module": "m.py"}


@pytest.mark.parametrize("kind", [*registry.KINDS, "config"])
def test_every_setting_takes_a_wrong_value_or_refuses_it_in_one_line(kind: str) -> None:
    classes = [*CONFIGS, OwnData] if kind == "config" else list(registry.choices(kind).values())
    seen = set()  # a field that several classes inherit is tried once
    for cls in filter(dataclasses.is_dataclass, classes):
        fields = [field for field in dataclasses.fields(cls) if field.init]
        bare = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        usual = {name: NEEDED.get(name) for name in bare}
        for field in fields:
            owner = next(
                base
                for base in cls.__mro__[::-1]
                if field.name in vars(base).get("__annotations__", {})
            )
            for value in WRONG if (owner, field.name) not in seen else ():
                told = ""
                try:
                    cls(**usual | {field.name: value})
                except FedspanError as error:
                    told = str(error)
                assert "\n" not in told
                assert len(told) < 500
            seen.add((owner, field.name))


@pytest.mark.parametrize("name", ["FedAvg", "fedAvg", "FEDAVG", "fed-avg", "fed_avg"])
def test_a_method_may_be_written_as_in_its_paper(name: str) -> None:
    assert (
        fedspan.run(spec(method={"name": name, "lr": 0.01}), progress=False).spec["method"]["name"]
        == "fedavg"
    )
    assert fit(method=fedspan.methods.FedAvg(lr=0.1), callbacks=["EarlyStopping"]).finished


def test_a_setting_in_the_wrong_place_is_told_its_place() -> None:
    refused(
        lambda: fit(lr=0.1, rank=0.2, method="ssf"),
        "`lr` is a setting of the method: give SSF(lr=0.1, rank=0.2)",
    )
    refused(lambda: fedspan.fit(nn.Linear(3, 2), data(), lr=0.1), "give SSF(lr=0.1)")  # type: ignore[call-arg]
    refused(lambda: compare(lr=0.1), "`lr` is a setting of the method: give FedAvg(lr=0.1)")
    refused(
        lambda: fit(weight_decay=0.01),
        "`weight_decay` is a setting of `training`: give training=Training(weight",
    )
    refused(lambda: fit(round=3), "there is no argument 'round' (did you mean 'rounds'?)")
    refused(
        lambda: fedspan.methods.FedAvg(learning_rate=0.1), "FedAvg has no setting 'learning_rate'"
    )  # type: ignore[call-arg]
    early: Any = fedspan.callbacks.EarlyStopping
    refused(
        lambda: early("accuracy", patence=3),
        "EarlyStopping has no setting 'patence' (did you mean 'patience'?)",
    )
