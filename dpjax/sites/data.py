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

That of images, say, has ``shape = [28, 28, 1]`` beside one column, of a number, for all pixels.
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
from typing import TypeAlias

import numpy as np

from dpjax import _files, _validate
from dpjax.plans.settings import Section, check_keys, naming

__all__ = ["Records", "Schema", "read", "split"]

_Range: TypeAlias = tuple[float, float]
_KINDS: dict[str, Section] = {
    "number": {"low": None, "high": None, "missing": "refuse"},
    "category": {"classes": None, "other": False},
    "flag": {},
}
"""Keys of a column by its type, beside its name and type; None must be given."""
_DIALECT: Section = {
    "file": None, "delimiter": ",", "decimal": ".", "encoding": "utf-8", "names": {}, "values": {},
    "missing_values": [""],
}  # fmt: skip
"""Keys of a source, and what they are by default."""
_NO = ("0", "no", "No", "NO", "false", "False", "FALSE")
_YES = ("1", "yes", "Yes", "YES", "true", "True", "TRUE")
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


def _texts(name: str, value: object) -> tuple[str, ...]:
    """Names of classes."""
    return tuple(_text(name, entry) for entry in _validate.entries(name, value))


def _check_distinct(name: str, entries: Collection[str], minimum: int = 1) -> None:
    """Refuse too few entries, and those that stand twice."""
    if len(set(entries)) < max(len(entries), minimum):
        raise _validate.refusal(name, entries, f"give {minimum} or more, each once")


def _section(name: str, value: object, keys: Collection[str]) -> Section:
    """Return a section, unless it has a key that nothing reads."""
    if not isinstance(value, Mapping):
        raise _validate.refusal(name, value, "give a section of keys and values")
    check_keys(f"{name}: ", value, set(keys))
    return value


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column, or the label."""

    name: str
    type: str
    # Scaling leaves what is no number as it is: 0 and 1.
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
        _validate.fields(self, _texts, "classes")
        # Halves, as they are what divides.
        if self.low / 2 >= self.high / 2:
            raise _validate.refusal("high", self.high, f"give a number above low, {self.low:g}")
        if self.type == "category":
            _check_distinct("classes", self.classes, 2)

    @classmethod
    def of(cls, place: str, entry: object) -> "_Column":
        """Return the column of a section, as TOML or JSON has it."""
        section = _section(place, entry, cls.__dataclass_fields__)
        with naming({}, f"{place}: "):
            kind = _validate.one_of("type", section.get("type"), _KINDS)
            keys = {"name": None, "type": kind, **_KINDS[kind]}
            check_keys("", section, keys.keys())
            return cls(**{**keys, **section})

    @property
    def choices(self) -> tuple[str, ...]:
        """The words of a column that has no numbers."""
        return _NO + _YES if self.type == "flag" else self.classes

    @property
    def described(self) -> str:
        """Its name and what it may be, in Markdown; as code, since HTML would be rendered."""
        # Every digit: a range is what records are clipped to.
        values = f"{self.low!r} to {self.high!r}".replace(".0 ", " ").removesuffix(".0")
        if self.type != "number":
            values = ", ".join(map(_code, self.classes or ("no", "yes")))
        if self.other:
            values += ", or another"
        if self.missing == "middle":
            values += ", or missing"
        return f"{_code(self.name)}: {values}"

    def features(self) -> dict[str, _Range]:
        """Ranges of the numbers that stand for it, by their names."""
        names = [f"{self.name}={entry}" for entry in self.classes] or [self.name]
        if self.other:
            names.append(f"{self.name} is another")
        ranges = dict.fromkeys(names, (self.low, self.high))
        if self.missing == "middle":
            ranges[f"{self.name} is missing"] = (-1.0, 1.0)
        return ranges

    def words(self, missing: Collection[str]) -> dict[str, float]:
        """Numbers of cells that are words: of a class its place, of a missing value NaN."""
        words = {entry: float(place) for place, entry in enumerate(self.classes)}
        if self.type == "flag":
            words = dict.fromkeys(_NO, 0.0) | dict.fromkeys(_YES, 1.0)
        return words | dict.fromkeys(missing, math.nan if self.missing == "middle" else math.inf)

    def number(self, cell: str, words: Mapping[str, float], decimal: str) -> float:
        """What stands for a cell; infinite where it is refused."""
        # All others come after the last class.
        number = words.get(cell, len(self.classes) if self.other else math.inf)
        if self.type == "number" and cell not in words:
            # A point among decimal commas marks thousands, or another dialect.
            plain = cell.translate({ord("."): decimal, ord(decimal): "."})
            number = float(plain) if _NUMBER.fullmatch(plain) else math.inf
        return number

    def reason(self, cell: str, words: Mapping[str, float], decimal: str) -> str:
        """Why a cell is refused, and what of the settings mends it, without the cell itself.

        A cell is a patient's, and a log may be sent on.
        """
        if cell in words:
            return "is missing, which the schema refuses: fill it in, or leave out the record"
        other = "," if decimal == "." else "."
        if self.type == "number" and math.isfinite(self.number(cell, words, other)):
            return (
                f"is no number; if {other!r} is its decimal mark, give [data] decimal = {other!r}"
            )
        expected = "; of a date give days since a public date"
        if self.choices:
            expected = f" of {_validate.shown([*self.choices])}"
        remedy = f"say what it means, {self.name} = {{ ... }} under [data.values]"
        if self.missing == "middle":
            remedy += ", or list it in [data] missing_values"
        return f"is no {self.type}{expected}; {remedy}"

    def expanded(self, numbers: np.ndarray) -> np.ndarray:
        """Features [m, k], in the schema's units, of the numbers [m] of cells."""
        width = len(self.features())
        if self.classes:
            return np.eye(width)[numbers.astype(int)]
        is_missing = np.isnan(numbers)
        middle = np.where(is_missing, _middle(self.low, self.high), numbers)
        return np.stack([middle, is_missing], axis=1)[:, :width]


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
    """

    columns: tuple[_Column, ...]
    label: _Column
    shape: tuple[int, ...]

    @classmethod
    def of(cls, mapping: Section) -> "Schema":
        """Return the schema of a mapping, as TOML or JSON has it.

        Args:
            mapping: ``columns``, ``label``, and of arrays ``shape``.

        Raises:
            ValueError: For unknown, missing or wrong entries.
        """
        section = _section("schema", mapping, ("columns", "label", "shape"))
        entries = _validate.entries("columns", section.get("columns"))
        columns = [_Column.of(f"column {place}", entry) for place, entry in enumerate(entries, 1)]
        label = _Column.of("label", section.get("label"))
        if label.type == "flag" or label.other or label.missing != "refuse":
            raise ValueError("label is a flag, or has other or missing; give classes, or a range")
        features = [name for column in columns for name in column.features()]
        _check_distinct("columns", features)
        _check_distinct("columns", [column.name for column in (*columns, label)])
        sizes = _validate.entries("shape", section.get("shape", [len(features)]))
        # Of arrays a column is all numbers.
        if len(features) > 1 and sizes != [len(features)]:
            raise _validate.refusal("shape", sizes, "give one column, of numbers, for arrays")
        shape = tuple(_validate.integer("shape", size) for size in sizes)
        return cls(tuple(columns), label, shape)

    @property
    def features(self) -> dict[str, _Range]:
        """A record's features in order, with their ranges in an archive; of arrays one for all."""
        return {name: pair for column in self.columns for name, pair in column.features().items()}

    def described(self) -> dict[str, np.ndarray]:
        """What whoever uses a model needs: features and their ranges [k, 2], the label."""
        features = self.features
        return {
            "features": np.array([*features]),
            "ranges": np.array([*features.values()]),
            "label": np.array(self.label.name),
            "label_range": np.array([self.label.low, self.label.high]),
            "classes": np.array(self.classes, str),
        }

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all that the schema says: equal for equal schemas alone."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

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
            remedy = f"the label {self.label.name!r} is a {self.label.type}, of {count} classes"
            raise _validate.refusal("loss", loss, remedy)


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
        >>> ward = {"name": "ward", "type": "category", "classes": ["heart", "lung"]}
        >>> sick = {"name": "sick", "type": "category", "classes": ["no", "yes"]}
        >>> schema = Schema.of({"columns": [ward], "label": sick})
        >>> records = Records(np.eye(2), np.array([0, 1]), schema, {"age": 0.5})
        >>> print(records.summary())
        2 records
        age: 50.0% clipped into the range
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
                lines.append(f"{name}: {share:.1%} clipped into the range")
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
        >>> age = {"name": "age", "type": "number", "low": 0, "high": 100}
        >>> sick = {"name": "sick", "type": "category", "classes": ["no", "yes"]}
        >>> schema = Schema.of({"columns": [age], "label": sick})
        >>> records = Records(np.ones((100, 1)), np.ones(100), schema, {})
        >>> train, test = split(records, 0.2, seed=0)
        >>> len(train.y), len(test.y)
        (80, 20)
    """
    count = len(records.y)
    share = _validate.number("held_out", held_out)
    _validate.integer("seed", seed, minimum=0)
    tests = round(share * count)
    if share and not 0 < tests < count:
        remedy = "give a number from 0, below 1, that leaves records for each part"
        raise _validate.refusal("held_out", held_out, remedy)
    # NumPy's generators may draw otherwise in another version.
    digests = [hashlib.sha256(f"{seed} {row}".encode()).hexdigest() for row in range(count)]
    order = np.argsort(digests)
    parts = []
    for rows in (np.sort(order[tests:]), np.sort(order[:tests])):
        parts.append(dataclasses.replace(records, x=records.x[rows], y=records.y[rows]))
    return parts[0], parts[1]


def read(source: Section, schema: Schema, folder: _files.PathLike) -> Records:
    """Return a site's records.

    Guarantee: see `Schema`. Errors name file, line and column, what is expected there, and the
    setting that mends it. They show no cell: whoever is asked for help gets the log.

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
    _section("[data]", source, _DIALECT)
    name = source.get("file")
    _text("[data] file", name)
    # As it is: file systems may tell apart two forms of one letter.
    path = Path(folder, str(name))
    with _files.reading(path, "give what the schema and the settings say"), naming({}, f"{path}: "):
        if not path.is_file():
            raise ValueError("there is no such file; mend [data] file")
        if path.suffix == ".npz":
            _section("[data] of an archive", source, ("file",))
            arrays = _files.archive(path)
        else:
            arrays = _table(path, {**_DIALECT, **source}, schema)
        x = _validate.finite_array("x", arrays.get("x"))
        y = _validate.finite_array("y", arrays.get("y"))
        count = len(schema.classes)
        if x.shape[1:] != schema.shape or y.shape != x.shape[:1]:
            remedy = f"give records of shape {schema.shape}, with a label each"
            raise ValueError(f"x has shape {x.shape}, y {y.shape}; {remedy}")
        if count and not np.isin(y, range(count)).all():
            raise ValueError(f"y has other labels than the classes' numbers, 0 .. {count - 1}")
    x, shares = _scaled(x, schema.features)
    if count:
        return Records(x, y.astype(np.int32), schema, shares)
    y, label_share = _scaled(y[:, None], schema.label.features())
    return Records(x, y[:, 0], schema, shares | label_share)


def _middle(low: float, high: float) -> float:
    """The middle of a range, the same wherever it is needed; a sum could overflow."""
    return low / 2 + high / 2


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


def _table(path: Path, source: Section, schema: Schema) -> dict[str, np.ndarray]:
    """Features x in the schema's units, and labels y, of a csv file."""
    columns = {column.name: column for column in (*schema.columns, schema.label)}
    decimal = _validate.one_of("[data] decimal", source["decimal"], (".", ","))
    delimiters = (",", ";", "\t", "|")
    delimiter = _validate.one_of("[data] delimiter", source["delimiter"], delimiters)
    entries = _validate.entries("[data] missing_values", source["missing_values"])
    missing = [_plain(entry) for entry in entries]
    names = _section("[data.names]", source["names"], columns)
    values = _section("[data.values]", source["values"], columns)
    lines = io.StringIO(_decoded(path, source["encoding"]), newline="")
    # Pandas would fill up short rows, and read on behind a broken quote.
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header = [_plain(cell) for cell in next(reader, ())]
    cells = []
    for name, column in columns.items():
        place = _place(header, _text(f"[data.names] {name}", names.get(name, name)), name)
        # No other column of the schema is this one.
        header[place] = ""
        words = column.words(missing)
        meanings = values.get(name, {})
        # A site's word may be another word of the schema.
        own_words = {}
        for cell, meaning in _section(f"[data.values] {name}", meanings, meanings).items():
            own_words[_plain(cell)] = _meaning(column, _plain(meaning), words, decimal)
        cells.append((place, column, words | own_words))
    # Numbers of Python take four times as much memory.
    numbers = array("d")
    try:
        for row in filter(None, reader):
            if len(row) != len(header):
                remedy = f"{len(row)} cells, and line 1 has {len(header)}; see [data] delimiter"
                raise ValueError(remedy)
            for place, column, words in cells:
                cell = _plain(row[place])
                number = column.number(cell, words, decimal)
                if math.isinf(number):
                    reason = column.reason(cell, words, decimal)
                    raise ValueError(f"column {column.name!r} {reason}")
                numbers.append(number)
    except (csv.Error, ValueError) as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None
    table = np.array(numbers).reshape(-1, len(columns)).T
    blocks = [column.expanded(row) for column, row in zip(schema.columns, table, strict=False)]
    return {"x": np.hstack(blocks), "y": table[-1]}


def _decoded(path: Path, encoding: object) -> str:
    """The text of a file, without the byte order mark that Windows writes."""
    data = path.read_bytes()
    remedy = "give the file's under [data], such as encoding = 'cp1252'"
    try:
        return data.decode(_text("[data] encoding", encoding)).removeprefix("\ufeff")
    except UnicodeError as error:
        # Python's own words show letters of a cell.
        line = data[: getattr(error, "start", 0)].count(b"\n") + 1
        raise ValueError(f"line {line} is not in encoding {encoding}; {remedy}") from None
    except LookupError:
        raise _validate.refusal("[data] encoding", encoding, remedy) from None


def _place(header: list[str], title: str, name: str) -> int:
    """Where a column is, by its title; without titles line 1 is a record, and is not shown."""
    count = header.count(title)
    if count == 1:
        return header.index(title)
    if len(header) == 1:
        raise ValueError("line 1 has one column; mend [data] delimiter")
    raise ValueError(
        f"line 1 has {count} columns {title!r}, where one is {name!r} of the schema; give its "
        f"title, {name} = ... under [data.names]"
    )


def _meaning(column: _Column, word: str, words: Mapping[str, float], decimal: str) -> float:
    """The number of what a site says that a cell means: the operator's word, and no cell."""
    # Misspelt, a meaning would be another value in silence.
    strict = dataclasses.replace(column, other=False)
    number = strict.number(word, words, decimal)
    if math.isinf(number):
        remedy = _validate.choice(word, column.choices) if column.choices else "give a number"
        raise _validate.refusal(f"[data.values] {column.name}", word, remedy)
    return number


def _code(text: str) -> str:
    """Text as code in Markdown, in which nothing is a mark."""
    fence = "`"
    while fence in text:
        fence += "`"
    # A space keeps a mark of the text's own apart.
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"
