"""`fedspan predict`: rows of a table to predictions, with a trained model."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    directory: Path,
    file: Path,
    out: Path = Path("predictions.csv"),
    client: str | None = None,
    keep: str | None = None,
    round_: Annotated[int | None, typer.Option("--round")] = None,
) -> None:
    """Predict a class, or a number, for every row of a table.

    Args:
        directory: A run directory, or what `result.save` wrote.
        file: A table with the columns of the training, such as a .csv
        out: The CSV file to write.
        client: A client of the training, by whose own mean and deviation numbers are scaled.
        keep: A column to write before the prediction, such as an id.
        round_: The round whose model to use, if `Checkpoint` has kept it.
    """
    from fedspan.core.terminal import say
    from fedspan.engine.result import load

    count = load(directory, round=round_).predictor.write(file, out, client, keep)
    say(f"{count:,} predictions are in {out}")
