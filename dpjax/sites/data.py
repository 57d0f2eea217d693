"""A site's own records: arrays, or a table in the site's own dialect, read by a shared schema.

The schema stands in the shared plan, in TOML, say:

    [[columns]]
    name = "age"
    type = "number"         # or "category" with classes, or "flag"
    low = 0                 # a public range, scaled to -1 .. 1; numbers beyond are clipped into it
    high = 120
    missing = "middle"      # as if it was 60, and a feature of 0 and 1 says so; or "refuse"

    [[columns]]
    name = "ward"
    type = "category"       # a feature of 0 and 1 for each class
    classes = ["medicine", "surgery"]
    other = true            # one more for all other values; false refuses them

    [label]
    name = "readmitted"
    type = "category"       # classes, numbered from 0; or a number with a range
    classes = ["no", "yes"]

That of images, say, is ``shape = [28, 28, 1]``, ``classes = 10``, ``low = 0``, ``high = 255``.
"""

import csv
import dataclasses
import hashlib
import io
import json
import math
import re
from array import array
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dpjax import _files, _validate

__all__ = ["Records", "Schema", "read", "split"]

_Mapping: TypeAlias = Mapping[str, object]
_Range: TypeAlias = tuple[float, float]
_KEYS = {"number": ("low", "high"), "category": ("classes",), "flag": ()}
"""Keys that a column must have, by its type, beside its name and type."""
_OPTIONS = {"number": ("missing",), "category": ("other",), "flag": ()}
_DIALECT: _Mapping = {
    "file": None, "delimiter": ",", "decimal": ".", "encoding": "utf-8", "names": {}, "values": {},
    "missing_values": [""],
}  # fmt: skip
"""Keys of a source, and what they are by default."""
_FLAGS = {"0": 0.0, "no": 0.0, "false": 0.0, "1": 1.0, "yes": 1.0, "true": 1.0}
# No marks of thousands, no infinities, no underscores, no digits of other scripts.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def _plain(value: object) -> str:
    """A name, or a cell, as it is compared: its letters in one form."""
    return _validate.name(value).strip()


def _text(name: str, value: object) -> str:
    """A name, of one line."""
    text = _plain(value)
    if value is None or not text or not text.isprintable():
        raise _validate.refusal(name, value, "give a text of one line")
    return text


def _classes(name: str, value: object) -> tuple[str, ...]:
    """Names of classes."""
    return tuple(_text(name, entry) for entry in _validate.entries(name, value))


def _known(name: str, mapping: object, keys: Collection[str]) -> _Mapping:
    """Return a mapping, unless it has a key that nothing reads."""
    if not isinstance(mapping, Mapping):
        raise _validate.refusal(name, mapping, f"give a table with keys {', '.join(keys)}")
    for key in mapping:
        if key not in keys:
            raise ValueError(f"{name} has {key!r}, which is unknown; {_validate.choice(key, keys)}")
    return mapping


def _middle(low: float, high: float) -> float:
    """The middle of a range, the same wherever it is needed; a sum could overflow."""
    return low / 2 + high / 2


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column, or the label."""

    name: str
    type: str
    # What is no number keeps its 0 and 1.
    low: float = -1.0
    high: float = 1.0
    missing: str = "refuse"
    classes: tuple[str, ...] = ()
    other: bool = False

    def __post_init__(self) -> None:
        """Refuse values of other kinds."""
        _validate.fields(self, _text, "name")
        _validate.fields(self, _validate.number, "low", "high")
        _validate.fields(self, _validate.one_of, "missing", options=("refuse", "middle"))
        _validate.fields(self, _validate.flag, "other")
        _validate.fields(self, _classes, "classes")
        # Halves, as they are what divides.
        if self.low / 2 >= self.high / 2:
            raise _validate.refusal("high", self.high, f"give a number above low, {self.low:g}")
        is_repeated = len(set(self.classes)) < len(self.classes)
        if is_repeated or (self.type == "category" and len(self.classes) < 2):
            raise _validate.refusal("classes", self.classes, "give two or more, each once")

    @classmethod
    def of(cls, place: str, mapping: object) -> "_Column":
        """Return the column of a mapping, as TOML or JSON has it."""
        try:
            kind = mapping.get("type") if isinstance(mapping, Mapping) else None
            kind = _validate.one_of("type", kind, _KEYS)
            # Missing is what is None.
            keys: dict[str, Any] = dict.fromkeys(("name", *_KEYS[kind]))
            keys |= _known("it", mapping, ("type", *keys, *_OPTIONS[kind]))
            return cls(**keys)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    def features(self) -> dict[str, _Range]:
        """Ranges of the numbers that stand for it, by their names."""
        names = [f"{self.name}={entry}" for entry in self.classes] or [self.name]
        if self.other:
            names.append(f"{self.name} is another")
        if self.missing == "middle":
            names.append(f"{self.name} is missing")
        ranges = dict.fromkeys(names, (-1.0, 1.0))
        ranges[names[0]] = (self.low, self.high)
        return ranges

    def numbers(self, cell: str, decimal: str, missing: Collection[str]) -> list[float]:
        """What stands for a cell, in the schema's units; ValueError says what is wrong with it."""
        if cell in missing:
            if self.missing == "refuse":
                raise ValueError("is a missing value, and the schema allows none here")
            return [_middle(self.low, self.high), 1.0]
        if self.type == "category":
            marks = [float(cell == entry) for entry in self.classes]
            if self.other:
                marks.append(1 - sum(marks))
            if not any(marks):
                raise ValueError(f"is no class; {_validate.choice(cell, self.classes)}")
            return marks
        number = _FLAGS.get(cell.lower(), math.nan)
        if self.type == "number":
            # A point among decimal commas marks thousands, or another dialect.
            plain = cell.translate({ord("."): decimal, ord(decimal): "."})
            number = float(plain) if _NUMBER.fullmatch(plain) else math.nan
        if not math.isfinite(number):
            remedy = f"decimals follow {decimal!r}; of a date give days since a public date"
            raise ValueError(f"is no {self.type}; {remedy}")
        return [number, 0.0] if self.missing == "middle" else [number]


@dataclasses.dataclass(frozen=True)
class Schema:
    """What the columns of all sites' records mean; `Schema.of` makes one.

    Guarantee: nothing is computed from data. A record's features follow from that record and the
    schema alone, so that no record moves another's.

    Attributes:
        columns: In the order of the features; of arrays one, for all their numbers.
        label: What is learned.
        shape: Of a record's features, as the model gets them.

    Example:
        >>> from dpjax.sites.data import Schema
        >>> age = {"name": "age", "type": "number", "low": 0, "high": 100}
        >>> sick = {"name": "sick", "type": "category", "classes": ["no", "yes"]}
        >>> schema = Schema.of({"columns": [age], "label": sick})
        >>> schema.features, schema.classes
        ({'age': (0.0, 100.0)}, ('no', 'yes'))
        >>> schema.differences({"columns": [age | {"high": 120}], "label": sick})
        "column 'age' has high 120.0, here 100.0"
    """

    columns: tuple[_Column, ...]
    label: _Column
    shape: tuple[int, ...]

    @classmethod
    def of(cls, mapping: _Mapping) -> "Schema":
        """Return the schema of a mapping, as TOML or JSON has it.

        Args:
            mapping: ``columns`` and ``label``; or of arrays ``shape``, ``classes``, ``low`` and
                ``high``.

        Raises:
            ValueError: For unknown, missing or wrong entries.
        """
        if isinstance(mapping, Mapping) and "shape" in mapping:
            _known("schema", mapping, ("shape", "classes", "low", "high"))
            sizes = _validate.entries("shape", mapping["shape"])
            shape = tuple(_validate.integer("shape", size) for size in sizes)
            count = _validate.integer("classes", mapping.get("classes"), maximum=2**16)
            label = _Column("y", "category", classes=tuple(map(str, range(count))))
            # Arrays are one column of many numbers.
            limits = {"low": mapping.get("low"), "high": mapping.get("high")}
            return cls(
                (_Column.of("schema", limits | {"name": "x", "type": "number"}),), label, shape
            )
        mapping = _known("schema", mapping, ("columns", "label"))
        entries = _validate.entries("columns", mapping.get("columns"))
        columns = [_Column.of(f"column {place}", entry) for place, entry in enumerate(entries, 1)]
        label = _Column.of("label", mapping.get("label"))
        if label.type == "flag" or label.other or label.missing != "refuse":
            raise ValueError("label is a flag, or has other or missing; give classes, or a range")
        names = [column.name for column in (*columns, label)]
        features = [name for column in columns for name in column.features()]
        for group in (names, features):
            if not columns or len(set(group)) < len(group):
                raise _validate.refusal("columns", group, "give some, each name once")
        return cls(tuple(columns), label, (len(features),))

    @property
    def features(self) -> dict[str, _Range]:
        """A record's features in order, with their ranges in an archive; of arrays one for all."""
        return {name: pair for column in self.columns for name, pair in column.features().items()}

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all that the schema says: equal for equal schemas alone."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self, other: _Mapping) -> str:
        """Return in words where another site's schema first differs; "" where it does not.

        Args:
            other: The mapping that the other site reads.
        """
        try:
            schema = Schema.of(other)
        except (ValueError, RecursionError) as error:
            return f"no schema: {error}"
        # The label stands last, so that a column too many or too few shows by its name.
        pairs = zip((*self.columns, self.label), (*schema.columns, schema.label), strict=False)
        for ours, theirs in pairs:
            for key, here in vars(ours).items():
                value = vars(theirs)[key]
                # As the digest sees them: 0 and -0 differ.
                if repr(value) != repr(here):
                    values = f"{_validate.shown(value)}, here {_validate.shown(here)}"
                    return f"column {ours.name!r} has {key} {values}"
        if schema.shape != self.shape:
            return f"records have shape {schema.shape}, here {self.shape}"
        return ""

    @property
    def classes(self) -> tuple[str, ...]:
        """What the label's numbers 0, 1, ... stand for; none where the label is a number."""
        return self.label.classes

    def check_loss(self, loss: str) -> None:
        """Refuse a loss that does not take the label.

        Args:
            loss: "logistic" (two classes), "cross_entropy" (classes) or "squared" (a number).

        Raises:
            ValueError: If it does not.
        """
        count = len(self.classes)
        fits = {"logistic": count == 2, "cross_entropy": count > 0, "squared": count == 0}
        if not fits[_validate.one_of("loss", loss, fits)]:
            kind = f"one of {count} classes" if count else "a number"
            raise _validate.refusal("loss", loss, f"the label {self.label.name!r} is {kind}")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Records:
    """A site's records.

    Attributes:
        x: [m, ...] float32, each record in the schema's shape.
        y: [m] int32 class numbers; or float32, the label scaled to -1 .. 1.
        schema: What they mean.
        clipped: By feature, and the label where it is a number, the share of values in the file
            that were clipped.

    Example:
        >>> import numpy as np
        >>> from dpjax.sites.data import Records, Schema
        >>> schema = Schema.of({"shape": [2], "classes": 2, "low": 0, "high": 9})
        >>> records = Records(np.eye(2), np.array([0, 1]), schema, {"x": 0.5})
        >>> print(records.summary())
        2 records
        x: 50.0 % clipped into the range
        >>> records.targets("logistic").tolist()
        [-1, 1]
    """

    x: np.ndarray
    y: np.ndarray
    schema: Schema
    clipped: Mapping[str, float]

    def targets(self, loss: str) -> np.ndarray:
        """Return the labels as a loss takes them: -1 and +1 under "logistic".

        Args:
            loss: As in `Schema.check_loss`.

        Raises:
            ValueError: If the loss does not take them.
        """
        self.schema.check_loss(loss)
        return 2 * self.y - 1 if loss == "logistic" else self.y

    def summary(self) -> str:
        """Return their number and what was clipped, for the operator alone: never sent."""
        lines = [_validate.counted(len(self.y), "record")]
        for name, share in self.clipped.items():
            if share:
                lines.append(f"{name}: {100 * share:.1f} % clipped into the range")
        return "\n".join(lines)


def split(records: Records, held_out: float, seed: int) -> tuple[Records, Records]:
    """Return the records to train on, and those held out for the site's own metrics.

    Guarantee: which records are held out follows from their number and the seed alone, on every
    machine and with every version.

    Args:
        records: All of them.
        held_out: Their share: 0 or more, and below 1. The number is rounded.
        seed: A whole number; public.

    Returns:
        Both, in the order of the file.

    Raises:
        ValueError: For other arguments, and where there are none to train on or none to hold out.

    Example:
        >>> import numpy as np
        >>> from dpjax.sites.data import Records, Schema, split
        >>> schema = Schema.of({"shape": [1], "classes": 2, "low": 0, "high": 1})
        >>> records = Records(np.ones((100, 1)), np.ones(100), schema, {})
        >>> train, test = split(records, 0.2, seed=0)
        >>> len(train.y), len(test.y)
        (80, 20)
    """
    count = len(records.y)
    remedy = "give a number from 0, below 1, that leaves records for each part"
    share = _validate.number("held_out", held_out, remedy=remedy, holds=lambda x: 0 <= x < 1)
    _validate.integer("seed", seed, minimum=0)
    tests = round(share * count)
    if tests == count or (share and not tests):
        raise _validate.refusal("held_out", held_out, remedy)
    # NumPy's generators may draw otherwise in another version.
    digests = [hashlib.sha256(f"{seed} {row}".encode()).hexdigest() for row in range(count)]
    order = np.argsort(digests)
    parts = []
    for rows in (np.sort(order[tests:]), np.sort(order[:tests])):
        parts.append(dataclasses.replace(records, x=records.x[rows], y=records.y[rows]))
    return parts[0], parts[1]


def read(source: _Mapping, schema: Schema, folder: _files.PathLike) -> Records:
    """Return a site's records.

    Guarantee: see `Schema`. Errors name file, line and column, and show values: they are for the
    site's operator alone, and never sent.

    Args:
        source: ``file``, an .npz or a .csv. An archive has ``x`` [m, ...], the schema's features in
            its units, and ``y`` [m], class numbers or values. Of a table other keys say how the
            site writes: ``delimiter``, ``decimal``, ``encoding``, ``names`` (what the schema calls
            age: what the file does), ``values`` (by the schema's name of a column, what the file
            writes: what the schema means) and ``missing_values``.
        schema: Shared by all sites.
        folder: What ``file`` is relative to.

    Returns:
        The records, in the file's order.

    Raises:
        ValueError: For anything that is not as source and schema say.

    Example:
        >>> from pathlib import Path
        >>> from dpjax.sites.data import Schema, read
        >>> age = {"name": "age", "type": "number", "low": 0, "high": 100}
        >>> sick = {"name": "sick", "type": "category", "classes": ["no", "yes"]}
        >>> _ = Path("clinic.csv").write_text("Alter;sick\\n75,0;yes\\n", encoding="utf-8")
        >>> dialect = {"delimiter": ";", "decimal": ",", "names": {"age": "Alter"}}
        >>> schema = Schema.of({"columns": [age], "label": sick})
        >>> records = read({"file": "clinic.csv"} | dialect, schema, ".")
        >>> records.x.tolist(), records.y.tolist()
        ([[0.5]], [1])
    """
    _known("source", source, _DIALECT)
    name = source.get("file")
    _text("source: file", name)
    # As it is: file systems may tell apart two forms of one letter.
    path = Path(folder, str(name))
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        if path.suffix == ".npz":
            _known("source of an archive", source, ("file",))
            x, y = _archive(path, schema)
        else:
            x, y = _table(path, {**_DIALECT, **source}, schema)
    except Exception as error:  # Of zip files, codecs and csv: damage takes every shape.
        # In one line, whatever the file holds.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{path}: {reason}") from None
    x, shares = _scaled(x, schema.features)
    if schema.classes:
        return Records(x, y.astype(np.int32), schema, shares)
    y, label_share = _scaled(y[:, None], schema.label.features())
    return Records(x, y[:, 0], schema, shares | label_share)


def _scaled(
    values: np.ndarray, ranges: Mapping[str, _Range]
) -> tuple[np.ndarray, dict[str, float]]:
    """Values from their ranges to -1 .. 1, and by feature the share of clipped ones."""
    low, high = np.array([*ranges.values()]).T
    inside = np.clip(values, low, high)
    is_clipped = (inside != values).reshape(len(values), len(ranges), -1)
    shares = is_clipped.mean(axis=(0, 2)).tolist()
    scaled = (inside - _middle(low, high)) / (high / 2 - low / 2)
    # Rounding may lead beyond.
    scaled = np.clip(scaled, -1, 1).astype(np.float32)
    return scaled, dict(zip(ranges, shares, strict=True))


def _archive(path: Path, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    """Features in the schema's units, and labels, of an npz file."""
    arrays = _files.archive(path)
    x = _validate.finite_array("x", arrays.get("x"))
    y = _validate.finite_array("y", arrays.get("y"))
    if x.shape[1:] != schema.shape or y.shape != x.shape[:1]:
        remedy = f"give records of shape {schema.shape}, with a label each"
        raise ValueError(f"x has shape {x.shape}, y {y.shape}; {remedy}")
    count = len(schema.classes)
    if count and not np.isin(y, range(count)).all():
        raise ValueError(f"y has other labels than the classes' numbers, 0 .. {count - 1}")
    return x, y


def _table(path: Path, source: _Mapping, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    """Features in the schema's units, and labels, of a csv file."""
    if schema.shape != (len(schema.features),):
        raise ValueError(f"records of shape {schema.shape} are read from an archive, NAME.npz")
    columns = {column.name: column for column in (*schema.columns, schema.label)}
    names = _known("names", source["names"], columns)
    values = _known("values", source["values"], columns)
    decimal = _validate.one_of("decimal", source["decimal"], (".", ","))
    delimiter = _validate.one_of("delimiter", source["delimiter"], (",", ";", "\t", "|"))
    entries = _validate.entries("missing_values", source["missing_values"])
    missing = [_plain(entry) for entry in entries]
    lines = io.StringIO(_decoded(path, source["encoding"]), newline="")
    reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
    # Numbers of Python take four times as much memory.
    numbers = array("d")
    place = ":"
    try:
        header = [_plain(cell) for cell in reader.fieldnames or ()]
        reader.fieldnames = header
        if not header:
            raise ValueError("there is no header")
        titles = [_text("names", names.get(name, name)) for name in columns]
        cells = []
        for title, column in zip(titles, columns.values(), strict=True):
            if header.count(title) != 1 or titles.count(title) != 1:
                remedy = _validate.choice(title, header)
                raise ValueError(f"{title!r} is not one column, for one of the schema; {remedy}")
            cells.append((title, column, _meanings(column, values.get(column.name, {}), missing)))
        for row in reader:
            # Of rows too long and too short.
            if None in row or None in row.values():
                raise ValueError(f"not {len(header)} cells, as in the header")
            for title, column, meanings in cells:
                cell = _plain(row[title])
                place = f", column {title!r}: {cell[:40]!r}"
                numbers.extend(column.numbers(meanings.get(cell, cell), decimal, missing))
            place = ":"
    except (csv.Error, ValueError) as error:
        raise ValueError(f"line {reader.reader.line_num}{place} {error}") from None
    if not numbers:
        raise ValueError("it has no records")
    width = len(schema.features)
    table = np.array(numbers).reshape(-1, width + len(schema.label.features()))
    labels = table[:, width:]
    return table[:, :width], labels.argmax(axis=1) if schema.classes else labels[:, 0]


def _meanings(column: _Column, mapping: object, missing: Collection[str]) -> dict[str, str]:
    """What cells in the file's own words mean."""
    place = f"values of {column.name}"
    if not isinstance(mapping, Mapping):
        raise _validate.refusal(place, mapping, "give texts by text")
    meanings = {_plain(cell): _plain(meaning) for cell, meaning in mapping.items()}
    for meaning in meanings.values() if column.other else ():
        # Misspelt, it would be another value in silence.
        _validate.one_of(place, meaning, [*column.classes, *missing])
    return meanings


def _decoded(path: Path, encoding: object) -> str:
    """The text of a file."""
    content = path.read_bytes()
    try:
        # Windows writes a byte order mark.
        return content.decode(_text("encoding", encoding)).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}: {error}; name its encoding, 'cp1252', say") from None
