"""The estimator against all pairs by hand, scikit-learn, closed forms, and versions of it broken.

What its callers rely on beside: both routes to the bit, the normaliser's two numbers, inputs left
alone, a null that tells leaking from chance.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest

from dpjax.accounting import leakage
from dpjax.contrib import leakage as study

Estimator = Callable[[np.ndarray, np.ndarray, int], float]

BACKENDS = ("tree", "dense")
MOSTLY_TREES = ("tree", pytest.param("dense", marks=pytest.mark.slow))

FOUND = {1: 1.0, 2: 0.96, 4: 0.8, 8: 0.5, 16: 0.26}
"""Share of the truth that is found of .8 nats in 1,000 trials, by coordinates of x and of y."""


def psi(m: int) -> float:
    """The digamma function of a whole number: a harmonic number less Euler's constant."""
    return math.fsum(1.0 / j for j in range(1, m)) - 0.57721566490153286


def by_hand(
    x: np.ndarray,
    y: np.ndarray,
    k: int,
    *,
    nearer: Callable = np.less,
    norm: Callable = lambda gaps: gaps.max(axis=-1),
    more: int = 1,
    own: int = 0,
) -> float:
    """The estimate from all pairs of trials; the options break it."""
    trials = len(x)
    total = []
    for i in range(trials):
        others = np.arange(trials) != i
        in_x = norm(np.abs(x - x[i]))
        in_y = norm(np.abs(y - y[i]))
        distance = np.sort(np.maximum(in_x, in_y)[others])[k - 1]
        for case in (in_x, in_y):
            count = int(nearer(case[others], distance).sum()) + own
            total.append(psi(max(count + more, 1)))
    return psi(trials) + psi(k) - math.fsum(total) / trials


BROKEN: dict[str, Estimator] = {
    "not strictly nearer": lambda x, y, k: by_hand(x, y, k, nearer=np.less_equal),
    "psi(n) for psi(n + 1)": lambda x, y, k: by_hand(x, y, k, more=0),
    "itself counted": lambda x, y, k: by_hand(x, y, k, own=1),
    "neighbour k + 1": lambda x, y, k: by_hand(x, y, k + 1),
    "Euclidean": lambda x, y, k: by_hand(x, y, k, norm=lambda gaps: np.linalg.norm(gaps, axis=-1)),
    "bits": lambda x, y, k: by_hand(x, y, k) / math.log(2.0),
    "negative cut": lambda x, y, k: max(0.0, by_hand(x, y, k)),
}


def gaussians(seed: int, trials: int, dims: int, truth: float) -> tuple[np.ndarray, np.ndarray]:
    """Two standard normal vectors whose coordinates go together in pairs; ``truth`` nats in all."""
    rng = np.random.default_rng(seed)
    correlation = math.sqrt(-math.expm1(-2.0 * truth / dims))
    x = rng.normal(size=(trials, dims))
    y = correlation * x + math.sqrt(1.0 - correlation**2) * rng.normal(size=(trials, dims))
    return x, y


def estimate(x: np.ndarray, y: np.ndarray, k: int = 3, *, backend: str) -> float:
    """The estimate of one pair, by a route."""
    x = np.asarray(x)
    y = np.asarray(y)
    if backend == "tree":
        return leakage.mutual_information(x, y, k)
    return float(study.over_rounds(x[None], y[None], k, backend=backend)[0])


def shapes() -> list[tuple[int, int, int, int]]:
    """Trials, coordinates of x and of y, k."""
    return [
        (40, 1, 1, 1),
        (60, 1, 1, 3),
        (60, 1, 3, 3),
        (50, 2, 1, 4),
        (50, 16, 16, 2),
        (9, 2, 2, 8),
    ]


def check_counts(estimator: Estimator, some: int = 1) -> None:
    """Equal to all pairs by hand, for dependent and for independent variables."""
    for seed, (trials, dx, dy, k) in enumerate(shapes()[::some]):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(trials, dx))
        for y in (rng.normal(size=(trials, dy)), x[:, :1] + 0.3 * rng.normal(size=(trials, dy))):
            assert estimator(x, y, k) == pytest.approx(by_hand(x, y, k), abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_formula(backend: str) -> None:
    check_counts(
        lambda x, y, k: estimate(x, y, k, backend=backend), some=1 if backend == "tree" else 3
    )


@pytest.mark.mutant
@pytest.mark.parametrize("name", BROKEN)
def test_broken_formula_is_caught(name: str) -> None:
    with pytest.raises(AssertionError):
        check_counts(BROKEN[name])


def lattice(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of an eighth, most of which come several times."""
    return np.random.default_rng(seed).integers(-12, 12, size=shape) / 8.0


@pytest.mark.parametrize(
    ("dims", "tied"),
    [
        ((1, 3), True),
        ((6, 6), False),
        *(
            pytest.param(dims, tied, marks=pytest.mark.slow)
            for dims in ((1, 1), (1, 3), (2, 4), (6, 6))
            for tied in (False, True)
            if (dims, tied) not in (((1, 3), True), ((6, 6), False))
        ),
    ],
)
def test_both_routes_count_same(
    dims: tuple[int, int], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ten blocks, the last one padded.
    monkeypatch.setattr(study, "_ENTRIES", dict.fromkeys(("cpu", "gpu"), 10_000))
    shape = (2, 301, sum(dims))
    pair = lattice(7, shape) if tied else np.random.default_rng(7).standard_cauchy(shape)
    for rows in pair:
        x = rows[:, : dims[0]]
        y = rows[:, dims[0] :]
        tree = leakage.tree(x, y, 3)
        other = study.dense(x, y, 3)
        np.testing.assert_array_equal(tree.distance, other.distance)
        inside = tree.distance > 0
        np.testing.assert_array_equal(tree.x[inside], other.x[inside])
        np.testing.assert_array_equal(tree.y[inside], other.y[inside])
        assert inside.any()


@pytest.mark.gpu
def test_gpu_counts_what_trees_count() -> None:
    x, y = np.random.default_rng(0).laplace(size=(2, 5000, 3))
    tree = leakage.tree(x[:, :1], y, 3)
    other = study.dense(x[:, :1], y, 3)
    for mine, theirs in zip(tree, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_counts_on_line_are_those_of_differences() -> None:
    # x + d and x - d are rounded otherwise than the differences: tenths are on no binary grid.
    values = np.random.default_rng(1).integers(0, 40, size=400) / 10.0
    radii = np.abs(values - np.random.default_rng(2).permutation(values)) + 0.0
    radii[radii == 0] = 0.1
    result = leakage._nearer(values[:, None], radii)
    gaps = np.abs(values[:, None] - values)
    np.testing.assert_array_equal(result, (gaps < radii[:, None]).sum(axis=1) - 1)
    naive = np.searchsorted(np.sort(values), values + radii)
    naive -= np.searchsorted(np.sort(values), values - radii, side="right")
    assert (naive - 1 != result).any()


@pytest.mark.parametrize(
    ("backend", "strength"),
    [
        *(("tree", strength) for strength in (0.0, 0.5, 20.0)),
        ("dense", 0.5),
        pytest.param("dense", 0.0, marks=pytest.mark.slow),
        pytest.param("dense", 20.0, marks=pytest.mark.slow),
    ],
)
def test_it_is_scikit_learns_on_scalar_pairs(backend: str, strength: float) -> None:
    theirs = pytest.importorskip("sklearn.feature_selection._mutual_info")._compute_mi_cc
    for seed, k in ((0, 3), (1, 1), (2, 7)):
        x, noise = np.random.default_rng(seed).normal(size=(2, 700, 1))
        y = np.sin(strength * x) + noise if strength < 1 else strength * x + noise
        ours = estimate(x, y, k, backend=backend)
        # Theirs is cut at 0, and given the same numbers: it scales and jitters elsewhere.
        assert max(ours, 0.0) == pytest.approx(theirs(x[:, 0], y[:, 0], k), abs=1e-10)


@pytest.mark.parametrize("backend", MOSTLY_TREES)
def test_labels_far_apart_are_right(backend: str) -> None:
    theirs = pytest.importorskip("sklearn.feature_selection._mutual_info")._compute_mi_cd
    rng = np.random.default_rng(3)
    label = rng.integers(0, 3, size=600)
    y = label + rng.normal(size=600)
    ours = estimate(1e3 * label[:, None], y[:, None], backend=backend)
    assert ours == pytest.approx(theirs(y, label, 3), abs=1e-10)
    assert 0.2 < ours < math.log(3)


def check_gaussians(estimator: Callable[[np.ndarray, np.ndarray], float], times: float) -> None:
    """Within .1 of the closed form, or of ``times`` it, where coordinates are few."""
    for dims, truth in ((1, 0.8), (2, 0.8), (1, 2.0), (1, 4.0)):
        result = estimator(*gaussians(dims, 1000, dims, truth))
        assert result == pytest.approx(times * truth, abs=0.1), (dims, truth)


def test_gaussians_have_their_closed_form() -> None:
    check_gaussians(leakage.mutual_information, 1.0)
    with pytest.raises(AssertionError):
        check_gaussians(leakage.mutual_information, 1.5)


@pytest.mark.mutant
@pytest.mark.parametrize("name", ["psi(n) for psi(n + 1)", "itself counted", "bits"])
def test_broken_estimate_misses_closed_form(name: str) -> None:
    with pytest.raises(AssertionError):
        check_gaussians(lambda x, y: BROKEN[name](x, y, 3), 1.0)


@pytest.mark.parametrize(
    "dims", [pytest.param(d, marks=pytest.mark.slow) if d in (4, 8) else d for d in FOUND]
)
def test_gaussians_of_many_coordinates(dims: int) -> None:
    """Independent ones have 0 in any dimension; of dependent ones less and less is found."""
    rng = np.random.default_rng(dims)
    none = study.over_rounds(*rng.normal(size=(2, 10, 300, dims)))
    assert abs(none.mean()) < 0.04
    results = [leakage.mutual_information(*gaussians(seed, 1000, dims, 0.8)) for seed in range(3)]
    assert np.mean(results) / 0.8 == pytest.approx(FOUND[dims], abs=0.09)


@pytest.mark.slow
def test_more_trials_mend_it_slowly() -> None:
    few, extras = (
        np.mean([leakage.mutual_information(*gaussians(seed, n, 4, 2.0)) for seed in range(3)])
        for n in (250, 4000)
    )
    assert 1.2 < few < extras - 0.2 < 1.8


def test_coordinates_that_tell_more_may_give_less() -> None:
    # The mean of all sixteen has .805 nats, one alone .112: the maximum norm drowns in them.
    rng = np.random.default_rng(5)
    x = rng.normal(size=(1000, 1))
    y = x + 2.0 * rng.normal(size=(1000, 16))
    assert leakage.mutual_information(x, y) < 0.05
    assert leakage.mutual_information(x, y.mean(axis=1, keepdims=True)) == pytest.approx(
        0.5 * math.log1p(4.0), abs=0.1
    )


def test_what_is_beyond_trials_is_not_found() -> None:
    maximum = study.normaliser(1000, 3)
    assert leakage.mutual_information(*gaussians(1, 1000, 1, 20.0)) <= maximum + 1e-12
    assert maximum < 6.0


def test_independent_variables_lie_around_0() -> None:
    rng = np.random.default_rng(11)
    result = study.over_rounds(*rng.normal(size=(2, 400, 150, 1)))
    error = result.std() / math.sqrt(400)
    assert abs(result.mean()) < 4 * error < 0.02
    assert (result < 0).sum() > 100  # As they come.
    cut = np.maximum(result, 0.0)
    assert cut.mean() > 4 * error


@pytest.mark.parametrize("backend", MOSTLY_TREES)
def test_what_does_not_change_it(backend: str) -> None:
    rng = np.random.default_rng(6)
    x = rng.integers(-(2**20), 2**20, size=(150, 2)) / 2**10  # exact under what follows
    y = np.round((x @ [[1.0, 0.5, 0.0], [0.0, 1.0, 1.0]]) * 2**10) / 2**10
    y = y + rng.integers(-(2**19), 2**19, size=y.shape) / 2**10
    first = estimate(x, y, backend=backend)

    def again(x: np.ndarray, y: np.ndarray) -> float:
        return estimate(x, y, backend=backend)

    order = rng.permutation(150)
    same = {
        "exchanged": again(y, x),
        "in another order": again(x[order], y[order]),
        "coordinates in another order": again(x[:, ::-1], y[:, [2, 0, 1]]),
        "moved": again(x + 4096.0, y - 512.0),
        "mirrored": again(-x, y * [1.0, -1.0, 1.0]),
        "both scaled": again(8.0 * x, 8.0 * y),
        "with a constant coordinate": again(np.hstack([x, np.ones((150, 1))]), y),
    }
    for name, value in same.items():
        assert value == pytest.approx(first, abs=1e-12), name
    assert abs(again(x, y[order]) - first) > 0.1
    assert again(x, 8.0 * y) != first  # One alone scaled: other neighbours.


def test_rounds_are_their_pairs() -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(size=(3, 80, 2))
    y = rng.normal(size=(3, 80, 1))
    for backend in BACKENDS:
        result = study.over_rounds(x, y, 2, backend=backend)
        each = [leakage.mutual_information(*pair, 2) for pair in zip(x, y, strict=True)]
        np.testing.assert_array_equal(result, each)


def test_normaliser_has_both_published_values() -> None:
    assert study.normaliser(5000, 3) == pytest.approx(7.594, abs=5e-4)
    assert study.normaliser(5000, 3, "jittered") == pytest.approx(7.261, abs=5e-4)
    for k in (1, 3, 10):
        gap = study.normaliser(400, k) - study.normaliser(400, k, "jittered")
        assert gap == pytest.approx(1.0 / k, abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dims", [1, 3])
def test_normaliser_is_what_estimator_gives(backend: str, dims: int) -> None:
    x = np.random.default_rng(dims).laplace(size=(900, dims))
    for k in (1, 3):
        complete = estimate(x, x, k, backend=backend)
        assert complete == pytest.approx(study.normaliser(900, k), abs=1e-12)
        copies = study.jittered(x, (0, 0)), study.jittered(x, (0, 1))
        apart = estimate(*copies, k, backend=backend)
        assert apart == pytest.approx(study.normaliser(900, k, "jittered"), abs=1e-12)
        # The same jitter on both is no jitter: x with itself again.
        single = study.jittered(x, 0)
        assert leakage.mutual_information(single, single, k) == pytest.approx(complete, abs=1e-12)


def test_no_estimate_without_ties_is_above_normaliser() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = rng.standard_cauchy(size=(60, 1 + seed % 3))
        y = np.hstack([x**3, rng.normal(size=(60, 1))])[:, seed % 2 :]
        maximum = study.normaliser(60, 2)
        assert leakage.mutual_information(x, y, 2) <= maximum + 1e-12


def test_jitter_is_seeded_and_leaves_its_input_alone() -> None:
    x = np.random.default_rng(0).integers(0, 5, size=(2, 50, 3)).astype(np.float64)
    x[..., 2] = np.arange(50.0)
    before = x.copy()
    x.setflags(write=False)
    state = repr(np.random.get_state())
    first, same, other = (study.jittered(x, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, same)
    np.testing.assert_array_equal(x, before)
    assert repr(np.random.get_state()) == state
    assert (first != other).all()
    assert 0 < np.abs(first - x).max() < 1e-8
    assert len(np.unique(first[0, :, 0])) == 50
    ties = study.jittered(x, 3, ties_only=True)
    np.testing.assert_array_equal(ties[..., 2], x[..., 2])
    assert (ties[..., :2] != x[..., :2]).all()
    constant = np.full((4, 1), 0.1)
    np.testing.assert_array_equal(study.jittered(constant, 0), constant)
    # One large value does not widen the noise of the others.
    wild = np.append(np.arange(20.0), 1e20)[:, None]
    assert np.abs(study.jittered(wild, 0) - wild)[:-1].max() < 1e-8


def test_copies_of_pairs_are_refused_and_jitter_mends_it() -> None:
    values = np.random.default_rng(1).normal(size=(20, 1))
    x = np.repeat(values, 10, axis=0)
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=r"same as those of at least 3 others.*noise"):
            estimate(x, x, backend=backend)
        with pytest.raises(ValueError, match="at trial 0 are the same"):
            study.over_rounds(np.stack([x + np.arange(200.0)[:, None], x]), np.stack([x, x]))
    # Twenty values, independent copies: the jittered pairs are independent within a value.
    result = study.normalised(x[None], x[None], jitter="ties", seed=0).information[0]
    assert result == pytest.approx(math.log(20), abs=0.2)


def test_lattice_is_too_much_and_jitter_mends_it() -> None:
    x, y = np.random.default_rng(9).integers(0, 40, size=(2, 1, 300, 1))
    plain = study.normalised(x, y)
    mended = study.normalised(x, y, jitter="ties", seed=0)
    assert plain.information[0] > 0.5
    assert abs(mended.information[0]) < 0.12


def test_constant_tells_nothing() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3, 100, 1))
    y = rng.normal(size=(3, 100, 2))
    x[1] = 0.1
    y[2] = 0.3
    for backend in BACKENDS:
        outcome = study.over_rounds(x, y, backend=backend)
        assert outcome[0] != 0.0 and outcome[1] == outcome[2] == 0.0
    for jitter in ("none", "ties", "all"):
        result = study.normalised(x, y, jitter=jitter, coordinates="standardised", seed=0)
        assert result.constant.tolist() == [False, True, True]
        assert result.information[1:].tolist() == [0.0, 0.0]
    assert leakage.mutual_information(np.ones((9, 1)), np.ones((9, 1))) == 0.0


def leaking(seed: int, rounds: int = 6, leaks: int | None = 4) -> tuple[np.ndarray, np.ndarray]:
    """Independent x and y, but for one round."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rounds, 200, 1))
    y = rng.normal(size=(rounds, 200, 3))
    if leaks is not None:
        y[leaks, :, 1] = x[leaks, :, 0] + 0.5 * rng.normal(size=200)
    return x, y


def test_maximum_is_over_rounds() -> None:
    x, y = leaking(0)
    result = study.normalised(x, y)
    assert result.round == 4 and result.value == result.rounds.max() == result.rounds[4]
    np.testing.assert_array_equal(result.information, study.over_rounds(x, y))
    np.testing.assert_array_equal(result.rounds, result.information / study.normaliser(200, 3))
    assert result.null is None and not result.constant.any()
    only = np.full((2, 200, 1), 0.0) + np.arange(200.0)[:, None]
    reduced = study.normalised(only, np.random.default_rng(1).normal(size=(2, 200, 1)), 150)
    assert reduced.value == reduced.rounds.max()


def test_attacker_who_has_value_has_1() -> None:
    x, y = leaking(1)
    y[2, :, :] = x[2] * [1.0, 0.25, -0.5]
    assert study.normalised(x, y).value == pytest.approx(1.0, abs=1e-12)
    as_tools_do = study.normalised(x, y, convention="jittered", jitter="all", seed=0)
    assert as_tools_do.value == pytest.approx(1.0, abs=1e-12)
    # One convention's jitter under the other's normaliser is neither.
    assert study.normalised(x, y, jitter="all", seed=0).value < 0.95
    assert study.normalised(x, y, convention="jittered").value > 1.05


def test_standardised_coordinates_do_not_know_units() -> None:
    x, y = leaking(2)
    units = np.array([2.0**30, 1.0, 2.0**-10])
    raw = study.normalised(x, y)
    other = study.normalised(x, y * units)
    assert other.value < raw.value / 2  # The largest coordinate hides the one that leaks.
    first, same = (
        study.normalised(4.0 * x, case, coordinates="standardised") for case in (y, y * units)
    )
    np.testing.assert_array_equal(first.information, same.information)
    assert first.value == pytest.approx(raw.value, rel=0.1)
    by_hand_y = (y - y.mean(axis=1, keepdims=True)) / y.std(axis=1, keepdims=True)
    by_hand_x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
    np.testing.assert_allclose(
        first.information, study.over_rounds(by_hand_x, by_hand_y), atol=1e-12
    )


def check_null() -> None:
    """A leak is told from chance, and chance is not taken for a leak."""
    x, y = leaking(3)
    null = study.normalised(x, y, seed=1, permutations=19).null
    assert null is not None and null.p_value == 1 / 20 and null.permutations == 19
    assert null.maximum_quantile < 0.1
    np.testing.assert_allclose(null.mean, 0.0, atol=0.03)
    assert (null.quantile >= null.mean).all() and null.quantile.max() <= null.maximum_quantile
    # The maximum of six rounds that tell nothing is above 0, a single round is not.
    assert null.maximum_mean > 3 * abs(null.mean.mean())
    values = [
        study.normalised(*leaking(seed, 3, None), seed=0, permutations=9).null.p_value
        for seed in range(8)
    ]
    assert 0.25 < np.mean(values) < 0.75


def test_null_tells_leak_from_chance() -> None:
    check_null()


@pytest.mark.mutant
@pytest.mark.parametrize("broken", ["not dealt", "copies"])
def test_broken_null_is_caught(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def orders(trials: int, permutations: int, seed: int) -> list[np.ndarray]:
        if broken == "not dealt":
            return [np.arange(trials)] * permutations
        return [np.zeros(trials, dtype=int)] * permutations  # Constant: 0 by rule.

    monkeypatch.setattr(study, "_orders", orders)
    with pytest.raises(AssertionError):
        check_null()


def test_one_permutation_serves_all_rounds() -> None:
    # The same round six times: the maximum of the null is that of one round.
    x, y = (np.repeat(item[:1], 6, axis=0) for item in leaking(4))
    null = study.normalised(x, y, seed=0, permutations=9).null
    assert null is not None
    assert null.maximum_mean == pytest.approx(null.mean[0], abs=1e-12)
    extra = study.normalised(x, y, seed=0, permutations=9).null
    np.testing.assert_array_equal(null.quantile, extra.quantile)


def test_inputs_are_left_alone() -> None:
    x, y = leaking(5)
    kept = x.copy(), y.copy()
    state = repr(np.random.get_state())
    x.setflags(write=False)
    y.setflags(write=False)
    for backend in BACKENDS:
        study.normalised(
            x, y, coordinates="standardised", jitter="all", seed=0, permutations=1, backend=backend
        )
        estimate(x[0], y[0], backend=backend)
    np.testing.assert_array_equal(x, kept[0])
    np.testing.assert_array_equal(y, kept[1])
    assert repr(np.random.get_state()) == state


def test_integers_and_single_precision_are_taken_as_they_are() -> None:
    x, y = (item[0] for item in leaking(6))
    single = x.astype(np.float32), y.astype(np.float32)
    expected = leakage.mutual_information(*(value.astype(np.float64) for value in single))
    for backend in BACKENDS:
        assert estimate(*single, backend=backend) == expected
    complete = leakage.mutual_information(np.arange(30)[:, None], (np.arange(30) * 7 % 30)[:, None])
    assert math.isfinite(complete)


ROWS = np.arange(10.0)[:, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ROWS[:, 0], ROWS), r"x has shape \(10,\); give \[N, d\], one row a trial \(x\[:, None\]"),
        ((ROWS, ROWS[None]), r"y has shape \(1, 10, 1\); give \[N, d\]"),
        ((ROWS, ROWS[:9]), "y has 9 trials beside x of 10; give both of the same"),
        ((np.where(ROWS == 3, np.nan, ROWS), ROWS), r"x holds nan at \(3, 0\)"),
        ((ROWS, np.where(ROWS == 3, np.inf, ROWS)), r"y holds inf at \(3, 0\)"),
        ((ROWS * 1e160, ROWS), "x reaches 9e\\+160; rescale"),
        ((ROWS, ROWS, 10), "k is 10 with 10 trials; give more trials"),
        ((ROWS[:2], ROWS[:2]), "k is 3 with 2 trials; give more trials"),
        ((ROWS, ROWS, 0), "k is 0; give a whole number of at least 1"),
        ((ROWS, ROWS, 2.0), "k is 2.0; give a whole number"),
        ((np.empty((0, 1)), ROWS), r"x has shape \(0, 1\); give at least one entry"),
        ((ROWS, np.empty((10, 0))), r"y has shape \(10, 0\); give at least one entry"),
        (("ten", ROWS), "x is not an array of numbers"),
    ],
)
def test_what_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        leakage.mutual_information(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(backend="gpu"), "backend is 'gpu'; choose one of tree, dense"),
        (dict(convention="entropy"), "convention is 'entropy'; choose one of exact, jittered"),
        (dict(coordinates="ranks"), "coordinates is 'ranks'; choose one of raw, standardised"),
        (dict(jitter=True), "jitter is True; choose one of none, ties, all"),
        (dict(jitter="all"), "seed is None; give a whole number"),
        (dict(permutations=3), "seed is None; give a whole number"),
        (dict(permutations=-1), "permutations is -1; give a whole number of at least 0"),
        (dict(seed=-1), "seed is -1; give a whole number of at least 0"),
        (dict(level=1.0), "level is 1.0; give a number strictly between 0 and 1"),
        (dict(k=200), "k is 200; give a whole number"),
    ],
)
def test_options_that_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        study.normalised(*leaking(7), **options)


def test_rounds_that_do_not_match_are_refused() -> None:
    x, y = leaking(8)
    with pytest.raises(ValueError, match="give both of the same trials and rounds"):
        study.over_rounds(x, y[:5])
    with pytest.raises(ValueError, match=r"x has shape \(200, 1\); give \[R, N, d\]"):
        study.normalised(x[0], y)
    with pytest.raises(ValueError, match=r"x has shape \(3,\); give \[N, d\]"):
        study.jittered(np.arange(3.0), 0)
    with pytest.raises(ValueError, match="seed is -1"):
        study.jittered(ROWS, (0, -1))


def test_normaliser_of_zero_is_refused():
    x = np.random.default_rng(0).normal(size=(2, 4, 1))
    assert study.normaliser(4, 3, "jittered") == 0
    with pytest.raises(ValueError, match="k is 3 with 4 trials, whose jittered normaliser is 0"):
        study.normalised(x, x, 3, convention="jittered", jitter="all", seed=0)
    assert np.isfinite(study.normalised(x, x, 3).value)
    result = study.normalised(x, x, 2, convention="jittered", jitter="all", seed=0)
    assert np.isfinite(result.value)
