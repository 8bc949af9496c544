"""`fedspan check-method`: the laws of fedspan on a file of one's own."""

from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli._options import Plugin, key_and_value, load_plugins

BROKEN = 1
HOLDS = (
    "every law holds. Laws are about form and safety: whether the mathematics is that of your paper, only a comparison "
    "with an independent version of it can show"
)


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            callback=key_and_value,
            help="A setting of what is checked, as in mu=0.5; around a choice on an axis, method.lr=0.1 is one of the "
            "method and server.lr=0.5 one of its server.",
        ),
    ] = None,
    plugin: Plugin = None,
    verbose: bool = False,
) -> int:
    """Check a method of yours, or a part of one.

    A method is tried in the simulator and with a server and clients that exchange messages, with lost, repeated and
    unanswered ones. A drift, uplink, server or downlink is tried in fedavg, scaffold, subavg and ssf, and in subavg in
    a gaussian space. --set gives settings, as in --set mu=0.5.

    Args:
        file: A Python file that registers something.
        verbose: Print every law, not only those that do not hold.
    """
    from fedspan.checks.check_file import check_file
    from fedspan.cli._tables import say, show
    from fedspan.core.spec import toml_value

    load_plugins(plugin)
    parts = [one.partition("=") for one in change or ()]
    settings = {key.strip(): toml_value(text) for key, _, text in parts}
    marks = {True: "pass", False: "FAIL", None: "-"}
    broken = 0
    for what, laws in check_file(file, settings).items():
        held = sum(holds is True for _, holds, _ in laws)
        if verbose:
            show((what, "law"), [(marks[holds], law) for law, holds, _ in laws])
        else:
            say(f"{what}: {held} of {len(laws)} laws hold")
        for law, holds, why in laws:
            broken += holds is False
            if why:
                say(f"{marks[holds]}: {law}: {why}")
    say(HOLDS if not broken else f"{broken} {'law does' if broken == 1 else 'laws do'} not hold")
    return BROKEN if broken else 0
