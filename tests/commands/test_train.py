"""`dpjax train`: one's own records, models and releases."""

import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from dpjax import cli
from dpjax.algorithms import methods
from dpjax.commands import train
from dpjax.engine.run import Result
from dpjax.learning import samplers
from dpjax.plans import noise, optimizers, protect
from tests.test_cli import Capture, refused

SITES = ["North", "South", "St Mary"]
OWNER = np.repeat(SITES, [20, 12, 8])
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 3))
Y = np.where(X[:, 0] > 0, 1, -1)
SETTINGS = """
rounds = 3
seeds = [0]
[data]
name = "own"
partition = "owner"
[network]
graph = "edges.txt"
[model]
name = "Linear"
loss = "logistic"
metrics = ["auc"]
class_weights = [1.0, 0.5]
[protect]
relation = "zero_out_record"
clip_norm = 1.0
[budget]
epsilon = { South = 2.0, North = 1.0, "St Mary" = 3.0 }
delta = 1e-5
[[noise]]
name = "Independent"
[sampler]
name = "Full"
[optimizer]
name = "Sgd"
step_size = 0.1
"""
RISK = """
import flax.linen as nn

class Risk(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)[..., 0]
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Three sites with a record file, a network and settings, in a folder of the test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("DPJAX_DATA", str(tmp_path))
    save(x_train=X, y_train=Y, x_test=X, y_test=Y, owner=OWNER)
    Path("edges.txt").write_text('North South\nSouth "St Mary"\n')
    Path("own.toml").write_text(SETTINGS)
    return tmp_path


def save(**arrays: np.ndarray) -> None:
    """Write the records of the test."""
    np.savez("own.npz", **arrays)  # type: ignore[arg-type]


def settings(*pairs: tuple[str, str]) -> None:
    """Change texts of the settings."""
    text = SETTINGS
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after)
    Path("own.toml").write_text(text)


def test_records_go_to_sites_that_own_them() -> None:
    parsed = train.tomllib.loads(SETTINGS)
    (plan,), task = train.read_settings(parsed)
    assert task.partition.names == tuple(SITES)
    np.testing.assert_array_equal(task.partition.counts, [20, 12, 8])
    np.testing.assert_array_equal(plan.guarantee.per_agent_epsilon, [1, 2, 3])
    save(x_train=X, y_train=Y, x_test=X, y_test=Y, owner=np.unique(OWNER, return_inverse=True)[1])
    dealt = train.read_settings(parsed | {"data": {"name": "own"}})[1].partition
    assert dealt.names == tuple(SITES) and set(dealt.counts) == {13, 14}
    numbered = {"network": {"graph": "complete:3"}, "budget": {"epsilon": [1, 2, 3], "delta": 1e-5}}
    again = train.read_settings(parsed | numbered)[1]
    np.testing.assert_array_equal(again.partition.indices, task.partition.indices)


def test_owners_stay_with_records_that_are_split(capsys: Capture) -> None:
    save(x=X, y=Y, owner=OWNER)
    task = train.read_settings(train.tomllib.loads(SETTINGS))[1]
    assert "no test records in own: 8 records held out, by seed 0" in capsys.readouterr().out
    rows = [int(np.flatnonzero((X.astype(np.float32) == x).all(axis=1))[0]) for x in task.x]
    for site, shard, count in zip(SITES, *task.partition[:2], strict=True):
        assert set(OWNER[[rows[index] for index in shard[:count]]]) == {site}


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        (
            {},
            r"own.toml, \[data\] partition is 'owner', and the file .*own.npz has no array owner; ",
        ),
        ({"owner": OWNER[1:]}, r"owner of shape \(39,\); give one name or number a train record"),
        (
            {"owner": np.where(OWNER == "North", "Nord", OWNER)},
            r"error: own.toml, \[data\] owner of the file .*own.npz holds 'Nord', which is no ag",
        ),
        (
            {"owner": np.where(OWNER == "North", "South", OWNER)},
            r"error: own.toml, \[network\] graph edges.txt holds 'North', which owns no record",
        ),
        (
            {"owner": OWNER, "x_test": X, "y_test": Y + 3},
            r"error: own.toml, \[data\] test y of the file .*own.npz has classes",
        ),
        (
            {"owner": OWNER.astype(object)},
            r"\(its array owner holds Python objects; save texts by astype",
        ),
        ({"owner": np.where(OWNER == "North", np.nan, 1)}, r"owner nan at \(0,\); save names"),
        ({"owner": np.full(40, 2**40)}, "own.npz holds '1099511627776', which is no agent"),
        ({"owner": OWNER, "y_test": Y}, "lacks x_test"),
        ({"owner": OWNER, "x_test": X, "y_test": np.ones(40)}, "'auc' and test y one class, 1"),
    ],
)
def test_records_that_do_not_fit_are_refused(arrays: dict, match: str, capsys: Capture) -> None:
    save(x_train=X, y_train=Y, **arrays)
    refused(["train", "own.toml"], capsys, match)


def test_site_has_one_name_in_two_forms_of_unicode() -> None:
    """Files of edges, records and settings may write u and its dots as one letter or as two."""
    composed = "Z\u00fcrich"
    decomposed = "Zu\u0308rich"
    for edges, held, budget in (
        (composed, decomposed, decomposed),
        (decomposed, composed, composed),
    ):
        owner = np.where(OWNER == "North", held, OWNER)
        save(x_train=X, y_train=Y, x_test=X, y_test=Y, owner=owner)
        Path("edges.txt").write_text(f'{edges} South\nSouth "St Mary"\n', encoding="utf-8")
        (plan,), task = train.read_settings(
            train.tomllib.loads(SETTINGS.replace("North", f'"{budget}"'))
        )
        assert task.partition.names == (composed, *SITES[1:])
        np.testing.assert_array_equal(plan.guarantee.per_agent_epsilon, [1, 2, 3])
    twice = SETTINGS.replace("North = 1.0", f'"{composed}" = 1.0, "{decomposed}" = 4.0')
    with pytest.raises(ValueError, match="epsilon is of .*; give one for each of"):
        train.read_settings(train.tomllib.loads(twice))


@pytest.mark.parametrize("owner", [OWNER.astype("S8"), OWNER])
def test_texts_of_one_byte_letter_are_names_too(owner: np.ndarray) -> None:
    save(x_train=X, y_train=Y, x_test=X, y_test=Y, owner=owner)
    task = train.read_settings(train.tomllib.loads(SETTINGS))[1]
    np.testing.assert_array_equal(task.partition.counts, [20, 12, 8])


@pytest.mark.parametrize(
    ("pairs", "match"),
    [
        ([('"owner"', '"iid"\nalpha = 0.5')], "alpha is 0.5, and partition is not 'dirichlet'"),
        ([('"owner"', '"owner"\ntest = 0.5')], "test is 0.5, and own has its own"),
        ([('name = "own"', 'name = ["own"]')], r"name is \['own'\]; give one data set's"),
        ([('"edges.txt"', "5")], "graph is 5; give text"),
        ([('"Linear"', '"os:path"')], r"\[model\] name is 'os:path', a module; name a class"),
        ([("rounds = 3", "rounds = 3\nout = 5")], "own.toml, out is 5; give the name of a folder"),
        (
            [("rounds = 3", 'rounds = 3\nout = "own.toml/a"')],
            "error: own.toml, out is 'own.toml/a', which cannot be written",
        ),
        (
            [('"Full"', '"Random"\nbatch_size = 39')],
            "agent .* \\(index [0-2]\\) has [0-9]+ records",
        ),
        ([('"owner"', '"owner"\nseed = "one"')], "seed is 'one'; give a whole number"),
        ([('["auc"]', "true")], "metrics is True; give a list of"),
        ([('"Linear"', '["Linear"]')], r"\[model\] name is \['Linear'\]; choose one of"),
        ([('"Linear"', '"sys:exit"')], "name is 'sys:exit', a builtin.*; name a class of modules"),
        ([('"Linear"', '"own_bad:Net"')], "cannot be imported: ZeroDivisionError"),
        ([("{ South = 2.0, North = 1.0,", "{ South = 2.0,")], "epsilon is of .* give one for each"),
        (
            [("South = 2.0", "Suoth = 2.0")],
            r"own.toml, \[budget\] epsilon Suoth is unknown; did you mean South\? If not, choose",
        ),
        ([('{ South = 2.0, North = 1.0, "St Mary" = 3.0 }', "[1, 2, 3]")], "name the sites: { 'N"),
    ],
)
def test_settings_that_nothing_reads_are_refused(pairs: list, match: str, capsys: Capture) -> None:
    Path("own_bad.py").write_text("1 / 0")
    settings(*pairs)
    refused(["train", "own.toml"], capsys, match)
    assert not list(Path().glob(".*"))


@pytest.mark.slow
def test_settings_that_windows_wrote_are_read(capsys: Capture) -> None:
    """With a byte order mark, lines that end in two characters, and letters beyond ASCII."""
    text = SETTINGS.replace("rounds = 3", 'rounds = 3\nout = "Zürich"')
    Path("own.toml").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert cli.main(["train", "own.toml"]) == 0
    assert Path("Zürich/settings.toml").read_text(encoding="utf-8") == text
    Path("own.toml").write_text(text, encoding="utf-16")
    refused(["train", "own.toml", "--out", "run"], capsys, "own.toml cannot be read.*as UTF-8")


PARTS = {
    "protect": {"Protect": protect.Protect}, "budget": {"Budget": protect.Budget},
    "noise": vars(noise), "sampler": vars(samplers), "optimizer": vars(optimizers),
    "method": vars(methods),
}  # fmt: skip
OTHERS = {
    "relation": "zero_out_record", "clip_norm": 1.0, "epsilon": 1.0, "delta": 1e-5, "clients": 1,
    "examples": 1, "epochs": 1, "separation": 3, "batch_size": 1, "expected": 2.0, "capacity": 8,
    "size": 3, "bands": 1, "bins": 4, "fraction": 0.5, "schedule": 0.9, "shared": 1.0,
    "step_size": 0.1,
}  # fmt: skip
"""Arguments that have no default."""


def keys() -> Iterator[tuple[str, str, dict]]:
    """All keys of settings: section, key, and the section around a wrong value of it."""
    yield from (("", key, {}) for key in ("rounds", "seeds", "out", "eval_every", "release"))
    yield from (("data", key, {}) for key in ("name", "partition", "seed", "test"))
    yield "data", "alpha", {"partition": "dirichlet"}
    yield from (("network", key, {}) for key in ("graph", "mixing"))
    yield "network", "seed", {"graph": "er:3:0.9"}
    yield from (("model", key, {}) for key in ("name", "loss", "metrics", "class_weights"))
    for section, classes in PARTS.items():
        for name in classes.get("__all__", classes):
            # A function, and classes whose arguments no file can hold.
            if not inspect.isclass(classes[name]) or name in ("Average", "Chain", "Covariance"):
                continue
            parameters = inspect.signature(classes[name]).parameters
            required = {
                key for key, parameter in parameters.items() if parameter.default is parameter.empty
            }
            values = {key: OTHERS[key] for key in OTHERS if key in required}
            named = {} if section in ("protect", "budget") else {"name": name}
            yield from ((section, key, named | values) for key in parameters)


@pytest.mark.parametrize(
    ("section", "key", "values"),
    [pytest.param(*case, id=f"{case[0]}-{case[2].get('name', '')}-{case[1]}") for case in keys()],
)
def test_errors_name_section_and_key_of_wrong_value(
    section: str, key: str, values: dict, capsys: Capture
) -> None:
    """In place of the argument of Python that it becomes; -1 is wrong everywhere."""
    save(x=X, y=Y)
    text = SETTINGS.replace('partition = "owner"', "").replace("edges.txt", "complete:3")
    text = text.replace('{ South = 2.0, North = 1.0, "St Mary" = 3.0 }', "1.0")
    parsed = train.tomllib.loads(text)
    before = parsed["noise"][0] if section == "noise" else parsed.get(section, {})
    held = ({} if "name" in values else before) | values | {key: -1}
    parsed |= {key: -1} if not section else {section: [held] if section == "noise" else held}
    Path("own.toml").write_text(toml(parsed))
    place = {"": key, "noise": rf"\[\[noise\]\] {key}"}.get(section, rf"\[{section}\] {key}")
    refused(["train", "own.toml"], capsys, f"error: own.toml, {place} is")


def toml(parsed: dict) -> str:
    """Settings as a file: JSON's texts, numbers, lists and truths are TOML's."""
    plain = {key: value for key, value in parsed.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items() if key != "noise"]
    sections = [(key, value) for key, value in parsed.items() if isinstance(value, dict)]
    sections += [("[noise]", value) for value in parsed["noise"]]
    for name, section in sections:
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    return "\n".join(lines)


def test_errors_of_plans_and_runs_name_settings(capsys: Capture) -> None:
    for before, after, match in (
        ('"Independent"', '"Whisper"\nsubgroups = [[0, 7]]', r"\[\[noise\]\] subgroups is"),
        ("step_size", "decay = [1.0]\nstep_size", r"\[optimizer\] decay has 1"),
        ('"Full"', '"Random"\nbatch_size = 39', r"\[sampler\] batch_size is 39"),
        ('"edges.txt"', '"."', r"\[network\] graph is '.', a folder"),
        ('"edges.txt"', '"er:3:0.9"\nseed = -1', r"\[network\] seed is -1"),
        ("St Mary", "St John", r"\[budget\] epsilon St John is unknown"),
    ):
        settings((before, after))
        refused(["train", "own.toml"], capsys, f"error: own.toml, {match}")


@pytest.mark.parametrize("argument", ["n", "seed", "loss", "train x"])
def test_what_model_of_ones_own_refuses_names_no_other_key(
    argument: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it calls its arguments may be what keys of other sections become."""
    settings(('"Linear"', '"own_risk:Risk"'))
    refuse = f"raise ValueError('{argument} is 3 layers; give more')"
    Path("own_risk.py").write_text(f"{RISK}    def __post_init__(self): {refuse}\n")
    monkeypatch.delitem(sys.modules, "own_risk", raising=False)
    refused(["train", "own.toml"], capsys, f"error: own.toml, {argument} is 3 layers; give more")
    sys.modules.pop("own_risk")


def test_remedies_are_what_settings_can_do(capsys: Capture) -> None:
    few = '"complete:60"'
    skewed = '"dirichlet"\nalpha = 1e-9'
    settings(('"owner"', '"iid"'), ('"edges.txt"', few))
    refused(["train", "own.toml"], capsys, "there are 40; use fewer agents or more data$")
    settings(('"owner"', skewed))
    refused(["train", "own.toml"], capsys, "of the 40 records; raise alpha, or use fewer agents$")
    settings(('"Full"', '"Random"\nbatch_size = 39'))
    refused(["train", "own.toml"], capsys, "lower it to that, or give this agent more records$")


BASELINE = '[[noise]]\nname = "None"\n'


@pytest.mark.slow
def test_baseline_runs_beside_private_plans(capsys: Capture) -> None:
    settings(("[[noise]]", BASELINE + "[[noise]]"))
    assert cli.main(["train", "own.toml"]) == 0
    baseline, private = Result.load("run/result.npz").guarantees
    assert baseline.epsilon == np.inf and private.per_agent_epsilon == (1, 2, 3)
    assert "not private" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pairs", "match"),
    [
        ([('"Independent"', '"None"')], "budget. is given and noise is missing; a private"),
        (
            [('"Independent"', '"None"\nhorizon = "run"')],
            "noise.. name is 'None'; choose one of",
        ),
        ([('"Independent"', '"none"')], "noise.. name is 'none'; choose one of .*ZeroSum"),
        ([('"Independent"', '"LABELS"')], "noise.. name is 'LABELS'; choose one of"),
        ([('"Independent"', '"named"')], "noise.. name is 'named'; choose one of"),
        ([('"Full"', '"None"')], "sampler. name is 'None'; choose one of"),
        ([('"Sgd"', '"None"')], "optimizer. name is 'None'; choose one of"),
        ([("[sampler]", '[method]\nname = "dome"\n[sampler]')], "method. name is 'dome'"),
    ],
)
def test_names_that_are_no_parts_are_refused(pairs: list, match: str, capsys: Capture) -> None:
    settings(*pairs)
    refused(["train", "own.toml"], capsys, match)


def test_release_needs_noise(capsys: Capture) -> None:
    text = SETTINGS.partition("[budget]")[0] + SETTINGS.partition('"Independent"')[2]
    Path("own.toml").write_text("release = true\n" + text + BASELINE)
    refused(["train", "own.toml"], capsys, "release is True for a config without noise")


@pytest.mark.slow
def test_model_is_found_beside_settings(capsys: Capture, folder: Path) -> None:
    settings(('"Linear"', '"own_risk:Risk"'), ("North = 1.0", "North = 1.0000004"))
    refused(["train", "own.toml"], capsys, "put own_risk.py beside the file of settings")
    (folder / "elsewhere").mkdir()
    Path("elsewhere/own_risk.py").write_text(RISK)
    Path("own.toml").rename("elsewhere/own.toml")
    assert cli.main(["train", "elsewhere/own.toml"]) == 0
    # Printed epsilons are rounded up.
    assert "epsilon by agent: North 1.00001, South 2, St Mary 3" in capsys.readouterr().out
    assert Result.load("run/result.npz").params["params"]["Dense_0"]["kernel"].shape[-2:] == (3, 1)


STOPPED: list[Result] = []


def stopped(result: Result, path: Path) -> None:
    """Take the place of a method that writes."""
    STOPPED.append(result)
    raise KeyboardInterrupt


def test_release_keeps_its_key_until_it_ends(capsys: Capture, folder: Path) -> None:
    settings(("rounds = 3", 'rounds = 3\nrelease = true\nout = "new/run"'))
    assert cli.main(["train", "own.toml"]) == 0
    result = Result.load("new/run/result.npz")
    assert result.guarantees[0].release
    assert sorted(path.name for path in Path("new").iterdir()) == ["run", "run.checkpoint"]
    # The last lines say what to do with each of these, and are true of them.
    publish, files, states, key = capsys.readouterr().out.splitlines()[-4:]
    models, statement = publish.removeprefix("publish only: ").split(" (the models) and ")
    jax.tree.map(np.testing.assert_array_equal, eval(models), result.params)
    assert eval(statement) == result.guarantees[0].statement()
    assert files.startswith("keep private: new/run, ")
    assert states.startswith("keep private or delete: new/run.checkpoint, ")
    assert key.startswith("deleted: new/run.key, ")
    # Stopped while it wrote its result: the same command writes it.
    Path("own.toml").write_text(Path("own.toml").read_text().replace("new/run", "half"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Result, "to_csv", stopped)
        train.train_command(Path("own.toml"), None)
    assert not Path("half").exists() and not Path("half.key").exists()
    assert cli.main(["train", "own.toml"]) == 0
    again = Result.load("half/result.npz")
    jax.tree.map(np.testing.assert_array_equal, again.params, STOPPED[0].params)
    settings(("rounds = 3", "rounds = 3\nrelease = true"), ("seeds = [0]", "seeds = [0, 1]"))
    refused(["train", "own.toml"], capsys, "release is true; leave one .* and give seeds = .0.")
    settings(("rounds = 3", "rounds = 3\nrelease = true"), ("seeds = [0]", "seeds = 3"))
    refused(["train", "own.toml"], capsys, "seeds is 3")
    settings(("rounds = 3", "rounds = 3\nrelease = true"), ('"owner"', '"dirichlet"'))
    refused(["train", "own.toml"], capsys, 'partition is made from private.*"iid" or "owner" in a')
    assert not Path("run.key").exists() and not Path("run").exists()
    Path("run.key").touch()
    Path("own.toml").write_text(SETTINGS)
    refused(["train", "own.toml"], capsys, "own.toml, out is 'run', where a release is unfinished")
    text = SETTINGS.partition("[budget]")[0] + SETTINGS.partition('"Independent"')[2]
    Path("own.toml").write_text("release = true\n" + text)
    refused(["train", "own.toml"], capsys, "release is True for a config without noise")


def test_simulation_is_not_to_be_published(capsys: Capture) -> None:
    assert cli.main(["train", "own.toml"]) == 0
    text = capsys.readouterr().out
    assert "publish only" not in text and text.splitlines()[-1].startswith("written: run/report")


def test_warnings_are_one_line_as_errors_are(capsys: Capture) -> None:
    settings(("delta = 1e-5", "delta = 0.5"))
    show = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.main(["train", "own.toml"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" in line.lower()]
    assert lines and all(line.startswith("dpjax train: warning: ") for line in lines)
    assert any("warning: delta is 0.5 for" in line for line in lines)
    assert warnings.showwarning is show


def test_template_names_what_there_is() -> None:
    used = re.findall(r"^\[*(\w+)", train.TEMPLATE, re.MULTILINE)
    assert "release" in used and "class_weights" in train.TEMPLATE and "owner [N]" in train.TEMPLATE


def test_errors_name_file_as_it_was_given(capsys: Capture, folder: Path) -> None:
    settings(("clip_norm", "clipnorm"))
    (folder / "there").mkdir()
    Path("own.toml").rename("there/study.toml")
    text = r"there/study.toml, \[protect\] clipnorm is unknown; did you mean clip_norm\? If not, "
    refused(["train", "there/study.toml"], capsys, f"^dpjax train: error: {text}")
    refused(["train", "own.toml"], capsys, "^dpjax train: error: own.toml is not there; dpjax init")


def test_value_of_option_is_not_said_to_be_of_file(capsys: Capture) -> None:
    refused(["train", "own.toml", "--out", "edges.txt"], capsys, "error: --out is 'edges.txt', wh")


def test_what_run_refuses_names_file_and_key(capsys: Capture) -> None:
    for key, value in (("seeds", "[-1]"), ("eval_every", "0")):
        Path("own.toml").write_text(f"{key} = {value}\n{SETTINGS.replace('seeds = [0]', '')}")
        refused(["train", "own.toml"], capsys, f"error: own.toml, {key} is")
