"""A secure sum over gRPC, some of whose clients leave: python examples/secure_sum.py [CLIENTS]"""

import argparse
import random
import time

import numpy as np

from dpjax.secagg.terms import Terms
from dpjax.sites import sums

SENT = {"share": "keys", "mask": "shares", "confirm": "vector", "unmask": "vector"}


def main(clients=20, length=1000, dropout=0.1, corrupt=0.05, adversary="semi_honest"):
    terms = Terms(clients, length, 48, 2**20, corrupt, dropout, adversary)
    values = np.random.default_rng().integers(-(2**20), 2**20, (clients, length), endpoint=True)
    leaving = random.sample(range(clients), clients - terms.minimum)
    stages = terms.stages[1:]
    leaves = {row: stages[at % len(stages)] for at, row in enumerate(leaving)}
    started = time.perf_counter()
    carried = sums.over_channel(terms, values, leaves)
    seconds = time.perf_counter() - started
    for row, stage in sorted(leaves.items()):
        print(f"  client {row} left after its {SENT[stage]}")
    survivors = list(carried.total.survivors)
    right = np.array_equal(carried.total.values, values[survivors].sum(axis=0))
    word = "exact" if right else "WRONG"
    down, up = (each / clients / 1e3 for each in (carried.received, carried.sent))
    print(f"the sum of {len(survivors)} vectors is {word}: {seconds:.2f} s, {down:.1f} kB from and "
          f"{up:.1f} kB to a client, {terms.vector_bytes() / 1e3:.1f} kB of either its vector or "
          "the sum")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", type=int, nargs="?", default=20)
    main(parser.parse_args().clients)
