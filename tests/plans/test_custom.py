"""Parts of a user's own: a few draws, and what they state, are tried when a plan is made."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax as dp
from dpjax.algorithms.disk import DiSK
from dpjax.algorithms.dsgd import DSGD
from dpjax.learning.samplers import Clients, Cyclic, Poisson, Random
from dpjax.plans import compatibility, custom, noise, plan
from dpjax.plans.calibration import DrawnNoise
from dpjax.plans.links import ScaledNoise
from dpjax.protocols import Draw, Sampler
from dpjax.topology import graphs, mixing
from dpjax.transforms import noise as noise_
from tests.plans import test_amplification as amplified
from tests.support import load_script, make_config, make_problem

RING = mixing.metropolis_hastings(graphs.ring(4))
COUNTS = np.array([24, 12, 30, 24])
frozen = dataclasses.dataclass(frozen=True)


def made(sampler, counts=COUNTS, **changes):
    options = {"relation": "zero_out_record", "rounds": 12, "design": "independent"}
    return plan.make(make_config(sampler=sampler, **options | changes), RING, counts=counts)


@frozen
class Own(Random):
    """Draws as it should."""


@frozen
class Blind(Own):
    """Draws from no fewer records than twice a batch."""

    def check(self, counts, agents=None):
        if min(counts) < 8:
            raise ValueError("too few")


@frozen
class Replaced(Random):
    """With replacement: among many records hardly any comes twice."""

    def draw(self, key, round, counts):
        shape = (len(counts), self.batch_size)
        return Draw(jax.random.randint(key, shape, 0, counts[:, None]), None)


@frozen
class Late(Random):
    """Its first record twice, after a hundred rounds."""

    def draw(self, key, round, counts):
        drawn = super().draw(key, round, counts)
        twice = drawn.rows.at[:, 1].set(drawn.rows[:, 0])
        return drawn._replace(rows=jnp.where(round == 100, twice, drawn.rows))


@frozen
class Moved(Random):
    """Rows by another origin."""

    by: object = 1

    def draw(self, key, round, counts):
        drawn = super().draw(key, round, counts)
        return drawn._replace(rows=drawn.rows + self.by)


@frozen
class Padded(Poisson):
    """Padding counts as the first record; its own word for the loss, as all that draw anew."""

    amplification = Poisson.amplification

    def draw(self, key, round, counts):
        drawn = super().draw(key, round, counts)
        return drawn._replace(padding=jnp.zeros_like(drawn.padding))


@frozen
class Restless(Cyclic):
    """Every cycle is one round longer than it says."""

    def draw(self, key, round, counts):
        longer = Cyclic(self.epochs, self.separation + 1, self.batch_size)
        return longer.draw(key, round, counts)


@frozen
class Rare(Random):
    """Says that a record comes once."""

    def pattern(self, rounds):
        return 1, rounds


@frozen
class Unlike(Cyclic):
    """Another participation than pattern."""

    participation = (1, 3)


@frozen
class Anywhere(Poisson):
    """Coins in every round, at the groups' rate."""

    amplification = Poisson.amplification

    def draw(self, key, round, counts):
        other = Poisson(self.expected * self.separation, self.capacity, self.records)
        return other.draw(key, round, counts)


@frozen
class Alike(Poisson):
    """One batch by any key."""

    amplification = Poisson.amplification

    def draw(self, key, round, counts):
        return super().draw(jax.random.key(0), round, counts)


@frozen
class Frozen(Poisson):
    """One coin for all rounds, where the loss it inherits is of fresh ones."""

    key_of = "run"


@frozen
class Mistyped(Random):
    key_of = "Round"


@frozen
class Early(Clients):
    """A client's record in another client's round."""

    def draw(self, key, round, counts):
        drawn = super().draw(key, round, counts)
        return drawn._replace(rows=jnp.where(round == 4, 2, drawn.rows))


@frozen
class Bare(Sampler):
    """Neither divisor nor draw."""


@frozen
class Undrawn(Bare):
    divisor = 4.0


@frozen
class Floating(Moved):
    by: float = 0.5


@frozen
class Unpadded(Poisson):
    amplification = Poisson.amplification

    def draw(self, key, round, counts):
        drawn = super().draw(key, round, counts)
        return drawn._replace(padding=drawn.padding[:, :1])


@frozen
class Broken(Random):
    def draw(self, key, round, counts):
        return self.missing


@frozen
class Silent(Random):
    def amplification(self, counts=None):
        raise NotImplementedError


@frozen
class Infinite(Random):
    divisor = math.nan


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("sampler", "changes", "text"),
    [
        (Replaced(4), {"counts": np.full(4, 9_000)}, "draw distinct rows, from 0 to below 9000"),
        (Replaced(4), {"counts": None}, "draw distinct rows"),
        (Late(4), {"rounds": 101}, r"rows \[(\d+), \1, .* in round 100; draw distinct rows"),
        (Moved(4), {}, "from 0 to below 12"),
        (Moved(4, -1), {"design": "non_private"}, "which draws rows .*-1.*; draw distinct rows"),
        (Padded(4.0, 6), {"epsilon": 2.0}, r"rows \[.*, 0, 0, 0"),
        (Restless(4, 3, 12), {}, "in round 4; .*by the pattern .*epochs=4, separation=3"),
        (Rare(4), {}, "by the pattern .*epochs=1, separation=12"),
        (Rare(4), {"relation": "replace_agent"}, "an agent takes part in every round"),
        (Unlike(4, 3, 12), {}, r"participation is \(1, 3\) and whose pattern is \(4, 3\)"),
        (Anywhere(2.0, 6, separation=3), {"epsilon": 2.0}, "in round 1; .*by the pattern"),
        (Frozen(4.0, 6), {"epsilon": 2.0}, "define amplification in its own class"),
        (Mistyped(4), {}, r"sampler.key_of is 'Round'; did you mean round\? If not, choose one of"),
        (Alike(4.0, 6), {"epsilon": 2.0}, "the same by 4 keys, which amplifies nothing"),
        (
            Early(3, 4, 1),
            {"relation": "zero_out_client", "counts": np.full(4, 12)},
            r"rows \[2\] of agent 0 in round 4; .*by the pattern",
        ),
        (Bare(), {}, "sampler.divisor is missing; give a finite number above 0"),
        (Infinite(4), {}, "sampler.divisor is nan"),
        (Undrawn(), {}, "whose draw returns None; return a protocols.Draw"),
        (Floating(4), {}, "float32.*; return a protocols.Draw of whole numbers"),
        (Unpadded(4.0, 6), {"epsilon": 2.0}, "padding alike. of Unpadded fails: MaskError"),
        (Broken(4), {}, "sampler.divisor or draw of Broken fails: AttributeError"),
        (Silent(4), {}, r"sampler.amplification of Silent fails: NotImplementedError\(\)"),
    ],
)
def test_sampler_that_draws_otherwise_than_it_says_is_refused(sampler, changes, text):
    with pytest.raises(ValueError, match=text):
        made(sampler, **changes)


@frozen
class Shuffled(Cyclic):
    """Every record once, in no order that it promises."""

    participation = None


@pytest.mark.mutant
@pytest.mark.parametrize("design", ["independent", "anti_pgd"])
def test_record_that_is_in_some_rounds_alone_may_be_in_first(design):
    stated = made(Shuffled(1, 12, 3), design=design).guarantee
    # A record of round 0 has spent everything after it.
    assert stated.after(1).mu == stated.mu and not stated.white
    assert stated.loss.concentrated().after(1).rho == stated.loss.concentrated().rho
    if design == "independent":
        assert stated.stopping_at([1, 12]).curve.shares == (1.0, 1.0)
        assert "in some of which alone each record takes part, perhaps the first, against" in (
            stated.statement()
        )
    dealt = made(Cyclic(1, 12, 3), design=design).guarantee
    assert (dealt.after(1).mu == dealt.mu) and dealt.white == (design == "independent")
    assert dealt.mu == stated.mu and type(stated).from_dict(stated.to_dict()) == stated


def test_samplers_that_draw_as_they_say_are_planned():
    for sampler in (Own(4), Blind(4)):
        assert made(sampler).guarantee.custom == (type(sampler).__name__,)
        made(sampler, counts=None)
    assert made(frozen(type("Coins", (Poisson,), {}))(4.0, 6), epsilon=2.0)
    # Of many records few rounds are drawn.
    made(Late(4), counts=np.full(4, 300_000), rounds=101, delta=1e-7)


@frozen
class Wrapped(Sampler):
    """Begins again where the records end."""

    divisor = 25.0

    def draw(self, key, round, counts):
        places = jnp.arange(25)[None, :]
        return Draw((round + places) % counts[:, None], None)


@pytest.mark.mutant
def test_sampler_is_tried_again_on_records_of_run():
    """A plan without counts knows no agent that has fewer than a batch."""
    own = made(Wrapped(), counts=None)
    with pytest.raises(ValueError, match="which draws rows .*; draw distinct rows"):
        dp.rounds(own, make_problem(4, 24))
    dp.rounds(own, make_problem(4, 25))


@frozen
class Loss(amplified.Once):
    """Another number than follows from the noise."""

    times: float = 1.0
    fewer: int = 0
    kind = "changed"

    @property
    def draw_ratios(self):
        return tuple(self.times * ratio for ratio in self.ratios)


class Unhidden(Loss):
    kind = "unhidden"

    @property
    def unamplified(self):
        return 0.7 * max(self.ratios)


class Rising(Loss):
    kind = "rising"

    def epsilon(self, delta):
        return super().epsilon(delta) * math.sqrt(delta / 1e-5)


class Endless(Loss):
    kind = "endless"

    def epsilon(self, delta):
        return math.inf


class Inherited(Loss):
    """Records would be read as its base."""


class Staying(Loss):
    kind = "staying"

    def plus(self, later):
        return self


@pytest.mark.mutant
def test_total_is_of_all_rounds():
    loss = Staying((0.1,), 8)
    with pytest.raises(ValueError, match="Staying, whose plus gives 8 rounds for 8 and 8"):
        loss.then(loss)


@frozen
class Stating(amplified.OneDraw):
    """States a loss that may contradict the noise."""

    kind_of: type
    times: float = 1.0
    fewer: int = 0

    kind = property(lambda self: self.kind_of.kind)

    def loss(self, target, noise):
        honest = super().loss(target, noise)
        return self.kind_of(honest.ratios, target.rounds - self.fewer, self.times)


@frozen
class Single(amplified.Single):
    """Every record in one round, with another claim."""

    claim: Stating = Stating(Loss)

    def amplification(self, counts=None):
        return self.claim


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("claim", "text"),
    [
        (Stating(Loss, times=0.99), "whose draw_ratios is .*, and one draw moves messages by"),
        (Stating(Unhidden), "whose unamplified is 1.*, and .* of a record that came 1 times"),
        (Stating(Rising), "whose epsilon is .*; give finite numbers from 0 that fall"),
        (
            Stating(Endless),
            "whose epsilon is inf|epsilon is .* whose exact epsilon is inf",
        ),
        (Stating(Loss, fewer=1), "whose rounds is 7; give 8"),
        (Stating(Inherited), "whose kind is 'changed', as which records read another class"),
    ],
)
def test_amplified_loss_that_contradicts_noise_is_refused(claim, text):
    options = {"rounds": 8, "counts": np.full(4, 24)}
    assert made(Single(8, 24), **options).guarantee.custom == ("Single", "Stating", "Loss")
    with pytest.raises(ValueError, match=text):
        made(Single(8, 24, claim=claim), **options)


@pytest.mark.mutant
def test_known_batches_cost_as_much_as_those_that_were_drawn():
    """A record of the example is in all rounds or none: one round's mu is too little."""
    module = load_script("own_sampler", "examples")

    class Forgetful(module.CoinLoss):
        kind = "forgetful"
        unamplified = property(lambda self: max(self.ratios))

    class Coin(module.Coin):
        kind = "forgetful"

        def loss(self, target, noise):
            honest = super().loss(target, noise)
            return Forgetful(honest.ratios, honest.rounds)

    class Forgetting(module.OneCoin):
        def amplification(self, counts=None):
            return Coin()

    made(module.OneCoin(), epsilon=2.0)
    with pytest.raises(ValueError, match="whose unamplified is .* of a record that came 12 times"):
        made(Forgetting(), epsilon=2.0)


@frozen
class Plain(ScaledNoise):
    """Independent noise of a user's own, drawn by a function of a name."""

    way: str = "fresh"

    label = "plain"
    secrets = "own"

    def unit(self, target):
        size = target.protect.sensitivity * np.sqrt(target.pattern.epochs)
        return np.full(target.agents, size * (1 + 1e-12))

    def source(self, target):
        return np.eye(target.agents)

    def drawn(self, target):
        return DrawnNoise(globals()[f"_{self.way}"], (target.rounds, target.agents))


def _fresh(arrays, key, rounds, agents):
    scales = jnp.full(agents, 1.0, jnp.float32) * arrays["noise_scale"]
    return noise_.correlated(scales, key=key, rounds=rounds)


def _keyless(arrays, key, rounds, agents):
    return _fresh(arrays, jax.random.key(3, impl="threefry2x32"), rounds, agents)


def _repeated(arrays, key, rounds, agents):
    link = _fresh(arrays, key, rounds, agents)
    return link._replace(
        update=lambda updates, state, params=None: (link.update(updates, state)[0], state)
    )


def _undefined(arrays, key, rounds, agents):
    link = _fresh(arrays, key, rounds, agents)

    def update(updates, state, params=None):
        noisy, state = link.update(updates, state)
        return jax.tree.map(lambda leaf: leaf / 0, noisy), state

    return link._replace(update=update)


def _hosted(arrays, key, rounds, agents):
    return _fresh({"noise_scale": np.random.default_rng().uniform(1, 2)}, key, rounds, agents)


def _narrow(arrays, key, rounds, agents):
    link = _fresh(arrays, key, rounds, agents)

    def update(updates, state, params=None):
        noisy, state = link.update(updates, state)
        return jax.tree.map(lambda leaf: leaf[:, :1], noisy), state

    return link._replace(update=update)


@pytest.mark.mutant
@pytest.mark.parametrize("way", ["keyless", "repeated", "undefined", "hosted", "narrow"])
def test_noise_of_ones_own_is_drawn_once(way):
    sampler = Random(4)
    assert made(sampler, noise=Plain()).guarantee.custom == ("Plain",)
    made(sampler, noise=Plain(), rounds=1)
    with pytest.raises(ValueError, match="noise is Plain.*draws .*Draw finite noise"):
        made(sampler, noise=Plain(way))


def _changed(change):
    """The fresh noise, changed."""

    def drawn(arrays, key, rounds, agents):
        link = _fresh(arrays, key, rounds, agents)

        def update(updates, state, params=None):
            noisy, state = link.update(updates, state)
            return jax.tree.map(change, noisy), state

        return link._replace(update=update)

    return drawn


_halved = _changed(lambda leaf: leaf / 2)
_common = _changed(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape))
_level = _changed(lambda leaf: jnp.broadcast_to(leaf[:, :1], leaf.shape))
_mixed = _changed(lambda leaf: (leaf + leaf[::-1]) / 2**0.5)


@pytest.mark.mutant
@pytest.mark.parametrize("way", ["halved", "common", "level", "mixed"])
def test_noise_of_ones_own_has_covariance_of_its_factor(way):
    with pytest.raises(ValueError, match="noise is Plain.* covariance F F' over agents"):
        made(Random(4), noise=Plain(way))


def test_designs_that_inherit_draw_what_their_factors_say():
    for base in (noise.Whisper, noise.SpaceTime, noise.Mafalda):
        own = frozen(type(base.__name__ + "OfMine", (base,), {}))()
        assert made(Random(4), noise=own).guarantee.custom == (type(own).__name__,)


@frozen
class Numbered(DSGD):
    """Weighs what it sends by the agents' numbers, which one agent alone does not know."""

    def send(self, ctx, public_state, emission, noisy):
        weighted = jax.tree.map(lambda leaf: (leaf.T * jnp.arange(len(leaf))).T, noisy)
        return super().send(ctx, public_state, emission, weighted)


class Stated(Numbered):
    by_agent = True


class Renamed(DiSK):
    """Nothing of a round is another one."""

    def measured(self, public_state):
        return public_state.models


@pytest.mark.mutant
def test_method_that_replaces_part_says_again_that_agents_can_run_alone():
    assert not compatibility.by_agent(Numbered())
    for method in (DSGD(), DiSK(), frozen(Stated)(), Renamed()):
        assert compatibility.by_agent(method)
    own = made(Random(4), method=Numbered(), relation="replace_agent", rounds=2, counts=None)
    with pytest.raises(ValueError, match="whose rounds need all agents"):
        dp.rounds(own, make_problem(4), agents=(1,))


def test_parts_of_package_are_not_tried(monkeypatch):
    for name in ("check_sampler", "check_noise_draws", "check_amplified"):
        monkeypatch.setattr(custom, name, None)
    made(Random(4))
    made(Poisson(4.0, 6), epsilon=2.0)
    made(Random(4), noise=noise.Covariance(np.eye(4), "mine"))
    assert compatibility.custom_names(Own(4)) == ("Own",)
