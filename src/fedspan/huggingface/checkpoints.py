"""Pre-trained models and tokenizers by name or from a directory of this machine.

`outline` makes a model without its weights, on torch's meta device, of a config.json alone.

Models are read from safetensors alone: nothing is downloaded here, unpickled or run from a hub. `tiny` is a small
network with random weights and a tokenizer of a few lines, for trials and tests.
"""

import contextlib
import functools
import importlib.util
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedspan.core.errors import DataError, FedspanError, SpecError, at_least, one_line
from fedspan.core.extras import needs
from fedspan.core.seeds import torch_generator
from fedspan.data import sets
from fedspan.data.datasets import Split
from fedspan.huggingface.models import CAUSAL, about, prepare

ModelKind = Literal["SequenceClassification", "CausalLM"]
DROPOUTS = (
    "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "seq_classif_dropout", "dropout",
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
)  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 128, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NAMED = ("minilm", "stories260k")
WORDS = 500  # numbers that the tiny classifier's tokenizer gives to words
SPECIAL, BEGIN = 3, 1  # padding, beginning, end


def place_of(model: str) -> Path | None:
    """The directory of a model by name or path; None for `tiny`."""
    if model == "tiny":
        return None
    if model == "minilm":
        sets.require([model])
        found: Any = importlib.util.find_spec(sets.find(model).package)
        return Path(found.submodule_search_locations[0]) / "model"
    if model == "stories260k":
        return next(iter(sets.paths(model).values())).parent
    place = Path(model)
    if not (place / "config.json").is_file():
        raise DataError(
            f"`task.model` {model!r}: there is no {str(place / 'config.json')!r}; name a model's directory"
        )
    return place


def load_model(
    model: str,
    kind: ModelKind,
    seed: int,
    dropout: float,
    **settings: Any,
) -> Any:
    """A model by name or directory; the seed decides what is not in its file, such as a new head."""
    needs("nlp", "transformers")
    import transformers

    place = place_of(model)
    auto: Any = getattr(transformers, f"AutoModelFor{kind}")
    local = {"local_files_only": True}
    with quietly(), torch_generator(seed), _readable(place, f"as a model for {kind}"):
        if place is not None:
            config: Any = transformers.AutoConfig.from_pretrained(place, **(local | settings))
        elif kind == "CausalLM":
            own = {
                "vocab_size": SPECIAL + 256,
                "tie_word_embeddings": True,
                "num_key_value_heads": 1,
            }
            config = transformers.LlamaConfig(**(TINY | own | settings))
        else:
            config = transformers.BertConfig(**(TINY | {"vocab_size": WORDS} | settings))
        named = [name for name in DROPOUTS if isinstance(getattr(config, name, None), float)]
        for name in named:
            setattr(config, name, dropout)
        if dropout and not named:
            raise SpecError(
                f"`task.dropout` is {dropout}, but a {config.model_type} model has none to set"
            )
        if place is None:
            return auto.from_config(config)
        return auto.from_pretrained(place, config=config, use_safetensors=True, **local)


@functools.lru_cache(maxsize=4)
def sentences(
    data: Split, place: Path | None, longest: int, which: tuple[int, ...]
) -> dict[int, list[int]]:
    """Row of a data set → its text as ids of a model's own tokenizer, between its marks, cut to `longest`."""
    texts = data.x[list(which)].tolist()
    if place is None:  # for every word a number by a hash of its text, the same on every machine
        words = [[zlib.crc32(word.encode()) for word in text.lower().split()] for text in texts]
        ids = [[BEGIN, *(SPECIAL + one % (WORDS - SPECIAL) for one in text)] for text in words]
        found = [one[:longest] for one in ids]
    else:
        with quietly():
            found = _tokenizer(place)(texts, truncation=True, max_length=longest)["input_ids"]
    return dict(zip(which, found, strict=True))


@functools.lru_cache(maxsize=4)
def running(
    data: Split, place: Path | None, which: tuple[int, ...]
) -> tuple[list[int], dict[int, list[int]]]:
    """The mark of a beginning, if the tokenizer has one, and row → its text as ids, uncut and without marks."""
    texts = data.x[list(which)].tolist()
    if place is None:
        begin, found = [BEGIN], [[SPECIAL + byte for byte in text.encode()] for text in texts]
    else:
        with quietly():  # blocks are cut of texts that are longer than the model
            tokenizer = _tokenizer(place)
            begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
            found = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return begin, dict(zip(which, found, strict=True))


def _tokenizer(place: Path) -> Any:
    needs("nlp", "transformers")
    import transformers

    with _readable(place, "with its tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)


@contextlib.contextmanager
def _readable(place: Path | None, how: str) -> Iterator[None]:
    """Turn what the libraries raise on damaged files, bare exceptions among it, into one line."""
    try:
        yield
    except FedspanError:
        raise
    except Exception as error:
        if place is None:
            raise
        first = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        why = f"it cannot be loaded {how}: {one_line(first)}"
        for known in map(sets.find, NAMED):
            if known.here() and place_of(known.name) == place:
                raise known.damaged(why) from None
        raise DataError(f"`task.model` {str(place)!r}: {why}") from None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """transformers without its reports and progress bars: a new head is intended here."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


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
