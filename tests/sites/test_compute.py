"""A site's rounds: the plan's, with its own noise and records, and nothing of others."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax as dp
from dpjax.engine.step import State
from dpjax.models import linear
from dpjax.sites.compute import SiteRounds
from dpjax.sites.noise import SiteNoise
from dpjax.transforms import noise as noise_

SITES = 4
RECORDS = 30
FEATURES = 5
ROUNDS = 40
RUN = bytes(range(1, 33))


@functools.cache
def problem_of(*sites: int) -> dp.Problem:
    """Records of some sites, which are made of their numbers."""
    xs = []
    ys = []
    for site in sites:
        rng = np.random.default_rng(site)
        x = rng.normal(size=(RECORDS, FEATURES)).astype(np.float32)
        xs.append(x)
        ys.append(np.where(x[:, 0] + 0.3 * rng.normal(size=RECORDS) > 0, 1, -1))
    x = np.concatenate(xs)
    y = np.concatenate(ys)
    parts = dp.partition.by_owner(np.repeat(np.arange(len(sites)), RECORDS), range(len(sites)))
    return dp.supervised(linear.Linear(), "logistic", (x, y), (x, y), parts)


def plan_of(
    noise: object, rounds: int = ROUNDS, attacker: str = "outsider", **changes: object
) -> dp.Plan:
    config = dp.Config(
        protect=dp.Protect("zero_out_record", clip_norm=1.0, attacker=attacker),
        sampler=dp.samplers.Full(),
        optimizer=dp.optimizers.Sgd(0.3),
        noise=noise,
        budget=dp.Budget(8.0, delta=1e-3),
        rounds=rounds,
        release=True,
        **changes,
    )
    W = dp.mixing.metropolis_hastings(dp.graphs.ring(SITES))
    return dp.make_plan(config, W, counts=[RECORDS] * SITES)


def source_of(plan: dp.Plan, site: int) -> tuple[SiteNoise, int]:
    """The noise of a site: of its own secret, or of the one that all share."""
    if plan.guarantee.secrets == "own":
        return SiteNoise(bytes([site + 1] * 32), run=RUN, holder=f"site {site}"), 1
    return SiteNoise(bytes([9] * 32), run=RUN, holder="all"), SITES


def site_of(plan: dp.Plan, site: int) -> SiteRounds:
    source, rows = source_of(plan, site)
    rounds = SiteRounds(plan, problem_of(site), site, [rows])
    rounds.begin([source])
    return rounds


def trained(sites: Mapping[int, SiteRounds], rounds: int) -> dict[int, State]:
    states = {i: site.init() for i, site in sites.items()}
    for _ in range(rounds):
        sent = {i: site.outgoing(states[i]) for i, site in sites.items()}
        for i, site in sites.items():
            received = {j: sent[j].message for j in site.senders}
            states[i] = site.incoming(states[i], sent[i], received)
    return states


DESIGNS = {
    "own": dp.noise.Independent(),
    "shared": dp.noise.Whisper(),
    "polynomial": dp.noise.Polynomial(),
    "recursion": dp.noise.BandedInverse(4),
    "blocked": dp.noise.Mafalda(),
}


@pytest.mark.gate(4)
@pytest.mark.parametrize("name", DESIGNS)
def test_sites_train_the_models_of_a_run_with_their_noise(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """A release of one process, whose normals are replaced by those that the sites draw."""
    plan = plan_of(DESIGNS[name])
    sites = {i: site_of(plan, i) for i in range(SITES)}
    states = trained(sites, ROUNDS)

    def table(group: int, entries: int) -> np.ndarray:
        """Normals of all sites by round, drawn before anything is traced."""
        draws = []
        for t in range(ROUNDS + 32):
            if plan.guarantee.secrets == "own":
                sources = [source_of(plan, i)[0] for i in range(SITES)]
                rows = [s.normals(round=t, group=group, rows=1, entries=entries) for s in sources]
                draws.append(np.concatenate(rows))
            else:
                source, _ = source_of(plan, 0)
                draws.append(source.normals(round=t, group=group, rows=SITES, entries=entries))
        return np.stack(draws)

    values = table(0, FEATURES + 1)

    def draw(key, group, shape, dtype, released, rows):
        assert (group, shape) == (0, (SITES, FEATURES + 1))
        return lambda round: jnp.asarray(values)[round]

    monkeypatch.setattr(noise_, "_draw", draw)
    rounds = dp.rounds(plan, problem_of(*range(SITES)), key_file=tmp_path / "key")
    state = rounds.init()
    for _ in range(ROUNDS):
        state, _ = rounds.step(state)
    assert max(float(abs(leaf).max()) for leaf in jax.tree.leaves(state.models)) > 0.1
    for i in range(SITES):
        own = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], state.models)
        difference = jax.tree.map(lambda a, b: float(abs(a - b).max()), own, states[i].models)
        assert max(jax.tree.leaves(difference)) < 1e-6
    assert sites[0].guarantee == rounds.guarantee


@pytest.mark.gate(4)
@pytest.mark.parametrize("name", DESIGNS)
def test_a_restored_state_sends_the_same_bits(name: str) -> None:
    plan = plan_of(DESIGNS[name])
    sites = {i: site_of(plan, i) for i in range(SITES)}
    for rounds in (0, 3, 33):
        states = trained(sites, rounds)
        expected = sites[1].outgoing(states[1]).message
        stored = sites[1].stored(states[1])
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(stored.models))
        fresh = site_of(plan, 1)
        again = fresh.outgoing(fresh.restored(stored)).message
        assert jax.tree.map(bytes, jax.tree.map(np.asarray, again)) == jax.tree.map(
            bytes, jax.tree.map(np.asarray, expected)
        )
