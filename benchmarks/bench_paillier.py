"""Time and bytes of the encrypted exchange, by length of key.

A ring of agents exchanges models of d entries (`dpjax.contrib.paillier`), all of them in
one process that does every agent's work, one after the other:

- ``ahead``: obfuscators are ready when the round begins; ``prepare_milliseconds`` is what computing
  them took, a pull.
- ``within``: they are computed in the round.
- ``phe``: the same sums by phe's own numbers, ``(E(-x) + y) * b``, with a request of its own for
  each neighbour and no blur.

A pull is one entry that one agent gets over one link: a request, an answer, a decryption. A request
serves all neighbours of an agent. Times are the least of repeated rounds that take turns, key
generation excluded, in the thread's own seconds: all work is one thread's, and waiting for a busy
processor is not counted. ``power_milliseconds`` is one r^n mod n^2 by gmpy2, the least of ten a
turn, and ``times_power`` a pull over it.
"""

import functools
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from _timing import Bench, turns
from dpjax.contrib.paillier import PaillierExchange


def of_exchange(exchange: PaillierExchange, message: Any, ahead: bool) -> dict[str, float]:
    """Seconds of a round, and of what was computed before it."""
    entries = message[0].shape[1]
    # A request takes one obfuscator of an agent's own an entry, an answer one of the asker's.
    began = time.thread_time()
    exchange.prepare(entries if ahead else 0)
    ready = time.thread_time()
    exchange(message, 0)
    return {"prepare": ready - began, "seconds": time.thread_time() - ready}


def of_phe(exchange: PaillierExchange, message: Any) -> dict[str, float]:
    """Seconds of the same sums by phe's own numbers."""
    import phe

    model, weights = message
    keys = [(agent._public, agent._private) for agent in exchange.agents]
    began = time.thread_time()
    total = np.zeros_like(model)
    for i, j in [(i, j) for link in exchange.links for i, j in (link, link[::-1])]:
        public, private = keys[i]
        for k, (x, y) in enumerate(zip(model[i].tolist(), model[j].tolist(), strict=True)):
            request = public.encrypt(-x, precision=2.0**-40)
            sent = phe.EncryptedNumber(public, request.ciphertext(), request.exponent)
            weighed = (sent + y) * float(weights[j, i])
            # Asked for its ciphertext, phe randomises what was computed.
            answer = phe.EncryptedNumber(public, weighed.ciphertext(), weighed.exponent)
            total[i, k] += weights[i, j] * private.decrypt(answer)
    took = time.thread_time() - began
    want = exchange(message, 0)
    assert np.abs(total - want).max() < 1e-9, "the two compute different sums"
    return {"prepare": 0.0, "seconds": took}


def one_power(modulus: int) -> dict[str, float]:
    """Seconds of r^n mod n^2."""
    import gmpy2

    square = modulus**2
    seconds = []
    for _ in range(10):
        base = 1 + secrets.randbelow(modulus - 1)
        began = time.thread_time()
        gmpy2.powmod(base, modulus, square)
        seconds.append(time.thread_time() - began)
    return {"prepare": 0.0, "seconds": min(seconds)}


def measure(key_size: int, agents: int, entries: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row a way."""
    random = np.random.default_rng(0)
    links = {(min(ends), max(ends)) for ends in ((i, (i + 1) % agents) for i in range(agents))}
    exchange = PaillierExchange(links, agents, key_size=key_size)
    weights = np.zeros((agents, agents))
    for i, j in exchange.links:
        weights[i, j], weights[j, i] = random.uniform(0.1, 0.7, 2)
    message = random.normal(size=(agents, entries)), weights
    calls: dict[str, Callable[[], Any]] = {
        "within": functools.partial(of_exchange, exchange, message, False),
        "ahead": functools.partial(of_exchange, exchange, message, True),
        "phe": functools.partial(of_phe, exchange, message),
        "power": functools.partial(one_power, exchange.agents[0].modulus),
    }
    took = turns(calls, repeats, clock=lambda result: result["seconds"])
    pulls = 2 * len(links) * entries
    rows = []
    power = took.pop("power").least
    for name, timing in took.items():
        each = timing.least / pulls
        row: dict[str, Any] = {"algorithm": name, "key_size": key_size, "agents": agents}
        row |= {"links": len(links), "entries": entries, "round_milliseconds": 1e3 * timing.least}
        row |= {"milliseconds": 1e3 * each, "power_milliseconds": 1e3 * power}
        row |= {"times_power": each / power}
        row |= {"prepare_milliseconds": 1e3 * timing.result["prepare"] / pulls}
        crossed = exchange.traffic[-1]
        row |= {"numbers": crossed.numbers, "bytes_per_number": crossed.bytes // crossed.numbers}
        rows.append(row | {"bytes_per_pull": crossed.bytes // pulls})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__, repeats=5)
    bench.parser.add_argument("--key-size", type=int, nargs="+", default=[1024, 2048, 3072])
    bench.parser.add_argument("--agents", type=int, default=3)
    bench.parser.add_argument("--entries", type=int, default=4)
    options = bench.parse(argv)
    for key_size in options.key_size:
        for row in measure(key_size, options.agents, options.entries, options.repeats):
            bench.row(**row)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
