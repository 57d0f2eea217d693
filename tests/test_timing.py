"""What benchmarks share: times, a command line and a record."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from _timing import Bench, Timing, forget_peak, peak, timed, turns
from dpjax.results import records

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
OWN_CLOCK = re.compile(r"perf_counter|getrusage|ArgumentParser|getloadavg|records\.write")


def test_calls_take_turns_and_first_is_told_apart() -> None:
    order = []
    calls = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    result = turns(calls, 2, clock=float)
    assert order == ["a", "b"] * 3
    assert result["a"] == Timing(5, 1.0, (3.0, 5.0)) and result["b"] == Timing(6, 2.0, (4.0, 6.0))
    assert (result["a"].median, result["a"].least) == (4.0, 3.0)


def test_call_that_is_not_repeated_counts_itself() -> None:
    timing = timed(lambda: 7, 0)
    assert timing.result == 7 and timing.median == timing.least == timing.first > 0


def test_peak_memory_is_in_bytes() -> None:
    # Python with JAX takes tens of megabytes at the least.
    assert 2**25 < peak() < 2**40


SCRIPT = f"""
import json, sys
if "fails" in sys.argv:
    raise SystemExit("no such graph")
sys.path.insert(0, {str(BENCHMARKS)!r})
from _timing import Bench
bench = Bench(__file__, None)
options = bench.parse(sys.argv[1:])
print(json.dumps({{"words": options.one, "repeats": options.repeats}}))
"""


def test_rows_and_record(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "bench_some.py"
    script.write_text(SCRIPT)
    output = tmp_path / "some.jsonl"
    bench = Bench(str(script), None)
    options = bench.parse(["--output", str(output)])
    assert options.repeats == 3
    bench.row(algorithm="ours", seconds=0.12345)
    bench.in_own_process("a b", 3, repeats=1)
    bench.in_own_process("fails", repeats=1)
    assert bench.finish() == 1
    printed = capsys.readouterr()
    assert "algorithm ours  seconds 0.123" in printed.out
    assert printed.err == "failed: fails: no such graph\n"
    frame = records.read(output)
    assert list(frame["experiment"]) == ["bench_some"] * 2 and frame["repeats"][1] == 1
    about = records.read_metadata(output)
    assert about["command"] == "python benchmarks/bench_some.py"
    assert len(about["load_average"]) == 2 and "jax_privacy" in about["versions"]
    assert about["machine"]["processor"] and about["machine"]["memory_gib"] > 0
    assert json.dumps(about["platform"])
    with pytest.raises(SystemExit):
        bench.parse(["--output", str(output)])


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_benchmarks_have_no_clock_of_their_own(path: Path) -> None:
    assert not OWN_CLOCK.search(path.read_text())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone forgets")
def test_peak_that_is_forgotten_hides_no_later_one() -> None:
    held = np.ones(20_000_000)
    before = peak()
    del held
    begun = forget_peak()
    assert begun < before - 100e6
    held = np.ones(10_000_000)
    assert 60e6 < peak() - begun < 120e6 and held.size
