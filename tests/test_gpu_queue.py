"""The GPU queue: every command is one that runs, and scripts/gpu takes what fits and goes on."""

import functools
import importlib
import tarfile
from pathlib import Path

import pytest

import _timing
from _common import launch
from _runs import QUEUE, TINY, Run
from dpjax.results import records
from tests.support import ROOT, load_script

EXPERIMENTS = sorted({run.script for run in QUEUE if run.words[0].startswith("experiments/")})
BENCHMARKS = sorted({run.script for run in QUEUE if run.script.startswith("bench_")})
DEVICE = {
    "device": {"kind": "NVIDIA H100 80GB", "count": 1}, "platform": {"backend": "gpu"},
    "commit": "0123456789abcdef", "dirty": False, "date": "2026-01-02T03:04:05Z",
}  # fmt: skip


class Parsed(Exception):
    """Options are fine."""


@pytest.fixture(scope="module")
def gpu():
    return load_script("gpu", "scripts")


def lines_of(script):
    """Every command of a script, and the same at a hundredth of its size."""
    for run in QUEUE:
        if run.script == script:
            yield run.words[1:]
            yield [*run.words[1:], *TINY[script].split()]


def test_queue_has_fourteen_entries_of_at_most_nine_minutes() -> None:
    assert sorted({run.entry for run in QUEUE}) == list(range(14))
    assert [run.entry for run in QUEUE] == sorted(run.entry for run in QUEUE)
    commands = {(run.command, run.flags) for run in QUEUE}
    assert len({run.name for run in QUEUE}) == len(commands) == len(QUEUE)
    assert all(0 < run.minutes <= 9 for run in QUEUE)
    assert {run.script for run in QUEUE} == TINY.keys() == {*EXPERIMENTS, *BENCHMARKS, "pytest"}
    for run in QUEUE:
        assert run.script == "pytest" or (ROOT / run.words[0]).is_file(), run.name


@pytest.mark.parametrize("script", EXPERIMENTS)
def test_every_command_of_experiment_makes_its_config(script: str, tmp_path: Path) -> None:
    module = load_script(script)
    name, presets, experiment = module.main.args
    configs = []

    @functools.wraps(experiment)
    def keep(config, lab):
        configs.append((config, lab))

    for words in lines_of(script):
        # An option that a preset has already would hide a wrong name of one.
        assert words[words.index("--preset") + 1] in presets
        assert launch.main(name, presets, keep, [*words, "--output", str(tmp_path)]) == 0, words
    for (config, lab), (tiny, _) in zip(configs[::2], configs[1::2], strict=True):
        # Figures of its own, and another size alone.
        assert lab.suffix == f"_{lab.preset}"
        same = ("dataset", "model", "filter", "rivals", "study", "optimizers", "models", "parts")
        for field in same:
            assert getattr(config, field, None) == getattr(tiny, field, None)
        assert config != tiny


@pytest.mark.parametrize("script", BENCHMARKS)
def test_every_command_of_benchmark_has_its_options(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = _timing.Bench.parse

    def parsed(bench, argv=None):
        parse(bench, argv)
        raise Parsed

    monkeypatch.setattr(_timing.Bench, "parse", parsed)
    module = importlib.import_module(script)
    for words in lines_of(script):
        with pytest.raises(Parsed):
            module.main(words)


GOOD = """
import pathlib, sys
from dpjax.results import records
folder = pathlib.Path(sys.argv[sys.argv.index("--output") + 1]) / "good" / "paper"
if not (folder / "cell.jsonl").exists():
    records.write(folder / "cell.jsonl", [{"loss": 0.5}], {"command": "python good.py"})
(folder / "good_paper.svg").write_text("a figure")
"""
SLOW = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--output") + 1]) / "checkpoints"
folder.mkdir(parents=True, exist_ok=True)
(folder / "state").write_text("half")
time.sleep(600)
"""
BENCH = """
import sys
from dpjax.results import records
records.write(sys.argv[-1], [{"seconds": 0.5}], {"command": "python bench_one.py"})
"""
BAD = "raise SystemExit('no such option')"
FAKE = {"good": GOOD, "slow": SLOW, "bad": BAD, "empty": "", "bench_one": BENCH}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu) -> Path:
    """A checkout with an empty page, whose queue has fake commands, on a machine with a GPU."""
    for folder in ("experiments", "benchmarks/records", "docs/records", "out"):
        (tmp_path / folder).mkdir(parents=True)
    for name, text in FAKE.items():
        position = "benchmarks" if name.startswith("bench") else "experiments"
        (tmp_path / position / f"{name}.py").write_text(text)
    (tmp_path / "docs" / "records" / "gpu.md").write_text("| entry | run | state |\n")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "about", lambda: DEVICE)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return tmp_path


def fake(entry: int, name: str, minutes: float) -> Run:
    folder = "benchmarks" if name.startswith("bench") else "experiments"
    return Run(entry, f"{name}_{entry}", "something", minutes, f"{folder}/{name}.py --preset paper")


def test_first_run_that_fits_is_next(gpu) -> None:
    runs = [fake(1, "good", 9), fake(2, "good", 5), fake(3, "good", 2), fake(4, "good", 1)]
    assert gpu.next_run(runs, 600) == runs[0]
    assert gpu.next_run(runs, 539.9) == runs[1]
    assert gpu.next_run(runs[2:], 300) == runs[2]
    assert gpu.next_run(runs, 59) is None


def test_runs_that_fit_are_taken_despite_failures(
    checkout: Path, gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    queue = [fake(1, "bad", 1), fake(2, "good", 9), fake(3, "good", 1), fake(4, "bench_one", 2)]
    queue.append(fake(5, "empty", 1))
    monkeypatch.setattr(gpu, "QUEUE", queue)
    assert gpu.main(["300"]) == 1
    output = capsys.readouterr().out
    assert "bad_1" in output and "failed" in output and "no such option" in output
    assert output.splitlines()[-1] == "next: good_2, 9 minutes"
    # What leaves no record is not done.
    assert "empty_5" in output and output.count("failed after") == 2
    # A line of date, device, commit and seconds for each that is done.
    page = (checkout / "docs" / "records" / "gpu.md").read_text().splitlines()
    assert len(page) == 3
    for line, (entry, name) in zip(page[1:], ((3, "good_3"), (4, "bench_one_4")), strict=True):
        words = f"| {entry} | {name} | done | 2026-01-02 | NVIDIA H100 80GB | 0123456789 | "
        assert line.startswith(words) and line.removeprefix(words).removesuffix(" |").isdigit()
    stored = checkout / "docs" / "records" / "good_3.jsonl.gz"
    assert records.read(stored)["loss"].tolist() == [0.5]
    timed = checkout / "benchmarks" / "records" / "bench_one_4@nvidia-h100-80gb.jsonl"
    assert records.read(timed)["seconds"].tolist() == [0.5]
    with tarfile.open(checkout / "out" / "gpu.tar.gz") as archive:
        names = archive.getnames()
    figure = "results/gpu/good_3/good/paper/good_paper.svg"
    assert {"docs/records/gpu.md", "docs/records/good_3.jsonl.gz", figure} <= set(names)
    assert (checkout / "out" / "gpu.md").read_text().splitlines() == page
    # What is done is not run again, whether its line or its records say so.
    (checkout / "docs" / "records" / "good_2.jsonl.gz").touch()
    for name in ("bad", "empty"):
        (checkout / "experiments" / f"{name}.py").write_text(GOOD)
    assert gpu.main(["300"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in output] == [["bad_1", "done"], ["empty_5", "done"]]


@pytest.mark.slow
def test_run_that_time_ends_leaves_its_checkpoint(
    checkout: Path, gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu, "QUEUE", [fake(1, "slow", 0.01), fake(2, "good", 1)])
    monkeypatch.setattr(gpu, "GRACE", 2.0)
    monkeypatch.setattr(gpu, "PACKING", 1.0)
    assert gpu.main(["8"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert "slow_1" in text[0] and "stopped after" in text[0]
    assert text[1] == "next: good_2, 1 minutes"
    assert "done" not in (checkout / "docs" / "records" / "gpu.md").read_text()
    with tarfile.open(checkout / "out" / "checkpoints.tar.gz") as archive:
        assert archive.getnames() == ["results/gpu/slow_1/checkpoints/state"]


def test_without_gpu_nothing_is_run(
    checkout: Path, gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu, "about", lambda: DEVICE | {"platform": {"backend": "cpu"}})
    assert gpu.main(["300"]) == 2
    assert "sees no GPU: install" in capsys.readouterr().err
    for words, match in (([], "SECONDS is missing"), (["--rehearse", "gone"], "NAME is 'gone'")):
        with pytest.raises(SystemExit):
            gpu.main(words)
        assert match in capsys.readouterr().err
    monkeypatch.setattr(gpu, "NEEDED", ("tyro", "no_such_library"))
    with pytest.raises(SystemExit):
        gpu.main(["300"])
    assert "no_such_library not installed; put" in capsys.readouterr().err
    assert not (checkout / "results").exists()


def test_committed_page_lists_runs_of_queue(gpu, capsys: pytest.CaptureFixture) -> None:
    text = gpu.page().read_text() if gpu.page().exists() else ""  # copies with faults lack it
    lines = [line.split(" | ") for line in text.splitlines() if " | done | " in line]
    assert {name for _, name, *_ in lines} <= {run.name for run in QUEUE}
    assert gpu.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(QUEUE)


def test_committed_page_lists_every_record_of_gpu(gpu) -> None:
    if gpu.page().exists():  # copies with faults lack it
        assert "\n".join(gpu.recorded()) in gpu.page().read_text(), "run scripts/gpu --page"
        # Of the archive's two files together.
        archive = "cifar_doppler_long_paper.jsonl.gz | long_paper"
        assert f"| {archive} | NVIDIA H200 | 0.11.2 | 56ba2db489 | 530 |" in gpu.recorded()


def test_page_has_new_records(checkout: Path, gpu) -> None:
    page = checkout / "docs" / "records" / "gpu.md"
    page.write_text(f"{gpu.BEGIN}\nold\n{gpu.END}\n| entry |\n")
    records.write(
        checkout / "docs" / "records" / "a.jsonl.gz",
        [{"loss": 1.0}],
        DEVICE | {"preset": "tiny", "versions": {"jax": "0.12"}},
    )
    assert gpu.main(["--page"]) == 0
    row = "| a.jsonl.gz | tiny | NVIDIA H100 80GB | 0.12 | 0123456789 |  |"
    assert row in page.read_text() and "old" not in page.read_text()
    assert page.read_text().endswith("| entry |\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", [run.name for run in QUEUE])
def test_every_run_is_rehearsed(name: str, gpu, capsys: pytest.CaptureFixture) -> None:
    code = gpu.main(["--rehearse", name])
    assert code == 0, capsys.readouterr().out
