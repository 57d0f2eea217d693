"""A site from its settings: its plan, identity, records, neighbours and folder."""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np

from dpjax import _files, _validate
from dpjax._version import __version__
from dpjax.learning.problem import Problem
from dpjax.plans.plan import Plan
from dpjax.plans.protect import Budget
from dpjax.plans.settings import check_keys
from dpjax.secagg.primitives import derived
from dpjax.sites import data as data_
from dpjax.sites import wire
from dpjax.sites.carrier import GrpcChannel
from dpjax.sites.channel import ChannelLimits
from dpjax.sites.identity import Identity, Renewal, Roster
from dpjax.sites.ledger import Ledger, beginning_of
from dpjax.sites.meeting import Agreement, neighbours_of, whole
from dpjax.sites.project import SPOILED, Project, budget_fault
from dpjax.sites.relay import Forwarder
from dpjax.sites.site import Site, SiteLoop, Waits
from dpjax.sites.store import SUCCESSOR, Folder, shared_secret
from dpjax.sites.sum_site import SumSite

__all__ = ["site"]

_log = logging.getLogger("dpjax.sites")
_Settings: TypeAlias = Mapping[str, Any]
"""Plain values by name, as TOML holds them."""
_Arrays: TypeAlias = tuple[np.ndarray, np.ndarray]
_KEYS = frozenset(
    ("name", "plan", "certificate", "key", "authority", "folder", "listen", "secret", "departed")
    + ("neighbours", "data", "held_out", "waits", "limits", "renewals", "home", "certificates")
    + ("seed", "average_rounds", "relays", "spoiled", "ledger")
)
_SECTIONS = {
    section: frozenset(field.name for field in dataclasses.fields(kind))
    for section, kind in (("waits", Waits), ("limits", ChannelLimits))
}
_HEADROOM = 2**16
"""Bytes of a message beside its numbers."""


def settings_of(path: _files.PathLike) -> dict[str, Any]:
    """Return the settings of a file, whose paths are relative to the file's folder.

    Args:
        path: TOML.

    Raises:
        ValueError: For a file that is no TOML, or has a key that nothing reads.
    """
    settings = _files.toml(path)
    # Where it is follows from where the file is.
    check_keys(f"{path}: ", settings, _KEYS - {"home"})
    settings["home"] = os.fspath(Path(path).absolute().parent)
    return settings


def site(
    plan: Agreement | Plan | _files.PathLike,
    data: Problem | Callable[[], _Arrays] | _Settings,
    settings: _Settings | _files.PathLike,
    *,
    insecure_loopback: bool = False,
) -> SiteLoop:
    """Return a site, ready to run: ``site.run()``, or ``for progress in site.rounds()``.

    Guarantee: `dpjax.sites.site.Site`'s. Nothing listens without certificates, unless
    ``insecure_loopback`` is given, which takes addresses of this machine alone; statements then say
    that links were not encrypted. Records of other sites are never loaded.

    Args:
        plan: The plan file that all sites share, or what `Project.load` made of it; or a plan with
            ``release=True``, which every site makes by the same program.
        data: This site's records: the section ``data`` of its settings, as `dpjax.sites.data.read`
            takes it; a function that returns (x, y) as the schema has them; or a problem of one
            agent of your own, whose first values (``params``, frozen leaves) count as public and
            must be the same at all sites.
        settings: ``site.toml``, or its values: name, certificate, key, authority, folder,
            neighbours (name = "host:port"); where they apply listen ("host:port"), relays (name =
            "host:port") in place of both, secret (the file of a group's), held_out (the share that
            measures), departed (names), renewals (files), ledger (a folder, by default beside the
            run's: NAME.PROJECT.ledger), waits (late, linger, gone) and limits. Beside a plan,
            certificates (files of all sites, in the order of its agents), seed, average_rounds and
            spoiled.
        insecure_loopback: Run without TLS, on one machine.

    Returns:
        The site; `Site.close` lets go of its folder.

    Raises:
        ValueError: For settings that are missing or unknown, and whatever does not fit the plan.

    Example:
        >>> import dpjax as dp
        >>> dp.site("plan.json", {"file": "records.csv"}, {"name": "lyon"})
        Traceback (most recent call last):
            ...
        ValueError: certificate is missing in the site's settings; give it as text
    """
    values = settings if isinstance(settings, Mapping) else settings_of(settings)
    check_keys("", values, _KEYS)
    for name, keys in _SECTIONS.items():
        if not isinstance(values.get(name, {}), Mapping):
            raise _validate.refusal(name, values[name], f"give a section of {', '.join(keys)}")
        check_keys(f"[{name}] ", values.get(name, {}), keys)
    for name in ("departed", "renewals", "certificates"):
        # The letters of a text are no names, and nobody would be refused.
        _validate.entries(name, values.get(name, ()))
    home = Path(values.get("home", "."))
    for name in ("name", "certificate", "key", "authority", "folder"):
        if not isinstance(values.get(name), str | os.PathLike):
            raise ValueError(f"{name} is missing in the site's settings; give it as text")
    if isinstance(plan, str | os.PathLike):
        project: Agreement = Project.load(home / plan)
    elif isinstance(plan, Plan):
        project = _Programmed.of(plan, data, values, home)
    else:
        project = plan
    fault = budget_fault(project.plan)
    if fault:
        _log.warning("%s", fault)
    if "renewals" in values:
        project = _renewed(project, [home / path for path in values["renewals"]])
    files = {name: home / values[name] for name in ("certificate", "key", "authority")}
    identity = functools.partial(Identity.load, values["name"], **files)
    secret = shared_secret(home / values["secret"]) if "secret" in values else None
    site_identity = identity()
    summary = None
    is_own = isinstance(data, Problem)
    if isinstance(data, Problem):
        problem = data
        # Nobody knows which of them a file has, or holds out.
        records = _digest_of(data)
    else:
        problem, summary, records = _problem(project, site_identity.name, data, values)
    leaves = jax.tree.leaves(jax.eval_shape(problem.init, jax.random.key(0)))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    # A message of tracking has two models; a group of headers is small beside the headroom.
    limits = {"message_bytes": 4 * size + _HEADROOM, **values.get("limits", {})}
    channel = _channel(project, identity, files, values, ChannelLimits(**limits), insecure_loopback)
    waits = Waits(**values.get("waits", {}))
    folder = phase_folder(home / values["folder"], project.phase)
    ledger = None
    kind = SumSite if project.plan.guarantee.sum_only else Site
    try:
        if isinstance(project, Project):
            ledger = _ledger(project, values, channel.insecure)
            _enter(project, ledger, records, home / values["folder"], secret)
        made = kind(
            project,
            problem,
            site_identity,
            channel,
            folder,
            secret=secret,
            waits=waits,
            ledger=ledger,
            is_own=is_own,
        )
    except BaseException:
        # Nothing keeps others out of what is not used.
        channel.close()
        if ledger is not None:
            ledger.close()
        raise
    if summary is not None:
        # Of the site alone, and journals keep what is logged.
        path = folder / "records.txt"
        _files.replace(path, f"{summary}\n".encode(), mode=0o600)
        _log.info("records: %s has their number, and what was clipped", path)
    return made


def _enter(
    project: Project, ledger: Ledger, records: bytes, base: Path, secret: bytes | None
) -> None:
    """Ask the ledger for a phase, and end those before it, which nothing takes back."""
    for number in range(project.phase):
        begun = phase_folder(base, number) / "run"
        if begun.exists():
            presences = whole(begun.read_bytes(), wire.Presences, str(begun)).presences
            by_name = {presence.name: presence for presence in presences}
            ledger.recall(beginning_of(by_name, ledger.name))
    ledger.bind(records, project.accounts)
    folder = phase_folder(base, project.phase)
    nonce = folder / "nonce"
    if not (folder / SUCCESSOR).exists():
        ledger.guarantee(nonce.read_bytes() if nonce.exists() else b"")
    _end_phases_before(project, ledger.name, base, secret)


def _check_there(path: _files.PathLike, values: _Settings, names: tuple[str, ...]) -> None:
    """Refuse a file without some settings."""
    for name in names:
        if name not in values:
            raise ValueError(
                f"{path}: {name} is missing; the page 'Real sites' of the manual has one"
            )


def site_of(path: _files.PathLike, insecure_loopback: bool = False) -> SiteLoop:
    """Return the site of a file of settings.

    Args:
        path: ``site.toml``.
        insecure_loopback: As in `site`.

    Raises:
        ValueError: As `site`.
    """
    values = settings_of(path)
    _check_there(path, values, ("plan", "data"))
    return site(values["plan"], values["data"], values, insecure_loopback=insecure_loopback)


def ledger_lines(path: _files.PathLike, insecure: bool = False) -> list[str]:
    """Return what each site of a project may spend, has spent and has left, line by line.

    Args:
        path: ``site.toml``.
        insecure: Whether links are not encrypted.

    Raises:
        ValueError: As `site`.
    """
    values = settings_of(path)
    _check_there(path, values, ("name", "plan", "folder"))
    project = Project.load(Path(values["home"], values["plan"]))
    name = _validate.one_of("name", values["name"], project.names)
    lines = [f"project {project.root}, phase {project.phase + 1}"]
    lines += map(str, project.spending())
    if not project.totals:
        lines.append("[total] is not in the first plan: no phase may follow, and runs add up")
    charged, was_insecure = Ledger.read(_ledger_folder(project, values))
    for plan, nonce in charged:
        lines.append(f"charged: plan {plan}, nonce {nonce.hex()[:16]}")
    stated = project.of_site(name)
    if charged:
        plans = [plan for plan, _ in charged]
        try:
            stated = project.guarantee_of(name, plans, insecure or was_insecure)
        except ValueError as error:
            return [*lines, f"nothing more may be sent: {error}"]
    lines.append(stated.statement())
    lines.append(str(stated.protection()))
    return lines


def phase_folder(folder: Path, phase: int) -> Path:
    """Return the folder of a phase's run: the first one's, or beside it.

    Args:
        folder: Of the first phase.
        phase: Number of the phase.
    """
    return folder.with_name(f"{folder.name}.{phase}") if phase else folder


def _ledger_folder(project: Project, values: _Settings) -> Path:
    """The ledger's: another folder of a run must not begin another ledger."""
    home = Path(values.get("home", "."))
    if "ledger" in values:
        return home / values["ledger"]
    return (home / values["folder"]).with_name(f"{values['name']}.{project.root[:8]}.ledger")


def _ledger(project: Project, values: _Settings, insecure: bool) -> Ledger:
    """The ledger that settings name, or that stands beside the run."""
    return Ledger(_ledger_folder(project, values), project, values["name"], insecure)


def _digest_of(problem: Problem) -> bytes:
    """A digest of the records of a problem of one's own."""
    digest = hashlib.sha256(b"own")
    for leaf in jax.tree.leaves((problem.x, problem.y)):
        digest.update(np.asarray(leaf).tobytes())
    return digest.digest()


def _end_phases_before(project: Project, name: str, base: Path, secret: bytes | None) -> None:
    """End this site's phases before: from now on it signs one plan after the last, this one."""
    path = phase_folder(base, project.phase - 1)
    if name in project.standings and not path.is_dir():
        raise ValueError(
            f"folder is {str(path)!r} of the phase before, and there is none; name it under "
            f"folder, or ask for a plan in which {name} joins"
        )
    # Also those before one in which it took no part: who knows their secrets may have left.
    paths = [phase_folder(base, number) for number in range(project.phase)]
    for path in filter(Path.is_dir, paths):
        _end_phase(path, project, name, secret, is_last=path == paths[-1])


def _end_phase(
    path: Path, project: Project, name: str, secret: bytes | None, is_last: bool
) -> None:
    """End a phase, by its folder."""
    with contextlib.closing(Folder(path)) as folder:
        nonce = folder.read("nonce")
        if secret is not None and nonce is not None:
            if folder.read("mark") == derived(secret, "mark", nonce):
                raise ValueError(
                    "secret is that of a phase before, which who left may have; let the group "
                    "draw another: dpjax site secret"
                )
        signed = folder.read(SUCCESSOR)
        if signed is None:
            folder.create(SUCCESSOR, project.digest.encode())
        elif is_last and signed.decode() != project.digest:
            raise ValueError(
                f"{name} has signed the plan {signed.decode()} after the phase before, and a site "
                "signs one; use that plan, or begin a new project"
            )
        for kept in ("secret", "exchange"):
            folder.delete(kept)


@dataclass(frozen=True)
class _Programmed:
    """A plan that every site makes by the same program: what they compare of it.

    Attributes:
        plan: With ``release=True``.
        roster: Names and public keys, in the order of the plan's agents.
        model: Digest of paths, shapes and dtypes of a model's leaves.
        seed: Of the first models and of batches; public.
        average_rounds: How often sites average on after the last round, without noise.
        spoiled: Rounds without a sum after which sites that add up stop.
        phase: Of a plan without a file, the first.
        totals: None: phases follow from files.
    """

    plan: Plan
    roster: Roster
    model: str
    phase: ClassVar[int] = 0
    totals: ClassVar[Mapping[str, Budget]] = {}
    seed: int = 0
    average_rounds: int = 0
    spoiled: int = SPOILED

    @classmethod
    def of(cls, plan: Plan, data: object, values: _Settings, home: Path) -> "_Programmed":
        """The agreement of a plan with a site's settings."""
        if not isinstance(data, Problem) or "certificates" not in values:
            raise ValueError(
                "plan is a Plan, which has neither model nor roster; give data as a Problem, and "
                "certificates = [files of all sites] in the settings"
            )
        roster = Roster.of_certificates([home / path for path in values["certificates"]])
        if len(roster) != plan.agents:
            raise ValueError(f"certificates are {len(roster)} for {plan.agents} agents; give all")
        shapes = jax.eval_shape(data.init, jax.random.key(0))
        model = hashlib.sha256(str(jax.tree.leaves_with_path(shapes)).encode()).hexdigest()
        shared = ("seed", "average_rounds", "spoiled")
        options = {key: values[key] for key in shared if key in values}
        return cls(plan, roster, model, **options)

    @property
    def names(self) -> tuple[str, ...]:
        """The sites, in the order of the plan's agents."""
        return tuple(self.roster)

    @property
    def digest(self) -> str:
        """The plan's fingerprint."""
        return self.plan.fingerprint()

    def described(self) -> dict[str, np.ndarray]:
        """What a saved model's file says beside the model: a problem of one's own has no schema."""
        return {}

    def terms(self) -> dict[str, str]:
        """What sites compare, by item."""
        return {
            "plan": self.digest,
            "roster": self.roster.digest,
            "model": self.model,
            "seed": str(self.seed),
            "averages after the last round": str(self.average_rounds),
            "rounds without a sum": str(self.spoiled),
            "package version": __version__,
        }


def _renewed(project: Agreement, paths: list[Path]) -> Agreement:
    """The project, whose roster accepts keys that sites have renewed."""
    if not isinstance(project, Project | _Programmed):
        raise ValueError("renewals is given for an agreement of your own; renew its roster")
    roster = project.roster
    for path in paths:
        with _files.reading(path, "get the file of the renewal again"):
            renewal = Renewal.from_bytes(path.read_bytes())
        roster = roster.renewed(renewal)
    return dataclasses.replace(project, roster=roster)


def _addresses(project: Agreement, name: str, values: _Settings) -> dict[str, str | None]:
    """The neighbours of the plan, with the addresses of those that are dialled."""
    names = list(project.names)
    neighbours = neighbours_of(project, names.index(_validate.one_of("name", name, names)))
    given = values.get("neighbours", {})
    if not isinstance(given, Mapping):
        raise _validate.refusal("neighbours", given, 'give a section: lyon = "host:port"')
    check_keys("[neighbours] ", given, neighbours.keys())
    return {other: given.get(other) for other in neighbours}


def _channel(
    project: Agreement,
    identity: Callable[[], Identity],
    files: Mapping[str, Path],
    values: _Settings,
    limits: ChannelLimits,
    insecure_loopback: bool,
) -> GrpcChannel:
    """The channel to the neighbours, by relays where settings name them."""
    name = values["name"]
    peers = _addresses(project, name, values)
    listen = values.get("listen")
    forwarder = None
    if "relays" in values:
        for key in ("listen", "neighbours"):
            if key in values:
                raise ValueError(f"{key} is given beside [relays], which replace it; leave one out")
        forwarder = Forwarder(name, files, values["relays"], peers, limits)
        for relay in values["relays"]:
            if relay in project.roster:
                raise ValueError(f"[relays] {relay} is a site of the plan; name a relay")
        peers = {**forwarder.peers}
        listen = forwarder.listen
    return GrpcChannel(
        identity(),
        project.roster,
        peers,
        listen,
        limits,
        departed=frozenset(values.get("departed", ())),
        reload=identity,
        insecure_loopback=insecure_loopback,
        forwarder=forwarder,
    )


def _check_count(project: Project, name: str, train: int, test: int) -> None:
    """Refuse another number of records than the plan's, in words of the site's files."""
    sampler = project.plan.config.sampler
    least = sampler.distinct or 1
    if train < least:
        # How far below is for the site alone: its number of records is in no plan.
        raise ValueError(
            f"[data] file leaves too few records to train on: a batch has {least}; mend file or "
            "held_out, or ask for a plan of a smaller [sampler] batch_size"
        )
    if project.plan.counts is None:
        return
    planned = project.plan.counts[project.names.index(name)]
    if train != planned:
        # These numbers are public under such a sampler, and the new one is what to ask for.
        raise ValueError(
            f"the plan is for {planned} records of {name} to train on, and there are {train}, "
            f"beside {test} held out; mend [data] file or held_out, or ask for a new plan, with "
            f"{name} = {train} in [data] counts of study.toml"
        )


def _problem(
    project: Agreement, name: str, source: Callable[[], _Arrays] | _Settings, values: _Settings
) -> tuple[Problem, str, bytes]:
    """The problem of a site's own records, by the project's schema and model; a summary, and a
    digest of which are held out.
    """
    if not isinstance(project, Project):
        raise ValueError("data is no Problem, for a plan without a schema; give a Problem")
    if callable(source):
        x, y = map(np.asarray, source())
        records = data_.Records(x, y, project.schema, {})
    else:
        records = data_.read(source, project.schema, values.get("home", "."))
    # Held-out records are the same in all phases.
    first = project.phases[0]
    held_out = values.get("held_out", 0.2)
    train, test = data_.split(records, held_out, first.seed)
    if project.account == "held_out" and not len(test.y):
        remedy = "give the share that was held out when the model was trained"
        raise _validate.refusal("held_out", held_out, remedy)
    _check_count(project, name, len(train.y), len(test.y))
    # Without held-out records the training records measure; metrics are local all the same.
    test = test if len(test.y) else train
    targets = train.targets(project.loss), test.targets(project.loss)
    problem = project.problem(train.x, targets[0], test.x, targets[1], name)
    if callable(source):
        content = x.tobytes() + y.tobytes()
    else:
        content = Path(values.get("home", "."), source["file"]).read_bytes()
    digest = hashlib.sha256(f"{held_out} {first.seed} ".encode() + content).digest()
    return problem, records.summary(), digest
