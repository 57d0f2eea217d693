"""Phases of a project: who leaves, who joins, what goes on, and what each site may spend."""

import base64
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks._local_sites import LocalChannel, Network
from dpjax import _files
from dpjax.accounting import budget
from dpjax.plans.protect import Budget
from dpjax.sites import project, start, wire
from dpjax.sites.compute import SumRounds
from dpjax.sites.identity import Identity, Refused, Roster
from dpjax.sites.ledger import Ledger, beginning_of
from dpjax.sites.noise import SiteNoise
from dpjax.sites.project import Project, follow
from dpjax.sites.site import SiteLoop
from dpjax.sites.store import MustLeave
from tests.sites import sum_world
from tests.sites.test_project import SCHEMA, resealed

GOSSIP: dict[str, Any] = {
    "rounds": 6,
    "seed": 3,
    "model": {"name": "MLP", "hidden": [4]},
    "protect": {"relation": "zero_out_record", "clip_norm": 1.0},
    "budget": {"epsilon": 2.0, "delta": 1e-4},
    "total": {"epsilon": 3.0},
    "noise": [{"name": "Independent"}],
    "sampler": {"name": "Random", "batch_size": 4},
    "optimizer": {"name": "Sgd", "step_size": 0.1},
}
SUMS = GOSSIP | {
    "noise": [{"name": "Discrete", "dropouts": 1, "colluders": 1}],
    "protect": GOSSIP["protect"] | {"attacker": "aggregator"},
    "budget": {"epsilon": 2.0, "delta": 1e-4, "accountant": "zcdp"},
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of keys and certificates of seven sites."""
    folder = tmp_path_factory.mktemp("keys")
    sum_world.identities(folder, 7)
    return folder


class Sites:
    """Sites in threads, with files as their operators have them, and sessions over queues."""

    def __init__(self, folder: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.keys = keys
        self.network = Network()
        self.threads: dict[str, threading.Thread] = {}
        self.results: dict[str, object] = {}
        self.members: dict[str, SiteLoop] = {}
        self.waits = {"late": 5.0, "linger": 5.0, "enrol": 10.0, "stage": 10.0}
        monkeypatch.setattr(start, "_channel", self._channel)

    def _channel(self, agreement: Any, identity: Any, files: Any, values: Any, *rest: Any) -> Any:
        peers = set(start._addresses(agreement, values["name"], values))
        return LocalChannel(self.network, values["name"], peers)

    def name(self, number: int) -> str:
        return f"site-{number:02d}"

    def certificate(self, number: int) -> Path:
        return self.keys / "authority" / f"{self.name(number)}.pem"

    def identity(self, number: int) -> Identity:
        name = self.name(number)
        files = {"key": self.keys / f"{name}.key", "certificate": self.certificate(number)}
        return Identity.load(name, authority=self.keys / "authority/authority_root.pem", **files)

    def write(self, count: int, settings: dict[str, Any], file: str = "plan.json") -> Project:
        roster = Roster.of_certificates(map(self.certificate, range(count)))
        if settings["noise"][0]["name"] != "Discrete":
            names = list(roster)
            pairs = zip(names, [*names[1:], names[0]], strict=True)
            settings = settings | {"network": {"edges": [list(pair) for pair in pairs]}}
        return project.write(settings, roster, SCHEMA, self.folder / file)

    def site(self, name: str, plan: str = "plan.json", **changes: Any) -> SiteLoop:
        rng = np.random.default_rng([*name.encode()])
        x = rng.uniform(-1, 1, (30, 3)).astype(np.float32)
        y = rng.integers(0, 3, 30).astype(np.int32)
        values = {
            "name": name,
            "certificate": self.keys / "authority" / f"{name}.pem",
            "key": self.keys / f"{name}.key",
            "authority": self.keys / "authority/authority_root.pem",
            "folder": str(self.folder / name / "run"),
            "home": str(self.folder),
            "waits": self.waits,
        }
        (self.folder / name).mkdir(exist_ok=True)
        return start.site(plan, lambda: (x, y), values | changes)

    def start(self, *names: str, plan: str = "plan.json", rounds: int = 1000, **rest: Any) -> None:
        """Lives of sites, which end after so many rounds."""
        for name in names:
            self.members[name] = self.site(name, plan, **rest)

        def live(site: SiteLoop) -> None:
            try:
                for progress in site.rounds():
                    if progress.round == rounds:
                        break
                self.results[site.name] = jax.device_get(site.compute.released(site._state))
            except BaseException as error:
                self.results[site.name] = error
            finally:
                site.close()

        for name in names:
            self.results.pop(name, None)
            thread = threading.Thread(target=live, args=(self.members[name],), daemon=True)
            self.threads[name] = thread
            thread.start()

    def finished(self, *names: str) -> dict[str, Any]:
        for name in names:
            self.threads[name].join(60)
            assert not self.threads[name].is_alive(), f"{name} hangs"
        return {name: self.results[name] for name in names}

    def models(self, *names: str) -> list[np.ndarray]:
        models = []
        for name, result in self.finished(*names).items():
            if isinstance(result, BaseException):
                raise AssertionError(name) from result
            models.append(np.concatenate([leaf[0].ravel() for leaf in jax.tree.leaves(result)]))
        return models

    def standings(self, *names: str, plan: str = "plan.json", tag: str = "") -> list[Path]:
        paths = []
        for name in names:
            member = self.site(name, plan)
            path = self.folder / f"{name}{tag}.standing"
            member.standing(path)
            member.close()
            paths.append(path)
        return paths

    def stop(self) -> None:
        for member in self.members.values():
            member._conversation.doubt = member._conversation.doubt or "the test is over"
            member._last = max(member._last, 1000)
        for thread in self.threads.values():
            thread.join(30)


@pytest.fixture
def sites(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sites]:
    world = Sites(tmp_path, keys, monkeypatch)
    yield world
    world.stop()


def names_of(count: int) -> list[str]:
    return [f"site-{number:02d}" for number in range(count)]


# A site leaves.


@pytest.mark.mutant
def test_a_site_leaves_in_order_and_others_go_on(sites: Sites) -> None:
    sites.write(4, GOSSIP)
    names = names_of(4)
    gone = names[1]
    stay = [names[0], *names[2:]]
    sites.start(*names, rounds=2)
    sites.finished(*names)
    (sites.folder / gone / "run/leaving").write_bytes(b"")
    sites.start(*names)
    results = sites.finished(*names)
    # The one that leaves ends without an error; the others by one line that names it.
    assert not isinstance(results[gone], BaseException)
    assert sites.members[gone].has_left
    for name in stay:
        assert isinstance(results[name], ValueError), name
        assert f"{gone} left in order, after 2 rounds" in str(results[name])
        assert "dpjax site standing" in str(results[name])
    # It stays away; the others hear of it again from their folders.
    with pytest.raises(ValueError, match="has left in order"):
        sites.site(gone)
    sites.start(stay[0])
    assert "left in order" in str(sites.finished(stay[0])[stay[0]])
    files = sites.standings(*stay)
    edges = [[stay[0], stay[1]], [stay[1], stay[2]]]
    second = follow(
        sites.folder / "plan.json",
        files,
        sites.folder / "plan-2.json",
        changes={"network": {"edges": edges}},
    )
    assert second.names == tuple(stay) and second.phase == 1 and second.round == 2
    assert second.plan.config.rounds == 4 and second.seed == 4
    # The first models are the mean of those after the last common round.
    states = [np.load(file) for file in files]
    leaf = np.mean([state["2/0"][0] for state in states], axis=0)
    np.testing.assert_allclose(jax.tree.leaves(second.start)[0], leaf, atol=1e-7)
    sites.start(*stay, plan="plan-2.json")
    models = sites.models(*stay)
    assert len({model.tobytes() for model in models}) == 3
    text = sites.members[stay[0]].guarantee.statement()
    assert "(epsilon = 3, delta" in text and "2 phases" in text
    # The old phase has ended for who signed its successor, and its secrets are gone.
    assert not (sites.folder / stay[0] / "run/secret").exists()
    with pytest.raises(ValueError, match="of a phase that site-00 has ended"):
        sites.site(stay[0])


def test_who_is_gone_is_named_everywhere(sites: Sites) -> None:
    """On a ring of five, one has no session with the site that is gone, and blames nobody else."""
    sites.write(5, GOSSIP)
    names = names_of(5)
    sites.waits["gone"] = 4.0
    sites.start(*names[1:], rounds=1000)
    sites.start(names[0], rounds=2)
    results = sites.finished(*names)
    for name in names[1:]:
        assert f"{names[0]} is gone" in str(results[name]), results[name]
        assert "start this site again" in str(results[name])
    # It is back: nothing of it is on disk.
    sites.waits["gone"] = 60.0
    sites.start(*names)
    sites.models(*names)


@pytest.mark.mutant
def test_who_is_there_and_says_nothing_holds_nobody_for_ever(sites: Sites) -> None:
    sites.write(4, GOSSIP)
    names = names_of(4)
    sites.waits["gone"] = 3.0
    silent = sites.site(names[0])
    ended = threading.Event()

    def listen() -> None:
        silent._conversation.connect()
        while not ended.is_set():
            silent._conversation.turn()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    sites.start(*names[1:])
    results = sites.finished(*names[1:])
    ended.set()
    thread.join(10)
    silent.close()
    # Its neighbours on the ring wait for its message, and the third for theirs.
    for name in (names[1], names[3]):
        assert "seconds went by without the message of site-00" in str(results[name])
        assert "find out who spoils it" in str(results[name])
    assert isinstance(results[names[2]], ValueError)


def after_a_round(sites: Sites, count: int, settings: dict[str, Any]) -> SiteLoop:
    """The first of some sites, started again after a round of all."""
    sites.write(count, settings)
    names = names_of(count)
    sites.start(*names, rounds=1)
    sites.finished(*names)
    return sites.site(names[0])


@pytest.mark.mutant
def test_words_of_departures_are_checked(sites: Sites) -> None:
    names = names_of(4)
    site = after_a_round(sites, 4, GOSSIP)
    meeting = site._conversation
    peer = meeting.neighbours[names[1]]
    content = wire.leave_content(meeting.run, 0, 1)
    signature = sites.identity(2).sign("leave", content)
    meeting._take(peer, wire.Leave(names[2], 1, signature))
    assert "left in order" in str(meeting.ended(is_stuck=False))
    for leave, message in (
        (wire.Leave(names[3], 1, signature), "did not sign"),
        (wire.Leave(names[2], 2, signature), "did not sign"),
        (wire.Leave(names[0], 1, b""), "is here"),
        (wire.Leave("nobody", 1, b""), "no site"),
    ):
        with pytest.raises(Refused, match=message):
            meeting._take(peer, leave)
    peer.live = True
    with pytest.raises(Refused, match="is here"):
        meeting._take(meeting.neighbours[names[3]], wire.Leave(names[1], 1, b""))
    # Another run's word, and one of this site that its folder lacks.
    other = sites.identity(3).sign("leave", wire.leave_content(bytes(32), 0, 1))
    with pytest.raises(Refused, match="did not sign"):
        meeting._take(peer, wire.Leave(names[3], 1, other))
    mine = sites.identity(0).sign("leave", content)
    with pytest.raises(Refused, match="this folder lacks"):
        meeting._take(peer, wire.Leave(names[0], 1, mine))
    assert "this folder lacks" in str(meeting.doubt)
    assert "site-00 must leave" in str(meeting.doubt)
    site.close()


@pytest.mark.mutant
def test_of_two_words_of_leaving_the_earlier_round_stands(sites: Sites) -> None:
    """Who names a later round, first or afterwards, would keep some waiting for its word."""
    names = names_of(6)
    site = after_a_round(sites, 6, SUMS)
    meeting = site._conversation
    peer = meeting.neighbours[names[1]]
    for round in (5, 1, 3):
        content = wire.leave_content(meeting.run, 0, round)
        signature = sites.identity(2).sign("leave", content)
        meeting._take(peer, wire.Leave(names[2], round, signature))
    assert names[2] in meeting.sums._asked_for_voids(1)
    assert names[2] not in meeting.sums._asked_for_voids(2)
    site.close()


def test_sums_go_on_without_a_site_and_one_joins(sites: Sites) -> None:
    sites.write(6, SUMS)
    names = names_of(6)
    gone = names[2]
    stay = [name for name in names if name != gone]
    sites.start(gone, rounds=2)
    sites.start(*stay)
    first = sites.models(*stay)
    assert len({model.tobytes() for model in first}) == 1
    files = sites.standings(*stay)
    joins = sites.name(6)
    second = follow(
        sites.folder / "plan.json",
        files,
        sites.folder / "plan-2.json",
        joining=[sites.certificate(6)],
        changes={"rounds": 3},
    )
    members = [*stay, joins]
    assert second.names == tuple(members) and second.round == 6
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(second.start)])
    np.testing.assert_allclose(flat, first[0], atol=1e-6)
    # Who joins has spent nothing, and all are planned for what is left of the others' totals.
    assert second.plan.config.budget.epsilon < 2.2
    assert second.remaining(joins).epsilon > second.remaining(names[0]).epsilon
    for name in members:
        place = sites.folder / name / "run.1"
        place.mkdir(parents=True)
        number = int(name[-2:])
        (place / "nonce").write_bytes(bytes([number + 1] * 32))
        (place / "secret").write_bytes(bytes([number + 101] * 32))
    sites.start(*members, plan="plan-2.json")
    models = sites.models(*members)
    assert len({model.tobytes() for model in models}) == 1
    totals, model = in_one_process(sites, second, members)
    bits = second.plan.noise.code.bits
    for round, total in enumerate(totals):
        content = (sites.folder / joins / f"run.1/sums/{round}").read_bytes()
        opened = wire.decoded(content)
        assert opened.survivors == tuple(range(6))
        values = sum_world.primitives.unpacked_vector(opened.total, len(total), bits)
        np.testing.assert_array_equal(values, total)
    np.testing.assert_allclose(models[0], model, atol=1e-6)
    assert "(epsilon = 3, delta" in sites.members[joins].guarantee.statement()


def in_one_process(sites: Sites, plan: Project, names: list[str]) -> tuple[list, np.ndarray]:
    """The sums and the model of a phase whose vectors are added up by hand."""
    run = wire.decoded((sites.folder / names[0] / "run.1/run").read_bytes())
    title = wire.run_of({entry.name: entry for entry in run.presences}, plan.digest)
    rounds = []
    for number, name in enumerate(names):
        member = sites.members[name]
        computed = SumRounds(plan.plan, problem_of(sites, plan, name), number, seed=plan.seed)
        secret = bytes([int(name[-2:]) + 101] * 32)
        computed.begin([SiteNoise(secret, run=title, holder=name, phase=1)])
        rounds.append(computed)
        assert member.compute.rounds == computed.rounds
    states = [site.init() for site in rounds]
    totals = []
    for _ in range(rounds[0].rounds):
        sent = [site.outgoing(state) for site, state in zip(rounds, states, strict=True)]
        vectors = [s.vector(states[i], sent[i]) for i, s in enumerate(rounds)]
        total = sum(vectors) % 2 ** rounds[0].code.bits
        totals.append(total)
        for i, site in enumerate(rounds):
            states[i] = site.incoming(states[i], sent[i], total, len(rounds))
    released = rounds[0].released(states[0])
    return totals, np.concatenate([leaf[0].ravel() for leaf in jax.tree.leaves(released)])


def problem_of(sites: Sites, plan: Project, name: str) -> Any:
    """A site's problem, read again."""
    rng = np.random.default_rng([*name.encode()])
    x = rng.uniform(-1, 1, (30, 3)).astype(np.float32)
    y = rng.integers(0, 3, 30).astype(np.int32)
    problem, *_ = start._problem(plan, name, lambda: (x, y), {})
    return problem


@pytest.mark.mutant
def test_a_plan_that_was_signed_and_never_began_is_followed(sites: Sites) -> None:
    """Of two coordinators' plans neither begins: sites go on after one, and it costs nothing."""
    sites.write(5, SUMS)
    names = names_of(5)
    sites.start(*names, rounds=2)
    sites.finished(*names)
    files = sites.standings(*names)
    plan = sites.folder / "plan.json"
    second = follow(plan, files[:4], sites.folder / "plan-2.json", changes=FEWER)
    follow(plan, files[1:], sites.folder / "other.json", changes=FEWER)
    # Three sign the one, and one the other; neither begins.
    signed = sites.standings(*names[:3], plan="plan-2.json", tag=".2")
    sites.site(names[3], "other.json").close()
    with pytest.raises(ValueError, match="a site signs one"):
        sites.site(names[3], "plan-2.json")
    # Who has signed so begins it no more.
    sites.start(names[0], plan="plan-2.json")
    assert "signed that it has not begun" in str(sites.finished(names[0])[names[0]])
    parts = sites.folder / "plan-2.json", signed, sites.folder / "plan-3.json"
    joining = [sites.certificate(3)]
    with pytest.raises(ValueError, match="site-03 was to take part .* give its standing"):
        follow(*parts, joining=joining)
    # A hostile author gets no further: what it sent counts, unless it signs that it did not.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpjax.sites.project._validate.refuse", lambda rules: None)
        with pytest.raises(ValueError, match="site-03: .*total of 3 leaves 0.0"):
            follow(*parts, joining=joining)
    third = follow(*parts)
    members = names[:3]
    assert third.phase == 2 and third.round == 0 and third.names == tuple(members)
    assert third.plan.config.rounds == second.plan.config.rounds == 4
    for name in members:
        left = third.before.before.remaining(name).epsilon
        assert third.before.remaining(name).epsilon < left
        assert third.of_site(name).epsilon == pytest.approx(float(left), rel=1e-3)
    models = [jax.tree.leaves(plan.start)[0] for plan in (second, third)]
    np.testing.assert_array_equal(*models)
    # Nor does a second one that never began.
    again = sites.standings(*members, plan="plan-3.json", tag=".3")
    fourth = follow(sites.folder / "plan-3.json", again, sites.folder / "plan-4.json")
    assert fourth.of_site(names[0]).epsilon == pytest.approx(third.of_site(names[0]).epsilon)
    sites.start(*members, plan="plan-4.json")
    ends = sites.models(*members)
    assert len({end.tobytes() for end in ends}) == 1
    ledger = sites.members[names[0]]._ledger
    assert [digest for digest, _ in ledger.runs] == [third.root, fourth.digest]
    assert "2 phases" in sites.members[names[0]].guarantee.statement()
    # Nobody goes back to the one that did not begin.
    with pytest.raises(ValueError, match="of a phase that site-00 has ended"):
        sites.site(names[0], "plan-2.json")


def test_folders_charge_a_ledger_that_was_lost(sites: Sites) -> None:
    """Also where no other site shows it: a hostile one may have been the only neighbour."""
    sites.write(5, SUMS)
    names = names_of(5)
    sites.start(*names, rounds=1)
    sites.finished(*names)
    files = sites.standings(*names)
    second = follow(sites.folder / "plan.json", files, sites.folder / "plan-2.json", changes=FEWER)
    (lost,) = (sites.folder / names[0]).glob("*.ledger")
    shutil.rmtree(lost)
    site = sites.site(names[0], "plan-2.json")
    assert [digest for digest, _ in site._ledger.runs] == [second.root]
    assert "2 phases" in site.guarantee.statement()
    site.close()


@pytest.mark.mutant
@pytest.mark.parametrize("settings", [SUMS, GOSSIP])
def test_who_holds_evidence_hands_in_how_far_it_came(sites: Sites, settings: Any) -> None:
    """Otherwise one that signs two words would end the project for all."""
    sites.write(5, settings)
    names = names_of(5)
    sites.start(*names, rounds=2)
    sites.finished(*names)
    site = sites.site(names[0])
    if settings is SUMS:
        proof = b""
    else:
        header = site._conversation._stored(site._folder.names("sent")[0]).header(names[0])
        proof = wire.encoded(wire.Headers((header, header)))
    site._folder.create("evidence-site-01-1", proof)
    site.close()
    site = sites.site(names[0])
    standing = site.standing(sites.folder / "proved.standing")
    assert len(standing.rounds) > 1
    with pytest.raises(MustLeave, match="proves|two"):
        next(site.rounds())
    site.close()


# The plan of a later phase.


@pytest.fixture(scope="module")
def after_two(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[Sites]:
    """Five sites of sums after two rounds, with their standings."""
    with pytest.MonkeyPatch.context() as patch:
        world = Sites(tmp_path_factory.mktemp("after"), keys, patch)
        world.write(5, SUMS)
        world.start(*names_of(5), rounds=2)
        world.finished(*names_of(5))
        world.standings(*names_of(5))
        yield world
        world.stop()


def standing(sites: Sites, *numbers: int) -> list[Path]:
    return [sites.folder / f"{sites.name(number)}.standing" for number in numbers]


def following(sites: Sites, numbers: tuple[int, ...], file: str, **options: Any) -> Project:
    plan = sites.folder / "plan.json"
    return follow(plan, standing(sites, *numbers), sites.folder / file, **options)


FEWER = {"noise": [{"name": "Discrete", "colluders": 1}]}


def test_a_phase_follows_for_a_majority_alone(after_two: Sites) -> None:
    third = following(after_two, (0, 1, 2), "three.json", changes=FEWER)
    assert third.names == tuple(names_of(3)) and third.plan.config.rounds == 4
    with pytest.raises(ValueError, match="2 of 5 sites go on, which is no majority"):
        following(after_two, (3, 4), "two.json", joining=[after_two.certificate(6)])
    with pytest.raises(ValueError, match=r"site-01 goes on by its standing; do not join it"):
        following(after_two, (0, 1, 2), "both.json", joining=[after_two.certificate(1)])
    with pytest.raises(ValueError, match="give one in the folder of"):
        plan = after_two.folder / "plan.json"
        follow(plan, standing(after_two, 0, 1, 2), after_two.folder / "elsewhere/plan-2.json")


@pytest.mark.mutant
def test_standings_are_checked(after_two: Sites, tmp_path: Path) -> None:
    text, arrays = _files.unpacked(after_two.folder / "site-00.standing")
    frame = wire.decoded(base64.b64decode(text))
    identity = after_two.identity(0)
    plan = after_two.folder / "plan.json"

    def forged(**changes: Any) -> list[Path]:
        bare = frame._replace(**changes)
        signed = bare._replace(signature=identity.sign("standing", bare.content))
        encoded = base64.b64encode(wire.encoded(signed)).decode()
        path = tmp_path / "forged.standing"
        path.unlink(missing_ok=True)
        _files.create(path, _files.packed(encoded, arrays))
        return [path, *standing(after_two, 1, 2)]

    def refused(files: list[Path], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            follow(plan, files, after_two.folder / "forged.json", changes=FEWER)
        assert not (after_two.folder / "forged.json").exists()

    refused(forged(name="site-04"), "of site-04 is not signed by it")
    refused(forged(plan="0" * 64), "after the plan 0000000000000000, and .* of one phase")
    refused(forged(run=bytes(32)), "of several runs")
    refused(forged(rounds=((1, bytes(32)),)), "other models than it signed")
    refused(forged(rounds=((7, bytes(32)),)), "no round in common")
    path = tmp_path / "bare.standing"
    bare = wire.encoded(frame._replace(signature=b""))
    _files.create(path, _files.packed(base64.b64encode(bare).decode(), arrays))
    refused([path, *standing(after_two, 1, 2)], "site-00 is not signed by it")


@pytest.mark.mutant
def test_hostile_authors_of_a_phase_are_refused(after_two: Sites) -> None:
    fourth = following(after_two, (0, 1, 2, 3), "four.json", changes=FEWER)
    folder = after_two.folder
    path = folder / "four.json"
    content = path.read_text(encoding="utf-8")

    def refused(change: Callable[[dict[str, Any]], object], match: str) -> None:
        stored = json.loads(content)
        del stored["digest"]
        change(stored)
        path.write_text(project._sealed(stored), encoding="utf-8")
        with pytest.raises(ValueError, match=match):
            Project.load(path)

    def fewer(stored: dict[str, Any]) -> None:
        stored["after"]["standings"] = stored["after"]["standings"][:2]

    def richer(stored: dict[str, Any]) -> None:
        stored["settings"]["total"]["epsilon"] = 30.0

    def none(stored: dict[str, Any]) -> None:
        del stored["settings"]["total"]

    refused(fewer, "no majority")
    refused(lambda stored: stored["after"].update(plan="0" * 64), "a phase follows the plan 000")
    refused(lambda stored: stored["after"].update(file="../plan.json"), "no file beside it")
    refused(lambda stored: stored["after"].update(file="four.json"), "four.json")
    refused(lambda stored: stored["after"].update(round=5), "lacks round 5")
    refused(lambda stored: stored["after"].update(standings=["AAAA"]), "no message|no standing")
    refused(richer, "is 30 by zcdp, and was 3 by zcdp; a total is fixed before the first phase")
    refused(none, r"\[total\] of site-00 is missing, and was 3")
    other = dict(after_two_roster(after_two, (0, 1, 2)))
    other["site-03"] = dict(after_two_roster(after_two, (6,)))["site-06"]
    refused(lambda stored: stored.update(roster=other), "another key than in an earlier phase")
    path.write_text(content, encoding="utf-8")
    assert Project.load(path).digest == fourth.digest


def after_two_roster(sites: Sites, numbers: tuple[int, ...]) -> dict[str, str]:
    pairs = {}
    for number in numbers:
        key = sites.identity(number).public_key
        pairs[sites.name(number)] = base64.b64encode(key).decode()
    return pairs


@pytest.mark.mutant
def test_a_site_signs_one_plan_after_a_phase(sites: Sites) -> None:
    sites.write(5, SUMS)
    names = names_of(5)
    sites.start(*names, rounds=1)
    sites.finished(*names)
    files = sites.standings(*names)
    plan = sites.folder / "plan.json"
    follow(plan, files, sites.folder / "first.json")
    follow(plan, files, sites.folder / "second.json", changes={"rounds": 2})
    sites.site(names[0], "first.json").close()
    with pytest.raises(ValueError, match=r"has signed the plan .* and a site signs one"):
        sites.site(names[0], "second.json")
    assert not (sites.folder / names[0] / "run/secret").exists()
    # Whose standing it is has the folder; others join.
    with pytest.raises(ValueError, match="ask for a plan in which site-01 joins"):
        sites.site(names[1], "first.json", folder=str(sites.folder / "lost/run"))


# What each site may spend.


def test_totals_of_sites_add_up_by_hand(after_two: Sites) -> None:
    """zCDP: rho adds up; the total keeps a hundredth of delta for roundings."""
    second = following(after_two, (0, 1, 2, 3, 4), "by_hand.json", changes={"rounds": 2})
    first = second.before
    assert first is not None
    spent = [phase.guarantee.loss for phase in (first, second)]
    total = Budget(3.0, 1e-4, "zcdp")
    assert sum(loss.failure for loss in spent) <= 0.01 * 1e-4
    limit = budget.total_fields(total, release=True)["loss"].rho
    assert sum(loss.rho for loss in spent) <= limit
    # The second phase takes nearly all that is left.
    assert sum(loss.rho for loss in spent) > 0.99 * limit
    stated = second.guarantee_of("site-00", [first.digest, second.digest])
    assert stated.epsilon == 3.0 and len(stated.phases) == 2
    with pytest.raises(ValueError, match="more than the total's"):
        second.guarantee_of("site-00", [first.digest, first.digest, second.digest])
    with pytest.raises(ValueError, match="which is no phase before this one"):
        second.guarantee_of("site-00", ["0" * 64])
    assert second.remaining("site-00").epsilon < 0.05 * 3


def test_totals_may_be_unequal(sites: Sites) -> None:
    """One site has a smaller total: it takes part until that is spent, and is left out then."""
    totals = {name: 4.0 for name in names_of(4)} | {"site-01": 1.0}
    settings = GOSSIP | {
        "total": {"epsilon": totals},
        "budget": {"epsilon": {**dict.fromkeys(names_of(4), 2.0), "site-01": 1.0}, "delta": 1e-4},
        "rounds": 2,
    }
    sites.write(4, settings)
    names = names_of(4)
    sites.start(*names)
    sites.models(*names)
    files = sites.standings(*names)
    plan = sites.folder / "plan.json"
    with pytest.raises(ValueError, match=r"\[total\] of site-01 is spent"):
        follow(plan, files, sites.folder / "all.json", changes={"rounds": 2})
    del files[1]
    edges = [["site-00", "site-02"], ["site-02", "site-03"]]
    changes = {"rounds": 2, "network": {"edges": edges}}
    second = follow(plan, files, sites.folder / "plan-2.json", changes=changes)
    assert second.names == ("site-00", "site-02", "site-03")
    # Who joins has a total of its own; others keep theirs, and give what they have at most.
    joins = [sites.certificate(6)]
    with pytest.raises(ValueError, match="site-06 is missing; .* in the file of --changes"):
        follow(plan, files, sites.folder / "joins.json", joining=joins, changes=changes)
    edges = [*edges, ["site-03", "site-06"]]
    wider = {"rounds": 2, "network": {"edges": edges}, "budget": {"epsilon": 2.5}}
    wider["total"] = {"epsilon": {"site-06": 2.0}}
    third = follow(plan, files, sites.folder / "joins.json", joining=joins, changes=wider)
    assert third.totals["site-06"].epsilon == 2.0 and third.totals["site-00"].epsilon == 4.0
    budgets = third.settings["budget"]["epsilon"]
    assert budgets["site-00"] == 2.5 and 1.9 < budgets["site-06"] < 2.0
    (sites.folder / "elsewhere").mkdir()
    for suffix in (".json", ".npz"):
        content = (sites.folder / f"joins{suffix}").read_bytes()
        (sites.folder / f"elsewhere/joins{suffix}").write_bytes(content)
    with pytest.raises(ValueError, match="phase before it, plan.json and its .npz, is not beside"):
        Project.load(sites.folder / "elsewhere/joins.json")
    # Squares of mu add up.
    rest = budget.remaining(Budget(4.0, 1e-4), [second.phases[0].of_site("site-00")])
    assert second.plan.config.budget.largest == pytest.approx(rest.epsilon)
    match = (
        r"site-01: \[budget\] epsilon is .*, and the total of 1 leaves 0.99.*; give at most that"
    )
    with pytest.raises(ValueError, match=match):
        sites.write(4, settings | {"budget": {"epsilon": 1.5, "delta": 1e-4}}, "dear.json")
    # Nothing is left of a plan that is refused.
    assert not list(sites.folder.glob("dear*"))
    assert "Records of site-00: (epsilon = 4" in sites.members["site-00"].statement()
    assert "site-01 1, site-02 4" in sites.members["site-00"].statement()
    for change, match in (
        ({"epsilon": {"site-00": 1.0}}, "epsilon of site-01, site-02, site-03 is missing"),
        ({"epsilon": 3.0, "price": 1}, "price"),
        ({"epsilon": -1.0}, r"\[total\] epsilon is -1.0"),
        ({"epsilon": 3.0, "accountant": "magic"}, r"\[total\] accountant"),
        ({}, "give epsilon"),
    ):
        with pytest.raises(ValueError, match=match):
            sites.write(4, settings | {"total": change}, "wrong.json")


@pytest.mark.mutant
def test_a_plan_that_is_run_again_is_charged_again(sites: Sites) -> None:
    """With new folders a run is another one, and the ledger knows of the first."""
    # Two runs of epsilon 2 have 2.8 together.
    sites.write(5, SUMS | {"total": {"epsilon": 2.5}})
    names = names_of(5)
    sites.start(*names, rounds=1)
    sites.finished(*names)
    again = str(sites.folder / names[0] / "again")
    with pytest.raises(ValueError, match="more than the total's"):
        sites.site(names[0], folder=again)
    # A lost ledger learns of it from others, before anything goes out.
    site = sites.site(names[0], folder=again, ledger=str(sites.folder / "lost"))
    other = sites.site(names[1])
    hello = other._conversation.greeting(names[0])
    assert len(wire.decoded(hello).charges) == 1
    assert site._ledger is not None
    with pytest.raises(MustLeave, match=r"ledger lacked: .*more than the total's"):
        site._ledger.take(names[1], wire.decoded(hello).charges)
    assert len(site._ledger.runs) == 1
    site.close()
    other.close()


@pytest.mark.mutant
def test_who_is_no_neighbour_shows_a_run_to_a_lost_ledger(sites: Sites) -> None:
    """On a ring of four: what a site signs of its beginning is handed on, and kept."""
    sites.write(4, GOSSIP | {"total": {"epsilon": 3.5}})
    names = names_of(4)
    sites.start(*names, rounds=2)
    sites.finished(*names)
    lost = sites.site(names[0], ledger=str(sites.folder / "lost"))
    across = sites.site(names[2])
    (beginning,) = wire.decoded(across._conversation.greeting(names[0])).charges
    assert beginning.name == names[0] and beginning.run == across._conversation.run
    assert lost._ledger is not None
    lost._ledger.take(names[2], (beginning,))
    assert len(lost._ledger.runs) == 1
    lost.close()
    across.close()


@pytest.mark.mutant
def test_a_plan_that_never_began_cannot_be_charged(sites: Sites) -> None:
    """What a site signs before all are there costs it nothing, whoever has it."""
    sites.write(3, SUMS | FEWER)
    names = names_of(3)
    site = sites.site(names[0])
    meeting = site._conversation
    (presence,) = meeting.presences.values()
    with pytest.raises(Refused, match=r"charges has 5 parts, not 6"):
        wire.decoded(wire.encoded(wire.Greeting(presence, b"", (), (), (presence,))))  # type: ignore
    assert site._ledger is not None and site._ledger.runs == []
    made_up = beginning_of(meeting.presences, names[0])
    with pytest.raises(Refused, match="is not signed"):
        site._ledger.take(names[1], (made_up,))
    assert site._ledger.runs == []
    site.close()


@pytest.mark.mutant
def test_who_signs_no_beginning_is_not_heard(sites: Sites) -> None:
    """Its ledger could be lost, and nobody would know that it has sent something."""
    site = after_a_round(sites, 4, GOSSIP)
    meeting = site._conversation
    names = names_of(4)
    peer = meeting.neighbours[names[1]]
    # What it was before, its ledger has kept.
    assert meeting._beginnings.keys() >= {site.name, names[1], names[3]}
    meeting._beginnings = {site.name: meeting._beginnings[site.name]}
    receipt = wire.Receipt(0, bytes(32))
    with pytest.raises(Refused, match="has not signed that the run has begun"):
        meeting._take(peer, receipt)
    signer = sites.identity(1)
    mine = meeting._beginnings[site.name]
    fields = (signer.name, mine.project, mine.plan, meeting.presences[signer.name].nonce)
    bare = wire.Beginning(*fields, mine.run, b"")
    for wrong in (
        bare._replace(run=bytes(32)),
        bare._replace(plan="other"),
        bare._replace(nonce=mine.nonce),
        bare._replace(name="site-09"),
        bare._replace(project="other"),
    ):
        signed = wire.signed_beginning(signer, wrong)
        with pytest.raises(Refused, match="another run has begun"):
            meeting._take(peer, wire.Beginnings((signed,)))
    with pytest.raises(Refused, match="is not signed"):
        meeting._take(peer, wire.Beginnings((bare,)))
    assert meeting._beginnings.keys() == {site.name}
    signed = wire.signed_beginning(signer, bare)
    meeting._take(peer, wire.Beginnings((signed,)))
    with pytest.raises(Refused, match="a receipt of round 0"):
        meeting._take(peer, receipt)
    site.close()


@pytest.mark.mutant
def test_no_keys_are_taken_of_who_signs_no_beginning(sites: Sites) -> None:
    """A hostile aggregator could hide it from all, and shares with it open its vector."""
    site = after_a_round(sites, 5, SUMS)
    meeting = site._conversation
    peer = meeting.neighbours["site-01"]
    words = [wire.Word(name, 1, 0, b"", b"", b"", b"") for name in meeting.presences]
    del meeting._beginnings["site-03"]
    with pytest.raises(Refused, match="keys of 'site-03', which has not signed"):
        meeting._take(peer, wire.Enrolment(tuple(words)))
    with pytest.raises(Refused, match="takes part in no such aggregation"):
        meeting._take(peer, wire.Enrolment(tuple(words[:3])))
    site.close()


@pytest.mark.mutant
def test_a_ledger_refuses_what_others_make_up(sites: Sites) -> None:
    agreed = sites.write(5, SUMS)
    path = sites.folder / "ledger"
    ledger = Ledger(path, agreed, "site-00")

    def signed(number: int, **changed: str) -> wire.Beginning:
        identity = sites.identity(number)
        presence = wire.signed_presence(identity, bytes([2] * 32), agreed.terms() | changed)
        bare = beginning_of({identity.name: presence}, identity.name)
        return wire.signed_beginning(identity, bare)

    other = signed(1)
    mine = signed(0, plan="older")
    with pytest.raises(Refused, match="shows a run of 'site-01'"):
        ledger.take("site-02", (other,))
    with pytest.raises(Refused, match="of another project"):
        ledger.take("site-02", (signed(0, project="x"),))
    with pytest.raises(Refused, match="not signed"):
        ledger.take("site-02", (mine._replace(nonce=bytes([3] * 32)),))
    assert ledger.runs == []
    # Signed by this site, for a plan of this project that nobody here has: its cost is not known.
    with pytest.raises(MustLeave, match="no phase before this one"):
        ledger.take("site-02", (mine,))
    ledger.close()
    # It lasts: the site does not start again as if nothing had been.
    again = Ledger(path, agreed, "site-00")
    assert again.runs == [("older", bytes([2] * 32))]
    assert Ledger.read(path)[0] == again.runs
    with pytest.raises(ValueError, match="no phase before this one"):
        again.guarantee(bytes(32))
    again.close()
    with pytest.raises(ValueError, match="of site-00 in another project"):
        Ledger(path, agreed, "site-01")
    (path / "charges").write_bytes(b"{}\n")
    with pytest.raises(MustLeave, match="is damaged"):
        Ledger(path, agreed, "site-00")


def test_a_project_without_totals_has_no_later_phase(sites: Sites) -> None:
    settings = {name: value for name, value in SUMS.items() if name != "total"}
    agreed = sites.write(5, settings)
    assert agreed.totals == {} and agreed.guarantee_of("site-00", [agreed.digest]).phases == ()
    names = names_of(5)
    sites.start(*names, rounds=1)
    sites.finished(*names)
    with pytest.raises(ValueError, match=r"\[total\] is missing in the plan before"):
        follow(sites.folder / "plan.json", sites.standings(*names), sites.folder / "plan-2.json")
    with pytest.raises(ValueError, match="missing; a first plan fixes it"):
        agreed.remaining("site-00")
    resealed(sites.folder)


@pytest.mark.mutant
def test_records_keep_their_account(sites: Sites) -> None:
    """A record that was trained on is held out under no other total."""
    agreed = sites.write(5, SUMS | {"total": {"epsilon": 9.0}})
    both = ["held_out", "training"]
    ledger = Ledger(sites.folder / "ledger", agreed, "site-00")

    def charge(number: int) -> None:
        presences = {}
        for site in (0, 1):
            identity = sites.identity(site)
            nonce = bytes([number] * 32)
            presences[identity.name] = wire.signed_presence(identity, nonce, agreed.terms())
        ledger.charge(beginning_of(presences, "site-00"))

    # Records that no run has read bind nobody.
    ledger.bind(bytes([2] * 32), ["training"])
    ledger.bind(bytes(32), ["training"])
    charge(1)
    ledger.bind(bytes(32), both)
    with pytest.raises(ValueError, match="held_out is another than in an earlier phase"):
        ledger.bind(bytes([1] * 32), both)
    ledger.bind(bytes([1] * 32), ["training"])
    charge(2)
    ledger.close()
    # Some of those that the first file holds out may have been trained on with the second.
    ledger = Ledger(sites.folder / "ledger", agreed, "site-00")
    for records in (bytes(32), bytes([1] * 32)):
        with pytest.raises(ValueError, match="held_out is another than in an earlier phase"):
            ledger.bind(records, both)
    ledger.close()


@pytest.mark.mutant
def test_a_group_draws_another_secret_for_a_phase(sites: Sites) -> None:
    """Who left knows the old one."""
    settings = GOSSIP | {"noise": [{"name": "Pairwise"}], "rounds": 3}
    sites.write(4, settings)
    names = names_of(4)
    for tag in ("old", "new"):
        (sites.folder / tag).write_bytes(tag.encode() * 10 + b"..")
        (sites.folder / tag).chmod(0o600)
    sites.start(*names, secret="old", rounds=1)
    sites.finished(*names)
    files = []
    for name in names[:3]:
        member = sites.site(name, secret="old")
        files.append(sites.folder / f"{name}.standing")
        member.standing(files[-1])
        member.close()
    edges = [[names[0], names[1]], [names[1], names[2]]]
    plan = sites.folder / "plan.json"
    changes = {"network": {"edges": edges}}
    follow(plan, files, sites.folder / "plan-2.json", changes=changes)
    with pytest.raises(ValueError, match="let the group draw another"):
        sites.site(names[0], "plan-2.json", secret="old")
    sites.start(*names[:3], plan="plan-2.json", secret="new")
    assert len(sites.models(*names[:3])) == 3


@pytest.mark.mutant
def test_phases_are_in_addresses(sites: Sites) -> None:
    """Noise, words of sums and of departures are a phase's own, also under one run's name."""
    sites.write(5, SUMS)
    site = sites.site("site-00")
    meeting = site._conversation
    word = wire.Word("site-00", 0, 0, bytes(32), bytes(32), b"payload", b"")
    contents = {wire.word_content(bytes(32), phase, "site-01", word) for phase in (0, 1)}
    contents |= {wire.leave_content(bytes(32), phase, 0) for phase in (0, 1)}
    assert len(contents) == 4
    drawn = []

    class Source(SiteNoise):
        """Notes the phase."""

        def __init__(self, *args: Any, phase: int = 0, **words: Any) -> None:
            drawn.append(phase)
            super().__init__(*args, phase=phase, **words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpjax.sites.site.SiteNoise", Source)
        patch.setattr(Project, "phase", 7)
        meeting.run = bytes(range(32))
        site._draw()
    assert drawn == [7]
    site.close()


def test_kills_at_every_signature_of_a_phase(sites: Sites, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is on disk when a process dies, the site signs one plan, and a run is charged."""
    sites.write(5, SUMS)
    names = names_of(5)
    sites.start(*names, rounds=1)
    sites.finished(*names)
    files = sites.standings(*names)
    plan = sites.folder / "plan.json"
    # What is left of the total is planned for a part of it, so that a second charge would show.
    follow(plan, files, sites.folder / "plan-2.json", changes={"rounds": 2})
    real = {"create": start.Folder.create, "append": start.Folder.append}
    deaths: list[str] = []

    class Died(BaseException):
        """As SIGKILL, before or after a write."""

    def dying(kind: str, after: bool, count: int) -> Callable[..., None]:
        left = [count]

        def write(folder: Any, name: str, content: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                if after:
                    real[kind](folder, name, content)
                deaths.append(f"{kind} {name}")
                raise Died
            real[kind](folder, name, content)

        return write

    # Each life dies at the first write that the lives before it did not do.
    for after in [False, True] * 5:
        with monkeypatch.context() as patch:
            patch.setattr(start.Folder, "create", dying("create", after, 1))
            try:
                sites.site(names[0], "plan-2.json").close()
            except Died:
                continue
    assert {death.split()[1] for death in deaths} >= {"successor", "nonce", "secret"}
    sites.start(*names, plan="plan-2.json")
    assert len({model.tobytes() for model in sites.models(*names)}) == 1
    ledger = sites.site(names[0], "plan-2.json")._ledger
    assert ledger is not None
    digests = [digest for digest, _ in ledger.runs]
    assert len(digests) == len(set(digests)) == 2
    ledger.close()


def test_a_partition_during_the_plan_lets_one_part_begin_at_most(sites: Sites) -> None:
    """Two parts of the sites make plans: who has signed one begins no other."""
    sites.write(6, SUMS)
    names = names_of(6)
    sites.start(*names, rounds=1)
    sites.finished(*names)
    files = dict(zip(names, sites.standings(*names), strict=True))
    plan = sites.folder / "plan.json"
    first = [files[name] for name in names[:5]]
    second = [files[name] for name in names[1:]]
    follow(plan, first, sites.folder / "first.json", changes={"rounds": 2})
    follow(plan, second, sites.folder / "second.json", changes={"rounds": 2})
    follow(plan, first[:4], sites.folder / "four.json", changes=FEWER | {"rounds": 2})
    with pytest.raises(ValueError, match="no majority"):
        follow(plan, first[:3], sites.folder / "half.json", changes=FEWER)
    # One part begins by the first plan, but for a site that signed the second.
    sites.site(names[4], "second.json").close()
    sites.start(*names[:4], plan="first.json")
    time.sleep(1.0)
    for name in names[:4]:
        assert name not in sites.results
        assert not (sites.folder / name / "run.1/run").exists()
    with pytest.raises(ValueError, match="a site signs one"):
        sites.site(names[4], "first.json")
    with pytest.raises(ValueError, match="a site signs one|another process uses"):
        sites.site(names[0], "four.json")


def test_the_page_and_the_ledger_say_what_phases_spend(after_two: Sites) -> None:
    second = following(after_two, (0, 1, 2, 3), "page.json", changes=FEWER | {"rounds": 1})
    page = " ".join(second.document().split())
    assert "This is phase 2 of a project" in page
    assert "All are at delta 0.0001." in page
    assert "| site-00 | to train on | 3 | 1, 2 | 2" in page
    assert "site-04 has left: it still has its keys" in page
    assert second.below(2.9) == names_of(4) and second.below(0.5) == []
    path = after_two.folder / "site.toml"
    lines = {"name": "site-00", "plan": "page.json", "folder": "site-00/run"}
    path.write_text("".join(f'{key} = "{value}"\n' for key, value in lines.items()))
    printed = start.ledger_lines(path)
    assert printed[0] == f"project {second.root}, phase 2"
    assert any("site-03, records to train on: total 3" in line for line in printed)
    assert any(line.startswith(f"charged: plan {second.root}") for line in printed)
    assert "(epsilon = 3, delta" in "\n".join(printed) and "outsider" in printed[-1]
    # Before there is a ledger, and without totals.
    path.write_text(path.read_text().replace("site-00/run", "nowhere/run"))
    assert not any(line.startswith("charged") for line in start.ledger_lines(path))
