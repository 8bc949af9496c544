"""Takes from Python what Windows does not have. Python imports this file first if its folder is on PYTHONPATH.

`os`, `fcntl` and `multiprocessing` lose their POSIX names, in this process and in those that it starts. `msvcrt` and
`ctypes.windll` get the few functions that fedspan calls. Files behave as on Windows: one that is open or mapped cannot
be deleted or replaced, a directory cannot be opened, a descriptor must be opened as binary, and text without an
encoding is an error. It is no Windows: paths, signals and the C library stay those of this system.
"""

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import re
import shutil
import subprocess  # noqa: F401 (takes msvcrt for a sign of Windows, so it comes before it)
import sys
import tempfile
import types
import warnings

GONE = (
    "pwrite", "pwritev", "pread", "preadv", "readv", "writev", "fchmod", "fchown", "chown", "O_NOFOLLOW", "O_DIRECTORY",
    "fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "getpgid", "killpg", "setsid",
    "sysconf", "sched_getaffinity", "statvfs", "posix_fadvise", "mkfifo",
)  # fmt: skip
flock, LOCK = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB

for name in GONE:
    if hasattr(os, name):
        delattr(os, name)
os.O_BINARY = os.O_NOCTTY  # does nothing to a file
os.environ.setdefault("USERNAME", "user")
shutil._use_fd_functions = False

multiprocessing.context._concrete_contexts = {"spawn": multiprocessing.get_context("spawn")}
multiprocessing.context._default_context._default_context = multiprocessing.get_context("spawn")
multiprocessing.get_all_start_methods = lambda: ["spawn"]


def locking(file: int, mode: int, size: int) -> None:
    try:
        flock(file, LOCK)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error


def memory(status: object) -> int:
    status._obj[1] = 4 << 30
    return 1


kernel32 = types.SimpleNamespace(GlobalMemoryStatusEx=memory, DeviceIoControl=lambda *_: 1)
ctypes.windll = types.SimpleNamespace(kernel32=kernel32)
sys.modules["fcntl"] = None
sys.modules["msvcrt"] = types.ModuleType("msvcrt")
sys.modules["msvcrt"].__dict__.update(LK_NBLCK=2, locking=locking, get_osfhandle=lambda file: file)


def held() -> set[str]:
    """The files that this process has open or mapped."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    with open("/proc/self/maps", "rb") as maps:
        found.update(line.split(None, 5)[5].strip().decode() for line in maps if line.count(b"/"))
    return found


def watch(event: str, arguments: tuple) -> None:
    if event not in ("os.remove", "os.rename", "open"):
        return
    frame = sys._getframe().f_back
    caller = "" if frame is None else frame.f_code.co_filename
    if caller == tempfile.__file__:  # has its own ways on POSIX
        return
    if event != "open":
        names = [
            os.path.realpath(os.fsdecode(one))
            for one in arguments[: 1 if event == "os.remove" else 2]
        ]
        for name in set(names) & held():
            raise PermissionError(
                13, "The process cannot access the file because it is being used", name
            )
    elif isinstance(arguments[0], str | bytes):
        name, mode, flags = arguments
        name = os.fsdecode(name)
        if os.path.isdir(name):
            raise PermissionError(13, "Permission denied", name)
        if re.search(r'[<>:"|?*\\]|[ .]$', os.path.basename(name)) and flags & (
            os.O_WRONLY | os.O_RDWR
        ):
            raise OSError(22, "Invalid argument", name)
        if mode is None and not flags & os.O_BINARY and "fedspan" in caller:
            raise AssertionError(f"{name} is opened as text")


if os.path.exists("/proc/self/maps"):
    sys.addaudithook(watch)
warnings.filterwarnings("ignore", category=EncodingWarning)  # of other libraries
warnings.filterwarnings("error", category=EncodingWarning, module=r"fedspan\b")
