"""Plans of later phases under partitions, kills, restored backups and hostile sites.

``python -m tests.sites.test_phase_attacks FIRST LAST`` runs trials of more numbers than the suite.
"""

import base64
import collections
import contextlib
import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from dpjax import _files
from dpjax.sites import start, wire
from dpjax.sites.ledger import beginning_of
from dpjax.sites.project import follow
from tests.sites.phase_world import LIMIT, PLANS, Life, Stage, Trial
from tests.sites.test_peer_attacks import mangled
from tests.sites.test_phases import FEWER

Attack: TypeAlias = Callable[[Trial, Life, str, wire.Frame], list[wire.Frame]]
# Plans that two coordinators make; some alone.
PAIRS = (
    *(("left.json", "right.json"), ("left.json", "all.json"), ("right.json", "four.json")),
    *(("left.json", "other.json"), ("all.json", "cheap.json"), ("joined.json", "four.json")),
    *(("small.json", "left.json"), ("joined.json", "cheap.json"), ("left.json",), ("all.json",)),
    *(("cheap.json",), ("joined.json",), ("four.json",)),
)
STEPS = 40
STEP = 0.025
# Writes at which a process may end, in the order of a phase.
FILES = (
    "successor",
    "nonce",
    "secret",
    "records",
    "charges",
    "run",
    "others",
    "audit",
    "journal",
    "enrolled",
)
LATER_FILES = ("sums/", "state", "states/", "left-", "exchange", "leaving")


# What a hostile site says.


def replays(trial: Trial, life: Life, peer: str, frame: wire.Frame) -> list[wire.Frame]:
    """Anything that anybody said before, in any phase, run or plan."""
    if isinstance(frame, wire.Greeting) or trial.chance.random() < 0.6:
        return [frame]
    return [frame, *trial.chance.choices(trial.heard, k=2)]


def departures(trial: Trial, life: Life, peer: str, frame: wire.Frame) -> list[wire.Frame]:
    """That others leave, by its own signature or none; that it leaves itself, and goes on."""
    if isinstance(frame, wire.Greeting | wire.Presences) or trial.chance.random() < 0.7:
        return [frame]
    assert life.site is not None
    content = wire.leave_content(life.site._conversation.run, life.plan.phase, 1)
    signature = life.site._identity.sign("leave", content)
    name = trial.chance.choice(life.plan.names)
    return [frame, wire.Leave(name, 1, trial.chance.choice((signature, b"")))]


def false_charges(trial: Trial, life: Life, peer: str, frame: wire.Frame) -> list[wire.Frame]:
    """Charges of others, of old runs, or none."""
    if not isinstance(frame, wire.Greeting):
        return [frame]
    charges: list[wire.Beginning] = []
    for earlier in trial.chance.sample(trial.heard, min(60, len(trial.heard))):
        if isinstance(earlier, wire.Beginnings):
            charges += earlier.beginnings
        elif isinstance(earlier, wire.Presences):
            # Of a run that may never begin.
            presences = {entry.name: entry for entry in earlier.presences}
            charges += [beginning_of(presences, name) for name in presences]
    charges = trial.chance.sample(charges, min(len(charges), trial.chance.randrange(4)))
    return [frame._replace(charges=tuple(charges))]


def two_faces(trial: Trial, life: Life, peer: str, frame: wire.Frame) -> list[wire.Frame]:
    """Some hear of another nonce."""
    if peer > "site-02":
        return [frame]

    def other(presence: wire.Presence) -> wire.Presence:
        if presence.name != life.name or life.site is None:
            return presence
        terms = dict(presence.terms)
        return wire.signed_presence(life.site._identity, bytes([7] * 32), terms)

    if isinstance(frame, wire.Greeting):
        return [frame._replace(presence=other(frame.presence))]
    if isinstance(frame, wire.Presences):
        return [wire.Presences(tuple(map(other, frame.presences)))]
    return [frame]


def other_plans(trial: Trial, life: Life, peer: str, frame: wire.Frame) -> list[wire.Frame]:
    """Presences of another plan stand among those of this one."""
    if not isinstance(frame, wire.Presences):
        return [frame]
    frames = [entry for entry in trial.heard if isinstance(entry, wire.Presences)]
    strangers = trial.chance.choice(frames).presences if frames else ()
    return [trial.chance.choice((frame, wire.Presences((*frame.presences, *strangers))))]


def silence(trial: Trial, life: Life, peer: str, frame: wire.Frame) -> list[wire.Frame]:
    """Some words are lost."""
    is_lost = not isinstance(frame, wire.Greeting) and trial.chance.random() < 0.15
    return [] if is_lost else [frame]


def changed_fields(trial: Trial, life: Life, peer: str, frame: wire.Frame) -> list[wire.Frame]:
    """Any part of a frame is another one."""
    return [mangled(trial, trial.chance, frame) if trial.chance.random() < 0.15 else frame]


ATTACKS: tuple[Attack, ...] = (
    *(replays, departures, false_charges, two_faces, other_plans, silence, changed_fields),
)


def forged(stage: Stage, folder: Path, chance: random.Random) -> list[str]:
    """Standings that a coordinator must refuse; what is wrong with those that made a plan."""
    text, arrays = _files.unpacked(stage.standings[0])
    standing = wire.decoded(base64.b64decode(text))
    assert isinstance(standing, wire.Standing)
    changes: dict[str, dict[str, object]] = {
        "of a minority": {},
        "of other models": {"rounds": ((2, bytes(32)),)},
        "of another run": {"run": bytes(32)},
        "of another plan": {"plan": "0" * 64},
        "of another site": {"name": "site-03"},
        "of no site before": {"name": "site-06"},
    }
    kind = chance.choice(list(changes))
    bare = standing._replace(**changes[kind])
    signature = stage.sites.identity(0).sign("standing", bare.content)
    content = base64.b64encode(wire.encoded(bare._replace(signature=signature))).decode()
    path = folder / "forged.standing"
    _files.create(path, _files.packed(content, arrays))
    others = stage.standings[1 : 2 if kind == "of a minority" else 3]
    plan = stage.sites.folder / "plan.json"
    target = stage.sites.folder / "forged.json"
    with contextlib.suppress(ValueError):
        follow(plan, [path, *others], target, changes=FEWER)
        target.unlink()
        target.with_suffix(".npz").unlink()
        return [f"a plan follows from a standing {kind}"]
    return []


class Script:
    """What happens in a trial, chosen before by chance; when sites come to it is theirs."""

    def __init__(self, trial: Trial, chance: random.Random, files: tuple[str, ...]) -> None:
        self.trial = trial
        self.chance = chance
        self.actions: dict[int, list[Callable[[], object]]] = collections.defaultdict(list)
        plans = [trial.stage.plans[file] for file in files]
        names = sorted({name for plan in plans for name in plan.names})
        self.hostile = chance.choice(names) if chance.random() < 0.5 else ""
        self.attacks = chance.sample(ATTACKS, chance.randrange(1, 3))
        self.gone = {name for name in names if chance.random() < 0.03}
        # Most sites get the plan of one side; some get both.
        favourite = files[0] if chance.random() < 0.8 else ""
        trial.attack = self._attacked
        for name in names:
            choices = [f for f, plan in zip(files, plans, strict=True) if name in plan.names]
            if favourite not in choices or chance.random() < 0.1:
                chance.shuffle(choices)
            route = choices if chance.random() < 0.2 else choices[:1]
            if chance.random() < 0.1 and name in trial.stage.plans["plan.json"].names:
                route = ["plan.json", *route]
            self._plan_site(name, route)
        if self.hostile and chance.random() < 0.5 and len(files) > 1:
            self._at(chance.randrange(6), lambda: self._twin(files[1]))
        for _ in range(chance.randrange(3)):
            pair = frozenset(chance.sample(names, 2))
            self._at(chance.randrange(STEPS), lambda pair=pair: trial.cut.add(pair))
            healed = chance.randrange(STEPS) if chance.random() < 0.85 else 2 * STEPS
            self._at(healed, lambda pair=pair: trial.cut.discard(pair))

    def _at(self, step: int, action: Callable[[], object]) -> None:
        self.actions[step].append(action)

    def _attacked(self, life: Life, peer: str, frame: wire.Frame) -> list[wire.Frame]:
        frames = [frame]
        for attack in self.attacks:
            frames = [new for old in frames for new in attack(self.trial, life, peer, old)]
        return frames

    def _plan_site(self, name: str, route: list[str]) -> None:
        """When a site starts, dies, is restored and leaves."""
        chance = self.chance
        if name in self.gone:
            if chance.random() < 0.5:
                # It signs, and never comes again.
                self._at(0, lambda: self._start(name, route[0]))
                self._at(chance.randrange(STEPS), lambda: self._kill(name))
            return
        step = chance.randrange(5)
        for number, file in enumerate(route):
            self._at(step, lambda file=file, number=number: self._start(name, file, number))
            step += chance.randrange(1, STEPS // 3)
        if name == self.hostile:
            return
        for _ in range(chance.choice((0, 0, 0, 1, 2))):
            moment = chance.randrange(2, STEPS)
            self._at(moment, lambda: self._kill(name))
            file = chance.choice(route)
            self._at(moment + chance.randrange(5), lambda file=file: self._start(name, file))
        if chance.random() < 0.25:
            self._restore_later(name, chance.choice(route))
        if chance.random() < 0.12:
            self._at(chance.randrange(4, STEPS), lambda: self._leave(name))

    def _restore_later(self, name: str, file: str) -> None:
        chance = self.chance
        kind = chance.choice(("whole", "whole", "run", "run", "ledger", *3 * ("empty",)))
        copies: list[Path] = []
        first = chance.randrange(STEPS // 2)
        last = first + chance.randrange(1, STEPS // 2)
        self._at(first, lambda: copies.append(self.trial.backup(name, kind)))

        def put_back() -> None:
            self.trial.restore(name, kind, None if kind == "empty" else copies[0])
            self._start(name, file)

        self._at(last, put_back)

    # Actions.

    def _start(self, name: str, file: str, number: int = 0) -> None:
        life = self.trial.lives.get(name)
        if life is not None and not life.end and number == 0:
            return
        (self.trial.folder / name).mkdir(exist_ok=True)
        doom = None
        if name != self.hostile and self.chance.random() < 0.3:
            files = FILES if self.chance.random() < 0.7 else LATER_FILES
            moment = self.chance.choice(("before", "after", "half"))
            doom = self.chance.choice(files), self.chance.choice((1, 1, 2, 3)), moment
        self.trial.begin(name, file, hostile=name == self.hostile, doom=doom)

    def _kill(self, name: str) -> None:
        if name in self.trial.lives:
            self.trial.kill(self.trial.lives[name])

    def _twin(self, file: str) -> None:
        """A hostile site runs a second folder, in which it has signed nothing."""
        home = f"{self.hostile}.twin"
        if self.hostile in self.trial.stage.plans[file].names:
            first = self.trial.stage.sites.folder / self.hostile
            if first.is_dir():
                shutil.copytree(first, self.trial.folder / home)
            (self.trial.folder / home).mkdir(exist_ok=True)
            self.trial.begin(self.hostile, file, home=home, hostile=True)

    def _leave(self, name: str) -> None:
        life = self.trial.lives.get(name)
        if life is not None:
            base = self.trial.folder / name / "run"
            folder = start.phase_folder(base, life.plan.phase)
            if (folder / "run").exists():
                (folder / "leaving").write_bytes(b"")

    # The trial.

    def run(self) -> None:
        """All actions, then the end."""
        for step in range(2 * STEPS):
            for action in self.actions.pop(step, []):
                action()
            self.trial.dial()
            if self.actions or step < STEPS // 2:
                self.restart(0.15)
                time.sleep(STEP)
        self.go_on()
        self.finish()

    def restart(self, share: float) -> None:
        """Start again some of those that died by a write."""
        for life in list(self.trial.lives.values()):
            if life.end == "killed" and self.chance.random() < share:
                plans = self.trial.stage.plans.items()
                self._start(life.name, next(file for file, plan in plans if plan is life.plan))

    def go_on(self) -> None:
        """Start again who was killed, but for some; and some in a third phase."""
        trial = self.trial
        self.restart(0.8)
        later = [file for file in trial.stage.plans if PLANS.get(file, ("",))[0] != "plan.json"]
        later = [file for file in later if file in PLANS]
        if not later or self.chance.random() < 0.3:
            return
        # Who is done may go on; a coordinator may make two plans again.
        self.finish()
        for life in list(trial.lives.values()):
            files = [file for file in later if trial.stage.plans[file].before is life.plan]
            files = [file for file in files if life.name in trial.stage.plans[file].names]
            if files and life.home == life.name:
                if life.name != self.hostile and self.chance.random() < 0.3:
                    trial.restore(life.name, "empty", None)
                self._start(life.name, self.chance.choice(files), 1)

    def finish(self) -> None:
        """Wait until all have ended, or wait for somebody who is not there."""
        began = time.monotonic()
        since = began
        while time.monotonic() < began + LIMIT:
            self.trial.dial()
            living = [life for life in self.trial.lives.values() if not life.end]
            honest = [life for life in living if not life.is_hostile]
            if not honest:
                return
            if not all(map(self.trial.absence, honest)):
                since = time.monotonic()
            # In a run that has begun the others are gone after a while.
            patience = 1.3 if any(life.run for life in honest) else 0.3
            if time.monotonic() > since + patience:
                return
            time.sleep(STEP)
        for life in honest:
            if not self.trial.absence(life):
                self.trial.fault(life, f"hangs: it waits for {life.missing()}")


def replanned(folder: Path, stage: Stage, number: int) -> Trial:
    """A trial: two coordinators, or one, after the first phase, and what may befall sites."""
    chance = random.Random(number)
    files = chance.choice(PAIRS)
    if chance.random() < 0.3:
        files = files[::-1]
    later = [file for file, (before, *_) in PLANS.items() if before in files]
    needed = {"plan.json", *files, *(later if chance.random() < 0.5 else [])}
    for file in sorted(needed - {"plan.json"}):
        stage.plan(file)
    everything = stage.plans
    stage.plans = {file: plan for file, plan in everything.items() if file in needed}
    trial = Trial(stage, folder, number)
    try:
        Script(trial, chance, files).run()
        if chance.random() < 0.3:
            trial.faults += forged(stage, folder, chance)
    finally:
        trial.waiting = [life for life in trial.lives.values() if not life.end]
        for life in list(trial.lives.values()):
            trial.kill(life)
        trial.check()
        stage.trial = None
        stage.plans = everything
    return trial


def outcomes(trial: Trial) -> set[str]:
    """What happened to honest sites in a trial."""
    ends = {life.end for life in trial.ended if not life.is_hostile}
    ends |= {"begun"} if trial.begun.keys() - {trial.stage.plans["plan.json"].digest} else set()
    ends |= {"waited"} if any(not life.is_hostile for life in trial.waiting) else set()
    ends |= {"restored"} if any(trial.restored.values()) else set()
    ends |= {"hostile"} if any(life.is_hostile for life in trial.ended) else set()
    return ends


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    world = Stage(tmp_path_factory.mktemp("stage"))
    yield world
    world.close()


# Of two plans: each more takes seconds to make.
@pytest.mark.parametrize("number", [2, 17, 29])
def test_replanning(tmp_path: Path, stage: Stage, number: int) -> None:
    assert replanned(tmp_path, stage, number).faults == []


if __name__ == "__main__":
    logging.disable()
    counts: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place, contextlib.closing(Stage(Path(place))) as world:
        for number in range(int(sys.argv[1]), int(sys.argv[2])):
            folder = Path(place) / str(number)
            folder.mkdir()
            trial = replanned(folder, world, number)
            shutil.rmtree(folder)
            counts.update(["trials", *outcomes(trial), *(["faulty"] if trial.faults else [])])
            for fault in trial.faults:
                print(f"trial {number}: {fault}", flush=True)
            if number % 20 == 19:
                seconds = time.monotonic() - began
                print(f"after {seconds:.0f} s: {dict(sorted(counts.items()))}", flush=True)
    print(f"all: {dict(sorted(counts.items()))}")
