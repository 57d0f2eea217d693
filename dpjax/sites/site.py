"""One process a site: it computes, stores, sends, receives and absorbs, round by round.

`Site` is the loop. It is one thread, which alone writes to the folder; what sites say to each other
is in `dpjax.sites.conversation`. The page 'Sites: the threat model and a round' of the manual has
the states of a round, and what a kill leaves at each.
"""

import base64
import contextlib
import json
import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from dpjax import _files, _validate
from dpjax.engine.result import Progress
from dpjax.engine.step import NOT_FINITE, Metrics, Outgoing
from dpjax.learning.problem import Problem
from dpjax.plans import calibration
from dpjax.plans.calibration import ByFactor
from dpjax.plans.plan import Plan
from dpjax.plans.sums import CalibratedCode
from dpjax.protocols import Models, State, Tree
from dpjax.secagg.primitives import derived, key_pair
from dpjax.secagg.terms import Limits
from dpjax.sites import wire
from dpjax.sites.channel import Channel
from dpjax.sites.compute import LocalRounds, SiteRounds, Stored
from dpjax.sites.conversation import Conversation
from dpjax.sites.identity import Identity
from dpjax.sites.ledger import Ledger
from dpjax.sites.meeting import GROUP_ITEM, LEFT, Agreement, Meeting, digest_of, neighbours_of
from dpjax.sites.noise import SiteNoise, of_pair
from dpjax.sites.store import LEAVING, SUCCESSOR, UNBEGUN, Folder, MustLeave

__all__ = ["MustLeave", "Site", "SiteLoop"]

_log = logging.getLogger("dpjax.sites")
_ROUNDS_TOLD = 10
"""Rounds of which one is told in the log."""
_Status: TypeAlias = dict[str, str | int | float | None]


@dataclass(frozen=True)
class Waits:
    """How long a site waits, in seconds.

    Attributes:
        late: After this long, who is waited for is named in the log, again and again.
        linger: How long a site that is done stays for those that are not.
        enrol: In a sum among sites, how long for all to begin a round.
        stage: In such a sum, how long for each word.
        gone: How long until who is waited for is gone, and this site stops.

    Example:
        >>> from dpjax.sites.site import Waits
        >>> Waits(late=5.0).linger
        60.0
    """

    late: float = 60.0
    linger: float = 60.0
    enrol: float = 60.0
    stage: float = 60.0
    gone: float = 86_400.0

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        _validate.fields(self, _validate.positive, "late", "linger", "enrol", "stage", "gone")

    @property
    def of_sums(self) -> Limits:
        """Those of a sum."""
        return Limits(enrol=self.enrol, stage=self.stage)


class _Leaving(Exception):
    """The operator wants the site to leave in order."""


class SiteLoop:
    """The loop of a site, whatever its rounds say: `Site` gossips, `SumSite` adds up.

    Args:
        agreement: The project that all sites compare.
        problem: Of this site's own records, as one agent.
        identity: The site's name and key.
        channel: To its neighbours.
        folder: Of this run, on a local disk; made where there is none.
        secret: Of the site's group, where noise is correlated between sites; None draws one.
        waits: Times.
        ledger: What the site has spent in the project; None where it keeps none.
        is_own: Whether the problem is the caller's own: the first message is made of its first
            model, so that sites then compare its values and those of frozen leaves.

    Attributes:
        compute: The rounds.
        guarantee: What all rounds guarantee, finite precision included; of a project with totals,
            what all phases so far do.
        has_left: Whether it has left in order.

    Raises:
        ValueError: For a name that is not in the project, a key that is not the roster's, a folder
            of another project, and what the plan cannot do at sites.

    Example:
        >>> from dpjax.sites.site import Site, SiteLoop
        >>> issubclass(Site, SiteLoop)
        True
    """

    compute: LocalRounds
    _conversation: Meeting
    _group: tuple[str, ...]

    def __init__(
        self,
        agreement: Agreement,
        problem: Problem,
        identity: Identity,
        channel: Channel,
        folder: _files.PathLike,
        *,
        secret: bytes | None = None,
        waits: Waits | None = None,
        ledger: Ledger | None = None,
        is_own: bool = False,
    ) -> None:
        self.agreement = agreement
        self.name = identity.name
        self.waits = waits or Waits()
        self.has_left = False
        self._identity = identity
        self._is_linked = False
        plan = agreement.plan
        names = agreement.names
        if self.name not in names:
            raise ValueError(f"name is {self.name!r}, which is none of {', '.join(names)}")
        if identity.public_key not in agreement.roster.accepted(self.name):
            raise ValueError(
                f"key of {self.name} is another than the project's; renew the certificate with "
                "the key that the project pins"
            )
        number = names.index(self.name)
        self.compute = self._rounds_of(plan, problem, number)
        if (secret is None) == (len(self._group) > 1):
            if secret is not None:
                raise ValueError("secret is given, and this noise has no group's; leave it out")
            raise ValueError(
                f"secret is missing; name the file that the group of {', '.join(self._group)} "
                "drew for this run: secret = FILE in site.toml"
            )
        self._group_secret = secret
        if is_own and problem.init_per_agent:
            raise ValueError(
                "problem has init_per_agent=True, whose first models sites cannot compare, and "
                "which are sent; give one first model to all"
            )
        if agreement.average_rounds and not self.compute.averages:
            raise ValueError(
                f"average_rounds is {agreement.average_rounds} for method {plan.method}, "
                "whose last models are no averages of messages; give 0"
            )
        # Made once, as every round states it. Refuses a plan whose loss is none at sites.
        self.guarantee = self.compute.guarantee.replace(sites=True, insecure=channel.insecure)
        self._of_phase = self.guarantee
        self._last = self.compute.rounds + agreement.average_rounds
        self._channel = channel
        self._is_used = False
        self._ledger = ledger
        self._told = 0.0
        self._state: State | None = None
        # States that are kept: of two sites one is ahead by no more rounds than links between them.
        self._behind = len(names) if self.compute.gossips else 2
        self._folder = Folder(folder)
        try:
            self._begin(identity, [problem.frozen] if is_own else None)
        except BaseException:
            self._folder.close()
            raise

    def _rounds_of(self, plan: Plan, problem: Problem, number: int) -> LocalRounds:
        """The rounds of this site, and whose secrets its noise is of."""
        raise NotImplementedError

    def _met(self, identity: Identity, presence: wire.Presence) -> Meeting:
        """What is said in the run."""
        raise NotImplementedError

    @property
    def round(self) -> int:
        """Rounds absorbed."""
        return self._conversation.round

    @property
    def awaited(self) -> tuple[str, ...]:
        """Who has not absorbed the last round that this site has, and may need it again."""
        return tuple(self._conversation.behind())

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self._folder.path

    def statement(self) -> str:
        """What is guaranteed, of whose records; and the totals of all sites, where they differ."""
        self._restate()
        text = self.guarantee.statement()
        totals = self.agreement.totals
        if len({total.largest for total in totals.values()}) < 2:
            return text
        epsilons = [f"{name} {total.largest:g}" for name, total in totals.items()]
        return f"Records of {self.name}: {text} Totals by site, in epsilon: {', '.join(epsilons)}."

    def save(self, path: _files.PathLike) -> None:
        """Write what may be published, readable without JAX: arrays by their paths, a statement,
        and the features and classes of the project's schema.

        Args:
            path: An .npz file; must not exist.
        """
        assert self._state is not None
        released = jax.device_get(self.compute.released(self._state))
        entries: dict[str, Any] = {"statement": np.array(self.statement())}
        entries |= self.agreement.described()
        for place, leaf in jax.tree.leaves_with_path(released):
            entries[jax.tree_util.keystr(place)] = leaf[0]
        with _files.writing("path", path):
            _files.create(_files.npz(path), lambda file: np.savez(file, **entries))

    def _begin(self, identity: Identity, public: Tree | None) -> None:
        """Begin with what an earlier process has stored, or for the first time."""
        folder = self._folder
        self._check_open()
        folder.room("states")
        nonce = folder.drawn("nonce")
        self._bind(nonce)
        self._nonce = nonce
        self._restate()
        begun = folder.read("run")
        exchange = b""
        if begun is None:
            # Later none is drawn: what came of the lost one is out.
            if self._group_secret is None:
                folder.drawn("secret")
            if self._is_linked:
                exchange = key_pair(folder.drawn("exchange")).public
        presence = wire.signed_presence(identity, nonce, self._terms(public), exchange)
        self._conversation = self._met(identity, presence)
        self._conversation.ledger = self._ledger
        if begun is not None:
            with self._telling_of_end():
                self._conversation.resume(begun)
                stored = self._restored("state")
                self._conversation.recall(0 if stored is None else stored.round)
                self._draw()
                self._state = None if stored is None else self.compute.restored(stored)

    def _restate(self) -> None:
        """State what all runs of the ledger guarantee, also those that others have shown."""
        if self._ledger is not None:
            stated = self._ledger.guarantee(self._nonce)
            # A project without totals states this phase alone.
            self.guarantee = stated if stated.phases else self.guarantee

    def _check_open(self) -> None:
        """Refuse a phase that this site has ended."""
        successor = self._folder.read(SUCCESSOR)
        if successor is not None:
            raise ValueError(
                f"folder is {str(self.folder)!r}, of a phase that {self.name} has ended: it signed "
                f"the plan {successor.decode()} after it; name that plan in site.toml"
            )
        has_left = self._folder.read(f"{LEFT}{self.name}") is not None
        # Killed before all knew it, it says so again.
        if has_left and self._folder.read(LEAVING) is None:
            raise ValueError(
                f"folder is {str(self.folder)!r}, of a run that {self.name} has left in order; "
                "join again by a plan after it"
            )

    def _terms(self, public: Tree | None) -> dict[str, str]:
        """What sites compare; of a problem of one's own its first values, too."""
        terms = dict(self.agreement.terms())
        if public is not None:
            terms["first model"] = digest_of((self.compute.init().models, public))
        if self._group_secret is not None:
            # With another secret noise would not cancel, and nobody would notice.
            digest = self.agreement.digest.encode()
            terms[GROUP_ITEM] = derived(self._group_secret, "commitment", digest).hex()
        return terms

    def _bind(self, nonce: bytes) -> None:
        """Refuse another secret of the group than the folder's: rounds' noise is correlated."""
        if self._group_secret is None:
            return
        mark = derived(self._group_secret, "mark", nonce)
        kept = self._folder.read("mark")
        if kept is None:
            self._folder.create("mark", mark)
        elif kept != mark:
            raise ValueError(
                f"secret is another than the one that {str(self._folder.path)!r} began with, and "
                "noise of old and new rounds must be of one; give that file"
            )

    def _draw(self) -> None:
        """Take the noise that is drawn for the run, whose name is known."""
        conversation = self._conversation
        if self.round >= self.compute.rounds or self.name in conversation.departed:
            self._forget()
            return
        secret = self._group_secret or self._kept("secret")
        holder = ",".join(self._group)
        phase = self.agreement.phase
        sources = [SiteNoise(secret, run=conversation.run, holder=holder, phase=phase)]
        if self._is_linked:
            private = self._kept("exchange")
            public = conversation.presences[self.name].exchange
            if key_pair(private).public != public:
                raise MustLeave("exchange is another key than this run's; this site must leave")
            for name in conversation.neighbours:
                ends = {self.name: public, name: conversation.presences[name].exchange}
                pair = of_pair(private, ends, name, run=conversation.run, phase=phase)
                sources.append(pair)
        self.compute.begin(sources)

    def _kept(self, name: str) -> bytes:
        """A secret that was drawn with the folder."""
        if self._folder.read(name) is None:
            raise MustLeave(f"{name} is gone, without which noise is another; this site must leave")
        return self._folder.drawn(name)

    def _forget(self) -> None:
        """Let go of all secrets: the last message with noise is stored."""
        self.compute.begin(())
        self._folder.delete("secret")
        self._folder.delete("exchange")

    def run(self, callback: Callable[[Progress], object] | None = None) -> Models:
        """Take part to the end, and return what may be published.

        Args:
            callback: Called after every round with `dpjax.engine.result.Progress`, of one seed and
                one plan; what it returns is not read. Its metrics are the site's own: no guarantee
                covers them.

        Raises:
            MustLeave: Where going on might send a round twice.
        """
        # A callback that raises must not leave sessions that seem alive.
        with contextlib.closing(self.rounds()) as rounds:
            for done in rounds:
                if callback is not None:
                    callback(done)
        assert self._state is not None
        return self.compute.released(self._state)

    def rounds(self) -> Generator[Progress, None, None]:
        """Take part, round by round; what is behind a ``yield`` is on disk.

        Raises:
            MustLeave: Where going on might send a round twice.
            ValueError: Of a site that has run: its channel is closed.
        """
        if self._is_used:
            raise ValueError(f"{self.name} has run and its channel is closed; make another site")
        self._is_used = True
        conversation = self._conversation
        with contextlib.closing(self._channel), self._telling_of_end():
            if conversation.doubt is not None and self.round < self._last:
                raise MustLeave(conversation.doubt)
            if not conversation.run and self._folder.read(UNBEGUN) is not None:
                raise ValueError(
                    f"folder is {str(self.folder)!r}, of a phase of which {self.name} has signed "
                    "that it has not begun; name the plan after it in site.toml"
                )
            conversation.connect()
            if self._state is None:
                self._state = self.compute.init()
            try:
                self._meet()
                began = time.monotonic(), self.round
                while self.round < self._last:
                    metrics = self._measured(self._step())
                    if self.round % _ROUNDS_TOLD == 0:
                        _log.info("round %d of %d", self.round, self._last)
                    rate = (self.round - began[1]) / (time.monotonic() - began[0])
                    yield Progress(self.round, metrics, (self.guarantee,), rate)
            except _Leaving:
                self._leave()
            else:
                self._finish()

    def _meet(self) -> None:
        """Wait for who takes part, and take the noise of the run."""
        conversation = self._conversation
        if self.name in conversation.departed:
            raise _Leaving
        if not conversation.run:
            self._wait(conversation.absent)
            self._draw()
        # Before anything is computed, each neighbour shows what it has of this site's.
        if self.round < self._last:
            self._wait(conversation.unmet)
        self._restate()

    def _leave(self) -> None:
        """Leave in order: say so, and stay until those who are here know it."""
        conversation = self._conversation
        conversation.leave()
        self.has_left = True
        self._forget()
        self._wait(conversation.untold, self.waits.linger, "leaves, and tells", is_over=True)
        for name in conversation.untold():
            _log.warning("%s does not know that %s leaves; start this site again", name, self.name)
        if not conversation.untold():
            self._folder.delete(LEAVING)
        conversation.end()
        self._told = 0.0
        self._tell("is done: it has left in order")
        _log.info("%s has left, after %d rounds", self.name, self.round)

    @contextlib.contextmanager
    def _telling_of_end(self) -> Generator[None, None, None]:
        """Say in the status why the site stopped, and in the audit file that it must leave."""
        try:
            yield
        except BaseException as error:
            # The first error is what matters, whatever the disk can still take.
            with contextlib.suppress(OSError, ValueError):
                self._told = 0.0
                self._tell(f"stopped: {str(error) or 'interrupted'}")
                if isinstance(error, MustLeave):
                    self._conversation.audit.note("stopped", reason=str(error))
            raise

    def close(self) -> None:
        """End the sessions, and let other processes have the folder."""
        self._channel.close()
        self._folder.close()
        if self._ledger is not None:
            self._ledger.close()

    # One round.

    def _step(self) -> Metrics:
        """Compute, store, send, receive and absorb one round."""
        raise NotImplementedError

    def _measured(self, of_round: Metrics) -> dict[str, np.ndarray]:
        """Metrics of a round and of the models after it, [1, 1] each."""
        assert self._state is not None
        metrics = {**of_round, **self.compute.metrics(self._state)}
        # A message that is not finite ends the run by an error.
        metrics.pop(NOT_FINITE, None)
        return {name: np.reshape(np.asarray(value), (1, 1)) for name, value in metrics.items()}

    def _keep(self, new: State) -> None:
        """Put the next state on disk, with what was heard for it."""
        self._conversation.settle()
        self._folder.link("state", f"states/{self.round}")
        self._folder.replace("state", _packed(self.compute.stored(new)))
        self._folder.delete(f"states/{self.round - self._behind}")
        self._state = new

    def standing(self, path: _files.PathLike) -> wire.Standing:
        """Write how far this site came, signed, for the plan of a phase after this one.

        Args:
            path: A file, of models that are public, after the last few rounds; of the first models
                alone where the run has not begun.
        """
        conversation = self._conversation
        if not conversation.run:
            self._check_unbegun()
        models: dict[int, Models] = {}
        if self.round < self._behind:
            models[0] = self.compute.released(self.compute.init())
        for name in (*(f"states/{kept}" for kept in self._folder.names("states")), "state"):
            stored = self._restored(name)
            if stored is not None and stored.round >= self.round - self._behind:
                models[stored.round] = self.compute.released(stored)
        rounds = []
        arrays = {}
        for round, tree in sorted(models.items()):
            rounds.append((round, bytes.fromhex(digest_of(tree))))
            for number, leaf in enumerate(jax.tree.leaves(jax.device_get(tree))):
                arrays[f"{round}/{number}"] = np.asarray(leaf)
        plan = self.agreement.digest
        bare = wire.Standing(self.name, plan, conversation.run, tuple(rounds), b"")
        signature = self._identity.sign("standing", bare.content)
        standing = bare._replace(signature=signature)
        header = base64.b64encode(wire.encoded(standing)).decode()
        with _files.writing("path", path):
            _files.replace(Path(path), _files.packed(header, arrays))
        return standing

    def _check_unbegun(self) -> None:
        """Note that this phase does not begin any more, unless it has."""
        plan = self.agreement.digest
        if self._ledger is not None and plan in [digest for digest, _ in self._ledger.runs]:
            raise ValueError(
                f"folder is {str(self.folder)!r}, where no run has begun, and the ledger has one "
                f"of the plan {plan}; name that run's folder, or let {self.name} join again"
            )
        if self._folder.read(UNBEGUN) is None:
            self._folder.create(UNBEGUN, b"")

    def _finish(self) -> None:
        """Stay until all neighbours have absorbed the last round, or for the time of lingering."""
        conversation = self._conversation
        self._wait(conversation.behind, self.waits.linger, "is done, and stays for")
        for name in conversation.behind():
            _log.warning("%s is not done yet; start this site again if it needs it", name)
        conversation.end()
        self._told = 0.0
        self._tell("is done")
        _log.info("%s is done, after round %d", self.name, self.round)

    # Waiting.

    def _wait(
        self,
        missing: Callable[[], list[str]],
        most: float = np.inf,
        verb: str = "waits for",
        is_over: bool = False,
    ) -> None:
        """Handle events until nothing is missing, or for so long; name what is late."""
        conversation = self._conversation
        began = time.monotonic()
        late = began + self.waits.late
        while missing() and time.monotonic() < began + most:
            # After the last round nothing of this site's is at stake any more.
            if self.round < self._last and not is_over:
                self._check_end(time.monotonic() - began, missing)
            conversation.turn()
            names = "; ".join(missing())
            self._tell(f"{verb} {names}" if names else "goes on")
            if names and time.monotonic() > late:
                late += self.waits.late
                _log.warning("round %d %s %s", self.round, verb, names)

    def _check_end(self, waited: float, missing: Callable[[], list[str]]) -> None:
        """Stop where the run has ended for this site, or is to end."""
        conversation = self._conversation
        if conversation.doubt is not None:
            raise MustLeave(conversation.doubt)
        if not conversation.run:
            return
        if (self.folder / LEAVING).exists():
            raise _Leaving
        is_stuck = waited > self.waits.gone
        if is_stuck:
            conversation.give_up(self.waits.gone)
        fault = conversation.ended(is_stuck)
        if fault is None and waited > 2 * self.waits.gone:
            # A site whose session is open, and that says nothing a round is made of, could keep all
            # for ever. Whoever has no session with one that is gone has heard of it by now.
            fault = (
                f"{waited:.0f} seconds went by without {'; '.join(missing())}, with sessions "
                "open: this run has ended. Compare logs, find out who spoils it, and go on without"
            )
        if fault is not None:
            _log.warning("%s", fault)
            # Who is gone is not met by all.
            verb = f"ends, as {fault}, and tells"
            self._wait(conversation.untold, self.waits.linger, verb, is_over=True)
            raise ValueError(fault)

    def _tell(self, doing: str) -> None:
        """Write what the site is doing, once a second."""
        if time.monotonic() < self._told:
            return
        self._told = time.monotonic() + 1
        conversation = self._conversation
        traffic = self._channel.statistics()
        peers = {}
        for peer in conversation.neighbours.values():
            session = "open" if peer.live else "closed"
            state: _Status = {"session": session, "acknowledged_rounds": peer.acknowledged + 1}
            if peer.refusal:
                state["refused"] = peer.refusal
            if peer.name in traffic:
                sent, received, sessions, silence = traffic[peer.name]
                state |= {"sent_bytes": sent, "received_bytes": received, "sessions": sessions}
                # JSON has no infinity.
                state["silence_s"] = round(silence, 1) if silence < np.inf else None
            peers[peer.name] = state
        status = {
            "name": self.name,
            "time": time.time(),
            "doing": doing,
            "round": self.round,
            "rounds": self._last,
            "sent": conversation.sent,
            "caption": self._of_phase.caption(),
            "total": self.guarantee.caption() if self.guarantee.phases else None,
            "peers": peers,
        }
        _files.replace(self.folder / "status.json", json.dumps(status).encode(), mode=0o600)

    def _restored(self, name: str) -> Stored | None:
        """A state of the folder; None where there is none."""
        first = self.compute.stored(self.compute.init())
        like, structure = jax.tree.flatten((first.models, first.memory))
        try:
            header, arrays = _files.unpacked(self.folder / name)
            leaves = []
            for number, leaf in enumerate(like):
                leaves.append(arrays[f"leaf_{number}"].view(leaf.dtype).reshape(leaf.shape))
            models, memory = jax.tree.unflatten(structure, leaves)
            return Stored(models, memory, json.loads(header)["round"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise MustLeave(
                f"{name} is damaged ({_files.brief(error)}); this site must leave"
            ) from None


def group_of(plan: Plan, site: int) -> tuple[int, ...]:
    """The sites that draw their noise from one secret with a site, itself among them.

    Args:
        plan: Any.
        site: The site's number.

    Raises:
        ValueError: For noise that sites do not draw.
    """
    noise: object = plan.noise
    if isinstance(noise, CalibratedCode):
        # Shares of a sum are each site's own.
        return (site,)
    if not isinstance(noise, ByFactor):
        raise ValueError(
            f"plan has noise {plan.config.noise}, which sites do not draw as it is; give "
            "release=True, and a design such as Independent, Mafalda, Whisper or PairKeys"
        )
    # What both ends of a link draw comes of keys of theirs, and no group's secret.
    if plan.guarantee.secrets == "links":
        return (site,)
    group = calibration.groups(noise.factor)
    return tuple(np.flatnonzero(group == group[site]).tolist())


class Site(SiteLoop):
    """One site of a run.

    Guarantee: what `Site.guarantee` states, for this site's records, against a participant that
    sees every message of every site, whatever others send. One message a round leaves, the same
    bytes however often the process is killed, each with noise of an address of its own. It holds
    if nobody copies the folder, or starts from an older copy of it while none of the neighbours
    that answer has a later message; and if the secret stays secret.

    Example:
        >>> import dpjax as dp
        >>> def train(settings):
        ...     site = dp.site("plan.json", {"file": "records.csv"}, settings)
        ...     for progress in site.rounds():
        ...         print(progress.round, progress.metrics["test_accuracy"])
        ...     site.save("model.npz")
        >>> train({"name": "lyon"})
        Traceback (most recent call last):
            ...
        ValueError: certificate is missing in the site's settings; give it as text
    """

    compute: SiteRounds
    _conversation: Conversation

    def _rounds_of(self, plan: Plan, problem: Problem, number: int) -> SiteRounds:
        """The rounds of this site, and whose secrets its noise is of."""
        self._group = tuple(self.agreement.names[member] for member in group_of(plan, number))
        self._is_linked = plan.guarantee.secrets == "links"
        rows = [len(self._group)]
        if self._is_linked:
            rows += [1] * len(neighbours_of(self.agreement, number))
        return SiteRounds(plan, problem, number, rows, seed=self.agreement.seed)

    def _met(self, identity: Identity, presence: wire.Presence) -> Conversation:
        """What is said in the run."""
        return Conversation(
            self.agreement,
            identity,
            self._channel,
            self._folder,
            presence,
            group=self._group,
            shapes=self.compute.message,
            rounds=self._last,
        )

    def _step(self) -> Metrics:
        """Compute, store, send, receive and absorb one round."""
        state = self._state
        assert state is not None
        conversation = self._conversation
        sent, message = self._computed(state)
        conversation.send(message)
        self._wait(conversation.missing)
        received = {}
        for peer in conversation.neighbours.values():
            if peer.sends:
                received[peer.number] = conversation.arrived[peer.name, self.round]
        if sent is None:
            new = self.compute.averaged(state, received)
        else:
            new = self.compute.incoming(state, sent, received)
        self._absorb(new)
        return {} if sent is None else sent.metrics

    def _computed(self, state: State) -> tuple[Outgoing | None, wire.RoundMessage]:
        """The round's message: the stored one, or a new one that is stored now."""
        conversation = self._conversation
        if conversation.doubt is not None:
            raise MustLeave(conversation.doubt)
        stored = conversation.stored()
        sent: Outgoing | None = None
        numbers: Tree = state.models
        if self.round < self.compute.rounds:
            sent = self.compute.outgoing(state)
            numbers = sent.message
        message = conversation.store(numbers) if stored is None else stored
        if sent is not None:
            # What others have, should another library or machine compute other last bits.
            sent = sent._replace(message=conversation.numbers(message))
        return sent, message

    def _absorb(self, new: State) -> None:
        """Put the next state on disk, then let go of the messages that it is made of."""
        self._keep(new)
        conversation = self._conversation
        conversation.audit.note("absorbed", round=self.round)
        conversation.absorbed()
        if self.round == self.compute.rounds:
            self._forget()


def _packed(stored: Stored) -> _files.Content:
    """A state as a file, with its digest."""
    leaves = jax.tree.leaves((stored.models, stored.memory))
    arrays = {f"leaf_{number}": np.asarray(leaf) for number, leaf in enumerate(leaves)}
    return _files.packed(json.dumps({"round": stored.round}), arrays)
