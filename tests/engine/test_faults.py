"""Every write, sync and rename of a run is interrupted once; the run then resumes to the same bits or is refused."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import fedspan
from fedspan.callbacks import KeepBest
from fedspan.core.errors import DiskError, FedspanError
from fedspan.core.files import append
from fedspan.engine import run_dir as engine_run_dir
from support.files import damage
from support.killing import CALLS, KilledError

Kind = Literal["crash", "short", "full", "io"]
SPEC = {
    "rounds": 4,
    "eval_every": 1,
    "clients_per_round": 2,
    "batch_size": "full",
    "method": {"name": "ssf", "lr": 0.01, "local_steps": 2, "rank": 2},
    "task": {"name": "regression", "dim": 6, "clients": 4, "samples": 8},
}


@contextmanager
def faults(kind: Kind, at: int) -> Iterator[list[str]]:
    """Lets the `at`-th call that changes a file fail; gives the names of the calls so far.

    `crash`: the process is killed before the call. `short`: a write is half done, then the process is killed.
    `full`: from this call on no space is left, and a write is half done. `io`: this call alone fails.
    """
    seen: list[str] = []
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in CALLS}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            seen.append(name)
            number = len(seen) - 1
            half = name == "pwrite" and len(arguments[1]) > 1
            if kind in ("crash", "short"):
                if number == at and kind == "short" and half:
                    real[name](arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                if number >= at:
                    raise KilledError
            elif kind == "full" and number >= at and name == "pwrite":
                if number == at and half:
                    return real[name](
                        arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:]
                    )
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            elif kind == "io" and number == at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real[name](*arguments, **named)

        return call

    real["fsync"] = lambda file: None  # thousands of real ones would take minutes
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrapped(name))
        yield seen


def run(folder: Path, resume: bool = False) -> fedspan.Result:
    spec = SPEC | {"engine": {"states_dir": str(folder / "states")}}
    return fedspan.run(spec, folder / "run", resume=resume, callbacks=[KeepBest()])


@pytest.fixture
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fedspan.Result:
    monkeypatch.setattr(
        engine_run_dir.RunFiles, "seconds", -1.0
    )  # a checkpoint with every evaluation
    return run(tmp_path / "undisturbed")


def same(result: fedspan.Result, other: fedspan.Result) -> bool:
    rows = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in one.history]
        for one in (result, other)
    ]
    loaded = fedspan.load(result.run_dir)
    weights = [one.weights[0] for one in (result, other, loaded)]
    return rows[0] == rows[1] and all(
        torch.equal(weights[0][k], w[k]) for w in weights[1:] for k in weights[0]
    )


def after_fault(folder: Path, kind: Kind, at: int) -> tuple[fedspan.Result | None, str]:
    """The result of an interrupted run, resumed or begun again as its user would; None where it was refused."""
    said = ""
    with faults(kind, at):
        try:
            run(folder)
        except KilledError:
            pass
        except FedspanError as error:
            said = str(error)
    assert "\n" not in said, "an error is one line"
    try:
        return run(folder, resume=True), "resumed"
    except FedspanError as error:
        said = str(error)
    assert "\n" not in said
    if "no checkpoint" not in said:
        return None, said
    shutil.rmtree(
        folder / "states", ignore_errors=True
    )  # the run was killed before its first checkpoint
    return run(folder), "begun again"


def count_calls(folder: Path) -> int:
    with faults("crash", 1 << 30) as seen:
        run(folder)
    assert {"pwrite", "fsync", "replace", "unlink"} <= set(seen)
    return len(seen)


def test_a_finished_run_that_is_killed_while_it_is_made_longer_can_be_read_and_resumed(
    tmp_path: Path,
) -> None:
    """The file that vouches for the history is gone before the history changes."""
    fedspan.run(SPEC, tmp_path / "short")
    longer = SPEC | {"rounds": 6}
    whole = fedspan.run(longer, tmp_path / "whole")
    for at in range(24):
        place = shutil.copytree(tmp_path / "short", tmp_path / f"{at}")
        with faults("crash", at):
            try:
                fedspan.run(longer, place, resume=True)
            except KilledError:
                assert fedspan.load(place).status in ("finished", "interrupted"), f"call {at}"
        assert same(fedspan.run(longer, place, resume=True), whole), f"call {at}"


EVERY = [pytest.param(5, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("step", EVERY)
@pytest.mark.parametrize("kind", ["crash", "short", "full", "io"])
def test_every_interrupted_call_leaves_a_run_that_resumes(
    kind: Kind, step: int, undisturbed: fedspan.Result, tmp_path: Path
) -> None:
    calls, resumed = count_calls(tmp_path / "count"), 0
    tried = [*range(0, calls - 16, step), *range(calls - 16, calls)] if step > 1 else range(calls)
    for at in tried:
        result, how = after_fault(tmp_path / f"{at}", kind, at)
        assert result is not None, f"call {at}: {how}"
        assert same(result, undisturbed), f"call {at} ({how}) gives another result"
        resumed += how == "resumed"
        shutil.rmtree(tmp_path / f"{at}")
    assert resumed > len(tried) / 2


def interrupted(folder: Path, at_round: int = 2) -> None:
    """A run that was killed after a few rounds."""

    class Kill(fedspan.Callback):
        def on_evaluate(self, run: Any, row: Any) -> None:
            if row.round == at_round:
                raise KilledError

    spec = SPEC | {"engine": {"states_dir": str(folder / "states")}}
    with pytest.raises(KilledError):
        fedspan.run(spec, folder / "run", callbacks=[KeepBest(), Kill()])


@pytest.mark.parametrize("how", ["delete", "cut", "empty", "zeros", "double", "flip"])
def test_a_damaged_file_is_refused_or_does_not_matter(
    how: str, undisturbed: fedspan.Result, tmp_path: Path
) -> None:
    interrupted(tmp_path / "whole")
    files = sorted(
        p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*") if p.is_file()
    )
    assert {p.name for p in files} >= {
        "checkpoint.safetensors",
        "history.jsonl",
        "best.safetensors",
        "c.states",
    }
    refused: dict[str, str] = {}
    for file in files:
        shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
        damage(tmp_path / "damaged" / file, how)
        spec = SPEC | {"engine": {"states_dir": str(tmp_path / "damaged" / "states")}}
        try:
            result = fedspan.run(
                spec, tmp_path / "damaged" / "run", resume=True, callbacks=[KeepBest()]
            )
            assert same(result, undisturbed), f"{how} {file} gives another result"
        except FedspanError as error:
            refused[file.name] = str(error)
        shutil.rmtree(tmp_path / "damaged")
    assert not any("\n" in said for said in refused.values())
    assert {"checkpoint.safetensors", "best.safetensors"} <= set(refused)
    assert how == "double" or "c.states" in refused


def test_states_of_another_run_are_refused(undisturbed: fedspan.Result, tmp_path: Path) -> None:
    for name in ("a", "b"):
        interrupted(tmp_path / name)
    shutil.rmtree(tmp_path / "a" / "states")
    shutil.copytree(tmp_path / "b" / "states", tmp_path / "a" / "states")
    with pytest.raises(FedspanError, match="another run"):
        run(tmp_path / "a", resume=True)
    shutil.copy(
        tmp_path / "a" / "run" / "best.safetensors", tmp_path / "b" / "run" / "best.safetensors"
    )
    with pytest.raises(FedspanError, match="another run"):
        run(tmp_path / "b", resume=True)


@pytest.mark.parametrize("how", ["delete", "cut", "empty", "zeros", "double", "flip"])
@pytest.mark.parametrize("file", ["history.jsonl", "model.safetensors", "result.json"])
def test_a_finished_run_whose_files_changed_is_not_loaded(
    file: str, how: str, undisturbed: fedspan.Result
) -> None:
    assert undisturbed.run_dir is not None
    damage(undisturbed.run_dir / file, how)
    if (file, how) == ("result.json", "delete"):
        assert fedspan.load(undisturbed.run_dir).status == "interrupted"
        return
    with pytest.raises(FedspanError) as refused:
        fedspan.load(undisturbed.run_dir)
    assert "\n" not in str(refused.value)


def test_files_with_states_are_for_their_owner_alone(tmp_path: Path) -> None:
    interrupted(tmp_path)
    private = [*(tmp_path / "states").iterdir(), tmp_path / "run" / "checkpoint.safetensors"]
    assert len(private) > 1
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)


@pytest.mark.parametrize("kind", ["full", "io"])
def test_an_append_that_fails_leaves_the_file_as_it_was(kind: Kind, tmp_path: Path) -> None:
    """Whoever reads an interrupted run must not find half of an evaluation."""
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    with faults(kind, 0), pytest.raises(DiskError, match="what was saved before is intact"):
        append(path, b"two\n" * 10)
    assert path.read_bytes() == b"one\n"


def test_a_planted_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "run").mkdir()
    for name in ("spec.toml", f".spec.toml.{os.getpid()}", "model.safetensors", "clients.csv"):
        (tmp_path / "run" / name).symlink_to(victim)
    assert run(tmp_path).finished
    assert victim.read_text() == "untouched"
