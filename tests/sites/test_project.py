"""The shared plan file: what every site makes of it, and what it refuses."""

import datetime
import hashlib
import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpjax import _validate
from dpjax.engine.round import part
from dpjax.plans import calibration
from dpjax.plans.plan import Plan, make
from dpjax.sites import project
from dpjax.sites.identity import Roster
from dpjax.sites.project import Project

pytest.importorskip("cryptography")

NAMES = ("turin", "lyon", "geneva")
AGE = {"name": "age", "type": "number", "low": 0, "high": 120}
WARD = {"name": "ward", "type": "category", "classes": ["medicine", "surgery"]}
LABEL = {"name": "back", "type": "category", "classes": ["no", "yes", "died"]}
SCHEMA = {"columns": [AGE, WARD], "label": LABEL}
SETTINGS: dict[str, Any] = {
    "rounds": 6,
    "seed": 3,
    "average_rounds": 2,
    # Named in another order than the roster's, which is the plan's.
    "network": {"edges": [["lyon", "geneva"], ["lyon", "turin"]]},
    "model": {"name": "MLP", "hidden": [4], "metrics": ["f1"]},
    "protect": {"relation": "zero_out_record", "clip_norm": 1.0},
    "budget": {"epsilon": {"lyon": 3.0, "turin": 4.0, "geneva": 2.0}, "delta": 1e-5},
    "noise": [{"name": "Independent"}],
    "sampler": {"name": "Random", "batch_size": 2},
    "optimizer": {"name": "Sgd", "step_size": 0.1},
}
MIXING = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
EVEN = {"budget": {"epsilon": 3.0, "delta": 1e-5}}
NODE = {"protect": SETTINGS["protect"] | {"attacker": "node"}}
TRACKING = {"method": {"name": "Tracking", "beta": 0.5}, "average_rounds": 0}
SCHEDULED = EVEN | {"noise": [{"name": "ScheduledGaussian", "schedule": 0.9}]}
DESIGNS: list[dict[str, Any]] = [
    {"name": "Independent"},
    {"name": "Mafalda"},
    {"name": "BandedInverse", "bands": 2},
    {"name": "OneStep", "fraction": 0.5},
    {"name": "Whisper", "horizon": "run", "subgroups": [[0, 1], [2]]},
    {"name": "Pairwise"},
    {"name": "SpaceTime"},
    {"name": "Polynomial"},
]


def roster(*names: str) -> Roster:
    """Return a roster of keys that are always the same."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    keys = {}
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    for name in names:
        secret = int.from_bytes(name.encode(), "big")
        public = ec.derive_private_key(secret, ec.SECP256R1()).public_key()
        keys[name] = public.public_bytes(serialization.Encoding.DER, form)
    return Roster(keys)


def written(folder: Path, **changes: Any) -> Project:
    """Write a project, with other settings than these."""
    settings = {**SETTINGS, **changes}
    settings = {name: value for name, value in settings.items() if value is not None}
    return project.write(settings, roster(*NAMES), SCHEMA, folder / "plan.json")


def resealed(folder: Path, change: Callable[[dict[str, Any]], object] = dict) -> None:
    """Change a project's text, and the digests in it, as a hostile author can."""
    path = folder / "plan.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["arrays"] = hashlib.sha256((folder / "plan.npz").read_bytes()).hexdigest()
    change(content)
    path.write_text(project._sealed(content))


def changed(folder: Path, **arrays: np.ndarray | None) -> None:
    """Change arrays of a project, and all digests; None leaves an array out."""
    place = folder / "plan.npz"
    with np.load(place) as file:
        content = {**file, **arrays}
    np.savez(place, **{name: array for name, array in content.items() if array is not None})
    resealed(folder)


def stored(folder: Path, name: str) -> np.ndarray:
    """Return an array of a project."""
    with np.load(folder / "plan.npz") as file:
        return np.asarray(file[name])


def refused(folder: Path, match: str) -> None:
    """Assert that a project cannot be loaded, for this reason."""
    with pytest.raises(ValueError, match=match) as caught:
        Project.load(folder / "plan.json")
    assert str(caught.value).startswith(str(folder / "plan.json"))


def same(plan: Plan, other: Plan) -> None:
    """Assert that two plans have the same noise and guarantee, to the bit."""
    assert plan.guarantee == other.guarantee
    assert plan.fingerprint() == other.fingerprint()
    for first, second in ((plan.factor, other.factor), (plan.strategy, other.strategy)):
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert first.dtype == second.dtype and first.tobytes() == second.tobytes()


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design["name"])
def test_stored_noise_is_that_of_plan_to_bit(design: dict[str, Any], tmp_path: Path) -> None:
    sites = written(tmp_path, noise=[design])
    assert sites.plan.config.release
    assert isinstance(sites.plan.noise, calibration.Factored)
    same(sites.plan, make(sites.plan.config, sites.plan.mixing))
    again = Project.load(tmp_path / "plan.json")
    same(again.plan, sites.plan)
    assert again.terms() == sites.terms() and again.roster == sites.roster


@pytest.mark.parametrize(
    "changes",
    [EVEN | NODE | {"noise": [{"name": "PairKeys", "shared": 2.0}]}, SCHEDULED],
    ids=["PairKeys", "ScheduledGaussian"],
)
def test_other_noise_is_made_again_and_compared(changes: dict[str, Any], tmp_path: Path) -> None:
    sites = written(tmp_path, **changes)
    again = Project.load(tmp_path / "plan.json")
    noise = sites.plan.noise
    assert noise is not None and again.plan.noise is not None
    (name,) = noise.arrays
    assert again.plan.noise.arrays[name].tobytes() == noise.arrays[name].tobytes()
    assert again.plan.guarantee == sites.plan.guarantee
    # What finite precision costs has to fit beneath the epsilon.
    assert noise.loss(sites.plan.target).epsilon.max() <= 3.0 * (1 - 1e-3) * (1 + 1e-6)
    smaller = np.nextafter(stored(tmp_path, name), np.float32(0))
    changed(tmp_path, **{name: smaller})
    refused(tmp_path, f"its array {name} is not what the plan makes here, to the bit")


def test_sites_are_in_roster_s_order(tmp_path: Path) -> None:
    sites = written(tmp_path)
    assert sites.names == NAMES
    assert sites.plan.senders == ((1,), (0, 2), (1,))
    assert sites.plan.guarantee.per_agent_epsilon == (4.0, 3.0, 2.0)
    assert (sites.seed, sites.average_rounds) == (3, 2)


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({}, ["nobody"] * 3),
        (
            EVEN | {"noise": [{"name": "Whisper"}]},
            ["lyon, geneva", "turin, geneva", "turin, lyon"],
        ),
        (
            EVEN | {"noise": [{"name": "Whisper", "subgroups": [[0, 1], [2]]}]},
            ["lyon", "turin", "nobody"],
        ),
        (EVEN | NODE | {"noise": [{"name": "PairKeys"}]}, ["lyon", "turin, geneva", "lyon"]),
    ],
)
def test_groups_are_sites_that_share_secret(
    changes: dict[str, Any], groups: list[str], tmp_path: Path
) -> None:
    rows = re.findall(r"\| \d \| .* \| .* \| (.*) \|", written(tmp_path, **changes).document())
    assert rows == groups


def test_counts_are_for_samplers_that_need_them(tmp_path: Path) -> None:
    counts = {"geneva": 4, "turin": 5, "lyon": 6}
    sites = written(tmp_path, sampler={"name": "Full"}, data={"counts": counts})
    assert sites.plan.counts is not None
    assert sites.plan.counts.tolist() == [5, 6, 4]
    x, y = np.ones((5, 3), np.float32), np.array([0, 1, 2, 0, 1])
    assert sites.problem(x, y, x, y, "turin").agents == 1
    for number, count in ((2, 4), (1, 6)):
        task = sites.problem(x, y, x, y, NAMES[number])
        with pytest.raises(ValueError, match=rf"\[5\].*\[{count}\]|\[{count}\].*\[5\]"):
            part(sites.plan, task, 0, [number])


def test_problem_is_of_one_site(tmp_path: Path) -> None:
    sites = written(tmp_path)
    x, y = np.ones((5, 3), np.float32), np.array([0, 1, 2, 0, 1])
    task = sites.problem(x, y, x[:2], y[:2], "lyon")
    assert task.agents == 1 and task.name == "lyon"
    assert task.partition.names == ("lyon",) and task.partition.counts.tolist() == [5]
    # As many classes as the schema says, of which these data have fewer.
    few = sites.problem(x, 0 * y, x, 0 * y, "lyon")
    assert sites.module.outputs == 3  # type: ignore[attr-defined]
    assert few.predict is not None
    with pytest.raises(ValueError, match=r"shape of x is \(5, 2\); the schema's is \(3,\)"):
        sites.problem(x[:, :2], y, x[:, :2], y, "lyon")
    with pytest.raises(ValueError, match="y reaches class 3, the model has 3 outputs"):
        sites.problem(x, y + 1, x, y, "lyon")
    with pytest.raises(ValueError, match="lyon"):
        part(sites.plan, sites.problem(x[:1], y[:1], x, y, "lyon"), 0, [1])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"noise": [{"name": "None"}]},
            "is not one design",
        ),
        ({"noise": []}, "is not one design"),
        (
            {"noise": [{"name": "Wisper"}]},
            r"^\[\[noise\]\] name is 'Wisper'; did you mean Whisper\? If not, choose one of "
            "AntiPgd, BandedInverse, Discrete, Independent, Mafalda, OneStep, PairKeys, Pairwise, "
            "Polynomial, PrefixSum, ScheduledGaussian, SpaceTime, Whisper$",
        ),
        ({"noise": DESIGNS[:2]}, "is not one design"),
        ({"noise": None}, r"\[\[noise\]\] is missing"),
        ({"budget": None}, r"\[budget\] is missing"),
        ({"release": False}, "release is unknown"),
        (
            EVEN
            | {
                "sampler": {"name": "Poisson", "expected": 2.0, "capacity": 4},
                "data": {"counts": dict.fromkeys(NAMES, 10)},
            },
            "no privacy amplification with a release, as of sites: use Random",
        ),
        ({"protect": SETTINGS["protect"] | {"gradients": "view"}}, "gradients 'view'"),
        (
            EVEN
            | {
                "noise": [{"name": "PairKeys"}],
                "protect": SETTINGS["protect"] | {"attacker": "node", "gradients": "view"},
            },
            "gradients 'view' in a release",
        ),
        ({"protect": SETTINGS["protect"] | {"attacker": "aggregator"}}, "attacker 'aggregator'"),
        (
            SCHEDULED | {"protect": {"relation": "replace_agent", "gradient_gap": 1.0}},
            "gradient_gap is 1.0 in a release",
        ),
        (
            {
                "noise": [{"name": "ScheduledLaplace"}],
                "budget": {"epsilon": 3.0, "accountant": "pure"},
                "protect": {"relation": "replace_agent", "clip_norm": 1.0, "norm": "l1"},
            },
            "is Laplace's, which no site hardens",
        ),
        ({"method": {"name": "DSGD", "gossip_steps": 2}}, r"\[method\] is DSGD.*need all agents"),
        (EVEN | {"method": {"name": "Federated"}, "average_rounds": 0}, "whose rounds need all ag"),
        (SCHEDULED | TRACKING | {"average_rounds": 1}, "average_rounds is for last models"),
        ({"average_rounds": -1}, "average_rounds is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"rounds": 10**6}, "rounds is 1000000; give a whole number from 0 to 100000"),
        ({"seeds": [0]}, "seeds is unknown; did you mean seed?"),
        ({"out": "run"}, "out is unknown"),
        ({"rounds": datetime.date(2026, 1, 1)}, "rounds is '2026-01-01'; give a whole number"),
        ({"budget": {"epsilon": np.inf, "delta": 1e-5}}, "epsilon is inf|not JSON compliant"),
        ({"budget": {"epsilon": [1.0, 2.0, 3.0], "delta": 1e-5}}, "name the sites"),
        ({"data": {"name": "digits"}}, r"\[data\] name is unknown"),
        (
            {"data": {"counts": {"lyon": 3}}},
            "counts of is 'lyon'; leave it out",
        ),
        (
            {"sampler": {"name": "Full"}, "data": {"counts": [3, 4, 5]}},
            "give the number of records of turin, lyon, geneva",
        ),
        (
            {"sampler": {"name": "Full"}},
            "'nobody'; give the number of records of",
        ),
        (
            {"sampler": {"name": "Full"}, "data": {"counts": {"lyon": 3}}},
            "records of turin, lyon, geneva: of whom there are certificates",
        ),
        ({"model": {"name": "own:Net"}}, r"\[model\] name is 'own:Net'; choose one of MLP"),
        ({"model": {"name": "os.system"}}, r"\[model\] name is 'os.system'"),
        ({"model": {"name": "MLP", "loss": "logistic"}}, r"\[model\] loss is 'logistic'"),
        ({"noise": [{"name": "DESIGNS"}]}, r"\[\[noise\]\] name is 'DESIGNS'"),
        ({"optimizer": {"name": "optax.sgd", "step_size": 1.0}}, r"\[optimizer\] name is 'optax.s"),
        (
            {"optimizer": {"name": "Chain", "make": "optax.sgd", "step_size": 1.0}},
            r"\[optimizer\] name is 'Chain'; choose one of Sgd$",
        ),
        ({"protect": SETTINGS["protect"] | {"clip": 1}}, r"\[protect\] clip is unknown"),
        (
            {"network": {"edges": [["lyon", "geneva"]]}},
            "not connected: agent turin",
        ),
        ({"network": {"edges": [["lyon", "paris"]]}}, "edges is .*paris"),
        ({"network": {"edges": [["lyon", "lyon"]]}}, "not connected"),
        ({"network": {"edges": [["lyon", "turin", "geneva"]]}}, "give pairs of"),
        ({"network": {"edges": "lyon"}}, "edges is 'lyon'; give a list"),
        ({"network": SETTINGS["network"] | {"mixing": "uniform"}}, "mixing is unknown"),
        ({"network": SETTINGS["network"] | {"seed": 1}}, r"\[network\] seed is unknown"),
        ({"network": {}}, r"\[network\] edges is missing; network needs it"),
        (
            {"model": {"name": "MLP", "hidden": 32}},
            r"\[model\] hidden is 32; give a list, \[32\]",
        ),
        (
            {"model": {"name": "MLP", "hidden": [0]}},
            r"\[model\] is MLP of .*'hidden': \[0\].*, which cannot be made .*; mend a value",
        ),
        (
            {"model": {"name": "MLP", "activation": "gelu"}},
            "MLP of .*'gelu'.*, which cannot be made",
        ),
        (
            {"model": {"name": "MLP", "metrics": ["f2"]}},
            r"\[model\] metrics is 'f2'; choose one of",
        ),
        (
            {"optimizer": {"name": "Adam", "step_size": 0.1}},
            r"\[optimizer\] name is 'Adam'; choose one of Sgd$",
        ),
        (
            {"protect": {"relation": "replace_patient", "clip_norm": 1.0}},
            r"\[protect\] relation is 'replace_patient'; .* choose one of .*, zero_out_record, ",
        ),
        ({"protect": {"relation": "zero_out_record"}}, r"clip_norm is inf; give clip_norm = 1\.0"),
        (
            EVEN | NODE | {"noise": [{"name": "Whisper"}]},
            "give attacker = 'outsider' and gradients = 'any', .* Independent or PairKeys$",
        ),
        (
            EVEN | {"method": {"name": "GradientTracking"}, "average_rounds": 0},
            "give noise = ScheduledLaplace or ScheduledGaussian, or None, and optimizer = Sgd$",
        ),
        (EVEN | {"noise": [{"name": "SumShares"}]}, "'aggregator' or 'outsider'$"),
    ],
)
def test_what_sites_cannot_run_is_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=match):
        written(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_links_may_be_a_file_of_edges(tmp_path: Path) -> None:
    pairs = written(tmp_path).settings["network"]["edges"]
    (tmp_path / "edges.txt").write_text("".join(f"{one} {other}\n" for one, other in pairs))
    again = tmp_path / "again"
    again.mkdir()
    sites = written(again, network={"graph": str(tmp_path / "edges.txt")})
    # The order of pairs is the file's, which changes no entry of W.
    first = Project.load(tmp_path / "plan.json").plan
    np.testing.assert_array_equal(sites.plan.mixing, first.mixing)
    assert "graph" not in sites.settings["network"]


def test_tracking_shows_models_that_nothing_bounds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method Tracking, whose payload nothing bounds"):
        written(tmp_path, **SCHEDULED | TRACKING)
    assert not list(tmp_path.iterdir())


def test_project_is_not_written_over(tmp_path: Path) -> None:
    sites = written(tmp_path)
    with pytest.raises(ValueError, match=r"plan.json'; there is one; move it, or name another"):
        written(tmp_path, rounds=7)
    assert Project.load(tmp_path / "plan.json").digest == sites.digest


@pytest.mark.parametrize("name", ["plan.json", "plan.npz"])
def test_each_changed_byte_is_noticed(name: str, tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    step = len(content) // 60
    for place in [*range(0, len(content), step), len(content) - 1]:
        for other in {content[place] ^ 1, 0x80} - {content[place]}:
            path.write_bytes(content[:place] + bytes([other]) + content[place + 1 :])
            refused(tmp_path, "plan.json")
    for other_content in (content[:-1], content + b"\n", b"", content[:100]):
        path.write_bytes(other_content)
        refused(tmp_path, "plan.json")
    path.write_bytes(content)
    Project.load(tmp_path / "plan.json")


def test_arrays_of_another_project_are_refused(tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    written(first)
    written(second, rounds=7)
    (first / "plan.npz").replace(second / "plan.npz")
    refused(second, "its arrays are damaged, or of another plan")


@pytest.mark.parametrize(
    "design",
    [*DESIGNS[:2], DESIGNS[4], DESIGNS[7]],
    ids=["Independent", "Mafalda", "Whisper", "Polynomial"],
)
def test_less_noise_is_refused_whatever_digests_say(design: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, noise=[design])
    factor = stored(tmp_path, "factor")
    changed(tmp_path, factor=factor * np.float32(0.9))
    refused(tmp_path, "epsilon|mu")
    # One agent's noise, and then its column: others seem to be as they were.
    weak = factor.copy()
    weak[1] *= np.float32(0.9)
    changed(tmp_path, factor=weak)
    refused(tmp_path, "epsilon|mu")
    changed(tmp_path, factor=factor)
    Project.load(tmp_path / "plan.json")


def test_stronger_strategy_is_refused(tmp_path: Path) -> None:
    written(tmp_path, noise=[{"name": "Mafalda"}])
    changed(tmp_path, strategy=stored(tmp_path, "strategy") * 1.1)
    refused(tmp_path, "epsilon|mu")
    # Fresh noise of a factor that was made for a strategy of sensitivity 1.
    changed(tmp_path, strategy=None)
    refused(tmp_path, "epsilon|mu")


@pytest.mark.parametrize(
    ("name", "array", "match"),
    [
        ("factor", 100 * np.eye(3), "factor is float64"),
        ("factor", np.full((3, 3), np.nan, np.float32), "plan.json"),
        ("factor", 100 * np.eye(4, dtype=np.float32), "plan.json"),
        ("factor", np.array("noise"), "plan.json"),
        ("factor", None, "factor"),
        ("mixing", np.eye(3), "mixing matrix is not that of its network"),
        ("mixing", np.full((3, 3), 1 / 3), "mixing matrix is not that of its network"),
        ("mixing", np.stack([MIXING] * 2), "mixing matrix is not that of its network"),
        ("mixing", np.full((2, 2), 1 / 2), "plan.json"),
        ("mixing", None, "mixing"),
        ("strategy", np.eye(5), "strategy"),
        ("strategy", np.eye(6, dtype=np.float32), "strategy"),
    ],
)
def test_unfit_array_is_refused(
    name: str, array: np.ndarray | None, match: str, tmp_path: Path
) -> None:
    written(tmp_path)
    changed(tmp_path, **{name: array})
    refused(tmp_path, match)


def reversed_names(content: dict[str, Any]) -> None:
    """Turn the roster round, and with it the plan's order."""
    content["roster"] = dict(reversed(content["roster"].items()))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda content: content["settings"].update(clip=1), "clip is unknown"),
        (lambda content: content["settings"]["protect"].update(clip=1), "clip is unknown"),
        (lambda content: content["settings"]["protect"].update(clip_norm=2.0), "epsilon|mu"),
        (lambda content: content["settings"].update(rounds=7), "epsilon|mu"),
        (lambda content: content["settings"]["budget"].update(delta=1e-6), "epsilon|mu"),
        (
            lambda content: content["settings"]["protect"].update(relation="replace_record"),
            "epsilon|mu",
        ),
        (lambda content: content["settings"]["network"].update(graph="edges.txt"), "graph is unk"),
        (
            lambda content: content["settings"]["network"].update(
                edges=[["lyon", "geneva"], ["turin", "geneva"]]
            ),
            "mixing matrix is not that of its network",
        ),
        (lambda content: content["settings"].update(noise={"name": "Independent"}), "noise is"),
        (
            lambda content: content["settings"].update(model={"name": "own:Net"}),
            "name is 'own:Net'",
        ),
        (lambda content: content["settings"].update(model=[]), r"\[model\]|model is"),
        (lambda content: content["settings"].update(rounds=2**40), "rounds is"),
        (lambda content: content["settings"].update(rounds="many"), "rounds is 'many'"),
        (lambda content: content["settings"]["model"].update(hidden=[[["x"]]]), "plan.json"),
        (lambda content: content.update(settings=[]), "plan.json"),
        (lambda content: content.update(schema={"columns": []}), "label"),
        (lambda content: content.update(roster=[]), "roster is"),
        (lambda content: content["roster"].pop("lyon"), "roster|lyon"),
        (lambda content: content["roster"].update(lyon="AAAA"), "key of lyon"),
        (lambda content: content["roster"].update(Lyon=content["roster"]["lyon"]), "Lyon"),
        (lambda content: content.update(protocol=3), "its protocol is not 2"),
        (lambda content: content.update(code="print()"), "not that of a plan file"),
        (lambda content: content.pop("package"), "not that of a plan file"),
        (reversed_names, "epsilon|mu"),
    ],
)
def test_hostile_content_is_refused_whatever_digests_say(
    change: Callable[[dict[str, Any]], object], match: str, tmp_path: Path
) -> None:
    written(tmp_path)
    resealed(tmp_path, change)
    refused(tmp_path, match)


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"a":' * 200_000, "[]", "1e999", "NaN", '"' + "x" * 2**22, "1" * 5000, "\x80"],
)
def test_text_of_another_shape_is_refused(text: str, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    refused(tmp_path, "plan.json")


def test_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "plan.json"
    text = path.read_text()
    path.write_text(text.replace('"protocol": 2,', '"protocol": 3,\n "protocol": 2,'))
    refused(tmp_path, "its content was changed")


def archive(folder: Path, data: bytes) -> None:
    """Put other bytes in the place of a project's arrays, with their digest."""
    (folder / "plan.npz").write_bytes(data)
    resealed(folder)


def npz(*entries: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive of any bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as packed:
        for name, data in entries:
            packed.writestr(name, data)
    return file.getvalue()


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    """Return the head of an array file."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype, "fortran_order": False, "shape": shape}
    )
    return file.getvalue()


def test_bombs_take_no_memory(tmp_path: Path) -> None:
    written(tmp_path)
    archive(tmp_path, npz(("factor.npy", bytes(2**28)), compression=zipfile.ZIP_DEFLATED))
    refused(tmp_path, "more than .* bytes")
    before = _validate.resident()[0]
    archive(tmp_path, npz(("factor.npy", bytes(2**24)), compression=zipfile.ZIP_DEFLATED))
    refused(tmp_path, "its arrays are larger than their file")
    archive(tmp_path, npz(("factor.npy", header((2**20, 2**20)))))
    refused(tmp_path, "plan.json")
    archive(tmp_path, npz(("factor.npy", header((2**62,), "|V0"))))
    refused(tmp_path, "plan.json")
    assert _validate.resident()[0] - before < 2**28
    (tmp_path / "plan.npz").write_bytes(bytes(2**17))
    refused(tmp_path, "plan.npz has more than .* bytes")


@pytest.mark.parametrize("name", ["plan.json", "plan.npz"])
def test_what_is_no_file_is_not_read(name: str, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / name).unlink()
    # Reading it would take no memory, and would not end in an error of ours.
    (tmp_path / name).symlink_to("/dev/null")
    refused(tmp_path, f"{name} has more than .* bytes, or is no regular file")
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    refused(tmp_path, f"{name} has more than .* bytes, or is no regular file")


def test_entries_that_share_bytes_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    data = bytearray(npz(("a.npy", bytes(1000)), ("b.npy", b"")))
    # The second entry of the directory claims the bytes of the first, again and again.
    place = data.rindex(b"PK\1\2")
    data[place + 20 : place + 28] = (2000).to_bytes(4, "little") * 2
    archive(tmp_path, bytes(data))
    refused(tmp_path, "larger than their file")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    written(tmp_path)
    marker = tmp_path / "ran"

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return marker.write_text, ("",)

    file = io.BytesIO()
    np.savez(file, factor=np.array([Code()], dtype=object), mixing=np.eye(3))
    archive(tmp_path, file.getvalue())
    refused(tmp_path, "Object arrays cannot be loaded")
    assert not marker.exists()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="plan.json"):
        Project.load(tmp_path / "plan.json")
    written(tmp_path)
    (tmp_path / "plan.npz").unlink()
    with pytest.raises(FileNotFoundError, match="plan.npz does not exist"):
        Project.load(tmp_path / "plan.json")


def test_terms_are_the_same_in_two_processes(tmp_path: Path) -> None:
    sites = written(tmp_path, noise=[{"name": "Whisper"}])
    code = (
        "import json, sys; from dpjax.sites.project import Project; "
        "print(json.dumps(Project.load(sys.argv[1]).terms()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    assert json.loads(done.stdout) == sites.terms()
    assert all(len(bytes.fromhex(digest)) == 32 for digest in sites.terms().values())


def differing(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """The items of terms that differ."""
    assert mine.keys() == theirs.keys()
    return [item for item in mine if mine[item] != theirs[item]]


def test_terms_name_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = written(tmp_path / "a")
    terms = sites.terms()
    wider = written(tmp_path / "b", model={"name": "MLP", "hidden": [5]})
    assert differing(terms, wider.terms()) == ["plan", "project", "model"]
    # Equal leaves, another activation.
    relu = written(tmp_path / "c", model={"name": "MLP", "hidden": [4], "activation": "relu"})
    assert differing(terms, relu.terms()) == ["plan", "project", "model"]
    folder = tmp_path / "d" / "plan.json"
    older = {"columns": [AGE | {"high": 130}, WARD], "label": LABEL}
    other = project.write(SETTINGS, roster(*NAMES), older, folder)
    assert differing(terms, other.terms()) == ["plan", "project", "schema"]
    monkeypatch.setattr(project, "__version__", "9.9")
    monkeypatch.setattr(project, "PROTOCOL", 9)
    assert differing(terms, sites.terms()) == ["package version", "protocol version"]


@pytest.mark.parametrize(
    ("changes", "numbers", "sharing"),
    [
        ({}, 31, "nobody"),
        (EVEN | {"noise": [{"name": "Whisper"}]}, 31, "turin, geneva"),
        (SCHEDULED | {"average_rounds": 0}, 31, "nobody"),
        (EVEN | NODE | {"noise": [{"name": "PairKeys"}]}, 31, "turin, geneva"),
    ],
)
def test_document_has_plan_s_numbers(
    changes: dict[str, Any], numbers: int, sharing: str, tmp_path: Path
) -> None:
    sites = written(tmp_path, **changes)
    page = sites.document()
    guarantee = sites.plan.guarantee.replace(release=True, sites=True)
    assert sites.digest in page
    assert f"| 1 | lyon | turin, geneva | {sharing} |" in page
    assert f"{numbers} numbers." in page and "The model has 31." in page
    assert "Rounds: 6. In each" in page and sites.roster.digest in page
    averaging = f"last round: {sites.average_rounds} messages of 31 numbers"
    assert (averaging in page) == ("last round" in page) == (sites.average_rounds > 0)
    statement = guarantee.statement()
    assert statement in " ".join(page.split())
    # Each party has its sentence there, but for the stated attacker.
    parties = list(guarantee.protection())
    assert sum(str(party) in statement for party in parties) == len(parties) - 1
    lines = page.partition("## Who learns what")[2].splitlines()
    assert max(map(len, lines)) <= 122 and max(map(len, page.splitlines())) <= 130
    words = len(page.split())
    assert words <= 750 and words - len(statement.split()) <= 430
    assert guarantee.attacker == sites.plan.config.protect.attacker
    assert "does not tell all sites how many records" in page
    assert "{" not in page and len(page.splitlines()) < 80
    other = written(tmp_path / "other", **{**changes, "rounds": 12}).document()
    assert "Rounds: 12. In each" in other


@pytest.mark.parametrize(
    ("budget", "match"),
    [
        ({"epsilon": 3.0, "delta": 1e-5}, "^$"),
        ({"epsilon": 3.0, "delta": 0.5}, "^delta is 0.5 for at least 6 records: .* below 0.17$"),
        ({"epsilon": 300.0, "delta": 1e-5}, r"^epsilon is vacuous: .* more than e\^20$"),
    ],
)
def test_absurd_budget_is_warned_of(
    budget: dict[str, float], match: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    made = written(tmp_path, budget=budget)
    fault = project.budget_fault(made.plan)
    assert re.search(match, fault)
    # Whoever makes the plan hears of delta at once, as in a simulation.
    heard = [str(item.message) for item in recwarn]
    assert heard == [text for text in fault.split("; e") if text.startswith("delta")]
    page = " ".join(made.document().split())
    assert ("**Warning**: " in page) == bool(fault)
    assert f"**Warning**: {fault}." in page or not fault
    # Loading says nothing by itself: a log of JSON lines has no place for it.
    recwarn.clear()
    loaded = Project.load(tmp_path / "plan.json")
    assert not list(recwarn) and project.budget_fault(loaded.plan) == fault


def page_of(folder: Path, **changes: Any) -> str:
    """A page, as one line."""
    return " ".join(written(folder, **changes).document().split())


def test_document_has_columns_with_their_public_ranges(tmp_path: Path) -> None:
    page = written(tmp_path).document()
    assert "- `age`: 0 to 120\n- `ward`: `medicine`, `surgery`\n- the label, `back`:" in page
    wide = {
        "name": "dose",
        "type": "number",
        "low": -0.5,
        "high": 7.123456789012,
        "missing": "middle",
    }
    flag = {"name": "smokes", "type": "flag"}
    columns = [wide, flag, WARD | {"other": True}]
    schema = {"columns": columns, "label": AGE}
    changes = {"model": {"name": "Linear", "loss": "squared"}}
    path = tmp_path / "other" / "plan.json"
    page = project.write(SETTINGS | changes, roster(*NAMES), schema, path).document()
    # Every digit: what is beyond a range is clipped into it.
    assert "- `dose`: -0.5 to 7.123456789012, or missing\n- `smokes`: `no`, `yes`\n" in page
    assert "- `ward`: `medicine`, `surgery`, or another\n- the label, `age`: 0 to 120\n" in page


def test_document_renders_no_name_of_a_column(tmp_path: Path) -> None:
    """An officer reads the page in a browser, and whoever wrote the schema is not trusted."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark")
    names = ["<script>x()</script>", "`` `<b>` ``", "[a](http://b)", "**&amp;**", "a|b_c_", "`"]
    columns = [AGE | {"name": name} for name in names]
    schema = {"columns": columns, "label": LABEL | {"classes": ["no", "<i>", "`<u>"]}}
    page = project.write(SETTINGS, roster(*NAMES), schema, tmp_path / "plan.json").document()
    html = markdown.render(page)
    assert not re.search("<(script|b|i|u|a|strong|em)[ >]", html)
    codes = [unescape(code) for code in re.findall("<code>(.*?)</code>", html)]
    assert codes == [*names, "back", "no", "<i>", "`<u>"]


def test_document_says_what_holds_for_its_secrets(tmp_path: Path) -> None:
    own = page_of(tmp_path / "own")
    group = page_of(
        tmp_path / "group", **EVEN, noise=[{"name": "Whisper", "subgroups": [[0, 1], [2]]}]
    )
    every = page_of(tmp_path / "all", **EVEN, noise=[{"name": "Whisper"}])
    links = page_of(tmp_path / "links", **EVEN | NODE, noise=[{"name": "PairKeys"}])
    for page in (own, group, every, links):
        assert "A site deletes its own when its rounds with noise are over" in page
        assert ("delete all copies of its secret's file" in page) == (page in (group, every))
        assert ("protects from non-members alone" in page) == (page in (group, every))
        assert ("distinct organisations" in page) == (page == links)
        assert ("All other sites together, a coalition, learn no more" in page) == (page == own)
        for words in (
            "No machine is cloned",
            "restored its folder leaves",
            "The authority",
            "author",
        ):
            assert words in page
        assert "a model of its own, which may be published" in page
        assert "metrics" in page and "audit file" in page and "certificates at both ends" in page


def test_project_shows_no_settings_in_tracebacks(tmp_path: Path) -> None:
    assert repr(written(tmp_path)).startswith("<dpjax.sites.project.Project object")
