"""What a site says to its neighbours in rounds of gossip, what it hears, and knows by that.

`Conversation` has the messages of a run, on disk and in memory.
"""

import time
from collections.abc import Collection

import jax
import numpy as np

from dpjax.protocols import Message, Tree
from dpjax.sites import wire
from dpjax.sites.channel import Channel
from dpjax.sites.identity import Identity, Refused
from dpjax.sites.meeting import (
    PIECE,
    Agreement,
    Meeting,
    Neighbour,
    bytes_of,
    neighbours_of,
    pieces,
    whole,
)
from dpjax.sites.store import Folder, Log, MustLeave

__all__ = ()

_DIGEST_BYTES = 32
_EVIDENCE = "evidence-"


class Conversation(Meeting):
    """The messages of a site and of its neighbours, round by round.

    Guarantee: a message is on disk before it is handed to the channel, and it is the only one of
    its round. What is taken of other sites' messages is signed by them, for this run.

    Args:
        agreement: What all sites agree on.
        identity: This site.
        channel: To its neighbours.
        folder: Of the run.
        presence: This site's own.
        group: Names of the sites that share the secret of its noise, itself among them.
        shapes: Of a message's numbers.
        rounds: Of the run, those that only average included.

    Attributes:
        log: Headers of all messages that are known.
        arrived: Messages of neighbours that are not absorbed yet, by name and round.
    """

    def __init__(
        self,
        agreement: Agreement,
        identity: Identity,
        channel: Channel,
        folder: Folder,
        presence: wire.Presence,
        *,
        group: Collection[str],
        shapes: Message,
        rounds: int,
    ) -> None:
        neighbours = neighbours_of(agreement, agreement.names.index(presence.name))
        parts = agreement, identity, channel, folder, presence
        super().__init__(*parts, group=group, neighbours=neighbours)
        self.log = Log(folder)
        self.arrived: dict[tuple[str, int], Message] = {}
        self._shapes = shapes
        self._rounds = rounds
        # Headers that are neither on disk nor handed on, and when they were last.
        self._news: list[wire.Header] = []
        self._settled = 0.0

    @property
    def sent(self) -> int:
        """Rounds whose message is stored."""
        last = self.log.last(self.name)
        return 0 if last is None else last.round + 1

    def recall(self, round: int) -> None:
        """Note messages, and who proved to send two."""
        self.round = round
        names = self._folder.names("sent")
        for name in names:
            message = self._stored(name)
            self._note(message.header(self.name))
            if message.round < round - 1:
                self._folder.delete(f"sent/{name}")
        if round == self._rounds and str(round - 1) not in names:
            # All had absorbed it: this site was done.
            for peer in self.neighbours.values():
                peer.acknowledged = round - 1
        for name in self._folder.names("."):
            if name.startswith(_EVIDENCE) and round < self._rounds:
                first, _ = whole(self._folder.read(name), wire.Headers, name).headers
                # It still hands in how far it came, so that others go on without who lied.
                self.doubt = self._accusation(first)

    # This site's messages.

    def stored(self) -> wire.RoundMessage | None:
        """The message of this round, where there is one.

        Raises:
            MustLeave: Where it is damaged, or known to be out though it is gone.
        """
        name = str(self.round)
        if name in self._folder.names("sent"):
            return self._stored(name)
        self._check_first()
        return None

    def store(self, numbers: Tree) -> wire.RoundMessage:
        """Put a message on disk, from where alone it is sent; from now on its round is spent.

        Args:
            numbers: Of the message.
        """
        bare = wire.RoundMessage(self.round, bytes_of(numbers), b"")
        header = bare.header(self.name)
        to_sign = wire.message_content(self.run, self._agreement.digest, header)
        message = bare._replace(signature=self._identity.sign("message", to_sign))
        with self._guard:
            self._check_first()
            self._folder.create(f"sent/{self.round}", wire.encoded(message))
            # The payload's digest was computed for the signature.
            self._note(header._replace(signature=message.signature))
        self.audit.note("stored", round=self.round, digest=header.digest.hex())
        return message

    def send(self, message: wire.RoundMessage) -> None:
        """Send a message to all who hear this site; who comes later is welcomed with it.

        Args:
            message: One that is stored.

        Raises:
            MustLeave: Where somebody else was found to send as this site, since it was computed.
        """
        if self.doubt is not None:
            raise MustLeave(self.doubt)
        data = wire.encoded(message)
        for peer in self.neighbours.values():
            if peer.hears and peer.live and peer.acknowledged < message.round:
                peer.backlog.append(data)
        self.flush()

    def numbers(self, message: wire.RoundMessage) -> Message:
        """The numbers of a message, all finite.

        Args:
            message: Of anybody.

        Raises:
            Refused: For other shapes, and for what is not finite.
        """
        leaves, structure = jax.tree.flatten(self._shapes)
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
        if len(message.payload) != sum(sizes):
            raise Refused(f"round {message.round} has {len(message.payload)} bytes")
        opened = []
        for leaf, end, size in zip(leaves, np.cumsum(sizes), sizes, strict=True):
            part = message.payload[end - size : end]
            values = np.frombuffer(part, np.dtype(leaf.dtype).newbyteorder("<"))
            values = values.astype(leaf.dtype).reshape(leaf.shape)
            if not np.isfinite(values).all():
                raise Refused(f"round {message.round} has numbers that are not finite")
            opened.append(values)
        return jax.tree.unflatten(structure, opened)

    def absorbed(self) -> None:
        """Go on to the next round: the state after this one is on disk."""
        done = self.round
        self.round += 1
        # All have absorbed the message before this round's, which a new session may still need.
        self._folder.delete(f"sent/{done - 1}")
        for peer in self.neighbours.values():
            if peer.sends:
                del self.arrived[peer.name, done]
            self._acknowledge(peer, done)
        self.flush()

    def end(self) -> None:
        """Let go of the last message, once all who need it have absorbed it."""
        if not self.behind():
            self._folder.delete(f"sent/{self.round - 1}")
        super().end()

    # What is waited for.

    def missing(self) -> list[str]:
        """Who has not sent this round's message, or not absorbed that of the round before."""
        texts = []
        for peer in self.neighbours.values():
            if peer.sends and (peer.name, self.round) not in self.arrived:
                texts.append(f"the message of {peer}")
            if peer.hears and peer.acknowledged < self.round - 1:
                texts.append(f"the receipt of {peer}")
        return texts

    def behind(self) -> list[str]:
        """Who has not absorbed the last round."""
        return [
            peer.name for peer in self.neighbours.values() if peer.acknowledged < self.round - 1
        ]

    def idle(self, is_quiet: bool) -> None:
        """Put new headers on disk and hand them on, in a quiet moment or after a second."""
        if is_quiet or time.monotonic() > self._settled + 1:
            self.settle()

    def settle(self) -> None:
        """Put new headers on disk, and hand them on: so two messages of one round meet."""
        self._settled = time.monotonic()
        with self._guard:
            news = self._news
            self._news = []
            self.log.keep(news)
        for peer in self.neighbours.values():
            if peer.live:
                others = [header for header in news if header.sender not in (self.name, peer.name)]
                peer.backlog.extend(pieces(wire.Headers, others))

    # What is heard.

    def welcome(self, peer: Neighbour) -> None:
        """Say to a new session what the last one may have lost."""
        recent = [header for header in self.log if header.round >= self.round - 1]
        peer.backlog.extend(pieces(wire.Headers, recent))
        for round in (self.round - 1, self.round):
            content = self._folder.read(f"sent/{round}")
            if peer.hears and content is not None and peer.acknowledged < round:
                peer.backlog.append(content)
        if not peer.sends and self.log.get(self.name, self.round - 1) is not None:
            self._acknowledge(peer, self.round - 1)

    def take(self, peer: Neighbour, frame: wire.Frame) -> None:
        """What a neighbour says."""
        if isinstance(frame, wire.RoundMessage):
            self._take_message(peer, frame)
        elif isinstance(frame, wire.Receipt):
            header = self.log.get(self.name if peer.hears else peer.name, frame.round)
            if header is None or header.digest != frame.digest:
                raise Refused(f"a receipt of round {frame.round} for what this site did not send")
            peer.acknowledged = max(peer.acknowledged, frame.round)
        elif isinstance(frame, wire.Headers):
            if len(frame.headers) > PIECE:
                raise Refused(f"{len(frame.headers)} headers of one frame, more than {PIECE}")
            for header in frame.headers:
                self._take_header(header)
        else:
            raise Refused("a greeting after the hello")

    def _take_message(self, peer: Neighbour, message: wire.RoundMessage) -> None:
        """Keep a neighbour's message until it is absorbed; once it is, acknowledge it again."""
        header = message.header(peer.name)
        if not peer.sends or not self._is_signed(header):
            raise Refused(f"round {message.round} is not signed for this run, or on no link of it")
        earlier = self.log.get(peer.name, message.round)
        if earlier is not None and earlier.digest != header.digest:
            self._accuse(earlier, header)
        if message.round < self.round:
            if earlier is None:
                raise Refused(f"round {message.round}, which this site never had")
            self._acknowledge(peer, message.round)
            return
        # A neighbour may be one round ahead, and no more.
        if message.round > self.round + 1 or message.round >= self._rounds:
            raise Refused(f"round {message.round} in round {self.round}")
        if message.round > self.round and (peer.name, self.round) not in self.arrived:
            # It keeps a message until all have absorbed it, and sends it first.
            raise Refused(
                f"round {message.round}, so that somebody acknowledged round {self.round} as "
                f"{self.name}, which lacks it: its folder was restored, or has a copy that runs"
            )
        if (peer.name, message.round) not in self.arrived:
            self.arrived[peer.name, message.round] = self.numbers(message)
            self._note(header)

    def _acknowledge(self, peer: Neighbour, round: int) -> None:
        """Say that a message is absorbed, once, however often it came before that is said.

        Who does not send hears of this site's own: until then it stays, whose receipts are needed.
        """
        header = self.log.get(peer.name if peer.sends else self.name, round)
        assert header is not None
        receipt = wire.encoded(wire.Receipt(round, header.digest))
        if receipt not in peer.backlog:
            peer.backlog.append(receipt)

    def _take_header(self, header: wire.Header) -> None:
        """Note what somebody sent to others; two of one round prove that it sent both."""
        earlier = self.log.get(header.sender, header.round)
        if earlier is not None and earlier.digest == header.digest:
            return
        if header.round >= self._rounds or not self._is_signed(header):
            raise Refused(f"a header of {header.sender!r} is not signed for this run")
        if header.sender == self.name:
            self.doubt = self._foreign(header, "a neighbour")
            return
        # No site is further ahead than links lie between; others would fill memory.
        if header.round > self.round + len(self._agreement.names):
            return
        if earlier is not None:
            self._accuse(earlier, header)
        self._note(header)

    def _note(self, header: wire.Header) -> None:
        if self.log.get(header.sender, header.round) is None:
            self.log.note(header)
            self._news.append(header)

    def _accuse(self, first: wire.Header, second: wire.Header) -> None:
        """Stop: a site sent two messages in one round, and its signatures prove it."""
        name = f"{_EVIDENCE}{first.sender}-{first.round}"
        content = wire.encoded(wire.Headers((first, second)))
        if self._folder.read(name) is None:
            self._folder.create(name, content)
        for other in self.neighbours.values():
            other.backlog.append(content)
        self.flush()
        self.doubt = self._accusation(first)
        # Paths of this machine are nothing to others.
        raise Refused(_fault_of(first))

    def _accusation(self, header: wire.Header) -> str:
        """Why a site stops that has the evidence."""
        place = self._folder.path / f"{_EVIDENCE}{header.sender}-{header.round}"
        return f"{_fault_of(header)}. {place} has both signatures. Go on without it"

    # The hello, in the channel's threads.

    def shown(self, peer: str) -> tuple[wire.Header, ...]:
        """The header of a neighbour's last message."""
        last = self.log.last(peer)
        return () if last is None else (last,)

    def check_shown(self, peer: str, greeting: wire.Greeting) -> None:
        """Stop where a neighbour has a message of this site's that its folder lacks."""
        for header in greeting.shown:
            noted_header = self.log.get(self.name, header.round)
            if noted_header is not None and noted_header.digest == header.digest:
                continue
            # A site that has no run yet did not sign in one, unless it lost its folder.
            if header.sender != self.name or not self._is_signed(header, greeting.run):
                raise Refused(f"{peer} shows a message that {self.name} did not sign for this plan")
            self.doubt = self._foreign(header, peer)
            raise Refused(self.doubt)

    def _foreign(self, header: wire.Header, holder: str) -> str:
        """Why a site must leave whose signature is on what its folder does not have."""
        if not self.run:
            return (
                f"this folder is new, and {holder} has a message of {self.name} in round "
                f"{header.round} of a run: {self.name} lost its folder, or restored it from a "
                "backup, and must leave"
            )
        return (
            f"{holder} has a message of {self.name} in round {header.round} that this folder "
            "lacks: it was restored from a backup, or somebody runs a copy of it. "
            f"{self.name} must leave"
        )

    # The folder.

    def _stored(self, name: str) -> wire.RoundMessage:
        """A message of a file of the folder, whose signature still holds."""
        frame = whole(self._folder.read(f"sent/{name}"), wire.RoundMessage, f"sent/{name}")
        if name != str(frame.round) or not self._is_signed(frame.header(self.name)):
            raise MustLeave(
                f"{self._folder.path / 'sent' / name} is damaged, and may be out already; this "
                "site must leave"
            )
        return frame

    def _check_first(self) -> None:
        """Leave where this round, or any after it, has a message that is known here."""
        last = self.log.last(self.name)
        if last is not None and last.round >= self.round:
            raise MustLeave(
                f"round {last.round} of this folder was sent already, and what round "
                f"{self.round} sent is gone; this site must leave"
            )

    def _is_signed(self, header: wire.Header, run: bytes = b"") -> bool:
        content = wire.message_content(run or self.run, self._agreement.digest, header)
        # A digest of another length is signed as well, and everybody would keep it.
        if len(header.digest) != _DIGEST_BYTES:
            return False
        return self._agreement.roster.verify(header.sender, "message", content, header.signature)


def _fault_of(header: wire.Header) -> str:
    """What two messages of one round prove."""
    return (
        f"{header.sender} sent two messages in round {header.round}: its folder was copied or "
        "restored, and its records are not protected as stated"
    )
