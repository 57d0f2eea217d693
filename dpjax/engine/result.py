"""What a run leaves, and what its callback sees on the way."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

import dpjax
from dpjax import _files
from dpjax._rounding import up
from dpjax.accounting.guarantee import Guarantee
from dpjax.engine import inference, saved
from dpjax.plans.plan import Plan

if TYPE_CHECKING:
    import pandas

__all__: list[str] = []


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
        s = inference.place("seed", seed, self.seeds)
        v = inference.place("plan", plan, labels if isinstance(plan, str) else range(len(labels)))
        model = inference.one(jax.tree.map(lambda leaf: leaf[s, v], self.params), agent)
        return model if problem is None else inference.complete(problem, model, self.frozen)

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
        return inference.predictor(problem, model, self.frozen)

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
        header = {
            "versions": {"dpjax": dpjax.__version__, "jax": jax.__version__},
            "seeds": self.seeds,
            "metrics": list(self.metrics),
            "guarantees": [each.to_dict() for each in self.guarantees],
            # In words, as JSON has no infinity.
            "terms": [terms._asdict() | {"epsilon": repr(terms.epsilon)} for terms in self.terms],
            "ended": self.ended,
            "frozen": self.frozen,
        }
        # Those of a model in bfloat16 are no numbers to NumPy alone.
        metrics = [
            x if x.dtype.kind != "V" else x.astype(np.float32) for x in self.metrics.values()
        ]
        arrays = {f"metric_{i}": values for i, values in enumerate(metrics)}
        arrays |= {"rounds": self.rounds, "times": np.array([self.seconds, self.rounds_per_second])}
        return saved.write(path, header, arrays, self.params)

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
            header, arrays, params = saved.read(path)
            metrics = {name: arrays[f"metric_{i}"] for i, name in enumerate(header["metrics"])}
            seconds, rate = map(float, arrays["times"])
            return cls(
                plans=(),
                seeds=tuple(header["seeds"]),
                rounds=arrays["rounds"],
                metrics=metrics,
                guarantees=tuple(map(Guarantee.from_dict, header["guarantees"])),
                params=params,
                seconds=seconds,
                rounds_per_second=rate,
                ended=header["ended"],
                frozen=header["frozen"],
                terms=tuple(
                    Terms(**each | {"epsilon": float(each["epsilon"])}) for each in header["terms"]
                ),
            )
        except FileNotFoundError:
            raise
        except Exception as error:  # a foreign file may lack, or have, anything
            raise ValueError(
                f"path is {os.fspath(path)!r}, which cannot be read "
                f"({type(error).__name__}: {error}); give a file that Result.save wrote with this "
                "version, or make it again"
            ) from None
