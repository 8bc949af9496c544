"""Client states on disk: the same run as in memory, little memory, and a crash at any moment loses nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedspan
from fedspan.core.config import Engine
from fedspan.core.errors import CheckpointError, SpecError
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.engine.states import InMemory, OnDisk
from support.loops import RUN, advance, model, small
from support.methods import GAUSSIAN, build


def loop_on(states_dir: Path | None, resume: bool = False, name: str = "ssf") -> Loop:
    problem, engine = small(torch.float32), Engine(simulate="loop", states_dir=states_dir)
    method = build(name, **({} if name == "scaffold" else {"projector": GAUSSIAN}))
    return Loop(method, problem, Simulator(method, problem, engine, resume=resume), (5,), 3)


@pytest.mark.parametrize("name", ["ssf", "scaffold", "fedsub"])
def test_on_disk_is_in_memory_to_the_bit(name: str, tmp_path: Path) -> None:
    disk, memory = advance(loop_on(tmp_path, name=name), 20), advance(loop_on(None, name=name), 20)
    assert torch.equal(model(disk), model(memory))
    for field, value in vars(memory.transport.clients()).items():
        assert torch.equal(getattr(disk.transport.clients(), field), value)


def test_a_run_in_float64_keeps_its_states_in_float64(tmp_path: Path) -> None:
    table = RUN | {"method": {"name": "scaffold", "lr": 0.02, "local_steps": 3}}
    disk, memory = (
        fedspan.run(table | {"engine": how}, progress=False)
        for how in ({"states_dir": tmp_path}, {})
    )
    assert all(
        torch.equal(disk.weights[0][name], value) for name, value in memory.weights[0].items()
    )


def test_a_checkpoint_leads_back_whatever_came_after(tmp_path: Path) -> None:
    """Crash after a later save whose checkpoint was never written: the older checkpoint still leads back."""
    whole = advance(loop_on(None), 30)
    first = advance(loop_on(tmp_path / "s"), 10)
    kept = {name: array.clone() for name, array in first.save().items()}
    advance(first, 7)
    first.save()  # the crash comes before this one is on disk
    advance(first, 3)
    second = loop_on(tmp_path / "s", resume=True)
    second.load(kept)
    assert second.t == 10
    assert torch.equal(model(advance(second, 20)), model(whole))
    assert torch.equal(second.transport.clients().c, whole.transport.clients().c)


def copied(states: OnDisk | InMemory) -> dict[str, torch.Tensor]:
    return {name: array.clone() for name, array in states.save().items()}


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.sampled_from(["put", "save", "crash"]), min_size=1, max_size=25),
    seed=st.integers(0, 999),
)
def test_any_order_of_writes_saves_and_crashes(
    steps: list[str], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A model of it: after a crash the rows are those of the last save whose checkpoint was written."""
    folder, rng = tmp_path_factory.mktemp("s"), np.random.default_rng(seed)
    first = torch.tensor([0.0, 1.0, 2.0])
    states = OnDisk(folder / "c.states", first, 5, resume=False)
    now = first.repeat(5, 1)
    kept = (copied(states), now.clone())
    for step in steps:
        if step == "put":
            rows = np.sort(rng.choice(5, 2, replace=False))
            values = torch.from_numpy(rng.normal(size=(2, 3)).astype(np.float32))
            states.put(rows, values)
            now[torch.from_numpy(rows)] = values
        elif step == "save":
            kept = (copied(states), now.clone())
            if (
                rng.random() < 0.7
            ):  # else the process dies before it hears that the checkpoint is on disk
                states.saved()
        else:
            if rng.random() < 0.4:  # the crash came after a save, before its checkpoint was on disk
                states.save()
            states = OnDisk(folder / "c.states", first, 5, resume=True)
            states.load(kept[0])
            now = kept[1].clone()
        assert torch.equal(states.take(None), now)
    shutil.rmtree(folder)


def test_another_runs_states_are_not_touched(tmp_path: Path) -> None:
    saved = advance(loop_on(tmp_path), 3).save()
    with pytest.raises(SpecError, match="earlier run"):
        loop_on(tmp_path)
    other = advance(loop_on(tmp_path / "other"), 3).save()
    with pytest.raises(CheckpointError, match="another run"):
        loop_on(tmp_path, resume=True).load(other)
    assert loop_on(tmp_path, resume=True).load(saved) is None


BIG = """
import resource, sys, torch
from pathlib import Path
import fedspan
from fedspan.methods.ssf import SSF
from fedspan.projectors.coordinate import Coordinate
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1280, 1280), nn.ReLU(), nn.Linear(1280, 10))
x, y = torch.randn(4, 1280), torch.tensor([0, 1, 2, 3])
method = SSF(lr=0.1, local_steps=1, space=Coordinate(rank=0.1))
states = Path(sys.argv[1])
fedspan.fit(model, [(x, y)] * 2000, method=method, rounds=int(sys.argv[2]), clients_per_round=20,
            engine=fedspan.Engine(states_dir=states))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(states_dir: Path, rounds: int) -> int:
    done = subprocess.run(
        [sys.executable, "-c", BIG, str(states_dir), str(rounds)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout) * 1024


@pytest.mark.slow
def test_two_thousand_clients_of_a_large_model_need_little_memory(tmp_path: Path) -> None:
    """1.65 million numbers, 13 GB of controls, 100 of the clients seen; peak resident memory of the whole process."""
    assert peak(tmp_path / "s", 5) < 2e9
    seen = sum(file.stat().st_blocks * 512 for file in (tmp_path / "s").iterdir())
    assert seen < 3e9


@pytest.mark.slow
def test_two_thousand_clients_all_taking_part(tmp_path: Path) -> None:
    assert peak(tmp_path / "s", 300) < 4e9
