"""Training from a saved design in plain NumPy; this file imports nothing of dpjax.

It averages once a round, also where a design is of several gossip steps.

dpjax design --graph ring:6 --relation replace_agent --epsilon 10 --delta 1e-5 --rounds 200 \\
    --clip-norm 1 --out design.npz
python examples/own_loop.py design.npz
"""

import argparse
import hashlib
import secrets

import numpy as np


def clipped(gradients, clip_norm):
    """Rows scaled down to a norm of at most clip_norm."""
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return gradients * np.minimum(1.0, clip_norm / np.maximum(norms, 1e-300))


def normals(design, site, secret, t, size):
    """Row `site` of factor @ Z_t; all sites of its group draw the same Z_t from their secret."""
    members = np.flatnonzero(design["seed_group"] == design["seed_group"][site])
    shape = len(members), size
    # 128 bits a normal, which nobody can guess who does not hold the secret.
    key = secret.to_bytes(16, "big") + t.to_bytes(8, "big")
    bits = hashlib.shake_256(key).digest(16 * len(members) * size)
    u, v = ((np.frombuffer(bits, "<u8").reshape(2, *shape) >> 11) + 0.5) / 2**53
    return design["factor"][site, members] @ (np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v))


class Site:
    """What one site holds: its data, its model, its group's secret, and its past noise."""

    def __init__(self, design, index, x, y, secret, batch_size=8, step_size=0.02):
        self.design, self.index, self.x, self.y, self.secret = design, index, x, y, secret
        self.batch_size, self.step_size = batch_size, step_size
        self.model, self.past, self.t = np.zeros(x.shape[1]), [], 0
        self.batches = np.random.default_rng(index)  # Which records it takes is not secret.

    def message(self):
        """Gradient, clip, noise, division, step: what goes to the neighbours in round t."""
        if self.t >= self.design["rounds"]:
            raise RuntimeError("the budget is spent: make a new design for more rounds")
        rows = self.rows()
        margins = self.y[rows] * (self.x[rows] @ self.model)
        records = -(self.y[rows] / (1 + np.exp(margins)))[:, None] * self.x[rows]
        clip_norm, of_records = self.design["clip_norm"], self.design["unit"] == "record"
        # Agents: the mean gradient is clipped. Records: each one is, and nothing divides yet.
        parts = records if of_records else records.mean(axis=0, keepdims=True)
        if of_records:  # Room for rounding the sum, as how_to_use says.
            clip_norm = clip_norm * (1 - 2 * len(rows) / 2**24)
        total = clipped(parts, clip_norm).sum(axis=0)
        noisy = total + self.noise()
        # The same number in every round, after the noise.
        update = noisy / self.batch_size if of_records else noisy
        return self.model - self.step_size * update

    def rows(self):
        """Records of round t: in the fixed order that a guarantee for (k, b) assumes, or any."""
        if "participation" in self.design:
            separation = self.design["participation"][1]
            return np.arange(self.t % separation, len(self.x), separation)
        return self.batches.choice(len(self.x), self.batch_size, replace=False)

    def noise(self):
        """V_t; with a strategy C over rounds, C V = E."""
        value = normals(self.design, self.index, self.secret, self.t, len(self.model))
        if "strategy" in self.design:
            row = self.design["strategy"][self.t]
            value = (value - sum(c * v for c, v in zip(row, self.past, strict=False))) / row[self.t]
            self.past.append(value)
        return value

    def receive(self, messages):
        """Average what arrived, its own message among it; the round is over."""
        mixing = self.design["mixing"]
        if mixing.ndim == 3:  # A schedule of networks, round by round.
            mixing = mixing[self.t % len(mixing)]
        self.model = mixing[self.index] @ messages
        self.t += 1


def rounds_of(design, data, secret_of, rounds):
    """The sites after so many rounds."""
    groups = design["seed_group"]
    sites = [Site(design, i, *records, secret_of[groups[i]]) for i, records in enumerate(data)]
    for _ in range(rounds):
        messages = np.stack([site.message() for site in sites])  # A network carries these.
        for site in sites:
            site.receive(messages)
    return sites


def train(path, rounds=None, seed=0):
    """Six hospitals, say, whose data are made up here; with noise, and without to compare."""
    design = {name: value[()] for name, value in np.load(path).items()}
    print(design["how_to_use"])
    rng = np.random.default_rng(seed)
    truth, data = rng.normal(size=6), []
    for _ in design["labels"]:
        x = rng.normal(size=(200, 6))
        data.append((x, np.where(x @ truth + rng.normal(size=200) > 0, 1.0, -1.0)))
    secret_of = {group: secrets.randbits(128) for group in set(design["seed_group"].tolist())}
    rounds = int(design["rounds"]) if rounds is None else rounds
    sites = rounds_of(design, data, secret_of, rounds)
    # What privacy costs. This protects nobody: run it on data that are public or made up.
    free = rounds_of({**design, "factor": 0 * design["factor"]}, data, secret_of, rounds)
    x = rng.normal(size=(2000, 6))
    for label, *pair in zip(design["labels"], sites, free, strict=True):
        private, bare = (np.mean((x @ site.model > 0) == (x @ truth > 0)) for site in pair)
        print(f"{label}: accuracy {private:.3f}, without noise {bare:.3f}")
    return sites


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("design", help="the file that dpjax design wrote")
    train(parser.parse_args().design)
