"""No command imports what it does not use; what is imported is most of the time that a short command takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedspan.core import catalog, registry

SPEC = """
rounds = 2
batch_size = "full"
[method]
name = "ssf"
lr = 0.1
local_steps = 2
rank = 2
[task]
name = "regression"
dim = 6
clients = 4
samples = 8
"""
RUN = """
import contextlib, io, json, sys
from fedspan.cli.app import app
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        app(words, standalone_mode=False)
    assert shown.getvalue()
    print(" ".join(sorted(sys.modules)))
"""
TORCH = {"torch", "numpy", "fedspan.core.registry", "fedspan.engine"}
EXTRAS = {
    "pandas", "matplotlib", "torchmetrics", "transformers", "datasets", "peft", "flwr", "sklearn", "scipy", "wandb",
    "torch.utils.tensorboard", "torch._dynamo", "rich.markdown", "typer.rich_utils", "IPython",
}  # fmt: skip


def modules(words: str, folder: Path) -> list[set[str]]:
    """What is imported after each of several commands in one process."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, words], cwd=folder, capture_output=True, text=True, check=True
    )
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_commands_that_do_not_compute_do_not_load_torch(tmp_path: Path) -> None:
    plain, shown = modules(
        '[["--help"], ["run", "--help"], ["version"], ["init", "own"], ["list"]]', tmp_path
    )[-2:]
    assert not plain & (TORCH | EXTRAS | {"rich"})
    assert not shown & (TORCH | EXTRAS)


def test_commands_that_compute_load_no_extra_that_is_not_needed(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(SPEC, "utf-8")
    words = '[["plan", "spec.toml"], ["partition", "spec.toml"], ["diagnose", "spec.toml"], ["run", "spec.toml"]]'
    last = modules(words, tmp_path)[-1]
    assert "torch" in last
    assert not last & EXTRAS
    assert not any(name.startswith("fedspan.study") for name in last)


@pytest.mark.parametrize("kind", registry.KINDS)
def test_the_catalog_is_what_is_registered(kind: str) -> None:
    own = {
        n: c
        for n, c in registry.choices(kind).items()
        if c.__module__.startswith(f"{catalog.FOLDERS[kind]}.")
    }
    assert catalog.summaries(kind) == {name: registry.summary(cls) for name, cls in own.items()}
