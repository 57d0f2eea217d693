"""What the experiment on spectra measures: by hand, and its tiny preset by Lemma 3.1."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.results import records
from tests.support import load_script

PATH = Path(__file__).resolve().parents[2] / "experiments" / "dome_spectrum.py"


@pytest.fixture(scope="module")
def script():
    return load_script("dome_spectrum")


def test_spectra_and_hindsight_are_those_of_dense_matrix(script):
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(6, 3)) @ rng.normal(size=(3, 9))
    dense, vectors = np.linalg.eigh(gradients.T @ gradients)
    spectrum = script.spectrum(gradients)
    np.testing.assert_allclose(spectrum[:3], dense[::-1][:3], rtol=1e-9)
    np.testing.assert_allclose(spectrum[3:], 0, atol=1e-9 * spectrum[0])
    lead = gradients @ vectors[:, -2:]
    expected = np.square(lead).sum(1) / np.square(gradients).sum(1)
    np.testing.assert_allclose(script.hindsight(gradients, 2), expected, rtol=1e-9)
    np.testing.assert_allclose(script.hindsight(gradients, 3), 1.0, rtol=1e-9)


@pytest.mark.slow
def test_sample_s_gradient_is_of_scaled_records(script):
    config = script.PRESETS["tiny"]
    task = script.learn(config)
    params = task.init(jax.random.key(0))
    each = []
    for i in range(config.sample):
        leaves = jax.tree.leaves(jax.grad(task.loss)(params, task.x[i], task.y[i]))
        vector = np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(np.float64)
        each.append(vector / (np.linalg.norm(vector) + 0.01))
    function = jax.jit(script.sampled(config))(params)
    np.testing.assert_allclose(function, np.mean(each, 0), rtol=2e-3, atol=2e-6)
    assert jnp.linalg.norm(function) <= 1


@pytest.mark.slow
def test_noise_in_tiny_run_is_lemma_3_1_s(script, tmp_path, capsys):
    arguments = ["--preset", "tiny", "--output", str(tmp_path), "--quiet"]
    assert script.main(arguments) == 0
    assert "No guarantee covers these records" in capsys.readouterr().out
    frame = records.read(tmp_path / "dome_spectrum" / "tiny")
    run = frame[frame["kind"] == "run"].set_index("trained")
    rounds = int(run["rounds"].iloc[0])
    entries = int(run["entries"].iloc[0])
    for name, width in (("adam", entries), ("dome", 8)):
        row = run.loc[name]
        spread = 5 * np.sqrt(2 / (rounds * width))
        assert row["noise"] / row["expected"] == pytest.approx(1, abs=spread)
    # The broken twin states the sketch's noise for the full dimension.
    assert run.loc["adam"]["noise"] > 20 * run.loc["dome"]["expected"]
    held = frame[frame["kind"] == "round"]["held"].dropna()
    assert len(held) == rounds and held.between(0, 1 + 1e-5).all()
    reference = frame[(frame["kind"] == "frames") & (frame["trained"] == "dome")].iloc[0]
    assert reference["hindsight"] > reference["held"] and reference["random"] == 8 / entries
    assert reference["findable"] > reference["random"] and reference["gain"] > 1
    assert len(list((tmp_path / "dome_spectrum" / "tiny").glob("*.svg"))) == 1


@pytest.mark.parametrize("gain", [1.0, 5.0])
def test_how_loud_gradient_is_in_what_is_sent(script, gain):
    rng = np.random.default_rng(2)
    rounds = 400
    k = 8
    entries = 200
    noise = 0.01
    others = 0.04
    held, centre = rng.normal(size=(2, rounds, k))
    centre += 0.5 * held
    sent = gain * held - 3 * centre + np.sqrt(others) * rng.normal(size=(rounds, k))
    three = np.stack([held, centre, sent], axis=1)
    products = np.einsum("tik,tjk->tij", three, three)
    result = script.heard(products, 0.02, k, noise, entries)
    assert result["gain"] == pytest.approx(gain, rel=0.02)
    assert result["others"] == pytest.approx(others, rel=0.1)
    each = [0.0]
    for t in range(1, rounds):
        each.append(script.sketching.findable(0.02 * gain**2, noise + others, entries, k, t))
    assert result["findable"] == pytest.approx(k / entries + np.mean(each), rel=0.07)
    # Twins: the centre taken for noise, and a gradient taken for as long as it is.
    deaf = np.array([1, 0, 1])
    blind = script.heard(products * np.outer(deaf, deaf), 0.02, k, noise, entries)
    assert blind["others"] > 10 * others
    if gain > 1:
        plain = script.sketching.findable(0.02, noise + others, entries, k, rounds)
        assert plain < 0.7 * result["findable"]
    # Without a centre nothing is taken off.
    bare = np.einsum("tik,tjk->tij", *2 * [three * deaf[:, None]])
    assert np.isfinite(list(script.heard(bare, 0.02, k, noise, entries).values())).all()


def test_bad_options_are_refused(script):
    with pytest.raises(ValueError, match="trained holds 'sgd'"):
        script.Config(trained=("sgd",))
    with pytest.raises(ValueError, match="sample is 0"):
        script.Config(sample=0)


def test_stored_records_say_what_page_says(script):
    frame = records.read(PATH.parents[1] / "docs" / "records" / "dome_spectrum.jsonl.gz")
    frames = frame[(frame["kind"] == "frames") & frame["trained"].isin(list(script.CENTRES))]
    keys = ["dataset", "trained", "columns", "budget_epsilon"]
    mean = frames.groupby(keys)[["held", "findable", "random", "hindsight"]].mean()
    assert (mean["hindsight"] > 0.99).all()
    # Without a centre no frame holds more than could be found; with one, of its own making, some.
    plain = mean.xs("uncentred", level="trained")
    assert (plain["held"] < plain["findable"]).all()
    for dataset, k, epsilon in (("a9a", 16, 1.0), ("digits", 64, 400.0)):
        row = mean.loc[(dataset, "dome", k, epsilon)]
        assert row["held"] > 1.5 * row["findable"]
    # On the network hardly anything could be found, with noise and without.
    network = mean.loc[("mnist", "dome", 64)]
    assert (network["findable"] < 0.02).all() and (network["held"] < network["findable"]).all()
    assert (network["held"] > network["random"]).all()
    # All columns are probes: what a random frame holds.
    few = mean.xs(("a9a", 4), level=("dataset", "columns"))
    assert (few["held"] / few["random"]).between(0.9, 1.1).all()
    run = frame[(frame["kind"] == "run") & (frame["trained"] != "non_private")]
    assert (run["noise"] / run["expected"]).between(0.94, 1.06).all()
