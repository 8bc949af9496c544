"""Laws of every registered projector: orthonormal rows, adjointness, E[PᵀP] = ρ I, a probe that tells them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.core import registry, seeds, tables
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.layout import Block, Layout
from fedspan.core.projector import Projector, draw
from fedspan.methods import SSF
from fedspan.projectors import Hadamard
from fedspan.projectors._dense import Dense
from support.loops import advance, small, start

NAMES = list(registry.choices("projector"))
layouts = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 40), st.sampled_from([0, 1, None])),
    min_size=1,
    max_size=3,
).map(
    lambda parts: Layout(
        tuple(Block(f"w{i}", (a, b), axis) for i, (a, b, axis) in enumerate(parts)), torch.float64
    )
)


def make(name: str, rank: float = 0.3) -> Projector:
    return tables.build(
        "projector", {"name": name} | ({} if name == "identity" else {"rank": rank})
    )


def sample(projector: Projector, layout: Layout, runs: int = 1, seed: int = 0):
    return projector.sample(layout, np.arange(seed, seed + runs, dtype=np.uint64))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(layout=layouts, rank=st.floats(0.01, 1.0), seed=st.integers(0, 2**32))
def test_rows_are_orthonormal_and_the_transpose_is_adjoint(
    name: str, layout: Layout, rank: float, seed: int
) -> None:
    P = sample(make(name, rank), layout, runs=2, seed=seed)
    z, v = (
        torch.randn(2, 3, P.rank, dtype=torch.float64),
        torch.randn(2, 3, layout.size, dtype=torch.float64),
    )
    torch.testing.assert_close(P @ (P.T @ z), z, rtol=0, atol=1e-10)
    torch.testing.assert_close(((P @ v) * z).sum(-1), (v * (P.T @ z)).sum(-1), rtol=1e-9, atol=1e-9)
    assert (P @ v).shape == (2, 3, P.rank)
    assert (P.T @ z).shape == v.shape


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("d", [8, 13])
def test_expectation_is_a_multiple_of_the_identity(name: str, d: int) -> None:
    """E[PᵀP] = (r/d) I over 20,000 draws; each entry is a mean of bounded numbers, so 5 · 0.5/√20000 is five sigmas."""
    layout = Layout((Block("w", (1, d), 1),), torch.float64)
    factor = sample(make(name, 3), layout, runs=20_000).factors[0]
    if factor is None:
        return
    columns = factor.columns()
    mean = (columns @ columns.mT).mean(0)
    assert (mean - 3 / d * torch.eye(d)).abs().max() < 5 * 0.5 / np.sqrt(20_000)


@pytest.mark.parametrize("t", [0, 2, 5])
def test_a_round_of_a_cycle_alone_is_a_uniform_draw(t: int) -> None:
    """E[PᵀP] = (r/d) I in a round at the start, at the filled-up end and in a later cycle, over 4,000 seeds."""
    layout = Layout((Block("w", (1, 8), 1),), torch.float64)
    factor = draw(make("cycle", 3), layout, tuple(range(4000)), t).factors[0]
    assert factor is not None
    columns = factor.columns()
    mean = (columns @ columns.mT).mean(0)
    assert (mean - 3 / 8 * torch.eye(8)).abs().max() < 5 * 0.5 / np.sqrt(4000)


@pytest.mark.parametrize(("d", "r"), [(12, 3), (13, 3), (5, 5)])
def test_every_input_has_its_turn_in_every_cycle(d: int, r: int) -> None:
    """And the order is a new one in every cycle, block and run."""
    layout = Layout((Block("a", (2, d), 1), Block("b", (d, 1), 0)), torch.float64)
    length, projector = -(-d // r), make("cycle", r)
    maps = [draw(projector, layout, (3, 4), t) for t in range(40 * length)]
    picks = np.array(
        [[f.index[:, 0].numpy() for f in P.factors] for P in maps]
    )  # (rounds, blocks, runs, r)
    cycles = picks.reshape(40, length, 2, 2, r)
    for cycle in cycles:
        for block, run in np.ndindex(2, 2):
            assert set(cycle[:, block, run].ravel()) == set(range(d))
    if r < d:
        assert (
            len(
                {
                    cycle[0, block, run].tobytes()
                    for cycle in cycles
                    for block, run in np.ndindex(2, 2)
                }
            )
            > 20
        )


def test_the_rounds_of_a_cycle_do_not_depend_on_how_they_are_drawn() -> None:
    """One run or several, one epoch or many at once."""
    layout, projector = Layout((Block("w", (2, 13), 1),), torch.float64), make("cycle", 4)
    together = projector.of_epochs(layout, (5, 6), range(2, 9))
    for place, (t, seed) in enumerate((t, seed) for t in range(2, 9) for seed in (5, 6)):
        alone = projector.of_epochs(layout, (seed,), range(t, t + 1))
        assert torch.equal(together.factors[0].index[place], alone.factors[0].index[0])


@pytest.mark.parametrize("name", NAMES)
def test_written_out_columns_are_the_map(name: str) -> None:
    layout = Layout((Block("w", (4, 23), 1),), torch.float64)
    P = sample(make(name, 7), layout, runs=2)
    if P.factors[0] is None:
        return
    v = torch.randn(2, 3, 4 * 23, dtype=torch.float64)
    by_hand = v.view(2, 3, 4, 23) @ P.factors[0].columns().unsqueeze(1)
    torch.testing.assert_close(P @ v, by_hand.flatten(2))


@pytest.mark.parametrize("d", [2, 3, 100, 127, 600])
def test_fast_hadamard_equals_the_written_out_one(d: int) -> None:
    rank, keys = max(1, d // 3), np.arange(2, dtype=np.uint64)
    fast = Hadamard(rank=rank).walsh(d, rank, keys, torch.float64)
    p, v = fast.columns(), torch.randn(2, 5, d, dtype=torch.float64)
    torch.testing.assert_close(fast.down(v), v @ p)
    torch.testing.assert_close(fast.up(v @ p), v @ p @ p.mT)
    if d <= 512:
        written = Hadamard(rank=rank).factor(d, rank, keys, torch.float64)
        torch.testing.assert_close(written.down(v), fast.down(v))


@pytest.mark.parametrize("name", [n for n in NAMES if n != "identity"])
def test_a_mismatch_is_caught(name: str) -> None:
    layout = Layout((Block("w", (4, 50), 1),), torch.float32)
    P, same, other = (draw(make(name, 5), layout, (seed,), 0) for seed in (1, 1, 2))
    P.agree(same.probe.clone())
    with pytest.raises(ProtocolError, match="same seed"):
        P.agree(other.probe)
    later = draw(make(name, 5), layout, (1,), 1)
    with pytest.raises(ProtocolError):
        P.agree(later.probe)


@pytest.mark.parametrize("rank", [0, -1, 0.0, 1.5, float("nan"), True])
def test_a_rank_that_makes_no_sense_is_refused(rank: float) -> None:
    with pytest.raises(SpecError, match="rank"):
        make("gaussian", rank)


def test_rank_is_a_number_or_a_ratio() -> None:
    block = Block("w", (4, 50), 1)
    assert make("gaussian", 5).rank_of(block) == 5
    assert make("gaussian", 0.1).rank_of(block) == 5
    assert make("gaussian", 1e-9).rank_of(block) == 1
    assert make("gaussian", 1.0).rank_of(block) == 50
    with pytest.raises(SpecError, match="larger than the 50 inputs of block 'w'"):
        make("gaussian", 51).rank_of(block)


def test_float32_is_the_cast_of_the_float64_draw() -> None:
    blocks = (Block("w", (1, 30), 1),)
    keys = np.array([seeds.key(1, "projector", 0)], np.uint64)
    p64, p32 = (
        make("gaussian", 7).sample(Layout(blocks, t), keys).factors[0].columns()
        for t in (torch.float64, torch.float32)
    )
    assert torch.equal(p64.float(), p32)


@pytest.mark.parametrize("name", NAMES)
def test_the_size_of_a_subspace_is_known_without_a_draw(name: str) -> None:
    layout = Layout(
        (Block("w", (3, 50), 1), Block("b", (3,)), Block("v", (20, 4), 0)), torch.float64
    )
    for rank in (2, 0.3):
        projector = tables.build("projector", {"name": name, "rank": rank})
        assert projector.size(layout) == draw(projector, layout, (0,), 0).rank


@dataclass(frozen=True, kw_only=True)
class Sketch(Projector):
    """A Gaussian matrix as it is drawn: right on average, and not orthonormal."""

    scale: float = 1.0

    def factor(self, inputs: int, rank: int, keys: Any, dtype: torch.dtype) -> Dense:
        p = (
            self.scale
            * torch.from_numpy(seeds.normal(keys, inputs * rank)).view(-1, rank, inputs)
            / inputs**0.5
        )
        return Dense(p.to(dtype), p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_not_orthonormal_are_refused(dtype: torch.dtype) -> None:
    problem = small(dtype)
    for projector in (Sketch(rank=3), Sketch(rank=12, scale=0.5)):
        with pytest.raises(
            SpecError, match="the projector Sketch draws are not orthonormal"
        ) as error:
            advance(start(SSF(lr=0.02, local_steps=3, space=projector), problem), 1)
        assert "\n" not in str(error.value)
