"""The proof of the theorem in numbers: the gaps of the printed one are real, the repaired one closes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lemmas
import proof
import transient
from fedspan.theory import corollary, theorem
from fedspan.theory.setting import Setting, Steps
from support.theory import SETTINGS


@settings(max_examples=300, deadline=None)
@given(s=SETTINGS, a=st.floats(1e-3, 1), b=st.floats(1e-3, 1))
def test_our_conditions_give_descent_with_the_constants_we_state(
    s: Setting, a: float, b: float
) -> None:
    local = a * math.sqrt(s.rho) / (24 * s.local_steps * s.L)
    steps = Steps(local=local, effective=b * corollary.stability_step(s))
    assert all(condition.holds for condition in theorem.conditions_proved(s, steps))
    for nu in (1.0, s.rho):
        found = proof.repaired(s, steps, nu=nu)
        assert found.follows
        assert found.weight <= steps.effective / 16 * (1 + 1e-9)
        whole = 8 * (s.gap + found.weight * s.control) / (s.rho * steps.effective * s.rounds)
        whole += 8 * found.noise / (s.rho * steps.effective)
        assert whole <= theorem.bound_proved(s, steps, nu=nu) * (1 + 1e-9)


def test_the_printed_proof_does_not_carry_its_own_step_sizes() -> None:
    quiet = Setting(L=1, sigma2=0, gap=1, control=1, rho=0.2, clients=20, local_steps=5, rounds=100)
    steps = corollary.steps(quiet)
    assert all(condition.holds for condition in theorem.conditions(quiet, steps))
    assert proof.printed(quiet, steps).gradient < 0  # condition (3) at its limit takes all of ρη̃/4
    one = Setting(L=1, sigma2=0, gap=1, control=1, rho=0.2, clients=20, local_steps=1, rounds=100)
    assert (
        proof.printed(one, corollary.steps(one)).control < 0
    )  # K³ in M is no more than K² when K = 1
    loud = Setting(
        L=1, sigma2=1, gap=1, control=1, rho=0.05, clients=20, local_steps=20, rounds=100
    )
    steps = corollary.steps(loud)
    assert proof.printed(loud, steps).noise > proof.noise_claimed(loud, steps)  # the lost K/ρ


def test_lemmas_order() -> None:
    s = Setting(L=3, sigma2=2, gap=1, control=5, rho=0.3, clients=4, local_steps=6, rounds=10)
    assert lemmas.drift(s, 0.01, 0) == pytest.approx(6 * 6 * 1e-4 * 2)
    assert lemmas.drift(s, 0.01, lemmas.correction_gap_tight(5, 1)) < lemmas.drift(
        s, 0.01, lemmas.correction_gap(5, 1)
    )
    still = Steps(local=1e-9, effective=1e-9)
    floor, error = lemmas.control_floor(s), 100.0
    for _ in range(400):
        error = lemmas.control_error(s, still, error, 1.0, 0.0)
    assert error == pytest.approx(floor, rel=1e-6)
    assert lemmas.control_floor_tight(s) < floor
    assert lemmas.progress(s, Steps.of(0.001, 1, 6), 1.0, 0.0) < 0
    assert lemmas.contraction_sampled(0.3, 1.0) < lemmas.contraction(0.3)
    assert (
        lemmas.projected_variance_tight(2, 0.3)
        < lemmas.projected_variance(2)
        < lemmas.second_moment(1, 2)
    )


def test_the_transient_of_a_quadratic() -> None:
    hessian, start = np.diag([1.0, 10.0]), np.array([[1.0], [0.0]])
    found = transient.relative_error(
        hessian, start, np.array([0.0, 1.0, 7.0]), lr=0.01, local_steps=5, rho=0.1
    )
    np.testing.assert_allclose(found, (1 - 0.1 * (1 - 0.99**5)) ** np.array([0, 1, 7]))
    for model in ("mean field", "narrow"):
        small = transient.factors(np.array([1.0, 2.0]), 1e-6, 3, 0.2, model)  # type: ignore[arg-type]
        np.testing.assert_allclose(1 - small, 0.2 * 3e-6 * np.array([1.0, 2.0]), rtol=1e-4)


@settings(max_examples=300, deadline=None)
@given(s=SETTINGS, cohort=st.integers(1, 50), a=st.floats(1e-3, 1), b=st.floats(1e-3, 1))
def test_the_sampled_argument_closes_under_the_conditions_of_the_code(
    s: Setting, cohort: int, a: float, b: float
) -> None:
    cohort = min(cohort, s.clients)
    s = dataclasses.replace(s, clients=cohort, share=cohort / s.clients)
    most = theorem.largest_steps(s)
    assert proof.sampled(s, Steps(local=a * most.local, effective=b * most.effective)).follows
    conditions = theorem.conditions_proved(s, most)
    assert all(condition.holds for condition in conditions)
    assert len(conditions) == (2 if s.share == 1 else 4)
    for more in (Steps(local=1.01 * most.local, effective=b * most.effective),
                 Steps(local=a * most.local, effective=1.01 * most.effective)):  # fmt: skip
        assert not all(condition.holds for condition in theorem.conditions_proved(s, more))


@settings(max_examples=300, deadline=None)
@given(
    s=SETTINGS,
    a=st.floats(1e-3, 1),
    b=st.floats(1e-3, 1),
    low=st.floats(1e-3, 1),
    ratio=st.floats(1, 1e3),
)
def test_a_shared_preconditioner_asks_for_smaller_steps(
    s: Setting, a: float, b: float, low: float, ratio: float
) -> None:
    """m ≤ D ≤ M: 576K²L²η_l² ≤ ρm/M³ and η̃ ≤ min(1/4, ρ/2)/(LM)."""
    high, most = ratio * low, theorem.largest_steps(s)
    steps = Steps(
        local=a * most.local * math.sqrt(low / high**3), effective=b * most.effective / high
    )
    assert proof.repaired(s, steps, low=low, high=high).follows


def test_a_preconditioner_in_the_servers_step_alone_is_not_enough() -> None:
    """With η̃ ≤ min(1/4, ρ/2)/(LM) but 576K²L²η_l² ≤ ρ, as without D, no descent follows."""
    s = Setting(L=1, sigma2=0, gap=1, control=1, rho=0.2, clients=20, local_steps=5, rounds=100)
    most = theorem.largest_steps(s)
    assert proof.repaired(s, most).follows
    found = proof.repaired(
        s, Steps(local=most.local, effective=most.effective / 3), low=1 / 3, high=3
    )
    assert not found.gradient_falls


def test_the_sampled_argument_fails_without_it() -> None:
    found = proof.failures(2000, 0)
    assert found["ρS/N"] == (0, 0)
    assert min(found["ρ"]) > 0


def test_with_all_clients_the_sampled_argument_asks_for_no_smaller_steps() -> None:
    """θ = 0: the coefficients are those of full participation wherever M is the same."""
    s = Setting(L=3, sigma2=2, gap=1, control=5, rho=0.3, clients=40, local_steps=6, rounds=10)
    steps = Steps(local=0.9 * math.sqrt(0.3) / (24 * 6 * 3), effective=1e-3)
    full, every = proof.repaired(s, steps), proof.sampled(s, steps)
    for name in ("gradient", "control", "noise", "weight", "needed"):
        assert getattr(every, name) == pytest.approx(getattr(full, name)), name


def test_noise_in_blocks_trained_in_full_is_not_reduced_by_the_subspace() -> None:
    """E[𝒫] ⪰ ρI does not bound E‖𝒫ξ‖² by ρσ²: a block trained in full keeps all of its noise."""
    rng = np.random.default_rng(0)
    noise, rho = rng.normal(size=(4000, 20)), 0.25
    kept = np.concatenate(
        [rng.random((4000, 12)).argsort(1) < 3, np.ones((4000, 8), bool)], 1
    )  # 3 of 12, 8 of 8
    assert kept.mean(0).min() == pytest.approx(rho, abs=0.03)
    share = ((noise * kept) ** 2).sum(1).mean() / (noise**2).sum(1).mean()
    assert share == pytest.approx((3 + 8) / 20, abs=0.02)
    assert share > rho
