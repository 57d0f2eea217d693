"""The shared plan file of a project: what all of its sites run, in two files that each reads.

``plan.json`` holds the settings as plain values, the sites' names and public keys, the schema and
the digest of ``plan.npz``, whose arrays are the mixing matrix and the noise. Neither is trusted:
every site makes the plan again from them, audits the noise as it will run, and computes epsilon
itself. Values name classes of this package alone, so reading a file runs nobody's code.

A project is a row of such plans, its *phases*. The file of a later one names the one before, which
stands beside it, and holds how far that phase's sites came, signed by each of them.
"""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import io
import itertools
import json
import re
import textwrap
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import networkx as nx
import numpy as np

from dpjax import _files, _validate
from dpjax._version import __version__
from dpjax.accounting import budget as budget_
from dpjax.accounting import parties
from dpjax.accounting.guarantee import Guarantee
from dpjax.accounting.rounding import down, up
from dpjax.algorithms.exchange import Trusted
from dpjax.algorithms.federated import Federated
from dpjax.data.partition import Partition
from dpjax.learning.problem import Problem
from dpjax.learning.supervised import supervised
from dpjax.plans import calibration, compatibility, statements
from dpjax.plans.calibration import Calibrated, Factored, Target
from dpjax.plans.noise import DESIGNS, Correlated, Polynomial
from dpjax.plans.plan import Config, Plan, make
from dpjax.plans.protect import Budget
from dpjax.plans.settings import (
    MODEL_OPTIONS,
    MODELS,
    SECTIONS,
    Section,
    check_keys,
    check_sections,
    config_parts,
    constructed,
    naming,
    part_titles,
    titles_of,
)
from dpjax.plans.sums import CalibratedCode, Discrete
from dpjax.protocols import Arrays, Models
from dpjax.sites import measures, wire
from dpjax.sites.data import Schema
from dpjax.sites.identity import Refused, Renewal, Roster, certificate_of
from dpjax.sites.ledger import PLAN_ITEM, PROJECT_ITEM
from dpjax.sites.measures import Measure
from dpjax.sites.meeting import digest_of
from dpjax.sites.peers import PeerTerms
from dpjax.sites.site import group_of
from dpjax.topology import graphs, nodes
from dpjax.topology.mixing import Mixing, metropolis_hastings

__all__ = ["Project"]

_Records: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Records, and their labels as the loss takes them."""
PROTOCOL = 2
"""Changed with the bytes that sites exchange, and with what a plan file holds."""

_PAGE = Path(__file__).with_name("document.txt")
_AVERAGING = """\
- Averaging after the last round: {rounds:,} messages of {parameters:,} numbers, made of
  earlier messages alone.
"""
_TRAINED = (
    "The model has {parameters:,}. Records reach a message through clipped gradients alone, with "
    "noise."
)
_MEASURED = (
    "They are sums over its records of a public function, clipped, with noise. A bound of the\n"
    "  records' number is public, the number is not."
)
_LEARNT = "a site has a model of its own, which may be published with the statement"
_OPENED = "all sites have {}; all this may be published with the statement"
_KEPT = (
    "Links are encrypted, with certificates at both ends. At the end {}. For its operator a site "
    "keeps the audit file, digests of all messages and its metrics."
)
_SPENDING = """
## What all phases spend

This is phase {phase} of a project. Totals were fixed before; each site's ledger holds them. The
statement above is of this phase alone. Epsilons of phases do not add up, so more is left than
their difference. All are at delta {delta:g}.

| site | its records | total | phases | epsilon of each, rounded up | left |
| --- | --- | --- | --- | --- | --- |
{lines}
"""
_LEFT = "it still has its keys and all that it saw, and is one of those that may collude"
_GROUP = """\
- A group's sites delete all copies of its secret's file after the run.
"""
_GOSSIP = "one message, the same to all of its neighbours"
_ADDING = (
    "one vector under masks to the site that adds up, which all are in turn, and encrypted shares "
    "of its masks to all; they learn the sum, with which all end"
)
_OF_GROUP = (
    "A group's secret protects from non-members alone, also from several together. It is replaced "
    "when a member leaves."
)
_TOGETHER = {
    "own": "All other sites together, a coalition, learn no more than the epsilon says.",
    "group": _OF_GROUP,
    "shared": _OF_GROUP,
    "shares": "A coalition of sites is covered as far as the statement counts colluders, the site "
    "that adds up among them.",
    "links": "A coalition of sites is covered only where the statement names it. Pair keys protect "
    "only if the names in the roster are distinct organisations.",
}
"""What several sites learn that put together what they have, by who holds secrets of noise."""
_PYTHON = {
    r"release=True: give release=False, which must not be published, or": "a release, as of sites:",
    r"; a run in one process holds all keys, so it is a simulation \(release=False\)": "",
    r",? or release=False": "",
    r"release is True with": "sites release, with",
    r"give Budget\(epsilon, delta, accountant='(\w+)'\)": r'give accountant = "\1" under [budget]',
    r"method=Federated\(aggregate=...\) and attacker='aggregator'(?! or)": (
        'method Federated, and attacker = "aggregator" under [protect]'
    ),
    r"\b(dp\.\w+\.)?([A-Z]\w+)\([^()]*\)": r"\2",
    r"\b(\w+)=(?=\S)": r"\1 = ",
}
"""What errors of plans say in Python, and how a file of settings has it."""
_PARAGRAPHS = re.compile(r"(?<=[.]) (?=NOT |Protected |A person |Sites: )")
_WIDTH = 100
_REMEDY = "get both files again"
_REQUIRED = ("rounds", "network", "model", "protect", "budget", "noise", "sampler", "optimizer")
_DEFAULTS = {"seed": 0, "average_rounds": 0, "data": {}}
_SUMS = Discrete.__name__
"""The noise of sums among sites."""
_DRAWN = {type(part).__name__: part.terms.released for part in DESIGNS.values()} | {_SUMS: True}
"""Classes of noise by name, and whether sites draw it."""
_KEYS = {"protocol", "package", "settings", "roster", "schema", "arrays", "after"}
_MOST_PHASES = 50
_LEAST_LEFT = 0.05
"""Of a total: with less left it is spent, as finite precision and roundings take a part."""
_START = "start_"
"""How the names of arrays begin that a phase's first model is made of."""
# What a file may hold at most: limits of memory, not of plans.
_MOST_SITES = 500
_MOST = {"rounds": 100_000, "seed": 2**32 - 1, "average_rounds": 100_000, "spoiled": 100_000}
SPOILED = 3
"""Rounds without a sum after which sites stop, where a plan does not say."""
_MOST_TEXT = 2**22
_MOST_ARRAYS = 2**28


class Spending(NamedTuple):
    """What a site may spend of some records in all phases, and what is left, in words.

    Attributes:
        site: Its name.
        records: Which of its records.
        total: Epsilon of all phases.
        phases: Their numbers, from 1.
        epsilons: What each of them costs, rounded up.
        left: For later phases.
    """

    site: str
    records: str
    total: str
    phases: str
    epsilons: str
    left: str

    def __str__(self) -> str:
        """As a line."""
        return (
            f"{self.site}, records {self.records}: total {self.total}, phases {self.phases} with "
            f"epsilon {self.epsilons}, left {self.left}"
        )

    @property
    def row(self) -> str:
        """As a table's row."""
        return f"| {' | '.join(self)} |"


@dataclass(frozen=True, eq=False, repr=False)
class Project:
    """What the sites of a project run; `write` makes its files, `Project.load` reads them.

    Guarantee: that of ``plan.guarantee``, computed by whoever loads the files from the noise that
    they hold: whoever writes them is trusted for nothing. Sites whose `terms` are equal run the
    same plan, model and schema, under the same names and keys.

    Attributes:
        settings: Plain values, as `write` takes them.
        roster: The sites' names, in the plan's order, and their public keys.
        schema: What the columns of all sites' records mean.
        plan: Made from the settings and the stored noise, and audited.
        digest: SHA-256, hex, of the content of both files.
        module: The model, or what is measured in its place.
        shapes: Of one model's leaves, a tree.
        loss: Name of the loss, for `dpjax.sites.data.Records.targets`.
        names: The sites, in the plan's order.
        seed: Of the first models and of batches, not of noise.
        average_rounds: How often sites average on after the last round, without noise.
        columns: The schema, as it was written.
        totals: What each site may spend in all phases, by name; empty where the plan has none.
        before: The phase before this one; None of a first one.
        standings: How far its sites came, by name: of those that go on.
        round: The round of it after which they go on.
        start: The first models of this phase, of one site; None where the seed draws them.

    Example:
        >>> from dpjax.sites.project import Project
        >>> Project.load("plan.json")
        Traceback (most recent call last):
            ...
        FileNotFoundError: plan.json does not exist; name a file that does
    """

    settings: Section
    roster: Roster
    schema: Schema
    plan: Plan
    digest: str
    module: nn.Module | Measure
    shapes: Any
    loss: str
    names: tuple[str, ...]
    seed: int
    average_rounds: int
    columns: Section
    totals: Mapping[str, Budget]
    before: "Project | None" = None
    standings: Mapping[str, wire.Standing] = field(default_factory=dict)
    round: int = 0
    start: Models | None = None

    @classmethod
    def load(cls, path: _files.PathLike) -> "Project":
        """Return the project of a plan file, and of the arrays beside it.

        Args:
            path: ``plan.json``; the arrays are in the file of that name with the suffix ``.npz``.
                The files of earlier phases stand beside it.

        Raises:
            FileNotFoundError: Where one of the two is missing, or a phase before.
            ValueError: For files that are damaged, changed, too large or of another protocol, for
                settings that sites cannot run, for less noise than the budget asks for, and for a
                phase that does not follow from the one before, or passes a site's total.
        """
        return cls._load(Path(path), _MOST_PHASES)

    @classmethod
    def _load(cls, path: Path, most: int, followed: str | None = None) -> "Project":
        """The project of a file, which may have so many phases; of a digest that one follows."""
        stored = path.with_suffix(".npz")
        for file in (path, stored):
            with _files.reading(file, _REMEDY):
                file.stat()
        # Hostile values fail in every way.
        with _files.reading(path, _REMEDY), naming({}, f"{path}: "), _as_file():
            text = _content(path, _MOST_TEXT).decode()
            content = json.loads(text)
            digest = content.pop("digest", None)
            # Byte for byte: no key stands twice, and nobody has edited a value.
            if content.keys() != _KEYS or text != _sealed(content):
                raise ValueError(
                    f"its content was changed, or is not that of a plan file; {_REMEDY}"
                )
            if followed not in (None, digest):
                raise ValueError(
                    f"a phase follows the plan {followed}, which is another; {_REMEDY}"
                )
            if content["protocol"] != PROTOCOL:
                raise ValueError(f"its protocol is not {PROTOCOL}; use the dpjax that wrote it")
            settings = content["settings"]
            roster = Roster.from_json(content["roster"])
            target = _target(settings, roster)
            schema = Schema.of(content["schema"])
            # Three arrays [n, n] at most, a strategy; and the first models of a later phase, or one
            # that is evaluated.
            entries = 4 * target.agents**2 + target.rounds**2
            if measures.is_measure(settings):
                entries = _MOST_ARRAYS
            elif content["after"] is not None:
                entries += _size(_trained(settings["model"], schema)[1])
            data = _content(stored, min(2**16 + 8 * entries, _MOST_ARRAYS))
            if _digest(data) != content["arrays"]:
                raise ValueError(f"its arrays are damaged, or of another plan; {_REMEDY}")
            evaluated, stored_arrays = measures.split(_arrays(data))
            module, shapes, loss = _model(settings["model"], schema, evaluated)
            of_noise = {k: v for k, v in stored_arrays.items() if not k.startswith(_START)}
            plan = _stored_plan(target, of_noise)
            project = cls(
                settings,
                roster,
                schema,
                plan,
                digest,
                module,
                shapes,
                loss,
                tuple(roster),
                settings["seed"],
                settings["average_rounds"],
                content["schema"],
                _totals(settings, tuple(roster)),
            )
            after = content["after"]
            if after is not None:
                if most <= 1:
                    raise ValueError(f"it has more than {_MOST_PHASES} phases; begin a new project")
                earlier = path.parent / _file_name(after["file"])
                if not (earlier.exists() and earlier.with_suffix(".npz").exists()):
                    raise ValueError(
                        f"the phase before it, {earlier.name} and its .npz, is not beside it; get "
                        "the files of all phases"
                    )
                before = cls._load(earlier, most - 1, str(after["plan"]))
                project = project._following(before, after, stored_arrays)
            project._check_totals()
            return project

    def _following(self, before: "Project", after: Section, arrays: Arrays) -> "Project":
        """This plan as the phase after another one, else raise ValueError."""
        old = before.roster
        for text in after["renewals"]:
            old = old.renewed(Renewal.from_bytes(base64.b64decode(text)))
        standings = {}
        for text in after["standings"]:
            standing = _standing_of(text)
            standings[standing.name] = standing
        round = after["round"]
        _check_standings(standings, before, old, self.names, round)
        for phase in before.phases:
            for name in self.names:
                if name in phase.names and phase.roster[name] != self.roster[name]:
                    raise ValueError(
                        f"{name} has another key than in an earlier phase; give its certificate of "
                        "the key that the first plan pins, or another name"
                    )
                # One that the first plan lacks cannot be fixed before it any more.
                if name in phase.names and phase.totals.get(name) != self.totals.get(name):
                    raise ValueError(
                        f"[total] of {name} is {_shown(self.totals.get(name))}, and was "
                        f"{_shown(phase.totals.get(name))}; a total is fixed before the first phase"
                    )
        if not self.totals:
            raise ValueError("[total] is missing, without which no phase follows; see [total]")
        leaves, structure = jax.tree.flatten(self.shapes)
        start = None
        if f"{_START}0" in arrays:
            values = [arrays[f"{_START}{number}"] for number in range(len(leaves))]
            for value, leaf in zip(values, leaves, strict=True):
                is_alike = value.shape == leaf.shape and value.dtype == leaf.dtype
                if not is_alike or not np.isfinite(value).all():
                    raise ValueError("its first models are none of this model's")
            start = jax.tree.unflatten(structure, values)
        return dataclasses.replace(
            self, before=before, standings=standings, round=round, start=start
        )

    def _check_totals(self) -> None:
        """Refuse phases that pass a site's total."""
        for name in self.totals:
            if name in self.names:
                phases = self.phases_of(name, self.account)
                with naming({}, f"{name}: "):
                    self._check_left(name, phases[:-1])
                    self.guarantee_of(name, [phase.digest for phase in phases])

    def _check_left(self, name: str, earlier: Sequence["Project"]) -> None:
        """Refuse a phase that costs a site more than earlier ones leave of its total."""
        cost = self.of_site(name).epsilon
        costs = [phase.of_site(name) for phase in earlier]
        left = float(np.max(budget_.remaining(self.totals[name], costs).epsilon))
        # Squares add up, so that what is left rounds a little otherwise.
        if cost > left * (1 + 1e-6):
            remedy = "give at most that for all: the sites of a sum state one"
            if not self.guarantee.sum_only:
                remedy = (
                    f"give at most that, for each site: epsilon = {{ {name} = {left:.4g}, ... }}"
                )
            raise ValueError(
                f"[budget] epsilon is {cost:.6g}, and the total of {self.totals[name].largest:g} "
                f"leaves {left:.6g}; {remedy}"
            )

    def total_of(self, name: str) -> Budget | None:
        """What a site may spend in all phases; None where no phase so far says it.

        Args:
            name: The site's.
        """
        stated = [phase.totals[name] for phase in self.phases if name in phase.totals]
        return stated[-1] if stated else None

    @property
    def phases(self) -> list["Project"]:
        """All phases in their order, this one last."""
        return [*([] if self.before is None else self.before.phases), self]

    def phases_of(self, name: str, account: str) -> list["Project"]:
        """The phases in which a site takes part with records of one account.

        Args:
            name: The site's.
            account: "training" or "held_out".
        """
        phases = [phase for phase in self.phases if name in phase.names]
        empty = self._unbegun(name)
        return [phase for phase in phases if phase.account == account and phase not in empty]

    def _unbegun(self, name: str) -> list["Project"]:
        """The phases of which a site itself signed that they did not begin.

        Others may not know whether it sent something: a hostile neighbour may keep that back.
        """
        unbegun = []
        for later in self.phases[1:]:
            standing = later.standings.get(name)
            if standing is not None and not standing.run and later.before is not None:
                unbegun.append(later.before)
        return unbegun

    @property
    def accounts(self) -> list[str]:
        """Which records phases read, each a part of a site's: no record is in two of them."""
        return sorted({phase.account for phase in self.phases})

    @property
    def phase(self) -> int:
        """Its number among the project's phases, from 0."""
        return len(self.phases) - 1

    @property
    def root(self) -> str:
        """Digest of the project's first plan, by which the project is known."""
        return self.phases[0].digest

    @functools.cached_property
    def guarantee(self) -> Guarantee:
        """What this phase guarantees at sites, finite precision included."""
        size = _size(jax.eval_shape(self.plan.method.payload, self.shapes))
        return _stated(statements.with_precision_cost(self.plan, size))

    def of_site(self, name: str) -> Guarantee:
        """What this phase guarantees a site.

        Args:
            name: The site's.
        """
        others = [number for number, other in enumerate(self.names) if other != name]
        return self.guarantee.survivors(others)

    def guarantee_of(self, name: str, runs: Sequence[str], insecure: bool = False) -> Guarantee:
        """What some runs guarantee a site together: its total, where there is one.

        Runs that read other records than this phase add nothing to what it states.

        Args:
            name: The site's.
            runs: Digests of their plans, each as often as it was run.
            insecure: Whether links were not encrypted.

        Raises:
            ValueError: For runs that pass the total, and plans that are no phases of this project.
        """
        costs = []
        known = {phase.digest: phase for phase in self.phases}
        for digest in runs:
            if digest not in known:
                raise ValueError(
                    f"there is a run of the plan {digest}, which is no phase before this one, so "
                    "that its cost is not known; name a plan that follows from it"
                )
            phase = known[digest]
            if phase.account == self.account:
                costs.append(phase.of_site(name).replace(insecure=insecure))
        total = self.totals.get(name)
        if total is None or not costs:
            return self.of_site(name).replace(insecure=insecure)
        stated = costs[0].within(total)
        for cost in costs[1:]:
            stated = stated.followed_by(cost, planned=False)
        return stated

    def remaining(self, name: str, account: str = "training") -> budget_.Remaining:
        """What all phases so far leave of a site's total for later ones.

        Args:
            name: The site's.
            account: Of whose records.

        Raises:
            ValueError: Where it has no total.
        """
        total = self.total_of(name)
        if total is None:
            raise ValueError(f"[total] of {name} is missing; a first plan fixes it")
        costs = [phase.of_site(name) for phase in self.phases_of(name, account)]
        return budget_.remaining(total, costs)

    @property
    def measure(self) -> Measure | None:
        """What is measured; None where a model is trained."""
        return self.module if isinstance(self.module, Measure) else None

    @property
    def account(self) -> str:
        """Which of a site's records are read: "training" or "held_out" ones.

        Which are held out follows from their number, the share and the seed: two plans of another
        seed may read the same records under both names.
        """
        return Measure.account if self.measure is None else self.measure.account

    @property
    def spoiled(self) -> int:
        """Rounds without a sum after which sites that add up stop: each is charged."""
        return int(self.settings.get("spoiled", SPOILED))

    def described(self) -> dict[str, np.ndarray]:
        """Return what whoever uses a model needs, and the seed by which records were held out."""
        return {**self.schema.described(), "seed": np.array(self.phases[0].seed)}

    def terms(self) -> dict[str, str]:
        """Return what all sites compare, by item in words: a digest each."""
        leaves = jax.tree.leaves_with_path(self.shapes)
        return {
            PLAN_ITEM: self.digest,
            PROJECT_ITEM: self.root,
            "roster": self.roster.digest,
            # Models of equal leaves may still compute another function.
            "model": _digest(f"{self.module} {self.loss} {leaves}".encode()),
            "schema": self.schema.digest,
            "package version": _digest(__version__.encode()),
            "protocol version": _digest(f"{PROTOCOL}".encode()),
        }

    def problem(
        self, x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, name: str
    ) -> Problem:
        """Return the problem of one site's records, of one agent.

        Args:
            x: [m, ...] training records, each in the schema's shape.
            y: [m] labels as the loss takes them.
            x_test: Records that only measure, at the site alone.
            y_test: Their labels.
            name: The site's.

        Raises:
            ValueError: For records of another shape, and labels that the loss does not take. A run
                refuses another number of records than the plan says, and fewer than a batch has.
        """
        if x.shape[1:] != self.schema.shape:
            raise _validate.refusal("shape of x", x.shape, f"the schema's is {self.schema.shape}")
        data = (x, y), (x_test, y_test)
        problem = _problem(self.settings["model"], self.module, self.loss, data, name)
        if self.start is None:
            return problem
        return dataclasses.replace(problem, init=functools.partial(_given, self.start))

    def below(self, epsilon: float) -> list[str]:
        """Return the sites whose totals leave less than a budget for this phase.

        Args:
            epsilon: The budget.
        """
        names = []
        for name, total in self.totals.items():
            earlier = self.phases_of(name, self.account)[:-1]
            costs = [phase.of_site(name) for phase in earlier]
            if np.max(budget_.remaining(total, costs).epsilon) < epsilon:
                names.append(name)
        return names

    def spending(self) -> list[Spending]:
        """Return what each site may spend, has spent and has left of its records."""
        entries = []
        for account in self.accounts:
            records = "to train on" if account == "training" else "held out"
            for site, total in self.totals.items():
                phases = self.phases_of(site, account)
                entry = Spending(
                    site,
                    records,
                    total=f"{total.largest:g}",
                    phases=", ".join(str(phase.phase + 1) for phase in phases) or "none",
                    epsilons=", ".join(up(phase.of_site(site).epsilon) for phase in phases) or "0",
                    left=down(float(np.max(self.remaining(site, account).epsilon)), 4),
                )
                entries.append(entry)
        return entries

    def document(self) -> str:
        """Return a page in Markdown for a data protection officer, made from the plan."""
        guarantee = _stated(self.plan)
        rows = []
        for number, name in enumerate(self.names):
            senders = self.plan.senders[number]
            # Of pair keys each link has a secret of its two ends.
            sharing = senders if guarantee.secrets == "links" else group_of(self.plan, number)
            neighbours = ", ".join(self.names[sender] for sender in senders)
            others = ", ".join(self.names[other] for other in sharing if other != number)
            rows.append(f"| {number} | {name} | {neighbours} | {others or 'nobody'} |")
        sending = _GOSSIP
        numbers = _size(jax.eval_shape(self.plan.method.payload, self.shapes))
        if isinstance(self.plan.noise, CalibratedCode):
            sending = _ADDING
            numbers = self.plan.noise.code.padded
        parameters = _size(self.shapes)
        contents = _TRAINED.format(parameters=parameters)
        learnt = _LEARNT
        if self.measure is not None:
            contents = _MEASURED
            learnt = _OPENED.format(self.measure.page)
        averaging = ""
        if self.average_rounds:
            averaging = _AVERAGING.format(rounds=self.average_rounds, parameters=parameters)
        fault = budget_fault(self.plan)
        warning = f"\n{textwrap.fill(f'**Warning**: {fault}.', _WIDTH)}\n" if fault else ""
        columns = [f"- {column.described}" for column in self.schema.columns]
        columns.append(f"- the label, {self.schema.label.described}")
        paragraphs = _PARAGRAPHS.split(guarantee.statement())
        spending = ""
        if self.totals:
            earlier = {name for phase in self.phases for name in phase.names} - {*self.names}
            lines = [entry.row for entry in self.spending()]
            if earlier:
                # A list begins after an empty line.
                lines += ["", *(f"- {name} has left: {_LEFT}" for name in sorted(earlier))]
            delta = next(iter(self.totals.values())).delta
            spending = _SPENDING.format(phase=self.phase + 1, delta=delta, lines="\n".join(lines))
        return _PAGE.read_text(encoding="utf-8").format(
            project=self,
            sites="\n".join(rows),
            columns="\n".join(columns),
            contents=contents,
            learnt=textwrap.fill(_KEPT.format(learnt), _WIDTH + 20),
            averaging=averaging,
            sending=sending,
            numbers=numbers,
            counts="does not tell" if self.plan.counts is None else "tells",
            statement="\n\n".join(textwrap.fill(text, _WIDTH) for text in paragraphs),
            warning=warning,
            spending=spending,
            together=textwrap.fill(_TOGETHER[str(guarantee.secrets)], _WIDTH),
            group=_GROUP if guarantee.secrets in ("group", "shared") else "",
        )


def budget_fault(plan: Plan) -> str:
    """Return what is absurd in a budget, of which a plan holds all the same; "" for nothing.

    Args:
        plan: Any.
    """
    with warnings.catch_warnings(record=True) as faults:
        warnings.simplefilter("always")
        calibration.check_delta(plan.config, plan.agents, plan.counts)
    texts = [str(fault.message) for fault in faults]
    if plan.guarantee.epsilon > parties.VACUOUS:
        texts.append(f"epsilon is vacuous: odds may change by more than e^{parties.VACUOUS:g}")
    return "; ".join(texts)


def write(settings: Section, roster: Roster, schema: Section, path: _files.PathLike) -> Project:
    """Make the plan of a project and write its two files, which are then the same at all sites.

    Args:
        settings: As `dpjax train` takes them, without what is a site's own: the sections network
            (``edges``, pairs of names, or ``graph``, a file of them), model, protect, budget, noise
            (one), sampler, optimizer, method, and data (``counts`` by site, where the sampler needs
            them); ``rounds``,
            ``seed``; ``average_rounds``, which is how often models are averaged after the last
            round; ``spoiled``, after how many rounds without a sum sites that add up stop.
        roster: The sites, whose order becomes the plan's: where settings number agents, as for
            subgroups, they number the roster from 0.
        schema: As `dpjax.sites.data.Schema.of` takes it.
        path: Of ``plan.json``; ``plan.npz`` stands beside it. Neither may exist.

    Returns:
        What the files hold, as every site will load it.

    Raises:
        ValueError: For settings that sites cannot run, with the reason, or a path that cannot be
            written.
    """
    return _written(Path(path), settings, roster, schema)


def follow(
    before: _files.PathLike,
    standings: Sequence[_files.PathLike],
    path: _files.PathLike,
    *,
    joining: Sequence[_files.PathLike] = (),
    renewals: Sequence[_files.PathLike] = (),
    changes: Section | None = None,
    schema: Section | None = None,
) -> Project:
    """Make the plan of a phase after another one and write its two files.

    Members are the sites whose standings are given, and those that join. They go on after the last
    round that all standings have, from the mean of their models, which are public; from new models
    where the model is another one. The phase has the rounds that are left, and what all members'
    totals leave, unless the changes say otherwise.

    Args:
        before: The plan file of the phase before.
        standings: Files that `dpjax.sites.site.SiteLoop.standing` wrote.
        path: Of the new plan, in the folder of the one before.
        joining: Certificates of sites that join.
        renewals: Files of keys that sites have renewed since the first plan, which pins them.
        changes: Sections of settings in place of those of the phase before.
        schema: In place of its schema.

    Returns:
        What the files hold, as every site will load it.

    Raises:
        ValueError: For standings that do not belong together, or are not of a majority of the
            sites before; a total that leaves nothing; and what `write` refuses.

    Example:
        >>> from dpjax.sites.project import follow
        >>> follow("plan.json", ["lyon.standing"], "plan-2.json")
        Traceback (most recent call last):
            ...
        FileNotFoundError: plan.json does not exist; name a file that does
    """
    path = Path(path)
    if path.absolute().parent != Path(before).absolute().parent:
        raise _validate.refusal("path", str(path), f"give one in the folder of {before}")
    _check_new(path)
    old = Project.load(before)
    accepted = old.roster
    signed = []
    for file in renewals:
        with _files.reading(file, "get the file of the renewal again"):
            content = Path(file).read_bytes()
            accepted = accepted.renewed(Renewal.from_bytes(content))
        signed.append(base64.b64encode(content).decode())
    texts = {}
    standing_by_name = {}
    models = {}
    for file in standings:
        with _files.reading(file, "get the file again"):
            text, arrays = _files.unpacked(file)
            standing = _standing_of(text)
        if standing.plan != old.digest:
            raise ValueError(
                f"{file} is of {standing.name} after the plan {standing.plan[:16]}, and {before} "
                f"is {old.digest[:16]}; give standings and plan of one phase"
            )
        standing_by_name[standing.name] = standing
        texts[standing.name] = text
        models[standing.name] = arrays
    entrants = dict(map(certificate_of, joining))
    doubles = sorted(standing_by_name.keys() & entrants.keys())
    _validate.refuse(
        {f"{', '.join(doubles)} goes on by its standing; do not join it": bool(doubles)}
    )
    names = [name for name in old.names if name in standing_by_name]
    roster = Roster({name: old.roster[name] for name in names} | entrants)
    shared = [{round for round, _ in standing.rounds} for standing in standing_by_name.values()]
    common = set.intersection(*shared) if shared else set()
    if not common:
        spans = [
            f"{name} {min(r)} to {max(r)}"
            for name, r in zip(standing_by_name, shared, strict=True)
            if r
        ]
        raise ValueError(
            f"standings have no round in common ({', '.join(spans)}); start the site that is "
            "behind again until it has caught up, or leave it out and let it join"
        )
    round = max(common)
    with naming({}, "standings: "):
        _check_standings(standing_by_name, old, accepted, tuple(roster), round)
    changes = measures.as_phase(changes or {})
    last_begun = _last_begun(old, standing_by_name, {*entrants})
    settings = _following_settings(old, last_begun, tuple(roster), round, changes)
    after = {
        "file": Path(before).name,
        "plan": old.digest,
        "round": round,
        "renewals": signed,
        "standings": [texts[name] for name in names],
    }
    start = _mean_models(old, standing_by_name, models, round)
    meaning = old.columns if schema is None else schema
    if settings["model"] != old.settings["model"] or schema is not None:
        start = []
    seed = old.phases[0].seed
    return _written(path, settings, roster, meaning, after=after, start=start, first_seed=seed)


def _last_begun(
    old: Project, standings: Mapping[str, wire.Standing], entrants: set[str]
) -> Project:
    """The last phase that has begun, by standings after one; refused with some who join."""
    phase = old
    while not any(standing.run for standing in standings.values()):
        if phase.before is None:
            raise ValueError("standings are of a first phase that has not begun; plan it again")
        standings = phase.standings
        phase = phase.before
    silent = [] if phase is old else sorted(entrants & {*old.names})
    _validate.refuse(
        {
            f"{', '.join(silent)} was to take part in the phase before, which has not begun; give "
            "its standing, as it alone knows what it sent, or leave it out": bool(silent)
        }
    )
    return phase


def _written(path: Path, *parts: Any, **options: Any) -> Project:
    """Write the two files of a plan, and return what they hold."""
    _check_new(path)
    with _as_file():
        arrays, content = _made(*parts, **options)
    written: list[Path] = []
    try:
        for file, data in (path.with_suffix(".npz"), arrays), (path, _sealed(content).encode()):
            with _files.writing("path", file):
                _files.create(file, data)
            written.append(file)
        return Project.load(path)
    except BaseException:
        # What no site can load takes no name.
        for file in written:
            file.unlink()
        raise


def _check_new(path: Path) -> None:
    """Refuse a plan's path that is taken, before any work."""
    for file in (path, path.with_suffix(".npz")):
        if file.exists():
            raise _validate.refusal("path", str(file), "there is one; move it, or name another")


def _following_settings(
    old: Project, last_begun: Project, names: tuple[str, ...], round: int, changes: Section
) -> dict[str, Any]:
    """Settings of a phase after another one, which may not have begun."""
    if not old.totals:
        raise ValueError("[total] is missing in the plan before: begin a new project")
    settings = {**old.settings, **changes}
    left = old.plan.config.rounds - round
    if "rounds" not in changes:
        if left <= 0:
            raise ValueError(
                f"rounds is missing, and none is left of {old.plan.config.rounds}; give --rounds"
            )
        settings["rounds"] = left
    if "seed" not in changes:
        # Batches and signs of this phase are others.
        settings["seed"] = (old.seed + 1) % 2**32
    adds_up = _adds_up(settings)
    if "network" not in changes:
        network_section = dict(settings.pop("network"))
        edges = network_section["edges"]
        network_section["edges"] = [edge for edge in edges if {*edge} <= {*names}]
        if not (adds_up or old.plan.guarantee.sum_only):
            settings["network"] = network_section
    if "data" not in changes:
        counts = old.settings["data"].get("counts", {})
        kept = {name: count for name, count in counts.items() if name in names}
        settings["data"] = {"counts": kept} if kept else {}
    settings["budget"] = {**old.settings["budget"], **changes.get("budget", {})}
    settings["total"] = _following_total(old, names, changes)
    asked = changes.get("budget", {})
    settings["budget"] = _following_budget(last_begun, names, settings, asked)
    if adds_up and "noise" not in changes:
        # What followed from the model and the network is made anew.
        settings["noise"] = [
            {key: value for key, value in section.items() if key != "size"}
            for section in settings["noise"]
        ]
    return settings


def _following_total(old: Project, names: tuple[str, ...], changes: Section) -> dict[str, Any]:
    """Totals of a phase after another one: those of before, and of who joins."""
    before = old.settings["total"]
    total = {**before, **changes.get("total", {})}
    tables = (before["epsilon"], total["epsilon"])
    if all(isinstance(table, Mapping) for table in tables):
        total["epsilon"] = {**tables[0], **tables[1]}
    if isinstance(total["epsilon"], Mapping):
        total["epsilon"] = {k: v for k, v in total["epsilon"].items() if k in names}
    return total


def _following_budget(
    old: Project, names: tuple[str, ...], settings: Section, changes: Section
) -> dict[str, Any]:
    """The budget of a phase after another one: what totals leave, or less."""
    epsilons = {}
    account = measures.account(settings)
    totals = _totals(settings, names)
    for name in names:
        # Who joins has spent nothing.
        epsilons[name] = totals[name].largest
        if old.total_of(name) is not None:
            epsilons[name] = float(np.max(old.remaining(name, account).epsilon))
    spent = [name for name in names if epsilons[name] < _LEAST_LEFT * totals[name].largest]
    if spent:
        lefts = [f"{name} {epsilons[name]:.3g}" for name in spent]
        raise ValueError(
            f"[total] of {', '.join(spent)} is spent (left: {', '.join(lefts)}, less than "
            f"{_LEAST_LEFT:.0%} of it, which finite precision may take); leave the standing out, "
            "and the others go on"
        )
    asked = changes.get("epsilon", np.inf)
    if not isinstance(asked, Mapping):
        epsilons = {name: min(asked, epsilon) for name, epsilon in epsilons.items()}
        # Of a sum all sites state one epsilon.
        is_one = _adds_up(settings) or len({*epsilons.values()}) == 1
        asked = min(epsilons.values()) if is_one else epsilons
    return {**settings["budget"], "epsilon": asked}


def _mean_models(
    old: Project,
    standings: Mapping[str, wire.Standing],
    models: Mapping[str, Arrays],
    round: int,
) -> list[np.ndarray]:
    """The mean of the sites' models after a round, leaf by leaf."""
    shapes = jax.tree.leaves(old.shapes)
    sums = [np.zeros(leaf.shape) for leaf in shapes]
    for name, standing in standings.items():
        leaves = []
        for number, leaf in enumerate(shapes):
            array = models[name].get(f"{round}/{number}")
            if array is None or array.shape != (1, *leaf.shape) or array.dtype != leaf.dtype:
                raise ValueError(f"standing of {name} lacks its models; get the file again")
            leaves.append(array)
        if bytes.fromhex(digest_of(leaves)) != dict(standing.rounds)[round]:
            raise ValueError(f"standing of {name} has other models than it signed; get it again")
        for total, array in zip(sums, leaves, strict=True):
            total += array[0]
    return [
        (total / len(standings)).astype(leaf.dtype)
        for total, leaf in zip(sums, shapes, strict=True)
    ]


def _standing_of(text: object) -> wire.Standing:
    """The standing of a text, whose signature is not checked."""
    try:
        frame = wire.decoded(base64.b64decode(str(text), validate=True))
    except Refused as refusal:
        raise ValueError(str(refusal)) from None
    if not isinstance(frame, wire.Standing):
        raise ValueError("it is no standing")
    return frame


def _check_standings(
    standings: Mapping[str, wire.Standing],
    before: Project,
    roster: Roster,
    names: tuple[str, ...],
    round: int,
) -> None:
    """Refuse standings that are not those of a majority of one run's sites after one round."""
    for name, standing in standings.items():
        if name not in before.names or name not in names:
            raise ValueError(f"{name} was no site of the phase before, or is none of this one")
        if not roster.verify(name, "standing", standing.content, standing.signature):
            raise ValueError(f"the standing of {name} is not signed by it")
        if standing.plan != before.digest or round not in dict(standing.rounds):
            raise ValueError(f"the standing of {name} is of another plan, or lacks round {round}")
    if len({standing.run for standing in standings.values()}) > 1:
        raise ValueError("the standings are of several runs; get those of one")
    if 2 * len(standings) <= len(before.names):
        raise ValueError(
            f"{len(standings)} of {len(before.names)} sites go on, which is no majority: others "
            "could do the same. Begin a new project, if all operators agree"
        )


def _file_name(name: object) -> str:
    """The bare name of a file."""
    if not isinstance(name, str) or name != Path(name).name:
        raise ValueError("its phase before is no file beside it")
    return name


def _shown(total: Budget | None) -> str:
    """A total as a file has it."""
    return "missing" if total is None else f"{total.largest:g} by {total.accountant}"


def _given(models: Models, key: object) -> Models:
    """First models that are given, whatever the key."""
    del key
    return models


def _totals(settings: Section, names: tuple[str, ...]) -> dict[str, Budget]:
    """What each site may spend in all phases; nothing without the section."""
    section = settings.get("total")
    if section is None:
        return {}
    if not isinstance(section, Mapping) or "epsilon" not in section:
        raise _validate.refusal("[total]", section, "give epsilon, a number or one for each site")
    check_keys("[total] ", section, {"epsilon", "accountant"})
    epsilons = section["epsilon"]
    if not isinstance(epsilons, Mapping):
        epsilons = dict.fromkeys(names, epsilons)
    check_keys("[total] epsilon ", epsilons, {*names})
    missing = [name for name in names if name not in epsilons]
    if missing:
        raise ValueError(
            f"[total] epsilon of {', '.join(missing)} is missing; give one for each site: of who "
            "joins in the file of --changes"
        )
    delta = settings["budget"].get("delta")
    accountant: Any = section["accountant"]
    titles = {"epsilon": "[total] epsilon", "accountant": "[total] accountant"}
    with naming(titles | {"delta": "[budget] delta"}):
        return {name: Budget(epsilons[name], delta, accountant) for name in names}


def _within_totals(settings: Section, names: tuple[str, ...]) -> Section:
    """The budget, of which a total keeps a little for finite precision and roundings."""
    totals = _totals(settings, names)
    epsilon = settings["budget"].get("epsilon")
    most = {}
    for name, total in totals.items():
        most[name] = float(np.max(budget_.remaining(total, []).epsilon))
    if isinstance(epsilon, Mapping):
        pairs = {name: (value, totals.get(name)) for name, value in epsilon.items()}
        epsilon = {
            name: most[name] if total and value == total.largest else value
            for name, (value, total) in pairs.items()
        }
    elif epsilon == min(total.largest for total in totals.values()):
        epsilon = min(most.values())
    return {**settings["budget"], "epsilon": epsilon}


def _adds_up(settings: Section) -> bool:
    """Whether sites add up among themselves."""
    return any(design.get("name") == _SUMS for design in settings["noise"])


def _made(
    settings: Section,
    roster: Roster,
    schema: Section,
    after: Section | None = None,
    start: Sequence[np.ndarray] = (),
    first_seed: int | None = None,
) -> tuple[bytes, dict[str, Any]]:
    """What the two files of a plan hold."""
    settings, evaluated = measures.completed(settings, Schema.of(schema), first_seed)
    settings = json.loads(json.dumps({**_DEFAULTS, **settings}, default=str))
    network = settings.get("network")
    if isinstance(network, dict) and "graph" in network:
        # Sites get the links themselves, and no file of one's own.
        graph = graphs.parse(network.pop("graph"))
        names = nodes.labels(graph)
        network["edges"] = [[names[end] for end in edge] for edge in graph.edges]
    meaning = Schema.of(schema)
    check_sections(settings, ("model", "noise"))
    module, shapes, loss = _model(settings["model"], meaning, evaluated)
    settings = {**_with_sums(settings, tuple(roster), _size(shapes))}
    if isinstance(settings.get("total"), dict):
        # All later phases add up as the first one.
        settings["total"].setdefault("accountant", "zcdp" if _adds_up(settings) else "gdp")
        settings["budget"] = _within_totals(settings, tuple(roster))
    target = _target(settings, roster)
    noise = _made_noise(target)
    _plan(target, noise)
    # A record of any kind, so that no site is the first to hear of a wrong metric.
    record = np.zeros((1, *meaning.shape), np.float32), np.ones(1, np.int32)
    _problem(settings["model"], module, loss, (record, record), "study")
    file = io.BytesIO()
    stored = _stored_arrays(target, noise) | evaluated
    for number, array in enumerate(start):
        stored[f"{_START}{number}"] = array
    np.savez(file, **stored)
    arrays = file.getvalue()
    return arrays, {
        "protocol": PROTOCOL,
        "package": __version__,
        "settings": settings,
        "roster": roster.to_json(),
        "schema": schema,
        "arrays": _digest(arrays),
        "after": after,
    }


@contextlib.contextmanager
def _as_file() -> Iterator[None]:
    """Give errors' advice as a file of settings has it, which coordinators write."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        for python, words in _PYTHON.items():
            text = re.sub(python, words, text)
        raise ValueError(text) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _size(tree: Any) -> int:
    """How many numbers a tree has."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _sealed(content: Section) -> str:
    """The text of a plan file, with the digest of all else in it."""
    text = json.dumps(content, indent=1, allow_nan=False)
    return json.dumps({**content, "digest": _digest(text.encode())}, indent=1) + "\n"


def _content(path: Path, most: int) -> bytes:
    """The bytes of a file of a limited size."""
    size = path.stat().st_size
    # A pipe or a device, behind a link say, may never end.
    if size > most or not path.is_file():
        raise ValueError(f"{path.name} has more than {most:,} bytes, or is no regular file")
    return path.read_bytes()


def _arrays(data: bytes) -> Arrays:
    """The arrays of an npz file, which take no more memory than the file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # Compressed entries may unfold to any size, and several may share bytes.
        if sum(entry.file_size for entry in archive.infolist()) > len(data):
            raise ValueError("its arrays are larger than their file, which dpjax does not write")
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _target(settings: Section, roster: Roster) -> Target:
    """What the noise is for, by settings; refused where sites cannot run it."""
    names = tuple(roster)
    check_keys("", settings, SECTIONS.keys() | _MOST | {"total"})
    measures.check(settings)
    check_sections(settings, _REQUIRED)
    for name, most in _MOST.items():
        _validate.integer(name, settings.get(name, 0), minimum=0, maximum=most)
    for section in settings["noise"]:
        name = section.get("name")
        # Of other designs the rules below say why sites draw none.
        if name not in [*_DRAWN, "None"]:
            _validate.one_of("[[noise]] name", name, sorted(filter(_DRAWN.get, _DRAWN)))
    parts = config_parts(settings, names)
    designs = parts.pop("noise")
    terms = compatibility.noise(designs[0] if designs else None)
    rules = {
        f"roster has more than {_MOST_SITES} sites; leave some out": len(names) > _MOST_SITES,
        "[[noise]] is not one design; give one, as sites send nothing without noise": (
            len(designs) != 1 or None in designs
        ),
        "[[noise]] is Laplace's, which no site hardens; give a Gaussian design": (
            terms.loss == "pure"
        ),
        "average_rounds is for last models that messages show; leave it out, or give DSGD": (
            settings["average_rounds"] > 0
            and compatibility.method(parts["method"]).payload != "dsgd"
        ),
    }
    _validate.refuse(rules)
    check_keys("[data] ", settings["data"], {"counts"})
    counts = settings["data"].get("counts", {})
    needed = names if parts["sampler"].needs_counts else ()
    if not isinstance(counts, Mapping) or counts.keys() != {*needed}:
        remedy = "leave it out: this [sampler] needs none"
        if needed:
            sites = ", ".join(needed)
            remedy = f"give the number of records of {sites}: of whom there are certificates"
        raise _validate.refusal("[data] counts of", ", ".join(map(str, counts)) or "nobody", remedy)
    # One process may not release noise of several holders, which sites draw each for itself.
    parts["release"] = terms.released
    matrix = constructed("network", network, {**settings["network"], "names": names})
    (design,) = designs
    if isinstance(design, Discrete) and isinstance(parts["method"], Federated):
        # Whoever adds up opens no sum of fewer.
        aggregate = Trusted(dropouts=design.dropouts)
        parts["method"] = dataclasses.replace(parts["method"], aggregate=aggregate)
    with naming(part_titles(parts, {"noise": design})):
        config = Config(noise=design, **parts)
        numbers: Any = [counts[name] for name in needed]
        return Target(config, matrix, numbers or None)


def _with_sums(settings: Section, names: tuple[str, ...], size: int) -> Section:
    """Settings with what follows where sites add up: links, method and the size of vectors."""
    designs = settings["noise"]
    if len(designs) != 1 or not _adds_up(settings):
        return settings
    pairs = itertools.combinations(names, 2)
    return {
        "network": {"edges": [list(pair) for pair in pairs]},
        "method": {"name": Federated.__name__},
        "spoiled": SPOILED,
        **settings,
        "noise": [{"size": size, **designs[0]}],
    }


def network(names: tuple[str, ...], edges: Any) -> Mixing:
    """The mixing matrix of edges, in the order of the roster."""
    graph = nx.Graph()
    graph.add_nodes_from(names)
    for edge in _validate.entries("edges", edges):
        ends = _validate.entries("edges", edge)
        if len(ends) != 2 or not all(end in names for end in ends):
            remedy = f"give pairs of {', '.join(names)}, whose certificates were given"
            raise _validate.refusal("edges", " ".join(map(str, ends)), remedy)
        graph.add_edge(*ends)
    return metropolis_hastings(graph)


def _plan(target: Target, noise: Calibrated) -> Plan:
    """The plan, audited; refused where no site can make its own part of a round."""
    plan = Plan(target, noise, calibration.guarantee_of(target, noise))
    _stated(plan)  # Refuses what holds for no sites.
    if isinstance(noise, CalibratedCode):
        # Refuses what no sum among sites has.
        PeerTerms.of(plan)
        return plan
    receives = plan.method.exchange.for_agents(plan.mixing, [0], plan.senders[:1])
    draws = noise.privatizer(target).for_agents(plan.arrays, [0])
    if not compatibility.by_agent(plan.method) or receives is None or draws is None:
        raise ValueError(
            f"[method] is {plan.method} with {target.config.noise!r}, whose rounds need all "
            "agents; give DSGD with one gossip step, Tracking or GradientTracking, and noise by a "
            "factor, such as Independent or Whisper"
        )
    return plan


def _stated(plan: Plan) -> Guarantee:
    """The guarantee of sites, who each draw hardened noise, whatever a config of one process is."""
    return plan.guarantee.replace(release=True, sites=True)


def _made_noise(target: Target) -> Calibrated:
    """The noise, made for a budget whose reserve stays for finite precision."""
    config = target.config
    # A config that is no release would keep nothing for it, and sites harden this noise, too.
    budget = target.budget if config.release else target.budget.without_reserve()
    config = dataclasses.replace(config, budget=budget)
    noise = make(config, target.mixing, counts=target.counts).noise
    assert noise is not None
    return noise


def _stored_arrays(target: Target, noise: Calibrated) -> dict[str, Any]:
    """What a file holds of a plan."""
    arrays = {"mixing": target.mixing, "strategy": noise.strategy, **noise.arrays}
    return {name: array for name, array in arrays.items() if array is not None}


def _stored_plan(target: Target, arrays: Arrays) -> Plan:
    """The plan of a file's arrays."""
    matrix = arrays["mixing"]
    # Other processors may round otherwise, and all sites take the file's bits.
    is_near = np.allclose(matrix, target.mixing, rtol=0.0, atol=1e-12)
    if matrix.shape != target.mixing.shape or not is_near:
        raise ValueError("its mixing matrix is not that of its network")
    target = dataclasses.replace(target, mixing=matrix)
    noise: Calibrated
    if isinstance(target.config.noise, Correlated | Polynomial):
        # How good a design is knows who solved for it, and a site has none to save.
        noise = Factored(arrays["factor"], arrays.get("strategy"), None)  # type: ignore[arg-type]
    else:
        with warnings.catch_warnings():
            # Every operator reads of delta in what `budget_fault` says.
            warnings.filterwarnings("ignore", "delta is ")
            noise = _made_noise(target)
    made = _stored_arrays(target, noise)
    for name in made.keys() | arrays:
        if not np.array_equal(made.get(name, ()), arrays.get(name, ())):
            raise ValueError(f"its array {name} is not what the plan makes here, to the bit")
    return _plan(target, noise)


def _problem(
    section: Section,
    module: nn.Module | Measure,
    loss: str,
    data: tuple[_Records, _Records],
    name: str,
) -> Problem:
    """The problem of one site's training and test records."""
    if isinstance(module, Measure):
        return module.problem(*data[module.account == "held_out"], name)
    count = len(data[0][1])
    shards = Partition(np.arange(count)[None], np.array([count]), (name,))
    options = {key: section[key] for key in MODEL_OPTIONS - {"loss"} & section.keys()}
    with naming(titles_of("model", MODEL_OPTIONS)):
        return supervised(module, loss, *data, shards, name=name, **options)


def _model(
    section: Section, schema: Schema, evaluated: Arrays
) -> tuple[nn.Module | Measure, Any, str]:
    """The model, the shapes of its leaves, its loss's name; the schema says how many classes.

    Of a measure the leaf is its sums, and the loss is one that takes labels as records have them.
    """
    if section.get("name") in measures.NAMES:
        parts = None
        if isinstance(section.get("model"), Mapping):
            parts = _trained(section["model"], schema)
        measure = measures.of(section, schema, parts, evaluated)
        loss = "cross_entropy" if schema.classes else "squared"
        return measure, jax.ShapeDtypeStruct((measure.size,), "float32"), loss
    if evaluated:
        raise ValueError("its arrays have a model that is evaluated, and [model] names none")
    return _trained(section, schema)


def _trained(section: Section, schema: Schema) -> tuple[nn.Module, Any, str]:
    """As `_model`, of a model that is trained."""
    fields = {key: value for key, value in section.items() if key not in MODEL_OPTIONS}
    kind = MODELS[_validate.one_of("[model] name", fields.pop("name", "MLP"), MODELS)]
    loss = section.get("loss", "cross_entropy")
    with naming({"loss": "[model] loss"}):
        schema.check_loss(loss)
    if loss == "cross_entropy":
        for name in inspect.signature(kind).parameters.keys() & {"outputs", "classes"}:
            fields.setdefault(name, len(schema.classes))
    record = jax.ShapeDtypeStruct((1, *schema.shape), "float32")
    try:
        module = constructed("model", kind, fields)
        return module, jax.eval_shape(module.init, jax.random.key(0), record), loss
    except ValueError:
        raise
    except Exception as error:  # Layers refuse values in many ways.
        raise ValueError(
            f"[model] is {kind.__name__} of {_validate.shown(fields)}, which cannot be made "
            f"({_validate.said(error)}); mend a value"
        ) from error
