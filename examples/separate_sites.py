"""Three sites that train over TCP, a process each: python examples/separate_sites.py [FOLDER]

It writes a design, secrets, a password and addresses into FOLDER, and starts the sites there. On a
machine of its own a site needs design.npz, sites.json with true addresses, and by a safe channel
password and NAME.secret; then: python separate_sites.py FOLDER NAME. It imports nothing of dpjax.

This is no deployment. Whoever has the password may join as any site. Messages are neither encrypted
nor signed. A site that stops ends the run for all, and nothing is stored to restart from. Starting
again spends epsilon again.
"""

import argparse
import hashlib
import json
import math
import secrets
import socket
import subprocess
import sys
import time
from multiprocessing import AuthenticationError, connection
from pathlib import Path

import numpy as np

SITES = ("Lyon", "Paris", "Brest")
BATCH = 500  # Records of a site, all of which take part in every round.


def normals(secret, t, shape):
    """Standard normals of round t, the same for all who hold the secret: 128 bits each."""
    bits = hashlib.shake_256(secret + t.to_bytes(8, "big")).digest(16 * math.prod(shape))
    u, v = ((np.frombuffer(bits, "<u8").reshape(2, *shape) >> 11) + 0.5) / 2**53
    return np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)


def connected(address, password):
    """A connection to a site that may not listen yet."""
    for _ in range(600):
        try:
            return connection.Client(address, authkey=password)
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise TimeoutError(f"nobody listens at {address}")


def links_of(i, neighbours, addresses, password):
    """A connection to each neighbour: a site joins those before it, and listens for the others."""
    links = {}
    with connection.Listener(addresses[i], backlog=len(addresses), authkey=password) as listener:
        for j in neighbours:
            if j < i:
                links[j] = connected(addresses[j], password)
                links[j].send_bytes(bytes([i]))
        while len(links) < len(neighbours):
            link = listener.accept()
            links[link.recv_bytes()[0]] = link
    # In one order everywhere, so that no two sites wait for each other.
    return sorted(links.items())


def site(folder, name):
    """Train as one site on records that are made up here: least squares in six coordinates."""
    with np.load(folder / "design.npz") as file:
        design = dict(file)
    labels = design["labels"].tolist()
    fresh = not {"strategy", "participation"} & design.keys()
    if design["unit"] != "record" or not fresh or design["mixing"].ndim != 2:
        sys.exit("design.npz is not for this loop: take records, fresh noise and one network")
    if name not in labels:
        sys.exit(f"{name} is none of {', '.join(labels)}")
    i = labels.index(name)
    weights = design["mixing"][i]
    neighbours = [j for j in range(len(weights)) if j != i and weights[j]]
    places = json.loads((folder / "sites.json").read_text(encoding="utf-8"))
    addresses = [tuple(places[label]) for label in labels]
    secret = (folder / f"{name}.secret").read_bytes()
    links = links_of(i, neighbours, addresses, (folder / "password").read_bytes())
    (folder / f"{name}.secret").unlink()  # It serves one run: nobody starts again with it.
    # Sites of a group draw the same numbers, in the order of their names.
    members = np.flatnonzero(design["seed_group"] == design["seed_group"][i])
    truth = np.arange(6) / 6
    rng = np.random.default_rng(i)
    x = rng.normal(size=(BATCH, 6))
    y = x @ truth + 0.1 * rng.normal(size=BATCH)
    clip_norm = design["clip_norm"] * (1 - 2 * BATCH / 2**24)  # less what rounding may add
    model = np.zeros(6)  # public, and the same at all sites
    for t in range(int(design["rounds"])):
        gradients = (x @ model - y)[:, None] * x
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        total = (gradients * np.minimum(1, clip_norm / np.maximum(norms, 1e-300))).sum(axis=0)
        noise = design["factor"][i, members] @ normals(secret, t, (len(members), 6))
        message = model - 0.1 * (total + noise) / BATCH
        model = weights[i] * message
        for j, link in links:
            if i < j:
                link.send_bytes(message.tobytes())
            # As bytes: recv() would run what a pickle says.
            model += weights[j] * np.frombuffer(link.recv_bytes())
            if i > j:
                link.send_bytes(message.tobytes())
    distance = np.linalg.norm(model - truth)
    # In one piece: all sites write to one terminal.
    sys.stdout.write(f"{name}: distance {distance:.2f} from the true model\n")


def prepare(folder, rounds):
    """What the sites need; on machines of their own they agree on it beforehand."""
    import dpjax as dp

    network = dp.mixing.metropolis_hastings(dp.graphs.complete(len(SITES)))
    terms = {"epsilon": 4.0, "delta": 1e-5, "rounds": rounds, "clip_norm": 1.0}
    plan = dp.design(network, relation="zero_out_record", batch_size=BATCH, **terms)
    path = plan.save(folder / "design.npz", labels=SITES)
    print(f"written: {path}, whose how_to_use says what it guarantees", flush=True)
    places = {}
    for name in SITES:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            places[name] = ("localhost", free.getsockname()[1])
    (folder / "sites.json").write_text(json.dumps(places), encoding="utf-8")
    # A group shares one secret; with independent noise every site is a group of its own.
    groups = np.load(path)["seed_group"].tolist()
    secret_of = {group: secrets.token_bytes(16) for group in groups}
    hidden = {"password": secrets.token_bytes(16)}
    for name, group in zip(SITES, groups, strict=True):
        hidden[f"{name}.secret"] = secret_of[group]
    for name, content in hidden.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).touch(mode=0o600, exist_ok=False)
        (folder / name).write_bytes(content)


def main(folder, rounds=100):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "design.npz").unlink(missing_ok=True)
    prepare(folder, rounds)
    running = [subprocess.Popen([sys.executable, __file__, folder, name]) for name in SITES]
    try:
        # The first site that fails ends all: others would wait for it.
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return codes


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, nargs="?", default="results/separate_sites")
    parser.add_argument("name", nargs="?", help="start this site alone")
    options = parser.parse_args()
    try:
        if options.name:
            site(options.folder, options.name)
        else:
            sys.exit(any(main(options.folder)))
    except (OSError, EOFError, AuthenticationError) as error:
        sys.exit(f"{options.name or 'the sites'} stopped: {type(error).__name__} {error}")
