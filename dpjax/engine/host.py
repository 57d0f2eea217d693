"""The second driver: a loop on the host, cut between send and absorb, for a real network.

The compiled scan (`dpjax.engine.program`) exchanges messages by itself. Here a round is two
compiled halves of the same operations. A `Transport` connects them: a function of the outgoing
messages that returns the received ones. With the method's own exchange (`local_transport`) a linear
model has the bits of the scan. The compiler may fuse layers of other models differently, so that
they differ in the last bit; no guarantee depends on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Traced
from jaxtyping import Array

from dpjax import _numerics, _validate
from dpjax._programs import compiled
from dpjax.engine import program
from dpjax.engine.checkpoint import Storage
from dpjax.engine.state import RunState, not_finite
from dpjax.engine.step import Data, Metrics, Outgoing, Rounds, Statics, finite_leaves
from dpjax.plans.plan import Plan
from dpjax.protocols import Arrays, Message, State, Tree
from dpjax.topology import mixing

__all__ = ["Transport", "local_transport"]

Transport: TypeAlias = Callable[[Message, int], Message]
"""Carries messages over a network: ``transport(message, round) -> received``.

The message is what the method sends, numpy leaves [n, ...], and rounds count from 0. The result is
that of the method's exchange: every agent's average for D-SGD, the sum and the number of present
clients for a server. Each round calls it once, so it must deliver all gossip steps of a round: W^K
times the messages for ``DSGD(gossip_steps=K)``.

For a plan with colluders it needs an attribute ``colluders``: the number of clients that may tell
the server everything while it still opens no single message. `SecureSums` has it; for a custom
transport it is its author's word.

A transport that cannot deliver raises any error, and so must one that has lost numbers: values that
are not finite are refused. The run then ends before that round, and the error's note says how to
continue. A transport may send one message again, as often as it must.
"""


@dataclass(frozen=True)
class _LocalTransport:
    """An exchange in this process, and how many clients may collude with the server."""

    exchange: Callable[[Message, Array], Message]
    colluders: int

    def __call__(self, message: Message, round: int) -> Message:
        return jax.device_get(self.exchange(message, jnp.int32(round)))


def local_transport(plan: Plan) -> Transport:
    """Return the transport that is the method's own exchange, in this process.

    Args:
        plan: The plan of the run.

    Example:
        >>> import dpjax as dp
        >>> from dpjax.engine import host
        >>> parts = dict(sampler=dp.samplers.Random(1), optimizer=dp.optimizers.Sgd(0.1), rounds=2)
        >>> config = dp.Config(protect=dp.Protect("replace_agent", clip_norm=1.0), **parts)
        >>> plan = dp.make_plan(config, dp.mixing.metropolis_hastings(dp.graphs.ring(3)))
        >>> result = dp.run(plan, dp.quadratics(3), seeds=[0], transport=host.local_transport(plan))
        >>> result.metrics["mean_gap"].shape
        (2, 1, 1)
    """

    @jax.jit
    def value(message: Message, round: Array) -> Message:
        # As the compiled rounds have them, so that both exchanges round alike.
        kind = _numerics.wide_dtype(message)
        dense = {**plan.arrays, "mixing": mixing.dense(plan.mixing)}
        arrays = {name: jnp.asarray(array, kind) for name, array in dense.items()}
        return plan.method.exchange(arrays, round, message).value

    # No message leaves the process.
    return _LocalTransport(value, plan.guarantee.colluders)


@dataclass(frozen=True, eq=False)
class HostDriver:
    """The rounds of one run, message by message.

    Guarantee: noise never goes out with two payloads. A round whose exchange fails leaves the state
    unchanged, and its messages are spent. The repeated round sends the same message, since batch
    and noise follow from keys and round, and the models are unchanged. With checkpoints this also
    holds for a killed run: its state is stored before a message goes out, and the key file of a
    release notes the round and the message's digest. A release is refused if its newest state is
    lost, or its message would differ.

    Attributes:
        transport: What carries messages.
        min_survivors: The fewest agents in a sum for which the plan's noise suffices; 0 for no sum.
    """

    transport: Transport
    min_survivors: int = 0

    options: ClassVar[dict[str, str]] = {"transport": "given"}
    """What makes a run another one, by name."""

    def advance(self, run: RunState) -> None:
        """Do the rounds of a chunk, or its remaining ones.

        Args:
            run: The state of the run, which advances by one with every round.

        Raises:
            ValueError: For messages that are not finite, which are not sent; for received values
                unlike those of the method's exchange, or not finite.
            BaseException: What the transport raised, with a note on how to continue.
        """
        for _ in range(run.schedule.ahead(run.done)):
            self._round(run)

    def _round(self, run: RunState) -> None:
        inputs = run.inputs
        arguments = run.arguments
        sent, sums = _outgoing(*arguments, run.sums)
        message = jax.tree.map(lambda leaf: np.array(leaf[0, 0]), jax.device_get(sent.message))
        expected = delivered(inputs.statics, _numerics.shapes(inputs.arrays), message)
        # First the state: a killed run makes the very same message of it again.
        run.save()
        # Then the digest: no other payload may go out under the noise of this round.
        run.storage.note_sent(run.done, message)
        places = _not_finite(message)
        if places:
            raise ValueError(not_finite(f"round {run.done} (from 0), at {places},"))
        received = self._received(message, run.done, expected, run.storage)
        run.state = _incoming(*arguments, sent, received)
        run.sums = sums
        measured: Metrics = {}
        end = run.done + 1
        if end in run.schedule.marks:
            # The last block may be shorter.
            length = (end - 1) % run.schedule.block_rounds + 1
            values = _measured(inputs.statics, length, inputs.data, run.state, sums)
            measured = jax.device_get(values)
            run.sums = jax.tree.map(jnp.zeros_like, sums)
        run.record(1, measured)

    def _received(
        self, message: Message, round: int, expected: Message, storage: Storage
    ) -> Message:
        """The result of the transport; its errors get a note on how to continue."""
        try:
            received = self.transport(message, round)
            check_delivered("transport returned", received, expected)
            check_opened("transport opened", received, self.min_survivors)
            places = _not_finite(received)
            if places:
                raise ValueError(
                    f"transport returned numbers {places} that are not finite in round {round} "
                    "(from 0), for a message whose numbers are; raise there, and the message is "
                    "sent again"
                )
        # After an interrupt, too, the message may be out.
        except BaseException as error:
            rest = (
                ", and there is no checkpoint: the run is over. Begun again with its seed it would "
                "send its noise with other payloads; a new run takes another seed, a budget of its "
                "own, and checkpoint=FOLDER to go on from"
            )
            if storage.folder is not None:
                rest = (
                    f": the same call goes on from the checkpoint {storage.folder}, and gives the "
                    "transport the very same message"
                )
            error.add_note(f"round {round} (from 0) was not delivered{rest}")
            raise
        return jax.tree.map(jnp.array, received)

    def traced(self, run: RunState) -> list[Traced]:
        """Both halves and the metrics, traced: all that the run computes.

        Args:
            run: Its state before the first round.
        """
        statics, arrays, data, *_ = run.arguments
        outgoing = _outgoing.trace(*run.arguments, run.sums)
        sent, _ = outgoing.out_info
        # The run's own secret has the same shapes; JAX would shorten the float64 of past noise.
        sent = sent._replace(secret=run.state.secret)
        message = _numerics.shapes(sent.message, dropped=2)
        received = delivered(statics, _numerics.shapes(arrays), message)
        incoming = _incoming.trace(*run.arguments, sent, received)
        programs = [outgoing, incoming]
        for length in np.unique(np.diff(run.schedule.marks, prepend=0)).tolist():
            programs.append(_measured.trace(statics, length, data, run.state, run.sums))
        return programs


def _sent_axes(axes: State) -> Outgoing:
    """The axes of plans (or seeds) in outgoing messages."""
    return Outgoing._make([0, 0, 0, axes.secret])


@compiled()
def _outgoing(statics: Statics, *arguments: Tree) -> tuple[Outgoing, Metrics]:
    """The stacked messages of a round, and the sums of metrics with those of the round."""
    *inputs, sums = arguments

    def half(rounds: Rounds, state: State) -> tuple[Outgoing, Metrics]:
        sent = rounds.outgoing(state)
        return sent._replace(metrics={}), program.reported(statics, sent.metrics)

    sent, reported = program.each_run(
        statics,
        half,
        program.RunInputs(*inputs),
        axes=lambda of_state: ((), (_sent_axes(of_state), 0)),
    )
    # Added here as in the scan: outside the round they would be rounded once more.
    return sent, program.joined(sums, reported)


@compiled()
def _incoming(statics: Statics, *arguments: Tree) -> State:
    """The stacked state of the run after it has received its messages."""
    *inputs, sent, received = arguments

    # Of the one seed and the one plan.
    received = jax.tree.map(lambda leaf: leaf[None, None], received)
    return program.each_run(
        statics,
        lambda rounds, *halves: rounds.incoming(*halves),
        program.RunInputs(*inputs),
        sent,
        received,
        axes=lambda of_state: ((_sent_axes(of_state), 0), of_state),
    )


@compiled(static=2)
def _measured(statics: Statics, length: int, data: Data, state: State, sums: Metrics) -> Metrics:
    """Metrics after a block of so many rounds, [1, S, V]."""
    values = program.block_metrics(statics, data, state, sums, length)
    return jax.tree.map(lambda leaf: leaf[None], values)


def delivered(statics: Statics, arrays: Arrays, message: Message) -> Message:
    """Shapes of the result of the method's exchange; costs nothing in a compiled program.

    Args:
        statics: What is static.
        arrays: One plan's arrays, traced or not, or their shapes.
        message: Of all agents, or its shapes.
    """

    def value(arrays: Arrays, message: Message) -> Message:
        return statics.method.exchange(arrays, jnp.int32(0), message).value

    return jax.eval_shape(value, arrays, message)


def make_driver(
    transport: Transport,
    plans: Sequence[Plan],
    seeds: Sequence[int],
    devices: int | None,
    checkpoint: object,
) -> HostDriver:
    """Check that one run crosses the network, and that a release has a checkpoint.

    Args:
        transport: What carries messages.
        plans: The plans.
        seeds: The seeds.
        devices: To spread the agents over, or None.
        checkpoint: Folder, or None.

    Raises:
        ValueError: Naming what does not fit.
    """
    plan = plans[0]
    survivors = plan.method.exchange.min_survivors(plan.agents)
    opened = getattr(transport, "min_survivors", survivors)
    colluders = plan.guarantee.colluders
    defended = getattr(transport, "colluders", None)
    if defended is not None:
        _validate.integer("colluders", defended, minimum=0)
    refusals = {
        f"transport is {_validate.shown(transport)}; give a function of a message and a round": (
            not callable(transport)
        ),
        f"transport came with {len(plans)} plans and {len(seeds)} seeds; run one plan with one "
        "seed, whose messages a network can carry": len(plans) * len(seeds) != 1,
        f"devices is {devices} with a transport, which gets all messages; leave it out": (
            devices is not None
        ),
        "transport came with gradients 'view', whose loss is of the method's own exchange; protect "
        "'any' gradients": plan.config.protect.gradients == "view",
        "checkpoint is None for a release over a transport; name a folder: begun again without, "
        "the run would send its noise twice": plan.config.release and checkpoint is None,
        f"transport opens sums of {opened} of {plan.agents} agents, and the plan's noise is for "
        f"sums of {survivors} or more; plan for more dropouts": opened < survivors,
        f"transport says no colluders, and the plan's noise is for {colluders}; give SecureSums "
        "itself, or one of your own with the attribute": colluders and defended is None,
        f"transport has terms for {defended} colluders, and the plan's noise is for {colluders}; "
        f"give transport.terms_of(plan.noise.code, {colluders=}, dropouts=...)": (
            defended is not None and defended < colluders
        ),
    }
    _validate.refuse(refusals)
    return HostDriver(transport, survivors)


def check_delivered(
    subject: str, received: Tree, expected: Tree, source: str = "the method's exchange delivers"
) -> None:
    """Refuse values unlike those of the method's exchange, or of another source.

    Args:
        subject: Name of the values in the error.
        received: The values of a round, leaves of numpy or jax.
        expected: Shapes and dtypes of what the source gives.
        source: Its name, with a verb.

    Raises:
        ValueError: For other shapes, dtypes or trees.
    """

    def kind(leaf: Any) -> str:
        leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        return f"{leaf.dtype}{list(leaf.shape)}"

    actual = jax.tree.map(kind, received)
    kinds = jax.tree.map(kind, expected)
    if actual != kinds:
        raise ValueError(f"{subject} {actual}, {source} {kinds}; give that")


def check_opened(subject: str, received: Message, survivors: int) -> None:
    """Refuse a sum of fewer agents than the plan's noise is for.

    Args:
        subject: Name of the values in the error.
        received: The sum, and the number of agents in it; traced ones pass.
        survivors: The fewest agents for which the noise suffices; 0 where nothing is summed.

    Raises:
        ValueError: For fewer; nobody in it (0) is a sum that was not opened.
    """
    if not survivors or isinstance(received[1], jax.core.Tracer):
        return
    # Fewer terms in a sum carry less noise than its guarantee says.
    present = float(received[1])
    if 0 < present < survivors:
        raise ValueError(
            f"{subject} a sum of {present:g} agents, less than the {survivors} of the plan's "
            "noise, so that its guarantee does not hold; give one that aborts"
        )


def _not_finite(message: Message) -> list[str]:
    """Places of leaves with numbers that are not finite."""
    places = finite_leaves(message, np.isfinite)
    return [place for place, is_finite in places.items() if not is_finite]
