"""Which benchmarks there are, at which sizes they run, and which lines of the page they make.

`SUITE` has an entry a record. A line of the page is a template that every row of the record fills
in which has the entries of ``where``. Where dpjax and what it is compared with have rows of their
own, ``base`` picks the other row, the one that has the same ``by``. Templates see it as
``base``.
"""

import dataclasses
from typing import Any

__all__ = ["SECTIONS", "SUITE", "Entry", "Line"]

SECTIONS = {
    "peers": "other programs that do the same work",
    "bounds": "lower bounds and other references, measured alone in the same run",
    "limits": "what the machine can do",
    "growth": "cost by agents, parameters, rounds and batch",
}
"""Data files of the page, and what dpjax is compared with in each."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A kind of line of the page.

    Attributes:
        section: One of `SECTIONS`.
        what: Template of what is measured.
        ours: Template of dpjax's number.
        other: Template of the number that it is compared with.
        times: Column with the ratio; "rate X" is base's X over the row's, "time X" the row's over
            base's; empty for none.
        where: Entries of the rows meant; a tuple lists several values.
        base: Entries of the other row.
        by: Columns that both rows share.
        title: What the page calls all rows of it together; what stands before the first comma of
            ``what`` by default. The page shows peers alone.
    """

    section: str
    what: str
    ours: str
    other: str = ""
    times: str = ""
    where: dict[str, Any] = dataclasses.field(default_factory=dict)
    base: dict[str, Any] = dataclasses.field(default_factory=dict)
    by: tuple[str, ...] = ()
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A benchmark of the suite.

    Attributes:
        name: Of its record.
        package: Of dpjax, what is measured.
        script: In this folder.
        normal: Its options.
        quick: Those of ``--quick``.
        lines: Of the page.
        gpu: Whether a GPU changes what it measures.
    """

    name: str
    package: str
    script: str
    normal: str
    quick: str
    lines: tuple[Line, ...]
    gpu: bool = False


def _tracking(kind: str, normal: str, quick: str, *lines: Line) -> Entry:
    package = "accounting" if kind == "estimator" else "algorithms"
    words = f"--what {kind} "
    name = f"tracking_{kind}"
    return Entry(name, package, "bench_tracking", words + normal, words + quick, lines)


def _secagg(name: str, kind: str, normal: str, quick: str, *lines: Line) -> Entry:
    words = f"--what {kind} "
    return Entry(name, "secagg", "bench_secagg", words + normal, words + quick, lines)


_ROUNDS = "{rounds_per_second:rate}"
_BASE_ROUNDS = "{base[rounds_per_second]:rate}"
_GROWTH = "{plan_seconds:time} to plan, {first_seconds:time} for a first run, {peak:bytes} at most"
_SHARED = "D-SGD, n = {agents:,}, d = {parameters:,}, T = {rounds:,}, batch {batch:,}"
_SITES = "{agents} sites, complete graph, d = {parameters:,}"
_A_ROUND = "{seconds:time}, {bytes:bytes}"
_OF_BASE = "{base[seconds]:time}, {base[bytes]:bytes}"
_TRAINING = "D-SGD, {case}, {agents} agents, runs side by side: {lanes}"

SUITE = (
    Entry(
        "gossip", "topology", "bench_gossip", "",
        "--agents 8 4096 --parameters 4096 --rounds --batch --repeats 1",
        (
            Line("limits", "float32 numbers in 256 MiB, read and written",
                 "", "{copy_bytes_per_second:bytes}/s"),
            Line("limits", "float32 product of 2,048 x 2,048", "", "{matmul_per_second:flops}"),
            *(
                Line("growth", f"by {axis}: {_SHARED}", "{seconds:time} a round", _GROWTH,
                     where={"axis": axis})
                for axis in ("agents", "parameters", "rounds", "batch")
            ),
            Line("limits", f"a round of {_SHARED}", "{seconds:time}",
                 "reads, writes and products: {limit:time}", "times_limit",
                 {"axis": ("agents", "parameters")}),
            Line("bounds", f"a round of {_SHARED}", "{seconds:time}",
                 "reads, writes, products, and normals: {normals:time}", "times_floor",
                 {"axis": ("agents", "batch")}),
        ),
        gpu=True,
    ),
    Entry(
        "dsgd", "engine", "bench_dsgd", "--rounds 500",
        "--rounds 100 --torch-rounds 10 --seeds 2 --steps 2 --repeats 1 --graph florentine "
        "--cases \"a9a record\"",
        (
            Line("peers", _TRAINING, _ROUNDS, f"PyTorch, a loop over agents: {_BASE_ROUNDS}",
                 "times_torch", {"algorithm": "dpjax"}, {"algorithm": "torch"}, ("case",),
                 "D-SGD on a9a"),
            Line("bounds", _TRAINING, "{milliseconds:ms} a round",
                 "its draws, products and gradients: {floor_milliseconds:ms}", "times_floor",
                 {"algorithm": "dpjax"}),
        ),
        gpu=True,
    ),
    Entry(
        "sockets", "engine", "rival_sockets", "", "--agents 8 --rounds 50 --repeats 1",
        (
            Line("peers", "D-SGD, {agents} agents, d = {parameters:,}", _BASE_ROUNDS,
                 f"a process a node, NumPy over TCP: {_ROUNDS}", "times_dpjax",
                 {"algorithm": "sockets"}, {"algorithm": "dpjax"}, ("agents",)),
        ),
    ),
    Entry(
        "flower", "algorithms", "rival_flower", "--rounds 10 --repeats 1",
        "--clients 8 --rounds 5 --repeats 1",
        (
            Line("peers", "federated averaging, {agents} clients, d = {parameters:,}", _BASE_ROUNDS,
                 f"Flower {{versions[flwr]}}, simulation: {_ROUNDS}", "times_dpjax",
                 {"algorithm": "flower"}, {"algorithm": "dpjax"}, ("agents",)),
        ),
    ),
    Entry(
        "sites", "sites", "bench_sites", "", "--sites 3 --rounds 5 --flower-rounds 3",
        (
            Line("peers", f"a round of real sites, {_SITES}", _OF_BASE,
                 f"Flower {{versions[flwr]}}, a process a node, no computing: {_A_ROUND}",
                 "times_sites", {"algorithm": "flower"}, {"algorithm": "sites"}, ("agents",)),
            *(
                Line("bounds", f"a round of real sites, {_SITES}", _A_ROUND, f"{name}: {_OF_BASE}",
                     "time seconds", {"algorithm": "sites"}, {"algorithm": algorithm}, ("agents",))
                for algorithm, name in (
                    ("sockets", "as many bytes over plain sockets, no computing"),
                    ("computing", "plain sockets and the same computing"),
                    ("simulation", "the same plan in one process"),
                )
            ),
        ),
    ),
    Entry(
        "estimate", "engine", "bench_estimate", "--cases agents network over_rounds --repeats 1",
        "--cases records --repeats 1",
        (
            Line("bounds", "`dp.estimate`, memory of a run: {case}", "{estimated_mib:.0f} MiB",
                 "the run: {memory_mib:.0f} MiB", "memory_ratio"),
            Line("bounds", "`dp.estimate`, time of a run: {case}", "{estimated_seconds:time}",
                 "the run: {seconds:time}", "seconds_ratio"),
        ),
    ),
    Entry(
        "dpsgd", "models", "bench_dpsgd", "--batches 64 256 --passes 8 32 256 --repeats 2",
        "--batches 32 --passes 8 --repeats 1",
        (
            Line("peers", "clipped gradients of {model}, batch {batch_size}",
                 "{base[examples_per_second]:rate}", "{algorithm}: {examples_per_second:rate}",
                 "rate examples_per_second",
                 {"algorithm": ("jax_privacy", "opacus"), "fastest": True},
                 {"algorithm": "dpjax", "fastest": True}, ("model", "batch_size"),
                 "clipped gradients"),
            Line("bounds", "clipped gradients of {model}, batch {batch_size}",
                 "{examples_per_second:rate}",
                 "the gradient without clipping: {base[examples_per_second]:rate}", "times_plain",
                 {"algorithm": "dpjax", "fastest": True}, {"times_plain": 1.0},
                 ("model", "batch_size")),
        ),
        gpu=True,
    ),
    Entry(
        "clipping", "transforms", "bench_clipping", "--sizes 1000 10000 100000 --repeats 3",
        "--sizes 1000 10000 --repeats 1",
        (
            Line("bounds", "clipping of a loss of one's own, {parameters:,} parameters",
                 "{milliseconds:ms}", "the best number of records at once", "times_best",
                 {"algorithm": "default"}),
        ),
        gpu=True,
    ),
    Entry(
        "noise", "transforms", "bench_noise", "--seeds 1 --rounds 100 --repeats 7",
        "--agents 32 --entries 200 --rounds 100 --seeds 1 --repeats 1",
        (
            Line("bounds", "noise alone, {agents} agents of {entries}, over rounds: {algorithm}",
                 "{milliseconds:ms} a round", "normals and products on their own",
                 "times_tight_floor"),
        ),
        gpu=True,
    ),
    Entry(
        "sketch_peers", "transforms", "bench_sketch", "--dimensions 1000 100000 --repeats 5",
        "--dimensions 1000 --repeats 1",
        (
            Line("peers", "update of a sketch, d = {dimension:,}, k = {k}",
                 "{base[seconds]:time}", "{algorithm}: {seconds:time}", "times_update",
                 {"algorithm": ("svd", "incremental_pca", "incremental_pca by k")},
                 {"algorithm": "update"}, ("dimension", "k"), "sketch"),
        ),
    ),
    Entry(
        "mechanism", "mechanism", "bench_mechanism", "--versus 10 20 --alone 100 300 --repeats 3",
        "--versus 10 --alone 100 --repeats 1",
        (
            Line("peers", "noise over agents, n = {n}", "{seconds:time}",
                 "cvxpy and Clarabel: {clarabel_seconds:time}", "ratio", {"algorithm": "versus"}),
            Line("bounds", "noise over agents, n = {n}", "{seconds:time}",
                 "as many bare decompositions: {floor_seconds:time}", "times_floor",
                 {"algorithm": "alone"}),
        ),
        gpu=True,
    ),
    Entry(
        "polynomial", "mechanism", "bench_polynomial",
        "--agents 1000 100000 --degrees 0 6 --repeats 2", "--agents 1000 --degrees 6 --repeats 1",
        (
            Line("growth", "polynomial noise, n = {agents:,}, d = {parameters:,}, degree "
                 "{polynomial}", "{seconds:time} a round",
                 "{plan_seconds:time} to plan; energy {gap:.2%} above a bound of all designs"),
        ),
        gpu=True,
    ),
    Entry(
        "temporal", "mechanism", "bench_temporal",
        "--versus 128 256 512 --design 380x20 5000x10 --repeats 2",
        "--versus 128 --gram 100x100 --design 120x4 --repeats 1",
        (
            Line("peers", "noise over {rounds:,} rounds", "{seconds:time}",
                 "jax_privacy, dense search: {jax_privacy_seconds:time}", "ratio",
                 {"algorithm": "versus"}, title="noise over rounds"),
            Line("growth", "workload over rounds, n = {n:,}, T = {rounds:,}, {mixing}",
                 "{seconds:time}", "{peak_bytes:bytes} at most", where={"algorithm": "gram"}),
            Line("growth", "noise over rounds, T = {rounds:,}, k = {epochs}",
                 "{seconds:time} with compilation, gap {gap:.1e}",
                 "Toeplitz, {bands} bands: gap {toeplitz_gap:.1%}",
                 where={"algorithm": "design"}),
        ),
        gpu=True,
    ),
    Entry(
        "accounting", "accounting", "bench_accounting",
        "--versus 5 20 60 --alone facebook_ego/380,20,19 er:271:0.05/200,10,20 --repeats 2",
        "--graphs florentine --versus 20 --alone er:60:0.1/60,6,10 --every florentine/10 "
        "--repeats 1",
        (
            Line("peers", "loss to one insider, {graph}, T = {rounds}", "{seconds:time}",
                 "dense singular values: {dense_seconds:time}", "ratio",
                 {"algorithm": "versus"}),
            Line("growth", "loss to one insider, {graph}, n = {n:,}, T = {rounds:,}",
                 "{seconds:time}", "{peak_bytes:bytes} at most", where={"algorithm": "alone"}),
            Line("growth", "loss to each of {attackers} insiders, {graph}, T = {rounds}",
                 "{seconds:time}", "{peak_bytes:bytes} at most", where={"algorithm": "every"}),
        ),
    ),
    _tracking(
        "estimator", "--pairs 5 --trials 500 2000 --repeats 3",
        "--pairs 2 --trials 200 --repeats 1",
        *(
            Line("peers", "mutual information, {trials:,} trials, y of {coordinates}",
                 "{base[seconds]:time}", f"{name}: {{seconds:time}}", "times_tree",
                 {"algorithm": algorithm}, {"algorithm": "tree"}, ("trials", "coordinates"))
            for algorithm, name in (
                ("scikit_learn", "scikit-learn"), ("plain", "a k-d tree, trial by trial"),
            )
        ),
    ),
    _tracking(
        "runs", "--run-trials 300 --repeats 2",
        "--agents 10 --run-rounds 100 --run-trials 20 --repeats 1",
        *(
            Line("peers", "gradient tracking, {agents} agents, trials x rounds",
                 "{base[trials_rounds_per_second]:rate}",
                 f"{name}: {{trials_rounds_per_second:rate}}",
                 "rate trials_rounds_per_second", {"algorithm": algorithm},
                 {"algorithm": "dpjax"}, ("agents", "rounds"))
            for algorithm, name in (("numpy", "NumPy"), ("loop", "NumPy, a loop over agents"))
        ),
    ),
    _secagg(
        "secagg", "protocol",
        "--clients 100 300 --lengths 4096 65536 --repeats 1 --peer-clients 100",
        "--clients 30 --lengths 1024 --repeats 0",
        *(
            Line("peers", f"secure sum, {{clients}} clients of {{length:,}}: {side}",
                 f"{{base[{side}_seconds]:time}}",
                 f"Flower {{version}}, SecAgg+: {{{side}_seconds:time}}",
                 f"time {side}_seconds", {"source": "flower"},
                 {"source": "dpjax"}, ("clients", "length"), f"secure sum: {side}")
            for side in ("client", "server")
        ),
        Line("bounds", "secure sum, {clients} clients of {length:,}, {adversary}: client",
             "{client_seconds:time}", "ChaCha20 bytes of its masks: {client_floor:time}",
             "client_times_floor", {"source": "dpjax"}),
    ),
    _secagg(
        "secagg_jit", "jit", "--jit-clients 100 1000 4000", "--jit-clients 100 --repeats 1",
        Line("bounds", "masks in jit, {clients:,} clients of {length:,}", "{mask_seconds:time}",
             "as many words of jax.random.bits: {bits_seconds:time}", "mask_times_bits"),
    ),
    _secagg(
        "secagg_tcp", "tcp", "--clients 20 100 --repeats 0",
        "--clients 20 --lengths 1024 --repeats 0",
        Line("growth", "secure sum over gRPC, {clients:,} clients of {length:,}",
             "{seconds:time} of all parties", "{received:bytes} from a client"),
    ),
    _secagg(
        "secagg_peers", "peers",
        "--peer-sites 10 50 100 --lengths 4096 65536 --repeats 1",
        "--peer-sites 6 --lengths 1024 --repeats 0",
        Line("growth", "secure sum among {clients:,} sites of {length:,}, a round",
             "{seconds:time} of all sites", "{site_bytes:bytes} from a site"),
    ),
    Entry(
        "integers", "secagg", "bench_integers", "--repeats 3",
        "--size 1024 --variances 400 --norms 64 --repeats 1",
        (
            Line("peers", "discrete Gaussians of variance {variance:,}", "{base[per_second]:rate}",
                 "OpenDP: {per_second:rate}", "rate per_second",
                 {"what": "draws", "source": "opendp"}, {"source": "threefry"}, ("variance",),
                 "discrete Gaussians"),
            Line("bounds", "discrete Gaussians of variance {variance:,}", "{per_second:rate}",
                 "float32 normals: {base[per_second]:rate}", "rate per_second",
                 {"what": "draws", "source": "threefry"}, {"source": "normals"}, ("variance",)),
        ),
    ),
    Entry(
        "paillier", "algorithms", "bench_paillier", "--key-size 1024 2048 --repeats 3",
        "--key-size 1024 --entries 2 --repeats 1",
        (
            Line("peers", "encrypted exchange of one entry, {key_size} bits",
                 "{base[milliseconds]:ms}", "phe: {milliseconds:ms}", "time milliseconds",
                 {"algorithm": "phe"}, {"algorithm": "within"}, ("key_size",)),
            Line("bounds", "encrypted exchange of one entry, {key_size} bits, {algorithm}",
                 "{milliseconds:ms}", "one r^n mod n^2: {power_milliseconds:ms}", "times_power",
                 {"algorithm": ("ahead", "within")}),
        ),
    ),
)  # fmt: skip
"""All benchmarks, in the order in which they run."""
