"""Hostile aggregators and clients in sums among peers: what honest sites give away, and when."""

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dpjax.secagg.messages import (
    Confirmed,
    Delivery,
    Hello,
    Keys,
    MaskedVector,
    Request,
    UnmaskingShares,
    decoded,
    encoded,
)
from dpjax.sites import wire
from dpjax.sites.identity import Identity
from dpjax.sites.store import MustLeave
from tests.sites import sum_world
from tests.sites.sum_world import RUN, World, told_apart

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
        for said in self.attack(sender, peer, frame):
            data = wire.encoded(said)
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
        """No honest vector is opened alone, whatever the coalition was told."""
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
                mine, theirs = map(told_apart, pair)
                if mine != theirs:
                    assert self.left or round == len(longest) - 1

    def check_sum(self, round: int, outcome: wire.Opened) -> None:
        """A hostile site may add anything, and an aggregator say anything."""
        assert len(outcome.survivors) >= self.terms.minimum


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    return sum_world.identities(tmp_path_factory.mktemp("identities"), SITES)


def two_survivor_sets(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """Each client is asked for other survivors."""
    if isinstance(frame, wire.Word):
        message = decoded(frame.payload)
        if isinstance(message, Request):
            number = world.random.randrange(SITES)
            survivors = message.survivors - {number}
            dropouts = message.dropouts | {number}
            payload = encoded(Request(message.nonce, survivors, dropouts))
            return [world.signed(sender, frame._replace(payload=payload))]
    return [frame]


def dropped_members(world: HostileWorld, sender: str, peer: str, frame: wire.Frame) -> list:
    """Each client is told other keys."""
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
        old = [word for word in world.heard if isinstance(decoded(word.payload), Keys)]
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
        message = decoded(frame.payload)
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
    """Each client is told of other neighbours that finished sharing."""
    if isinstance(frame, wire.Word):
        message = decoded(frame.payload)
        if isinstance(message, Delivery):
            kept = {j: c for j, c in message.sealed.items() if world.random.random() < 0.8}
            payload = encoded(Delivery(message.nonce, kept))
            return [world.signed(sender, frame._replace(payload=payload))]
        if isinstance(message, Confirmed):
            kept = {j: c for j, c in message.confirmations.items() if world.random.random() < 0.8}
            payload = encoded(Confirmed(message.nonce, kept))
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
        for one in attacks:
            frames = [made for said in frames for made in one(world, sender, peer, said)]
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


@pytest.mark.parametrize("number", range(2 * len(ATTACKS)))
def test_attacks(tmp_path: Path, identities: dict[str, Identity], number: int) -> None:
    attacked(tmp_path, identities, number)
