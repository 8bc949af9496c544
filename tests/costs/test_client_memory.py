"""Client memory as a cost: what a dry run of a spec's local step says, and what a real step holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

pytest.importorskip("transformers")
pytest.importorskip("peft")


from fedspan.core import registry, tables
from fedspan.core.errors import SpecError
from fedspan.core.spec import Spec
from fedspan.costs import plan as plans
from fedspan.costs.dry_run import Live
from fedspan.costs.memory import OneBatch, largest_batch, memory, step_memory, without_numbers
from fedspan.costs.plan import client_memory, plan, shapes
from fedspan.huggingface.adapters import stepper
from fedspan.huggingface.checkpoints import load_model
from fedspan.nn.problem import TorchProblem
from support.axes import by_axis
from support.loops import SMALL, advance, start
from support.loops import model as model_of
from support.methods import METHODS
from support.texts import text_data  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("data")
CUT = {"name": "dirichlet", "clients": 4, "alpha": 1.0}
ASK = {"name": "text_classification", "model": "tiny", "partition": CUT, "max_length": 6}
SPEAK = {"name": "language_model", "model": "tiny", "min_characters": 300, "block": 32}
IMAGES = {"name": "classification", "data": "digits", "partition": {"name": "iid", "clients": 3}}
ADAMW = {"name": "adamw"}


def table(task: dict[str, Any], method: dict[str, Any], **more: Any) -> dict[str, Any]:
    small = {"projection": {"min_numel": 64}} if task["name"] == "classification" else {}
    own = {"method": by_axis({"lr": 0.1, "local_steps": 2} | method), "task": task}
    return {"rounds": 2, "batch_size": 8, "device": "cpu"} | own | small | more


def dry_of(task: dict[str, Any], **more: Any) -> TorchProblem:
    found = shapes(Spec.from_table(table(task, {"name": "fedavg"}, **more))).dry
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("told", "steps"),
    [
        ({"gradient_checkpointing": True}, {}),
        ({"precision": "bfloat16"}, {"optimizer": ADAMW}),
    ],
)
def test_a_spec_holds_what_the_plan_of_its_model_says(
    told: Any, steps: Any, tmp_path: Path
) -> None:
    model: Any = load_model("tiny", "SequenceClassification", 0, 0.0, num_labels=4)
    model.config.save_pretrained(tmp_path)
    outline = {"name": "outline", "model": str(tmp_path), "length": 6, "labels": 4} | told
    frozen = {"frozen_modules": ["*embed*"]}
    asked = table(outline, {"name": "ssf", "rank": 0.25} | steps, projection=frozen)
    for row in plan(asked).rows:
        method = {"name": row.method} | ({} if row.rank is None else {"rank": row.rank}) | steps
        assert row.memory is not None
        assert client_memory(table(ASK | told, method)) == row.memory.peak, row.method


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("task", "method", "dtype"),
    [
        (ASK, {"name": "ssf", "projector": {"name": "gaussian", "rank": 0.2}}, "float32"),
        (ASK, {"name": "ssf", "rank": {"*.query.*": 4, "*": 0.5}, "optimizer": ADAMW}, "float64"),
        (ASK, {"name": "subavg", "projector": {"name": "hadamard", "rank": 0.2}}, "float32"),
        (ASK, {"name": "ffalora", "rank": 0.2}, "float32"),
        (SPEAK, {"name": "fedsub", "rank": 0.2}, "float32"),
        (SPEAK, {"name": "scallion", "compressor": {"name": "qsgd"}}, "float32"),
        (SPEAK | {"precision": "bfloat16"}, {"name": "scaffold"}, "float32"),
        (
            SPEAK | {"precision": "bfloat16"},
            {"name": "ssf", "projector": {"name": "gaussian"}},
            "float32",
        ),
        (IMAGES | {"model": "cnn"}, {"name": "ssf", "rank": 0.3}, "float32"),
        (IMAGES | {"model": "cnn"}, {"name": "fedprox", "momentum": 0.5}, "float32"),
        (IMAGES | {"model": "resnet8", "norm": "batch"}, {"name": "fedavg"}, "float64"),
        (IMAGES | {"model": "mlp"}, {"name": "fedit", "rank": 0.2}, "float32"),
    ],
)
def test_a_dry_step_holds_what_the_real_one_does(
    task: Any, method: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same count on the real model and a real batch; kernels differ a little in what they keep."""
    monkeypatch.setattr(
        "fedspan.core.projector.AT_ONCE", 1
    )  # no P of later rounds in the same storage
    spec = Spec.from_table(table(task, method, dtype=dtype))
    problem: Any = spec.task.build((0,), spec)
    problem.client_data, problem.batch_size = (
        [OneBatch(tree_map_only(torch.Tensor, torch.clone, largest_batch(problem)))],
        1,
    )
    for parameter in problem.model.train().parameters():
        parameter.data = (
            parameter.data.clone()
        )  # out of the one vector that a problem keeps them in
    problem.module = type(problem.module)(problem.model, problem.layout)
    planned = memory(spec.method, dry_of(task, dtype=dtype))
    with Live(torch.device("cpu")) as live:
        real = step_memory(spec.method, problem, live)
    assert planned.peak == pytest.approx(real.peak, rel=0.02)
    assert planned.weights == real.weights
    assert planned.controls == pytest.approx(real.controls, rel=0.02, abs=64)
    assert client_memory(spec.table()) == planned.peak


def test_what_a_method_holds_from_step_to_step() -> None:
    problem = dry_of(IMAGES | {"model": "mlp"})
    layout = problem.layout

    def held(name: str, **given: Any) -> Any:
        method = tables.build("method", by_axis({"name": name, "lr": 0.1} | given))
        return memory(method, problem), method.footprint(layout).trained

    (without, r), (controls, same) = held("subavg", rank=0.25), held("ssf", rank=0.25)
    assert r == same < layout.size
    assert (
        0 <= controls.controls - without.controls - 4 * r <= 16
    )  # P c − P c_i, and the numbers of the test
    (plain, d), (heavy, _), (adam, _) = (
        held("fedavg"),
        held("fedavg", momentum=0.5),
        held("fedavg", optimizer=ADAMW),
    )
    assert (plain.optimizer, heavy.optimizer, adam.optimizer) == (0, 4 * d, adam.optimizer)
    assert adam.optimizer >= 8 * d
    for name in ("scaffold", "scallion", "fedprox"):
        assert held(name)[0].controls - plain.controls == 4 * d, name


def test_every_method_has_a_number() -> None:
    problem = dry_of(IMAGES | {"model": "mlp"})
    for name in registry.choices("method"):
        for own in METHODS[name]:
            method = tables.build("method", by_axis({"name": name, "lr": 0.1} | own))
            found = memory(method, problem)
            assert min(found.weights, found.gradients, found.activations) > 0, (name, own)


def test_a_dry_run_leaves_no_trace() -> None:
    """Neither in the problem's model, nor in what is drawn for a later run."""
    spec = Spec.from_table(table(IMAGES | {"model": "mlp"}, {"name": "ssf", "rank": 0.25}))
    problem = spec.task.build((0,), spec)
    before = model_of(advance(start(spec.method, problem, 2), 2))
    client_memory(spec.table())
    assert torch.equal(before, model_of(advance(start(spec.method, problem, 2), 2)))
    assert all(not p.is_meta for p in problem.model.parameters())


def test_the_largest_batch_of_any_client() -> None:
    batch = largest_batch(dry_of(ASK | {"max_length": 40}))
    assert {name: tuple(column.shape) for name, column in batch.items()} == {
        "input_ids": (8, 10), "attention_mask": (8, 10), "labels": (8,),  # six words, three thanks, and a beginning
    }  # fmt: skip
    assert all(column.is_meta for column in batch.values())


def test_a_copy_without_numbers_keeps_what_is_tied_and_what_is_frozen() -> None:
    model: Any = load_model("tiny", "CausalLM", 0, 0.0)
    model.model.norm.weight.requires_grad_(False)
    copy: Any = without_numbers(model.eval())
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert [p.requires_grad for p in copy.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert all(tensor.is_meta for tensor in [*copy.parameters(), *copy.buffers()])
    assert copy.training


def test_no_network_no_number() -> None:
    assert client_memory(table(SMALL, {"name": "fedavg"})) is None
    assert (
        client_memory({"rounds": 2, "method": {"name": "fedavg"}, "model": {}}) is None
    )  # not a spec
    assert client_memory(table(IMAGES, {"name": "of_my_own"})) is None
    with pytest.raises(SpecError, match="3 numbers per trained one"):
        stepper(torch.nn.Linear(2, 2), lambda m: torch.zeros(()), 3)


def test_what_cannot_be_rehearsed_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is not lost for want of it."""

    def no_kernel(*_: object) -> None:
        raise NotImplementedError("no such kernel on the meta device")

    with monkeypatch.context() as patch:
        patch.setattr(plans, "memory", no_kernel)
        assert client_memory(table(IMAGES, {"name": "fedavg", "server_lr": 0.123})) is None
    spec = Spec.from_table(table(IMAGES, {"name": "fedavg"}))
    assert shapes(spec).dry is not None
    plans._shapes.clear()
    problem: Any = spec.task.build((0,), spec)
    problem.model.computed = torch.ones(2, requires_grad=True) * 2
    monkeypatch.setattr(type(spec.task), "build", lambda *_: problem)
    assert shapes(spec).dry is None
    plans._shapes.clear()


def test_a_grid_of_steps_is_rehearsed_once() -> None:
    plans._shapes.clear()
    for lr, rounds in ((0.1, 5), (0.2, 7), ("search", 7)):
        assert client_memory(
            table(IMAGES, {"name": "fedavg", "lr": lr, "local_steps": 3}, rounds=rounds)
        )
    (known,) = plans._shapes.values()
    assert len(known.peaks) == 1
