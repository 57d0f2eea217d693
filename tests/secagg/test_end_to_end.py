"""Reals, rotated, rounded and noisy, through the protocol: what comes out is their sum."""

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="the extra `secure` is not installed")
pytest.importorskip("msgpack", reason="the extra `secure` is not installed")

from dpjax.encoding import integers  # noqa: E402
from dpjax.secagg import local  # noqa: E402
from dpjax.secagg.terms import Terms  # noqa: E402

CLIENTS = 8


def summed(variance, modular):
    """The protocol's sum of reals, and theirs; with a bound of entries, or modulo 2^b."""
    code = integers.SumCode(size=60, bound=1.0, grid=0.01, clients=CLIENTS, variance=variance)
    reals = np.random.default_rng(0).normal(size=(CLIENTS, 60))
    reals /= np.linalg.norm(reals, axis=1, keepdims=True) * 1.01
    signs = code.signs(b"a round's seed")
    streams = [integers.Stream(bytes([index]) * 32) for index in range(CLIENTS)]
    complete = np.stack(
        [
            integers.noisy(code, *item)
            for item in zip(reals, [signs] * CLIENTS, streams, strict=True)
        ]
    )
    complete = complete & (2**code.bits - 1) if modular else complete
    sizes = (code.bits, None) if modular else (32, code.largest)
    terms = Terms(CLIENTS, code.padded, *sizes, corrupt=0.0, dropout=0.25)
    total = local.over_memory(terms, complete, {2: "mask", 5: "unmask"}).total
    present = [0, 1, 3, 4, 5, 6, 7]
    assert total.survivors == tuple(present)
    plain = complete[present].astype(np.int64).sum(axis=0)
    if modular:
        np.testing.assert_array_equal(total.values % 2**code.bits, plain % 2**code.bits)
    else:
        np.testing.assert_array_equal(total.values, plain)
    return code, integers.decode(code, total.values, signs), reals[present].sum(axis=0)


@pytest.mark.parametrize("modular", [False, True])
def test_sum_without_noise_is_exact_up_to_rounding(modular):
    code, result, want = summed(0, modular)
    # Rounding moves each of seven vectors' rotated coordinates by less than a grid unit.
    assert 0 < np.linalg.norm(result - want) < 7 * code.grid * np.sqrt(code.padded)
    assert np.abs(result - want).max() < 0.05


@pytest.mark.parametrize("modular", [False, True])
def test_sum_has_noise_of_seven_clients(modular):
    code, result, want = summed(16, modular)
    deviation = code.grid * np.sqrt(7 * 16)
    assert 0.7 * deviation < np.std(result - want) < 1.4 * deviation
