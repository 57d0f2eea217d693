"""What a site has spent in a project: a line for each run in which it took part, and the total.

A run is charged whole, before its first message goes out, under the total that the project's first
plan fixed. Then the site signs that the run has begun, and who takes anything of it keeps that. In
the hello each site shows the other what it keeps, so that a ledger that was lost or restored learns
what it lacks before anything is sent. What was not charged nobody can show.
"""

import base64
import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from dpjax import _files
from dpjax.accounting.guarantee import Guarantee
from dpjax.sites import wire
from dpjax.sites.identity import Refused, Roster
from dpjax.sites.store import Folder, MustLeave

__all__ = ["Ledger"]

_log = logging.getLogger("dpjax.sites")

_CHARGES = "charges"
"""A line for each run that was charged here."""
_SHOWN = "shown"
"""A line for each run that others showed, and the ledger lacked."""
_OTHERS = "others"
"""A line for each beginning of another site, which is shown to it."""
_RECORDS = "records"
"""A line for each digest of records that a charged run read."""
_INSECURE = "insecure"
"""A file that is there once a run was charged whose links were not encrypted."""
_MOST_SHOWN = 32
"""Runs of another site that a hello shows, and so all that a ledger may have."""
_Place: TypeAlias = tuple[str, bytes]
"""A plan's digest, and the site's nonce in its run."""
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
    the ledger learns of a run from any site that took anything of it in that run, and from all to
    whom that one handed on what it signed, if they kept their ledgers. Nobody can charge a run that
    the site did not begin. The ledger is of one project: runs of other projects on the same records
    add up to it, and so do those of several sites that have records of one person.

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
        self._runs: dict[_Place, bytes] = {}
        self._was_shown = False
        # Of other sites, by name and run.
        self._others: dict[str, dict[bytes, wire.Beginning]] = {}
        for file in (_CHARGES, _SHOWN, _OTHERS):
            for beginning in _parsed(self._folder.path / file, self._folder.lines(file)):
                self._note(file, beginning)

    @classmethod
    def read(cls, path: _files.PathLike) -> tuple[list[tuple[str, bytes]], bool]:
        """Return the `runs` of a ledger, and its `insecure`, while a site may use it.

        Args:
            path: The folder.

        Raises:
            MustLeave: For a ledger that is damaged.
        """
        runs: list[_Place] = []
        for name in (_CHARGES, _SHOWN):
            file = Path(path, name)
            content = file.read_bytes() if file.exists() else b""
            # The last line may be half written.
            runs += map(_place_of, _parsed(file, content.split(b"\n")[:-1]))
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

    def charge(self, beginning: wire.Beginning) -> None:
        """Charge a run that is about to begin, unless it is charged.

        Args:
            beginning: This site's.

        Raises:
            ValueError: Where it passes the site's total.
            MustLeave: Where this site's nonce has served in a run with others.
        """
        self.guarantee(beginning.nonce)
        if self._records and self._records not in self._all_records:
            self._folder.append(_RECORDS, self._records)
            self._all_records.add(self._records)
        if self.insecure and self._folder.read(_INSECURE) is None:
            self._folder.create(_INSECURE, b"")
        if not self._has(beginning):
            self._add(_CHARGES, beginning)

    def recall(self, beginning: wire.Beginning) -> None:
        """Charge an earlier run of this project whose folder has it, where this ledger lacks it.

        Args:
            beginning: This site's.

        Raises:
            ValueError: For a run of another project.
            MustLeave: Where this site's nonce has served in a run with others.
        """
        if beginning.project != self._costs.root:
            raise ValueError(
                "folder has a run of another project; name another one under folder, in site.toml"
            )
        if not self._has(beginning):
            self._add(_CHARGES, beginning)
            _log.warning("the ledger lacked a run that a folder of %s has: charged", self.name)

    def keep(self, beginning: wire.Beginning) -> None:
        """Keep what another site signed, to show it once that lost its ledger.

        Args:
            beginning: Of another site, checked.
        """
        if beginning.run not in self._others.get(beginning.name, {}):
            self._add(_OTHERS, beginning)

    def kept(self, run: bytes) -> list[wire.Beginning]:
        """What other sites signed of a run.

        Args:
            run: Its name.
        """
        return [signed[run] for signed in self._others.values() if run in signed]

    def shown(self, peer: str) -> tuple[wire.Beginning, ...]:
        """What another site signed of runs that it has begun, for the hello.

        Args:
            peer: The site.
        """
        return tuple(self._others.get(peer, {}).values())[-_MOST_SHOWN:]

    def take(self, peer: str, beginnings: Sequence[wire.Beginning]) -> None:
        """Charge what another site shows of this one, and this ledger lacks.

        Args:
            peer: Who shows it.
            beginnings: Signed by this site.

        Raises:
            Refused: For what this site did not sign in this project.
            MustLeave: Where the total does not hold it, its cost is not known, or this site's nonce
                has served in two runs.
        """
        for beginning in beginnings[-_MOST_SHOWN:]:
            if beginning.name != self.name or beginning.project != self._costs.root:
                raise Refused(f"{peer} shows a run of {beginning.name!r}, or of another project")
            wire.check_beginning(beginning, self._costs.roster)
            if self._has(beginning):
                continue
            self._add(_SHOWN, beginning)
            _log.warning("%s shows a run of %s that its ledger lacked: charged", peer, self.name)
            self._check_known()
            try:
                self.guarantee(self._nonce)
            except ValueError as error:
                raise MustLeave(
                    f"{peer} shows a run of {self.name} that its ledger lacked: {error}"
                ) from None

    def _has(self, beginning: wire.Beginning) -> bool:
        """Whether a run of this site is charged; its nonce may have served in no other."""
        run = self._runs.get(_place_of(beginning))
        if run not in (None, beginning.run):
            raise MustLeave(
                f"the nonce of a folder of {self.name} began two runs: it was restored from a "
                "backup, or is a copy; name another folder, whose run is charged, too"
            )
        return run is not None

    def _check_known(self) -> None:
        """Refuse held-out records where the ledger was lost: what was trained on is not known."""
        if self._is_split and (self._was_shown or (self._runs and not self._all_records)):
            raise MustLeave(
                f"ledger is {str(self._folder.path)!r}, which was lost: its runs are known from "
                "others or from folders, and not which records were held out then; restore it "
                "from a backup, or begin a new project"
            )

    def close(self) -> None:
        """Let other processes have it."""
        self._folder.close()

    def _note(self, file: str, beginning: wire.Beginning) -> None:
        is_own = beginning.name == self.name
        if is_own == (file == _OTHERS) or beginning.project != self._costs.root:
            raise ValueError(
                f"ledger is {str(self._folder.path)!r}, of {beginning.name} in another project; "
                "name another: ledger = FOLDER in site.toml"
            )
        if is_own:
            self._runs[_place_of(beginning)] = beginning.run
            self._was_shown |= file == _SHOWN
        else:
            self._others.setdefault(beginning.name, {})[beginning.run] = beginning

    def _add(self, file: str, beginning: wire.Beginning) -> None:
        self._folder.append(file, _line_of(beginning))
        self._note(file, beginning)


def beginning_of(presences: Mapping[str, wire.Presence], name: str) -> wire.Beginning:
    """Return what a site signs of a run that begins, without the signature.

    Args:
        presences: Of all sites of the run, by name.
        name: The site's.
    """
    presence = presences[name]
    terms = dict(presence.terms)
    plan = terms.get(PLAN_ITEM, "")
    run = wire.run_of(presences, plan)
    return wire.Beginning(name, terms.get(PROJECT_ITEM, ""), plan, presence.nonce, run, b"")


def _place_of(beginning: wire.Beginning) -> _Place:
    """The plan of a run, and the site's nonce in it."""
    return beginning.plan, beginning.nonce


def _parsed(file: Path, lines: Iterable[bytes]) -> Iterator[wire.Beginning]:
    """What the lines of a ledger's file say."""
    for line in lines:
        beginning = _beginning_of(line)
        if beginning is None:
            loss = "folders of its runs, and other sites, show what it had"
            if file.name == _OTHERS:
                loss = "others that lose their ledgers miss what it would show them"
            raise MustLeave(f"{file} is damaged; restore it from a backup, or delete it: {loss}")
        yield beginning


def _line_of(beginning: wire.Beginning) -> bytes:
    """A line of the ledger, with its digest: it is whole, or refused."""
    encoded = wire.encoded(wire.Beginnings((beginning,)))
    content = {"digest": hashlib.sha256(encoded).hexdigest()}
    return json.dumps({**content, "beginning": base64.b64encode(encoded).decode()}).encode()


def _beginning_of(line: bytes) -> wire.Beginning | None:
    try:
        content = json.loads(line)
        encoded = base64.b64decode(content["beginning"], validate=True)
        if hashlib.sha256(encoded).hexdigest() != content["digest"]:
            return None
        frame = wire.decoded(encoded)
    except (ValueError, KeyError, TypeError, Refused):
        return None
    if not isinstance(frame, wire.Beginnings) or len(frame.beginnings) != 1:
        return None
    return frame.beginnings[0]
