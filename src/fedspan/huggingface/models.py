"""What fedspan has to know of a Hugging Face model: its kind, its loss, its metrics, and what it takes.

A model is recognized by its class, so that transformers itself is never imported here. The loss is the model's own,
`model(**batch).loss`; a batch is a mapping of tensors such as input_ids, attention_mask and labels.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.core.errors import SpecError
from fedspan.core.metric import IGNORED
from fedspan.nn.batches import Batch
from fedspan.nn.evaluate import Score, Scored

Kind = Literal["classes", "causal", "tokens", "other"]
CAUSAL = ("ForCausalLM", "LMHeadModel")
TOKENS = ("ForMaskedLM", "ForTokenClassification")


@dataclass(frozen=True)
class Pretrained:
    """The kind of a model and the bounds of what may be fed to it."""

    kind: Kind  # one class per example; the next token; a label for each token; anything else that has a loss
    takes: frozenset[str]  # the arguments of its forward
    vocabulary: int
    labels: int  # classes, or the vocabulary where labels are tokens
    positions: int | None  # longest sequence; None: not stated
    pad: int  # the token that fills up short sequences

    @property
    def by_token(self) -> bool:
        """Whether there is a label for each token."""
        return self.kind in ("causal", "tokens")


def is_pretrained(model: nn.Module) -> bool:
    """Whether a module is a model of transformers, without importing transformers."""
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.")
        for c in type(model).__mro__
    )


def about(model: nn.Module) -> Pretrained:
    """The kind and bounds of a model, by its class and config; a model without a loss of its own is refused."""
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
        raise SpecError(
            f"{name} needs a padding token to find the end of a text; set model.config.pad_token_id"
        )
    vocabulary = hub.get_input_embeddings().weight.shape[0]
    by_word = kind == "causal" or name.endswith("ForMaskedLM")
    labels = vocabulary if by_word else config.num_labels
    positions = getattr(config, "max_position_embeddings", None)
    return Pretrained(kind, takes, vocabulary, labels, positions, pad or 0)


def own_loss(model: nn.Module, batch: Batch) -> Any:
    """The model's own loss: a mean over the examples, or over the predicted tokens, of the batch."""
    return model(**batch).loss


def score_of(known: Pretrained) -> Score:
    """How a model of this kind is evaluated on a batch; labels of tokens are those that the logits predict."""

    def score(model: nn.Module, batch: Batch) -> Scored:
        found, labels = model(**batch), batch["labels"]
        loss, count, logits = found.loss, len(labels), found.logits
        if known.kind == "classes":  # its own loss, with digits enough for bfloat16 weights
            loss = F.cross_entropy(logits.float(), labels)
        if known.kind == "causal":
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if known.by_token:
            count, logits = int((labels != IGNORED).sum()), logits.movedim(-1, 1)
        return loss, count, logits, labels

    return score


def usual_metrics(known: Pretrained) -> tuple[str, ...]:
    """The metrics that a model of this kind is evaluated by."""
    if known.kind == "classes":
        return "accuracy", "f1_macro"
    if known.by_token and known.labels == known.vocabulary:
        return "perplexity", "token_accuracy"
    return ("token_accuracy",) if known.by_token else ()


def prepare(model: nn.Module, checkpointing: bool = False) -> nn.Module:
    """Makes a model fit for training: no cache of keys, and checkpoints that work with `autograd.grad`."""
    hub: Any = model
    hub.config.get_text_config().use_cache = False
    if checkpointing or hub.is_gradient_checkpointing:
        hub.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _kind(model: nn.Module) -> Kind:
    config: Any = model.config
    several = ("regression", "multi_label_classification")
    for base in type(model).__mro__:  # a user's subclass has a name of its own
        if base.__name__.endswith(CAUSAL):
            return "causal"
        if base.__name__.endswith(TOKENS):
            return "tokens"
        if base.__name__.endswith("ForSequenceClassification") and config.num_labels > 1:
            return "other" if getattr(config, "problem_type", None) in several else "classes"
    return "other"
