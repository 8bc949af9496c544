"""Clients whose inputs are a dictionary or a tuple of tensors: training, evaluation, metrics, predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fedspan
from fedspan.core.errors import DataError
from fedspan.methods import SSF

DRAW = torch.Generator().manual_seed(0)
SIZES = (20, 24, 16)
RAW = [
    (torch.rand(n, 3, 4, generator=DRAW), *torch.randint(0, 10, (2, n), generator=DRAW))
    for n in SIZES
]
RAW = [(a, b % 5, y % 2) for a, b, y in RAW]


class Both(nn.Module):
    """An image, and the number of a ward for an embedding."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.ward_of = nn.Embedding(5, 8)
        self.first, self.head = nn.Linear(20, width), nn.Linear(width, 2)

    def forward(self, image: Tensor, ward: Tensor) -> Tensor:
        out: Tensor = self.head(
            torch.relu(self.first(torch.cat([image.flatten(1), self.ward_of(ward)], 1)))
        )
        return out


class OneArgument(Both):
    """The same model, which takes all inputs as one argument."""

    def forward(self, inputs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(*(inputs.values() if isinstance(inputs, dict) else inputs))


def network(cls: type[Both] = Both) -> Both:
    torch.manual_seed(0)
    return cls()


class Rows(Dataset[Any]):
    def __init__(self, inputs: Any, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> Any:
        if isinstance(self.inputs, dict):
            return {name: one[i] for name, one in self.inputs.items()}, self.targets[i]
        return tuple(one[i] for one in self.inputs), self.targets[i]


FORMS = {
    "dictionary": lambda a, b, y: ({"image": a, "ward": b}, y),
    "another order": lambda a, b, y: ({"ward": b, "image": a}, y),
    "tuple": lambda a, b, y: ((a, b), y),
    "arrays": lambda a, b, y: ((a.double().numpy(), b.numpy()), y.numpy()),
    "dataset of dictionaries": lambda a, b, y: Rows({"image": a, "ward": b}, y),
    "dataset of tuples": lambda a, b, y: Rows((a, b), y),
    "rows": lambda a, b, y: [((a[i], b[i]), y[i]) for i in range(len(y))],
}


def fit(clients: Any, model: nn.Module | None = None, **more: Any) -> Any:
    given: dict[str, Any] = {
        "method": SSF(lr=0.3, local_steps=3), "rounds": 3, "batch_size": 8, "test": clients[0], "metrics": ["auroc"],
        "eval_clients_every": 3, "progress": False,
    }  # fmt: skip
    return fedspan.fit(model or network(), clients, **given | more)


@pytest.fixture(scope="module")
def expected() -> Any:
    """One input that holds both, split by the model: what has worked all along."""

    class Joined(Both):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x[:, :12], x[:, 12].long())

    clients = [(torch.cat([a.flatten(1), b[:, None].float()], 1), y) for a, b, y in RAW]
    return fit(clients, network(Joined))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_the_same_model(form: str, expected: Any) -> None:
    result = fit([FORMS[form](*raw) for raw in RAW])
    for name, value in expected.weights[0].items():
        torch.testing.assert_close(result.weights[0][name], value)
    for column in ("loss", "auroc"):
        assert result.history[-1][column] == pytest.approx(expected.history[-1][column], rel=1e-5)
    assert len(result.per_client) == len(expected.per_client) > 0


@pytest.mark.parametrize("form", ["dictionary", "tuple"])
def test_a_loader_of_several_inputs(form: str) -> None:
    rows = [Rows(*FORMS[form](*raw)) for raw in RAW]
    result = fit([DataLoader(one, batch_size=8, shuffle=True) for one in rows], batch_size=None)
    assert np.isfinite(result.history[-1]["auroc"])


@pytest.mark.parametrize("form", ["dictionary", "tuple"])
def test_a_model_that_takes_them_as_one_argument(form: str, expected: Any) -> None:
    result = fit([FORMS[form](*raw) for raw in RAW], network(OneArgument))
    assert result.history[-1]["loss"] == pytest.approx(expected.history[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize("form", ["dictionary", "tuple"])
def test_metrics_beside_an_objective(form: str, expected: Any) -> None:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        inputs, y = batch
        inputs = inputs.values() if isinstance(inputs, dict) else inputs
        return F.cross_entropy(model(*inputs), y)

    result = fit([FORMS[form](*raw) for raw in RAW], objective=objective)
    for column in ("loss", "auroc"):
        assert result.history[-1][column] == pytest.approx(expected.history[-1][column], rel=1e-5)


@pytest.mark.parametrize("form", ["dictionary", "tuple"])
def test_predictions_of_several_inputs(form: str, tmp_path: Path) -> None:
    result = fit([FORMS[form](*raw) for raw in RAW], run_dir=tmp_path / "run")
    inputs, _ = FORMS[form](*RAW[0])
    with torch.no_grad():
        wanted = result.model(*RAW[0][:2]).softmax(1).numpy()
    for one in (result, fedspan.load(tmp_path / "run", model=network())):
        np.testing.assert_allclose(one.predict_proba(inputs), wanted, rtol=1e-5)
        assert (one.predict(inputs) == wanted.argmax(1)).all()
    wrong = {"image": RAW[0][0]} if form == "dictionary" else (RAW[0][0],)
    with pytest.raises(
        DataError, match=r"the model takes a (dictionary of image, ward|tuple of 2)"
    ):
        result.predict(wrong)


def test_parts_of_their_own_and_resume(tmp_path: Path) -> None:
    clients = [
        {"train": ({"image": a[:12], "ward": b[:12]}, y[:12]), "test": ({"image": a[12:], "ward": b[12:]}, y[12:])}
        for a, b, y in RAW
    ]  # fmt: skip
    how: dict[str, Any] = {"test": None, "run_dir": tmp_path / "run"}
    fit(clients, rounds=3, **how)
    found = fit(clients, rounds=6, resume=True, **how)
    whole = fit(clients, rounds=6, test=None)
    assert all(
        torch.equal(value, whole.weights[0][name]) for name, value in found.weights[0].items()
    )


@pytest.mark.parametrize("level", ["client", "example"])
def test_with_privacy(level: Any) -> None:
    privacy = fedspan.Privacy(level=level, clip=1.0, noise=0.5)
    clients = [FORMS["dictionary"](*raw) for raw in RAW]
    with pytest.warns():  # of so much noise
        result = fit(
            clients,
            privacy=privacy,
            participation={"weights": "uniform"},
            eval_clients_every=None,
            metrics=(),
        )
    assert np.isfinite(result.history[-1]["loss"])


YES = torch.arange(4) % 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (({"image": torch.rand(4, 3, 4), "ward": torch.arange(3)}, YES), "different lengths"),
        (({"image": torch.full((4, 3, 4), torch.nan), "ward": torch.arange(4)}, YES), "not finite: 'image'"),
        (({"image": torch.rand(4, 3, 5), "ward": torch.arange(4)}, YES), "client 0 has inputs of shape"),
        (({"image": ["a"] * 4, "ward": torch.arange(4)}, YES), "client 0: 'image' has text"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_used_are_named(data: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        fit([data])
