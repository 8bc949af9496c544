"""Any combination of choices runs: the laws over a set of rows in which all pairs of choices of two axes meet."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fedspan.checks import laws, network_laws
from fedspan.core import registry, tables
from fedspan.core.errors import SpecError
from fedspan.core.method import Method
from support.loops import advance, model, small, start

TOPK, SIGN = {"name": "topk", "k": 0.3}, {"name": "sign"}
AXES: dict[str, dict[str, Any]] = {
    "space": {
        "identity": "identity",
        "gaussian": {"name": "gaussian", "rank": 3},
        "coordinate": {"name": "coordinate", "rank": 0.5, "refresh": 2},
        "hadamard": {"name": "hadamard", "rank": 4},
        "cycle": {"name": "cycle", "rank": 5},
    },
    "drift": {
        "none": "none",
        "proximal": "proximal",
        "controls": "controls",
        "dynamic": {"name": "dynamic", "alpha": 1.0},
        "tested": {"name": "controls", "correction": "tested"},
        "paper": {"name": "controls", "rule": "paper"},
    },
    "local": {
        "sgd": "sgd",
        "momentum": {"name": "sgd", "momentum": 0.5, "moments": "project"},
        "adamw": {"name": "adamw", "eps": 1e-3},
        "preconditioned": "preconditioned",
    },
    "uplink": {
        "plain": "plain",
        "code": {"name": "qsgd", "bits": 6},
        "feedback": {"name": "feedback", "compressor": TOPK},
        "ef21": {"name": "ef21", "compressor": TOPK},
        "running_mean": {"name": "running_mean", "beta": 0.5, "compressor": SIGN},
        "sign_momentum": {"name": "sign_momentum", "beta1": 0.5, "beta2": 0.8},
    },
    "server": {
        name: name for name in ("mean", "momentum", "adam", "yogi", "adagrad", "fedexp", "decay")
    },
    "downlink": {
        "full": "full",
        "changes": "changes",
        "sign": SIGN,
        "qsgd": {"name": "qsgd", "bits": 6},
    },
}
CONTROLS = ("controls", "dynamic", "tested", "paper")
REFUSED = {
    **{
        ("drift", drift, "uplink", uplink): "controls"
        for drift in CONTROLS
        for uplink in ("feedback", "ef21", "sign_momentum")
    },
    **{("drift", drift, "uplink", "running_mean"): "running mean" for drift in ("none", "proximal", "dynamic")},
    ("uplink", "ef21", "server", "fedexp"): "change of each client",
}  # fmt: skip
Row = dict[str, str]


def refused(row: Row) -> list[str]:
    """The reasons for which a row is refused."""
    return [why for (a, x, b, y), why in REFUSED.items() if row.get(a) == x and row.get(b) == y]


def covering() -> list[Row]:
    """Rows in which every pair of choices meets that is not refused; greedy, in a fixed order."""
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(AXES, 2)
        for x in AXES[a]
        for y in AXES[b]
        if (a, x, b, y) not in REFUSED
    }
    rows: list[Row] = []
    while missing:
        a, x, b, y = min(missing)
        row = {a: x, b: y}
        for axis, choices in AXES.items():
            if axis in row:
                continue

            def new(choice: str, axis: str = axis, row: Row = row, missing: Any = missing) -> int:
                if refused({**row, axis: choice}):
                    return -1
                return sum(pair in missing for pair in pairs({**row, axis: choice}))

            row[axis] = max(choices, key=new)
        rows.append(row)
        missing -= pairs(row)
    return rows


def pairs(row: Row) -> set[tuple[str, str, str, str]]:
    order = [axis for axis in AXES if axis in row]
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(order, 2)}


def built(row: Row) -> Method:
    table = {axis: AXES[axis][choice] for axis, choice in row.items()}
    return tables.build("method", {"name": "fedavg", "lr": 0.02, "local_steps": 3, **table})


ROWS = covering()
NAMES = ["-".join(row[axis] for axis in AXES) for row in ROWS]
CHECKED = [
    law
    for law in laws.LAWS + network_laws.LAWS
    if law.__name__ not in ("learns", "frozen", "bad_values")  # of settings, not of what they do
]


def test_every_choice_of_an_axis_is_in_the_rows() -> None:
    kinds = {"space": "projector", "local": "optimizer"}
    for axis, choices in AXES.items():
        named = {
            choice if isinstance(choice, str) else choice["name"] for choice in choices.values()
        }
        assert named >= set(registry.choices(kinds.get(axis, axis))) - {"code", "coded"}


@pytest.mark.parametrize("law", CHECKED, ids=lambda law: law.__name__)
@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_a_law_holds_for_a_combination(row: Row, law: Any) -> None:
    law(built(row))


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: "-".join(pair))
def test_what_is_mathematically_wrong_is_refused_with_its_reason(pair: tuple[str, ...]) -> None:
    a, x, b, y = pair
    with pytest.raises(SpecError, match=REFUSED[pair]):  # type: ignore[index]
        built({a: x, b: y}).check(small().layout)


COMBINATIONS: dict[str, dict[str, Any]] = {
    "FedAdam in a subspace": {"name": "fedadam", "space": {"name": "gaussian", "rank": 4}},
    "error feedback with server momentum": {
        "name": "ef",
        "server": {"name": "momentum", "beta": 0.5},
    },
    "a proximal term under one bit both ways": {
        "name": "fedprox",
        "uplink": {"name": "feedback", "compressor": SIGN},
        "downlink": SIGN,
    },
}


@pytest.mark.parametrize("table", COMBINATIONS.values(), ids=COMBINATIONS)
def test_combinations_that_nobody_published_learn(table: dict[str, Any]) -> None:
    method = tables.build("method", {"lr": 0.02, "local_steps": 3, **table})
    problem = small(batch="full")
    loop = advance(start(method, problem, 7), 150)
    first, last = (float(problem.evaluate(x)["loss"][0]) for x in (problem.x0, model(loop)))
    lowest = float(problem.lowest()[0])  # type: ignore[index]
    assert last - lowest < 0.2 * (first - lowest)


def test_adam_picks_the_same_coordinates_as_its_subspace() -> None:
    """In a subspace of coordinates the others stay, and with all of them it is FedAdam."""
    settings = {"name": "fedadam", "lr": 0.02, "local_steps": 3}
    whole = tables.build("method", settings)
    inside = tables.build("method", {**settings, "space": {"name": "coordinate", "rank": 1.0}})
    ends = [model(advance(start(method, small()), 12)) for method in (whole, inside)]
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)
