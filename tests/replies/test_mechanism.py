"""What a round with privacy releases: secret cohorts, clipped replies, noise of the right size, and a fixed divisor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.core.bundle import Bundle, payload
from fedspan.core.config import Engine
from fedspan.core.errors import CheckpointError
from fedspan.core.objective import Problem
from fedspan.core.privacy import Privacy
from fedspan.core.round import Terms
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.remote.client import RemoteClient
from fedspan.remote.server import RemoteTransport
from fedspan.replies.chain import Chain, norms_of
from fedspan.replies.clip import MARGIN, clipped
from fedspan.replies.noise import Mechanism
from support.channel import LocalChannel, agree
from support.loops import WireTransport, advance, close, model, small
from support.methods import build

KEY = bytes(range(32))
SSF: dict[str, Any] = {"projector": {"name": "coordinate", "rank": 4}, "correction": "always"}


def begun(
    name: str,
    problem: Problem,
    privacy: Privacy,
    cohort: int = 3,
    transport: Any = None,
    key: bytes | None = KEY,
    **own: Any,
) -> Loop:
    method = build(name, **own)
    made = Mechanism(privacy, problem.clients, cohort, 60, key)
    end = (transport or Simulator)(method, problem)
    chain = Chain(method, runs=len(problem.seeds), noise=made)
    return Loop(method, problem, end, problem.seeds, cohort, rounds=60, chain=chain)


def noiseless(clip: float = 1e6, **own: Any) -> Privacy:
    return Privacy(clip=clip, noise=0.0, **own)


def controls(loop: Loop) -> torch.Tensor:
    """mean_i c_i at the start of the next round."""
    states = loop.transport.clients()  # type: ignore[attr-defined]
    assert loop.chain.noise is not None
    kept = (1 - loop.chain.noise.settings.leak) ** (loop.t - loop.last_round[0])
    return (states.c * torch.from_numpy(kept)[None, :, None]).mean(1, keepdim=True)


def test_cohorts_vary_and_do_not_follow_from_the_seed() -> None:
    problem = small()
    sets = [[tuple(one.chain.noise.cohort(t, 1)[0]) for t in range(200)] for one in _two(problem)]
    assert sets[0] != sets[1]  # same seed, other secret
    sizes = [len(one) for one in sets[0]]
    assert min(sizes) <= 1 < 5 <= max(sizes)
    share = np.mean([np.isin(np.arange(7), one) for one in sets[0]], 0)
    assert np.abs(share - 3 / 7).max() < 0.15


def _two(problem: Problem) -> list[Any]:
    return [begun("fedavg", problem, noiseless(), key=None) for _ in range(2)]


def test_secrets_are_drawn_anew_and_are_not_told() -> None:
    one, two = _two(small())
    assert one.chain.noise.key != two.chain.noise.key
    assert len(set(one.chain.noise.key)) > 8
    assert "key" not in repr(one.chain.noise)
    rnd = one._round()
    assert rnd.schedule is None  # which would hold the cohorts of later rounds


@pytest.mark.parametrize(
    "sizes", [(3.0, 1e-3), (1e30, 1.0), (float("inf"), 1.0), (float("nan"), 1.0), (0.0, 0.0)]
)
def test_a_message_is_clipped_as_a_whole(sizes: tuple[float, float]) -> None:
    up = Bundle(v=torch.full((1, 1, 4), sizes[0]), z=torch.full((1, 1, 9), sizes[1]))
    small, before = clipped(up, 0.5)
    after = float(norms_of(payload(small).values()))
    assert after <= 0.5 * (1 + 1e-6)
    finite = np.isfinite(sizes[0])
    assert after == 0 or (finite and abs(after - 0.5) < 1e-6)
    assert (float(before) > 0.5) == bool(sizes[0])
    if sizes[0] == 3.0:
        close(
            small.z / small.v[..., :1], torch.full((1, 1, 9), 1e-3 / 3.0), 1e-5
        )  # the direction stays


def test_the_margin_keeps_rounded_messages_within_the_clip() -> None:
    """In float32, in which scaling rounds: without the margin some of these norms are above the clip."""
    up = Bundle(v=torch.randn(1, 200, 30, generator=torch.Generator().manual_seed(0)))
    assert float(norms_of([clipped(up, 0.3)[0].v]).max()) > 0.3
    assert float(norms_of([clipped(up, MARGIN * 0.3)[0].v]).max()) <= 0.3


def test_a_message_within_the_clip_stays_bit_for_bit() -> None:
    up = Bundle(v=torch.randn(1, 3, 8))
    assert torch.equal(clipped(up, 100.0)[0].v, up.v)


@pytest.mark.parametrize("dropped", [set(), {0, 1}, {0, 1, 2, 3, 4, 5, 6}])
def test_the_sum_is_divided_by_qn_whoever_replies(dropped: set[int]) -> None:
    problem = small()
    loop = begun("fedavg", problem, noiseless(0.05), cohort=5)
    before, sent = model(loop).clone(), []
    exchange = loop.transport.exchange

    def lossy(rnd: Any, down: Any, buffers: Any, chain: Any) -> Any:
        there = np.array([p for p, c in enumerate(rnd.ids[0]) if c not in dropped], np.int64)
        if not len(there):
            return dataclasses.replace(exchange(rnd, down, buffers, chain), places=there, up=None)
        found = exchange(rnd.subset(there), down, buffers, chain)
        sent.append(found.up.v)
        return dataclasses.replace(found, places=there)

    loop.transport.exchange = lossy  # type: ignore[method-assign]
    ids = loop._round().ids[0]
    assert 0 < len(ids) != 5  # the realized cohort is not qN = 5
    advance(loop, 1)
    total = sum((one.sum(1, keepdim=True) for one in sent), torch.zeros_like(before))
    close(before - model(loop), total / 5)
    for one in sent:
        assert float(one.norm(dim=-1).max()) <= 0.05


@pytest.mark.parametrize("cohort", [2, 7])
def test_noise_of_the_sum_is_sigma_times_the_clip(cohort: int) -> None:
    problem = small(dim=800, outputs=5)
    loop = begun("fedavg", problem, Privacy(clip=1e-6, noise=3.0), cohort, lr=1e-12)
    for _ in range(4):  # of different cohorts, also an empty one
        before = model(loop).clone()
        advance(loop, 1)
        noise = (model(loop) - before) * cohort  # all replies are nearly 0
        assert abs(float(noise.std()) / (3.0 * 1e-6) - 1) < 0.06
        assert abs(float(noise.mean())) < 5 * 3e-6 / 4000**0.5


def test_an_empty_cohort_releases_noise_and_is_counted() -> None:
    for name, own in (
        ("ssf", SSF),
        ("fedavg", {}),
        ("scaffold", {}),
        ("subavg", {"projector": SSF["projector"]}),
        ("ffalora", {"rank": 3}),
    ):
        loop = begun(name, small(), Privacy(clip=1.0, noise=1.0), cohort=1, **own)
        assert loop.chain.noise is not None
        loop.chain.noise.q = 1e-9  # nobody ever takes part
        before = model(loop).clone()
        advance(loop, 2)
        assert not torch.equal(before, model(loop))
        assert loop.t == 2
        assert loop.ledger.up.sum() == loop.ledger.down.sum() == 0
        assert (loop.last_round == -1).all()


@pytest.mark.parametrize("clip", [1e6, 0.05])
@pytest.mark.parametrize("leak", [0.0, 0.3])
@pytest.mark.parametrize(("name", "own"), [("ssf", SSF), ("scaffold", {})])
def test_controls_follow_from_the_clipped_messages(
    name: str, own: Any, leak: float, clip: float
) -> None:
    """c = mean c_i for cohorts of any size, with and without a leak; 1e-6 is the margin of the clip."""
    loop = begun(name, small(), noiseless(clip, leak=leak), cohort=2, **own)
    sizes = set()
    for _ in range(25):
        sizes.add(loop._round().ids.shape[1])
        advance(loop, 1)
        close(loop.server.c, controls(loop))
    assert 0 in sizes
    assert float(loop.server.c.abs().max()) > 1e-3
    sums = [float(one.norm()) for one in loop.transport.clients().c[0]]  # type: ignore[attr-defined]
    assert clip > 1 or max(sums) <= 25 * clip


def test_without_clip_and_noise_a_full_cohort_is_a_plain_round() -> None:
    kept = SSF | {"momentum": 0.5, "moments": "project", "refresh": 3}
    for name, own in (("ssf", SSF), ("ssf", kept), ("fedavgm", {}), ("scaffold", {})):
        private = advance(begun(name, small(), noiseless(), cohort=7, **own), 6)
        method, problem = build(name, **own), small()
        plain = advance(
            Loop(method, problem, Simulator(method, problem), problem.seeds, 7, rounds=60), 6
        )
        close(model(private), model(plain))


def test_several_runs_at_once_with_full_participation() -> None:
    loop = begun("ssf", small(seeds=(1, 2)), Privacy(clip=0.1, noise=1.0), cohort=7, **SSF)
    assert torch.isfinite(model(advance(loop, 2))).all()


@pytest.mark.parametrize(
    "privacy", [Privacy(clip=0.3, noise=1.0, leak=0.1), Privacy(clip=0.3, noise=1.0, quantile=0.5)]
)
def test_a_resumed_run_continues_to_the_same_bits_and_the_same_epsilon(privacy: Privacy) -> None:
    whole = advance(begun("ssf", small(), privacy, **SSF), 8)
    half = advance(begun("ssf", small(), privacy, **SSF), 4)
    resumed = begun("ssf", small(), privacy, key=None, **SSF)
    resumed.load({name: array.clone() for name, array in half.save().items()})
    advance(resumed, 4)
    assert torch.equal(model(whole), model(resumed))
    assert whole.chain.noise is not None
    assert whole._evaluate().metrics["epsilon"] == resumed._evaluate().metrics["epsilon"]
    assert whole.chain.noise.epsilon(8) > whole.chain.noise.epsilon(4) > 0


@pytest.mark.parametrize(
    "privacy", [Privacy(clip=0.3, noise=1.0, leak=0.1), Privacy(clip=0.3, noise=1.0, quantile=0.5)]
)
@pytest.mark.parametrize(("name", "own"), [("ssf", SSF), ("scaffold", {}), ("fedavg", {})])
def test_packed_messages_and_batched_clients_give_the_same_run(
    name: str, own: Any, privacy: Privacy
) -> None:
    def batched(method: Any, problem: Any) -> Simulator:
        return Simulator(method, problem, Engine(simulate="batched"))

    loops = [
        advance(begun(name, small(), privacy, transport=end, **own), 6) for end in (None, batched)
    ]
    if privacy.quantile is None:
        loops.append(advance(begun(name, small(), privacy, transport=WireTransport, **own), 6))
    for other in loops[1:]:
        close(model(loops[0]), model(other), 1e-9)


class Channel(LocalChannel):
    """Clients that know of the run's privacy, some of which do not keep to it."""

    honest = True
    terms = Terms(0.05, 0.1)

    def client(self, number: int) -> RemoteClient:
        terms = self.terms if self.honest or number % 2 else Terms(1e9, self.terms.leak)
        return dataclasses.replace(super().client(number), privacy=terms)


@pytest.mark.parametrize("honest", [True, False])
@pytest.mark.parametrize(("name", "own"), [("ssf", SSF), ("scaffold", {})])
def test_over_machines_the_server_clips_what_clients_did_not(
    name: str, own: Any, honest: bool, tmp_path: Path
) -> None:
    """And its copies of their states follow from what it counted."""
    problem, privacy = small(), Privacy(clip=0.05, noise=1.0, leak=0.1)
    transports = []

    def over(method: Any, problem: Problem) -> RemoteTransport:
        channel = Channel(method, problem, tmp_path)
        channel.honest = honest
        agreement = agree(method, problem)
        transports.append(
            RemoteTransport(method, problem.layout, problem.x0, problem.clients, channel, agreement)
        )
        return transports[0]

    loop = begun(name, problem, privacy, transport=over, **own)
    seen = []
    release = loop.chain.noise.release  # type: ignore[union-attr]

    def watched(up: Any, within: Any, rnd: Any) -> Any:
        seen.append(float(norms_of(payload(up).values()).max()))
        return release(up, within, rnd)

    loop.chain.noise.release = watched  # type: ignore[union-attr,method-assign]
    advance(loop, 6)
    assert 0.0499 < max(seen) <= 0.05 * (1 + 1e-9)
    if honest:
        close(model(loop), model(advance(begun(name, problem, privacy, **own), 6)), 1e-9)
        assert not loop.events


def test_the_clip_adapts_to_a_quantile_of_the_norms() -> None:
    loop = begun("fedavg", small(), Privacy(clip=100.0, noise=1e-3, quantile=0.5), cohort=7)
    clips = []
    for _ in range(150):
        advance(loop, 1)
        clips.append(loop.chain.noise.clip)  # type: ignore[union-attr]
    rnd = loop._round()
    found = Simulator(build("fedavg"), loop.problem).exchange(
        dataclasses.replace(rnd, privacy=None),
        loop.method.broadcast(loop.server, rnd),
        None,
        Chain(loop.method),
    )
    lengths = found.up.v.norm(dim=-1)[0].sort().values
    assert float(lengths[0]) < clips[-1] < float(lengths[-1])
    assert loop._evaluate().metrics["clip"][0] == clips[-1]
    assert clips[0] > clips[1] > clips[-1]


def mechanism(noise: float = 1.0, key: bytes = KEY, **own: Any) -> Mechanism:
    return Mechanism(Privacy(clip=1.0, noise=noise, **own), 100, 100, 60, key)


def released(made: Mechanism, t: int = 0, within: float = 0.5, clients: int = 100) -> torch.Tensor:
    """What a round releases if every client sends 4,000 zeros."""
    rnd = dataclasses.replace(
        begun("fedavg", small(), noiseless())._round(), t=t, ids=np.arange(clients)[None]
    )
    up = Bundle(v=torch.zeros(1, clients, 4000, dtype=torch.float64))
    return made.release(up, torch.full((1, clients, 1), within), rnd)[0].v * made.expected  # type: ignore[no-any-return]


def test_every_round_has_noise_of_its_own() -> None:
    first, second = (released(mechanism(), t) for t in (0, 1))
    assert abs(float((first * second).mean())) < 0.1
    assert torch.equal(first, released(mechanism(), 0))


def test_an_adapted_clip_is_paid_for_with_more_noise() -> None:
    """Both releases together cost what `noise` says."""
    made = mechanism(9.0, quantile=0.5)
    assert made.vector_noise > 1.5 * 9.0
    assert float(released(made).std()) == pytest.approx(made.vector_noise, rel=0.05)


def test_what_is_released_lies_on_a_grid() -> None:
    """2⁻²⁰ of the power of two below the noise: single bits of floating point tell nothing."""
    steps = released(mechanism(3.0)) / (2.0 * 2**-20)
    assert float((steps - steps.round()).abs().max()) < 1e-6


def test_the_count_within_the_clip_is_noised_and_no_client_moves_it_by_more_than_one() -> None:
    one, two, liars = (
        mechanism(quantile=0.5),
        mechanism(key=bytes(32), quantile=0.5),
        mechanism(quantile=0.5),
    )
    for made, told in ((one, 0.5), (two, 0.5), (liars, 1e9)):
        released(made, within=told)
    assert one.clip != two.clip
    assert liars.clip == one.clip


def test_a_resumed_mechanism_keeps_its_noise_key_and_clip() -> None:
    one, two = mechanism(2.0, quantile=0.5), mechanism(2.0, bytes(32), quantile=0.5)
    one.clip = 0.25
    two.load(one.save())
    assert (two.noise, two.key, two.clip) == (2.0, KEY, 0.25)
    for other in (
        mechanism(3.0, quantile=0.5),
        mechanism(2.0),
    ):  # other noise, and another clip than that of the settings
        with pytest.raises(CheckpointError, match="its noise or clip is not that of its settings"):
            other.load(one.save())
