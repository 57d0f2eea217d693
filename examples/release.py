"""A release, killed on the way, resumed and published: python examples/release.py [FOLDER]

Eight sites hold scikit-learn's digits. FOLDER/private is for its owner alone; FOLDER/public is what
others may have: the model, which NumPy reads without JAX, and the statement of its guarantee.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import dpjax as dp


def records():
    """Training and test images and their labels; 16 is the public range of a pixel."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return train_test_split(images, labels, test_size=0.2, random_state=0)


def train(private, rounds):
    """Begin the release, or resume it: the call is the same."""
    import flax.linen as nn

    x, x_test, y, y_test = records()
    network = dp.mixing.metropolis_hastings(dp.graphs.ring(8))
    shards = dp.partition.iid(len(y), len(network), seed=0)
    task = dp.supervised(nn.Dense(10), "cross_entropy", (x, y), (x_test, y_test), shards)
    config = dp.Config(
        protect=dp.Protect("zero_out_record", clip_norm=1.0, attacker="outsider"),
        budget=dp.Budget(epsilon=2.0, delta=1e-5),
        noise=dp.noise.Whisper("run"),
        sampler=dp.samplers.Full(),
        optimizer=dp.optimizers.Sgd(0.5),
        rounds=rounds,
        release=True,
    )
    plan = dp.make_plan(config, network, counts=shards.counts)
    # The key stays outside the checkpoint, which may be copied.
    place = dp.Checkpoint(private / "checkpoint", seconds=0, key_file=private / "noise.key")
    return dp.run(plan, task, seeds=[0], checkpoint=place, progress=True)


def publish(result, public):
    """Write the average model and what is guaranteed, and nothing else of the result."""
    public.mkdir(exist_ok=True)
    layer = result.model()["params"]
    np.savez(public / "model.npz", kernel=layer["kernel"], bias=layer["bias"])
    statement = result.guarantees[0].statement()
    (public / "statement.txt").write_text(statement + "\n", encoding="utf-8")


def start(folder, rounds):
    """Train and publish in a process of its own."""
    command = [sys.executable, __file__, str(folder), "--rounds", str(rounds), "--child"]
    return subprocess.Popen(command)


def main(folder="release", rounds=1000):
    folder = Path(folder)
    child = start(folder, rounds)
    state = folder / "private" / "checkpoint" / "state.npz"
    saved = set()
    # The first state is stored before the first round, and each later one replaces it.
    while child.poll() is None and len(saved) < 5:
        time.sleep(0.01)
        if state.exists():
            saved.add(state.stat().st_mtime_ns)
    child.kill()
    print(f"process 1 ended with {child.wait()}; the same call again", flush=True)
    code = start(folder, rounds).wait()
    if code != 0:
        sys.exit(f"process 2 ended with {code}; its message is above")

    # From here on as somebody who has FOLDER/public: NumPy alone.
    print((folder / "public" / "statement.txt").read_text(encoding="utf-8"), end="")
    with np.load(folder / "public" / "model.npz") as model:
        kernel, bias = model["kernel"], model["bias"]
    _, x, _, y = records()
    accuracy = np.mean((x @ kernel + bias).argmax(axis=1) == y)
    # These records are private, so no guarantee covers this number: keep it.
    print(f"accuracy {accuracy:.2f}; JAX loaded: {'jax' in sys.modules}")
    print("to publish:", *sorted(path.name for path in (folder / "public").iterdir()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default="release")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        publish(train(options.folder / "private", options.rounds), options.folder / "public")
    else:
        main(options.folder, options.rounds)
