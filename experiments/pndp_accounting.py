"""Exact accounting for insiders beside Muffliato's bound: Fig. 2 of the MAFALDA-SGD paper.

No training: for every victim and attacker, what DP-D-SGD costs exactly (for gradients that are
fixed or functions of what the attacker sees, as the paper takes them, and for any gradients) and
what the published bound says, with either numerator, by distance in the graph.

The presets have the paper's graphs but for PeerTube, which is not here: ``--peertube FILE`` takes
its edge list.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from _common import claims, launch, looks, tables
from dpjax.accounting import views
from dpjax.commands import account
from dpjax.contrib import published
from dpjax.mechanism.participation import Participation
from dpjax.results import plots
from dpjax.topology import graphs, mixing

__all__ = ["PRESETS", "Config", "experiment", "main"]

LABELS = {
    "any": "any gradients",
    "view": "exact, gradients of the view (paper)",
    "plain": "Muffliato, plain numerator (Cyffers et al. 2022)",
    "squared": "Muffliato, squared numerator",
}
BOUNDS: tuple[published.Numerator, ...] = ("plain", "squared")
WEIGHTS = {"uniform": mixing.uniform_neighbors, "metropolis": mixing.metropolis_hastings}
Weights = Literal["uniform", "metropolis"]
SPARSE = "er:100:0.04605170185988092:42000"
"""The random graph of the authors' code: p = ln(n) / n in place of the paper's 0.2, seed 42."""
TITLES = {
    "er:100:0.2:1": "Erdos-Renyi (100, 0.2)",
    SPARSE: "Erdos-Renyi (100, 0.046)",
    "facebook_ego": "Facebook ego",
    "florentine": "Florentine",
    "uniform": "row-normalised",
    "metropolis": "Metropolis",
}
"""Graphs and weights as the figure names them, where their names say less."""
FAR = 3
"""Distances from here on are also pooled."""


@dataclass(frozen=True)
class Config:
    """Which graphs and attackers.

    Attributes:
        graphs: Networks, as `dpjax account --graph` takes them; one that is missing is passed over.
        peertube: Edge list of the PeerTube network, which the user supplies. The authors' is
            fedivertex, software peertube, follow graph 1, largest component.
        mixing: uniform (row-stochastic, the paper's) and metropolis.
        rounds: T; every agent takes part in every round.
        alpha: Renyi order.
        sigma: Noise multiplier.
        attackers: How many single attackers, 0, 1, ...; None is every agent. Attacker 0 is also
            told alone.
    """

    graphs: tuple[str, ...] = ("er:100:0.2:1", SPARSE, "facebook_ego", "florentine")
    peertube: Path | None = None
    mixing: tuple[Weights, ...] = ("uniform", "metropolis")
    rounds: int = 10
    alpha: float = 2.0
    sigma: float = 1.0
    attackers: int | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that make no figure."""
        if self.rounds < 1 or (self.attackers is not None and self.attackers < 1):
            raise ValueError(
                f"rounds is {self.rounds} and attackers {self.attackers}; give at least 1"
            )
        if not (self.alpha > 1 and self.sigma > 0 and self.graphs and self.mixing):
            raise ValueError(
                f"alpha is {self.alpha} and sigma {self.sigma}; give alpha above 1, sigma above 0, "
                "a graph and a mixing"
            )


PRESETS = {
    "tiny": Config(graphs=("florentine", "ring:6"), rounds=4, attackers=2),
    "cpu": Config(),
    "full": Config(graphs=("er:100:0.2:1", "er:100:0.2:2", "er:100:0.2:3", SPARSE,
                           "facebook_ego", "florentine")),
}  # fmt: skip


def squares(result: Any) -> np.ndarray:
    """mu^2 by (attacker, victim)."""
    return np.stack([item.mu**2 for item in result])


def losses(config: Config, graph: Any, weights: Weights) -> list[dict[str, Any]]:
    """Renyi losses by distance, of attacker 0 and of all attackers together."""
    matrix = WEIGHTS[weights](graph)
    n = len(matrix)
    selection = range(n if config.attackers is None else min(config.attackers, n))
    when = Participation(config.rounds, config.rounds, 1)
    algorithm = views.dsgd(matrix)
    observed = [algorithm.pndp(attacker) for attacker in selection]
    unit = config.alpha / 2 / config.sigma**2
    exact = [item.loss(when, gradients="view") for item in observed]
    wide = [value.loss(when) for value in observed]
    results = {"any": squares(wide), "view": squares(account.tighter_losses(exact, wide))}
    for numerator in BOUNDS:
        bound = published.muffliato_pndp(matrix, config.rounds, numerator=numerator)
        results[numerator] = bound.T[list(selection)]
    away = np.stack([account.distances(matrix, [attacker]) for attacker in selection])
    rows = []
    for scope, part in (("attacker 0", slice(0, 1)), ("all attackers", slice(None))):
        hops = away[part]
        for distance in (*range(1, int(hops.max()) + 1), FAR + 1000):
            position = hops >= FAR if distance > 1000 else hops == distance
            if not position.any():
                continue
            display = f">={FAR}" if distance > 1000 else str(distance)
            row: dict[str, Any] = {
                "graph": "", "mixing": weights, "attackers": len(hops), "scope": scope,
                "distance": display, "pairs": int(position.sum()), "rounds": config.rounds,
                "alpha": config.alpha, "sigma": config.sigma,
            }  # fmt: skip
            view = results["view"][part][position]
            flagged = np.stack([case.upper_bound for case in exact])[part][position]
            plain = squares(exact)[part][position]
            for name in LABELS:
                values = unit * results[name][part][position]
                ratio = values / (unit * view)
                rows.append(
                    row
                    | {
                        "algorithm": name, "mean": float(values.mean()),
                        "min": float(values.min()), "max": float(values.max()),
                        # Before the minimum with the loss of a larger view.
                        "uncapped": float(unit * plain.mean()) if name == "view" else None,
                        "upper_bounds": int(flagged.sum()) if name == "view" else 0,
                        "ratio_of_means": float(values.mean() / (unit * view.mean())),
                        "geometric_ratio": float(np.exp(np.log(ratio).mean())),
                    }
                )  # fmt: skip
    return rows


def experiment(config: Config, lab: launch.Lab) -> None:
    """Exact losses to insiders beside Muffliato's bound, by distance; nothing is trained."""
    stored = dataclasses.asdict(config)
    cells = []
    named = dict(zip(config.graphs, config.graphs, strict=True))
    if config.peertube is None:
        lab.say("peertube: passed over; give its edge list with --peertube FILE")
    else:
        named["peertube"] = str(config.peertube)
    for name, spec in named.items():
        try:
            graph = graphs.parse(spec)
        except ValueError as error:
            if name != "facebook_ego":
                raise
            lab.say(f"{name}: passed over: {error}")
            continue
        for weights in config.mixing:
            selection = {key: stored[key] for key in ("rounds", "alpha", "sigma", "attackers")}
            selection |= {"graph": spec, "mixing": weights}
            selection["fingerprint"] = mixing.fingerprint(WEIGHTS[weights](graph))

            def compute(
                _: Path, name: str = name, graph: Any = graph, weights: Weights = weights
            ) -> list[dict[str, Any]]:
                return [row | {"graph": name} for row in losses(config, graph, weights)]

            cell = f"{name.replace(':', '_')}_{weights}"
            cells.append((cell, selection, compute))
    if cells:
        report(config, lab, lab.cells(cells))


def report(config: Config, lab: launch.Lab, frame: Any) -> None:
    """Tables with the ratios to the published bounds, a verdict for each graph, and the figure."""
    keys = ["graph", "mixing", "scope"]
    for (graph, weights, scope), part in frame.groupby(keys, sort=False):
        lab.say(
            f"\n{graph}, {weights} mixing, {scope}: Renyi loss of order {config.alpha:g} at sigma "
            f"{config.sigma:g}, T = {config.rounds}"
        )
        table = []
        for distance, item in part.groupby("distance", sort=False):
            by = item.set_index("algorithm")
            view = by.loc["view"]
            line = {"distance": distance, "pairs": view["pairs"]}
            line |= {"exact: mean": view["mean"], "min": view["min"], "max": view["max"]}
            line |= {"uncapped": view["uncapped"], "any": by.loc["any", "mean"]}
            for name in BOUNDS:
                line[name] = by.loc[name, "mean"]
                line[f"{name} / exact"] = by.loc[name, "ratio_of_means"]
            table.append(line | {"upper bounds": view["upper_bounds"]})
        lab.say(tables.text(table))
        lab.say(verdict(part))
    names = list(dict.fromkeys(zip(frame["graph"], frame["mixing"], strict=True)))
    columns = len(config.mixing)
    from matplotlib.ticker import MaxNLocator

    figure, panels = plots.figure(-(-len(names) // columns), columns)
    display = frame[(frame["scope"] == "attacker 0") & ~frame["distance"].str.startswith(">")]
    display = display.assign(hops=display["distance"].astype(int))
    display = display[np.isfinite(display["max"]) & (display["min"] > 0)].sort_values("hops")
    for panel, (graph, weights) in zip(panels, names, strict=False):
        with plots.style():
            for number, (key, label) in enumerate(LABELS.items()):
                mine = (display["graph"] == graph) & (display["mixing"] == weights)
                part = display[mine & (display["algorithm"] == key)]
                look = looks.look(key)
                # Side by side, so that bars do not hide each other.
                panel.errorbar(
                    part["hops"] + 0.06 * (number - 1.5), part["mean"],
                    [part["mean"] - part["min"], part["max"] - part["mean"]], label=label,
                    color=look.color, marker=look.marker, linestyle=look.line, capsize=2.5,
                    elinewidth=0.9,
                )  # fmt: skip
            panel.set(
                yscale="log", xlabel="distance from attacker 0",
                title=f"{TITLES.get(graph, graph)}, {TITLES[weights]}",
                ylabel=f"Renyi loss of order {config.alpha:g}",
            )  # fmt: skip
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    lab.figure(
        figure,
        "pndp_accounting.svg",
        guarantee=f"none is run: DP-D-SGD at sigma = {config.sigma:g}, zeroing out one agent's "
        f"gradient in all T = {config.rounds} rounds, against agent 0",
        note="Mean, least and largest over victims. The exact loss holds for gradients that are "
        "fixed or functions of what the attacker sees, not for training; the loss for any "
        "gradients holds for it too.",
    )


CLAIMED = {"1": 1.1, "2": 10.0, f">={FAR}": 100.0}
"""How many times tighter counts as the paper's words: at all distances, by an order, by two."""


def verdict(part: Any) -> str:
    """How far the published bounds are above the exact loss, and what that says of the claims."""
    messages = []
    for distance, minimum in CLAIMED.items():
        rows = part[part["distance"] == distance].set_index("algorithm")
        for name in BOUNDS if len(rows) else ():
            ratio, geometric = rows.loc[name, ["ratio_of_means", "geometric_ratio"]]
            messages.append(
                f"  distance {distance} (our threshold: {minimum:g}x), {name}: {ratio:.3g}x "
                f"(geometric mean {geometric:.3g}x): "
                f"{claims.YES if ratio >= minimum else claims.NO}"
            )
    return "published over exact:\n" + "\n".join(messages)


main = functools.partial(launch.main, "pndp_accounting", PRESETS, experiment)
"""Command line."""


if __name__ == "__main__":
    raise SystemExit(main())
