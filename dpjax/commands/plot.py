"""The body of `dpjax plot`: a figure from stored records."""

from typing import Any

from dpjax.results import plots

__all__: list[str] = []


def run(command: Any) -> int:
    """Draw a figure and say where it is.

    Args:
        command: The options, `dpjax.cli.PlotCommand`.

    Returns:
        Exit status.

    Raises:
        ValueError: For options that do not go together, or records that cannot be drawn.
    """
    if not command.source:
        raise ValueError("source is missing; name a record file, or a folder of them")
    if command.linear and (command.log_x or command.log_y):
        raise ValueError("linear is given with log_x or log_y; take one")
    figure = plots.from_records(
        command.source,
        x=command.x,
        y=command.y,
        series=command.series,
        where=command.where,
        log_x=command.log_x or (False if command.linear else None),
        log_y=command.log_y or (False if command.linear else None),
        out=command.out,
    )
    print(f"written: {figure}")
    return 0
