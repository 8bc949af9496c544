"""Fine-tuning across machines: text tasks and Hugging Face models on Flower give what the simulator gives."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")
pytest.importorskip(
    "transformers", reason="transformers is not installed; pip install 'fedspan[nlp]'"
)

import transformers

from fedspan.api.run import run
from fedspan.core import tables
from fedspan.core.errors import DataError
from fedspan.core.spec import Spec
from fedspan.engine.loop import Line
from fedspan.huggingface import checkpoints
from support.flower import FakeGrid, inside_a_task, serve  # noqa: F401
from support.loops import settings
from support.texts import CLASSIFY, QUESTIONS, SPEAK, text_data  # noqa: F401

FLOAT32, COUNTED = settings(8, torch.float32), settings(8, torch.float32, "examples")
PAGE = Path(__file__).parents[2] / "docs/language-models.md"
METHODS: dict[str, dict[str, Any]] = {
    "ssf": {"name": "ssf", "rank": 0.25},
    "ssf, moments": {"name": "ssf", "rank": 0.25, "lr": 0.003}
    | {"local": {"name": "adamw", "moments": "project"}},
    "scaffold": {"name": "scaffold"},
    "fedit": {"name": "fedit", "rank": 2},
    "ffalora": {"name": "ffalora", "rank": 3},
}


def both(spec: Spec, clients: int, out: Path) -> tuple[list[Line], list[Line]]:
    """The rows of a run in the simulator and of one over the grid, whose models must be the same bits."""
    here = run(spec, out / "here").history
    grid = FakeGrid(spec, out / "states")
    grid.clients = {100 + i: i for i in range(clients)}
    there = serve(spec, grid, out / "there").history
    first, second = (load_file(out / place / "model.safetensors") for place in ("here", "there"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    return here, there


def same(here: list[Line], there: list[Line]) -> bool:
    """Whether losses, scores and bytes are equal in every row."""
    return all(
        one | {"seconds": 0} == other | {"seconds": 0}
        for one, other in zip(here, there, strict=True)
    )


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("task", [CLASSIFY, SPEAK], ids=lambda task: task["name"])
def test_a_text_task_gives_the_simulators_model_and_bytes(
    task: dict[str, Any], name: str, tmp_path: Path
) -> None:
    table = {
        "rounds": 4, "eval_every": 2, "task": task, "clients_per_round": 2, "batch_size": 8,
        "method": {"lr": 0.1, "local_steps": 3, **METHODS[name]},
    }  # fmt: skip
    assert same(*both(Spec.from_table(table), 4 if task is CLASSIFY else 3, tmp_path))


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("name", ["ssf", "ssf, kept", "fedit"])
def test_clients_that_hold_the_model_are_not_sent_it(name: str, tmp_path: Path) -> None:
    kept = {
        "name": "ssf",
        "rank": 0.25,
        "server": {"name": "momentum", "beta": 0.5},
        "local": "preconditioned",
    }
    table = {
        "rounds": 4, "eval_every": 2, "task": CLASSIFY, "clients_per_round": 2, "batch_size": 8,
        "participation": {"known_start": True},
        "method": {"lr": 0.1, "local_steps": 3, **(METHODS | {"ssf, kept": kept})[name]},
    }  # fmt: skip
    here, there = both(Spec.from_table(table), 4, tmp_path)
    assert same(here, there)
    sent = run(Spec.from_table(table | {"participation": {}}), progress=False).history
    assert [row["loss"] for row in here] == [row["loss"] for row in sent]
    assert here[-1]["down_bytes"] < sent[-1]["down_bytes"]


@pytest.mark.usefixtures("data")
@pytest.mark.parametrize("task", [CLASSIFY, SPEAK], ids=lambda task: task["name"])
def test_a_machine_has_its_own_client_alone(
    task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tokenizes no other's texts, scores nothing, and has no x0; the server has no client's texts."""
    requested: list[tuple[int, ...]] = []
    for name in ("sentences", "running"):
        original = getattr(checkpoints, name)

        def watched(*given: Any, original: Any = original) -> Any:
            requested.append(given[-1])
            return original(*given)

        monkeypatch.setattr(f"fedspan.tasks.{task['name']}.{name}", watched, raising=False)
    built = tables.build("task", task)
    whole = built.build((0,), FLOAT32)
    requested.clear()
    client_problem, server_problem = (
        built.client_problem(2, (0,), FLOAT32),
        built.server_problem((0,), FLOAT32),
    )
    assert (
        whole.layout.fingerprint
        == client_problem.layout.fingerprint
        == server_problem.layout.fingerprint
    )
    assert whole.clients == client_problem.clients == server_problem.clients
    assert torch.equal(whole.x0, server_problem.x0)
    mine, also = (problem.client_data[2].columns for problem in (whole, client_problem))
    assert all(torch.equal(mine[name], also[name]) for name in mine)
    assert len(requested[0]) == (len(client_problem.client_data[2]) if task is CLASSIFY else 1)
    assert client_problem.evaluate(whole.x0) == {}
    assert client_problem.x0.untyped_storage().nbytes() == 4
    for problem in (client_problem, server_problem):
        with pytest.raises(DataError, match="client 1 is not on this machine"):
            problem.client_data[1]
    assert server_problem.evaluate(server_problem.x0) == whole.evaluate(whole.x0)
    assert built.server_problem((0,), COUNTED).weights is None  # clients say how many they have
    told = [
        built.describe(i, (0,), COUNTED)["examples"]
        for i in range(built.build((0,), COUNTED).clients)
    ]
    weights = COUNTED.participation.shares(np.array(told, float))
    assert np.array_equal(weights, built.build((0,), COUNTED).weights)


def hospitals(folder: Path) -> None:
    """A small BERT with its tokenizer, and the notes of three clients and of the server."""
    words = sorted({word for question in QUESTIONS for word in question.lower().split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*special, *words]))
    transformers.BertTokenizerFast.from_pretrained(folder).save_pretrained(folder / "model")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(1)
    transformers.BertModel(
        transformers.BertConfig(vocab_size=40, initializer_range=0.1, **sizes)
    ).save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    for name, n in (("notes-0", 20), ("notes-1", 16), ("notes-2", 24), ("test", 30)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["text", "label"])
            for label in rng.integers(4, size=n).tolist():
                lines.writerow([" ".join(rng.permutation(QUESTIONS[label].split())), label])


@pytest.fixture
def triage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module and the spec as they stand on the page, beside the files of all machines."""
    text = PAGE.read_text().split("## Across machines")[1].split("\n## ")[0]
    (module,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (spec,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    hospitals(tmp_path / "triage")
    (tmp_path / "triage.py").write_text(module)
    (tmp_path / "spec.toml").write_text(spec)
    monkeypatch.setenv("TRIAGE", str(tmp_path / "triage"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("triage", None)


def test_the_pages_hospitals_train_a_model_of_their_own(triage: Path) -> None:
    few = (
        "rounds=5",
        "eval_every=5",
        "task.clients=3",
        "clients_per_round=2",
        "method.local_steps=6",
        "method.lr=0.3",
    )
    spec = Spec.load(triage / "spec.toml", few)
    here, there = both(spec, 3, triage)
    assert {"accuracy", "f1_macro"} < set(there[-1])
    assert there[-1]["loss"] < there[0]["loss"]
    assert same(here, there)
    saved = load_file(
        triage / "there/model.safetensors"
    )  # complete, frozen tensors too, for load_state_dict
    assert any("embeddings" in name for name in saved)
    for gone in ("test.csv", "notes-0.csv", "notes-2.csv"):
        (triage / "triage" / gone).unlink()
    assert len(spec.task.client_problem(1, (0,), FLOAT32).client_data[1]) == 16  # type: ignore[attr-defined]
    (triage / "triage/notes-1.csv").rename(triage / "triage/test.csv")
    assert spec.task.server_problem((0,), FLOAT32).clients == 3


def test_a_model_in_bfloat16_stays_so(triage: Path) -> None:
    with (triage / "triage.py").open("a") as file:
        file.write("\n\nload = model\n\n\ndef model():\n    return load().bfloat16()\n")
    problem = Spec.load(triage / "spec.toml", ("task.clients=3",)).task.client_problem(
        0, (0,), FLOAT32
    )
    assert problem.module.flat.dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert problem.layout.dtype == problem.x0.dtype == torch.float32


def test_a_client_with_other_frozen_weights_runs_another_model(triage: Path) -> None:
    """What is trained is sent and may have been anything; what is frozen must be the server's."""
    spec, path = (
        Spec.load(triage / "spec.toml", ("task.clients=3",)),
        triage / "triage/model/model.safetensors",
    )
    server, weights = spec.task.server_problem((0,), spec).layout.fingerprint, load_file(path)
    for part, alike in (
        ("encoder.layer.0.output.dense.weight", True),
        ("embeddings.word_embeddings.weight", False),
    ):
        weights[part][:, 0] += 1
        save_file(weights, path, metadata={"format": "pt"})
        assert (spec.task.client_problem(1, (0,), spec).layout.fingerprint == server) is alike
