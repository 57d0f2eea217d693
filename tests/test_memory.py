"""What cannot fit is refused with its bytes, before anything is allocated."""

import re

import pytest

from dpjax import _validate
from dpjax.mechanism import temporal, workload
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs

HUGE = 5_000_000


@pytest.mark.parametrize(
    "make",
    [
        lambda: temporal.identity(HUGE),
        lambda: temporal.anti_pgd(HUGE),
        lambda: temporal.prefix_sum(Participation(HUGE, 1, HUGE)),
        lambda: temporal.mafalda([[0.5, 0.5], [0.5, 0.5]], Participation(HUGE, 1, HUGE)),
        lambda: workload.gram([[1.0]], HUGE),
        lambda: graphs.complete(HUGE),
        lambda: graphs.ring(100 * HUGE),
        lambda: graphs.path(100 * HUGE),
        lambda: graphs.star(100 * HUGE),
        lambda: graphs.grid(HUGE, HUGE),
        lambda: graphs.exponential(HUGE),
        lambda: graphs.erdos_renyi(HUGE, 0.5),
    ],
)
def test_refused_at_once(make):
    with pytest.raises(
        ValueError, match=r"takes [\d.,]+ GiB; this machine has .*; ?|:"
    ) as observed:
        make()
    assert re.search(r"(rounds|n|columns) is \d+, for which", str(observed.value))


def test_what_fits_is_made_and_limit_is_this_machine(monkeypatch):
    assert 2**28 < _validate.memory_limit() < 2**50
    _validate.memory("n", 10, "a matrix", 10, 10)
    monkeypatch.setattr(_validate, "memory_limit", lambda: 2**30 - 1)
    with pytest.raises(ValueError, match="n is 10, for which a matrix takes 1.0 GiB"):
        _validate.memory("n", 10, "a matrix", 2**27)
    with pytest.raises(ValueError, match="rounds is 20000"):
        temporal.anti_pgd(20_000)
