"""All combinations of settings that are refused, with the reason and the remedy: what is mathematically wrong.

Each entry of `REFUSALS` is (name, condition, reason). A condition is a function of a `Run` and gives what is refused,
or something false where nothing is. The reason is the text of the error; `{0}` is what the condition gave. An entry
that needs the problem, or the config of a server, gives nothing while these are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fedspan.core.callback import Callback
from fedspan.core.errors import SpecError
from fedspan.core.method import Method, is_plain_sum
from fedspan.core.objective import Problem
from fedspan.core.privacy import LEAST, Privacy
from fedspan.core.registry import name_of
from fedspan.core.spec import Spec

SUMMED = (
    "fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "scaffold", "subavg", "ssf", "ffalora", "fedit",
)  # fmt: skip  # methods whose server needs the sum of the replies alone


@dataclass(frozen=True)
class Run:
    """A run that is to begin."""

    spec: Spec
    callbacks: Sequence[Callback] = ()  # besides those of the spec
    problem: Problem | None = None  # None: not built yet
    server: Any = None  # the run config of a server whose clients are on other machines

    @property
    def method(self) -> Method:
        return self.spec.method

    @property
    def noise(self) -> Privacy | None:
        """Privacy of clients, where sums have noise."""
        return self.spec.dp if self.spec.dp is not None and self.spec.dp.level == "client" else None

    @property
    def robust(self) -> str:
        """The name of the aggregator, if it is not the mean."""
        aggregator = self.spec.participation.aggregator
        name = "" if aggregator is None else name_of(aggregator)
        return "" if name == "mean" else name

    def looks_at_data(self) -> Iterator[tuple[str, str]]:
        """(setting that uses the data of all clients beside the training, what to do instead)."""
        lr = self.method.lr
        if isinstance(lr, str):
            yield f"`method.lr` is {lr!r}, which", "give a number"
        if self.spec.eval_clients_every is not None and self.spec.privacy is not None:
            yield "`eval_clients_every`", "leave it out"
        for one in (*self.spec.callbacks, *self.callbacks):
            if one.needs_all_clients:
                yield f"callback {type(one).__name__}", "leave it out"
        if self.server is not None and self.spec.epochs is not None:
            yield "`epochs`", "set method.local_steps"


def check(run: Run) -> None:
    """Raises the first refusal of a run."""
    for _, condition, reason in REFUSALS:
        if found := condition(run):
            raise SpecError(
                reason.format(*found) if isinstance(found, tuple) else reason.format(found)
            )


def _data_without_noise(run: Run) -> Any:
    return run.spec.dp is not None and next(run.looks_at_data(), None)


def _data_elsewhere(run: Run) -> Any:
    return run.server is not None and next(run.looks_at_data(), None)


def _single_replies(run: Run) -> Any:
    """Whatever needs the mean of the replies alone, with a method that needs more."""
    hidden = "`privacy`" if run.noise else "`privacy.secure`" if run.spec.secure else ""
    if is_plain_sum(run.method) or not (hidden or run.robust):
        return None
    remedy = "leave out a coded `uplink` and server = 'fedexp', or use"
    what = hidden or f"`participation.aggregator` {run.robust!r}"
    return what, name_of(run.method), remedy, ", ".join(SUMMED)


def _method_with_noise(run: Run) -> Any:
    """(setting of a method, why it cannot have noise)."""
    method: Any = run.method
    if run.noise is None:
        return None
    if name_of(method) == "fedsub":
        return "fedsub", (
            "its clients' states follow from the mean of the replies, and with privacy that is divided by qN; use ssf"
        )
    if method.statistics:
        why = "two numbers of another size would be clipped with the reply; use 'always' or 'never'"
        return f"`drift.correction` 'tested' of {name_of(method)}", why
    return None


def _few_clients(run: Run) -> Any:
    if run.spec.secure is None or run.problem is None:
        return None
    clients = run.problem.clients
    if clients < LEAST:
        return f"needs at least {LEAST} clients, got {clients}: a sum of fewer hides nobody; leave it out"
    per_round = run.spec.clients_per_round or clients
    if per_round < LEAST:
        return f"hides nobody among {per_round} clients; set `clients_per_round` to {LEAST} or more"
    return None


def _deployment(run: Run) -> Any:
    """(key of the run config, its value, why it does not go with privacy, what to set)."""
    if run.server is None or not (run.noise or run.spec.secure):
        return None
    config = run.server
    if run.noise is not None and config.min_replies != 1:
        why = "one client could decide whether all others count"
        return "min-replies", config.min_replies, why, 1
    if config.checkpoint_every != 1:
        why = "a resumed run would release or sum rounds again, which clients refuse"
        return "checkpoint-every", config.checkpoint_every, why, 1
    if run.spec.secure is not None and config.backup:
        why = "a server would make its copies of the clients' states of replies, which secure sums hide"
        return "backup", "true", why, "false"
    return None


def _no_network(run: Run) -> Any:
    """Settings that need a torch model, with another task."""
    if run.problem is None or hasattr(run.problem, "sampling_rate"):
        return None
    if run.spec.eval_clients_every is not None:
        return "`eval_clients_every`", "leave it out"
    if run.spec.dp is not None and run.spec.dp.level == "example":
        return "`privacy` of level 'example'", "use level 'client'"
    return None


REFUSALS: list[tuple[str, Callable[[Run], Any], str]] = [
    (
        "data without noise",
        _data_without_noise,
        "{0} looks at the clients' data without noise; with `privacy` {1}",
    ),
    (
        "data on other machines",
        _data_elsewhere,
        "{0} needs all clients' data, which a server does not have; {1}",
    ),
    (
        "weights with noise",
        lambda run: run.noise and run.spec.participation.weights != "uniform",
        "`participation.weights` 'examples' would let a client's size decide its part of the sum; with `privacy` "
        "set it to 'uniform'",
    ),
    (
        "a robust mean of replies that nobody sees",
        lambda run: (run.noise or run.spec.secure) and run.robust,
        "`participation.aggregator` {0!r} needs single replies, of which `privacy` gives the server the sum alone; "
        "leave out one of them",
    ),
    (
        "single replies",
        _single_replies,
        "{0} gives the server one mean of plain vectors, and {1} with these settings needs each reply, or sends codes; "
        "{2} a method such as {3}",
    ),
    (
        "a robust mean that is added up",
        lambda run: run.robust and run.method.follows_states and (run.robust, name_of(run.method)),
        "`participation.aggregator` {0!r} is not for {1} with these settings, whose server adds up replies to follow "
        "the clients' states: what an aggregator leaves out would be missing for ever, and x would drift; use subavg, "
        "fedavg, or ssf with drift.rule = 'paper'",
    ),
    (
        "a method with noise",
        _method_with_noise,
        "{0} is not for `privacy`: {1}",
    ),
    (
        "buffers without noise",
        lambda run: run.spec.dp and run.problem and run.problem.buffers0 is not None,
        "the model has buffers, such as running statistics of BatchNorm, which clients would send without noise; with "
        "`privacy` use GroupNorm or LayerNorm",
    ),
    ("a secure sum of few", _few_clients, "`privacy.secure` {0}"),
    (
        "a quantile of replies that nobody sees",
        lambda run: run.spec.secure and run.spec.secure.quantile is not None,
        "`privacy.quantile` needs to know of single clients; leave it out with `secure`",
    ),
    (
        "a deployment with privacy",
        _deployment,
        "run config {0!r} is {1}: {2}; with `privacy` set it to {3}",
    ),
    ("no network", _no_network, "{0} needs a task with a torch model; {1}"),
]


# --- Choices of one method ---


def needs_contractive(key: str, compressor: Any, n: int) -> None:
    """Refuse a compressor of n values that may leave out more than it sends: what is kept would grow."""
    if compressor.delta(n) is None:
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
            "needs an unbiased one; use randk, qsgd or natural with unbiased = true"
        )


def needs_controls(key: str, choice: Any, drift: Any) -> None:
    """Refuse a running mean of what controls lack without controls."""
    if not drift.controls:
        raise SpecError(
            f"`{key}` {name_of(choice)!r} is a running mean of what controls lack; set `drift` to 'controls', or use "
            "uplink = 'feedback'"
        )


def check_axes(drift: Any, uplink: Any, server: Any) -> None:
    """Refuse choices of a method that cannot work together."""
    if drift.controls and uplink.needs_no_controls:
        raise SpecError(
            f"`uplink` {name_of(uplink)!r} with drift = 'controls': {uplink.needs_no_controls}"
        )
    if server.needs_each_reply and uplink.in_gradients:
        raise SpecError(
            f"`server` {name_of(server)!r} needs the change of each client, and uplink = {name_of(uplink)!r} sends "
            "changes of an estimate; use another of the two"
        )
