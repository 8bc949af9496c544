"""Laws of every registered aggregator, what each computes, and runs in which it takes the place of the mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedspan
from fedspan.aggregators import (
    CenteredClipping,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    NormBound,
    TrimmedMean,
)
from fedspan.checks import aggregator_laws, part_laws
from fedspan.checks.aggregator_laws import replies, round_of
from fedspan.core import registry, tables
from fedspan.core.aggregator import Aggregator
from fedspan.core.config import Participation
from fedspan.core.errors import FedspanError, SpecError
from fedspan.core.layout import Vector
from fedspan.core.round import Round
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.replies.chain import Chain
from support.axes import by_axis
from support.loops import RUN, advance, close, small
from support.methods import build

# One or more settings of every registered aggregator; one without an entry fails the suite.
AGGREGATORS: dict[str, list[dict[str, Any]]] = {
    "mean": [{}],
    "norm_bound": [{}, {"factor": 2.0}, {"bound": 5.0}],
    "trimmed_mean": [{}, {"share": 0.4}],
    "median": [{}],
    "geometric_median": [{}],
    "krum": [{}, {"keep": 3}, {"keep": 0.6, "hostile": 0.3}],
    "centered_clipping": [{}, {"radius": 2.0, "steps": 1}],
}
EVERY = pytest.mark.parametrize(
    "own",
    [
        pytest.param({"name": name} | one, id=f"{name}-{i}")
        for name, some in AGGREGATORS.items()
        for i, one in enumerate(some)
    ],
)
ROBUST = [
    Median(),
    TrimmedMean(share=0.3),
    GeometricMedian(),
    Krum(),
    CenteredClipping(),
    NormBound(),
]


def test_every_registered_aggregator_is_tested() -> None:
    assert set(AGGREGATORS) == set(registry.choices("aggregator"))


@EVERY
@pytest.mark.parametrize("law", part_laws.LAWS["aggregator"], ids=lambda law: law.__name__)
def test_the_laws_hold(own: dict[str, Any], law: Any) -> None:
    law(tables.build("aggregator", own))


class First(Aggregator):
    """Breaks every law: takes the first reply, in place, and as it is."""

    def combine(self, v: Vector, rnd: Round) -> Vector:
        v[:, 0] += 1
        return v[:, 0]


@pytest.mark.parametrize(
    "law",
    [law for law in aggregator_laws.LAWS if law.__name__ != "runs_apart"],
    ids=lambda x: x.__name__,
)
def test_the_laws_can_fail(law: Any) -> None:
    class Plain(Mean):
        bounded = True  # which it is not

    class Shrunk(Mean):
        def combine(self, v: Vector, rnd: Round) -> Vector:
            return 0.5 * v.mean(1, keepdim=True) if law.__name__ != "no_order" else v[:, :1]

    wrong = {"one_vector": First(), "bounded_influence": Plain()}.get(law.__name__, Shrunk())
    with pytest.raises(FedspanError):
        law(wrong)


def test_what_each_computes() -> None:
    """By hand, on replies of one number."""
    v = torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0], dtype=torch.float64).view(1, 5, 1)
    rnd = round_of(v)
    assert Mean().combine(v, rnd).item() == 22
    assert Median().combine(v, rnd).item() == 3
    assert TrimmedMean(share=0.2).combine(v, rnd).item() == 3
    assert NormBound().combine(v, rnd).item() == (1 + 2 + 3 + 3 + 3) / 5
    assert NormBound(bound=1.5).combine(v, rnd).item() == (1 + 4 * 1.5) / 5
    assert (
        Krum(hostile=0.2).combine(v, rnd).item() == 2
    )  # the nearest two of 2 are 1 and 3; those of 3 are 2 and 4, too
    assert Krum(hostile=0.2, keep=3).combine(v, rnd).item() == (2 + 3 + 1) / 3
    assert (
        CenteredClipping(radius=1.0, steps=1).combine(v, rnd).item() == 3 + (-1 - 1 + 0 + 1 + 1) / 5
    )
    assert GeometricMedian().combine(v, rnd).item() == pytest.approx(3, abs=1e-3)


def test_the_geometric_median_minimizes_the_sum_of_distances() -> None:
    v = replies()
    for weighted in (False, True):
        rnd = round_of(v, weighted)
        weights = (
            torch.full((2, 9, 1), 1 / 9, dtype=v.dtype) if rnd.weights is None else rnd.weights
        )
        m = GeometricMedian().combine(v, rnd)
        pull = (weights * (v - m) / (v - m).norm(dim=-1, keepdim=True)).sum(1)
        assert float(pull.norm(dim=-1).max()) < 1e-8


def points(kind: str, trial: int) -> tuple[Vector, Any]:
    """Random replies and their round."""
    draw = np.random.default_rng(trial)
    count, size = int(draw.integers(4, 16)), int(draw.integers(2, 4))
    v, weights = draw.normal(size=(count, size)), np.ones(count)
    if kind == "outliers":
        v[: count // 3] += 1e6 * draw.normal(size=size)
    elif kind == "ties":
        v = np.round(v)
    elif kind == "one reply often":
        v[: count // 2] = v[0]
    elif kind == "a line, weighted":
        v, weights = np.outer(v[:, 0], v[0]), draw.random(count)
    elif kind == "weighted":
        weights = draw.random(count) ** 4
    replies = torch.from_numpy(v).unsqueeze(0)
    shares = torch.from_numpy(weights / weights.sum()).view(1, -1, 1)
    return replies, replace(round_of(replies, weighted=True), weights=shares)


@pytest.mark.parametrize(
    "kind", ["plain", "outliers", "ties", "one reply often", "a line, weighted", "weighted"]
)
def test_the_geometric_median_is_as_good_as_a_reference_minimization(kind: str) -> None:
    """Nelder and Mead's method from the best reply; eight steps of Weiszfeld end up to 1 % above it and more."""
    optimize = pytest.importorskip("scipy.optimize")
    for trial in range(12):
        v, rnd = points(kind, trial)

        def total(m: Any, v: Vector = v, rnd: Any = rnd) -> float:
            return float((rnd.weights * (v - torch.as_tensor(m)).norm(dim=-1, keepdim=True)).sum())

        best = min(v[0].numpy(), key=total)
        found = optimize.minimize(
            total,
            best,
            method="Nelder-Mead",
            options={"xatol": 1e-10, "fatol": 1e-12, "maxiter": 4000},
        )
        lowest = min(total(best), float(found.fun))
        assert total(GeometricMedian().combine(v, rnd)) <= (1 + 1e-6) * lowest, trial
        single = v.float()  # the replies of most runs
        assert total(GeometricMedian().combine(single, rnd).double()) <= (1 + 1e-6) * lowest, trial


def test_the_geometric_median_of_each_run_is_that_of_the_run_alone() -> None:
    """Runs take different numbers of steps, and one that has ended does not move on."""
    (easy, rnd), (hard, _) = points("plain", 3), points("ties", 3)
    assert easy.shape == hard.shape
    both = GeometricMedian().combine(torch.cat([easy, hard]), replace(rnd, weights=None))
    for run, v in enumerate((easy, hard)):
        assert torch.equal(
            both[run : run + 1], GeometricMedian().combine(v, replace(rnd, weights=None))
        )


def test_huge_replies_do_not_blur_the_geometric_median() -> None:
    """A third of the replies lie a million away: the others' pulls cancel as exactly as without them."""
    for trial in range(12):
        v, rnd = points("outliers", trial)
        m = GeometricMedian().combine(v, rnd)
        assert float(m.norm()) < 20
        apart = (v - m).norm(dim=-1, keepdim=True)
        if float(apart.min()) > 1e-3:
            assert float((rnd.weights * (v - m) / apart).sum(1).norm()) < 1e-7


@pytest.mark.parametrize(
    ("aggregator", "counts"),
    [
        (Mean(), True),
        (NormBound(), True),
        (CenteredClipping(), True),
        (GeometricMedian(), True),
        (Median(), False),
        (TrimmedMean(), False),
        (Krum(), False),
    ],
    ids=lambda one: type(one).__name__,
)
def test_which_aggregators_use_the_clients_weights(aggregator: Aggregator, counts: bool) -> None:
    v = replies()
    plain, weighted = (
        aggregator.combine(v, round_of(v)),
        aggregator.combine(v, round_of(v, weighted=True)),
    )
    assert torch.allclose(plain, weighted) != counts


def loops(
    name: str, aggregator: Aggregator | None, rounds: int = 15, task: Any = None, **own: Any
) -> tuple[Loop, Any]:
    problem = small(**(task or {}))
    method = build(name, **own)
    transport = Simulator(method, problem)
    chain = Chain(method, Participation(screen=None, aggregator=aggregator))
    loop = Loop(method, problem, transport, problem.seeds, 5, rounds=60, chain=chain)
    return advance(loop, rounds), transport


@pytest.mark.parametrize("name", ["ssf", "scaffold", "subavg", "fedavg", "fedadam"])
def test_the_mean_by_name_is_the_run_without_an_aggregator(name: str) -> None:
    assert torch.equal(loops(name, Mean())[0].model(), loops(name, None)[0].model())


@pytest.mark.parametrize("own", [{}, {"momentum": 0.5}, {"correction": "tested"}], ids=str)
def test_all_vectors_of_a_reply_are_one(own: dict[str, Any]) -> None:
    """An aggregator that is the mean in all but its class gives the run of the mean: nothing is mixed up."""

    class Other(Aggregator):
        def combine(self, v: Vector, rnd: Round) -> Vector:
            return rnd.mean(v)

    own = own | {"rank": 0.4, "control": "paper"}
    close(loops("ssf", Other(), **own)[0].model(), loops("ssf", None, **own)[0].model(), 1e-10)


@pytest.mark.parametrize(
    "aggregator", ["median", "geometric_median", {"name": "krum", "keep": 0.6}], ids=str
)
@pytest.mark.parametrize("correction", ["always", "tested"])
def test_honest_clients_with_controls_learn_under_a_robust_aggregator(
    aggregator: Any, correction: str
) -> None:
    """As well as without controls. When c added up what was combined, the error grew from round to round."""
    run = RUN | {
        "rounds": 400,
        "clients_per_round": 6,
        "task": {"name": "regression", "clients": 12, "het": 2.0},
    }
    run |= {"participation": {"aggregator": aggregator}, "eval_every": 100, "batch_size": 20}
    step = {"rank": 20, "lr": 2e-3, "local_steps": 5}
    methods = {"ssf": {"correction": correction, "control": "paper"}, "subavg": {}}
    errors = {
        name: [
            line["loss"]
            for line in fedspan.run(
                run | {"method": by_axis({"name": name} | step | own)}, progress=False
            ).history
        ]
        for name, own in methods.items()
    }
    assert errors["ssf"][-1] < 1.2 * errors["subavg"][-1]
    assert errors["ssf"] == sorted(errors["ssf"], reverse=True)


@pytest.mark.parametrize(
    ("name", "own"),
    [("ssf", {}), ("ssf", {"correction": "always"}), ("scaffold", {}), ("fedsub", {})],
)
def test_methods_that_add_up_replies_are_refused_with_the_reason(
    name: str, own: dict[str, Any]
) -> None:
    """c = mean c_i needs every reply in full: what an aggregator leaves out would be missing for ever."""
    with pytest.raises(
        SpecError,
        match=f"'median' is not for {name} .* missing for ever.*rule *= *['\"]paper",
    ):
        fedspan.run(
            RUN
            | {"method": by_axis({"name": name} | own), "participation": {"aggregator": "median"}},
            progress=False,
        )


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("ssf", {"compressor": "topk"}),
        ("ssf", {"extrapolate": True}),
        ("ef", {}),
        ("powersgd", {}),
        ("compressed", {}),
    ],
)
def test_methods_that_need_single_replies_are_refused_by_name(
    name: str, own: dict[str, Any]
) -> None:
    method = by_axis({"name": name, "lr": 0.02, "local_steps": 3} | own)
    with pytest.raises(SpecError, match=f"`participation.aggregator` 'median' .* {name} "):
        fedspan.run(
            RUN | {"method": method, "participation": {"aggregator": "median"}}, progress=False
        )


def test_a_spec_names_its_aggregator() -> None:
    table = RUN | {"participation": {"aggregator": {"name": "trimmed_mean", "share": 0.3}}}
    spec = fedspan.Spec.from_table(table)
    assert spec.participation.aggregator == TrimmedMean(share=0.3)
    assert fedspan.Spec.from_table(spec.table()) == spec
    assert spec.identity() != fedspan.Spec.from_table(RUN).identity()
    assert Participation(aggregator="median") == Participation(aggregator=Median())  # type: ignore[arg-type]
    run, plain = (fedspan.run(one, progress=False).weights[0] for one in (table, RUN))
    assert not all(torch.equal(run[name], plain[name]) for name in run)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"aggregator": "middle"}, "`participation.aggregator` must be one of"),
        (
            {"aggregator": {"name": "trimmed_mean", "share": 0.5}},
            "`participation.aggregator.share` must be below 0.5",
        ),
        ({"aggregator": {"name": "krum", "keep": 0}}, "`participation.aggregator.keep`"),
        ({"screen": 0.5}, "`participation.screen` must be at least 1"),
        ({"aggregator": 3}, "`participation.aggregator` must be an aggregator"),
    ],
)
def test_wrong_settings_are_refused_by_key(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as error:
        fedspan.Spec.from_table(RUN | {"participation": wrong})
    assert words in str(error.value)


@pytest.mark.parametrize("aggregator", ROBUST, ids=lambda one: type(one).__name__)
def test_a_liar_cannot_lead_the_run_away(
    aggregator: Aggregator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 2 of 7 sends a thousand times its reply, turned around. With the mean the run diverges."""
    from fedspan.engine import simulator

    honest = simulator.local_work

    def lying(method: Any, problem: Any, state: Any, down: Any, buffers: Any, rnd: Round) -> Any:
        new, up, beside = honest(method, problem, state, down, buffers, rnd)
        sign = torch.from_numpy(np.where(rnd.ids == 2, -1000.0, 1.0)).unsqueeze(-1)
        return (
            new,
            type(up)(**{k: None if v is None else v * sign for k, v in vars(up).items()}),
            beside,
        )

    alike = {"het": 0.1, "target_het": 0.1}
    start, good = (
        loops("fedavg", aggregator, rounds=0, task=alike)[0],
        loops("fedavg", None, rounds=40, task=alike)[0],
    )
    monkeypatch.setattr(simulator, "local_work", lying)
    bad, held = (loops("fedavg", one, rounds=40, task=alike)[0] for one in (None, aggregator))
    loss = {
        k: float(v.problem.evaluate(v.model(), None)["loss"][0])
        for k, v in {"start": start, "good": good, "bad": bad, "held": held}.items()
    }
    assert not loss["bad"] < loss["start"]
    assert loss["held"] < loss["good"] + 0.5 * (loss["start"] - loss["good"]), loss
