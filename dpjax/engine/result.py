"""The result of a run, and the progress that its callback reads.

`Result.save` writes these entries, which NumPy can read:

    header      JSON: seeds, names of the metrics, guarantees, columns of each plan, and the
                position of each array in the parameters
    rounds      [E]
    metric_0    [E, S, V], the first name's, and so on
    leaf_0      [S, V, n, ...] parameters, and so on; bfloat16 as its 16-bit integers
    times       seconds, rounds a second
    digest      SHA-256 of all of it
"""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dpjax import _files, _html, _validate
from dpjax._version import __version__
from dpjax.accounting.arrays import Fields
from dpjax.accounting.guarantee import Guarantee
from dpjax.engine import report
from dpjax.engine.checkpoint import tree_digest
from dpjax.learning import parameters
from dpjax.learning.examples import as_numbers
from dpjax.learning.parameters import Params
from dpjax.learning.problem import Problem
from dpjax.plans import noise
from dpjax.plans.plan import Plan
from dpjax.protocols import Models, Tree

if TYPE_CHECKING:
    import pandas

__all__ = ()

_FORMAT = 2
_KIND = "dpjax result"
_Number: TypeAlias = int | None
_PlanChoice: TypeAlias = int | str | None
"""A plan by its number or its label; None where there is one alone."""
_TERMS = ("label", "agents", "epsilon", "delta", "accountant", "relation", "unit", "step_size")
"""Columns of a plan in the order that rows have, which files do not keep."""


class Progress(NamedTuple):
    """What a callback receives at a chunk's end: metrics, but no data, models or keys.

    Attributes:
        round: Rounds done.
        metrics: name -> [S, V], the latest.
        guarantees: The statement of each of the V plans if the callback ends the run now, see
            ``stopping`` of `dpjax.engine.run.run`.
        rounds_per_second: Of one seed and one plan, counted in this process only.
    """

    round: int
    metrics: dict[str, np.ndarray]
    guarantees: tuple[Guarantee, ...]
    rounds_per_second: float


def _terms(plan: Plan) -> Fields:
    """The columns of a plan in rows, which a saved result stores in place of the plan."""
    config = plan.config
    values = (
        config.label,
        plan.agents,
        plan.guarantee.epsilon,
        0.0 if config.budget is None else config.budget.delta,
        config.accountant or "none",
        config.protect.relation,
        config.protect.unit,
        float(config.optimizer.first),
    )
    return dict(zip(_TERMS, values, strict=True))


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The result of a run.

    Attributes:
        plans: The V plans; empty in a result that was loaded, since plans hold functions.
        seeds: The S seeds.
        rounds: [E] rounds at which metrics were taken.
        metrics: name -> [E, S, V].
        guarantees: The statement of each plan: its whole guarantee, also after an early stop, which
            may depend on released messages. It is less only where the rounds were fixed beforehand
            (``stop_at``) or a curve over marks was (``stopping="curve"``).
        params: What the method releases at the end, mostly the agents' models, leaves
            [S, V, n, ...]. They are functions of messages, which the guarantee covers. Under
            gradients="view" they are the models that agents keep, which it does not. Frozen leaves
            are None.
        seconds: Time in the compiled loop of this process, without compilation.
        rounds_per_second: Of one seed and one plan. The first chunk, which compiles, counts only
            where it is the only one.
        ended: False when a callback stopped the run.
        terms: Columns of each plan in rows, by name.
        frozen: SHA-256 of the frozen values; empty where there were none.
        problem: The problem's name.
        agent_names: [n] names of the agents, where the partition has them.
    """

    plans: tuple[Plan, ...]
    seeds: tuple[int, ...]
    rounds: np.ndarray
    metrics: dict[str, np.ndarray]
    guarantees: tuple[Guarantee, ...]
    params: Models
    seconds: float
    rounds_per_second: float
    ended: bool
    terms: tuple[Fields, ...] = ()
    frozen: str = ""
    problem: str = ""
    agent_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Take the terms from the plans."""
        if not self.terms:
            object.__setattr__(self, "terms", tuple(map(_terms, self.plans)))

    def __repr__(self) -> str:
        """One line: the number of runs, their rounds, and the metrics."""
        names = ", ".join(self.metrics)
        return f"Result({report.sizes(self)}, metrics {names}, which no guarantee covers)"

    def __str__(self) -> str:
        """The line of `repr`, and each plan's guarantee in sentences."""
        lines = [repr(self)]
        for terms, guarantee in zip(self.terms, self.guarantees, strict=True):
            lines.append(f"{noise.display_name(terms['label'])}: {guarantee.statement()}")
        return "\n".join(lines)

    def rows(self, **extra: Any) -> list[Fields]:
        """Tidy rows, one for each plan, seed and measured round.

        ``epsilon`` is that of ``guarantee``, the statement at the end of the run, in all rows. It
        is less than the plan's after ``stop_at``, and more where phases add up. Where agents'
        differ it is the largest, and the guarantee's ``per_agent_epsilon`` has all.

        Args:
            extra: Columns to add to every row; ``design`` replaces the design's name.

        Returns:
            Rows of plain Python values.

        Raises:
            ValueError: For a column that the result states itself, or one ``design`` for plans
                of several designs.
        """
        label = extra.pop("design", None)
        if label is not None and len({terms["label"] for terms in self.terms}) > 1:
            raise ValueError(f"design is {label!r} for plans of several designs; leave it out")
        rows = []
        for v, (terms, guarantee) in enumerate(zip(self.terms, self.guarantees, strict=True)):
            columns = {"design": label or terms["label"], **terms}
            del columns["label"]
            # Phases add to what the plan states, and fixed early ends take from it.
            columns |= {"epsilon": guarantee.epsilon, "guarantee": guarantee.to_dict()}
            for name in extra:
                if name in {*columns, "seed", "round", *self.metrics}:
                    raise ValueError(
                        f"{name} is {extra[name]!r}, a column that the result states; rename it"
                    )
            for s, seed in enumerate(self.seeds):
                for e, rounds in enumerate(self.rounds):
                    row = {**extra, **columns, "seed": seed, "round": int(rounds)}
                    for name, values in self.metrics.items():
                        row[name] = float(values[e, s, v])
                    rows.append(row)
        return rows

    def to_frame(self, **extra: Any) -> "pandas.DataFrame":
        """`rows` as a data frame.

        Args:
            extra: As in `rows`.
        """
        import pandas

        return pandas.DataFrame(self.rows(**extra))

    def to_csv(self, path: _files.PathLike) -> Path:
        """Write `rows` as comma-separated values, with each guarantee's caption in one cell.

        Guarantee: as for `save`, it holds metrics, which no guarantee covers, and seeds, with which
        a simulation's noise can be subtracted. Only its owner may read it (mode 0600).

        Args:
            path: The file, which is replaced.

        Returns:
            The path.

        Raises:
            ValueError: Where the system refuses to write.
        """
        frame = self.to_frame()
        captions = [guarantee.caption() for guarantee in self.guarantees]
        # Rows are those of one plan after the other, equally many.
        frame["guarantee"] = np.repeat(captions, len(frame) // len(captions))
        with _files.writing("path", path):
            _files.replace(Path(path), frame.to_csv(index=False).encode(), mode=0o600)
        return Path(path)

    def summary(self) -> str:
        """A table of the last metrics: mean +- standard error over seeds, one line for each plan.

        ``design`` is the design's name in figures; rows and `model` have its label. ``epsilon`` is
        that of each plan's guarantee, rounded up, or the range of its agents'. ``protected`` is
        whom it protects from whom; ``str(result)`` states all of it. Metrics are means over agents.
        """
        from dpjax.results import tables

        return tables.text(report.cells(self))

    def _repr_html_(self) -> str:
        """The table of `summary`, for notebooks."""
        # Plans that state the same are described once.
        captions = dict.fromkeys(guarantee.caption() for guarantee in self.guarantees)
        lines = "".join(f"<p>{_html.escape(caption)}</p>" for caption in captions)
        return _html.html_table(report.cells(self)) + lines

    def report(self, path: _files.PathLike) -> Path:
        """Write one page of HTML about the run, with all that it needs in it.

        It has the table of `summary`, each guarantee and who is protected from whom, epsilon of
        every agent where they differ, the forecast
        of the noise beside the outcome, a figure for each metric, the parameters of every plan, and
        command, seeds, versions and device. Guarantee: as for `save`, it holds metrics, which no
        guarantee covers, and seeds, with which a simulation's noise can be subtracted.

        Args:
            path: The file, ending in .html, which is replaced.

        Returns:
            The path.

        Raises:
            ValueError: For another ending, or where the system refuses to write.
        """
        return report.write_report(self, path)

    def plot(self, metric: str | None = None, path: _files.PathLike | None = None) -> Any:
        """Draw a metric over rounds, mean and standard error, one line for each design.

        Args:
            metric: Which; the first by default.
            path: The figure's file, .svg, .png or .pdf.

        Returns:
            The path written when one is given, else the figure.

        Raises:
            ValueError: For an unknown metric, or several plans of one design.
        """
        from dpjax.results import plots

        sheet = plots.lines(self.to_frame(), "round", metric or next(iter(self.metrics)))
        plots.finish(sheet)
        return sheet if path is None else plots.save(sheet, path)

    def model(
        self,
        problem: Problem | None = None,
        *,
        seed: _Number = None,
        plan: _PlanChoice = None,
        agent: _Number = None,
    ) -> Params:
        """The average model of a run, or one agent's, for inference.

        Guarantee: the run's, since an average of released models is post-processing. Under
        gradients="view" agents keep their models, and no guarantee covers them or their average:
        do not publish it.

        Args:
            problem: The trained problem, whose frozen values fill the parameters. With None, frozen
                leaves stay None.
            seed: One of ``seeds``; needed where there are several.
            plan: A plan, by its number from 0 or by its label; needed where there are several.
            agent: The agent whose model is returned; None averages all.

        Returns:
            Parameters of one model: ``module.apply(params, x)``.

        Raises:
            ValueError: For an unknown or missing seed, plan or agent; for a method that releases no
                models; for another problem's model, or other frozen values.
        """
        run = (_index("seed", seed, self.seeds), self._plan_index(plan))
        models = jax.tree.map(lambda leaf: leaf[run], self.params)
        if not jax.tree.leaves(models):
            raise ValueError("params are empty: this method releases no models")
        if agent is None:
            model = jax.tree.map(_average, models)
        else:
            last = len(jax.tree.leaves(models)[0]) - 1
            number = _validate.integer("agent", agent, minimum=0, maximum=last)
            model = jax.tree.map(lambda leaf: leaf[number], models)
        return model if problem is None else _complete(problem, model, self.frozen)

    def _plan_index(self, plan: _PlanChoice) -> int:
        """The index of a plan that is chosen by its label or its number."""
        labels = [terms["label"] for terms in self.terms]
        return _index("plan", plan, labels if isinstance(plan, str) else range(len(labels)))

    def predictor(
        self,
        problem: Problem,
        *,
        seed: _Number = None,
        plan: _PlanChoice = None,
        agent: _Number = None,
    ) -> Callable[[Tree], Array]:
        """Return the predictions of the trained model: ``predict = result.predictor(task)``.

        Guarantee: that of `model`, and none under gradients="view". Predictions on public examples
        are post-processing.

        Args:
            problem: The trained problem, with its frozen values and the shape of its examples.
            seed: As in `model`.
            plan: As in `model`.
            agent: As in `model`.

        Returns:
            ``predict(x)`` of examples [M, ...]: logits or scores, as the module returns them.

        Raises:
            ValueError: As `model`; for another problem's model, other frozen values, or a problem
                without ``predict``.
        """
        model = _complete(problem, self.model(seed=seed, plan=plan, agent=agent), self.frozen)
        if problem.predict is None:
            raise ValueError("problem has no predict; make it with dp.supervised")
        apply = jax.jit(problem.predict)
        return lambda x: apply(model, _examples(problem, x))

    def export(
        self,
        path: _files.PathLike,
        problem: Problem,
        *,
        seed: _Number = None,
        plan: _PlanChoice = None,
        agent: _Number = None,
    ) -> Path:
        """Write the trained model as safetensors, which other frameworks read.

        A tensor's name is its place, as in ``params.Dense_0.kernel``, in flax's layout: kernels are
        [inputs, outputs] and [height, width, inputs, outputs]. The metadata have the guarantee's
        caption. `safetensors.numpy.load_file` reads the file. Guarantee: that of `model`.

        Args:
            path: The file, ending in .safetensors, which is replaced.
            problem: As in `predictor`.
            seed: As in `model`.
            plan: As in `model`.
            agent: As in `model`.

        Returns:
            The path.

        Raises:
            ValueError: As `model`; for another ending, or without the package safetensors.
        """
        file = Path(path)
        if file.suffix != ".safetensors":
            raise ValueError(f"path is {str(path)!r}; end it in .safetensors")
        try:
            safetensors = importlib.import_module("safetensors.numpy")
        except ImportError:
            raise ValueError(
                "safetensors is not installed, and the file needs it: pip install safetensors"
            ) from None
        model = self.model(problem, seed=seed, plan=plan, agent=agent)
        tensors = {}
        for keys, leaf in jax.tree.leaves_with_path(model):
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            # The writer takes a tensor's memory as it lies.
            tensors[name] = np.asarray(leaf, order="C")
        guarantee = self.guarantees[self._plan_index(plan)]
        content = safetensors.save(tensors, {"guarantee": guarantee.caption()})
        with _files.writing("path", file):
            _files.replace(file, content)
        return file

    def save(self, path: _files.PathLike) -> Path:
        """Write the result to a new .npz file, without code or keys; a failed write leaves no file.

        Guarantee: none beyond that of the result. The file holds ``params``, which the guarantees
        cover except under gradients="view". It also holds metrics, which no guarantee covers, and
        seeds, with which a simulation's noise can be subtracted. It never holds a noise key. Only
        its owner may read it (mode 0600): read the page 'Security and the threat model' of the
        manual before you pass it on.

        Args:
            path: The file; ``.npz`` is appended where there is no suffix.

        Returns:
            The path.

        Raises:
            ValueError: For a file that exists or cannot be written, a value that is no path, or
                parameters that are no numbers in dicts keyed by texts, lists and tuples.
        """
        path = _files.npz(path)
        leaves: list[np.ndarray] = []
        tree = _structure(self.params, leaves)
        header = {
            "format": _FORMAT,
            "kind": _KIND,
            "versions": {"dpjax": __version__, "jax": jax.__version__},
            "seeds": self.seeds,
            "metrics": list(self.metrics),
            "guarantees": [guarantee.to_dict() for guarantee in self.guarantees],
            # Written as texts, since JSON has no infinity.
            "terms": [terms | {"epsilon": repr(terms["epsilon"])} for terms in self.terms],
            "ended": self.ended,
            "frozen": self.frozen,
            "problem": self.problem,
            "agents": self.agent_names,
            "tree": tree,
            "dtypes": [leaf.dtype.name for leaf in leaves],
        }
        arrays = {"rounds": self.rounds, "times": np.array([self.seconds, self.rounds_per_second])}
        for i, values in enumerate(self.metrics.values()):
            arrays[f"metric_{i}"] = np.asarray(values, np.float64)
        for i, leaf in enumerate(leaves):
            arrays[f"leaf_{i}"] = leaf
        text = json.dumps(header, sort_keys=True, allow_nan=False)
        with _files.writing("path", path):
            try:
                _files.create(path, _files.packed(text, arrays), mode=0o600)
            except FileExistsError:
                raise ValueError(
                    f"path is {str(path)!r}, which exists; results are never overwritten, name "
                    "another"
                ) from None
        return path

    @classmethod
    def load(cls, path: _files.PathLike) -> "Result":
        """Read a result that `save` wrote; `rows`, metrics, guarantees and models are the same.

        Guarantee: none. The digest detects damage. It proves neither the author nor the statements
        of the file. Load results only from sources that you trust with designs.

        Args:
            path: The file; ``.npz`` is appended where there is no suffix, as in `save`.

        Returns:
            The result, without plans; its arrays cannot be written to.

        Raises:
            FileNotFoundError: For a missing file.
            ValueError: For a truncated, changed or foreign file, or a value that is no path.
        """
        path = _files.npz(path)
        remedy = "give a file that Result.save wrote with this version, or make it again"
        with _files.reading(f"path is {str(path)!r}, which", remedy):
            text, arrays = _files.unpacked(path)
            header = json.loads(text)
            if header["kind"] != _KIND or header["format"] != _FORMAT:
                raise ValueError(f"it is a {header['kind']} of format {header['format']}")
            leaves = []
            for i, kind in enumerate(header["dtypes"]):
                leaf = arrays[f"leaf_{i}"]
                # Narrow floats are stored as integers. A name has no byte order, which the rest
                # keeps.
                leaves.append(leaf if leaf.dtype.name == kind else leaf.view(jnp.dtype(kind)))
            for array in (*arrays.values(), *leaves):
                array.flags.writeable = False
            seconds, rate = map(float, arrays["times"])
            terms = []
            for columns in header["terms"]:
                columns["epsilon"] = float(columns["epsilon"])
                terms.append({name: columns[name] for name in _TERMS})
            return cls(
                plans=(),
                seeds=tuple(header["seeds"]),
                rounds=arrays["rounds"],
                metrics={name: arrays[f"metric_{i}"] for i, name in enumerate(header["metrics"])},
                guarantees=tuple(map(Guarantee.from_dict, header["guarantees"])),
                params=_filled(header["tree"], leaves),
                seconds=seconds,
                rounds_per_second=rate,
                ended=header["ended"],
                frozen=header["frozen"],
                # Older files lack these two.
                problem=header.get("problem", ""),
                agent_names=tuple(header.get("agents", ())),
                terms=tuple(terms),
            )


def _index(name: str, value: Any, choices: Sequence[Any]) -> int:
    """The index of one of several; None where there is no choice."""
    options = list(choices)
    text = _validate.shown(options)
    if value is None:
        if len(options) == 1:
            return 0
        raise ValueError(f"{name} is missing; give {name}={options[0]}, or another of {text}")
    is_name = isinstance(value, str | int | np.integer) and not isinstance(value, bool)
    # A label that several plans have names none of them.
    if not is_name or options.count(value) != 1:
        raise _validate.refusal(name, value, f"give one of {text}, by its number")
    return options.index(value)


def _average(leaf: np.ndarray) -> np.ndarray:
    """The mean over agents, added in float64 whatever the dtype."""
    return np.asarray(leaf).mean(axis=0, dtype=np.float64).astype(leaf.dtype)


def _complete(problem: Any, params: Params, frozen: str) -> Params:
    """The parameters of one model, filled with frozen values.

    Args:
        problem: The problem that was trained.
        params: Parameters of one model; frozen leaves are None.
        frozen: Digest of the frozen values that it was trained with, see `frozen_digest`.

    Raises:
        ValueError: For a value that is no problem, other parameters, or other frozen values.
    """
    if not isinstance(problem, Problem):
        raise _validate.refusal("problem", problem, "give the problem that was trained")

    def shape(leaf: np.ndarray) -> tuple[Any, ...]:
        return leaf.shape, leaf.dtype.name

    trained = jax.eval_shape(problem.init, jax.random.key(0))
    if jax.tree.map(shape, params) != jax.tree.map(shape, trained):
        raise ValueError("problem trains another model; give the problem that was trained")
    if frozen_digest(problem.frozen) != frozen:
        raise ValueError("problem has other frozen values; give the problem that was trained")
    return parameters.merge(params, problem.frozen)


def frozen_digest(frozen: Params) -> str:
    """Return a digest of frozen values; empty where there are none.

    Args:
        frozen: Of a problem.
    """
    if frozen is None:
        return ""
    # Equal arrays at other places are another model.
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(frozen)]
    return tree_digest((frozen, names))


def _examples(problem: Problem, x: Tree) -> Array:
    """Examples in the shape and dtype of those that the model was trained on."""
    shape = problem.x.shape[1:]
    kind = problem.x.dtype
    _validate.check_columns("x", x, problem.columns)
    traced = isinstance(x, jax.core.Tracer)
    records = x if traced else as_numbers("x", x)
    if not records.ndim or records.shape[1:] != shape:
        raise ValueError(f"x has shape {records.shape}; give examples {['M', *shape]}")
    if traced:
        # A cast might change traced values, which cannot be checked.
        if x.dtype != jnp.result_type(kind):
            raise ValueError(f"x is {x.dtype} in a function that is traced; give {kind}")
        return x
    # A cast would wrap around, and an embedding would read another word.
    with np.errstate(invalid="ignore"):
        cast = records.astype(kind)
    changed = records[cast != records]
    if kind.kind in "iub" and changed.size:
        raise ValueError(
            f"x holds {changed[0]}; the model was trained on {kind}, give such numbers"
        )
    return jnp.asarray(cast)


def _structure(tree: Tree, leaves: list[np.ndarray]) -> Tree:
    """The position of each leaf, in lists and dicts for JSON."""
    if tree is None:
        return None
    container = type(tree)
    if container is dict and all(type(key) is str for key in tree):
        return {"dict": {key: _structure(part, leaves) for key, part in tree.items()}}
    if container in (list, tuple):
        return {container.__name__: [_structure(part, leaves) for part in tree]}
    kind = tree.dtype if isinstance(tree, np.ndarray | np.generic | jax.Array) else None
    if kind is None or not (jnp.issubdtype(kind, jnp.number) or jnp.issubdtype(kind, jnp.bool_)):
        raise ValueError(
            f"params hold a {container.__name__} of {kind}, which a file without code cannot; "
            "give dataclasses.replace(result, params=...) numbers in lists, tuples and dicts "
            "keyed by texts"
        )
    leaves.append(np.asarray(tree))
    return len(leaves) - 1


def _filled(tree: Tree, leaves: Sequence[np.ndarray]) -> Tree:
    """The inverse of `_structure`."""
    if tree is None:
        return None
    if isinstance(tree, int):
        return leaves[tree]
    ((kind, parts),) = tree.items()
    if kind == "dict":
        return {key: _filled(part, leaves) for key, part in parts.items()}
    return {"list": list, "tuple": tuple}[kind](_filled(part, leaves) for part in parts)
