"""Clients who follow a server by its sums: bits, hashes, catching up, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from dpjax.algorithms.average import Average
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import Sum, Trusted
from dpjax.algorithms.federated import Federated, dome
from dpjax.contrib.replica import DIGEST, Feed, Replica
from dpjax.contrib.rules import UpdateRule
from dpjax.engine.host import local_transport
from dpjax.engine.run import run
from dpjax.learning.samplers import Clients
from dpjax.plans import plan
from dpjax.plans.noise import SumShares
from dpjax.plans.optimizers import Chain
from dpjax.plans.protect import Budget, Protect
from dpjax.topology import graphs, mixing
from tests.support import make_config, make_problem

N = 5
K = 3
EACH = 6
COMPLETE = mixing.metropolis_hastings(graphs.complete(N))
FEATURES = 199


def made(method, **changes):
    options = dict(
        protect=Protect("zero_out_record", clip_norm=1.0, attacker="aggregator"),
        sampler=Clients(EACH, 1, 1), optimizer=UpdateRule("adam", floor=1e-3).chain(0.1),
        rounds=EACH, noise=SumShares(1), budget=Budget(8.0, 1e-5), method=method,
    )  # fmt: skip
    return plan.make(plan.Config(**(options | changes)), COMPLETE)


def task():
    return make_problem(N, records=EACH, features=FEATURES)


def recorded(item, value):
    """A run, and what its server received in every round."""
    carried = local_transport(item)
    sums = []

    def transport(message, round):
        sums.append(carried(message, round))
        return sums[-1]

    return run(item, value, seeds=[0], transport=transport), sums


@pytest.fixture(scope="module")
def followed():
    single = made(dome(K, Trusted(1, (2,)), probes=2))
    argument = task()
    result, sums = recorded(single, argument)
    return single, argument, result, sums


@pytest.mark.slow
def test_clients_replay_run_to_bit_and_server_sends_sums(followed):
    single, argument, result, sums = followed
    server, entries, late = (Replica(single, argument) for _ in range(3))
    feed = Feed(server)
    taken = 0
    for received in sums:
        feed.publish(received)
        taken += entries.follow(feed)
    assert entries.fingerprint() == server.fingerprint() and entries.round == EACH
    assert taken == EACH * (4 * K + 4 + DIGEST)
    with pytest.raises(ValueError, match="has 6 rounds, and all were received"):
        feed.publish(sums[0])
    # One who missed all rounds fetches their sums alone: a state is longer.
    assert late.follow(feed) == EACH * (4 * K + 4) + DIGEST
    assert late.fingerprint() == server.fingerprint()
    model = jax.tree.leaves(jax.tree.map(lambda leaf: leaf[0], result.params))
    for a, b in zip(model, jax.tree.leaves(server.state[0]), strict=True):
        np.testing.assert_allclose(np.asarray(a).reshape(np.shape(b)), b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_state_is_sent_where_it_is_shorter():
    single = made(Federated(Trusted(1)))
    argument = task()
    server = Feed(Replica(single, argument))
    late = Replica(single, argument)
    for received in recorded(single, argument)[1]:
        server.publish(received)
    size = server.replica.size
    assert EACH * 4 * (FEATURES + 1) > size > 3 * 4 * (FEATURES + 1)
    assert late.follow(server) == size + DIGEST
    assert late.fingerprint() == server.replica.fingerprint()


@pytest.mark.slow
def test_whoever_computed_otherwise_gets_whole_state(followed):
    single, argument, _, sums = followed
    feed = Feed(Replica(single, argument))
    client = Replica(single, argument)
    feed.publish(sums[0])
    client.follow(feed)
    models, memory = client.state
    off = jax.tree.map(lambda leaf: np.nextafter(leaf, np.float32(9)), models)
    client.adopt((off, memory), 1)
    feed.publish(sums[1])
    size = feed.replica.size
    assert client.follow(feed) == 4 * K + 4 + DIGEST + size + DIGEST
    assert client.fingerprint() == feed.replica.fingerprint()
    # A sum that was changed on the way shows as well.
    total, present = sums[2]
    feed.publish((total, present))
    client.receive((total * np.float32(1.001), present))
    assert client.fingerprint() != feed.replica.fingerprint()


@pytest.mark.slow
def test_another_process_has_same_bits(followed, tmp_path):
    single, argument, _, sums = followed
    feed = Feed(Replica(single, argument))
    for received in sums:
        feed.publish(received)
    path = tmp_path / "sums.npz"
    np.savez(path, totals=[s[0] for s in sums], present=[s[1] for s in sums])
    code = (
        "import json, sys, numpy as np\n"
        "from tests.contrib import test_replica as t\n"
        "from dpjax.contrib.replica import Replica\n"
        "one = t.made(t.dome(t.K, t.Trusted(1, (2,)), probes=2))\n"
        "client, held = Replica(one, t.task()), np.load(sys.argv[1])\n"
        "for total, present in zip(held['totals'], held['present']):\n"
        "    client.receive((total, present))\n"
        "print(json.dumps(client.fingerprint()))\n"
    )
    root = Path(__file__).resolve().parents[2]
    given_ = [sys.executable, "-c", code, str(path)]
    paths = (root, root / "examples", root / "experiments")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    out = subprocess.run(given_, cwd=root, env=env, capture_output=True, text=True, check=True)
    assert json.loads(out.stdout.splitlines()[-1]) == feed.replica.fingerprint()


def test_averages_are_followed_and_methods_of_links_are_refused():
    method = Average(Federated(Trusted(1)), decay=0.9)
    single = made(method, noise=None, budget=None)
    argument = task()
    client = Replica(single, argument)
    client.receive((_like(client), np.float32(N)))
    assert client.round == 1
    rule = Chain(optax.adam, 0.1)
    config = make_config(method=DSGD(), design="independent", optimizer=rule)
    linked = plan.make(config, COMPLETE)
    with pytest.raises(ValueError, match="keep something of a round"):
        Replica(linked, make_problem(N))


def _like(client):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), client.model)


def test_bad_sums_states_and_rounds_are_refused(followed):
    single, argument, _, sums = followed
    client = Replica(single, argument)
    with pytest.raises(ValueError, match="received is"):
        client.receive((np.zeros(K + 1, np.float32), np.float32(N)))
    with pytest.raises(ValueError, match="received is"):
        client.receive((np.zeros(K, np.float64), np.float32(N)))
    with pytest.raises(ValueError, match="state is"):
        client.adopt(client.state[:1], 0)
    with pytest.raises(ValueError, match="round is 3 of a server that has done 0"):
        Feed(Replica(single, argument)).since(3)
    plain = plan.make(make_config(method=Federated(Sum()), design="independent"), COMPLETE)
    assert Replica(plain, make_problem(N)).round == 0
