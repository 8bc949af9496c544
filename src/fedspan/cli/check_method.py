"""`fedspan check-method`: the laws of fedspan on a file of one's own."""

from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli._options import Changes

BROKEN = 1
HOLDS = (
    "every law holds. Laws are about form and safety: whether the mathematics is that of your paper, only a comparison "
    "with an independent version of it can show"
)


def command(file: Annotated[Path, typer.Argument(metavar="FILE")], change: Changes = None) -> int:
    """Check a method of yours, or a part of one.

    A method is tried in the simulator and with a server and clients that exchange messages, with lost, repeated and
    unanswered ones. A drift, uplink, server or downlink is tried in fedavg, scaffold, subavg and ssf. --set gives
    settings, as in --set mu=0.5.

    Args:
        file: A Python file that registers something.
    """
    from fedspan.checks.check_file import check_file
    from fedspan.cli._tables import say, show
    from fedspan.core.spec import toml_value

    parts = [one.partition("=") for one in change or ()]
    settings = {key.strip().removeprefix("method."): toml_value(text) for key, _, text in parts}
    marks = {True: "pass", False: "FAIL", None: "-"}
    broken = 0
    for what, laws in check_file(file, settings).items():
        show((what, "law"), [(marks[holds], law) for law, holds, _ in laws])
        for law, holds, why in laws:
            broken += holds is False
            if why:
                say(f"{marks[holds]}: {law}: {why}")
    say(HOLDS if not broken else f"{broken} {'law does' if broken == 1 else 'laws do'} not hold")
    return BROKEN if broken else 0
