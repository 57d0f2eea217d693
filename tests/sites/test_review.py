"""What a hostile and patient reader tried on a site: promises that were broken, or might be.

Those that are marked as expected failures are mended elsewhere, or are listed as open.
"""

import itertools
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import dpjax as dp
from benchmarks._local_sites import LocalChannel
from dpjax import _files
from dpjax.algorithms.dsgd import DSGD
from dpjax.sites import wire
from dpjax.sites.channel import Event
from dpjax.sites.compute import SiteRounds
from dpjax.sites.identity import Identity, Refused
from dpjax.sites.noise import SiteNoise
from dpjax.sites.site import MustLeave, Site, Waits
from dpjax.sites.store import Audit, Folder
from tests.sites.test_compute import DESIGNS, RECORDS, SITES, plan_of, problem_of, site_of
from tests.sites.test_site import (
    NAMES,
    ROUNDS,
    Agreed,
    Killed,
    Runner,
    began,
    begun,
    equal_models,
    hear,
    identities,
    message_of,
    payload_of,
    runner,
    sent_by,
)

__all__ = ("identities", "runner")

PEERS = ("lyon", "turin")
"""Neighbours of geneva on the ring."""


def stepped(site: Site, runner: Runner, rounds: int) -> None:
    """Let a site absorb some rounds, of neighbours that always answer."""
    site._state = site._state or site.compute.init()
    began(site, runner)
    for round in range(site.round, site.round + rounds):
        for peer in PEERS:
            site._conversation.neighbours[peer].acknowledged = round
            message = message_of(site, runner.identities[peer], round, payload_of(site))
            site._channel.events.put(Event("message", peer, wire.encoded(message), ""))
        site._step()


# One noise, one payload.

FILES = ("state", "headers", "sent", "run", "secret")
LOSSES = [s for size in range(1, len(FILES)) for s in itertools.combinations(FILES, size)]


@pytest.fixture(scope="module")
def stopped(identities: dict[str, Identity], tmp_path_factory: pytest.TempPathFactory):
    """A site that has stored its message of round 2, and its headers by round."""
    folder = tmp_path_factory.mktemp("stopped")
    runner = Runner(Agreed(plan_of(DESIGNS["own"], rounds=6), identities), identities, folder)
    site = begun(runner)
    stepped(site, runner, 2)
    site._computed(site._state)
    headers = {
        header.round: header for header in site._conversation.log if header.sender == "geneva"
    }
    assert set(headers) == {0, 1, 2}
    site.close()
    return runner, headers


@pytest.mark.gate(8)
@pytest.mark.parametrize("lost", sorted(LOSSES, key=lambda names: "headers" not in names))
def test_a_folder_that_lost_files_sends_no_second_payload(
    lost: tuple[str, ...], stopped, tmp_path: Path
) -> None:
    """Of other records, which would make other bytes; neighbours show the last message."""
    original, headers = stopped
    shutil.copytree(original.folder / "geneva", tmp_path / "geneva")
    for name in lost:
        path = tmp_path / "geneva" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    runner = Runner(original.agreed, original.identities, tmp_path)
    number = NAMES.index
    channel = LocalChannel(runner.network, "geneva", set(PEERS))
    try:
        site = Site(
            runner.agreed, problem_of(3), runner.identities["geneva"], channel, tmp_path / "geneva"
        )
    except ValueError:
        return
    try:
        for other in PEERS + ("nice",):
            presence = wire.signed_presence(
                runner.identities[other], bytes([number(other) + 1] * 32), site.agreement.terms()
            )
            hear(site, "lyon", wire.Presences((presence,)))
        greeting = wire.Greeting(
            site._conversation.presences["lyon"], site._conversation.run, (headers[2],)
        )
        site._conversation.check("lyon", wire.encoded(greeting))
        site._state = site._state or site.compute.init()
        _, message = site._computed(site._state)
    except MustLeave:
        return
    finally:
        site.close()
    assert message.header("geneva").digest == headers[message.round].digest


def test_an_old_state_beside_a_later_message_leaves(stopped, tmp_path: Path) -> None:
    """Neighbours show the later message, which the folder has: they cannot tell."""
    original, headers = stopped
    shutil.copytree(original.folder / "geneva", tmp_path / "geneva")
    for name in ("state", "headers"):
        (tmp_path / "geneva" / name).unlink()
    runner = Runner(original.agreed, original.identities, tmp_path)
    site = begun(runner)
    greeting = wire.Greeting(
        site._conversation.presences["lyon"], site._conversation.run, (headers[2],)
    )
    assert site._conversation.check("lyon", wire.encoded(greeting)) is None
    site._state = site._state or site.compute.init()
    site.compute.outgoing = None  # Nothing is computed before it leaves.
    with pytest.raises(MustLeave, match="round 2 of this folder was sent already"):
        site._computed(site._state)
    assert not (tmp_path / "geneva" / "sent" / "0").exists()
    site.close()


def test_a_lost_secret_is_not_drawn_again(stopped, tmp_path: Path) -> None:
    """Rounds' noise is correlated: new numbers for old rounds are another strategy."""
    original, _ = stopped
    shutil.copytree(original.folder / "geneva", tmp_path / "geneva")
    (tmp_path / "geneva" / "secret").unlink()
    with pytest.raises(MustLeave):
        Runner(original.agreed, original.identities, tmp_path).site("geneva")


def test_no_secret_is_left_after_the_last_message(runner: Runner) -> None:
    runner.agreed.average_rounds = 1
    site = begun(runner)

    def delete(name: str, function=site._folder.delete) -> None:
        if name == "secret":
            raise Killed
        function(name)

    site._folder.delete = delete
    with pytest.raises(Killed):
        stepped(site, runner, 6)
    site.close()
    runner.site("geneva").close()
    assert not (runner.folder / "geneva" / "secret").exists()


def test_another_secret_of_the_group_is_refused(
    identities: dict[str, Identity], tmp_path: Path
) -> None:
    agreed = Agreed(plan_of(DESIGNS["shared"], rounds=3), identities)
    runner = Runner(agreed, identities, tmp_path)
    runner.site("geneva").close()
    with pytest.raises(ValueError, match="secret is another than the one"):
        runner.site("geneva", secret=bytes([8] * 32))
    runner.site("geneva").close()
    # What the folder keeps of it does not tell it, nor whether two folders have the same.
    marks = (tmp_path / "geneva" / "mark").read_bytes()
    runner.site("lyon").close()
    assert bytes([9] * 32) not in marks and marks != (tmp_path / "lyon" / "mark").read_bytes()


def test_rounds_begun_again_draw_from_the_new_secret() -> None:
    site = site_of(plan_of(DESIGNS["own"]), 0)
    first = site.outgoing(site.init()).message
    site.begin([SiteNoise(bytes([77] * 32), run=bytes([5] * 32), holder="site 0")])
    second = site.outgoing(site.init()).message
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    assert all((np.asarray(one) != np.asarray(other)).all() for one, other in pairs)


def test_models_of_a_method_of_ones_own_are_not_sent_without_noise() -> None:
    """Its last models may hold more than messages show."""

    class Mine(DSGD):
        pass

    plan = plan_of(DESIGNS["own"], method=Mine())
    assert not SiteRounds(plan, problem_of(0), 0, [1]).averages
    assert SiteRounds(plan_of(DESIGNS["own"]), problem_of(0), 0, [1]).averages


def test_a_site_runs_once(runner: Runner) -> None:
    """Its channel is closed: a second loop would wait for ever, and busily."""
    site = runner.site("geneva")
    rounds = site.rounds()
    site._conversation.doubt = "enough"
    with pytest.raises(MustLeave, match="enough"):
        next(rounds)
    with pytest.raises(ValueError, match="make another site"):
        site.run()
    site.close()


# The disk.


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "site")
    audit = Audit(folder)
    audit.note("begun")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ValueError, match="No space left"):
            audit.note("stored")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data, write=os.write: write(handle, data[:9]))
        with pytest.raises(ValueError, match="does not fit"):
            audit.note("stored")
    audit.note("absorbed")
    assert Audit.check(tmp_path / "site" / "audit.jsonl") == 2
    folder.close()


def test_folders_of_messages_last_before_anything_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure must not take the folder of a message that is out."""
    synchronised = []

    def synchronise(folder: Path) -> None:
        names = [path.name for path in folder.iterdir() if path.suffix != ".tmp"]
        synchronised.append((folder, sorted(names)))

    monkeypatch.setattr(_files, "synchronise", synchronise)
    folder = Folder(tmp_path / "site")
    assert (tmp_path / "site", ["lock", "sent"]) in synchronised
    assert any(place == tmp_path and "site" in names for place, names in synchronised)
    folder.create("sent/0", b"numbers")
    assert synchronised[-1] == (tmp_path / "site" / "sent", ["0"])
    # A secret is gone for good.
    folder.create("secret", b"numbers")
    synchronised.clear()
    folder.delete("secret")
    assert synchronised == [(tmp_path / "site", ["lock", "sent"])]
    folder.close()


# Hostile neighbours.


def test_a_flood_of_refusals_fills_neither_disk_nor_memory(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    site = begun(runner)
    lyon = site._conversation.neighbours["lyon"]
    lyon.live = True
    receipt = wire.encoded(wire.Receipt(0, bytes(32)))
    site._folder.append = lambda name, line: None  # Faster.
    before = len(lyon.backlog)
    for _ in range(5000):
        site._conversation.handle(Event("message", "lyon", receipt, ""))
    assert 1000 <= len(lyon.backlog) - before <= 1003
    assert len(caplog.records) <= 1003
    # What it refuses, or says it does, is logged no more often, and in one line.
    caplog.clear()
    hostile = wire.Refusal("no\n2026-01-01 INFO geneva: all is well\x1b[2J")
    hear(site, "turin", hostile)
    (record,) = caplog.records
    assert "\n" not in record.getMessage() and "\x1b" not in record.getMessage()
    for _ in range(5000):
        hear(site, "turin", hostile)
    assert len(caplog.records) <= 1003
    site.close()


def test_a_message_that_comes_again_and_again_has_one_receipt_waiting(runner: Runner) -> None:
    site = begun(runner)
    data = wire.encoded(message_of(site, runner.identities["lyon"], 0, payload_of(site)))
    lyon = site._conversation.neighbours["lyon"]
    for round, receipts in ((0, 0), (1, 1)):
        lyon.live = True
        lyon.backlog.clear()
        for _ in range(100):
            site._conversation.handle(Event("message", "lyon", data, ""))
        assert (site.round, len(lyon.backlog)) == (round, receipts)
        stepped(site, runner, 1 - round)
    site.close()


def test_headers_fill_no_memory_and_stop_nobody(
    identities: dict[str, Identity], tmp_path: Path
) -> None:
    """Whoever signs headers of rounds to come, or of long digests, makes others keep none."""
    agreed = Agreed(plan_of(DESIGNS["own"], rounds=3000), identities)
    site = begun(Runner(agreed, identities, tmp_path))
    lyon = identities["lyon"]

    def header(round: int, digest: bytes) -> wire.Header:
        bare = wire.Header("lyon", round, digest, b"")
        content = wire.message_content(site._conversation.run, agreed.digest, bare)
        return bare._replace(signature=lyon.sign("message", content))

    (answer,) = hear(site, "lyon", wire.Headers((header(0, bytes(100_000)),)))
    assert "not signed for this run" in answer.reason
    (answer,) = hear(site, "lyon", wire.Headers((header(0, bytes(32)),) * 33))
    assert "33 headers of one frame" in answer.reason
    far = tuple(header(round, bytes(32)) for round in range(5, 3000, 500))
    near = tuple(header(round, bytes(32)) for round in range(5))
    assert hear(site, "lyon", wire.Headers(far + near)) == []
    assert {noted.round for noted in site._conversation.log} == set(range(5))
    site.close()


def test_what_a_new_session_is_told_fits_into_frames(runner: Runner) -> None:
    site = begun(runner)
    presences = site._conversation.presences
    for number in range(500):
        site._conversation.log.note(wire.Header("nice", number, bytes(32), bytes(72)))
        name = f"hospital-{number}"
        site._conversation.presences[name] = site._conversation.presences["nice"]._replace(
            name=name
        )
    turin = site._conversation.neighbours["turin"]
    site._conversation.handle(Event("opened", "turin", b"", ""))
    assert max(map(len, turin.backlog)) < 2**16
    frames = [wire.decoded(data) for data in turin.backlog]
    headers = [frame for frame in frames if isinstance(frame, wire.Headers)]
    presences = [frame for frame in frames if isinstance(frame, wire.Presences)]
    assert sum(len(frame.headers) for frame in headers) == 500
    assert sum(len(frame.presences) for frame in presences) == 504
    site.close()


def test_presences_are_taken_and_handed_on_together_or_not_at_all(runner: Runner) -> None:
    site = runner.site("geneva")
    site._conversation.neighbours["turin"].live = True
    good, bad = (
        wire.signed_presence(runner.identities[name], bytes([3] * 32), site.agreement.terms())
        for name in ("lyon", "nice")
    )
    bad = bad._replace(nonce=bytes([4] * 32))
    (refusal,) = hear(site, "lyon", wire.Presences((good, bad)))
    assert "not signed" in refusal.reason and set(site._conversation.presences) == {"geneva"}
    assert not site._conversation.neighbours["turin"].backlog
    hear(site, "lyon", wire.Presences((good,)))
    assert [wire.decoded(data) for data in site._conversation.neighbours["turin"].backlog] == [
        wire.Presences((good,))
    ]
    # Equal terms, a thousand times over, would be in the frames of all sites.
    terms = tuple(sorted(site.agreement.terms().items())) * 1000
    long = wire.Presence("nice", bytes([4] * 32), b"", terms, b"")
    long = long._replace(signature=runner.identities["nice"].sign("presence", long.content))
    (refusal,) = hear(site, "lyon", wire.Presences((long,)))
    assert "the way in which terms are written" in refusal.reason
    site.close()


@pytest.mark.mutant
def test_an_old_presence_stops_a_start_and_never_mixes_two_runs(runner: Runner) -> None:
    """Nice gave a folder up, whose presence a neighbour hands on: nobody can tell which is new."""

    def presence_of(name: str, number: int) -> wire.Presence:
        terms = runner.agreed.terms()
        return wire.signed_presence(runner.identities[name], bytes([number] * 32), terms)

    remedy = "stop all sites and start them again; if that does not help, with new folders"
    sites = [runner.site(name) for name in ("geneva", "lyon")]
    own = tuple(site._conversation.presences[site.name] for site in sites)
    old, new = (presence_of("nice", number) for number in (1, 2))
    for site, theirs, other in zip(sites, (old, new), ("turin", "nice"), strict=True):
        assert hear(site, other, wire.Presences((theirs,))) == []
    first, second = (site._conversation for site in sites)
    (refusal,) = hear(sites[0], "turin", wire.Presences((new,)))
    assert "nice has begun twice, with two folders" in refusal.reason and remedy in refusal.reason
    assert remedy in str(second.check("nice", wire.encoded(wire.Greeting(old, b"", ()))))
    # With all others each begins, in a run of its own.
    for site, other in zip(sites, ("turin", "nice"), strict=True):
        hear(site, other, wire.Presences((*own, presence_of("turin", 3))))
    assert len(first.run) == len(second.run) == 32 and first.run != second.run
    for one, other in ((first, second), (second, first)):
        reason = str(one.check(other.name, other.greeting(one.name)))
        assert reason.startswith(f"{other.name} is in another run. ") and remedy in reason
    for site in sites:
        site.close()


def test_a_hello_of_another_run_is_in_the_audit_file(
    identities: dict[str, Identity], tmp_path: Path
) -> None:
    runner = Runner(Agreed(plan_of(DESIGNS["own"], rounds=3), identities), identities, tmp_path)
    site = begun(runner)
    other = Runner(runner.agreed, identities, tmp_path / "other").site("lyon")
    other._channel.network = runner.network
    for end in (site, other):
        end._channel.open(end._conversation.greeting, end._conversation.check)
    site._conversation.handle(site._channel.receive(1))
    lines = (tmp_path / "geneva" / "audit.jsonl").read_text().splitlines()
    line = json.loads(lines[-1])
    assert (line["event"], line["peer"]) == ("hello refused", "lyon")
    assert "began again with another folder" in line["reason"]
    site.close()
    other.close()


def test_a_backup_of_before_the_run_is_told_what_it_is(runner: Runner) -> None:
    site = begun(runner)
    header = message_of(site, runner.identities["geneva"], 0, payload_of(site)).header("geneva")
    greeting = wire.Greeting(
        site._conversation.presences["lyon"], site._conversation.run, (header,)
    )
    site.close()
    (runner.folder / "geneva" / "run").unlink()
    restored = runner.site("geneva")
    reason = restored._conversation.check("lyon", wire.encoded(greeting))
    assert "this folder is new, and lyon has a message of geneva in round 0 of a run" in reason
    assert reason.endswith("restored it from a backup, and must leave")
    with pytest.raises(MustLeave, match="this folder is new, and lyon has a message"):
        restored.run()
    status = json.loads((runner.folder / "geneva" / "status.json").read_text())
    assert status["doing"].startswith("stopped: this folder is new, and lyon has a message")
    restored.close()


def test_a_lost_folder_stops_and_a_forged_message_stops_nobody(runner: Runner) -> None:
    site = begun(runner)
    identities = runner.identities
    own = message_of(site, identities["lyon"], 0, payload_of(site)).header("lyon")
    forged = message_of(site, identities["nice"], 0, payload_of(site)).header("lyon")
    lost = runner.site("lyon")

    def reason_for(header: wire.Header, run: bytes) -> str | None:
        greeting = wire.Greeting(site._conversation.presences["geneva"], run, (header,))
        return lost._conversation.check("geneva", wire.encoded(greeting))

    # Of another run, of another round, of another site.
    run = site._conversation.run
    cases = [(own, bytes(32)), (own, b""), (own._replace(round=1), run), (forged, run)]
    cases.append((message_of(site, identities["nice"], 0, b"").header("nice"), run))
    for header, stated in cases:
        assert reason_for(header, stated) == (
            "geneva shows a message that lyon did not sign for this plan"
        )
    assert lost._conversation.doubt is None
    assert "lyon lost its folder" in str(reason_for(own, run))
    with pytest.raises(MustLeave, match="this folder is new, and geneva has a message of lyon"):
        lost.run()
    lost.close()
    site.close()


@pytest.mark.mutant
def test_a_message_of_another_plan_stops_no_new_folder(
    runner: Runner, identities: dict[str, Identity], tmp_path: Path
) -> None:
    """A neighbour kept it, with the name of its run; lyon has lost nothing."""
    earlier = Runner(Agreed(plan_of(DESIGNS["own"], rounds=3), identities), identities, tmp_path)
    site = begun(earlier)
    header = message_of(site, identities["lyon"], 0, payload_of(site)).header("lyon")
    site.close()
    runner.folder = tmp_path / "later"
    lost = runner.site("lyon")
    presence = wire.signed_presence(identities["geneva"], bytes(32), lost.agreement.terms())
    greeting = wire.Greeting(presence, site._conversation.run, (header,))
    reason = lost._conversation.check("geneva", wire.encoded(greeting))
    assert reason == "geneva shows a message that lyon did not sign for this plan"
    assert lost._conversation.doubt is None
    lost.close()


# Waiting.


def test_a_callback_that_raises_ends_the_sessions(runner: Runner) -> None:
    for name in NAMES[1:]:
        runner.start(name)
    site = runner.site("geneva")

    def callback(progress: object) -> None:
        raise KeyError("of the user's own")

    try:
        site.run(callback)
    except KeyError:
        # While the error is handled, whose traceback holds all frames.
        assert "geneva" not in runner.network.channels
    assert site.round == 1
    site.close()


def test_leaving_is_in_the_audit_file(stopped, tmp_path: Path) -> None:
    original, _ = stopped
    shutil.copytree(original.folder / "geneva", tmp_path / "geneva")
    (tmp_path / "geneva" / "state").unlink()
    site = Runner(original.agreed, original.identities, tmp_path).site("geneva")
    for peer in PEERS:
        site._conversation.neighbours[peer].met = True
    with pytest.raises(MustLeave, match="was sent already"):
        site.run()
    lines = (tmp_path / "geneva" / "audit.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["event"] == "stopped"
    site.close()
    # And nobody else has the folder meanwhile.
    site = Runner(original.agreed, original.identities, tmp_path).site("geneva")
    with pytest.raises(ValueError, match="another process uses, or another object"):
        Runner(original.agreed, original.identities, tmp_path).site("geneva")
    site.close()


def test_an_early_message_is_acknowledged_when_it_is_absorbed(runner: Runner) -> None:
    site = begun(runner)
    now, early = (message_of(site, runner.identities["lyon"], r, payload_of(site)) for r in (0, 1))
    assert hear(site, "lyon", now) == hear(site, "lyon", early) == []
    lyon = site._conversation.neighbours["lyon"]
    for message, later in ((now, early), (early, None)):
        stepped(site, runner, 1)
        said = [wire.decoded(data) for data in lyon.backlog]
        assert wire.Receipt(message.round, message.header("lyon").digest) in said
        assert later is None or wire.Receipt(later.round, later.header("lyon").digest) not in said
    site.close()


def test_a_message_is_kept_until_all_have_absorbed_it(runner: Runner) -> None:
    """A neighbour that was killed has it in memory no more, and asks by its new session."""
    site = begun(runner)
    stepped(site, runner, 1)
    lyon = site._conversation.neighbours["lyon"]
    lyon.acknowledged = -1
    site._computed(site._state)
    assert site._conversation.missing() == [
        "the message of lyon", "the receipt of lyon", "the message of turin",
    ]  # fmt: skip
    site._conversation.handle(Event("opened", "lyon", b"", ""))
    frames = [wire.decoded(data) for data in lyon.backlog]
    assert [frame.round for frame in frames if isinstance(frame, wire.RoundMessage)] == [0, 1]
    site.close()
    # So after a kill; and what is absorbed by all is gone.
    again = runner.site("geneva")
    assert sorted(path.name for path in (runner.folder / "geneva" / "sent").iterdir()) == ["0", "1"]
    stepped(again, runner, 1)
    assert sorted(path.name for path in (runner.folder / "geneva" / "sent").iterdir()) == ["1"]
    again.close()


def test_evidence_is_read_at_the_next_start(runner: Runner) -> None:
    site = begun(runner)
    for value in (0.25, 0.5):
        payload = payload_of(site, value)
        hear(site, "lyon", message_of(site, runner.identities["lyon"], 0, payload))
    site.close()
    site = runner.site("geneva")
    with pytest.raises(MustLeave, match="lyon sent two messages in round 0.*evidence-lyon-0 has"):
        site.run()
    site.close()


def test_evidence_of_the_last_round_takes_no_model_away(runner: Runner) -> None:
    """Nothing more of a site goes out that has absorbed all rounds."""
    for name in NAMES:
        runner.start(name)
    models = runner.finished()
    site = runner.site("geneva", waits=Waits(late=5.0, linger=0.2))
    began(site, runner)
    last = ROUNDS - 1
    for value in (0.25, 0.5):
        payload = payload_of(site, value)
        hear(site, "lyon", message_of(site, runner.identities["lyon"], last, payload))
    assert "lyon sent two messages" in str(site._conversation.doubt)
    # As one who knows it, and from its folder.
    for _ in range(2):
        released = jax.tree.map(np.asarray, site.run())
        assert equal_models({"geneva": released}, {"geneva": models["geneva"]})
        site.close()
        site = runner.site("geneva", waits=Waits(late=5.0, linger=0.2))
    site.close()


def test_a_message_under_the_name_of_another_round_leaves(runner: Runner) -> None:
    site = begun(runner)
    stepped(site, runner, 2)
    site.close()
    sent = runner.folder / "geneva" / "sent"
    shutil.copy(sent / "1", sent / "2")
    with pytest.raises(MustLeave, match="is damaged, and may be out already"):
        runner.site("geneva")


def test_a_round_after_one_that_somebody_else_acknowledged_is_refused(runner: Runner) -> None:
    """Lyon goes on when it has this site's receipt, which a copy of the folder has sent."""
    site = begun(runner)
    early = message_of(site, runner.identities["lyon"], 1, payload_of(site))
    (refusal,) = hear(site, "lyon", early)
    assert isinstance(refusal, wire.Refusal)
    assert "acknowledged round 0 as geneva, which lacks it" in refusal.reason
    assert not site._conversation.arrived
    site.close()


class OneWay(Runner):
    """Sites of a ring in which each sends to the next one alone."""

    def site(self, name: str, **changes: object) -> Site:
        number = NAMES.index(name)
        peers = {NAMES[(number + step) % SITES] for step in (1, -1)}
        channel = LocalChannel(self.network, name, peers)
        identity = self.identities[name]
        waits = Waits(late=5.0, linger=20.0)
        folder = self.folder / name
        return Site(self.agreed, problem_of(number), identity, channel, folder, waits=waits)


@pytest.fixture
def one_way(identities: dict[str, Identity], tmp_path: Path) -> Iterator[OneWay]:
    config = dp.Config(
        protect=dp.Protect("zero_out_record", clip_norm=1.0),
        sampler=dp.samplers.Full(),
        optimizer=dp.optimizers.Sgd(0.3),
        noise=dp.noise.Independent(),
        budget=dp.Budget(8.0, delta=1e-3),
        rounds=4,
        release=True,
    )
    W = np.eye(SITES) / 2 + np.roll(np.eye(SITES), 1, axis=0) / 2
    plan = dp.make_plan(config, W, counts=[RECORDS] * SITES)
    runner = OneWay(Agreed(plan, identities), identities, tmp_path)
    yield runner
    runner.stop()


@pytest.mark.slow
def test_links_of_one_direction_do_not_run_away(one_way: OneWay) -> None:
    """A sender that hears nothing of a slow receiver was two rounds ahead, and refused for ever."""
    runner = one_way

    def slow(site: Site) -> None:
        handle = site._conversation.handle

        def late(event: Event) -> None:
            frame = wire.decoded(event.data) if event.kind == "message" else None
            if event.peer == "lyon" and isinstance(frame, wire.RoundMessage) and frame.round == 1:
                # All others go on without it, as far as they can.
                threading.Event().wait(1.0)
            handle(event)

        site._conversation.handle = late

    for name in NAMES:
        runner.start(name, slow if name == "nice" else lambda site: None)
    runner.finished()
    refusals = [wire.decoded(data) for _, _, data in runner.network.frames]
    assert not [frame for frame in refusals if isinstance(frame, wire.Refusal)]


@pytest.mark.slow
def test_links_of_one_direction_serve_who_was_killed_in_the_last_round(one_way: OneWay) -> None:
    """Lyon has all that it waits for, and geneva needs lyon's receipt once more."""

    def killed(site: Site) -> None:
        absorb = site._absorb

        def die(new: object) -> None:
            if site.round == 3:
                # All others end meanwhile, as far as they can.
                threading.Event().wait(1.0)
                raise Killed
            absorb(new)

        site._absorb = die

    for name in NAMES:
        one_way.start(name, killed if name == "geneva" else lambda site: None)
    one_way.join("geneva")
    assert isinstance(one_way.results["geneva"], Killed)
    one_way.start("geneva")
    one_way.finished()
    # Nobody stays for those that are done.
    assert not any(site._conversation.behind() for site in one_way.sites if site.round == 4)


def test_a_site_that_is_done_serves_again_and_ends_though_others_are_gone(runner: Runner) -> None:
    for name in NAMES:
        runner.start(name)
    runner.finished()
    # All have had its last message, so that it waits for nobody.
    site = runner.site("geneva", waits=Waits(late=5.0, linger=1000.0))
    ended = threading.Thread(target=site.run, daemon=True)
    ended.start()
    ended.join(20)
    is_over = not ended.is_alive()
    site._conversation.doubt = "the test is over"
    assert is_over
    site.close()


def test_a_refusal_holds_no_numbers_of_records(runner: Runner) -> None:
    """What goes out beside messages: names, rounds, digests, sizes."""
    for name in NAMES:
        runner.start(name)
    runner.finished()
    kinds = {type(wire.decoded(data)) for _, _, data in runner.network.frames}
    greetings = {wire.Presences, wire.Beginnings}
    assert kinds <= greetings | {wire.Headers, wire.RoundMessage, wire.Receipt}
    assert all(len(variants) == 1 for variants in sent_by(runner.network).values())
    for path in (runner.folder / "geneva").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    lines = (runner.folder / "geneva" / "audit.jsonl").read_text().splitlines()
    keys = {key for line in lines for key in json.loads(line)}
    assert keys == {"event", "time", "before", "run", "plan", "round", "digest"}


def test_a_reason_is_one_line_of_ascii() -> None:
    assert "\n" not in str(Refused("a\nb\x1b")) and "\x1b" not in str(Refused("a\nb\x1b"))


def test_terms_of_other_groups_fill_no_frames(runner: Runner) -> None:
    """Sites do not compare the secret of another group, of which they keep and hand on a digest."""
    site = runner.site("geneva")
    for items in ((("secret of the group", "x"),) * 1000, (("secret of the group", "x" * 1000),)):
        terms = tuple(sorted((*site.agreement.terms().items(), *items)))
        bare = wire.Presence("nice", bytes([4] * 32), b"", terms, b"")
        presence = bare._replace(signature=runner.identities["nice"].sign("presence", bare.content))
        (refusal,) = hear(site, "lyon", wire.Presences((presence,)))
        assert "nice and geneva differ in" in refusal.reason
    assert set(site._conversation.presences) == {"geneva"}
    site.close()


def test_a_copy_that_is_met_while_a_round_is_computed_stops_it(runner: Runner) -> None:
    site = begun(runner)
    site._state = site.compute.init()
    conversation = site._conversation
    header = message_of(site, runner.identities["geneva"], 0, payload_of(site)).header("geneva")
    greeting = wire.Greeting(conversation.presences["lyon"], conversation.run, (header,))

    def outgoing(state, function=site.compute.outgoing):
        conversation.check("lyon", wire.encoded(greeting))
        return function(state)

    site.compute.outgoing = outgoing
    conversation.neighbours["lyon"].live = True
    with pytest.raises(MustLeave, match="or somebody runs a copy of it"):
        site._step()
    assert not conversation.neighbours["lyon"].backlog
    site.close()


def test_a_folder_of_another_model_is_told_what_it_is(runner: Runner) -> None:
    site = begun(runner)
    stepped(site, runner, 1)
    site.close()
    content = _files.packed('{"round": 1}', {"leaf_0": np.zeros(3, np.float32)})
    _files.replace(runner.folder / "geneva" / "state", content)
    runner.agreed.extra = {"model": "another"}
    with pytest.raises(ValueError, match="of a run that differs in the model") as caught:
        runner.site("geneva")
    assert not isinstance(caught.value, MustLeave)


def test_what_was_heard_last_is_handed_on_before_a_round_is_computed(runner: Runner) -> None:
    site = runner.site("geneva")
    conversation = site._conversation
    conversation.neighbours["turin"].live = True
    said = []
    site._channel.send = lambda peer, data: not said.append((peer, wire.decoded(data)))
    others = tuple(
        wire.signed_presence(runner.identities[name], bytes([3] * 32), site.agreement.terms())
        for name in NAMES
        if name != "geneva"
    )
    site._channel.events.put(Event("message", "lyon", wire.encoded(wire.Presences(others)), ""))
    site._wait(conversation.absent)
    assert ("turin", wire.Presences(others)) in said
    site.close()


def test_own_messages_of_any_later_round_stop_a_site(
    identities: dict[str, Identity], tmp_path: Path
) -> None:
    agreed = Agreed(plan_of(DESIGNS["own"], rounds=30), identities)
    runner = Runner(agreed, identities, tmp_path)
    site = begun(runner)
    header = message_of(site, identities["geneva"], 20, payload_of(site)).header("geneva")
    hear(site, "lyon", wire.Headers((header,)))
    assert "has a message of geneva in round 20" in str(site._conversation.doubt)
    site.close()
