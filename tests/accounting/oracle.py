"""Views by simulation of unit impulses, and their losses by pseudo-inverse and in mpmath.

Nothing here uses the package's recursion, its state-space models or its dense route.
"""

import mpmath
import numpy as np


def gossip_messages(schedule, inflow, steps=1, contraction=None):
    """Messages [T, K, n, c] of linear inflow [T, n, c]: x <- W^K (D x + u)."""
    rounds, n, columns = inflow.shape
    contraction = np.ones(n) if contraction is None else np.asarray(contraction)
    x = 0 * inflow[0]
    out = []
    for t in range(rounds):
        mixing = schedule[t % len(schedule)]
        sent = contraction[:, None] * x + inflow[t]
        here = []
        for _ in range(steps):
            here.append(sent)
            sent = mixing @ sent
        out.append(here)
        x = sent
    return np.array(out)


def gossip_view(
    schedule,
    rounds,
    source,
    *,
    attackers=(),
    known=(),
    eavesdropper=False,
    strategy=None,
    steps=1,
    contraction=None,
    unit=None,
):
    """A and B of gossip: attackers see what they receive, an eavesdropper everything."""
    n = schedule.shape[-1]
    unit = np.eye(rounds * n) if unit is None else unit
    unit = unit.reshape(rounds, n, rounds * n)
    messages = gossip_messages(schedule, unit, steps, contraction)
    rows = []
    for t in range(rounds):
        mixing = schedule[t % len(schedule)]
        for k in range(steps):
            for j in range(n):
                if eavesdropper or any(mixing[a, j] != 0 for a in attackers):
                    rows.append(messages[t, k, j])
    complete = np.array(rows)
    source = np.array(source)
    source[:, list(known)] = 0
    inverse = np.eye(rounds) if strategy is None else np.linalg.inv(strategy)
    b = complete @ np.kron(inverse, source)
    a = complete.reshape(-1, rounds, n).copy()
    a[:, :, list(attackers)] = 0
    return a.reshape(len(complete), -1), b


def zip_view(mixing, rounds, *, own_copy, attackers=(), eavesdropper=False):
    """A and B of Zip-DL, message by message."""
    n = len(mixing)
    sent = [(i, j) for i in range(n) for j in range(n) if i != j and mixing[j, i] != 0]
    entries = sent + [(i, i) for i in range(n)]
    columns = rounds * (n + len(entries))
    x = np.zeros((n, columns))
    rows = []
    for t in range(rounds):
        half = x.copy()
        for i in range(n):
            if i not in attackers:
                half[i, t * n + i] += 1
        message = {}
        for i in range(n):
            mine = [e for e in entries if e[0] == i and (own_copy or e[1] != i)]
            fresh = {}
            for edge in mine:
                fresh[edge] = np.zeros(columns)
                if i not in attackers:
                    fresh[edge][rounds * n + t * len(entries) + entries.index(edge)] = 1
            mean = sum(fresh.values()) / max(len(mine), 1)
            for edge in [e for e in entries if e[0] == i]:
                noise = fresh[edge] - mean if edge in fresh else 0
                message[edge] = half[i] + noise
        for i, j in entries:
            if (eavesdropper and i != j) or j in attackers:
                rows.append(message[i, j])
        x = np.array(
            [
                sum(mixing[j, i] * message[i, j] for i in range(n) if (i, j) in message)
                for j in range(n)
            ]
        )
    complete = np.array(rows)
    return complete[:, : rounds * n], complete[:, rounds * n :]


def exact_gossip_loss(mixing, node, steps, participation, digits=90):
    """Loss against one attacker with K gossip steps, the powers of W taken in mpmath too.

    Rounded powers would be another view: messages that repeat each other no longer do.
    """
    with mpmath.workdps(digits):
        n = len(mixing)
        exact = np.vectorize(mpmath.mpf, otypes=[object])
        a, b = gossip_view(
            exact(mixing)[None],
            participation.rounds,
            exact(np.eye(n)),
            attackers=(node,),
            known=(node,),
            steps=steps,
            unit=exact(np.eye(participation.rounds * n)),
        )
    return exact_losses(a, b, participation, (node,), digits)


def losses(a, b, participation, attackers=()):
    """Return mu [n] by pseudo-inverse, and the smallest kept singular value's share."""
    values = np.linalg.svd(b, compute_uv=False)
    kept = values[values > 1e-11 * values[0]]
    white = np.linalg.pinv(b, rcond=1e-11) @ a
    outside = np.abs(a - b @ white).reshape(len(a), participation.rounds, -1).max((0, 1))
    gram = white.T @ white
    return _patterns(gram, participation, attackers, outside > 1e-7), kept[-1] / kept[0]


def _patterns(gram, participation, attackers, infinite):
    rounds = participation.rounds
    n = len(gram) // rounds
    mu = np.zeros(n)
    for u in range(n):
        for start in range(participation.starts):
            position = [
                (start + k * participation.separation) * n + u for k in range(participation.epochs)
            ]
            mu[u] = max(mu[u], np.sqrt(np.abs(gram[np.ix_(position, position)]).sum()))
    mu[infinite] = np.inf
    mu[list(attackers)] = np.nan
    return mu


def exact_losses(a, b, participation, attackers=(), digits=90):
    """The same in mpmath: Gram-Schmidt on the rows of B, carried along on A."""
    with mpmath.workdps(digits):
        tiny = mpmath.mpf(10) ** (-digits // 2)
        ortho = []
        white = []
        leak = set()
        for row_a, row_b in zip(a, b, strict=True):
            x = [mpmath.mpf(v) for v in row_b]
            y = [mpmath.mpf(v) for v in row_a]
            norm = mpmath.sqrt(mpmath.fsum(v * v for v in x))
            for _ in range(2):
                for q, p in zip(ortho, white, strict=True):
                    c = mpmath.fsum(u * v for u, v in zip(q, x, strict=True) if u and v)
                    if c:
                        x = [v - c * u for u, v in zip(q, x, strict=True)]
                        y = [v - c * u for u, v in zip(p, y, strict=True)]
            left = mpmath.sqrt(mpmath.fsum(v * v for v in x))
            if left > tiny * (norm + tiny):
                ortho.append([v / left for v in x])
                white.append([v / left for v in y])
            else:
                leak |= {k for k, v in enumerate(y) if abs(v) > tiny}
        rounds = participation.rounds
        size = a.shape[1]
        gram = np.zeros((size, size))
        for u in range(size // rounds):
            columns = [t * (size // rounds) + u for t in range(rounds)]
            for s in columns:
                for t in columns:
                    gram[s, t] = float(mpmath.fsum(row[s] * row[t] for row in white))
        infinite = np.zeros(size // rounds, bool)
        infinite[[k % (size // rounds) for k in leak]] = True
        return _patterns(gram, participation, attackers, infinite)
