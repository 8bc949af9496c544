"""Texts as users give them: every form trains alike, batches are no longer than they must be, mistakes are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedspan
from fedspan.core.errors import DataError, SpecError
from fedspan.huggingface.models import about
from fedspan.huggingface.text_data import as_texts
from support.tiny import bert, flat, llama, questions, ssf


def test_every_form_of_the_same_texts_trains_to_the_same_weights() -> None:
    import pandas as pd
    import pyarrow as pa
    from datasets import Dataset

    rows = [questions(8, seed) for seed in range(2)]

    def padded(part: list[dict[str, Any]]) -> dict[str, Any]:
        ids = torch.zeros(len(part), 14, dtype=torch.int64)  # wider than any text
        mask = torch.zeros_like(ids)
        for place, row in enumerate(part):
            ids[place, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            mask[place, : len(row["input_ids"])] = 1
        return {
            "input_ids": ids,
            "attention_mask": mask.numpy(),
            "labels": torch.tensor([r["labels"] for r in part]),
        }

    kinds = (
        lambda part: part,
        padded,
        lambda part: Dataset.from_list([row | {"text": "left out"} for row in part]),
        lambda part: [{"input_ids": r["input_ids"], "label": r["labels"]} for r in part],
        pd.DataFrame,
        pa.Table.from_pylist,
    )
    found = [
        flat(
            fedspan.fit(bert(), [kind(p) for p in rows], method=ssf(), rounds=2, batch_size=4).model
        )
        for kind in kinds
    ]
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_inputs_and_targets_are_enough() -> None:
    ids = torch.randint(5, 60, (8, 6), generator=torch.Generator().manual_seed(0))
    result = fedspan.fit(
        llama(), [(ids, ids)], method=ssf(), rounds=2, batch_size=4, test=(ids, ids)
    )
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_a_batch_is_as_long_as_its_longest_text() -> None:
    rows = [{"input_ids": [7] * n, "labels": [7] * n} for n in (2, 9, 4)]
    source = as_texts(rows, about(llama()), "it")
    batch = source.take(torch.tensor([2, 0]))
    assert batch["input_ids"].tolist() == [[7, 7, 7, 7], [7, 7, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[7, 7, 7, 7], [7, 7, -100, -100]]
    classes = as_texts(questions(), about(bert()), "it").take(torch.arange(3))
    assert classes["labels"].shape == (3,)


def _without(name: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != name} for row in questions()]


SHORT = {"input_ids": torch.full((2, 4), 7), "labels": torch.zeros(2, dtype=torch.int64)}
MISTAKES: dict[str, tuple[Any, Any, str]] = {
    "no labels": (bert, _without("labels"), "client 0 has no column 'labels'"),
    "no ids": (bert, _without("input_ids"), "client 0 has no column 'input_ids'"),
    "class": (lambda: bert(num_labels=2), questions(), "outside the 2 numbers of the classes"),
    "word": (
        bert,
        [{"input_ids": [3, 60], "labels": 0}],
        "'input_ids' has 60, outside the 60 numbers",
    ),
    "mask": (
        bert,
        SHORT | {"attention_mask": torch.ones(2, 3)},
        r"'attention_mask' has the shape (2, 3), 'input_ids' (2, 4)",
    ),
    "length": (
        bert,
        [{"input_ids": [7] * 25, "labels": 0}],
        "texts of 25 tokens; the model takes 24",
    ),
    "padding": (
        bert,
        SHORT | {"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])},
        "example 1 has nothing",
    ),
    "examples": (
        bert,
        SHORT | {"labels": torch.zeros(3, dtype=torch.int64)},
        "has 2 examples, but 3 in 'labels'",
    ),
    "nothing to predict": (
        llama,
        [{"input_ids": [7], "labels": [7]}],
        "example 0 has no token to predict",
    ),
    "labels of a class": (llama, SHORT, r"'labels' has the shape (2,), 'input_ids' (2, 4)"),
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
        return nn.functional.cross_entropy(
            model(input_ids=batch["input_ids"]).logits, batch["labels"]
        )

    result = fedspan.fit(bert(), [rows], method=ssf(), rounds=1, objective=objective, test=rows)
    assert result.history[-1]["loss"] > 0
