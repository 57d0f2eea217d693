"""Phases of a project under authors, folders, files and kills that mean no good."""

import base64
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpjax.secagg.primitives import derived
from dpjax.sites import command, project, start, wire
from dpjax.sites.identity import Roster
from dpjax.sites.ledger import Ledger, beginning_of
from dpjax.sites.project import Project, follow
from dpjax.sites.store import LEAVING, SUCCESSOR, Folder, MustLeave
from tests.sites import sum_world
from tests.sites.test_phases import FEWER, SUMS, Sites, names_of

RICH = SUMS | {"total": {"epsilon": 9.0}}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of keys and certificates of three sites."""
    folder = tmp_path_factory.mktemp("keys")
    sum_world.identities(folder, 3)
    return folder


@pytest.fixture
def sites(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sites]:
    made = Sites(tmp_path, keys, monkeypatch)
    yield made
    made.stop()


THREE = SUMS | FEWER


def beginning(sites: Sites, plan: Project, *nonces: int) -> wire.Beginning:
    """What the first site signs of a run of some sites with such nonces."""
    presences = {}
    for number, nonce in enumerate(nonces):
        identity = sites.identity(number)
        signed = wire.signed_presence(identity, bytes([nonce] * 32), plan.terms())
        presences[identity.name] = signed
    first = sites.identity(0)
    return wire.signed_beginning(first, beginning_of(presences, first.name))


def signed_standings(sites: Sites, plan: Project) -> list[str]:
    """Standings of three sites after no round, without a run."""
    texts = []
    for number in range(3):
        identity = sites.identity(number)
        bare = wire.Standing(identity.name, plan.digest, bytes(32), ((0, bytes(32)),), b"")
        signed = bare._replace(signature=identity.sign("standing", bare.content))
        texts.append(base64.b64encode(wire.encoded(signed)).decode())
    return texts


def later(sites: Sites, before: Project, file: str, settings: dict[str, Any]) -> Path:
    """A plan after another one, by a hostile author, who checks nothing."""
    roster = Roster.of_certificates(map(sites.certificate, range(3)))
    names = {1: "plan.json", 2: "plan-2.json"}
    after = {
        "file": names[before.phase + 1],
        "plan": before.digest,
        "round": 0,
        "renewals": [],
        "standings": signed_standings(sites, before),
    }
    schema = json.loads((sites.folder / "plan.json").read_text())["schema"]
    arrays, content = project._made(settings, roster, schema, after)
    path = sites.folder / file
    path.with_suffix(".npz").write_bytes(arrays)
    path.write_text(project._sealed(content))
    return path


@pytest.mark.mutant
def test_no_total_comes_after_the_first_phase(sites: Sites) -> None:
    bare = {key: value for key, value in THREE.items() if key != "total"}
    first = sites.write(3, bare)
    path = later(sites, first, "plan-2.json", THREE | {"total": {"epsilon": 9.0}})
    with pytest.raises(ValueError, match=r"\[total\] of site-00 is .*, and was missing"):
        Project.load(path)


@pytest.mark.mutant
def test_a_plan_that_is_refused_takes_no_name(sites: Sites) -> None:
    dear = THREE | {"budget": THREE["budget"] | {"epsilon": 5.0}}
    with pytest.raises(ValueError, match="the total of 3 leaves"):
        sites.write(3, dear)
    assert not list(sites.folder.iterdir())
    # Nor do arrays stay beside a file that was there.
    (sites.folder / "plan.json").write_text("kept")
    with pytest.raises(ValueError, match=r"plan\.json.*there is one"):
        sites.write(3, THREE)
    assert [path.name for path in sites.folder.iterdir()] == ["plan.json"]
    assert (sites.folder / "plan.json").read_text() == "kept"


@pytest.mark.mutant
def test_a_nonce_begins_one_run(sites: Sites) -> None:
    """A folder of before the run, restored, meets others with new ones: another run."""
    plan = sites.write(3, THREE | {"total": {"epsilon": 9.0}})
    with contextlib.closing(Ledger(sites.folder / "ledger", plan, "site-00")) as ledger:
        ledger.charge(beginning(sites, plan, 1, 2, 3))
        ledger.charge(beginning(sites, plan, 1, 2, 3))
        with pytest.raises(MustLeave, match="of site-00 began two runs"):
            ledger.charge(beginning(sites, plan, 1, 4, 5))
        assert len(ledger.runs) == 1
    # Both were restored, and a neighbour shows the first run.
    with contextlib.closing(Ledger(sites.folder / "restored", plan, "site-00")) as ledger:
        ledger.guarantee(bytes([1] * 32))
        ledger.take("site-01", [beginning(sites, plan, 1, 2, 3)])
        assert len(ledger.runs) == 1
        with pytest.raises(MustLeave, match="of site-00 began two runs"):
            ledger.charge(beginning(sites, plan, 1, 4, 5))
        with pytest.raises(MustLeave, match="of site-00 began two runs"):
            ledger.take("site-02", [beginning(sites, plan, 1, 4, 5)])
        ledger.charge(beginning(sites, plan, 1, 2, 3))


def test_a_folder_of_another_project_spoils_no_ledger(sites: Sites) -> None:
    plan = sites.write(3, THREE)
    foreign = beginning(sites, plan, 1, 2, 3)._replace(project="other")
    with contextlib.closing(Ledger(sites.folder / "ledger", plan, "site-00")) as ledger:
        with pytest.raises(ValueError, match="folder has a run of another project"):
            ledger.recall(foreign)
        assert ledger.runs == []
    with contextlib.closing(Ledger(sites.folder / "ledger", plan, "site-00")) as ledger:
        ledger.recall(beginning(sites, plan, 1, 2, 3))
        assert len(ledger.runs) == 1


@pytest.mark.mutant
def test_another_folder_begins_no_other_ledger(sites: Sites) -> None:
    """All sites take new folders, so that nobody shows the first run."""
    plan = sites.write(3, THREE | {"total": {"epsilon": 2.5}})
    site = sites.site("site-00")
    ledger = site._ledger
    assert ledger is not None
    ledger.charge(beginning(sites, plan, 1, 2, 3))
    site.close()
    with pytest.raises(ValueError, match="more than the total's"):
        sites.site("site-00", folder=str(sites.folder / "site-00/other"))


@pytest.mark.mutant
def test_a_ledger_has_no_more_runs_than_others_show(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = sites.write(3, THREE | {"total": {"epsilon": 9.0}})
    monkeypatch.setattr("dpjax.sites.ledger._MOST_SHOWN", 2)
    with contextlib.closing(Ledger(sites.folder / "ledger", plan, "site-00")) as ledger:
        for number in (1, 2):
            ledger.charge(beginning(sites, plan, number, 8, 9))
        with pytest.raises(ValueError, match="runs of site-00 are 3"):
            ledger.charge(beginning(sites, plan, 3, 8, 9))


@pytest.mark.mutant
def test_links_in_the_clear_stay_in_the_statement(sites: Sites) -> None:
    plan = sites.write(3, THREE | {"total": {"epsilon": 9.0}})
    for insecure, number in ((True, 1), (False, 2)):
        ledger = Ledger(sites.folder / "ledger", plan, "site-00", insecure)
        ledger.charge(beginning(sites, plan, number, 8, 9))
        assert ledger.guarantee(bytes([number] * 32)).insecure
        ledger.close()


@pytest.mark.mutant
def test_records_of_ones_own_problem_are_bound(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a problem nobody knows what it holds out."""
    plan = sites.write(3, THREE | {"total": {"epsilon": 9.0}})
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (30, 3)).astype(np.float32)
    y = rng.integers(0, 3, 30).astype(np.int32)
    monkeypatch.setattr(Project, "accounts", property(lambda _: ["held_out", "training"]))
    problem = plan.problem(x, y, x, y, "site-00")
    real = sites.site

    def own() -> Any:
        with monkeypatch.context() as patch:
            site = start.site
            patch.setattr(start, "site", lambda path, _, values: site(path, problem, values))
            return real("site-00")

    site = own()
    assert site._ledger is not None
    site._ledger.charge(beginning(sites, plan, 1, 2, 3))
    site.close()
    with pytest.raises(ValueError, match="held_out is another than in an earlier phase"):
        sites.site("site-00")
    # What was refused lets go of the ledger.
    own().close()


@pytest.mark.mutant
def test_all_phases_before_end(sites: Sites) -> None:
    """A site that was not in the second phase comes back with the first one's secrets."""
    first = sites.write(3, RICH | FEWER)
    second = Project.load(later(sites, first, "plan-2.json", RICH | FEWER))
    third = Project.load(later(sites, second, "plan-3.json", RICH | FEWER))
    base = sites.folder / "run"
    secret = b"known to who left the first one."
    with contextlib.closing(Folder(base)) as folder:
        nonce = folder.drawn("nonce")
        folder.drawn("secret")
        folder.create("mark", derived(secret, "mark", nonce))
    with pytest.raises(ValueError, match="secret is that of a phase before"):
        start._end_phases_before(third, "nobody", base, secret)
    start._end_phases_before(third, "nobody", base, None)
    assert (base / SUCCESSOR).read_text() == third.digest
    assert not (base / "secret").exists()


@pytest.mark.mutant
def test_a_phase_beyond_the_total_ends_none(sites: Sites) -> None:
    """By its ledger, which has a run more than the plan knows of."""
    total = {"total": {"epsilon": 3.2}}
    settings = THREE | total
    first = sites.write(3, settings)
    later(sites, first, "plan-2.json", settings | {"seed": 9})
    site = sites.site("site-00")
    assert site._ledger is not None
    for number in (1, 2):
        site._ledger.charge(beginning(sites, first, number, 8, 9))
    site.close()
    folder = sites.folder / "site-00/run"
    with pytest.raises(ValueError, match="more than the total's"):
        sites.site("site-00", "plan-2.json")
    assert not (folder / SUCCESSOR).exists()
    assert (folder / "secret").exists()


def test_a_ledger_is_shown_before_a_run_of_its_account(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = sites.write(3, THREE)
    monkeypatch.setattr(Project, "account", property(lambda _: "held_out"))
    only = Project.load(sites.folder / "plan.json")
    assert only.guarantee_of("site-00", []).phases == ()
    del plan


@pytest.mark.mutant
def test_a_lost_ledger_does_not_know_which_records_were_held_out(sites: Sites) -> None:
    """What others show has charges, and no digest of the records that were trained on."""
    plan = sites.write(3, THREE | {"total": {"epsilon": 9.0}})
    accounts = ["held_out", "training"]
    shown = [beginning(sites, plan, 7, 8, 9)]
    with contextlib.closing(Ledger(sites.folder / "lost", plan, "site-00")) as ledger:
        ledger.bind(b"of today", ["training"])
        ledger.take("site-01", shown)
        with pytest.raises(MustLeave, match="which was lost"):
            ledger.bind(b"of today", accounts)
    # It hears of its loss when it has begun to evaluate.
    with contextlib.closing(Ledger(sites.folder / "again", plan, "site-00")) as ledger:
        ledger.bind(b"of today", accounts)
        with pytest.raises(MustLeave, match="which was lost"):
            ledger.take("site-01", shown)
    with pytest.raises(MustLeave, match="which was lost"):
        with contextlib.closing(Ledger(sites.folder / "again", plan, "site-00")) as ledger:
            ledger.bind(b"of today", accounts)


@pytest.mark.mutant
def test_a_statement_has_what_others_showed_of_a_ledger(sites: Sites) -> None:
    plan = sites.write(3, THREE | {"total": {"epsilon": 9.0}})
    site = sites.site("site-00")
    ledger = site._ledger
    assert ledger is not None and "by 2 phases" not in site.statement()
    ledger.take("site-01", [beginning(sites, plan, 4, 5, 6)])
    assert "by 2 phases" in site.statement()
    site.close()


def test_a_ledger_is_printed_while_a_site_uses_it(sites: Sites) -> None:
    plan = sites.write(3, THREE | {"total": {"epsilon": 2.5}})
    ledger = Ledger(sites.folder / "spent", plan, "site-00")
    ledger.charge(beginning(sites, plan, 1, 2, 3))
    path = sites.folder / "site.toml"
    path.write_text('name = "site-00"\nplan = "plan.json"\nfolder = "run"\nledger = "spent"\n')
    charged = [line for line in start.ledger_lines(path) if line.startswith("charged: ")]
    assert charged == [f"charged: plan {plan.digest}, nonce {bytes([1] * 8).hex()}"]
    # Another run, which others have shown, passes the total: it is printed all the same.
    with pytest.raises(MustLeave):
        ledger.take("site-01", [beginning(sites, plan, 4, 5, 6)])
    printed = start.ledger_lines(path)
    assert len([line for line in printed if line.startswith("charged: ")]) == 2
    assert printed[-1].startswith("nothing more may be sent: ") and "total" in printed[-1]
    ledger.close()
    charges = sites.folder / "spent/charges"
    charges.write_bytes(charges.read_bytes() + b'{"digest"')
    assert start.ledger_lines(path) == printed
    charges.write_bytes(b"{}\n")
    with pytest.raises(MustLeave, match="charges is damaged"):
        start.ledger_lines(path)


@pytest.mark.mutant
def test_who_leaves_says_so_again_after_a_kill(sites: Sites) -> None:
    sites.write(3, THREE | {"rounds": 3})
    names = names_of(3)
    sites.start(*names, rounds=1)
    sites.finished(*names)
    gone = names[1]
    folder = sites.folder / gone / "run"
    # Killed once its word is on disk, and its secret gone.
    site = sites.site(gone)
    (folder / LEAVING).write_bytes(b"")
    site._conversation.leave()
    site._forget()
    site.close()
    sites.start(*names)
    results = sites.finished(*names)
    assert not isinstance(results[gone], BaseException), results[gone]
    for name in (names[0], names[2]):
        assert f"{gone} left in order, after 1 rounds" in str(results[name])
    assert not (folder / LEAVING).exists()
    with pytest.raises(ValueError, match="has left in order"):
        sites.site(gone)


def test_nobody_leaves_a_phase_that_has_ended(tmp_path: Path) -> None:
    for name in ("run", SUCCESSOR):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"run\.1 for the second one"):
        command.leave_command(tmp_path)
    assert not (tmp_path / LEAVING).exists()


def test_files_that_lack_something_are_named(sites: Sites) -> None:
    path = sites.folder / "site.toml"
    path.write_text('name = "site-00"\n')
    with pytest.raises(ValueError, match=r"site\.toml: plan is missing"):
        start.ledger_lines(path)
    with pytest.raises(ValueError, match=r"site\.toml: plan is missing"):
        command.standing_command(path)
    sites.write(3, THREE)
    with pytest.raises(FileNotFoundError, match="no.renewal does not exist"):
        follow(
            sites.folder / "plan.json", [], sites.folder / "plan-2.json", renewals=["no.renewal"]
        )


@pytest.mark.mutant
def test_first_models_are_of_the_models_numbers(sites: Sites) -> None:
    first = sites.write(3, RICH | FEWER)
    roster = Roster.of_certificates(map(sites.certificate, range(3)))
    path = later(sites, first, "plan-2.json", RICH | FEWER)
    content = json.loads(path.read_text())
    leaves = [np.zeros(leaf.shape, complex) for leaf in project.jax.tree.leaves(first.shapes)]
    made = project._made(RICH | FEWER, roster, content["schema"], content["after"], leaves)
    path.with_suffix(".npz").write_bytes(made[0])
    path.write_text(project._sealed(made[1]))
    with pytest.raises(ValueError, match="its first models are none of this model's"):
        Project.load(path)
