"""Noise on links: DECOR with keys at both ends, and Zip-DL, as plans with guarantees and runs.

Losses are derived again here: DECOR's from the Laplacian of the links among those who do not
attack, views' from dense pseudo-inverses in place of the filter that the plan uses.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax.accounting import finite, gdp, views
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.zip_dl import ZipDL, ZipDLOnLinks, links
from dpjax.contrib.trace import trace
from dpjax.engine import inputs
from dpjax.engine.round import rounds
from dpjax.engine.step import Statics
from dpjax.learning.samplers import Poisson
from dpjax.plans import calibration, noise, plan, scheduled, statements
from dpjax.plans.calibration import DrawnNoise
from dpjax.plans.links import PairKeys, ScaledNoise, ZeroSum
from dpjax.plans.optimizers import Chain, Sgd
from dpjax.plans.protect import Budget
from dpjax.protocols import Answer
from dpjax.results import plots
from dpjax.topology import graphs, mixing
from dpjax.topology.links import link_pairs
from dpjax.transforms import noise as noise_
from tests.support import algorithm_of, make_config, make_problem, retargeted, run

T = 5
SHARED = 3.0
RING = mixing.metropolis_hastings(graphs.ring(7))
KEY = jax.random.key(7, impl="threefry2x32")


def decor(network, **changes):
    options = {"noise": PairKeys(SHARED), "rounds": T, "attacker": "node"}
    return plan.make(make_config(**(options | changes)), network)


def zipped(network, **changes):
    options = {
        "noise": ZeroSum(), "method": ZipDL(), "rounds": T, "attacker": "node", "gradients": "view",
    }  # fmt: skip
    return plan.make(make_config(**(options | changes)), network)


def who(result):
    """Every set of attackers that the guarantee is about."""
    protect = result.config.protect
    if protect.attacker == "outsider":
        return [()]
    return [(a,) for a in range(result.agents)] if protect.attacker == "node" else [protect.nodes]


def laplacian_mu(result, shared=SHARED, times=T):
    """Largest loss over victims and attackers, from the links among those who do not attack."""
    linked = (result.mixing != 0) & ~np.eye(result.agents, dtype=bool)
    scale = float(result.noise.scale)
    worst = 0.0
    for attackers in who(result):
        honest = np.setdiff1d(np.arange(result.agents), attackers)
        among = linked[np.ix_(honest, honest)].astype(float)
        covariance = np.eye(len(honest)) + shared * (np.diag(among.sum(1)) - among)
        worst = max(worst, np.linalg.inv(scale**2 * covariance).diagonal().max())
    return result.config.protect.sensitivity * np.sqrt(times * worst)


def dense_mu(result, algorithm, moved=1.0):
    """Largest loss over victims and attackers by pseudo-inverses of dense views."""
    worst = 0.0
    for attackers in who(result):
        a, b = algorithm.pndp(attackers).materialize(T)
        gram = a.T @ np.linalg.pinv(b @ b.T, rcond=1e-10, hermitian=True) @ a
        each = np.abs(gram.reshape(T, result.agents, T, -1)).sum(axis=(0, 2)).diagonal()
        worst = max(worst, np.delete(each, attackers).max())
    scale = float(result.noise.scale)
    return result.config.protect.sensitivity * moved * np.sqrt(worst) / scale


ATTACKS = [{"attacker": "node"}, {"attacker": "coalition", "nodes": (1, 4)}]


@pytest.mark.parametrize("attack", [*ATTACKS, {"attacker": "outsider"}])
@pytest.mark.parametrize("relation", ["replace_agent", "zero_out_record"])
def test_decor_meets_its_budget_against_whom_it_names(network, attack, relation):
    result = decor(network, **attack, relation=relation)
    stated = result.guarantee
    mu = laplacian_mu(result)
    assert stated.mu == pytest.approx(mu, rel=3e-6) and stated.mu >= mu
    # Exactly the budget, and never above.
    assert 8.0 * (1 - 1e-5) < gdp.epsilon(mu, stated.delta) <= gdp.epsilon(stated.mu, 1e-5) <= 8.0
    assert (stated.attacker, stated.nodes) == (attack["attacker"], attack.get("nodes"))
    assert stated.gradients == "any" and stated.white
    # Whoever knew no secret, or links of other agents too, would be another loss.
    if attack["attacker"] != "outsider":
        outside = decor(network, attacker="outsider", relation=relation)
        assert float(result.noise.scale) > 1.02 * float(outside.noise.scale)


@pytest.mark.parametrize("attack", ATTACKS)
def test_decor_under_any_covers_attackers_who_see_every_message(network, attack):
    result = decor(network, **attack)
    for attackers in who(result):
        honest = sorted(set(range(result.agents)) - set(attackers))
        algorithm = views.decor(network, 1.0, SHARED)
        observed = algorithm.secldp(protected=honest).gdp(result.config.pattern)[honest]
        reported = algorithm.pndp(attackers).gdp(result.config.pattern)[honest]
        np.testing.assert_allclose(observed, reported, rtol=1e-9)


@pytest.mark.parametrize("attack", ATTACKS)
def test_decor_under_view_is_nodes_own_loss(attack):
    result = decor(RING, gradients="view", **attack)
    mu = dense_mu(result, views.decor(RING, 1.0, SHARED))
    assert result.guarantee.mu == pytest.approx(mu, rel=3e-6)
    assert "(gradients: view)" in result.guarantee.caption()
    # Less noise than under "any", whose loss at this noise is larger.
    assert laplacian_mu(result) > 1.01 * mu or attack["attacker"] == "coalition"


@pytest.mark.parametrize(
    ("attack", "rule"), [(ATTACKS[0], "messages"), (ATTACKS[1], "with_own_copy")]
)
def test_zip_dl_meets_its_budget(attack, rule):
    result = zipped(RING, noise=ZeroSum(rule), **attack)
    step = result.config.optimizer.step_size
    mu = dense_mu(result, views.zip_dl(RING, zero_sum=rule), moved=step)
    assert result.guarantee.mu == pytest.approx(mu, rel=3e-6)
    assert 8.0 * (1 - 1e-5) < result.guarantee.exact_epsilon <= 8.0
    assert "(gradients: view)" in result.guarantee.caption()
    assert "do not depend on what the attacker cannot see" in result.guarantee.statement()
    assert attack["attacker"] in result.guarantee.caption()


def test_sum_over_batch_moves_model_by_less(network):
    first = zipped(network, relation="zero_out_record", batch_size=1)
    many = zipped(network, relation="zero_out_record", batch_size=4)
    assert float(first.noise.scale) == pytest.approx(4 * float(many.noise.scale), rel=1e-6)


@pytest.mark.mutant
@pytest.mark.parametrize("make", [decor, zipped])
def test_less_noise_than_is_stated_is_refused(network, make):
    """The broken twins: a smaller scale, a design of smaller loss, another attacker."""
    result = make(network)
    reduced = dataclasses.replace(result.noise, scale=np.float32(0.99) * result.noise.scale)
    with pytest.raises(ValueError, match="guarantee states epsilon"):
        dataclasses.replace(result, noise=reduced)
    extra = dataclasses.replace(result.noise, scale=np.float32(1.01) * result.noise.scale)
    assert dataclasses.replace(result, noise=extra).guarantee == result.guarantee
    protect = dataclasses.replace(result.config.protect, attacker="coalition", nodes=(0, 1))
    with pytest.raises(ValueError, match="guarantee.attacker is 'node'"):
        retargeted(result, config=dataclasses.replace(result.config, protect=protect))


@pytest.mark.mutant
def test_noise_of_another_design_is_refused_in_plan(network):
    """The broken twin: correlated noise of one seed, whose loss is an outsider's, against nodes."""
    result = decor(network)
    other = plan.make(make_config(rounds=T), network)
    louder = dataclasses.replace(other.noise, factor=100 * other.noise.factor)
    with pytest.raises(ValueError, match="attacker 'node'.*Correlated has no finite loss"):
        dataclasses.replace(result, noise=louder)
    with pytest.raises(ValueError, match="method is DSGD, which noise ZeroSum does not join"):
        dataclasses.replace(result, noise=zipped(network).noise)
    with pytest.raises(ValueError, match="ZipDL.*no answer of the query.*Correlated"):
        dataclasses.replace(zipped(network), noise=louder)


def test_coalition_is_part_of_guarantee(network):
    result = decor(network, attacker="coalition", nodes=[3, 1])
    assert result.guarantee.nodes == (1, 3) and "coalition of 1, 3" in result.guarantee.caption()
    protect = dataclasses.replace(result.config.protect, nodes=(2, 4))
    with pytest.raises(ValueError, match=r"guarantee.nodes is \(1, 3\)"):
        retargeted(result, config=dataclasses.replace(result.config, protect=protect))


def test_what_one_attacker_keeps_from_another_counts_for_both(network):
    """For "node" the worst attacker counts, for every victim."""
    result = decor(network)
    each = [decor(network, attacker="coalition", nodes=(a,)) for a in range(result.agents)]
    assert float(result.noise.scale) == max(float(item.noise.scale) for item in each)


def step_of(result, gradients):
    """One plan's algorithm on given gradients."""
    statics = Statics.of((result,), (make_problem(result.agents),))
    arrays = jax.tree.map(lambda leaf: leaf[0], inputs.stacked_arrays((result,)))

    class Given:
        metrics = ()

        def __call__(self, models, batch, encode=None):
            return Answer({"w": gradients})

    statics = statics._replace(query=Given(), divisor=1)
    algorithm = algorithm_of(statics, arrays, KEY)
    return algorithm, algorithm.init({"w": jnp.zeros_like(gradients)})


def test_run_adds_noise_that_is_accounted_by_keys_of_links(network):
    outcome = decor(network)
    d = 40_000
    algorithm, state = step_of(outcome, jnp.zeros((outcome.agents, d)))
    _, info = jax.jit(algorithm.step)(KEY, state, jnp.zeros((outcome.agents, 1)))
    step = outcome.config.optimizer.step_size
    sent = np.asarray(info.messages["w"], np.float64) / -step
    pairs = link_pairs(network)
    own, shared = noise_.simulated_keys(KEY, outcome.agents, len(pairs))
    # Each agent's and each link's key is in the secret slot, and draws its part.
    keys = jax.random.key_data(state.secret.noise.key)
    np.testing.assert_array_equal(keys[: outcome.agents], jax.random.key_data(own))
    np.testing.assert_array_equal(keys[outcome.agents :], jax.random.key_data(shared))
    linked = (network != 0) & ~np.eye(outcome.agents, dtype=bool)
    expected = np.eye(outcome.agents) + SHARED * (np.diag(linked.sum(1)) - linked)
    expected = float(outcome.noise.scale) ** 2 * expected
    spread = np.sqrt(2 * np.outer(expected.diagonal(), expected.diagonal()) / d)
    result = sent @ sent.T / d
    assert (np.abs(result - expected) <= 5 * spread).all()
    assert (np.abs(1.1 * result - expected) > 5 * spread).any()
    np.testing.assert_allclose(outcome.covariance(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("rule", ["with_own_copy", "messages"])
def test_run_of_zip_dl_adds_noise_that_is_accounted(rule):
    outcome = zipped(RING, noise=ZeroSum(rule))
    d = 40_000
    algorithm, state = step_of(outcome, jnp.zeros((outcome.agents, d)))
    new, info = jax.jit(algorithm.step)(KEY, state, jnp.zeros((outcome.agents, 1)))
    sent = np.asarray(info.messages["w"], np.float64)
    ends = links(RING)
    deviation = float(outcome.noise.scale)
    for agent in range(outcome.agents):
        own = ends.receiver[ends.sender == agent] == agent
        counted = ~own | (rule == "with_own_copy")
        m = counted.sum()
        expected = deviation**2 * (np.diag(counted * 1.0) - np.outer(counted, counted) / m)
        rows = sent[ends.sender == agent]
        result = rows @ rows.T / d
        assert (np.abs(result - expected) <= 5 * deviation**2 * np.sqrt(2 / d)).all()
        # The broken twin: half the noise.
        assert (np.abs(result / 4 - expected) > 5 * deviation**2 * np.sqrt(2 / d)).any()
    # What reaches the models is what the plan forecasts, in units of gradients.
    step = outcome.config.optimizer.step_size
    models = np.asarray(new.models["w"], np.float64) / step
    spread = np.abs(outcome.covariance()).max() * np.sqrt(2 / d)
    assert (np.abs(models @ models.T / d - outcome.covariance()) <= 6 * spread).all()
    # Nothing of a sender's messages correlates with another's.
    first, other = (sent[ends.sender == agent] for agent in (0, 1))
    assert np.abs(first @ other.T / d).max() < 6 * deviation**2 / np.sqrt(d)


def _bare(passed):
    return jnp.stack([
        jnp.mean(a == b) for a, b in
        zip(jax.tree.leaves(passed.private), jax.tree.leaves(passed.noisy), strict=True)
    ])  # fmt: skip


@pytest.mark.slow
def test_run_of_zip_dl_says_where_its_noise_is_lost():
    """As of noise by schedule; of PairKeys, which is added to clipped sums, nothing is asked."""
    task = make_problem(len(RING))
    distant = dataclasses.replace(
        task, init=lambda key: jax.tree.map(lambda leaf: jnp.full_like(leaf, 4e6), task.init(key))
    )
    outcome = zipped(RING)
    assert run(outcome, task, seeds=[0]).metrics["lost_noise"].max() < 1e-4
    with pytest.warns(scheduled.LostNoiseWarning, match="From round 1 on"):
        result = run(outcome, distant, seeds=[0])
    share = result.metrics["lost_noise"].max()
    assert result.guarantees[0].lost_noise == (1, pytest.approx(share))
    # The share is of half a normal's variance, the least of a message; here each has two thirds.
    bare = trace(outcome, distant, seeds=[0], read=_bare).mean()
    assert 0.05 < share < 0.95 and 0.7 * share < bare < share
    assert decor(RING).privatizer.lost is None


def test_one_agents_data_move_its_copies_by_no_more_than_accounted(network):
    result = zipped(network)
    c = result.config.protect.clip_norm
    step = result.config.optimizer.step_size
    unit = np.random.default_rng(0).normal(size=(result.agents, 8))
    unit *= c / np.linalg.norm(unit, axis=1, keepdims=True)
    sent = []
    for changed in (1, -1):
        gradients = unit.copy()
        gradients[2] *= changed
        algorithm, state = step_of(result, jnp.asarray(gradients, jnp.float32))
        _, info = algorithm.step(KEY, state, jnp.zeros((result.agents, 1)))
        sent.append(np.asarray(info.messages["w"]))
    moved = np.linalg.norm(sent[0] - sent[1], axis=1)
    of_agent = links(network).sender == 2
    np.testing.assert_allclose(moved[of_agent], 2 * c * step, rtol=1e-5)
    np.testing.assert_array_equal(moved[~of_agent], 0)
    # The broken twin: an optimizer that adds its steps up would move it by more, later.
    with pytest.raises(ValueError, match="optimizer is Chain.*which method ZipDL does not join"):
        zipped(network, optimizer=Chain(lambda s: optax.sgd(s, momentum=0.9), 0.1))


@pytest.mark.slow
@pytest.mark.parametrize("make", [decor, pytest.param(zipped, marks=pytest.mark.slow)])
def test_runs_share_normals_with_runs_without_noise(network, make, small):
    outcome = make(network)
    free = plan.make(outcome.config.using(None), network)
    result = run([free, outcome], small, seeds=[0, 1])
    assert all(np.isfinite(values).all() for values in result.metrics.values())
    single = run(outcome, small, seeds=[1])
    last = jax.tree.leaves(result.params)[0][1, 1]
    np.testing.assert_allclose(last, jax.tree.leaves(single.params)[0][0, 0], rtol=1e-4, atol=1e-5)
    rows = result.rows()
    assert {row["design"] for row in rows} == {"non_private", outcome.config.label}
    assert result.guarantees[1].gradients == outcome.config.protect.gradients


@dataclass(frozen=True)
class HoldsLinkKeys(DSGD):
    """The broken twin: DECOR's keys in the memory, which checkpoints hold."""

    def start(self, ctx, models):
        return ctx.optimizer.init(models), noise_.simulated_keys(KEY, 6, 9)

    def send(self, ctx, public_state, emission, noisy):
        inner = public_state._replace(memory=public_state.memory[0])
        message, memory = super().send(ctx, inner, emission, noisy)
        return message, (memory, public_state.memory[1])


@dataclass(frozen=True)
class SendsKey(ZipDLOnLinks):
    """The broken twin: Zip-DL's key goes out with the messages."""

    def on(self, mixing):
        return self

    def released(self, public_state):
        return KEY


@dataclass(frozen=True)
class HoldsKey(SendsKey):
    """The broken twin: Zip-DL's key in the memory."""

    def start(self, ctx, models):
        return KEY

    def emit(self, ctx, public_state):
        inner = public_state._replace(memory=ctx.optimizer.init(public_state.models))
        return super().emit(ctx, inner)._replace(carry=public_state.memory)


@dataclass(frozen=True)
class LateKey(SendsKey):
    """The broken twin: the key enters the models' slot in the first round."""

    def released(self, public_state):
        return ()

    def absorb(self, ctx, public_state, carry, received):
        return {"model": received, "key": KEY}, carry


@pytest.mark.mutant
def test_keys_anywhere_but_in_secret_slot_are_refused(network):
    with pytest.raises(ValueError, match="state has a key in .*memory.*secret slot"):
        decor(network, method=HoldsLinkKeys())
    sent = links(network)
    ends = (tuple(sent.sender.tolist()), tuple(sent.receiver.tolist()))
    for method, where in ((SendsKey, "released"), (HoldsKey, "memory"), (LateKey, "models")):
        with pytest.raises(ValueError, match=f"state has a key in .*{where}.*secret slot"):
            zipped(network, method=method(*ends))


@dataclass(frozen=True)
class Louder(ZipDLOnLinks):
    """The broken twin: copies that a gradient moves by three times as much."""

    sender: tuple = ()
    receiver: tuple = ()

    def on(self, mixing):
        sent = links(mixing)
        return Louder(tuple(sent.sender.tolist()), tuple(sent.receiver.tolist()))

    def emit(self, ctx, public_state):
        emission = super().emit(ctx, public_state)
        return emission._replace(private=jax.tree.map(lambda leaf: 3 * leaf, emission.private))


@dataclass(frozen=True)
class Slower(DSGD):
    """A post-processing of its own, of which nodes see otherwise than of D-SGD."""

    def absorb(self, ctx, public_state, carry, received):
        return jax.tree.map(lambda leaf: 0.5 * leaf, received), carry


def test_what_is_made_of_method_with_view_is_named(network):
    for case in (
        zipped(network, method=Louder()), decor(network, method=Slower(), gradients="view"),
        decor(network, method=Slower()),
    ):  # fmt: skip
        name = type(case.config.method).__name__
        assert case.guarantee.custom == (name,)
        assert f"relies on your own `{name}`" in case.guarantee.statement()


def test_packaged_method_without_view_of_its_own_is_refused(network):
    lazy = type("Lazy", (DSGD,), {"__module__": "dpjax.algorithms.lazy"})
    with pytest.raises(ValueError, match="method is Lazy under gradients 'view'.*messages of DSGD"):
        decor(network, method=lazy(), gradients="view")
    assert decor(network, method=lazy()).guarantee.epsilon


def test_optimizer_of_same_name_is_not_packages(network):
    momentum = type("Sgd", (Chain,), {"decay": "constant"})(optax.adam, 0.1)
    with pytest.raises(ValueError, match="optimizer is .*which method ZipDL does not join"):
        zipped(network, optimizer=momentum)


@pytest.mark.parametrize(
    ("make", "changes", "text"),
    [
        (zipped, {"gradients": "any"}, "gradients 'any'.*gradients='view'.*captions state"),
        (zipped, {"attacker": "outsider"}, "attacker 'outsider'.*finite only for nodes"),
        (zipped, {"noise": noise.Independent()}, "noise is Independent.*noise.ZeroSum"),
        (zipped, {"optimizer": Sgd(0.1, "sqrt")}, "optimizer is Sgd.*ZipDL does not join"),
        (zipped, {"method": DSGD()}, "method is DSGD, which noise ZeroSum does not join"),
        (zipped, {"release": True}, "release is True with noise ZeroSum.*holds all keys"),
        (
            decor,
            {"release": True, "gradients": "view"},
            "gradients 'view' in a release: rounded sums can show what exact ones hide",
        ),
        (decor, {"attacker": "coalition"}, "nodes is None with attacker 'coalition'"),
        (decor, {"nodes": (1,)}, r"nodes is \(1,\) with attacker 'node'"),
        (decor, {"attacker": "coalition", "nodes": (9,)}, r"nodes is \(9,\) of 6 agents"),
        (decor, {"attacker": "coalition", "nodes": tuple(range(6))}, "leave a victim"),
        (decor, {"attacker": "coalition", "nodes": ("Bonn",)}, r"nodes names 'Bonn'.*nodes\.find"),
        (decor, {"attacker": "nobody"}, "attacker is 'nobody'"),
        (decor, {"noise": noise.Whisper()}, "Whisper.*a seed that they share.*PairKeys"),
        (
            decor,
            {"noise": noise.Independent(), "gradients": "view"},
            "gradients 'view'.*Independent.*other agents learn no more if each keeps its own key",
        ),
        (decor, {"epsilon": (1.0, 2.0)}, "epsilon has 2 entries for 6 agents"),
        (
            decor,
            {"gradients": "view", "optimizer": Sgd(0.1, "sqrt")},
            "optimizer is Sgd.*with gradients 'view'",
        ),
    ],
)
def test_what_does_not_go_together(network, make, changes, text):
    with pytest.raises(ValueError, match=text):
        make(network, **changes)


def test_records_that_take_part_twice(network):
    result = decor(
        network, relation="zero_out_record", participation=(2, 2), rounds=4, batch_size=12
    )
    assert result.guarantee.mu == pytest.approx(laplacian_mu(result, times=2), rel=3e-6)
    assert result.guarantee.participation == (2, 2)


def test_one_agent_alone():
    result = decor(np.ones((1, 1)), attacker="outsider")
    assert result.guarantee.mu == pytest.approx(laplacian_mu(result), rel=3e-6)
    with pytest.raises(ValueError, match="attacker is 'node' with one agent"):
        decor(np.ones((1, 1)))


def test_schedule_of_networks(network):
    schedule = np.stack([network, network])
    with pytest.raises(ValueError, match="Zip-DL takes one matrix"):
        zipped(schedule)
    assert decor(schedule).guarantee.mu == pytest.approx(decor(network).guarantee.mu, rel=1e-6)
    # Secrets are those of every link of any round.
    pair = decor(np.stack([network, mixing.metropolis_hastings(graphs.ring(6))]))
    linked = (pair.mixing != 0).any(axis=0) & ~np.eye(6, dtype=bool)
    honest = linked[1:, 1:].astype(float)
    covariance = np.eye(5) + SHARED * (np.diag(honest.sum(1)) - honest)
    minimum = np.sqrt(T * np.linalg.inv(covariance).diagonal().max()) / float(pair.noise.scale)
    assert pair.config.protect.sensitivity * minimum <= pair.guarantee.mu


def test_leaf_of_network_has_no_noise_over_messages_alone():
    star = mixing.metropolis_hastings(graphs.star(5))
    with pytest.raises(ValueError, match="without noise, at any scale.*with_own_copy"):
        zipped(star, noise=ZeroSum("messages"))
    assert np.isfinite(zipped(star).guarantee.mu)


def test_early_stops_and_phases_under_view(network):
    guarantee = zipped(network).guarantee
    assert not guarantee.white and guarantee.after(2).mu == guarantee.mu
    assert "correlated over rounds" not in guarantee.statement()
    with pytest.raises(ValueError, match="gradients is 'view'.*earlier one's gradients"):
        guarantee.followed_by(guarantee, planned=True)
    complete = decor(network).guarantee
    assert complete.after(1).mu == pytest.approx(complete.mu / np.sqrt(T))
    assert complete.followed_by(complete, planned=True).nodes is None


@dataclass(frozen=True)
class Plain(ScaledNoise):
    """A user's own: independent noise, its loss that of a shift in units of the clip norm."""

    shift: float = 2.0

    label = "plain"
    secrets = "links"

    def unit(self, target):
        size = self.shift * target.protect.clip_norm * np.sqrt(target.pattern.epochs)
        return np.full(target.agents, size * (1 + 1e-12))

    def source(self, target):
        return np.eye(target.agents)

    def drawn(self, target):
        source = tuple(map(tuple, self.source(target).tolist()))
        return DrawnNoise(_drawn_plainly, (target.rounds, source))


def _drawn_plainly(arrays, key, rounds, source):
    factor = jnp.array(source, jnp.float32) * arrays["noise_scale"]
    return noise_.correlated(factor, key=key, rounds=rounds)


class Silent(Plain):
    """Says nothing of its secrets, and inherits no promise."""


class Beside(Plain):
    """Noise of two agents alone: a combination of the messages carries none."""

    secrets = "links"

    def source(self, target):
        return np.eye(target.agents)[:, :2]


@pytest.mark.mutant
@pytest.mark.parametrize("attacker", ["outsider", "node", "coalition"])
def test_noise_of_ones_own_states_at_least_outsiders_loss(network, attacker):
    """The clip norm in the place of the sensitivity: half of the loss, to replace an agent."""
    changes = {"attacker": attacker, "relation": "replace_agent"}
    if attacker == "coalition":
        changes["nodes"] = (1, 3)
    result = decor(network, noise=Plain(), **changes)
    scale = float(result.noise.scale)
    clip = result.config.protect.clip_norm
    assert result.guarantee.mu == pytest.approx(2 * clip * np.sqrt(T) / scale, rel=1e-6)
    assert result.guarantee.attacker == attacker and result.guarantee.custom == ("Plain",)
    with pytest.raises(ValueError, match=r"Plain, which states mu .* By its own factor F an outsi"):
        decor(network, noise=Plain(shift=1.0), **changes)
    assert decor(network, noise=Plain(1.0), **changes | {"relation": "zero_out_record"})
    with pytest.raises(ValueError, match="covariance is singular"):
        decor(network, noise=Beside(), **changes)


@dataclass(frozen=True)
class Uneven(Plain):
    """Agents whose noise differs by orders, which may cancel in part; the loss of the first."""

    span: float = 1e7
    mixed: float = 0.0
    first: float = 1.0

    secrets = "links"

    def source(self, target):
        n = target.agents
        sizes = np.geomspace(1, self.span, n)
        return sizes[:, None] * (np.eye(n) + self.mixed * np.tri(n))

    def unit(self, target):
        factor = self.source(target)
        minimum = 1 / np.linalg.norm(np.linalg.inv(factor), axis=0)
        shares = np.ones(target.agents)
        shares[0] = self.first
        return super().unit(target) * shares / minimum


@pytest.mark.mutant
@pytest.mark.parametrize("span", [1.0, 1e3, 1e7])
@pytest.mark.parametrize("mixed", [0.0, 1.0, 100.0])
def test_loss_of_ones_own_is_compared_agent_by_agent(network, span, mixed):
    """What other agents add, and how that is rounded, lets none state less than it loses."""
    changes = {"attacker": "outsider", "relation": "replace_agent", "rounds": T}
    part = Uneven(span=span, mixed=mixed)
    assert decor(network, noise=part, **changes).guarantee.custom == ("Uneven",)
    for share in (0.0, 0.5, 0.999):
        low = dataclasses.replace(part, first=share)
        with pytest.raises(ValueError, match="Uneven, which states mu .* for agent 0. By its own"):
            decor(network, noise=low, **changes)


@dataclass(frozen=True)
class Shared(Plain):
    """Noise in shares of which the sum is seen alone; two of them cancel in part."""

    sum_only = True
    secrets = "shares"

    def source(self, target):
        factor = np.eye(target.agents)
        factor[0, 1] = -0.9
        return factor

    def unit(self, target):
        total = np.linalg.norm(self.source(target).sum(axis=0))
        return super().unit(target) / total


@pytest.mark.mutant
def test_loss_of_ones_own_to_sums_is_that_of_sum(network):
    changes = {"attacker": "outsider", "relation": "replace_agent"}
    assert decor(network, noise=Shared(), **changes).guarantee.sum_only
    with pytest.raises(ValueError, match="Shared, which states mu .*1' F F' 1"):
        decor(network, noise=Shared(shift=1.99), **changes)


class Own(calibration.Factored):
    """A user's own, which replaces nothing."""


class Low(calibration.Factored):
    """A user's own: it states whatever it likes."""

    def loss(self, target):
        return target.budget.spent(np.full(target.agents, 1e-3))


class Optimist(calibration.Factored):
    """A user's own: it computes another inverse."""

    def inverse_diagonal(self):
        return super().inverse_diagonal() / 4


@pytest.mark.mutant
@pytest.mark.parametrize("design", ["independent", "pairwise"])
@pytest.mark.parametrize("kind", [Low, Optimist])
def test_correlated_noise_of_ones_own_class_states_at_least_outsiders_loss(network, kind, design):
    training_plan = plan.make(make_config(design=design, rounds=T), network)
    parts = [
        training_plan.noise.factor / 2,
        training_plan.noise.strategy,
        training_plan.noise.design,
    ]
    with pytest.raises(ValueError, match=f"{kind.__name__}, which states mu .* an outsider gains"):
        replaced(training_plan, kind(*parts))
    parts[0] = training_plan.noise.factor
    assert replaced(training_plan, Own(*parts)).guarantee.mu == training_plan.guarantee.mu


class White(calibration.Factored):
    """A user's own: it claims that the first t of T rounds spend t / T."""

    def spends_evenly(self, target):
        return True


def test_noise_of_ones_own_over_rounds_spends_no_share_round(network):
    training_plan = plan.make(make_config(design="prefix_sum", rounds=T), network)
    parts = [training_plan.noise.factor, training_plan.noise.strategy, training_plan.noise.design]
    with pytest.raises(ValueError, match="White, whose spends_evenly.. is True beside a strategy"):
        replaced(training_plan, White(*parts))
    single = plan.make(make_config(design="independent", rounds=T), network)
    parts = [single.noise.factor, single.noise.strategy, single.noise.design]
    assert replaced(single, White(*parts)).guarantee.mu == single.guarantee.mu


def replaced(result, own):
    """A plan with noise of a user's own class, and the guarantee that it states."""
    return dataclasses.replace(
        result, noise=own, guarantee=calibration.guarantee_of(result.target, own)
    )


def test_noise_of_ones_own_class_states_at_least_outsiders_loss_to_sampled_batches(network):
    changes = {"sampler": Poisson(2.0, 4), "rounds": T, "relation": "zero_out_record"}
    config = make_config(design="independent", **changes)
    training_plan = plan.make(config, network, counts=np.full(len(network), 20))
    parts = [training_plan.noise.factor, training_plan.noise.strategy, training_plan.noise.design]
    with pytest.raises(ValueError, match="Optimist, which states mu .* an outsider gains"):
        replaced(training_plan, Optimist(*parts))
    assert replaced(training_plan, Own(*parts)).guarantee.custom == ("Own",)


@pytest.mark.parametrize(
    "attacker", [{}, {"attacker": "outsider"}, {"attacker": "coalition", "nodes": (0, 3)}]
)
def test_release_of_pair_keys_pays_for_finite_precision_within_its_reserve(network, attacker):
    """What one process refuses, and sites draw: rows of F = [own | links], on a grid."""
    result = decor(network, release=True, epsilon=3.0, **attacker)
    # The reserve went into more noise: the ideal mechanism's loss is below the stated one.
    simulated = decor(network, epsilon=3.0, **attacker)
    assert result.noise.scale > simulated.noise.scale
    assert result.guarantee.epsilon == 3.0 and result.guarantee.release
    assert result.guarantee.mu == pytest.approx(laplacian_mu(result), rel=2e-6)
    n, links = len(network), len(link_pairs(network))
    assert result.factor.shape == (n, n + links)
    np.testing.assert_array_equal(result.factor[:, :n], result.noise.scale * np.eye(n))
    np.testing.assert_array_equal(result.factor[:, n:].sum(axis=0), np.zeros(links))
    # The own noise alone smooths a cell, whatever is known of links.
    assert result.grid.deviation == float(result.noise.scale)
    assert result.grid.spacing <= result.grid.deviation / 8
    priced = statements.with_precision_cost(result, 1000)
    assert 0 < priced.guarantee.added_epsilon < 3e-3
    assert 0 < priced.guarantee.added_delta <= finite.LIMIT * priced.guarantee.delta
    assert priced.guarantee.epsilon == 3.0 and priced.guarantee.exact_epsilon <= 3.0
    with pytest.raises(
        ValueError, match="noise of finite precision would take .* over the 600,000"
    ):
        statements.with_precision_cost(result, 10**10)


def test_release_of_pair_keys_in_one_process_is_refused_by_name(network, small, tmp_path):
    result = decor(network, release=True)
    text = "noise PairKeys.*in one process: its secrets are those of several holders.*dp.site"
    with pytest.raises(ValueError, match=text):
        run(result, small, seeds=[0], key_file=tmp_path / "key")
    with pytest.raises(ValueError, match=text):
        rounds(result, small, key_file=tmp_path / "key")
    assert not (tmp_path / "key").exists()


@pytest.mark.mutant
def test_released_pair_keys_with_less_noise_than_stated_are_refused(network):
    result = decor(network, release=True)
    twin = dataclasses.replace(result.noise, scale=np.float32(0.999) * result.noise.scale)
    with pytest.raises(ValueError, match="guarantee states"):
        dataclasses.replace(result, noise=twin)


def test_release_of_noise_that_has_no_grid_is_refused_before_its_first_round(network):
    with pytest.raises(ValueError, match=r"True with noise Plain, which .*: give release=False"):
        decor(network, noise=Plain(), attacker="outsider", release=True)


@pytest.mark.mutant
def test_noise_of_users_class_inherits_no_promise(network):
    """The broken copy: a class that would draw by one seed for all, and says nothing of it."""
    results = [decor(network), decor(network, noise=noise.Independent(), attacker="outsider")]
    for item, secrets in zip(results, ("links", "own"), strict=True):
        assert calibration.guarantee_of(item.target, item.noise).secrets == secrets
        heir = type("Heir", (type(item.noise),), {})
        fields = [field.name for field in dataclasses.fields(item.noise)]
        argument = heir(*[getattr(item.noise, name) for name in fields])
        assert calibration.guarantee_of(item.target, argument).secrets is None
        heir = type("Heir", (type(item.noise),), {"secrets": secrets})
        argument = heir(*[getattr(item.noise, name) for name in fields])
        assert calibration.guarantee_of(item.target, argument).secrets == secrets


def test_noise_of_ones_own_covers_nodes_by_secrets_that_it_states(network):
    assert {row.party: row.epsilon for row in decor(network, noise=Plain()).protection()}[
        "another participant"
    ] == decor(network, noise=Plain()).guarantee.epsilon
    for secrets in ("shared", "group", None):
        part = type("Told", (Plain,), {"secrets": secrets})()
        with pytest.raises(ValueError, match=f"its class states secrets {secrets!r}"):
            decor(network, noise=part)
        assert decor(network, noise=part, attacker="outsider").guarantee.secrets == secrets
    with pytest.raises(ValueError, match="its class states secrets None.*'own' or 'links'"):
        decor(network, noise=Silent())
    with pytest.raises(ValueError, match="gradients 'view'.*gradients='any'"):
        decor(network, noise=Plain(), gradients="view")


def test_planned_phases_of_one_coalition_lose_what_one_long_run_does(network, small):
    """The same scale over twice the rounds is the oracle: links draw new secrets every round."""
    one = decor(network, attacker="coalition", nodes=(1, 3))
    pair = one.guarantee.followed_by(one.guarantee, planned=True)
    long = decor(network, attacker="coalition", nodes=(1, 3), rounds=2 * T)
    same = dataclasses.replace(long.noise, scale=one.noise.scale)
    assert pair.mu == pytest.approx(float(np.max(same.loss(long.target).size)), rel=1e-9)
    assert pair.nodes == (1, 3) and pair.rounds == 2 * T
    first = run(one, small, seeds=[0])
    later = run(one, small, seeds=[0], start=first.params, phase=1, spent=first.guarantees,
                planned=True)  # fmt: skip
    assert later.guarantees[0].mu == pair.mu and "of 1, 3" in later.guarantees[0].caption()
    other = decor(network, attacker="coalition", nodes=(2, 4)).guarantee
    with pytest.raises(ValueError, match=r"nodes is \(1, 3\), then \(2, 4\)"):
        one.guarantee.followed_by(other, planned=True)
    with pytest.raises(ValueError, match=r"fix all phases of a coalition beforehand"):
        one.guarantee.within(Budget(1000.0, one.guarantee.delta))


def test_every_design_is_part_and_has_colour_of_its_own():
    assert set(plots.TITLES) == {*noise.DESIGNS, "non_private", "central"}
    looks = [(look.color, look.marker, look.line) for look in plots.LOOKS.values()]
    assert len(set(looks)) == len(looks)
    # All parts that `dp.noise` names, and no other.
    parts = [getattr(noise, name) for name in noise.__all__]
    kinds = {part for part in parts if isinstance(part, type)} - {noise.Covariance}
    assert {type(part) for part in noise.DESIGNS.values()} == kinds
    assert {*noise.LABELS} <= {*noise.DESIGNS, "non_private"}
