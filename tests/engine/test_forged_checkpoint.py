"""A checkpoint that somebody has edited, with its checksum made again: refused in one line, or the run is the same."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from fedspan.callbacks import KeepBest
from fedspan.core import checkpoint
from fedspan.core.errors import CheckpointError, FedspanError
from fedspan.core.json_log import read_table, write_table
from support.loops import RUN, Interrupt

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
    assert result.history[-1]["loss"] == resumed_loss(begun, place.parent), (
        f"{place.name} gives another result"
    )
    return False


def resumed_loss(begun: Path, tmp_path: Path) -> float:
    place = tmp_path / "whole"
    if not place.exists():
        shutil.copytree(begun, place)
        resumed(place)
    return float(fedspan.load(place).history[-1]["loss"])


@pytest.mark.parametrize("key", ["id", "t", "seconds", "shape", "events", "more", "checks"])
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


def interrupted(place: Path, kind: str, resume: bool = False) -> fedspan.Result:
    """A run that Ctrl-C ends after three of five rounds, or the rest of it."""
    methods: dict[str, dict[str, Any]] = {
        "ssf": {"name": "ssf", "rank": 0.5},
        "scaffold": {"name": "scaffold"},
    }
    more: dict[str, Any] = {
        "method": methods.get(kind, {"name": "fedavg"}) | {"lr": 0.1},
        "rounds": 5,
    }
    if kind == "private":
        more |= {
            "privacy": fedspan.Privacy(noise=1.0, clip=1.0),
            "participation": {"weights": "uniform"},
        }
    callbacks: list[Any] = [fedspan.callbacks.KeepBest("loss")] if kind == "best" else []
    callbacks += [] if resume else [Interrupt(3)]
    if kind == "powersgd":  # with layers that are not sent in full
        own = {"method": SSF | {"name": "powersgd", "rank": 1}}
        return fedspan.run(SPEC | own, place, resume=resume, callbacks=callbacks, progress=False)
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(8, 3, generator=draw) for _ in range(3)]
    clients = [(one, (one[:, 0] > 0).long()) for one in inputs]
    torch.manual_seed(0)
    return fedspan.fit(
        torch.nn.Linear(3, 2), clients, test=clients[0], run_dir=place, progress=False, resume=resume, **more,
        callbacks=callbacks,
    )  # fmt: skip


def changed(arrays: dict[str, Any], **new: Any) -> dict[str, Any]:
    return arrays | {name.replace("__", "."): value for name, value in new.items()}


def record(arrays: dict[str, Any], **new: Any) -> dict[str, Any]:
    told = json.loads(arrays["loop.record"].numpy().tobytes()) | new
    return arrays | {
        "loop.record": torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    }


def without(table: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}


FORGED: list[tuple[str, Any]] = [
    *(
        ("fedavg", lambda a, m, key=key: (without(a, key), m))
        for key in ("loop.counts", "loop.rows", "loop.record")
    ),
    *(
        ("scaffold", lambda a, m, key=key: (without(a, key), m))
        for key in ("server.c", "clients.c.rows", "server.x")
    ),
    ("fedavg", lambda a, m: (changed(a, other__x=a["server.x"]), m)),
    ("fedavg", lambda a, m: (changed(a, server__y=a["server.x"]), m)),
    ("fedavg", lambda a, m: (changed(a, server__x=a["server.x"].double()), m)),
    ("fedavg", lambda a, m: (changed(a, server__x=a["server.x"].flatten()), m)),
    ("fedavg", lambda a, m: (changed(a, server__x=a["server.x"][..., :-1].contiguous()), m)),
    ("fedavg", lambda a, m: (changed(a, server__x=a["server.x"] * float("nan")), m)),
    ("fedavg", lambda a, m: (record(a, t=2.5), m)),
    ("fedavg", lambda a, m: (record(a, t=9), m)),
    ("fedavg", lambda a, m: (record(a, t=-3), m)),
    ("fedavg", lambda a, m: (record(a, seconds=math.inf), m)),
    ("fedavg", lambda a, m: (record(a, seconds=-1.0), m)),
    ("fedavg", lambda a, m: (changed(a, loop__counts=-a["loop.counts"] - 5), m)),
    ("fedavg", lambda a, m: (changed(a, loop__counts=a["loop.counts"][:, :-1].contiguous()), m)),
    ("fedavg", lambda a, m: (changed(a, loop__rows=a["loop.rows"] + 10**6), m)),
    ("fedavg", lambda a, m: (changed(a, loop__rows=a["loop.rows"] * 0), m)),
    ("fedavg", lambda a, m: (changed(a, replies__usual=-a["replies.usual"] - 1), m)),
    ("fedavg", lambda a, m: (changed(a, loop__record=torch.zeros(3, dtype=torch.uint8)), m)),
    ("fedavg", lambda a, m: (changed(a, loop__record=a["loop.record"].bfloat16()), m)),
    ("fedavg", lambda a, m: (record(a, events=3), m)),
    ("fedavg", lambda a, m: (record(a, more=-1), m)),
    ("fedavg", lambda a, m: (record(a, checks=[]), m)),
    ("fedavg", lambda a, m: (record(a, shape=[1, 99]), m)),
    *(
        ("fedavg", lambda a, m, key=key: (a, without(m, key)))
        for key in ("decisions", "identity", "seeds", "round")
    ),
    *(("fedavg", lambda a, m, key=key: (a, m | {key: "x"})) for key in ("seeds", "round")),
    ("fedavg", lambda a, m: (a, m | {"seeds": [1]})),
    ("fedavg", lambda a, m: (a, m | {"identity": "another"})),
    ("fedavg", lambda a, m: (a, m | {"decisions": {}})),
    ("fedavg", lambda a, m: (a, without(m, "start"))),
    ("fedavg", lambda a, m: (a, m | {"round": 2})),
    ("fedavg", lambda a, m: (record(a, checks={"history.jsonl": ""}), m)),
    ("fedavg", lambda a, m: (record(a, checks={}), m)),
    ("fedavg", lambda a, m: (a, 3)),
    ("scaffold", lambda a, m: (changed(a, server__c=a["server.c"].double()), m)),
    ("scaffold", lambda a, m: (changed(a, server__c=a["server.c"] + float("inf")), m)),
    ("scaffold", lambda a, m: (changed(a, clients__c__rows=a["clients.c.rows"] + 99), m)),
    ("scaffold", lambda a, m: (changed(a, clients__c__values=a["clients.c.values"].int()), m)),
    (
        "scaffold",
        lambda a, m: (changed(a, clients__c__values=a["clients.c.values"] * float("nan")), m),
    ),
    ("ssf", lambda a, m: (without(a, "server.log.missed"), m)),
    (
        "ssf",
        lambda a, m: (changed(a, server__m=a["server.x"]), m),
    ),  # which has no numbers without momentum
    ("ssf", lambda a, m: (changed(a, server__log__end=a["server.log.end"] + 4), m)),
    ("ssf", lambda a, m: (changed(a, server__log__end=a["server.log.end"].repeat(2)), m)),
    ("ssf", lambda a, m: (changed(a, server__log__end=a["server.log.end"].reshape(1, 1)), m)),
    (
        "ssf",
        lambda a, m: (
            changed(a, server__log__missed=a["server.log.missed"][..., :-1].contiguous()),
            m,
        ),
    ),
    ("private", lambda a, m: (changed(a, replies__key=a["replies.key"][:4].clone()), m)),
    ("private", lambda a, m: (changed(a, replies__clip=torch.tensor([1.0, 0.0]).double()), m)),
    ("private", lambda a, m: (changed(a, replies__clip=torch.tensor([9.0, 1.0]).double()), m)),
    ("best", lambda a, m: (a, m | {"best": {"7": 0.5}})),
    ("best", lambda a, m: (a, m | {"best": [0.5]})),
    ("best", lambda a, m: (a, m | {"best": {"0": "high"}})),
    ("best", lambda a, m: (a, m | {"best": {"0": math.nan}})),
    ("best", lambda a, m: ({f"{name}x": one for name, one in a.items()}, m)),
    ("best", lambda a, m: (changed(a, **{"0__weight": a["0.weight"][:1].clone()}), m)),
    ("best", lambda a, m: (without(a, "0.weight"), m)),
    ("best", lambda a, m: (changed(a, **{"0__weight": a["0.weight"] * math.nan}), m)),
    ("fedavg", lambda a, m: (changed(a, loop__counts=a["loop.counts"] * 0), m)),
    ("powersgd", lambda a, m: (changed(a, server__columns=a["server.columns"].repeat(1, 1, 2)), m)),
]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    places = {
        kind: tmp_path_factory.mktemp("stopped") / kind for kind in {kind for kind, _ in FORGED}
    }
    for kind, place in places.items():
        with pytest.raises(KeyboardInterrupt):
            interrupted(place, kind)
    return places


@pytest.mark.parametrize(("kind", "forge"), FORGED, ids=range(len(FORGED)))
def test_a_forged_checkpoint_with_a_right_checksum_is_refused(
    kind: str, forge: Any, stopped: dict[str, Path], tmp_path: Path
) -> None:
    place = shutil.copytree(stopped[kind], tmp_path / "run")
    path = place / ("best.safetensors" if kind == "best" else "checkpoint.safetensors")
    checkpoint.save(path, *forge(*checkpoint.load(path)))
    with pytest.raises(
        fedspan.FedspanError, match=r"damaged|is of|is at round|was made with"
    ) as error:
        interrupted(place, kind, resume=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["fedavg", "scaffold", "ssf", "private", "best", "powersgd"])
def test_the_same_checkpoint_written_again_is_resumed(
    kind: str, stopped: dict[str, Path], tmp_path: Path
) -> None:
    place = shutil.copytree(stopped[kind], tmp_path / "run")
    path = place / "checkpoint.safetensors"
    checkpoint.save(path, *checkpoint.load(path))
    assert interrupted(place, kind, resume=True).finished


@pytest.mark.parametrize(
    "change", [lambda v: v.flatten(), lambda v: v * math.nan, lambda v: v.int()]
)
def test_the_model_of_a_finished_run_is_checked(
    change: Any, stopped: dict[str, Path], tmp_path: Path
) -> None:
    place = shutil.copytree(stopped["fedavg"], tmp_path / "run")
    weights = interrupted(place, "fedavg", resume=True).weights[0]
    checkpoint.write_tensors(
        place / "model.safetensors", weights | {"weight": change(weights["weight"])}
    )
    digest = hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest()
    table = read_table(place / "result.json")
    write_table(
        place / "result.json", table | {"files": table["files"] | {"model.safetensors": digest}}
    )
    with pytest.raises(CheckpointError, match=r"model.safetensors' is damaged: 'weight' is"):
        interrupted(place, "fedavg", resume=True)


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    fedspan.run(SPEC, tmp_path / "run", progress=False)
    fedspan.load(tmp_path / "run").save(tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "copy" / "result.json").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors' cannot be read"):
        fedspan.load(tmp_path / "copy")
