"""What padding, parts and masks must not change: a loss or score of many texts is that of the texts one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from fedspan.core.config import Settings
from fedspan.huggingface.models import about, own_loss
from fedspan.huggingface.text_data import AT_ONCE, as_texts
from fedspan.tasks._module import Material
from support.tiny import MODELS, bert, lines, llama, questions


def evaluated(model: Any, rows: Any) -> Any:
    material = Material(model, settings=Settings(device="cpu"))
    evaluator = material.evaluator(material.read(rows, "test set"))
    with torch.inference_mode():
        return evaluator(model)


def test_perplexity_is_the_mean_over_tokens() -> None:
    """In small parts of unequal length, against all log-probabilities at once."""
    model, rows = llama().eval(), lines(AT_ONCE + 11)
    found = evaluated(model, rows)
    logs, right = [], []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            logs += scores[torch.arange(ids.shape[1] - 1), ids[0, 1:]].tolist()
            right += (scores.argmax(-1) == ids[0, 1:]).tolist()
    assert found["loss"] == pytest.approx(-np.mean(logs), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(-np.mean(logs)), rel=1e-5)
    assert found["token_accuracy"] == np.mean(right)


def alone(model: Any, row: dict[str, Any]) -> Any:
    """What the model says of one text without any padding, and no mask."""
    ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
    with torch.no_grad():
        return model(input_ids=ids, labels=labels)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_a_batch_is_the_mean_over_its_texts(name: str) -> None:
    """Over its predicted tokens where these are the labels; what fills a text up is neither seen nor predicted.

    transformers has losses of tokens, and the norms of Llamas, in float32, hence the wider margin there.
    """
    make, data = MODELS[name]
    model, rows = make().double().eval(), data(7, 3)
    assert len({len(row["input_ids"]) for row in rows}) > 2
    batch = as_texts(rows, about(model), "it").take(torch.arange(7))
    weights = [len(row["labels"]) - 1 if isinstance(row["labels"], list) else 1 for row in rows]
    wanted = np.average([float(alone(model, row).loss) for row in rows], weights=weights)
    with torch.no_grad():
        found = float(own_loss(model, batch))
    assert found == pytest.approx(wanted, rel=1e-10 if name == "bert" else 1e-5)


def test_scores_of_a_classifier_are_those_of_its_texts_one_by_one() -> None:
    """In parts of unequal size."""
    model, rows = bert().eval(), questions(AT_ONCE + 13, 3)
    found = evaluated(model, rows)
    said = [alone(model, row) for row in rows]
    predicted, actual = [int(one.logits.argmax()) for one in said], [row["labels"] for row in rows]
    f1 = f1_score(actual, predicted, average="macro", zero_division=0)
    assert abs(f1 - np.mean(np.equal(predicted, actual))) > 0.02  # one could not pass for the other
    assert found["loss"] == pytest.approx(np.mean([float(one.loss) for one in said]), rel=1e-5)
    assert found["accuracy"] == pytest.approx(np.mean(np.equal(predicted, actual)), rel=1e-12)
    assert found["f1_macro"] == pytest.approx(f1, rel=1e-12)
