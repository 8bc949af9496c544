"""The app: finds the commands in this folder, runs one, and turns errors into one line and an exit code.

0  finished        1  the run diverged        2  a mistake of the user        130  interrupted by Ctrl-C

SIGTERM ends the process as it ends any other, with 143 in a shell, once what is running is saved.
"""

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
from fedspan.cli._options import described
from fedspan.core.errors import FedspanError, one_line, shown
from fedspan.core.signals import ending_by_sigterm
from fedspan.core.terminal import broken

MISTAKE, INTERRUPTED = 2, 130
# Arguments of Python functions that are flags of commands
ARGUMENTS = ("run_dir", "resume", "seeds")
GIVEN = {
    "tune": "--grid",
    "metric": "--metric",
    "goal": "--goal",
    "tail": "--tail",
}  # where they are
WITH_OUT = ("compare", "reproduce")  # commands that call the run directory --out
typer.core.HAS_RICH = False  # plain help texts are quick, and read well in a pipe


def commands() -> dict[str, ModuleType]:
    """Return name → module of every command."""
    return {
        name.replace("_", "-"): importlib.import_module(f"fedspan.cli.{name}")
        for name in sorted(found.name for found in pkgutil.iter_modules(cli.__path__))
        if name[0] != "_" and name != "app"
    }


def build() -> typer.Typer:
    """Return the app with all commands."""
    found = typer.Typer(
        add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, suggest_commands=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
        help=(fedspan.__doc__ or "").split("\n\n")[0],
    )  # fmt: skip
    found.callback()(lambda: None)  # one command alone would lose its name
    for name, module in commands().items():
        found.command(name, help=described(module.command))(module.command)
    return found


app = build()


def main() -> None:
    """Run the command line; a mistake of the user is one line, never a traceback."""
    with ending_by_sigterm():
        _main()


def _main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # without UTF-8 other characters show as "?"
            stream.reconfigure(errors="replace")
    warnings.showwarning = lambda message, *_: _say(f"warning: {message}")
    try:
        if "" in sys.argv[1:]:
            number = sys.argv[1:].index("") + 1
            raise FedspanError(f"argument {number} is empty; is a variable of the shell not set?")
        code = app(standalone_mode=False, prog_name="fedspan")
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as asked:
        print(asked.ctx.get_help(), file=sys.stderr)  # noqa: T201
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        more = f" (see {context.command_path} --help)" if context is not None else ""
        _say("error: " + " ".join(error.format_message().split()).removesuffix(".") + more)
    except FedspanError as error:
        _say("error: " + with_flags(str(error), sys.argv[1] if len(sys.argv) > 1 else ""))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except OSError as error:
        what = "the output" if error.filename is None else shown(str(error.filename))
        if error.filename is None:  # what cannot be written is not written again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # of a reader that has seen enough, such as head
            why = error.strerror or error
            _say(f"error: {what} cannot be read or written: {why}; check the path and the disk")
    except MemoryError as error:
        why = one_line(str(error)) or "none is left"
        _say(f"error: there is not enough memory ({why}); use smaller sizes")
    sys.exit(MISTAKE)


def with_flags(text: str, command: str) -> str:
    """Return a message with the flags of a command in place of the Python arguments that it names."""
    for name in ARGUMENTS:
        flag = "--" + name.replace("_", "-")
        if name == "run_dir" and command in WITH_OUT:
            flag = "--out"
        text = text.replace(f"`{name}=True`", flag).replace(f"`{name}`", flag)
    for name, flag in GIVEN.items():
        if flag in sys.argv:
            text = text.replace(f"`{name}`", flag)
    return text


def _say(text: str) -> None:
    print(broken(text, sys.stderr), file=sys.stderr)  # noqa: T201
