"""Large arrays are sent in pieces that are views of them, and read piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedspan.core.errors import ProtocolError
from fedspan.remote.flower import records
from fedspan.remote.messages import RoundMessage

MOST = 1 << 20


def message(x: torch.Tensor) -> RoundMessage:
    return RoundMessage(
        "ok", 0, 0, 0, "f", {"x": x, "probe": torch.ones(1, 1, 1, dtype=torch.float64)}
    )


def carried(content: RecordDict) -> RecordDict:
    """The records as the other end gets them."""
    arrays = {
        k: Array(a.dtype, tuple(a.shape), a.stype, bytes(a.data))
        for k, a in content["arrays"].items()
    }
    header = content["header"]
    assert isinstance(header, ConfigRecord)
    return RecordDict({"header": header, "arrays": ArrayRecord(arrays)})


PIECE = 1000  # bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_array_arrives_as_it_was_sent(dtype: torch.dtype) -> None:
    x = torch.randn(1, 1, 1777).to(dtype)
    content = carried(records.write_message(message(x), PIECE))
    assert len(content["arrays"]) > 3
    found = records.read_message(content, MOST).arrays["x"]
    assert found.dtype == dtype
    assert torch.equal(found, x)


def test_nothing_is_copied_to_send_and_every_piece_is_freed_when_it_is_read() -> None:
    x = torch.randn(1, 1, 5000)
    content = records.write_message(message(x), PIECE)
    views = [array.data for name, array in content["arrays"].items() if name.startswith("x")]
    assert sum(len(view) for view in views) == x.nbytes
    assert all(np.shares_memory(np.frombuffer(view, np.uint8), x.numpy()) for view in views)
    arrived = carried(content)
    records.read_message(arrived, MOST)
    assert list(arrived["arrays"]) == ["probe#0"]


def lacking(arrays: dict[str, Any]) -> None:
    del arrays["x#1"]


def other_shape(arrays: dict[str, Any]) -> None:
    arrays["x#0"] = Array("<f4", (1, 1, 10**12), "raw", arrays["x#0"].data)


def other_type(arrays: dict[str, Any]) -> None:
    arrays["x#0"] = Array("|O8", arrays["x#0"].shape, "raw", arrays["x#0"].data)


def negative(arrays: dict[str, Any]) -> None:
    arrays["x#0"] = Array("<f4", (-1, -1777), "raw", arrays["x#0"].data)


@pytest.mark.parametrize("spoil", [lacking, other_shape, other_type, negative])
def test_pieces_that_do_not_fit_are_refused(spoil: Callable[[dict[str, Any]], None]) -> None:
    content = carried(records.write_message(message(torch.randn(1, 1, 1777)), PIECE))
    arrays = dict(content["arrays"].items())
    spoil(arrays)
    header = content["header"]
    assert isinstance(header, ConfigRecord)
    with pytest.raises(ProtocolError, match="array 'x'"):
        records.read_message(RecordDict({"header": header, "arrays": ArrayRecord(arrays)}), MOST)
