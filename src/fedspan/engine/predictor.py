"""A trained model in use: rows in, predictions out, with the preprocessing and the names of the training."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedspan.core.errors import DataError, SpecError, shown
from fedspan.core.files import write_atomic
from fedspan.data.columns import column_of, is_number
from fedspan.data.schema import Schema, gaps_of
from fedspan.data.table_data import as_columns
from fedspan.nn.batches import placed
from fedspan.nn.client_data import as_tensor
from fedspan.nn.problem_kind import call_of, parts_of

AT_ONCE = 1024  # rows
Array = npt.NDArray[Any]


@dataclass(eq=False)
class Predictor:
    """A trained module with what it takes to use it; it has the interface of a fitted scikit-learn estimator.

    Args:
        module: The trained module.
        kind: What it was trained for: "classes", "binary" (yes or no), "labels" (several of them), or "numbers".
        classes: The names of the classes.
        schema: How the columns of a table become its features, if it was trained on tables.
        columns: The columns of a table without a schema, in order.
        own: The schema with each client's own means and deviations, by the client's name.
        logits: Whether an output of "binary" or "labels" is a logit, and no probability.
        several: The names or the number of the model's inputs, if it takes a dictionary or a tuple of tensors.
    """

    module: nn.Module
    kind: str
    classes: list[Any] = field(default_factory=list)
    schema: Schema | None = None
    columns: list[str] = field(default_factory=list)
    own: Mapping[str, Schema] = field(default_factory=dict)
    logits: bool = True
    several: list[str] | int = 0

    @property
    def classes_(self) -> Array:
        """The classes, in the order of the columns of `predict_proba`."""
        if self.kind == "numbers":
            raise SpecError("the model predicts numbers, not classes; `predict` gives them")
        return np.array(self.classes)

    @property
    def feature_names_in_(self) -> Array:
        """The columns that a table must have."""
        names = self.columns if self.schema is None else [c.name for c in self.schema.used]
        return np.array(names, dtype=object)

    @property
    def n_features_in_(self) -> int:
        """How many columns a table must have."""
        return len(self.feature_names_in_)

    def inputs(self, rows: Any, client: str | None = None) -> Any:
        """Return rows as the module takes them; see `predict`."""
        if self.several:
            return self._several(rows)
        own = None
        if client is not None:
            if client not in self.own:
                known = f"; there are {', '.join(self.own)}" if self.own else ""
                raise SpecError(
                    f"`client` {client!r} has no means and deviations of its own{known}"
                )
            own = self.own[client]
        who = f"{str(rows)!r}" if isinstance(rows, str | Path) else "the table"
        dtype = next(self.module.parameters()).dtype
        plain = isinstance(rows, Tensor | np.ndarray) or (
            isinstance(rows, list) and not (rows and isinstance(rows[0], Mapping))
        )
        table = None if plain else as_columns(rows, "the table")
        if self.schema is not None:
            if table is None:
                raise DataError(
                    "the model was trained on tables; give a DataFrame, a dictionary of columns, a list of "
                    f"dictionaries or a file, got {shown(rows)}"
                )
            for line in self.schema.news(table, who):
                # one place for all calls, so that Python shows the same text once
                warnings.warn(line, stacklevel=2)
            return torch.from_numpy((own or self.schema).features(table, who)).to(dtype)
        if table is not None:
            names = self.columns or [*table]
            if missing := [name for name in names if name not in table]:
                raise DataError(f"{who} has no column {missing[0]!r}; the model needs it")
            if unknown := [name for name in table if name not in names]:
                raise DataError(
                    f"{who} has a column {unknown[0]!r} that the model does not know; remove it"
                )
            rows = np.column_stack([np.asarray(table[name]) for name in names])
        try:
            x = torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"rows must be an array, a tensor or a table, got {shown(rows)}"
            ) from None
        return x.to(dtype) if x.is_floating_point() or x.dtype == torch.bool or table else x

    def outputs(self, rows: Any, client: str | None = None) -> Tensor:
        """Return what the module returns for rows, in evaluation mode."""
        x, was = self.inputs(rows, client), self.module.training
        shapes = [tuple(one.shape[1:]) for one in parts_of(x)]
        device = next(self.module.parameters()).device
        self.module.eval()
        try:
            with torch.inference_mode():
                found = [call_of(self.module, placed(part, device))().cpu() for part in split(x)]
        except (RuntimeError, IndexError) as error:
            raise DataError(
                f"the model does not take rows of shape {', '.join(map(str, shapes))}: {str(error).splitlines()[0]}"
            ) from None
        finally:
            self.module.train(was)
        return torch.cat(found) if found else torch.zeros(0, 1)

    def _several(self, rows: Any) -> Any:
        names, dtype = self.several, next(self.module.parameters()).dtype
        if isinstance(names, list):
            good = isinstance(rows, Mapping) and set(rows) == set(names)
            form, order = f"a dictionary of {', '.join(names)}", list[Any](names)
        else:
            good = isinstance(rows, list | tuple) and len(rows) == names
            form, order = f"a tuple of {names} inputs", list(range(names))
        if not good:
            raise DataError(f"the model takes {form}, got {shown(rows)}")
        found = [as_tensor(rows[one], "rows") for one in order]
        if len({len(one) for one in found}) > 1:
            raise DataError(f"rows have inputs of different lengths: {[*map(len, found)]}")
        found = [one.to(dtype) if one.is_floating_point() else one for one in found]
        return dict(zip(order, found, strict=True)) if isinstance(names, list) else tuple(found)

    def probabilities(self, z: Tensor) -> Tensor:
        """Return the probabilities that outputs stand for; numbers are left as they are."""
        if self.kind == "classes":
            return z.softmax(1)
        return z.sigmoid() if self.kind != "numbers" and self.logits else z

    def predict_proba(self, rows: Any, client: str | None = None) -> Array:
        """Return the probability of each class, (rows, classes)."""
        self.classes_  # noqa: B018 (refused for numbers)
        z = self.outputs(rows, client).double()
        p = self.probabilities(z).numpy()
        if self.kind == "classes":
            return p
        p = p.reshape(len(z), -1)
        return p if self.kind == "labels" else np.concatenate([1 - p, p], 1)

    def predict(self, rows: Any, client: str | None = None) -> Array:
        """Return the predicted class, or the predicted number, of each row.

        Args:
            rows: A DataFrame or Arrow table, a dictionary of columns, a list of dictionaries, or the path of a file. A
                model that was trained on arrays also takes these.
            client: A client of the training, whose own means and deviations to use where training used them.
        """
        if self.kind == "numbers":
            found = self.outputs(rows, client).numpy()
            return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found
        p = self.predict_proba(rows, client)
        return (p > 0.5).astype(np.int64) if self.kind == "labels" else self.classes_[p.argmax(1)]

    def write(
        self, rows: Any, out: Path, client: str | None = None, keep: str | None = None
    ) -> int:
        """Write a CSV file with a line per row: the prediction, and the probability of each class.

        Args:
            rows: See `predict`.
            out: The file.
            client: See `predict`.
            keep: A column of the table to write before the prediction, such as an id.
        """
        names, parts = ["prediction"], [self.predict(rows, client)]
        if self.kind != "numbers":
            names += [f"probability of {name}" for name in self.classes_.tolist()]
            parts += list(self.predict_proba(rows, client).T)
        elif parts[0].ndim == 2:
            names, parts = [f"prediction {n}" for n in range(parts[0].shape[1])], list(parts[0].T)
        if keep is not None:
            names.insert(0, keep)
            parts.insert(
                0, column_of(as_columns(rows, "the table"), keep, "the table", "`keep` names it")
            )
        text = io.StringIO()
        lines = zip(*(part.tolist() for part in parts), strict=True)
        csv.writer(text, lineterminator="\n").writerows([names, *lines])
        write_atomic(out, text.getvalue().encode())
        return len(parts[0])

    def pipeline(self) -> nn.Module:
        """Return a module that takes the table's cells as numbers and returns probabilities or numbers, for export.

        Its input has one column per column of `feature_names_in_`, in that order: numbers and booleans as they are, NaN
        for an empty cell; of a category the number of its place in the schema, from 0, and -1 for an unknown one.
        """
        return Pipeline(self)


def split(inputs: Any) -> Iterator[Any]:
    """Yield a few rows of inputs at a time."""
    for own in zip(*(one.split(AT_ONCE) for one in parts_of(inputs)), strict=True):
        if isinstance(inputs, Mapping):
            yield dict(zip(inputs, own, strict=True))
        else:
            yield own if isinstance(inputs, tuple) else own[0]


class Pipeline(nn.Module):
    """Preprocessing, module and probabilities as one module."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.module, self.schema = predictor.module, predictor.schema
        self.probabilities = predictor.probabilities
        if self.schema is not None and any(one.kind == "date" for one in self.schema.used):
            raise SpecError(
                "a model with dates cannot be exported with its preprocessing; leave the dates out"
            )

    def forward(self, cells: Tensor) -> Tensor:
        """Return probabilities of the classes, or predicted numbers."""
        x = cells if self.schema is None else torch.cat(list(self._features(cells)), 1)
        z: Tensor = self.module(x.to(next(self.module.parameters()).dtype))
        return self.probabilities(z)

    def _features(self, cells: Tensor) -> Iterator[Tensor]:
        assert self.schema is not None
        for place, column in enumerate(self.schema.used):
            x = cells[:, place : place + 1]
            if column.kind == "category":
                gap = column.categories.index("") if "" in column.categories else -1
                x = torch.where(torch.isnan(x), gap, x)
                places = torch.arange(len(column.categories), device=x.device)
                yield x + 1 if self.schema.encode == "index" else (x == places).to(x.dtype)
                continue
            gaps = [float(gap) for gap in gaps_of(self.schema.gaps, column.name) if is_number(gap)]
            empty = torch.isnan(x) | torch.isin(x, x.new_tensor(gaps))
            filler = column.mean[0] if column.mean else 0.0
            mean, deviation = 0.0, 1.0
            if column.kind == "number" and self.schema.standardize != "none":
                mean, deviation = filler, column.deviation[0]
            yield (torch.where(empty, filler, x) - mean) / deviation
            if column.gaps:
                yield empty.to(x.dtype)
