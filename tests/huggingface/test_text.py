"""Hugging Face models: exact restricted gradients, learning in a subspace, and a result that transformers loads."""

from __future__ import annotations

import copy
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedspan
from fedspan import Engine, Projection
from fedspan.core import tables
from fedspan.core.errors import SpecError
from fedspan.core.projector import draw
from fedspan.huggingface.models import about, own_loss
from fedspan.huggingface.text_data import as_texts
from fedspan.nn.module import FlatModule, Restricted
from fedspan.nn.projection_rules import layout_of, projection_rules
from support.methods import build
from support.tiny import MODELS, bert, flat, gpt2, lines, llama, questions, ssf


@pytest.mark.parametrize("projector", ["coordinate", "gaussian"])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_restricted_gradient_is_the_projected_one(
    name: str, checkpoints: bool, projector: str
) -> None:
    """On texts of unequal length, so with masks; transformers norms Llamas in float32, hence the wider margin there."""
    make, data = MODELS[name]
    model = make().double().train()
    if checkpoints:
        model.gradient_checkpointing_enable()
    batch = as_texts(data(), about(model), "it").take(torch.arange(6))
    choices = projection_rules(model)
    assert not any(c.how == "projected" for c in choices)
    layout = layout_of(choices, torch.float64)
    module = FlatModule(model, layout)
    P = draw(tables.build("projector", {"name": projector, "rank": 0.4}), layout, (3,), 1)
    x = module.flat.detach().clone().view(1, 1, -1)
    generator = torch.Generator().manual_seed(0)
    with Restricted(module, choices, x, P) as inside:
        for _ in range(2):
            z = 0.05 * torch.randn(1, 1, P.rank, dtype=torch.float64, generator=generator)
            found = inside.grad(z, lambda m: own_loss(m, batch))
    full = module.grad(x + P.T @ z, lambda m: own_loss(m, batch))
    assert float((found - P @ full).norm() / (P @ full).norm()) < (
        1e-5 if "llama" in name else 1e-9
    )


def test_heads_embeddings_and_frozen_modules() -> None:
    def how(model: nn.Module) -> dict[str, str]:
        return {c.name: c.how for c in projection_rules(model)}

    assert how(bert())["classifier.weight"] == "full"
    assert how(bert())["bert.pooler.dense.weight"] == "fused"
    assert how(llama())["lm_head.weight"] == "full"
    assert how(MODELS["llama classifier"][0]())["score.weight"] == "full"
    tied = {c.name: c for c in projection_rules(llama(tie_word_embeddings=True))}[
        "model.embed_tokens.weight"
    ]
    assert (tied.how, tied.layer, tied.also) == ("fused", "model.embed_tokens", ("lm_head",))
    for shares in (False, True):
        whole = llama(tie_word_embeddings=shares)
        assert layout_of(projection_rules(whole)).size == sum(
            p.numel() for p in whole.parameters()
        )  # a shared weight once
    transposed = {c.name: c for c in projection_rules(gpt2())}["transformer.h.0.mlp.c_fc.weight"]
    assert (transposed.how, transposed.shape, transposed.axis) == ("fused", (32, 128), 0)
    model = bert()
    projection_rules(model, frozen_modules=["*embeddings*"])
    assert not any("embeddings" in name for name in how(model))
    with pytest.raises(SpecError, match=r"'\*embed_tokens\*' matches no tensor of the model"):
        projection_rules(model, frozen_modules=["*embed_tokens*"])


@pytest.mark.parametrize("name", ["bert", "llama, tied", "gpt2"])
def test_models_learn_and_plain_transformers_loads_the_result(name: str, tmp_path: Path) -> None:
    """What is asked for is far above chance, a quarter of the classes and a 55th of the tokens, on many texts."""
    make, data = MODELS[name]
    model, clients = make(), [data(64, seed) for seed in range(3)]
    method = ssf(lr=0.05, local_steps=8, projector={"name": "coordinate", "rank": 0.5})
    result = fedspan.fit(
        model, clients, method=method, rounds=15, batch_size=8, test=data(100, 9), eval_every=15
    )
    assert result.model is model
    first, last = result.history
    if name == "bert":
        assert first["accuracy"] < 0.4
        assert min(last["accuracy"], last["f1_macro"]) > 0.9
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
    for name, own in (("ssf", {"correction": "always"}), ("subavg", {})):
        method = build(
            name, lr=0.1, local_steps=10, projector={"name": "coordinate", "rank": 0.25}, **own
        )
        result = fedspan.fit(
            bert(num_hidden_layers=1),
            clients,
            method=method,
            rounds=8,
            batch_size=8,
            test=every,
            eval_every=8,
        )
        ends[name] = result.history[-1]["loss"] / result.history[0]["loss"]
    assert ends["ssf"] < 0.5 * ends["subavg"] < 0.5


def test_frozen_parts_stay_and_are_not_sent() -> None:
    model, before = bert(), bert().state_dict()
    model.bert.encoder.layer[0].requires_grad_(False)
    result = fedspan.fit(
        model,
        [questions()],
        method=build("fedavg", lr=0.1),
        rounds=1,
        projection=Projection(frozen_modules=["embeddings"]),
    )
    left = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert left == {n for n in before if "embeddings" in n or "encoder.layer.0" in n}
    numbers = sum(value.numel() for name, value in before.items() if name not in left)
    assert result.history[-1]["up_bytes"] == 4 * numbers
    assert (
        model.bert.embeddings.word_embeddings.weight.requires_grad
    )  # the caller's module keeps its own settings


def test_constants_of_a_model_are_neither_averaged_nor_sent() -> None:
    model = llama()
    result = fedspan.fit(model, [lines()], method=build("fedavg", lr=0.1), rounds=1)
    assert result.history[-1]["up_bytes"] == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("checkpoints", [False, True])
def test_dropout_is_decided_by_the_seed_alone(checkpoints: bool) -> None:
    clients = [questions(8, seed) for seed in range(3)]

    def trained(
        seed: int = 0, simulate: Any = "loop", noise: int = 0, dropout: float = 0.2
    ) -> torch.Tensor:
        model = bert(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
        if checkpoints:
            model.gradient_checkpointing_enable()
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        fedspan.fit(
            model,
            clients,
            method=ssf(),
            rounds=2,
            batch_size=4,
            seed=seed,
            engine=Engine(simulate=simulate),
        )
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
    models = [
        bert(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout) for _ in range(2)
    ]
    models[1].gradient_checkpointing_enable()
    for model in models:
        fedspan.fit(model, [questions()], method=ssf(), rounds=2, batch_size=4)
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
    found = fedspan.fit(
        half, clients, method=method, rounds=10, batch_size=8, test=test, eval_every=10
    )
    whole = fedspan.fit(
        start, clients, method=method, rounds=10, batch_size=8, test=test, eval_every=10
    )
    assert all(p.dtype == torch.bfloat16 for p in half.parameters())
    assert found.history[-1]["up_bytes"] == whole.history[-1]["up_bytes"]
    fell, wanted = (r.history[0]["loss"] - r.history[-1]["loss"] for r in (found, whole))
    assert wanted > 0.005
    assert fell == pytest.approx(wanted, rel=0.1)


def test_bfloat16_weights_are_the_rounding_of_where_x_and_z_are() -> None:
    """Not of a rounded x and z: steps too short for a weight to show would be lost within a round."""
    model = bert().to(torch.bfloat16)
    choices = projection_rules(model)
    layout = layout_of(choices)
    module = FlatModule(model, layout)
    P = draw(tables.build("projector", {"name": "coordinate", "rank": 0.4}), layout, (3,), 1)
    draws = torch.Generator().manual_seed(0)
    x = module.flat.float().view(1, 1, -1)
    x = x * (1 + 2e-3 * torch.randn(x.shape, generator=draws))
    z = 1e-3 * torch.randn(1, 1, P.rank, generator=draws)
    batch = as_texts(questions(), about(model), "it").take(torch.arange(4))
    with Restricted(module, choices, x, P) as inside:
        inside.grad(z, lambda m: own_loss(m, batch))
        assert torch.equal(module.flat, (x + P.T @ z).bfloat16().flatten())
    assert not torch.equal(module.flat, (x.bfloat16() + P.T @ z).bfloat16().flatten())


def test_other_short_types_are_refused() -> None:
    with pytest.raises(SpecError, match="float16 would need"):
        fedspan.fit(bert().half(), [questions()], method=ssf(), rounds=1)
    mixed = bert().to(torch.bfloat16)
    mixed.classifier.float()
    with pytest.raises(SpecError, match=r"several types \(bfloat16, float32\)"):
        fedspan.fit(mixed, [questions()], method=ssf(), rounds=1)


def test_importing_fedspan_imports_no_transformers() -> None:
    code = (
        "import sys, fedspan, fedspan.api.fit, fedspan.cli.app\n"
        "from fedspan.core import registry\n"
        "registry.choices('task')\n"
        "assert not {'transformers', 'datasets', 'peft'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
