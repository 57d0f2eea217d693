"""One process a site, in a run whose sites add up among themselves.

The loop is `SiteLoop`. A round asks `dpjax.sites.peers.PeerSums` for the sum of all sites' whole
numbers, and steps by it; a round without a sum changes no model.
"""

import contextlib
from collections.abc import Generator

import jax
import numpy as np

from dpjax.engine.step import Metrics
from dpjax.learning.problem import Problem
from dpjax.plans.plan import Plan
from dpjax.protocols import Models
from dpjax.secagg.terms import Limits
from dpjax.sites import wire
from dpjax.sites.channel import Channel
from dpjax.sites.compute import SumRounds
from dpjax.sites.identity import Identity, Refused
from dpjax.sites.meeting import Agreement, Meeting, Neighbour, neighbours_of
from dpjax.sites.peers import PeerSums, PeerTerms
from dpjax.sites.site import SiteLoop
from dpjax.sites.store import Folder

__all__ = ["SumSite"]


class SumMeeting(Meeting):
    """What sites say of sums, over the sessions of a meeting.

    Guarantee: that of `dpjax.sites.peers.PeerSums`.

    Args:
        agreement: What all sites agree on.
        identity: This site.
        channel: To all other sites.
        folder: Of the run.
        presence: This site's own.
        terms: Of the sums.
        limits: How long the site waits in a sum.

    Attributes:
        sums: This site's part in them.
    """

    def __init__(
        self,
        agreement: Agreement,
        identity: Identity,
        channel: Channel,
        folder: Folder,
        presence: wire.Presence,
        *,
        terms: PeerTerms,
        limits: Limits,
    ) -> None:
        neighbours = neighbours_of(agreement, agreement.names.index(identity.name))
        parts = agreement, identity, channel, folder, presence
        super().__init__(*parts, group=(identity.name,), neighbours=neighbours)
        self.sums = PeerSums(
            terms,
            identity,
            agreement.roster,
            folder,
            limits=limits,
            spoiled=agreement.spoiled,
            phase=agreement.phase,
            say=self._say,
        )

    @property
    def sent(self) -> int:
        """Rounds whose vector may be out."""
        return len(self.sums.charged)

    def recall(self, round: int) -> None:
        """Read notes and sums."""
        self.round = round
        for leave in self.departed.values():
            self.sums.part_from(leave.name, leave.round)
        with self._noting_doubt():
            self.sums.resume(self.run, round)

    def begun(self) -> None:
        """Begin to add up with those who are here."""
        with self._noting_doubt():
            self.sums.resume(self.run, 0)
        for peer in self.neighbours.values():
            if peer.live:
                self.sums.came(peer.name)

    def absorbed(self) -> None:
        """Go on to the next round: the state after this one is on disk."""
        self.sums.absorbed()
        self.round = self.sums.round

    def behind(self) -> list[str]:
        """Who has not said that it is in the round that this site is in."""
        stay = self.neighbours.keys() - self.departed
        return [name for name in sorted(stay) if self.sums.places.get(name, 0) < self.round]

    def unmet(self) -> list[str]:
        """Nobody: sums that are signed may come from any one site."""
        return []

    def unknown(self) -> list[str]:
        """With whom no session was opened yet, while too few are here for a sum of this round."""
        absent = super().unmet()
        is_wanted = self.sums.is_wanted and len(absent) > self.spare
        return absent if is_wanted else []

    def welcome(self, peer: Neighbour) -> None:
        """Say to a new session where this site is."""
        self.sums.came(peer.name)

    @property
    def spare(self) -> int:
        """Who is away is missing from sums, as long as there are enough."""
        return len(self.neighbours) + 1 - self.sums.terms.minimum

    def leave(self) -> None:
        """Say that it has no sum of this round, which nobody waits for then, and leave."""
        with self._guard:
            self.sums.withdraw()
        super().leave()

    def parted(self, peer: Neighbour) -> None:
        """Wait no longer for a site."""
        if self.run:
            self.sums.left(peer.name)

    def depart(self, leave: wire.Leave) -> None:
        """Note that a site takes part no more; its word counts for all rounds after its last."""
        super().depart(leave)
        # Of two signed words the one of the earlier round stands.
        standing = self.departed[leave.name]
        if standing.signature:
            self.sums.part_from(standing.name, standing.round)

    def take(self, peer: Neighbour, frame: wire.Frame) -> None:
        """Take what a site says of sums."""
        if isinstance(frame, wire.Enrolment):
            # What is shared with a site opens its vector, so that its beginning must be here.
            for word in frame.words:
                if word.sender not in self._beginnings:
                    raise Refused(f"keys of {word.sender!r}, which has not signed that it began")
        with self._noting_doubt():
            self.sums.hear(peer.name, frame)
            peer.acknowledged = self.sums.places.get(peer.name, 0) - 1

    def shown_keys(self, peer: str) -> tuple[wire.Word, ...]:
        """The last keys of the other end."""
        return self.sums.shown(peer)

    def check_shown(self, peer: str, greeting: wire.Greeting) -> None:
        """Stop where a site has keys of this one that its journal lacks."""
        with self._noting_doubt():
            self.sums.check_shown(peer, greeting.keys)

    def idle(self, is_quiet: bool) -> None:
        """Do what it is time for."""
        if self.run:
            with self._guard, self._noting_doubt():
                self.sums.tick()

    @contextlib.contextmanager
    def _noting_doubt(self) -> Generator[None, None, None]:
        try:
            yield
        finally:
            self.doubt = self.doubt or self.sums.doubt

    def _say(self, name: str, frame: wire.Frame) -> None:
        peer = self.neighbours[name]
        data = wire.encoded(frame)
        # Who asks again and again, and takes no answer, fills no memory.
        if peer.live and data not in peer.backlog:
            peer.backlog.append(data)


class SumSite(SiteLoop):
    """One site of a run whose sites add up among themselves.

    Guarantee: what `Site.guarantee` states, for this site's records, against sites that collude, as
    many as the plan says, the one that adds up among them. A vector leaves the site at most once a
    round, under masks. It holds if nobody copies the folder, or starts from an older copy of it.

    Example:
        >>> from dpjax.sites.sum_site import SumSite
        >>> SumSite.__name__
        'SumSite'
    """

    compute: SumRounds
    _conversation: SumMeeting

    @property
    def opened(self) -> tuple[Models, int]:
        """What may be published, and how many sites the last sum is of; 0 where there was none."""
        assert self._state is not None
        outcome = wire.decoded(self._folder.read(f"sums/{self.round - 1}") or b"")
        present = len(outcome.survivors) if isinstance(outcome, wire.Opened) else 0
        return jax.device_get(self.compute.released(self._state)), present

    def _rounds_of(self, plan: Plan, problem: Problem, number: int) -> SumRounds:
        """The rounds of this site, whose noise is its own."""
        self._group = (self.name,)
        return SumRounds(plan, problem, number, seed=self.agreement.seed)

    def _met(self, identity: Identity, presence: wire.Presence) -> SumMeeting:
        """What is said, with those that the plan's sums are for."""
        terms = PeerTerms.of(self.agreement.plan)
        parts = self.agreement, identity, self._channel, self._folder, presence
        return SumMeeting(*parts, terms=terms, limits=self.waits.of_sums)

    def _step(self) -> Metrics:
        """Compute, add up and step."""
        state = self._state
        assert state is not None
        conversation = self._conversation
        sums = conversation.sums
        sent = self.compute.outgoing(state)
        # Others show what they have of this site's before its vector may go out.
        self._wait(conversation.unknown)
        if sums.is_wanted:
            sums.offer(self.compute.vector(state, sent))
        self._wait(sums.missing)
        outcome = sums.outcome
        total = np.zeros(self.compute.code.padded, np.uint64)
        survivors: tuple[int, ...] = ()
        if isinstance(outcome, wire.Opened):
            total = sums.vector(outcome)
            survivors = outcome.survivors
        new = self.compute.incoming(state, sent, total, len(survivors))
        self._keep(new)
        if self.round in sums.charged:
            conversation.audit.note("sent", round=self.round)
        names = [self.agreement.names[number] for number in survivors]
        conversation.audit.note("opened", round=self.round, survivors=" ".join(names))
        conversation.absorbed()
        if self.round == self._last:
            sums.finish()
            self._forget()
        return sent.metrics
