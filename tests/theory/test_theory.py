"""The theorem and the corollary as functions: they agree with each other, and units are consistent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from fedspan.core.errors import SpecError
from fedspan.theory import corollary, theorem
from fedspan.theory.setting import Setting, Steps
from support.theory import SETTINGS


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


def test_a_condition_that_is_broken_says_by_how_much() -> None:
    s = Setting(L=10, sigma2=1, gap=1, control=1, rho=0.2, clients=20, local_steps=5, rounds=100)
    first = theorem.conditions(s, Steps.of(0.03, 1.0, 5))[0]
    assert not first.holds
    assert first.excess == pytest.approx(3.0)
    assert theorem.conditions(s, Steps.of(0.009, 1.0, 5))[0].holds


def test_the_printed_bound_depends_on_the_units_of_the_loss() -> None:
    """F → aF multiplies ‖∇F‖² by a²; the printed bound adds a loss and a squared gradient, ours does not."""

    def scaled(a: float) -> Setting:
        return Setting(
            L=2 * a,
            sigma2=3 * a**2,
            gap=5 * a,
            control=7 * a**2,
            rho=0.1,
            clients=4,
            local_steps=3,
            rounds=50,
        )

    def at(a: float) -> tuple[float, float]:
        steps = Steps(local=0.002 / a, effective=0.01 / a)
        return theorem.bound(scaled(a), steps) / a**2, theorem.bound_proved(scaled(a), steps) / a**2

    assert at(1.0)[1] == pytest.approx(at(1e-3)[1], rel=1e-9)
    assert at(1.0)[0] != pytest.approx(at(1e-3)[0], rel=0.1)


@pytest.mark.parametrize(
    ("name", "value"), [("L", 0.0), ("sigma2", -1.0), ("rho", 1.5), ("clients", 0)]
)
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
