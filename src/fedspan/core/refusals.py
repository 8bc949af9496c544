"""All combinations of settings that are refused, with the reason and the remedy: what is mathematically wrong.

`refused` yields the reasons against a run, `check` raises the first one. What needs the problem, or the config of a
server, is passed over while these are not known. The choices of one method are checked below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedspan.core.callback import Callback
from fedspan.core.errors import SpecError
from fedspan.core.method import is_plain_sum
from fedspan.core.objective import Problem
from fedspan.core.privacy import LEAST
from fedspan.core.registry import is_registered, name_of
from fedspan.core.spec import Spec

SUMMED = (
    "fedavg", "fedprox", "fednova", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "mimelite", "feddyn", "fedvarp",
    "scaffold", "subavg", "ssf", "ffalora", "fedit",
)  # fmt: skip  # methods whose server needs the sum of the replies alone


def check(
    spec: Spec,
    callbacks: Sequence[Callback] = (),
    problem: Problem | None = None,
    server: Any = None,
) -> None:
    """Raise the first reason against a run.

    Args:
        spec: What is to run.
        callbacks: Those besides the callbacks of the spec.
        problem: The task with its data; None before it is built.
        server: The run config of a server whose clients are on other machines.
    """
    for reason in refused(spec, callbacks, problem, server):
        raise SpecError(reason)


def refused(
    spec: Spec, callbacks: Sequence[Callback], problem: Problem | None, server: Any
) -> Iterator[str]:
    """Return the reasons against a run, in the order in which they are checked."""
    method, secure = spec.method, spec.secure
    name = name_of(method) if is_registered(method) else type(method).__name__
    noise = spec.dp is not None and spec.dp.level == "client"  # whether sums of replies have noise
    aggregator = spec.participation.aggregator
    robust = "" if aggregator is None else name_of(aggregator).removeprefix("mean")

    # what uses the data of all clients beside the training
    looks = []
    if isinstance(method.lr, str):
        looks.append((f"`method.lr` is {method.lr!r}, which", "give a number"))
    if spec.eval_clients_every is not None and spec.privacy is not None:
        looks.append(("`eval_clients_every`", "leave it out"))
    watching = [one for one in (*spec.callbacks, *callbacks) if one.needs_all_clients]
    looks += [(f"callback {type(one).__name__}", "leave it out") for one in watching]
    if server is not None and spec.epochs is not None and not spec.training.per_client:
        looks.append(("`epochs`", "set method.local_steps"))
    for what, remedy in looks:
        if spec.dp is not None:
            yield f"{what} looks at the clients' data without noise; with `privacy` {remedy}"
        if server is not None:
            yield f"{what} needs all clients' data, which a server does not have; {remedy}"

    # unequal local work
    if spec.training.per_client and not method.own_steps:
        yield (
            f"`training.per_client` is not for {name}, whose replies are of K steps each; leave it out, or use a "
            "method such as fedavg, scaffold or ssf"
        )

    # what follows from numbers of examples, which have no noise
    sized = []
    if spec.training.per_client and spec.dp is not None:
        sized.append(("`training.per_client`", "steps", "leave it out"))
    if noise and spec.participation.weights != "uniform":
        what = "`participation.weights` 'examples'"
        sized.append((what, "part of the sum", "set it to 'uniform'"))
    for what, part, remedy in sized:
        yield (
            f"{what} lets a client's number of examples, which has no noise, decide its {part}; with `privacy` {remedy}"
        )

    # the mean of the replies, and who sees each of them
    if (noise or secure) and robust:
        yield (
            f"`participation.aggregator` {robust!r} needs single replies, of which `privacy` gives the server the sum "
            "alone; leave out one of them"
        )
    hidden = "`privacy`" if noise else "`privacy.secure`" if secure else ""
    if (hidden or robust) and not is_plain_sum(method):
        what = hidden or f"`participation.aggregator` {robust!r}"
        yield (
            f"{what} gives the server one mean of plain vectors, and {name} with these settings needs each reply, or "
            "sends codes; leave out a coded `uplink` and server = 'fedexp', or use a method such as "
            f"{', '.join(SUMMED)}"
        )
    if robust and method.follows_states:
        yield (
            f"`participation.aggregator` {robust!r} is not for {name} with these settings, whose server adds up "
            "replies to follow the clients' states: what an aggregator leaves out would be missing for ever, and x "
            "would drift; use subavg, fedavg, or ssf with drift.rule = 'paper'"
        )

    # noise
    if noise and name == "fedsub":
        yield (
            "fedsub is not for `privacy`: its clients' states follow from the mean of the replies, and with privacy "
            "that is divided by qN; use ssf"
        )
    if noise and method.statistics:
        yield (
            f"`drift.correction` 'tested' of {name} is not for `privacy`: two numbers of another size would be clipped "
            "with the reply; use 'always' or 'never'"
        )
    if spec.dp and problem and problem.buffers0 is not None:
        yield (
            "the model has buffers, such as running statistics of BatchNorm, which clients would send without noise; "
            "with `privacy` use GroupNorm or LayerNorm"
        )

    # secure sums
    if secure and problem:
        clients = problem.clients
        per_round = spec.clients_per_round or clients
        why = f"hides nobody among {per_round} clients; set `clients_per_round` to {LEAST} or more"
        if clients < LEAST:
            why = f"needs at least {LEAST} clients, got {clients}: a sum of fewer hides nobody; leave it out"
        if min(clients, per_round) < LEAST:
            yield f"`privacy.secure` {why}"
    if secure and secure.quantile is not None:
        yield ("`privacy.quantile` needs to know of single clients; leave it out with `secure`")

    # clients on other machines
    if server is not None and (noise or secure):
        one, again, copies = (
            "one client could decide whether all others count",
            "a resumed run would release or sum rounds again, which clients refuse",
            "a server would make its copies of the clients' states of replies, which secure sums hide",
        )
        for key, applies, value, wanted, why in (
            ("min-replies", noise, server.min_replies, 1, one),
            ("checkpoint-every", True, server.checkpoint_every, 1, again),
            ("backup", secure, str(server.backup).lower(), "false", copies),
        ):
            if applies and value != wanted:
                yield f"run config {key!r} is {value}: {why}; with `privacy` set it to {wanted}"

    # no network
    if problem and not hasattr(problem, "sampling_rate"):
        what = "`eval_clients_every`" if spec.eval_clients_every is not None else ""
        remedy = "leave it out"
        if spec.dp is not None and spec.dp.level == "example":
            what, remedy = "`privacy` of level 'example'", "use level 'client'"
        if what:
            yield f"{what} needs a task with a torch model; {remedy}"


# --- Choices of one method ---


def needs_contractive(key: str, compressor: Any, n: int) -> None:
    """Refuse a compressor of n values that may leave out more than it sends: what is kept would grow."""
    if compressor is not None and compressor.delta(n) is None:
        raise SpecError(
            f"`{key}` {name_of(compressor)!r} is not contractive for {n} values with these settings: it would leave "
            "out more than it sends; use topk or sign, more bits, or set its unbiased = false"
        )


def needs_unbiased(key: str, compressor: Any, n: int) -> None:
    """Refuse a biased compressor where only unbiased errors average out."""
    compressor.delta(n)  # refuses too large a k
    if compressor.omega(n) is None:
        raise SpecError(
            f"`{key}` {name_of(compressor)!r} is biased with these settings, and a control that moves by a share of it "
            "needs an unbiased one; use randk or qsgd with unbiased = true"
        )


def needs_controls(key: str, choice: Any, drift: Any) -> None:
    """Refuse a running mean of what controls lack without controls that are gradients."""
    if not (drift.controls and drift.in_gradients):
        raise SpecError(
            f"`{key}` {name_of(choice)!r} is a running mean of what controls lack; set `drift` to 'controls', or use "
            "uplink = 'feedback'"
        )


def check_axes(drift: Any, uplink: Any, server: Any, normalize: bool) -> None:
    """Refuse choices of a method that cannot work together."""
    if drift.controls and uplink.needs_no_controls:
        raise SpecError(
            f"`uplink` {name_of(uplink)!r} with drift = {name_of(drift)!r}, whose clients keep "
            f"{', '.join(drift.controls)}: "
            f"{uplink.needs_no_controls}"
        )
    if not normalize and (drift.in_gradients or uplink.in_gradients):
        raise SpecError(
            "`normalize` = false is for methods whose clients send the end of their steps; with these settings they "
            "send a mean gradient, which does not grow with the number of steps; leave it out"
        )
    if server.needs_each_reply and uplink.in_gradients:
        raise SpecError(
            f"`server` {name_of(server)!r} needs the change of each client, and uplink = {name_of(uplink)!r} sends "
            "changes of an estimate; use another of the two"
        )
