"""Very small Hugging Face models and texts for them, which several tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.methods import build

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; pip install 'fedspan[nlp]'"
)

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
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**(SIZES | own | still | settings))
    )


def llama(kind: str = "LlamaForCausalLM", **settings: Any) -> Any:
    torch.manual_seed(0)
    own = {"intermediate_size": 48, "num_key_value_heads": 1, "max_position_embeddings": 24}
    return getattr(transformers, kind)(transformers.LlamaConfig(**(SIZES | own | settings)))


def gpt2() -> Any:
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=24, **ends, **still
        )
    )


def questions(
    n: int = 12, seed: int = 0, classes: int = 4, tell: bool = True
) -> list[dict[str, Any]]:
    """Texts of unequal length; the class is told by which tokens occur."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        label = int(rng.integers(classes))
        low = 5 + 10 * label if tell else 5
        rows.append(
            {
                "input_ids": rng.integers(low, low + 10, rng.integers(3, 12)).tolist(),
                "labels": label,
            }
        )
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
    return build(
        "ssf",
        **(
            {"lr": 0.1, "local_steps": 4, "projector": {"name": "coordinate", "rank": 0.25}}
            | settings
        ),
    )


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


MODELS = {
    "bert": (bert, questions),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), lines),
    "llama, untied": (llama, lines),
    "gpt2": (gpt2, lines),
    "llama classifier": (
        lambda: llama("LlamaForSequenceClassification", pad_token_id=3, num_labels=4),
        questions,
    ),
}
