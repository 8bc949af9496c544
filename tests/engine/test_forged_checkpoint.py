"""A checkpoint that somebody has edited, with its checksum made again: refused in one line, or the run is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from conftest import RUN, Interrupt
from fedspan.callbacks import KeepBest
from fedspan.core import checkpoint
from fedspan.core.errors import CheckpointError, FedspanError

Arrays = dict[str, torch.Tensor]
SSF = {"name": "ssf", "lr": 0.02, "local_steps": 2, "rank": 4}
SPEC = RUN | {"rounds": 8, "eval_every": 2, "method": SSF}


def resumed(place: Path) -> fedspan.Result:
    return fedspan.run(SPEC, place, resume=True, callbacks=[KeepBest()], progress=False)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoint") / "run"
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(SPEC, place, callbacks=[KeepBest(), Interrupt(5)], progress=False)
    return place


def cut(v: torch.Tensor) -> torch.Tensor:
    return v.flatten()[:-1]


def below(v: torch.Tensor) -> torch.Tensor:
    return v - 10_000


def other_type(v: torch.Tensor) -> torch.Tensor:
    return v.to(torch.float16 if v.is_floating_point() else torch.float64)


def one_number(v: torch.Tensor) -> torch.Tensor:
    return v.flatten()[:1].reshape([1] * v.dim()) if v.numel() else v


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "removed": lambda _: None, "cut": cut, "below": below, "other type": other_type, "one number": one_number,
    "empty": lambda v: v.new_zeros(0), "huge": lambda v: v * 0 + 2**40,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_array_is_checked(
    change: Callable[[torch.Tensor], torch.Tensor | None], begun: Path, tmp_path: Path
) -> None:
    """Numbers of the right shape are the run's own business: nothing in a checkpoint says that they are others."""
    arrays, meta = checkpoint.load(begun / "checkpoint.safetensors")
    refused = 0
    for name, array in arrays.items():
        changed = change(array.clone())
        same = changed is not None and (changed.shape, changed.dtype) == (array.shape, array.dtype)
        if same and array.is_floating_point():
            continue
        shutil.copytree(begun, tmp_path / name)
        others = {key: value for key, value in arrays.items() if key != name}
        new = others if changed is None else others | {name: changed}
        checkpoint.save(tmp_path / name / "checkpoint.safetensors", new, meta)
        refused += refused_or_the_same(tmp_path / name, begun)
    assert refused > 2


def refused_or_the_same(place: Path, begun: Path) -> bool:
    """Whether a run cannot be resumed; else it must end as it would have."""
    try:
        result = resumed(place)
    except FedspanError as refusal:
        return "\n" not in str(refusal)
    finally:
        shutil.rmtree(place)
    assert result.history[-1]["loss"] == resumed_loss(begun, place.parent), f"{place.name} gives another result"
    return False


def resumed_loss(begun: Path, tmp_path: Path) -> float:
    place = tmp_path / "whole"
    if not place.exists():
        shutil.copytree(begun, place)
        resumed(place)
    return float(fedspan.load(place).history[-1]["loss"])


METAS: dict[str, Any] = {
    "round": 3, "history": [], "seeds": [1], "identity": "another", "decisions": {}, "spec": None,
}  # fmt: skip


@pytest.mark.parametrize("key", METAS)
@pytest.mark.parametrize("gone", [False, True], ids=["other", "gone"])
def test_what_a_checkpoint_says_of_itself_is_checked(key: str, gone: bool, begun: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(begun, place)
    arrays, meta = checkpoint.load(place / "checkpoint.safetensors")
    others = {name: value for name, value in meta.items() if name != key}
    checkpoint.save(place / "checkpoint.safetensors", arrays, others if gone else others | {key: METAS[key]})
    if key == "spec":  # which nothing reads
        assert resumed(place).finished
        return
    with pytest.raises(CheckpointError) as error:
        resumed(place)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["id", "shape", "events", "more", "checks"])
def test_the_record_in_a_checkpoint_is_checked(key: str, begun: Path, tmp_path: Path) -> None:
    arrays, meta = checkpoint.load(begun / "checkpoint.safetensors")
    record = json.loads(arrays["loop.record"].numpy().tobytes())
    for number, value in enumerate((None, [], {}, "x", -1)):
        place = tmp_path / str(number)
        shutil.copytree(begun, place)
        text = json.dumps(record | {key: value}).encode()
        new = arrays | {"loop.record": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        checkpoint.save(place / "checkpoint.safetensors", new, meta)
        refused_or_the_same(place, begun)


@pytest.mark.parametrize("how", ["names", "shapes", "value", "seed"])
def test_the_best_model_is_checked(how: str, begun: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(begun, place)
    arrays, meta = checkpoint.load(place / "best.safetensors")
    (number,) = meta["best"]
    if how == "value":
        meta["best"][number] = "high"
    elif how == "seed":
        meta["best"] = {"7": meta["best"][number]}
    else:
        arrays = {
            f"{k}x" if how == "names" else k: v if how == "names" else v.flatten()[:-1] for k, v in arrays.items()
        }
    checkpoint.save(place / "best.safetensors", arrays, meta)
    with pytest.raises(CheckpointError, match="holds no model of this run"):
        resumed(place)


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    fedspan.run(SPEC, tmp_path / "run", progress=False)
    fedspan.load(tmp_path / "run").save(tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "copy" / "result.json").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors' cannot be read"):
        fedspan.load(tmp_path / "copy")
