"""The app: finds the commands in this folder, runs one, and turns errors into one line and an exit code.

0  finished        1  the run diverged        2  a mistake of the user        130  interrupted by Ctrl-C

SIGTERM ends the process as it ends any other, with 143 in a shell, once what is running is saved.
"""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import sys
import warnings
from types import ModuleType

import click
import typer
import typer.core

import fedspan
from fedspan import cli
from fedspan.core.errors import FedspanError, one_line, shown
from fedspan.core.signals import ending_by_sigterm
from fedspan.core.terminal import broken

MISTAKE, INTERRUPTED = 2, 130
ARGUMENTS = ("run_dir", "resume", "seeds")  # of Python functions that are flags of commands
WITH_OUT = ("compare", "reproduce")  # commands that call the run directory --out
typer.core.HAS_RICH = False  # plain help texts are quick, and read well in a pipe


def commands() -> dict[str, ModuleType]:
    """Name → module of every command."""
    names = sorted(found.name for found in pkgutil.iter_modules(cli.__path__))
    shown = [name for name in names if name[0] != "_" and name != "app"]
    return {
        name.replace("_", "-"): importlib.import_module(f"fedspan.cli.{name}") for name in shown
    }


def build() -> typer.Typer:
    """The app with all commands."""
    found = typer.Typer(
        add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, suggest_commands=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
        help=(fedspan.__doc__ or "").split("\n\n")[0],
    )  # fmt: skip
    found.callback()(lambda: None)  # one command alone would lose its name
    for name, module in commands().items():
        found.command(name)(module.command)
    return found


app = build()


def main() -> None:
    """Runs the command line; a mistake of the user is one line, never a traceback."""
    with ending_by_sigterm():
        _main()


def _main() -> None:
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # a terminal without UTF-8 shows other characters as "?"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    warnings.showwarning = lambda message, *_: print(  # noqa: T201
        broken(f"warning: {message}", sys.stderr), file=sys.stderr
    )
    if "" in sys.argv[1:]:
        sys.exit(
            _mistake(
                f"argument {sys.argv[1:].index('') + 1} is empty; is a variable of the shell not set?"
            )
        )
    try:
        code = app(standalone_mode=False, prog_name="fedspan")
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as asked:
        sys.exit(_mistake(asked.ctx.get_help(), prefix=""))
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        more = f" (see {context.command_path} --help)" if context is not None else ""
        sys.exit(_mistake(" ".join(error.format_message().split()).removesuffix(".") + more))
    except FedspanError as error:
        sys.exit(_mistake(with_flags(str(error), sys.argv[1] if len(sys.argv) > 1 else "")))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        _drop_output()
        sys.exit(MISTAKE)
    except OSError as error:
        what = "the output" if error.filename is None else shown(str(error.filename))
        if error.filename is None:
            _drop_output()
        sys.exit(
            _mistake(
                f"{what} cannot be read or written: {error.strerror or error}; check the path and the disk"
            )
        )
    except MemoryError as error:
        sys.exit(
            _mistake(
                f"there is not enough memory ({one_line(str(error)) or 'none is left'}); use smaller sizes"
            )
        )
    sys.exit(code if isinstance(code, int) else 0)


def _drop_output() -> None:
    """What cannot be written is not written again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def with_flags(text: str, command: str) -> str:
    """A message with the flags of a command in place of the Python arguments that it names."""
    for name in ARGUMENTS:
        flag = "--" + name.replace("_", "-")
        if name == "run_dir" and command in WITH_OUT:
            flag = "--out"
        text = text.replace(f"`{name}=True`", flag).replace(f"`{name}`", flag)
    return text


def _mistake(text: str, prefix: str = "error: ") -> int:
    print(broken(f"{prefix}{text}", sys.stderr) if prefix else text, file=sys.stderr)  # noqa: T201
    return MISTAKE
