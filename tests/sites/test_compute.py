"""A site's rounds: the plan's, with its own noise and records, and nothing of others."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

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


Sources = list[tuple[SiteNoise, int]]
"""What draws noise, each with how many rows of normals it draws."""


def sources_of(plan: dp.Plan, site: int) -> Sources:
    """The noise of a site: of its own secret, or of the one that all share."""
    if plan.guarantee.secrets == "own":
        return [(SiteNoise(bytes([site + 1] * 32), run=RUN, holder=f"site {site}"), 1)]
    return [(SiteNoise(bytes([9] * 32), run=RUN, holder="all"), SITES)]


def all_sources(plan: dp.Plan) -> Sources:
    """The noise of all sites, in the order of the factor's columns."""
    if plan.guarantee.secrets == "own":
        return [sources_of(plan, i)[0] for i in range(SITES)]
    return sources_of(plan, 0)


def with_sources(plan: dp.Plan, site: int, sources: Sources) -> SiteRounds:
    rounds = SiteRounds(plan, problem_of(site), site, [rows for _, rows in sources])
    rounds.begin([source for source, _ in sources])
    return rounds


def site_of(plan: dp.Plan, site: int) -> SiteRounds:
    return with_sources(plan, site, sources_of(plan, site))


def trained(sites: Mapping[int, SiteRounds], rounds: int) -> dict[int, State]:
    states = {i: site.init() for i, site in sites.items()}
    for _ in range(rounds):
        sent = {i: site.outgoing(states[i]) for i, site in sites.items()}
        for i, site in sites.items():
            received = {j: sent[j].message for j in site.senders}
            states[i] = site.incoming(states[i], sent[i], received)
    return states


class Replayed:
    """A release of one process, whose normals are replaced by those that sources draw."""

    def __init__(
        self, plan: dp.Plan, sources: Sources, patch: pytest.MonkeyPatch, folder: Path
    ) -> None:
        # By round, drawn before anything is traced; blocks reach beyond the last one.
        normals = []
        for t in range(plan.config.rounds + 32):
            address = {"round": t, "group": 0, "entries": FEATURES + 1}
            drawn = [source.normals(rows=rows, **address) for source, rows in sources]
            normals.append(np.concatenate(drawn))
        table = np.stack(normals)

        def draw(key, group, shape, dtype, released, rows):
            assert (group, shape, released) == (0, table.shape[1:], True)
            return lambda round: jnp.asarray(table)[round]

        patch.setattr(noise_, "_draw", draw)
        rounds = dp.rounds(plan, problem_of(*range(SITES)), key_file=folder / "key")
        state = rounds.init()
        for _ in range(plan.config.rounds):
            state, _ = rounds.step(state)
        self.models = state.models
        self.guarantee = rounds.guarantee

    def check(self, states: Mapping[int, State]) -> None:
        """Assert that sites have its models, which are not zero."""
        assert max(float(abs(leaf).max()) for leaf in jax.tree.leaves(self.models)) > 0.1
        for i, state in states.items():
            own = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], self.models)
            difference = jax.tree.map(lambda a, b: float(abs(a - b).max()), own, state.models)
            assert max(jax.tree.leaves(difference)) < 1e-6


def check_restored(made: Callable[[int], SiteRounds], *marks: int) -> None:
    """Assert that a site sends the same bits after a restart at these rounds."""
    sites = {i: made(i) for i in range(SITES)}
    for rounds in marks:
        state = trained(sites, rounds)[1]
        stored = sites[1].stored(state)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(stored.models))
        fresh = made(1)
        messages = []
        for site, current in ((sites[1], state), (fresh, fresh.restored(stored))):
            leaves = jax.tree.leaves(site.outgoing(current).message)
            messages.append([np.asarray(leaf).tobytes() for leaf in leaves])
        assert messages[0] == messages[1]


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
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_of(DESIGNS[name])
    sites = {i: site_of(plan, i) for i in range(SITES)}
    together = Replayed(plan, all_sources(plan), monkeypatch, tmp_path)
    together.check(trained(sites, ROUNDS))
    assert sites[0].guarantee == together.guarantee


@pytest.mark.gate(4)
@pytest.mark.parametrize("name", DESIGNS)
def test_a_restored_state_sends_the_same_bits(name: str) -> None:
    plan = plan_of(DESIGNS[name])
    check_restored(lambda site: site_of(plan, site), 0, 3, 33)
