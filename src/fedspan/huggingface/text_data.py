"""Tokenized text as a client's examples: columns of equal length, each batch cut to its longest sequence.

Text comes as a mapping of columns, a `datasets.Dataset`, a list of rows of unequal length, or (inputs, targets). Short
rows are filled up on the right: ids with the model's padding token, masks with 0, labels of tokens with −100, which no
loss counts. Columns that the model does not take are left out, as are the last ones of a batch that are all padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from fedspan.core.errors import DataError, one_line
from fedspan.core.metric import IGNORED
from fedspan.huggingface.models import Pretrained
from fedspan.nn.batches import Batch, ClientData
from fedspan.nn.client_data import of_loader, table_columns
from fedspan.nn.problem_kind import whole

SPELLINGS = {"label": "labels", "label_ids": "labels"}  # as transformers' own collators read them
Columns = dict[str, Tensor]
AT_ONCE = 128  # texts evaluated at a time
LOGITS = 1 << 26  # and at most so many logits of tokens: 256 MB


@dataclass(frozen=True, eq=False)
class Texts:
    """Token columns (n, longest), one of them labels, and how long each text is."""

    columns: Columns
    lengths: Tensor
    about: Pretrained

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def take(self, index: Tensor) -> Batch:
        """Rows of each column, as long as the longest of them."""
        longest, found = int(self.lengths[index].max()), {}
        for name, column in self.columns.items():
            by_token = column.dim() > 1 and (name != "labels" or self.about.by_token)
            found[name] = column[index, :longest] if by_token else column[index]
        return found


def by_length(data: ClientData, about: Pretrained) -> list[Tensor]:
    """Which texts to evaluate together: in the order of their length, in parts small enough for their logits."""
    lengths = data.lengths if isinstance(data, Texts) else torch.ones(len(data), dtype=torch.int64)
    each = int(lengths.max()) * (about.labels if about.by_token else 1)
    return list(torch.argsort(lengths, stable=True).split(max(1, min(AT_ONCE, LOGITS // each))))


def as_texts(data: Any, about: Pretrained, who: str) -> ClientData:
    """The examples of one client for a Hugging Face model, from what a user gives; errors name it as `who`."""
    if isinstance(data, DataLoader):  # with its own way to make batches
        return of_loader(data, who)
    given = {name: column for name, column in _columns(data, who).items() if name in about.takes}
    for name in ("input_ids", "labels"):
        if name not in given:
            hint = (
                " (a copy of 'input_ids' for a causal language model)" if name == "labels" else ""
            )
            raise DataError(
                f"{who} has no column {name!r}{hint}; it has {', '.join(given) or 'none'}"
            )
    rows = given["input_ids"]
    if not len(rows):
        raise DataError(f"{who} has no examples; leave it out")
    ragged = not isinstance(rows, Tensor | np.ndarray) and len({len(row) for row in rows}) > 1
    if ragged and "attention_mask" not in given:
        given["attention_mask"] = [[1] * len(row) for row in rows]
    fillers, columns = {"input_ids": about.pad, "labels": IGNORED}, {}
    for name, column in given.items():
        try:
            columns[name] = _filled(column, fillers.get(name, 0))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(
                f"{who}: {name!r} is not numbers that go into one table: {one_line(str(error))}"
            ) from None
    _check(columns, about, who)
    mask = columns.get("attention_mask", torch.ones_like(columns["input_ids"]))
    # up to the last token that is attended to
    lengths = mask.shape[1] - mask.ne(0).flip(1).int().argmax(1)
    return Texts(columns, lengths, about)


def _columns(data: Any, who: str) -> dict[str, Any]:
    """Name → values, whatever the data came as."""
    if (table := table_columns(data)) is not None:
        data = {
            name: list(column) if str(getattr(column, "dtype", "")) == "object" else column
            for name, column in table.items()
        }
    elif isinstance(data, Dataset) and not isinstance(data, Mapping):
        data = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], Mapping):
        data = {"input_ids": data[0], "labels": data[1]}
    if isinstance(data, Sequence) and data and all(isinstance(row, Mapping) for row in data):
        for number, row in enumerate(data):
            if row.keys() != data[0].keys():
                raise DataError(
                    f"{who}: example {number} has the keys {list(row)}, the first has {list(data[0])}"
                )
        data = {name: [row[name] for row in data] for name in data[0]}
    if not isinstance(data, Mapping):
        raise DataError(
            f"{who} must be a mapping of token columns, a tokenized Dataset, a list of rows or (inputs, targets), "
            f"got {type(data).__name__}"
        )
    return {SPELLINGS.get(str(name), str(name)): column for name, column in data.items()}


def _filled(column: Any, filler: int) -> Tensor:
    """The column as one tensor, rows of unequal length filled up on the right."""
    table = column
    if not isinstance(column, Tensor | np.ndarray):
        rows = [torch.as_tensor(row) for row in column]
        table = torch.stack(rows) if rows[0].dim() == 0 else pad_sequence(rows, True, filler)
    return whole(torch.as_tensor(table))


def _check(columns: Columns, about: Pretrained, who: str) -> None:
    """Refuse what the model would fail on in the middle of a round, or quietly learn nothing from."""
    ids, labels, mask = columns["input_ids"], columns["labels"], columns.get("attention_mask")
    shape = tuple(ids.shape)
    if ids.dim() != 2 or ids.is_floating_point():
        raise DataError(
            f"{who}: 'input_ids' must be whole numbers (examples, tokens), got {ids.dtype} of shape {shape}"
        )
    for name, column in columns.items():
        if len(column) != len(ids):
            raise DataError(f"{who} has {len(ids)} examples, but {len(column)} in {name!r}")
        like = name == "attention_mask" or (name == "labels" and about.by_token)
        if like and column.shape != ids.shape:
            raise DataError(
                f"{who}: {name!r} has the shape {tuple(column.shape)}, 'input_ids' {shape}; they must be alike"
            )
    if about.positions is not None and shape[1] > about.positions:
        raise DataError(
            f"{who} has texts of {shape[1]} tokens; the model takes {about.positions}: truncate them"
        )
    if about.kind == "classes" and (labels.dim() != 1 or labels.is_floating_point()):
        raise DataError(
            f"{who}: 'labels' must be one class number an example, got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    counted = labels != IGNORED
    predicted = counted[:, 1:] if about.kind == "causal" else counted
    used = {"nothing but padding": mask}
    if about.by_token:
        used["no token to predict; leave it out"] = predicted
    for what, marks in used.items():
        if marks is not None and len(none := (~marks.ne(0).any(1)).nonzero()):
            raise DataError(f"{who}: example {int(none[0])} has {what}")
    bounds = [
        ("input_ids", ids, about.vocabulary, "the vocabulary; is it the model's own tokenizer?")
    ]
    if about.by_token:
        of = f"what is predicted; {IGNORED} marks what is not"
        bounds.append(("labels", labels[counted], about.labels, of))
    elif about.kind == "classes":
        of = "the classes; set num_labels when loading the model"
        bounds.append(("labels", labels, about.labels, of))
    for name, values, high, of in bounds:
        if len(wrong := values[(values < 0) | (values >= high)]):
            raise DataError(
                f"{who}: {name!r} has {int(wrong[0])}, outside the {high} numbers of {of}"
            )
