"""Runs that stop and go on, and checkpoints that are whole or refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan import Spec, load, run
from fedspan.core import checkpoint
from fedspan.core.errors import CheckpointError, FedspanError
from fedspan.engine import run_dir as folder
from support.commands import rows, spec_file
from support.loops import Interrupt

# A run whose checkpoints come often enough to be caught between two of them.
SLOW = """
import sys, torch, fedspan, fedspan.engine.run_dir as f
torch.set_num_threads(1)
f.RunFiles.seconds = 0.3
result = fedspan.run(fedspan.Spec.load(sys.argv[1], ("rounds=100000",)), sys.argv[3], seeds=int(sys.argv[2]))
sys.exit(0 if result.finished else 143)
"""


def reached(saved: Path) -> int:
    """The round of a checkpoint that another process may just be putting in place of the last."""
    try:
        return int(checkpoint.load(saved)[1]["round"])
    except CheckpointError:
        return 0


@pytest.mark.skipif(os.name != "posix", reason="no signals between processes")
@pytest.mark.parametrize(("name", "seeds"), [("SIGINT", 2), ("SIGTERM", 1), ("SIGKILL", 2)])
def test_a_stopped_run_resumes_to_the_same_bits(name: str, seeds: int, tmp_path: Path) -> None:
    """Another process is stopped; this one resumes its run, and runs the same without a stop."""
    sign = getattr(signal, name)
    spec, cut, whole = spec_file(tmp_path), tmp_path / "cut", tmp_path / "whole"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, spec, str(seeds), cut],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first = cut / ("history.jsonl" if seeds == 1 else "seed-3/history.jsonl")
    deadline = time.monotonic() + 300
    saved = cut / folder.CHECKPOINT
    while time.monotonic() < deadline and process.poll() is None:
        if first.exists() and reached(saved) > 0:
            break
        time.sleep(0.02)
    process.send_signal(sign)
    assert process.wait(300) == -sign
    assert load(cut).status == "interrupted"
    stopped_at = checkpoint.load(saved)[1]["round"]
    assert stopped_at > 0
    until = Spec.load(spec, (f"rounds={stopped_at // 10 * 10 + 20}",))
    assert run(until, cut, seeds=seeds, resume=True).finished
    run(until, whole, seeds=seeds)
    for part in ["."] if seeds == 1 else ["seed-3", "seed-4"]:
        assert rows(cut / part) == rows(whole / part)
        assert (
            len({(place / part / "model.safetensors").read_bytes() for place in (cut, whole)}) == 1
        )


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    path = spec_file(tmp_path)
    short, long = (Spec.load(path, (f"rounds={n}",)) for n in (25, 60))
    run(long, tmp_path / "long")
    run(short, tmp_path / "grown")
    run(long, tmp_path / "grown", resume=True)
    grown, whole = rows(tmp_path / "grown"), rows(tmp_path / "long")
    assert [row for row in grown if row["round"] != 25] == whole
    assert run(long, tmp_path / "grown", resume=True).finished  # nothing left to do
    (tmp_path / "grown" / folder.CHECKPOINT).unlink()  # to save disk
    with pytest.raises(CheckpointError, match="finished after 60 rounds and has no checkpoint"):
        run(Spec.load(path, ("rounds=80",)), tmp_path / "grown", resume=True)
    assert rows(tmp_path / "grown") == grown


def test_a_run_with_a_schedule_resumes_to_the_same_bits_but_not_to_another_length(
    tmp_path: Path,
) -> None:
    """Its first rounds would have had other steps."""
    spec = Spec.load(spec_file(tmp_path), ("method.schedule=cosine", "rounds=30"))
    run(spec, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(spec, tmp_path / "cut", callbacks=[Interrupt(13)])
    with pytest.raises(
        CheckpointError, match="made with rounds = 30, not 60; its schedule spans the run; keep"
    ):
        run(replace(spec, rounds=60), tmp_path / "cut", resume=True)
    run(spec, tmp_path / "cut", resume=True)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


def test_a_cut_last_line_is_dropped(tmp_path: Path) -> None:
    spec = Spec.load(spec_file(tmp_path))
    run(spec, tmp_path / "o")
    path = tmp_path / "o" / "history.jsonl"
    before = rows(tmp_path / "o")
    path.write_text(path.read_text("utf-8")[:-25], "utf-8")
    assert rows(tmp_path / "o") == before[:-1]
    path.write_text(path.read_text("utf-8").replace('"round": 20', '"round": '), "utf-8")
    with pytest.raises(CheckpointError, match="line 4"):
        rows(tmp_path / "o")


@settings(max_examples=25, deadline=None)
@given(place=st.floats(0, 1), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_checkpoint_is_refused(
    place: float, value: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("c") / "c.safetensors"
    arrays = {"a": torch.arange(50.0), "b": torch.arange(4), "none": torch.zeros(0, 3)}
    checkpoint.save(path, arrays, {"round": 7})
    data = bytearray(path.read_bytes())
    where = int(place * (len(data) - 1))
    if cut:
        damaged = bytes(data[:where])
    else:
        if data[where] == value:
            return
        data[where] = value
        damaged = bytes(data)
    path.write_bytes(damaged)
    try:
        found, meta = checkpoint.load(path)
    except CheckpointError:
        return
    # The byte carried nothing, such as a space of the header: then nothing may be lost.
    assert meta == {"round": 7}
    assert all(torch.equal(found[name], arrays[name]) for name in arrays)


def test_a_checkpoint_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, {"a": torch.ones(3)}, {"round": 1})

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(FedspanError, match="disk full"):
        checkpoint.save(path, {"a": torch.zeros(3)}, {"round": 2})
    monkeypatch.undo()
    assert checkpoint.load(path)[1] == {"round": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_run_killed_before_its_first_row_can_be_resumed(tmp_path: Path) -> None:
    spec = Spec.load(spec_file(tmp_path))
    run(spec, tmp_path / "whole")

    def die(*_: Any) -> None:
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "JsonLog", die)
        with pytest.raises(SystemExit):
            run(spec, tmp_path / "cut")
    assert not (tmp_path / "cut" / "history.jsonl").exists()
    run(spec, tmp_path / "cut", resume=True)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
