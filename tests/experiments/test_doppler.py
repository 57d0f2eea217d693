"""What the experiments on filters measure: the pieces, on small inputs with known answers."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import linalg, signal

from dpjax.contrib import filtered, snr
from dpjax.contrib.networks import NETWORKS
from dpjax.contrib.rules import BASES, UpdateRule, read_filter
from dpjax.data import catalog
from dpjax.learning import samplers
from dpjax.mechanism import workload
from dpjax.mechanism.participation import Participation
from dpjax.plans import noise, optimizers, plan, protect
from dpjax.results import records
from dpjax.topology import graphs, mixing
from dpjax.transforms.lowpass import FILTERS
from tests.support import ROOT, load_script


@pytest.mark.slow
def test_recorded_noise_has_calibrated_variance():
    spectra = load_script("doppler_spectra")
    config = spectra.PRESETS["tiny"]
    record = spectra.record(config, "sgd", spectra.learn(config), seed=0)
    assert record.gradient.shape == record.private.shape == (config.rounds, config.coordinates)
    noise = record.private - record.gradient
    assert np.mean(noise**2) == pytest.approx(record.variance, rel=0.1)
    lags = spectra.autocovariance(noise, 3)
    assert np.abs(lags[1:]).max() < 0.1 * lags[0]
    assert record.accuracy > 0.5
    streams = spectra.streams(record)
    unfiltered = np.mean((streams["private"] - record.gradient)[config.skip :] ** 2)
    filtered = np.mean((streams["momentum"] - record.gradient)[config.skip :] ** 2)
    assert filtered < 0.5 * unfiltered


@pytest.mark.slow
def test_pass_of_fewer_records_has_same_gradients():
    spectra = load_script("doppler_spectra")
    tiny = dataclasses.replace(spectra.PRESETS["tiny"], rounds=22)
    task = spectra.learn(tiny)
    record = spectra.record(tiny, "sgd", task, seed=0)
    # 128 places, of which each pass takes 24, the last one fewer.
    passes = spectra.record(dataclasses.replace(tiny, capacity=24), "sgd", task, seed=0)
    # Clipped to C less what rounding may add, which depends on the size of a pass.
    np.testing.assert_allclose(passes.gradient, record.gradient, atol=1e-4)
    assert (passes.gradient != record.gradient).any()
    assert spectra.PRESETS["cpu"].capacity is None
    with pytest.raises(ValueError, match="capacity is 0"):
        dataclasses.replace(tiny, capacity=0)


@pytest.mark.parametrize(("capacity", "blocks"), [(None, 8), (128, 2), (1000, 32)])
def test_fixed_records_are_read_in_passes_of_capacity(monkeypatch, capacity, blocks):
    spectra = load_script("doppler_spectra")
    shapes = []

    def stop(config, trained, task, seed, fixed):
        shapes.append(fixed[1].shape)
        raise InterruptedError

    monkeypatch.setattr(spectra, "record", stop)
    config = dataclasses.replace(spectra.PRESETS["tiny"], capacity=capacity)
    with pytest.raises(InterruptedError):
        spectra.assume(config, 1.0, None, None)
    # All 256, in equal blocks.
    assert shapes == [(blocks, 256 // blocks)]


def test_white_noise_has_its_variance_at_all_frequencies():
    spectra = load_script("doppler_spectra")
    values = 3 * np.random.default_rng(0).normal(size=(64, 4000))
    for segment in (16, 15):
        frequencies, density = spectra.spectrum(values, segment)
        assert frequencies[0] == 0 and frequencies[-1] == (segment // 2) / segment
        np.testing.assert_allclose(density, 9, rtol=0.05)


def test_stored_spectra_behind_filters_are_slow_as_responses_say():
    """Fig. 2b on the stored runs; white noise behind the same filters would be as slow."""
    frame = records.read(ROOT / "docs" / "records" / "doppler_spectra.jsonl.gz")
    frame = frame[(frame["kind"] == "spectrum") & (frame["trained"] == "sgd")]
    densities = frame.groupby(["frequency", "series"])["density"].mean().unstack()
    frequencies = densities.index.to_numpy()
    shares = densities[frequencies <= 0.05].sum() / densities.sum()
    assert shares["private"] == pytest.approx(4 / 33, abs=0.01)
    published = [name for name in FILTERS if name != "sgd"]
    for name in published:
        b, a = FILTERS[name]
        response = signal.freqz(b, [1.0, *a], 2 * np.pi * frequencies)[1]
        white = np.abs(response) ** 2
        of_white = white[frequencies <= 0.05].sum() / white.sum()
        assert shares[name] == pytest.approx(of_white, abs=0.04), name
        assert densities[name].iloc[-1] < 0.05 * densities["private"].iloc[-1]
    assert shares[published].min() == pytest.approx(0.53, abs=0.005)
    assert shares[published].max() == pytest.approx(0.92, abs=0.005)
    assert shares["first v1"] == pytest.approx(0.78, abs=0.005)


@pytest.mark.slow
def test_full_gradient_is_that_of_fixed_records_mean_loss():
    spectra = load_script("doppler_spectra")
    config = dataclasses.replace(spectra.PRESETS["tiny"], coordinates=10**6)
    task = spectra.learn(config)
    x = jnp.asarray(task.x[:96])
    y = jnp.asarray(task.y[:96])
    blocks = x.reshape(3, 32, *x.shape[1:]), y.reshape(3, 32)
    record = spectra.record(config, "sgd", task, 0, blocks)
    start = task.init(jax.random.split(jax.random.key(0), 3)[0])
    complete = jax.flatten_util.ravel_pytree(jax.grad(task.batch_loss)(start, x, y))[0]
    np.testing.assert_allclose(record.full[0], complete, rtol=1e-4, atol=1e-6)
    # What is looked at changes nothing.
    np.testing.assert_array_equal(record.private, spectra.record(config, "sgd", task, 0).private)


def test_autocovariance_is_its_definition():
    spectra = load_script("doppler_spectra")
    values = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]])
    expected = [np.mean(values**2), (3 - 2 + 1.5 - 4) / 4, (0.5 + 8) / 2]
    np.testing.assert_allclose(spectra.autocovariance(values, 2), expected)


def test_ratio_grows_even_under_short_gradients():
    for c in ([0.5], 0.5 * 0.8 ** np.arange(50)):
        ratios = []
        for taps in (1, 16, 256, 4096):
            padded = np.pad(c, (0, max(0, taps - len(c))))[:taps]
            ratios.append(snr.signal_to_noise(*snr.optimal_fir(padded), padded))
        # By a square root of the taps, at least: (sum c + sqrt(n sum c^2)) / 2.
        assert all(b > 1.5 * a for a, b in zip(ratios, ratios[1:], strict=False))
        minimum = (np.sum(c) + np.sqrt(4096 * np.sum(np.square(c)))) / 2
        assert ratios[-1] == pytest.approx(minimum, rel=1e-6) and ratios[-1] > 15


def test_ratio_grows_where_error_has_turned():
    c = np.maximum(0.9 ** np.arange(256) - 0.5, 0)
    ratios = []
    errors = []
    for taps in (1, 8, 64, 256):
        b, _ = snr.optimal_fir(c[:taps])
        lags = 0.9 ** np.arange(taps)
        gradient = np.asarray(b) @ linalg.toeplitz(lags) @ b
        errors.append(1 - 2 * np.dot(b, lags) + gradient + np.sum(np.square(b)))
        ratios.append(snr.signal_to_noise(b, (), c))
    assert ratios == sorted(ratios)
    assert errors[1] < 0.4 < 0.6 < errors[2] < errors[3] < errors[0] == pytest.approx(1)


def test_filter_at_every_agent_leaves_guarantee_as_it_is():
    filters = load_script("doppler_decentralised").PRESETS["cpu"].filters
    matrix = mixing.metropolis_hastings(graphs.ring(4))
    for design in ("independent", "whisper", "mafalda"):
        stated = []
        for name in filters:
            config = plan.Config(
                noise=noise.named(design),
                budget=protect.Budget(2.0, 1e-5),
                protect=protect.Protect("zero_out_record", clip_norm=1.0),
                sampler=samplers.Cyclic(2, 3, 10),
                optimizer=UpdateRule(filter=read_filter(name)).chain(0.5),
                rounds=6,
            )
            training_plan = plan.make(config, matrix)
            stated.append((training_plan.guarantee.to_dict(), training_plan.factor.tolist()))
        assert all(guarantee == stated[0] for guarantee in stated)


@pytest.mark.slow
def test_strategy_chosen_with_its_filter_runs_as_any_other():
    matrix = mixing.metropolis_hastings(graphs.ring(4))
    pair = filtered.solve(
        filtered.covariance(0.9 ** np.arange(6), 6),
        1.0,
        Participation(6, 2, 3),
        gram=workload.gram(matrix, 6),
    )
    config = plan.Config(
        noise=noise.Mafalda(),
        budget=protect.Budget(2.0, 1e-5),
        protect=protect.Protect("zero_out_record", clip_norm=1.0),
        sampler=samplers.Cyclic(2, 3, 10),
        optimizer=optimizers.Chain(
            lambda step: optax.chain(filtered.by_matrix(pair.filter), optax.sgd(step)), 0.5
        ),
        rounds=6,
    )
    training_plan = plan.make(config, matrix, strategy=pair.strategy)
    np.testing.assert_array_equal(training_plan.strategy, pair.strategy)
    plain = plan.make(config, matrix).guarantee
    assert training_plan.guarantee.epsilon == plain.epsilon
    assert training_plan.guarantee.mu == pytest.approx(plain.mu, rel=1e-6)


def test_link_is_filter_then_step():
    values = np.array([4.0, 0.0], np.float32)
    plain = UpdateRule()(0.5, 1.0)
    np.testing.assert_allclose(plain.update(values, plain.init(values))[0], -0.5 * values)
    link = UpdateRule(filter=read_filter("first v1"))(0.5, 1.0)
    _, state = link.update(values, link.init(values))
    second, _ = link.update(np.zeros(2, np.float32), state)
    b, a = FILTERS["first v1"]
    response = b[1] - a[0] * b[0]
    np.testing.assert_allclose(second[0], -0.5 * 4 * response / (b[0] + response), rtol=1e-5)


CENTRAL = load_script("cifar_doppler")


@pytest.mark.parametrize(
    "name, options, match",
    [
        ("doppler_spectra", ("--trained", "f9"), "trained holds 'f9'; choose from"),
        ("doppler_spectra", ("--trained",), "trained is empty; give"),
        ("doppler_spectra", ("--taps",), "taps is empty; give"),
        ("doppler_spectra", ("--rounds", "20"), "rounds is 20; give at least"),
        ("doppler_spectra", ("--seeds", "1", "1"), "seeds is (1, 1), with an entry twice"),
        ("doppler_spectra", ("--epochs", "0"), "epochs is 0; give"),
        ("doppler_spectra", ("--epochs", "3"), "epochs holds 3; give divisors of the horizon, 4"),
        ("doppler_spectra", ("--lags", "-1"), "lags is -1; give"),
        ("doppler_spectra", ("--variances", "-1"), "variances is -1.0; give"),
        ("doppler_spectra", ("--correlations", "1.5"), "correlations holds 1.5; give"),
        ("doppler_spectra", ("--segment", "0"), "segment is 0; give"),
        ("doppler_spectra", ("--taps", "1", "0"), "taps is 0; give"),
        ("doppler_spectra", ("--skip", "-5"), "skip is -5; give"),
        ("doppler_spectra", ("--step-size", "0"), "step_size is 0.0; give"),
        ("doppler_decentralised", ("--filters", "f9"), "filter is 'f9'"),
        ("doppler_decentralised", ("--tuning-seeds", "0"), "tuning_seeds share"),
        ("doppler_decentralised", ("--tuning-seeds",), "tuning_seeds is empty; give"),
        ("doppler_decentralised", ("--steps",), "steps is empty; give"),
        ("doppler_decentralised", ("--steps", "-1"), "steps is -1.0; give"),
        ("doppler_decentralised", ("--designs", "whispers"), "designs holds 'whispers'; choose"),
        ("doppler_decentralised", ("--designs", "non_private"), "designs holds 'non_private'"),
        ("doppler_decentralised", ("--records", "-1"), "records is -1; give"),
        ("doppler_decentralised", ("--agents", "0"), "agents is 0; give"),
        ("doppler_decentralised", ("--separation", "0"), "separation is 0; give"),
        ("doppler_decentralised", ("--hidden", "0"), "hidden is 0; give"),
        ("doppler_decentralised", ("--measurements", "0"), "measurements is 0; give"),
        ("doppler_decentralised", ("--delta", "1"), "delta is 1.0; give"),
        ("doppler_decentralised", ("--clip-norm", "0"), "clip_norm is 0.0; give"),
        ("doppler_decentralised", ("--epsilon", "0"), "epsilon is 0.0; give"),
        ("doppler_decentralised", ("--probability", "1.5"), "probability is 1.5; give"),
        ("doppler_decentralised", ("--validation", "0"), "validation is 0.0; give"),
        ("doppler_decentralised", ("--seeds", "-1"), "seeds is -1; give"),
        ("cifar_doppler", ("--measurements", "0"), "measurements is 0; give"),
        ("cifar_doppler", ("--batch-size", "0"), "batch_size is 0; give"),
        ("cifar_doppler", ("--epochs", "nan"), "epochs is nan; give"),
        ("cifar_doppler", ("--epsilon", "1", "1"), "epsilon is (1.0, 1.0), with an entry twice"),
        ("cifar_doppler", ("--validation", "1.5"), "validation is 1.5; give"),
        ("cifar_doppler", ("--moves", "-1"), "moves is -1; give"),
        ("doppler_ablations", ("--picture-batch", "0"), "picture_batch is 0; give"),
        ("doppler_ablations", ("--epochs", "-1"), "epochs is -1.0; give"),
        ("glue_doppler", ("--measurements", "0"), "measurements is 0; give"),
        ("glue_doppler", ("--steps", "0.1", "-1"), "steps is -1.0; give"),
        ("glue_doppler", ("--width", "7"), "width is 7; give"),
    ],
)
def test_bad_options_are_refused(tmp_path, capsys, name, options, match):
    arguments = ["--preset", "tiny", "--output", str(tmp_path), *options]
    code = load_script(name).main(arguments)
    streams = capsys.readouterr()
    assert code == 2 and match in " ".join((streams.err + streams.out).split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "rival, option, match",
    [
        ("banded: 8 bands", ("--batch-size", "1000"), "batch_size is 1000 for 'banded: 8 bands'"),
        (
            "banded, together",
            ("--epochs", "1000"),
            "epochs is 1000 and batch_size 96, 14,979 rounds",
        ),
    ],
)
def test_methods_that_cannot_run_are_refused_first(tmp_path, capsys, rival, option, match):
    arguments = ["--preset", "tiny", "--output", str(tmp_path), "--rivals", rival, *option]
    assert CENTRAL.main(arguments) == 2
    assert match in capsys.readouterr().err and not list(tmp_path.iterdir())


DATASETS = [name for name, entry in catalog.SETS.items() if entry.images]
# The last are told as a range.
NAMED = [name for name in FILTERS if not re.fullmatch("f[1-6]|sgd", name)]


@pytest.mark.parametrize(
    "name, option, reference",
    [
        ("cifar_doppler", "filter", ["none", *NAMED, "adaptive", "wiener"]),
        ("cifar_doppler", "rivals", CENTRAL.RIVALS | CENTRAL.FILTERED),
        ("cifar_doppler", "dataset", DATASETS),
        ("doppler_ablations", "dataset", DATASETS),
        ("doppler_ablations", "model", NETWORKS),
        ("doppler_ablations", "optimizers", BASES),
        ("doppler_ablations", "filter", [*NAMED, "adaptive", "wiener"]),
        ("doppler_decentralised", "designs", noise.LABELS[1:]),
        ("doppler_decentralised", "filters", ["none", *NAMED, "adaptive", "wiener"]),
        ("doppler_spectra", "trained", ["sgd", *NAMED]),
    ],
)
def test_help_names_what_option_takes(name, option, reference):
    doc = inspect.getdoc(load_script(name).Config)
    (text,) = re.findall(rf"(?m)^    {option}: ((?:.|\n)*?)(?=^    \w|\Z)", doc)
    text = " ".join(text.split())
    names = set(re.findall("'([^']+)'", text)) - {"f1", "f6"}
    assert names == set(reference)
    assert ("filter" not in option and option != "trained") or "'f1' to 'f6'" in text
