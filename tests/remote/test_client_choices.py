"""What a client imports, reads and writes is its own choice, whatever the server or the submitter of a run asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")

from flwr.app import Context, Message

from fedspan.core.errors import SpecError
from fedspan.core.spec import Spec
from fedspan.remote.flower import client_app
from fedspan.remote.flower.client import client_spec, load_spec, module_of
from fedspan.remote.flower.permissions import SETTABLE, UNUSED
from support.flower import FakeGrid, events_of, inside_a_task, serve, spec_of  # noqa: F401

MODULE = """import torch
def model(): return torch.nn.Linear(6, 2)
def data(client):
    g = torch.Generator().manual_seed(client)
    return torch.randn(20, 6, generator=g), torch.randint(0, 2, (20,), generator=g)
"""
BUNDLE = """rounds = 2
batch_size = 5
participation = {weights = "uniform"}
[method]
name = "fedavg"
lr = 0.1
[task]
name = "custom"
module = "bundled_part"
clients = 3
"""


def leaves_mark(path: Path) -> str:
    return f"import pathlib\npathlib.Path({str(path)!r}).touch()\n"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The spec of an app with its own module beside it, and a module of somebody else that leaves a mark."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "bundled_part.py").write_text(MODULE)
    (tmp_path / "foreign_part.py").write_text(leaves_mark(tmp_path / "imported") + MODULE)
    (tmp_path / "app" / "spec.toml").write_text(BUNDLE)
    return tmp_path / "app" / "spec.toml"


class Grid(FakeGrid):
    """Clients with the submitter's run config and their own node config."""

    def __init__(
        self, spec: Path, states_dir: Path, run_config: dict[str, Any], node_config: dict[str, Any]
    ) -> None:
        super().__init__(load_spec(spec, ()), states_dir)
        self.app, self.run_config, self.node_config = client_app(spec), run_config, node_config
        self.clients = {100 + i: i for i in range(3)}

    def answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        config = {
            "partition-id": self.clients[node],
            "states-dir": str(self.states_dir),
        } | self.node_config
        return self.app(
            message, Context(1, node, config, message.content.__class__(), self.run_config)
        )


FOREIGN = {
    "module": "task.module=foreign_part",
    "path of a module": "task.module=../foreign_part.py",
    "directory": "task.module_dir=..",
    "whole task": "task={name='custom', module='foreign_part', clients=3}",
    "function": "task={name='classification', data='digits', model='foreign_part:model'}",
    "data": "task={name='tabular_regression', data={path='rows.csv', target='y'}}",
    "array": "task={name='regression', data='/srv/rows.npz'}",
    "model directory": "task={name='text_classification', model='/srv/model'}",
    "nonsense": "task=3",
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_a_client_imports_and_reads_nothing_that_the_submitter_names(
    change: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = serve(
        load_spec(bundle, ()),
        Grid(bundle, tmp_path / "states", {"set": change}, {}),
        tmp_path / "out",
    )
    assert not (tmp_path / "imported").exists()
    events = events_of(result)
    assert any("client 0: refused: " in event for event in events)
    if change != "task=3":
        assert any(
            "refused: `set` of the run config gives task." in event and "own choice" in event
            for event in events
        )
    assert not any("\n" in event for event in events)


def test_plain_settings_and_the_apps_own_names_may_be_set(bundle: Path) -> None:
    spec = client_spec(bundle, ("method.lr=0.5", "task.clients=2", "task.module=bundled_part"), "")
    assert (spec.method.lr, spec.task.clients, spec.task.module) == (0.5, 2, "bundled_part")  # type: ignore[attr-defined]
    assert client_spec(spec_of(), ("rounds=3",), "").rounds == 3


def test_the_module_of_the_nodes_own_config_is_imported(bundle: Path, tmp_path: Path) -> None:
    """It may have another name or path on each machine, and counts before what the app or the submitter names."""
    ours = tmp_path / "ward" / "ours.py"
    ours.parent.mkdir()
    ours.write_text(leaves_mark(tmp_path / "ours-imported") + MODULE)
    grid = Grid(
        bundle, tmp_path / "states", {"set": "task.module=foreign_part"}, {"module": str(ours)}
    )
    result = serve(load_spec(bundle, ()), grid, tmp_path / "out")
    assert result.finished
    assert events_of(result) == []
    assert (tmp_path / "ours-imported").exists()
    assert not (tmp_path / "imported").exists()
    made = client_spec(
        bundle, ("task={name='classification', data='digits', model='ward_net:make'}",), "ward_net"
    )
    assert made.task.model == "ward_net:make"  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="own choice"):
        client_spec(
            bundle, ("task={name='classification', data='digits', model='other:make'}",), "ward_net"
        )


def test_a_nodes_module_is_a_name_or_a_path() -> None:
    def context(module: Any) -> Context:
        return Context(1, 1, {"module": module}, Message.__new__, {})  # type: ignore[arg-type]

    assert module_of(context("~/ours.py")) == str(Path.home() / "ours.py")
    assert module_of(context("wards.task")) == "wards.task"
    with pytest.raises(SpecError, match="module = 3"):
        module_of(context(3))


def test_states_are_where_the_node_says(bundle: Path, tmp_path: Path) -> None:
    asked = {"states-dir": str(tmp_path / "theirs")}
    result = serve(
        load_spec(bundle, ()), Grid(bundle, tmp_path / "states", asked, {}), tmp_path / "out"
    )
    assert events_of(result) == []
    assert not (tmp_path / "theirs").exists()
    assert len(list((tmp_path / "states" / "run").iterdir())) == 3


OUTSIDE = {
    "states": "engine.states_dir='/etc/x'",
    "engine": "engine.simulate='pool'",
    "augment": "training.augment='os:system'",
    "metric": "metrics=['accuracy', 'os.path:join']",
    "optimizer": "method.local='/srv/own.py'",
    "list": "projection.full_modules=['a', '../b']",
}


@pytest.mark.parametrize("change", OUTSIDE.values(), ids=OUTSIDE)
def test_no_setting_from_outside_names_code_or_files(change: str, bundle: Path) -> None:
    key = change.partition("=")[0]
    with pytest.raises(
        SpecError,
        match=rf"^`set` of the run config gives {key} = .*(its own choice|decides itself)",
    ) as error:
        client_spec(bundle, (change,))
    assert "\n" not in str(error.value)


def test_every_setting_of_a_spec_is_either_settable_or_the_clients_own(bundle: Path) -> None:
    """A setting that is added later is refused until somebody decides."""
    names = {one.name for one in dataclasses.fields(Spec)}
    assert names - SETTABLE - UNUSED == {"engine", "federation"}
    assert names >= SETTABLE | UNUSED


def test_a_client_keeps_its_own_callbacks(bundle: Path) -> None:
    assert client_spec(bundle, ("callbacks=[{name='csv', path='/etc/x.csv'}]",)).callbacks == ()


DP = "privacy = {clip = 0.5, noise = 2.0, secure = true, secure_signed = true}\n"
EPSILON = (
    "clients_per_round = 2\nprivacy = {clip = 0.5, epsilon = 4.0, delta = 1e-3, secure = true}\n"
)
WEAKER = [
    (DP, "privacy.secure=false", "secure"),
    (DP, "privacy.secure_signed=false", "secure_signed"),
    (DP, "privacy.secure_threshold=0.6", "secure_threshold"),
    (DP, "privacy.noise=1e-9", "noise"),
    (DP, "privacy.clip=1e15", "clip"),
    (DP, "privacy.quantile=0.5", "quantile"),
    (DP, "privacy.level='example'", "level"),
    (DP, "privacy={secure=true, secure_signed=true}", "clip"),
    (DP, "privacy={clip=0.5, epsilon=1.0, secure=true, secure_signed=true}", "noise"),
    (DP, "rounds=200", "rounds"),
    (DP, "clients_per_round=1", "clients_per_round"),
    (EPSILON, "privacy.epsilon=100.0", "epsilon"),
    (EPSILON, "privacy.delta=0.01", "delta"),
]


@pytest.mark.parametrize(
    ("own", "change", "named"), WEAKER, ids=[f"{change}" for _, change, _ in WEAKER]
)
def test_a_run_protects_a_client_no_less_than_its_own_spec(
    own: str, change: str, named: str, bundle: Path
) -> None:
    bundle.write_text(own + BUNDLE)
    client_spec(bundle, ())
    with pytest.raises(
        SpecError, match=rf"the run has (privacy\.)?{named} = .*(less than its own|another ε)"
    ):
        client_spec(bundle, (change,))


def test_a_run_may_protect_a_client_more(bundle: Path) -> None:
    bundle.write_text(DP + BUNDLE)
    stronger = client_spec(
        bundle,
        ("privacy.clip=0.1", "privacy.noise=3.0", "rounds=1", "privacy.secure_threshold=0.9"),
    )
    assert stronger.privacy is not None
    assert (stronger.privacy.clip, stronger.privacy.noise) == (0.1, 3.0)


def test_the_nodes_own_config_is_a_floor(bundle: Path, tmp_path: Path) -> None:
    """Also where the app's spec has no privacy at all."""
    with pytest.raises(
        SpecError, match=r"the run has no `privacy`, but this client asks for privacy.secure = True"
    ):
        client_spec(bundle, (), privacy="{secure = true}")
    assert (
        client_spec(bundle, ("privacy={secure=true}",), privacy="{secure = true}").secure
        is not None
    )
    with pytest.raises(SpecError, match="privacy = 'secure'; write a table"):
        client_spec(bundle, (), privacy="secure")
    with pytest.raises(
        SpecError, match=r"privacy.clip = 1.0, which protects this client less than its own 0.5"
    ):
        client_spec(bundle, ("privacy={clip=1.0, noise=1.0}",), privacy="{clip = 0.5, noise = 1.0}")
    grid = Grid(bundle, tmp_path / "states", {}, {"privacy": "{secure = true}"})
    result = serve(load_spec(bundle, ()), grid, tmp_path / "out")
    assert any("this client asks for privacy.secure" in event for event in events_of(result))
