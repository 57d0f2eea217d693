"""Results saved and read again, and models for inference from them."""

import dataclasses
import functools
import html
import json
import os
import re
import stat

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest

from dpjax import _files
from dpjax.data import partition
from dpjax.engine import keys
from dpjax.engine.run import Checkpoint, Result, run
from dpjax.learning.supervised import supervised
from dpjax.models.linear import Linear
from dpjax.plans import plan
from tests.support import make_config

AGENTS = 6


@pytest.fixture(scope="module")
def result(network, small):
    """Two designs and two seeds, one of them without noise."""
    plans = [plan.make(make_config(design=name), network) for name in ("whisper", "non_private")]
    return run(plans, small, seeds=[3, 5], eval_every=5)


def equal(value, other):
    assert jax.tree.structure(value) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(value), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_saved_result_gives_same_rows_to_byte(tmp_path, result):
    path = result.save(tmp_path / "inside" / "run")
    assert path == tmp_path / "inside" / "run.npz" and os.listdir(path.parent) == ["run.npz"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Result.load(path)
    assert json.dumps(again.rows(extra=1)) == json.dumps(result.rows(extra=1))
    assert again.guarantees == result.guarantees and again.terms == result.terms
    assert (again.seeds, again.ended, again.plans) == ((3, 5), True, ())
    assert (again.seconds, again.rounds_per_second) == (result.seconds, result.rounds_per_second)
    equal(
        (again.params, again.metrics, again.rounds), (result.params, result.metrics, result.rounds)
    )
    assert repr(again) == repr(result)
    # And once more, from what was read.
    copy = again.save(tmp_path / "copy.npz")
    assert copy.read_bytes() == path.read_bytes()


def test_result_prints_and_draws_itself(tmp_path, result):
    header, _, private, bare = result.summary().splitlines()
    assert header.split()[:2] == ["design", "epsilon"] and "test_accuracy" in header
    losses = result.metrics["test_loss"][-1]
    for line, values in zip((private, bare), losses.T, strict=True):
        assert f"{values.mean():.4g} +- {abs(values[0] - values[1]) / 2:.2g}" in line
    assert private.split()[:2] == ["Whisper", "8"] and bare.split()[:2] == ["non-private", "inf"]
    frame = result.to_frame(run=1)
    assert frame.to_dict("records") == result.rows(run=1)
    # In a notebook too, lines have names and the figure its guarantee.
    display = result.plot("test_loss")
    assert len(display.legends) == 1 and "epsilon = 8" in display.get_supxlabel()
    path = result.plot("test_loss", tmp_path / "loss.svg")
    assert path.read_text().startswith("<?xml") and "epsilon = 8" in path.read_text()


def text_of(page):
    """What a browser shows of a page's tables and sentences."""
    return html.unescape(re.sub(r"<(style|svg)\b.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL))


@pytest.mark.slow
def test_report_is_one_page_with_all_of_run(tmp_path, result):
    path = result.report(tmp_path / "inside" / "a <b> run.html")
    page = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "<b> run" not in page and "a &lt;b&gt; run" in page
    # Nothing is fetched: no script, no image or style from elsewhere.
    assert not re.search(r"<(script|img|link|iframe)\b|url\((?!#)|src=", page)
    display = text_of(page)
    assert display.count("This is a simulation: do not publish its models; a release") == 1
    first = re.findall(r"data-name='(\w+)'", page)[: 3 + len(result.metrics)]
    assert first == ["design", "epsilon", *result.metrics, "protected"]
    for guarantee, outcome in zip(result.guarantees, result.plans, strict=True):
        assert guarantee.caption() in display and guarantee.statement() in display
        for party in outcome.protection():
            assert party.party in display and party.why in display
    for row in result.summary().splitlines()[2:]:
        for cell in re.split(r"\s{2,}", row):
            assert cell in display
    assert page.count("<figure") == page.count("<svg ") == len(result.metrics)
    forecast = result.plans[0].forecast(6)
    assert forecast.level in display and f"{forecast.ratio:.3g}" in display
    assert f"{forecast.disagreement:.3g}" in display and "around it at agents" in display
    assert "protect.clip_norm" in display and jax.__version__ in display and "[3, 5]" in display
    # A result from a file has no configs; a page is replaced.
    again = Result.load(result.save(tmp_path / "r"))
    assert again.report(path) == path and "holds no configs" in path.read_text()
    with pytest.raises(ValueError, match=r"path is .*run.txt'; end it in .html"):
        result.report(tmp_path / "run.txt")


@pytest.mark.slow
def test_names_of_agents_travel_with_their_epsilons(tmp_path, network, small):
    names = tuple("ABCDEF")
    task = dataclasses.replace(small, name="ward", partition=small.partition._replace(names=names))
    training_plan = plan.make(make_config(epsilon=(1.0, 2.0, 3.0, 3.0, 2.0, 1.5)), network)
    result = run(training_plan, task, seeds=[0], eval_every=20)
    again = Result.load(result.save(tmp_path / "r"))
    assert (
        (again.problem, again.agent_names)
        == (result.problem, result.agent_names)
        == ("ward", names)
    )
    assert "1 to 3 by agent" in again.summary()
    text = " ".join(text_of(again.report(tmp_path / "r.html").read_text()).split())
    assert text.startswith("dpjax: ward") and "A 1 B 2 C 3 D 3 E 2 F 1.5" in text


def test_notebooks_show_tables(result):
    outcome = result.plans[0]
    guarantee = result.guarantees[0]
    display = text_of(result._repr_html_())
    assert guarantee.caption() in display and "agent from outsider" in display
    assert guarantee.statement() in text_of(guarantee._repr_html_())
    display = text_of(outcome._repr_html_())
    assert repr(outcome) in display and "NOT protected" in display


def test_rows_as_comma_separated_values(tmp_path, result):
    path = result.to_csv(tmp_path / "rows.csv")
    assert os.stat(path).st_mode & 0o777 == 0o600  # It has seeds, as the saved result has.
    frame = pandas.read_csv(path)
    want = result.to_frame()
    assert list(frame["guarantee"].unique()) == [
        guarantee.caption() for guarantee in result.guarantees
    ]
    pandas.testing.assert_frame_equal(
        frame.drop(columns="guarantee"), want.drop(columns="guarantee"), check_dtype=False
    )


class Scaled(nn.Module):
    """A linear model with a parameter that is a single number."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) * self.param("temperature", nn.initializers.ones, ())


def test_export_keeps_parameter_that_is_one_number(tmp_path, network):
    from safetensors.numpy import load_file

    data = np.ones((60, 2), np.float32), np.arange(60) % 3
    shards = partition.iid(60, AGENTS, seed=0)
    task = supervised(Scaled(), "cross_entropy", data, data, shards)
    training_plan = plan.make(make_config(design="non_private"), network)
    exported = run(training_plan, task, seeds=[0]).export(tmp_path / "model.safetensors", task)
    assert load_file(exported)["params.temperature"].shape == ()


def test_model_as_safetensors(tmp_path, result, small):
    from safetensors import safe_open
    from safetensors.numpy import load_file

    path = result.export(tmp_path / "model.safetensors", small, seed=5, plan="whisper")
    model = result.model(small, seed=5, plan="whisper")
    for name, tensor in load_file(path).items():
        leaf = functools.reduce(lambda tree, key: tree[key], name.split("."), model)
        assert tensor.dtype == leaf.dtype
        np.testing.assert_array_equal(tensor, leaf)
    assert len(load_file(path)) == len(jax.tree.leaves(model))
    with safe_open(path, "np") as file:
        assert file.metadata() == {"guarantee": result.guarantees[0].caption()}
    with pytest.raises(ValueError, match="end it in .safetensors"):
        result.export(tmp_path / "model.bin", small, seed=5, plan=0)
    with pytest.raises(ValueError, match="plan is missing"):
        result.export(tmp_path / "other.safetensors", small, seed=5)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize(
    "params",
    [
        np.arange(24.0).reshape(2, 2, 6),
        {"a": [np.ones((2, 2, 6)), None], "b": (np.zeros((2, 2, 6, 0)), {})},
        {"w": jnp.arange(24.0).reshape(2, 2, 6).astype(jnp.bfloat16)},
        {"w": np.ones((2, 2, 6), ">f4")},
        (),
    ],
)
def test_trees_come_back_as_they_were(tmp_path, result, params):
    other = dataclasses.replace(result, params=params)
    equal(Result.load(other.save(tmp_path / "r")).params, params)


def test_metrics_of_narrow_models_come_back(tmp_path, result):
    metrics = {name: values.astype(jnp.bfloat16) for name, values in result.metrics.items()}
    other = dataclasses.replace(result, metrics=metrics)
    assert Result.load(other.save(tmp_path / "r")).rows() == other.rows()


def test_guarantees_of_every_kind_come_back(tmp_path, result):
    from dpjax.accounting.guarantee import Guarantee
    from dpjax.accounting.losses import Pld

    loss = Pld.of((0.1,), (0.5,), 10)
    sampled = Guarantee.of(
        epsilon=loss.epsilon(1e-5), delta=1e-5, mu=None, relation="zero_out_record",
        attacker="outsider", rounds=10, clip_norm=1.0, accountant="pld", release=False,
        other_loss=loss,
    )  # fmt: skip
    curved = result.guarantees[0].stopping_at([5, 20])
    other = dataclasses.replace(result, guarantees=(sampled, curved))
    assert Result.load(other.save(tmp_path / "r")).guarantees == (sampled, curved)


def test_nothing_is_overwritten(tmp_path, result):
    path = tmp_path / "r.npz"
    path.write_text("somebody's")
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "link.npz").symlink_to(tmp_path / "nowhere")
    for case in (path, path.with_suffix(""), tmp_path / "link.npz"):
        with pytest.raises(ValueError, match="which exists; results are never overwritten"):
            result.save(case)
    assert path.read_text() == "somebody's" and len(os.listdir(tmp_path)) == 3
    with pytest.raises(ValueError, match="which cannot be written"):
        result.save(path / "below.npz")


def test_damaged_and_foreign_files_are_refused(tmp_path, result):
    path = result.save(tmp_path / "r")
    content = path.read_bytes()
    for place in range(100, len(content), len(content) // 7):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        try:
            again = Result.load(path)
        except ValueError as error:
            assert "make it again" in str(error)
        else:  # A bit of the archive's own padding or attributes.
            assert again.rows() == result.rows()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="cannot be read .*; give a file that Result.save wrote"):
        Result.load(path)
    with np.load(tmp_path / "r.npz" if path.write_bytes(content) else path) as file:
        held = dict(file)
    held["metric_0"] = held["metric_0"] - 1
    np.savez(tmp_path / "changed.npz", **held)
    with pytest.raises(ValueError, match="its content was changed"):
        Result.load(tmp_path / "changed.npz")
    np.savez(tmp_path / "foreign.npz", x=np.ones(3))
    np.save(tmp_path / "bare.npy", np.ones(3))
    np.savez(tmp_path / "objects.npz", header=np.array({"a": 1}, object))
    for name in ("foreign.npz", "bare.npy", "objects.npz"):
        with pytest.raises(ValueError, match="path is .*which cannot be read") as refused:
            Result.load(tmp_path / name)
        assert "pickle" not in str(refused.value)  # NumPy advises to allow them.
    with pytest.raises(FileNotFoundError, match="^path is .*, which does not exist; name a file"):
        Result.load(tmp_path / "nowhere.npz")


def test_other_containers_are_refused_before_anything_is_written(tmp_path, result):
    class Pair(tuple):
        """A container that only its code can make."""

    for params in (Pair((np.ones(3),)), {1: np.ones(3)}, {"f": np.sin}):
        other = dataclasses.replace(result, params=params)
        with pytest.raises(ValueError, match="params hold a .* of None"):
            other.save(tmp_path / "r")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "path",
    ["", " ", ".", "..", "/", None, 3, 3.5, b"x.npz", "a\0b", ["r"], "a" * 300, "folder", "f.npz"],
)
def test_paths_that_name_no_file(tmp_path, monkeypatch, result, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "f.npz").mkdir()
    with pytest.raises(ValueError, match="path is"):
        result.save(path)
    with pytest.raises(ValueError, match="path is"):
        Result.load(path)
    assert sorted(os.listdir()) == ["f.npz", "folder"] and not os.listdir("folder")


def test_files_that_are_open_already_are_left_alone():
    """A number is a file that the process has open: reading it would close it in the end."""
    ours = os.open(os.devnull, os.O_RDONLY)
    for number in (ours, True, False):
        with pytest.raises(ValueError, match=f"path is {number}; name a file"):
            Result.load(number)
    for number in (ours, 0, 1):
        os.fstat(number)  # raises where it was closed
    os.close(ours)


def test_one_name_is_one_file(tmp_path, monkeypatch, result):
    monkeypatch.chdir(tmp_path)
    result.save("run")
    assert os.listdir() == ["run.npz"]
    assert Result.load("run").rows() == Result.load("run.npz").rows() == result.rows()
    result.save("run.v1")
    assert Result.load("run.v1").rows() == result.rows()


def test_what_was_read_cannot_be_written_to(tmp_path, result):
    loaded = Result.load(result.save(tmp_path / "r"))
    own = loaded.model(seed=3, plan=0, agent=0)
    arrays = (*jax.tree.leaves((loaded.params, own, loaded.metrics)), loaded.rounds)
    for array in filter(np.ndim, arrays):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 9


def forged(path, place, change):
    """A file whose header was edited, with a digest of its own."""
    with np.load(path) as file:
        held = dict(file)
    header = json.loads(str(held.pop("header")))
    del held["digest"]
    change(header, held)
    text = json.dumps(header, sort_keys=True)
    np.savez(place, header=np.array(text), digest=_files._digest(text, held), **held)
    return place


def setting(**values):
    return lambda header, held: header.update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting(format=1), "it is a dpjax result of format 1"),
        (setting(tree=99), "cannot be read"),
        (setting(tree={"exec": [0]}), "cannot be read"),
        (lambda header, held: held.update(times=np.zeros(3)), "cannot be read"),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path, result, change, message):
    """Edited with care, that is: the digest is nobody's signature."""
    path = result.save(tmp_path / "r")
    assert Result.load(forged(path, tmp_path / "same.npz", setting())).rows() == result.rows()
    with pytest.raises(ValueError, match=f"path is .*{message}"):
        Result.load(forged(path, tmp_path / "forged.npz", change))


def test_results_that_could_not_be_read_again_are_not_written(tmp_path, result):
    for change, message in (
        ({"params": {"w": np.array([[object()] * 2] * 2)}}, "params hold a ndarray of object"),
        ({"params": {"w": jax.random.split(jax.random.key(0), (2, 2))}}, "of key<fry>"),
        ({"params": {0: np.ones((2, 2))}}, "a dict of None, .*keyed by texts"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(result, **change).save(tmp_path / "r")
    assert not os.listdir(tmp_path)


def test_no_noise_key_is_in_file(tmp_path, network, small):
    release = plan.make(make_config(release=True, rounds=4), network)
    words = []

    def peek(_):
        words.extend(json.loads((tmp_path / "noise.key").read_text())["key"])

    kept = Checkpoint(key_file=tmp_path / "noise.key")
    left = run(release, small, seeds=[0], checkpoint=kept, callback=peek)
    simulated = run(plan.make(make_config(rounds=4), network), small, seeds=[0])
    simulation = np.asarray(jax.random.key_data(keys.derive(0, "noise")))
    for name, item, key in (("r", left, words[:2]), ("s", simulated, simulation)):
        content = item.save(tmp_path / name).read_bytes()
        assert np.asarray(key, np.uint32).tobytes() not in content
        assert str(int(key[0])).encode() not in content
    # The broken twin: a key among the parameters would be found.
    twin = dataclasses.replace(left, params={"w": np.asarray(words[:2], np.uint32)[None, None]})
    outcome = np.asarray(words[:2], np.uint32).tobytes()
    assert outcome in twin.save(tmp_path / "twin").read_bytes()


def test_average_model_and_one_agents(result):
    params = jax.tree.leaves(result.params)
    average = result.model(seed=5, plan="whisper")
    mine = result.model(seed=5, plan=0, agent=2)
    for complete, mean, own in zip(params, *map(jax.tree.leaves, (average, mine)), strict=True):
        np.testing.assert_allclose(mean, complete[1, 0].astype(float).mean(0), rtol=1e-6)
        np.testing.assert_array_equal(own, complete[1, 0, 2])
        assert mean.dtype == own.dtype == np.float32


def test_predictions_are_modules(tmp_path, result, small):
    x = np.asarray(small.x[:7])
    expected = Linear().apply(result.model(seed=3, plan=1), x)
    loaded = Result.load(result.save(tmp_path / "r"))
    for case in (result, loaded):
        predict = case.predictor(small, seed=3, plan=1)
        np.testing.assert_allclose(predict(x), expected, rtol=1e-6)
    # The broken twin: another agent's, or another plan's.
    assert np.abs(result.predictor(small, seed=3, plan=0)(x) - expected).max() > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plan": 0}, r"seed is missing; give seed=3, or another of \[3, 5\]"),
        ({"seed": 4, "plan": 0}, r"seed is 4; give one of \[3, 5\]"),
        ({"seed": 3}, "plan is missing; give plan=0, or another of"),
        ({"seed": 3, "plan": 2}, "plan is 2; give one of"),
        ({"seed": 3, "plan": "mafalda"}, r"plan is 'mafalda'; give one of \['whisper'"),
        ({"seed": 3, "plan": 0, "agent": 6}, "agent is 6; give a whole number from 0 to 5"),
        ({"seed": True, "plan": 0}, "seed is True"),
        ({"seed": 3, "plan": np.array([0, 1])}, r"plan is array"),
        ({"seed": np.array([3, 5]), "plan": 0}, r"seed is array"),
        ({"seed": 3.0, "plan": 0}, "seed is 3.0"),
    ],
)
def test_models_that_there_are_not(result, arguments, message):
    with pytest.raises(ValueError, match=message):
        result.model(**arguments)


def test_what_cannot_predict(result, small):
    selection = {"seed": 3, "plan": 0}
    with pytest.raises(ValueError, match="problem has no predict"):
        result.predictor(dataclasses.replace(small, predict=None), **selection)
    with pytest.raises(ValueError, match="give the problem that was trained"):
        other = dataclasses.replace(
            small, init=lambda key: {"w": jnp.zeros(3)}, loss=lambda p, x, y: jnp.sum(p["w"]),
            batch_loss=None, weighted=None,
        )  # fmt: skip
        result.predictor(other, **selection)
    for invalid in (Linear, 3):
        with pytest.raises(ValueError, match="give the problem that was trained"):
            result.predictor(invalid, **selection)
    predict = result.predictor(small, **selection)
    for x in (np.ones(5), np.ones((2, 4)), 1.0):
        with pytest.raises(
            ValueError, match=r"x has shape .*; give examples \['M', 5\]|x is 1.0; give one entry"
        ):
            predict(x)
    named = dataclasses.replace(small, columns=tuple("abcde"))
    frame = pandas.DataFrame(small.x[:3], columns=list("abcde"))
    by_name = result.predictor(named, **selection)
    np.testing.assert_array_equal(by_name(frame), predict(small.x[:3]))
    with pytest.raises(ValueError, match="x has columns .*'e'.*; give those of train x"):
        by_name(frame[list("edcba")])
    empty = dataclasses.replace(result, params=())
    with pytest.raises(ValueError, match="releases no models"):
        empty.model(**selection)


class Texts(nn.Module):
    """A frozen embedding below a head."""

    @nn.compact
    def __call__(self, tokens):
        """Return the logits."""
        return nn.Dense(2, name="head")(nn.Embed(9, 4, name="words")(tokens).mean(axis=-2))


@pytest.mark.slow
def test_frozen_leaves_and_integers_are_put_back(network):
    tokens = np.random.default_rng(0).integers(0, 9, size=(AGENTS * 6, 3))
    params = Texts().init(jax.random.key(1), tokens[:1])
    task = supervised(
        Texts(), "cross_entropy", (tokens, tokens[:, 0] % 2), (tokens, tokens[:, 0] % 2),
        partition.iid(len(tokens), AGENTS, 0), params=params, frozen=lambda path: "words" in path,
    )  # fmt: skip
    result = run(plan.make(make_config(rounds=3), network), task, seeds=[0])
    predict = result.predictor(task)
    head = result.model()["params"]["head"]
    complete = {"params": {"words": params["params"]["words"], "head": head}}
    np.testing.assert_allclose(predict(tokens[:5]), Texts().apply(complete, tokens[:5]), rtol=1e-5)
    assert result.model()["params"]["words"]["embedding"] is None
    jax.tree.map(np.testing.assert_array_equal, result.model(task), complete)
    assert not np.array_equal(head["kernel"], params["params"]["head"]["kernel"])
    other = supervised(
        Texts(), "cross_entropy", (tokens, tokens[:, 0] % 2), (tokens, tokens[:, 0] % 2),
        partition.iid(len(tokens), AGENTS, 0), params=jax.tree.map(lambda leaf: leaf + 1, params),
        frozen=lambda path: "words" in path,
    )  # fmt: skip
    for invalid, message in (
        (other, "other frozen values"),
        (Texts(), "give the problem that was"),
    ):
        with pytest.raises(ValueError, match=message):
            result.model(invalid)
    with pytest.raises(ValueError, match="x holds .*5; the model was trained on int32"):
        predict(tokens[:5] + 0.5)


@pytest.fixture(scope="module")
def predictors(network):
    """Of a problem by the numbers that it was trained on."""

    def of(kind):
        x = np.random.default_rng(0).integers(0, 9, size=(AGENTS * 6, 3)).astype(kind)
        data = x, x[:, 0].astype(int) % 2
        task = supervised(
            Texts() if np.dtype(kind).kind == "i" else nn.Dense(2), "cross_entropy", data, data,
            partition.iid(len(x), AGENTS, 0),
        )  # fmt: skip
        result = run(plan.make(make_config(rounds=1), network), task, seeds=[0])
        return result.predictor(task)

    return {kind: of(kind) for kind in (np.uint8, np.int64, np.float32)}


@pytest.mark.parametrize(
    ("kind", "entry", "message"),
    [
        (np.uint8, 300, "x holds 300; the model was trained on uint8"),
        (np.uint8, -1, "x holds -1; the model was trained on uint8"),
        (np.int64, 2**32 + 5, "x reaches 4294967301, beyond what int32"),
        (np.int64, 2**70, "x holds 1.18.*; the model was trained on int32"),
        (np.float32, 1e300, "x reaches 1e[+]300, beyond what float32"),
        (np.float32, np.nan, "x holds nan at"),
        (np.float32, 1j, "x is not an array of numbers .dtype complex128"),
        (np.float32, "a", "x is not an array of numbers"),
        (np.float32, None, "x holds nan at .0, 0."),
    ],
)
def test_examples_that_would_be_others(predictors, kind, entry, message):
    """A cast would wrap around, or leave out an imaginary part, without a word."""
    predict = predictors[kind]
    for x in ([[entry] * 3], np.array([[entry] * 3])):
        with pytest.raises(ValueError, match=message):
            predict(x)


def test_examples_that_are_no_array(predictors):
    for x, message in (
        (None, "x is not an array of numbers"),
        ([[1], [2, 3]], "x is not an array of numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            predictors[np.float32](x)
    with pytest.raises(ValueError, match="x is not an array of numbers"):
        predictors[np.float32](jax.random.key(0))


def test_all_that_training_takes_is_predicted_from(predictors):
    predict = predictors[np.uint8]
    for x in (np.full((1, 3), 255), [[255] * 3], jnp.full((1, 3), 255, jnp.int32)):
        np.testing.assert_array_equal(predict(x), predict(np.full((1, 3), 255, np.uint8)))
    assert predict(np.ones((1, 3))).shape == predict([[True] * 3]).shape == (1, 2)
    predict = predictors[np.float32]
    for kind in (np.float64, np.int64, bool, np.float16, jnp.bfloat16):
        np.testing.assert_array_equal(
            predict(np.ones((1, 3)).astype(kind)), predict(np.ones((1, 3), np.float32))
        )


def test_numbers_in_objects_are_numbers(predictors):
    """As tables of mixed columns give them; training takes them too."""
    for kind, entry in ((np.float32, 1), (np.float32, 1.0), (np.uint8, 1)):
        predict = predictors[kind]
        wide = np.full((2, 3), entry, object)
        np.testing.assert_array_equal(predict(wide), predict(np.ones((2, 3), kind)))


def test_traced_examples_have_dtype_that_was_trained_on(predictors, result):
    """Nobody sees their values there, which a cast might change."""
    for kind, held in ((np.uint8, np.uint8), (np.int64, np.int32), (np.float32, np.float32)):
        predict = predictors[kind]
        x = np.ones((2, 3), held)
        np.testing.assert_allclose(jax.jit(predict)(x), predict(x), rtol=1e-6)
        with pytest.raises(ValueError, match="x is int16 in a function that is traced"):
            jax.jit(predict)(x.astype(np.int16))
    slope = jax.grad(lambda x: predictors[np.float32](x).sum())(jnp.ones((2, 3), np.float32))
    assert np.abs(slope).max() > 0
