"""What fits in this machine's memory, asked before anything large is made."""

import math
import os
from pathlib import Path

__all__ = ["check", "limit", "over_rounds"]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def limit() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its container's."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            available = min(available, int(Path(place).read_text()))
        except (OSError, ValueError):
            continue
    return available


def check(
    name: str, value: object, what: str, *shape: int, item: int = 8, most: int | None = None
) -> None:
    """Refuse an array that this machine cannot hold, before it is allocated.

    Args:
        name: The argument that decides the size.
        value: Its value.
        what: The array, as in "a strategy [T, T]".
        shape: Its shape; several arrays at once by a leading number.
        item: Bytes an entry.
        most: Bytes that there are; None is `limit`.

    Raises:
        ValueError: With the bytes that it takes and those that there are.
    """
    size, most = math.prod(map(int, shape)) * item, limit() if most is None else most
    if size > most:
        raise ValueError(
            f"{name} is {value!r}, for which {what} takes {_size_text(size)}; this machine has "
            f"{_size_text(most)}: give a smaller one"
        )


def over_rounds(rounds: int) -> None:
    """Refuse a number of rounds whose strategy cannot be made: a few [T, T] at a time."""
    check("rounds", rounds, "a strategy [T, T] and what makes it", 3, rounds, rounds)


def _size_text(size: int) -> str:
    power = min(int(math.log(size, 1024)), len(_UNITS) - 1) if size > 1 else 0
    return f"{size / 1024**power:,.1f} {_UNITS[power]}"
