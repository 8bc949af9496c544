"""From tables to predictions: a run keeps what it takes to use its model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedspan
from fedspan.callbacks import Checkpoint
from fedspan.core.errors import FedspanError
from fedspan.methods import FedAvg
from support.patients import TABLES

RNG = np.random.default_rng(3)
ILL = {
    who: t.assign(ill=np.where(RNG.random(len(t)) < 0.4, "yes", "no")) for who, t in TABLES.items()
}
NEW = ILL["h1"].drop(columns=["ill", "note"]).head(9)
FEDAVG = FedAvg(lr=0.1, local_steps=2)


def network(data) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(data.width, 8), nn.ReLU(), nn.Linear(8, data.outputs))


def fitted(path=None, **arguments):
    data = fedspan.data.tables(ILL, "ill", categories=["ward"])
    return fedspan.fit(
        network(data), data, test=data.test, method=FEDAVG, rounds=4, eval_every=4, progress=False,
        run_dir=path, **arguments,
    )  # fmt: skip


def spec_of(folder: Path, **more) -> Path:
    for who, table in ILL.items():
        table.to_csv(folder / f"{who}.csv", index=False)
    data = "".join(f", {key} = {json.dumps(value)}" for key, value in more.items())
    (folder / "spec.toml").write_text(
        "rounds = 3\nbatch_size = 8\n[method]\nname = 'fedavg'\nlr = 0.1\nlocal_steps = 2\n[task]\n"
        f"name = 'classification'\nmodel = 'mlp'\ndata = {{ path = 'h*.csv', target = 'ill'{data} }}\n"
    )
    return folder / "spec.toml"


def test_a_loaded_model_predicts_the_same_bits(tmp_path):
    result = fitted(tmp_path / "run")
    assert not result.model.training
    p = result.predict_proba(NEW)
    result.save(tmp_path / "saved")
    for place in ("run", "saved"):
        found = fedspan.load(tmp_path / place)
        assert (found.predict_proba(NEW[list(NEW)[::-1]]) == p).all()
        assert (found.predict(NEW) == found.classes_[p.argmax(1)]).all()
    with pytest.raises(FedspanError, match="no column 'age'"):
        found.predict(NEW.drop(columns="age"))
    with pytest.raises(FedspanError, match="a column 'height' that the model does not know"):
        found.predict(NEW.assign(height=1))


def test_the_model_of_a_round_that_was_kept(tmp_path):
    result = fitted(tmp_path / "run", callbacks=[Checkpoint(every=2)])
    early, last = (fedspan.load(tmp_path / "run", round=t) for t in (2, 4))
    assert (last.predict_proba(NEW) == result.predict_proba(NEW)).all()
    assert (early.predict_proba(NEW) != result.predict_proba(NEW)).any()
    with pytest.raises(FedspanError, match="has no model of it; there are 2, 4"):
        fedspan.load(tmp_path / "run", round=3)


def test_a_model_trained_from_a_spec_predicts_on_the_command_line(tmp_path):
    spec = spec_of(tmp_path)
    result = fedspan.run(spec, tmp_path / "run", progress=False)
    NEW.to_csv(tmp_path / "new.csv", index=False)
    done = subprocess.run(
        [sys.executable, "-m", "fedspan", "predict", "run", "new.csv", "--out", "out.csv"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = pd.read_csv(tmp_path / "out.csv")
    assert np.allclose(out["probability of yes"], result.predict_proba(tmp_path / "new.csv")[:, 1])
    NEW.rename(columns={"age": "Age"}).to_csv(tmp_path / "bad.csv", index=False)
    done = subprocess.run(
        [sys.executable, "-m", "fedspan", "predict", "run", "bad.csv"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: 'bad.csv' has no column 'age' (did you mean 'Age'?)" in done.stderr
    assert not (tmp_path / "predictions.csv").exists()


def test_clients_keep_their_names_and_their_own_tests(tmp_path):
    spec = spec_of(tmp_path)
    result = fedspan.run(f"{spec}", tmp_path / "run", progress=False)
    assert (tmp_path / "run/clients.csv").read_text().splitlines()[1].startswith("h0,")
    made = fedspan.Spec.load(spec)
    problem = made.task.build((0,), made)
    assert problem.names == ("h0", "h1", "h2")
    part, evaluator = problem.client_tests(1)
    assert part == "test"
    assert len(evaluator.data) == round(0.2 * len(ILL["h1"]))
    assert "accuracy" in result.history[-1]


def test_numbers_are_predicted_with_each_clients_own_scale(tmp_path):
    spec = spec_of(tmp_path, standardize="client")
    text = (
        spec.read_text().replace("classification", "tabular_regression").replace("'ill'", "'age'")
    )
    spec.write_text(text.replace("'mlp'", "'linear'"))
    result = fedspan.run(spec, progress=False)
    new = NEW.drop(columns="age").assign(ill="yes")
    assert result.predict(new).dtype == np.float32
    assert not (result.predict(new) == result.predict(new, client="h1")).all()
    with pytest.raises(FedspanError, match="predicts numbers, not classes"):
        result.predict_proba(new)


def test_a_schema_is_part_of_a_run_and_damage_is_seen(tmp_path):
    fitted(tmp_path / "run")
    file = tmp_path / "run" / "model.json"
    file.write_text(file.read_text().replace("yes", "oui"))
    with pytest.raises(FedspanError, match=r"model\.json"):
        fedspan.load(tmp_path / "run")


def test_arrays_and_frames_without_a_schema():
    x = torch.randn(40, 3)
    y = (x[:, 0] > 0).long()
    clients = [(x[:20], y[:20]), (x[20:], y[20:])]
    result = fedspan.fit(nn.Linear(3, 2), clients, method=FEDAVG, rounds=2, progress=False)
    assert result.predict(x.numpy()).shape == (40,)
    assert set(result.classes_) == {0, 1}
    with pytest.raises(FedspanError, match="does not take rows of shape"):
        result.predict(x[:, :2])
    frame = pd.DataFrame(x.numpy(), columns=["a", "b", "c"])
    clients = [(frame[:20], y[:20]), (frame[20:], y[20:])]
    named = fedspan.fit(nn.Linear(3, 2), clients, method=FEDAVG, rounds=2, progress=False)
    assert (named.predict(frame[["c", "a", "b"]]) == named.predict(frame)).all()
    assert list(named.predictor.feature_names_in_) == ["a", "b", "c"]
    with pytest.raises(FedspanError, match="no column 'c'"):
        named.predict(frame[["a", "b"]])
