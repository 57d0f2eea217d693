"""What a run leaves, and what its callback sees on the way.

Entries of the file that `Result.save` writes, readable with NumPy alone:

    header      JSON: seeds, names of the metrics, guarantees, what rows say of each plan, and where
                each array stands in the parameters
    rounds      [E]
    metric_0    [E, S, V], the first name's, and so on
    leaf_0      [S, V, n, ...] parameters, and so on; bfloat16 as the 16-bit integers it is made of
    times       seconds, rounds a second
    digest      SHA-256 of all of it
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dpjax
from dpjax import _files, _validate
from dpjax._numerics import up
from dpjax.accounting.guarantee import Guarantee
from dpjax.engine.checkpoint import digest
from dpjax.plans import parameters
from dpjax.plans.plan import Plan
from dpjax.plans.problem import Problem

if TYPE_CHECKING:
    import pandas

__all__: list[str] = []

_FORMAT = 2
_KIND = "dpjax result"


class Progress(NamedTuple):
    """What a callback sees at a chunk's end: metrics only, never data, models or keys.

    Attributes:
        round: Rounds done.
        metrics: name -> [S, V], the latest.
        guarantees: What each of the V plans states if the run ends here because of it, see
            ``stopping`` of `dpjax.engine.run.run`.
        rounds_per_second: One seed's round of one plan counts one; this process only.
    """

    round: int
    metrics: dict[str, np.ndarray]
    guarantees: tuple[Guarantee, ...]
    rounds_per_second: float


class Terms(NamedTuple):
    """What rows say of a plan, which a saved result keeps in its place.

    Attributes:
        label: What records call the design.
        agents: Number of agents n.
        epsilon: Of the plan's own guarantee.
        delta: Of its budget; 0 without one.
        accountant: How its epsilon follows; "none" without a budget.
        relation: Neighbouring relation.
        unit: "agent" or "record".
        step_size: Of the first round.
    """

    label: str
    agents: int
    epsilon: float
    delta: float
    accountant: str
    relation: str
    unit: str
    step_size: float

    @classmethod
    def of(cls, plan: Plan) -> "Terms":
        """The terms of a plan.

        Args:
            plan: The plan.
        """
        config, budget = plan.config, plan.config.budget
        return cls(
            config.label,
            plan.agents,
            plan.guarantee.epsilon,
            0.0 if budget is None else budget.delta,
            config.accountant or "none",
            config.protect.relation,
            config.protect.unit,
            float(config.optimizer.first),
        )


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What a run leaves.

    Attributes:
        plans: The V plans; empty in a result that was loaded, since plans hold functions.
        seeds: The S seeds.
        rounds: [E] rounds at which metrics were taken.
        metrics: name -> [E, S, V].
        guarantees: What each plan states: its own guarantee, also after an early stop, which
            anything seen on the way may have decided; less only where the rounds were fixed
            beforehand (``stop_at``) or a curve over marks was (``stopping="curve"``).
        params: What the method releases at the end, the agents' models as a rule, leaves
            [S, V, n, ...]: functions of messages, which the guarantee covers. Under
            gradients="view" the agents' own models, which it does not. None in the places of frozen
            leaves.
        seconds: Time in the compiled loop, this process only, compilation included.
        rounds_per_second: One seed's round of one plan counts one; the first chunk, which
            compiles, is left out where there is a second one.
        ended: False when a callback stopped the run.
        terms: What rows say of each plan.
        frozen: SHA-256 of the frozen values that were trained with; empty where there were none.
    """

    plans: tuple[Plan, ...]
    seeds: tuple[int, ...]
    rounds: np.ndarray
    metrics: dict[str, np.ndarray]
    guarantees: tuple[Guarantee, ...]
    params: Any
    seconds: float
    rounds_per_second: float
    ended: bool
    terms: tuple[Terms, ...] = ()
    frozen: str = ""

    def __post_init__(self) -> None:
        """Take the terms from the plans."""
        if not self.terms:
            object.__setattr__(self, "terms", tuple(map(Terms.of, self.plans)))

    def __repr__(self) -> str:
        """One line: how many runs, how far, which metrics."""
        return (
            f"Result({len(self.terms)} plans, {len(self.seeds)} seeds, {self.rounds[-1]} rounds, "
            f"metrics {', '.join(self.metrics)}, which no guarantee covers)"
        )

    def __str__(self) -> str:
        """The line, and each plan's guarantee in sentences: what it covers, and against whom."""
        stated = zip(self.terms, self.guarantees, strict=True)
        return "\n".join([repr(self), *(f"{one.label}: {own.statement()}" for one, own in stated)])

    def rows(self, **extra: Any) -> list[dict[str, Any]]:
        """Tidy rows, one for each plan, seed and measured round.

        ``epsilon`` is that of ``guarantee``, in all rows: what the run states at its end. It is
        less than the plan's after ``stop_at``, and more where phases add up.

        Args:
            extra: Columns to add to every row; ``algorithm`` takes the place of the design's name.

        Returns:
            Rows of plain Python values.

        Raises:
            ValueError: For a column that the result states itself, or one ``algorithm`` for plans
                of several designs.
        """
        rows = []
        if "algorithm" in extra and len({terms.label for terms in self.terms}) > 1:
            raise ValueError(
                f"algorithm is {extra['algorithm']!r} for plans of several designs, which it would "
                "not tell apart; leave it out"
            )
        for v, terms in enumerate(self.terms):
            columns = {
                "algorithm": terms.label,
                "agents": terms.agents,
                "epsilon": self.guarantees[v].epsilon,
                "delta": terms.delta,
                "budget": terms.accountant,
                "relation": terms.relation,
                "unit": terms.unit,
                "step_size": terms.step_size,
                "guarantee": self.guarantees[v].to_dict(),
            }
            own = [*columns, "seed", "round", *self.metrics]
            for name in extra:
                if name in own and name != "algorithm":
                    raise ValueError(
                        f"{name} is {extra[name]!r}, a column that the result states itself; give "
                        "it another name"
                    )
            columns = {**extra, **columns, "algorithm": extra.get("algorithm", terms.label)}
            for s, seed in enumerate(self.seeds):
                for e, rounds in enumerate(self.rounds):
                    taken = {name: float(value[e, s, v]) for name, value in self.metrics.items()}
                    rows.append({**columns, "seed": seed, "round": int(rounds), **taken})
        return rows

    def to_frame(self, **extra: Any) -> "pandas.DataFrame":
        """`rows` as a data frame.

        Args:
            extra: As in `rows`.
        """
        import pandas

        return pandas.DataFrame(self.rows(**extra))

    def summary(self) -> str:
        """A table of the last metrics, mean +- standard error over seeds, a line a plan.

        ``epsilon`` is that of each plan's guarantee, rounded up; ``str(result)`` states what it
        covers, and against whom.
        """
        from dpjax.results import tables

        def cell(values: np.ndarray) -> str:
            error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
            return f"{values.mean():.4g}" + ("" if np.isnan(error) else f" +- {error:.2g}")

        columns = [
            {name: cell(values[-1, :, v]) for name, values in self.metrics.items()}
            for v in range(len(self.terms))
        ]
        stated = zip(self.terms, self.guarantees, columns, strict=True)
        return tables.text(
            {"algorithm": terms.label, "epsilon": up(own.epsilon), **cells}
            for terms, own, cells in stated
        )

    def plot(self, metric: str | None = None, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw a metric over rounds, mean and standard error, a line a design.

        Args:
            metric: Which; the first by default.
            path: The figure's file, .svg, .png or .pdf.

        Returns:
            The path written when one is given, else the figure.

        Raises:
            ValueError: For a metric that there is not, or several plans of one design.
        """
        from dpjax.results import plots

        return plots.lines(self.to_frame(), "round", metric or next(iter(self.metrics)), path=path)

    def model(
        self,
        problem: Any = None,
        *,
        seed: int | None = None,
        plan: int | str | None = None,
        agent: int | None = None,
    ) -> Any:
        """The average model of a run, or one agent's, for inference.

        Guarantee: the run's; an average of released models is post-processing. Not under
        gradients="view": there it is one of agents' own models, which no guarantee covers, and
        whoever publishes it publishes what is not protected.

        Args:
            problem: What was trained: its frozen values are put in their places. None leaves None
                there, and is enough where nothing was frozen.
            seed: Which of ``seeds``; may be left out where there is one.
            plan: Which of the plans, by its number from 0 or by its label; may be left out where
                there is one.
            agent: Whose model; None averages all.

        Returns:
            Parameters of one model: ``module.apply(params, x)``.

        Raises:
            ValueError: For a seed, a plan or an agent that there is not, or that is left out where
                there are several; where the method releases no models; for another problem's model,
                or other frozen values.
        """
        labels = [terms.label for terms in self.terms]
        s = _index("seed", seed, self.seeds)
        v = _index("plan", plan, labels if isinstance(plan, str) else range(len(labels)))
        model = _one_model(jax.tree.map(lambda leaf: leaf[s, v], self.params), agent)
        return model if problem is None else _complete(problem, model, self.frozen)

    def predictor(
        self,
        problem: Any,
        *,
        seed: int | None = None,
        plan: int | str | None = None,
        agent: int | None = None,
    ) -> Callable[[Any], Any]:
        """What the trained model says of examples: ``predict = result.predictor(task)``.

        Guarantee: that of `model`, and none under gradients="view": for whoever does not know the
        examples, predictions are post-processing.

        Args:
            problem: What was trained, whose frozen values are used and whose examples those to
                come must resemble; or a flax module, where nothing was frozen.
            seed: As in `model`.
            plan: As in `model`.
            agent: As in `model`.

        Returns:
            ``predict(x)`` of examples [M, ...]: logits or scores, as the module returns them.

        Raises:
            ValueError: As `model`; for another problem's model, other frozen values, or a problem
                without ``predict``.
        """
        model = self.model(seed=seed, plan=plan, agent=agent)
        return _predictor(problem, model, self.frozen)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result to a new .npz file, complete or not at all: no code, no keys.

        Guarantee: none beyond the result's own. The file holds what ``params`` holds, which the
        guarantees cover but for runs under gradients="view", whose agents' own models are in it;
        metrics, which none covers; and seeds, with which a simulation's noise can be subtracted. It
        never holds a noise key. It is its owner's alone (mode 0600): read SECURITY.md before it
        is passed on.

        Args:
            path: Where to; ``.npz`` is appended where there is no suffix.

        Returns:
            The path.

        Raises:
            ValueError: Where the file exists or cannot be written, for what is no path, a result
                that contradicts itself, or parameters that are no numbers in dicts keyed by
                texts, lists and tuples.
        """
        path = _files.npz(path)
        leaves: list[np.ndarray] = []
        tree = _structure(self.params, leaves)
        self._check_shapes()
        header = {
            "format": _FORMAT,
            "kind": _KIND,
            "versions": {"dpjax": dpjax.__version__, "jax": jax.__version__},
            "seeds": self.seeds,
            "metrics": list(self.metrics),
            "guarantees": [each.to_dict() for each in self.guarantees],
            # In words, as JSON has no infinity.
            "terms": [terms._asdict() | {"epsilon": repr(terms.epsilon)} for terms in self.terms],
            "ended": self.ended,
            "frozen": self.frozen,
            "tree": tree,
            "dtypes": [leaf.dtype.name for leaf in leaves],
        }
        # Those of a model in bfloat16 are no numbers to NumPy alone.
        metrics = [
            x if x.dtype.kind != "V" else x.astype(np.float32) for x in self.metrics.values()
        ]
        arrays: dict[str, Any] = {f"metric_{i}": values for i, values in enumerate(metrics)}
        arrays |= {"rounds": self.rounds, "times": np.array([self.seconds, self.rounds_per_second])}
        arrays |= {f"leaf_{i}": _plain(leaf) for i, leaf in enumerate(leaves)}
        text = json.dumps(header, sort_keys=True, allow_nan=False)
        entries = {"header": np.array(text), "digest": _digest(text, arrays), **arrays}
        with _files.writing("path", path):
            try:
                _files.create(path, lambda file: np.savez(file, **entries), mode=0o600)
            except FileExistsError:
                raise ValueError(
                    f"path is {str(path)!r}, which exists; results are never overwritten, name "
                    "another"
                ) from None
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Result":
        """Read a result that `save` wrote; `rows`, metrics, guarantees and models are the same.

        Guarantee: none of its own: the file's digest finds damage, and proves nothing of who made
        it or whether what it states is true. Load results from where you would load designs.

        Args:
            path: The file; ``.npz`` is appended where there is no suffix, as in `save`.

        Returns:
            The result, without plans; its arrays cannot be written to.

        Raises:
            FileNotFoundError: Where there is no such file.
            ValueError: For a truncated, changed or foreign file, one that contradicts itself, or
                what is no path.
        """
        path = _files.npz(path)
        try:
            result = cls._read(path)
            result._check_shapes()
        except FileNotFoundError:
            raise
        except Exception as error:  # a foreign file may lack, or have, anything
            raise ValueError(
                f"path is {os.fspath(path)!r}, which cannot be read "
                f"({type(error).__name__}: {error}); give a file that Result.save wrote with this "
                "version, or make it again"
            ) from None
        return result

    @classmethod
    def _read(cls, path: Path) -> "Result":
        """The result in a file, whatever is wrong with it raised as it comes."""
        arrays = _files.archive(path)
        text, stated = str(arrays.pop("header")), str(arrays.pop("digest"))
        if stated != _digest(text, arrays):
            raise ValueError("its content was changed")
        header = json.loads(text)
        if header["kind"] != _KIND or header["format"] != _FORMAT:
            raise ValueError(f"it is a {header['kind']} of format {header['format']}")
        leaves = [_rich(arrays[f"leaf_{i}"], kind) for i, kind in enumerate(header["dtypes"])]
        for array in (*arrays.values(), *leaves):
            array.flags.writeable = False
        seconds, rate = map(float, arrays["times"])
        terms = [Terms(**each | {"epsilon": float(each["epsilon"])}) for each in header["terms"]]
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
            terms=tuple(terms),
        )

    def _check_shapes(self) -> None:
        """Refuse what does not fit together, as a result put together by hand may not."""
        shape = (len(self.seeds), len(self.terms))
        if len(self.guarantees) != len(self.terms):
            raise ValueError(f"guarantees are {len(self.guarantees)} for {len(self.terms)} plans")
        for name, values in self.metrics.items():
            if values.shape != (len(self.rounds), *shape):
                raise ValueError(
                    f"metrics have {name!r} of shape {values.shape}; {len(self.rounds)} rounds, "
                    f"{shape[0]} seeds and {shape[1]} plans fit the rest"
                )
        if bad := [leaf.shape for leaf in jax.tree.leaves(self.params) if leaf.shape[:2] != shape]:
            raise ValueError(f"params have a leaf of shape {bad[0]}; all begin with {shape}")


def _index(name: str, value: Any, choices: Sequence[Any]) -> int:
    """The index of one of several; None where there is no choice."""
    shown = _validate.shown(list(choices))
    if value is None:
        if len(choices) != 1:
            raise ValueError(f"{name} is None for several; give one of {shown}")
        return 0
    known = isinstance(value, str | int | np.integer) and not isinstance(value, bool)
    if not known or list(choices).count(value) != 1:
        raise ValueError(f"{name} is {_validate.shown(value)}; give one of {shown}, by its number")
    return list(choices).index(value)


def _one_model(models: Any, agent: int | None) -> Any:
    """One model of several, leaves [n, ...], or their average."""
    leaves = jax.tree.leaves(models)
    if not leaves:
        raise ValueError("params are empty: this method releases no models")
    if agent is not None:
        number = _validate.integer("agent", agent, least=0, most=len(leaves[0]) - 1)
        return jax.tree.map(lambda leaf: leaf[number], models)

    def average(leaf: Any) -> np.ndarray:
        return np.asarray(leaf).mean(axis=0, dtype=np.float64).astype(leaf.dtype)

    return jax.tree.map(average, models)


def _complete(problem: Any, params: Any, frozen: str) -> Any:
    """The parameters of one model, frozen values in their places.

    Args:
        problem: The problem that was trained.
        params: Of one model, None in the places of frozen leaves.
        frozen: Digest of the frozen values that it was trained with, see `frozen_digest`.

    Raises:
        ValueError: For what is no problem, another problem's parameters, or other frozen values.
    """

    def shapes(tree: Any) -> Any:
        return [
            (jax.tree_util.keystr(path), leaf.dtype.name, leaf.shape)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]

    remedy = "give the problem that was trained"
    if not isinstance(problem, Problem):
        raise ValueError(f"problem is {_validate.shown(problem)}; {remedy}")
    stored, trained = shapes(params), shapes(jax.eval_shape(problem.init, jax.random.key(0)))
    if stored != trained:
        raise ValueError(
            f"problem trains {_validate.shown(trained)}, this result holds "
            f"{_validate.shown(stored)}; {remedy}"
        )
    if frozen_digest(problem.frozen) != frozen:
        raise ValueError(f"problem has other frozen values than the trained one; {remedy}")
    return parameters.merge(params, problem.frozen)


def _predictor(problem: Any, params: Any, frozen: str) -> Callable[[Any], Any]:
    """Return ``predict(x)`` of one model.

    Args:
        problem: The problem, or a module with ``apply``.
        params: Of one model.
        frozen: Digest of the frozen values that it was trained with, see `frozen_digest`.

    Raises:
        ValueError: For what cannot predict, or another problem's parameters.
    """
    if isinstance(problem, Problem):
        if problem.predict is None:
            raise ValueError(
                "problem has no predict; make it with problem.supervised, or give it one"
            )
        whole, apply = _complete(problem, params, frozen), jax.jit(problem.predict)
        return lambda x: apply(whole, _examples(problem, x))
    if isinstance(problem, type) or not callable(getattr(problem, "apply", None)):
        raise ValueError(
            f"problem is {_validate.shown(problem)}; give the problem, or a flax module"
        )
    if frozen:
        raise ValueError(
            f"problem is {_validate.shown(problem)}, which lacks the values that were frozen; give "
            "the problem that was trained"
        )
    apply = jax.jit(problem.apply)
    return lambda x: apply(params, x if isinstance(x, jax.core.Tracer) else _numbers(x))


def frozen_digest(frozen: Any) -> str:
    """Return what tells frozen values from others; empty where there are none.

    Args:
        frozen: Of a problem.
    """
    if frozen is None:
        return ""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(frozen)]
    return digest((frozen, names))


def _examples(problem: Problem, x: Any) -> Any:
    """Examples in the form of those that the model was trained on."""
    trained, traced = problem.x, isinstance(x, jax.core.Tracer)
    _validate.check_columns("x", x, problem.columns)
    records = x if traced else _numbers(x)
    if not records.ndim or records.shape[1:] != trained.shape[1:]:
        shape = ", ".join(map(str, ("M", *trained.shape[1:])))
        raise ValueError(f"x has shape {records.shape}; give examples [{shape}]")
    kind = jnp.result_type(trained.dtype)
    if traced:
        if x.dtype != kind:
            raise ValueError(
                f"x is {x.dtype} in a function that is traced, where its values cannot be checked; "
                f"give {kind}, as the model was trained on"
            )
        return x
    boolean = trained.dtype.kind == "b"
    if trained.dtype.kind in "iub":
        if (records.dtype.kind == "b") != boolean or records.dtype.kind == "f":
            whole = "booleans" if boolean else "integers"
            raise ValueError(f"x is {records.dtype}; the model was trained on {whole}, give such")
        if not boolean and records.size:
            # A cast would wrap around, and an embedding would take another word.
            low, high = np.iinfo(kind).min, np.iinfo(kind).max
            worst = records.max() if records.max() > high else records.min()
            if not low <= worst <= high:
                raise ValueError(
                    f"x holds {worst}; the model was trained on {trained.dtype}, give whole "
                    f"numbers from {low} to {high}"
                )
    return jnp.asarray(records.astype(trained.dtype))


def _numbers(x: Any) -> np.ndarray:
    """Examples as finite real numbers that 32 bits hold, else ValueError."""
    try:
        records = np.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"x is no array of numbers ({error}); give examples [M, ...]") from None
    if records.dtype.kind == "O" and all(type(entry) is int for entry in records.flat):
        try:
            records = records.astype(np.int64)
        except OverflowError:
            value = _validate.shown(max(records.flat, key=abs))
            raise ValueError(f"x holds {value}; give numbers of at most 32 bits") from None
    elif records.dtype.kind == "O":
        records = _validate.finite_array("x", records)
    if records.size and records.dtype.kind != "b":
        _validate.finite_array("x", records)
        _validate.check_range("x", records)
    return records


def _plain(leaf: np.ndarray) -> np.ndarray:
    """A leaf as NumPy alone can read it; narrow floats of models are no numbers to it."""
    if leaf.dtype.kind != "V":
        return leaf
    return np.ascontiguousarray(leaf).view(f"u{leaf.dtype.itemsize}")


def _rich(leaf: np.ndarray, kind: str) -> np.ndarray:
    """The inverse of `_plain`."""
    return leaf if leaf.dtype.name == kind else leaf.view(jnp.dtype(kind))


def _structure(tree: Any, leaves: list[np.ndarray]) -> Any:
    """Where each leaf stands, in lists and dicts that JSON can hold."""
    if tree is None:
        return None
    if type(tree) is dict:
        if not all(type(key) is str for key in tree):
            keys = _validate.shown(list(tree))
            raise ValueError(f"params hold a dict with the keys {keys}; name them by texts")
        return {"dict": {key: _structure(part, leaves) for key, part in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_structure(part, leaves) for part in tree]}
    if not isinstance(tree, np.ndarray | np.generic | jax.Array):
        raise ValueError(
            f"params hold a {type(tree).__name__}, which a file without code cannot; save "
            "dataclasses.replace(result, params=...) with dicts, lists and tuples of arrays"
        )
    if not (jnp.issubdtype(tree.dtype, jnp.number) or jnp.issubdtype(tree.dtype, jnp.bool_)):
        raise ValueError(
            f"params hold an array of {tree.dtype}, which is no number; save "
            "dataclasses.replace(result, params=...) with arrays of numbers alone, and no keys"
        )
    leaves.append(np.asarray(tree))
    return len(leaves) - 1


def _filled(tree: Any, leaves: Sequence[np.ndarray]) -> Any:
    """The inverse of `_structure`."""
    if tree is None or isinstance(tree, int):
        return None if tree is None else leaves[tree]
    ((kind, parts),) = tree.items()
    if kind == "dict":
        return {key: _filled(part, leaves) for key, part in parts.items()}
    return {"list": list, "tuple": tuple}[kind](_filled(part, leaves) for part in parts)


def _digest(header: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
