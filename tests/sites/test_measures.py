"""Statistics of columns and evaluation over sites: what is summed, learnt, charged and refused."""

import itertools
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import _files
from dpjax.encoding import integers
from dpjax.sites import command, measures, project, start, wire
from dpjax.sites.compute import SumRounds
from dpjax.sites.data import Records, Schema, split
from dpjax.sites.identity import Authority, Roster, request
from dpjax.sites.noise import SiteNoise
from dpjax.sites.project import Project
from tests.sites.test_hospitals import example
from tests.sites.test_phases import SUMS, Sites, keys
from tests.sites.test_project import changed, refused, resealed, roster

__all__ = ["example", "keys"]

NAMES = ("geneva", "lyon", "turin")
AGE = {"name": "age", "type": "number", "low": 0, "high": 100}
GLUCOSE = {"name": "glucose", "type": "number", "low": 2, "high": 12, "missing": "middle"}
WARD = {"name": "ward", "type": "category", "classes": ["medicine", "surgery"], "other": True}
SICK = {"name": "sick", "type": "category", "classes": ["no", "yes"]}
GRADE = {"name": "grade", "type": "category", "classes": ["low", "middle", "high"]}
DAYS = {"name": "days", "type": "number", "low": 0, "high": 30}
SCHEMA = {"columns": [AGE, GLUCOSE, WARD], "label": SICK}
SCHEMAS: dict[str, dict[str, Any]] = {
    "classes": SCHEMA,
    "number": {"columns": [AGE, {"name": "smoker", "type": "flag"}], "label": DAYS},
    "image": {
        "columns": [{"name": "pixel", "type": "number", "low": 0, "high": 1}],
        "label": GRADE,
        "shape": [4, 4, 1],
    },
}
MOST = 60
SETTINGS: dict[str, Any] = {
    "model": {"name": "Columns", "most": MOST},
    "protect": {"relation": "zero_out_record", "attacker": "aggregator"},
    "budget": {"epsilon": 8.0, "delta": 1e-4, "accountant": "zcdp"},
    "noise": [{"name": "Discrete", "colluders": 1}],
}
LINEAR = {"name": "Linear", "loss": "logistic"}
WEIGHT = np.array([1.5, -2.0, 0.5, 1.0, -1.0, 0.0], np.float32)


def records_of(count: int, seed: int, extreme: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Records that the schema makes, scaled."""
    rng = np.random.default_rng(seed)
    numbers = rng.uniform(-1, 1, (count, 2))
    if extreme:
        numbers = rng.choice([-1.0, 0.0, 1.0], (count, 2))
    missing = rng.random(count) < 0.2
    numbers[missing, 1] = 0
    ward = np.eye(3)[rng.integers(0, 3, count)]
    x = np.hstack([numbers, missing[:, None], ward]).astype(np.float32)
    y = (rng.random(count) < 1 / (1 + np.exp(-x @ WEIGHT))).astype(np.int32)
    return x, y


def model_file(folder: Path, **changes: np.ndarray) -> str:
    """What a run has saved."""
    path = folder / "model.npz"
    entries = {
        "statement": np.array("a statement"),
        "['params']['bias']": np.float32(0.25),
        "['params']['weight']": WEIGHT,
        "seed": np.array(5),
        **Schema.of(SCHEMA).described(),
        **changes,
    }
    np.savez(path, **entries)
    return str(path)


def evaluation(folder: Path, **changes: Any) -> dict[str, Any]:
    section = {"name": "Evaluation", "file": model_file(folder), "bins": 10, "most": MOST}
    return {**SETTINGS, "model": {**section, "model": LINEAR, **changes}}


def plan_of(folder: Path, settings: dict[str, Any], name: str = "plan") -> Project:
    return project.write(settings, roster(*NAMES), SCHEMA, folder / f"{name}.json")


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return plan_of(tmp_path_factory.mktemp("columns"), SETTINGS)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("evaluated")
    return plan_of(folder, evaluation(folder))


def measure_of(schema: dict[str, Any]) -> measures.Measure:
    return measures.of({"name": "Columns", "most": 1}, Schema.of(schema), None, {})


def phis(measure: measures.Measure, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(measure.phi))(x, y), np.float64)


def rounds_of(study: Project, data: tuple[np.ndarray, np.ndarray], site: int) -> SumRounds:
    problem = study.problem(*data, *data, NAMES[site])
    return SumRounds(study.plan, problem, site, seed=study.seed)


def sum_of(study: Project, data: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """A site's clipped sum, before rounding and noise."""
    rounds = rounds_of(study, data, 0)
    (leaf,) = jax.tree.leaves(rounds.outgoing(rounds.init()).message)
    return np.ravel(np.asarray(leaf, np.float64))


# What a record adds.


@pytest.mark.mutant
@pytest.mark.parametrize("name", SCHEMAS)
def test_no_record_is_longer_than_one(name: str) -> None:
    """The bound is met, so that no noise is wasted, and never exceeded."""
    schema = Schema.of(SCHEMAS[name])
    measure = measure_of(SCHEMAS[name])
    corners: Any = itertools.product([-1.0, 0.0, 1.0], repeat=2)
    if name == "classes":
        x, y = records_of(2000, 0, extreme=True)
        uniform, others = records_of(2000, 1)
        x = np.concatenate([x, uniform])
        y = np.concatenate([y, others])
    elif name == "number":
        x = np.array([[age, smoker] for age, smoker in corners if smoker >= 0])
        x = np.concatenate([x, x])
        y = np.repeat([-1.0, 1.0], len(x) // 2)
    else:
        rng = np.random.default_rng(0)
        x = np.concatenate([rng.uniform(-1, 1, (50, 4, 4, 1)), -np.ones((1, 4, 4, 1))])
        y = np.arange(51) % 3
    assert x.shape[1:] == schema.shape
    lengths = np.linalg.norm(phis(measure, x, y), axis=1)
    assert measure.size == phis(measure, x, y).shape[1]
    assert lengths.max() == pytest.approx(1, abs=1e-6)
    assert (lengths <= 1 + 1e-6).all()


@pytest.mark.mutant
def test_no_record_moves_a_sum_by_more_than_one(columns: Project) -> None:
    """Whatever it is: also one that no schema makes."""
    x, y = records_of(MOST - 1, 2)
    before = sum_of(columns, (x, y))
    for row in ([1, 1, 1, 1, 1, 1], [-1, 1, 0, 0, 0, 1], [9e37, -9e37, 9, 9, 9, 9]):
        for label in (0, 1):
            data = np.vstack([x, row]).astype(np.float32), np.append(y, label)
            assert np.linalg.norm(sum_of(columns, data) - before) <= 1 + 1e-5
            replaced = np.vstack([row, x[1:]]).astype(np.float32), np.append(label, y[1:])
            assert np.linalg.norm(sum_of(columns, replaced) - before) <= 2 + 1e-5
    # Sums are those of phi: nothing is clipped that the schema makes.
    measure = columns.measure
    assert measure is not None
    np.testing.assert_allclose(before, measure.unit * phis(measure, x, y).sum(0), rtol=2e-6)


@pytest.mark.mutant
def test_what_is_not_finite_moves_nothing(evaluated: Project) -> None:
    """Of a model that overflows a record adds one at most, and others add what they did."""
    measure = evaluated.measure
    assert isinstance(measure, measures.Evaluation)
    x, y = records_of(30, 3)
    before = sum_of(evaluated, (x, y))
    odd = np.full((1, 6), 3e38, np.float32)
    after = sum_of(evaluated, (np.vstack([x, odd]), np.append(y, 1)))
    assert np.isfinite(after).all()
    assert np.linalg.norm(after - before) <= 1
    assert np.linalg.norm(phis(measure, np.float32([[np.nan] * 6]), np.array([1]))) <= 1


def place_of(probability: float, label: int, bins: int) -> int:
    """The bin whose ends a probability is between, by comparing; an upper end belongs to it."""
    ends = [number / bins for number in range(1, bins + 1)]
    return next(place for place, end in enumerate(ends) if probability <= end) + bins * label


@pytest.mark.mutant
def test_a_record_is_at_one_place(evaluated: Project) -> None:
    measure = evaluated.measure
    assert measure is not None
    x, y = records_of(300, 4)
    # A score of 0 is a no, as the predictor has it.
    x[0] = np.float32([-0.25 / 1.5, 0, 0, 0, 0, 0])
    rows = phis(measure, x, y)
    assert (rows.sum(axis=1) == 1).all()
    assert (rows.max(axis=1) == 1).all()
    scores = x.astype(np.float64) @ WEIGHT + 0.25
    scores[0] = 0
    for row, score, label in zip(rows, scores, y, strict=True):
        assert row[place_of(1 / (1 + math.exp(-score)), label, 10)] == 1


def test_of_several_classes_the_largest_probability_counts() -> None:
    schema = Schema.of({"columns": [AGE], "label": GRADE})
    scores = np.float32([[0, 1, 3]])

    class Fixed:
        def apply(self, params: object, x: jax.Array) -> jax.Array:
            return x * jnp.asarray(scores)

    measure = measures.Evaluation(schema, 9, 4, Fixed(), "cross_entropy", None)
    probability = np.exp(3) / np.exp(scores).sum()
    assert 0.75 < probability < 1
    rows = phis(measure, np.ones((2, 1), np.float32), np.array([2, 1]))
    assert rows.argmax(axis=1).tolist() == [7, 3]
    estimates = measure.estimates(rows.sum(axis=0), 0.1)
    assert estimates["model", "accuracy"] == 0.5
    assert ("model", "AUC") not in estimates


# What is made of sums.


@pytest.mark.mutant
def test_statistics_are_the_exact_ones_without_noise(columns: Project) -> None:
    measure = columns.measure
    assert measure is not None
    x, y = records_of(500, 5)
    estimates = measure.estimates(phis(measure, x, y).sum(axis=0), 0.0)
    age = 50 + 50 * x[:, 0].astype(float)
    glucose = 7 + 5 * x[x[:, 2] == 0, 1].astype(float)
    expected = {
        ("records", "number"): 500,
        ("sick: yes", "share"): y.mean(),
        ("age", "mean"): age.mean(),
        ("age", "deviation"): age.std(),
        ("age", "suggested low"): max(age.mean() - 3 * age.std(), 0),
        # Of those that are not missing.
        ("glucose", "mean"): glucose.mean(),
        ("glucose", "variance"): glucose.var(),
        ("glucose is missing", "share"): x[:, 2].mean(),
        ("ward is another", "share"): x[:, 5].mean(),
    }
    for key, value in expected.items():
        assert estimates[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key


def test_a_number_is_a_column_also_as_a_label() -> None:
    measure = measure_of(SCHEMAS["number"])
    rng = np.random.default_rng(0)
    x = np.stack([rng.uniform(-1, 1, 100), rng.integers(0, 2, 100)], axis=1).astype(np.float32)
    y = rng.uniform(-1, 1, 100).astype(np.float32)
    estimates = measure.estimates(phis(measure, x, y).sum(axis=0), 0.0)
    assert estimates["days", "mean"] == pytest.approx(15 + 15 * y.mean(), rel=1e-4)
    assert estimates["days", "deviation"] == pytest.approx(15 * y.std(), rel=1e-4)
    assert estimates["smoker", "share"] == pytest.approx(x[:, 1].mean(), rel=1e-4)


@pytest.mark.mutant
def test_evaluation_is_the_exact_one_of_bins_without_noise(evaluated: Project) -> None:
    measure = evaluated.measure
    assert measure is not None
    x, y = records_of(400, 6)
    estimates = measure.estimates(phis(measure, x, y).sum(axis=0), 1e-9)
    probability = 1 / (1 + np.exp(-(x.astype(float) @ WEIGHT + 0.25)))
    assert estimates["records", "number"] == 400
    assert estimates["model", "accuracy"] == pytest.approx(((probability > 0.5) == y).mean())
    bins = np.ceil(10 * probability) - 1
    wins = []
    for yes, no in itertools.product(bins[y == 1], bins[y == 0]):
        wins.append((yes > no) + 0.5 * (yes == no))
    assert estimates["model", "AUC"] == pytest.approx(np.mean(wins))
    gap = 0.0
    for number in range(10):
        of_bin = bins == number
        gap += abs(y[of_bin].sum() - (number + 0.5) / 10 * of_bin.sum()) / 400
    assert estimates["model", "calibration error"] == pytest.approx(gap)
    share = y[bins == 7].mean()
    assert estimates["probability 0.7 to 0.8", "share of yes"] == pytest.approx(share)


def opened(study: Project, sums: np.ndarray) -> dict[str, Any]:
    """The result of exact sums of one site, with the errors of the plan's noise."""
    measure = study.measure
    assert measure is not None
    code = study.plan.noise.code
    return measure.result(-sums * measure.unit / code.records, code, 1)


def test_errors_are_those_of_noise(columns: Project) -> None:
    """A mean S / n has the variance of (S' - m n') / n, in closed form."""
    measure = columns.measure
    assert isinstance(measure, measures.Columns)
    x, y = records_of(2000, 7)
    result = opened(columns, phis(measure, x, y).sum(axis=0))
    numbers = result["numbers"]
    heavy, weight = measure._weights
    noise = result["noise"]
    mean = x[:, 0].mean()
    expected = 50 * noise / 2000 * math.sqrt(weight**-2 + (mean / heavy) ** 2)
    assert numbers["age"]["mean"]["error"] == pytest.approx(expected, rel=0.1)
    assert numbers["records"]["number"]["error"] == pytest.approx(noise / heavy, rel=0.1)
    assert numbers["records"]["number"]["value"] == pytest.approx(2000, rel=1e-5)
    json.dumps(result, allow_nan=False)


@pytest.mark.mutant
def test_errors_are_how_estimates_vary(columns: Project, evaluated: Project) -> None:
    """Of sums with noise drawn apart, once and again, deviations of all estimates."""
    for study in (columns, evaluated):
        measure = study.measure
        assert measure is not None
        sums = phis(measure, *records_of(1200, 12)).sum(axis=0)
        result = opened(study, sums)
        code = study.plan.noise.code
        rng = np.random.default_rng(1)
        # Of one site, in the unit of phi.
        deviation = code.grid * math.sqrt(code.variance + 0.25) / measure.unit
        draws = sums + rng.normal(0, deviation, (1000, measure.size))
        for (subject, quantity), values in measure.estimates(draws, deviation).items():
            entry = result["numbers"][subject][quantity]
            if np.isfinite(values).all() and values.std() > 1e-6:
                assert entry["error"] == pytest.approx(values.std(), rel=0.2), (subject, quantity)


def test_noise_beyond_what_it_hides_is_said(columns: Project) -> None:
    measure = columns.measure
    assert measure is not None
    sums = phis(measure, *records_of(40, 8)).sum(axis=0)
    # Noise of this size leaves a negative variance.
    sums[measure.size - 2] -= 30
    result = opened(columns, sums)
    age = result["numbers"]["age"]
    assert age["variance"]["value"] < 0
    assert age["deviation"] == {"value": None, "error": None}
    (line,) = [line for line in result["lines"] if line.startswith("age")]
    assert "variance -" in line and "deviation unknown, as noise is larger" in line
    code = columns.plan.noise.code
    nothing = measure.result(np.zeros(measure.size), code, 0)
    assert nothing["numbers"] == {} and "the epsilon is spent" in nothing["lines"][0]


# What is charged.


@pytest.mark.mutant
def test_opened_sums_have_the_stated_noise(columns: Project) -> None:
    """Of many runs the opened sums less the exact one have the mean 0 and the stated deviation."""
    code = columns.plan.noise.code
    signs = code.signs(b"public")
    data = [records_of(20 + site, site) for site in range(3)]
    sums = [sum_of(columns, pair) for pair in data]
    exact = np.sum(sums, axis=0)
    errors = []
    for run in range(120):
        total = np.zeros(code.padded, np.int64)
        for site, values in enumerate(sums):
            name = bytes([run % 256, run // 256] * 16)
            source = SiteNoise(bytes([site + 1] * 32), run=name, holder=NAMES[site])
            noise = source.stream("discrete noise", round=0)
            rounding = source.stream("rounding", round=0)
            total += integers.noisy(code, values, signs, noise, rounding)
        errors.append(integers.decode(code, total, signs) - exact)
    measure = columns.measure
    assert measure is not None
    deviation = measure.result(np.zeros(measure.size), code, 3)["noise"] * measure.unit
    size = np.size(errors)
    assert np.std(errors) == pytest.approx(deviation, rel=5 / math.sqrt(2 * size))
    assert abs(np.mean(errors)) < 5 * deviation / math.sqrt(size)


@pytest.mark.mutant
@pytest.mark.parametrize("relation", ["zero_out_record", "replace_record"])
def test_epsilon_is_that_of_length_one(relation: str, tmp_path: Path) -> None:
    """By the formula of zCDP, for a move of 1 or 2 and the noise of all but one who colludes."""
    protect = {"relation": relation, "attacker": "aggregator"}
    study = plan_of(tmp_path, {**SETTINGS, "protect": protect})
    code = study.plan.noise.code
    move = 1 if relation == "zero_out_record" else 2
    rho = move**2 / (2 * code.grid**2 * code.variance * 2)
    order = np.linspace(1.001, 200, 200_000)
    tail = np.log1p(-1 / order) - np.log(order * 1e-4) / (order - 1)
    epsilon = (rho * order + tail).min()
    # Roundings lengthen the move by one percent at most.
    assert epsilon <= study.plan.guarantee.epsilon <= 8
    assert epsilon == pytest.approx(8, rel=0.03)
    assert study.plan.guarantee.epsilon == pytest.approx(8, rel=0.001)


@pytest.mark.mutant
def test_nothing_tells_the_number_of_records(columns: Project, evaluated: Project) -> None:
    """One record or as many as may be: shapes and the plan are the same."""
    for study in (columns, evaluated):
        shapes = set()
        for count in (1, MOST):
            rounds = rounds_of(study, records_of(count, 9), 0)
            rounds.begin([SiteNoise(bytes([1] * 32), run=bytes(32), holder="geneva")])
            state = rounds.init()
            sent = rounds.outgoing(state)
            vector = rounds.vector(state, sent)
            shapes.add((vector.shape, vector.dtype, str(jax.tree.map(jnp.shape, sent.message))))
            assert vector.max() < 2**rounds.code.bits
        assert len(shapes) == 1
        assert study.plan.counts is None
        assert "does not tell all sites how many records" in study.document()
        assert study.plan.guarantee.epsilon <= 8


@pytest.mark.mutant
def test_too_many_records_are_refused(columns: Project) -> None:
    with pytest.raises(ValueError, match="more records than the 60") as caught:
        rounds_of(columns, records_of(MOST + 1, 0), 0)
    assert "larger [model] most" in str(caught.value)
    # The number is the site's alone, and a log is sent to others.
    assert "61" not in str(caught.value)


@pytest.mark.mutant
def test_each_reads_its_own_records(columns: Project, evaluated: Project) -> None:
    """Statistics are of the records to train on, evaluation of those held out."""
    x, y = records_of(50, 10)
    records = Records(x, y, Schema.of(SCHEMA), {})
    expected = {"training": 0, "held_out": 1}
    for study in (columns, evaluated):
        parts = split(records, 0.2, study.seed)
        part = parts[expected[study.account]]
        problem, *_ = start._problem(study, "lyon", lambda: (x, y), {"held_out": 0.2})
        np.testing.assert_array_equal(problem.x, part.x)
        np.testing.assert_array_equal(problem.y, part.y)
    assert columns.account == "training" and columns.seed == 0
    # That of the run whose model it is: other records would be held out by another one.
    assert evaluated.account == "held_out" and evaluated.seed == 5
    with pytest.raises(ValueError, match="held_out is 0.0; give the share"):
        start._problem(evaluated, "lyon", lambda: (x, y), {"held_out": 0.0})


def test_kinds_are_told_apart(tmp_path: Path, columns: Project, evaluated: Project) -> None:
    sampler = {"name": "Random", "batch_size": 4}
    trained = {"rounds": 2, "sampler": sampler, "optimizer": {"name": "Sgd", "step_size": 1.0}}
    protect = {**SETTINGS["protect"], "clip_norm": 1.0}
    study = plan_of(tmp_path, {**SETTINGS, **trained, "model": LINEAR, "protect": protect})
    assert study.measure is None and study.account == "training"
    assert "The model has 7." in study.document()
    assert columns.measure is not None and evaluated.measure is not None
    for measured in (columns, evaluated):
        page = " ".join(measured.document().split())
        assert "sums over its records of a public function, clipped, with noise" in page
        assert measured.measure is not None and measured.measure.page in page
        assert "model of its own" not in page


# What is refused.


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": {"name": "Columns"}}, r"\[model\] most is missing; give a public bound"),
        ({"model": {"name": "Columns", "most": 0}}, r"\[model\] most is 0; give a public bound"),
        ({"model": {"name": "Columns", "most": 9, "bins": 4}}, r"\[model\] bins is unknown"),
        ({"protect": {**SETTINGS["protect"], "clip_norm": 2.0}}, r"clip_norm is 2.0; leave it out"),
        ({"protect": {"relation": "replace_agent"}}, r"\[protect\] relation is 'replace_agent'"),
        ({"protect": {**SETTINGS["protect"], "clipping": "automatic"}}, "clipping is unknown"),
        ({"rounds": 2}, "rounds is 2; leave it out: Columns has 1"),
        ({"sampler": {"name": "Random", "batch_size": 4}}, "sampler is .*; leave it out"),
        ({"noise": [{"name": "Independent"}]}, r"\[\[noise\]\] name is 'Independent'"),
    ],
)
def test_other_settings_are_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        plan_of(tmp_path, {**SETTINGS, **changes})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bins": 1}, r"\[model\] bins is 1; give an even number"),
        ({"bins": 5}, r"\[model\] bins is 5; give an even number"),
        ({"file": None}, r"\[model\] file is missing; give the model.npz"),
        ({"model": None}, r"\[model\] model is missing"),
        ({"model": {"name": "MLP", "loss": "logistic"}}, "is of another model: .*Dense"),
        ({"model": {"name": "Columns"}}, "Columns"),
        (
            {"model": {**LINEAR, "use_bias": False}},
            r"file has also evaluated\['params'\]\['bias'\]",
        ),
    ],
)
def test_other_evaluations_are_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        plan_of(tmp_path, evaluation(tmp_path, **changes))


def test_model_of_other_records_is_refused(tmp_path: Path) -> None:
    settings = evaluation(tmp_path)
    with pytest.raises(ValueError, match="seed is 3; leave it out, or give 5"):
        plan_of(tmp_path, {**settings, "seed": 3})
    model_file(tmp_path, ranges=np.zeros((6, 2)))
    with pytest.raises(ValueError, match="of another schema, by its ranges"):
        plan_of(tmp_path, settings)
    model_file(tmp_path, **{"['params']['bias']": np.float32(np.nan)})
    with pytest.raises(ValueError, match="bias.* holds nan"):
        plan_of(tmp_path, settings)
    schema = Schema.of(SCHEMAS["number"])
    with pytest.raises(ValueError, match="of numbers there is no such histogram"):
        measures.Evaluation(schema, 9, 10, None, "squared", None)

    class Pixels:
        def apply(self, params: object, x: jax.Array) -> jax.Array:
            return x

    schema = Schema.of(SCHEMAS["image"])
    with pytest.raises(
        ValueError, match=r"outputs is \(1, 4, 4, 1\); give one of outputs \(1, 3\)"
    ):
        measures.Evaluation(schema, 9, 10, Pixels(), "cross_entropy", None)


@pytest.mark.mutant
def test_hostile_plan_is_refused(tmp_path: Path) -> None:
    """Sites trust no author: other sums, or another model, are found when a plan is loaded."""
    settings = evaluation(tmp_path)
    plan_of(tmp_path, settings)
    name = "evaluated['params']['weight']"
    changed(tmp_path, **{name: np.zeros(5, np.float32)})
    refused(tmp_path, "is of another model: .*weight")
    changed(tmp_path, **{name: WEIGHT})
    assert Project.load(tmp_path / "plan.json").measure is not None

    def clipped(content: dict[str, Any]) -> None:
        content["settings"]["protect"]["clip_norm"] = 0.5

    resealed(tmp_path, clipped)
    refused(tmp_path, "clip_norm is 0.5")
    place = tmp_path / "columns"
    place.mkdir()
    plan_of(place, SETTINGS)
    changed(place, **{name: WEIGHT})
    refused(place, "has also evaluated")


# Runs.


def trusted(folder: Path) -> tuple[Roster, dict[str, Path], Path]:
    authority = Authority(folder / "authority")
    certificates = {}
    for name in NAMES:
        _, demand = request(name, folder)
        certificates[name] = authority.sign(demand)
    return Roster.of_certificates([*certificates.values()]), certificates, authority.certificate


SITE = """\
name = "{name}"
plan = "{plan}.json"
certificate = "{certificate}"
key = "{name}.key"
authority = "{authority}"
folder = "run_{name}_{plan}"
{links}
[waits]
linger = 20.0

[data]
file = "{name}.npz"
"""


def ended(folder: Path, plan: str, links: Callable[[str], str], **files: object) -> dict[str, int]:
    """Run all sites by the command, each in a thread, and return their exit statuses."""
    statuses: dict[str, Any] = {}
    threads = []
    for name in NAMES:
        words = {"name": name, "plan": plan, "links": links(name), "certificate": files[name]}
        path = folder / f"{name}_{plan}.toml"
        path.write_text(SITE.format(**words, authority=files["authority"]))

        def live(name: str = name, path: Path = path) -> None:
            try:
                statuses[name] = command._run(path, False)
            except BaseException as error:
                statuses[name] = error

        threads.append(threading.Thread(target=live, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return statuses


def test_sites_measure_by_the_command(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Statistics, then evaluation, from files to measure.json, near the exact numbers."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    sites, certificates, authority = trusted(tmp_path)
    ranges = np.array([*Schema.of(SCHEMA).features.values()])
    held_out = []
    trained = []
    for number, name in enumerate(NAMES):
        x, y = records_of(70, number)
        middles = ranges.mean(axis=1)
        np.savez(tmp_path / name, x=middles + (ranges[:, 1] - middles) * x, y=y)
        train, test = split(Records(x, y, Schema.of(SCHEMA), {}), 0.2, 5)
        trained.append((train.x, train.y))
        held_out.append((test.x, test.y))
    monkeypatch.chdir(tmp_path)
    settings = {"statistics": {**SETTINGS, "seed": 5}, "evaluation": evaluation(tmp_path)}
    edges = example.edges_of(NAMES, True)
    for plan, records in (("statistics", trained), ("evaluation", held_out)):
        study = project.write(settings[plan], sites, SCHEMA, tmp_path / f"{plan}.json")
        ports = zip(NAMES, map("127.0.0.1:{}".format, example.free_ports(3)), strict=True)
        addresses = dict(ports)
        statuses = ended(
            tmp_path,
            plan,
            lambda name, places=addresses: example.links_of(name, NAMES, edges, places),
            authority=authority,
            **certificates,
        )
        assert statuses == dict.fromkeys(NAMES, 0)
        results = []
        for name in NAMES:
            folder = tmp_path / f"run_{name}_{plan}"
            results.append(json.loads((folder / "measure.json").read_text()))
            assert not (folder / "model.npz").exists()
            assert "test_" not in (folder / "metrics.jsonl").read_text()
        assert results[0] == results[1] == results[2]
        assert results[0]["account"] == study.account and "epsilon" in results[0]["statement"]
        measure = study.measure
        assert measure is not None
        x = np.concatenate([part[0] for part in records])
        y = np.concatenate([part[1] for part in records])
        exact = measure.estimates(phis(measure, x, y).sum(axis=0), 0.0)
        close = 0
        for (subject, quantity), value in exact.items():
            entry = results[0]["numbers"][subject][quantity]
            if "suggested" not in quantity and entry["value"] is not None and np.isfinite(value):
                close += 1
                assert abs(entry["value"] - value) < 6 * entry["error"] + 0.1, (subject, quantity)
        assert close > 4
        out = capsys.readouterr().out
        assert "records: number" in out and f"run_lyon_{plan}/measure.json" in out
        assert study.measure is not None and study.measure.composition in out
    outcome = wire.decoded((tmp_path / "run_lyon_evaluation/sums/0").read_bytes())
    assert isinstance(outcome, wire.Opened) and outcome.survivors == (0, 1, 2)


def test_five_sites_of_three_hundred_records_at_epsilon_one(tmp_path: Path) -> None:
    """What is to be expected: means to a hundredth of their range, AUC to less than a tenth."""
    names = ("basel", *NAMES, "siena")
    settings = {
        **SETTINGS,
        "budget": {"epsilon": 1.0, "delta": 1e-4, "accountant": "zcdp"},
        "noise": [{"name": "Discrete", "dropouts": 1, "colluders": 1}],
    }
    section = {**evaluation(tmp_path)["model"], "most": 300}
    for kind, model in (("columns", {"name": "Columns", "most": 300}), ("evaluated", section)):
        path = tmp_path / f"{kind}.json"
        study = project.write({**settings, "model": model}, roster(*names), SCHEMA, path)
        measure = study.measure
        assert measure is not None
        sums = phis(measure, *records_of(1500, 11)).sum(axis=0)
        code = study.plan.noise.code
        result = measure.result(-sums * measure.unit / code.records / 5, code, 5)
        numbers = result["numbers"]
        if kind == "columns":
            assert numbers["age"]["mean"]["error"] < 1
            assert numbers["records"]["number"]["error"] < 12
        else:
            assert numbers["model"]["AUC"]["error"] < 0.03
            assert numbers["model"]["accuracy"]["error"] < 0.02


def test_examples_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[2] / "examples/hospitals"
    names = ("bern", "lyon", "nantes", "parma", "siena", "turin")
    schema = _files.toml(root / "schema.toml")
    study = _files.toml(root / "statistics.toml")
    study_plan = project.write(study, roster(*names), schema, tmp_path / "plan.json")
    assert study_plan.plan.guarantee.epsilon <= 1
    ranges = Schema.of(schema).described()
    model = {"['params']['bias']": np.float32(0), "['params']['weight']": np.zeros(10, np.float32)}
    np.savez(tmp_path / "model.npz", **ranges, **model)
    monkeypatch.chdir(tmp_path)
    study = _files.toml(root / "evaluation.toml")
    study_plan = project.write(study, roster(*names), schema, tmp_path / "evaluation.json")
    assert study_plan.account == "held_out"


@pytest.mark.slow
def test_measures_are_phases_of_one_ledger(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after training, under the total that the first plan fixed."""
    sites = Sites(tmp_path, keys, monkeypatch)
    names = [sites.name(number) for number in range(3)]
    noise = SETTINGS["noise"]
    measured = {
        "model": {"name": "Columns", "most": 30},
        "protect": SETTINGS["protect"],
        "budget": SUMS["budget"] | {"epsilon": 1.0},
        "noise": noise,
    }
    total = {"total": {"epsilon": 3.0}, "seed": 3}
    first = sites.write(3, measured | total)
    sites.start(*names)
    sites.models(*names)
    study = {key: value for key, value in SUMS.items() if key not in ("total", "seed")}
    budget = SUMS["budget"] | {"epsilon": 1.0}
    changes = study | {"rounds": 1, "budget": budget, "noise": noise}
    standings = sites.standings(*names)
    second = project.follow(
        tmp_path / "plan.json", standings, tmp_path / "plan-2.json", changes=changes
    )
    assert second.measure is None and second.seed != 3
    sites.start(*names, plan="plan-2.json")
    sites.models(*names)
    trained = sites.members[names[0]]
    trained.save(tmp_path / "model.npz")
    section = {"name": "Evaluation", "file": str(tmp_path / "model.npz"), "most": 30, "bins": 4}
    third = project.follow(
        tmp_path / "plan-2.json",
        sites.standings(*names, plan="plan-2.json", tag="-2"),
        tmp_path / "plan-3.json",
        changes=measured | {"model": {**section, "model": SUMS["model"]}},
    )
    assert [phase.account for phase in third.phases] == ["training", "training", "held_out"]
    assert third.phases[0].digest == first.digest
    sites.start(*names, plan="plan-3.json")
    results = sites.models(*names)
    assert all(len(result) == 8 for result in results)
    statement = third.guarantee_of(names[0], [phase.digest for phase in third.phases])
    assert 1 < statement.epsilon <= 3.0
