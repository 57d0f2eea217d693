"""Data files of the artifact: records give every number, at the digits that a cell has.

`tables.toml` says of each file which records a row is about, and what gives its cells.
`PYTHONPATH=.:experiments python tests/docs/test_tables.py` mends the cells that differ.
"""

import csv
import fnmatch
import gzip
import json
import math
import re
import tomllib
from collections.abc import Iterable
from decimal import Decimal
from functools import cache
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

import cifar_doppler
from _common import claims, tables
from dpjax.accounting import budget, finite, gdp, views
from dpjax.contrib import bands, published, snr
from dpjax.mechanism import banded, polynomial, spatial, temporal, workload
from dpjax.mechanism.participation import Participation
from dpjax.plans import noise
from dpjax.results import records
from dpjax.topology import graphs, mixing
from pndp_accounting import account, squares

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "artifact" / "data"
TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
NAMES = TABLES.pop("names") | {part.look.label: label for label, part in noise.DESIGNS.items()}
FAST = [name for name in TABLES if not TABLES[name].get("slow")]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in TABLES if name not in FAST]

ELSEWHERE = {
    "claims_*": "tests/test_claims.py",
    "audit*": "tests/plans/test_audit.py",
    "benchmarks_*": "tests/test_suite.py",
    "tracking_messages": "tests/test_docs_tracking.py",
    "tracking_budgets": "tests/test_docs_tracking.py",
    "secagg_neighbours": "tests/secagg/test_graph.py",
    "mafalda_optimum": "tests/mechanism/test_temporal.py",
    "mafalda_bands": "names of functions, no number of a record",
    "filters_methods": "configs, no number of a record",
    "filters_wiener": "simulated without a record; tests/contrib/test_wiener.py holds the order",
    "package_sizes": "sizes on disk of one installation",
    "extra_sizes": "sizes on disk of one installation",
    "licences_data": "read at the sources",
    "licences_packages": "read in the metadata of packages",
}
"""Files that are not in `tables.toml`: which test holds them, or why none does."""

WORDS = {
    "setting": "words, but in filters_central",
    "remark": "words",
    "unit": "words",
    "record_in_benchmarks": "names of files",
    "squared_error_in_paper": "the paper's",
    "efficiency_in_paper": "the paper's",
    "bytes_per_link_and_round": "4 a number; a ciphertext has 512",
    "milliseconds_per_round": "six exchanges of tracking_speed",
}
"""Columns that no record gives, and why."""

NUMBER = r"-?\d[\d.]*(?:e-?\d+)?"
Row = dict[str, str]


# Rows of records.


@cache
def read(name: str, file: str):
    """All rows of an archive, or of a benchmark's record."""
    archive = ROOT / "docs" / "records" / f"{name}.jsonl.gz"
    benchmark = ROOT / "benchmarks" / "records" / f"{name}.jsonl"
    return records.read(archive if archive.is_file() else benchmark, file)


def stored(name: str, file: str = "*", **where):
    """Rows with these values in columns, or one of a list."""
    return chosen(read(name, file), **where)


def chosen(frame, **where):
    for column, value in where.items():
        frame = frame[frame[column].isin(value if isinstance(value, list) else [value])]
    return frame


def mean_of(frame, column: str, **where) -> float:
    return float(chosen(frame, **where)[column].mean())


def numbers(name: str, column: str, **where) -> tuple[float, ...]:
    """A column of a benchmark's record: of the fastest passes where there are several."""
    frame = stored(name, **where)
    return tuple((frame[frame["fastest"].eq(True)] if "fastest" in frame else frame)[column])


def rate(name: str, column: str, **where) -> float:
    """The one number of a benchmark's record."""
    (number,) = numbers(name, column, **where)
    return float(number)


@cache
def heads(name: str):
    """The metadata of all files of an archive."""
    text = gzip.decompress((ROOT / "docs" / "records" / f"{name}.jsonl.gz").read_bytes())
    lines = [line for line in text.splitlines() if line.startswith(b'{"metadata"')]
    return [json.loads(line)["metadata"] for line in lines]


def seconds(name: str, pattern: str = "*") -> list[float]:
    """How long the runs of an archive's files took."""
    return [head["seconds"] for head in heads(name) if fnmatch.fnmatch(head["file"], pattern)]


def minutes(preset: str, device: str) -> float | None:
    """How long all recorded runs of a preset of cifar_doppler took on a device."""
    archive = "cifar_doppler" + (f"_{preset}" if preset.startswith("long") else "")
    if not (ROOT / "docs" / "records" / f"{archive}.jsonl.gz").is_file():
        return None
    found = [h for h in heads(archive) if (h["preset"], h["device"]["kind"]) == (preset, device)]
    return sum(head["seconds"] for head in found) / 60 if found else None


def span(values: Iterable[float]) -> tuple[float, float]:
    return min(values), max(values)


# What a cell is made of, beyond means.


def significant(pair: tables.Paired) -> str:
    """Whether zero is outside the 95 % interval of a t-test."""
    return "yes" if abs(pair.mean) > claims.margin(pair.standard_error, pair.count) else "no"


def messages(frame, rival: str, row: Row) -> tables.Paired:
    """DOME's lead over a rival, both with the numbers that they send."""
    sent = row["numbers_that_it_sends"].replace("all", str(frame["parameters"].iloc[0]))
    frame = frame.assign(entry=frame["design"] + " " + frame["k"].astype(str))
    dome = f"dome {row['numbers_that_dome_sends']}"
    return tables.paired(frame, f"{rival} {sent}", dome, "test_accuracy", column="entry")


def probes(row: Row) -> int:
    k = int(row["run"].partition("k = ")[2])
    return {"half of k": k // 2, "k": k}.get(row["probes"]) or int(row["probes"])


def loop(name: str, text: str):
    """Rows of a loop without noise: what its name says differs from the plain one."""
    share = 1.0 if re.search("nothing cut|no probes|four probes", text) else 0.99
    where = {"k": 16, "noise": 0.0, "share": share, "probes": 0 if text == "no probes" else 4}
    where["forgetting"] = 1.0 if "nothing forgotten" in text else 0.9
    where["algorithm"] = "printed" if text == "printed lines" else "sketch"
    return stored(name, floor="none", **where)


def batches(row: Row):
    """Rates of large batches: of 1,024 images nine repetitions, of two ways, have a file."""
    ending = "_turns" if row["batch_images"] == "1024" else ""
    return stored(f"dpsgd_{row['batch_images']}{ending}")


def images(where: str) -> float:
    name, model = where.split()
    return rate(name, "examples_per_second", algorithm="dpjax", model=model)


def on_h200() -> float:
    return max(numbers("dpsgd@nvidia-h200", "examples_per_second", algorithm="dpjax"))


def gradients(preset: str) -> float:
    """Clipped gradients of a method at one epsilon: of all step sizes and of all seeds."""
    config = cifar_doppler.PRESETS[preset]
    runs = (1 - config.validation) * len(config.steps) + len(config.seeds)
    return 50_000 * config.epochs * runs


def preset(row: Row) -> cifar_doppler.Config:
    return cifar_doppler.PRESETS[row["preset"]]


def drawn(frame, row: Row, kind: str):
    """What float32 draws are, with powers of two where the file has them."""
    cell = row["float32"]
    if frame.empty:
        return {"laplace": 64.0, "normal": 24.0}[kind]
    columns = {"l": "largest", "p": "probability", "n": "nearest"}
    value = mean_of(frame, columns.get(cell[0], "share"), kind=kind)
    if frame["what"].iloc[0] == "grid":
        return (100 * value,)
    power = cell[0] == "p" or (cell[0], kind) == ("n", "laplace")
    return (value, 2.0, math.log2(value)) if power else value


def bound(rule: str, row: Row, **options) -> float:
    """The bound on [R^-1]_ii of Whisper's setting."""
    setting = {"rounds": 5000, "clip_norm": 0.1, "relation": "replace_agent", "accountant": rule}
    return float(budget.precision_bound(float(row["epsilon"]), 1e-5, **setting, **options))


def averaged(row: Row) -> tuple[float, float]:
    """Ratio (4) and error of its best taps, for AR(1) gradients and noise of power 1."""
    lags = np.arange(int(row["taps"]))
    correlations = 0.9 ** np.abs(np.subtract.outer(lags, lags))
    taps = np.array(snr.optimal_fir(correlations[0] / 2).b)
    missed = 1 - 2 * taps @ correlations[0] + taps @ correlations @ taps
    return snr.signal_to_noise(tuple(taps), (), correlations[0] / 2), missed + taps @ taps


@cache
def polynomials(name: str, rounds: int) -> list[float]:
    """Noise energy over the optimum: independent, and of polynomials of degree 3, 6 and 12."""
    graph = {
        "regular, degree 8": lambda: nx.random_regular_graph(8, 150, seed=0),
        "random, p = 0.06": lambda: graphs.erdos_renyi(150, 0.06, 0),
        "small world, degree 6": lambda: nx.watts_strogatz_graph(150, 6, 0.2, seed=0),
        "grid, 12 x 12": lambda: nx.convert_node_labels_to_integers(nx.grid_2d_graph(12, 12)),
    }[name]()
    weights = mixing.metropolis_hastings(graph)
    horizon = rounds if rounds > 1 else None
    best = spatial.energy(spatial.whisper(weights, 1.0, horizon=horizon), weights, horizon=rounds)
    energies = [spatial.energy(np.eye(len(weights)), weights, horizon=rounds)]
    for degree in (3, 6, 12):
        made = polynomial.design_polynomial(weights, 1.0, degree, step_sizes=np.ones(rounds))
        energies.append(made.value)
    return [energy / best for energy in energies]


@cache
def florentine():
    """500 rounds on the Florentine graph, ten participations, and the optimum."""
    weights = mixing.metropolis_hastings(graphs.florentine())
    when = Participation(500, 10, 50)
    gram = workload.gram(weights, 500)
    return weights, when, gram, temporal.objective(temporal.mafalda(weights, when), gram, when)


def excess(row: Row) -> float:
    """How far above the optimum a strategy of few bands is."""
    weights, when, gram, best = florentine()
    number = float(row["bands_or_fraction"].rpartition(" ")[2] or 0)
    strategy = {
        "banded Toeplitz": lambda: bands.toeplitz(weights, when, int(number)),
        "banded inverse (BISR)": lambda: banded.banded_inverse(when, int(number)),
        "one step (DP-lambda-CGD)": lambda: banded.one_lag(when, number),
        "independent": lambda: temporal.identity(500),
    }[row["strategy"]]()
    return temporal.objective(strategy, gram, when) / best - 1


def over_rounds(graph: str, row: Row):
    """How far below Muffliato's bound the loss to nodes is, after so many rounds, or some to some.

    The attacker is agent 0, or the first five that have a victim so far away.
    """
    weights = mixing.uniform_neighbors(graphs.parse(graph))
    away = [account.distances(weights, [agent]) for agent in range(len(weights))]
    far = np.stack(away) == int(row["distance_hops"])
    attackers = list(np.flatnonzero(far.any(axis=1))[:5]) if row["pairs"] else [0]
    first, last = (list(map(int, row["rounds"].split(" to "))) * 2)[:2]
    found = []
    for rounds in range(first, last + 1):
        when = Participation(rounds, rounds, 1)
        seen = [views.dsgd(weights).pndp(attacker) for attacker in attackers]
        exact = [view.loss(when, gradients="view") for view in seen]
        tight = account.tighter_losses(exact, [view.loss(when) for view in seen])
        limit = published.muffliato_pndp(weights, rounds, numerator="plain").T[attackers]
        found.append(limit[far[attackers]].mean() / squares(tight)[far[attackers]].mean())
    return span(found) if last > first else found[0]


@cache
def releases() -> dict[tuple[str, str], finite.Cost]:
    """What finite precision costs, by noise and agents."""
    mu = gdp.mu(10.0, 1e-5)
    prefix = np.asarray(temporal.prefix_sum(Participation(380, 20, 19)))
    weights = mixing.metropolis_hastings(graphs.erdos_renyi(20, 0.5, 0))
    whisper = np.linalg.cholesky(spatial.whisper(weights, 1.0))
    found = {}
    for name, parameters, rounds, factor, strategy in (
        ("independent", 641, 380, np.ones(148) * 380**0.5, None),
        ("independent", 1_000_000, 625, np.ones(16) * 25, None),
        ("whisper", 641, 5000, whisper * 5000**0.5, None),
        ("prefix_sum", 641, 380, np.ones(148), prefix),
    ):
        scaled = factor * 2 / mu
        spacing = finite.release_grid(scaled, rounds, strategy).spacing
        about = {"parameters": parameters, "mu": mu, "delta": 1e-5, "clip_norm": 1.0}
        cost = finite.release_cost(scaled, rounds, strategy, spacing=spacing, **about)
        found[name, str(len(factor))] = cost
    return found


def release(row: Row) -> finite.Cost:
    return releases()[row["noise"], row["agents"]]


# Findings on other seeds: functions of where the archives are.


def twice(number, *parts, **where) -> tuple[float, float]:
    """What the stored runs give, and those on other seeds."""
    return number("", *parts, **where), number("again/", *parts, **where)


def gains(place: str, design: str) -> float:
    """Points that the best filter gains behind noise."""
    frame = stored(f"{place}doppler_decentralised", phase="final", round=120, design=design)
    means = frame.groupby("filter")["test_accuracy"].mean()
    return 100 * (means.max() - means["none"])


def departed(place: str, policy: str) -> float:
    where = {"round": 4000, "design": "whisper_horizon", "policy": policy}
    return mean_of(stored(f"{place}whisper_departure", **where), "test_loss")


# Cells and what gives them.


class Cells:
    """A row of a file with its rows of records: the words of `tables.toml`."""

    def __init__(self, table: dict, row: Row) -> None:
        self.row = row
        self.names = NAMES | table.get("names", {})
        files = {"archive": table.get("archive"), "file": table.get("file", "*")}
        where = files | table.get("where", {})
        for column, choices in table.get("choose", {}).items():
            where |= choices[row[column]]
        for column, other in table.get("keys", {}).items():
            if row[column]:
                where[other] = self.name(column)
        archive, file = where.pop("archive"), where.pop("file")
        self.frame = stored(archive, file, **where) if archive else None
        if table.get("final"):
            frame = chosen(self.frame, phase="final")
            self.frame = frame[frame["round"] == frame["rounds"]]

    def name(self, column: str):
        """What records call what a cell says."""
        cell = self.row[column]
        if cell in self.names:
            return self.names[cell]
        return float(cell) if re.fullmatch(NUMBER, cell) else cell

    def mean(self, column: str, **where) -> float:
        return mean_of(self.frame, column, **where)

    def deviation(self, column: str, **where) -> float:
        return float(chosen(self.frame, **where)[column].std())

    def error(self, column: str, **where) -> float:
        """The standard error of a mean."""
        values = chosen(self.frame, **where)[column]
        return float(values.std() / len(values) ** 0.5)

    def quantile(self, column: str, part: float) -> float:
        """Of the runs that came below the threshold."""
        return float(self.frame[self.frame["reached"].eq(True)][column].quantile(part))

    def pair(self, better: str, worse: str, value: str, column: str = "design") -> tables.Paired:
        return tables.paired(self.frame, better, worse, value, column=column)

    def pair_of_graphs(self, better: str, worse: str, value: str) -> tables.Paired:
        """As `pair`, of the means over seeds on each graph."""
        means = self.frame.groupby(["graph", "design"], as_index=False)[value].mean()
        renamed = means.rename(columns={"graph": "seed"})
        return tables.paired(renamed, better, worse, value, column="design")

    def won(self, better: str, worse: str, value: str) -> float:
        """On how many seeds the better one is lower."""
        sides = self.frame.pivot(index="seed", columns="design", values=value)
        return float((sides[better] < sides[worse]).sum())

    def bound(self, rule: str, **options) -> float:
        return bound(rule, self.row, **options)

    def value(self, expression: str):
        """What an expression of `tables.toml` gives."""
        own = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        return eval(expression, globals() | own)


def unit(text: str) -> Decimal:
    """What one of the last digit is worth: of 13700 a hundred, as it has three digits."""
    exponent = Decimal(text).as_tuple().exponent
    digits = text.lstrip("-")
    if digits.isdigit() and len(digits) > 3:
        exponent = min(len(digits) - len(digits.rstrip("0")), len(digits) - 3)
    return Decimal(10) ** exponent


def agrees(text: str, value) -> bool:
    """Whether a cell is a value, rounded once; several numbers among words are a tuple."""
    if isinstance(value, str):
        return text == value
    if isinstance(value, tuple):
        parts = re.findall(NUMBER, text)
        return len(parts) == len(value) and all(map(agrees, parts, value))
    if value is None or not math.isfinite(value):
        return text == ""
    if not re.fullmatch(NUMBER, text):
        return False
    return abs(float(text) - value) <= float(unit(text)) / 2 * 1.0001


def cells(name: str) -> list[Row]:
    """The rows of a file."""
    text = (DATA / f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def differing(name: str, rows: Iterable[Row]):
    """Cells that are not what records give: row, column, and what they give."""
    table = TABLES[name]
    for row in rows:
        values = table.get("values", {})
        if "each" in table:
            values = {"value": table["each"][row["what"]]} if row["what"] in table["each"] else {}
        about = Cells(table, row)
        for column, expression in values.items():
            value = about.value(expression)
            if not agrees(row[column], value):
                yield row, column, value


def lines(name: str, rows: Iterable[Row]) -> list[str]:
    """The same to be read."""
    found = differing(name, rows)
    return [f"{list(row.values())[:4]}, {column} is {value}" for row, column, value in found]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_cells_are_what_records_give(name):
    assert not lines(name, cells(name)), "its docstring says how to mend them"


def test_every_file_is_recomputed_or_named():
    used = {
        "archive",
        "file",
        "where",
        "keys",
        "names",
        "choose",
        "final",
        "slow",
        "each",
        "values",
    }
    assert {key for table in TABLES.values() for key in table} <= used
    present = {path.stem for path in DATA.glob("*.csv")}
    named = {stem for stem in present for name in ELSEWHERE if fnmatch.fnmatch(stem, name)}
    assert present == TABLES.keys() | named and not TABLES.keys() & named
    paths = [reason for reason in ELSEWHERE.values() if reason.startswith("tests/")]
    assert all((ROOT / path).is_file() for path in paths)


def seen(name: str, row: Row, column: str) -> bool:
    """Whether a number that is off by two of its last digit is found, or in no record."""
    wrong = f"{Decimal(row[column]) + 2 * unit(row[column])}"
    try:
        return bool(lines(name, [row | {column: wrong}]))
    except (ArithmeticError, KeyError, ValueError, IndexError):
        return True


@pytest.mark.parametrize("name", FAST)
def test_wrong_number_is_found_in_every_column(name):
    each = TABLES[name].get("each")
    rows = [row for row in cells(name) if each is None or row["what"] in each]
    for column in rows[0].keys() - WORDS.keys():
        listed = [row for row in rows if re.fullmatch(NUMBER, row[column])]
        assert not listed or any(seen(name, row, column) for row in listed), column


def rounded(text: str, value: float) -> str:
    """A value with the digits of a cell."""
    mantissa, exponential, _ = text.partition("e")
    if exponential:
        digits = len(mantissa.partition(".")[2])
        return re.sub(r"e\+?(-?)0?", r"e\1", f"{value:.{digits}e}")
    return f"{Decimal(repr(value)).quantize(unit(text)):f}" if text else f"{value:.3g}"


def write() -> None:
    """Put what records give into the cells that differ, and name the others."""
    for name in TABLES:
        rows = cells(name)
        for row, column, value in list(differing(name, rows)):
            if isinstance(value, float) and (not row[column] or re.fullmatch(NUMBER, row[column])):
                row[column] = rounded(row[column], value)
            else:
                print(f"{name}: {column} is {row[column]!r}, and records give {value!r}")
        with (DATA / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    write()
