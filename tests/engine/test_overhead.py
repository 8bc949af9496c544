"""What a round costs beside its arithmetic, counted: torch operations and Python calls. No clock is read."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedspan.core.config import Engine, Participation, Settings
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.nn.client_data import as_client_data
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules
from fedspan.projectors.gaussian import Gaussian
from fedspan.replies.chain import Chain
from fedspan.tasks.regression import Regression
from support.methods import build

ROUNDS = 64  # as many as are drawn ahead, so that every bound includes the drawing


class Operations(TorchDispatchMode):
    """Counts the operations that reach torch's dispatcher."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # loading torch's compiler takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def advance(loop: Loop) -> None:
    with torch.inference_mode():
        for _ in range(ROUNDS):
            loop.step()


def calls(loop: Loop) -> int:
    """Calls of Python functions in some rounds."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.disable()  # whose callbacks, of whichever library, would be counted too
    sys.setprofile(note)
    try:
        advance(loop)
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


# Bounds are a few per cent above what a round takes: raise one only for something that every round needs.
@pytest.mark.parametrize(
    ("name", "operations", "python_calls"),
    [("ssf", 99, 188), ("ssf, tested", 170, 209), ("scaffold", 58, 120), ("fedavg", 35, 103)],
)
def test_a_round_of_the_toy_stays_cheap(name: str, operations: int, python_calls: int) -> None:
    own: dict[str, Any] = {}
    if name.startswith("ssf"):
        own = {
            "space": Gaussian(rank=20),
            "correction": "always" if name == "ssf" else "tested",
        }
    for clients in (20, 500):  # the same whatever their number
        method = build(name.split(",")[0], local_steps=5, **own)
        problem = Regression(clients=clients, samples=30).build((0,), Settings(batch_size=20))
        loop = Loop(method, problem, Simulator(method, problem), (0,), 10)
        advance(loop)  # fills caches
        with Operations() as seen:
            advance(loop)
        found = seen.count / ROUNDS, calls(loop) / ROUNDS
        assert found[0] <= operations, found
        assert found[1] <= python_calls, found
        chain = Chain(method, Participation())  # which screens replies, as `run` does
        loop = Loop(method, problem, Simulator(method, problem), (0,), 10, chain=chain)
        advance(loop)
        with Operations() as screened:
            advance(loop)
        assert screened.count / ROUNDS <= operations + 3, "one norm, and two checks of its list"
        assert calls(loop) / ROUNDS <= python_calls + 7


def network() -> TorchProblem:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    data = [
        as_client_data((torch.randn(8, 6), torch.randint(0, 3, (8,))), str(i)) for i in range(12)
    ]
    loss = lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])  # noqa: E731
    return TorchProblem(
        model, data, loss, projection_rules(model, min_numel=4), Settings(batch_size=4)
    )


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ssf"])
@pytest.mark.parametrize(
    "make", [lambda: Regression(samples=30).build((0,), Settings(batch_size=20)), network]
)
def test_nothing_of_a_round_waits_for_the_garbage_collector(name: str, make: Any) -> None:
    """The mini-batches of a cohort are freed with its round, so that the next round finds their memory."""
    problem, method = make(), build(name)
    loop = Loop(method, problem, Simulator(method, problem, Engine(simulate="batched")), (0,), 10)
    made, cohort = [], problem.cohort

    def watched(rnd: Any) -> Any:
        f = cohort(rnd)
        made.append(weakref.ref(f))
        return f

    problem.cohort = watched
    gc.disable()
    try:
        with torch.inference_mode():
            loop.step()
            loop.step()
        assert len(made) == 2
        assert not any(one() for one in made)
    finally:
        gc.enable()
