"""Changes of SSF as PEFT adapters: PEFT itself loads them and computes the same outputs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from fedspan.core.errors import SpecError  # noqa: E402
from fedspan.core.projector import draw  # noqa: E402
from fedspan.huggingface.adapters import export_change  # noqa: E402
from fedspan.nn.module import FlatModule  # noqa: E402
from fedspan.nn.projection_rules import layout_of, projection_rules  # noqa: E402
from fedspan.projectors.coordinate import Coordinate  # noqa: E402
from fedspan.projectors.gaussian import Gaussian  # noqa: E402

IDS = torch.arange(24).view(3, 8)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).eval()


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    projection_rules(model, frozen_modules=["transformer.wte*", "transformer.wpe*"])
    return model


MODELS = {"bert": bert, "llama": llama, "gpt2": gpt2}


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def at(model: nn.Module, x: torch.Tensor, layout: Any) -> nn.Module:
    """A copy of the model at another x."""
    other = copy.deepcopy(model)
    FlatModule(other, layout).load(x)
    return other


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "projector", [Coordinate(rank=0.2), Gaussian(rank=5)], ids=["coordinate", "gaussian"]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_round_is_an_adapter(name: str, projector: Any, tmp_path: Path) -> None:
    model = MODELS[name]()
    if name == "bert":  # PEFT has no adapters for embeddings beside biases
        projection_rules(model, frozen_modules=["*embeddings*"])
    choices = projection_rules(model)
    layout = layout_of(choices)
    P = draw(projector, layout, (3,), 2)
    x = torch.cat(
        [dict(model.named_parameters())[c.name].detach().reshape(-1) for c in choices]
    ).view(1, 1, -1)
    z = 0.1 * torch.randn(1, 1, P.rank, generator=torch.Generator().manual_seed(1))
    after = at(model, x + P.T @ z, layout)
    assert export_change(model, after, tmp_path) < 1e-5
    config = peft.LoraConfig.from_pretrained(str(tmp_path))
    assert config.fan_in_fan_out == (name == "gpt2")  # said, not guessed
    assert (logits(after) - logits(model)).abs().max() > 1e-2
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path)).eval()
    assert torch.allclose(logits(loaded), logits(after), atol=1e-5)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors", ".md"}


def test_an_accumulated_change_of_low_rank_is_exact_and_else_the_nearest(tmp_path: Path) -> None:
    before = llama()
    after = copy.deepcopy(before)
    weight = after.get_parameter("model.layers.0.self_attn.q_proj.weight")
    other = after.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        weight += torch.randn(32, 3) @ torch.randn(3, 32) / 10
        other += torch.randn(32, 48) / 10
        after.get_parameter("model.norm.weight").mul_(1.1)
    exact = export_change(before, after, tmp_path / "exact")
    assert exact < 1e-6
    config = peft.PeftConfig.from_pretrained(str(tmp_path / "exact"))
    assert (config.r, config.rank_pattern) == (32, {"^model.layers.0.self_attn.q_proj": 3})
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(before), str(tmp_path / "exact")).eval()
    assert torch.allclose(logits(loaded), logits(after), atol=1e-5)
    near = export_change(before, after, tmp_path / "near", rank=8)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(before), str(tmp_path / "near"))
    merged = theirs.merge_and_unload()
    name = "model.layers.1.mlp.down_proj"
    was = before.get_submodule(name).weight.detach()
    got, wanted = merged.get_submodule(name).weight.detach() - was, other.detach() - was
    narrow = weight.detach() - before.get_submodule("model.layers.0.self_attn.q_proj").weight
    whole = torch.cat([wanted.flatten(), narrow.detach().flatten()])
    assert near == pytest.approx(float((got - wanted).norm() / whole.norm()), rel=1e-4)
    assert near > 0.1


def test_what_peft_cannot_hold_is_refused(tmp_path: Path) -> None:
    model = bert()
    layout = layout_of(projection_rules(model))
    with pytest.raises(
        SpecError, match=r"no adapter for 'bert.embeddings.word_embeddings' together with biases"
    ):
        export_change(model, at(model, torch.randn(1, 1, layout.size), layout), tmp_path)
    with pytest.raises(SpecError, match="nothing to export"):
        export_change(model, copy.deepcopy(model), tmp_path)
    with pytest.raises(SpecError, match="the two models differ"):
        export_change(model, llama(), tmp_path)
