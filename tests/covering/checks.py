"""What a run of the covering set is compared with: equivalences, one function each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fedspan
from covering.pairwise import Row
from covering.problems import SCALE, TASKS, Variant
from covering.settings import ROUNDS, spec_table
from fedspan.api.step_size import built
from fedspan.core.config import Engine
from fedspan.core.spec import Spec
from fedspan.core.tables import describe
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.remote.client import RemoteClient
from fedspan.remote.server import RemoteTransport
from fedspan.replies.chain import Chain
from support.channel import LocalChannel, agree, ids_of
from support.loops import Scripted, advance

Line = dict[str, Any]
NUMBERS = itertools.count()


class Stop(fedspan.Callback):
    """Ends a run after its first round."""

    def on_round_end(self, run: Loop) -> None:
        run.end("enough")


class Interrupt(fedspan.Callback):
    """Presses Ctrl-C after a round."""

    def on_round_end(self, run: Loop) -> None:
        if run.t == ROUNDS // 2:
            signal.raise_signal(signal.SIGINT)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of settings, and what came of it."""

    row: Row
    folder: Path
    spec: Spec
    result: Any

    @staticmethod
    def of(row: Row, folder: Path) -> Case:
        """Runs a row."""
        case = Case(row, folder, Spec.from_table(spec_table(row, _new(folder))), None)
        return dataclasses.replace(case, result=case.run())

    def run(
        self,
        variant: Variant = "",
        *,
        without: tuple[str, ...] = (),
        more: Row | None = None,
        **how: Any,
    ) -> Any:
        """The same run with other data or settings."""
        row = {name: level for name, level in self.row.items() if name not in without} | (
            more or {}
        )
        return launch(
            spec_table(row, _new(self.folder), variant), **{"seeds": _seeds(self.row)} | how
        )

    @property
    def values(self) -> dict[str, Any]:
        """The settings."""
        return {name: json.loads(level) for name, level in self.row.items()}

    @property
    def precision(self) -> float:
        """Of results that should differ in the last digits alone."""
        return 1e-12 if self.spec.dtype == "float64" else 1e-5


def launch(table: dict[str, Any], run_dir: Path | None = None, **how: Any) -> Any:
    """Runs a spec; warnings are for people."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return fedspan.run(table, run_dir, progress=False, **how)


def refusal(row: Row, folder: Path) -> str | None:
    """Why a row is refused before its first round is over; None if it is not."""
    why = None
    try:
        launch(spec_table(row, _new(folder)), callbacks=[Stop()], seeds=_seeds(row))
    except fedspan.FedspanError as error:
        why = str(error)
    except Exception:  # noqa: S110  which the row's own test shows
        pass
    assert why is None or "\n" not in why, why
    return why


def _new(folder: Path) -> Path:
    made = folder / str(next(NUMBERS))
    made.mkdir()
    return made


def _seeds(row: Row) -> int:
    return int(row.get("seeds", "1"))


# --- comparisons ---


def flat(result: Any) -> list[torch.Tensor]:
    """The trained numbers of each seed."""
    return [
        torch.cat([v.double().reshape(-1) for _, v in sorted(weights.items())])
        for weights in result.weights
    ]


def lines(result: Any) -> list[list[Line]]:
    """The evaluations of each seed, besides their times."""
    return [
        [{k: v for k, v in line.items() if k != "seconds"} for line in run] for run in result.runs
    ]


def same(one: Any, other: Any) -> None:
    """Asserts that two runs have the same bits."""
    for a, b in zip(flat(one), flat(other), strict=True):
        assert torch.equal(a, b), f"weights differ by {float((a - b).abs().max()):.3g}"


def same_history(one: Any, other: Any) -> None:
    """Asserts that two runs have the same bits in all evaluations too."""
    same(one, other)
    assert repr(lines(one)) == repr(lines(other))


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> None:
    """Asserts that two models agree, relative to their size."""
    wrong = float((one - other).norm() / other.norm().clamp(min=1e-300))
    assert wrong <= tolerance, f"models differ by {wrong:.3g} of their norm"


# --- equivalences: each takes a case to which it applies, as `APPLIES` says ---


def stopped_and_resumed(case: Case) -> None:
    """A run that was stopped half-way and resumed is the run that was not."""
    folder = _new(case.folder)
    table = spec_table(case.row, folder)
    with contextlib.suppress(KeyboardInterrupt):
        launch(table, folder / "run", callbacks=[Interrupt()], seeds=_seeds(case.row))
    same_history(launch(table, folder / "run", resume=True, seeds=_seeds(case.row)), case.result)
    same_history(fedspan.load(folder / "run"), case.result)


def several_seeds(case: Case) -> None:
    """Three seeds together are each seed alone."""
    together = case.run(seeds=3)
    for number in range(3):
        alone = case.run(more={"seed": str(case.spec.seed + number)}, seeds=1)
        assert torch.equal(flat(together)[number], flat(alone)[0]), f"seed {together.seeds[number]}"
        assert repr(lines(together)[number]) == repr(lines(alone)[0])


def every_way(case: Case) -> None:
    """The loop, the batched computation and the pool agree; the pool with the loop in every bit."""
    found = {}
    for way in ("loop", "batched", "pool"):
        with contextlib.suppress(fedspan.FedspanError):  # not every network can be batched
            found[way] = case.run(more={"engine.simulate": json.dumps(way), "engine.workers": "2"})
    same(found["loop"], found["pool"])
    for one in (found.get("batched", found["loop"]), case.result):
        close(flat(one)[0], flat(found["loop"])[0], case.precision)


def states_elsewhere(case: Case) -> None:
    """States on disk are those in memory."""
    plain = case.run(without=("engine.states_dir",))
    same(case.run(more={"engine.states_dir": '"@dir"'}), plain)


def known_start(case: Case) -> None:
    """Clients that hold the initial model compute the same and are sent no more."""
    known = case.spec.participation.known_start
    other = case.run(more={"participation.known_start": json.dumps(not known)})
    same(case.result, other)
    a, b = (one.runs[0][-1] for one in ((case.result, other) if known else (other, case.result)))
    assert a["up_bytes"] == b["up_bytes"]
    assert a["down_bytes"] <= b["down_bytes"]


def equal_weights(case: Case) -> None:
    """Clients of equal size count alike, with weights by examples and without."""
    other = {"uniform": "examples", "examples": "uniform"}[case.spec.participation.weights]
    same(case.run(more={"participation.weights": json.dumps(other)}), case.result)


def only_watched(case: Case) -> None:
    """Evaluations, metrics and callbacks that decide nothing do not change what is trained."""
    same(
        case.run(without=("callbacks", "metrics", "eval_every", "eval_clients_every")), case.result
    )


def no_screen(case: Case) -> None:
    """No honest reply is left out."""
    same(case.run(more={"participation.screen": "null"}), case.result)


def scaled_targets(case: Case) -> None:
    """1024 times the targets of a linear regression give 1024 times the model, and nothing is left out."""
    scaled = case.run("scaled")
    assert not [line for line in scaled.runs[0] if line.get("events")]
    close(flat(scaled)[0] / SCALE, flat(case.result)[0], case.precision)


def order_of_clients(case: Case) -> None:
    """The order of clients has no effect where all take part with all of their data."""
    first, second = (
        case.run(one, without=("engine.simulate",), more=FULL) for one in ("", "ordered")
    )
    close(flat(second)[0], flat(first)[0], case.precision)


def clients_alike(case: Case) -> None:
    """An aggregator of clients that are alike gives their mean; a step size found for others may be none for them."""
    one, mean = (
        case.run(
            "alike", without=("engine.simulate", "clients_per_round", "method.lr", *gone), more=FULL
        )
        for gone in ((), (ROBUST,))
    )
    close(flat(one)[0], flat(mean)[0], case.precision)


FULL, ROBUST = {"batch_size": '"full"'}, "participation.aggregator"


def secure_sums(case: Case) -> None:
    """Secure sums are plain sums up to the resolution of their numbers, 2^-36 of them in 64 bits."""
    private = {
        name: level
        for name, level in case.values["privacy"].items()
        if not name.startswith("secure")
    }
    double = {"dtype": '"float64"'}
    secure = case.run(
        more=double | {"privacy": json.dumps(private | {"secure": True, "secure_bits": 64})}
    )
    plain = case.run(
        without=("privacy",), more=double | ({"privacy": json.dumps(private)} if private else {})
    )
    close(flat(secure)[0], flat(plain)[0], 1e-7)


def across_machines(case: Case) -> None:
    """A server and clients that exchange packed messages come to the simulator's model, and count its bytes."""
    plain = case.run(without=("callbacks", "engine.states_dir"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        loop, channel = _across(case, plain)
    lost = "lost" in case.row
    if not lost:
        assert not loop.events, loop.events[0]
        close(_flat(loop), flat(plain)[0], case.precision)
        last, counted = (
            plain.runs[0][-1],
            tuple(int(one.sum()) for one in (loop.ledger.up, loop.ledger.down)),
        )
        assert (last["up_bytes"], last["down_bytes"]) == counted == (channel.up, channel.down), (
            last,
            counted,
        )
    else:
        assert loop.events
        close(_flat(loop), _flat(_simulated(case, plain)), case.precision)


LOST = {(1, 1), (3, 0)}  # (round, place)


def _parts(case: Case, plain: Any) -> tuple[Any, ...]:
    spec = with_settings(case.spec, _steps(plain))
    method, problem, per_round = built(spec)
    return spec, method, problem, per_round, Chain.of(spec, method, problem.clients, per_round)


def with_settings(value: Any, settings: dict[str, Any]) -> Any:
    """A dataclass with values at dotted keys, such as `method.space.rank`."""
    changes: dict[str, Any] = {}
    for path, inner in settings.items():
        key, _, rest = path.partition(".")
        now = changes.get(key, getattr(value, key))
        changes[key] = with_settings(now, {rest: inner}) if rest else inner
    return dataclasses.replace(value, **changes)


def _steps(result: Any) -> dict[str, Any]:
    """The step sizes that were found, as settings."""
    values = {} if result.lr_search is None else dict(result.lr_search["values"])
    found = {"method.lr": values["lr"]} if values else {}
    if "server_lr" in values:
        found["method.server"] = {"name": "mean", "lr": values["server_lr"]}
    return found


def _loop(case: Case, parts: tuple[Any, ...], transport: Any) -> Loop:
    spec, method, problem, per_round, chain = parts
    return Loop(
        method, problem, transport, (spec.seed,), per_round, rounds=spec.rounds, chain=chain,
        known_start=spec.participation.known_start,
    )  # fmt: skip


def _across(case: Case, plain: Any) -> tuple[Loop, Counted]:
    parts = spec, method, problem, _, chain = _parts(case, plain)
    terms = None if chain.noise is None else chain.noise.terms()
    channel = Counted(method, problem, _new(case.folder))
    channel.known_start = spec.participation.known_start
    options = {}
    if spec.secure is not None:
        options = {"secure": spec.secure, "weighted": spec.participation.weights == "examples"}
    channel.kind = lambda *own, known_start: RemoteClient(
        *own[:6], spec.rounds, terms, known_start=known_start, **options
    )
    transport = RemoteTransport(
        method, problem.layout, problem.x0, problem.clients, channel, agree(method, problem),
        backup=spec.secure is None,
    )  # fmt: skip
    loop = _loop(case, parts, transport)
    for t, place in LOST if "lost" in case.row else ():
        ids = ids_of(loop, t)
        if place < len(ids):
            channel.faults[t, ids[place]] = lambda _: []
    return advance(loop, spec.rounds), channel


def _simulated(case: Case, plain: Any) -> Loop:
    parts = spec, method, problem, _, _ = _parts(case, plain)
    end = Lossy(Simulator(method, problem, Engine(simulate="loop")), LOST)
    return advance(_loop(case, parts, end), spec.rounds)


class Counted(LocalChannel):
    """A channel that counts what passes."""

    up = down = 0

    def deliver(self, messages: Any) -> Iterator[Any]:
        self.down += sum(message.bytes for message in messages)
        for number, reply in super().deliver(messages):
            self.up += reply.bytes
            yield number, reply


class Lossy(Scripted):
    """A simulator some of whose replies are lost, each as (round, place)."""

    def exchange(self, rnd: Any, down: Any, buffers: Any, chain: Any) -> Any:
        places = {
            (rnd.t, int(rnd.ids[0, place]))
            for t, place in LOST
            if t == rnd.t and place < rnd.ids.shape[1]
        }
        self.missing = places
        return super().exchange(rnd, down, buffers, chain)


def _flat(loop: Loop) -> torch.Tensor:
    return torch.cat([v.double().reshape(-1) for _, v in sorted(loop.state_dict().items())])


def planned_bytes(case: Case) -> None:
    """`plan` forecasts the bytes that are then counted."""
    name = case.values["method.name"]
    cost = fedspan.plan(case.spec, methods=[name])[name].cost
    last = case.result.runs[0][-1]
    assert (last["up_bytes"], last["down_bytes"]) == (cost.up, cost.down)


def epochs_as_steps(case: Case) -> None:
    """Epochs are so many local steps."""
    steps = built(case.spec)[0].local_steps
    same(case.run(without=("epochs",), more={"method.local_steps": json.dumps(steps)}), case.result)


def found_rate(case: Case) -> None:
    """A run whose step size was found is the run with that step size."""
    found = {name: json.dumps(value) for name, value in _steps(case.result).items()}
    same(case.run(more=found), case.result)


def private_without_noise(case: Case) -> None:
    """Privacy of clients without noise and with a clip that none reaches is a plain run of all of them."""
    free = {
        "privacy": json.dumps({"clip": 1e9, "noise": 0.0}),
        "participation.weights": '"uniform"',
    }
    plain = _drift(case)
    one, other = (
        case.run(without=("clients_per_round", *gone), more=more)
        for gone, more in (
            ((), free),
            (("privacy",), plain | {"participation.weights": '"uniform"'}),
        )
    )
    close(flat(one)[0], flat(other)[0], case.precision)


def _drift(case: Case) -> Row:
    """The correction of a private run, which tests nothing."""
    drift = getattr(case.spec.method, "drift", None)
    return {} if drift is None else {"method.drift": json.dumps(describe(drift))}


def private_examples_without_noise(case: Case) -> None:
    """Privacy of examples without noise and with a clip that none reaches is a plain run on full batches."""
    free = {"privacy": json.dumps({"level": "example", "clip": 1e9, "noise": 0.0})}
    plain = _drift(case)
    ways = (("engine.simulate",), FULL | free), (("engine.simulate", "privacy"), FULL | plain)
    one, other = (case.run(without=gone, more=more) for gone, more in ways)
    close(flat(one)[0], flat(other)[0], case.precision)


def plain_mean(case: Case) -> None:
    """The aggregator `mean` is none."""
    same(*(case.run(without=(ROBUST,), more=more) for more in ({}, {ROBUST: '{"name": "mean"}'})))


def identity_codes(case: Case) -> None:
    """Codes that leave everything as it is change nothing."""
    whole = {"name": "randk", "k": 1.0}
    both = {"name": "coded", "compressor": whole, "control": whole}
    for axis, coded, plain in (("uplink", whole, "plain"), ("downlink", both, "changes")):
        with contextlib.suppress(fedspan.FedspanError):  # not with secure sums and aggregators
            one, other = (
                case.run(more={f"method.{axis}": json.dumps(choice)}) for choice in (coded, plain)
            )
            close(flat(one)[0], flat(other)[0], case.precision)


# --- which equivalences hold for which rows ---


def applying(case: Case) -> list[Callable[[Case], None]]:
    """The equivalences that a row must keep."""
    spec, values, method = case.spec, case.values, case.spec.method
    dp, task = spec.dp, values.get("task", TASKS[0])
    network = "regression" not in task
    noise = dp is not None and dp.level == "example" and dp.noise != 0  # of the clients
    watched = {one["name"] for one in values.get("callbacks", ())}
    # Gradients of idle units and of biases before a norm are 0, or −1e-18, whose sign is a rounding error; projected by
    # `hadamard`, they leave numbers of one size, of which rounding decides the largest.
    words = str(method)
    decided = "Sign(" in words or ("TopK(" in words and "Hadamard(" in words)  # by the last digits
    steady = not (decided and task in ("network", "running statistics"))
    checks = {
        stopped_and_resumed: True,
        several_seeds: not isinstance(method.lr, str),  # the first seed finds it for all
        every_way: network and not noise and steady,
        states_elsewhere: True,
        known_start: True,
        equal_weights: "uneven" not in task and (dp is None or dp.level == "example"),
        only_watched: not watched & {"early_stopping", "keep_best"},
        no_screen: True,
        scaled_targets: not network and _homogeneous(case),
        order_of_clients: spec.clients_per_round is None
        and not noise
        and steady
        and _alike(case)
        and not (
            network and method.lr == "auto"
        ),  # which looks at 4 clients of a network, drawn by their numbers
        clients_alike: ROBUST in case.row and not noise and _alike(case) and not _has_unit(case),
        secure_sums: spec.secure is not None,
        across_machines: steady
        and not (noise and dp.level == "client")
        and not (spec.secure and spec.secure.secure_signed),
        planned_bytes: spec.privacy is None and case.result.status == "finished",
        epochs_as_steps: spec.epochs is not None,
        found_rate: isinstance(method.lr, str),
        private_without_noise: dp is not None and dp.level == "client" and spec.secure is None,
        private_examples_without_noise: dp is not None
        and dp.level == "example"
        and steady
        and _alike(case),
        plain_mean: ROBUST in case.row
        and not isinstance(method.lr, str),  # the search may find none without it
        identity_codes: hasattr(method, "downlink") and not isinstance(method.lr, str),
    }
    return [check for check, applies in checks.items() if applies]


def _homogeneous(case: Case) -> bool:
    """Whether a method is linear in its gradients, up to rounding that knows no unit."""
    method, values = case.spec.method, case.values
    server = getattr(method, "server", None)
    unit = hasattr(server, "tau") or values["method.name"] == "fedit"
    return (
        case.spec.privacy is None
        and not unit
        and not any(word in str(method) for word in ("AdamW", "SignMomentum(", "sizes=0"))
        and not _has_unit(case)
    )


def _has_unit(case: Case) -> bool:
    """Whether an aggregator bounds replies by a number."""
    return bool({"bound", "radius"} & case.values.get(ROBUST, {}).keys())


def _alike(case: Case) -> bool:
    """Whether clients with the same data do the same, whatever their numbers."""
    drawn = ("QSGD", "RandK", "tested")  # by each client's own key
    own = str(dataclasses.replace(case.spec.method, **_no_download(case.spec.method)))
    apart = case.values.get("task") == "dropout" or case.spec.training.augment is not None
    return not apart and not any(word in own for word in drawn)


def _no_download(method: Any) -> dict[str, Any]:
    return {"downlink": "full"} if hasattr(method, "downlink") else {}
