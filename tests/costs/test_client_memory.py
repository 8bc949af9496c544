"""Client memory as a cost: what the plan of a spec's model says and what a real step holds; and how it is shown."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils._pytree import tree_map_only

pytest.importorskip("transformers")
pytest.importorskip("peft")

from fedspan.api.spec import Spec
from fedspan.costs.client_memory import client, kind_of
from fedspan.costs.client_memory import memory as held_by
from fedspan.costs.model_plan import ModelRequest, plan_model
from fedspan.study.memory import client_memory
from fedspan.study.outcome import Outcome
from test_report_page import SHORT, browse, drawn
from test_text_tasks import CLASSIFY, SPEAK, data  # noqa: F401 (a fixture)

from conftest import METHODS, SMALL, advance, start
from conftest import model as model_of
from fedspan.api import spec as experiment
from fedspan.core import registry
from fedspan.core.errors import SpecError
from fedspan.costs.dry_run import Live, peak_of, rehearsal
from fedspan.costs.sketch import Sketch, largest, sketched, without_numbers
from fedspan.engine.run_dir import toml
from fedspan.huggingface.checkpoints import load_model
from fedspan.optimizers.sgd import SGD
from fedspan.study import chart, command, figures, memory, report, tables
from fedspan.study.request import requested

pytestmark = pytest.mark.usefixtures("data")
ASK = CLASSIFY | {"max_length": 6}
IMAGES = {"name": "classification", "data": "digits", "clients": 3, "batch": 16, "least": 64}
ADAMW = {"name": "adamw"}


def table(task: dict[str, Any], method: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rounds": 2, "eval_every": 1, "task": task, "method": {"lr": 0.1, "local_steps": 2} | method} | more


def sketch_of(task: dict[str, Any], **more: Any) -> Sketch:
    found = experiment.sketch(Spec.from_table(table(task, {"name": "fedavg"}, **more)))
    assert found is not None
    return found


# ---- the number


@pytest.mark.parametrize(
    ("told", "steps", "asked"),
    [
        ({"gradient_checkpointing": True}, {}, {"checkpointing": True}),
        ({"precision": "bfloat16"}, {"optimizer": ADAMW}, {"dtype": "bfloat16", "optimizer": "adamw"}),
    ],
)
def test_a_spec_holds_what_the_plan_of_its_model_says(told: Any, steps: Any, asked: Any, tmp_path: Path) -> None:
    model: Any = load_model("tiny", "SequenceClassification", 0, 0.0, num_labels=4)
    model.config.save_pretrained(tmp_path)
    plan = plan_model(
        ModelRequest(model=tmp_path, rank=0.25, batch=8, length=6, labels=4, freeze=("*embed*",), **asked)
    )
    methods: dict[str, dict[str, Any]] = {
        "ssf": {"name": "ssf", "rank": 0.25}, "lora": {"name": "fedit", "rank": plan.ranks[0]},
        "ffa-lora": {"name": "ffalora", "rank": plan.ranks[1]}, "fedavg": {"name": "fedavg"},
        "scaffold": {"name": "scaffold"},
    }  # fmt: skip
    assert {line.method: client_memory(table(ASK | told, methods[line.method] | steps)) for line in plan.lines} == {
        line.method: line.memory.peak for line in plan.lines
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("task", "method", "dtype"),
    [
        (ASK, {"name": "ssf", "projector": {"name": "gaussian", "rank": 0.2}}, "float32"),
        (ASK, {"name": "ssf", "rank": {"*.query.*": 4, "*": 0.5}, "optimizer": ADAMW}, "float64"),
        (ASK, {"name": "subavg", "projector": {"name": "hadamard", "rank": 0.2}}, "float32"),
        (ASK, {"name": "ffalora", "rank": 0.2, "others": "frozen"}, "float32"),
        (SPEAK, {"name": "fedsub", "rank": 0.2}, "float32"),
        (SPEAK, {"name": "scallion", "compressor": {"name": "qsgd"}}, "float32"),
        (SPEAK | {"precision": "bfloat16"}, {"name": "scaffold"}, "float32"),
        (IMAGES | {"model": "cnn"}, {"name": "ssf", "rank": 0.3}, "float32"),
        (IMAGES | {"model": "resnet8", "norm": "batch"}, {"name": "fedavg"}, "float64"),
        (IMAGES | {"model": "mlp"}, {"name": "fedit", "rank": 0.2}, "float32"),
    ],
)
def test_a_rehearsed_step_holds_what_the_real_one_does(task: Any, method: Any, dtype: str) -> None:
    """The same count on the real model and a real batch; kernels differ a little in what they keep."""
    spec = Spec.from_table(table(task, method, dtype=dtype))
    problem: Any = spec.task.build((0,), getattr(torch, dtype))
    sketch = sketch_of(task, dtype=dtype)
    batch, model = largest(problem), problem.model.train()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # out of the one vector that a problem keeps them in
    with Live() as live:
        batch = tree_map_only(torch.Tensor, torch.clone, batch)
        for tensor in [*model.parameters(), *model.buffers()]:
            live.count(tensor)
        real = client(spec.method, sketch, model, lambda m: problem.loss(m, batch))
        real.step()
        peak = peak_of(real.step, live)
    planned = held_by(spec.method, sketch)
    assert planned.peak == pytest.approx(peak, rel=0.02)
    assert client_memory(spec.table()) == planned.peak


def test_what_is_trained_is_what_the_method_trains() -> None:
    sketch = sketch_of(ASK)
    layout = Spec.from_table(table(ASK, {"name": "fedavg"})).task.build((0,), torch.float32).layout
    for name, given in (
        ("fedit", {"rank": 3}),
        ("ffalora", {"rank": 0.2}),
        ("ffalora", {"rank": 3, "others": "frozen"}),
    ):
        method = registry.build("method", {"name": name, "lr": 0.1} | given)
        assert held_by(method, sketch).trained == sum(method.sizes(layout)), (name, given)
    without, controls = (
        held_by(registry.build("method", {"name": name, "lr": 0.1, "rank": 0.25}), sketch) for name in ("subavg", "ssf")
    )
    assert controls.trained == without.trained < layout.size
    assert controls.controls - without.controls == 4 * controls.trained  # P c − P c_i


def test_every_method_has_a_client() -> None:
    sketch = sketch_of(IMAGES)
    for name in registry.choices("method"):
        for own in METHODS[name]:
            method = registry.build("method", {"name": name, "lr": 0.1} | own)
            with rehearsal():
                assert client(method, sketch, sketch.outline(), lambda m: torch.zeros(())).trained, (name, own)


def test_the_largest_batch_of_any_client() -> None:
    batch = sketch_of(CLASSIFY | {"max_length": 40}).batch(None)  # type: ignore[arg-type]
    assert {name: tuple(column.shape) for name, column in batch.items()} == {
        "input_ids": (8, 10), "attention_mask": (8, 10), "labels": (8,),  # six words, three thanks, and a beginning
    }  # fmt: skip
    assert all(column.is_meta for column in batch.values())


def test_a_copy_without_numbers_keeps_what_is_tied_and_what_is_frozen() -> None:
    model: Any = load_model("tiny", "CausalLM", 0, 0.0)
    model.model.norm.weight.requires_grad_(False)
    copy: Any = without_numbers(model.eval())
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert [p.requires_grad for p in copy.parameters()] == [p.requires_grad for p in model.parameters()]
    assert all(tensor.is_meta for tensor in [*copy.parameters(), *copy.buffers()])
    assert copy.training


def test_no_network_no_number() -> None:
    assert client_memory(table(SMALL, {"name": "fedavg"})) is None
    assert client_memory({"rounds": 2, "method": {"name": "fedavg"}, "model": {}}) is None  # a run of `fit`
    assert client_memory(table(IMAGES, {"name": "of_my_own"})) is None
    assert [kind_of(SGD()), kind_of(SGD(momentum=0.5))] == ["sgd", "momentum"]

    class Hungry(SGD):
        def size(self, n: int) -> int:
            return 3 * n

    with pytest.raises(SpecError, match="3 numbers for each that is trained"):
        kind_of(Hungry())


def test_what_cannot_be_rehearsed_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is not lost for want of it."""

    def no_kernel(*_: object) -> None:
        raise NotImplementedError("no such kernel on the meta device")

    with monkeypatch.context() as patch:
        patch.setattr("fedspan.costs.client_memory.memory", no_kernel)
        assert client_memory(table(IMAGES, {"name": "fedavg", "server_lr": 0.123})) is None
    problem: Any = Spec.from_table(table(IMAGES, {"name": "fedavg"})).task.build((0,), torch.float32)
    assert sketched(problem) is not None
    problem.model.computed = torch.ones(2, requires_grad=True) * 2
    assert sketched(problem) is None


def test_a_grid_of_steps_is_rehearsed_once() -> None:
    memory._peak.cache_clear()
    for lr, rounds in ((0.1, 5), (0.2, 7), ("search", 7)):
        assert client_memory(table(IMAGES, {"name": "fedavg", "lr": lr, "local_steps": 3}, rounds=rounds))
    assert memory._peak.cache_info().misses == 1


# ---- tables, figures and the page


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods on images, and two on the toy."""
    place = tmp_path_factory.mktemp("shown")
    for name, task in (("images", IMAGES), ("toy", SMALL)):
        spec = place / f"{name}.toml"
        spec.write_text(toml(table(task, {"name": "fedavg"})))
        plan = requested([spec], methods=["fedavg,scaffold", "ssf:rank=0.5 as SSF"], seeds=2, budget=["rounds=2"])
        made = {
            "jobs": 1,
            "resume": False,
            "formats": ["html", "md", "csv"],
            "line": "",
            "console": Console(quiet=True),
        }
        outcome = command.compare(plan, place / name, **made)
        figures.draw_memory(outcome, place / name / "memory")
    return place


def chart_of(page: Path) -> dict[str, Any]:
    (text,) = re.findall(r'class="chart marks".*?application/json">(.*?)</script>', page.read_text(), re.S)
    found: dict[str, Any] = json.loads(text)
    return found


def test_tables_have_a_column(shown: Path) -> None:
    lines = list(csv.DictReader((shown / "images/results.csv").read_text().splitlines()))
    sizes = [int(line["client_memory_bytes"]) for line in lines]
    assert len(set(sizes)) == 3
    text = (shown / "images/results.md").read_text()
    assert text.count(tables.MEMORY) == 2  # of results and runs
    for line, size in zip(lines, sizes, strict=True):
        assert f"| {size / 1e6:.4g} |" in next(row for row in text.splitlines() if row.startswith(f"| {line['run']} "))
    assert memory.WORDS in text


def test_the_toy_has_neither_column_nor_chart(shown: Path) -> None:
    assert "client_memory_bytes" not in (shown / "toy/results.csv").read_text()
    for name in ("results.md", "index.html"):
        assert "client memory" not in (shown / "toy" / name).read_text().lower()
    assert 'class="chart"' in (shown / "toy/index.html").read_text()
    assert not list((shown / "toy").glob("memory.*"))


def test_the_chart_has_one_mark_a_method(shown: Path) -> None:
    drawing = chart_of(shown / "images/index.html")
    lines = list(csv.DictReader((shown / "images/results.csv").read_text().splitlines()))
    assert list(drawing["axes"]) == ["memory"]
    for one, line in zip(drawing["series"], lines, strict=True):
        assert one["x"]["memory"] == [pytest.approx(int(line["client_memory_bytes"]) / 1e6, rel=1e-5)]
        accuracy = one["y"]["accuracy"]
        assert accuracy["mean"] == [pytest.approx(100 * float(line["result_mean"]), rel=1e-5)]
        assert accuracy["low"][0] <= accuracy["mean"][0] <= accuracy["high"][0]
    assert (shown / "images/memory.svg").read_text().count("SSF") > 0
    assert (shown / "images/memory.png").stat().st_size > 0


def test_a_report_of_runs_has_them_too(shown: Path, tmp_path: Path) -> None:
    report.report([shown / "images/runs"], tmp_path, ["html", "md"], None, "")
    assert tables.MEMORY in (tmp_path / "results.md").read_text()
    assert len(chart_of(tmp_path / "index.html")["series"]) == 3


def test_what_is_not_known_has_no_mark(shown: Path) -> None:
    plan = requested([shown / "images/comparison.toml"])
    outcome = Outcome(plan, shown / "images/runs")
    series = [outcome.series(variant) for variant in plan.variants]
    drawing = chart.by_memory(series, [None, 2_000_000, None], "accuracy", "max")
    assert drawing is not None
    assert [(one["name"], one["x"]) for one in drawing["series"]] == [("scaffold", {"memory": [2.0]})]
    header, rows = tables.with_memory((["a"], [["1"], ["2"]]), [None, 2_000_000])
    assert (header, rows) == (["a", tables.MEMORY], [["1", ""], ["2", "2"]])


@drawn
def test_marks_and_names_have_room(shown: Path) -> None:
    code = """
        const box = (n) => n.getBoundingClientRect();
        const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
        const names = all('.marks text.name'), marks = all('.marks .mark'), plot = box(one('.marks svg'));
        const pieces = [...names, ...marks].map(box);
        const overlaps = names.flatMap((n, i) => pieces.filter((b, j) => i !== j && meet(box(n), b))).length;
        const out = pieces.filter((b) => b.left < plot.left || b.right > plot.right).length;
        const keys = texts('.marks .key'), titles = texts('.marks .label');
        return { overlaps, out, marks: marks.length, whiskers: all('.marks .whisker').length > 0, keys, titles };
    """
    views = [("", 1100), ("", 340), ("m.y=loss&m.band=0&m.off=0&y=accuracy", 340)]
    wide, narrow, other = browse(shown / "images/index.html", SHORT + code, *views)
    assert wide == narrow
    assert (wide["overlaps"], wide["out"], wide["marks"], wide["whiskers"]) == (0, 0, 3, True)
    assert wide["keys"] == ["fedavg", "scaffold", "SSF"]
    assert wide["titles"] == [tables.MEMORY, "accuracy, %"]
    assert (other["titles"], other["marks"], other["whiskers"]) == ([tables.MEMORY, "loss"], 2, False)


def test_a_task_that_recomputes_takes_less_and_learns_the_same() -> None:
    task = ASK | {"dropout": 0.2}
    method = registry.build("method", {"name": "ssf", "rank": 0.2, "lr": 0.3, "local_steps": 2})
    told = [task | {"recompute": again} for again in (False, True)]
    kept, remade = (held_by(method, sketch_of(table)).activations for table in told)
    assert remade < 0.9 * kept
    problems = [registry.build("task", table).build((0,), torch.float32) for table in told]
    one, two = (model_of(advance(start(method, problem, 2), 3)) for problem in problems)
    assert torch.equal(one, two)
    assert not torch.equal(one, problems[0].x0)
