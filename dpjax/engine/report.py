"""One page about a run: guarantees, curves, parameters, forecasts and how it was made."""

import collections
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from dpjax import _files, _html, _validate
from dpjax.accounting.arrays import Fields
from dpjax.accounting.parties import epsilon_text
from dpjax.accounting.rounding import up
from dpjax.plans import noise
from dpjax.plans.identity import described

__all__ = ()

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1rem; }
p { max-width: 50rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.card { border: 1px solid var(--line); border-radius: .5rem; padding: .2rem 1rem; margin: 1rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; text-align: left; }
th, td { vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
td:last-child { overflow-wrap: anywhere; }
@media (max-width: 40rem) { thead { display: none; } tr { display: block; padding: .4rem 0; }
  td { display: flex; gap: 1rem; padding: .1rem 0; border: 0; }
  td::before { content: attr(data-name); flex: 0 0 8rem; opacity: .7; } }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)); gap: 1rem; }
figure { margin: 0; background: #fff; border-radius: .5rem; }
svg { width: 100%; height: auto; }
summary { cursor: pointer; } code { background: var(--soft); overflow-wrap: anywhere; }
"""


# Results are of `dpjax.engine.result`, which imports this module: their type has no name here.


def cells(result: Any) -> list[Fields]:
    """Of each plan epsilon, who is protected, and the last metrics: mean +- standard error.

    Args:
        result: The run.
    """
    from dpjax.results import tables

    rows = []
    for plan, (terms, guarantee) in enumerate(zip(result.terms, result.guarantees, strict=True)):
        protected = "nobody"
        if guarantee.relation is not None:
            protected = f"{guarantee.unit} from {guarantee.attacker}"
        row = {"design": noise.display_name(terms["label"]), "epsilon": epsilon_text(guarantee)}
        row["protected"] = protected
        for name, values in result.metrics.items():
            row[name] = tables.measured(values[-1, :, plan])
        rows.append(row)
    return rows


def sizes(result: Any) -> str:
    """How many plans, seeds and rounds a run has.

    Args:
        result: The run.
    """
    return (
        f"{_validate.counted(len(result.terms), 'plan')}, "
        f"{_validate.counted(len(result.seeds), 'seed')}, "
        f"{_validate.counted(result.rounds[-1], 'round')}"
    )


def write_report(result: Any, path: _files.PathLike) -> Path:
    """Write the page, see `dpjax.engine.result.Result.report`.

    Args:
        result: The run.
        path: The file, which is replaced.

    Raises:
        ValueError: For a path that does not end in .html, or where the system refuses to write.
    """
    from dpjax.results import records

    file = Path(path)
    if file.suffix != ".html":
        raise ValueError(f"path is {str(path)!r}; end it in .html")
    # What problems are called by default is no title.
    is_default = result.problem in ("", "problem", "supervised")
    title = _html.escape(file.stem if is_default else result.problem)
    about = records.metadata(shlex.join(sys.argv), result.seeds)
    sections = [*_outcome(result), *_guarantees(result), *_curves(result), *_parameters(result)]
    sections += ["<h2>How it was made</h2>", _wide(_pairs(about))]
    page = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>dpjax: {title}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{title}</h1>{''.join(sections)}</body></html>\n"
    )
    with _files.writing("path", file):
        # Metrics and seeds are not for others to read, as in `Result.save`.
        _files.replace(file, page.encode(), mode=0o600)
    return file


def _outcome(result: Any) -> Iterator[str]:
    """The table of the last metrics, and what was forecast of the noise."""
    warning = ""
    if not any(guarantee.release for guarantee in result.guarantees):
        warning = (
            "This is a simulation: do not publish its models; a release (release=True) is for that."
        )
    yield (
        f"<p>{sizes(result)}. Mean and standard error over seeds at the last round. Metrics are "
        f"computed from test data and covered by no guarantee.</p><p><b>{warning}</b></p>"
    )
    # Metrics come before whom it protects.
    rows = [row | {"protected": row.pop("protected")} for row in cells(result)]
    yield _wide(_html.html_table(rows))
    # Of one agent: leaves are [S, V, n, ...].
    size = sum(math.prod(leaf.shape[3:]) for leaf in jax.tree.leaves(result.params))
    forecasts = []
    # A result that was loaded has no plans, and a method may release no models.
    for plan, row in zip(result.plans if size else (), rows, strict=False):
        if plan.why_no_forecast or plan.guarantee.relation is None:
            continue
        forecast = plan.forecast(size)
        outcome = {
            "design": row["design"],
            "forecast": forecast.level,
            "noise over largest drift": f"{forecast.ratio:.3g}",
            "around it at agents": f"{forecast.disagreement:.3g}",
        }
        forecasts.append(outcome | {name: row[name] for name in result.metrics})
    if forecasts:
        yield "<h2>Forecast and outcome</h2>"
        yield (
            "<p>The forecast reads the plan and no data: the noise in the average model over the "
            "largest distance that clipped gradients could move it, and the noise of agents' own "
            "models around it.</p>"
        )
        yield _wide(_html.html_table(forecasts))


def _guarantees(result: Any) -> Iterator[str]:
    """A card for each different guarantee."""
    yield "<h2>Guarantees</h2>"
    # Plans with one guarantee share a card.
    cards = collections.defaultdict(list)
    for terms, guarantee in zip(result.terms, result.guarantees, strict=True):
        card = guarantee._repr_html_()
        epsilons = guarantee.per_agent_epsilon or ()
        if min(epsilons, default=math.inf) < guarantee.epsilon:
            names = result.agent_names or range(len(epsilons))
            pairs = zip(names, epsilons, strict=True)
            table = _html.html_table(
                {"agent": name, "epsilon": up(epsilon)} for name, epsilon in pairs
            )
            card += f"<details><summary>Epsilon by agent</summary>{table}</details>"
        cards[card].append(noise.display_name(terms["label"]))
    for card, labels in cards.items():
        title = _html.escape(", ".join(dict.fromkeys(labels)))
        yield f"<div class='card'><h3>{title}</h3>{card}</div>"


def _curves(result: Any) -> Iterator[str]:
    """Every metric over rounds."""
    from dpjax.results import plots

    yield "<h2>Curves</h2><div class='curves'>"
    frame = result.to_frame()
    for metric in result.metrics:
        if frame[metric].notna().any():
            try:
                sheet = plots.lines(frame, "round", metric)
            except ValueError as error:
                # Several plans of one design: one line would mix them.
                yield f"<p>No figure of {_html.escape(metric)}: {_html.escape(str(error))}</p>"
                continue
            name = _html.escape(f"{metric} over rounds")
            yield f"<figure role='img' aria-label='{name}'>{plots.markup(sheet)}</figure>"
    yield "</div>"


def _parameters(result: Any) -> Iterator[str]:
    """Configs, folded."""
    yield "<h2>Parameters</h2>"
    if not result.plans:
        yield "<p>This result was loaded from a file, which holds no configs.</p>"
    for number, plan in enumerate(result.plans):
        design = noise.display_name(plan.config.label)
        name = f"{number}: {design}, {_validate.counted(plan.agents, 'agent')}"
        pairs = _pairs(described(plan.config))
        yield f"<details><summary>{_html.escape(name)}</summary>{_wide(pairs)}</details>"


def _pairs(values: Fields) -> str:
    """Names and values as a table; those of parts as ``part.name``."""

    def flat(name: str, value: object) -> Iterator[Fields]:
        if isinstance(value, dict):
            for key, part in value.items():
                yield from flat(f"{name}.{key}".lstrip("."), part)
        elif value is not None:
            yield {"name": name, "value": value}

    return _html.html_table(flat("", values))


def _wide(content: str) -> str:
    return f"<div class='wide'>{content}</div>"
