"""Sites of a project's phases in threads: sessions, kills at writes, backups, and what they say.

`Stage` makes the first phase and the plans that may follow, once. A `Trial` has a copy of the first
phase's folders, and real sites in them; what is sent is checked as it goes out.
"""

import base64
import contextlib
import copy
import functools
import hashlib
import json
import queue
import random
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from dpjax._programs import Compiled
from dpjax.accounting import budget, discrete
from dpjax.accounting.guarantee import Guarantee
from dpjax.engine import round as round_
from dpjax.plans.protect import Budget
from dpjax.secagg.messages import MaskedVector, decoded
from dpjax.sites import compute, meeting, start, wire
from dpjax.sites.channel import Event
from dpjax.sites.compute import SumRounds
from dpjax.sites.identity import Identity, Refused
from dpjax.sites.noise import SiteNoise
from dpjax.sites.project import Project, follow
from dpjax.sites.site import SiteLoop
from dpjax.sites.store import Folder, MustLeave
from dpjax.sites.sum_site import SumSite
from tests.sites import sum_world
from tests.sites.test_phases import FEWER, SUMS, Sites, names_of, problem_of

Place: TypeAlias = tuple[str, bytes, bytes]
"""A run of a site: the digest of its plan, and the site's nonce."""
ALL = (0, 1, 2, 3, 4)
# Who goes on, who joins, and what changes, by the file of the plan; and the phase before it.
PLANS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "left.json": ("plan.json", (0, 1, 2), (), FEWER | {"rounds": 2}),
    "right.json": ("plan.json", (2, 3, 4), (), FEWER | {"rounds": 2}),
    "four.json": ("plan.json", (0, 1, 2, 3), (), FEWER | {"rounds": 2}),
    "other.json": ("plan.json", (0, 1, 2), (), FEWER | {"rounds": 1, "seed": 9}),
    "all.json": ("plan.json", ALL, (), {"rounds": 2}),
    "cheap.json": ("plan.json", ALL, (), {"rounds": 2, "budget": {"epsilon": 1.0}}),
    "joined.json": ("plan.json", (0, 1, 2, 3), (5,), {"rounds": 2, "budget": {"epsilon": 1.2}}),
    "small.json": ("plan.json", (1, 2, 4), (), FEWER | {"rounds": 2, "budget": {"epsilon": 1.0}}),
    "third.json": ("cheap.json", (0, 1, 2, 3), (), FEWER | {"rounds": 1}),
    "again.json": ("cheap.json", (2, 3, 4), (), FEWER | {"rounds": 1}),
    "last.json": ("joined.json", (0, 2, 3), (), FEWER | {"rounds": 1}),
}
WAITS = {"late": 5.0, "linger": 0.3, "enrol": 0.4, "stage": 0.4, "gone": 0.8}
LIMIT = 20.0
"""Seconds after which a site that still waits must say for whom, who is not there."""
SPENT = budget.total_fields(Budget(3.0, 1e-4, "zcdp"), release=True)["loss"].rho
REMEDIES = re.compile(
    "use that plan|must leave|give |[sS]tart |name |plan the next|join again|find out|cannot go on|"
    "[gG]o on without|end or close|restore|delete|copy|get |ask for|open it again"
)


class Died(BaseException):
    """As SIGKILL, before or after a write."""


@dataclass
class Life:
    """One process of a site.

    Attributes:
        name: The site's.
        home: Name of the folder that it has its own in.
        plan: That it was started with.
        is_hostile: Whether what it says is changed, and no invariant is its.
        initial: What its ledger had when it began.
        doom: How the name of a file begins, which of its writes ends the process, and when.
        is_dead: Whether it was killed.
        runs_shown: Runs that neighbours had of it on disk when they met: now, a turn ago, and the
            turn before that.
        warnings: Likewise whether one had keys that it lacks.
        drawn: By round, the noise's key and the digest of the vector.
        missing: What it waits for.
        end: How it ended; "" while it lives.
        error: Its text.
    """

    name: str
    home: str
    plan: Project
    is_hostile: bool
    initial: set[Place] = field(default_factory=set)
    doom: tuple[str, int, str] | None = None
    is_dead: bool = False
    runs_shown: list[set[Place]] = field(default_factory=lambda: [set(), set(), set()])
    warnings: list[str] = field(default_factory=lambda: ["", "", ""])
    drawn: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    run: tuple[Place, bytes] | None = None
    missing: Callable[[], list[str]] = list
    end: str = ""
    error: str = ""
    site: SiteLoop | None = None
    thread: threading.Thread | None = None

    def pulse(self) -> None:
        """Die at the next thing that it does, if it was killed."""
        if self.is_dead:
            raise Died

    def turned(self) -> None:
        """Note what neighbours had shown before this turn of the loop."""
        for rows in (self.runs_shown, self.warnings):
            rows[1:] = [copy.copy(rows[0]), rows[1]]


class Line:
    """A `dpjax.sites.channel.Channel` of one process."""

    insecure = False

    def __init__(self, trial: "Trial", life: Life, peers: set[str]) -> None:
        self.trial = trial
        self.life = life
        self.name = life.name
        self.peers = peers
        self.sessions: dict[str, Line] = {}
        self.events: queue.Queue[Event] = queue.Queue()

    def open(self, greeting: Callable[[str], bytes], check: Callable[..., str | None]) -> None:
        """Be there; hellos are the network's."""
        self.greeting = greeting
        self.check = check
        with self.trial.guard:
            self.trial.lines.append(self)
        self.trial.dial()

    def said(self, peer: str, data: bytes) -> list[bytes]:
        """What a peer hears of it: of a hostile site something else."""
        frame = wire.decoded(data)
        if not self.life.is_hostile:
            self.trial.note(self.life, frame)
            return [data]
        return [wire.encoded(changed) for changed in self.trial.attack(self.life, peer, frame)]

    def send(self, peer: str, data: bytes) -> bool:
        """Put a message into the other's queue."""
        self.life.pulse()
        with self.trial.guard:
            other = self.sessions.get(peer)
            if other is None:
                return False
            for changed in self.said(peer, data):
                with contextlib.suppress(Refused):
                    self.trial.heard.append(wire.decoded(changed))
                other.events.put(Event("message", self.name, changed, ""))
            return True

    def receive(self, seconds: float) -> Event | None:
        """The next event."""
        self.life.pulse()
        self.life.turned()
        try:
            return self.events.get(timeout=seconds)
        except queue.Empty:
            return None

    def statistics(self) -> Mapping[str, Any]:
        """Nothing is counted."""
        return {}

    def part(self, peer: str) -> None:
        """End a session at both ends."""
        other = self.sessions.pop(peer, None)
        if other is not None:
            self.events.put(Event("closed", peer, b"", "gone"))
            other.part(self.name)

    def close(self) -> None:
        """End all sessions; messages that are in queues still arrive."""
        with self.trial.guard:
            if self in self.trial.lines:
                self.trial.lines.remove(self)
            for peer in list(self.sessions):
                self.part(peer)


class Stage:
    """The first phase after two rounds, and plans that may follow, each made once."""

    def __init__(self, folder: Path) -> None:
        self.patch = pytest.MonkeyPatch()
        self.keys = folder / "keys"
        self.keys.mkdir()
        self.trial: Trial | None = None
        self.plans: dict[str, Project] = {}
        self.rounds: dict[tuple[str, str], SumRounds] = {}
        self.guard = threading.Lock()
        sum_world.identities(self.keys, 7)
        self._keep_what_takes_long()
        self.sites = Sites(folder / "first", self.keys, self.patch)
        self.sites.folder.mkdir()
        self.plans["plan.json"] = self.sites.write(5, SUMS)
        self.sites.start(*names_of(5), rounds=2)
        self.sites.finished(*names_of(5))
        self.standings = self.sites.standings(*names_of(5))
        # All that was said in it is there for replays.
        self.heard = [wire.decoded(data) for _, _, data in self.sites.network.frames]
        for kind in ("create", "replace", "append", "delete"):
            self.patch.setattr(Folder, kind, self._dying(kind))
        self.patch.setattr(meeting, "_TICK", 0.02)
        wait = SiteLoop._wait

        def waiting(
            site: SiteLoop, missing: Callable[[], list[str]], *rest: Any, **options: Any
        ) -> None:
            life = self._life_of(site.folder)
            if life is not None:
                life.missing = missing
            wait(site, missing, *rest, **options)

        self.patch.setattr(SiteLoop, "_wait", waiting)

    def _keep_what_takes_long(self) -> None:
        """Plans, records and compiled rounds serve all trials; what a site decides does not."""
        self.patch.setattr(discrete, "largest_rho", functools.cache(discrete.largest_rho))
        for module in (compute, round_):
            for program in vars(module).values():
                if isinstance(program, Compiled):
                    everything = functools.cache(program._program.__wrapped__)
                    self.patch.setattr(program, "_program", everything)
        guarantees: dict[tuple[object, ...], Guarantee] = {}
        guarantee_of = Project.guarantee_of

        def stating(agreed: Project, name: str, runs: Sequence[str], insecure: bool = False) -> Any:
            key = agreed.digest, name, *runs, insecure
            if key not in guarantees:
                guarantees[key] = guarantee_of(agreed, name, runs, insecure)
            return guarantees[key]

        self.patch.setattr(Project, "guarantee_of", stating)
        loaded: dict[tuple[Path, bytes, tuple[Any, ...]], Project] = {}
        load = Project._load.__func__

        def loading(kind: type[Project], path: Path, *rest: Any) -> Project:
            key = path, path.read_bytes(), rest
            if key not in loaded:
                loaded[key] = load(kind, path, *rest)
            return loaded[key]

        self.patch.setattr(Project, "_load", classmethod(loading))
        self.patch.setattr(Identity, "load", functools.cache(Identity.load))
        problems: dict[tuple[str, str], Any] = {}
        problem = start._problem

        def reading(agreed: Project, name: str, *rest: Any) -> Any:
            key = agreed.digest, name
            if key not in problems:
                problems[key] = problem(agreed, name, *rest)
            return problems[key]

        self.patch.setattr(start, "_problem", reading)

        def compiled(site: SumSite, plan: Any, problem: Any, number: int) -> Any:
            site._group = (site.name,)
            rounds = copy.copy(self._rounds(site.agreement, site.name))
            rounds.vector = functools.partial(self._drawing, site, rounds)
            return rounds

        self.patch.setattr(SumSite, "_rounds_of", compiled)

    def _rounds(self, agreed: Project, name: str) -> SumRounds:
        """A site's rounds, compiled by a round that nobody hears of."""
        with self.guard:
            key = agreed.digest, name
            if key not in self.rounds:
                problem = problem_of(self.sites, agreed, name)
                number = agreed.names.index(name)
                rounds = SumRounds(agreed.plan, problem, number, seed=agreed.seed)
                self.rounds[key] = copy.copy(rounds)
                rounds.begin([SiteNoise(bytes([1] * 32), run=bytes(32), holder=name)])
                state = rounds.init()
                sent = rounds.outgoing(state)
                total = rounds.vector(state, sent)
                state = rounds.incoming(state, sent, total, len(agreed.names))
                rounds.metrics(rounds.restored(rounds.stored(state)))
            return self.rounds[key]

    def _drawing(self, site: SumSite, rounds: Any, state: Any, sent: Any) -> np.ndarray:
        """A vector, of which the trial notes the noise."""
        vector = type(rounds).vector(rounds, state, sent)
        life = self._life_of(site.folder)
        if life is not None and self.trial is not None:
            source = rounds._source
            place = source._run, source._phase
            if place != (site._conversation.run, life.plan.phase):
                self.trial.fault(life, "draws noise at an address of another run or phase")
            key = source._key("discrete noise", (source._phase, int(state.round)))
            life.drawn[int(state.round)] = key, hashlib.sha256(vector.tobytes()).digest()
        return vector

    def _life_of(self, path: Path) -> Life | None:
        trial = self.trial
        if trial is None or not path.is_relative_to(trial.folder):
            return None
        return trial.lives.get(path.relative_to(trial.folder).parts[0])

    def _dying(self, kind: str) -> Callable[..., None]:
        """A write that may be a process's last."""
        real = getattr(Folder, kind)

        def write(folder: Folder, name: str, *content: Any) -> None:
            life = self._life_of(folder.path)
            if life is None or self.trial is None:
                real(folder, name, *content)
                return
            life.pulse()
            moment = ""
            if life.doom is not None and name.startswith(life.doom[0]):
                file, count, moment = life.doom
                life.doom = file, count - 1, moment
                moment = moment if count == 1 else ""
            with self.trial.disk:
                if moment == "half" and kind == "append":
                    with open(folder.path / name, "ab") as file:
                        file.write(content[0][: len(content[0]) // 2])
                elif moment in ("", "after"):
                    real(folder, name, *content)
            if moment:
                life.is_dead = True
            life.pulse()

        return write

    def plan(self, file: str) -> Project:
        """A plan that follows, made at the first call, before a trial begins."""
        if file not in self.plans:
            before, numbers, entrants, changes = PLANS[file]
            self.trial = None
            self.plan(before)
            if before == "plan.json":
                standings = [self.standings[number] for number in numbers]
            else:
                standings = self._stood(before, self.plans[before].names, numbers)
            joining = [self.sites.certificate(number) for number in entrants]
            folder = self.sites.folder
            options = {"joining": joining, "changes": changes}
            plan = follow(folder / before, standings, folder / file, **options)
            for name in plan.names:
                self._rounds(plan, name)
            self.plans[file] = plan
        return self.plans[file]

    def _stood(self, file: str, names: tuple[str, ...], numbers: tuple[int, ...]) -> list[Path]:
        """Standings after a run of a later plan, each in folders of its own."""
        shutil.copytree(self.sites.folder, self.sites.folder.with_name(file), dirs_exist_ok=True)
        run = Sites(self.sites.folder.with_name(file), self.keys, self.patch)
        run.start(*names, plan=file)
        run.finished(*names)
        return run.standings(*[run.name(number) for number in numbers], plan=file)

    def close(self) -> None:
        """Take back what was patched."""
        self.sites.stop()
        self.patch.undo()


class Trial(Sites):
    """Sites after the first phase, what is done to them, and what they say."""

    def __init__(self, stage: Stage, folder: Path, number: int) -> None:
        self.stage = stage
        self.chance = random.Random(number)
        self.names = names_of(7)
        self.guard = threading.RLock()
        self.disk = threading.RLock()
        self.lines: list[Line] = []
        self.cut: set[frozenset[str]] = set()
        # When two processes that refused each other meet again.
        self.again: dict[tuple[Line, Line], float] = {}
        self.lives: dict[str, Life] = {}
        self.ended: list[Life] = []
        self.heard: list[wire.Frame] = list(stage.heard)
        self.faults: list[str] = []
        self.attack: Callable[[Life, str, wire.Frame], list[wire.Frame]] = lambda *said: [said[2]]
        # What backups took from sites: whole, run, ledger.
        self.restored: dict[str, set[str]] = defaultdict(set)
        # Phases whose successor a backup took away, by site.
        self.forgotten: dict[str, set[int]] = defaultdict(set)
        self.signed: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.begun: dict[str, set[str]] = defaultdict(set)
        # Of runs whose beginning a site has signed.
        self.signed_runs: dict[str, set[Place]] = defaultdict(set)
        self.out: dict[str, set[Place]] = defaultdict(set)
        self.vectors: dict[tuple[str, bytes, int], set[bytes]] = defaultdict(set)
        self.noise: dict[bytes, set[bytes]] = defaultdict(set)
        self.left: set[tuple[str, bytes]] = set()
        # Who still lived when the trial was over.
        self.waiting: list[Life] = []
        shutil.copytree(stage.sites.folder, folder / "trial")
        super().__init__(folder / "trial", stage.keys, stage.patch)
        stage.trial = self
        self.waits = WAITS

    def _channel(self, agreement: Any, identity: Any, files: Any, values: Any, *rest: Any) -> Any:
        peers = set(start._addresses(agreement, values["name"], values))
        return Line(self, self.lives[Path(values["folder"]).parent.name], peers)

    # What is done to sites.

    def begin(
        self,
        name: str,
        file: str,
        *,
        home: str = "",
        hostile: bool = False,
        doom: tuple[str, int, str] | None = None,
    ) -> None:
        """A process of a site."""
        life = Life(name, home or name, self.stage.plan(file), hostile, doom=doom)
        earlier = self.lives.get(life.home)
        if earlier is not None:
            self.kill(earlier)
        life.initial = charges(self.folder / life.home)
        self.lives[life.home] = life
        thread = threading.Thread(target=self._live, args=(life,), daemon=True)
        life.thread = thread
        thread.start()

    def _live(self, life: Life) -> None:
        try:
            folder = str(self.folder / life.home / "run")
            life.site = self.site(life.name, life.plan, folder=folder)
            for _ in life.site.rounds():
                life.pulse()
            life.end = "left" if life.site.has_left else "done"
        except Died:
            life.end = "killed"
        except MustLeave as error:
            life.end = "stopped"
            life.error = str(error)
        except ValueError as error:
            life.end = "refused" if life.site is None else "ended"
            life.error = str(error)
        except BaseException as error:
            life.end = "broken"
            life.error = repr(error)
        finally:
            if life.site is not None:
                life.site.close()
                life.is_dead = True

    def kill(self, life: Life) -> None:
        """As SIGKILL, and its end is waited for."""
        life.is_dead = True
        self.dial()
        assert life.thread is not None
        life.thread.join(20)
        if life.thread.is_alive():
            self.fault(life, "does not end")
        self.ended.append(life)
        del self.lives[life.home]

    def dial(self) -> None:
        """Sessions between all that have none, where both accept; none with the dead."""
        with self.guard:
            for line in list(self.lines):
                if line.life.is_dead:
                    line.close()
                for peer in list(line.sessions):
                    if frozenset((line.name, peer)) in self.cut:
                        line.part(peer)
            for first in list(self.lines):
                for second in list(self.lines):
                    self._join(first, second)

    def _join(self, first: Line, second: Line) -> None:
        is_known = second.name in first.peers and first.name in second.peers
        is_free = second.name not in first.sessions and first.name not in second.sessions
        is_cut = frozenset((first.name, second.name)) in self.cut
        if first is second or not is_known or not is_free or is_cut:
            return
        if time.monotonic() < self.again.get((first, second), 0.0):
            return
        # What a disk says before the hello, the hello must say.
        lessons = [self._lesson(first.life, second.life), self._lesson(second.life, first.life)]
        reason: str | None = None
        for end, peer in ((first, second), (second, first)):
            for death in (end, peer):
                if death.life.is_dead:
                    return
            try:
                (data,) = end.said(peer.name, end.greeting(peer.name))
                reason = reason or peer.check(end.name, data)
            except Died:
                return
            except Exception as error:
                self.faults.append(f"a hello of {end.name} with {peer.name} raises {error!r}")
                return
        if reason is not None:
            self.again[first, second] = self.again[second, first] = time.monotonic() + 0.15
            for end, peer in ((first, second), (second, first)):
                end.events.put(Event("refused", peer.name, b"", reason))
            return
        for end, peer in ((first, second), (second, first)):
            end.sessions[peer.name] = peer
            end.events.put(Event("opened", peer.name, b"", ""))
        for end, (places, warning) in zip((first, second), lessons, strict=True):
            end.life.runs_shown[0] |= places
            end.life.warnings[0] = end.life.warnings[0] or warning

    def _lesson(self, life: Life, peer: Life) -> tuple[set[Place], str]:
        """What an honest peer's disk has of a site when they meet, which the site must heed."""
        if peer.is_hostile:
            return set(), ""
        places = set()
        for entry in beginnings(self.folder / peer.home, "others"):
            if entry.name == life.name:
                places.add(place_of(entry))
        folder = start.phase_folder(Path("run"), life.plan.phase)
        enrolled = _read(self.folder / peer.home / folder / "enrolled")
        journal = (_read(self.folder / life.home / folder / "journal") or b"").decode()
        frame = wire.decoded(enrolled) if enrolled else wire.Enrolment(())
        assert isinstance(frame, wire.Enrolment)
        for word in frame.words:
            digest = hashlib.sha256(word.payload).hexdigest()
            if word.sender == life.name and digest not in journal:
                return places, f"{peer.name} has its keys of round {word.round}"
        return places, ""

    def backup(self, home: str, kind: str) -> Path:
        """A copy of what a site has on disk."""
        copied = self.folder.parent / f"{home}.{kind}.{self.chance.random()}"
        (self.folder / home).mkdir(exist_ok=True)
        with self.disk:
            # A status is being written at any time, and no invariant is about it.
            hidden = shutil.ignore_patterns(".*.tmp", "status.json")
            shutil.copytree(self.folder / home, copied, ignore=hidden)
        return copied

    def restore(self, home: str, kind: str, copied: Path | None) -> None:
        """Put a backup back, or an empty ledger, while the site does not run."""
        if home in self.lives:
            self.kill(self.lives[home])
        current = self.folder / home
        for entry in list(current.iterdir()) if current.is_dir() else []:
            is_ledger = entry.name.endswith(".ledger")
            if kind == "whole" or is_ledger == (kind in ("ledger", "empty")):
                self._replace(home, entry, copied)
        # What a run had that the backup has not stays where only a ledger is put back.
        self.restored[home].add(kind)

    def _replace(self, home: str, entry: Path, copied: Path | None) -> None:
        source = copied / entry.name if copied is not None else None
        if (entry / "successor").exists():
            if source is None or not (source / "successor").exists():
                self.forgotten[home].add(int(entry.suffix[1:] or 0))
        shutil.rmtree(entry)
        if source is not None and source.is_dir():
            shutil.copytree(source, entry)

    # What must hold.

    def fault(self, life: Life, text: str) -> None:
        """Note that an invariant does not hold."""
        if not life.is_hostile:
            self.faults.append(f"{life.name} (phase {life.plan.phase + 1}) {text}")

    def note(self, life: Life, frame: wire.Frame) -> None:
        """Look at what an honest site says, as it goes out."""
        base = self.folder / life.home / "run"
        phase = life.plan.phase
        folder = start.phase_folder(base, phase)
        if (folder / "successor").exists():
            self.fault(life, f"says {type(frame).__name__} in a phase that it has ended")
        if isinstance(frame, wire.Greeting):
            self.signed[life.name, phase].add(life.plan.digest)
            self._check_before(life, base)
        elif not isinstance(frame, wire.Presences | wire.Refusal):
            self._check_begun(life, folder, frame)

    def _check_before(self, life: Life, base: Path) -> None:
        """The phases before have ended, on disk."""
        folders = [start.phase_folder(base, number) for number in range(life.plan.phase)]
        for folder in filter(Path.is_dir, folders):
            signed = (_read(folder / "successor") or b"").decode()
            if not signed or folder == folders[-1] and signed != life.plan.digest:
                self.fault(life, f"signs a plan, and {folder.name} has {signed or 'none'} after it")
            if (folder / "secret").exists():
                self.fault(life, f"keeps the secret of {folder.name}")

    def _check_begun(self, life: Life, folder: Path, frame: wire.Frame) -> None:
        """The run has begun with all presences, and is charged."""
        if life.run is None:
            content = _read(folder / "run")
            if content is None:
                self.fault(life, f"says {type(frame).__name__} before the run has begun")
                return
            presences = {entry.name: entry for entry in wire.decoded(content).presences}
            roster = life.plan.roster
            for name in life.plan.names:
                entry = presences.get(name)
                is_signed = entry is not None and roster.verify(
                    name, "presence", entry.content, entry.signature
                )
                if not is_signed or dict(entry.terms)["plan"] != life.plan.digest:
                    self.fault(life, f"has begun a run without {name}")
                    return
            run = wire.run_of(presences, life.plan.digest)
            life.run = (life.plan.digest, presences[life.name].nonce, run), run
        self.begun[life.plan.digest].add(life.name)
        if isinstance(frame, wire.Beginnings):
            own = [entry for entry in frame.beginnings if entry.name == life.name]
            self.signed_runs[life.name] |= {*map(place_of, own)}
        place, run = life.run
        charged = charges(self.folder / life.home)
        if place not in charged:
            self.fault(life, f"says {type(frame).__name__}, and its ledger lacks the run")
        if isinstance(frame, wire.Leave) and frame.name == life.name:
            self.left.add((life.name, run))
        if isinstance(frame, wire.Word) and frame.sender == life.name:
            if isinstance(decoded(frame.payload), MaskedVector):
                has_left = life.name in {name for name, left in self.left if left == run}
                if has_left and not self.restored[life.name] & {"whole", "run"}:
                    self.fault(life, "sends a vector in a run that it has left")
                self._check_vector(life, charged, frame.round, frame.payload)
        if isinstance(frame, wire.Opened):
            number = life.plan.names.index(life.name)
            turn = (frame.round + frame.attempt) % len(life.plan.names)
            # Who left hands on the sum that it opened before.
            if turn == number and number in frame.survivors and frame.round in life.drawn:
                payload = f"own {frame.attempt}".encode()
                self._check_vector(life, charged, frame.round, payload)

    def _check_vector(self, life: Life, charged: set[Place], round: int, payload: bytes) -> None:
        """A vector goes out once, with noise of its own, within the total."""
        name = life.name
        assert life.run is not None
        place, run = life.run
        is_restored = bool(self.restored[name] & {"whole", "run"})
        has_ledger = not self.restored[name] & {"whole", "ledger", "empty"}
        heeded = life.initial | life.runs_shown[2] | {place}
        costs = {plan.digest: plan.guarantee.loss.rho for plan in life.plan.phases}
        foreign = [digest for digest, *_ in heeded if digest not in costs]
        if foreign:
            self.fault(life, "sends a vector with a charged run of unknown cost")
        elif sum(costs[digest] for digest, *_ in heeded) > SPENT:
            self.fault(life, "sends a vector beyond its total")
        if life.runs_shown[2] - charged:
            self.fault(life, "sends a vector, and its ledger lacks a run that a neighbour has")
        if has_ledger and self.out[name] - charged:
            self.fault(life, "sends a vector, and its ledger lacks a run of its own")
        self.out[name].add(place)
        sent = self.vectors[name, run, round]
        sent.add(payload)
        if life.warnings[2]:
            self.fault(life, f"sends a vector of round {round}, though {life.warnings[2]}")
        if len(sent) > 1 and not is_restored:
            self.fault(life, f"sends two vectors of round {round}")
        key, digest = life.drawn[round]
        self.noise[key].add(digest)
        if len(self.noise[key]) > 1 and not is_restored:
            self.fault(life, f"adds one noise to two vectors of round {round}")

    def absence(self, life: Life) -> str | None:
        """For whom a site waits who is not there; None where all are, or it waits for nobody."""
        with self.guard:
            # One that spoils each attempt stops a run, as by silence.
            for other in self.lives.values():
                if other.is_hostile and other.name in life.plan.names and life.run:
                    return other.name
            line = next((line for line in self.lines if line.life is life), None)
            for name in re.findall(r"site-\d\d", "; ".join(life.missing())):
                other = line.sessions.get(name) if line is not None else None
                if other is None or other.life.is_hostile:
                    return name
        return None

    def check(self) -> None:
        """Look at what must hold at the end."""
        for (name, phase), plans in self.signed.items():
            if len(plans) > 1 and phase - 1 not in self.forgotten[name]:
                self.faults.append(f"{name} has signed {len(plans)} plans of phase {phase + 1}")
        hostile = {life.name for life in self.ended if life.is_hostile}
        plans = {plan.digest: plan for plan in self.stage.plans.values()}
        for first, second in ((a, b) for a in self.begun for b in self.begun if a < b):
            plan = plans[first]
            rival = plans[second]
            if plan.before is None or plan.before is not rival.before:
                continue
            shared = plan.standings.keys() & rival.standings.keys() - hostile
            if any(plan.phase - 1 not in self.forgotten[name] for name in shared):
                self.faults.append(f"two plans after phase {plan.phase} have begun")
        for life in self.ended:
            places = {*map(place_of, beginnings(self.folder / life.home, "shown"))}
            if not life.is_hostile and places - self.signed_runs[life.name]:
                self.fault(life, "has charged a run that it has not begun")
            if life.end == "broken" or life.error and not REMEDIES.search(life.error):
                self.fault(life, f"ends by {life.error}")


def charges(home: Path) -> set[Place]:
    """The runs of a site's ledger, as its files have them."""
    return {*map(place_of, beginnings(home, "charges", "shown"))}


def place_of(beginning: wire.Beginning) -> Place:
    """A run, by its plan, the site's nonce in it, and its name."""
    return beginning.plan, beginning.nonce, beginning.run


def beginnings(home: Path, *files: str) -> Iterator[wire.Beginning]:
    """The lines of some of a ledger's files."""
    for file in files:
        for path in home.glob(f"*.ledger/{file}"):
            for line in (_read(path) or b"").split(b"\n")[:-1]:
                with contextlib.suppress(ValueError):
                    frame = wire.decoded(base64.b64decode(json.loads(line)["beginning"]))
                    yield from frame.beginnings


def _read(path: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        return path.read_bytes()
    return None
