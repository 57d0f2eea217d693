"""A site's rounds: what it computes, with noise that it draws from secrets of its own.

The rounds are those of `dpjax.rounds` for one agent of a release: its own records, its rows of W
and of the noise's factor, in the same compiled programs. The normals alone come from elsewhere,
from `dpjax.sites.noise`, and enter the programs as arguments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PRNGKeyArray

from dpjax import _validate
from dpjax._numerics import Integer, double_precision, fold_in, shapes
from dpjax._programs import compiled
from dpjax.algorithms.dsgd import DSGD
from dpjax.encoding import integers, simulated
from dpjax.encoding.lattice import SumCode
from dpjax.engine import round as round_
from dpjax.engine.step import NOT_FINITE, Metrics, Outgoing, Statics
from dpjax.learning.problem import Problem
from dpjax.plans.plan import Plan
from dpjax.plans.sums import CalibratedCode
from dpjax.protocols import (
    Arrays,
    Memory,
    Message,
    Models,
    Privatizer,
    PublicState,
    State,
    Tree,
    Updates,
)
from dpjax.sites.noise import SiteNoise
from dpjax.transforms import noise as noise_
from dpjax.transforms import rounds as rounds_

__all__ = ()


class Stored(NamedTuple):
    """What of a state a site keeps on disk; the noise behind it is drawn again.

    Attributes:
        models: Leaves [1, ...].
        memory: What the method keeps beside them.
        round: Rounds done.
    """

    models: Models
    memory: Memory
    round: int


class LocalRounds:
    """What rounds at a site have in common, whatever they send.

    Args:
        plan: For all sites.
        part: The site's own.
        problem: Of its records.

    Attributes:
        guarantee: What all rounds guarantee, finite precision included.
        rounds: T.
        averages: Whether models after the last round are averages of messages, so that averaging
            on costs nothing.
        gossips: Whether sites may be several rounds apart.
    """

    averages = False
    gossips = True

    def __init__(self, plan: Plan, part: round_.Part, problem: Problem) -> None:
        self._part = part
        self._evaluation = problem.evaluation
        self.guarantee = part.guarantee
        self.rounds = plan.config.rounds

    def begin(self, sources: Iterable[SiteNoise]) -> None:
        """Take what draws the noise, once the run has a name; nothing lets go of it.

        Args:
            sources: Of the site's secrets.
        """
        raise NotImplementedError

    def init(self) -> State:
        """The state before the first round."""
        # The caller may donate them.
        return jax.tree.map(jnp.copy, self._part.first)

    def stored(self, state: State) -> Stored:
        """What to store of a state, on the host.

        Args:
            state: After a round.
        """
        models, memory = jax.device_get((state.models, state.memory))
        return Stored(models, memory, int(state.round))

    def restored(self, stored: Stored) -> State:
        """A state of which models and memory were stored.

        Args:
            stored: As `stored` returned it.

        Raises:
            ValueError: For models of another form, and those that are not finite.
        """
        state = self.init()._replace(
            models=jax.tree.map(jnp.asarray, stored.models),
            memory=jax.tree.map(jnp.asarray, stored.memory),
            round=jnp.int32(stored.round),
        )
        round_.check_form(state, self._part.first)
        for leaf in jax.tree.leaves(state.models):
            _validate.finite_array("stored.models", leaf)
        return state

    def metrics(self, state: State) -> Metrics:
        """Metrics of the models on the site's own held-out records; private to the site.

        Args:
            state: After a round.
        """
        statics = self._part.statics
        models = statics.method.measured(PublicState(state.models, state.memory))
        return _measured(statics, models, self._evaluation)

    def released(self, state: State | Stored) -> Models:
        """What may be published: a function of messages alone.

        Args:
            state: After a round.
        """
        method = self._part.statics.method
        return method.released(PublicState(state.models, state.memory))

    def _sent(self, state: State, instance: round_.Instance) -> Outgoing:
        """The round up to its message, which is finite."""
        round_.check_form(state, self._part.first)
        done = int(state.round)
        if done >= self.rounds:
            raise ValueError(f"state.round is {done}, so all {self.rounds} messages are sent")
        sent: Outgoing = round_.outgoing_program(self._part.statics, instance, state)
        if sent.metrics[NOT_FINITE]:
            raise ValueError(
                "state has a message that is not finite, and nothing goes out: models diverged; "
                "plan again with a smaller step size. The end by this error is an output that no "
                "epsilon covers"
            )
        return sent


class SiteRounds(LocalRounds):
    """One site's rounds of a plan, stepped by a driver that stores and sends.

    Guarantee: the plan's, for all messages of its rounds together, if the driver sends one message
    of `outgoing` a round, or its bytes again. A message depends on the site's records through
    clipped gradients, to which noise of the source is added in float64 on the plan's grid, round
    by round at an address of its own. Nothing of another site's records, secrets or rows is in it.

    Args:
        plan: A plan with ``release=True``, for all sites.
        problem: Of this site's records alone, as one agent; or of all sites.
        site: The site's number.
        rows: How many rows of normals each secret of the site's noise draws; `begin` has what
            draws them.
        seed: Public: of initial models and batches.

    Raises:
        ValueError: For a plan that is no release, and what `dpjax.rounds` refuses of some agents.

    Attributes:
        guarantee: What all rounds guarantee, finite precision included.
        rounds: T.
        averages: Whether models after the last round are averages of messages, so that averaging
            on costs nothing.
        senders: Numbers of the sites whose messages this one receives.
        message: Shapes and dtypes of a message, leaves [1, ...].
    """

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        site: int,
        rows: Sequence[int],
        *,
        seed: int = 0,
    ) -> None:
        if not plan.config.release:
            raise ValueError("plan has release=False, whose noise is not hardened; give True")
        part = round_.part(plan, problem, seed, [site])
        super().__init__(plan, part, problem)
        self._rows = tuple(rows)
        self._sources: tuple[SiteNoise, ...] = ()
        self.averages = type(plan.method) is DSGD
        self.senders = part.senders[0]
        payload = jax.eval_shape(part.statics.method.payload, part.first.models)
        paths = jax.tree.leaves_with_path(payload)
        groups = noise_.draw_groups(paths, 1, "this site", np.float64)
        self._shapes = [(sum(rows), group.entries) for group in groups]
        strategy = plan.strategy
        self._route = None if strategy is None else rounds_.route(strategy, self.rounds)
        self._drawn: dict[range, round_.Instance] = {}
        # Nothing is drawn yet: a program is traced for shapes alone.
        zeros = self._with(self._places(0))
        outgoing = round_.outgoing_program.trace(part.statics, zeros, part.first)
        self.message: Message = shapes(outgoing.out_info.message, 1)

    def begin(self, sources: Iterable[SiteNoise]) -> None:
        """Take what draws the normals, once the run has a name.

        Args:
            sources: As many as ``rows``.
        """
        self._sources = tuple(sources)
        # Normals of other sources must not serve a second run.
        self._drawn = {}

    def restored(self, stored: Stored) -> State:
        """A state of which models and memory were stored, with the noise behind it drawn again.

        Args:
            stored: As `stored` returned it.

        Raises:
            ValueError: For models of another form, and those that are not finite.
        """
        state = super().restored(stored)
        noise = state.secret.noise
        # After the last round no noise is needed, and the secret may be gone.
        for done in range(stored.round if stored.round < self.rounds else 0):
            noise = _after(self._part.statics, self._instance(done), state.models, noise)
        return state._replace(secret=state.secret._replace(noise=noise))

    def outgoing(self, state: State) -> Outgoing:
        """The round up to its message, with the site's noise.

        Args:
            state: Before the round.

        Raises:
            ValueError: For a round past the last, and a message that is not finite.
        """
        return self._sent(state, self._instance(int(state.round)))

    def incoming(self, state: State, sent: Outgoing, received: Mapping[int, Message]) -> State:
        """The round from its message on.

        Args:
            state: Before the round.
            sent: Of `outgoing`.
            received: By the sender's number, the message that it sent, leaves [1, ...].
        """
        part = self._part
        together = self._together(received)
        # No noise is drawn any more.
        return round_.incoming_of_agents(
            part.statics, part.instance, part.combine, state, sent, together
        )

    def averaged(self, state: State, received: Mapping[int, Models]) -> State:
        """One average of models without noise, after the last round.

        Args:
            state: After all rounds.
            received: By the sender's number, its models.
        """
        value = self._part.combine(state.round, state.models, self._together(received))
        return state._replace(models=value, round=state.round + 1)

    def _together(self, received: Mapping[int, Message]) -> Message:
        """Messages of all senders as one tree, leaves [1, senders, ...]."""
        messages = [received[sender] for sender in self.senders]
        # On the host, where they arrive: a transfer each would take as long as the round.
        return jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *messages)

    def _instance(self, done: int) -> round_.Instance:
        """The arguments of a round's programs, its normals among them."""
        rounds = self._needed(done)
        if rounds not in self._drawn:
            places = self._places(done)
            for group, (_, entries) in enumerate(self._shapes):
                # Of rounds that there are not, weights are zero.
                for round in range(max(rounds.start, 0), min(rounds.stop, self.rounds)):
                    address = {"round": round, "group": group, "entries": entries}
                    sources = zip(self._sources, self._rows, strict=True)
                    drawn = [source.normals(rows=rows, **address) for source, rows in sources]
                    places[group][round % len(rounds)] = np.concatenate(drawn)
            self._drawn = {rounds: self._with(places)}
        return self._drawn[rounds]

    def _with(self, normals: list[np.ndarray]) -> round_.Instance:
        instance = self._part.instance
        with double_precision():
            arrays = {**instance.arrays, "normals": tuple(map(jnp.asarray, normals))}
        return instance._replace(arrays=arrays)

    def _places(self, done: int) -> list[np.ndarray]:
        """Of a round's normals, zeros: those of round t stand at t modulo the number of rounds."""
        return [np.zeros((len(self._needed(done)), *shape)) for shape in self._shapes]

    def _needed(self, done: int) -> range:
        """The rounds whose normals a round is made of: the same of all groups."""
        if self._route is None:
            return range(done, done + 1)
        # The widest group decides: what is drawn and not read does no harm.
        return max((self._route.drawn(shape, done) for shape in self._shapes), key=len)


class SumRounds(LocalRounds):
    """One site's rounds of a plan whose messages are added up among the sites.

    Guarantee: the plan's, for the opened sums, if the driver adds up the vector of `vector` at most
    once a round, by a protocol that shows the sum alone. A vector is whole numbers modulo 2^b: the
    site's clipped gradients on the code's grid, rounded, and its share of the noise. Roundings and
    noise have an address each, by round.

    Args:
        plan: For all sites: Federated, with noise Discrete.
        problem: Of this site's records alone, as one agent; or of all sites.
        site: The site's number.
        seed: Public: of initial models, batches and signs.

    Raises:
        ValueError: For another plan.

    Attributes:
        code: What all sites agree on of a sum.
    """

    gossips = False

    def __init__(self, plan: Plan, problem: Problem, site: int, *, seed: int = 0) -> None:
        noise = plan.noise
        if not isinstance(noise, CalibratedCode):
            raise ValueError(f"plan has noise {plan.config.noise}; give Discrete for sums")
        self.code = noise.code
        decoding = _Decoding(noise.privatizer(plan.target))
        part = round_.part(plan, problem, seed, [site], encoding=decoding)
        # As a release: a message that is not finite goes nowhere.
        part = part._replace(statics=part.statics._replace(release=True))
        super().__init__(plan, part, problem)
        # Its noise is exact, and the site's own, which no run of one process can say.
        self.guarantee = self.guarantee.replace(release=True, sites=True)
        self._source: SiteNoise | None = None

    def begin(self, sources: Iterable[SiteNoise]) -> None:
        """Take what draws roundings and noise, once the run has a name.

        Args:
            sources: One, or none.
        """
        self._source = next(iter(sources), None)

    def outgoing(self, state: State) -> Outgoing:
        """The round up to its clipped gradients: their sum is the site's alone, never a message.

        Args:
            state: Before the round.

        Raises:
            ValueError: For a round past the last, and what is not finite.
        """
        return self._sent(state, self._part.instance)

    def vector(self, state: State, sent: Outgoing) -> np.ndarray:
        """The site's whole numbers of a round, with its share of the noise.

        Args:
            state: Before the round.
            sent: Of `outgoing`.

        Returns:
            [K] residues modulo 2^b.
        """
        assert self._source is not None
        done = int(state.round)
        leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(sent.message)]
        signs = np.asarray(_signs(self.code, self._part.instance.batch_key, state.round))
        rounding = self._source.stream("rounding", round=done)
        noise = self._source.stream("discrete noise", round=done)
        numbers = integers.noisy(self.code, np.concatenate(leaves), signs, noise, rounding)
        return numbers & (2**self.code.bits - 1)

    def incoming(self, state: State, sent: Outgoing, total: np.ndarray, present: int) -> State:
        """The round from its sum on; a sum of nobody changes no model.

        Args:
            state: Before the round.
            sent: Of `outgoing`.
            total: [K] residues of the sum.
            present: How many sites it is of.
        """
        part = self._part
        received = jnp.asarray(total.astype(np.uint32)), jnp.float32(present)
        return round_.incoming_of_agents(
            part.statics, part.instance, part.combine, state, sent, received
        )


@dataclass(frozen=True)
class _Decoding(Privatizer):
    """A stand-in for noise that the site adds outside of the programs: sums are decoded alone.

    Attributes:
        encoded: How the noise would be drawn, which knows how sums are read.
    """

    encoded: Privatizer

    @property
    def opened(self) -> Callable[[Message, PRNGKeyArray, Updates], Updates] | None:
        """What decodes sums."""
        return self.encoded.opened

    def transformation(self, arrays: Arrays, key: PRNGKeyArray) -> optax.GradientTransformation:
        """Nothing."""
        return optax.with_extra_args_support(optax.identity())


@compiled()
def _signs(code: SumCode, batch_key: PRNGKeyArray, round: Integer) -> Array:
    """The round's public signs, as what decodes sums has them."""
    return simulated.public_signs(code, fold_in(batch_key, round))


@compiled()
def _measured(statics: Statics, models: Models, evaluation: Tree) -> Metrics:
    return statics.metrics(models, evaluation)


@compiled()
def _after(
    statics: Statics, instance: round_.Instance, models: Models, noise: noise_.NoiseState
) -> noise_.NoiseState:
    """The noise's state after one more round; what it was added to does not matter."""
    transformation = statics.transformation(instance.arrays, instance.noise_key)
    payload = statics.method.payload(models)
    _, after = transformation.update(payload, noise)
    return after
