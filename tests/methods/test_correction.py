"""The tested correction: what is measured, when the server switches, and what holds in every phase."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.core.errors import SpecError
from fedspan.drifts import controls
from fedspan.drifts.controls import OFF, ON, TRIAL, Controls
from support.loops import advance, model, small, start
from support.methods import GAUSSIAN, build

NAMES = [("ssf", {"projector": GAUSSIAN}), ("scaffold", {})]


def rounds(t: int, cohort: int = 4) -> Any:
    """A round of which only its number and the sizes matter."""
    return SimpleNamespace(t=t, clients=8, ids=np.zeros((1, cohort)))


def switch_of(test: torch.Tensor) -> torch.Tensor:
    return test[..., :1]


def sums(s: float, d: float = 2.0) -> torch.Tensor:
    return torch.tensor([[[s * d, d]]])


def test_off_until_the_controls_are_filled_then_on_trial() -> None:
    test = Controls("tested").init_server(torch.zeros(1, 1, 3))["test"]
    modes = []
    for t in range(20):
        test = controls.judged(test, sums(0.0, 0.0), 0.25, rounds(t))
        modes.append(int(switch_of(test)))
    assert (
        modes == [OFF] * 15 + [TRIAL] * 5
    )  # from round 2 N/(ρ S) = 16; a trial without a tested client goes on


def test_a_trial_that_fails_is_repeated_at_twice_the_round() -> None:
    test = Controls("tested").init_server(torch.zeros(1, 1, 3))["test"]
    trials = []
    for t in range(40):
        on_trial = int(switch_of(test)) == TRIAL
        trials += [t] if on_trial else []
        test = controls.judged(test, sums(0.2) if on_trial else sums(0.0, 0.0), 1.0, rounds(t))
    assert trials == [4, 10, 22]


def test_it_stays_on_while_the_running_mean_is_above_one_half() -> None:
    test = Controls("tested").init_server(torch.zeros(1, 1, 3))["test"]
    values = [1.0, 0.0, 0.9, 0.9, 0.0, 0.0]
    seen = []
    for t in range(10):
        told = int(switch_of(test)) != OFF
        test = controls.judged(
            test, sums(values.pop(0) if told and values else 0.0, 2.0 * told), 1.0, rounds(t)
        )
        seen.append((int(switch_of(test)), round(float(test[..., 1]), 3)))
    assert seen[3] == (TRIAL, 0.0)
    assert seen[4] == (ON, 1.0)
    assert seen[5] == (OFF, 0.25)  # 1 + 3/4 (0 − 1); due again at round 12
    assert seen[9][0] == OFF


@pytest.mark.parametrize(("s", "stays"), [(0.49, False), (0.5, False), (0.51, True)])
def test_the_correction_stays_above_one_half_and_not_at_it(s: float, stays: bool) -> None:
    on_trial = torch.tensor([[[float(TRIAL), 0.0, 0.0, 0.0]]], dtype=torch.float64)
    assert int(switch_of(controls.judged(on_trial, sums(s), 1.0, rounds(9)))) == (
        ON if stays else OFF
    )


@pytest.mark.parametrize(("name", "settings"), NAMES)
def test_the_measured_numbers_are_those_of_their_definition(
    name: str, settings: dict[str, Any]
) -> None:
    """n_i and d_i from all local gradients, which a recording objective keeps."""
    method = build(name, correction="tested", **settings)
    loop = advance(start(method, small(), 7), 40)
    rnd, server = loop._round(), loop.server
    P = method.subspace(rnd)
    down = method.broadcast(server, rnd)
    b = controls.corrects(down.switch, rnd)
    assert b is not None
    f, seen = loop.problem.cohort(rnd), []
    asked = "direction" if P.whole else "restrict"
    inner = getattr(f, asked)

    def recorded(*args: Any, plus: Any = None) -> Any:
        direction = inner(*args, plus=plus)
        return lambda z: seen.append(direction(z).clone()) or seen[-1]

    setattr(f, asked, (lambda u: recorded(plus=u)) if P.whole else recorded)
    client = loop.transport.clients()
    _, up = method.client_step(client, down, f, rnd)
    c = P @ server.c
    v = P @ client.c - c
    h, mean = (torch.stack(part).mean(0) + b * v for part in (seen[1:], seen))
    total = (v * v + (mean - c) ** 2).sum(-1, keepdim=True)
    expected = (
        b
        * torch.cat([(v * (h - c)).sum(-1, keepdim=True), (v * v).sum(-1, keepdim=True)], -1)
        / total
    )
    expected[..., 0].clamp_(-0.5, 0.5)
    torch.testing.assert_close(up.stat_test, expected)


def one_by_one(make: Any) -> Any:
    """Makes directions that tell their values and take no steps."""

    def made(*args: Any, **settings: Any) -> Any:
        direction = make(*args, **settings)
        return lambda y: direction(y)

    return made


@pytest.mark.parametrize("mode", [OFF, ON, TRIAL])
@pytest.mark.parametrize(("name", "settings"), NAMES)
def test_steps_taken_together_tell_the_same_as_steps_one_by_one(
    name: str, settings: dict[str, Any], mode: int
) -> None:
    """Of a direction that takes the steps itself only the end points are known; of any other, each value."""
    method = build(name, correction="tested", **settings)
    loop = advance(start(method, small(), 7), 40)
    rnd, client = loop._round(), loop.transport.clients()
    down = method.broadcast(loop.server, rnd).replace(
        switch=torch.tensor([[[mode]]], dtype=torch.uint8)
    )
    replies = []
    for together in (True, False):
        f = loop.problem.cohort(rnd)
        if not together:
            asked = "restrict" if name == "ssf" else "direction"
            setattr(f, asked, one_by_one(getattr(f, asked)))
        replies.append(vars(method.client_step(client, down, f, rnd)[1]))
    for field, value in replies[0].items():
        torch.testing.assert_close(value, replies[1][field], rtol=1e-8, atol=1e-10)
    assert replies[0]["stat_test"].any() == (mode != OFF)


@pytest.mark.parametrize(("name", "settings"), NAMES)
def test_the_ways_of_naming_who_corrects_agree(name: str, settings: dict[str, Any]) -> None:
    """One number for all clients, and one for each of them."""
    method = build(name, correction="tested", **settings)
    loop = advance(start(method, small(), 7), 40)
    rnd, client = loop._round(), loop.transport.clients()
    for mode in (OFF, ON):
        down = method.broadcast(loop.server, rnd).replace(
            switch=torch.tensor([[[mode]]], dtype=torch.uint8)
        )
        assert controls.corrects(down.switch, rnd) == mode
        replies = []
        for b in (mode, torch.full((1, 7, 1), float(mode), dtype=torch.float64)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(controls, "corrects", lambda *_, b=b: b)
                replies.append(
                    vars(method.client_step(client, down, loop.problem.cohort(rnd), rnd)[1])
                )
        for field, value in replies[0].items():
            assert value is None or torch.equal(value, replies[1][field]), field


@pytest.mark.parametrize(("name", "settings"), NAMES)
def test_a_client_without_a_control_is_not_counted(name: str, settings: dict[str, Any]) -> None:
    method = build(name, correction="tested", **settings)
    loop = start(method, small(), 7)
    rnd = loop._round()
    server = loop.server.replace(c=loop.server.c + 1, test=torch.ones(1, 1, 4))
    _, up = method.client_step(
        loop.transport.clients(), method.broadcast(server, rnd), loop.problem.cohort(rnd), rnd
    )
    assert (up.stat_test == 0).all()


def test_in_a_trial_a_quarter_of_the_clients_corrects_and_each_knows_it_alone() -> None:
    method, problem = build("ssf", correction="tested", projector=GAUSSIAN), small(clients=2000)
    rnd = start(method, problem, 2000)._round()
    switch = torch.full((1, 1, 1), TRIAL, dtype=torch.uint8)
    b = controls.corrects(switch, rnd)
    assert b is not None
    assert 0.2 < float(b.mean()) < 0.3
    alone = rnd.subset(np.array([17]))
    assert torch.equal(controls.corrects(switch, alone), b[:, 17:18])


def test_never_takes_the_steps_of_subavg() -> None:
    ends = [
        model(advance(start(build(name, projector=GAUSSIAN, **settings), small(), 7), 20))
        for name, settings in (("ssf", {"correction": "never"}), ("subavg", {}), ("ssf", {}))
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)
    assert (ends[2] - ends[1]).norm() > 1e-6


@pytest.mark.parametrize("own", [{}, {"momentum": 0.5}])
def test_never_takes_the_steps_of_fedavg(own: dict[str, Any]) -> None:
    """With all clients in every round, however the controls are renewed."""
    methods = build("scaffold", correction="never", **own), build("fedavg", **own)
    found, wanted = (model(advance(start(method, small(), 7), 20)) for method in methods)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_never_sends_no_controls() -> None:
    down = {
        name: advance(start(build("scaffold", correction=name), small()), 3).ledger.down.sum()
        for name in ("never", "always")
    }
    assert 2 * down["never"] == down["always"]


@pytest.mark.parametrize(("name", "settings"), NAMES)
def test_it_converges_to_the_optimum_of_heterogeneous_clients(
    name: str, settings: dict[str, Any]
) -> None:
    """Without the correction a floor remains; the test finds that the correction is worth it, and the floor goes."""
    errors = {}
    for correction in ("tested", "never"):
        method = build(name, correction=correction, lr=0.02, **settings)
        loop = advance(start(method, small(batch="full", samples=40), 7), 2500)
        errors[correction] = float(loop.problem.evaluate(model(loop))["rel_err"][0])
        if correction == "tested":
            assert loop.method.measures(loop.server)["correction"].tolist() == [1.0]
    assert errors["tested"] < 1e-6
    assert errors["never"] > 1e-3


def test_runs_with_different_switches_do_not_touch_each_other() -> None:
    method = build("ssf", correction="tested", projector=GAUSSIAN)
    both = advance(start(method, small(seeds=(5, 6))), 40)
    for place, seed in enumerate((5, 6)):
        alone = advance(start(method, small(seeds=(seed,))), 40)
        torch.testing.assert_close(model(both)[place], model(alone)[0], rtol=1e-12, atol=1e-13)
        assert torch.equal(both.server.test[place, :, 0], alone.server.test[0, :, 0])


def test_settings_that_make_no_sense_are_named() -> None:
    with pytest.raises(SpecError, match=r"`method\.drift\.correction` must be"):
        build("ssf", correction="sometimes")
