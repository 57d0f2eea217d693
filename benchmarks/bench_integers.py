"""Whole numbers of secure sums: speed, sensitivity, bits: python benchmarks/bench_integers.py

- ``draws`` rows: discrete Gaussian variables a second. ``threefry``: one compiled call for all
  clients (`dpjax.encoding.simulated`); ``chacha20``: a client's NumPy call
  (`dpjax.encoding.integers`); ``opendp``: its own call, where it is installed; ``normals``: float32
  normals of the same shape, for comparison.
- ``encode`` rows: vectors a second, rotated and rounded, by both.
- ``sensitivity`` rows: the norm after rounding over the one before, by how many grid units a vector
  may be long, and what C + grid sqrt(K) would be; the bits of a coordinate of the noisy sum.
- ``loss`` rows: rho of whole numbers over that of real noise of the same variance, a round, by the
  variance of each client; a vector of norm C has an epsilon of ``each`` a round.

Seconds are the process's own, least of repeated calls that take turns: waiting for a busy processor
is not counted, and two busy threads count twice.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from _timing import Bench, installed, turns
from dpjax.accounting import discrete as accounting
from dpjax.encoding import integers, simulated
from dpjax.encoding.lattice import SumCode
from dpjax.encoding.stream import Stream
from dpjax.transforms import variates


def clocked(call: Callable[[], Any]) -> float:
    """The process's seconds of a call."""
    began = time.process_time()
    jax.block_until_ready(call())
    return time.process_time() - began


def opendp(count: int, variance: int) -> Any:
    """Draws of the peer."""
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
    return dp.m.make_gaussian(*space, scale=math.sqrt(variance))([0] * count)


def draws(clients: int, size: int, variance: int) -> dict[str, Callable[[], float]]:
    """Calls by source, each of them so many numbers."""
    key = jax.random.key(0)
    shape = (clients, size)
    ours = jax.jit(
        functools.partial(simulated.discrete_gaussian_rows, shape=shape, variance=variance)
    )
    plain = jax.jit(functools.partial(variates.normals, shape=shape, dtype=jnp.float32))
    stream = Stream(bytes(32))
    single = functools.partial(integers.discrete_gaussians, stream, size, variance)
    calls: dict[str, Callable[[], Any]] = {
        "threefry": lambda: ours(key),
        "normals": lambda: plain(key),
        "chacha20": lambda: [single() for _ in range(clients)],
    }
    if installed("opendp"):
        calls["opendp"] = lambda: opendp(clients * size, variance)
    return {name: functools.partial(clocked, call) for name, call in calls.items()}


def encodings(code: SumCode, clients: int) -> dict[str, Callable[[], float]]:
    """Calls that encode as many vectors as there are clients."""
    drawn = np.random.default_rng(0).normal(size=(clients, code.size))
    vectors = code.bound * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    signs = code.signs(b"bench")
    key = jax.random.key(0)
    ours = jax.jit(simulated.encode_rows, static_argnums=0)
    values = jnp.asarray(vectors, jnp.float32)
    stream = Stream(bytes(32))
    return {
        "threefry": functools.partial(clocked, lambda: ours(code, values, signs, key)),
        "chacha20": functools.partial(
            clocked, lambda: [integers.encode(code, vector, signs, stream) for vector in vectors]
        ),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__, repeats=5)
    bench.parser.add_argument("--clients", type=int, default=10)
    bench.parser.add_argument("--size", type=int, default=4096)
    bench.parser.add_argument("--variances", type=int, nargs="+", default=[4, 400, 2**20])
    bench.parser.add_argument("--norms", type=float, nargs="+", default=[16.0, 64.0, 256.0, 1024.0])
    options = bench.parse(argv)
    shape = {"clients": options.clients, "size": options.size}
    count = options.clients * options.size
    for variance in options.variances:
        took = turns(draws(**shape, variance=variance), options.repeats, clock=float)
        for source, timing in took.items():
            each = {"source": source, "variance": variance, "per_second": count / timing.least}
            bench.row(what="draws", **shape, **each)
    code = SumCode(options.size, 1.0, 1 / 256, options.clients, variance=400)
    for source, timing in turns(
        encodings(code, options.clients), options.repeats, clock=float
    ).items():
        per_second = options.clients / timing.least
        bench.row(what="encode", **shape, source=source, per_second=per_second)
    for norm in options.norms:
        code = SumCode(options.size, 1.0, 1 / norm, options.clients, variance=400)
        bench.row(
            what="sensitivity", **shape, norm=norm, conditional=code.sensitivity,
            always=code.bound + code.grid * math.sqrt(code.padded), bits=code.bits,
        )  # fmt: skip
    for variance in (1, 2, 4):
        honest = 1000
        each = 0.0162
        tau = accounting.tau(variance, honest)
        norm = each * math.sqrt(honest * variance)
        complete = accounting.round_epsilon(norm, variance, honest, options.size)
        bench.row(
            what="loss",
            **shape,
            variance=variance,
            tau=tau,
            each=each,
            times=(complete / each) ** 2,
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
