"""The audit trail, as somebody who tampers with it finds out: every change shows, and a kill is no change."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from attacks import filled, hostile

import fedspan
from fedspan.cli import app as cli
from fedspan.core import json_log
from fedspan.core.callback import Callback
from fedspan.core.errors import SpecError
from fedspan.core.json_log import lines_text, read_lines, read_table, write_table
from fedspan.engine.audit import COUNTED, MISSED, Trail, numbers, ranges, read_record
from fedspan.engine.loop import cohort_of
from support.files import write_key
from support.loops import RUN, Interrupt

pytest.importorskip(
    "cryptography", reason="cryptography is not installed; pip install 'fedspan[privacy]'"
)
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

SPEC = RUN | {"rounds": 12, "eval_every": 3}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a signed card, in which a reply was left out. Tests change copies of it."""
    out = tmp_path_factory.mktemp("audit")
    with pytest.MonkeyPatch.context() as patch, hostile([2], filled(3e38), {7}):
        patch.setenv("FEDSPAN_SIGN_KEY", str(write_key(out / "sign.pem")))
        fedspan.run(SPEC | {"clients_per_round": 6}, out / "run", progress=False)
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


def audit(*words: object) -> tuple[int, str]:
    """(exit code, all that the command prints)."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(told), redirect_stderr(told):
        patch.setattr(sys, "argv", ["fedspan", "audit", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0), told.getvalue()


def trails(run_dir: Path) -> list[Trail]:
    found, _, wrong = read_record(run_dir)
    assert not wrong
    return found


def test_the_command_tells_who_took_part(finished: Path) -> None:
    code, told = audit(finished / "run", "--key", finished / "sign.pub")
    assert code == 0, told
    assert "finished after 12 rounds" in told
    assert "replies: 71 counted, 1 not" in told
    assert "events: left out 1" in told
    assert "signed by key" in told
    assert "the record is as it was written" in told
    code, told = audit(finished / "run", "--client", 2)
    assert "client 2 not counted in rounds 7" in told
    assert "round 7: client 2: reply left out: its norm" in told


def test_the_trail_is_what_happened(finished: Path) -> None:
    (trail,) = trails(finished / "run")
    for t, clients in trail.of_kind(COUNTED).items():
        drawn = cohort_of((0,), 7, 6, t).tolist()[0]
        assert clients == sorted(set(drawn) - ({2} if t == 7 else set()))
    assert sorted(trail.of_kind(COUNTED)) == list(range(12))
    last = fedspan.load(finished / "run").history[-1]
    assert (trail.up_bytes, trail.down_bytes) == (last["up_bytes"], last["down_bytes"])
    assert trail.last["loss"] == last["loss"]


def changed(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def edited(lines: list[str]) -> list[str]:
    return [*lines[:3], lines[3].replace('"events": [[', '"events": [[1'), *lines[4:]]


def resealed(lines: list[str]) -> list[str]:
    """Somebody who knows the format: a line is changed, and all hashes after it are made again."""
    plain = [{k: v for k, v in json.loads(line).items() if k != "checksum"} for line in lines]
    plain[3]["events"][0][2] = "0-6"
    return lines_text(plain)[0].decode().splitlines(keepends=True)


def sealed(change: Callable[[list[Any]], list[Any]]) -> Callable[[list[str]], list[str]]:
    """The same for any change of the lines' contents."""

    def made(lines: list[str]) -> list[str]:
        plain = [{k: v for k, v in json.loads(line).items() if k != "checksum"} for line in lines]
        return lines_text(change(plain))[0].decode().splitlines(keepends=True)

    return made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edited, "line 4 of"),
        (lambda lines: [*lines[:2], *lines[3:]], "line 3 of"),  # removed
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 2 of"),  # moved
        (lambda lines: lines[1:], "line 1 of"),
        (lambda lines: lines[:-1], "audit.jsonl' was changed after the run"),  # cut off
        (lambda lines: [*lines, lines[-1]], "line 7 of"),  # repeated
        (lambda lines: [], "does not begin with the line of a run"),
        (resealed, "audit.jsonl' was changed after the run"),
        (
            sealed(lambda lines: [*lines, {"time": "later"}]),
            "audit.jsonl' was changed after the run",
        ),
        (sealed(lambda lines: lines[1:]), "does not begin with the line of a run"),
    ],
    ids=[
        "edited",
        "removed",
        "moved",
        "headless",
        "cut-off",
        "repeated",
        "empty",
        "resealed",
        "added",
        "headless-sealed",
    ],
)
def test_a_changed_trail_shows(change: Any, words: str, copy: Path) -> None:
    changed(copy / "audit.jsonl", change)
    code, told = audit(copy)
    assert code == 1
    assert words in told
    assert "the record is not as it was written" in told


def test_a_removed_trail_shows(copy: Path) -> None:
    (copy / "audit.jsonl").unlink()
    code, told = audit(copy)
    assert code == 1
    assert "audit.jsonl' is missing" in told


def test_a_removed_card_shows(copy: Path) -> None:
    (copy / "result.json").unlink()
    code, told = audit(copy)
    assert code == 1
    assert "result.json' is missing, although the run has ended" in told


def reseal_card(copy: Path, **changes: Any) -> None:
    """The card with other contents and a right checksum, which is no secret."""
    write_table(copy / "result.json", read_table(copy / "result.json") | changes)


def test_a_changed_card_shows_unless_it_is_signed_again(
    copy: Path, finished: Path, tmp_path: Path
) -> None:
    text = (copy / "result.json").read_text()
    (copy / "result.json").write_text(text.replace('"rounds": 12', '"rounds": 13', 1))
    assert "result.json' is damaged" in audit(copy)[1]
    (copy / "result.json").write_text(text)
    reseal_card(copy, rounds=13)
    code, told = audit(copy)
    assert code == 1
    assert "the signature of" in told
    card = read_table(copy / "result.json")  # signed by somebody else: only the known key tells
    other = ed25519.Ed25519PrivateKey.generate()
    signed = json.dumps(
        {k: v for k, v in card.items() if k != "signature"}, sort_keys=True
    ).encode()
    own = {"algorithm": "ed25519", "public_key": other.public_key().public_bytes_raw().hex()}
    reseal_card(copy, signature=own | {"value": other.sign(signed).hex()})
    assert audit(copy)[0] == 0
    code, told = audit(copy, "--key", finished / "sign.pub")
    assert code == 1
    assert "not signed by the key" in told
    card.pop("signature")
    write_table(copy / "result.json", card)
    assert audit(copy, "--key", finished / "sign.pub")[0] == 1


def test_another_model_shows(copy: Path) -> None:
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (copy / "model.safetensors").write_bytes(raw)
    code, told = audit(copy)
    assert code == 1
    assert "model.safetensors' was changed after the run" in told


def test_without_a_key_the_card_is_not_signed(tmp_path: Path) -> None:
    fedspan.run(SPEC, tmp_path, progress=False)
    assert "signature" not in read_table(tmp_path / "result.json")
    assert "not signed" in audit(tmp_path)[1]


@pytest.mark.parametrize("wrong", ["missing", "text", "curve"])
def test_a_wrong_key_is_refused_before_the_run(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key.pem"
    if wrong == "text":
        key.write_text("not a key")
    elif wrong == "curve":
        write_key(key, ec.generate_private_key(ec.SECP256R1()))
    monkeypatch.setenv("FEDSPAN_SIGN_KEY", str(key))
    with pytest.raises(SpecError, match=r"FEDSPAN_SIGN_KEY names '.*key\.pem', which"):
        fedspan.run(SPEC, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "history.jsonl").exists()


def test_an_interrupted_run_goes_on_with_one_chain(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(SPEC, out, callbacks=[Interrupt(7)], progress=False)
    code, told = audit(out)
    assert code == 0, told
    assert "not finished after 7 rounds" in told
    lines = (out / "audit.jsonl").read_bytes()
    (out / "audit.jsonl").write_bytes(b"".join(lines.splitlines(keepends=True)[:-1]))
    assert "audit.jsonl' is missing or of another run" in audit(out)[1]
    (out / "audit.jsonl").write_bytes(lines + b'{"time": "cut sh')  # killed while it wrote
    assert audit(out)[0] == 0
    fedspan.run(SPEC, out, resume=True, progress=False)
    code, told = audit(out)
    assert code == 0, told
    assert "resumed at round 7" in told
    (trail,) = trails(out)
    assert trail.of_kind(COUNTED) == {t: sorted(cohort_of((0,), 7, 3, t)[0]) for t in range(12)}


def test_a_trail_that_was_changed_before_a_resume_stays_changed(tmp_path: Path) -> None:
    """The run goes on; resuming does not wash the change away."""
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(SPEC, out, callbacks=[Interrupt(7)], progress=False)
    changed(out / "audit.jsonl", lambda lines: [*lines[:1], *lines[2:]])
    fedspan.run(SPEC, out, resume=True, progress=False)
    code, told = audit(out)
    assert code == 1
    assert "the trail begins at round 7: line 2 of" in told
    assert list(out.glob("damaged-7-audit.jsonl"))


class Killed(BaseException):
    """The process ends at once: nothing more is written."""


class Kill(Callback):
    def on_round_end(self, run: Any) -> None:
        if run.t == 10:
            raise Killed


def test_a_killed_run_keeps_its_chain(tmp_path: Path) -> None:
    """It ends after lines that no checkpoint covers."""
    with pytest.raises(Killed):
        fedspan.run(SPEC, tmp_path / "run", callbacks=[Kill()], progress=False)
    assert len(read_lines(tmp_path / "run" / "audit.jsonl")[0]) == 4
    assert audit(tmp_path / "run")[0] == 0
    fedspan.run(SPEC, tmp_path / "run", resume=True, progress=False)
    assert audit(tmp_path / "run")[0] == 0
    (trail,) = trails(tmp_path / "run")
    assert sorted(trail.of_kind(COUNTED)) == list(range(12))


def test_every_seed_has_its_trail(tmp_path: Path) -> None:
    with hostile([2], filled(3e38), {5, 7, 9}):
        ssf = {
            "name": "ssf",
            "lr": 0.02,
            "local_steps": 3,
            "rank": 4,
        }  # whose bytes depend on who took part
        fedspan.run(
            SPEC | {"clients_per_round": 4, "method": ssf}, tmp_path, seeds=2, progress=False
        )
    bytes_of = set()
    for seed, trail in enumerate(trails(tmp_path)):
        drawn = {t: set(cohort_of((seed,), 7, 4, t)[0].tolist()) for t in range(12)}
        assert {t: drawn[t] - set(clients) for t, clients in trail.of_kind(COUNTED).items()} == {
            t: set(trail.of_kind(MISSED).get(t, ())) for t in range(12)
        }
        assert trail.of_kind(MISSED)
        last = fedspan.load(tmp_path / f"seed-{seed}").history[-1]
        bytes_of.add(trail.down_bytes)
        assert (trail.up_bytes, trail.down_bytes) == (last["up_bytes"], last["down_bytes"])
        assert trail.last["loss"] == last["loss"]
    assert len(bytes_of) == 2
    code, told = audit(tmp_path)
    assert code == 0, told
    assert "seed 0" in told
    assert "seed 1" in told
    changed(tmp_path / "seed-1" / "audit.jsonl", lambda lines: lines[:-1])
    code, told = audit(tmp_path)
    assert code == 1
    assert "CHANGED" in told.split("seed 1")[1]


def test_the_trail_does_not_grow_with_the_population(tmp_path: Path) -> None:
    sizes = []
    for clients in (20, 2000):
        task = {"name": "regression", "clients": clients, "dim": 4, "samples": 2}
        fedspan.run(
            SPEC | {"task": task, "eval_every": 12}, tmp_path / str(clients), progress=False
        )
        sizes.append((tmp_path / str(clients) / "audit.jsonl").stat().st_size)
    assert sizes[1] < sizes[0] + 12 * 3 * 4


def test_ranges_are_read_back() -> None:
    for ids in ([], [3], [0, 1, 2, 7], [5, 4, 9, 10, 11]):
        assert numbers(ranges(ids)) == sorted(ids)
    assert ranges(range(1000)) == "0-999"


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    assert "there is no audit.jsonl" in audit(tmp_path)[1]


def test_lines_are_written_with_evaluations_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    honest = json_log.append
    monkeypatch.setattr(
        json_log, "append", lambda path, data: (written.append(path), honest(path, data))
    )
    fedspan.run(SPEC, tmp_path / "run", progress=False)
    assert sum(path.name == "audit.jsonl" for path in written) == 4 + 1  # evaluations, and the end
    assert torch.isfinite(torch.tensor(fedspan.load(tmp_path / "run").history[-1]["loss"]))


def test_a_line_holds_no_more_than_so_many_rounds(tmp_path: Path) -> None:
    fedspan.run(SPEC | {"rounds": 1030, "eval_every": 2000}, tmp_path, progress=False)
    lines = read_lines(tmp_path / "audit.jsonl")[0]
    rounds = [[event[0] for event in line["events"]] for line in lines if "events" in line]
    assert rounds == [list(range(1024)), list(range(1024, 1030))]


def test_the_card_names_the_round_of_the_model_and_epsilon(tmp_path: Path) -> None:
    private = {"participation": {"weights": "uniform"}, "privacy": {"clip": 1.0, "noise": 50.0}}
    result = fedspan.run(
        SPEC | private | {"callbacks": [{"name": "keep_best"}]}, tmp_path, progress=False
    )
    card = read_table(tmp_path / "result.json")
    assert card["rounds"] == 12
    assert (
        card["model_rounds"]["0"] == result.model_rounds[0] < 12
    )  # with so much noise the last model is not the best
    assert card["metrics"][0]["epsilon"] == result.history[-1]["epsilon"] > 0
