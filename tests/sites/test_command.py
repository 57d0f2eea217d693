"""The commands of sites: a status of a site that has stopped, and what it takes to ask."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpjax.sites.command import status_command


@pytest.mark.parametrize(
    ("doing", "age", "code"),
    [
        ("waits for the message of lyon", 1.0, 0),
        ("waits for the message of lyon", 200.0, 1),
        ("is done", 200.0, 0),
    ],
)
def test_status_of_site_that_stopped_is_no_success(
    doing: str, age: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    status = {"name": "turin", "doing": doing, "round": 3, "rounds": 5, "sent": 4, "peers": {}}
    status |= {"caption": "sites", "time": time.time() - age}
    (tmp_path / "status.json").write_text(json.dumps(status))
    (tmp_path / "audit.jsonl").write_text('{"event": "begun", "before": ""}\n')
    assert status_command(tmp_path) == code
    printed = capsys.readouterr().out
    assert f"turin: {doing}, round 3 of 5" in printed and "audit: 1 line" in printed
    assert ("has stopped" in printed) == bool(code)
    # A round of theirs takes longer.
    assert status_command(tmp_path, stale=300.0) == 0


def test_health_check_loads_no_jax(tmp_path: Path) -> None:
    program = "import sys; from dpjax.sites import command; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path).returncode == 0
