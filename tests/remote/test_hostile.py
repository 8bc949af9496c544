"""Hostile and broken messages: none ends the run, hangs it or costs more memory than an honest one."""

from __future__ import annotations

import math
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedspan.core.config import Participation
from fedspan.core.errors import one_line
from fedspan.engine.loop import Loop
from fedspan.remote.flower import server
from fedspan.remote.flower.client import agreement_of, reply_to
from fedspan.remote.flower.records import read_message, write_message
from fedspan.remote.messages import DroppedError, RoundMessage
from fedspan.remote.server import RemoteTransport
from fedspan.replies.chain import Chain, in_words
from support.axes import by_axis
from support.flower import FakeGrid, events_of, inside_a_task, serve, spec_of  # noqa: F401
from support.methods import METHODS

METHODS_TRIED = ("ssf", "ssf, tested", "ef", "compressed", "powersgd")
MANY = {f"a{i}": Array(np.zeros(1, np.float32)) for i in range(5000)}
ODD = (np.nan, np.inf, -np.inf, -3e38, 1e30, -1.0, 1e-45)
DEPTH = {  # how far a reply came: words of the refusal, and for which methods
    "not one of fedspan's": METHODS_TRIED, "header keys; that is too many": METHODS_TRIED,
    "is longer than": METHODS_TRIED, "bytes of arrays; at most": METHODS_TRIED,
    "are not complete": METHODS_TRIED, "is of type": METHODS_TRIED, "claims shape": METHODS_TRIED,
    "the header's": METHODS_TRIED, "another method, model, seed": METHODS_TRIED, "the reply has arrays": METHODS_TRIED,
    "), expected ((": METHODS_TRIED, "values that are not finite": METHODS_TRIED,
    "its statistics are outside their ranges": ("ssf, tested",),
}  # fmt: skip
DTYPES = (
    "<f4",
    ">f4",
    "<f8",
    "<f2",
    "<i8",
    ">i8",
    "<i2",
    "|u1",
    "|b1",
    "<c8",
    "<U4",
    "<M8[s]",
    "|V8",
)


def honest(name: str, tmp_path: Path) -> tuple[RemoteTransport, Any, Any, RecordDict]:
    """(the server's end, a round of one client, its download, the client's honest reply)."""
    name, _, correction = name.partition(", ")
    method = {"name": name, "lr": 0.02, "local_steps": 2} | METHODS[name][0]
    method |= {"correction": correction} if correction else {}
    spec = spec_of(by_axis(method), clients_per_round=1)
    problem = spec.task.server_problem((spec.seed,), spec)
    agreement = agreement_of(spec, problem)
    transport = RemoteTransport(
        spec.method,
        problem.layout,
        problem.x0,
        problem.clients,
        None,
        agreement,  # type: ignore[arg-type]
    )
    loop = Loop(spec.method, problem, transport, (spec.seed,), 1)
    rnd = loop._round()
    down = spec.method.broadcast(loop.server, rnd)
    arrays = {
        k: torch.zeros(v.shape, dtype=v.dtype) for k, v in transport._expect(rnd, down, {}).items()
    }
    for array in arrays.values():
        if array.is_floating_point():
            array.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.1).abs_()
    reply = RoundMessage("ok", rnd.t, int(rnd.ids[0, 0]), 0, agreement.fingerprint, arrays)
    return transport, rnd, down, write_message(reply)


def spoil_array(rng: random.Random, array: Array) -> Array:
    """One array of a reply, changed."""
    dtype, shape, stype, raw = array.dtype, array.shape, array.stype, bytearray(array.data)
    size, choice = len(raw), rng.randrange(12)
    if choice == 0:
        for _ in range(rng.randint(1, 12) if size else 0):
            raw[rng.randrange(size)] = rng.randrange(256)
    elif choice == 1:
        raw = raw[: rng.randrange(size + 1)]
    elif choice == 2:
        raw = bytearray(rng.randbytes(rng.randint(0, 300)))
    elif choice == 3:
        dtype, shape = rng.choice(DTYPES), (1, 1, size // 4)
    elif choice == 4:
        shape = rng.choice([(), (0,), (10**12,), (1, 1, 2**62), (-1, 4), (1,) * 40, (-1, -size)])
    elif choice == 5:
        raw[:] = np.full(size // 4, rng.choice([np.nan, np.inf, 3e38]), np.float32).tobytes()
    elif choice == 6:
        raw[:] = rng.randbytes(size)  # for packed indices: places that do not exist
    elif choice == 10:
        kind = np.dtype(rng.choice(("<f4", "<f8", "<f2", "<i8", "<i4", "<i2", "|u1")))
        ones = (), (3,), (1, 1, 1), (1, 1, 7), (1, 2, 6), (2, 1, 6), (1, 1, 6), (1, 1, 0)
        shape = rng.choice([*ones, (1, 1, 1, 6)])
        dtype, raw = kind.str, bytearray(math.prod(shape) * kind.itemsize)
    elif choice == 7:
        raw += rng.randbytes(rng.randint(1, 10_000))
    elif choice == 11:
        stype = rng.choice(("", "numpy.ndarray", "pickle"))
    else:  # an array as it must look, with other numbers
        numbers = np.frombuffer(bytes(raw), np.dtype(dtype)).copy()
        if numbers.size:
            kinds = (
                ODD
                if numbers.dtype.kind == "f"
                else (np.iinfo(numbers.dtype).min, np.iinfo(numbers.dtype).max)
            )
            numbers[rng.randrange(numbers.size) if choice == 8 else slice(None)] = rng.choice(kinds)
        raw = bytearray(numbers.tobytes())
    return Array(dtype, tuple(shape), stype, bytes(raw))


def spoil_header(rng: random.Random, header: dict[str, Any]) -> dict[str, Any]:
    """The header of a reply, changed."""
    values = [
        0,
        -1,
        2**63 - 1,
        1.5,
        True,
        "",
        "ok",
        "lost",
        "refused",
        "failed",
        "\x1b[2J\nforged line",
        "é" * 20_000,
    ]
    header = dict(header)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([*header, "settings", "reason", "more"])
        if rng.random() < 0.2:
            header.pop(key, None)
        else:  # half of them of the right type: another round, another client, another run
            alike = [value for value in values if type(value) is type(header.get(key))]
            header[key] = rng.choice(alike if alike and rng.random() < 0.5 else values)
    if rng.random() < 0.05:
        header |= {f"k{i}": i for i in range(5000)}
    if rng.random() < 0.1:
        header |= {
            "status": "refused",
            "settings": rng.choice(["[" * 3000, '{"a":' * 2000, "null", "[1]", '{"seed": []}']),
        }
    return header


def spoil(rng: random.Random, content: RecordDict) -> RecordDict:
    """A reply of somebody who wants to harm the server, or whose disk or program is broken."""
    header, arrays = dict(content["header"]), dict(content["arrays"].items())
    kind = rng.randrange(10)
    if kind < 4 and arrays:
        name = rng.choice(list(arrays))
        arrays[name] = spoil_array(rng, arrays[name])
    elif kind < 7:
        header = spoil_header(rng, header)
    elif kind == 7:
        names = [
            "a",
            "x" * 500,
            "a.b.c",
            "restore.c",
            "sync.x",
            "__class__",
            "../../etc",
            "a\n\x07b",
            "buffers",
        ]
        end = rng.choice(["", "#0", "#1", "#"])
        arrays = {rng.choice(names) + end: array for array in arrays.values()} | {
            rng.choice(names): Array(np.zeros(3))
        }
    elif kind == 8:
        arrays = dict(list(MANY.items())[: rng.choice([0, 2, 50, 5000])])
    else:
        broken = [
            RecordDict(),
            RecordDict({"header": ConfigRecord({})}),
            RecordDict({"arrays": ArrayRecord()}),
        ]
        return rng.choice(broken)
    return RecordDict({"header": ConfigRecord(header), "arrays": ArrayRecord(arrays)})


def screened(transport: RemoteTransport) -> Chain:
    return Chain(transport.method, Participation())


class OneReply:
    """A channel that answers every message with the given reply, as Flower's channel reads it."""

    def __init__(self, contents: Callable[[], RecordDict]) -> None:
        self.contents = contents
        self.inner = server.GridChannel(None, 7, 1.0)  # type: ignore[arg-type]

    def deliver(
        self, messages: list[RoundMessage]
    ) -> Iterator[tuple[int, RoundMessage | DroppedError]]:
        for index, message in enumerate(messages):
            reply = Message(self.contents(), 1, "train")
            yield index, self.inner._read(reply, message.max_reply)


@pytest.mark.parametrize(
    "count", [pytest.param(500, id="some"), pytest.param(50_000, id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", METHODS_TRIED)
def test_no_reply_ends_or_stalls_the_server(name: str, count: int, tmp_path: Path) -> None:
    transport, rnd, down, good = honest(name, tmp_path)
    rng, accepted, refused, slowest = random.Random(7), 0, 0, 0.0
    fresh = {key: array.clone() for key, array in transport.save().items()}
    reached, header = Counter[str](), dict(good["header"])
    for _ in range(count):
        hostile = spoil(rng, good)
        transport.channel = OneReply(lambda hostile=hostile: hostile)  # type: ignore[misc]
        transport.load(
            {key: array.clone() for key, array in fresh.items()}
        )  # else it is a reply to another message
        began = time.process_time()
        replies = transport.exchange(rnd, down, None, screened(transport))
        slowest = max(slowest, time.process_time() - began)
        told = in_words(rnd.t, replies.events)
        for event in told:
            assert event.isprintable(), event
            assert len(event) < 500
        if len(replies.places):
            accepted += 1
            transport.method.server_step(transport._first_server, replies.up, rnd)
        else:
            refused += 1
            assert replies.events
        said = " ".join(told)
        reached.update(words for words in DEPTH if words in said)
        if "another message" in said:
            assert any(
                hostile["header"].get(key) != header[key]
                for key in ("t", "client", "accepted", "mark")
            )
    assert refused > 0.6 * count
    assert accepted > 0.05 * count, (
        "some changes do no harm; where nothing is accepted the test shows nothing"
    )
    assert [
        words for words, methods in DEPTH.items() if name in methods and reached[words] < 2
    ] == []
    assert slowest < 2.0


def test_a_large_reply_costs_no_memory(tmp_path: Path) -> None:
    transport, rnd, down, good = honest("ssf", tmp_path)
    header, arrays = good["header"], dict(good["arrays"].items())
    honest_bytes = sum(len(array.data) for array in arrays.values())
    name = next(iter(arrays))
    claims = Array("<f4", (1, 1, 10**9), "raw", b"")
    hostile = RecordDict(
        {
            "header": header,
            "arrays": ArrayRecord(arrays | {name: claims}),
        }
    )
    transport.channel = OneReply(lambda: hostile)
    tracemalloc.start()
    replies = transport.exchange(rnd, down, None, screened(transport))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not len(replies.places)
    assert peak < 2 * honest_bytes + 200_000


@pytest.mark.parametrize(
    "count", [pytest.param(500, id="some"), pytest.param(20_000, id="many", marks=pytest.mark.slow)]
)
def test_no_download_harms_a_client(count: int, tmp_path: Path) -> None:
    """Whatever the server sends, the client replies, keeps to its own directory and does not lose its state."""
    spec = spec_of()
    grid, sent = FakeGrid(spec, tmp_path / "states"), []
    grid.answer = lambda message: sent.append(message) or FakeGrid.answer(grid, message)  # type: ignore[method-assign, func-returns-value]
    serve(spec, grid, tmp_path / "out")
    messages = [m for m in sent if m.metadata.message_type == "train"]
    last = messages[-1]
    node = last.metadata.dst_node_id
    config = {"partition-id": grid.clients[node], "states-dir": str(tmp_path / "states")}
    file = tmp_path / "states" / "run" / f"client-{grid.clients[node]}.safetensors"
    good_state, rng, reached = file.read_bytes(), random.Random(3), Counter[str]()
    for _ in range(count):
        context = Context(
            run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={}
        )
        reply = reply_to(Message(spoil(rng, last.content), node, "train"), context, spec)
        reached[read_message(reply, 1 << 20).status] += 1
        file.write_bytes(good_state)
    assert set(reached) == {"ok", "lost", "refused", "failed"}
    assert reached["ok"] > 0.1 * count, "some changes do no harm"
    outside = [
        p
        for p in tmp_path.rglob("*")
        if p.is_file()
        and p.parent not in (file.parent, tmp_path / "out", tmp_path / "out" / "copies")
    ]
    assert outside == []


def test_words_of_others_are_safe_in_a_log() -> None:
    assert one_line("a\x1b[2J\nb\x07\r c" + "x" * 9999).startswith("a [2J b c")
    assert len(one_line("x" * 9999)) == 300
