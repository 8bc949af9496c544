"""Codes of every registered compressor: they travel, cost what is promised, and bear whatever comes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.core import encoded as codes
from fedspan.core import registry, wire
from fedspan.core.bundle import Bundle
from fedspan.core.encoded import Encoded
from fedspan.core.errors import ProtocolError
from support.codes import DTYPES, EVERY, fits, keys, make, there_and_back


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_is_its_members_one_by_one(
    name: str, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    compressor, v, of = make(name, fields), torch.randn(2, 3, 37, dtype=dtype), keys(2, 3)
    together = there_and_back(compressor, v, of)
    assert together.dtype == dtype
    assert together.shape == v.shape
    for run, client in np.ndindex(2, 3):
        one = (slice(run, run + 1), slice(client, client + 1))
        alone = there_and_back(compressor, v[one], of[one])
        torch.testing.assert_close(alone, together[one], rtol=4 * torch.finfo(dtype).eps, atol=0)


@EVERY
@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 37, 300])
def test_codes_survive_the_wire_and_cost_what_they_promise(
    name: str, fields: dict[str, Any], n: int
) -> None:
    compressor = make(name, fields)
    if not fits(compressor, n):
        return
    v, of = torch.randn(1, 3, n), keys(1, 3)
    code = compressor.compress(v, of)
    whole = compressor.decompress(code, n, of, v.dtype)
    for client in range(3):
        packed = wire.pack(wire.pick(Bundle(v=code), client))
        assert all(part.dtype in (torch.uint8, v.dtype) for part in packed.values())
        assert (
            sum(a.numel() * a.element_size() for a in packed.values())
            == code.bytes
            == promised(compressor, n)
        )
        again = compressor.decompress(wire.unpack(packed).v, n, of[:, client : client + 1], v.dtype)
        assert torch.equal(again, whole[:, client : client + 1])


def promised(compressor: Any, n: int, item: int = 4) -> int:
    """Bytes of a code, from the formulas in the docs."""
    scales = item * math.ceil(n / (getattr(compressor, "bucket", None) or n))
    match registry.name_of(compressor):
        case "identity":
            return item * n
        case "randk":
            return item * compressor.kept(n)
        case "topk":
            among = min(n, compressor.chunk or n)
            return item * compressor.kept(n) + math.ceil(
                compressor.kept(n) * max(1, math.ceil(math.log2(among))) / 8
            )
        case "qsgd":
            return math.ceil(n * (1 + math.ceil(math.log2(compressor.levels + 1))) / 8) + scales
        case "sign":
            double = 2 if compressor.sizes == 2 else 1
            return math.ceil(double * n / 8) + double * scales
        case _:
            k = compressor.inner.kept(n)
            return promised(compressor.inner, n) - item * k + promised(compressor.outer, k)


@EVERY
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_and_nothing_is_changed(
    name: str, fields: dict[str, Any], dtype: torch.dtype
) -> None:
    compressor, of = make(name, fields), keys(1, 2)
    zeros = torch.zeros(1, 2, 21, dtype=dtype)
    assert (there_and_back(compressor, zeros, of) == 0).all()
    v = torch.randn(1, 2, 21, dtype=dtype)
    kept = v.clone()
    code = compressor.compress(v, of)
    before = {name: part.clone() for name, part in code.parts.items()}
    compressor.decompress(code, 21, of, dtype)
    assert torch.equal(v, kept)
    assert all(torch.equal(code.parts[name], part) for name, part in before.items())


@EVERY
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_come_back_finite(
    name: str, fields: dict[str, Any], bad: float
) -> None:
    """And a client beside it is not touched."""
    compressor, v, of = make(name, fields), torch.randn(1, 2, 21), keys(1, 2)
    fine = there_and_back(compressor, v, of)
    v = v.clone()
    v[0, 0] = bad
    found = there_and_back(compressor, v, of)
    assert not torch.isfinite(found[0, 0]).all()
    assert torch.equal(found[0, 1], fine[0, 1])
    if "randk" not in (
        name,
        fields.get("inner", {}).get("name"),
    ):  # which looks at some of the numbers only
        v[0, 0] = torch.randn(21)
        v[0, 0, 20] = bad
        assert not torch.isfinite(there_and_back(compressor, v, of)[0, 0]).all()


@EVERY
def test_bytes_of_a_stranger_do_no_harm(name: str, fields: dict[str, Any]) -> None:
    """Any payload of the right shape, with a finite scale, gives finite numbers; none raises."""
    compressor, of = make(name, fields), keys(1, 1)
    code = compressor.compress(torch.randn(1, 1, 21), of)
    for fill in (0, 85, 255):
        parts = {
            k: torch.full_like(p, fill) if p.dtype == torch.uint8 else p
            for k, p in code.parts.items()
        }
        assert torch.isfinite(compressor.decompress(Encoded(**parts), 21, of, torch.float32)).all()
    with pytest.raises(ProtocolError, match="same compressor"):
        compressor.decompress(Encoded(), 21, of, torch.float32)


@EVERY
def test_same_key_same_code(name: str, fields: dict[str, Any]) -> None:
    compressor, v = make(name, fields), torch.randn(1, 1, 200)
    one, two, other = (compressor.compress(v, keys(1, 1, seed=seed)).parts for seed in (3, 3, 4))
    assert all(torch.equal(one[part], two[part]) for part in one)
    if name in ("randk", "qsgd") and fields.get("k") != 1.0:  # which draws nothing
        assert any(not torch.equal(one[part], other[part]) for part in one)


@given(st.integers(1, 40), st.integers(1, 60), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_whole_numbers_of_any_width_are_packed_without_gaps(
    width: int, n: int, random: Any
) -> None:
    drawn = torch.tensor([[random.randrange(1 << width) for _ in range(n)] for _ in range(2)])
    packed = codes.pack(drawn, width)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, math.ceil(n * width / 8))
    assert torch.equal(codes.unpack(packed, width, n).long(), drawn)


def test_the_width_of_whole_numbers() -> None:
    assert [codes.width_of(most) for most in (0, 1, 2, 3, 4, 14, 255, 256)] == [
        1,
        1,
        2,
        2,
        3,
        4,
        8,
        9,
    ]
