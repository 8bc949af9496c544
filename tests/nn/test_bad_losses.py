"""Losses of one's own that would be silently wrong, or that would fail far from the call."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import fedspan
from fedspan.core.errors import FedspanError
from fedspan.tasks._module import model_from
from fedspan.tasks.custom import Custom

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        return self.inner(x).squeeze(1)


def trained(model, targets, loss, **more):
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    fedspan.fit(model, [(X, targets)] * 2, loss=loss, rounds=3, progress=False, **more)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, t: ((o - t) ** 2).mean(),
        lambda o, t: F.mse_loss(o, t),
        lambda o, t: ((o.reshape(-1) - t.reshape(-1)) ** 2).mean(),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_of_ones_own_does_not_broadcast(loss):
    torch.testing.assert_close(
        trained(nn.Linear(4, 1), X[:, 0], loss), trained(nn.Linear(4, 1), X[:, 0], nn.MSELoss())
    )
    torch.testing.assert_close(
        trained(Flat(), X[:, :1], loss), trained(Flat(), X[:, :1], nn.MSELoss())
    )


def test_a_loss_that_squeezes_outputs_itself_keeps_its_targets():
    own = trained(nn.Linear(4, 1), X[:, 0], lambda o, t: ((o.squeeze(1) - t) ** 2).mean())
    torch.testing.assert_close(own, trained(nn.Linear(4, 1), X[:, 0], nn.MSELoss()))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, t: (o[:, 0] - t) ** 2, "shape"),
        (lambda o, t: None, "None"),
        (lambda o, t: 1.0, "float"),
        (lambda o, t: (o.mean(), 1), "tuple"),
        (lambda o, t: o.mean().to(torch.complex64), "complex"),
        (lambda o, t: o.mean().detach(), "gradient"),
        (lambda o: o.mean(), "function of"),
        (lambda o, t: F.mse_loss(o[:, 0], t, reduction="sum"), "is a sum"),
        (5, "function of"),
    ],
)
def test_a_loss_that_is_none_is_refused_in_one_line(loss, words):
    with pytest.raises(FedspanError, match=words) as caught:
        trained(nn.Linear(4, 1), X[:, 0], loss)
    assert "\n" not in str(caught.value)


def test_columns_are_matched_by_name():
    pd = pytest.importorskip("pandas")
    frame, target = pd.DataFrame(X.numpy(), columns=list("abcd")), X[:, 0]

    def weights(second, **more):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        result = fedspan.fit(
            model, [(frame, target), second], loss=nn.MSELoss(), rounds=2, progress=False, **more
        )
        return model.weight.detach(), result

    same, other = (
        weights((frame, target)),
        weights((frame[list("dcba")], target), test=(frame[list("dcba")], target)),
    )
    torch.testing.assert_close(same[0], other[0])
    with pytest.raises(FedspanError, match="client 1 has the columns a, b, c, z"):
        weights((frame.rename(columns={"d": "z"}), target))
    with pytest.raises(FedspanError, match="test set has the columns"):
        weights((frame, target), test=(frame.rename(columns={"d": "z"}), target))
    with pytest.raises(FedspanError, match="client 1 has the columns"):
        weights(frame.assign(target=target.numpy()))


class Returns(nn.Linear):
    def __init__(self, make, outputs=2):
        super().__init__(4, outputs)
        self.make = make

    def forward(self, x):
        return self.make(super().forward(x))


def named(name):
    def metric(outputs, targets):
        return 1.0

    metric.__name__ = name
    return metric


LABELS = torch.arange(12) % 2


def refused(words, model=None, labels=LABELS, **more):
    with pytest.raises(FedspanError, match=words) as caught:
        fedspan.fit(model or nn.Linear(4, 2), [(X, labels)] * 2, rounds=1, progress=False, **more)
    assert "\n" not in str(caught.value)


def test_models_that_cannot_be_trained():
    refused("returns a tuple", Returns(lambda o: (o, o)))
    refused("returns None", Returns(lambda o: None))
    refused("no shape yet", nn.LazyLinear(2))
    refused("no parameters", nn.Flatten())


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        self.lock = threading.Lock()


def test_models_without_a_gradient_without_weights_or_without_a_copy():
    refused("outputs of the model have no gradient", Returns(lambda o: o.detach()))
    refused(
        "outputs of the model have no gradient",
        Returns(lambda o: o.detach()),
        loss=nn.CrossEntropyLoss(),
    )
    refused("on the device 'meta', which holds none", nn.Linear(4, 2, device="meta"))
    refused("`model` cannot be copied.*cannot pickle '_thread.lock'", Locked())


@pytest.mark.parametrize(
    "last", [nn.Sigmoid(), lambda o: 1 / (1 + torch.exp(-o)), lambda o: o.clamp(0, 1)]
)
@pytest.mark.parametrize("loss", [None, nn.BCEWithLogitsLoss()])
def test_outputs_between_0_and_1_under_a_loss_of_logits(last, loss):
    def fit(make):
        model = Returns(make, 1)
        nn.init.constant_(model.weight, 0.01)
        nn.init.constant_(model.bias, 0.5)
        labels = LABELS if loss is None else LABELS.float()
        fedspan.fit(model, [(X, labels)] * 2, loss=loss, rounds=1, progress=False)

    with pytest.warns(
        UserWarning,
        match="takes logits and applies a sigmoid itself; remove Sigmoid from the model",
    ):
        fit(last)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(lambda o: o)  # near 0.5 by chance


@pytest.mark.parametrize("scale", [1e-3, 10.0])  # outputs that begin between 0 and 1, and others
@pytest.mark.parametrize("loss", [nn.BCELoss(), F.binary_cross_entropy])
def test_outputs_that_are_no_probabilities(loss, scale):
    model = nn.Linear(4, 1)
    nn.init.constant_(model.weight, scale)
    nn.init.constant_(model.bias, 0.5)
    clients, more = [(X, (X[:, 0] > 0).long())] * 2, {"rounds": 1, "progress": False}
    with pytest.raises(
        FedspanError,
        match=r"takes probabilities; give loss=BCEWithLogitsLoss\(\), or end .* Sigmoid$",
    ):
        fedspan.fit(model, clients, loss=loss, **more)
    assert fedspan.fit(nn.Sequential(model, nn.Sigmoid()), clients, loss=loss, **more).finished


def test_a_softmax_before_cross_entropy():
    with pytest.warns(UserWarning, match="applies a softmax itself; remove Softmax"):
        fedspan.fit(Returns(nn.Softmax(1)), [(X, LABELS)] * 2, rounds=1, progress=False)


@pytest.mark.parametrize(
    ("augment", "words"),
    [
        (lambda batch, draw: None, r"must return a batch such as it gets, .* got None"),
        (lambda batch, draw: batch[0], r"of shapes \(\(12, 4\), \(12,\)\), got \(12, 4\)"),
        (lambda batch, draw: (batch[0],), r"got \(\(12, 4\),\)"),
        (lambda batch, draw: (batch[0][:2], batch[1]), r"got \(\(2, 4\), \(12,\)\)"),
        (lambda batch, draw: 1 / 0, "fails: ZeroDivisionError"),
        (lambda batch: batch, "a function of .batch, generator., fails"),
        ("flip", "is for images"),
        ("crop", "is for images"),
        ("turn", "`augment` must be one of"),
    ],
)
@pytest.mark.parametrize("simulate", ["loop", "batched"])
def test_an_augmentation_that_gives_no_batch(augment, words, simulate):
    more = {
        "training": fedspan.Training(augment=augment),
        "engine": fedspan.Engine(simulate=simulate),
    }
    refused(words, method={"name": "fedavg", "lr": 0.1}, **more)


class TwoWordsError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def test_an_error_that_no_other_process_can_make_again():
    def fails(outputs):
        if outputs.requires_grad and len(outputs) == 4:
            raise TwoWordsError("no", "way")
        return outputs

    more = {"batch_size": 4, "method": {"name": "fedavg", "lr": 0.1}}
    refused(
        "worker process.*TwoWordsError: no way",
        Returns(fails),
        engine=fedspan.Engine(simulate="pool"),
        **more,
    )
    with pytest.raises(TwoWordsError):
        fedspan.fit(Returns(fails), [(X, LABELS)] * 2, rounds=1, progress=False, **more)


class Short(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return X[i], LABELS[:7][i]


class Ragged(Short):
    def __getitem__(self, i):
        return X[i, : 4 - i // 2 % 2], LABELS[i]


def test_a_dataset_whose_examples_cannot_be_read():
    for data in (Short(), torch.utils.data.DataLoader(Short(), batch_size=4, shuffle=True)):
        with pytest.raises(FedspanError, match=r"client 0: example \d+ cannot be read: IndexError"):
            fedspan.fit(nn.Linear(4, 2), [data] * 2, rounds=3, progress=False)
    with pytest.raises(
        FedspanError, match="client 0: examples cannot be joined to a batch: RuntimeError"
    ):
        fedspan.fit(nn.Linear(4, 2), [Ragged()] * 2, rounds=3, progress=False)


@pytest.mark.parametrize(
    "name", ["up_bytes", "round", "seconds", "loss", "down_bytes", "diverged", "events"]
)
def test_a_metric_does_not_take_the_name_of_a_column(name):
    refused("column of every run", metrics=[named(name)], test=(X, LABELS))


def test_metrics_that_are_none():
    refused("there twice", metrics=[lambda o, t: 1.0, lambda o, t: 2.0], test=(X, LABELS))
    for make in (lambda o, t: o, lambda o, t: None, lambda o, t: "a", lambda o, t: {"a": 1}):
        refused("must return one number", metrics=[make], test=(X, LABELS))
    refused("function of", metrics=[lambda o: 1.0], test=(X, LABELS))
    refused("must be a list", metrics=None, test=(X, LABELS))
    refused("must be a list", metrics=1, test=(X, LABELS))


def test_objectives_that_are_none():
    refused("function of .model, batch., got 5", objective=5)
    refused("got None", objective=lambda model, batch: None)
    refused("gradient", objective=lambda model, batch: model(batch[0]).mean().detach())


def test_a_negative_label_without_a_loss():
    refused("class -100", labels=torch.where(LABELS == 1, -100, 0))


GOOD = "import torch\nfrom torch import nn\ndef model(): return nn.Linear(4, 2)\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "def model(): return None\ndef data(client): pass\n",
            r"model\(\) must return a torch.nn.Module, got NoneType",
        ),
        ("def model(:\n", "fails in line 1 of nets.py: SyntaxError"),
        ("import sys\nsys.exit(1)\n", "it ends Python"),
        (GOOD + "def data(): pass\n", r"data\(\) must take one argument"),
        (
            GOOD + "def data(client):\n  return 1 / 0\n",
            r"data\(\) fails in line 5 of nets.py: ZeroDivisionError",
        ),
        (
            GOOD.replace("2)", "2, device='meta')") + "def data(client): pass\n",
            "a model with weights",
        ),
    ],
)
def test_errors_of_a_task_module_name_it(tmp_path, text, words):
    (tmp_path / "nets.py").write_text(text)
    task = Custom(module="nets.py", clients=2, module_dir=str(tmp_path))
    with pytest.raises(FedspanError, match=words) as caught:
        task.material(0, torch.float32).clients[0]
    assert "nets.py" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_that_makes_a_model_is_called_without_arguments(tmp_path):
    (tmp_path / "nets_of_test.py").write_text("def fn(width): pass\nother = 5\n")
    with pytest.raises(FedspanError, match=r"fn\(\) must take no argument"):
        model_from("nets_of_test:fn", str(tmp_path), 0)
    with pytest.raises(FedspanError, match="a int, not a function"):
        model_from("nets_of_test:other", str(tmp_path), 0)
