"""The loop of a site: what is stored before what is sent, over every kill and restart."""

import functools
import itertools
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import _local_sites
from benchmarks._local_sites import NAMES, Agreed, LocalChannel, Network
from dpjax.sites import wire
from dpjax.sites.channel import Event, Traffic
from dpjax.sites.identity import Identity
from dpjax.sites.ledger import beginning_of
from dpjax.sites.site import MustLeave, Site, Waits
from dpjax.sites.store import Audit
from tests.sites.test_compute import DESIGNS, SITES, plan_of, problem_of

ROUNDS = 6


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    return _local_sites.identities(tmp_path_factory.mktemp("identities"))


class Runner:
    """Sites in threads, each with a folder that outlasts it."""

    def __init__(self, agreed: Agreed, identities: dict[str, Identity], folder: Path) -> None:
        self.agreed = agreed
        self.identities = identities
        self.folder = folder
        self.network = Network()
        self.results: dict[str, object] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.sites: list[Site] = []
        self.over: str | None = None

    def stop(self) -> None:
        """End the sites that still wait."""
        self.over = "the test is over"
        for site in self.sites:
            site._conversation.doubt = self.over
        self.join(*self.threads)

    def site(self, name: str, **changes: object) -> Site:
        number = NAMES.index(name)
        senders = self.agreed.plan.senders[number]
        channel = LocalChannel(self.network, name, {NAMES[sender] for sender in senders})
        secret = bytes([9] * 32) if self.agreed.plan.guarantee.secrets == "shared" else None
        options = {"secret": secret, "waits": Waits(late=5.0, linger=5.0)} | changes
        return Site(
            self.agreed,
            problem_of(number),
            self.identities[name],
            channel,
            self.folder / name,
            **options,
        )

    def prepare(self) -> None:
        """Folders as if every site had drawn these numbers itself: runs with the same noise."""
        for number, name in enumerate(NAMES):
            folder = self.folder / name
            folder.mkdir(parents=True, mode=0o700)
            (folder / "nonce").write_bytes(bytes([number + 1] * 32))
            if self.agreed.plan.guarantee.secrets == "own":
                (folder / "secret").write_bytes(bytes([number + 101] * 32))

    def start(self, name: str, prepare: Callable[[Site], None] = lambda site: None) -> None:
        """One life of a site, in a thread of its own."""

        def live() -> None:
            site = self.site(name)
            self.sites.append(site)
            site._conversation.doubt = self.over
            try:
                prepare(site)
                self.results[name] = jax.tree.map(np.asarray, site.run())
            except BaseException as error:
                self.results[name] = error
            finally:
                site.close()

        self.threads[name] = threading.Thread(target=live, daemon=True)
        self.threads[name].start()

    def join(self, *names: str, seconds: float = 60.0) -> None:
        for name in names:
            self.threads[name].join(seconds)
            assert not self.threads[name].is_alive(), f"{name} hangs"

    def finished(self) -> dict[str, object]:
        self.join(*NAMES)
        for name, result in self.results.items():
            if isinstance(result, BaseException):
                raise AssertionError(name) from result
        return self.results


@pytest.fixture
def runner(identities: dict[str, Identity], tmp_path: Path) -> Iterator[Runner]:
    plan = plan_of(DESIGNS["own"], rounds=ROUNDS)
    runner = Runner(Agreed(plan, identities), identities, tmp_path)
    yield runner
    runner.stop()


def test_sites_agree_and_train_to_the_end(runner: Runner) -> None:
    for name in NAMES:
        runner.start(name)
    models = runner.finished()
    flat = [np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(m)]) for m in models.values()]
    assert len({vector.tobytes() for vector in flat}) == SITES
    assert max(abs(vector).max() for vector in flat) > 0.1
    for name in NAMES:
        folder = runner.folder / name
        # One message a round went out; the secret of the noise is gone.
        assert Audit.check(folder / "audit.jsonl") == 1 + 2 * ROUNDS
        assert not (folder / "secret").exists()
        assert not list((folder / "sent").iterdir())


class Killed(BaseException):
    """In place of a kill, for a thread."""


def sent_by(network: Network) -> dict[tuple[str, int], set[bytes]]:
    """All payloads that a site ever handed to the channel, by site and round."""
    payloads: dict[tuple[str, int], set[bytes]] = {}
    for sender, _, data in network.frames:
        frame = wire.decoded(data)
        if isinstance(frame, wire.RoundMessage):
            payloads.setdefault((sender, frame.round), set()).add(data)
    return payloads


def equal_models(first: dict, second: dict) -> bool:
    def flat(models: object) -> bytes:
        return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(models))

    return {name: flat(models) for name, models in first.items()} == {
        name: flat(models) for name, models in second.items()
    }


def killing(step: int, after: bool) -> Callable[[Site], None]:
    """Kill a site at its so-manieth step that writes, deletes or sends; before it or after."""

    def prepare(site: Site) -> None:
        counter = itertools.count()

        def wrapped(function):
            def call(*arguments):
                number = next(counter)
                if number == step and not after:
                    raise Killed
                result = function(*arguments)
                if number == step:
                    raise Killed
                return result

            return call

        folder = site._folder
        for name in ("create", "replace", "append", "delete"):
            setattr(folder, name, wrapped(getattr(folder, name)))
        site._channel.send = wrapped(site._channel.send)

    return prepare


@pytest.fixture(scope="module")
def undisturbed(identities: dict[str, Identity], tmp_path_factory) -> Callable[[str], dict]:
    """Models of runs in which nobody is killed, by the design."""

    @functools.cache
    def models(name: str) -> dict:
        plan = plan_of(DESIGNS[name], rounds=3)
        runner = Runner(Agreed(plan, identities, 2), identities, tmp_path_factory.mktemp("run"))
        runner.prepare()
        for site in NAMES:
            runner.start(site)
        return runner.finished()

    return models


# The steps of a round are twenty, or so; the first of these are one at each arrow.
KILLS = [(20 + 3 * step, after) for after in (False, True) for step in range(6)]
KILLS += [pair for pair in itertools.product(range(90), (False, True)) if pair not in KILLS]


def with_kill(step: int, after: bool, name: str, identities, folder: Path) -> tuple[Runner, bool]:
    """A run in which one site is killed once; and whether it was."""
    plan = plan_of(DESIGNS[name], rounds=3)
    runner = Runner(Agreed(plan, identities, 2), identities, folder)
    runner.prepare()
    for site in NAMES[1:]:
        runner.start(site)
    runner.start(NAMES[0], killing(step, after))
    runner.threads[NAMES[0]].join(60)
    killed = isinstance(runner.results[NAMES[0]], Killed)
    if killed:
        runner.start(NAMES[0])
    return runner, killed


@pytest.mark.gate(6)
@pytest.mark.parametrize(("step", "after"), KILLS)
def test_a_kill_at_any_step_changes_no_bit_of_any_model(
    step: int,
    after: bool,
    identities: dict[str, Identity],
    undisturbed: Callable[[str], dict],
    tmp_path: Path,
) -> None:
    name = ("own", "shared", "recursion")[step % 7 % 3]
    runner, killed = with_kill(step, after, name, identities, tmp_path)
    assert killed or step > 60
    assert equal_models(runner.finished(), undisturbed(name))
    # And never other bytes of a round.
    payloads = sent_by(runner.network)
    assert len(payloads) == SITES * 5
    assert all(len(variants) == 1 for variants in payloads.values())


def begun(runner: Runner, name: str = NAMES[0]) -> Site:
    """A site whose run has a name, and that waits for the messages of round 0."""
    site = runner.site(name)
    for other in NAMES:
        if other != name:
            presence = wire.signed_presence(
                runner.identities[other],
                bytes([NAMES.index(other) + 1] * 32),
                site.agreement.terms(),
            )
            hear(site, NAMES[1], wire.Presences((presence,)))
    assert len(site._conversation.run) == 32
    began(site, runner)
    site._draw()
    return site


def began(site: Site, runner: Runner) -> None:
    """Let a site hear that the run has begun at all others."""
    for name in NAMES:
        if name != site.name:
            bare = beginning_of(site._conversation.presences, name)
            signed = wire.signed_beginning(runner.identities[name], bare)
            hear(site, NAMES[1], wire.Beginnings((signed,)))


def hear(site: Site, peer: str, frame: wire.Frame | bytes) -> list[wire.Frame]:
    """Let a site hear something from a neighbour, and return what it then says to it."""
    data = frame if isinstance(frame, bytes) else wire.encoded(frame)
    neighbour = site._conversation.neighbours[peer]
    neighbour.live = True
    neighbour.backlog.clear()
    site._conversation.handle(Event("message", peer, data, ""))
    return [wire.decoded(answer) for answer in neighbour.backlog]


def message_of(site: Site, identity: Identity, round: int, payload: bytes) -> wire.RoundMessage:
    bare = wire.RoundMessage(round, payload, b"")
    content = wire.message_content(
        site._conversation.run, site.agreement.digest, bare.header(identity.name)
    )
    return bare._replace(signature=identity.sign("message", content))


def content_of(folder: Path) -> dict[str, bytes]:
    """All files of a folder but for the audit file, in which refusals stand."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "audit.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def payload_of(site: Site, value: float = 0.25) -> bytes:
    sizes = [leaf.size for leaf in jax.tree.leaves(site.compute.message)]
    return np.full(sum(sizes), value, "<f4").tobytes()


def test_what_came_of_a_message_is_on_disk_before_its_receipt(runner: Runner) -> None:
    site = begun(runner)
    site._state = site.compute.init()
    conversation = site._conversation
    messages = {
        name: message_of(site, runner.identities[name], 0, payload_of(site)) for name in NAMES
    }
    receipt = wire.encoded(wire.Receipt(0, messages["lyon"].header("lyon").digest))
    stored = []

    def replace(name, content, function=site._folder.replace):
        function(name, content)
        stored.append((name, receipt in conversation.neighbours["lyon"].backlog))

    site._folder.replace = replace
    for name in ("lyon", "turin"):
        assert hear(site, name, messages[name]) == []
        conversation.neighbours[name].live = False
    site._step()
    assert stored == [("state", False)]
    # Again, from a session that lost it: once, however often the message comes.
    for _ in range(2):
        assert wire.encoded(hear(site, "lyon", messages["lyon"])[-1]) == receipt
    site.close()


def test_what_is_no_message_of_the_round_is_refused_by_name(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    """Five hundred messages of a site with a valid key; nothing of the folder changes."""
    site = begun(runner)
    lyon = runner.identities["lyon"]
    good = payload_of(site)
    rng = np.random.default_rng(0)
    before = content_of(runner.folder / "geneva")
    other_run = begun(Runner(runner.agreed, runner.identities, runner.folder / "other"))
    hostile: list[tuple[bytes | wire.Frame, str]] = [
        (message_of(site, lyon, 0, payload_of(site, value)), "not finite")
        for value in (np.nan, np.inf, -np.inf)
    ]
    hostile += [(message_of(site, lyon, 0, good[:size]), "bytes") for size in (0, 1, 4, 20)]
    hostile += [(message_of(site, lyon, 0, good + good), "bytes")]
    hostile += [(message_of(site, lyon, round, good), "in round 0") for round in (2, 5, 2**30)]
    hostile += [(message_of(other_run, lyon, 0, good), "not signed for this run")]
    # Another site's message, and one that another site signed.
    turin = runner.identities["turin"]
    hostile += [(message_of(site, turin, 0, good), "not signed for this run")]
    hostile += [(wire.Receipt(0, bytes(32)), "did not send")]
    greeting = wire.Greeting(site._conversation.presences["lyon"], site._conversation.run, ())
    hostile += [(greeting, "greeting after the hello")]
    forged = site._conversation.presences["nice"]._replace(nonce=bytes([77] * 32))
    hostile += [(wire.Presences((forged,)), "begun twice")]
    header = message_of(site, lyon, 0, good).header("lyon")
    for changed in ({"signature": b""}, {"sender": "nobody"}, {"round": 999}, {"digest": b"x"}):
        hostile += [(wire.Headers((header._replace(**changed),)), "not signed for this run")]
    valid = wire.encoded(message_of(site, lyon, 0, good))
    while len(hostile) < 500:
        changed = bytearray(valid)
        for place in rng.integers(len(valid), size=rng.integers(1, 4)):
            changed[place] ^= int(rng.integers(1, 256))
        if len(hostile) % 3 == 0:
            changed = changed[: rng.integers(len(changed))]
        hostile.append((bytes(changed), ""))
    for frame, reason in hostile:
        caplog.clear()
        (answer,) = hear(site, "lyon", frame)
        assert isinstance(answer, wire.Refusal)
        assert answer.reason.startswith("geneva refuses what lyon sent") and reason in answer.reason
        assert [record.exc_info for record in caplog.records] == [None]
    assert content_of(runner.folder / "geneva") == before
    assert site._conversation.doubt is None and not site._conversation.arrived
    assert hear(site, "lyon", valid) == [] and ("lyon", 0) in site._conversation.arrived
    site.close()
    other_run.close()


def test_two_messages_of_a_round_are_proof_against_their_sender(runner: Runner) -> None:
    site = begun(runner)
    lyon = runner.identities["lyon"]
    first = message_of(site, lyon, 0, payload_of(site))
    second = message_of(site, lyon, 0, payload_of(site, 0.5))
    hear(site, "lyon", first)
    (evidence, refusal) = hear(site, "lyon", second)
    assert evidence.headers == (first.header("lyon"), second.header("lyon"))
    assert "lyon sent two messages in round 0" in refusal.reason
    assert str(runner.folder) not in refusal.reason
    with pytest.raises(MustLeave, match="lyon sent two messages in round 0"):
        site._wait(lambda: ["nobody"])
    # Whoever gets it finds the same.
    other = begun(Runner(runner.agreed, runner.identities, runner.folder / "other"), "nice")
    other._conversation.run = site._conversation.run
    hear(other, "turin", wire.Headers(evidence.headers))
    assert "lyon sent two messages in round 0" in str(other._conversation.doubt)
    assert (runner.folder / "geneva" / "evidence-lyon-0").exists()
    site.close()
    other.close()


def test_a_restored_backup_stops_before_it_computes(runner: Runner, monkeypatch) -> None:
    """Its neighbours show it a message that its folder lacks."""
    runner.prepare()
    for name in NAMES:
        runner.start(name)
    runner.finished()
    # A folder as it was before the last message: begun, and without what came then.
    restored = runner.folder / "geneva"
    (restored / "secret").write_bytes(bytes([101] * 32))
    for name in ("state", "headers"):
        (restored / name).unlink()
    for path in (restored / "sent").iterdir():
        path.unlink()
    computed = []
    monkeypatch.setattr("dpjax.sites.compute.SiteRounds.outgoing", computed.append)
    # The others are done, and end as soon as they have begun.
    runner.start("geneva")
    while "geneva" not in runner.network.channels and runner.threads["geneva"].is_alive():
        runner.threads["geneva"].join(0.01)
    for name in NAMES:
        if name != "geneva":
            runner.start(name)
    runner.join("geneva")
    error = runner.results["geneva"]
    assert isinstance(error, MustLeave) and "restored from a backup" in str(error)
    assert not computed and not sent_after(runner, "geneva", 6)


def sent_after(runner: Runner, name: str, rounds: int) -> set[int]:
    return {
        round for sender, round in sent_by(runner.network) if sender == name and round >= rounds
    }


def test_a_folder_begun_again_is_refused_by_its_neighbours(runner: Runner) -> None:
    site = begun(runner)
    fresh = wire.signed_presence(runner.identities["lyon"], bytes([5] * 32), site.agreement.terms())
    reason = site._conversation.check("lyon", wire.encoded(wire.Greeting(fresh, b"", ())))
    assert reason is not None and "lyon began again with another folder" in reason
    known = site._conversation.presences["lyon"]
    assert site._conversation.check("lyon", wire.encoded(wire.Greeting(known, b"", ()))) is None
    reason = site._conversation.check("lyon", wire.encoded(wire.Greeting(known, bytes(32), ())))
    assert str(reason).startswith("lyon is in another run. If the run does not start, stop all ")
    site.close()


def test_who_differs_in_what_is_named(runner: Runner) -> None:
    site = runner.site("geneva")
    terms = site.agreement.terms() | {"schema": "a column"}
    other = wire.signed_presence(runner.identities["lyon"], bytes([2] * 32), terms)
    reason = site._conversation.check("lyon", wire.encoded(wire.Greeting(other, b"", ())))
    assert reason == "lyon and geneva differ in the schema; give the same at all sites"
    site.close()


def test_another_project_does_not_take_a_folder(runner: Runner) -> None:
    begun(runner).close()
    runner.agreed.extra = {"schema": "another"}
    with pytest.raises(ValueError, match="of a run that differs in the schema"):
        runner.site("geneva")


def test_status_is_plain_json_with_units(runner: Runner) -> None:
    site = begun(runner)
    site._channel.statistics = lambda: {"lyon": Traffic(5, 6, 1, 0.25), "turin": Traffic()}
    site._tell("waits for lyon")

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = (runner.folder / "geneva" / "status.json").read_text()
    peers = json.loads(text, parse_constant=refuse)["peers"]
    assert peers["lyon"] == {
        "session": "open", "acknowledged_rounds": 0, "sent_bytes": 5, "received_bytes": 6,
        "sessions": 1, "silence_s": 0.2,
    }  # fmt: skip
    assert peers["turin"]["silence_s"] is None
    site.close()


def test_an_error_is_in_the_status(runner: Runner) -> None:
    begun(runner).close()
    (runner.folder / "geneva" / "secret").unlink()
    with pytest.raises(MustLeave, match="secret is gone"):
        runner.site("geneva")
    status = json.loads((runner.folder / "geneva" / "status.json").read_text())
    assert status["doing"].startswith("stopped: secret is gone")
    site = runner.site("nice")

    def taken(*functions: object) -> None:
        raise ValueError("listen is taken")

    site._channel.open = taken
    with pytest.raises(ValueError, match="listen is taken"):
        site.run()
    status = json.loads((runner.folder / "nice" / "status.json").read_text())
    assert status["doing"] == "stopped: listen is taken"
    site.close()


def test_log_tells_sessions_rounds_and_end(
    runner: Runner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpjax.sites.site._ROUNDS_TOLD", 4)
    with caplog.at_level(logging.INFO, "dpjax.sites"):
        for name in NAMES:
            runner.start(name)
        runner.finished()
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert lines.count("session with lyon open") == 2
    assert [line for line in lines if line.startswith("round")] == ["round 4 of 6"] * SITES
    assert "geneva is done, after round 6" in lines
    # One that comes and goes fills no disk.
    caplog.clear()
    site = runner.site("geneva")
    with caplog.at_level(logging.INFO, "dpjax.sites"):
        for _ in range(3000):
            site._conversation.handle(Event("closed", "lyon", b"", "gone"))
    assert 1000 <= len(caplog.records) <= 1003
    assert caplog.records[0].getMessage() == "session with lyon closed: gone"
    site.close()


def test_another_secret_of_the_group_is_named(
    identities: dict[str, Identity], tmp_path: Path
) -> None:
    """Noise that should cancel between sites would not, and all would end as if it had."""
    plan = plan_of(DESIGNS["shared"], rounds=ROUNDS)
    runner = Runner(Agreed(plan, identities), identities, tmp_path)
    site = runner.site("geneva")
    named = "the secret of the group; copy the one file that the group drew for this run"
    for secret, expected in ((bytes([9] * 32), None), (bytes([8] * 32), named)):
        other = runner.site("lyon", secret=secret)
        greeting = wire.Greeting(other._conversation.presences["lyon"], b"", ())
        reason = site._conversation.check("lyon", wire.encoded(greeting))
        assert reason == (expected and f"lyon and geneva differ in {expected}")
        other.close()
        shutil.rmtree(tmp_path / "lyon")
    assert secret.hex() not in str(other._conversation.presences["lyon"].terms)
    site.close()


def test_members_of_a_group_alone_compare_its_secret(
    identities: dict[str, Identity], tmp_path: Path
) -> None:
    """Each of several groups has a secret of its own."""
    plan = plan_of(DESIGNS["shared"], rounds=ROUNDS)
    runner = Runner(Agreed(plan, identities), identities, tmp_path)
    site = runner.site("geneva")
    site._conversation._group = ("geneva", "lyon")
    other = site.agreement.terms() | {"secret of the group": "another"}
    named = "the secret of the group; copy the one file that the group drew for this run"
    none = site.agreement.terms()
    plans = "the plan; get plan.json and plan.npz again, the same two files at both sites"
    for name, terms, expected in (
        ("lyon", other, named),
        ("lyon", none, named),
        ("turin", other, None),
        ("turin", none, None),
        ("turin", other | {"plan": "", "model": ""}, plans),
    ):
        presence = wire.signed_presence(identities[name], bytes([2] * 32), terms)
        greeting = wire.encoded(wire.Greeting(presence, b"", ()))
        reason = site._conversation.check(name, greeting)
        assert reason == (expected and f"{name} and geneva differ in {expected}")
    site.close()
