"""The files of fedspan that a round of SSF passes through, as docs/architecture.md lists them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bench
import torch

import fedspan
from fedspan.core.callback import Callback
from fedspan.methods import SSF

ROOT = Path(fedspan.__file__).parent


class Trace(Callback):
    """Notes the files whose functions are called between round `first` and the next one."""

    def __init__(self, first: int = 5) -> None:
        self.first, self.files = first, dict[str, int]()

    def on_round_end(self, run: Any) -> None:
        if run.t == self.first:
            sys.setprofile(self._note)
        elif run.t == self.first + 1:
            sys.setprofile(None)

    def _note(self, frame: Any, event: str, _argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if (
            event == "call"
            and ROOT in path.parents
            and not frame.f_code.co_filename.endswith("namespace.py")
        ):
            name = str(path.relative_to(ROOT))
            self.files[name] = self.files.get(name, 0) + 1


def of_run() -> dict[str, int]:
    """A round of `run` on the toy problem."""
    trace = Trace()
    method = {"name": "ssf", "lr": 0.01, "local_steps": 5, "rank": 20}
    table = {
        "rounds": 8,
        "eval_every": 100,
        "clients_per_round": 10,
        "batch_size": 20,
        "method": method,
    }
    fedspan.run(table | {"task": {"name": "regression"}}, callbacks=[trace], progress=False)
    return trace.files


def of_fit() -> dict[str, int]:
    """A round of `fit` on a small network."""
    trace = Trace()
    data = [(torch.randn(64, 16), torch.randint(0, 4, (64,))) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    fedspan.fit(
        model,
        data,
        method=SSF(rank=0.2, lr=0.1),
        rounds=8,
        eval_every=100,
        callbacks=[trace],
        progress=False,
    )
    return trace.files


def main() -> None:
    """Print both walks."""
    bench.arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    for name, files in (("run", of_run()), ("fit", of_fit())):
        print(f"{name}: {len(files)} files, {sum(files.values())} calls")
        for file, calls in files.items():
            print(f"  {file:28} {calls}")


if __name__ == "__main__":
    bench.start(main)
