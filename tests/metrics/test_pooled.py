"""Metrics of several clients' examples, from sums of what each client says of its own."""

from __future__ import annotations

import pytest
import torch

from fedspan.metrics._own import chosen


def parts(kind: str):
    torch.manual_seed(1)
    n = 900
    if kind == "numbers":
        y = torch.randn(n, 2)
        out = y + torch.randn(n, 2)
    elif kind == "binary":
        y = (torch.rand(n) < 0.3).float()
        out = 1.5 * y + torch.randn(n)
    elif kind == "tokens":
        y, out = torch.randint(0, 5, (n, 7)), torch.randn(n, 5, 7)
        y[::3, 2] = -100
    else:
        y = torch.randint(0, 4, (n,))
        out = torch.randn(n, 4) + torch.nn.functional.one_hot(y, 4)
    return [(out[a:b], y[a:b]) for a, b in ((0, 100), (100, 500), (500, n))]


CASES = [
    ("accuracy", "classes"), ("accuracy", "binary"), ("f1_macro", "classes"), ("f1_macro", "binary"),
    ("mse", "numbers"), ("mae", "numbers"), ("r2", "numbers"), ("perplexity", "tokens"),
    ("token_accuracy", "tokens"), ("auroc", "binary"), ("auroc", "classes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_sum_of_clients_summaries_gives_the_metric_of_all_examples(name, kind):
    given = parts(kind)
    (whole,) = chosen([name]).values()
    found = []
    for outputs, targets in given:
        (one,) = chosen([name]).values()
        for half in (slice(0, 40), slice(40, None)):
            one.update(outputs[half], targets[half])
        found.append(one.summary())
        whole.update(outputs, targets)
    length = max(map(len, found))
    total = sum(torch.nn.functional.pad(one, (0, length - len(one))) for one in found)
    close = {"auroc": 1e-3, "perplexity": 1e-6}.get(name, 1e-12)
    assert type(whole).pooled(total) == pytest.approx(whole.compute(), abs=close)
    alone = [type(whole).pooled(one) for one in found]
    assert max(alone) - min(alone) > 1e-3  # clients differ, and are not the pooled value


def test_scores_that_are_not_finite_have_no_rank():
    outputs, targets = parts("binary")[0]
    outputs[3] = float("nan")
    (one,) = chosen(["auroc"]).values()
    one.update(outputs, targets)
    assert one.compute() != one.compute()
    assert type(one).pooled(one.summary()) != type(one).pooled(one.summary())


def test_what_needs_the_examples_has_no_summary():
    def own(outputs, targets):
        return 1.0

    for one in chosen(["c_index", own]).values():
        assert getattr(one, "summary", lambda: None)() is None
