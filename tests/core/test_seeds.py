"""The shared seed is a protocol: these numbers must never change, on any machine."""

from __future__ import annotations

import os
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedspan.core import seeds, tables
from fedspan.core.layout import Block, Layout
from fedspan.core.projector import draw

# Measured once and kept: two releases that draw differently must not talk to each other.
FROZEN = {
    "key": 1259708419074632788,
    "choose": [3, 10, 14, 17, 18],
    "integers": [44, 9, 10, 28, 31, 48],
    "permute": [1, 2, 4, 3, 5, 0],
    "normal": [1.277015922855518, -0.8466735523761448, -0.8203579881887902],
}


def test_bits_are_splitmix64() -> None:
    """First outputs of SplitMix64 from state 0, as published with the reference C code."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert seeds.bits(np.array([0], np.uint64), 3)[0].tolist() == expected


def test_protocol_values_are_frozen() -> None:
    k = np.array([seeds.key(7, "cohort", 3)], np.uint64)
    assert int(k[0]) == FROZEN["key"]
    assert seeds.choose(k, 20, 5)[0].tolist() == FROZEN["choose"]
    assert seeds.integers(k, 6, 50)[0].tolist() == FROZEN["integers"]
    assert seeds.permute(k, 6)[0].tolist() == FROZEN["permute"]
    np.testing.assert_allclose(seeds.normal(k, 3)[0], FROZEN["normal"], rtol=1e-13)


@given(st.integers(0, 2**63), st.integers(0, 10**6), st.integers(0, 10**6))
def test_children_are_the_keys_of_paths(seed: int, t: int, client: int) -> None:
    parent = np.array([seeds.key(seed, "batch", t)], np.uint64)
    assert int(seeds.children(parent, np.array([client]))[0]) == seeds.key(seed, "batch", t, client)


@given(st.integers(0, 2**63), st.integers(1, 60), st.data())
def test_choose_draws_different_numbers(seed: int, population: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, population))
    chosen = seeds.choose(np.array([seed], np.uint64), population, size)[0]
    assert len(set(chosen.tolist())) == size
    assert chosen.min() >= 0
    assert chosen.max() < population
    assert (np.diff(chosen) > 0).all()


def floyd(drawn: list[int], population: int, size: int) -> list[int]:
    """Floyd's method step by step, in whole numbers of any length."""
    taken: set[int] = set()
    for top, bits in enumerate(drawn, population - size):
        pick = bits * (top + 1) >> 64
        taken.add(top if pick in taken else pick)
    return sorted(taken)


@given(st.integers(0, 2**63), st.integers(1, 300) | st.integers(2**31, 2**32 - 1), st.data())
def test_choose_is_floyds_method(seed: int, population: int, data: st.DataObject) -> None:
    """Whole arrays at once, and the very same numbers."""
    size = data.draw(st.integers(1, min(population, 300)))
    keys = np.array([[seed, seed + 1], [seed + 2, 5]], np.uint64)
    chosen = seeds.choose(keys, population, size)
    for place in np.ndindex(2, 2):
        assert chosen[place].tolist() == floyd(
            seeds.bits(keys, size)[place].tolist(), population, size
        )


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_a_stream_can_be_drawn_in_pieces(seed: int, start: int) -> None:
    key = np.array([seed], np.uint64)
    assert (seeds.bits(seeds.later(key, start), 7) == seeds.bits(key, start + 7)[:, start:]).all()


def test_choose_is_uniform() -> None:
    """Each of 10 is drawn in 3 of 10 cases; 40,000 draws, five standard deviations."""
    chosen = seeds.choose(np.arange(40_000, dtype=np.uint64), 10, 3)
    share = np.bincount(chosen.ravel(), minlength=10) / 40_000
    assert np.abs(share - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / 40_000)


def test_normal_has_the_moments_and_tails_of_a_normal() -> None:
    x = seeds.normal(np.arange(200, dtype=np.uint64), 5_000).ravel()
    assert abs(x.mean()) < 5e-3
    assert abs(x.var() - 1) < 1e-2
    assert abs((x**4).mean() - 3) < 5e-2
    assert np.isfinite(x).all()
    assert 4.5 < np.abs(x).max() < 7


def test_normal_is_the_inverse_of_the_normal_distribution() -> None:
    """Against the standard library, at every drawn number."""
    keys = np.arange(20, dtype=np.uint64)
    expected = [statistics.NormalDist().inv_cdf(u) for u in seeds.uniform(keys, 2_000).ravel()]
    np.testing.assert_allclose(seeds.normal(keys, 2_000).ravel(), expected, rtol=0, atol=1e-13)


def test_a_library_that_is_off_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.arange(3, dtype=np.uint64)
    right = seeds.normal(keys, 5_001)
    good = torch.Tensor.erfinv_
    monkeypatch.setattr(torch.Tensor, "erfinv_", lambda x: good(x).mul_(1 + 1e-9))
    np.testing.assert_allclose(seeds.normal(keys, 5_001), right, rtol=1e-14, atol=1e-15)
    assert seeds.normal(keys, 0).shape == (3, 0)


def test_streams_do_not_depend_on_company() -> None:
    """A client draws the same alone and in any cohort."""
    keys = np.arange(5, dtype=np.uint64)
    together = seeds.integers(keys, 7, 50)
    for number in range(5):
        assert (seeds.integers(keys[number : number + 1], 7, 50)[0] == together[number]).all()


DRAWS = """
import numpy as np, sys, torch
from fedspan.core import tables
from fedspan.core.layout import Block, Layout
from fedspan.core.projector import draw
torch.set_num_threads(int(sys.argv[1]))
layout = Layout((Block("w", (6, 300), 1),), torch.float64)
for name in sys.argv[3:]:
    p = tables.build("projector", {"name": name, "rank": 60})
    np.save(f"{sys.argv[2]}-{name}.npy", draw(p, layout, (3,), 9).factors[0].columns().numpy())
"""


def test_same_projector_for_every_thread_count_and_instruction_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes with two threads, and with narrower vector instructions, draw the same P as this one."""
    tolerances = {"gaussian": 1e-12, "coordinate": 0, "cycle": 0, "hadamard": 0}
    script = tmp_path / "draws.py"
    script.write_text(DRAWS, "utf-8")
    monkeypatch.setattr(sys, "argv", ["draws.py", "1", tmp_path / "0", *tolerances])
    runpy.run_path(str(script))
    for number, (threads, extra) in enumerate(
        [("2", {}), ("1", {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"})], 1
    ):
        env = os.environ | {"OMP_NUM_THREADS": threads} | extra
        subprocess.run(
            [sys.executable, script, threads, tmp_path / str(number), *tolerances],
            check=True,
            env=env,
        )
    for name, tolerance in tolerances.items():
        first, *others = (
            np.load(tmp_path / f"{number}-{name}.npy", allow_pickle=False) for number in range(3)
        )
        assert all(np.abs(other - first).max() <= tolerance for other in others)


def test_a_batch_of_epochs_and_runs_draws_what_each_draws_alone() -> None:
    layout = Layout(
        (Block("w", (2, 40), 1), Block("bias", (3,)), Block("v", (30, 4), 0)), torch.float32
    )
    projector = tables.build("projector", {"name": "gaussian", "rank": 0.25})
    together = draw(projector, layout, (4, 9), 5)
    alone = projector.sample(layout, np.array([seeds.key(9, "projector", 5)], np.uint64))
    v = torch.randn(2, 3, layout.size)
    torch.testing.assert_close((together @ v)[1:], alone @ v[1:], rtol=1e-6, atol=1e-6)
    assert abs(float(together.probe[1] - alone.probe)) < 1e-12
