"""SIGTERM, which `kill`, `timeout` and schedulers send: what is running is saved, then the process ends by the signal.

A run handles the signal between two rounds (`engine.run_dir`). Everywhere else `Terminated` is raised at once. It
passes through every `with` and `finally`, and the outermost `ending_by_sigterm` ends the process.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fedspan.core.errors import Terminated

ONE_SECOND = 1.0  # within which a second signal is the same one: `timeout` sends it to the process and to its group
_came = -ONE_SECOND  # when the last one did


def sigterm_again() -> bool:
    """Note that SIGTERM came; whether it is an echo of the one before."""
    global _came
    before, _came = _came, time.monotonic()
    return _came - before < ONE_SECOND


def _terminate(_number: int, _frame: object) -> None:
    if not sigterm_again():
        raise Terminated("stopped by SIGTERM")


@contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """End the process as SIGTERM does where `Terminated` leaves this context.

    The user's own handler is called, if any. `Terminated` is raised where that handler returns, and in a notebook,
    whose kernel goes on. Inside another such context, in other threads than the main one and where the signal is
    ignored this does nothing.
    """
    here = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if here else None
    if before in (None, signal.SIG_IGN, _terminate):
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except Terminated as error:
        signal.signal(signal.SIGTERM, before)
        if callable(before):
            before(signal.SIGTERM, None)
        elif not _in_notebook():
            traceback.clear_frames(error.__traceback__)  # releases what these hold: semaphores
            gc.collect()
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
