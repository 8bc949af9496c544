"""Losses, targets and inputs as users have them: each kind of problem is found, or refused with what to pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedspan
from fedspan.core.errors import DataError, FedspanError, SpecError
from fedspan.methods import FedAvg

X = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
CLASS, YES, MANY, NUMBER = X[:, :4].argmax(1), X[:, 0] > 0, X[:, :4] > 0, X[:, 0].clone()


def net(outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def fit(
    model: nn.Module, targets: Any, loss: Any = None, inputs: Any = X, **settings: Any
) -> fedspan.Result:
    clients = [(inputs[i::3], targets[i::3]) for i in range(3)]
    settings = {
        "method": FedAvg(lr=0.3),
        "rounds": 5,
        "test": (inputs, targets),
        "progress": False,
    } | settings
    return fedspan.fit(model, clients, loss, **settings)


BCE, CE, MSE = nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss(), nn.MSELoss()


@pytest.mark.parametrize(
    ("outputs", "targets", "loss", "metrics"),
    [
        (4, CLASS, None, ["accuracy"]),
        (4, CLASS.int(), CE, ["accuracy"]),
        (4, CLASS.to(torch.uint8), F.cross_entropy, ["accuracy"]),
        (4, CLASS.unsqueeze(1), CE, ["accuracy"]),
        (4, CLASS.double(), CE, ["accuracy"]),
        (4, F.one_hot(CLASS, 4), CE, ["accuracy"]),
        (2, YES, None, ["accuracy"]),
        (1, YES, None, ["accuracy"]),
        (1, YES.float(), BCE, ["accuracy"]),
        (1, YES.long().unsqueeze(1), BCE, ["accuracy"]),
        (1, YES.numpy().astype(np.int16), BCE, ["accuracy"]),
        (4, MANY, None, ["f1_macro"]),
        (4, MANY.double(), BCE, ["f1_macro"]),
        (1, NUMBER.unsqueeze(1), MSE, []),
        (1, NUMBER.double(), nn.L1Loss(), []),
        (1, CLASS, MSE, []),
        (1, YES.long(), MSE, []),
    ],
)
def test_kinds(outputs: int, targets: Any, loss: Any, metrics: list[str]) -> None:
    result = fit(net(outputs), targets, loss)
    assert result.metrics == ["loss", *metrics]
    assert result.history[-1]["loss"] < 0.8 * result.history[0]["loss"]
    if metrics:
        assert result.history[-1][metrics[0]] > 0.7


def test_a_column_of_targets_and_a_row_of_them_are_the_same() -> None:
    """torch broadcasts (n, 1) − (n,) to n × n."""
    results = [fit(net(1), targets, MSE) for targets in (NUMBER, NUMBER.unsqueeze(1))]
    assert torch.equal(results[0].weights[0]["0.weight"], results[1].weights[0]["0.weight"])


def test_one_hot_targets_are_classes_for_metrics() -> None:
    one_hot, numbers = (
        fit(net(4), targets, CE).history[-1] for targets in (F.one_hot(CLASS, 4), CLASS)
    )
    assert one_hot["accuracy"] == pytest.approx(numbers["accuracy"])


@pytest.mark.parametrize(
    ("targets", "loss", "outputs", "message"),
    [
        (NUMBER, None, 1, r"client 0 has floating-point targets, which need a `loss`.*MSELoss\(\)"),
        (MANY.float(), None, 4, r"client 0 has floating-point targets.*BCEWithLogitsLoss\(\)"),
        (CLASS, None, 1, r"client 0 has the target [23].*one output per class"),
        (CLASS, BCE, 1, r"client 0 has the target [23], and `loss` BCEWithLogitsLoss needs 0 to 1"),
        (
            CLASS,
            CE,
            3,
            r"client 0 has a target of class 3, but the model has 3 outputs, for classes 0 to 2",
        ),
        (CLASS - 1, CE, 4, r"client 0 has a target of class -1"),
        (NUMBER, CE, 4, r"client 0 has targets that are not class numbers"),
        (
            NUMBER,
            CE,
            1,
            r"the model gives one output per example, and cross-entropy needs one per class",
        ),
        (
            CLASS,
            MSE,
            4,
            r"client 0 has targets of shape one per example.*shape \(4,\).*MSELoss compares",
        ),
        (CLASS, nn.CrossEntropyLoss, 4, r"write CrossEntropyLoss\(\)"),
        (CLASS, "mse", 4, r"`loss` must be a function of \(outputs, targets\), got 'mse'"),
        (CLASS, nn.CrossEntropyLoss(reduction="sum"), 4, r"reduction='sum'"),
        (
            np.array(list("abcd"))[CLASS.numpy()],
            None,
            4,
            r"client 0 has text where numbers are needed",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(
    targets: Any, loss: Any, outputs: int, message: str
) -> None:
    with pytest.raises(FedspanError, match=message):
        fit(net(outputs), targets, loss)


def test_labels_of_numbers_are_refused() -> None:
    with pytest.raises(
        SpecError, match="'accuracy' is for classes, and `loss` for numbers; use 'r2'"
    ):
        fit(net(1), YES.long(), MSE, metrics=["accuracy"])
    assert fit(net(1), YES.long(), MSE, metrics=["auroc", "r2"]).history[-1]["auroc"] > 0.9


def test_a_client_that_disagrees_is_named() -> None:
    good = [(X[:20], CLASS[:20]), (X[20:40], CLASS[20:40])]
    cases = {
        r"client 2 has inputs of shape \(7,\) per example that the model refuses": (
            X[40:, :7],
            CLASS[40:],
        ),
        r"client 2 has a target of class [6-9]": (X[40:], CLASS[40:] + 6),
        r"client 2 has inputs but no targets": (X[40:],),
        r"client 2 has 3 parts": (X[40:], CLASS[40:], CLASS[40:]),
        r"client 2 is one Tensor; give \(inputs, targets\)": X[40:],
        r"client 2 has parts of different lengths": (X[40:], CLASS),
    }
    for message, wrong in cases.items():
        with pytest.raises(DataError, match=message):
            fedspan.fit(net(4), [*good, wrong], method=FedAvg(lr=0.1), rounds=1)
    named = dict(
        zip(("Bern", "Graz", "Lyon"), [*good, DataLoader(TensorDataset(X, CLASS + 6))], strict=True)
    )
    with pytest.raises(DataError, match=r"client 'Lyon' has a target of class [6-9]"):
        fedspan.fit(net(4), named, method=FedAvg(lr=0.1), rounds=1)
    with pytest.raises(DataError, match=r"test set has inputs of shape \(3,\)"):
        fedspan.fit(net(4), good, method=FedAvg(lr=0.1), rounds=1, test=(X[:, :3], CLASS))


def test_inputs_become_the_models_numbers() -> None:
    expected = fit(net(4), CLASS).weights[0]["0.weight"]
    assert torch.equal(
        fit(net(4), CLASS, inputs=X.double().numpy()).weights[0]["0.weight"], expected
    )
    whole = (10 * X).round()
    same = [
        fit(net(4), CLASS, inputs=x).weights[0]["0.weight"]
        for x in (whole, whole.int(), whole.short().numpy())
    ]
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])


def test_bytes_of_images_are_not_scaled_in_silence() -> None:
    images = (X.abs() * 50).to(torch.uint8)
    with pytest.raises(DataError, match=r"client 0 has inputs of uint8.*x\.float\(\) / 255"):
        fit(net(4), CLASS, inputs=images)

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x.float() / 255)
            return out

    assert fit(Scales(), CLASS, inputs=images).status == "finished"


def test_token_ids_stay_whole_numbers() -> None:
    ids = torch.randint(0, 50, (60, 6), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 16), nn.Linear(16, 4))
    for kind in (torch.int64, torch.int32, torch.int16):
        assert fit(model, CLASS, inputs=ids.to(kind)).status == "finished"


def test_tables() -> None:
    pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pd.DataFrame(X.numpy(), columns=list("abcdefgh"))
    frame["y"] = CLASS.numpy()
    settings: Any = {"method": FedAvg(lr=0.3), "rounds": 2, "progress": False}
    expected = fedspan.fit(net(4), [(X[i::3], CLASS[i::3]) for i in range(3)], **settings)
    tables = {
        "frames": [frame.iloc[i::3] for i in range(3)],
        "pairs": [(frame[list("abcdefgh")].iloc[i::3], frame["y"].iloc[i::3]) for i in range(3)],
        "arrow": [pa.Table.from_pandas(frame.iloc[i::3], preserve_index=False) for i in range(3)],
    }
    for name, clients in tables.items():
        found = fedspan.fit(net(4), clients, **settings)
        assert torch.equal(found.weights[0]["0.weight"], expected.weights[0]["0.weight"]), name
    with pytest.raises(DataError, match=r"client 0 has the columns a, b.*none of them a target"):
        fedspan.fit(net(4), [frame.drop(columns="y")], **settings)


def test_hugging_face_data() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        datasets.Dataset.from_dict({"x": X[i::3].numpy(), "label": CLASS[i::3].numpy()})
        for i in range(3)
    ]
    names = dict(zip(("Bern", "Graz", "Lyon"), rows, strict=True))
    settings: Any = {"method": FedAvg(lr=0.3), "rounds": 2, "progress": False}
    expected = fedspan.fit(net(4), [(X[i::3], CLASS[i::3]) for i in range(3)], **settings)
    found = fedspan.fit(net(4), datasets.DatasetDict(names), **settings)
    assert torch.equal(found.weights[0]["0.weight"], expected.weights[0]["0.weight"])
    with pytest.raises(DataError, match="divide train among clients, and give `test`"):
        fedspan.fit(net(4), datasets.DatasetDict({"train": rows[0], "test": rows[1]}), **settings)
