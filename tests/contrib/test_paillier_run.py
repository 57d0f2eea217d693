"""A whole run over the encrypted exchange is the compiled run, to fixed-point precision."""

import numpy as np
import pytest

pytest.importorskip("phe", reason="the extra `contrib` is not installed")
pytest.importorskip("gmpy2", reason="the extra `contrib` is not installed")

from dpjax.algorithms import random_weights  # noqa: E402
from dpjax.contrib import fusion  # noqa: E402
from dpjax.contrib.paillier import PaillierExchange  # noqa: E402
from dpjax.engine import host  # noqa: E402
from dpjax.engine.run import run  # noqa: E402
from dpjax.learning import samplers
from dpjax.plans import plan, protect  # noqa: E402
from dpjax.plans.optimizers import Sgd  # noqa: E402
from dpjax.topology import graphs, mixing  # noqa: E402

N = 4
P = 2
T = 12
MATRIX = mixing.metropolis_hastings(graphs.ring(N))
LINKS = np.argwhere(np.triu(MATRIX, 1))


def made():
    config = plan.Config(
        method=random_weights.Encrypted(),
        rounds=T,
        sampler=samplers.Random(1),
        optimizer=Sgd(0.004),
        protect=protect.Protect("replace_agent", 100.0),
    )
    return plan.make(config, MATRIX)


def ran(value, transport):
    """Metrics after every round, and the models that went into every round."""
    task = fusion.problem(fusion.make(N, seed=1, high=3.0))
    models = []

    def carried(message, round):
        models.append(message.model)
        return transport(message, round)

    argument = None if transport is None else carried
    result = run(value, task, seeds=[0], eval_every=1, transport=argument)
    return result.metrics, np.array(models)


@pytest.mark.slow
def test_run_over_ciphertexts_is_compiled_run():
    single = made()
    exchange = PaillierExchange(LINKS, N, key_size=256, allow_weak=True)
    compiled, _ = ran(single, None)
    _, plain = ran(single, host.local_transport(single))
    metrics, models = ran(single, exchange)
    assert models.shape == (T, N, P) and models.dtype == np.float32
    # A round's pull is off by half a grain of float32; nothing here makes it grow.
    np.testing.assert_allclose(models, plain, rtol=0, atol=T * 2.0**-23 * np.abs(plain).max())
    assert set(metrics) == set(compiled) and "residual" in metrics
    for name, values in compiled.items():
        np.testing.assert_allclose(metrics[name], values, rtol=2e-5, err_msg=name)
    assert [message.round for message in exchange.traffic] == list(range(T))
    assert {item.numbers for item in exchange.traffic} == {4 * len(LINKS) * P}


@pytest.mark.mutant
def test_run_over_weaker_pulls_is_seen():
    single = made()
    exchange = PaillierExchange(LINKS, N, key_size=256, allow_weak=True)
    _, plain = ran(single, host.local_transport(single))
    _, models = ran(single, lambda message, round: exchange(message, round) * np.float32(1.0001))
    assert np.abs(models - plain).max() > 10 * T * 2.0**-23 * np.abs(plain).max()
