"""Samplers that bring their own accounting: what they state, whom it covers, and a user's own."""

import json

import numpy as np
import pytest

from dpjax.accounting.guarantee import Guarantee
from dpjax.plans import noise, plan
from dpjax.plans.samplers import Poisson
from dpjax.topology import graphs, mixing
from tests.support import make_config

RING = mixing.metropolis_hastings(graphs.ring(4))
ALONE = np.ones((1, 1))
EQUAL = [24] * 4
UNEQUAL = [24, 40, 33, 60]


def sampled(counts=EQUAL, network=RING, **changes):
    options = {
        "relation": "zero_out_record", "sampler": Poisson(4.0, 6), "epsilon": 2.0, "rounds": 20,
        "clip_norm": 0.5, "delta": 1e-5,
    }  # fmt: skip
    return plan.make(make_config(**(options | changes)), network, counts=counts)


GROUPS = {
    "counts": [60],
    "network": ALONE,
    "rounds": 12,
    "sampler": Poisson(4.0, 8, separation=3),
    "noise": noise.PrefixSum(bands=3),
}

# Epsilon, the same after 5 rounds, of 2 and of 5 records; the first rate and ratio, the Gaussian-DP
# mu of the same noise without sampling, and the factor's first entry.
# Designs of solvers differ in their last digits between machines.
STATED = {
    "equal": (
        {},
        1e-7,
        (1.999573061816797, 1.1140663226703083, 4.700518324594426, 20.268711936090824),
        (0.16666666666666677, 0.5304088589632239, 2.3720606471919963, 1.0539360046386719),
    ),
    "unequal": (
        {"counts": UNEQUAL},
        1e-7,
        (1.9995961861224592, 1.3576598218373643, 4.971040132642348, 34.58207906748478),
        (0.16666666666666677, 0.530408858992603, 4.007583745502766, 1.0537898540496826),
    ),
    "independent": (
        {"noise": noise.Independent()},
        1e-12,
        (1.999573061816797, 1.1140663226703083, 4.700518324594426, 20.268711936090824),
        (0.16666666666666677, 0.5304088853868144, 2.3720606471919963, 0.9426689743995667),
    ),
    "groups": (
        GROUPS,
        1e-7,
        (1.999528078882991, 1.6030846164775907, 4.907099247957853, 27.98084157673542),
        (0.20000000000000012, 0.7160407397225177, 1.4320814794464676, 0.3491421639919281),
    ),
}


@pytest.mark.parametrize("name", STATED)
def test_poisson_states_what_it_stated_before_it_had_its_own_accounting(name):
    changes, tolerance, epsilons, noise_numbers = STATED[name]
    made = sampled(**changes)
    stated = made.guarantee
    found = [
        stated.exact_epsilon,
        stated.after(5).epsilon,
        stated.for_records(2),
        stated.for_records(5),
        stated.loss.phases[0].rates[0],
        stated.loss.phases[0].ratios[0],
        stated.loss.unamplified,
        made.factor[0, 0],
    ]
    np.testing.assert_allclose(found, [*epsilons, *noise_numbers], rtol=tolerance)
    assert Guarantee.from_dict(json.loads(json.dumps(stated.to_dict()))) == stated
