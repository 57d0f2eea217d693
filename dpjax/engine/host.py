"""The second driver: a loop on the host, cut between send and absorb, for a real network.

The compiled scan (`dpjax.engine.scan`) exchanges messages by itself. Here a round is two compiled
halves of the same operations, and what happens in between is a `Transport`'s: a function that gets
what goes out and returns what was received. Over the method's own exchange (`local`) a run of a
linear model has the bits of the scan; layers of a network may be fused otherwise in the halves and
differ in the last bit, which no guarantee depends on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax._numerics import compiled
from dpjax.engine import arguments, metrics, parts, placing, slots
from dpjax.engine.course import Course
from dpjax.engine.job import Job
from dpjax.engine.stand import Stand
from dpjax.engine.storage import Storage
from dpjax.plans.plan import Plan
from dpjax.protocols import State

__all__ = ["Transport", "local"]

Transport = Callable[[Any, int], Any]
"""What carries messages: ``transport(message, round) -> received``.

The message is what the method sends, numpy leaves [n, ...], and rounds count from 0. What comes
back is the value of the method's exchange: for D-SGD every agent's average of what it received, for
a server the sum and how many were present. It is called once a round, so that it has to deliver all
of a round's gossip: for ``DSGD(gossip_steps=K)`` what K averages leave, W^K of the messages.

For a plan with colluders it has an attribute ``colluders``: of how many clients the server may know
everything and still open no single message. `SecureSums` has it; of one's own it is one's word.

A transport that cannot deliver raises, whatever it likes, and so does one that has lost numbers:
what is not finite is refused. The run then ends before that round, and the error's note says how it
goes on. A transport may send one message again, as often as it must.
"""


def local(plan: Plan) -> Transport:
    """Return the transport that is the method's own exchange, in this process.

    Args:
        plan: The plan of the run.
    """

    @jax.jit
    def value(message: Any, round: Any) -> Any:
        kind = placing.computed_in(message)
        arrays = {name: jnp.asarray(array, kind) for name, array in plan.arrays.items()}
        return plan.method.exchange(arrays, round, message).value

    def transport(message: Any, round: int) -> Any:
        return jax.device_get(value(message, jnp.int32(round)))

    # No message leaves the process.
    transport.colluders = plan.guarantee.colluders  # type: ignore[attr-defined]
    return transport


@dataclass(frozen=True, eq=False)
class Loop:
    """The rounds of one run, message by message.

    Guarantee: a round whose exchange fails leaves the state as it was before it was sent. What was
    sent is spent, as the plan's guarantee has it. Begun again, the round sends the very same
    message, since batch and noise follow from keys and round, and the models are those of before:
    noise never goes out with another payload. With checkpoints that holds of a run that was killed,
    too: before a message goes out, the state that it was made of is stored, and in a release the
    key file notes the round and its message's digest; a release whose newest state is lost, or
    whose message would be another one, is refused.

    Attributes:
        job: What the halves are called with.
        course: The rounds.
        transport: What carries messages.
        least: Agents in a sum at least (`arguments.fewest`).
    """

    job: Job
    course: Course
    transport: Transport
    least: int = 0

    @property
    def options(self) -> dict[str, str]:
        """What makes a run another one, by name."""
        return {"transport": "given"}

    def advance(self, at: Stand, storage: Storage) -> None:
        """Do the rounds of a chunk, or what is left of one.

        Args:
            at: How far the run is; after every round one further.
            storage: Where it is kept.

        Raises:
            ValueError: For something else than what the method's exchange delivers, or numbers
                that are not finite in place of a message's that were.
            BaseException: What the transport raised, with a note on how the run goes on.
        """
        for _ in range(self.course.ahead(at.done)):
            self._round(at, storage)

    def _round(self, at: Stand, storage: Storage) -> None:
        job, marks = self.job, self.course.marks
        given = job.arrays, job.data, at.state, job.batch_keys, at.noise_keys
        sent, sums = _outgoing(job.statics, *given, at.sums)
        message = jax.tree.map(np.array, jax.device_get(sent.message))
        wanted = _delivered(job.statics, job.arrays, message)
        at.save(storage.store)
        storage.sending(at.done, message)
        received = self._received(message, at.done, wanted, storage)
        at.state, at.sums = _incoming(job.statics, *given, sent, received), sums
        taken = {}
        if at.done + 1 in marks:
            length = at.done + 1 - max([0, *marks[marks <= at.done]])
            taken = jax.device_get(_measured(job.statics, length, job.data, at.state, sums))
            at.sums = jax.tree.map(jnp.zeros_like, sums)
        at.measured(self.course, 1, taken)

    def _received(self, message: Any, round: int, wanted: Any, storage: Storage) -> Any:
        """What the transport made of a message; errors get a note on what is left to do."""
        try:
            received = _checked(self.transport(message, round), wanted)
            self._check_present(received, round)
            if _finite(message):
                _check_finite(received, round)
        except BaseException as error:
            error.add_note(_left(round, storage))
            raise
        return received

    def _check_present(self, received: Any, round: int) -> None:
        """Refuse a sum of fewer than the plan's noise is for, before models are moved by it."""
        if self.least and 0 < (present := float(received[1])) < self.least:
            raise ValueError(
                f"transport opened a sum of {present:g} agents in round {round} (from 0), and the "
                f"plan's noise is for sums of {self.least} or more: the guarantee does not hold "
                "for what it showed; give one that aborts, and a run of its own"
            )

    def traced(self, state: State) -> list[Any]:
        """Both halves and the metrics, traced: all that the run computes by itself.

        Args:
            state: Before the first round.
        """
        job = self.job
        given = job.arrays, job.data, state, job.batch_keys, job.batch_keys
        sums = self.sums(state)
        outgoing = _outgoing.trace(job.statics, *given, sums)
        sent, _ = outgoing.out_info
        received = _delivered(job.statics, job.arrays, sent.message)
        marks = [0, *self.course.marks]
        lengths = sorted({int(b - a) for a, b in zip(marks, marks[1:], strict=False)})
        return [
            outgoing,
            _incoming.trace(job.statics, *given, sent, received),
            *(_measured.trace(job.statics, each, job.data, state, sums) for each in lengths),
        ]

    def sums(self, state: State) -> dict[str, Any]:
        """Sums of the rounds' metrics before a block: zeros.

        Args:
            state: Of the run.
        """
        shape = jax.tree.leaves(state.models)[0].shape[:2]
        return {name: jnp.zeros(shape, jnp.float32) for name in self.job.statics.reports}


def _mapped(statics: parts.Statics, half: Any, given: Any, *others: Any) -> Any:
    """One half of a round over the one seed and the one plan, mapped as the scan maps a round.

    Not called at once: products of other shapes would be summed in another order.
    """
    arrays, data, state, batch_keys, noise_keys = given
    over = jax.lax.map if statics.sequential else lambda function, xs: jax.vmap(function)(xs)
    counters = jax.tree.map(slots.is_counter, state.secret)
    frozen, data = data.frozen, data._replace(frozen=None)
    shared, owned = (None, (data,)) if statics.own_data else (data, ())

    def of_seed(item: Any) -> Any:
        models, memory, secret, batch_key, noise_key, own, others = item
        batch = parts.batch(statics, parts.one(own, shared), batch_key, noise_key, state.round)

        def of_plan(item: Any) -> Any:
            models, memory, arrays, others = item
            cut = parts.halves(statics, arrays, noise_key, frozen)
            now = State(models, memory, secret, state.round)
            return half(cut, jax.random.fold_in(batch_key, state.round), now, batch, *others)

        return over(of_plan, (models, memory, arrays, others))

    secret = _merged(lambda leaf: leaf[None], lambda leaf: leaf, counters, state.secret)
    return over(
        of_seed,
        (state.models, state.memory, secret, batch_keys, noise_keys, owned, others),
    )


def _merged(of_counter: Any, of_other: Any, counters: Any, secret: Any) -> Any:
    """The secret slot with its counters treated otherwise than the rest."""
    return jax.tree.map(
        lambda is_one, leaf: of_counter(leaf) if is_one else of_other(leaf), counters, secret
    )


@compiled()
def _outgoing(statics: parts.Statics, *given: Any) -> Any:
    """What goes out of a round, and the sums of metrics with the round's."""
    *inputs, sums = given

    def half(cut: Any, key: Any, state: State, batch: Any) -> Any:
        sent = cut.outgoing(key, state, batch)
        return sent, metrics.reported(statics, sent.metrics)

    sent, reported = _mapped(statics, half, inputs)
    # Here, as the scan adds them: apart from the round they would be rounded once more.
    return jax.tree.map(lambda leaf: leaf[0, 0], sent), metrics.joined(sums, reported)


@compiled()
def _incoming(statics: parts.Statics, *given: Any) -> State:
    """The state after what was received, stacked again."""
    *inputs, sent, received = given

    def half(cut: Any, key: Any, state: State, batch: Any, sent: Any, received: Any) -> Any:
        return cut.incoming(key, state, batch, sent, received)

    stacked = jax.tree.map(lambda leaf: leaf[None, None], (sent, received))
    new = _mapped(statics, half, inputs, *stacked)
    counters = jax.tree.map(slots.is_counter, inputs[2].secret)
    secret = _merged(lambda leaf: leaf[0, 0], lambda leaf: leaf[:, 0], counters, new.secret)
    return State(new.models, new.memory, secret, new.round[0, 0])


@compiled(static=2)
def _measured(statics: parts.Statics, length: int, data: Any, state: State, sums: Any) -> Any:
    """Metrics after a block of so many rounds, [1, S, V]."""
    taken = metrics.measured(statics, data, state, sums, length)
    return jax.tree.map(lambda leaf: leaf[None], taken)


def _delivered(statics: parts.Statics, arrays: Any, message: Any) -> Any:
    """Shapes of what the method's exchange makes of a message."""

    def value(arrays: Any, message: Any) -> Any:
        one = jax.tree.map(lambda leaf: leaf[0], arrays)
        return statics.method.exchange(one, jnp.int32(0), message).value

    return jax.eval_shape(value, arrays, message)


def _checked(received: Any, wanted: Any) -> Any:
    """What a transport returned, on the device, if it is what the method waits for."""
    arguments.check_delivered("transport returned", received, wanted)
    return jax.tree.map(jnp.array, received)


def _finite(tree: Any) -> bool:
    """Whether all numbers of a tree are finite; integers always are."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in leaves)


def _check_finite(received: Any, round: int) -> None:
    """Refuse a lost number before it is every agent's; where models diverged there is none."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(received):
        if not _finite(leaf):
            where = jax.tree_util.keystr(path) or "what was received"
            raise ValueError(
                f"transport returned numbers that are not finite in {where}, in round {round} "
                "(from 0), for a message whose numbers are; raise where something is lost, and "
                "the message is sent again"
            )


def _left(round: int, storage: Storage) -> str:
    """What is left to do after a round that failed."""
    told = f"round {round} (from 0) was not delivered"
    if storage.store is None:
        return (
            f"{told}, and there is no checkpoint: the run is over. Begun again with its seed it "
            "would send its noise with other payloads; a new run takes another seed, a budget of "
            "its own, and checkpoint=FOLDER to go on from"
        )
    return (
        f"{told}: the same call goes on from the checkpoint {storage.store.folder}, and gives the "
        "transport the very same message"
    )
