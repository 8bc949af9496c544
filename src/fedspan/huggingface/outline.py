"""A Hugging Face model without its weights: its layers and shapes from a config.json alone, on torch's meta device."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedspan.core.errors import DataError, SpecError, at_least, one_line
from fedspan.core.extras import needs
from fedspan.huggingface.checkpoints import quietly
from fedspan.huggingface.models import CAUSAL, about, prepare


def outline(
    path: Path,
    dtype: torch.dtype = torch.float32,
    labels: int | None = None,
    checkpointing: bool = False,
) -> nn.Module:
    """The model that a directory or config.json describes, prepared for training; an encoder gets a class head."""
    needs("nlp", "transformers")
    import transformers

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise DataError(f"{str(path)!r} {what}; name a model's directory or its config.json")
    try:
        with quietly():
            config: Any = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(
            f"{str(file)!r} is no config that transformers knows: {one_line(str(error))}"
        ) from None

    named = (getattr(config, "architectures", None) or [""])[0]
    kind = "classifier"
    auto: Any = transformers.AutoModelForSequenceClassification
    if labels is not None:
        at_least("labels", labels, 1)
        config.num_labels = labels
    elif named.endswith(CAUSAL):
        kind, auto = "causal language model", transformers.AutoModelForCausalLM
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    try:
        with torch.device("meta"):
            model: nn.Module = auto.from_config(config)
    except (ValueError, KeyError, ImportError) as error:
        raise SpecError(
            f"{named or config.model_type} of {str(path)!r} cannot be loaded as a {kind}: {one_line(str(error))}"
        ) from None
    return prepare(model.to(dtype).train(), checkpointing)


def batch_of(model: nn.Module, batch: int, length: int) -> dict[str, torch.Tensor]:
    """A batch of texts as the model takes them; their content does not matter."""
    known = about(model)
    if known.positions is not None and length > known.positions:
        raise SpecError(
            f"`length` {length} is more than the {known.positions} positions of the model"
        )
    ids = torch.zeros(batch, length, dtype=torch.int64)
    # labels are a column of their own, as in a real batch
    labels = torch.zeros_like(ids if known.by_token else ids[:, 0])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
