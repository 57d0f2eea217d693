"""What ``dpjax site`` does: keys, certificates, plans, a site's run, and what is said of them.

JAX is imported by what runs alone: a health check asks for the status every minute.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
import tyro

from dpjax import _files, _validate
from dpjax.secagg.primitives import KEY_BYTES
from dpjax.sites.identity import Authority, Identity, Roster, renewal, renewed_key, request
from dpjax.sites.store import LEAVING, SUCCESSOR, Audit

if TYPE_CHECKING:
    from dpjax.engine.result import Progress
    from dpjax.sites.site import SiteLoop

__all__ = ()

_LOG = logging.getLogger("dpjax.sites")
_DONE = "is done"
"""How the status of a site begins whose rounds are over."""
_AGAIN = 5.0
"""Seconds after which SIGTERM has effect again, where a site has not ended; it does in two."""
_STARTED = "name the folder of a site that has been started"


def request_command(name: tyro.conf.Positional[str], folder: Path = Path(".")) -> int:
    """Make a site's key, which never leaves it, and a signing request for its authority.

    Example: dpjax site request lyon

    Args:
        name: The site's: lower-case letters, digits, dots and dashes.
        folder: Where both go; a key that is there already is renewed.
    """
    key, demand = request(name, folder)
    print(f"key: {key}, which stays here\nrequest: {demand}, for the authority")
    return 0


def renew_command(
    new: tyro.conf.Positional[Path],
    name: str,
    certificate: Path,
    key: Path,
    authority: Path = Path("authority_root.pem"),
) -> int:
    """Sign a site's new key with its old one, for all other sites: NAME.renewal.

    Example: dpjax site renew new/lyon.csr --name lyon --certificate lyon.pem --key lyon.key

    Args:
        new: Certificate or signing request of the new key.
        name: The site's.
        certificate: Of the old key, still valid.
        key: The old one.
        authority: The root certificates.
    """
    old = Identity.load(name, certificate=certificate, key=key, authority=authority)
    path = Path(f"{name}.renewal")
    with _files.writing("path", path):
        _files.create(path, renewal(old, renewed_key(old, new)).to_bytes())
    print(f"renewal: {path}, which all sites name under renewals")
    return 0


def authority_command(
    folder: tyro.conf.Positional[Path],
    requests: tyro.conf.Positional[tuple[Path, ...]] = (),
    days: int = 365,
) -> int:
    """Make a small authority for trials, or sign requests with it.

    An organisation's own authority takes its place: whoever has its key gives names away.

    Example: dpjax site authority trial lyon.csr turin.csr

    Args:
        folder: Of the authority, made at the first call and kept.
        requests: Signing requests.
        days: How long certificates are valid.
    """
    authority = Authority(folder)
    print(f"root: {authority.certificate}, for all sites")
    for demand in requests:
        print(f"certificate: {authority.sign(demand, days=days)}")
    return 0


def plan_command(
    study: tyro.conf.Positional[Path],
    certificates: tyro.conf.Positional[tuple[Path, ...]],
    schema: Path = Path("schema.toml"),
    out: Path = Path("plan.json"),
) -> int:
    """Make the plan that all sites share: two files, with the sites' names and public keys.

    Example: dpjax site plan study.toml lyon.pem turin.pem

    Args:
        study: Settings, as dpjax train takes them, with the network's edges by name.
        certificates: Of all sites; their keys are pinned.
        schema: What the columns of all sites' records mean.
        out: The plan; arrays go beside it.
    """
    from dpjax.sites import project

    roster = Roster.of_certificates(certificates)
    made = project.write(_files.toml(study), roster, _files.toml(schema), out)
    print(f"plan: {out} and {out.with_suffix('.npz')}, digest {made.digest}")
    print(f"roster: {roster.digest}; operators compare both by another way than the network")
    print(made.plan.guarantee.replace(release=True, sites=True).statement())
    return 0


def standing_command(
    settings: tyro.conf.Positional[Path] = Path("site.toml"),
    out: Path | None = None,
    insecure_loopback: bool = False,
) -> int:
    """Write how far a site came, signed, for the plan of a phase after this one: NAME.standing.

    It holds models that are public, and no data. The site must have stopped.

    Example: dpjax site standing site.toml

    Args:
        settings: Of the site.
        out: The file, for the coordinator.
        insecure_loopback: As in dpjax site run.
    """
    from dpjax.sites import start

    member = start.site_of(settings, insecure_loopback)
    try:
        path = out or settings.parent / f"{member.name}.standing"
        standing = member.standing(path)
    finally:
        member.close()
    rounds = [round for round, _ in standing.rounds]
    print(f"standing: {path}, with models after {min(rounds)} to {max(rounds)} rounds")
    return 0


def replan_command(
    plan: tyro.conf.Positional[Path],
    standings: tyro.conf.Positional[tuple[Path, ...]],
    join: tuple[Path, ...] = (),
    rounds: int | None = None,
    epsilon: float | None = None,
    changes: Path | None = None,
    schema: Path | None = None,
    renewals: tuple[Path, ...] = (),
    out: Path | None = None,
) -> int:
    """Make the plan of the next phase: without a site that left, with one that joins, or longer.

    Whose standing is given goes on.

    Example: dpjax site replan plan.json lyon.standing turin.standing --join bern.pem

    Args:
        plan: Of the phase before.
        standings: What dpjax site standing wrote, of more than half of its sites.
        join: Certificates of sites that join.
        rounds: Of the phase; those that are left unless it is given.
        epsilon: Of the phase, for each site whose total leaves so much; all that totals leave
            unless it is given.
        changes: A file of settings, whose sections take the place of those before.
        schema: In place of the schema before.
        renewals: Of keys, since the project's first plan.
        out: The plan, beside the one before: PLAN-2.json for the second phase.
    """
    from dpjax.sites import project

    before = project.Project.load(plan)
    number = before.phase + 2
    stem = plan.stem.removesuffix(f"-{before.phase + 1}")
    path = out or plan.with_name(f"{stem}-{number}.json")
    settings = {} if changes is None else _files.toml(changes)
    if rounds is not None:
        settings["rounds"] = rounds
    if epsilon is not None:
        settings["budget"] = {**settings.get("budget", {}), "epsilon": epsilon}
    made = project.follow(
        plan,
        standings,
        path,
        joining=join,
        renewals=renewals,
        changes=settings,
        schema=None if schema is None else _files.toml(schema),
    )
    print(f"plan: {path} and {path.with_suffix('.npz')}, digest {made.digest}")
    print(f"roster: {made.roster.digest}; every operator compares both digests")
    print(f"phase {number}: {', '.join(made.names)}, after round {made.round} of the one before")
    print(f"go on by: {', '.join(made.standings)}; who joins needs the files of all phases")
    lowered = [] if epsilon is None else made.below(epsilon)
    if lowered:
        print(
            f"epsilon is not {epsilon:g}: of {', '.join(lowered)} no more is left; leave their "
            "standings out for it"
        )
    print(made.guarantee.statement())
    return 0


def leave_command(folder: tyro.conf.Positional[Path]) -> int:
    """Let a site leave its run in order: it tells the others, and takes part no more.

    The reason must not depend on data, but for what was released.

    Example: dpjax site leave run

    Args:
        folder: Of its run.
    """
    if not (folder / "run").is_file():
        raise _validate.refusal("folder", str(folder), "name that of a run that has begun")
    if (folder / SUCCESSOR).exists():
        remedy = "its phase has ended; name the folder of this phase, run.1 for the second one"
        raise _validate.refusal("folder", str(folder), remedy)
    if str(_status_of(folder).get("doing", "")).startswith(_DONE):
        raise _validate.refusal("folder", str(folder), "its run is done, so nobody waits for it")
    with _files.writing("folder", folder):
        with contextlib.suppress(FileExistsError):
            _files.create(folder / LEAVING, b"")
    doing = "it leaves now" if _is_used(folder) else "start it once more, so that it tells others"
    print(f"{folder}: {doing}")
    return 0


def ledger_command(
    settings: tyro.conf.Positional[Path] = Path("site.toml"),
    insecure_loopback: bool = False,
) -> int:
    """Print what each site may spend in a project, has spent and has left, and this site's runs.

    Example: dpjax site ledger site.toml

    Args:
        settings: Of the site.
        insecure_loopback: As in dpjax site run.
    """
    from dpjax.sites import start

    for line in start.ledger_lines(settings, insecure_loopback):
        print(line)
    return 0


def document_command(plan: tyro.conf.Positional[Path]) -> int:
    """Print a page for a data protection officer, made from a plan.

    Args:
        plan: The plan file.
    """
    from dpjax.sites.project import Project

    print(Project.load(plan).document())
    return 0


def secret_command(path: tyro.conf.Positional[Path]) -> int:
    """Draw the secret that a group of sites shares, for one run.

    Args:
        path: The file, mode 0600; must not exist. Its copies go to the group's other sites by a
            safe way.
    """
    with _files.writing("path", path):
        _files.create(path, secrets.token_bytes(KEY_BYTES), mode=0o600)
    print(f"secret: {path}, for one run of this group's sites; delete all copies after it")
    return 0


def run_command(
    settings: tyro.conf.Positional[Path] = Path("site.toml"),
    log: Literal["text", "json"] = "text",
    insecure_loopback: bool = False,
) -> int:
    """Run a site to the end of its plan; started again, it goes on.

    It ends with status 1 where a neighbour still needs what it has: start it again for that one.

    Example: dpjax site run site.toml

    Args:
        settings: Of the site.
        log: Form of the lines on standard error.
        insecure_loopback: Without certificates' encryption, on this machine alone.
    """
    _log_to_stderr(log)
    try:
        return _run(settings, insecure_loopback)
    except (ValueError, OSError) as error:
        if log == "text":
            raise
        # As all other lines.
        _LOG.error("%s", error)
        return 2


def _run(settings: Path, insecure_loopback: bool) -> int:
    """Run a site whose log is open."""
    from dpjax.sites import start

    if "listen" not in start.settings_of(settings):
        # Of handshakes the end that dials learns all from its channel, in one line.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with _noting_termination():
        return _run_site(settings, insecure_loopback)


@contextlib.contextmanager
def _noting_termination() -> Iterator[None]:
    """Let SIGTERM end the process as Ctrl-C does, with a last line, and be what ended it."""

    def stop(number: int, frame: object) -> None:
        # What it interrupts may swallow it, as callbacks of the garbage collector do.
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        # Of a program that calls this: signals are its own.
        yield
        return
    earlier = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    except _Terminated:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _LOG.info("stopped by SIGTERM; started again, the site goes on")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A service's manager takes another status for a failure.
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _run_site(settings: Path, insecure_loopback: bool) -> int:
    """Run a site to its end."""
    from dpjax.sites import start

    member = start.site_of(settings, insecure_loopback)
    try:
        _LOG.info("%s: %s", member.name, member.guarantee.caption())
        agreement = member.agreement
        _LOG.info("roster %s, plan %s", agreement.roster.digest, agreement.digest)
        member.run(_Metrics(member.folder / "metrics.jsonl"))
        return _end(member)
    finally:
        member.close()


def relay_command(
    settings: tyro.conf.Positional[Path] = Path("relay.toml"),
    log: Literal["text", "json"] = "text",
) -> int:
    """Run a relay, to which all sites dial out: one public address, and none of a site.

    It passes on what sites encrypt for each other, and can be stopped and started at any time.

    Example: dpjax site relay relay.toml

    Args:
        settings: Of the relay.
        log: Form of the lines on standard error.
    """
    from dpjax.sites import relay

    _log_to_stderr(log)
    try:
        relay.run(settings)
    except (ValueError, OSError) as error:
        if log == "text":
            raise
        _LOG.error("%s", error)
        return 2
    return 0


class _Terminated(BaseException):
    """SIGTERM has come."""

    def __str__(self) -> str:
        """As the status has it."""
        return "by SIGTERM"


class _Metrics:
    """Writes a site's own metrics, for its operator alone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, progress: "Progress") -> None:
        """Append a line."""
        metrics = {name: float(np.mean(value)) for name, value in progress.metrics.items()}
        line = json.dumps({"round": progress.round, **metrics})
        self._path.touch(mode=0o600)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _end(member: "SiteLoop") -> int:
    """Write what the site ends with, and say where it is: journals keep what is printed."""
    from dpjax.sites import measures

    ending = measures.written(member)
    if not ending:
        model = member.folder / "model.npz"
        if not model.exists():
            member.save(model)
        ending = f"model {model}"
    print(member.statement())
    print(f"kept here: {member.folder}, whose metrics no guarantee covers")
    metrics = member.folder / "metrics.jsonl"
    print(f"{member.name}: round {member.round}, {ending}, metrics {metrics}")
    if member.has_left:
        # Nobody waits for it.
        return 0
    # A service that restarts what failed serves neighbours that still need this site.
    return int(bool(member.awaited))


def status_command(folder: tyro.conf.Positional[Path], stale: float = 120.0) -> int:
    """Print what a site is doing: its round, its neighbours, waits, and what this phase costs.

    It ends with status 1 where no process runs a site that is not done, or one has written nothing
    for a while.

    Args:
        folder: Of its run.
        stale: Seconds; more than a round takes.
    """
    later = _later(folder)
    if later is not None:
        print(f"{folder}: of an earlier phase; dpjax site status {later} is of the last one")
    status = _status_of(folder)
    if not status:
        doing = "a site starts" if _is_used(folder) else "no site has been started"
        print(f"{folder}: {doing} with this folder, which its site.toml names")
        return 1
    with _files.reading(folder / "status.json", _STARTED):
        doing = str(status["doing"])
        is_done = doing.startswith(_DONE)
        is_used = _is_used(folder)
        if not (is_used or is_done or doing.startswith("stopped")):
            doing = f"stopped; the last that it wrote: {doing}"
        audit = folder / Audit.name
        lines = audit.read_bytes().splitlines() if audit.exists() else []
        # The status is written once a second, the audit file before each message is sent.
        sent = max(status["sent"], sum(b'"event": "stored"' in line for line in lines))
        text = [
            f"{status['name']}: {doing}, round {status['round']} of {status['rounds']}",
            f"messages sent: {sent} of {status['rounds']}; {status['caption']}",
        ]
        if status.get("total"):
            text.append(f"of all phases: {status['total']}; dpjax site ledger has what is spent")
        for peer, state in sorted(status["peers"].items()):
            known = {key: value for key, value in state.items() if value is not None}
            text.append(f"  {peer}: " + ", ".join(f"{key} {value}" for key, value in known.items()))
        age = time.time() - status["time"]
        text.append(f"written {age:.0f} s ago")
    print("\n".join(text))
    checked = Audit.check(audit) if lines else 0
    print(f"audit: {_validate.counted(checked, 'line')}, each with the digest of the one before")
    if is_used:
        if age > stale and not is_done:
            print("the site hangs, or a round takes longer: see its log")
            return 1
    elif not is_done:
        again = "see its log, and start it again"
        if (folder / SUCCESSOR).exists():
            again = "its phase has ended"
        ends = ("must leave", "Go on without it", "this run has ended")
        if any(end in doing for end in ends):
            again = "it does not go on in this run"
        print(f"the site has stopped: no process runs it; {again}")
        return 1
    return 0


def _status_of(folder: Path) -> dict[str, Any]:
    """What a site wrote last of itself; nothing where none was started."""
    path = folder / "status.json"
    if not path.exists():
        return {}
    with _files.reading(path, _STARTED):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _later(folder: Path) -> Path | None:
    """The folder of the last phase, beside that of the first one; None where there is none."""
    # As `dpjax.sites.start.phase_folder` names them.
    beside = [path for path in folder.parent.glob(f"{folder.name}.*") if path.suffix[1:].isdigit()]
    return max(beside, key=lambda path: int(path.suffix[1:]), default=None)


def _is_used(folder: Path) -> bool:
    """Whether a process has a site's folder now."""
    with contextlib.suppress(FileNotFoundError), open(folder / "lock", "rb") as file:
        try:
            # Let go of at once, with the file.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


_subcommand = tyro.conf.subcommand
_Action: TypeAlias = (
    Annotated[int, _subcommand("request", constructor=request_command)]
    | Annotated[int, _subcommand("renew", constructor=renew_command)]
    | Annotated[int, _subcommand("authority", constructor=authority_command)]
    | Annotated[int, _subcommand("secret", constructor=secret_command)]
    | Annotated[int, _subcommand("plan", constructor=plan_command)]
    | Annotated[int, _subcommand("document", constructor=document_command)]
    | Annotated[int, _subcommand("run", constructor=run_command)]
    | Annotated[int, _subcommand("standing", constructor=standing_command)]
    | Annotated[int, _subcommand("replan", constructor=replan_command)]
    | Annotated[int, _subcommand("leave", constructor=leave_command)]
    | Annotated[int, _subcommand("ledger", constructor=ledger_command)]
    | Annotated[int, _subcommand("relay", constructor=relay_command)]
    | Annotated[int, _subcommand("status", constructor=status_command)]
)


def site_command(action: tyro.conf.OmitSubcommandPrefixes[_Action]) -> int:
    """A real site: request, plan, run, status, standing, replan, leave, ledger and more.

    Every site is a process of its own, with its own records, keys and certificate. The page 'Real
    sites' of the manual leads from a list of edges to a finished run. dpjax site run --help has
    options and an example, as have the others.

    Args:
        action: What to do.
    """
    return action


class _JsonLines(logging.Formatter):
    """Log records as JSON, one a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {"time": record.created, "level": record.levelname, "text": record.getMessage()}
        return json.dumps(fields)


def _log_to_stderr(form: str) -> None:
    """Log warnings and what a site does."""
    if form == "json":
        # gRPC writes lines of its own, unless this is set before it is imported.
        os.environ["GRPC_VERBOSITY"] = "NONE"
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonLines() if form == "json" else plain)
    _LOG.handlers = [handler]
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False
