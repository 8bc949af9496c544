"""Real SuperLinks and SuperNodes on 127.0.0.1: the simulator's result, TLS with known nodes, and kill -9."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "flower"))

from cluster import APP, Cluster, kill, quietly

from fedspan.api.run import run
from fedspan.core import checkpoint
from fedspan.core.privacy import Privacy
from fedspan.core.spec import Spec
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.remote.client import StateFile
from fedspan.remote.flower.client import agreement_of, load_spec
from fedspan.remote.flower.records import RunConfig
from fedspan.remote.roster import ROSTER, Roster
from support.loops import SMALL, Scripted, close
from support.methods import METHODS
from support.rounds import rounds_in

SSF = {"space": {"name": "coordinate", "rank": 4}}


def spec_of(
    rounds: int, clients: int, clients_per_round: int, name: str = "ssf", settings: Any = SSF
) -> Spec:
    table = {
        "rounds": rounds, "eval_every": 2, "clients_per_round": clients_per_round, "batch_size": 4,
        "method": {"name": name, "lr": 0.02, "local_steps": 3} | settings, "task": SMALL | {"clients": clients},
    }  # fmt: skip
    return Spec.from_table(table)


def changes(spec: Spec) -> str:
    """The spec as changes of the app's own: one line of TOML for each key; a regression has no projection rules."""
    table = {"projection": {}} | spec.decisions() | {"rounds": spec.rounds}
    return "; ".join(f"{key}={inline(value)}" for key, value in table.items())


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def same_as_simulated(spec: Spec, out: Path, folder: Path) -> None:
    """Final x within 1e-6, and the same bytes in both directions."""
    here = run(spec, folder).history[-1]
    rounds = rounds_in(out)
    assert [len(one["accepted"]) for one in rounds] == [spec.clients_per_round] * spec.rounds
    assert sum(one["payload_up"] for one in rounds) == here["up_bytes"]
    assert sum(one["payload_down"] for one in rounds) == here["down_bytes"]
    x, y = (safetensors.torch.load_file(place / "model.safetensors") for place in (folder, out))
    for name in x:
        assert torch.linalg.norm(x[name] - y[name]) <= 1e-6 * torch.linalg.norm(x[name])


@pytest.mark.slow
def test_a_deployment_with_tls_and_known_nodes_gives_the_simulators_result(tmp_path: Path) -> None:
    spec = spec_of(
        2, 3, 2
    )  # of three clients one takes part twice, with the state that it has stored
    with Cluster(tmp_path, nodes=3, tls=True) as cluster:
        stranger = tmp_path / "stranger"
        quietly("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(stranger))
        cluster.start_node(7, key=stranger)
        number = cluster.run(run_dir=str(tmp_path / "out"), set=changes(spec))
        status = cluster.wait(number, 300)
        assert status["status"] == "finished:completed", status
        assert cluster.processes["node7"].wait(60) != 0  # nobody has registered its key
    assert cluster.living() == []
    assert sorted(Roster.at(tmp_path / "out" / ROSTER).nodes) == [0, 1, 2], (
        "known nodes are bound to their clients"
    )
    same_as_simulated(spec, tmp_path / "out", tmp_path / "here")


@pytest.mark.slow
def test_a_registered_node_cannot_take_the_place_of_another_client(tmp_path: Path) -> None:
    """Its own key is known and it claims client 0: it is given neither that client's state nor its work."""
    spec, out = spec_of(10, 3, 2), tmp_path / "out"
    with Cluster(tmp_path, nodes=3, tls=True) as cluster:
        number = cluster.run(
            run_dir=str(out), set=changes(spec)
        )  # clients are bound because nodes have known keys
        until = time.monotonic() + 120
        while not (out / ROSTER).exists() or len(Roster.at(out / ROSTER).nodes) < 3:
            assert time.monotonic() < until
            time.sleep(0.2)
        bound = Roster.at(out / ROSTER).nodes
        cluster.register(8)
        cluster.start_node(8, client=0)
        status = cluster.wait(number, 400)
        assert status["status"] == "finished:completed", status
    events = [event for one in rounds_in(out) for event in one.get("events", [])]
    assert any("refused as client 0, which belongs to another node" in event for event in events)
    assert Roster.at(out / ROSTER).nodes == bound
    same_as_simulated(spec, out, tmp_path / "here")


@pytest.mark.slow
def test_secure_sums_on_a_superlink_give_the_simulators_result(tmp_path: Path) -> None:
    """Every question is answered by a new process, which has only the files of the client."""
    spec = dataclasses.replace(spec_of(3, 4, 3), privacy=Privacy(secure=True, secure_bits=64))
    with Cluster(tmp_path, nodes=4) as cluster:
        status = cluster.wait(
            cluster.run(run_dir=str(tmp_path / "out"), set=changes(spec), backup=False), 600
        )
    assert status["status"] == "finished:completed", status
    assert not (tmp_path / "out" / ROSTER).exists(), (
        "nodes without keys have other ids after a restart"
    )
    same_as_simulated(spec, tmp_path / "out", tmp_path / "here")


@pytest.mark.slow
def test_flowers_simulation_gives_the_simulators_result(tmp_path: Path) -> None:
    pytest.importorskip(
        "ray", reason="Flower's simulation engine is not installed; pip install 'flwr[simulation]'"
    )
    spec = spec_of(5, 7, 3)
    with Cluster(tmp_path, nodes=7, simulation=True) as cluster:
        status = cluster.wait(cluster.run(run_dir=str(tmp_path / "out"), set=changes(spec)), 300)
    assert status["status"] == "finished:completed", status
    same_as_simulated(spec, tmp_path / "out", tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize("simulation", [False, True], ids=["deployment", "simulation"])
def test_every_method_on_both_engines(simulation: bool, tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=3, simulation=simulation) as cluster:
        for name, settings in METHODS.items():
            spec = spec_of(3, 3, 2, name, settings[0])
            out = tmp_path / name
            status = cluster.wait(
                cluster.run(run_dir=str(out), set=changes(spec), run_name=name), 300
            )
            assert status["status"] == "finished:completed", (name, status)
            same_as_simulated(spec, out, tmp_path / f"{name}-here")


class Harm:
    """Kills parts of a running deployment, and starts again what a supervisor would."""

    def __init__(self, cluster: Cluster, config: dict[str, Any]) -> None:
        self.cluster, self.config = cluster, config
        self.run, self.done = cluster.run(**config), dict.fromkeys(("node", "client", "server"), 0)

    def node(self, rng: random.Random) -> bool:
        number = rng.randrange(3)
        self.cluster.crash(f"node{number}")
        self.cluster.start_node(number)
        return True

    def client(self, rng: random.Random) -> bool:
        return self._one("flwr-clientapp", rng)

    def server(self, rng: random.Random) -> bool:
        if not self._one("flwr-serverapp", rng):
            return False
        self.run = self.cluster.run(**self.config | {"resume": True})
        return True

    def _one(self, command: str, rng: random.Random) -> bool:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            found = self.cluster.living(command)
            if found:
                kill(rng.choice(found))
                return True
            time.sleep(0.05)
        return False


def rounds_done(out: Path) -> int:
    try:
        return max((one["round"] + 1 for one in rounds_in(out)), default=0)
    except FileNotFoundError:
        return 0


@pytest.mark.slow
def test_a_hundred_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    """SuperNodes, client processes and the server app die at random; what was counted is all that happened.

    pytest -m slow tests/remote/test_deployment.py -k hundred
    """
    rng, out, faults = random.Random(1), tmp_path / "out", 100
    spec = spec_of(40, 3, 2)
    with Cluster(tmp_path, nodes=3) as cluster:
        harm = Harm(cluster, {"run_dir": str(out), "set": changes(spec), "timeout": 45.0})
        while (before := rounds_done(out)) < spec.rounds:
            left = min(faults - sum(harm.done.values()), rng.randint(2, 6)) if before else 0
            for _ in range(left):
                kind = min(harm.done, key=lambda name: (harm.done[name], rng.random()))
                time.sleep(rng.uniform(0, 5))
                harm.done[kind] += getattr(harm, kind)(rng)
            print(f"round {before}: {harm.done}", flush=True)  # noqa: T201
            until = time.monotonic() + 600
            while rounds_done(out) in (before, 0) and time.monotonic() < until:
                time.sleep(0.2)
            assert time.monotonic() < until, f"no round in 600 s after {harm.done} kills"
        assert cluster.wait(harm.run, 120)["status"] == "finished:completed"
    assert sum(harm.done.values()) == faults, harm.done
    rounds = rounds_in(out)
    assert [one["round"] for one in rounds] == list(range(spec.rounds))
    uncounted = {
        (one["round"], c) for one in rounds for c in one["sampled"] if c not in one["accepted"]
    }
    print(f"{harm.done}, {len(uncounted)} replies not counted of {2 * spec.rounds}")  # noqa: T201
    loop = replayed(spec, uncounted)
    close(final_model(spec, out), loop.server.x, 1e-6)
    close(mean_control(spec, tmp_path / "states", rounds), loop.server.c.flatten(), 1e-6)


def final_model(spec: Spec, out: Path) -> torch.Tensor:
    """x at the end of a run."""
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    return spec.task.build((spec.seed,), spec).layout.join(
        {k: v[None, None] for k, v in tensors.items()}
    )


def mean_control(spec: Spec, states: Path, rounds: list[dict[str, Any]]) -> torch.Tensor:
    """mean c_i, each from the client's own file, after as many updates as the server accepted."""
    problem = spec.task.build((spec.seed,), spec)
    submitted = load_spec(
        APP / "fedspan_flower" / "spec.toml", RunConfig(set=changes(spec)).changes
    )
    fingerprint, found = agreement_of(submitted, problem).fingerprint, []
    for client in range(problem.clients):
        accepted = sum(client in one["accepted"] for one in rounds)
        file = StateFile.of(states, "run", f"client-{client}")
        marks = dict(
            zip(
                *(checkpoint.load(file.path)[1][name] for name in ("accepted", "marks")),
                strict=True,
            )
        )
        found.append(file.load(accepted, marks[accepted], fingerprint).state.c)
    return torch.stack(found).mean(0).flatten()


def replayed(spec: Spec, uncounted: set[tuple[int, int]]) -> Loop:
    """The simulator with the same replies missing."""
    problem = spec.task.build((spec.seed,), spec)
    inner = Scripted(Simulator(spec.method, problem), uncounted)
    loop = Loop(
        spec.method, problem, inner, (spec.seed,), spec.clients_per_round or problem.clients
    )
    with torch.inference_mode():
        for _ in range(spec.rounds):
            loop.step()
    return loop


@pytest.mark.slow
def test_a_superlink_with_its_database_is_killed_and_comes_back(tmp_path: Path) -> None:
    """Its server app ends with it, its SuperNodes do not; the run is resumed on the same database."""
    spec, out = spec_of(8, 3, 2), tmp_path / "out"
    config = {"run_dir": str(out), "set": changes(spec), "timeout": 60.0}
    with Cluster(tmp_path, nodes=3, database=True) as cluster:
        cluster.run(**config)
        while rounds_done(out) < 3:
            time.sleep(0.2)
        cluster.crash("link")
        until = time.monotonic() + 60
        while cluster.living("flwr-serverapp"):
            assert time.monotonic() < until
            time.sleep(0.2)
        cluster.start_link()
        status = cluster.wait(cluster.run(**config, resume=True), 400)
    assert status["status"] == "finished:completed", status
    rounds = rounds_in(out)
    assert [one["round"] for one in rounds] == list(range(spec.rounds))
    uncounted = {
        (one["round"], c) for one in rounds for c in one["sampled"] if c not in one["accepted"]
    }
    loop = replayed(spec, uncounted)
    close(final_model(spec, out), loop.server.x, 1e-6)
    close(mean_control(spec, tmp_path / "states", rounds), loop.server.c.flatten(), 1e-6)
