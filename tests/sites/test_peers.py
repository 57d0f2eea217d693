"""Sums among peers: what is opened, by whom, and never twice."""

import itertools
from pathlib import Path

import pytest

from dpjax.secagg.messages import (
    Confirm,
    Confirmed,
    Delivery,
    Hello,
    Keys,
    MaskedVector,
    Request,
    Shares,
    UnmaskingShares,
)
from dpjax.sites import wire
from dpjax.sites.identity import Identity, Refused
from dpjax.sites.peers import PeerTerms
from tests.sites import sum_world
from tests.sites.sum_world import LIMITS, World


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    return sum_world.identities(tmp_path_factory.mktemp("identities"), 6)


def test_sums_are_those_of_all_sites(tmp_path: Path, identities: dict[str, Identity]) -> None:
    world = World(tmp_path, identities, rounds=4)
    world.start()
    world.run()
    world.check()
    for outcome in world.history["site-00"]:
        assert isinstance(outcome, wire.Opened)
        assert outcome.survivors == tuple(range(6))
    assert not world.refusals
    assert world.now < 1


def test_an_absent_site_is_a_dropout(tmp_path: Path, identities: dict[str, Identity]) -> None:
    world = World(tmp_path, identities, rounds=7)
    world.start()
    world.kill("site-02")
    world.run()
    world.check()
    assert all(2 not in outcome.survivors for outcome in world.history["site-00"])
    # It comes back and catches up.
    world.start("site-02")
    world.run()
    world.check()
    assert len(world.history["site-02"]) == 7
    assert not world.refusals


@pytest.mark.parametrize("seed", range(8))
def test_kills(tmp_path: Path, identities: dict[str, Identity], seed: int) -> None:
    world = World(tmp_path, identities, rounds=6, seed=seed, spoiled=20)
    world.start()
    dead: list[str] = []
    for _ in range(12):
        for _ in range(world.random.randrange(150)):
            if not world.done:
                world.step()
        if dead and world.random.random() < 0.7:
            world.start(dead.pop())
        elif len(dead) < 2 and not world.done:
            name = world.random.choice(list(world.sites))
            world.kill(name)
            dead.append(name)
    if dead:
        world.start(*dead)
    world.run()
    world.check()
    assert not world.left


@pytest.mark.mutant
def test_the_threshold_parts_any_two_requests() -> None:
    """For all sizes: 2 t > k + c, and t others answer where as many are missing as may be."""
    for sites in range(4, 16):
        for dropouts in range(4):
            for colluders in range(1, 4):
                if sites < 2 * dropouts + colluders + 2:
                    with pytest.raises(ValueError, match="too few for sums"):
                        sum_world.terms(sites, dropouts, colluders)
                    continue
                terms = sum_world.terms(sites, dropouts, colluders)
                assert (terms.minimum, terms.colluders) == (sites - dropouts, colluders)
                for enrolled in range(terms.minimum, sites + 1):
                    degree, threshold, *_ = terms.graph(enrolled)
                    assert degree == enrolled - 1
                    assert 2 * threshold > degree + colluders
                    assert threshold <= terms.minimum - 1
                with pytest.raises(ValueError, match="enrolled is"):
                    terms.graph(terms.minimum - 1)


@pytest.mark.mutant
def test_an_aggregator_counts_as_a_colluder() -> None:
    with pytest.raises(ValueError, match="give at least 1"):
        PeerTerms(6, 8, 20, None, 0.0, 0.0, "semi_malicious")
    with pytest.raises(ValueError, match="at most 100"):
        PeerTerms(101, 8, 20, None, 0.02, 0.0, "semi_malicious")


# The second round's aggregator is the second site.
STAGES = [("site-04", kind) for kind in (Keys, Shares, MaskedVector, Confirm, UnmaskingShares)]
STAGES += [("site-01", kind) for kind in (Hello, Delivery, Request, Confirmed)]


@pytest.mark.mutant
@pytest.mark.parametrize("in_order", [False, True], ids=["gone", "in order"])
@pytest.mark.parametrize(("name", "stage"), STAGES, ids=lambda of: getattr(of, "__name__", of))
def test_departures_in_every_stage(
    tmp_path: Path, identities: dict[str, Identity], name: str, stage: type, in_order: bool
) -> None:
    """Others go on without a site, or wait for its word alone; who leaves in order has said it."""
    world = World(tmp_path, identities, rounds=4)
    world.start()
    while (name, stage) not in world.words:
        assert not world.done
        world.step()
    if in_order:
        world.sites[name].withdraw()
        for peer in world.names:
            while world.queues[name, peer] and peer in world.sites:
                world.deliver(name, peer)
    world.kill(name)
    while not world.done and world.now < 500:
        world.step()
    world.check()
    stuck = {other: site.missing() for other, site in world.sites.items() if site.round < 4}
    if in_order or not stuck:
        assert not stuck
        return
    # The vectors were out, and who added up is gone: all others say that there is none.
    assert name == "site-01" and len(stuck) == 5
    for other, missing in stuck.items():
        assert world.sites[other].spent
        assert missing == [f"a sum, or word that there is none, of {name}"]


@pytest.mark.mutant
@pytest.mark.parametrize("last", [0, 1])
def test_who_left_has_no_sum_of_later_rounds(
    tmp_path: Path, identities: dict[str, Identity], last: int
) -> None:
    """A round after its last one is void without its word, of its last one it must say so."""
    world = World(tmp_path, identities, rounds=3)
    world.start()
    world.kill("site-05")
    for name in world.names[:4]:
        world.sites[name].part_from("site-05", last)
    # In round 1 all vectors are out, when who adds up is killed.
    while ("site-01", Request) not in world.words:
        world.step()
    world.kill("site-01")
    world.start("site-01")
    world.sites["site-01"].part_from("site-05", last)
    while not world.done and world.now < 500:
        world.step()
    # One has not heard yet that it left.
    assert world.sites["site-04"].round == 1
    assert "site-05" in world.sites["site-04"].missing()[0]
    world.sites["site-04"].part_from("site-05", last)
    while not world.done and world.now < 1000:
        world.step()
    world.check()
    assert world.done == (last == 0)
    if last == 0:
        void = world.history["site-04"][1]
        assert [one.sender for one in void.voids] == world.names[:5]
        world.sites["site-03"].hear("site-04", void)
        assert world.sites["site-03"].doubt is None
        incomplete = wire.Voided((*void.voids[:4], void.voids[3]))
        with pytest.raises(Refused, match="not of each site once"):
            world.sites["site-03"].hear("site-04", incomplete)


def test_nobody_waits_for_who_left_to_add_up(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    world = World(tmp_path, identities, rounds=7)
    world.start()
    world.kill("site-05")
    for site in world.sites.values():
        site.part_from("site-05", 0)
    world.run()
    world.check()
    assert world.now < 1


@pytest.mark.mutant
def test_who_left_and_stays_connected_delays_its_last_round_alone(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    world = World(tmp_path, identities, rounds=6)
    said = world.say

    def say(sender: str, peer: str, frame: wire.Frame) -> None:
        if sender != "site-05":
            said(sender, peer, frame)

    world.say = say
    world.start()
    others = [site for name, site in world.sites.items() if name != "site-05"]
    for site in others:
        site.part_from("site-05", 0)
    while any(site.round == 0 for site in others):
        world.step()
    began = world.now
    world.run()
    world.check()
    assert world.now - began < LIMITS.enrol


@pytest.mark.mutant
def test_calls_of_as_many_as_may_collude_hurry_nobody(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    """One site with a standing call for a later attempt would rush others past all between."""
    world = World(tmp_path, identities, rounds=1)
    world.start()
    world.queues.clear()
    world.think("site-03")
    site = world.sites["site-03"]
    assert world.terms.colluders == 1
    for attempt in (2, 4):
        caller = f"site-0{attempt}"
        call = Hello(bytes(16), world.terms.digest())
        word = world.sites[caller]._word(attempt, bytes(16), call)
        world.now += site._grace + 1
        assert site.attempt == 0
        site.hear(caller, word)
    assert site.attempt == 1


def test_a_call_of_an_earlier_attempt_is_no_fault(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    """Who was killed and came back calls for the attempt that it was in."""
    world = World(tmp_path, identities, rounds=1)
    world.start()
    site = world.sites["site-03"]
    site.attempt = 1
    word = world.sites["site-00"]._word(0, bytes(16), Hello(bytes(16), world.terms.digest()))
    site.hear("site-00", word)
    assert not site._calls


@pytest.mark.mutant
def test_sites_that_met_nobody_for_a_while_meet_again_at_once(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    """Their attempts differ then; nobody waits for those that are ahead of its own."""
    world = World(tmp_path, identities, rounds=2)
    pairs = list(itertools.combinations(world.names, 2))
    world.start()
    world.kill("site-05")
    for first, second in pairs:
        world.cut.add(frozenset((first, second)))
        world.part(first, second)
    # Each went on by itself.
    for number, site in enumerate(world.sites.values()):
        site._part = site._aggregation = None
        site.attempt = number + 1
    healed = world.now
    world.cut.clear()
    for first, second in pairs:
        world.join(first, second)
    world.run()
    world.check()
    assert all(isinstance(outcome, wire.Opened) for outcome in world.history["site-00"])
    # Less than the time for which a sum waits for all to begin.
    assert world.now - healed < LIMITS.enrol


@pytest.mark.mutant
def test_who_comes_back_when_it_is_its_turn_keeps_nobody_waiting(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    """It adds up in attempt 0, and the others are in attempt 1, where they wait for it."""
    world = World(tmp_path, identities, rounds=8)
    world.start()
    world.kill("site-00")
    other = world.sites["site-01"]
    while other.round < 6 or other._aggregation is None:
        world.step()
    back = world.now
    world.start("site-00")
    world.run()
    world.check()
    assert world.now - back < LIMITS.enrol
