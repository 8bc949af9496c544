"""What a choice on an axis returns: a wrong form is one line in the first round, and nothing is checked later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fedspan
from fedspan.core import registry
from fedspan.core.errors import FedspanError, SpecError
from fedspan.methods import SubAvg
from support.loops import advance, small, start

Function = Callable[..., Any]


def mistaken(base: type, **functions: Function) -> Any:
    """A choice of this base class with some functions of its own."""
    return dataclass(frozen=True)(type("Own", (base,), functions))()


def state(self: Any, x0: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"m": torch.zeros_like(x0)}


SERVER: list[tuple[Function, str]] = [
    (
        lambda s, v, d, P, r, e: (P.T @ d, {}),
        r"returned a move of shape \(1, 1, 24\); it must be \(1, 1, 12\), that",
    ),
    (
        lambda s, v, d, P, r, e: (d[..., :1], {}),
        r"a move of shape \(1, 1, 1\); it must be \(1, 1, 12\)",
    ),
    (lambda s, v, d, P, r, e: d, "it must return a pair: the move, and a dictionary"),
    (lambda s, v, d, P, r, e: None, "returned None; it must return a pair"),
    (lambda s, v, d, P, r, e: (d, None), "returned None; it must return a dictionary of parts"),
    (lambda s, v, d, P, r, e: (d, {"m": d}), r"a part 'm' of shape \(1, 1, 12\).*P.T.put"),
    (
        lambda s, v, d, P, r, e: (d, {"mm": v.m}),
        "'mm', which `init` does not have .did you mean 'm'",
    ),
    (lambda s, v, d, P, r, e: (d, {"x": v.x}), "'x', which `init` does not have"),
    (
        lambda s, v, d, P, r, e: (d + P @ d, {}),
        "fails in line .*states have d = 24 values, vectors",
    ),
]
UPLINK: list[tuple[str, Function, str]] = [
    ("send", lambda s, v, c, P: v, "it must return a pair: the vector"),
    (
        "send",
        lambda s, v, c, P: (v[..., :3], {}),
        r"vector of shape \(1, 3, 3\); it must be \(1, 3, 12\), that of `v`",
    ),
    ("mean", lambda s, v, u, P, r: u, "it must return a pair: the mean"),
    ("mean", lambda s, v, u, P, r: (u, {}), "that of one client's `v`"),
    ("after", lambda s, c, v, P: {"q": v}, "a part 'q', which `init_client` does not have"),
    ("init_client", lambda s, x0: {"x": x0}, "a part 'x', which is the name of the model's own"),
    ("init_client", lambda s, x0: None, "returned None; it must return a dictionary"),
]
DRIFT: list[tuple[str, Function, str]] = [
    ("plus", lambda s, w, x, P: 0.5, "returned float 0.5; it must return a tensor"),
    ("plus", lambda s, w, x, P: lambda z: 0.5, "a function whose value is float 0.5"),
    ("reply", lambda s, w, c, d, u, P, k: {"w": c}, "returned w; it must have a part 'v'"),
    ("reply", lambda s, w, c, d, u, P, k: c, "it must return a dictionary of parts"),
    ("down", lambda s, v, P, r: {"x": v.x}, "a part 'x', which is the name of the model's own"),
]
CASES: list[tuple[str, Any, str, str]] = [
    *(
        ("server", mistaken(fedspan.Server, init=state, step=f), "step", words)
        for f, words in SERVER
    ),
    *(("uplink", mistaken(fedspan.Uplink, **{name: f}), name, words) for name, f, words in UPLINK),
    *(("drift", mistaken(fedspan.Drift, **{name: f}), name, words) for name, f, words in DRIFT),
]


@pytest.mark.parametrize(("axis", "choice", "name", "words"), CASES)
def test_a_wrong_form_is_one_line(axis: str, choice: Any, name: str, words: str) -> None:
    """It names the choice, the function, what came and what was expected."""
    method = SubAvg(lr=0.01, rank=0.5, **{axis: choice})
    with pytest.raises(SpecError, match=words) as error:
        advance(start(method, small()), 2)
    assert str(error.value).startswith(f"`{axis}` 'Own': `{name}` ")


def test_later_rounds_call_the_choice_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = advance(start(SubAvg(lr=0.01, rank=0.5), small()), 2)
    monkeypatch.delattr("fedspan.methods.box.checked")
    advance(loop, 3)


@pytest.mark.parametrize(
    ("base", "name", "function", "words"),
    [
        (
            fedspan.Server,
            "step",
            lambda self, server: 0,
            r"`step` of Own takes \(self, server\); it must",
        ),
        (
            fedspan.Server,
            "stepp",
            lambda self: 0,
            "'stepp' of Own is no function of a server .did you mean 'step'",
        ),
        (
            fedspan.Drift,
            "pluss",
            lambda self: 0,
            "'pluss' of Own is no function of a drift .did you mean 'plus'",
        ),
    ],
)
def test_functions_are_checked_when_a_class_is_registered(
    base: type, name: str, function: Function, words: str
) -> None:
    with pytest.raises(FedspanError, match=words):
        registry.register(type(mistaken(base, **{name: function})))
