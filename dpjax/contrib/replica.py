"""Clients who follow a server by the sums of its rounds, and what it sends them for that.

A server's step is a function of the sum that was opened, of how many were in it, and of public keys
(`dpjax.algorithms.federated.Federated`). So clients need neither model nor sketch from it: they
replay every step. Who missed rounds fetches their sums, or the whole state where that is shorter. A
hash of every round's state tells both sides apart that computed differently, and the whole state is
sent then.

Guarantee: none of its own and none lost: everything here is a function of sums that were opened.
Equal bits are promised on one platform, with one build and number of threads
(`state_fingerprint`); elsewhere the hash decides.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import _validate
from dpjax._programs import compiled
from dpjax.engine import arguments
from dpjax.engine.host import check_delivered
from dpjax.engine.inputs import Inputs
from dpjax.engine.step import Data, Outgoing, RoundDraw, Secret, Statics
from dpjax.learning.problem import Problem
from dpjax.plans.plan import Plan
from dpjax.protocols import State

__all__ = ["Feed", "Replica", "Update", "state_fingerprint"]

DIGEST = 32
"""Bytes of a hash."""


def state_fingerprint(state: Any) -> str:
    """Return a hash of every bit of a pytree of arrays, as 64 hexadecimal digits.

    Two sides that replay the same rounds compare these, and send the whole state where they differ.
    Equal bits are promised for one platform, build and number of threads, and for the same
    compiled function: a loop unrolled or vmapped may round otherwise. With 100,000 entries one core
    and two gave other bits; the variable NPROC, set to the same number on all sides before JAX
    starts, makes them equal, whatever cores there are.

    Args:
        state: A sketch, or any pytree of arrays.

    Example:
        >>> import jax
        >>> from dpjax.contrib import replica
        >>> from dpjax.transforms import sketch
        >>> first, second = (sketch.start(100, 4, jax.random.key(0)) for _ in range(2))
        >>> replica.state_fingerprint(first) == replica.state_fingerprint(second)
        True
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = np.ascontiguousarray(leaf)
        label = f"{jax.tree_util.keystr(path)} {array.dtype.name} {array.shape};"
        digest.update(label.encode() + array.tobytes())
    return digest.hexdigest()


class Replica:
    """The state of a run at a server, from the sums of its rounds alone.

    Args:
        plan: The plan of the run.
        problem: Its model and number of agents; no data are read.
        seed: The run's seed, from which models and public keys follow; never the noise.

    Raises:
        ValueError: For a method whose agents keep something of a round to themselves, which sums do
            not tell.

    Example:
        >>> import dpjax as dp
        >>> import numpy as np
        >>> from dpjax.contrib.replica import Feed, Replica
        >>> config = dp.Config(
        ...     protect=dp.Protect("replace_agent", clip_norm=1.0), rounds=5,
        ...     sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1),
        ...     method=dp.methods.Federated(),
        ... )
        >>> plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.complete(3)))
        >>> task = dp.quadratics(3)
        >>> server, client = Feed(Replica(plan, task)), Replica(plan, task)
        >>> server.publish((np.ones(2, np.float32), np.float32(3)))
        >>> client.follow(server), client.round
        (44, 1)
    """

    def __init__(self, plan: Plan, problem: Problem, seed: int = 0):
        self._inputs = Inputs.of(*arguments.check_run(plan, problem, (seed,)))
        self.round = 0
        self.rounds = plan.config.rounds
        self._expected = _received(self._inputs)
        models = self._inputs.start(None, 1)
        state = self._inputs.initial(models, self._inputs.batch_keys)
        # Of one plan and one seed.
        self._state = jax.tree.map(lambda leaf: leaf[0, 0], (state.models, state.memory))

    def receive(self, received: Any) -> None:
        """Replay the next round.

        Args:
            received: What the server had of it, ``(sum, present)``.

        Raises:
            ValueError: For other shapes or dtypes than the exchange delivers, or more rounds than
                the plan has.
        """
        if self.round >= self.rounds:
            raise ValueError(f"the plan has {self.rounds} rounds, and all were received")
        check_delivered("received is", received, self._expected)
        inputs = self._inputs
        followed = inputs.arrays, inputs.batch_keys, inputs.data.frozen
        self._state = _replayed(
            inputs.statics, *followed, self._state, jnp.int32(self.round), received
        )
        self.round += 1

    @property
    def state(self) -> Any:
        """Models, agent-stacked, and memory, on the host."""
        return jax.device_get(self._state)

    @property
    def model(self) -> Any:
        """The model that all agents share."""
        return jax.tree.map(lambda leaf: leaf[0], self.state[0])

    @property
    def size(self) -> int:
        """Bytes of the whole state, with one model in it."""
        return _bytes((self.model, self.state[1]))

    def fingerprint(self) -> str:
        """Hash of every bit of the state, 64 hexadecimal digits."""
        return state_fingerprint(self.state)

    def adopt(self, state: Any, round: int) -> None:
        """Take a whole state in place of one's own.

        Args:
            state: As `state`.
            round: Rounds that it has behind it.

        Raises:
            ValueError: For one of other shapes or dtypes.
        """
        expected = _shapes(self.state)
        offered = _shapes(state)
        if expected != offered:
            raise ValueError(f"state is {_validate.shown(offered)}; give one of {expected}")
        self.round = _validate.integer("round", round, minimum=0)
        self._state = jax.tree.map(jnp.asarray, state)

    def follow(self, feed: "Feed") -> int:
        """Catch up with a server, and check the hash; ask for the whole state where they differ.

        Args:
            feed: The server's.

        Returns:
            Bytes that were received.
        """
        update = feed.since(self.round)
        size = update.size
        if update.state is not None:
            self.adopt(update.state, update.round)
        for received in update.sums:
            self.receive(received)
        if self.fingerprint() != update.fingerprint:
            answer = feed.whole()
            self.adopt(answer.state, answer.round)
            size += answer.size
        return size


@dataclass(frozen=True)
class Update:
    """What a client gets who has missed rounds.

    Attributes:
        round: Rounds done by the server.
        fingerprint: Hash of its state.
        sums: What it received in each of the missed rounds, the oldest first; or none.
        state: Its whole state; or None.
        size: Bytes: sums or state, and the hash.
    """

    round: int
    fingerprint: str
    sums: tuple[Any, ...]
    state: Any
    size: int


class Feed:
    """A server's own replica, and the sums of its rounds.

    Args:
        replica: At the first round.
    """

    def __init__(self, replica: Replica):
        self.replica = replica
        self._sums = list[Any]()

    def publish(self, received: Any) -> None:
        """Replay a round at the server, and keep its sum for clients.

        Args:
            received: ``(sum, present)``.

        Raises:
            ValueError: For more rounds than the plan has, or as `Replica.receive`.
        """
        self.replica.receive(received)
        self._sums.append(jax.device_get(received))

    def since(self, round: int) -> Update:
        """What a client needs who has seen so many rounds: sums, or the state if that is shorter.

        Args:
            round: Rounds that it has replayed.

        Raises:
            ValueError: For more rounds than there were.
        """
        done = self.replica.round
        round = _validate.integer("round", round, minimum=0)
        if round > done:
            raise ValueError(f"round is {round} of a server that has done {done}; begin again")
        sums = tuple(self._sums[round - done :]) if round < done else ()
        if self.replica.size < _bytes(sums):
            return self.whole()
        return Update(done, self.replica.fingerprint(), sums, None, _bytes(sums) + DIGEST)

    def whole(self) -> Update:
        """The whole state."""
        replica = self.replica
        return Update(
            replica.round, replica.fingerprint(), (), replica.state, replica.size + DIGEST
        )


def _shapes(tree: Any) -> Any:
    """Shape and dtype of every leaf."""
    return jax.tree.map(lambda leaf: (np.shape(leaf), np.asarray(leaf).dtype), tree)


def _bytes(tree: Any) -> int:
    return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree))


def _received(inputs: Inputs) -> Any:
    """Shapes of what the exchange delivers; refused where agents keep something of a round."""
    statics = inputs.statics

    def first_round(arrays: Any, data: Data, models: Any, key: Any) -> Any:
        sent = statics.first_round(arrays, data, models, key)
        return sent.carry, statics.method.exchange(arrays, jnp.int32(0), sent.message).value

    arrays = jax.tree.map(lambda leaf: leaf[0], inputs.arrays)
    models = jax.tree.map(lambda leaf: leaf[0, 0], inputs.start(None, 1))
    carry, value = jax.eval_shape(first_round, arrays, inputs.data, models, inputs.batch_keys[0])
    if jax.tree.leaves(carry):
        raise ValueError(
            f"method is {type(statics.method).__name__}, whose agents keep something of a round to "
            "themselves, which sums do not tell; give one of algorithms.federated"
        )
    return value


@compiled()
def _replayed(
    statics: Statics,
    arrays: Any,
    batch_keys: Any,
    frozen: Any,
    state: Any,
    round: Any,
    received: Any,
) -> Any:
    """Models and memory after a round."""
    plan_arrays = jax.tree.map(lambda leaf: leaf[0], arrays)
    # The privatizer reads sums of another form, by public keys; no noise is drawn here.
    drawn = RoundDraw(jax.random.fold_in(batch_keys[0], round), None)
    rounds = statics.rounds(plan_arrays, batch_keys[0], lambda _: drawn, frozen=frozen)
    models, memory = state
    current = State(models, memory, (), round)
    new = rounds.incoming(current, Outgoing((), (), {}, Secret(())), received)
    return new.models, new.memory
