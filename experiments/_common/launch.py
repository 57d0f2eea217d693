"""What every experiment's command line shares: presets, options, cells, records, resume.

An experiment is a script with a frozen config, named presets of it, and a function of
``(config, lab)``. It splits its work into cells; a cell's rows become one immutable record file,
and a cell whose file exists is read instead of run, so a stopped experiment carries on where it
was, inside the cell from its checkpoint. Processes with one output share its cells.
"""

import dataclasses
import functools
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from _common import tune
from dpjax import _files, _validate, _workers, cli
from dpjax.engine.estimate import estimate
from dpjax.engine.run import Result, run
from dpjax.engine.state import RunSchedule
from dpjax.plans.statements import HopelessWarning
from dpjax.results import plots, records

if TYPE_CHECKING:
    import pandas

__all__ = ["Lab", "Options", "check", "file_name", "main", "on_graphs", "stored"]


@dataclass(frozen=True)
class Options:
    """Options of every experiment.

    Attributes:
        output: Folder for records, figures and checkpoints; a folder of the experiment's and the
            preset's name is made inside.
        checkpoint: Folder for the checkpoints of unfinished cells; by default inside the output.
        resume: Read finished cells and carry on with unfinished ones. With --no-resume existing
            records are an error, since records are never overwritten.
        devices: Spread the agents over this many devices.
        quiet: Show no progress bars.
        parallel: Run cells in so many processes at once, or in cluster jobs: the path of a YAML
            file of ``workers`` (how many) and parameters of submitit.
        estimate: Print memory and time of every run in place of running it; nothing is written.
            Cells without runs, such as designs, are computed.
        other_seeds: Added to the seeds of all runs, reported and tuning ones: the same experiment
            on other draws.
    """

    output: Path = Path("results")
    checkpoint: Path | None = None
    resume: bool = True
    devices: int = 1
    quiet: bool = False
    parallel: int | Path = 1
    estimate: bool = False
    other_seeds: int = 0


def check(
    config: Any,
    minimum: Mapping[str, int] | None = None,
    *,
    known: Mapping[str, Collection[str]] | None = None,
    empty: Collection[str] = (),
    free: Collection[str] = (),
    each: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Refuse options of an experiment that are out of range, before it reads anything.

    Whole numbers are at least 1, seeds and counts of records (0 is all) at least 0; other numbers
    are above 0, delta and validation below 1, probabilities at most 1. A list has an entry, and
    none twice; a path is of a file that is there; no seed of tuning is one of ``seeds``.

    Args:
        config: The experiment's config.
        minimum: Whole numbers by option that are at least something else.
        known: By option, the names that it may hold.
        empty: Lists that may be empty.
        free: Options that may be any number.
        each: By option, those that hold one entry for each of its own; they may repeat one.

    Raises:
        ValueError: Naming the option, its value and the remedy.
    """
    minimum = minimum or {}
    along = {n: first for first, names in (each or {}).items() for n in names}
    for field in dataclasses.fields(config):
        name = field.name
        value = getattr(config, field.name)
        entries = value if isinstance(value, tuple) else (value,)
        if not entries and name not in empty:
            raise ValueError(f"{name} is empty; give at least one entry")
        for item in () if name in free else entries:
            _check_number(name, str(field.type), item, minimum)
        if isinstance(value, tuple) and name not in along and len(set(value)) < len(value):
            raise ValueError(
                f"{name} is {_validate.shown(value)}, with an entry twice; give each once"
            )
        if isinstance(value, Path) and not os.path.isfile(value):
            raise ValueError(f"{name} is {str(value)!r}, where no file is; give one's path")
        for item in (entry for entry in entries if entry not in (known or {}).get(name, entries)):
            choice = ", ".join((known or {})[name])
            raise ValueError(f"{name} holds {item!r}; choose from {choice}")
    for name, first in along.items():
        has = len(getattr(config, name))
        expected = len(getattr(config, first))
        if has != expected:
            raise ValueError(
                f"{name} has {has} entries and {first} {expected}; give one for each of {first}"
            )
    for name in ("tuning_seed", "tuning_seeds"):
        own = getattr(config, name, ())
        own = own if isinstance(own, tuple) else (own,)
        tune.check_seeds(getattr(config, "seeds", ()), own, name)


def _check_number(name: str, kind: str, value: Any, minimum: Mapping[str, int]) -> None:
    """One entry of an option of a type."""
    if value is None or isinstance(value, tuple):
        return
    if re.search(r"\bint\b", kind):
        zero = "seed" in name or "records" in name
        _validate.integer(name, value, minimum=minimum.get(name, 0 if zero else 1))
    elif re.search(r"\bfloat\b", kind):
        share = name in ("delta", "validation")
        number = (_validate.probability if share else _validate.positive)(name, value)
        if name == "probability" and number > 1:
            raise ValueError(f"probability is {number:g}; give one of at most 1")


class Lab:
    """Where an experiment's cells are run and kept.

    Args:
        name: The experiment.
        preset: The preset its config began from.
        options: The shared options.
        command: The command line, for the records.
        team: Runs the cells in place of this process.
        silent: Whether neither text nor figures are wanted.
    """

    def __init__(
        self, name: str, preset: str, options: Options, command: str,
        team: _workers.Team | None = None, *, silent: bool = False,
    ):  # fmt: skip
        self.name = name
        self.preset = preset
        self.options = options
        self.command = command
        self.team = team
        self.silent = silent
        # Of figures: those of longer presets stand beside those of presets for two cores.
        small = preset.partition("_")[0] in ("tiny", "demo", "cpu")
        self.suffix = "" if small else f"_{preset}"
        self.seconds = 0.0  # That all runs so far were estimated to take.
        self.folder = options.output / name / preset
        self.checkpoints = (options.checkpoint or self.folder / "checkpoints") / name / preset

    def say(self, text: str) -> None:
        """Print a line of the experiment's report."""
        if not self.silent:
            print(text, flush=True)

    def say_ends(self, names: Sequence[str]) -> None:
        """Print what was tuned to an end of its step sizes, if anything was.

        Args:
            names: Of `_common.tables.at_ends`.
        """
        if names:
            self.say(f"best at an end of the step sizes tried: {'; '.join(names)}")

    def figure(self, sheet: Any, name: str, **caption: Any) -> None:
        """Finish a figure, write it to the folder and print its path.

        Args:
            sheet: The figure.
            name: Of its file.
            caption: Of `dpjax.results.plots.finish`.
        """
        if self.silent:
            return
        plots.finish(sheet, **caption)
        path = plots.save(sheet, self.folder / name)
        if path.suffix == ".png":
            _reduce_colors(sheet, path)
        self.say(f"figure: {path}")

    def run(
        self, plans: Any, problem: Any, *, checkpoint: Path | None = None, **options: Any
    ) -> Result:
        """Run plans as the shared options say; with ``estimate`` print what that takes.

        Args:
            plans: One plan or several.
            problem: The problem, or one for each seed.
            checkpoint: Folder of an unfinished run.
            options: More of `dpjax.engine.run.run`.

        Returns:
            The result; with ``estimate`` that of one round, at all marks.
        """
        options = {"devices": self.options.devices} | options
        if not self.options.estimate:
            progress = not self.options.quiet and sys.stderr.isatty()
            return run(plans, problem, checkpoint=checkpoint, progress=progress, **options)
        names = ("seeds", "eval_every", "chunk_blocks", "devices", "stop_at")
        settings = {name: options[name] for name in names if name in options}
        title = "" if checkpoint is None else f"{checkpoint.relative_to(self.checkpoints)}: "
        taken = estimate(plans, problem, **settings)
        self.seconds += taken.seconds
        print(title + taken.statement(), flush=True)
        # What follows may choose a step size by metrics, and go on from the models.
        once = {"eval_every": 1, "chunk_blocks": 1, "callback": lambda progress: True}
        result = run(plans, problem, **options | once)
        rounds = result.plans[0].config.rounds
        interval = options.get("eval_every")
        marks = RunSchedule.of(rounds, options.get("stop_at"), interval, 1).marks
        metrics = {name: value.repeat(len(marks), 0) for name, value in result.metrics.items()}
        return dataclasses.replace(result, rounds=marks, metrics=metrics)

    def cell(
        self,
        name: str,
        config: Mapping[str, Any],
        compute: Callable[[Path], list[dict[str, Any]]],
        *,
        seed: int | Sequence[int] | None = None,
        plot: Mapping[str, Any] | None = None,
    ) -> "pandas.DataFrame":
        """Run a cell, or read its records if it has been run.

        Args:
            name: File name of the cell's records, without the ending.
            config: All that decides the cell's rows; plain values.
            compute: ``compute(checkpoint_folder) -> rows``.
            seed: The seeds used, for the metadata.
            plot: What `dpjax plot` draws of the records unless asked.

        Returns:
            The rows.

        Raises:
            ValueError: If the file exists and was made with another config, or without resuming.
        """
        return self.cells([(name, config, compute)], seed=seed, plot=plot)

    def cells(
        self,
        cells: Iterable[tuple[str, Mapping[str, Any], Callable[[Path], list[dict[str, Any]]]]],
        *,
        seed: int | Sequence[int] | None = None,
        plot: Mapping[str, Any] | None = None,
    ) -> "pandas.DataFrame":
        """Run or read several cells, a sweep.

        Args:
            cells: Name, config and compute of each, as `cell` takes them.
            seed: The seeds used, for the metadata.
            plot: What `dpjax plot` draws of the records unless asked: columns ``x``, ``y`` and
                ``series``, conditions ``where``, ``log_x`` and ``log_y``.

        Returns:
            The rows of all, in the order of the cells; empty for none.
        """
        import pandas

        work = {self.folder / f"{name}.jsonl": rest for name, *rest in cells}
        configs = {path: json.loads(json.dumps(c, default=str)) for path, (c, _) in work.items()}
        commit = records.metadata()["commit"]
        for path, missing in _workers.shared_files(work, self.team, self.say):
            began = time.monotonic()
            if missing:
                metadata = {"config": configs[path], "preset": self.preset}
                metadata |= {"plot": plot} if plot else {}
                rows = self._make(path, work[path][1], metadata, seed)
                self.say(f"{path}: {rows} rows in {time.monotonic() - began:.1f} s")
                continue
            if not self.options.resume:
                raise ValueError(
                    f"output {path} exists; records are never overwritten, name another --output"
                )
            metadata = records.read_metadata(path)
            if _given(metadata.get("config") or {}) != _given(configs[path]):
                raise ValueError(
                    f"output {path} was made with another config; name another --output"
                )
            # Rows follow from code, too, whose edits must not invalidate hours of work unasked.
            outcome = metadata.get("commit")
            self.say(f"{path}: read" + (f", made at commit {outcome}" if outcome != commit else ""))
        frames = list(map(records.read, work))
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()

    def _make(
        self, path: Path, compute: Callable[[Path], Any], config: dict[str, Any], seed: Any
    ) -> int:
        """Run a cell and write its records; the number of its rows."""
        checkpoint = self.checkpoints / path.stem
        if not self.options.resume:
            shutil.rmtree(checkpoint, ignore_errors=True)
        began = time.monotonic()
        rows = [{"experiment": self.name, **row} for row in compute(checkpoint)]
        metadata = records.metadata(command=self.command, seed=seed) | config
        metadata["seconds"] = round(time.monotonic() - began, 3)
        if any(row.get("phase") == "final" for row in rows):
            # Runs that chose steps are drawn where somebody asks for them.
            metadata.setdefault("plot", {"where": ["phase=final"]})
        records.write(path, rows, metadata)
        shutil.rmtree(checkpoint, ignore_errors=True)
        return len(rows)


def _reduce_colors(sheet: Any, path: Path) -> None:
    """Write a PNG again in 256 colours: with all its dots it has fewer bytes than a coarse one."""
    from PIL import Image

    buffer = io.BytesIO()
    with plots.style():
        sheet.savefig(buffer, format="png", metadata={"Software": None})
    Image.open(buffer).convert("RGB").quantize(256).save(path, optimize=True)


def on_graphs(config: Any, folder: Path) -> Iterator[tuple[Any, Path]]:
    """The config of each of an experiment's graphs, with seeds of its own, and its folder.

    Args:
        config: The experiment's config, with ``graphs``, ``graph_seed`` and ``seeds``.
        folder: Of the cell; one graph alone uses it as it is.
    """
    for number in range(config.graphs):
        # Seeds are tried upwards until a graph is connected.
        graph_seed = config.graph_seed + 1000 * number
        seeds = tuple(seed + number * len(config.seeds) for seed in config.seeds)
        place = folder / f"graph-{number}" if config.graphs > 1 else folder
        yield dataclasses.replace(config, graph_seed=graph_seed, seeds=seeds), place


def stored(config: Any, *listed: str, **cell: Any) -> dict[str, Any]:
    """What a cell of a sweep stores of an experiment's config.

    Lists of what is swept stay out, so that a cell is read again when others join it.

    Args:
        config: The experiment's config, a dataclass.
        listed: Fields that say which cells there are, and no more.
        cell: What this cell is, also in the place of a field.

    Returns:
        Field or name -> value.

    Raises:
        ValueError: For a listed field that is not there.
    """
    total = dataclasses.asdict(config) | cell
    for name in listed:
        if name not in total:
            raise ValueError(f"listed holds {name!r}, which is no field; give {', '.join(total)}")
        del total[name]
    return total


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None: records stay as good when an option joins that they were not given."""
    return {name: value for name, value in config.items() if value is not None}


def file_name(text: str) -> str:
    """Return a text as the name of a file: letters, digits, dots and hyphens, others as "_".

    Args:
        text: Any text.
    """
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_")


def main(
    name: str,
    presets: Mapping[str, Any],
    experiment: Callable[[Any, Lab], Any],
    argv: Sequence[str] | None = None,
    *,
    default: str = "cpu",
) -> int:
    """Parse an experiment's command line, run it, and report user errors in one line.

    Args:
        name: The experiment's name.
        presets: Frozen config dataclasses of one type by preset name.
        experiment: The body.
        argv: Arguments; None is the process's.
        default: Preset used when none is named.

    Returns:
        Exit status: 0, or 2 after an error of the user's or the system's, or 130 when it was
        stopped from the keyboard; both are said in one line, as is a warning.
    """
    import tyro

    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        preset, rest = _split_preset(arguments, presets, default)
        selection = presets[preset]
        parser = _parser(type(selection), selection, experiment.__doc__, tuple(presets), preset)
        prog = f"experiments/{name}.py"
        _check_names(rest, type(selection), prog)
        with cli.on_parse_error(_refuse):
            config, options = tyro.cli(parser, args=rest, prog=prog, description=experiment.__doc__)
        config = _on_other_seeds(config, options.other_seeds)
        command = f"python experiments/{name}.py {shlex.join(arguments)}".rstrip()
        if options.estimate:
            with tempfile.TemporaryDirectory() as folder:
                options = dataclasses.replace(options, output=Path(folder), checkpoint=None)
                lab = Lab(name, preset, options, command, silent=True)
                _call(experiment, config, lab)
            print(f"All runs together take about {lab.seconds / 60:,.1f} minutes, one by one.")
            return 0
        if options.parallel == 1:
            _call(experiment, config, Lab(name, preset, options, command))
            return 0
        if not options.resume:
            raise ValueError("parallel is given with --no-resume; name another --output instead")
        single = dataclasses.replace(options, parallel=1, quiet=True)
        worker = Lab(name, preset, single, command, silent=True)
        work = functools.partial(_call, experiment, config, worker)

        def warn(text: str) -> None:
            print(f"{name}: {text}", file=sys.stderr, flush=True)

        with _workers.Team(options.parallel, work, options.output, warn) as team:
            _call(experiment, config, Lab(name, preset, options, command, team))
    except (ValueError, OSError) as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except MemoryError:
        print(f"{name}: error: out of memory; choose a smaller preset", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        without = " without --no-resume" if "--no-resume" in arguments else ""
        print(
            f"{name}: stopped; finished cells are kept, the same command{without} carries on",
            file=sys.stderr,
        )
        return 130
    return 0


def _on_other_seeds(config: Any, added: int) -> Any:
    """A config whose runs have other seeds.

    Raises:
        ValueError: For an experiment whose config has none.
    """
    if not added:
        return config
    if not getattr(config, "seeds", ()):
        raise ValueError(f"other_seeds is {added}, and this experiment has no seeds; leave it out")
    changed: dict[str, Any] = {"seeds": tuple(seed + added for seed in config.seeds)}
    if hasattr(config, "tuning_seeds"):
        changed["tuning_seeds"] = tuple(seed + added for seed in config.tuning_seeds)
    if hasattr(config, "tuning_seed"):
        changed["tuning_seed"] = config.tuning_seed + added
    return dataclasses.replace(config, **changed)


def _check_names(words: Iterable[str], config_type: type, prog: str) -> None:
    """Refuse an option that there is not, naming the nearest, as `dpjax` does.

    Raises:
        ValueError: Naming both.
    """
    fields = [*dataclasses.fields(config_type), *dataclasses.fields(Options)]
    names = ["--help", "--preset", *(f"--{field.name.replace('_', '-')}" for field in fields)]
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    # Completions for shells are options of the parser's own.
    options = [word.replace("_", "-") for word in options if not word.startswith("--tyro-")]
    cli._check("option", (word.replace("--no-", "--") for word in options), names, prog)


def _refuse(event: Any) -> None:
    """Say in one line what the parser would say in a box, as `dpjax` does.

    Raises:
        ValueError: With the line.
    """
    # What the config itself refuses has words of its own, and no argument.
    if getattr(event, "argument", event) is None:
        raise ValueError(event.message)
    cli._refuse(event)


def _call(experiment: Callable[[Any, Lab], Any], config: Any, lab: Lab) -> None:
    with warnings.catch_warnings():
        warnings.showwarning = lambda text, *_: _files.say(f"{lab.name}: warning: {text}")
        # Published budgets are compared as they are, also where they leave nothing to learn.
        warnings.simplefilter("ignore", HopelessWarning)
        experiment(config, lab)


def _split_preset(
    arguments: list[str], presets: Mapping[str, Any], default: str
) -> tuple[str, list[str]]:
    """Take --preset NAME out of the arguments: it decides the other options' defaults."""
    preset = default
    rest = []
    words = iter(arguments)
    for word in words:
        if word == "--preset":
            preset = next(words, "")
        elif word.startswith("--preset="):
            preset = word.removeprefix("--preset=")
        else:
            rest.append(word)
    return _validate.one_of("preset", preset, presets), rest


def _parser(
    config_type: type, config: Any, doc: str | None, presets: tuple[str, ...], preset: str
) -> Any:
    """A function whose signature tyro turns into the options."""
    import tyro

    def parse(
        config: Any = config,
        options: Options = Options(),  # noqa: B008 - a frozen dataclass
        preset: Any = preset,
    ) -> Any:
        return config, options

    flat: Any = tyro.conf.OmitArgPrefixes
    parse.__annotations__ = {
        "config": flat[config_type],
        "options": flat[Options],
        "preset": Literal.__getitem__(presets),
    }
    parse.__doc__ = f"""{doc}

    Args:
        config: What the experiment computes; the defaults are the preset's.
        options: How it is run.
        preset: Named config that sets the defaults above: {", ".join(presets)}.
    """
    return parse
