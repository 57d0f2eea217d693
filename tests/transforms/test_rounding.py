"""Neighbouring sums of clipped records, as they are computed, are C apart at most."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import _numerics
from dpjax.algorithms.exchange import Trusted
from dpjax.learning.query import AgentQuery
from dpjax.models import layer_norms, losses, mlp
from dpjax.transforms import clipping
from tests.transforms import rounding

pytestmark = pytest.mark.optimized


AGAIN = ("encoded records", "products", "passes of a query", "products of a query")
"""Parts of other routes, or mapped below: slow."""


@pytest.mark.x64
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in AGAIN else [])
        for name in rounding.ROUTES
    ],
)
def test_neighbouring_sums_are_one_clip_norm_apart(name, monkeypatch):
    """8,200 records, one of which is zeroed out; sums in float32 are two clip norms apart."""
    total = rounding.ROUTES[name]
    assert 0.99 < rounding.distance(total) <= rounding.CLIP
    rounding.in_single_precision(monkeypatch)
    assert rounding.distance(total) > 1.1 * rounding.CLIP


@pytest.mark.parametrize("name", rounding.WHOLE)
@pytest.mark.parametrize(
    "form", ["jitted", pytest.param("records on devices", marks=pytest.mark.slow)]
)
def test_so_are_sums_whose_order_compiler_chooses(name, form):
    assert 0.99 < rounding.distance(rounding.WHOLE[name], form) <= rounding.CLIP


MAPPED = {
    "vmapped": "products of a query",
    "scanned": "passes of a query",
    "records on devices": "records one by one",
}
"""A route for each form: the others are slow, as are agents on devices."""


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, marks=[] if MAPPED.get(form) == name else [pytest.mark.slow])
        for form in ("vmapped", "scanned", "agents on devices", "records on devices")
        for name in ("records one by one", "passes of a query", "products of a query")
    ],
)
def test_same_mapped_in_loop_and_on_eight_devices(name, form, monkeypatch):
    total = rounding.ROUTES[name]
    assert 0.99 < rounding.distance(total, form) <= rounding.CLIP
    rounding.in_single_precision(monkeypatch)
    assert rounding.distance(total, form) > 1.1 * rounding.CLIP


CLIP = 0.9
"""No multiple of the spacing of sums."""


def last_roundings(kind, places=200):
    """The longest distance of 16 pairs of sums of records, the first of which is as long as may be.

    Their exact distance is a record's norm, which is C but for the roundings that are accounted.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(0.3, 0.9, size=(16, places))
    x[:, 0] = 5
    fn = clipping.per_example(lambda w, x, y: jnp.sum(w * x.astype(kind)), CLIP)

    def total(x, padding):
        return fn(jnp.zeros(1, kind), x[:, None], jnp.zeros(len(x)), padding)

    pair = jax.jit(jax.vmap(total, (0, None)))
    x = jnp.asarray(x, jnp.float32)
    complete, reduced = (np.float64(pair(x, jnp.arange(places) < out)) for out in (0, 1))
    return np.abs(complete - reduced).max()


@pytest.mark.x64
@pytest.mark.mutant
@pytest.mark.parametrize("kind", [jnp.float32, jnp.bfloat16])
def test_rounding_of_sum_is_within_clip_norm(kind, monkeypatch):
    """A broken copy clips records to C, and nothing is left for the last rounding."""
    assert 0.4 < last_roundings(kind) <= CLIP
    monkeypatch.setattr(clipping, "rounding_share", lambda *value: 0.0)
    assert last_roundings(kind) > CLIP


def test_share_is_that_of_derivation():
    """Two sums of B records of C / (1 + r), each wrong by u + e of all their norms at most."""
    single = jnp.zeros(3, jnp.float32)
    for places in (1, 256, 8_200, 83_000):
        r = Fraction(clipping.rounding_share(places, single))
        unit = Fraction(1, 2**24)
        error = Fraction(places + 4, 2**53)
        term = 1 / (1 + r)
        apart = term + 2 * places * term * (unit * (1 + error) + error)
        assert Fraction(999_999, 10**6) < apart <= 1
    assert clipping.rounding_share(83_000, single) < 0.01 < clipping.rounding_share(84_000, single)
    assert clipping.rounding_share(10, jnp.zeros(3, jnp.bfloat16)) > 0.03
    assert math.isclose(clipping.lowered(1.0, single, 8_200), 1 / 1.000978, rel_tol=1e-5)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    spread=st.sampled_from([0.0, 3.0, 30.0]),
    kind=st.sampled_from(["float32", "bfloat16"]),
)
def test_no_records_are_exception(seed, spread, kind):
    """Records of many sizes, left out one after another, in a dtype of large roundings too."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(24, 4)) * 10.0 ** rng.uniform(-spread, spread / 10, size=(24, 1))
    neighbours = jnp.concatenate([jnp.zeros((1, 24), bool), jnp.eye(24, dtype=bool)])
    result = np.float64(_many(kind)(jnp.asarray(x, jnp.float32), neighbours).astype(jnp.float32))
    assert np.sqrt(np.sum((result[0] - result[1:]) ** 2, axis=1)).max() <= 0.7


_KNOWN = {}


def _many(kind):
    if kind not in _KNOWN:
        fn = clipping.per_example(lambda w, x, y: jnp.sum(w * x.astype(kind)), 0.7, microbatch=5)

        def total(x, padding):
            return fn(jnp.zeros(4, kind), x, jnp.zeros(len(x)), padding)

        _KNOWN[kind] = jax.jit(jax.vmap(total, (None, 0)))
    return _KNOWN[kind]


def whole(route):
    """By how much a sum of all records at once is wrong, over their summed sizes, at most."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(256, 128)) * 10 ** rng.uniform(-3, 3, (256, 1))).astype(np.float32)
    if route == "weighted":
        fn = jax.jit(lambda x: layer_norms._weighted(jnp.ones(len(x)), x, finite=True))
    else:
        sum_of = clipping.wide_per_example(
            lambda w, x, y: jnp.sum(w * x), 1e9, "flat", None if route == "whole" else 16,
            None, False,
        )  # fmt: skip
        fn = jax.jit(lambda x: sum_of(jnp.zeros(128), x, jnp.zeros(len(x))))
    exact = np.array([math.fsum(column) for column in np.float64(x).T])
    return (np.abs(np.float64(fn(x)) - exact) / np.sum(np.abs(np.float64(x)), axis=0)).max()


@pytest.mark.parametrize("route", ["weighted", "whole", "in passes"])
def test_sums_in_compiler_s_order_are_as_exact_as_stated(route, monkeypatch):
    assert whole(route) <= 260 * 2.0**-53
    rounding.in_single_precision(monkeypatch)
    assert whole(route) > 2.0**-30


def cancelling(places=64, positions=4):
    """By how much the sum of products is wrong, over what is said of it at most.

    Positions of a record cancel to a thousandth of their lengths. A record's term is what the same
    program gives where all others are padding.
    """
    rng = np.random.default_rng(0)
    model = rounding.Linear()
    x = rng.normal(size=(places, positions, 1))
    half = positions // 2
    x[:, half : 2 * half] = -x[:, :half] * (1 + 1e-3 * rng.normal(size=(places, half, 1)))
    gradients = layer_norms.Gradients(model.apply, lambda out, y: jnp.sum(out), {"Dense_0": "norm"})
    fn = clipping.wide_clipped_sum(gradients, 1e-4, "flat", False, None)
    params = model.init(jax.random.key(0), jnp.ones((1, positions, 1)))
    x = jnp.asarray(x, jnp.float32)
    y = jnp.zeros(places)
    function = jax.jit(lambda padding: jax.tree.leaves(fn(params, x, y, padding))[0])
    total = function(jnp.zeros(places, bool)).item()
    terms = [function(jnp.arange(places) != i).item() for i in range(places)]
    invalid = abs(Fraction(total) - sum(map(Fraction, terms)))
    return float(invalid / sum(map(abs, map(Fraction, terms)))), gradients.error(params, x, places)


def test_products_of_positions_that_cancel_are_added_in_float64(monkeypatch):
    result, stated = cancelling()
    assert result <= stated < 2.0**-24
    monkeypatch.setattr(layer_norms, "_single", lambda *value: True)
    assert cancelling()[0] > 2.0**-24


def cancelled(route, count=32, clip_norm=1e-3):
    """By record, the clip norms of a sum's one record; derivatives are last bits of p - 1.

    So a fused multiply-add, in the norm or in the sum alone, would change all of their digits.
    """
    rng = np.random.default_rng(0)
    model = mlp.MLP((), 4)
    x = rng.normal(size=(count, 16)).astype(np.float32)
    params = model.init(jax.random.key(0), x)
    outputs = np.sort(model.apply(params, x), axis=1)
    x *= (rng.uniform(10, 17, count) / (outputs[:, -1] - outputs[:, -2]))[:, None]
    params = jax.tree.map(lambda leaf: leaf / 1e3, params)
    x = jnp.asarray(1e3 * x)
    y = jnp.argmax(model.apply(params, x), axis=1)
    if route == "records":

        def loss(params, x, y):
            return losses.cross_entropy(model.apply(params, x[None])[0], y)

        fn = clipping.wide_per_example(loss, clip_norm, "flat", None, None, False)
    else:
        gradients = layer_norms.Gradients(model.apply, losses.cross_entropy, {"Dense_0": route})
        fn = clipping.wide_clipped_sum(gradients, clip_norm, "flat", False, None)
    total = jax.jit(lambda padding: fn(params, x, y, padding))
    each = [jax.tree.leaves(total(jnp.arange(count) != i)) for i in range(count)]
    squares = [sum(np.sum(np.square(np.asarray(leaf))) for leaf in item) for item in each]
    return np.sqrt(squares) / clip_norm


@pytest.mark.parametrize(
    "route", ["records", "norm", "formed", pytest.param("plain", marks=pytest.mark.slow)]
)
def test_record_is_clipped_by_norm_of_what_is_added(route, monkeypatch):
    """Compiled, the norm is of the very bits that are summed; a copy adds one per cent more."""
    lengths = cancelled(route)
    assert lengths.max() <= 1
    assert np.sum(lengths > 0.98) > 5
    contracted = layer_norms._contracted
    weighted = layer_norms._weighted
    norm = clipping._norm
    monkeypatch.setattr(
        layer_norms,
        "_contracted",
        lambda p, rows, d, w, **value: contracted(p, rows, 1.01 * d, w, **value),
    )
    monkeypatch.setattr(
        layer_norms, "_weighted", lambda w, g, **argument: weighted(w, 1.01 * g, **argument)
    )
    monkeypatch.setattr(clipping, "_norm", lambda tree, kind: norm(tree, kind) / 1.01)
    assert cancelled(route).max() > 1


@pytest.mark.gate(5)
@pytest.mark.parametrize("route", sorted(set(rounding.ROUTES) - {"a function of one's own"}))
def test_fence_lies_between_gradients_and_their_norms(route):
    """On a GPU a barrier, which lasts until after fusion; on a CPU a loop, which stays."""
    traced = jax.jit(rounding.ROUTES[route]).trace(jnp.ones(4), jnp.zeros(4, bool))
    assert "stablehlo.optimization_barrier" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.case" in traced.lower(lowering_platforms=("cpu",)).as_text()
    compiled = traced.lower(lowering_platforms=("cpu",)).compile().as_text()
    assert " while(" in compiled and " conditional(" in compiled


@pytest.mark.parametrize("places", [64, 256, 258])
def test_products_of_one_position_are_as_exact_as_is_said(places):
    """Up to 256 records in float32, which costs less than one per cent of the clip norm."""
    result, stated = cancelling(places, positions=1)
    assert result <= stated
    assert (stated > 2.0**-24) == (places <= 256)
    assert clipping.rounding_share(places, jnp.zeros(1, jnp.float32), stated) < 0.0081


@pytest.mark.parametrize("norm", ["l2", "l1"])
def test_mean_gradient_is_clipped_after_all_additions(norm):
    """Whatever rounding does to the mean of 8,200 records, what is sent is as long as is said."""
    query = AgentQuery(lambda w, x, y: jnp.sum(w * x), None, 0.1, "flat", norm=norm)
    x = jnp.asarray(np.repeat(rounding.amplitudes()[None, :, None], 3, axis=2))
    answer = jax.jit(lambda x: query(jnp.zeros((1, 3)), (x, jnp.zeros(x.shape[:2]), None)).total)
    entries = [Fraction(float(item)) for item in np.asarray(answer(x)).ravel()]
    if norm == "l1":
        assert 0 < sum(map(abs, entries)) <= Fraction(0.1)
    else:
        assert 0 < sum(entry**2 for entry in entries) <= Fraction(0.1) ** 2


@pytest.mark.parametrize("missing", [(), (0,), ((0,), ())])
def test_trusted_sum_is_exact_one_rounded_once(missing, monkeypatch):
    """Then it is a function of the exact sum of noisy messages, which is what accounting is of."""
    rng = np.random.default_rng(1)
    messages = np.repeat(rounding.amplitudes()[:, None], 3, axis=1)
    messages[:, 1] = rng.permutation(messages[:, 1])
    messages[:, 2] = rng.normal(size=len(messages))
    present = np.ones(len(messages), bool)
    present[[0] if missing else []] = False
    want = [np.float32(math.fsum(column[present])) for column in np.float64(messages).T]

    def total():
        return jax.jit(Trusted(8_000, missing))(jnp.asarray(messages))[0]

    np.testing.assert_array_equal(total(), want)
    rounding.in_single_precision(monkeypatch)
    assert np.any(total() != np.array(want))


@pytest.mark.x64
def test_global_flag_stays_as_it_was():
    observed = []

    def loss(w, x, y):
        observed.append((w * 1.5).dtype)
        return jnp.sum(w * x)

    fn = clipping.per_example(loss, 1.0, microbatch=2)
    assert (
        fn(jnp.zeros(2, jnp.float32), jnp.ones((4, 2), jnp.float32), jnp.zeros(4)).dtype
        == jnp.float32
    )
    assert observed and set(observed) == {jnp.dtype(jnp.float32)}
    assert _numerics.wide_zeros(jnp.zeros(2)).dtype == np.float64
