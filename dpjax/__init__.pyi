"""The names of `import dpjax as dp`: `dpjax.__getattr__` and type checkers read them here.

A name is imported `as` itself, or assigned: checkers take other imports for a stub's own.
"""

from dpjax._version import __version__ as __version__
from dpjax.accounting.guarantee import Guarantee as Guarantee
from dpjax.algorithms import methods as methods
from dpjax.commands.account import account as account
from dpjax.commands.design import design as design
from dpjax.commands.sweep import Sweep as Sweep
from dpjax.commands.sweep import sweep as sweep
from dpjax.data import load as _load
from dpjax.data import partition as partition
from dpjax.engine.estimate import Estimate as Estimate
from dpjax.engine.estimate import estimate as estimate
from dpjax.engine.round import rounds as rounds
from dpjax.engine.run import Checkpoint as Checkpoint
from dpjax.engine.run import Continuation as Continuation
from dpjax.engine.run import Result as Result
from dpjax.engine.run import run as run
from dpjax.learning import samplers as samplers
from dpjax.learning.problem import Problem as Problem
from dpjax.learning.quadratics import quadratics as quadratics
from dpjax.learning.supervised import supervised as supervised
from dpjax.plans import noise as noise
from dpjax.plans import optimizers as optimizers
from dpjax.plans.plan import Config as Config
from dpjax.plans.plan import Plan as Plan
from dpjax.plans.plan import make as _make
from dpjax.plans.protect import Budget as Budget
from dpjax.plans.protect import Protect as Protect
from dpjax.sites.start import site as site
from dpjax.topology import graphs as graphs
from dpjax.topology import mixing as mixing

datasets = _load
make_plan = _make
