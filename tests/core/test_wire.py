"""The codec: messages that hold messages, and logs of codes, cut, packed, counted and put together again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedspan.core import wire
from fedspan.core.encoded import Encoded
from fedspan.core.errors import ProtocolError
from fedspan.core.sync import Log, ModelSync


@dataclass(frozen=True, eq=False)
class Inner:
    """A message inside a message."""

    code: Encoded
    v: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Message:
    """All that a message may hold."""

    x: torch.Tensor
    q: Encoded
    inner: Inner
    none: Encoded | None = None
    either: torch.Tensor | Encoded | None = None


@dataclass(frozen=True, eq=False)
class Down:
    """A download with a log of codes."""

    sync: ModelSync
    q: Encoded


def code(clients: int, start: int = 0) -> Encoded:
    """Five bytes and one float a client."""
    levels = torch.arange(start, start + 5 * clients, dtype=torch.uint8).view(1, clients, 5)
    return Encoded(levels=levels, scale=torch.arange(float(clients)).view(1, clients, 1) + start)


def message(clients: int = 3) -> Message:
    inner = Inner(code(clients, 50), torch.randn(1, 1, 2))  # one vector for all, as a server sends
    return Message(torch.randn(1, clients, 4), code(clients), inner, either=code(clients, 100))


def same(a: object, b: object) -> bool:
    one, two = wire.pack(a), wire.pack(b)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_names_are_joined_by_dots_and_none_is_left_out() -> None:
    names = {"x", "q.levels", "q.scale", "inner.code.levels", "inner.code.scale", "inner.v"}
    assert set(wire.pack(message())) == names | {"either.levels", "either.scale"}


def test_nested_messages_come_back() -> None:
    sent = message()
    found = wire.unpack(Message, wire.pack(sent))
    assert same(found, sent)
    assert found.none is None
    assert found.q.values is None
    assert isinstance(found.either, Encoded)


def test_where_either_may_come_what_came_is_found() -> None:
    plain = Message(torch.randn(1, 1, 4), code(1), Inner(code(1)), either=torch.ones(1, 1, 1))
    assert isinstance(wire.unpack(Message, wire.pack(plain)).either, torch.Tensor)
    assert (
        wire.unpack(Message, {k: v for k, v in wire.pack(plain).items() if k != "either"}).either
        is None
    )


def test_bytes_are_those_of_what_one_client_is_sent() -> None:
    sent = message()
    size = wire.sizes(sent)
    assert size == 4 * 4 + 3 * (5 + 4) + 2 * 4
    for place in range(3):
        packed = wire.pack(wire.pick(sent, place))
        assert sum(a.numel() * a.element_size() for a in packed.values()) == size


def test_cut_apart_and_put_together() -> None:
    sent = message()
    parts = [wire.pick(sent, place) for place in range(3)]
    assert torch.equal(parts[2].q.levels, sent.q.levels[:, 2:])  # type: ignore[index,arg-type]
    assert torch.equal(parts[1].inner.code.scale, sent.inner.code.scale[:, 1:2])  # type: ignore[index,arg-type]
    joined = wire.gather(parts)
    assert torch.equal(joined.inner.v, sent.inner.v.expand(1, 3, 2))  # type: ignore[union-attr,arg-type]
    assert same(joined.q, sent.q)
    assert same(joined.either, sent.either)


def test_a_missing_array_is_named() -> None:
    arrays = wire.pack(message())
    with pytest.raises(ProtocolError, match="'x' is missing"):
        wire.unpack(Message, {k: v for k, v in arrays.items() if k != "x"})


def test_a_log_of_codes_travels_as_the_codes() -> None:
    """Clients away for 3, 1 and all rounds: what each is sent, its bytes, and what it makes of it."""
    x, last_round = torch.zeros(1, 1, 20), np.array([[1, 3, -1]])
    log = Log()
    for t in range(4):
        log = log.push(code(1, 10 * t), 80 // 9)
    down = Down(ModelSync(x, log, last_round), code(1, 90))
    sizes = wire.sizes(down)
    assert isinstance(sizes, np.ndarray)
    assert sizes.tolist() == [[3 * 9 + 9, 1 * 9 + 9, 80 + 9]]
    for place, wanted in enumerate(([10.0, 20.0, 30.0], [30.0], [])):
        packed = wire.pack(wire.pick(down, place))
        assert sum(a.numel() * a.element_size() for a in packed.values()) == sizes[0, place]
        arrived = wire.unpack(Down, packed).sync
        seen = []
        opened = arrived.open(
            x,
            int(last_round[0, place]),
            lambda x, entry, t, seen=seen: seen.append((t, entry)) or x,
        )  # type: ignore[misc]
        assert [float(entry.scale) for _, entry in seen] == wanted
        assert [t for t, _ in seen] == list(range(4 - len(wanted), 4))
        assert opened.log.end == (4 if wanted else 0)
    back = Log.from_arrays(log.arrays())
    assert back.end == log.end
    assert all(same(one, other) for one, other in zip(back.entries, log.entries, strict=True))


def test_a_log_sends_the_model_where_codes_are_more_bytes() -> None:
    x, log = torch.zeros(1, 1, 5), Log()  # 20 bytes, and codes of 9
    for t in range(4):
        log = log.push(code(1, t), 4)
    sync = ModelSync(x, log, np.array([[3, 2, 1]]))
    assert sync.full.tolist() == [[False, False, True]]
    assert sync.sizes().tolist() == [[9, 18, 20]]
