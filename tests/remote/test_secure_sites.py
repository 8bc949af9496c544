"""Tables and secure sums together: the server learns totals of the clients' tables, and the same schema as without."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")
pytest.importorskip("cryptography", reason="pip install 'fedspan[privacy]'")

import fedspan
from fedspan.core.errors import FedspanError, ProtocolError
from fedspan.core.spec import Spec
from fedspan.data.schema import SUMMABLE, Schema, sums, tally
from fedspan.remote.client import StateFile, answer_before
from fedspan.remote.messages import BEFORE, DESCRIBE, SUMS, RoundMessage
from fedspan.remote.sites import gather, to_text
from fedspan.replies.fixed_point import LIMBS, from_limbs, to_limbs
from support.flower import events_of, inside_a_task, serve  # noqa: F401
from support.sites import ILL, Sites, spec_of

SECURE = {"privacy": {"secure": True}, "eval_clients_every": None}
NAMES = ["h0", "h1", "h2"]


def specs(folder: Path, **others: Any) -> list[Spec]:
    """The spec of each hospital, with its own file."""
    data = others.pop("data", {})
    return [
        spec_of(
            folder, data=data | {"own_file": str(folder / f"{who}.csv"), "own_name": who}, **others
        )
        for who in NAMES
    ]


class Direct:
    """A channel to clients in this process, which keeps every message; `change` may replace one."""

    def __init__(self, own: list[Spec], folder: Path, change: Any = None) -> None:
        self.own, self.folder, self.change = own, folder, change or (lambda one: one)
        self.replies: list[RoundMessage] = []
        self.asked: list[RoundMessage] = []

    def deliver(self, messages: list[RoundMessage]) -> Any:
        for number, message in enumerate(messages):
            changed = self.change(message)
            if changed is None:
                continue
            self.asked.append(changed)
            file = StateFile.of(self.folder, "run", f"h{message.client}")
            try:
                found = answer_before(changed, self.own[message.client], message.client, file, None)
                reply = RoundMessage("ok", BEFORE, message.client, 0, "", found)
            except FedspanError as error:
                reply = RoundMessage("refused", BEFORE, message.client, 0, "", reason=str(error))
            self.replies.append(reply)
            yield number, reply


def agreed_over(channel: Direct, patience: float = 0.0) -> dict[str, Any]:
    spec = channel.own[0]
    return gather(channel, NAMES, "f", patience, spec.task.of_sites, spec.secure)


def train_rows(own: list[Spec]) -> list[dict[str, Any]]:
    return [one.task.data.own_rows(i, one.seed)[0] for i, one in enumerate(own)]


def test_limbs_add_up_exactly_whatever_the_sizes():
    rng = np.random.default_rng(1)
    low, high = (math.log10(size) for size in SUMMABLE)
    values = rng.normal(size=(50, 40)) * 10.0 ** rng.uniform(low + 2, high - 2, (50, 40))
    values[0, 0], values[1, 0] = 1e46, -1e46  # which cancel
    total = np.sum([to_limbs(row.tolist()) for row in values], 0, dtype=np.uint64)
    assert total.shape == (40 * LIMBS,)
    assert from_limbs(total).tolist() == [math.fsum(column) for column in values.T]
    assert from_limbs(to_limbs([-1.5, 0.0, 2.0**-395])).tolist() == [-1.5, 0.0, 2.0**-395]
    with pytest.raises(OverflowError):
        to_limbs([1e60])


def without_ranges(agreed):
    """What was agreed without the ranges of numbers, which leave no client under secure sums."""
    columns = [
        one | {"range": type(one["range"])(), "whole": 0} for one in agreed["schema"]["columns"]
    ]
    columns = type(agreed["schema"]["columns"])(columns)
    return agreed | {"schema": agreed["schema"] | {"columns": columns}}


def test_masked_totals_give_the_schema_of_sums_in_the_open_and_of_pooled_rows(tmp_path):
    own = specs(tmp_path, **SECURE)
    channel = Direct(own, tmp_path / "secure")
    masked = agreed_over(channel)
    plain = agreed_over(Direct(specs(tmp_path), tmp_path / "open"))
    assert masked == without_ranges(plain)
    assert {one.status for one in channel.asked} == {DESCRIBE, "keys", "shares", "train", "unmask"}
    together = pd.concat([pd.DataFrame(rows) for rows in train_rows(own)])
    columns = {one.name: one for one in Schema.of(masked["schema"]).used}
    for name in ("age", "pressure"):
        values = pd.to_numeric(together[name], errors="coerce")
        assert columns[name].mean[0] == pytest.approx(values.mean(), rel=1e-12)
        assert columns[name].deviation[0] == pytest.approx(values.std(ddof=0), rel=1e-12)
    counts = together["ill"].value_counts()
    assert masked["counts"] == [counts[name] for name in masked["classes"]]


def test_the_server_sees_types_texts_and_examples_of_a_client_and_none_of_its_numbers(tmp_path):
    own = specs(tmp_path, **SECURE)
    channel = Direct(own, tmp_path / "s")
    schema = Schema.of(agreed_over(channel)["schema"])
    rows = train_rows(own)
    described = [json.loads(one.arrays["text"].numpy().tobytes()) for one in channel.replies[:3]]
    for one, table in zip(described, rows, strict=True):
        assert one.keys() == {"examples", "facts", "classes", "others"}
        assert one["examples"] == len(table["ill"])
        assert one["classes"] == ["no", "yes"]
        for fact in one["facts"].values():
            assert fact.keys() == {"type", "texts", "range", "values", "row", "cell"}
            assert (fact["range"], fact["values"], fact["cell"]) == ([], [], "")
        for name in ("age", "one"):
            assert one["facts"][name]["type"] == "number"
            assert one["facts"][name]["texts"] == []
    later = channel.replies[3:]
    assert all("text" not in one.arrays for one in later)
    masked = [one for one in later if "masked" in one.arrays]
    assert len(masked) == 9
    about = {"counts": lambda i: tally(rows[i], ["age", "smoker"], own[i].task.data)}
    about |= {
        str(flag): lambda i, flag=flag: sums(schema, rows[i], "a client", flag)
        for flag in (False, True)
    }
    for one in masked:
        sent = one.arrays["masked"].numpy().view(np.uint64)
        high = sent >> np.uint64(32)
        assert (high != 0).mean() > 0.99  # limbs of one client are below 2^32
        for values in about.values():
            plain = to_limbs(values(one.client))
            assert not np.isin(plain[plain > 0], sent).any()


def test_with_uniform_weights_no_client_says_how_many_examples_it_has(tmp_path):
    own = specs(tmp_path, participation={"weights": "uniform"}, **SECURE)
    channel = Direct(own, tmp_path / "s")
    assert agreed_over(channel)["examples"] == [1, 1, 1]
    assert not any(
        one.arrays["text"].numpy().tobytes().count(b'"rows"') for one in channel.replies[:3]
    )


def test_flower_and_the_simulator_agree_under_secure_sums(tmp_path):
    """Balanced classes too, whose counts are masked totals; the simulator counts them itself."""
    training = {"class_weights": "balanced"}
    privacy = {"secure": True, "secure_bits": 64}
    spec = spec_of(tmp_path, training=training, privacy=privacy, eval_clients_every=None)
    fedspan.run(spec, tmp_path / "here", progress=False)
    grid = Sites(spec, tmp_path, tmp_path / "states")
    there = serve(spec, grid, tmp_path / "there", backup=False)
    assert grid.statuses.count(SUMS) == 0
    assert grid.statuses.count(DESCRIBE) == 3
    a, b = (json.loads((tmp_path / one / "model.json").read_text()) for one in ("here", "there"))
    assert without_ranges(a)["schema"] == b["schema"]
    x, y = (fedspan.load(tmp_path / one).weights[0] for one in ("here", "there"))
    plain = spec_of(tmp_path, privacy=privacy, eval_clients_every=None)
    z = fedspan.run(plain, progress=False).weights[0]
    for name in x:
        assert np.allclose(x[name], y[name], rtol=0, atol=1e-5)
    assert any(not np.allclose(x[name], z[name], rtol=0, atol=1e-4) for name in x)
    assert not events_of(there)
    agreed = json.loads((tmp_path / "there" / "agreed.json").read_text())
    rows = train_rows(specs(tmp_path, **SECURE))
    assert agreed["counts"] == [
        sum((table["ill"] == name).sum() for table in rows) for name in agreed["classes"]
    ]
    assert len({*agreed["counts"]}) == 2  # weights that differ


def test_the_simulator_has_the_same_schema_with_and_without_secure_sums(tmp_path):
    privacy = {"secure": True, "secure_bits": 64}
    found = []
    for name, more in {"open": {}, "secure": {"privacy": privacy}}.items():
        fedspan.run(
            spec_of(tmp_path, eval_clients_every=None, **more), tmp_path / name, progress=False
        )
        found.append(json.loads((tmp_path / name / "model.json").read_text())["schema"])
    assert found[0] == found[1]


def test_a_client_that_lost_its_disk_is_told_again_what_was_agreed_on(tmp_path):
    spec = spec_of(tmp_path, **SECURE)

    class Losing(Sites):
        def answer(self, message: Any) -> Any:
            header = message.content.get("header")
            if header is not None and (header["t"], header["status"]) == (2, "keys"):
                for file in (tmp_path / "states").rglob("h1.*"):
                    if file.is_dir():
                        shutil.rmtree(file)
                    else:
                        file.unlink(missing_ok=True)
            return super().answer(message)

    grid = Losing(spec, tmp_path, tmp_path / "states")
    told = events_of(serve(spec, grid, tmp_path / "out", backup=False))
    assert any("what the clients agreed on before round 0" in one for one in told)
    assert any("re-enters with an empty state" in one for one in told)
    assert not any("nothing counted" in one for one in told)


def test_noise_keeps_being_refused_at_both_ends(tmp_path):
    noisy = {"clip": 1.0, "noise": 1.0}
    for privacy in (noisy, noisy | {"secure": True}):
        others = {"participation": {"weights": "uniform"}, "eval_clients_every": None}
        own = specs(tmp_path, privacy=privacy, **others)
        spec = spec_of(tmp_path, privacy=privacy, **others)
        with pytest.raises(FedspanError, match="without noise; with `privacy` of `clip`"):
            serve(spec, Sites(spec, tmp_path, tmp_path / "s"), tmp_path / "out", backup=False)
        for question in (DESCRIBE, SUMS, "keys"):
            message = RoundMessage(question, BEFORE, 0, 0, "", {"text": to_text({})})
            with pytest.raises(FedspanError, match="without noise"):
                answer_before(message, own[0], 0, StateFile.of(tmp_path, "r", "h0"), None)


def test_a_client_with_secure_sums_sends_no_sums_in_the_open(tmp_path):
    file = StateFile.of(tmp_path, "run", "h0")
    asked = {"text": to_text({"columns": ["age"], "classes": []})}
    for question, own in (
        (SUMS, specs(tmp_path, **SECURE)),
        ("keys", specs(tmp_path)),
        ("evaluate", specs(tmp_path, **SECURE)),
    ):
        with pytest.raises(ProtocolError, match=r"not a question .* `privacy.secure`"):
            answer_before(RoundMessage(question, BEFORE, 0, 0, "", asked), own[0], 0, file, None)


def test_a_client_that_is_late_is_waited_for_and_named_when_it_does_not_come(tmp_path, monkeypatch):
    monkeypatch.setattr("fedspan.remote.sites.RETRY", 0.0)
    lost = [2]

    def late(message: RoundMessage) -> RoundMessage | None:
        if (message.client, message.status) == (1, "unmask") and lost[0]:
            lost[0] -= 1
            return None
        return message

    own = specs(tmp_path, **SECURE)
    found = agreed_over(Direct(own, tmp_path / "s", late), patience=60.0)
    assert found == without_ranges(agreed_over(Direct(specs(tmp_path), tmp_path / "open")))
    lost[0] = 10**6
    with pytest.raises(FedspanError) as caught:
        agreed_over(Direct(own, tmp_path / "t", late))
    assert "client 'h1' has not answered 'sums'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_question_that_differs_between_clients_or_changes_opens_nothing(tmp_path):
    own = specs(tmp_path, **SECURE)
    other = {"text": to_text({"columns": ["age"], "classes": ["nobody"]})}

    def unlike(message: RoundMessage) -> RoundMessage:
        """Client 0 alone is asked for its own classes."""
        if message.status == DESCRIBE or message.client == 0:
            return message
        return RoundMessage(message.status, BEFORE, message.client, 0, "", message.arrays | other)

    def changing(message: RoundMessage) -> RoundMessage:
        if message.status != "train":
            return message
        return RoundMessage("train", BEFORE, message.client, 0, "", message.arrays | other)

    with pytest.raises(FedspanError):
        agreed_over(Direct(own, tmp_path / "s", unlike))
    channel = Direct(own, tmp_path / "t", changing)
    with pytest.raises(FedspanError, match="not the one that the session was begun for"):
        agreed_over(channel)
    assert not any("masked" in one.arrays for one in channel.replies)


def test_sums_without_one_client_are_refused_once_all_have_been_summed(tmp_path):
    """The difference of the two would be that client's."""
    from fedspan.core.privacy import Privacy
    from fedspan.replies.fixed_point import in_limbs
    from fedspan.replies.secure.server import SecureSum

    folder = tmp_path / "s"
    own = specs(tmp_path, **SECURE)
    agreed_over(Direct(own, folder))
    channel = Direct([*own, own[0]], folder)
    text = {"text": to_text({"columns": ["age"], "classes": []})}
    refused: list[str] = []

    def ask(phase: str, messages: Any, _: Any) -> Any:
        found = {}
        asked = [RoundMessage(phase, BEFORE, i, 0, "", m | text) for i, m in messages.items()]
        for number, reply in channel.deliver(asked):
            if reply.status == "ok":
                found[asked[number].client] = reply.arrays
            else:
                refused.append(reply.reason)
        return found

    from fedspan.core.digest import digest, raw

    one = SecureSum(
        [0, 1, 3], 8 * LIMBS, in_limbs(Privacy(secure=True)), ask,
        about=f"{BEFORE} {digest(raw(text['text']), size=32)}",
    )  # fmt: skip
    with pytest.raises(ProtocolError):
        one.run()
    assert any("of which the difference" in reason for reason in refused)


@pytest.mark.parametrize("scale", [1e60, 1e-70])
def test_numbers_that_cannot_be_added_exactly_are_refused_in_one_line(scale, tmp_path, caplog):
    own = specs(tmp_path, data={"features": ["age", "sex"], "categories": []}, **SECURE)
    for who in NAMES:
        table = pd.read_csv(tmp_path / f"{who}.csv")
        table["age"] = np.linspace(1.5, 9.5, len(table)) * scale
        table.to_csv(tmp_path / f"{who}.csv", index=False)
    with pytest.raises(FedspanError) as caught:
        agreed_over(Direct(own, tmp_path / "s"))
    said = str(caught.value)
    assert "too large or too small to add up; the log of this client says where" in said
    assert "age" not in said
    assert "\n" not in said
    assert "column 'age' are too large or too small" in caplog.text


def test_two_clients_are_too_few(tmp_path):
    spec = spec_of(tmp_path, **SECURE)
    table = spec.table()
    table["task"]["partition"]["clients"] = 2
    spec = Spec.from_table(table)

    class Two(Sites):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.clients = {100: 0, 101: 1}

    with pytest.raises(FedspanError, match="at least 3 clients"):
        serve(spec, Two(spec, tmp_path, tmp_path / "s"), tmp_path / "out", backup=False)


def test_rows_that_only_a_few_clients_can_have_stay_where_they_are(tmp_path):
    """No reply holds a cell of a column of numbers, in whatever form."""
    own = specs(tmp_path, **SECURE)
    channel = Direct(own, tmp_path / "s")
    agreed_over(channel)
    said = b" ".join(
        array.numpy().tobytes() for one in channel.replies for array in one.arrays.values()
    )
    for who in NAMES:
        for cell in ILL[who]["age"][:20]:
            assert str(cell).encode() not in said
            assert np.float64(cell).tobytes() not in said
