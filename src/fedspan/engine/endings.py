"""How a run ends early: by a signal, or by a mistake that shows before its first round."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedspan.core.errors import ResumableError, Terminated
from fedspan.core.files import remove
from fedspan.core.signals import sigterm_again
from fedspan.core.spec import Spec
from fedspan.engine import history
from fedspan.engine.loop import Loop
from fedspan.engine.outcome import AUDIT, BEST, CHECKPOINT, SPEC, seed_dirs
from fedspan.engine.simulator import Simulator


@contextmanager
def removed_on_failure(loop: Loop, spec: Spec) -> Iterator[None]:
    """Removes what a run has written that fails before its first round is done, so that a corrected call can begin."""
    before = _written(loop, spec)
    try:
        yield
    except ResumableError:
        raise
    except Exception:
        if loop.t == 0:
            if isinstance(loop.transport, Simulator):
                loop.transport.close()  # an open file could not be deleted on every system
            for path in sorted(
                _written(loop, spec) - before, reverse=True
            ):  # a folder after what is in it
                with suppress(OSError, ResumableError):
                    path.rmdir() if path.is_dir() else remove(path)
        raise


def _written(loop: Loop, spec: Spec) -> set[Path]:
    """The files and folders that the first evaluation of a run may have left."""
    out, paths = loop.run_dir, []
    if out is not None:
        paths += [out / name for name in (CHECKPOINT, SPEC, BEST)]
        for folder in seed_dirs(out, loop.seeds):
            paths += [folder / history.NAME, folder / AUDIT, *([folder] if folder != out else [])]
    if spec.engine.states_dir is not None:
        states = Path(spec.engine.states_dir)
        paths += [
            states,
            *(path for one in states.glob("*.states") for path in states.glob(f"{one.stem}.*")),
        ]
    return {path for path in paths if path.exists()}


@contextmanager
def stop_signals(loop: Loop) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end the run after the current round, a second one at once; gives the signals received."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGTERM] in (None, signal.SIG_IGN):
        del before[signal.SIGTERM]

    def ask(number: int, _frame: object) -> None:
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])
        elif sigterm_again():
            return
        elif number in received:
            raise Terminated("stopped by SIGTERM")
        loop.stop = True
        received.append(number)

    for number in before:
        signal.signal(number, ask)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
