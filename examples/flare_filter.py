"""A result filter for NVIDIA FLARE that makes a site's updates private, and says how private.

    pip install nvflare 'dpjax[secure]'
    python examples/flare_filter.py            # what the job below guarantees, before it runs
    python examples/flare_filter.py FOLDER     # what a site has spent so far

Each round the filter clips the whole update (L2, over all layers together) and adds Gaussian noise
from the operating system's entropy. In a job, with this file beside it:

    from flare_filter import NoisyUpdates

    recipe = FedAvgRecipe(..., params_transfer_type=TransferType.DIFF)
    noise = NoisyUpdates(folder="/var/lib/flare/noise", rounds=20, clip_norm=1.0,
                         noise_multiplier=2.4, delta=1e-5)
    recipe.add_client_output_filter(noise, tasks=["train"])

These numbers, 20 rounds of noise 2.4 times the clip norm at delta 1e-5, have

    epsilon 9.17   if all data of a site are zeroed out
    epsilon 22.2   if they are replaced by any others

A plan that calls this "epsilon 10" counts a bit too much (a Renyi bound says 9.84) and leaves out
the relation, which changes far more. To choose the noise for an epsilon, take slightly more than
noise_multiplier = math.sqrt(rounds) / dpjax.accounting.gdp.mu(epsilon, delta) for data that are
zeroed out, and twice that for data that are replaced.

- Training must send differences (TransferType.DIFF) in NumPy arrays of floats
  (ExchangeFormat.NUMPY, the default). Whole weights, metrics alone and texts of errors are blocked,
  and so are the results of other tasks. Name each task that trains: for filters, tasks=["*"] is no
  wildcard in FLARE (2.9), and would apply to none.
- Metrics and the number of steps are data, too: the first are dropped, the second becomes 1, so
  that the server takes the plain mean. What training streams (SummaryWriter) or logs goes past all
  filters and is NOT covered: leave it out.
- FOLDER/SITE has one file a round and is shared by all jobs. It survives restarts; keep it out of
  backups that could be restored. When all rounds are counted, the filter blocks.
- A job may come without this filter, or with other numbers. A site that does not want to rely on
  jobs puts the filter into every scope of its own policy (task_result_filters in
  local/privacy.json), with this file on its PYTHONPATH by a name that no job uses.
- The unit is the site: all its records together. FLARE clips no records, so for one record (a
  patient) you must state in record_bound how far it can move an update. One step of SGD from the
  server's model, with each record's gradient clipped to c, no batch norm and a fixed public batch
  size, has record_bound = step_size * c / batch_size. After several local steps no such bound
  follows, since later gradients depend on the record, too.
- The noise is local: the server sees every noisy update. Noise in shares of a secure sum needs
  less, but then protects the sum alone: docs/howto/server.md.
"""

import argparse
from pathlib import Path

from nvflare.apis.dxo import DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.shareable import make_reply
from nvflare.app_common.app_constant import AppConstants

from dpjax.contrib.updates import SiteUpdates

PASSED = "_noisy_updates_passed"
HEADERS = (AppConstants.START_ROUND, AppConstants.CURRENT_ROUND, AppConstants.NUM_ROUNDS)
PLAN = {"rounds": 20, "clip_norm": 1.0, "noise_multiplier": 2.4, "delta": 1e-5}


class NoisyUpdates(DXOFilter):
    """Clips a site's WEIGHT_DIFF, adds noise, counts the round, and blocks all other results.

    Guarantee: that of `dpjax.contrib.updates.SiteUpdates`, for what passes this filter.

    Args:
        folder: On the site's own disk; each site has a folder in it.
        rounds: The most rounds, over all jobs.
        clip_norm: Of the whole update.
        noise_multiplier: Standard deviation of the noise, over clip_norm.
        delta: Delta.
        record_bound: How far one record can move an update; None states nothing of records.
        entries: The most numbers of a model.
    """

    def __init__(
        self, folder, rounds, clip_norm, noise_multiplier, delta, record_bound=None, entries=10**8
    ):
        super().__init__([DataKind.WEIGHT_DIFF], None)
        # FLARE writes these into the job's configuration, by the names of the arguments.
        self.folder = folder
        self.rounds = rounds
        self.clip_norm = clip_norm
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self.record_bound = record_bound
        self.entries = entries
        self.updates = SiteUpdates(
            rounds, clip_norm, noise_multiplier, delta, record_bound=record_bound, entries=entries
        )

    def handle_event(self, event_type, fl_ctx):
        """Empty a result that did not come through `process`, such as one of another task."""
        if event_type == EventType.BEFORE_TASK_RESULT_FILTER:
            fl_ctx.set_prop(PASSED, False, private=True, sticky=False)
        if event_type == EventType.AFTER_TASK_RESULT_FILTER and not fl_ctx.get_prop(PASSED):
            result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            code = result.get_return_code()
            result.clear()
            blocked = ReturnCode.TASK_RESULT_FILTER_ERROR if code == ReturnCode.OK else code
            result.set_return_code(blocked)
            self.log_error(fl_ctx, "a result did not pass the noise and is not sent; is its task "
                                   "among the tasks of this filter?")  # fmt: skip

    def process(self, shareable, fl_ctx):
        """Let the noisy update pass, and nothing else; an error here stops the result."""
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            return make_reply(code)
        try:
            dxo = from_shareable(shareable)
        except ValueError:
            raise ValueError(
                "the result is no DXO; only a WEIGHT_DIFF passes this filter"
            ) from None
        if dxo.data_kind != DataKind.WEIGHT_DIFF or not dxo.data:
            raise ValueError(
                f"the result is of kind {dxo.data_kind}, and only WEIGHT_DIFF passes; send "
                "differences: params_transfer_type=TransferType.DIFF"
            )
        # A fresh one: headers and other entries may hold anything.
        reply = self._apply_filter(dxo, shareable, fl_ctx).to_shareable()
        for name in HEADERS:
            value = shareable.get_header(name)
            if value is not None:
                reply.set_header(name, value)
        fl_ctx.set_prop(PASSED, True, private=True, sticky=False)
        return reply

    def process_dxo(self, dxo, shareable, fl_ctx):
        """Make an update noisy."""
        if dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM):
            raise ValueError("the update is encoded already; put this filter before the other one")
        folder = Path(self.folder) / fl_ctx.get_identity_name()
        dxo.data = self.updates.noisy(dxo.data, folder)
        steps = MetaKey.NUM_STEPS_CURRENT_ROUND
        dxo.meta = {steps: 1} if steps in dxo.meta else {}
        self.log_info(fl_ctx, self.updates.statement(self.updates.spent(folder)))
        return dxo


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
