"""What fedspan has to know of a Hugging Face model: its kind, its loss, and what it takes.

A model is recognized by its class, so that transformers itself is never imported here. The loss is the model's own,
`model(**batch).loss`; a batch is a mapping of tensors such as input_ids, attention_mask and labels.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fedspan.core.errors import SpecError
from fedspan.nn.client_data import Batch

Kind = Literal["classes", "causal", "tokens", "other"]
CAUSAL = ("ForCausalLM", "LMHeadModel")
TOKENS = ("ForMaskedLM", "ForTokenClassification")


@dataclass(frozen=True)
class Pretrained:
    """The kind of a model and the bounds of what may be fed to it."""

    kind: Kind  # one class an example; the next token; a label for each token; anything else that has a loss
    takes: frozenset[str]  # names that its forward accepts
    vocabulary: int
    labels: int  # classes, or the vocabulary where labels are tokens
    positions: int | None  # longest sequence; None: not stated
    pad: int  # what short sequences are filled up with

    @property
    def by_token(self) -> bool:
        """Whether labels are as long as the text."""
        return self.kind in ("causal", "tokens")


def is_pretrained(model: nn.Module) -> bool:
    """Whether it is a model of transformers, found out without importing that."""
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(model).__mro__
    )


def about(model: nn.Module) -> Pretrained:
    """What the model's class and config say of it; refused where it has no loss of its own."""
    takes, name = frozenset(inspect.signature(model.forward).parameters), type(model).__name__
    if "labels" not in takes:
        raise SpecError(
            f"{name} has no loss of its own; use a class with a head, such as AutoModelForSequenceClassification, "
            "or give `objective`"
        )
    hub: Any = model
    config, kind = hub.config.get_text_config(), _kind(model)
    pad = getattr(config, "pad_token_id", None)
    if kind == "classes" and pad is None:
        raise SpecError(f"{name} needs a padding token to find the end of a text; set model.config.pad_token_id")
    vocabulary = int(hub.get_input_embeddings().weight.shape[0])
    by_word = kind == "causal" or name.endswith("ForMaskedLM")
    positions = getattr(config, "max_position_embeddings", None)
    return Pretrained(kind, takes, vocabulary, vocabulary if by_word else int(config.num_labels), positions, pad or 0)


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss: a mean over the examples, or over the predicted tokens, of the batch."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def ready(model: nn.Module, checkpointing: bool = False) -> nn.Module:
    """A model of ours made fit for training: no cache of keys, and checkpoints that work with `autograd.grad`."""
    hub: Any = model
    hub.config.get_text_config().use_cache = False
    if checkpointing or hub.is_gradient_checkpointing:
        hub.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _kind(model: nn.Module) -> Kind:
    names = [c.__name__ for c in type(model).__mro__]  # a subclass of one's own has another name
    if any(name.endswith(CAUSAL) for name in names):
        return "causal"
    if any(name.endswith(TOKENS) for name in names):
        return "tokens"
    hub: Any = model
    several = getattr(hub.config, "problem_type", None) in ("regression", "multi_label_classification")
    classes = any(name.endswith("ForSequenceClassification") for name in names) and hub.config.num_labels > 1
    return "classes" if classes and not several else "other"
