"""Sums among sites as processes over TLS: kills of sites and of their relay at random moments."""

import random
import re
import signal
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dpjax.sites import wire
from tests.sites.test_hospitals import example

__all__ = ["example"]

SITES = 6
ROUNDS = 40
KILLS = 20
WAITS = "\n[waits]\nenrol = 20.0\nstage = 10.0\nlate = 5.0\nlinger = 30.0\n"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_twenty_kills(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    study_of = example.study_of

    def study(*arguments: object) -> str:
        return re.sub("rounds = .*", f"rounds = {ROUNDS}\nspoiled = {ROUNDS}", study_of(*arguments))

    monkeypatch.setattr(example, "study_of", study)
    hospitals = example.hospitals_of(tmp_path, SITES, False)
    names = [hospital.name for hospital in hospitals]
    (tmp_path / "hub").mkdir()
    hub = example.Hospital(tmp_path, "hub", None, command=("relay", "relay.toml"))
    example.prepare(tmp_path, hospitals, example.edges_of(names, True), hub)
    for hospital in hospitals:
        with open(hospital.folder / "site.toml", "a") as file:
            file.write(WAITS)
    chance = random.Random(seed)
    killed = 0
    for party in (hub, *hospitals):
        party.start()
    try:
        example.wait_for(hospitals, lambda: len(hospitals[0].events("opened")) > 0)
        while killed < KILLS:
            time.sleep(chance.uniform(0.1, 1.5))
            victim = chance.choice((hub, *hospitals))
            if victim.process.poll() is None:
                victim.process.send_signal(signal.SIGKILL)
                victim.process.wait()
                killed += 1
                time.sleep(chance.uniform(0.0, 1.0))
                victim.start()
        # Who was done, and then killed, says so again.
        running = [hospital.process for hospital in hospitals]
        example.wait_for(hospitals, lambda: all(entry.poll() is not None for entry in running))
    finally:
        for party in (hub, *hospitals):
            party.process.kill()
            party.process.wait()
    for round in range(ROUNDS):
        outcomes = set()
        for hospital in hospitals:
            frame = wire.decoded((hospital.run / "sums" / str(round)).read_bytes())
            opened = isinstance(frame, wire.Opened)
            outcomes.add(frame[:-1] if opened else "void")
        assert len(outcomes) == 1
    models = set()
    for hospital in hospitals:
        assert hospital.process.returncode == 0
        sent = hospital.events("sent")
        assert len(sent) == len(set(sent))
        notes = (hospital.run / "journal").read_text().splitlines()
        masked = [note.split()[1] for note in notes if note.startswith("masked")]
        assert len(masked) == len(set(masked))
        assert "Traceback" not in (hospital.folder / "log.txt").read_text()
        with np.load(hospital.run / "model.npz") as file:
            leaves = [file[name].tobytes() for name in sorted(file.files) if name.startswith("[")]
        models.add(b"".join(leaves))
    assert len(models) == 1
