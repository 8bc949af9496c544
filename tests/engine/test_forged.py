"""A run directory in the hands of somebody who knows every format but has no key: `audit --key` refuses all of it."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from fedspan.callbacks import CSV, KeepBest
from fedspan.cli import app as cli
from fedspan.core import checkpoint
from fedspan.core.errors import FedspanError
from fedspan.core.json_log import lines_text, read_table, write_table
from support.files import write_key
from support.loops import RUN, Interrupt

pytest.importorskip(
    "cryptography", reason="cryptography is not installed; pip install 'fedspan[privacy]'"
)
from cryptography.hazmat.primitives.asymmetric import ed25519

FORMS = ("one seed", "seeds together", "seeds apart")
COVERED = {
    "name": "ssf",
    "lr": "auto",
    "local_steps": 3,
    "rank": 4,
    "drift": "controls",
}  # by the theorem
SPEC = RUN | {"rounds": 12, "eval_every": 3, "method": COVERED, "clients_per_round": 7}


def command(*words: object) -> tuple[int, str]:
    """(exit code, all that a command prints); a traceback fails the test."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told), redirect_stderr(told):
        patch.setattr(sys, "argv", ["fedspan", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0), told.getvalue()


def make(form: str, out: Path, seed: int) -> None:
    """A finished run: of a small network, or of the toy problem, whose seeds are computed together."""
    if form == "seeds together":
        fedspan.run(
            SPEC | {"seed": seed, "callbacks": [{"name": "csv"}]},
            out,
            seeds=2,
            progress=False,
        )
        return
    draw = torch.Generator().manual_seed(seed)
    clients = [(torch.randn(12, 4, generator=draw), torch.arange(12) % 2) for _ in range(4)]
    fedspan.fit(
        torch.nn.Linear(4, 2), clients, method="fedavg", rounds=4, batch_size=4, test=clients[0], seed=seed,
        seeds=1 if form == "one seed" else 2, eval_clients_every=2, callbacks=[KeepBest(), CSV()], run_dir=out,
        progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every form, and another one of each, all signed with one key."""
    out = tmp_path_factory.mktemp("forged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSPAN_SIGN_KEY", str(write_key(out / "sign.pem")))
        for form in FORMS:
            make(form, out / form, 0)
            make(form, out / f"{form}, another", 3)
    return out


def test_what_nobody_changed_is_accepted(signed: Path) -> None:
    for form in FORMS:
        for name in (form, f"{form}, another"):
            code, told = command("audit", signed / name, "--key", signed / "sign.pub")
            assert code == 0, told
            assert fedspan.load(signed / name).finished
            code, told = command(
                "report", signed / name, "--out", signed / "page", "--format", "md"
            )
            assert code == 0, told
    every = {path.name for path in signed.rglob("*") if path.is_file()}
    assert every >= {
        "audit.jsonl", "checkpoint.safetensors", "clients.csv", "history.csv", "history.jsonl", "lr.json",
        "model.safetensors", "per_client.jsonl", "result.json", "spec.toml",
    }  # fmt: skip


def sealed(path: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    """Changes the lines of a file of lines and makes its checksums again."""
    plain = [
        {k: v for k, v in json.loads(line).items() if k != "checksum"}
        for line in path.read_text().splitlines()
    ]
    path.write_bytes(lines_text(change(plain))[0])


def other_value(path: Path) -> None:
    """A number, a digit or a weight."""
    if path.suffix == ".jsonl":
        sealed(path, lambda lines: [*lines[:1], *(_other(line) for line in lines[1:])])
    elif path.suffix == ".json":
        write_table(path, {k: _other(v) for k, v in read_table(path).items()})
    elif path.name == "checkpoint.safetensors":
        arrays, meta = checkpoint.load(path)
        checkpoint.save(
            path, {k: v + 1 if v.is_floating_point() else v for k, v in arrays.items()}, meta
        )
    else:
        raw = bytearray(path.read_bytes())
        raw[-2] ^= 1
        path.write_bytes(raw)


def _other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {k: _other(v) if k not in ("round", "files") else v for k, v in value.items()}
    return [_other(one) for one in value] if isinstance(value, list) else value


def line_removed(path: Path) -> None:
    if path.suffix == ".jsonl":
        sealed(path, lambda lines: [*lines[:1], *lines[2:]])
    elif path.suffix in (".csv", ".toml"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    elif path.suffix == ".json":
        write_table(path, dict(list(read_table(path).items())[:-1]))
    else:
        path.write_bytes(path.read_bytes()[:-8])


def line_added(path: Path) -> None:
    if path.suffix == ".jsonl":
        sealed(
            path,
            lambda lines: [*lines, lines[-1] | ({"round": 999} if "round" in lines[-1] else {})],
        )
    elif path.suffix == ".json":
        write_table(path, read_table(path) | {"more": 1})
    else:
        path.write_bytes(path.read_bytes() + b"\n# more\n")


def removed(path: Path) -> None:
    path.unlink()


def of_another_run(path: Path) -> None:
    root = next(one for one in path.parents if one.name in FORMS)
    there = Path(
        str(path.relative_to(root)).replace("seed-1", "seed-4").replace("seed-0", "seed-3")
    )
    shutil.copy(ORIGIN[0] / f"{root.name}, another" / there, path)


ORIGIN: list[Path] = []
FORGERIES = (other_value, line_removed, line_added, removed, of_another_run)


def card_made_again(run: Path) -> None:
    """The cards name the files as they are now; a signature does not belong to its card any more."""
    for path in sorted(run.rglob("result.json"), reverse=True):  # that of the whole run last
        card = read_table(path)
        for name in card.get("files", ()):
            there = path.parent / name
            card["files"][name] = (
                hashlib.sha256(there.read_bytes()).hexdigest() if there.exists() else "0"
            )
        write_table(path, card)


def signed_anew(run: Path) -> None:
    """The same, signed with a key of the forger's own."""
    card_made_again(run)
    key = ed25519.Ed25519PrivateKey.generate()
    for path in sorted(run.rglob("result.json"), reverse=True):
        card = {k: v for k, v in read_table(path).items() if k != "signature"}
        value = key.sign(json.dumps(card, sort_keys=True).encode()).hex()
        public = key.public_key().public_bytes_raw().hex()
        write_table(
            path,
            card | {"signature": {"algorithm": "ed25519", "public_key": public, "value": value}},
        )


def unsigned(run: Path) -> None:
    card_made_again(run)
    for path in run.rglob("result.json"):
        write_table(path, {k: v for k, v in read_table(path).items() if k != "signature"})


Effort = Callable[[Path], None]
EFFORTS: tuple[Effort, ...] = (lambda _: None, card_made_again, signed_anew, unsigned)


def copies(signed: Path, place: Path, form: str) -> Iterator[tuple[Path, Path]]:
    """(a fresh copy of a run, a file of it), for each of its files."""
    names = sorted(
        path.relative_to(signed / form) for path in (signed / form).rglob("*") if path.is_file()
    )
    assert len(names) > 7
    for name in names:
        shutil.rmtree(place / form, ignore_errors=True)
        shutil.copytree(signed / form, place / form)
        yield place / form, place / form / name


def refused(
    run: Path, path: Path, forgery: Callable[[Path], None], efforts: Sequence[Effort], key: Path
) -> None:
    before = path.read_bytes()
    forgery(path)
    if path.exists() and path.read_bytes() == before:
        assert path.name in ("clients.csv", "model.json")  # of as many bytes, of the same network
        return
    for effort in efforts:
        effort(run)
        code, told = command("audit", run, "--key", key)
        assert code, f"{path.relative_to(run)}: {told}"
        assert "is as it was written" not in told


@pytest.mark.parametrize("form", FORMS)
def test_every_forged_file_is_refused(form: str, signed: Path, tmp_path: Path) -> None:
    ORIGIN[:] = [signed]
    for number, (run, path) in enumerate(copies(signed, tmp_path, form)):
        refused(run, path, FORGERIES[number % len(FORGERIES)], EFFORTS[:2], signed / "sign.pub")


@pytest.mark.slow
@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("form", FORMS)
def test_every_forgery_of_every_file_is_refused(
    form: str, forgery: Callable[[Path], None], signed: Path, tmp_path: Path
) -> None:
    ORIGIN[:] = [signed]
    for run, path in copies(signed, tmp_path, form):
        refused(run, path, forgery, EFFORTS, signed / "sign.pub")


@pytest.mark.parametrize("form", FORMS)
def test_a_forged_result_is_neither_loaded_nor_shown(
    form: str, signed: Path, tmp_path: Path
) -> None:
    """Whatever the forger makes again short of the signature."""
    for run, path in copies(signed, tmp_path, form):
        if path.name not in (
            "history.jsonl",
            "per_client.jsonl",
            "lr.json",
            "result.json",
            "model.safetensors",
        ):
            continue
        other_value(path)
        for effort in EFFORTS[:2]:
            effort(run)
            with pytest.raises(FedspanError) as refusal:
                fedspan.load(run)
            assert "\n" not in str(refusal.value)
            code, told = command("report", run, "--out", tmp_path / "page", "--format", "md")
            assert code == 2, path
            assert told.startswith("error: ")
            assert told.count("\n") == 1
            assert not (tmp_path / "page").exists()


def test_the_reported_case(signed: Path, tmp_path: Path) -> None:
    """Another accuracy in the history, with all checksums made again."""
    shutil.copytree(signed / "one seed", tmp_path / "one seed")
    run = tmp_path / "one seed"
    sealed(run / "history.jsonl", lambda lines: [*lines[:-1], lines[-1] | {"accuracy": 0.999}])
    code, told = command("audit", run, "--key", signed / "sign.pub")
    assert code == 1
    assert f"{str(run / 'history.jsonl')!r} was changed after the run" in told
    code, told = command("report", run)
    assert code == 2
    assert told == f"error: {str(run / 'history.jsonl')!r} was changed after the run; put back what the run has written, or run again\n"  # noqa: E501  # fmt: skip


ADDED = {
    "seeds together": ["seed-7/history.jsonl", "history.jsonl", "per_client.jsonl"],
    "seeds apart": ["seed-7/history.jsonl", "history.jsonl", "per_client.jsonl"],
    "one seed": ["roster.json"],
}


@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form, names in ADDED.items() for name in names]
)
def test_an_added_file_is_refused(form: str, name: str, signed: Path, tmp_path: Path) -> None:
    run = tmp_path / form
    shutil.copytree(signed / form, run)
    source = next(
        iter(sorted((signed / "one seed").rglob(Path(name).name))), signed / "one seed" / "lr.json"
    )
    (run / name).parent.mkdir(exist_ok=True)
    shutil.copy(source, run / name)
    code, told = command("audit", run, "--key", signed / "sign.pub")
    assert code == 1, told
    if form != "one seed":
        with pytest.raises(FedspanError, match="was added after the run"):
            fedspan.load(run)


def test_a_seed_cannot_be_left_out_or_exchanged(signed: Path, tmp_path: Path) -> None:
    """Seeds apart have one signed card, which names all of them."""
    run = tmp_path / "seeds apart"
    shutil.copytree(signed / "seeds apart", run)
    shutil.rmtree(run / "seed-1")
    table = read_table(run / "result.json")
    files = {name: digest for name, digest in table["files"].items() if "seed-1" not in name}
    write_table(
        run / "result.json", table | {"seeds": [0], "statuses": ["finished"], "files": files}
    )
    assert command("audit", run, "--key", signed / "sign.pub")[0] == 1
    (run / "result.json").unlink()
    code, told = command("audit", run, "--key", signed / "sign.pub")
    assert code == 1
    assert "is not signed by the key" in told
    shutil.copytree(run / "seed-0", run / "seed-1")
    assert (
        "two audit trails are of the same seed"
        in command("audit", run, "--key", signed / "sign.pub")[1]
    )


def test_a_run_that_is_made_longer_has_no_card_until_it_ends(tmp_path: Path) -> None:
    """The card of its first end no longer holds, and the record is right all the while."""
    spec = SPEC | {"method": RUN["method"]}
    fedspan.run(spec, tmp_path, progress=False)
    assert command("audit", tmp_path)[0] == 0
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(
            spec | {"rounds": 30}, tmp_path, resume=True, callbacks=[Interrupt(20)], progress=False
        )
    code, told = command("audit", tmp_path)
    assert code == 0, told
    assert "not finished after 20 rounds" in told
    assert fedspan.load(tmp_path).status == "interrupted"
    fedspan.run(spec | {"rounds": 30}, tmp_path, resume=True, progress=False)
    assert command("audit", tmp_path)[0] == 0
    assert read_table(tmp_path / "result.json")["rounds"] == 30


def test_an_unfinished_history_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(
            SPEC | {"method": RUN["method"]}, tmp_path, callbacks=[Interrupt(10)], progress=False
        )
    assert command("audit", tmp_path)[0] == 0
    sealed(
        tmp_path / "history.jsonl", lambda lines: [*lines[:1], lines[1] | {"loss": 0.0}, *lines[2:]]
    )
    code, told = command("audit", tmp_path)
    assert code == 1
    assert "history.jsonl' is missing or of another run" in told


def test_a_run_without_noise_has_no_epsilon_and_is_read(tmp_path: Path) -> None:
    """Its ε is infinite, which JSON has no word for."""
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(12, 4, generator=draw), torch.arange(12) % 2) for _ in range(4)]
    fedspan.fit(
        torch.nn.Linear(4, 2), clients, method={"name": "fedavg", "lr": 0.1}, rounds=2, test=clients[0],
        privacy=fedspan.Privacy(clip=1.0, noise=0.0, delta=1e-3), run_dir=tmp_path / "run", progress=False,
        participation=fedspan.Participation(weights="uniform"),
    )  # fmt: skip
    assert fedspan.load(tmp_path / "run").finished
    for name in ("audit", "report"):
        code, told = command(name, tmp_path / "run")
        assert code == 0, told
