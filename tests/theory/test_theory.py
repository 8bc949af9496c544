"""The theory as functions: the corollary meets the theorem, bounds are ordered, the printed proof's gaps are real."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspan.core.errors import SpecError
from fedspan.theory import corollary, lemmas, proof, theorem, transient
from fedspan.theory.setting import Setting, Steps

SETTINGS = st.builds(
    Setting,
    L=st.floats(1e-2, 1e4),
    sigma2=st.one_of(st.just(0.0), st.floats(1e-4, 1e4)),
    gap=st.floats(1e-3, 1e4),
    control=st.floats(0, 1e4),
    rho=st.floats(0.01, 1),
    clients=st.integers(2, 50),
    local_steps=st.integers(1, 20),
    rounds=st.integers(1, 100_000),
)


@settings(max_examples=200, deadline=None)
@given(s=SETTINGS)
def test_the_corollary_meets_every_condition_of_the_theorem(s: Setting) -> None:
    steps = corollary.steps(s)
    for condition in [*theorem.conditions(s, steps), *theorem.conditions_proved(s, steps)]:
        assert condition.holds, condition


@settings(max_examples=200, deadline=None)
@given(s=SETTINGS)
def test_the_corollarys_bound_is_the_theorems_at_its_steps(s: Setting) -> None:
    assert theorem.bound(s, corollary.steps(s)) <= corollary.bound(s) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(s=SETTINGS, target=st.floats(1e-6, 1e3))
def test_rounds_to_a_target_is_where_the_bound_meets_it(s: Setting, target: float) -> None:
    rounds = corollary.rounds_to(s, target)
    if rounds > 1:
        a = 112 * s.L * s.start / s.rho**2 / rounds
        b = 8 * math.sqrt(2 * s.sigma2 * s.L * s.start / (s.clients * s.local_steps * rounds)) / s.rho
        assert a + b == pytest.approx(target, rel=1e-6)


def test_a_condition_that_is_broken_says_by_how_much() -> None:
    s = Setting(L=10, sigma2=1, gap=1, control=1, rho=0.2, clients=20, local_steps=5, rounds=100)
    first = theorem.conditions(s, Steps.of(0.03, 1.0, 5))[0]
    assert not first.holds
    assert first.excess == pytest.approx(3.0)
    assert theorem.conditions(s, Steps.of(0.009, 1.0, 5))[0].holds


@settings(max_examples=300, deadline=None)
@given(s=SETTINGS, a=st.floats(1e-3, 1), b=st.floats(1e-3, 1))
def test_our_conditions_give_descent_with_the_constants_we_state(s: Setting, a: float, b: float) -> None:
    local = a * math.sqrt(s.rho) / (24 * s.local_steps * s.L)
    steps = Steps(local=local, effective=b * corollary.stability_step(s))
    assert all(condition.holds for condition in theorem.conditions_proved(s, steps))
    for knows in (True, False):
        found = proof.repaired(s, steps, noise_knows_subspace=knows)
        assert found.follows
        assert found.weight <= steps.effective / 16 * (1 + 1e-9)
        whole = 8 * (s.gap + found.weight * s.control) / (s.rho * steps.effective * s.rounds)
        whole += 8 * found.noise / (s.rho * steps.effective)
        assert whole <= theorem.bound_proved(s, steps, noise_knows_subspace=knows) * (1 + 1e-9)


def test_the_printed_proof_does_not_carry_its_own_step_sizes() -> None:
    quiet = Setting(L=1, sigma2=0, gap=1, control=1, rho=0.2, clients=20, local_steps=5, rounds=100)
    steps = corollary.steps(quiet)
    assert all(condition.holds for condition in theorem.conditions(quiet, steps))
    assert proof.printed(quiet, steps).gradient < 0  # condition (3) at its limit takes all of ρη̃/4
    one = Setting(L=1, sigma2=0, gap=1, control=1, rho=0.2, clients=20, local_steps=1, rounds=100)
    assert proof.printed(one, corollary.steps(one)).control < 0  # K³ in M is no more than K² when K = 1
    loud = Setting(L=1, sigma2=1, gap=1, control=1, rho=0.05, clients=20, local_steps=20, rounds=100)
    steps = corollary.steps(loud)
    assert proof.printed(loud, steps).noise > proof.noise_claimed(loud, steps)  # the lost K/ρ


def test_the_printed_bound_depends_on_the_units_of_the_loss() -> None:
    """F → aF multiplies ‖∇F‖² by a²; the printed bound adds a loss and a squared gradient, ours does not."""

    def scaled(a: float) -> Setting:
        return Setting(
            L=2 * a, sigma2=3 * a**2, gap=5 * a, control=7 * a**2, rho=0.1, clients=4, local_steps=3, rounds=50
        )

    def at(a: float) -> tuple[float, float]:
        steps = Steps(local=0.002 / a, effective=0.01 / a)
        return theorem.bound(scaled(a), steps) / a**2, theorem.bound_proved(scaled(a), steps) / a**2

    assert at(1.0)[1] == pytest.approx(at(1e-3)[1], rel=1e-9)
    assert at(1.0)[0] != pytest.approx(at(1e-3)[0], rel=0.1)


def test_lemmas_order() -> None:
    s = Setting(L=3, sigma2=2, gap=1, control=5, rho=0.3, clients=4, local_steps=6, rounds=10)
    assert lemmas.drift(s, 0.01, 0) == pytest.approx(6 * 6 * 1e-4 * 2)
    assert lemmas.drift(s, 0.01, lemmas.correction_gap_tight(5, 1)) < lemmas.drift(s, 0.01, lemmas.correction_gap(5, 1))
    still = Steps(local=1e-9, effective=1e-9)
    floor, error = lemmas.control_floor(s), 100.0
    for _ in range(400):
        error = lemmas.control_error(s, still, error, 1.0, 0.0)
    assert error == pytest.approx(floor, rel=1e-6)
    assert lemmas.control_floor_tight(s) < floor
    assert lemmas.progress(s, Steps.of(0.001, 1, 6), 1.0, 0.0) < 0
    assert lemmas.contraction_sampled(0.3, 1.0) < lemmas.contraction(0.3)
    assert lemmas.projected_variance_tight(2, 0.3) < lemmas.projected_variance(2) < lemmas.second_moment(1, 2)


def test_the_transient_of_a_quadratic() -> None:
    hessian, start = np.diag([1.0, 10.0]), np.array([[1.0], [0.0]])
    found = transient.relative_error(hessian, start, np.array([0.0, 1.0, 7.0]), lr=0.01, local_steps=5, rho=0.1)
    np.testing.assert_allclose(found, (1 - 0.1 * (1 - 0.99**5)) ** np.array([0, 1, 7]))
    for model in ("mean field", "narrow"):
        small = transient.factors(np.array([1.0, 2.0]), 1e-6, 3, 0.2, model)  # type: ignore[arg-type]
        np.testing.assert_allclose(1 - small, 0.2 * 3e-6 * np.array([1.0, 2.0]), rtol=1e-4)


@pytest.mark.parametrize(("name", "value"), [("L", 0.0), ("sigma2", -1.0), ("rho", 1.5), ("clients", 0)])
def test_a_setting_that_cannot_be_is_refused(name: str, value: float) -> None:
    good = {
        "L": 1.0,
        "sigma2": 1.0,
        "gap": 1.0,
        "control": 1.0,
        "rho": 0.5,
        "clients": 2,
        "local_steps": 2,
        "rounds": 2,
    }
    with pytest.raises(SpecError, match=name):
        Setting(**(good | {name: value}))  # type: ignore[arg-type]
