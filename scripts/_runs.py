"""Runs that need a GPU, in the order of what each decides: `QUEUE`, of which scripts/gpu takes.

Each is one command of at most nine minutes on one H100 or H200 that can be stopped and carried on.
Minutes assume 100,000 clipped gradients a second of the five-layer CNN and 40 s to compile a cell.
One model made 243,000 at batches of 1,024 in one pass and 100,000 at 256 (an H200). Plans and seeds
are mapped: three models with the backend's convolutions made 8,800 at batches of 1,000 (an H100),
so that layout is "patches" here. The first entries measure what they make, with the flags and
without: mend minutes by them.
"""

import shlex
from dataclasses import dataclass

__all__ = ["QUEUE", "TINY", "Run"]


@dataclass(frozen=True)
class Run:
    """A command of the queue.

    Attributes:
        entry: Number in the queue. Several commands may decide one thing.
        name: Of its records, its folder and its line in docs/records/gpu.md.
        decides: What it decides.
        minutes: How long it takes at most, on one H100.
        command: What stands behind ``python`` in the project's root.
        flags: Whether a benchmark is compiled as experiments are.
    """

    entry: int
    name: str
    decides: str
    minutes: float
    command: str
    flags: bool = False

    @property
    def words(self) -> list[str]:
        """The command's words."""
        return shlex.split(self.command)

    @property
    def script(self) -> str:
        """What is run: the name of an experiment or a benchmark, or pytest."""
        return self.words[0].rpartition("/")[2].removesuffix(".py").replace("-m", "pytest")


_RATES = (
    "benchmarks/bench_dpsgd.py --ways 'plain patches' dpjax 'dpjax patches' --batches 1000 "
    "--passes 1000 --mapped 1 3 --repeats 3"
)
_CIFAR = "experiments/cifar_doppler.py --preset paper_cifar"
_BANDED = f"{_CIFAR} --filter none --rivals 'banded: 8 bands' --seeds 0 1 2"
_ABLATIONS = "experiments/doppler_ablations.py --preset paper_ablations"
_TRACKING = "experiments/tracking_mnist.py"
_OPTIMIZERS = f"{_ABLATIONS} --study optimizers --optimizers"
# Larger networks keep more of a record between layers.
_MODELS = f"{_ABLATIONS} --study models --capacity 280 --models"

_MAPPED = "clipped gradients a second of mapped models, by layout: the minutes of all below"
_GPU_TIMES = "solvers, gossip, noise and accounting on a GPU, never timed"
_HEADLINE = "DOPPLER's headline on CIFAR-10 at 50 epochs; Fig. 3; part of Fig. 7"
_BATCHES = "banded noise against SGD with its batch tuned"
_FIGURE_4 = "Fig. 4: SGD, Adam and GaLore by budget"
_FIGURE_7 = "Fig. 7: other networks, once their gradients a second are measured; several sittings"

QUEUE = (
    Run(0, "dpsgd_mapped", _MAPPED, 2, _RATES),
    Run(0, "dpsgd_mapped_flags", _MAPPED, 1.5, _RATES, flags=True),
    Run(1, "cifar_doppler_paper_cifar", _HEADLINE, 8, _CIFAR),
    Run(2, "mechanism", _GPU_TIMES, 1.5, "benchmarks/bench_mechanism.py"),
    # At 512 rounds the peer's search takes minutes.
    Run(2, "temporal", _GPU_TIMES, 3, "benchmarks/bench_temporal.py --versus 128 256"),
    Run(2, "gossip", _GPU_TIMES, 1.5, "benchmarks/bench_gossip.py"),
    Run(2, "noise", _GPU_TIMES, 0.5, "benchmarks/bench_noise.py"),
    Run(2, "gpu_tests", "what a GPU computes otherwise", 2, "-m pytest -q -m gpu tests"),
    Run(
        3, "doppler_spectra_paper_spectra", "Fig. 2: spectra of gradients at T = 4,000", 9,
        "experiments/doppler_spectra.py --preset paper_spectra",
    ),
    Run(
        4, "cifar_doppler_paper_filters", "Fig. 8: the filters' order", 7,
        f"{_CIFAR} --filter momentum 'first v2' second --seeds 0 1 2",
    ),
    Run(5, "cifar_doppler_paper_banded_1000", _BATCHES, 6.5, _BANDED),
    Run(
        5, "cifar_doppler_paper_banded_2000", _BATCHES, 5.5,
        f"{_BANDED} --batch-size 2000 --capacity 2144",
    ),
    Run(
        5, "cifar_doppler_paper_banded_512", _BATCHES, 9,
        f"{_BANDED} --batch-size 512 --capacity 608",
    ),
    # Without banded noise, of which 9,768 rounds take a quarter of an hour to design.
    Run(
        5, "cifar_doppler_paper_sgd_256", _BATCHES, 4,
        f"{_CIFAR} --filter none --seeds 0 1 2 --batch-size 256 --capacity 320",
    ),
    Run(
        6, "tracking_mnist_gpu_border", "gradient tracking: the border of steps", 8,
        f"{_TRACKING} --preset gpu --parts border --gammas 0.001 0.01 --test-records 1000",
    ),
    Run(
        7, "tracking_mnist_long_networks", "gradient tracking: networks", 6.5,
        f"{_TRACKING} --preset long --parts networks --budgets 1 2 5 --sizes 50 100",
    ),
    Run(
        8, "doppler_ablations_paper_clipping", "Fig. 9: clipping", 9,
        f"{_ABLATIONS} --study clipping",
    ),
    Run(
        9, "cifar_doppler_paper_cifar100", "CIFAR-100", 4.5,
        "experiments/cifar_doppler.py --preset paper_cifar100",
    ),
    Run(
        10, "doppler_ablations_paper_steps", "Fig. 10: step sizes", 6.5,
        f"{_ABLATIONS} --study steps --moment-steps 3e-3 1e-3 3e-4",
    ),
    Run(
        10, "doppler_ablations_paper_schedules", "Fig. 11: schedules", 9,
        f"{_ABLATIONS} --study schedules --epochs 120",
    ),
    Run(
        11, "doppler_ablations_paper_sgd", _FIGURE_4, 9, f"{_OPTIMIZERS} sgd --epsilon 1 2",
    ),
    Run(
        11, "doppler_ablations_paper_adam", _FIGURE_4, 9, f"{_OPTIMIZERS} adam --epsilon 1 8",
    ),
    Run(
        11, "doppler_ablations_paper_galore", _FIGURE_4, 9, f"{_OPTIMIZERS} galore --epsilon 1 8",
    ),
    Run(
        12, "dpsgd_networks", "are other networks possible: clipped gradients a second", 5,
        "benchmarks/bench_dpsgd.py --models wrn16_4 resnet50 vit_small --ways 'plain conv' dpjax "
        "--batches 256 --passes 64 256 --repeats 3",
    ),
    Run(12, "doppler_ablations_paper_vit_small", _FIGURE_7, 9, f"{_MODELS} vit_small"),
    Run(12, "doppler_ablations_paper_resnet50", _FIGURE_7, 9, f"{_MODELS} resnet50"),
    Run(12, "doppler_ablations_paper_efficientnet", _FIGURE_7, 9, f"{_MODELS} efficientnet"),
    Run(
        13, "cifar_doppler_paper_filters_f1_f3", "more filters", 9,
        f"{_CIFAR} --filter f1 f2 f3 --seeds 0 1 2",
    ),
    Run(
        13, "cifar_doppler_paper_filters_f4_f6", "more filters", 9,
        f"{_CIFAR} --filter f4 f5 f6 --seeds 0 1 2",
    ),
)  # fmt: skip

TINY = {
    "cifar_doppler": "--epochs 0.25 --batch-size 24 --capacity 32 --moves 0 --seeds 0 1 "
    "--measurements 2 --layout patches",
    "doppler_ablations": "--epochs 0.25 --batch-size 24 --picture-epochs 0.05 --picture-batch 4 "
    "--capacity 8 --moves 0 --seeds 0 1 --measurements 2 --tested 8 --layout patches",
    "doppler_spectra": "--rounds 8 --batch-size 4 --capacity 8 --skip 2 --lags 4 --segment 4 "
    "--taps 1 2 4 --fixed-records 4 --horizon 4 --seeds 0",
    "tracking_mnist": "--agents 4 --sizes 4 5 --probability 0.6 --rounds 2 --border-rounds 2 "
    "--batch-size 2 --measurements 1 --test-records 20 --seeds 0 --layout patches",
    "bench_dpsgd": "--batches 1 --passes 1 --repeats 1",
    "bench_gossip": "--agents 8 --parameters 64 --rounds --batch --repeats 1",
    "bench_mechanism": "--versus 10 --alone 60 --repeats 1",
    "bench_noise": "--agents 32 --entries 200 --rounds 100 --seeds 1 --repeats 1",
    "bench_temporal": "--versus 128 --gram 100x100 --design 120x4 --repeats 1",
    "pytest": "--collect-only",
}
"""By script, options behind those of a command: a hundredth of the size, for `--rehearse`."""
