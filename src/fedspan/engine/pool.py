"""A pool of processes that share the work of a cohort.

Forked children have the model and the data without a copy; where there is no fork they are sent both once. Tasks and
results go through pipes between this process and its own children.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import torch

from fedspan.core.errors import FedspanError, one_line
from fedspan.core.processes import FORKS, Shared, without_script

Work = Callable[..., Any]


class Pool:
    """Processes that compute `work(*task)`.

    Raises:
        NotSentError: There is no fork, and `work` cannot be sent to other processes.
    """

    def __init__(self, work: Work, processes: int) -> None:
        context: Any = multiprocessing.get_context("fork" if FORKS else "spawn")
        shared = Shared(work)
        self._ends: list[Any] = []
        self._children: list[Any] = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            others = [*self._ends, ours] if FORKS else []
            child = context.Process(target=_serve, args=(shared, theirs, others), daemon=True)
            with without_script():
                child.start()
            theirs.close()
            self._ends.append(ours)
            self._children.append(child)

    def __len__(self) -> int:
        return len(self._children)

    def map(self, tasks: list[tuple[Any, ...]]) -> list[Any]:
        """The results of at most as many tasks as there are processes, in order."""
        busy = self._ends[: len(tasks)]
        try:
            for end, task in zip(busy, tasks, strict=True):
                end.send_bytes(_pickle(task))
            results = [_unpickle(end.recv_bytes()) for end in busy]
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.close()
            raise FedspanError(
                "a worker process of the simulation ended; run again with simulate = 'loop'"
            ) from None
        for result in results:
            if isinstance(result, BaseException):
                self.close()
                raise result
        return results

    def close(self) -> None:
        """Stop the processes."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.close()
        for child in self._children:
            child.join(timeout=1)
            if child.is_alive():
                child.kill()
                child.join()
        self._ends, self._children = [], []


def _serve(work: Shared[Work], end: Any, others: list[Any]) -> None:
    """Work on tasks until the other end closes. Only the parent handles Ctrl-C and SIGTERM."""
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            task = _unpickle(end.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            with torch.inference_mode():
                answer = _pickle(work.value(*task))
        except BaseException as error:
            try:
                answer = _pickle(error)
                _unpickle(answer)
            except Exception:  # another process could not make it again
                told = f"{one_line(error)}; simulate = 'loop' shows where it arose"
                answer = _pickle(FedspanError(f"a worker process of the simulation failed: {told}"))
        try:
            end.send_bytes(answer)
        except OSError:
            os._exit(0)


def _pickle(value: Any) -> memoryview:
    """Packs a value, with tensors as NumPy arrays, which takes a single copy."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, 5)
    as_array = {torch.Tensor: lambda v: (torch.from_numpy, (v.detach().numpy(),))}
    pickler.dispatch_table = copyreg.dispatch_table | as_array  # type: ignore[operator]
    pickler.dump(value)
    return out.getbuffer()


def _unpickle(data: bytes | memoryview) -> Any:
    return pickle.loads(data)  # noqa: S301 (from our own parent or child, through a pipe)
