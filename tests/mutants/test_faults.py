"""Each written fault is still in one place of the package, so that it can be put there."""

import runpy
from pathlib import Path


def test_faults_are_in_one_place_each() -> None:
    run = runpy.run_path(str(Path(__file__).with_name("run.py")))
    # Ends by naming those that are not.
    assert len(run["written"]()) > 400
