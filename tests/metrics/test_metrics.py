"""Metrics equal those of scikit-learn, whatever form outputs and targets come in and however they are batched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn import metrics as sk
from torch import nn

import fedspan
from fedspan.core import tables
from fedspan.core.config import Settings
from fedspan.core.errors import SpecError
from fedspan.metrics import Accuracy
from fedspan.metrics._own import chosen
from fedspan.nn.evaluate import Evaluator, by_outputs
from fedspan.tasks._module import Material

GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(0, 4, (101,), generator=GENERATOR)
LOGITS = torch.randn(101, 4, generator=GENERATOR) + F.one_hot(LABELS)
BINARY = torch.randint(0, 2, (101,), generator=GENERATOR)
SCORES = torch.randn(101, generator=GENERATOR) + BINARY - 0.5
RIGHT = sk.accuracy_score(BINARY, SCORES > 0)
SEVERAL = torch.randint(0, 2, (101, 3), generator=GENERATOR)
MANY = torch.randn(101, 3, generator=GENERATOR) + SEVERAL


def measured(name: str, outputs: torch.Tensor, targets: torch.Tensor, batch: int = 17) -> float:
    metric = tables.build("metric", {"name": name})
    for part in torch.arange(len(targets)).split(batch):
        metric.update(outputs[part], targets[part])
    return float(metric.compute())


def one_hot(scores: torch.Tensor) -> Any:
    return F.one_hot(LABELS, 4).numpy(), scores.softmax(1).numpy()


CASES: dict[str, tuple[str, torch.Tensor, torch.Tensor, float]] = {
    "classes": ("accuracy", LOGITS, LABELS, sk.accuracy_score(LABELS, LOGITS.argmax(1))),
    "one logit": ("accuracy", SCORES, BINARY, RIGHT),
    "one logit in a column, float": ("accuracy", SCORES[:, None], BINARY.float()[:, None], RIGHT),
    "one logit in a column, whole": ("accuracy", SCORES[:, None], BINARY, RIGHT),
    "probabilities": ("accuracy", SCORES.sigmoid(), BINARY, RIGHT),
    "several labels": ("accuracy", MANY, SEVERAL.float(), float(((MANY > 0) == SEVERAL).double().mean())),
    "f1 of classes": ("f1_macro", LOGITS, LABELS, sk.f1_score(LABELS, LOGITS.argmax(1), average="macro")),
    "f1 of one logit": ("f1_macro", SCORES, BINARY, sk.f1_score(BINARY, SCORES > 0, average="macro")),
    "f1 of several": ("f1_macro", MANY, SEVERAL, sk.f1_score(SEVERAL, MANY > 0, average="macro")),
    "auroc of classes": ("auroc", LOGITS, LABELS, sk.roc_auc_score(*one_hot(LOGITS), average="macro")),
    "auroc of one logit": ("auroc", SCORES, BINARY, sk.roc_auc_score(BINARY, SCORES)),
    "auroc of several": ("auroc", MANY, SEVERAL, sk.roc_auc_score(SEVERAL, MANY, average="macro")),
    "r2": ("r2", SCORES[:, None], LOGITS[:, 0], sk.r2_score(LOGITS[:, 0].numpy(), SCORES.numpy())),
    "r2 of several": ("r2", MANY, LOGITS[:, :3], sk.r2_score(LOGITS[:, :3].numpy(), MANY.numpy())),
    "mae": ("mae", SCORES, LOGITS[:, 0], sk.mean_absolute_error(LOGITS[:, 0], SCORES)),
    "mse": ("mse", SCORES, LOGITS[:, 0], sk.mean_squared_error(LOGITS[:, 0], SCORES)),
    "perplexity": ("perplexity", LOGITS, LABELS, math.exp(sk.log_loss(LABELS, LOGITS.double().softmax(1)))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [17, 200])
def test_metrics_are_scikit_learns(case: str, batch: int) -> None:
    name, outputs, targets, expected = CASES[case]
    exact = name in ("accuracy", "f1_macro")
    assert measured(name, outputs, targets, batch) == pytest.approx(
        expected, rel=1e-12 if exact else 1e-5
    )


def test_tokens_that_do_not_count_change_nothing() -> None:
    """Batches of different lengths; (n, classes, tokens) against (n, tokens)."""
    metrics = {
        name: tables.build("metric", {"name": name}) for name in ("token_accuracy", "perplexity")
    }
    right, logs = [], []
    for length in (5, 9):
        logits, labels = torch.randn(3, 6, length), torch.randint(0, 6, (3, length))
        labels[:, :2] = -100
        for metric in metrics.values():
            metric.update(logits, labels)
        right += (logits.argmax(1) == labels)[:, 2:].flatten().tolist()
        logs += F.cross_entropy(logits[..., 2:], labels[:, 2:], reduction="none").flatten().tolist()
    assert metrics["token_accuracy"].compute() == np.mean(right)
    assert metrics["perplexity"].compute() == pytest.approx(math.exp(np.mean(logs)), rel=1e-6)


def test_concordance_counts_pairs_whose_order_is_known() -> None:
    risk, time = (
        torch.randn(60, generator=GENERATOR),
        torch.randint(1, 9, (60,), generator=GENERATOR),
    )
    event = torch.rand(60, generator=GENERATOR) < 0.6
    risk[:10] = risk[10]  # ties
    right, pairs = 0.0, 0
    for i in range(60):
        for j in range(60):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    targets = torch.stack([time.float(), event.float()], 1)
    assert measured("c_index", risk[:, None], targets) == pytest.approx(right / pairs, rel=1e-12)
    with pytest.raises(SpecError, match=r"targets \(time, event\)"):
        measured("c_index", risk, time)


def evaluated(
    outputs: torch.Tensor, targets: torch.Tensor, loss: Any = None, **settings: Any
) -> Any:
    own = Settings(device="cpu", **settings)
    material = Material(nn.Identity(), loss=loss, settings=own)
    return material.evaluator(material.read((outputs, targets), "test set"))(nn.Identity())


def test_metrics_by_default_follow_the_targets() -> None:
    assert list(evaluated(LOGITS, LABELS)) == ["loss", "accuracy"]
    bce = F.binary_cross_entropy_with_logits
    own = evaluated(SCORES, BINARY, lambda outputs, targets: bce(outputs, targets.float()))
    assert list(own) == ["loss"]  # a function of one's own may as well be a squared error
    assert evaluated(SCORES, BINARY.float(), bce)["accuracy"] == RIGHT
    assert evaluated(SCORES, BINARY)["accuracy"] == RIGHT
    assert list(evaluated(SCORES, BINARY, F.mse_loss)) == ["loss"]
    found = evaluated(SCORES, BINARY.float(), bce, metrics=["accuracy", "auroc"])
    assert list(found) == ["loss", "accuracy", "auroc"]
    assert found["accuracy"] == RIGHT
    assert found["loss"] == pytest.approx(float(bce(SCORES, BINARY.float())), rel=1e-6)


def test_logits_between_0_and_1_are_logits_where_the_loss_says_so() -> None:
    logits, targets = torch.tensor([0.2, 0.3]), torch.tensor([1.0, 1.0])
    assert evaluated(logits, targets, nn.BCEWithLogitsLoss())["accuracy"] == 1
    assert evaluated(logits, targets, nn.BCELoss())["accuracy"] == 0


def test_names_metrics_and_functions_are_taken_and_each_evaluation_starts_afresh() -> None:
    def share_of_zero(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        assert len(outputs) == len(targets) == 101
        return float((outputs.argmax(1) == 0).double().mean())

    given = ["f1_macro", Accuracy, Accuracy(), share_of_zero]
    assert list(chosen(given)) == ["f1_macro", "accuracy", "share_of_zero"]
    test = Material(nn.Identity()).read((LOGITS, LABELS), "test set")
    evaluator = Evaluator(
        test, by_outputs(F.cross_entropy, lambda targets: targets), given, torch.device("cpu")
    )
    assert evaluator(nn.Identity()) == evaluator(nn.Identity())
    assert evaluator(nn.Identity())["share_of_zero"] == pytest.approx(
        float((LOGITS.argmax(1) == 0).double().mean())
    )
    with pytest.raises(SpecError, match=r"acuracy.*did you mean 'accuracy'"):
        chosen(["acuracy"])
    with pytest.raises(SpecError, match="`metrics` must be names, metrics or functions"):
        chosen([3])


def test_r2_of_equal_targets_is_undefined_and_says_why() -> None:
    same = torch.ones(5)
    assert not math.isfinite(measured("r2", SCORES[:5], same))
    assert not math.isfinite(measured("r2", SCORES[:1], same[:1]))
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="'r2' is undefined .*it needs targets that differ"):
        fedspan.fit(
            nn.Linear(3, 1), [(x, x[:, :1])], F.mse_loss, rounds=1, test=(x, torch.ones(20, 1)),
            method={"name": "fedavg", "lr": 0.1}, metrics=["r2"], progress=False,
        )  # fmt: skip


def test_the_order_and_size_of_batches_change_no_label_metric() -> None:
    """What is kept of two parts is that of the whole."""
    for name in ("accuracy", "f1_macro", "auroc"):
        whole = measured(name, LOGITS, LABELS, 101)
        assert {measured(name, LOGITS, LABELS, batch) for batch in (1, 17, 50)} == {whole}
        back = measured(name, LOGITS.flip(0), LABELS.flip(0), 17)
        assert back == pytest.approx(whole, rel=1e-12)


def test_targets_that_a_metric_cannot_use_are_named() -> None:
    with pytest.raises(SpecError, match="one output per target, got outputs of shape"):
        measured("mae", LOGITS, LABELS)
    with pytest.raises(SpecError, match="targets must be 0 or 1, got"):
        measured("accuracy", SCORES, LABELS + 1)
    with pytest.raises(
        SpecError, match=r"`perplexity` needs .* whole numbers as targets, got outputs of shape"
    ):
        measured("perplexity", LOGITS, LOGITS)


def test_fit_reports_the_metrics_asked_for() -> None:
    torch.manual_seed(0)
    data = torch.randn(40, 3)
    result = fedspan.fit(
        nn.Linear(3, 1), [(data, data[:, :1])], F.mse_loss, method=fedspan.methods.FedAvg(lr=0.1), rounds=2,
        test=(data, data[:, :1]), metrics=["mae", "r2"],
    )  # fmt: skip
    assert {"loss", "mae", "r2"} <= set(result.history[-1])


def test_large_scores_are_ranked_and_not_squashed() -> None:
    scores, there = torch.tensor([20.0, 30.0, 25.0, 40.0]), torch.tensor([0, 1, 0, 1])
    assert measured("auroc", scores, there) == 1
    wide = 30 * SCORES.double()
    assert measured("auroc", wide, BINARY) == pytest.approx(
        sk.roc_auc_score(BINARY, wide), rel=1e-12
    )
    # a common factor of two classes' scores changes no order
    two = torch.stack([-SCORES, SCORES], 1).double()
    assert measured("auroc", 1000 * two, BINARY) == pytest.approx(
        measured("auroc", two, BINARY), rel=1e-12
    )


def test_ranks_of_places_are_those_of_examples() -> None:
    """(n, classes, places) against (n, places), of which some do not count."""
    images, labels = (
        LOGITS[:100].reshape(20, 5, 4).movedim(2, 1),
        LABELS[:100].reshape(20, 5).clone(),
    )
    assert measured("auroc", images, labels) == pytest.approx(
        measured("auroc", LOGITS[:100], LABELS[:100]), rel=1e-12
    )
    labels[:, 0] = -100
    counted = torch.arange(100) % 5 > 0
    assert measured("auroc", images, labels) == pytest.approx(
        measured("auroc", LOGITS[:100][counted], LABELS[:100][counted]), rel=1e-12
    )


def test_a_target_of_nearly_one_is_a_yes() -> None:
    """Smoothed labels, as BCE takes them."""
    soft = BINARY * 0.8 + 0.1
    for name in ("accuracy", "f1_macro", "auroc"):
        assert measured(name, SCORES, soft) == measured(name, SCORES, BINARY)


def test_a_metric_that_is_undefined_is_told_with_the_reason() -> None:
    """AUROC of one class, of the test set and of a client."""
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    both, one = (x, (x[:, 0] > 0).long()), (x, torch.zeros(20).long())
    more: dict[str, Any] = {
        "method": {"name": "fedavg", "lr": 0.1},
        "metrics": ["auroc"],
        "progress": False,
    }
    with pytest.warns(
        UserWarning, match="'auroc' is undefined on the test data: it needs .* two classes"
    ) as seen:
        fedspan.fit(nn.Linear(3, 2), [both], rounds=3, test=one, **more)
    assert len(seen) == 1
    clients = {"north": both, "south": one}
    result = fedspan.fit(
        nn.Linear(3, 2), clients, rounds=2, test=both, eval_clients_every=1, **more
    )
    for call in (result.per_client.worst, result.per_client.spread):
        with pytest.warns(
            UserWarning, match="'auroc' is undefined for 'south': it needs .* two classes; left out"
        ):
            call("auroc")
    assert result.per_client.worst("loss")["client"] in clients
    alone = fedspan.fit(nn.Linear(3, 2), [one], rounds=1, test=both, eval_clients_every=1, **more)
    with pytest.raises(SpecError, match="'auroc' is undefined for every client: it needs"):
        alone.per_client.worst("auroc")


def test_a_metric_without_a_name_is_called_metric() -> None:
    data = (torch.zeros(8, 3), torch.zeros(8, dtype=torch.long))
    result = fedspan.fit(
        torch.nn.Linear(3, 2),
        [data],
        test=data,
        metrics=[lambda outputs, targets: 0.5],
        rounds=1,
        progress=False,
    )
    assert result.history[-1]["metric"] == 0.5
