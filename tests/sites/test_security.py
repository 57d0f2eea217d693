"""SECURITY.md's table of sites says what guarantees of sites say."""

import re
from pathlib import Path

import pytest

import dpjax as dp
from dpjax.plans.links import PairKeys
from dpjax.plans.scheduled import ScheduledGaussian
from tests.sites.test_compute import FEATURES, plan_of
from tests.sites.test_sum_site import plan_of_sums

SECURITY = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text(encoding="utf-8")
PROTECTED = "protected"
NOBODY = "**not**"
GROUP = "**not** in its own group"

COLUMNS = {
    "own": [
        dp.noise.Independent(),
        dp.noise.AntiPgd(),
        dp.noise.PrefixSum(),
        dp.noise.Mafalda(),
        dp.noise.BandedInverse(4),
        dp.noise.OneStep(),
        ScheduledGaussian(0.9),
    ],
    "of groups": [dp.noise.Whisper(subgroups=((0, 1), (2, 3)))],
    "of all": [dp.noise.Pairwise(), dp.noise.Whisper(), dp.noise.SpaceTime()],
    "of links": [PairKeys(1.0)],
    "of sums": [dp.noise.Discrete(size=FEATURES + 1, dropouts=1, colluders=1)],
}


def table() -> dict[str, dict[str, str]]:
    """Cells by column and row."""
    lines = re.findall(r"^\|" + r" ([^|]+) \|" * 6 + "$", SECURITY, re.M)
    names, *rows = [line for line in lines if not line[0].startswith("---")]
    columns = zip(*rows, strict=True)
    parties = next(columns)
    return {
        name: dict(zip(parties, cells, strict=True))
        for name, cells in zip(names[1:], columns, strict=True)
    }


def test_table_has_the_secrets_that_sites_draw_from() -> None:
    assert list(table()) == list(COLUMNS)


@pytest.mark.parametrize("column", COLUMNS)
def test_guarantees_of_sites_say_what_the_table_says(column: str) -> None:
    for noise in COLUMNS[column]:
        attacker = "node" if column == "of links" else "outsider"
        if column == "of sums":
            plan = plan_of_sums(noise=noise)
        else:
            plan = plan_of(noise, rounds=6, attacker=attacker)
        stated = plan.guarantee.replace(release=True, sites=True)
        parties = {party.party: party.epsilon for party in stated.protection()}
        neighbours = [e for name, e in parties.items() if name.startswith("another participant")]
        protected = [epsilon is not None for epsilon in neighbours]
        departed = parties["a participant who has left"] is not None
        neighbour = {(True,): PROTECTED, (False,): NOBODY, (False, True): GROUP}[tuple(protected)]
        # All others together are in every group, and at the other ends of all links.
        alone = all(protected) and stated.secrets == "own"
        coalition = PROTECTED if alone else NOBODY
        left = PROTECTED if departed else {GROUP: GROUP}.get(neighbour, NOBODY)
        outsider = PROTECTED if parties["an outsider"] is not None else NOBODY
        # The authority is an outsider with a list of names, a relay one that passes bytes on.
        assert table()[column] == {
            "outsider, authority, relay": outsider,
            "one neighbour": neighbour,
            "all other sites together": coalition,
            "a site that left": left,
        }
