"""The codec: bundles of vectors, codes and logs of codes, cut, packed, counted and put together again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedspan.core import wire
from fedspan.core.bundle import Bundle, MissingPartError
from fedspan.core.encoded import Encoded
from fedspan.core.errors import ProtocolError
from fedspan.core.sync import Log, ModelSync


def code(clients: int, start: int = 0) -> Encoded:
    """Five bytes and one float a client."""
    levels = torch.arange(start, start + 5 * clients, dtype=torch.uint8).view(1, clients, 5)
    return Encoded(levels=levels, scale=torch.arange(float(clients)).view(1, clients, 1) + start)


def message(clients: int = 3) -> Bundle:
    """A vector and two codes of each client, and one vector for all, as a server sends; None is left out."""
    x, common = torch.randn(1, clients, 4), torch.randn(1, 1, 2)
    return Bundle(x=x, q=code(clients), common=common, none=None, other=code(clients, 100))


def same(a: Bundle, b: Bundle) -> bool:
    one, two = wire.pack(a), wire.pack(b)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_names_are_joined_by_dots_and_none_is_left_out() -> None:
    names = {"x", "q.levels", "q.scale", "common", "other.levels", "other.scale"}
    assert set(wire.pack(message())) == names


def test_parts_come_back() -> None:
    sent = message()
    found = wire.unpack(wire.pack(sent))
    assert same(found, sent)
    assert found.get("none") is None
    assert found.q.values is None
    assert isinstance(found.other, Encoded)


def test_a_part_may_come_as_a_vector_or_as_a_code() -> None:
    assert isinstance(wire.unpack(wire.pack(Bundle(v=torch.ones(1, 1, 1)))).v, torch.Tensor)
    assert isinstance(wire.unpack(wire.pack(Bundle(v=code(1)))).v, Encoded)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(ProtocolError, match="part 'v' of type list cannot be sent"):
        wire.pack(Bundle(v=[1.0]))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("q", "q.levels"), "'q' is there twice"),
        (("a b.levels",), "'a b' .* has an impossible name"),
        (("q.pickle",), "a compressed vector has no part 'pickle'"),
    ],
)
def test_arrays_of_no_message_are_refused(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        wire.unpack({name: torch.zeros(1, 1, 2) for name in names})


def test_bytes_are_those_of_what_one_client_is_sent() -> None:
    sent = message()
    size = wire.sizes(sent)
    assert size == 4 * 4 + 2 * (5 + 4) + 2 * 4
    for place in range(3):
        packed = wire.pack(wire.pick(sent, place))
        assert sum(a.numel() * a.element_size() for a in packed.values()) == size


def test_cut_apart_and_put_together() -> None:
    sent = message()
    parts = [wire.pick(sent, place) for place in range(3)]
    assert torch.equal(parts[2].q.levels, sent.q.levels[:, 2:])
    assert torch.equal(parts[1].other.scale, sent.other.scale[:, 1:2])
    joined = wire.gather(parts)
    assert same(joined, sent.replace(common=sent.common.expand(1, 3, 2)))


def test_a_missing_part_is_named() -> None:
    arrays = wire.pack(message())
    found = wire.unpack({k: v for k, v in arrays.items() if k != "x"})
    with pytest.raises(MissingPartError, match="no part 'x', only common, q, other; both ends"):
        _ = found.x


def test_a_log_of_codes_travels_as_the_codes() -> None:
    """Clients away for 3, 1 and all rounds: what each is sent, its bytes, and what it makes of it."""
    x, last_round = torch.zeros(1, 1, 20), np.array([[1, 3, -1]])
    log = Log()
    for t in range(4):
        log = log.push(code(1, 10 * t), 80 // 9)
    down = Bundle(sync=ModelSync(x, log, last_round), q=code(1, 90))
    sizes = wire.sizes(down)
    assert isinstance(sizes, np.ndarray)
    assert sizes.tolist() == [[3 * 9 + 9, 1 * 9 + 9, 80 + 9]]
    for place, wanted in enumerate(([10.0, 20.0, 30.0], [30.0], [])):
        packed = wire.pack(wire.pick(down, place))
        assert sum(a.numel() * a.element_size() for a in packed.values()) == sizes[0, place]
        arrived = wire.unpack(packed).sync
        seen = []
        opened = arrived.open(
            x,
            int(last_round[0, place]),
            lambda x, entry, t, seen=seen: seen.append((t, entry)) or x,
        )
        assert [float(entry.scale) for _, entry in seen] == wanted
        assert [t for t, _ in seen] == list(range(4 - len(wanted), 4))
        assert opened.log.end == (4 if wanted else 0)
    back = Log.from_arrays(log.arrays())
    assert back.end == log.end
    pairs = zip(back.entries, log.entries, strict=True)
    assert all(same(Bundle(v=one), Bundle(v=other)) for one, other in pairs)


def test_a_client_that_lacks_nothing_is_sent_nothing_and_keeps_its_copy() -> None:
    copy, down = torch.ones(1, 1, 20), ModelSync(torch.ones(1, 1, 20), Log(), np.array([[0]]))
    packed = wire.pack(wire.pick(Bundle(sync=down), 0))
    assert sum(a.numel() for a in packed.values()) == 0
    assert wire.unpack(packed).sync.open(copy, 0, lambda x, entry, t: x).model is copy


def test_a_log_sends_the_model_where_codes_are_more_bytes() -> None:
    x, log = torch.zeros(1, 1, 5), Log()  # 20 bytes, and codes of 9
    for t in range(4):
        log = log.push(code(1, t), 4)
    sync = ModelSync(x, log, np.array([[3, 2, 1]]))
    assert sync.sent[0].tolist() == [[False, False, True]]
    assert sync.sizes().tolist() == [[9, 18, 20]]
