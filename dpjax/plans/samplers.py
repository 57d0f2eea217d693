"""Which records take part in a round: drawn at random, or dealt in a fixed order."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from dpjax import _validate
from dpjax.data import batches
from dpjax.mechanism.participation import Participation
from dpjax.protocols import Draw, Sampler

__all__ = ["Cyclic", "Random", "audit"]


def audit(sampler: Sampler, counts: Int[np.ndarray, " n"], rounds: int) -> None:
    """Refuse a sampler that draws otherwise than it says, on numbers of records at hand.

    Guarantee: what passes drew distinct records of each agent in the rounds tried, and none more
    often than its pattern allows; two cycles of a pattern are tried, or a few rounds.

    Args:
        sampler: The sampler.
        counts: [n] records of each agent.
        rounds: Rounds T.

    Raises:
        ValueError: Naming the round and the agent.
    """
    pattern, key = sampler.pattern(rounds), jax.random.key(0)
    tried = min(rounds, _ROUNDS if pattern.epochs == rounds else 2 * pattern.separation + 1)
    last: dict[tuple[int, int], int] = {}
    for t in range(tried):
        drawn = sampler.draw(jax.random.fold_in(key, t), jnp.int32(t), jnp.asarray(counts))
        rows = np.asarray(drawn.rows)
        skip = np.zeros(rows.shape, bool) if drawn.padding is None else np.asarray(drawn.padding)
        for agent, (row, none) in enumerate(zip(rows, skip, strict=True)):
            taken = row[~none]
            if len(set(taken.tolist())) != len(taken) or (taken >= counts[agent]).any():
                raise ValueError(
                    f"sampler is {_validate.shown(sampler)}, which draws a record of agent {agent} "
                    f"twice, or one that is not there, in round {t}; draw distinct records"
                )
            if pattern.epochs == rounds:
                continue
            for record in taken.tolist():
                if t - last.get((agent, record), t - pattern.separation) != pattern.separation:
                    raise ValueError(
                        f"sampler is {_validate.shown(sampler)}, which draws record {record} of "
                        f"agent {agent} in rounds {last[agent, record]} and {t}, its pattern says "
                        f"{pattern.separation} apart; deal records by the pattern"
                    )
                last[agent, record] = t


_ROUNDS = 3


@dataclass(frozen=True)
class Random:
    """Distinct records drawn in every round; see `dpjax.data.batches.draw`.

    No amplification by subsampling is claimed: a record may take part in every round.

    Attributes:
        batch_size: Distinct records an agent draws each round.
    """

    batch_size: int

    def __post_init__(self) -> None:
        """Refuse a batch that is no number of records."""
        size = _validate.integer("batch_size", self.batch_size, most=2**31 - 2)
        object.__setattr__(self, "batch_size", size)

    @property
    def divisor(self) -> float:
        """Sums are divided by the batch size."""
        return self.batch_size

    @property
    def participation(self) -> None:
        """Nothing is fixed: a record may take part in every round."""

    def pattern(self, rounds: int) -> Participation:
        """Rounds in which one record may take part: all."""
        return Participation(rounds, rounds, 1)

    def check(self, counts: Int[np.ndarray, " n"], agents: Sequence[str] | None = None) -> None:
        """Refuse agents with fewer records than a batch has."""
        batches.check(counts, self.batch_size, agents)

    def draw(self, key: PRNGKeyArray, round: Int[Array, ""], counts: Int[Array, " n"]) -> Draw:
        """Draw a round's records; no place is padding."""
        del round
        return Draw(batches.draw(key, counts, self.batch_size), None)

    def filled(self, counts: Int[np.ndarray, " n"], rounds: int) -> np.ndarray:
        """How much of each batch is records, [n]."""
        return np.ones(len(counts))


@dataclass(frozen=True)
class Cyclic:
    """Every record ``epochs`` times, exactly ``separation`` rounds apart, in a fixed order.

    Record r of an agent is in the batches of the rounds r mod b, r mod b + b, ..., see
    `dpjax.data.batches.cyclic`. For relations of records only.

    Attributes:
        epochs: How often a record takes part, k.
        separation: Rounds between two times, b; a run has k b rounds.
        batch_size: Places in a batch, padding included: at least the largest number of an agent's
            records over the separation, rounded up. Sums are divided by it.
    """

    epochs: int
    separation: int
    batch_size: int

    def __post_init__(self) -> None:
        """Refuse what is no number of rounds or records."""
        for name in ("epochs", "separation", "batch_size"):
            value = _validate.integer(name, getattr(self, name), most=2**31 - 2)
            object.__setattr__(self, name, value)

    @property
    def divisor(self) -> float:
        """Sums are divided by the places in a batch."""
        return self.batch_size

    @property
    def participation(self) -> tuple[int, int]:
        """(epochs, separation)."""
        return self.epochs, self.separation

    def pattern(self, rounds: int) -> Participation:
        """Rounds in which one record takes part.

        Raises:
            ValueError: For another number of rounds than epochs x separation.
        """
        if self.epochs * self.separation != rounds:
            raise ValueError(
                f"sampler deals {self.epochs} epochs of {self.separation} batches in {rounds} "
                f"rounds; give rounds={self.epochs * self.separation}, or other epochs"
            )
        return Participation(rounds, self.epochs, self.separation)

    def check(self, counts: Int[np.ndarray, " n"], agents: Sequence[str] | None = None) -> None:
        """Refuse agents with more records than a cycle has places."""
        batches.check_cyclic(counts, self.batch_size, self.separation, agents)

    def draw(self, key: PRNGKeyArray, round: Int[Array, ""], counts: Int[Array, " n"]) -> Draw:
        """The round's records, whatever the key."""
        del key
        return Draw(*batches.cyclic(round, counts, self.batch_size, self.separation))

    def filled(self, counts: Int[np.ndarray, " n"], rounds: int) -> np.ndarray:
        """How much of each batch is records, [T, n]."""
        turn = np.arange(rounds)[:, None] % self.separation
        # Record r is in the rounds r mod b, r mod b + b, ...
        return np.maximum(np.ceil((counts - turn) / self.separation), 0) / self.batch_size
