"""Time and bytes of secure sums: python benchmarks/bench_secagg.py

Vectors are whole numbers of at most 2^17 in size, modulo 2^32, the same for all ways; corrupt and
dropout are .05, and that many clients leave after they have shared their secrets.

- ``protocol`` rows: all parties in one process, without a network. ``dpjax`` is
  `dpjax.secagg.local.over_memory`, whose messages are made into bytes and read again; ``flower`` is
  SecAgg+ of flwr (the extra `bench`): the stages of its `SecAggPlusWorkflow` and the clients'
  functions of its `secaggplus_mod`, with a grid that hands objects over. Degree and threshold are
  the same. Flower's sum is checked, too; rounding of reals, making its messages into bytes and
  reading them are not in its seconds, and its vectors are chosen so that they are rounded to
  themselves. Its masks are NumPy's Mersenne Twister under 32 bits of each seed, its keys P-384.
  Under ``adversary`` "semi_malicious" clients have more neighbours and confirm what they were told.
- ``floor``: seconds that the ChaCha20 bytes of all masks take, drawn at once under one key.
  ``times_floor`` is how many times as long a side takes. This cipher gives none for less.
- ``tcp`` rows: `dpjax.sites.sums.over_channel`, server and clients in one process, over gRPC with
  TLS; ``seconds`` are those of all parties, of making their keys too, ``wall`` those on the clock.
  Clients leave at three stages.
- ``peers`` rows: sums among sites (`dpjax.sites.peers`), all in one process, without a network: one
  of them runs the aggregator, every word is signed, and notes and sums are put on disk. One site
  may be missing and one collude; nobody is. ``seconds`` and ``bytes`` are those of all sites.
- ``jit`` rows: `dpjax.contrib.masks`, masks of simulated clients and the sum's unmasking.
  ``bits``: as many words drawn by `jax.random.bits` and added up, to compare with: it hashes once
  for each word, and masks once for two. Compilation is excluded.

Seconds are the process's own, the least of repeated calls (``runs``; what takes 100 seconds is not
repeated), a client's mean; bytes are payloads, a client's mean:
without the sum that comes back, over gRPC with it, Flower's as protobuf has them.
"""

import functools
import importlib
import importlib.metadata
import logging
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import _local_sites
from _timing import Bench, forget_peak, installed, peak, timed, turns
from dpjax.contrib import masks
from dpjax.secagg import local
from dpjax.secagg.terms import Terms
from dpjax.sites import sums
from dpjax.sites.peers import PeerTerms

BITS = 32
BOUND = 2**17
RANGE = 2**18
"""Whole numbers that Flower rounds reals to: from 0, where -2^17 is, to this one."""
SHARE = 0.05
SIDES = ("clients", "server")
ADVERSARIES = ("semi_honest", "semi_malicious")
LONG = 100.0
"""Seconds after which a sum is not taken again."""


def terms_of(clients: int, length: int, adversary: str = ADVERSARIES[0]) -> Terms:
    """What the parties of a benchmark agree on."""
    return Terms(clients, length, BITS, BOUND, SHARE, SHARE, adversary)  # type: ignore[arg-type]


def vectors_of(clients: int, length: int) -> np.ndarray:
    """Whole numbers from -2^17 to 2^17."""
    drawn = np.random.default_rng(0).integers(-BOUND, BOUND, (clients, length), endpoint=True)
    return drawn.astype(np.int64)


def leaves_of(terms: Terms, stages: tuple[str, ...]) -> dict[int, str]:
    """As many clients as may leave, spread over the stages."""
    rows = np.random.default_rng(1).permutation(terms.clients)[: terms.clients - terms.minimum]
    return {int(row): stages[index % len(stages)] for index, row in enumerate(rows)}


def check(values: np.ndarray, survivors: Iterable[int], total: np.ndarray) -> None:
    """Refuse to time what is not the sum."""
    assert np.array_equal(values[list(survivors)].sum(axis=0), total), "the sum is wrong"


def dpjax_sum(terms: Terms, values: np.ndarray, leaves: dict[int, str]) -> dict[str, float]:
    """A sum by the protocol."""
    carried = local.over_memory(terms, values, leaves)
    check(values, carried.total.survivors, carried.total.values)
    assert carried.server is not None and carried.clients is not None
    return {
        "server": carried.server,
        "clients": carried.clients,
        "received": carried.received,
        "sent": carried.sent,
    }


class InMemory:
    """A grid of Flower's whose clients are objects: hands messages over, and clocks the clients."""

    def __init__(self, values: np.ndarray, leaves: dict[int, str]) -> None:
        name = "flwr.client.mod.secure_aggregation.secaggplus_mod"
        self.mod = importlib.import_module(name)
        self.common = importlib.import_module("flwr.common")
        self.records = importlib.import_module("flwr.app")
        self.compat = importlib.import_module("flwr.compat.common.recorddict_compat")
        self.proto = importlib.import_module("flwr.common.serde").recorddict_to_proto
        rows = range(len(values))
        self.states = {row + 1: self.mod.SecAggPlusState(nid=row + 1) for row in rows}
        self.given = {
            row + 1: self.common.ndarrays_to_parameters([values[row].astype(np.float64)])
            for row in rows
        }
        self.gone = {row + 1 for row, stage in leaves.items() if stage == "mask"}
        self.clients = self.uncounted = 0.0
        self.received = self.sent = 0
        self._round = self.mod.quantize
        self.mod.quantize = self.rounded

    def rounded(self, *value: Any) -> Any:
        """Flower's rounding of reals, whose seconds are not counted."""
        began = time.process_time()
        result = self._round(*value)
        self.clients -= time.process_time() - began
        return result

    def send_and_receive(self, messages: Any, timeout: Any = None) -> list[Any]:
        """The clients' answers; none of those who have left."""
        came = time.process_time()
        replies = []
        counted = self.clients
        for message in messages:
            number = message.metadata.dst_node_id
            record = message.content.config_records[self.mod.RECORD_KEY_CONFIGS]
            self.sent += self.proto(message.content).ByteSize()
            stage = record[self.mod.Key.STAGE]
            if number in self.gone and stage in ("collect_masked_vectors", "unmask"):
                continue
            configs = {key: item for key, item in record.items() if key != self.mod.Key.STAGE}
            began = time.process_time()
            words = self._said(stage, number, configs)
            self.clients += time.process_time() - began
            content = self._content(words)
            self.received += self.proto(content).ByteSize()
            source = SimpleNamespace(src_node_id=number)
            replies.append(
                SimpleNamespace(metadata=source, content=content, has_error=lambda: False)
            )
        # What is neither the server's nor the clients': copies, and protobuf for its bytes.
        self.uncounted += time.process_time() - came - (self.clients - counted)
        return replies

    def _said(self, stage: str, number: int, configs: Any) -> Any:
        state = self.states[number]
        mod = self.mod
        if stage == "setup":
            return mod._setup(state, configs)
        if stage == "share_keys":
            return mod._share_keys(state, configs)
        if stage == "collect_masked_vectors":
            return mod._collect_masked_vectors(state, configs, 1, self.given[number])
        return mod._unmask(state, configs)

    def _content(self, words: Any) -> Any:
        common = self.common
        empty = self.common.Parameters([], "")
        fine = common.FitRes(common.Status(common.Code.OK, ""), empty, 1, {})
        content = self.compat.fitres_to_recorddict(fine, True)
        content.config_records[self.mod.RECORD_KEY_CONFIGS] = self.records.ConfigRecord(words)
        return content

    def close(self) -> None:
        """Put Flower's own function back."""
        self.mod.quantize = self._round


def flower_context(clients: int) -> tuple[Any, list[Any]]:
    """What the stages of Flower's workflow ask for, and where their result comes to lie."""
    common, app = (importlib.import_module(f"flwr.{name}") for name in ("common", "app"))
    constant = importlib.import_module("flwr.server.workflow.constant")
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    identity.run_id = identity.task_id = identity.node_id = 1
    logging.getLogger("flwr").setLevel(logging.ERROR)
    ins = common.FitIns(common.Parameters([], ""), {})
    entries = []

    def aggregate_fit(current: int, results: Any, failures: Any) -> tuple[None, dict]:
        del current, failures
        entries.append(common.parameters_to_ndarrays(results[0][1].parameters)[0])
        return None, {}

    strategy = SimpleNamespace(
        configure_fit=lambda *_: [(SimpleNamespace(node_id=i + 1), ins) for i in range(clients)],
        aggregate_fit=aggregate_fit,
    )
    configs = {constant.MAIN_CONFIGS_RECORD: app.ConfigRecord({constant.Key.CURRENT_ROUND: 1})}
    state = SimpleNamespace(
        config_records=configs, array_records={constant.MAIN_PARAMS_RECORD: app.ArrayRecord()}
    )
    manager = SimpleNamespace(num_available=lambda: clients)
    return SimpleNamespace(state=state, strategy=strategy, client_manager=manager), entries


def flower_sum(terms: Terms, values: np.ndarray, leaves: dict[int, str]) -> dict[str, float]:
    """The same sum by Flower's functions."""
    name = "flwr.server.workflow.secure_aggregation.secaggplus_workflow"
    module = importlib.import_module(name)
    graph = terms.graph(terms.clients)
    # A share for oneself is among them; a weight of 1 of 1, and a unit of rounding of 1.
    workflow = module.SecAggPlusWorkflow(
        graph.degree + 1, graph.threshold,
        max_weight=1.0, clipping_range=float(RANGE // 2), quantization_range=RANGE,
        modulus_range=2**BITS,
    )  # fmt: skip
    grid = InMemory(values, leaves)
    context, result = flower_context(terms.clients)
    state = module.WorkflowState()
    stages = ("setup", "share_keys", "collect_masked_vectors", "unmask")
    try:
        began = time.process_time()
        for stage in stages:
            assert getattr(workflow, f"{stage}_stage")(grid, context, state), f"{stage} failed"
        total = time.process_time() - began
    finally:
        grid.close()
    survivors = [row for row in range(terms.clients) if leaves.get(row) != "mask"]
    check(values, survivors, np.rint(result[0] * len(survivors)).astype(np.int64))
    server = total - grid.clients - grid.uncounted
    return {
        "server": server,
        "clients": grid.clients,
        "received": grid.received,
        "sent": grid.sent,
    }


def chacha20(size: int) -> float:
    """Seconds of so many bytes of ChaCha20's key stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    cipher = Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), None).encryptor()
    zeros = bytes(size)
    out = bytearray(size)
    began = time.process_time()
    cipher.update_into(zeros, out)
    return time.process_time() - began


def protocol(
    options: Namespace, clients: int, length: int, adversary: str
) -> Iterable[dict[str, Any]]:
    """Rows of a sum without a network."""
    terms = terms_of(clients, length, adversary)
    values = vectors_of(clients, length)
    leaves = leaves_of(terms, ("mask",))
    graph = terms.graph(clients)
    calls = {"dpjax": functools.partial(dpjax_sum, terms, values, leaves)}
    has_peer = installed("flwr")
    # Flower's protocol is the semi-honest one.
    if has_peer and clients <= options.peer_clients and adversary == ADVERSARIES[0]:
        calls["flower"] = functools.partial(flower_sum, terms, values, leaves)
    spent: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for _ in range(options.repeats + 1):
        for name, call in calls.items():
            if not spent[name] or sum(spent[name][0][side] for side in SIDES) < LONG:
                spent[name].append(call())
    size = BITS // 8 * length
    rate = min(chacha20(2**24) for _ in range(20)) / 2**24
    dropouts = len(leaves)
    survivors = clients - len(leaves)
    drawn = {"clients": (clients - dropouts) * (graph.degree + 1), "server": survivors}
    drawn["server"] += dropouts * graph.degree
    for name, runs in spent.items():
        row: dict[str, Any] = {"source": name, "adversary": adversary, "runs": len(runs)}
        row |= {"degree": graph.degree, "threshold": graph.threshold, "dropouts": dropouts}
        for side, many in zip(SIDES, (clients, 1), strict=True):
            minimum = min(run[side] for run in runs)
            floor = rate * size * drawn[side]
            label = side.removesuffix("s")
            row |= {f"{label}_seconds": minimum / many, f"{label}_floor": floor / many}
            row |= {f"{label}_times_floor": minimum / floor}
        row |= {way: runs[-1][way] / clients for way in ("received", "sent")}
        row |= {"vector": size, "stream_gigabytes_per_second": 1e-9 / rate}
        if name == "flower":
            row["version"] = importlib.metadata.version("flwr")
        yield row


def over_channel(options: Namespace, clients: int, length: int) -> dict[str, Any]:
    """The row of a sum over gRPC."""
    terms = terms_of(clients, length)
    values = vectors_of(clients, length)
    leaves = leaves_of(terms, ("share", "mask", "unmask"))

    def call() -> dict[str, Any]:
        began = time.process_time()
        timing = timed(lambda: sums.over_channel(terms, values, leaves), 0)
        took = {"seconds": time.process_time() - began, "wall": timing.first}
        carried = timing.result
        check(values, carried.total.survivors, carried.total.values)
        return took | {"received": carried.received / clients, "sent": carried.sent / clients}

    runs = [call() for _ in range(options.repeats + 1)]
    graph = terms.graph(clients)
    row = {"source": "dpjax", "degree": graph.degree, "threshold": graph.threshold}
    row |= {"dropouts": len(leaves), "vector": BITS // 8 * length}
    return row | {name: min(run[name] for run in runs) for name in runs[0]}


def among_peers(options: Namespace, sites: int, length: int) -> dict[str, Any]:
    """The row of a sum that sites make among themselves."""
    terms = PeerTerms(sites, length, BITS, None, 1.5 / sites, 1.5 / sites, "semi_malicious")
    values = vectors_of(sites, length).astype(np.uint32)
    spent = []
    sizes = []
    with tempfile.TemporaryDirectory() as folder:
        identities = _local_sites.identities(Path(folder), [f"site-{i}" for i in range(sites)])
        meeting = _local_sites.Sums(terms, identities, Path(folder))
        for _ in range(options.repeats + 2):
            began = time.process_time()
            outcome = meeting.add_up(values)
            spent.append(time.process_time() - began)
            sizes.append(meeting.bytes)
            total = values[list(outcome.survivors)].sum(axis=0, dtype=np.uint32)
            assert np.array_equal(meeting.total(outcome), total), "the sum is wrong"
            assert len(outcome.survivors) == sites
        meeting.close()
    graph = terms.graph(sites)
    row = {"source": "dpjax", "degree": graph.degree, "threshold": graph.threshold}
    return row | {
        "seconds": min(spent),
        "site_seconds": min(spent) / sites,
        "bytes": sizes[-1] - sizes[-2],
        "site_bytes": (sizes[-1] - sizes[-2]) / sites,
        "vector": BITS // 8 * length,
    }


def words(key: Any, draws: int, shape: tuple[int, int]) -> Any:
    """The sum of as many draws of words of a shape."""

    def step(position: Any, total: Any) -> Any:
        return total + jax.random.bits(jax.random.fold_in(key, position), shape, jnp.uint32)

    return jax.lax.fori_loop(0, draws, step, jnp.zeros(shape, jnp.uint32))


def in_jit(options: Namespace, clients: int, length: int) -> dict[str, Any]:
    """The row of masks of simulated clients."""
    terms = terms_of(clients, length)
    key = jax.random.key(0)
    values = vectors_of(clients, length)
    complete = jnp.asarray(values.astype(np.uint32))
    leaves = leaves_of(terms, ("mask",))
    degree = terms.graph(clients).degree
    present = jnp.ones(clients, bool).at[jnp.asarray(list(leaves))].set(False)
    start = forget_peak()
    mask = jax.jit(masks.masked_vectors, static_argnums=2)
    unmask = jax.jit(masks.unmasked_sum, static_argnums=3)
    sent = mask(complete, key, degree)
    total = np.asarray(unmask(sent, present, key, degree)).view(np.int32)
    check(values, np.flatnonzero(present), total)
    used = peak() - start
    bits = jax.jit(words, static_argnums=(1, 2))
    draws = (degree + 1) // 2 + 1
    jax.block_until_ready(bits(key, draws, (clients, length)))
    calls = {
        "mask": lambda: mask(complete, key, degree),
        "unmask": lambda: unmask(sent, present, key, degree),
        "bits": lambda: bits(key, draws, (clients, length)),
    }

    def clocked(call: Any) -> float:
        began = time.process_time()
        jax.block_until_ready(call())
        return time.process_time() - began

    pair = {name: functools.partial(clocked, call) for name, call in calls.items()}
    took = turns(pair, options.repeats, clock=float)
    minimum = {name: timing.least for name, timing in took.items()}
    row = {"source": "dpjax", "degree": degree, "dropouts": len(leaves)}
    row |= {f"{name}_seconds": item for name, item in minimum.items()}
    row |= {f"{name}_times_bits": minimum[name] / minimum["bits"] for name in ("mask", "unmask")}
    row |= {"words_per_second": draws * clients * length / minimum["mask"]}
    return row | {"peak_bytes": used, "vectors_bytes": complete.nbytes}


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__, repeats=2)
    whats = ("protocol", "tcp", "peers", "jit")
    bench.parser.add_argument("--what", nargs="+", default=whats, choices=whats)
    bench.parser.add_argument("--clients", type=int, nargs="+", default=[100, 300, 1000])
    bench.parser.add_argument("--peer-sites", type=int, nargs="+", default=[10, 50, 100])
    bench.parser.add_argument("--jit-clients", type=int, nargs="+", default=[100, 1000, 10_000])
    bench.parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    bench.parser.add_argument(
        "--adversaries", nargs="+", default=ADVERSARIES, choices=ADVERSARIES, help="of protocol"
    )
    bench.parser.add_argument(
        "--peer-clients", type=int, default=300, help="most clients that Flower is run with"
    )
    options = bench.parse(argv)
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    for length in options.lengths:
        for clients in options.clients if "protocol" in options.what else ():
            for adversary in options.adversaries:
                for row in protocol(options, clients, length, adversary):
                    bench.row(what="protocol", clients=clients, length=length, **row)
        for clients in options.clients if "tcp" in options.what else ():
            row = over_channel(options, clients, length)
            bench.row(what="tcp", clients=clients, length=length, **row)
        for sites in options.peer_sites if "peers" in options.what else ():
            row = among_peers(options, sites, length)
            bench.row(what="peers", clients=sites, length=length, **row)
        for clients in options.jit_clients if "jit" in options.what else ():
            row = in_jit(options, clients, length)
            bench.row(what="jit", clients=clients, length=length, **row)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
