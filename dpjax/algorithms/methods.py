"""The methods by name: ``dpjax.methods``."""

from dpjax.algorithms.average import Average
from dpjax.algorithms.disk import DiSK
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.federated import Federated, dome
from dpjax.algorithms.pairs import PPDOAGT, DiffTVAB, GradientTracking
from dpjax.algorithms.pmlf import PMLF
from dpjax.algorithms.random_weights import CorrelatedRandomness, Encrypted
from dpjax.algorithms.tracking import DGD, DPOP, Tracking
from dpjax.algorithms.zip_dl import ZipDL

__all__ = [
    "DGD",
    "DPOP",
    "DSGD",
    "PMLF",
    "PPDOAGT",
    "Average",
    "CorrelatedRandomness",
    "DiSK",
    "DiffTVAB",
    "Encrypted",
    "Federated",
    "GradientTracking",
    "Tracking",
    "ZipDL",
    "dome",
]
