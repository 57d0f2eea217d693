"""A site from its settings: what is read, what is refused, and a run over real channels."""

import dataclasses
import logging
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import dpjax as dp
from dpjax.contrib import callbacks
from dpjax.models import linear
from dpjax.sites import project
from dpjax.sites.identity import Authority, Roster, request
from dpjax.sites.site import Site
from dpjax.sites.start import settings_of as settings_of_file
from tests.sites.test_compute import DESIGNS, SITES, plan_of, problem_of

NAMES = ("geneva", "lyon", "nice", "turin")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Keys and certificates of four sites."""
    folder = tmp_path_factory.mktemp("sites")
    authority = Authority(folder / "authority")
    paths: dict[str, object] = {"authority": authority.certificate, "home": folder}
    for name in NAMES:
        key, demand = request(name, folder)
        paths[name] = {"key": key, "certificate": authority.sign(demand)}
    return paths


def settings_of(files: dict, name: str, folder: Path, ports: dict[str, int]) -> dict[str, object]:
    number = NAMES.index(name)
    neighbours = {NAMES[number - 1], NAMES[(number + 1) % SITES]}
    dialled = {other for other in neighbours if NAMES.index(other) < number}
    return {
        "name": name,
        **files[name],
        "authority": files["authority"],
        "certificates": [files[other]["certificate"] for other in NAMES],
        "folder": folder / name,
        "listen": f"127.0.0.1:{ports.get(name, 0)}",
        "neighbours": {other: f"127.0.0.1:{ports[other]}" for other in dialled},
        "waits": {"late": 20.0, "linger": 10.0},
    }


def free_ports() -> dict[str, int]:
    import socket

    sockets = [socket.socket() for _ in NAMES]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return {n: opened.getsockname()[1] for n, opened in zip(NAMES, sockets, strict=True)}
    finally:
        for opened in sockets:
            opened.close()


def test_sites_of_a_plan_train_over_real_channels(files: dict, tmp_path: Path) -> None:
    plan = plan_of(DESIGNS["own"], rounds=5)
    ports = free_ports()
    sites: dict[str, Site] = {}
    results: dict[str, object] = {}
    for number, name in enumerate(NAMES):
        settings = settings_of(files, name, tmp_path, ports)
        sites[name] = dp.site(plan, problem_of(number), settings)

    def live(name: str) -> None:
        try:
            watch = callbacks.tensorboard(tmp_path / "board" / name)
            results[name] = sites[name].run(watch)
        except BaseException as error:
            results[name] = error
        finally:
            sites[name].save(tmp_path / f"{name}.npz")
            sites[name].close()

    threads = [threading.Thread(target=live, args=(name,), daemon=True) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for name in NAMES:
        with np.load(tmp_path / f"{name}.npz") as saved:
            assert "sites" in str(saved["statement"]).lower()
            arrays = [saved[key] for key in saved.files if key != "statement"]
        leaves = [np.asarray(leaf)[0] for leaf in jax.tree.leaves(results[name])]
        assert sum(array.size for array in arrays) == sum(leaf.size for leaf in leaves) == 6
        assert list((tmp_path / "board" / name).iterdir())
        assert sites[name].guarantee.kind == "sites" and not sites[name].guarantee.insecure


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"name": None}, "name is missing in the site's settings"),
        ({"key": None}, "key is missing in the site's settings"),
        ({"certficate": "x"}, "certficate is unknown; did you mean certificate"),
        ({"neighbours": {"paris": "127.0.0.1:1"}}, r"\[neighbours\] paris is unknown"),
        ({"neighbours": "lyon"}, "neighbours is 'lyon'; give a section"),
        ({"certificates": []}, "roster is {}; give the keys of two sites"),
        ({"name": "paris"}, "paris"),
        ({"waits": {"late": -1.0}}, "late is -1.0"),
        ({"waits": {"lingr": 1.0}}, r"\[waits\] lingr is unknown; did you mean linger"),
        ({"limits": 7}, "limits is 7; give a section of "),
        ({"departed": "nice"}, r"departed is 'nice'; give a list, \['nice'\]"),
        ({"secret": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_bad_settings_are_refused_by_name(
    changes: dict, match: str, files: dict, tmp_path: Path
) -> None:
    plan = plan_of(DESIGNS["own"], rounds=5)
    settings = settings_of(files, "lyon", tmp_path, dict.fromkeys(NAMES, 1)) | changes
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        dp.site(plan, problem_of(1), settings)


def own_records(files: dict, folder: Path, **changes: object) -> dict:
    """Write a study's plan and the 16 records of a site, and return the site's settings."""
    columns = [{"name": name, "type": "number", "low": 0, "high": 1} for name in ("a", "b")]
    label = {"name": "sick", "type": "category", "classes": ["no", "yes"]}
    roster = Roster.of_certificates([files[name]["certificate"] for name in NAMES[:2]])
    study = {
        "rounds": 2,
        "network": {"edges": [["geneva", "lyon"]]},
        "model": {"name": "Linear", "loss": "logistic"},
        "protect": {"relation": "zero_out_record", "clip_norm": 1.0},
        "budget": {"epsilon": 8.0, "delta": 1e-3},
        "noise": [{"name": "Independent"}],
        "sampler": {"name": "Random", "batch_size": 2},
        "optimizer": {"name": "Sgd", "step_size": 0.3},
        **changes,
    }
    schema = {"columns": columns, "label": label}
    project.write(study, roster, schema, folder / "plan.json")
    (folder / "records.csv").write_text("a,b,sick\n" + "0.5,7,no\n0.25,0,yes\n" * 8)
    settings = settings_of(files, "geneva", folder, {"geneva": 0}) | {"neighbours": {}}
    del settings["certificates"]
    return settings


def test_summary_of_records_is_in_file_of_site_alone(
    files: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = own_records(files, tmp_path)
    with caplog.at_level(logging.INFO, "dpjax.sites"):
        site = dp.site(tmp_path / "plan.json", {"file": tmp_path / "records.csv"}, settings)
    site.close()
    path = tmp_path / "geneva" / "records.txt"
    assert path.read_text() == "16 records\nb: 50.0% clipped into the range\n"
    assert path.stat().st_mode & 0o077 == 0
    assert str(path) in caplog.text
    assert "16" not in caplog.messages[-1].replace(str(path), "") and "%" not in caplog.text


def test_absurd_delta_is_in_the_log(
    files: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.warns(UserWarning, match="delta is 0.5"):
        settings = own_records(files, tmp_path, budget={"epsilon": 8.0, "delta": 0.5})
    dp.site(tmp_path / "plan.json", {"file": tmp_path / "records.csv"}, settings).close()
    assert any(text.startswith("delta is 0.5 for at least 4 rec") for text in caplog.messages)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"sampler": {"name": "Full"}, "data": {"counts": {"geneva": 12, "lyon": 9}}},
            r"the plan is for 12 records of geneva to train on, and there are 13, beside 3 held "
            r"out; mend \[data\] file or held_out, or ask for a new plan, with geneva = 13 in "
            r"\[data\] counts of study.toml$",
        ),
        (
            {"sampler": {"name": "Random", "batch_size": 14}},
            r"\[data\] file leaves too few records to train on: a batch has 14; mend file or",
        ),
    ],
)
def test_other_records_than_the_plan_s_are_refused_in_words_of_files(
    changes: dict, match: str, files: dict, tmp_path: Path
) -> None:
    settings = own_records(files, tmp_path, **changes)
    with pytest.raises(ValueError, match=match) as caught:
        dp.site(tmp_path / "plan.json", {"file": tmp_path / "records.csv"}, settings)
    # Nobody knows the number of records where the plan does not say it.
    assert ("13" in str(caught.value)) == ("counts" in str(caught.value))
    assert not (tmp_path / "geneva").exists()


def test_section_of_a_file_that_nothing_reads_is_named_whole(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text("[dat]\n")
    with pytest.raises(
        ValueError, match=r"site.toml: dat is unknown; did you mean data\? .*waits$"
    ):
        settings_of_file(path)


def test_file_of_settings_has_no_home(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('name = "lyon"\nhome = "/"\n')
    with pytest.raises(ValueError, match="home is unknown"):
        settings_of_file(path)
    path.write_text('name = "lyon"\n')
    assert settings_of_file(path)["home"] == str(tmp_path)


def test_plans_that_sites_cannot_run_are_refused(files: dict, tmp_path: Path) -> None:
    settings = settings_of(files, "lyon", tmp_path, dict.fromkeys(NAMES, 1))
    simulated = dp.make_plan(
        dp.Config(**{**vars(plan_of(DESIGNS["own"]).config), "release": False}),
        plan_of(DESIGNS["own"]).mixing,
        counts=[30] * SITES,
    )
    with pytest.raises(ValueError, match="plan has release=False"):
        dp.site(simulated, problem_of(1), settings)
    with pytest.raises(
        ValueError, match="secret is missing; name the file that the group of geneva, lyon"
    ):
        dp.site(plan_of(DESIGNS["shared"]), problem_of(1), settings)
    with pytest.raises(ValueError, match="give data as a Problem"):
        dp.site(plan_of(DESIGNS["own"]), {"file": "records.csv"}, settings)


def test_first_values_of_a_problem_of_ones_own_are_compared(files: dict, tmp_path: Path) -> None:
    """The first message is made of them: of a model of private records it would be that model."""
    plan = plan_of(DESIGNS["own"], rounds=5)
    ports = dict.fromkeys(NAMES, 1)
    problem = problem_of(1)
    shapes = jax.eval_shape(problem.init, jax.random.key(0))
    private = jax.tree.map(lambda leaf: np.resize(problem.x[0], leaf.shape).astype("f4"), shapes)
    data = (problem.x, problem.y)
    warm = dp.supervised(linear.Linear(), "logistic", data, data, problem.partition, params=private)
    presences = []
    for number, task in enumerate((problem, warm, problem_of(0))):
        name = "geneva" if number == 2 else "lyon"
        settings = settings_of(files, name, tmp_path, ports) | {"folder": tmp_path / str(number)}
        site = dp.site(plan, task, settings)
        presences.append(site._conversation.presences[name])
        site.close()
    plain, of_records, other = (dict(presence.terms) for presence in presences)
    assert plain == other
    differing = [item for item in plain if plain[item] != of_records[item]]
    assert differing == ["first model"]


def test_problems_whose_agents_start_apart_are_refused(files: dict, tmp_path: Path) -> None:
    settings = settings_of(files, "lyon", tmp_path, dict.fromkeys(NAMES, 1))
    task = dataclasses.replace(problem_of(1), init_per_agent=True)
    with pytest.raises(ValueError, match="init_per_agent=True, whose first models sites cannot"):
        dp.site(plan_of(DESIGNS["own"], rounds=5), task, settings)
