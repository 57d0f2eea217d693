"""Values of every wrong kind in every field of a config and of its parts."""

import dataclasses
import decimal
import fractions
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.algorithms.dsgd import DSGD
from dpjax.learning.samplers import Cyclic, Random
from dpjax.plans import noise, plan
from dpjax.plans.config import Config
from dpjax.plans.links import PairKeys, ZeroSum
from dpjax.plans.optimizers import Sgd
from dpjax.plans.protect import Budget, Protect
from dpjax.topology import graphs, mixing
from tests.support import make_config

JUNK = [
    *(float("nan"), float("inf"), -float("inf"), True, False, np.bool_(True), None, 0, -1),
    *("4", "", b"4", "\ud800", 1 + 2j, np.complex128(3), np.complex64(3), np.array(3 + 1j)),
    *(np.float64(3.5), np.float32(3), np.float16(3), np.int64(3), np.int8(3), np.uint64(2**63)),
    *(10**400, -(10**400), 10**5000, -(10**5000), 2**31, 2**63, 1e-300, 1e300),
    *([3], [], (), (3,), [[3]], {}, {3}, {"a": 3}, object(), range(3), abs, [10**5000]),
    *(np.array(3.0), np.array([3.0]), np.array([[3.0]]), np.arange(4.0), jnp.float32(3)),
    *(decimal.Decimal(3), decimal.Decimal("NaN"), fractions.Fraction(7, 2), np.datetime64(0, "s")),
    *((np.int64(0), 1), ((0, 1), (2, 3)), [[0, 1], [np.int64(2), 3]], ((0, "1"),), ((0.0, 1),)),
    *((2, 10), (np.int64(2), np.int64(10)), (2.0, 10), (True, 20), (2, 10, 1), (10**5000, 1)),
]

PARTS = {
    Protect: {"relation": "zero_out_record", "clip_norm": 0.5},
    Budget: {"epsilon": 8.0, "delta": 1e-5},
    Random: {"batch_size": 4},
    Cyclic: {"epochs": 2, "separation": 10, "batch_size": 4},
    Sgd: {"step_size": 0.1},
    noise.Whisper: {},
    PairKeys: {"shared": 2.0},
    ZeroSum: {},
    DSGD: {},
}
FIELDS = [(part, field.name) for part in PARTS for field in dataclasses.fields(part)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("part", "name"), FIELDS)
def test_value_is_plain_or_refused_by_name(part, name):
    taken = 0
    for value in JUNK:
        try:
            result = part(**(PARTS[part] | {name: value}))
        except ValueError as error:
            text = str(error)
            assert name in text, text
            assert len(text) < 600 and "digits" not in text.split(";")[-1]
            continue
        taken += 1
        kept = dataclasses.asdict(result)
        again = part(**json.loads(json.dumps(kept)))
        assert again == result and hash(again) == hash(result)
    assert taken <= 24


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Config)])
def test_part_of_wrong_kind_is_refused_by_name(name):
    for value in JUNK:
        fits = {"noise": None, "rounds": 20}.get(name, "no such") is value or name == "noise"
        try:
            config = make_config(**{name: value})
        except ValueError as error:
            assert name in str(error) and len(str(error)) < 600
            continue
        assert fits or isinstance(getattr(config, name), bool | int), value


def test_numbers_of_numpy_are_plain_ones():
    """The same run, whatever the numbers came as."""
    matrix = mixing.metropolis_hastings(graphs.ring(4))
    plain = dict(epsilon=3.0, delta=0.125, clip_norm=0.5, step_size=0.25, max_variance=4.0)
    complete = dict(rounds=20, batch_size=4, subgroups=((0, 1), (2, 3)))
    results = [
        plan.make(make_config(**{n: kind(v) for n, v in plain.items()}, **extra), matrix)
        for kind, extra in itertools.product(
            (float, np.float32, fractions.Fraction),
            (
                complete,
                complete | {"rounds": np.int16(20), "subgroups": [[np.int64(0), 1], [2, 3]]},
            ),
        )
    ]
    assert len({item.fingerprint() for item in results}) == 1
