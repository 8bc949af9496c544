"""What a run leaves on disk: nothing of a kill, and under privacy nothing that others may read who took part."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

import fedspan

SPEC: dict[str, Any] = {
    "rounds": 3,
    "batch_size": "full",
    "method": {"name": "fedavg", "lr": 0.01},
    "task": {"name": "regression", "dim": 6, "clients": 4, "samples": 8},
}
PRIVATE = SPEC | {"privacy": {"clip": 1.0, "noise": 1.0}, "participation": {"weights": "uniform"}}


def killed(spec: dict[str, Any], out: Path, name: str) -> None:
    """A run that is killed between writing a file and giving it its name."""
    if os.fork() == 0:
        replace = os.replace
        os.replace = lambda a, b: os._exit(9) if Path(b).name == name else replace(a, b)  # type: ignore[assignment]
        fedspan.run(spec, out, progress=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("name", ["checkpoint.safetensors", "model.safetensors", "audit.jsonl"])
def test_a_killed_run_leaves_no_temporary_file_after_the_next_start(
    name: str, seeds: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    killed(SPEC, out, name)
    left = [path for path in out.rglob(".*") if path.is_file()]
    assert [path.name.rpartition(".")[0] for path in left] == [f".{name}"]
    mine = [out / ".notes.txt", out / f".{name}.mine", out / ".table.csv.abcdefgh"]
    for path in mine:
        path.write_text("mine")
    resume = (out / "checkpoint.safetensors").exists()
    if seeds == 2:  # another start in the same place
        for path in out.glob("[!.]*"):
            path.unlink()
        resume = False
    assert fedspan.run(SPEC, out, seeds=seeds, resume=resume, progress=False).finished
    assert sorted(path for path in out.rglob(".*") if path.is_file()) == sorted(mine)


@pytest.mark.parametrize("spec", [SPEC, PRIVATE], ids=["plain", "private"])
def test_under_privacy_only_the_owner_reads_who_took_part(
    spec: dict[str, Any], tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        fedspan.run(spec, tmp_path / "run", progress=False)
    finally:
        os.umask(before)
    for name in ("audit.jsonl", "clients.csv"):
        mode = stat.S_IMODE((tmp_path / "run" / name).stat().st_mode)
        assert mode == (0o600 if spec is PRIVATE else 0o644)
