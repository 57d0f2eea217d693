"""SECURITY.md's table of sites says what guarantees of sites say."""

import re
from pathlib import Path

import pytest
from tests.sites.test_compute import plan_of

import dpjax as dp

SECURITY = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text(encoding="utf-8")
PROTECTED = "protected"
NOBODY = "**not protected**"
GROUP = "**not** in its own group"

ROWS = {
    "own: independent, anti-PGD, prefix sum, MAFALDA, banded inverse, one step": [
        dp.noise.Independent(),
        dp.noise.AntiPgd(),
        dp.noise.PrefixSum(),
        dp.noise.Mafalda(),
        dp.noise.BandedInverse(4),
        dp.noise.OneStep(),
    ],
    "of a group: Whisper with subgroups": [dp.noise.Whisper(subgroups=((0, 1), (2, 3)))],
    "of all: pairwise, Whisper, space and time": [
        dp.noise.Pairwise(),
        dp.noise.Whisper(),
        dp.noise.SpaceTime(),
    ],
}


def table() -> dict[str, list[str]]:
    lines = re.findall(r"^\| " + r"([^|]+) \| " * 6 + "$", SECURITY.replace(" |\n", " | \n"), re.M)
    return {row: list(cells) for row, *cells in lines if not row.startswith("noise at")}


def test_table_has_the_designs_that_sites_draw() -> None:
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_guarantees_of_sites_say_what_the_table_says(row: str) -> None:
    for noise in ROWS[row]:
        stated = plan_of(noise, rounds=6).guarantee.replace(sites=True)
        parties = {party.party: party.epsilon for party in stated.protection()}
        neighbours = [e for name, e in parties.items() if name.startswith("another participant")]
        protected = [epsilon is not None for epsilon in neighbours]
        departed = parties["a participant who has left"] is not None
        neighbour = {(True,): PROTECTED, (False,): NOBODY, (False, True): GROUP}[tuple(protected)]
        # All others together are in every group.
        coalition = PROTECTED if all(protected) else NOBODY
        left = PROTECTED if departed else {GROUP: GROUP}.get(neighbour, NOBODY)
        outsider = PROTECTED if parties["an outsider"] is not None else NOBODY
        # The authority is an outsider with a list of names.
        assert table()[row] == [outsider, neighbour, coalition, left, outsider]
