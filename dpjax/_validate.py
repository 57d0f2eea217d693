"""Input checks: each failure names the argument, its value and the remedy."""

import contextlib
import difflib
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ()

_FINITE = "give a finite number"


def shown(value: object) -> str:
    """Return ``value`` as a message shows it: short, also where it is a number of many digits."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits.
        text = f"{type(value).__name__} of too many digits"
    # Addresses of functions tell a reader nothing, and differ in every process.
    text = re.sub(r"(<function \S+) at 0x[0-9a-fA-F]+>", r"\1>", text)
    return text if len(text) <= 200 else f"{text[:200]}..."


def counted(number: float, noun: str, plural: str | None = None) -> str:
    """Return how many of something there are, in words: "1 round", "2,000 rounds".

    Args:
        number: How many; rounded to a whole number.
        noun: What one of them is called.
        plural: What several are called; None is the noun with an s.
    """
    text = f"{number:,.0f}" if isinstance(number, float) else f"{number:,}"
    return f"{text} {noun if text == '1' else plural or f'{noun}s'}"


def said(error: BaseException) -> str:
    """Return the first line of an error, with its kind."""
    # Flax ends its messages in an address, behind which nothing is legible.
    first = (str(error).splitlines() or [""])[0].partition(" (http")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def argument(name: str, value: object) -> str:
    """Return what a message says of an argument; None is what a caller or a file leaves out."""
    return f"{name} is {'missing' if value is None else shown(value)}"


def refusal(name: str, value: object, remedy: str) -> ValueError:
    """Return the error of an argument that is refused: its name, its value and the remedy."""
    return ValueError(f"{argument(name, value)}; {remedy}")


def number(
    name: str, value: Any, *, remedy: str = _FINITE, holds: Callable[[float], bool] = math.isfinite
) -> float:
    """Return ``value`` as a finite float of which ``holds``, else raise ValueError."""
    result = math.nan
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        is_text = isinstance(value, str | bytes | bool | np.bool_)
        # Some versions of NumPy take an array of one number for that number.
        if not is_text and not np.iscomplexobj(value) and not np.ndim(value):
            result = float(value)
    if not (math.isfinite(result) and holds(result)):
        raise refusal(name, value, remedy)
    return result


def numbers(name: str, value: Any) -> tuple[float, ...] | None:
    """Return a sequence of numbers as finite floats, at least one; None for what is no sequence."""
    # A string is no sequence of numbers, nor is an array without axes.
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    if not is_array and not isinstance(value, list | tuple):
        return None
    if not len(value):
        raise ValueError(f"{name} is empty; give at least one number")
    return tuple(number(name, entry) for entry in value)


def positive(name: str, value: object, *, remedy: str = "give a finite number above 0") -> float:
    """Return ``value`` as a finite float above 0, else raise ValueError."""
    return number(name, value, remedy=remedy, holds=lambda x: x > 0)


def fraction(name: str, value: object) -> float:
    """Return ``value`` as a float above 0, at most 1, else raise ValueError."""
    remedy = "give a finite number above 0, at most 1"
    return number(name, value, remedy=remedy, holds=lambda x: 0 < x <= 1)


def single_precision(name: str, value: object, minimum: float, maximum: float) -> float:
    """Return ``value`` as a float from ``minimum`` to ``maximum``, which float32 can work with."""
    remedy = f"give a finite number above 0, from {minimum:g} to {maximum:g}, as float32 needs"
    return number(name, value, remedy=remedy, holds=lambda x: minimum <= x <= maximum)


def probability(
    name: str, value: object, *, remedy: str = "give a number strictly between 0 and 1"
) -> float:
    """Return ``value`` as a float strictly between 0 and 1, else raise ValueError."""
    return number(name, value, remedy=remedy, holds=lambda x: 0 < x < 1)


def spread(name: str, value: object) -> float:
    """Return a standard deviation that float32 noise can have, else raise ValueError."""
    return single_precision(name, value, 1e-30, 1e30)


def integer(
    name: str,
    value: Any,
    *,
    minimum: int = 1,
    maximum: int | None = None,
    remedy: str | None = None,
) -> int:
    """Return ``value`` as an int from ``minimum`` to ``maximum``, else raise ValueError."""
    # True is an int to Python, and no number to a reader.
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    largest = 2**63 - 1 if maximum is None else maximum  # arrays hold no more
    if is_integer and minimum <= value <= largest:
        return int(value)
    if remedy is None:
        # The limit of arrays is worth a word only where it is what was exceeded.
        is_too_large = is_integer and value > largest
        has_limit = maximum is not None or is_too_large
        limits = f"from {minimum} to {largest}" if has_limit else f"of at least {minimum}"
        remedy = f"give a whole number {limits}"
    raise refusal(name, value, remedy)


def fields(part: object, check: Callable[..., object], *names: str, **limits: object) -> None:
    """Put what ``check(name, value, **limits)`` returns into fields of a frozen dataclass."""
    for name in names:
        object.__setattr__(part, name, check(name, getattr(part, name), **limits))


def entries(name: str, values: object) -> list[object]:
    """Return the entries of a list, or of what is like one, else raise ValueError."""
    if isinstance(values, str | bytes) or not np.iterable(values):
        example = "" if values is None else f", [{shown(values)}]"
        raise refusal(name, values, f"give a list{example}")
    return list(values)


def agents(name: str, values: object, *, maximum: int = 2**31 - 2) -> list[int]:
    """Return agents' indices as ints from 0 to ``maximum``, else raise ValueError."""
    indices = entries(name, values)
    for index in indices:
        if isinstance(index, str):
            raise ValueError(f"{name} names {shown(index)}; give indices, by topology.nodes.find")
    return [integer(name, index, minimum=0, maximum=maximum) for index in indices]


def refuse(rules: Mapping[str, object]) -> None:
    """Refuse the first broken one of rules, each a text and whether it is broken."""
    for text, broken in rules.items():
        if broken:
            raise ValueError(text)


def flag(name: str, value: object) -> bool:
    """Return ``value`` when it is True or False itself, else raise ValueError."""
    if not isinstance(value, bool):
        raise refusal(name, value, "give True or False")
    return value


def one_of(name: str, value: object, options: Collection[str]) -> str:
    """Return ``value`` when it is one of ``options``, else raise ValueError that lists them."""
    if not isinstance(value, str) or value not in options:
        raise refusal(name, value, choice(value, options))
    return str(value)


def choice(value: object, options: Collection[str], remedy: str = "") -> str:
    """Return what to do about a value that is none of ``options``: the nearest one comes first.

    Args:
        value: What was given, which may misspell an option.
        options: What there is.
        remedy: In place of a list of the options.
    """
    listed = ", ".join(options)
    if not listed:
        return "there are none: leave it out"
    # Options of a command line begin with dashes, which are no likeness.
    spellings = {option.strip("-").lower(): option for option in options}
    word = value.strip("-").lower() if isinstance(value, str) else ""
    matches = difflib.get_close_matches(word, spellings, 1)
    near = f"did you mean {spellings[matches[0]]}? If not, " if matches else ""
    return near + (remedy or f"choose one of {listed}")


def name(value: object) -> str:
    """Return a name as text in one form: Unicode writes an u with dots as one letter or as two."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return unicodedata.normalize("NFC", text)


def flattened(name: str, array: np.ndarray) -> str:
    """Return what to do about labels that are not one number a record; empty where that is open."""
    if array.shape[1:] == (1,):
        return f"; give np.ravel({name})"
    if array.ndim != 2:
        return ""
    # Sorted, every row of a one-hot matrix is zeros and a one.
    one_hot = np.eye(1, array.shape[1], array.shape[1] - 1)
    if (np.sort(array, axis=1) == one_hot).all():
        return f"; they are one-hot: give class numbers, np.argmax({name}, 1)"
    return ""


def unmasked(name: str, value: Any) -> Any:
    """Return ``value``, unless it is a masked array, or a list of them, with masked entries.

    Converted to a plain array, these would be what they were before somebody masked them.
    """
    arrays = value if isinstance(value, list | tuple) else (value,)
    if any(np.ma.is_masked(array) for array in arrays):
        raise ValueError(f"{name} is a masked array with masked entries; leave out or fill these")
    return value


def finite_array(name: str, value: Any, *, ndim: int | None = None) -> np.ndarray:
    """Return ``value`` as a float64 array without NaN or infinity, else raise ValueError."""
    unmasked(name, value)
    if hasattr(value, "adjacency"):  # NumPy would take a graph's nodes for numbers.
        raise refusal(name, value, "give the matrix of a graph, mixing.metropolis_hastings(graph)")
    if callable(getattr(value, "toarray", None)):
        raise ValueError(f"{name} is sparse; give a dense array, {name}.toarray()")
    try:
        dtype = np.asarray(value).dtype
        # Numbers of these may be kept under a name that NumPy does not count as numeric.
        may_be_numbers = dtype.name in ("bfloat16", "object") and value is not None
        if dtype.kind not in "fiub" and not may_be_numbers:
            raise TypeError(f"dtype {dtype}")
        # A copy: whoever made the array may change it.
        array = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is not an array of numbers ({error}); give one") from None
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}; give an array of {ndim} dimensions")
    if array.size == 0:
        raise ValueError(f"{name} has shape {array.shape}; give at least one entry")
    strays = np.argwhere(~np.isfinite(array))
    if len(strays):
        position = tuple(strays[0].tolist())
        raise ValueError(
            f"{name} holds {array[position]} at {position}; remove or replace such entries"
        )
    return array


def columns(value: object) -> tuple[object, ...] | None:
    """Return the names of a data frame's columns, None for what has no names."""
    # A method of this name belongs to something other than a data frame.
    names = getattr(value, "columns", None)
    return None if names is None or callable(names) else tuple(names)


def check_columns(name: str, value: object, trained: tuple[object, ...] | None) -> None:
    """Refuse a data frame whose columns are not ``trained``, in that order."""
    actual = columns(value)
    # Another number of columns is refused by its shape.
    if actual is None or trained is None or len(actual) != len(trained) or actual == trained:
        return
    raise ValueError(
        f"{name} has columns {shown(list(actual))}; give those of train x, in its order: "
        f"{shown(list(trained))}"
    )


def check_rows(name: str, x: object, y: object) -> None:
    """Refuse labels whose index is not that of the examples, which position would join wrongly."""
    x_index: Any = getattr(x, "index", None)
    y_index: Any = getattr(y, "index", None)
    # Lists have a method of this name.
    has_indices = hasattr(x_index, "equals") and hasattr(y_index, "equals")
    if not has_indices or x_index.equals(y_index):
        return
    raise ValueError(
        f"{name}y has another index than {name}x; give y.loc[x.index], or y.to_numpy() where rows "
        "belong together as they stand"
    )


def check_range(name: str, array: np.ndarray) -> None:
    """Refuse numbers that become infinite, or other numbers, in the 32 bits of a run."""
    if array.dtype.kind not in "fiu" or array.itemsize <= 2 or not array.size:
        return
    if array.dtype.kind == "f":
        dtype = "float32"
        largest = float(np.finfo(np.float32).max)
        smallest = -largest
    else:
        dtype = "int32"
        largest = 2**31 - 1
        smallest = -(2**31)
    # The largest first, as it is the more frequent one.
    extreme = array.max()
    if extreme <= largest:
        extreme = array.min()
    if not smallest <= extreme <= largest:
        raise ValueError(
            f"{name} reaches {extreme}, beyond what {dtype} can hold, {largest:.10g}; scale it, or "
            "number labels from 0"
        )


def square(name: str, value: object) -> np.ndarray:
    """Return ``value`` as a finite square float64 matrix, else raise ValueError."""
    array = finite_array(name, value, ndim=2)
    if array.shape[0] != array.shape[1]:
        raise ValueError(f"{name} has shape {array.shape}; give a square matrix")
    return array


def symmetric(name: str, value: object) -> np.ndarray:
    """Return ``value`` as a finite symmetric float64 matrix, else raise ValueError."""
    matrix = square(name, value)
    asymmetry = np.abs(matrix - matrix.T).max()
    # Relative to the largest entry: products of matrices round that much.
    if asymmetry > 1e-10 * np.abs(matrix).max():
        raise ValueError(f"{name} is not symmetric; give ({name} + {name}.T) / 2")
    return matrix


# Sums of float64 rows of stochastic matrices stray by n * 1e-16; those of float32 ones by 1e-7,
# which 5,000 rounds would turn into a visible drift of the models.
SUM_TOLERANCE = 1e-8


def stochastic(name: str, value: object, sums: Collection[str]) -> np.ndarray:
    """Return a float64 copy, [n, n] or [P, n, n], of weights >= 0 whose named sums are 1.

    Args:
        name: Argument.
        value: Matrix, or a schedule of them.
        sums: Which of "row" and "column" sums must be 1; empty asks for finite entries only.
    """
    matrix = finite_array(name, value)
    check_weights(name, matrix, sums)
    return matrix


def check_weights(name: str, matrix: Any, sums: Collection[str]) -> None:
    """Check the shape, signs and sums of finite weights, dense or sparse, as `stochastic` does.

    Args:
        name: Argument.
        matrix: Matrix, or a schedule of them.
        sums: Which sums must be 1.
    """
    shape = matrix.shape
    if len(shape) not in (2, 3) or shape[-1] != shape[-2] or not shape[-1]:
        raise ValueError(f"{name} has shape {shape}; give [n, n] or a schedule [P, n, n]")
    negative = first(matrix < 0) if sums else ()
    if negative:
        weight = float(matrix[negative])
        raise ValueError(f"{name} holds {weight!r} at {negative}; give weights >= 0")
    for kind in sums:
        totals = matrix.sum(axis=-1 if kind == "row" else -2)
        stray = first(np.abs(totals - 1.0) > SUM_TOLERANCE)
        if stray:
            raise ValueError(
                f"{name} has {kind} {stray[-1]} summing to {float(totals[stray])!r}; give a "
                f"matrix in float64 whose {kind}s sum to 1, within {SUM_TOLERANCE:g}"
            )


def first(flags: Any) -> tuple[int, ...]:
    """The position of the first true entry of a dense or sparse array; empty without one."""
    return tuple(int(axis[0]) for axis in flags.nonzero() if len(axis))


def assign(part: object, **values: object) -> None:
    """Set fields of a frozen dataclass in its ``__post_init__``, to the plain values checked."""
    for name, value in values.items():
        object.__setattr__(part, name, value)


def fixed(array: object, dtype: Any = None) -> np.ndarray:
    """Return a copy that cannot be written to.

    Args:
        array: An array, or what makes one.
        dtype: Of the copy; None keeps the array's.
    """
    # A view without write access would still change with its base.
    copy = np.array(array, dtype)
    copy.flags.writeable = False
    return copy


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its container's."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Of control groups of version 2, and of version 1; a container has one of them at most.
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            available = min(available, int(Path(file).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return available


def resident() -> tuple[int, int]:
    """Return the bytes of memory that this process holds now, and the most it has held."""
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        sizes = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", text))
        return int(sizes["VmRSS"]) * 1024, int(sizes["VmHWM"]) * 1024
    except (OSError, KeyError):  # Not Linux; the most is all that is known, on macOS in bytes.
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if sys.platform != "darwin":
            peak *= 1024
        return peak, peak


def memory(
    name: str, value: object, purpose: str, *shape: int, item: int = 8, maximum: int | None = None
) -> None:
    """Refuse an array that this machine cannot hold, before it is allocated.

    Args:
        name: The argument that decides the size.
        value: Its value.
        purpose: The array, as in "a strategy [T, T]".
        shape: Its shape; several arrays at once by a leading number.
        item: Bytes an entry.
        maximum: Bytes that there are; None is `memory_limit`.

    Raises:
        ValueError: With the bytes that it takes and those that there are.
    """
    # Python's integers: NumPy's would overflow where the array is largest.
    size = math.prod(map(int, shape)) * item
    limit = memory_limit() if maximum is None else maximum
    if size > limit:
        raise ValueError(
            f"{name} is {value!r}, for which {purpose} takes {size / 2**30:,.1f} GiB; this machine "
            f"has {limit / 2**30:,.1f} GiB: give a smaller one"
        )


def rounds_in_memory(value: object) -> int:
    """Return a number of rounds whose strategy can be made: a few [T, T] at a time."""
    rounds = integer("rounds", value)
    memory("rounds", rounds, "a strategy [T, T] and what makes it", 3, rounds, rounds)
    return rounds
