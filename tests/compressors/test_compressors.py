"""Laws of every registered compressor: unbiased or contractive as it says."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.core import registry, seeds, tables
from fedspan.core.compressor import Compressor
from fedspan.core.errors import SpecError
from support.codes import COMPRESSORS, EVERY, QSGD, TOPK, fits, keys, make, there_and_back
from support.loops import small, start
from support.methods import build

numbers = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-6])


def test_every_compressor_has_settings_here() -> None:
    assert set(COMPRESSORS) == set(registry.choices("compressor"))


def laws(compressor: Compressor, v: torch.Tensor, draws: int, seed: int) -> None:
    """Mean and error over many draws of C(v).

    If C is unbiased, E‖mean − v‖² ≤ ω‖v‖²/draws; six times the root of that is allowed. The mean of ‖C(v) − v‖² may
    exceed its bound by six of its standard errors. What is not random must keep to its bound to rounding.
    """
    n, square = v.shape[-1], float(v.double() @ v.double())
    found = there_and_back(compressor, v.expand(draws, 1, n), keys(draws, 1, seed=seed))[
        :, 0
    ].double()
    errors = ((found - v.double()) ** 2).sum(-1)
    room = 6 * float(errors.std()) / math.sqrt(draws) + 4 * torch.finfo(v.dtype).eps * square
    omega, delta = compressor.omega(n), compressor.delta(n)
    if omega is not None:
        off = float((found.mean(0) - v.double()).norm())
        assert off <= math.sqrt(square) * (
            6 * math.sqrt(omega / draws) + 4 * torch.finfo(v.dtype).eps
        )
        assert float(errors.mean()) <= omega * square + room
    if delta is not None:
        assert 0 < delta <= 1
        assert float(errors.mean()) <= (1 - delta) * square + room


@EVERY
@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(numbers, min_size=1, max_size=70),
    seed=st.integers(0, 2**32),
    scale=st.integers(-60, 60),
)
def test_any_vector_keeps_the_law(
    name: str, fields: dict[str, Any], values: list[float], seed: int, scale: int
) -> None:
    compressor = make(name, fields)
    if fits(compressor, len(values)):
        laws(compressor, torch.tensor(values, dtype=torch.float64) * 2.0**scale, 400, seed)


SHAPES = {
    "normal": lambda n: torch.from_numpy(seeds.normal(keys(1), n)[0]),
    "heavy": lambda n: torch.from_numpy(seeds.normal(keys(1), n)[0] ** 5),
    "alone": lambda n: torch.eye(n)[n // 2],
    "equal": lambda n: torch.full((n,), -0.7),
    "tiny": lambda n: torch.from_numpy(seeds.normal(keys(1), n)[0]) * 1e-30,
    "huge": lambda n: torch.from_numpy(seeds.normal(keys(1), n)[0]) * 1e30,
}


@EVERY
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 13, 64])
def test_the_law_over_many_draws(name: str, fields: dict[str, Any], shape: str, n: int) -> None:
    """10,000 draws in float32, where tiny and huge squares would vanish or overflow."""
    compressor = make(name, fields)
    if fits(compressor, n):
        laws(compressor, SHAPES[shape](n).float(), 10_000, 7)


def test_a_bias_would_be_seen() -> None:
    """The law itself has teeth: what is unbiased only by its own word fails it."""

    class Liar(type(make("randk", {"k": 0.9}))):  # type: ignore[misc]
        def omega(self, n: int) -> float:
            return 0.2

    with pytest.raises(AssertionError):
        laws(Liar(k=0.9, unbiased=False), SHAPES["normal"](64).float(), 20_000, 7)


def test_the_bounds_are_met_where_they_are_exact() -> None:
    v = SHAPES["normal"](64)
    for fields, exact in (({"k": 16}, 3.0), ({"k": 16, "unbiased": False}, 0.75)):
        found = there_and_back(make("randk", fields), v.expand(20_000, 1, 64), keys(20_000, 1))[
            :, 0
        ]
        assert float(((found - v) ** 2).sum(-1).mean() / (v @ v)) == pytest.approx(exact, rel=0.02)


def test_signs_have_the_mean_size_of_their_bucket_and_ties_fill_k() -> None:
    """Also in a last bucket that is not full; of equal numbers as many are kept as there is room for."""
    v = torch.tensor([[[1.0, -2.0, 3.0, -4.0, 5.0]]])
    assert there_and_back(make("sign", {}), v, keys(1, 1)).flatten().tolist() == [3, -3, 3, -3, 3]
    assert there_and_back(make("sign", {"bucket": 3}), v, keys(1, 1)).flatten().tolist() == [
        2,
        -2,
        2,
        -4.5,
        4.5,
    ]
    found = there_and_back(
        make("topk", {"k": 3}), torch.tensor([[[1.0, -1.0, 2.0, 1.0, 0.5]]]), keys(1, 1)
    ).flatten()
    assert sorted(found.abs().tolist()) == [0, 0, 1, 1, 2]


def test_sizes_of_signs() -> None:
    """Two means, or ±1, where an entry of zero is as often one as the other."""
    v = torch.tensor([[[1.0, -2.0, 3.0, -10.0, 0.0]]])
    two = there_and_back(make("sign", {"sizes": 2}), v, keys(1, 1)).flatten().tolist()
    assert two == [1.5, -1.5, 1.5, -10, 1.5]
    drawn = there_and_back(
        make("sign", {"sizes": 0}), v.expand(1, 2000, 5).contiguous(), keys(1, 2000)
    )
    assert (drawn[..., :4] == v[..., :4].sign()).all()
    assert drawn[..., 4].abs().eq(1).all()
    assert abs(float(drawn[..., 4].mean())) < 6 * 2000**-0.5


def test_every_chunk_keeps_its_largest() -> None:
    v = torch.tensor([[[9.0, 8.0, 7.0, 1.0, -2.0, 0.5, 0.1]]])
    found = there_and_back(make("topk", {"k": 1, "chunk": 3}), v, keys(1, 1)).flatten().tolist()
    assert found == pytest.approx([9, 0, 0, 0, -2, 0, 0.1])
    topk = make("topk", {"k": 0.02, "chunk": 4096})
    n = 3 * 4096 + 100
    assert topk.kept(n) == 3 * 82 + 82  # type: ignore[attr-defined]
    sent = topk.compress(torch.randn(1, 1, n), keys(1, 1))
    assert sent.bytes == 4 * 82 * 4 + 4 * 82 * 12 // 8


def test_what_a_division_by_one_plus_omega_does() -> None:
    for name, fields in (("randk", {"k": 0.3}), ("qsgd", {"bits": 3})):
        plain, divided = make(name, fields), make(name, fields | {"unbiased": False})
        v, of = SHAPES["normal"](40).view(1, 1, -1), keys(1, 1)
        factor = 1 / (1 + plain.omega(40))  # type: ignore[operator]
        torch.testing.assert_close(
            there_and_back(divided, v, of), there_and_back(plain, v, of) * factor
        )
        assert divided.omega(40) is None
        assert divided.delta(40) == pytest.approx(factor)


def test_which_are_unbiased_and_which_contractive() -> None:
    qsgd = {"name": "qsgd", "bits": 4, "bucket": 16}
    kinds = {
        "everything": (make("randk", {"k": 1.0}), 0.0, 1.0),
        "topk": (make("topk", {"k": 0.25}), None, 0.25),
        "randk": (make("randk", {"k": 0.25}), 3.0, None),
        "most": (make("randk", {"k": 0.8}), 0.25, 0.75),
        "qsgd": (make("qsgd", {"bits": 4}), 10 / 7, None),
        "buckets": (make("qsgd", {"bits": 4, "bucket": 16}), 16 / 49, 33 / 49),
        "sign": (make("sign", {}), None, 0.01),
        "both": (
            make("compose", {"outer": qsgd, "inner": {"name": "randk", "k": 0.5}}),
            81 / 49,
            None,
        ),
        "qsparse": (
            make("compose", {"outer": qsgd, "inner": {"name": "topk", "k": 0.5}}),
            None,
            33 / 98,
        ),
        "neither": (
            make("compose", {"outer": {"name": "sign"}, "inner": {"name": "randk", "k": 0.25}}),
            None,
            None,
        ),
    }
    for name, (compressor, omega, delta) in kinds.items():
        assert compressor.omega(100) == (None if omega is None else pytest.approx(omega)), name
        assert compressor.delta(100) == (None if delta is None else pytest.approx(delta)), name


@pytest.mark.parametrize("k", [0, -1, 0.0, 1.5, float("nan"), True])
def test_a_k_that_makes_no_sense_is_refused(k: float) -> None:
    for name in ("topk", "randk"):
        with pytest.raises(SpecError, match="k` must be"):
            make(name, {"k": k}) if not isinstance(k, bool) else registry.choices("compressor")[
                name
            ](k=k)


def test_k_is_a_number_or_a_share() -> None:
    assert [make("topk", {"k": k}).kept(50) for k in (5, 0.1, 1e-9, 1.0)] == [5, 5, 1, 50]  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="larger than the 50 numbers"):
        make("topk", {"k": 51}).kept(50)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": "qsgd", "bits": 1}, "bits"),
        ({"name": "qsgd", "bucket": 0}, "bucket"),
        ({"name": "sign", "bucket": 0}, "bucket"),
        ({"name": "sign", "sizes": 3}, "sizes"),
        ({"name": "topk", "chunk": 0}, "chunk"),
        ({"name": "compose", "outer": QSGD}, "`compressor.inner` is missing"),
        ({"name": "tokp", "k": 1}, "did you mean 'topk'"),
        (
            {"name": "compose", "outer": TOPK, "inner": TOPK},
            "`compressor.outer` must not be sparse, got 'topk'",
        ),
        (
            {"name": "compose", "outer": QSGD, "inner": QSGD},
            "`compressor.inner` must keep some of the numbers",
        ),
        (
            {"name": "compose", "outer": QSGD, "inner": 3},
            "`compressor.inner` must be a compressor, its name or",
        ),
    ],
)
def test_bad_values_are_named(table: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        tables.build("compressor", table)


@EVERY
def test_is_a_value_that_a_spec_can_hold(name: str, fields: dict[str, Any]) -> None:
    compressor = make(name, fields)
    assert compressor == make(name, fields)
    assert hash(compressor) == hash(make(name, fields))
    assert tables.build("compressor", tables.describe(compressor)) == compressor
    assert len(registry.summary(type(compressor))) > 20


def test_each_client_keeps_coordinates_of_its_own() -> None:
    rnd = start(build("fedavg"), small(seeds=(5, 6)))._round()
    own = make("randk", {"k": 0.5}).keys(rnd)
    assert len(set(own.ravel().tolist())) == own.size == 6
    alone = rnd.subset(np.array([1]))
    assert make("randk", {"k": 0.5}).keys(alone).tolist() == own[:, 1:2].tolist()


@pytest.mark.parametrize("name", list(COMPRESSORS))
def test_a_large_vector_takes_no_loop_over_its_numbers(name: str) -> None:
    """Two million numbers, far below the time of a Python loop over them, here and back."""
    big = {
        "qsgd": {"bucket": 512},
        "compose": {"outer": {"name": "qsgd"}, "inner": {"name": "topk", "k": 0.01}},
    }
    compressor = make(
        name,
        big.get(name, COMPRESSORS[name][0] | ({"k": 0.01} if "k" in COMPRESSORS[name][0] else {})),
    )
    v = torch.randn(1, 1, 2_000_000)
    began = time.process_time()
    there_and_back(compressor, v, keys(1, 1))
    assert time.process_time() - began < 2
