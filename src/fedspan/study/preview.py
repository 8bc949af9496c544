"""What a spec tells before it runs: its metrics, its traffic, and the network of its task.

The model and the number of clients of a task are built once for all specs that share them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from fedspan.core.objective import Problem
from fedspan.core.spec import Spec
from fedspan.costs.sketch import Sketch, sketched
from fedspan.costs.traffic import Cost, FlatProblem, cost
from fedspan.nn.problem import TorchProblem

OWN = ("rounds", "method", "epochs", "eval_every", "callbacks", "search")  # not part of what a task is built from


def price(spec: Spec) -> Cost:
    """What a run of the spec sends, and what its clients keep."""
    problem = _model(_task_of(spec))
    method: Any = spec.method
    if isinstance(method.lr, str):  # a step size that is searched for
        method = dataclasses.replace(method, lr=1.0)
    method.check(problem.layout)
    return cost(method, problem, spec.clients_per_round or problem.clients, spec.rounds, spec.seed)


def check(spec: Spec) -> None:
    """Refuse a method that cannot work on the task's model."""
    spec.method.check(_model(_task_of(spec)).layout)


def metrics(spec: Spec) -> list[str]:
    """The metrics that a run of the spec reports."""
    problem = spec.task.server_problem((spec.seed,), spec)
    return list(problem.evaluate(problem.x0, problem.buffers0))


def network(spec: Spec) -> Sketch | None:
    """The task's network without numbers; None if the problem is not a network."""
    return _network(_task_of(spec))


def _task_of(spec: Spec) -> str:
    return json.dumps({key: value for key, value in spec.table().items() if key not in OWN}, sort_keys=True)


def _any(task: str) -> Spec:
    return Spec.from_table({"rounds": 1, "method": {"name": "fedavg", "lr": 1.0}} | json.loads(task))


@functools.lru_cache(maxsize=8)
def _model(task: str) -> Problem:
    """A task's model and number of clients, without its data."""
    spec = _any(task)
    problem = spec.task.server_problem((spec.seed,), spec)
    return FlatProblem(problem.layout, problem.x0[:1].clone(), problem.clients)


@functools.lru_cache(maxsize=8)
def _network(task: str) -> Sketch | None:
    """A task's network and the largest batch of any client, without numbers."""
    spec = _any(task)
    problem = spec.task.build((spec.seed,), spec)
    return sketched(problem) if isinstance(problem, TorchProblem) else None
