"""Sums among peers: what is opened, by whom, and never twice."""

from pathlib import Path

import pytest

from dpjax.sites import wire
from dpjax.sites.identity import Identity
from tests.sites import sum_world
from tests.sites.sum_world import World


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
