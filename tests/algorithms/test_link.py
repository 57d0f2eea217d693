"""The link between what runs and what is accounted: the messages of real runs are A G + B Z.

Every algorithm runs on given gradients from models at zero, in float64, and its messages are
compared with the view of an outsider, entry by entry; what nodes see must be rows of that view
less the columns that they know. The same comparison refuses runs that differ from their account.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax._numerics import double_precision
from dpjax.accounting import views
from dpjax.algorithms import zip_dl
from dpjax.algorithms.dsgd import DSGD
from dpjax.mechanism import spatial, temporal
from dpjax.mechanism.participation import Participation
from dpjax.topology import graphs, mixing
from dpjax.topology.links import link_pairs
from dpjax.transforms import noise, variates
from tests.support import composed

N = 6
T = 7
D = 2
STEP = 0.25
GRAPH = graphs.erdos_renyi(N, 0.5, 3)
W = mixing.metropolis_hastings(GRAPH)
ROWS = mixing.uniform_neighbors(GRAPH)
# Sends along arcs that nobody answers.
DIRECTED = np.eye(N) / 2 + np.roll(np.eye(N), 1, axis=1) / 3 + np.roll(np.eye(N), 2, axis=1) / 6
SCHEDULE = np.stack([W, mixing.metropolis_hastings(graphs.ring(N)), ROWS])
G = np.random.default_rng(5).normal(size=(T, N, D))
STRATEGY = temporal.mafalda(W, Participation(T, 1, 1))
BANDED = np.tril(np.triu(STRATEGY, -2))
LONG = 70
COVARIANCE = spatial.whisper(W, 1.0)


def key():
    return jax.random.key(11, impl="threefry2x32")


@functools.partial(jax.jit, static_argnums=1)
def drawn(value, agents, t):
    folded = jax.random.fold_in(jax.random.fold_in(value, t), 0)
    return variates.normals(folded, (agents, D), jnp.float64)


def normals(rounds, agents):
    """Raw normals [T, n, D], from the keys alone."""
    return np.stack([np.asarray(drawn(key(), agents, t)) for t in range(rounds)])


def messages(algorithm, gradients, agents=N):
    """-messages / step of every round, [T, rows, D]; models start at zero."""
    step = jax.jit(algorithm.step)
    state = algorithm.init(jnp.zeros((agents, D), jnp.float64))
    observed = []
    for gradient in gradients:
        state, info = step(key(), state, jnp.asarray(gradient))
        observed.append(np.asarray(info.messages).reshape(-1, D) / -STEP)
    return np.stack(observed)


def gossip(matrix, *, factor=None, strategy=None, gradients=G, before=None, **options):
    """A run of D-SGD and its raw normals; ``before`` mixes the gradients ahead of the noise."""
    factor = np.eye(N) if factor is None else factor
    rounds = len(gradients)
    noisy = noise.correlated(factor, key=key(), rounds=rounds, strategy=strategy)
    argument = gradients if before is None else before @ gradients
    result = composed(
        matrix, lambda model, batch: batch, optax.scale(-STEP), privatizer=noisy,
        method=DSGD(**options),
    )  # fmt: skip
    return messages(result, argument), normals(rounds, N)


def decor(matrix, *, own=0.7, shared=1.9, flipped=False):
    """A run of DECOR with keys at both ends, and its normals, an agent's before a link's."""
    pairs = link_pairs(matrix)
    own_keys, edge_keys = noise.simulated_keys(key(), N, len(pairs))
    argument = pairs[:, ::-1] if flipped else pairs
    noisy = noise.pairwise_cancelling(
        argument, own, shared, own_keys=own_keys, edge_keys=edge_keys, rounds=T
    )
    result = composed(matrix, lambda model, batch: batch, optax.scale(-STEP), privatizer=noisy)

    keys = [*own_keys, *edge_keys]
    z = np.stack([np.stack([np.asarray(drawn(item, 1, t))[0] for item in keys]) for t in range(T)])
    return messages(result, G), z


def zipped(rule, matrix=W, *, shifted=False):
    """A run of Zip-DL: its messages over links (own copies are not sent), and its normals."""
    sent = zip_dl.links(matrix)
    noisy = noise.zero_sum(
        sent.sender, sent.receiver, STEP, key=key(), rounds=T, over=rule
    )  # fmt: skip
    result = composed(
        matrix, lambda model, batch: batch, optax.scale(-STEP), privatizer=noisy,
        method=zip_dl.ZipDL().on(matrix),
    )  # fmt: skip
    count = len(sent.sender)
    # The noise is added to models and not to gradients, so its sign is turned.
    z = -normals(T + 1, count)[1:] if shifted else -normals(T, count)
    return messages(result, G)[:, sent.sender != sent.receiver], z


def distance(view, run, gradients=G):
    """Largest difference between a run's messages and A G + B Z."""
    observed, z = run
    rounds = len(gradients)
    a, b = view.materialize(rounds)
    reported = a @ gradients.reshape(rounds * N, D) + b @ z.reshape(-1, D)
    return np.abs(reported - observed.reshape(-1, D)).max()


def long(seed=6):
    return np.random.default_rng(seed).normal(size=(LONG, N, D))


def full():
    """A strategy of 70 rounds without bands: coloured in blocks."""
    return np.tril(np.random.default_rng(8).uniform(0, 1, (LONG, LONG))) / LONG + np.eye(LONG)


def whisper():
    return views.dsgd(W, covariance=COVARIANCE)


RUNS = {
    "dsgd": (lambda: views.dsgd(W), lambda: gossip(W)),
    "dsgd, row-stochastic": (lambda: views.dsgd(ROWS), lambda: gossip(ROWS)),
    "dsgd, directed": (lambda: views.dsgd(DIRECTED), lambda: gossip(DIRECTED)),
    "dsgd, time-varying": (lambda: views.dsgd(SCHEDULE), lambda: gossip(SCHEDULE)),
    "anti-pgd": (lambda: views.dsgd(W, np.tri(T)), lambda: gossip(W, strategy=np.tri(T))),
    "mafalda": (lambda: views.dsgd(W, STRATEGY), lambda: gossip(W, strategy=STRATEGY)),
    "banded": (lambda: views.dsgd(W, BANDED), lambda: gossip(W, strategy=BANDED)),
    "muffliato": (lambda: views.muffliato(W, 3), lambda: gossip(W, gossip_steps=3)),
    "muffliato, time-varying": (
        lambda: views.muffliato(SCHEDULE, 2),
        lambda: gossip(SCHEDULE, gossip_steps=2),
    ),
    "whisper": (whisper, lambda: gossip(W, factor=whisper().source)),
    "space and time": (
        lambda: views.dsgd(W, STRATEGY, COVARIANCE),
        lambda: gossip(W, strategy=STRATEGY, factor=whisper().source),
    ),
    "decor": (lambda: views.decor(W, 0.7, 1.9), lambda: decor(W)),
    "zip, messages": (lambda: views.zip_dl(W, zero_sum="messages"), lambda: zipped("messages")),
    "zip, own copy": (
        lambda: views.zip_dl(W, zero_sum="with_own_copy"),
        lambda: zipped("with_own_copy"),
    ),
    "zip, directed": (lambda: views.zip_dl(DIRECTED), lambda: zipped("with_own_copy", DIRECTED)),
}
BROKEN = {
    "gossip before the noise": ("dsgd", lambda: gossip(W, before=W)),
    "noise of another mixing": ("dsgd", lambda: gossip(ROWS)),
    "receivers' weights for senders'": ("dsgd, row-stochastic", lambda: gossip(ROWS.T)),
    "arcs turned round": ("dsgd, directed", lambda: gossip(DIRECTED.T)),
    "a schedule that is not followed": ("dsgd, time-varying", lambda: gossip(SCHEDULE[:2])),
    "fresh noise for correlated noise": ("anti-pgd", lambda: gossip(W)),
    "noise taken back a round late": ("anti-pgd", lambda: gossip(W, strategy=_late())),
    "a strategy that is transposed": (
        "mafalda",
        lambda: gossip(W, strategy=np.linalg.inv(np.linalg.inv(STRATEGY).T[::-1, ::-1])),
    ),
    "a strategy of a wrong scale": ("banded", lambda: gossip(W, strategy=1.5 * BANDED)),
    "one band too many": (
        "banded",
        lambda: gossip(W, strategy=np.tril(np.triu(STRATEGY, -3))),
    ),
    "a step of gossip too many": ("muffliato", lambda: _first(gossip(W, gossip_steps=4), 3)),
    "a step of gossip too few": ("muffliato", lambda: _repeated(gossip(W, gossip_steps=2))),
    "a schedule that starts a round late": (
        "muffliato, time-varying",
        lambda: gossip(np.roll(SCHEDULE, -1, axis=0), gossip_steps=2),
    ),
    "independent agents": ("whisper", lambda: gossip(W)),
    "a factor that is turned": ("whisper", lambda: gossip(W, factor=_turned())),
    "space without time": ("space and time", lambda: gossip(W, factor=whisper().source)),
    "time without space": ("space and time", lambda: gossip(W, strategy=STRATEGY)),
    "links of the other sign": ("decor", lambda: decor(W, flipped=True)),
    "own noise too small": ("decor", lambda: decor(W, own=0.4)),
    "the other rule": ("zip, own copy", lambda: zipped("messages")),
    "copies along arcs turned round": (
        "zip, directed",
        lambda: zipped("with_own_copy", DIRECTED.T),
    ),
    "normals of the next round": ("zip, messages", lambda: zipped("messages", shifted=True)),
}


def _late():
    """Noise z_t - z_t-2."""
    return np.linalg.inv(np.eye(T) - np.eye(T, k=-2))


def _first(run, steps):
    """Messages of the first steps of gossip of every round."""
    observed, z = run
    return observed[:, : steps * N], z


def _repeated(run):
    """Messages of every round, the last step's once more."""
    observed, z = run
    return np.concatenate([observed, observed[:, -N:]], axis=1), z


def _turned():
    rotation = np.linalg.qr(np.random.default_rng(2).normal(size=(N, N)))[0]
    return whisper().source @ rotation


@pytest.mark.parametrize("name", RUNS)
def test_messages_are_accounted_ones(name):
    algorithm, run = RUNS[name]
    with double_precision():
        assert distance(algorithm().ldp(), run()) < 1e-10


FIRST = {like: name for name, (like, _) in reversed(BROKEN.items())}.values()


@pytest.mark.mutant
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.slow]) for name in BROKEN],
)
def test_other_messages_are_caught(name):
    like, run = BROKEN[name]
    algorithm, _ = RUNS[like]
    with double_precision():
        assert distance(algorithm().ldp(), run()) > 1e-2


@pytest.mark.mutant
def test_every_algorithm_has_broken_twin():
    assert {like for like, _ in BROKEN.values()} == set(RUNS)


def test_noise_in_blocks_is_accounted_one():
    """A full strategy longer than a block, against its dense view."""
    strategy = full()
    gradients = long()
    with double_precision():
        run = gossip(W, strategy=strategy, gradients=gradients)
        assert distance(views.dsgd(W, strategy).ldp(), run, gradients) < 1e-10
        # Without the noise of rounds before a block it would be another one.
        short = np.tril(np.triu(strategy, -32))
        assert distance(views.dsgd(W, short).ldp(), run, gradients) > 1e-2


def matrix_of(name):
    """[P, n, n] mixing of a run."""
    kinds = {"row-stochastic": ROWS, "directed": DIRECTED, "time-varying": SCHEDULE}
    matrix = kinds.get(name.partition(", ")[2], W)
    return matrix if matrix.ndim == 3 else matrix[None]


def received(name, attackers):
    """Rows of an outsider's A and B that reach the nodes, without the columns that they know."""
    nodes = list(attackers)
    a, b = RUNS[name][0]().ldp().materialize(T)
    if name.startswith("zip"):
        sent = zip_dl.links(matrix_of(name)[0])
        owners = [{int(i)} for i in sent.sender]
        reach = np.tile(np.isin(sent.receiver[sent.sender != sent.receiver], nodes), (T, 1))
    else:
        owners = [{i} for i in range(N)]
        if name == "decor":
            owners += [set(map(int, pair)) for pair in link_pairs(W)]
        schedule = matrix_of(name)
        reach = np.stack([(schedule[t % len(schedule)][nodes] != 0).any(0) for t in range(T)])
        reach = np.tile(reach, (1, len(a) // (T * N)))
    reference = [column for column, owner in enumerate(owners) if owner & set(nodes)]
    a = a.reshape(len(a), T, N).copy()
    b = b.reshape(len(b), T, -1).copy()
    a[:, :, nodes] = 0.0
    b[:, :, reference] = 0.0
    rows = np.hstack([a.reshape(len(a), -1), b.reshape(len(b), -1)])
    return rows[reach.ravel()]


def told(name, attackers):
    """Rows of the view of the nodes; a node's own copies, which nobody sends, left out."""
    a, b = RUNS[name][0]().pndp(attackers).materialize(T)
    rows = np.hstack([a, b])
    if name.startswith("zip"):
        sent = zip_dl.links(matrix_of(name)[0])
        reaching = np.isin(sent.receiver, list(attackers))
        others = (sent.sender != sent.receiver)[reaching]
        rows = rows.reshape(T, -1, rows.shape[1])[:, others].reshape(-1, rows.shape[1])
    return rows


def same_rows(first, second):
    """Whether two lists of rows agree, rows of zeros aside."""
    first, second = (part[np.abs(part).max(1) > 1e-12] for part in (first, second))
    return first.shape == second.shape and bool(np.abs(first - second).max() < 1e-12)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("attackers", [(0,), (1, 4)])
def test_nodes_see_rows_of_it_less_what_they_know(name, attackers):
    if name in ("whisper", "space and time"):
        with pytest.raises(ValueError, match="share the noise seed"):
            RUNS[name][0]().pndp(attackers)
        return
    assert same_rows(received(name, attackers), told(name, attackers))
    # Other nodes see other rows.
    assert not same_rows(received(name, (2,)), told(name, attackers))


def test_covariance_of_factor():
    source = whisper().source
    np.testing.assert_allclose(source @ source.T, COVARIANCE, atol=1e-9)
