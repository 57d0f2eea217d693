"""The body of `dpjax plot`."""

from pathlib import Path
from typing import Any

import tyro

from dpjax.commands import inputs
from dpjax.results import plots

__all__ = ()


@inputs.with_arguments(plots.from_records)
def plot_command(
    path: tyro.conf.Positional[tuple[Path, ...]],
    *,
    where: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    out: Path | None = None,
    **terms: Any,
) -> int:
    """Draw a figure from stored records.

    Rows of several settings are refused, with the column that tells them apart: --where chooses
    one of its values. Unless x is the round, a run's last round is drawn. The example draws what
    dpjax account writes.

    Example: dpjax plot dpjax-account.jsonl --where gradients=any --x victim --y mu

    Args:
        path: One or several record files, or folders of them, drawn together.
        where: A condition column=value that rows must keep; may be given again.
        out: The figure's file, ending in .svg, .png or .pdf; beside the records by default.
    """
    if not path:
        raise ValueError("path is missing; name a record file, or a folder of them")
    print(f"written: {plots.from_records(path, where=where, out=out, **terms)}")
    return 0
