"""A site's own records: dialects, refusals, and features that no other record moves."""

import codecs
import copy
import csv
import hashlib
import io
import json
import os
import random
import runpy
import tomllib
from pathlib import Path

import numpy as np
import pytest

from dpjax.sites.data import Records, Schema, read, split

AGE = {"name": "age", "type": "number", "low": 0, "high": 100}
SEX = {"name": "sex", "type": "category", "classes": ["female", "male"]}
WARD = {"name": "ward", "type": "category", "classes": ["heart", "lung"], "other": True}
LAB = {"name": "lab", "type": "number", "low": 0, "high": 4, "missing": "middle"}
SMOKER = {"name": "smoker", "type": "flag"}
SICK = {"name": "sick", "type": "category", "classes": ["no", "yes"]}
COLUMNS = [AGE, SEX, WARD, LAB, SMOKER]
MAPPING = {"columns": COLUMNS, "label": SICK}
SCHEMA = Schema.of(MAPPING)
HEADER = ["age", "sex", "ward", "lab", "smoker", "sick"]
ROWS = [
    ["75", "female", "heart", "1", "yes", "yes"],
    ["25.5", "male", "eye", "", "0", "no"],
    ["120", "male", "lung", "4", "TRUE", "no"],
]
FEATURES = [
    [0.5, 1, 0, 1, 0, 0, -0.5, 0, 1],
    [-0.49, 0, 1, 0, 0, 1, 0, 1, 0],
    [1, 0, 1, 0, 1, 0, 1, 0, 1],
]
PIXEL = {"name": "x", "type": "number", "low": 0, "high": 255}
DIGIT = {"name": "y", "type": "category", "classes": ["0", "1", "2"]}
PIXELS = {"shape": [2, 2, 1], "columns": [PIXEL], "label": DIGIT}


def table(rows: list[list[str]], delimiter: str = ",", end: str = "\n", quoting: int = 0) -> str:
    """A table as a spreadsheet writes it."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerows([HEADER, *rows])
    return file.getvalue()


def read_text(
    folder: Path, text: str | bytes, schema: Schema = SCHEMA, **dialect: object
) -> Records:
    """Records of a table of that text."""
    content = text.encode() if isinstance(text, str) else text
    (folder / "records.csv").write_bytes(content)
    return read({"file": "records.csv", **dialect}, schema, folder)


def changed(row: int, column: str, cell: str) -> str:
    """The table with another cell."""
    rows = copy.deepcopy(ROWS)
    rows[row][HEADER.index(column)] = cell
    return table(rows)


def check(records: Records) -> None:
    """The records must be those of ``ROWS``."""
    assert records.x.dtype == np.float32 and records.y.dtype == np.int32
    np.testing.assert_allclose(records.x, FEATURES, atol=1e-7)
    assert records.y.tolist() == [1, 0, 0]
    assert records.clipped["age"] == pytest.approx(1 / 3)


def test_features_are_named_and_scaled_by_the_schema_alone(tmp_path: Path) -> None:
    check(read_text(tmp_path, table(ROWS)))
    names = ["age", "sex=female", "sex=male", "ward=heart", "ward=lung", "ward is another", "lab"]
    assert list(SCHEMA.features) == [*names, "lab is missing", "smoker"]
    assert SCHEMA.shape == (9,) and SCHEMA.features["lab"] == (0, 4)


def with_comma(rows: list[list[str]]) -> list[list[str]]:
    """Rows with decimal commas."""
    return [[cell.replace(".", ",") for cell in row] for row in rows]


DIALECTS = {
    "semicolons": (table(ROWS, ";"), {"delimiter": ";"}),
    "tabs": (table(ROWS, "\t"), {"delimiter": "\t"}),
    "bars": (table(ROWS, "|"), {"delimiter": "|"}),
    "decimal commas": (table(with_comma(ROWS), ";"), {"delimiter": ";", "decimal": ","}),
    "decimal commas between commas": (table(with_comma(ROWS)), {"decimal": ","}),
    "quoted": (table(ROWS, quoting=csv.QUOTE_ALL), {}),
    "lines of Windows": (table(ROWS, end="\r\n"), {}),
    "lines of old machines": (table(ROWS, end="\r"), {}),
    "blank lines": (table(ROWS, end="\n\n"), {}),
    "no last end": (table(ROWS).rstrip("\n"), {}),
    "byte order mark": (codecs.BOM_UTF8 + table(ROWS).encode(), {}),
    "wide letters": (table(ROWS).encode("utf-16"), {"encoding": "utf-16"}),
    "wide, marked by hand": (
        ("\ufeff" + table(ROWS)).encode("utf-16-le"),
        {"encoding": "UTF-16LE"},
    ),
    "spaces": (table([[f" {cell} " for cell in row] for row in ROWS]), {}),
    "another order": ("\n".join(",".join(row[::-1]) for row in [HEADER, *ROWS]), {}),
    "more columns": ("\n".join(",".join(["n", *row, ""]) for row in [HEADER, *ROWS]), {}),
    "missing by other words": (
        table([[cell or "n/a" for cell in row] for row in ROWS]),
        {"missing_values": ["NA", "n/a"]},
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_gives_the_same_records(name: str, tmp_path: Path) -> None:
    text, dialect = DIALECTS[name]
    check(read_text(tmp_path, text, **dialect))


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "latin-1", "mac-roman"])
def test_names_and_values_are_the_site_s_own(encoding: str, tmp_path: Path) -> None:
    text = (
        table(ROWS).replace("sex", "Geschlecht").replace("age", "Alter (è)").replace("eye", "Œil")
    )
    text = text.replace("female", "weiblich").replace("male", "männlich").replace("Œ", "é")
    check(
        read_text(
            tmp_path,
            text.encode(encoding),
            encoding=encoding,
            names={"age": "Alter (è)", "sex": "Geschlecht"},
            values={"sex": {"weiblich": "female", "männlich": "male"}},
        )
    )


def test_letters_of_two_forms_are_one(tmp_path: Path) -> None:
    text = table(ROWS).replace("age", "A\u0308lter")
    check(read_text(tmp_path, text, names={"age": "Älter"}))


def test_words_of_the_site_are_compared_in_one_form(tmp_path: Path) -> None:
    text = table(ROWS).replace("male", "ma\u0308le").replace(",,", ",-9,")
    values = {"sex": {"fem\u00e4le": "female", " m\u00e4le ": "male"}}
    check(read_text(tmp_path, text, values=values, missing_values=[" -9"]))
    text = table(ROWS).replace("eye", "e\u0301")
    assert read_text(tmp_path, text, values={"ward": {"\u00e9": "lung"}}).x[1, 4] == 1


def test_a_value_may_stand_for_a_missing_one(tmp_path: Path) -> None:
    text = table(ROWS).replace(",eye,,", ",eye,<0.1,")
    check(read_text(tmp_path, text, values={"lab": {"<0.1": ""}}))


def test_words_of_the_schema_may_mean_each_other(tmp_path: Path) -> None:
    swapped = {"female": "male", "male": "female"}
    text = table([[swapped.get(cell, cell) for cell in row] for row in ROWS])
    check(read_text(tmp_path, text, values={"sex": swapped}))


def test_cells_of_several_lines_count_as_lines(tmp_path: Path) -> None:
    text = table([["75", "female", "a\nb", "1", "yes", "yes"], ["x", *ROWS[1][1:]]])
    with pytest.raises(ValueError, match="line 4: column 'age' is no number"):
        read_text(tmp_path, text)


CELLS = [
    ("age", "old", "is no number"),
    ("age", "", "is missing, which the schema refuses: fill it in, or leave out the record"),
    ("age", "inf", "is no number"),
    ("age", "-Infinity", "is no number"),
    ("age", "nan", "is no number"),
    ("age", "1e999", "is no number"),
    ("age", "1_0", "is no number"),
    ("age", "0x10", "is no number"),
    ("age", "٣", "is no number"),
    ("age", "1 000", "is no number"),
    ("age", "3,5", r"is no number; if ',' is its decimal mark, give \[data\] decimal = ','$"),
    ("age", "1,234.5", r"is no number; of a date .* age = { ... } under \[data.values\]$"),
    ("age", "2020-01-31", "is no number; of a date give days since a public date"),
    ("age", "31.01.2020", "is no number"),
    ("age", "7" * 39 + "abc", "is no number"),
    ("age", "pickle", "is no number"),
    ("lab", "ND", r"say what it means, .* or list it in \[data\] missing_values$"),
    (
        "sex",
        "femal",
        r"is no category of \['female', 'male'\]; say what it means, sex = { ... } under \[data.v",
    ),
    ("sex", "Male", "is no category"),
    ("sex", "", "is missing, which the schema refuses"),
    ("ward", "", "is missing, which the schema refuses"),
    ("smoker", "2", "is no flag of .'0', 'no',"),
    ("smoker", "maybe", r"smoker = { ... } under \[data.values\]"),
    ("sick", "unknown", "is no category"),
    ("sick", "", "is missing, which the schema refuses"),
]


@pytest.mark.parametrize(("column", "cell", "message"), CELLS)
def test_a_cell_is_refused_by_its_place(
    column: str, cell: str, message: str, tmp_path: Path
) -> None:
    place = rf"records\.csv: line 3: column '{column}' .*{message}"
    with pytest.raises(ValueError, match=place):
        read_text(tmp_path, changed(1, column, cell))


def test_no_error_shows_a_cell(tmp_path: Path) -> None:
    """Logs may be sent on, and a cell is a patient's; so is line 1 of a file without titles."""
    secret = "Dupont9"
    texts = [changed(1, column, secret) for column in ("age", "sex", "lab", "smoker", "sick")]
    texts.append(table(ROWS).partition("\n")[2].replace("heart", secret))
    texts.append(table(ROWS) + f"{secret},1\n")
    texts.append(table(ROWS) + f'"{secret}"{secret},1\n')
    texts.append(table(ROWS) + f'"{secret}\n')
    texts.append(table(ROWS, ";").replace("age", secret))
    for text in texts:
        with pytest.raises(ValueError, match=r"records\.csv: line \d") as caught:
            read_text(tmp_path, text)
        assert secret not in str(caught.value) and "heart" not in str(caught.value)
    with pytest.raises(ValueError, match="line 3 is not in encoding ascii") as caught:
        read_text(tmp_path, changed(1, "ward", f"é{secret}"), encoding="ascii")
    assert secret not in str(caught.value) and "0x" not in str(caught.value)


def test_a_point_among_decimal_commas_is_refused(tmp_path: Path) -> None:
    for cell in ("1.5", "1.234,5"):
        text = "\n".join([";".join(HEADER), f"{cell};male;eye;1;0;no"])
        with pytest.raises(ValueError, match="line 2: column 'age' is no number"):
            read_text(tmp_path, text, delimiter=";", decimal=",")


TABLES = {
    "empty": ("", "line 1 has 0 columns 'age', where one is 'age' of the schema; give its title"),
    "blank": ("\n\n", "line 1 has 0 columns 'age'"),
    "header alone": (table([]), "give at least one entry"),
    "missing column": (
        table(ROWS).replace("age", "ages"),
        r"line 1 has 0 columns 'age', .* age = ... under \[data.names\]$",
    ),
    "column twice": (table(ROWS).replace("ward", "age"), "line 1 has 2 columns 'age'"),
    "long row": (
        table(ROWS) + "1,2,3,4,5,6,7\n",
        "line 5: 7 cells, and line 1 has 6; see .data. d",
    ),
    "short row": (table(ROWS) + "1,2\n", "line 5: 2 cells, and line 1 has 6"),
    "open quote": (table(ROWS) + '"1', "line 5: unexpected end of data"),
    "broken quote": (table(ROWS) + '"1"2,\n', "line 5: ',' expected after"),
    "other delimiter": (table(ROWS, ";"), r"line 1 has one column; mend \[data\] delimiter"),
    "letters": (
        table(ROWS).replace("eye", "œil").encode("cp1252"),
        r"line 3 is not in encoding utf-8; give the file's under \[data\], such as encoding = 'cp1",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_refused(name: str, tmp_path: Path) -> None:
    text, message = TABLES[name]
    with pytest.raises(ValueError, match=rf"records\.csv: .*{message}"):
        read_text(tmp_path, text)


SOURCES = [
    ({"delimeter": ";"}, r"\[data\]: delimeter is unknown; did you mean delimiter"),
    ({"delimiter": "::"}, "delimiter is '::'; choose one of"),
    ({"delimiter": "\n"}, "delimiter is"),
    ({"decimal": ";"}, "decimal is ';'; choose one of"),
    ({"encoding": "utf-9"}, r"\[data\] encoding is 'utf-9'; give the file's"),
    ({"encoding": "hex"}, r"\[data\] encoding is 'hex'; give the file's"),
    ({"encoding": None}, "encoding is missing"),
    ({"encoding": "ascii"}, "give the file's under"),
    ({"names": {"agee": "Alter"}}, r"\[data.names\]: agee is unknown; did you mean age"),
    ({"names": ["age"]}, r"\[data.names\] is"),
    ({"names": {"age": ""}}, r"\[data.names\] age is ''"),
    ({"values": {"sexe": {}}}, r"\[data.values\]: sexe is unknown; did you mean sex"),
    ({"values": {"sex": "m"}}, r"\[data.values\] sex is 'm'; give a section"),
    ({"values": {"smoker": {"J": "ja"}}}, r"\[data.values\] smoker is 'ja'; choose one of 0, no,"),
    ({"values": {"age": {"old": "ninety"}}}, r"\[data.values\] age is 'ninety'; give a number"),
    (
        {"values": {"ward": {"h": "haert"}}},
        r"\[data.values\] ward is 'haert'; did you mean heart\? If not, choose one of heart, lung",
    ),
    ({"missing_values": "NA"}, "missing_values is 'NA'; give a list"),
    ({"file": "other.csv"}, "other.csv: there is no such file"),
    ({"file": "."}, "there is no such file"),
    ({"file": "a\0.csv"}, "file is"),
    ({"file": None}, r"\[data\] file is missing"),
    ({"file": "x" * 300}, "File name too long|there is no such file"),
]


@pytest.mark.parametrize(("source", "message"), SOURCES)
def test_a_source_is_refused(source: dict[str, object], message: str, tmp_path: Path) -> None:
    text = changed(1, "ward", "œil")
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path, text, **source)


def test_one_column_serves_for_one_alone(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="line 1 has 0 columns 'age', where one is 'lab' of the schema"
    ):
        read_text(tmp_path, table(ROWS), names={"lab": "age"})


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "records.csv")
    with pytest.raises(ValueError, match="there is no such file"):
        read({"file": "records.csv"}, SCHEMA, tmp_path)


SCHEMAS = [
    ([], "schema is \\[\\]; give a section"),
    ({}, "columns is missing"),
    ({"columns": COLUMNS}, "label is missing; give a section"),
    ({"columns": [], "label": SICK}, "columns is"),
    ({**MAPPING, "lable": 1}, "schema: lable is unknown; did you mean label"),
    ({**MAPPING, "columns": "age"}, "columns is 'age'; give a list"),
    ({**MAPPING, "columns": [AGE, AGE]}, "columns is .*give 1 or more, each once"),
    ({**MAPPING, "columns": [AGE, SICK]}, "columns is .*give 1 or more, each once"),
    ({**MAPPING, "columns": [SEX, {**SMOKER, "name": "sex=male"}]}, "give 1 or more, each once"),
    ({**MAPPING, "columns": [5]}, "column 1 is 5; give a section"),
    ({**MAPPING, "columns": [{"name": "a", "type": "date"}]}, "column 1: type is 'date'; choose"),
    ({**MAPPING, "columns": [{"type": "flag"}]}, "column 1: name is missing"),
    ({**MAPPING, "columns": [{**SMOKER, "name": "a\nb"}]}, "column 1: name is 'a.nb'; give a text"),
    ({**MAPPING, "columns": [{**SMOKER, "low": 0}]}, "column 1: low is unknown"),
    ({**MAPPING, "columns": [{**AGE, "hihg": 9}]}, "hihg is unknown; did you mean high"),
    ({**MAPPING, "columns": [{"name": "a", "type": "number", "low": 0}]}, "high is missing"),
    ({**MAPPING, "columns": [{"name": "a", "type": "number", "high": 0}]}, "low is missing"),
    ({**MAPPING, "columns": [{**AGE, "high": 0}]}, "high is 0.0; give a number above low, 0"),
    ({**MAPPING, "columns": [{**AGE, "high": float("inf")}]}, "high is inf"),
    ({**MAPPING, "columns": [{**AGE, "high": float("nan")}]}, "high is nan"),
    ({**MAPPING, "columns": [{**AGE, "high": 5e-324}]}, "high is 5e-324; give a number above"),
    ({**MAPPING, "columns": [{**AGE, "low": "0"}]}, "low is '0'"),
    ({**MAPPING, "columns": [{**AGE, "missing": "mean"}]}, "missing is 'mean'; choose one of"),
    ({**MAPPING, "columns": [{**SEX, "missing": "middle"}]}, "missing is unknown"),
    ({**MAPPING, "columns": [{**SEX, "classes": ["m"]}]}, "give 2 or more, each once"),
    ({**MAPPING, "columns": [{**SEX, "classes": ["m", "m "]}]}, "give 2 or more, each once"),
    ({**MAPPING, "columns": [{**SEX, "classes": "mf"}]}, "classes is 'mf'; give a list"),
    ({**MAPPING, "columns": [{"name": "a", "type": "category"}]}, "classes is missing"),
    ({**MAPPING, "columns": [{**SEX, "other": 1}]}, "other is 1; give True or False"),
    ({**MAPPING, "label": SMOKER}, "label is a flag"),
    ({**MAPPING, "label": WARD}, "label is a flag, or has other"),
    ({**MAPPING, "label": LAB}, "label is a flag, or has other or missing"),
    ({**PIXELS, "shape": [0]}, "shape is 0"),
    ({**PIXELS, "shape": 4}, "shape is 4; give a list"),
    ({**MAPPING, "shape": [2, 2, 1]}, "shape is .*give one column, of numbers, for arrays"),
]


@pytest.mark.parametrize(("mapping", "message"), SCHEMAS)
def test_a_schema_is_refused(mapping: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schema.of(mapping)


def with_column(place: int, **entries: object) -> dict[str, object]:
    """The schema with other entries in one column."""
    columns = copy.deepcopy(COLUMNS)
    columns[place] |= entries
    return {**MAPPING, "columns": columns}


DIFFERENCES = [
    with_column(0, high=120),
    with_column(0, low=-0.0),
    with_column(1, name="gender"),
    with_column(1, classes=["male", "female"]),
    with_column(2, other=False),
    with_column(3, missing="refuse"),
    {**MAPPING, "columns": COLUMNS[:4]},
    {**MAPPING, "columns": [*COLUMNS, {**AGE, "name": "bmi"}]},
    {**MAPPING, "columns": COLUMNS[::-1]},
    {**MAPPING, "label": {**SICK, "classes": ["no", "may", "yes"]}},
    PIXELS,
]


@pytest.mark.parametrize("mapping", DIFFERENCES)
def test_other_schemas_have_other_digests(mapping: dict[str, object]) -> None:
    assert Schema.of(mapping).digest != SCHEMA.digest


@pytest.mark.parametrize("mapping", [json.loads(json.dumps(MAPPING)), with_column(0, low=0.0)])
def test_equal_schemas_have_one_digest(mapping: dict[str, object]) -> None:
    assert Schema.of(mapping).digest == SCHEMA.digest


def test_a_file_is_found_by_the_very_letters(tmp_path: Path) -> None:
    name = "re\u0301sume\u0301.csv"
    (tmp_path / name).write_text(table(ROWS), encoding="utf-8")
    check(read({"file": name}, SCHEMA, tmp_path))


def test_shapes_of_arrays_differ_in_digest() -> None:
    other = {**PIXELS, "shape": [4, 1]}
    assert Schema.of(PIXELS).digest != Schema.of(other).digest


def test_the_digest_is_that_of_canonical_json() -> None:
    schema = Schema.of({"columns": [AGE], "label": SICK})
    words = (
        '{"columns": [{"classes": [], "high": 100.0, "low": 0.0, "missing": "refuse", "name": '
        '"age", "other": false, "type": "number"}], "label": {"classes": ["no", "yes"], "high": '
        '1.0, "low": -1.0, "missing": "refuse", "name": "sick", "other": false, "type": '
        '"category"}, "shape": [1]}'
    )
    assert schema.digest == hashlib.sha256(words.encode()).hexdigest()


def test_no_record_moves_another_s_features(tmp_path: Path) -> None:
    """Nothing is computed from data: no mean, no maximum, no list of classes."""
    rng = random.Random(0)
    others = [
        lambda: str(rng.uniform(-1e6, 1e6)),
        lambda: rng.choice(["female", "male"]),
        lambda: rng.choice(["heart", "lung", "eye", "x"]),
        lambda: rng.choice(["", "3", "-1e9"]),
        lambda: rng.choice(["yes", "0"]),
        lambda: rng.choice(["no", "yes"]),
    ]
    before = read_text(tmp_path, table(ROWS * 4))
    for _ in range(100):
        row = rng.randrange(12)
        rows = copy.deepcopy(ROWS * 4)
        rows[row] = [make() for make in others]
        after = read_text(tmp_path, table(rows))
        rest = np.arange(12) != row
        np.testing.assert_array_equal(after.x[rest], before.x[rest])
        np.testing.assert_array_equal(after.y[rest], before.y[rest])
        assert np.abs(after.x).max() <= 1


def save(folder: Path, **arrays: object) -> dict[str, object]:
    """The source of an archive of these arrays."""
    np.savez(folder / "records.npz", **arrays)
    return {"file": "records.npz"}


def test_an_archive_has_features_in_the_schema_s_units(tmp_path: Path) -> None:
    x = np.array(FEATURES)
    x[:, 0] = [75, 25.5, 120]
    x[:, 6] = [1, 2, 4]
    check(read(save(tmp_path, x=x, y=[1, 0, 0]), SCHEMA, tmp_path))


def test_arrays_of_any_shape_are_scaled(tmp_path: Path) -> None:
    x = np.array([[[[0], [255]], [[51], [102]]], [[[0], [0]], [[0], [0]]]], np.uint8)
    records = read(save(tmp_path, x=x, y=np.array([2, 0])), Schema.of(PIXELS), tmp_path)
    assert records.x.shape == (2, 2, 2, 1) and records.x.dtype == np.float32
    np.testing.assert_allclose(records.x[0].ravel(), [-1, 1, -0.6, -0.2], atol=1e-7)
    assert records.y.tolist() == [2, 0] and records.clipped == {"x": 0}
    narrow = Schema.of({**PIXELS, "columns": [{**PIXEL, "high": 100}]})
    records = read(save(tmp_path, x=x, y=np.array([2, 0])), narrow, tmp_path)
    assert records.clipped == {"x": 0.25} and records.x.max() == 1


ONES = np.ones((3, 9))
ARCHIVES = [
    ({"x": ONES}, "y is not an array of numbers"),
    ({"y": ONES[:, 0]}, "x is not an array of numbers"),
    (
        {"x": ONES[:, 1:], "y": [0, 1, 1]},
        r"x has shape \(3, 8\), y \(3,\); give records of shape \(9,\)",
    ),
    ({"x": ONES, "y": [0, 1]}, r"y \(2,\); give records"),
    ({"x": ONES[:0], "y": []}, "give at least one entry"),
    ({"x": ONES * np.nan, "y": [0, 1, 1]}, "x holds nan"),
    ({"x": ONES * np.inf, "y": [0, 1, 1]}, "x holds inf"),
    ({"x": ONES, "y": [0, 1, 2]}, "y has other labels than the classes' numbers, 0 .. 1"),
    ({"x": ONES, "y": [0, 1, -1]}, "y has other labels"),
    ({"x": ONES, "y": [0, 1, 0.5]}, "y has other labels"),
    ({"x": ONES.astype(str), "y": [0, 1, 1]}, "x is not an array of numbers"),
    ({"x": ONES.astype(object), "y": [0, 1, 1]}, "holds Python objects"),
]


@pytest.mark.parametrize(("arrays", "message"), ARCHIVES)
def test_an_archive_is_refused(arrays: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"records\.npz: .*{message}"):
        read(save(tmp_path, **arrays), SCHEMA, tmp_path)


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "records.npz").write_bytes(table(ROWS).encode())
    with pytest.raises(ValueError, match=r"records\.npz: "):
        read({"file": "records.npz"}, SCHEMA, tmp_path)
    with pytest.raises(ValueError, match=r"\[data\] of an archive: decimal is unknown"):
        read({"file": "records.npz", "decimal": ","}, SCHEMA, tmp_path)
    with pytest.raises(ValueError, match="give records of shape"):
        read_text(tmp_path, "x,y\n1,1\n", Schema.of(PIXELS))


def test_a_label_may_be_a_number(tmp_path: Path) -> None:
    schema = Schema.of({"columns": [SEX], "label": {**AGE, "high": 50}})
    records = read_text(tmp_path, table(ROWS), schema)
    np.testing.assert_allclose(records.y, [1, 0.02, 1], atol=1e-6)
    assert records.y.dtype == np.float32 and records.clipped["age"] == pytest.approx(2 / 3)
    source = save(tmp_path, x=np.eye(2), y=[75, 25.5])
    np.testing.assert_allclose(read(source, schema, tmp_path).y, [1, 0.02], atol=1e-6)


def test_labels_are_coded_for_the_loss() -> None:
    y = np.array([0, 1], np.int32)
    assert Records(y, y, SCHEMA, {}).targets("logistic").tolist() == [-1, 1]
    assert Records(y, y, SCHEMA, {}).targets("cross_entropy").tolist() == [0, 1]
    number = Schema.of({"columns": [SEX], "label": AGE})
    assert Records(y, y, number, {}).targets("squared").tolist() == [0, 1]


LOSSES = [
    (MAPPING, "squared", "loss is 'squared'; the label 'sick' is a category, of 2 classes"),
    (PIXELS, "logistic", "loss is 'logistic'; the label 'y' is a category, of 3 classes"),
    ({"columns": [SEX], "label": AGE}, "logistic", "the label 'age' is a number"),
    ({"columns": [SEX], "label": AGE}, "cross_entropy", "the label 'age' is a number"),
    (MAPPING, "hinge", "loss is 'hinge'; choose one of"),
]


@pytest.mark.parametrize(("mapping", "loss", "message"), LOSSES)
def test_a_loss_of_other_labels_is_refused(
    mapping: dict[str, object], loss: str, message: str
) -> None:
    schema = Schema.of(mapping)
    y = np.array([0, 1], np.int32)
    with pytest.raises(ValueError, match=message):
        schema.check_loss(loss)
    with pytest.raises(ValueError, match=message):
        Records(y, y, schema, {}).targets(loss)


def test_extreme_ranges_stay_within_one(tmp_path: Path) -> None:
    for low, high in ((-1.7e308, 1.7e308), (0, 1e-300), (-3, 1)):
        schema = Schema.of({"columns": [{**LAB, "low": low, "high": high}], "label": SICK})
        cells = [repr(float(low)), repr(float(high)), "", "1e308", "-1e308"]
        rows = [[*ROWS[0][:3], cell, *ROWS[0][4:]] for cell in cells]
        x = read_text(tmp_path, table(rows), schema).x
        assert x[0, 0] == -1 and x[1, 0] == 1 and x[2].tolist() == [0, 1] and np.abs(x).max() <= 1


def records_of(count: int) -> Records:
    """Records that say their place."""
    return Records(np.arange(count)[:, None], np.arange(count), SCHEMA, {"age": 0.25, "lab": 0.0})


def test_the_held_out_are_a_share_by_place_and_seed() -> None:
    train, test = split(records_of(2000), 0.2, seed=3)
    assert sorted([*train.y, *test.y]) == list(range(2000))
    assert train.y.tolist() == sorted(train.y) and test.y.tolist() == sorted(test.y)
    assert train.x[:, 0].tolist() == train.y.tolist() and len(test.y) == 400
    # By hand: a later version must not train on what an earlier one held out.
    digests = {row: hashlib.sha256(b"3 %d" % row).digest() for row in range(2000)}
    assert test.y.tolist() == sorted(sorted(digests, key=digests.get)[:400])
    assert split(records_of(2000), 0.2, seed=4)[1].y.tolist() != test.y.tolist()
    # The places of the held out say nothing of values, so that no record moves another.
    assert abs(test.y.mean() - 1000) < 90


def test_none_may_be_held_out() -> None:
    train, test = split(records_of(5), 0, seed=0)
    assert len(train.y) == 5 and test.x.shape == (0, 1)


@pytest.mark.parametrize(
    "share", [-0.1, 1, 1.5, "0.2", float("nan"), None, True, 0.001, 0.999, np.inf]
)
def test_other_shares_are_refused(share: object) -> None:
    with pytest.raises(ValueError, match="held_out is"):
        split(records_of(5), share, seed=0)
    with pytest.raises(ValueError, match="seed is"):
        split(records_of(5), 0.5, seed=-1)


def test_the_operator_sees_what_was_clipped_and_no_value() -> None:
    records = records_of(1200)
    assert records.summary() == "1,200 records\nage: 25.0% clipped into the range"
    assert "1199" not in repr(records)


def corrupted(text: bytes, rng: random.Random) -> bytes:
    """A table with one to four accidents."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 1, 1, 3, 40]))
        noise = rng.choice(
            [
                b"", b",", b";", b'"', b"\n", b"\r", b"\0", b"\xff", b"\xef\xbb\xbf", b"NaN",
                b"inf", b"1e999", b"2020-01-01", b"-", rng.randbytes(3), text[start:end] * 2,
                "é\u2028".encode(), b"9" * 5000, b"9" * 140_000,
            ]
        )  # fmt: skip
        text = text[:start] + noise + text[end:]
    return text


def test_no_accident_of_a_table_escapes(tmp_path: Path) -> None:
    """It is read within the ranges, or refused by a line of its own that names the file."""
    rng = random.Random(1)
    refused = 0
    for _ in range(300):
        text = corrupted(table(ROWS * 2).encode(), rng)
        try:
            records = read_text(tmp_path, text, missing_values=["", "NA"])
        except ValueError as error:
            refused += 1
            message = str(error)
            assert message.startswith(f"{tmp_path / 'records.csv'}"), message
            assert "\n" not in message and len(message) < 400, message
            words = ("is no number", "is no category", "is no flag")
            cell = any(word in message for word in words)
            assert not cell or ("line " in message and "column '" in message), message
        else:
            assert np.isfinite(records.x).all() and np.abs(records.x).max() <= 1
            assert len(records.x) == len(records.y) > 0
    assert 150 < refused < 290


def test_hospitals_of_unlike_dialects_have_one_schema(tmp_path: Path) -> None:
    """The example's generated tables say the same, read by their own settings."""
    example = Path(__file__).resolve().parents[2] / "examples/hospitals"
    runpy.run_path(str(example / "generate.py"))["main"](tmp_path)
    study = tomllib.loads((example / "study.toml").read_text(encoding="utf-8"))
    schema = Schema.of(tomllib.loads((example / "schema.toml").read_text(encoding="utf-8")))
    schema.check_loss(study["model"]["loss"])
    rates = {}
    for name, count in study["data"]["counts"].items():
        source = tomllib.loads((tmp_path / name / "data.toml").read_text(encoding="utf-8"))
        records = read(source, schema, tmp_path / name)
        train, _ = split(records, 0.2, seed=0)
        assert len(train.y) == count
        rates[name] = records.y.mean()
        shares = dict(zip(schema.features, records.x.mean(axis=0), strict=True))
        assert 0.4 < shares["sex=male"] < 0.6 and 0.05 < shares["creatinine is missing"] < 0.15
        assert 0.05 < shares["ward is another"] < 0.15 < shares["ward=cardiology"] < 0.25
        assert 0 < records.clipped["age"] < 0.05
    assert rates["lyon"] + 0.1 < rates["geneva"] and rates["geneva"] + 0.05 < rates["turin"]
