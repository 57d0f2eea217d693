"""Hostile aggregators and clients in sums among peers: what honest sites give away, and when."""

import contextlib
import random
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dpjax.secagg import primitives
from dpjax.secagg.client import Client
from dpjax.secagg.messages import (
    Confirmed,
    Delivery,
    Hello,
    Keys,
    MaskedVector,
    ProtocolMessage,
    Request,
    Shares,
    UnmaskingShares,
    decoded,
    encoded,
)
from dpjax.secagg.terms import Rejected
from dpjax.sites import wire
from dpjax.sites.identity import Identity, Refused
from dpjax.sites.peers import PeerSums
from dpjax.sites.store import Folder, MustLeave
from tests.sites import sum_world
from tests.sites.sum_world import RUN, World, distinguished

SITES = 7
DROPOUTS = 1
COLLUDERS = 2


class Answer(NamedTuple):
    """What an honest site gave of its neighbours' secrets, in an aggregation as it knows it."""

    site: int
    session: bytes
    seeds: frozenset[int]
    keys: frozenset[int]
    threshold: int


class HostileWorld(World):
    """Some sites put together what they know, and say what an attack makes of their words."""

    def __init__(self, *args: object, hostile: tuple[str, ...], **options: object) -> None:
        super().__init__(*args, dropouts=DROPOUTS, colluders=COLLUDERS, **options)
        self.hostile = hostile
        self.answers: list[Answer] = []
        # With whom a vector has masks, by session and site.
        self.masks: dict[tuple[bytes, int], set[int]] = {}
        self.attack: Callable[[str, str, wire.Frame], list[wire.Frame]] = lambda *said: [said[2]]
        self.heard: list[wire.Word] = []

    def say(self, sender: str, peer: str, frame: wire.Frame) -> None:
        if sender not in self.hostile:
            self.note(sender, frame)
            super().say(sender, peer, frame)
            return
        for changed in self.attack(sender, peer, frame):
            data = wire.encoded(changed)
            if peer in self.sites:
                self.queues[sender, peer].append(data)

    def deliver(self, sender: str, peer: str) -> None:
        frame = wire.decoded(self.queues[sender, peer][0])
        if peer in self.hostile and isinstance(frame, wire.Word):
            self.heard.append(frame)
        super().deliver(sender, peer)

    def record(self, sender: str, frame: wire.Frame) -> None:
        if sender not in self.hostile:
            super().record(sender, frame)

    def note(self, sender: str, frame: wire.Frame) -> None:
        if not isinstance(frame, wire.Word):
            return
        message = decoded(frame.payload)
        if not isinstance(message, UnmaskingShares | MaskedVector):
            return
        part = self.sites[sender]._part
        client = part.client
        sites = part.sites
        if isinstance(message, MaskedVector):
            masks = {sites[number] for number in client._shares}
            self.masks[client._session, self.names.index(sender)] = masks
            return
        self.answers.append(
            Answer(
                self.names.index(sender),
                client._session,
                frozenset(sites[number] for number in message.seeds),
                frozenset(sites[number] for number in message.keys),
                client._graph.threshold,
            )
        )

    def signed(self, sender: str, word: wire.Word) -> wire.Word:
        site = self.sites[sender]
        content = wire.word_content(RUN, 0, site.aggregator(word.attempt, word.round), word)
        return word._replace(signature=self.identities[sender].sign("word", content))

    def check_secrets(self) -> None:
        """No honest vector is opened alone, whatever the coalition heard."""
        honest = [i for i, name in enumerate(self.names) if name not in self.hostile]
        by_session: dict[bytes, list[Answer]] = defaultdict(list)
        for answer in self.answers:
            by_session[answer.session].append(answer)
        for session, answers in by_session.items():
            # One answer an aggregation.
            assert len({answer.site for answer in answers}) == len(answers)
            threshold = answers[0].threshold
            seeds = {i: sum(i in answer.seeds for answer in answers) + COLLUDERS for i in honest}
            keys = {i: sum(i in answer.keys for answer in answers) + COLLUDERS for i in honest}
            opened = [i for i in honest if seeds[i] >= threshold]
            for i in honest:
                assert seeds[i] < threshold or keys[i] < threshold
            for i in opened:
                # An honest aggregator says its own words to nobody.
                near = self.masks.get((session, i), set(honest) - {i})
                # Their mask with it takes one of the two mask keys, and neither is rebuilt.
                hidden = [j for j in honest if j in near and keys[j] < threshold]
                assert keys[i] < threshold
                assert hidden, "a vector was opened alone"

    def finish(self, steps: int = 6000) -> None:
        """Go on for a while: honest sites may wait, stop or finish, but never send twice."""
        for _ in range(steps):
            if self.done or not self.sites:
                break
            self.step()
        self.check()
        self.check_secrets()

    def check(self) -> None:
        for name in self.hostile:
            self.history[name] = []
        super().check()

    def check_histories(self, longest: list[wire.Opened | wire.Voided]) -> None:
        """Outcomes differ only where a site stopped for it, or in the last round of all."""
        for history in self.history.values():
            for round, pair in enumerate(zip(history, longest, strict=False)):
                mine, theirs = map(distinguished, pair)
                if mine != theirs:
                    assert self.left or round == len(longest) - 1

    def check_sum(self, round: int, outcome: wire.Opened) -> None:
        """A hostile site may add anything, and an aggregator say anything."""
        assert len(outcome.survivors) >= self.terms.minimum


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    return sum_world.identities(tmp_path_factory.mktemp("identities"), SITES)


def message_of(word: wire.Word) -> ProtocolMessage | None:
    """What a word says; nothing where another attack has changed it."""
    with contextlib.suppress(Rejected):
        return decoded(word.payload)
    return None


def two_survivor_sets(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """Each client is asked for other survivors."""
    if isinstance(frame, wire.Word):
        message = message_of(frame)
        if isinstance(message, Request):
            number = world.random.randrange(SITES)
            survivors = message.survivors - {number}
            dropouts = message.dropouts | {number}
            payload = encoded(Request(message.nonce, survivors, dropouts))
            return [world.signed(sender, frame._replace(payload=payload))]
    return [frame]


def dropped_members(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """Each client gets other keys."""
    if isinstance(frame, wire.Enrolment):
        number = world.random.randrange(len(frame.words))
        return [wire.Enrolment(frame.words[:number] + frame.words[number + 1 :])]
    return [frame]


def swapped_keys(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """One site's keys stand under another's name, signed by the aggregator."""
    if isinstance(frame, wire.Enrolment):
        words = list(frame.words)
        first, second = world.random.sample(range(len(words)), 2)
        words[first] = world.signed(sender, words[first]._replace(payload=words[second].payload))
        return [wire.Enrolment(tuple(words))]
    return [frame]


def replayed_keys(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """Keys of another round or attempt stand for a site that did not enrol."""
    if isinstance(frame, wire.Enrolment):
        old = [word for word in world.heard if isinstance(message_of(word), Keys)]
        words = {word.sender: word for word in frame.words}
        words |= {word.sender: word for word in world.random.sample(old, min(2, len(old)))}
        return [wire.Enrolment(tuple(words[name] for name in world.names if name in words))]
    return [frame]


def two_results(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """Each site gets another sum, signed."""
    if (
        isinstance(frame, wire.Opened)
        and world.sites[sender].aggregator(frame.attempt, frame.round) == sender
    ):
        total = bytes([world.random.randrange(256)]) + frame.total[1:]
        other = frame._replace(total=total)
        content = wire.opened_content(RUN, 0, other)
        signature = world.identities[sender].sign("sum", content)
        return [world.random.choice((frame, other._replace(signature=signature)))]
    return [frame]


def silent_after_masked(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """It asks nothing once vectors are there, and calls again."""
    if isinstance(frame, wire.Word):
        message = message_of(frame)
        if isinstance(message, Request | Confirmed):
            nonce = message.nonce
            hello = Hello(nonce, world.terms.digest())
            attempt = frame.attempt + SITES * world.random.randrange(2)
            call = frame._replace(attempt=attempt, payload=encoded(hello))
            return [world.signed(sender, call)]
    return [frame]


def void_and_result(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """Some get a sum, others the word that there is none."""
    if isinstance(frame, wire.Opened) and world.random.random() < 0.6:
        content = wire.void_content(RUN, 0, frame.round, frame.before)
        signature = world.identities[sender].sign("void", content)
        return [wire.Voided((wire.Void(sender, frame.round, frame.before, signature),))]
    return [frame]


def partial_delivery(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """Each client hears of other neighbours that finished sharing."""
    if isinstance(frame, wire.Word):
        message = message_of(frame)
        if isinstance(message, Delivery):
            sealed = {j: c for j, c in message.sealed.items() if world.random.random() < 0.8}
            payload = encoded(Delivery(message.nonce, sealed))
            return [world.signed(sender, frame._replace(payload=payload))]
        if isinstance(message, Confirmed):
            opened = {j: c for j, c in message.confirmations.items() if world.random.random() < 0.8}
            payload = encoded(Confirmed(message.nonce, opened))
            return [world.signed(sender, frame._replace(payload=payload))]
    return [frame]


def lost_words(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """Words are lost, or said twice."""
    return [frame] * world.random.choice((0, 1, 1, 1, 2))


def changed_fields(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """A field of a frame is another one, and signed again where it is its own."""
    if world.random.random() < 0.7 or not isinstance(frame, wire.Word | wire.Opened):
        return [frame]
    name = world.random.choice(frame._fields)
    value = getattr(frame, name)
    if isinstance(value, int):
        value = max(0, value + world.random.choice((-1, 1, SITES, 1000)))
    elif isinstance(value, bytes) and value:
        place = world.random.randrange(len(value))
        value = (
            value[:place]
            + bytes([value[place] ^ 1 << world.random.randrange(8)])
            + value[place + 1 :]
        )
    elif isinstance(value, str):
        value = world.random.choice(world.names)
    elif isinstance(value, tuple):
        value = value[1:]
    changed = frame._replace(**{name: value})
    if isinstance(changed, wire.Word) and changed.sender == sender and name != "signature":
        changed = world.signed(sender, changed)
    return [changed]


ATTACKS = (
    two_survivor_sets,
    dropped_members,
    swapped_keys,
    replayed_keys,
    two_results,
    silent_after_masked,
    void_and_result,
    partial_delivery,
    lost_words,
    changed_fields,
)


def attacked(folder: Path, identities: dict[str, Identity], number: int) -> HostileWorld:
    """A trial: one attack, or two, by two sites, under dropouts."""
    chance = random.Random(number)
    hostile = tuple(chance.sample(list(identities), COLLUDERS))
    attacks = [ATTACKS[number % len(ATTACKS)], chance.choice(ATTACKS)][: 1 + number % 2]
    world = HostileWorld(folder, identities, rounds=3, seed=number, spoiled=2, hostile=hostile)

    def attack(sender: str, peer: str, frame: wire.Frame) -> list[wire.Frame]:
        frames = [frame]
        for change in attacks:
            frames = [new for old in frames for new in change(world, sender, peer, old)]
        return frames

    world.attack = attack
    world.start()
    victim = chance.choice([name for name in world.names if name not in hostile])
    # The attackers choose who is missing, too.
    for _ in range(chance.randrange(250)):
        world.step()
    if victim in world.sites:
        world.kill(victim)
    for _ in range(chance.randrange(250)):
        world.step()
    if victim not in world.sites and victim not in world.left:
        # Where it noted that somebody signed two sums, it does not begin again.
        with contextlib.suppress(MustLeave):
            world.start(victim)
    world.finish()
    return world


# One step of an attack each.


def run_until(world: World, reached: Callable[[], object], steps: int = 5000) -> None:
    for _ in range(steps):
        if reached():
            return
        world.step()
    raise AssertionError("it never came to this")


def honest_world(
    folder: Path, identities: dict[str, Identity], rounds: int = 3, **options: int
) -> World:
    options = {"dropouts": DROPOUTS, "colluders": COLLUDERS, **options}
    return World(folder, identities, rounds=rounds, **options)


def settle(world: World, name: str) -> None:
    """Deliver to a site all that was said to it."""
    for sender in list(world.sites):
        while name in world.sites and world.queues[sender, name]:
            world.deliver(sender, name)


def opened_by(world: World, attempt: int, survivors: tuple[int, ...], /, **changes: Any) -> Any:
    """A sum that the aggregator of an attempt of round 0 signed."""
    site = next(iter(world.sites.values()))
    packed = primitives.packed_vector(sum_world.vector(0, 0).astype("uint64"), sum_world.BITS)
    bare = wire.Opened(0, attempt, site.before, survivors, packed, b"")._replace(**changes)
    signer = world.identities[site.aggregator(attempt, bare.round)]
    content = wire.opened_content(RUN, 0, bare)
    return bare._replace(signature=signer.sign("sum", content))


def void_of(world: World, name: str, round: int, before: bytes) -> wire.Void:
    signature = world.identities[name].sign("void", wire.void_content(RUN, 0, round, before))
    return wire.Void(name, round, before, signature)


def refused(world: World, name: str, peer: str, frame: wire.Frame) -> str:
    with pytest.raises(Refused) as refusal:
        world.sites[name].hear(peer, frame)
    return str(refusal.value)


ALL = tuple(range(SITES))


@pytest.mark.mutant
@pytest.mark.parametrize("peers_restart", [False, True])
@pytest.mark.parametrize("stage", [Shares, MaskedVector])
def test_a_restored_folder_takes_no_part(
    tmp_path: Path, identities: dict[str, Identity], stage: type, peers_restart: bool
) -> None:
    world = honest_world(tmp_path, identities)
    victim = "site-03"
    world.start(*(name for name in world.names if name != victim))
    world.start(victim)
    shutil.copytree(tmp_path / victim, tmp_path / "backup")
    kinds: list[type] = []
    record = world.record

    def recorded(sender: str, frame: wire.Frame) -> None:
        record(sender, frame)
        if sender == victim and isinstance(frame, wire.Word):
            kinds.append(type(decoded(frame.payload)))

    world.record = recorded
    run_until(world, lambda: stage in kinds)
    # Others wait still for what it says, or another attempt is near.
    world.kill(victim)
    shutil.rmtree(tmp_path / victim)
    shutil.copytree(tmp_path / "backup", tmp_path / victim)
    if peers_restart:
        for name in list(world.sites):
            world.kill(name)
            world.start(name)
    world.start(victim)
    run_until(world, lambda: victim in world.left)
    assert "restored from a backup" in world.left[victim]
    world.check()


@pytest.mark.parametrize("seed", range(8))
def test_a_backup_of_any_moment_sends_nothing_twice(
    tmp_path: Path, identities: dict[str, Identity], seed: int
) -> None:
    """It is taken at one moment and restored at another; others may have begun again, too."""
    chance = random.Random(seed)
    world = honest_world(tmp_path, identities, spoiled=5)
    world.start()
    victim = chance.choice(world.names)
    for _ in range(chance.randrange(200)):
        world.step()
    history = list(world.history[victim])
    shutil.copytree(tmp_path / victim, tmp_path / "backup")
    for _ in range(chance.randrange(1, 150)):
        world.step()
    world.kill(victim)
    shutil.rmtree(tmp_path / victim)
    shutil.copytree(tmp_path / "backup", tmp_path / victim)
    world.history[victim] = history
    for name in chance.sample(list(world.sites), chance.randrange(3)):
        world.kill(name)
        world.start(name)
    world.start(victim)
    for _ in range(5000):
        if not world.done:
            world.step()
    world.check()


def test_a_folder_from_before_the_run_had_a_name_takes_no_part(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    run_until(world, lambda: len(world.sites["site-00"]._seen) == SITES - 1)
    words = world.sites["site-00"].shown("site-03")
    world.kill("site-03")
    shutil.rmtree(tmp_path / "site-03")
    folder = Folder(tmp_path / "site-03")
    site = PeerSums(
        world.terms,
        identities["site-03"],
        world.roster,
        folder,
        limits=sum_world.LIMITS,
        spoiled=5,
        say=lambda peer, frame: None,
    )
    site.check_shown("site-00", words)
    assert site.doubt is None
    site.resume(RUN, 0)
    assert "restored from a backup" in str(site.doubt)
    folder.close()


def test_keys_that_are_shown_must_be_ones_own(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    run_until(world, lambda: len(world.sites["site-00"]._seen) == SITES - 1)
    site = world.sites["site-03"]
    (other,) = world.sites["site-00"].shown("site-02")
    (latest,) = world.sites["site-00"].shown("site-03")
    forged = latest._replace(payload=encoded(Hello(latest.nonce, world.terms.digest())))
    for word in (other, forged, latest._replace(nonce=bytes(16))):
        with pytest.raises(Refused):
            site.check_shown("site-00", (word,))
        assert site.doubt is None
    site.check_shown("site-00", (latest,))


@pytest.mark.mutant
def test_two_keys_of_one_attempt_stop_all(tmp_path: Path, identities: dict[str, Identity]) -> None:
    """A copy of a folder answers the same call: its keys prove that it lives twice."""
    world = honest_world(tmp_path, identities)
    world.start()
    aggregator = world.sites["site-00"]
    mine: list[wire.Word] = []
    record = world.record

    def recorded(sender: str, frame: wire.Frame) -> None:
        if sender == "site-03" and isinstance(frame, wire.Word):
            mine.append(frame)
        record(sender, frame)

    world.record = recorded
    run_until(world, lambda: mine)
    nonce = mine[0].nonce
    keys = Client(world.terms, sum_world.vector(3, 0)).greet(Hello(nonce, world.terms.digest()))
    other = aggregator._word(0, nonce, keys)._replace(sender="site-03")
    content = wire.word_content(RUN, 0, "site-00", other)
    other = other._replace(signature=identities["site-03"].sign("word", content))
    run_until(world, lambda: "site-03" in aggregator._aggregation.keys)
    assert "two keys" in refused(world, "site-00", "site-03", other)
    for name in world.names[1:]:
        settle(world, name)
        doubt = world.sites[name].doubt
        assert "site-03 signed two keys" in doubt or "site-03 must leave" in doubt
        assert list((tmp_path / name).glob("evidence-site-03-0-1")) or name == "site-03"
    world.kill("site-05")
    world.start("site-05")
    assert "proves" in str(world.sites["site-05"].doubt)


def test_one_key_is_no_evidence(tmp_path: Path, identities: dict[str, Identity]) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    run_until(world, lambda: len(world.sites["site-00"]._seen) == SITES - 1)
    first = world.sites["site-00"]._seen["site-03"]
    site = world.sites["site-05"]
    site.hear("site-00", wire.Enrolment((first, first)))
    run_until(world, lambda: site._seen["site-03"].round == 1)
    latest = site._seen["site-03"]
    # Old keys do not hide that there are later ones.
    for words in ((first, first), (first, latest), (latest, first)):
        site.hear("site-00", wire.Enrolment(words))
        assert site.shown("site-03") == (latest,)
    # Signed by nobody.
    forged = first._replace(payload=world.sites["site-00"]._seen["site-02"].payload)
    refused(world, "site-05", "site-00", wire.Enrolment((first, forged)))
    assert site.doubt is None


@pytest.mark.mutant
def test_a_sum_with_a_vector_that_was_not_sent_stops_its_site(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    frame = opened_by(world, 0, ALL)
    assert "did not send" in refused(world, "site-03", "site-01", frame)
    assert world.sites["site-03"].doubt is not None
    assert world.sites["site-03"].outcome is None


@pytest.mark.mutant
@pytest.mark.parametrize("given_up", [False, True])
def test_a_sum_of_other_survivors_than_were_asked_for_stops(
    tmp_path: Path, identities: dict[str, Identity], given_up: bool
) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    run_until(world, lambda: site._confirmed)
    if given_up:
        site.left("site-00")
        assert site._part is None
    frame = opened_by(world, 0, ALL[:-1])
    assert "than it asked" in refused(world, "site-03", "site-01", frame)
    assert "site-00" in site.doubt


@pytest.mark.mutant
@pytest.mark.parametrize(
    "changes",
    [
        {"survivors": ALL[: SITES - DROPOUTS - 1]},
        {"survivors": (*ALL[1:], SITES)},
        {"survivors": (1, 0, *ALL[2:])},
        {"survivors": (0, *ALL)},
        {"survivors": ()},
        {"total": b""},
        {"total": b"\xff" * 24},
    ],
)
def test_a_sum_that_is_none_is_refused(
    tmp_path: Path, identities: dict[str, Identity], changes: dict[str, Any]
) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    frame = opened_by(world, 0, ALL, **changes)
    # Of no survivors but others: its own vector is a matter of another test.
    world.sites["site-03"]._masked = 0
    refused(world, "site-03", "site-01", frame)
    assert world.sites["site-03"].outcome is None
    assert world.sites["site-03"].doubt is None


@pytest.mark.mutant
def test_nobody_else_signs_a_sum(tmp_path: Path, identities: dict[str, Identity]) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    frame = opened_by(world, 0, tuple(n for n in ALL if n != 3))
    # Of attempt 1, whose aggregator is another one.
    assert "did not sign" in refused(world, "site-03", "site-00", frame._replace(attempt=1))
    world.sites["site-03"].hear("site-01", frame)
    assert world.sites["site-03"].outcome == frame


@pytest.mark.mutant
def test_two_sums_of_two_aggregators_accuse_no_single_one(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    """One of attempt 1 was never asked for: who hears of both knows not which one is false."""
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    others = tuple(n for n in ALL if n != 3)
    site.hear("site-01", opened_by(world, 1, others))
    fault = refused(world, "site-03", "site-00", opened_by(world, 0, others))
    assert "site-00 and site-01" in fault
    assert "one lies" in site.doubt


def test_evidence_is_handed_on_once(tmp_path: Path, identities: dict[str, Identity]) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    others = tuple(n for n in ALL if n != 3)
    world.sites["site-03"].hear("site-01", opened_by(world, 0, others))
    second = opened_by(world, 0, others, total=bytes(24))
    assert "signed by site-00" in refused(world, "site-03", "site-00", second)
    world.queues.clear()
    refused(world, "site-03", "site-00", second)
    assert not any(world.queues.values())


@pytest.mark.mutant
def test_a_sum_beside_word_of_all_that_there_is_none_stops(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    voids = tuple(void_of(world, name, 0, site.before) for name in world.names)
    opened = opened_by(world, 0, tuple(n for n in ALL if n != 3))
    site.hear("site-01", opened)
    forged = (voids[0]._replace(signature=b""), *voids[1:])
    refused(world, "site-03", "site-01", wire.Voided(forged))
    refused(world, "site-03", "site-01", wire.Voided((voids[1], voids[1], *voids[2:])))
    assert site.doubt is None
    assert "two outcomes, signed by site-00" in refused(
        world, "site-03", "site-01", wire.Voided(voids)
    )
    assert site.doubt is not None


@pytest.mark.mutant
def test_word_that_there_is_no_sum_is_of_all(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    voids = tuple(void_of(world, name, 0, site.before) for name in world.names)
    forged = voids[0]._replace(signature=voids[1].signature)
    refused(world, "site-03", "site-01", wire.Voided((forged,)))
    assert not site._voids
    for number, void in enumerate(n for n in voids if n.sender != "site-03"):
        assert site.outcome is None
        assert site.spent == (number > DROPOUTS)
        site.hear(void.sender, wire.Voided((void,)))
    # Its own is the last one.
    assert isinstance(site.outcome, wire.Voided)


def test_ones_own_word_that_the_journal_lacks(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    void = void_of(world, "site-03", 0, site.before)
    assert "restored from a backup" in refused(world, "site-03", "site-01", wire.Voided((void,)))
    assert site.doubt is not None


@pytest.mark.mutant
def test_other_sums_before_a_round_are_compared(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    """Whatever says so, the sum of the round before is asked for: two signatures meet there."""
    world = honest_world(tmp_path, identities)
    world.start()
    run_until(world, lambda: all(site.round == 1 for site in world.sites.values()))
    site = world.sites["site-03"]
    void = void_of(world, "site-01", 1, bytes(32))
    word = site._word(1, bytes(16), Hello(bytes(16), world.terms.digest()))
    word = word._replace(sender="site-01", before=bytes(32))
    opened = opened_by(world, 0, ALL, round=1, before=bytes(32))
    for frame in (wire.Voided((void,)), word, opened):
        world.queues.clear()
        assert "other sums" in refused(world, "site-03", "site-01", frame)
        frames = [wire.decoded(data) for data in world.queues["site-03", "site-01"]]
        assert frames == [wire.At(0, 0)]
    assert site.doubt is None
    assert not site._voids


@pytest.mark.mutant
def test_early_words_of_an_aggregator_spend_nothing(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    """A vector is noted and charged where it goes out, and not for whatever asks for it."""
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    run_until(world, lambda: site._part)
    nonce = site._part.nonce
    word = world.sites["site-00"]._word(0, nonce, Delivery(nonce, {}))
    site.hear("site-00", word)
    assert not site.spent
    assert not site.charged
    assert site.attempt == 1


@pytest.mark.mutant
def test_words_of_others_are_refused(tmp_path: Path, identities: dict[str, Identity]) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    hello = Hello(bytes(16), world.terms.digest())
    word = world.sites["site-00"]._word(0, bytes(16), hello)
    for frame in (
        word._replace(signature=b""),
        word._replace(attempt=SITES),
        word._replace(nonce=bytes([1] * 16)),
        world.sites["site-01"]._word(0, bytes(16), hello),
        world.sites["site-00"]._word(SITES, bytes(16), hello),
    ):
        refused(world, "site-03", frame.sender, frame)
    assert not site._calls
    refused(world, "site-03", "site-01", word)
    # Nor are keys taken of anybody but their site.
    run_until(world, lambda: world.sites["site-05"]._part)
    keys = world.sites["site-05"]._part.keys
    refused(world, "site-00", "site-04", keys)


@pytest.mark.mutant
def test_keys_of_another_attempt_enrol_nobody(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    enrolments: list[wire.Enrolment] = []

    def heard() -> object:
        for data in world.queues["site-00", "site-03"]:
            frame = wire.decoded(data)
            if isinstance(frame, wire.Enrolment):
                enrolments.append(frame)
        return enrolments

    run_until(world, heard)
    words = enrolments[0].words
    other = words[5]._replace(attempt=SITES)
    content = wire.word_content(RUN, 0, "site-00", other)
    other = other._replace(signature=identities["site-05"].sign("word", content))
    unsigned = words[5]._replace(signature=words[4].signature)
    for changed in (
        (*words[:5], other, words[6]),
        (*words[:5], unsigned, words[6]),
        (*words[:3], *words[4:]),
        (words[1], words[0], *words[2:]),
        (*words, words[6]),
    ):
        refused(world, "site-03", "site-00", wire.Enrolment(changed))
        assert not site._part.sites
    refused(world, "site-03", "site-01", enrolments[0])
    site.hear("site-00", enrolments[0])
    assert site._part.sites == ALL


@pytest.mark.mutant
def test_a_sum_is_asked_for_again(tmp_path: Path, identities: dict[str, Identity]) -> None:
    """Who was asked before it had a sum is asked again once it says that it went on."""
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    site.hear("site-00", wire.At(1, 0))
    site.hear("site-00", opened_by(world, 0, tuple(n for n in ALL if n != 3)))
    world.think("site-03")
    for place, answers in ((1, []), (2, [wire.At(1, 0)]), (2, []), (3, [wire.At(1, 0)])):
        world.queues.clear()
        site.hear("site-00", wire.At(place, 0))
        frames = [wire.decoded(data) for data in world.queues["site-03", "site-00"]]
        assert frames == answers
    void = void_of(world, "site-02", 1, site.before)
    site.hear("site-02", wire.Voided((void,)))
    world.queues.clear()
    site.hear("site-00", wire.At(1, 0))
    frames = [wire.decoded(data) for data in world.queues["site-03", "site-00"]]
    assert frames == [wire.Voided((void,))]


# Restarts.


@pytest.mark.mutant
def test_what_is_said_is_noted_before(tmp_path: Path, identities: dict[str, Identity]) -> None:
    """Keys, vectors and voids find their line in the journal as they go out."""
    world = honest_world(tmp_path, identities)
    kinds = {Keys: "keys", MaskedVector: "masked"}
    checked: set[str] = set()

    def recorded(sender: str, frame: wire.Frame) -> None:
        kind = None
        if isinstance(frame, wire.Word):
            kind = kinds.get(type(decoded(frame.payload)))
            place = f"{frame.round} {frame.attempt} "
        elif isinstance(frame, wire.Voided):
            kind = "void"
            place = f"{frame.voids[0].round} "
        if kind is not None:
            checked.add(kind)
            assert f"{kind} {place}" in (tmp_path / sender / "journal").read_text()

    world.record = recorded
    world.start()
    run_until(world, lambda: "masked" in checked)
    world.kill("site-00")
    run_until(world, lambda: "void" in checked or world.done)
    assert checked == {"keys", "masked", "void"}


@pytest.mark.mutant
def test_a_round_stays_spent(tmp_path: Path, identities: dict[str, Identity]) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    run_until(world, lambda: site._masked is not None)
    assert site.attempt == 0
    # Its aggregator is gone: no other attempt has this vector.
    world.kill("site-00")
    assert site.spent
    assert site.charged == {0}
    assert site.attempt == 0
    assert "site-03" in site._voids
    call = site._word(1, bytes(16), Hello(bytes(16), world.terms.digest()))
    content = wire.word_content(RUN, 0, "site-01", call._replace(sender="site-01"))
    signature = identities["site-01"].sign("word", content)
    site.hear("site-01", call._replace(sender="site-01", signature=signature))
    assert not site._calls
    world.kill("site-03")
    world.start("site-03")
    again = world.sites["site-03"]
    assert again.spent
    assert not again.is_wanted
    assert again.charged == {0}
    assert "site-03" in again._voids


@pytest.mark.mutant
def test_keys_are_lost_with_their_process(tmp_path: Path, identities: dict[str, Identity]) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    site = world.sites["site-03"]
    run_until(world, lambda: site._part)
    world.kill("site-03")
    world.start("site-03")
    assert world.sites["site-03"].attempt == 1
    world.run()
    world.check()


def test_a_journal_that_is_gone_or_damaged(tmp_path: Path, identities: dict[str, Identity]) -> None:
    world = honest_world(tmp_path, identities)
    world.start()
    run_until(world, lambda: world.sites["site-03"].round == 1)
    world.kill("site-03")
    journal = tmp_path / "site-03" / "journal"
    content = journal.read_bytes()
    journal.write_bytes(b"keys 0\n")
    with pytest.raises(MustLeave, match="damaged"):
        world.start("site-03")
    world.kill("site-03")
    journal.unlink()
    with pytest.raises(MustLeave, match="gone"):
        world.start("site-03")
    world.kill("site-03")
    journal.write_bytes(content)
    (tmp_path / "site-03" / "enrolled").write_bytes(b"")
    with pytest.raises(MustLeave, match="enrolled is damaged"):
        world.start("site-03")


@pytest.mark.mutant
def test_rounds_without_sums_stop_a_restarted_site(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    world = honest_world(tmp_path, identities, spoiled=0)
    world.start()
    site = world.sites["site-03"]
    for name in world.names:
        if name != "site-03":
            site.hear(name, wire.Voided((void_of(world, name, 0, site.before),)))
    world.history["site-03"].append(site.outcome)
    # Killed after the state was stored, before it went on.
    world.kill("site-03")
    world.start("site-03")
    assert "1 rounds have no sum" in str(world.sites["site-03"].doubt)


# Frames of any kind.


def mangled(world: World, chance: random.Random, value: Any) -> Any:
    """A value like another one."""
    if isinstance(value, int):
        return chance.choice((0, 1, value + 1, SITES, 2**31 - 1, chance.randrange(2**31)))
    if isinstance(value, str):
        return chance.choice((*world.names, "", "nobody", "\n\x00"))
    if isinstance(value, bytes):
        return chance.choice((b"", bytes(len(value)), value[:-1], chance.randbytes(len(value))))
    if hasattr(value, "_fields"):
        field = chance.choice(value._fields)
        return value._replace(**{field: mangled(world, chance, getattr(value, field))})
    items = list(value)
    if items and chance.random() < 0.5:
        place = chance.randrange(len(items))
        items[place] = mangled(world, chance, items[place])
    else:
        items = chance.choice(([], items[:1], items * 2, items[::-1]))
    return tuple(items)


def mangled_message(world: World, chance: random.Random, word: wire.Word) -> wire.Word:
    """Its payload is another message, signed by its sender."""
    message = decoded(word.payload)
    name = chance.choice(message._fields)
    value = getattr(message, name)
    if isinstance(value, dict):
        changed = dict(list(value.items())[: chance.randrange(len(value) + 1)])
        for key in list(changed):
            if chance.random() < 0.3:
                changed[key] = chance.choice((bytes(len(value[key])), b"\xff" * len(value[key])))
            if chance.random() < 0.2:
                changed[chance.choice((0, SITES, 2**32 - 1))] = changed.pop(key)
        value = dict(sorted(changed.items()))
    elif isinstance(value, frozenset):
        value = frozenset(chance.sample(range(SITES + 2), chance.randrange(SITES + 2)))
    elif isinstance(value, bytes):
        value = chance.choice((bytes(len(value)), chance.randbytes(len(value)), value[:-1]))
    word = word._replace(payload=encoded(message._replace(**{name: value})))
    site = next(iter(world.sites.values()))
    content = wire.word_content(RUN, 0, site.aggregator(word.attempt, word.round), word)
    return word._replace(signature=world.identities[word.sender].sign("word", content))


@pytest.mark.parametrize("seed", range(6))
def test_no_frame_ends_a_site(tmp_path: Path, identities: dict[str, Identity], seed: int) -> None:
    """Whatever two sites say, others refuse it, stop for evidence, or go on."""
    world = HostileWorld(
        tmp_path, identities, rounds=3, seed=seed, spoiled=5, hostile=("site-00", "site-04")
    )
    chance = random.Random(seed)

    def attack(sender: str, peer: str, frame: wire.Frame) -> list[wire.Frame]:
        frames = [frame]
        if chance.random() < 0.3 and isinstance(frame, wire.Word) and frame.sender == sender:
            frames = [mangled_message(world, chance, frame)]
        if chance.random() < 0.3:
            frames.append(mangled(world, chance, frame))
        if chance.random() < 0.1:
            frames.append(wire.At(chance.choice((0, 1, 2**31 - 1)), chance.randrange(2**31)))
        return frames

    world.attack = attack
    world.start()
    # Any error but Refused ends the test.
    world.finish(2000)


@pytest.mark.parametrize("number", range(2 * len(ATTACKS)))
def test_attacks(tmp_path: Path, identities: dict[str, Identity], number: int) -> None:
    attacked(tmp_path, identities, number)
