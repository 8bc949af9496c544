"""A result: what it tells, what it saves, and what `load` reads back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedspan
from fedspan.core.errors import FedspanError, SpecError
from support.loops import RUN as TABLE
from support.loops import Interrupt

DIGITS: dict[str, Any] = {
    "rounds": 2,
    "method": {"name": "fedavg", "lr": 0.1, "local_steps": 1},
    "task": {
        "name": "classification",
        "data": "digits",
        "partition": {"name": "iid", "clients": 3},
    },
}


def test_a_result_tells_its_run() -> None:
    result = fedspan.run(TABLE | {"eval_every": 10})
    assert (result.status, result.finished, result.seeds) == ("finished", True, (0,))
    assert [line["round"] for line in result.history] == [0, 10, 20, 30]
    assert result.metrics == ["rel_err", "loss"]
    assert result.best == min(result.history, key=lambda line: line["rel_err"])
    assert result.up_bytes == result.history[-1]["up_bytes"] == 30 * 3 * 24 * 8
    assert result.run_dir is None
    assert repr(result).startswith("Result(finished, 30 rounds, rel_err=")
    assert fedspan.Spec.from_table(result.spec) == fedspan.Spec.from_table(
        TABLE | {"eval_every": 10}
    )


def test_a_notebook_shows_method_settings_and_evaluations() -> None:
    method = {"name": "ssf", "lr": 0.02, "rank": 3, "local_steps": 10}
    result = fedspan.run(TABLE | {"eval_every": 10, "method": method})
    shown = result._repr_html_()
    assert "<p>ssf, finished; lr 0.02, local_steps 10, space.rank 3</p>" in shown
    heads, *rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>.*?</tr>", shown)]
    assert heads == ["round", "up_bytes", "down_bytes", "rel_err", "loss"]
    assert [row[:2] for row in rows] == [
        [str(line["round"]), str(line["up_bytes"])] for line in result.history
    ]
    assert "<td>seed</td>" in fedspan.run(TABLE | {"rounds": 2}, seeds=2)._repr_html_()


def test_several_seeds_say_which() -> None:
    result = fedspan.run(TABLE | {"rounds": 2, "seed": 3}, seeds=2)
    assert result.seeds == (3, 4)
    assert [(line["seed"], line["round"]) for line in result.history] == [
        (s, t) for s in (3, 4) for t in range(3)
    ]
    assert result.up_bytes == 2 * result.runs[0][-1]["up_bytes"]
    assert len(result.weights) == 2


def test_a_diverged_run_keeps_its_last_finite_model() -> None:
    table = TABLE | {"method": TABLE["method"] | {"lr": 50.0}}
    with pytest.warns(
        UserWarning,
        match="diverged at round .*; try a smaller lr; the result holds the model of the last",
    ):
        result = fedspan.run(table)
    last = result.history[-1]
    assert result.status == f"diverged at round {last['round']}"
    assert result.finished
    assert last["diverged"] is True
    assert result.weights[0]["X"].isfinite().all()


def test_pandas_and_plots() -> None:
    pd = pytest.importorskip("pandas")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    result = fedspan.run(TABLE | {"rounds": 2}, seeds=2)
    frame = result.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame["seed"]) == [0, 0, 0, 1, 1, 1]
    for x, name in (
        ("round", "rounds"),
        ("up_bytes", "bytes up"),
        ("total_bytes", "bytes up and down"),
    ):
        ax = result.plot(x=x)  # type: ignore[arg-type]
        assert (ax.get_xlabel(), ax.get_ylabel(), len(ax.lines)) == (name, "rel_err", 2)
        matplotlib.pyplot.close(ax.figure)
    last = result.runs[0][-1]
    assert ax.lines[0].get_xdata()[-1] == last["up_bytes"] + last["down_bytes"]
    with pytest.raises(SpecError, match="`x` must be one of"):
        result.plot(x="bytes")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="`metric` must be one of loss, rel_err"):
        result.plot(metric="accuracy")


@pytest.mark.parametrize("seeds", [1, 2])
def test_what_is_saved_is_loaded(seeds: int, tmp_path: Path) -> None:
    result = fedspan.run(TABLE | {"rounds": 2}, seeds=seeds)
    again = fedspan.load(result.save(tmp_path / "saved"))
    assert (again.seeds, again.runs, again.statuses) == (result.seeds, result.runs, result.statuses)
    assert again.spec == result.spec
    for a, b in zip(again.weights, result.weights, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    if seeds > 1:
        with pytest.raises(SpecError, match="weights of 2 seeds"):
            result.save(tmp_path / "model.safetensors")


def test_a_run_directory_is_loaded(tmp_path: Path) -> None:
    result = fedspan.run(DIGITS, tmp_path / "o")
    found = {path.name for path in (tmp_path / "o").iterdir()}
    assert {
        "spec.toml",
        "history.jsonl",
        "model.safetensors",
        "clients.csv",
        "result.json",
    } <= found
    assert {"model.json", "checkpoint.safetensors"} <= found
    assert result.model is not None
    fresh = fedspan.run(DIGITS | {"rounds": 1}).model
    assert fresh is not None
    again = fedspan.load(tmp_path / "o", fresh)
    assert again.model is fresh
    assert again.history == result.history
    for name, value in result.model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    with pytest.raises(FedspanError, match="`model` is not the one that was trained"):
        fedspan.load(tmp_path / "o", nn.Linear(2, 2))
    with pytest.raises(FedspanError, match="holds no run"):
        fedspan.load(tmp_path)


def test_seeds_that_cannot_be_batched_are_told_apart(tmp_path: Path) -> None:
    """The first seed finishes, the second is interrupted; then both go on."""

    class Second(Interrupt):
        def on_round_end(self, run: Any) -> None:
            if run.seeds == (1,):
                super().on_round_end(run)

    whole = fedspan.run(DIGITS, seeds=2)
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(DIGITS, tmp_path / "o", seeds=2, callbacks=[Second(1)])
    cut = fedspan.load(tmp_path / "o")
    assert cut.statuses == ["finished", "interrupted"]
    assert cut.status == "seed 0 finished; seed 1 interrupted"
    assert not cut.finished
    done = fedspan.run(DIGITS, tmp_path / "o", seeds=2, resume=True)
    assert done.status == fedspan.load(tmp_path / "o").status == "finished"
    for a, b in zip(done.weights, whole.weights, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_finished_run_that_is_resumed_is_loaded(tmp_path: Path) -> None:
    first = fedspan.run(TABLE, tmp_path / "o")
    before = {path.name: path.read_bytes() for path in (tmp_path / "o").iterdir()}
    assert fedspan.run(TABLE, tmp_path / "o", resume=True).history == first.history
    assert {path.name: path.read_bytes() for path in (tmp_path / "o").iterdir()} == before
    with pytest.raises(SpecError, match="already holds a run"):
        fedspan.run(TABLE, tmp_path / "o")
    with pytest.raises(SpecError, match="`resume` needs the `run_dir`"):
        fedspan.run(TABLE, resume=True)
