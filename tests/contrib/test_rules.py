"""Update rules by name: gains of one, the filters they are, schedules, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.contrib.optimizers import scale_by_adam, scale_by_galore
from dpjax.contrib.rules import BASES, UpdateRule, muon, read_filter
from dpjax.contrib.wiener import wiener
from dpjax.transforms.lowpass import FILTERS
from tests.support import make_config

RNG = np.random.default_rng(4)
STREAM = [jnp.asarray(RNG.normal(size=3), jnp.float32) for _ in range(6)]


def steps(rule, stream, noise=0.0, step_size=0.5):
    result = rule(step_size, noise)
    state = result.init(jax.tree.map(jnp.zeros_like, stream[0]))
    update = jax.jit(result.update)
    results = []
    for gradient in stream:
        out, state = update(gradient, state, gradient)
        results.append(out)
    return results


@pytest.mark.parametrize("filter", ["none", "first v1", "second"])
def test_constant_gradient_is_followed_at_step_size(filter):
    for out in steps(UpdateRule("sgd", read_filter(filter)), [STREAM[0]] * 6):
        np.testing.assert_allclose(out, -0.5 * STREAM[0], rtol=1e-5)
    for base in ("momentum", "nesterov"):
        last = steps(UpdateRule(base, read_filter(filter), beta=0.5), [STREAM[0]] * 30)[-1]
        np.testing.assert_allclose(last, -0.5 * STREAM[0], rtol=1e-5)


def after_filter(base):
    """The base alone, on what a filter of its own returns."""
    filtered = steps(UpdateRule("sgd", read_filter("f3")), STREAM, step_size=-1.0)
    return steps(UpdateRule(base), filtered)


@pytest.mark.parametrize("base", ["sgd", "momentum", "nesterov"])
def test_filter_stands_in_front(base):
    for out, expected in zip(
        steps(UpdateRule(base, read_filter("f3")), STREAM), after_filter(base), strict=True
    ):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_bases_are_links_of_their_names():
    own = {
        "momentum": optax.sgd(0.05, momentum=0.9),
        "nesterov": optax.sgd(0.05, momentum=0.9, nesterov=True),
        "muon": muon(0.5),
        "adam": optax.chain(scale_by_adam(0.1), optax.scale(-0.5)),
        "galore": optax.chain(scale_by_galore(0.1, rank=2, every=2), optax.scale(-0.5)),
    }
    stream = [jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32) for _ in range(4)]
    for base, link in own.items():
        state = link.init(stream[0])
        update = jax.jit(link.update)
        rule = UpdateRule(base, rank=2, every=2)
        for gradient, out in zip(stream, steps(rule, stream, noise=0.1), strict=True):
            expected, state = update(gradient, state, gradient)
            np.testing.assert_allclose(out, expected, rtol=2e-4, atol=1e-5)


def test_cosine_schedule_rises_and_then_falls():
    rule = UpdateRule("sgd", schedule="cosine", rounds=40)
    sizes = -np.array([float(out[0]) for out in steps(rule, [jnp.ones(1)] * 40, step_size=2.0)])
    t = np.arange(2, 40)
    falling = 1 + np.cos(np.pi * (t - 2) / 38)
    np.testing.assert_allclose(sizes, [1.0, 2.0, *falling], rtol=1e-4, atol=1e-6)
    assert sizes[-1] > 0


def test_cosine_is_over_rounds_of_run():
    rule = UpdateRule("sgd", schedule="cosine", rounds=40)
    assert make_config(optimizer=rule.chain(1.0), rounds=40).rounds == 40
    with pytest.raises(ValueError, match="rounds is 40 of a cosine schedule in a run of 41"):
        make_config(optimizer=rule.chain(1.0), rounds=41)


def test_what_needs_noise_asks_for_it():
    for base in BASES:
        for filter in ("none", "f1", "adaptive", "wiener"):
            if filter in ("adaptive", "wiener") and base in ("adam", "galore"):
                continue
            asks = base in ("adam", "galore") or filter in ("adaptive", "wiener")
            assert UpdateRule(base, read_filter(filter)).chain(0.1).uses_noise == asks
    quiet, loud = (steps(UpdateRule("adam"), STREAM, noise)[-1] for noise in (0.0, 0.5))
    assert np.abs(loud).max() > 1.2 * np.abs(quiet).max()


def test_wiener_filter_takes_plan_s_noise_variance():
    link = wiener(0.3, unit=True)
    state = link.init(STREAM[0])
    for gradient, out in zip(STREAM, steps(UpdateRule(filter="wiener"), STREAM, 0.3), strict=True):
        expected, state = link.update(gradient, state)
        np.testing.assert_allclose(out, -0.5 * expected, rtol=1e-5, atol=1e-7)


def test_filters_are_read():
    assert read_filter("none") is None and read_filter("adaptive") == "adaptive"
    assert read_filter("f3") == tuple(FILTERS["f3"])
    assert read_filter("0.5,0.5;") == ((0.5, 0.5), ())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"base": "lion"}, "base is 'lion'"),
        ({"base": "adam", "filter": "adaptive"}, "filter is 'adaptive' with adam"),
        ({"base": "galore", "filter": "wiener"}, "filter is 'wiener' with galore"),
        ({"schedule": "cosine"}, "rounds is None"),
        ({"schedule": "linear"}, "schedule is 'linear'"),
        ({"beta": 1.0}, "beta is 1.0"),
        ({"taps": 65}, "taps is 65"),
        ({"rank": 0}, "rank is 0"),
        ({"every": 0}, "every is 0"),
        ({"every": None}, "every is missing"),
        ({"filter": "first v1"}, "filter is 'first v1'"),
        ({"filter": 5}, "filter is 5"),
        ({"filter": ((1.0,), (0.5,))}, "sum"),
    ],
)
def test_impossible_rules_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        UpdateRule(**options)


@pytest.mark.parametrize("text", ["f9", "0.1", "1;2;3", "a;b", None, 5, ["f1"]])
def test_what_names_no_filter_is_refused(text):
    with pytest.raises(ValueError, match="filter is"):
        read_filter(text)
