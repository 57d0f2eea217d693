"""Which records take part in a round: all, at random, in turn, clients in turn, by coin flips."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from dpjax import _numerics, _validate
from dpjax.accounting.arrays import Pattern
from dpjax.accounting.balls_in_bins import BallsInBins
from dpjax.accounting.sampled import CoinFlips
from dpjax.data import batches
from dpjax.protocols import CountedRecords, Counts, Draw, Sampler

__all__ = ["BallsInBins", "Clients", "Cyclic", "Full", "Poisson", "Random"]

_Round: TypeAlias = Int[Array, ""]
_AgentCounts: TypeAlias = Int[Array, " n"]

_UNIT = float(np.finfo(np.float64).eps)


class _Sampler(Sampler):
    """Samplers whose settings are checked."""

    def __post_init__(self) -> None:
        """Refuse what is no number of records or rounds."""
        for field in dataclasses.fields(self):
            # Devices count rounds and records in int32.
            optional = field.type == int | None and getattr(self, field.name) is not None
            if field.type is int or optional:
                _validate.fields(self, _validate.integer, field.name, maximum=2**31 - 2)


class _Dealt(_Sampler):
    """Samplers that deal every record in a fixed order, ``epochs`` times, ``separation`` apart."""

    epochs: int
    if TYPE_CHECKING:
        # A field of one subclass and computed by the other. At run time it would be the default of
        # that field.
        @property
        def separation(self) -> int: ...
        @property
        def batch_size(self) -> int: ...

    @property
    def divisor(self) -> float:
        """Sums are divided by the places in a batch."""
        return self.batch_size

    @property
    def participation(self) -> Pattern:
        """(epochs, separation) of a record."""
        return self.epochs, self.separation

    def pattern(self, rounds: int) -> Pattern:
        """(epochs, separation) of the rounds in which one record takes part.

        Raises:
            ValueError: For another number of rounds than epochs x separation.
        """
        # Otherwise some records would take part more often than the pattern says.
        if self.epochs * self.separation != rounds:
            raise ValueError(
                f"sampler deals {_validate.counted(self.epochs, 'epoch')} of "
                f"{_validate.counted(self.separation, 'batch', 'batches')} in "
                f"{_validate.counted(rounds, 'round')}; give "
                f"rounds={self.epochs * self.separation}, or other epochs"
            )
        return self.epochs, self.separation

    def check(self, counts: Counts, agents: Sequence[str] | None = None) -> None:
        """Refuse agents with more records than a cycle has places."""
        batches.check_cyclic(counts, self.batch_size, self.separation, agents)

    def draw(self, key: PRNGKeyArray, round: _Round, counts: _AgentCounts) -> Draw:
        """The round's records, whatever the key."""
        del key
        return Draw(*batches.cyclic(round, counts, self.batch_size, self.separation))

    def fill_share(self, counts: Counts, rounds: int) -> np.ndarray:
        """How much of each batch is records, [T, n]."""
        # Rounds of one turn have the same records in every cycle.
        turn = np.arange(rounds)[:, None] % self.separation
        # Record r is in the rounds r mod b, r mod b + b, ...
        return np.maximum(np.ceil((counts - turn) / self.separation), 0) / self.batch_size


@dataclass(frozen=True)
class Random(_Sampler):
    """Distinct records drawn in every round; see `dpjax.data.batches.draw`.

    No amplification by subsampling is claimed: a record may take part in every round.

    Attributes:
        batch_size: Distinct records an agent draws each round.

    Example:
        >>> Random(batch_size=8).divisor
        8
    """

    batch_size: int

    @property
    def divisor(self) -> float:
        """Sums are divided by the batch size."""
        return self.batch_size

    @property
    def distinct(self) -> int:
        """A batch's records are distinct."""
        return self.batch_size

    def check(self, counts: Counts, agents: Sequence[str] | None = None) -> None:
        """Refuse agents with fewer records than a batch has."""
        batches.check_batch_size(counts, self.batch_size, agents)

    def draw(self, key: PRNGKeyArray, round: _Round, counts: _AgentCounts) -> Draw:
        """Draw a round's records; no place is padding."""
        del round
        return Draw(batches.draw(key, counts, self.batch_size), None)


@dataclass(frozen=True)
class Full(CountedRecords, _Sampler):
    """All records, in every round; agents with fewer than the most have padding.

    Where records are protected, every agent's sum is divided by ``records``, the largest number
    of an agent's: a public number, the same for all, so that every record weighs alike in the
    average model, and no count leaks. The numbers themselves are the plan's, and public: the
    relations of records keep them. Where agents are protected, one gradient of an agent's mean
    loss over its own records is clipped, whatever their number.

    Attributes:
        records: Most records of an agent; the plan fills it in, and refuses another number.

    Example:
        >>> Full().with_max_records(40).divisor
        40
    """

    records: int | None = None

    @property
    def divisor(self) -> float:
        """Sums are divided by the largest number of records; nan before a plan has said it."""
        return float("nan") if self.records is None else self.records

    def draw(self, key: PRNGKeyArray, round: _Round, counts: _AgentCounts) -> Draw:
        """All records, whatever the key and the round.

        Raises:
            ValueError: Where ``records`` is None.
        """
        del key, round
        positions = jnp.arange(self.places, dtype=jnp.int32)[None, :]
        padding = positions >= jnp.asarray(counts, jnp.int32)[:, None]
        # A padded slot points at record 0, whose weight is zero.
        return Draw(jnp.where(padding, 0, positions), padding)

    def fill_share(self, counts: Counts, rounds: int) -> np.ndarray:
        """How much of the largest batch is records, [n]."""
        del rounds
        return np.asarray(counts) / self.places


@dataclass(frozen=True)
class Cyclic(_Dealt):
    """Every record ``epochs`` times, exactly ``separation`` rounds apart, in a fixed order.

    Record r of an agent is in the batches of the rounds r mod b, r mod b + b, ..., see
    `dpjax.data.batches.cyclic`. For relations of records only.

    Attributes:
        epochs: How often a record takes part, k.
        separation: Rounds between two times, b; a run has k b rounds.
        batch_size: Places in a batch, padding included: at least the largest number of an agent's
            records over the separation, rounded up. Sums are divided by it.

    Example:
        >>> from dpjax.learning.samplers import Cyclic
        >>> Cyclic(epochs=2, separation=3, batch_size=4).pattern(rounds=6)
        (2, 3)
    """

    epochs: int
    separation: int
    batch_size: int


@dataclass(frozen=True)
class Clients(_Dealt):
    """Clients who fill the agents' cohort slots in turn, each time with another record.

    An agent is a cohort slot that M clients fill in turn: client c in the rounds c mod M,
    c mod M + M, ..., with its N records one after the other, and again in every epoch. Client c of
    a slot has that agent's records c, c + M, c + 2 M, ... So a round joins as many clients as
    there are slots, with one fresh record each, as DOME has it.

    With a ``batch`` b a client brings b records at once, and an epoch takes M N / b rounds.

    Guarantee: in E M N / b rounds every record takes part at most E times, exactly M N / b rounds
    apart, and every client at most E N / b times, M rounds apart, with b records each, whatever the
    data.

    Attributes:
        clients: Clients of a slot, M.
        examples: Records of a client, N.
        epochs: How often a record takes part, E.
        batch: Records of a client that take part together, b; divides N.

    Reference:
        DOME, section 2: every example once an epoch, N a client, E epochs.

    Example:
        >>> from dpjax.learning.samplers import Clients
        >>> dealt = Clients(clients=3, examples=2, epochs=4)
        >>> dealt.participation, dealt.turns
        ((4, 6), (8, 3))
    """

    clients: int = dataclasses.field()  # No default: the base's is for samplers without any.
    examples: int
    epochs: int
    batch: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no number of clients, records or rounds."""
        super().__post_init__()
        if self.examples % self.batch:
            raise ValueError(
                f"batch is {self.batch}, which does not divide examples, {self.examples}; give one "
                "that does"
            )

    @property
    def batch_size(self) -> int:
        """Records of a client in a round, b."""
        return self.batch

    @property
    def separation(self) -> int:
        """Rounds from one in which a record takes part to the next, M N / b."""
        return self.clients * self.examples // self.batch

    @property
    def turns(self) -> Pattern:
        """(times, separation) of a client: N E / b rounds, M apart."""
        return self.epochs * self.examples // self.batch, self.clients


@dataclass(frozen=True)
class Poisson(CountedRecords, _Sampler):
    """Every record is in a batch with probability ``expected / count_i``, apart from all others.

    With a ``separation`` b records are dealt to b groups, record r to r mod b, and those of group
    t mod b alone flip their coins in round t, with b times the probability: amplified banded matrix
    factorization, for noise over rounds of at most b diagonals (``noise.PrefixSum(bands=b)``).

    Guarantee: no record of agent i is drawn with a probability above `rates`, nor in a round of
    another group, whatever the data, and its presence is independent of all other records and
    rounds, as far as threefry bits are. Whoever knows the key knows the batches, and nothing is
    amplified against it: a run draws them from the noise's own key. A batch that is larger than the
    capacity is computed in several passes (`dpjax.learning.query`), never cut.

    Attributes:
        expected: Records that an agent's batch has on average; sums are divided by it, whatever
            the batch.
        capacity: Records a pass, to bound memory.
        records: Most records of an agent; the plan fills it in, and refuses another number.
        separation: Rounds from one in which a record may be drawn to the next, b; divides a run's.

    Reference:
        Choquette-Choo et al. (2023), (Amplified) banded matrix factorization, for groups.

    Example:
        >>> import numpy as np
        >>> from dpjax.learning.samplers import Poisson
        >>> Poisson(expected=8, capacity=16).rates(np.array([80, 160])).round(3)
        array([0.1 , 0.05])
    """

    expected: float
    capacity: int = dataclasses.field()  # No default: the base's is for samplers without one.
    records: int | None = None
    separation: int = 1

    def __post_init__(self) -> None:
        """Refuse what is no number of records or rounds."""
        super().__post_init__()
        _validate.fields(self, _validate.single_precision, "expected", minimum=1e-6, maximum=2**31)

    @property
    def divisor(self) -> float:
        """Sums are divided by the expected size, which is public; a batch's own size is not."""
        return self.expected

    def pattern(self, rounds: int) -> Pattern:
        """(epochs, separation) of the rounds in which one record may be drawn.

        Raises:
            ValueError: For rounds that are no multiple of the separation.
        """
        if rounds % self.separation:
            raise ValueError(
                f"rounds is {rounds} for sampler {self}; give a multiple of {self.separation}, in "
                "which every group has as many rounds"
            )
        return rounds // self.separation, self.separation

    def check(self, counts: Counts, agents: Sequence[str] | None = None) -> None:
        """Refuse agents with fewer records than are expected in batches of all groups."""
        smallest = int(np.argmin(counts))
        count = counts[smallest]
        if count < self.expected * self.separation:
            agent = f"agent {smallest}" if agents is None else agents[smallest]
            groups = "" if self.separation == 1 else f" in {self.separation} groups"
            raise ValueError(
                f"expected is {self.expected:g}, but {agent} has "
                f"{_validate.counted(count, 'record')}{groups}; lower it to "
                f"{count / self.separation:g} at most"
            )

    def rates(self, counts: Counts) -> Float[np.ndarray, " n"]:
        """[n] probability that a record is in the batch of a round of its group, rounded up."""
        # Three operations err by half a unit each: a rate is never understated.
        share = self.expected * self.separation * (1 + 3 * _UNIT)
        return np.minimum(share / np.asarray(counts, np.float64), 1.0)

    def amplification(self, counts: Counts | None = None) -> CoinFlips:
        """What the coins take off the loss."""
        return CoinFlips(None if counts is None else tuple(self.rates(counts).tolist()))

    def draw(self, key: PRNGKeyArray, round: _Round, counts: _AgentCounts) -> Draw:
        """Draw a round's records, those of the batch first; all other places are padding.

        Raises:
            ValueError: Where ``records`` is None.
        """
        places = self.places
        counts = jnp.asarray(counts, jnp.int32)[:, None]
        # Slightly fewer than asked for, so that float32 does not draw more often than it says.
        share = self.expected * self.separation * (1 - 2.0**-20)
        rate = jnp.float32(share) / counts.astype(jnp.float32)
        threshold = (rate * jnp.float32(2.0**32)).astype(jnp.uint32)
        bits = _numerics.threefry_bits(key, (counts.shape[0], places))
        positions = jnp.arange(places, dtype=jnp.int32)[None, :]
        # Each coin is of its own position: no record's presence says anything of another's.
        drawn = (bits < threshold) & (positions < counts)
        if self.separation > 1:
            turn = jnp.mod(jnp.asarray(round, jnp.int32), self.separation)
            drawn &= jnp.mod(positions, self.separation) == turn
        return Draw.of_flags(drawn, self.capacity)
