"""A pool of forked processes, each with the whole problem, that share a cohort's work.

The children come from `fork`, so the model and the data are theirs without a copy, whatever they are. Work and answers
go through pipes between this process and its own children.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import torch

from fedspan.core.errors import FedspanError

Work = Callable[..., Any]


class Pool:
    """Processes that answer `work(*task)`."""

    def __init__(self, work: Work, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._ends: list[Any] = []
        self._children: list[Any] = []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(work, theirs, [*self._ends, ours]), daemon=True)
            child.start()
            theirs.close()
            self._ends.append(ours)
            self._children.append(child)

    def __len__(self) -> int:
        return len(self._children)

    def map(self, tasks: list[tuple[Any, ...]]) -> list[Any]:
        """The answers to at most as many tasks as there are processes, in order."""
        busy = self._ends[: len(tasks)]
        try:
            for end, task in zip(busy, tasks, strict=True):
                end.send_bytes(_packed(task))
            answers = [_unpacked(end.recv_bytes()) for end in busy]
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.close()
            raise FedspanError("a worker process of the simulation ended; run again with simulate = 'loop'") from None
        for answer in answers:
            if isinstance(answer, BaseException):
                self.close()
                raise answer
        return answers

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.close()
        for child in self._children:
            child.join(timeout=1)
            if child.is_alive():
                child.kill()
                child.join()
        self._ends, self._children = [], []


def _serve(work: Work, end: Any, others: list[Any]) -> None:
    """Answer tasks until the other end closes; Ctrl-C is for the parent alone."""
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    while True:
        try:
            task = _unpacked(end.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        try:
            with torch.inference_mode():
                answer = work(*task)
        except BaseException as error:
            answer = error
        try:
            end.send_bytes(_packed(answer))
        except OSError:
            os._exit(0)


class _Pickler(pickle.Pickler):
    """Tensors go as plain arrays, which is one copy."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return torch.from_numpy, (obj.detach().numpy(),)
        return NotImplemented


def _packed(value: Any) -> memoryview:
    out = io.BytesIO()
    _Pickler(out, 5).dump(value)
    return out.getbuffer()


def _unpacked(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301 (from our own child or parent, through a pipe)
