"""What a site has spent in a project: a line for each run in which it took part, and the total.

A run is charged whole, before its first message goes out, under the total that the project's first
plan fixed. The line has the signed presences of all its sites. Each site shows the others, in the
hello, their own presences in other runs, so that a ledger that was lost or restored learns what it
lacks before anything is sent.
"""

import base64
import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dpjax import _files
from dpjax.accounting.guarantee import Guarantee
from dpjax.sites import wire
from dpjax.sites.identity import Refused, Roster
from dpjax.sites.store import Folder, MustLeave

__all__ = ["Ledger"]

_log = logging.getLogger("dpjax.sites")

_FILE = "charges"
_RECORDS = "records"
"""A line for each digest of records that a charged run read."""
_INSECURE = "insecure"
"""A file that is there once a run was charged whose links were not encrypted."""
_MOST_SHOWN = 32
"""Runs of another site that a hello shows, and so all that a ledger may have."""
PLAN_ITEM = "plan"
"""The item of a presence's terms that has the digest of its plan."""
PROJECT_ITEM = "project"
"""The item of a presence's terms that has the digest of the project's first plan."""


class Costs(Protocol):
    """What runs cost, as `dpjax.sites.project.Project` knows it."""

    @property
    def digest(self) -> str:
        """Of the plan of this phase."""

    @property
    def root(self) -> str:
        """Digest of the project's first plan."""

    @property
    def roster(self) -> Roster:
        """Names and public keys."""

    def guarantee_of(self, name: str, runs: Sequence[str], insecure: bool) -> Guarantee:
        """What a site's runs guarantee together; refused where they pass its total."""


class Ledger:
    """The runs of a project that a site has charged, on disk.

    Guarantee: a run of a site is charged before its first message, once, and whole; and what all
    charged runs spend together is within the site's total, or nothing is sent. A site that lost
    the ledger learns of a run from any other site of it that kept its own. The ledger is of one
    project: runs of other projects on the same records add up to it, and so do those of several
    sites that have records of one person.

    Args:
        path: A folder of the ledger alone; made where there is none.
        costs: The project.
        name: The site's.
        insecure: Whether links are not encrypted.

    Raises:
        MustLeave: For a ledger that is damaged.
        ValueError: For one of another project, and where another process has it.

    Example:
        >>> from dpjax.sites.ledger import Ledger
        >>> Ledger.__name__
        'Ledger'
    """

    def __init__(
        self, path: _files.PathLike, costs: Costs, name: str, insecure: bool = False
    ) -> None:
        self._nonce = b""
        self._records = b""
        self._is_split = False
        self._folder = Folder(path)
        # What one run showed in the clear no later one hides.
        self.insecure = insecure or self._folder.read(_INSECURE) is not None
        self._costs = costs
        self.name = name
        self._all_records = set(self._folder.lines(_RECORDS))
        # By plan and nonce, the presences of all sites of the run, or this one's alone.
        self._runs: dict[tuple[str, bytes], tuple[wire.Presence, ...]] = {}
        self._folder.lines(_FILE)  # A line that a kill cut off is taken out.
        for presences in _charged(self._folder.path):
            self._note(presences)

    @classmethod
    def read(cls, path: _files.PathLike) -> tuple[list[tuple[str, bytes]], bool]:
        """Return the `runs` of a ledger, and its `insecure`, while a site may use it.

        Args:
            path: The folder.

        Raises:
            MustLeave: For a ledger that is damaged.
        """
        runs = [_place_of(presences[0]) for presences in _charged(Path(path))]
        return runs, Path(path, _INSECURE).exists()

    @property
    def runs(self) -> list[tuple[str, bytes]]:
        """Digests of plans, and the nonce of the site in each of its runs."""
        return list(self._runs)

    def guarantee(self, nonce: bytes) -> Guarantee:
        """What all charged runs and this phase's guarantee together.

        Args:
            nonce: Of the site in the run of this phase, which may be charged already.

        Raises:
            ValueError: Where they pass the site's total.
        """
        self._nonce = nonce
        return self._stated({*self._runs, (self._costs.digest, nonce)})

    def _stated(self, places: Collection[tuple[str, bytes]]) -> Guarantee:
        if len(places) > _MOST_SHOWN:
            raise ValueError(
                f"runs of {self.name} are {len(places)} in this project, more than the "
                f"{_MOST_SHOWN} that other sites can show of a lost ledger; begin a new project"
            )
        return self._costs.guarantee_of(
            self.name, [plan for plan, _ in sorted(places)], self.insecure
        )

    def bind(self, records: bytes, accounts: Sequence[str]) -> None:
        """Refuse other held-out records than before, where these have their own account.

        What is given is noted with the next run that is charged.

        Args:
            records: Digest of the records, of the share held out, and of the seed that draws it.
            accounts: Of all phases.

        Raises:
            ValueError: Where a record that is held out may have been trained on before.
            MustLeave: Where the ledger was lost, and does not know.
        """
        self._records = records.hex().encode()
        self._is_split = len(accounts) > 1
        self._check_known()
        if self._is_split and not self._all_records <= {self._records}:
            raise ValueError(
                "[data] file or held_out is another than in an earlier phase, so that records may "
                "be held out which were trained on, and each kind has a total of its own; give "
                "those of all phases before, or begin a new project"
            )

    def charge(self, presences: Mapping[str, wire.Presence]) -> None:
        """Charge a run that has begun, unless it is charged.

        Args:
            presences: Of all its sites, by name.

        Raises:
            ValueError: Where it passes the site's total.
            MustLeave: Where this site's nonce has served in a run with others.
        """
        mine = presences[self.name]
        self.guarantee(mine.nonce)
        if self._records and self._records not in self._all_records:
            self._folder.append(_RECORDS, self._records)
            self._all_records.add(self._records)
        if self.insecure and self._folder.read(_INSECURE) is None:
            self._folder.create(_INSECURE, b"")
        charged = self._runs.get(_place_of(mine))
        if charged is None:
            self._add_run(presences)
        elif len(charged) > 1 and any(
            presences[other.name].nonce != other.nonce for other in charged
        ):
            raise MustLeave(
                f"the nonce of this folder began another run of {self.name}: it was restored from "
                "a backup, or is a copy; name another folder, whose run is charged, too"
            )

    def recall(self, presences: Mapping[str, wire.Presence]) -> None:
        """Charge an earlier run of this project whose folder has it, where this ledger lacks it.

        Args:
            presences: Of all its sites, by name.
        """
        if _place_of(presences[self.name]) not in self._runs:
            self._add_run(presences)
            _log.warning("the ledger lacked a run that a folder of %s has: charged", self.name)

    def shown(self, peer: str) -> tuple[wire.Presence, ...]:
        """The presences of another site in runs that are charged here, for the hello.

        Args:
            peer: The site.
        """
        entries = [entry for run in self._runs.values() for entry in run if entry.name == peer]
        return tuple(entries[-_MOST_SHOWN:])

    def take(self, peer: str, presences: Sequence[wire.Presence]) -> None:
        """Charge what another site shows of this one, and this ledger lacks.

        Args:
            peer: Who shows it.
            presences: Signed by this site.

        Raises:
            Refused: For what this site did not sign in this project.
            MustLeave: Where the total does not hold it, or its cost is not known.
        """
        for presence in presences[-_MOST_SHOWN:]:
            terms = dict(presence.terms)
            if presence.name != self.name or terms.get(PROJECT_ITEM) != self._costs.root:
                raise Refused(f"{peer} shows a run of {presence.name!r}, or of another project")
            wire.check_presence(presence, self._costs.roster)
            place = _place_of(presence)
            # The run of this phase is charged when it begins here.
            if place in self._runs or place == (self._costs.digest, self._nonce):
                continue
            self._add((presence,))
            _log.warning("%s shows a run of %s that its ledger lacked: charged", peer, self.name)
            self._check_known()
            try:
                self.guarantee(self._nonce)
            except ValueError as error:
                raise MustLeave(
                    f"{peer} shows a run of {self.name} that its ledger lacked: {error}"
                ) from None

    def _check_known(self) -> None:
        """Refuse held-out records where the ledger was lost: what was trained on is not known."""
        was_shown = any(len(presences) == 1 for presences in self._runs.values())
        if self._is_split and (was_shown or (self._runs and not self._all_records)):
            raise MustLeave(
                f"ledger is {str(self._folder.path)!r}, which was lost: its runs are known from "
                "others or from folders, and not which records were held out then; restore it "
                "from a backup, or begin a new project"
            )

    def close(self) -> None:
        """Let other processes have it."""
        self._folder.close()

    def _note(self, presences: tuple[wire.Presence, ...]) -> None:
        mine = presences[0]
        if mine.name != self.name or dict(mine.terms).get(PROJECT_ITEM) != self._costs.root:
            raise ValueError(
                f"ledger is {str(self._folder.path)!r}, of {mine.name} in another project; name "
                "another: ledger = FOLDER in site.toml"
            )
        self._runs[_place_of(mine)] = presences

    def _add_run(self, presences: Mapping[str, wire.Presence]) -> None:
        """Charge a run of which all presences are here."""
        others = [presence for name, presence in presences.items() if name != self.name]
        self._add((presences[self.name], *others))

    def _add(self, presences: tuple[wire.Presence, ...]) -> None:
        self._folder.append(_FILE, _line_of(presences))
        self._note(presences)


def _place_of(presence: wire.Presence) -> tuple[str, bytes]:
    """The plan of a run, and a site's nonce in it."""
    return dict(presence.terms).get(PLAN_ITEM, ""), presence.nonce


def _charged(path: Path) -> Iterator[tuple[wire.Presence, ...]]:
    """The runs of a ledger's file, without a line that a kill cut off."""
    file = path / _FILE
    content = file.read_bytes() if file.exists() else b""
    for line in content.split(b"\n")[:-1]:
        presences = _presences_of(line)
        if presences is None:
            raise MustLeave(
                f"{file} is damaged; restore it from a backup, or delete it: folders of its runs, "
                "and other sites, show what it had"
            )
        yield presences


def _line_of(presences: tuple[wire.Presence, ...]) -> bytes:
    """A run as a line of the ledger, with its digest: a line is whole, or refused."""
    encoded = wire.encoded(wire.Presences(presences))
    content = {"digest": hashlib.sha256(encoded).hexdigest()}
    return json.dumps({**content, "presences": base64.b64encode(encoded).decode()}).encode()


def _presences_of(line: bytes) -> tuple[wire.Presence, ...] | None:
    try:
        content = json.loads(line)
        encoded = base64.b64decode(content["presences"], validate=True)
        if hashlib.sha256(encoded).hexdigest() != content["digest"]:
            return None
        frame = wire.decoded(encoded)
    except (ValueError, KeyError, TypeError, Refused):
        return None
    if not isinstance(frame, wire.Presences) or not frame.presences:
        return None
    return frame.presences
