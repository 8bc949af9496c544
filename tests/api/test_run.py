"""`fedspan.run`: what it writes, divergence as a result, seeds, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from fedspan import Spec, run
from fedspan.core.errors import CheckpointError, FedspanError, SpecError
from fedspan.engine import history
from support.commands import rows, spec_file


def test_rows_and_files(tmp_path: Path) -> None:
    run(Spec.load(spec_file(tmp_path), ("method.lr=0.02", "task.het=0.1")), tmp_path / "o")
    header, found = history.read(tmp_path / "o" / "history.jsonl")
    assert header["spec"]["method"]["lr"] == 0.02
    assert header["spec"]["task"] | {"het": 0.1, "clients": 20} == header["spec"]["task"]
    assert set(header["versions"]) == {"fedspan", "python", "torch", "numpy"}
    assert [row["round"] for row in found] == [0, 10, 20, 30, 40]
    for row in found:
        assert {"round", "up_bytes", "down_bytes", "seconds", "rel_err", "loss"} <= set(row)
    assert found[0]["rel_err"] == 1.0
    assert found[-1]["rel_err"] < 1
    assert found[-1]["up_bytes"] == 40 * 10 * (20 * 10 + 2) * 4
    model = safetensors.torch.load((tmp_path / "o" / "model.safetensors").read_bytes())
    assert model["X"].shape == (10, 100)
    clients = (tmp_path / "o" / "clients.csv").read_text().splitlines()
    assert len(clients) == 21
    assert sum(int(line.split(",")[1]) for line in clients[1:]) == found[-1]["up_bytes"]
    written = Spec.load(tmp_path / "o" / "spec.toml")
    assert written.table() == header["spec"]


def test_seeds_at_once_are_the_seeds_one_by_one(tmp_path: Path) -> None:
    spec = Spec.load(spec_file(tmp_path))
    run(spec, tmp_path / "many", seeds=2)
    for seed in (3, 4):
        table = spec.table() | {"seed": seed}
        run(Spec.from_table(table), tmp_path / f"one{seed}")
        many, one = rows(tmp_path / "many" / f"seed-{seed}"), rows(tmp_path / f"one{seed}")
        np.testing.assert_allclose(
            [r["rel_err"] for r in many], [r["rel_err"] for r in one], rtol=1e-4
        )
        assert [r["down_bytes"] for r in many] == [r["down_bytes"] for r in one]


def test_divergence_is_a_result(tmp_path: Path) -> None:
    spec = Spec.load(spec_file(tmp_path, 400), ("method.lr=5.0",))
    with pytest.warns(UserWarning, match="try a smaller lr"):
        result = run(spec, tmp_path / "o")
    found = rows(tmp_path / "o")
    assert found[-1]["diverged"] is True
    assert found[-1]["round"] < 400
    assert result.status == f"diverged at round {found[-1]['round']}"
    for line in (tmp_path / "o" / "history.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    longer = run(
        Spec.load(spec_file(tmp_path, 800), ("method.lr=5.0",)), tmp_path / "o", resume=True
    )
    assert longer.status == result.status
    assert rows(tmp_path / "o") == found


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    spec = Spec.load(spec_file(tmp_path))
    run(spec, tmp_path / "o")
    before = {p.name: p.read_bytes() for p in (tmp_path / "o").iterdir()}
    with pytest.raises(SpecError, match="already holds a run"):
        run(spec, tmp_path / "o")
    other = Spec.load(spec_file(tmp_path), ("method.lr=0.5",))
    with pytest.raises(CheckpointError, match=r"method.lr = 0.01, not 0.5"):
        run(other, tmp_path / "o", resume=True)
    with pytest.raises(CheckpointError, match="seeds"):
        run(spec, tmp_path / "o", resume=True, seeds=2)
    assert {p.name: p.read_bytes() for p in (tmp_path / "o").iterdir()} == before


def npz(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def test_own_data(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    a = rng.normal(size=(5, 30, 8))
    b = a @ rng.normal(size=(5, 8, 2))
    changes = (
        "batch_size=full",
        f"task.data={npz(tmp_path / 'own.npz', A=a, B=b)}",
        "clients_per_round=2",
        "method.space.rank=0.5",
    )
    result = run(Spec.load(spec_file(tmp_path, 2000), changes), tmp_path / "o")
    assert result.history[-1]["rel_err"] < 1e-4


BAD_DATA = {
    "no B": ({"A": np.ones((2, 3, 4))}, "has no array 'B'"),
    "flat": ({"A": np.ones((2, 3)), "B": np.ones((2, 3, 1))}, "must be (N, n, d) and (N, n, m)"),
    "other n": (
        {"A": np.ones((2, 3, 4)), "B": np.ones((2, 4, 1))},
        "must be (N, n, d) and (N, n, m)",
    ),
    "nan": ({"A": np.full((2, 3, 4), np.nan), "B": np.ones((2, 3, 1))}, "not finite"),
    "counts": (
        {"A": np.ones((2, 3, 4)), "B": np.ones((2, 3, 1)), "n": np.array([3, 9])},
        "from 1 to 3",
    ),
    "pickle": ({"A": np.array([{}], object), "B": np.ones((2, 3, 1))}, "cannot be read"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data_is_named(name: str, tmp_path: Path) -> None:
    arrays, words = BAD_DATA[name]
    spec = Spec.load(spec_file(tmp_path), (f"task.data={npz(tmp_path / 'd.npz', **arrays)}",))
    with pytest.raises(FedspanError) as error:
        run(spec, tmp_path / "o")
    assert words in str(error.value)
    assert not (tmp_path / "o").exists()


def test_a_spec_survives_toml(tmp_path: Path) -> None:
    spec = Spec.load(spec_file(tmp_path))
    assert Spec.from_table(tomllib.loads(spec.toml())) == spec


def test_compressors_inside_compressors_survive_toml(tmp_path: Path) -> None:
    """Tables inside tables, in a file and on the command line."""
    inner, outer = (
        {"name": "topk", "k": 0.2},
        {"name": "qsgd", "bits": 5, "bucket": 8, "unbiased": False},
    )
    changes = (
        'method={name="ef", lr=0.01, local_steps=2}',
        'method.uplink.compressor={name="compose", outer={name="qsgd", bits=5, bucket=8, unbiased=false}}',
        'method.uplink.compressor.inner={name="topk", k=0.2}',
    )
    spec = Spec.load(spec_file(tmp_path), changes)
    assert spec.table()["method"]["uplink"]["compressor"] == {
        "name": "compose",
        "outer": outer,
        "inner": inner,
    }
    assert Spec.from_table(tomllib.loads(spec.toml())) == spec
    with pytest.raises(SpecError, match=r"compressor\.inner\.k` must be"):
        Spec.load(spec_file(tmp_path), (*changes, "method.uplink.compressor.inner.k=true"))


def test_import_is_quick() -> None:
    """`import fedspan` must not load torch."""
    code = "import sys, fedspan; print(sorted({'torch', 'numpy', 'typer', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
