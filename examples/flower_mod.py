"""A client mod for Flower that makes a site's updates private, and says how private.

    pip install 'flwr>=1.22' 'dpjax[secure]'
    python examples/flower_mod.py            # what the mod below guarantees, before it runs
    python examples/flower_mod.py FOLDER     # what a site has spent so far

In each round the mod takes the difference between the model that training returns and the one that
the server sent, clips it (L2, over all layers together), adds Gaussian noise from the operating
system's entropy, and sends the server's model plus that. In your client_app.py:

    from flower_mod import NoisyUpdates

    noise = NoisyUpdates(folder="/var/lib/flower/noise", rounds=20, clip_norm=1.0,
                         noise_multiplier=2.4, delta=1e-5)

    @app.train(mods=[noise])
    def train(msg, context): ...

Put it first in the list, so that it is the last to change a reply. These numbers, 20 rounds of
noise 2.4 times the clip norm at delta 1e-5, have

    epsilon 9.17   if all data of a site are zeroed out
    epsilon 22.2   if they are replaced by any others

A plan that calls this "epsilon 10" counts a bit too much (a Renyi bound says 9.84) and leaves out
the relation, which changes far more. To choose the noise for an epsilon, take slightly more than
noise_multiplier = math.sqrt(rounds) / dpjax.accounting.gdp.mu(epsilon, delta) for data that are
zeroed out, and twice that for data that are replaced.

- Metrics and "num-examples" are data, too: the first are dropped, the second becomes 1, so that the
  server takes the plain mean. What other functions send (evaluate, query) is NOT covered: set
  fraction_evaluate=0, or evaluate on public data. On them this mod refuses to work.
- FOLDER/SITE has one file a round and is shared by all runs. It survives restarts; keep it out of
  backups that could be restored. SITE is the partition-id of the node's configuration (or 0), so
  never change it. When all rounds are counted, the mod refuses before it trains.
- The numbers stand in the client's code. Read the app that the server hands out before your node
  runs it, and take none of them from run_config or from a message.
- The unit is the site: all its records together. Flower clips no records, so for one record (a
  patient) you must state in record_bound how far it can move an update. One step of SGD from the
  server's model, with each record's gradient clipped to c, no batch norm and a fixed public batch
  size, has record_bound = step_size * c / batch_size. After several local steps no such bound
  follows, since later gradients depend on the record, too.
- The noise is local: the server sees every noisy update. Noise in shares of a secure sum
  (secaggplus_mod) needs less, but then protects the sum alone: docs/howto/server.md.
"""

import argparse
import logging
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

from dpjax.contrib.updates import SiteUpdates

WEIGHTS = ("num-examples", "num_examples")
PLAN = {"rounds": 20, "clip_norm": 1.0, "noise_multiplier": 2.4, "delta": 1e-5}


class NoisyUpdates:
    """Clips what training changed, adds noise, counts the round, and drops all else of the reply.

    Guarantee: that of `dpjax.contrib.updates.SiteUpdates`, for replies that pass this mod.

    Args:
        folder: On the site's own disk; each site has a folder in it.
        rounds: The most rounds, over all runs.
        clip_norm: Of the whole update.
        noise_multiplier: Standard deviation of the noise, over clip_norm.
        delta: Delta.
        record_bound: How far one record can move an update; None states nothing of records.
        entries: The most numbers of a model.
    """

    def __init__(
        self, folder, rounds, clip_norm, noise_multiplier, delta, record_bound=None, entries=10**8
    ):
        self.folder = Path(folder)
        self.updates = SiteUpdates(
            rounds, clip_norm, noise_multiplier, delta, record_bound=record_bound, entries=entries
        )

    def __call__(self, msg, ctxt, call_next):
        """Train, and let the noisy update pass; an error here stops the reply."""
        kind = msg.metadata.message_type
        if kind.partition(".")[0] != "train":
            raise ValueError(f"a {kind} reply has no update; give this mod to @app.train alone")
        folder = self.folder / f"site-{ctxt.node_config.get('partition-id', 0)}"
        self.updates.check_left(folder)
        # Copies, taken before training could change them.
        _, old = arrays_of(msg)
        reply = call_next(msg, ctxt)
        if reply.has_error():
            # Its text may hold anything.
            return Message(Error(code=reply.error.code), reply_to=msg)
        name, new = arrays_of(reply)
        noisy = self.updates.noisy(difference(new, old), folder)
        logging.getLogger("flwr").info(self.updates.statement(self.updates.spent(folder)))
        sent = {key: Array((old[key] + noisy[key]).astype(old[key].dtype)) for key in old}
        content = RecordDict({name: ArrayRecord(sent)})
        for label, record in reply.content.metric_records.items():
            weights = {key: 1 for key in record if key in WEIGHTS}
            content[label] = MetricRecord(weights)
        return Message(content, reply_to=msg)


def arrays_of(message):
    """The name of a message's only ArrayRecord, and its arrays."""
    records = message.content.array_records
    if len(records) != 1:
        raise ValueError(f"the message has {len(records)} ArrayRecords; send the model as one")
    ((name, record),) = records.items()
    return name, {key: array.numpy() for key, array in record.items()}


def difference(new, old):
    """What training changed, in float64."""
    if {key: array.shape for key, array in new.items()} != {
        key: array.shape for key, array in old.items()
    }:
        raise ValueError("training returned other arrays than it was given; return the same names")
    changed = {}
    for key, array in new.items():
        # Whole numbers stay whole, for the noise to refuse them.
        dtype = np.float64 if array.dtype.kind == "f" else None
        changed[key] = np.subtract(array, old[key], dtype=dtype)
    return changed


def main(folder=None):
    if folder is None:
        print(SiteUpdates(**PLAN).statement())
    else:
        updates = SiteUpdates.of_folder(folder)
        print(updates.statement(updates.spent(folder)))


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", nargs="?", help="a site's folder; none states the plan above")
    main(parser.parse_args().folder)
