"""What is refused with privacy, by name: methods and settings for which ε would not be what it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from fedspan.core.callback import Callback
from fedspan.core.config import Participation
from fedspan.core.errors import SpecError
from fedspan.core.method import Method, is_plain_sum
from fedspan.core.objective import Flat, Problem
from fedspan.core.registry import name_of
from fedspan.core.reply import payload
from fedspan.core.round import Round
from fedspan.core.spec import Spec
from fedspan.privacy.mechanism import Mechanism

USABLE = (
    "fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "scaffold", "subavg", "ssf", "ffalora", "fedit",
)  # fmt: skip
REPEATED = "its clients' states follow from the mean of the replies, and with privacy that is divided by qN"


def check_spec(spec: Spec) -> None:
    """Refuses settings of a run under which something else than noised sums or gradients would tell of the data."""
    if spec.dp is None:
        return
    _check_data_use(spec)
    if spec.dp.level == "example":
        return
    if spec.participation.weights != "uniform":
        raise SpecError(
            "`participation.weights` 'examples' would let a client's size decide its part of the sum; with `privacy` "
            "set it to 'uniform'"
        )
    if spec.participation.aggregator is not None:
        name = name_of(spec.participation.aggregator)
        raise SpecError(
            f"`participation.aggregator` {name!r} is not for `privacy`: one client can move it by more than `clip`; "
            "leave it out, the clip bounds every reply"
        )


def _check_data_use(spec: Spec) -> None:
    """Refuses what looks at the clients' data beside the training."""
    if isinstance(spec.method.lr, str):
        raise SpecError(
            f"`method.lr` is {spec.method.lr!r}, which looks at the clients' data without noise; with `privacy` give a "
            "number"
        )
    if spec.eval_clients_every is not None:
        raise SpecError(
            "`eval_clients_every` tells of each client's data without noise; leave it out with `privacy`"
        )
    for callback in spec.callbacks:
        check_callback(callback)


def screening(spec: Spec) -> Participation:
    """How replies are chosen. With noised sums none is left out: one client could decide whether another's counts."""
    if spec.dp is None or spec.dp.level == "example":
        return spec.participation
    return dataclasses.replace(spec.participation, screen=None)


def check_callback(callback: Callback) -> None:
    """Refuses callbacks that compute on the clients' data."""
    if callback.needs_all_clients:
        raise SpecError(
            f"callback {type(callback).__name__} computes on the clients' data without noise; leave it out with "
            "`privacy`"
        )


def check_method(method: Method) -> None:
    """Refuse methods whose server needs more than a sum, and those that send numbers beside the payload."""
    name = name_of(method)
    if method.statistics:
        raise SpecError(
            f"`drift.correction` 'tested' is not for {name} with `privacy`: two numbers of another size would be "
            "clipped with the reply; use 'always' or 'never'"
        )
    if name == "fedsub":
        raise SpecError(f"{name} is not for `privacy`: {REPEATED}; use ssf")
    if not is_plain_sum(method):
        raise SpecError(
            f"{name} is not for `privacy` with these settings: its server needs more than the sum of plain replies; "
            f"leave out a coded `uplink` and server = 'fedexp', or use {', '.join(USABLE)}"
        )


def check_loop(mechanism: Mechanism, method: Method, problem: Problem) -> None:
    """Refuses problems whose rounds release more than the sum."""
    check_method(method)
    if problem.buffers0 is not None:
        raise SpecError(
            "the model has buffers, such as running statistics of BatchNorm, which clients would send without noise; "
            "with `privacy` use GroupNorm or LayerNorm"
        )
    if problem.weights is not None:
        raise SpecError("`participation.weights` must be 'uniform' with `privacy`")
    if len(problem.seeds) > 1 and (mechanism.q < 1 or mechanism.settings.quantile is not None):
        raise SpecError(
            "several seeds of one computation have cohorts of different sizes; run them one by one"
        )


def empty_reply(method: Method, server: Any, problem: Problem, rnd: Round) -> Any:
    """A reply of zeros in the form of the method's own, for a round without any."""
    one = np.zeros((len(rnd.seeds), 1), np.int64)
    alone = dataclasses.replace(rnd, ids=one, last_round=one - 1, schedule=None)
    _, up = method.client_step(
        method.init_client(problem.x0, problem.layout),
        method.broadcast(server, alone),
        Flat(),
        alone,
    )
    return up.replace(**{name: torch.zeros_like(part) for name, part in payload(up).items()})
