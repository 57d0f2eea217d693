"""What joins what: the classes of methods and noise say it, those of the package alone."""

import dataclasses
from dataclasses import dataclass

import pytest

from dpjax.algorithms import methods
from dpjax.algorithms.disk import DiSK
from dpjax.algorithms.dsgd import DSGD
from dpjax.algorithms.exchange import Trusted
from dpjax.algorithms.federated import Federated
from dpjax.algorithms.tracking import Tracking
from dpjax.algorithms.zip_dl import ZipDL
from dpjax.plans import noise, plan
from dpjax.plans.compatibility import ANSWERS, OWN_KEYS, SCHEDULED, TO_SERVER
from dpjax.plans.links import ZeroSum
from dpjax.plans.scheduled import ScheduledGaussian
from dpjax.plans.sums import SumShares
from dpjax.protocols import MethodTerms
from dpjax.topology import graphs, mixing
from tests.support import make_config

N = 4
COMPLETE = mixing.metropolis_hastings(graphs.complete(N))
METHODS = {
    "dsgd": DSGD(),
    "answer": DiSK(),
    "sum": Federated(),
    "models": Tracking(beta=1.0),
    "links": ZipDL(),
}
"""A method of every kind of payload that noise hides."""
JOINED = {payload: {payload} for payload in METHODS} | {"answer": {*ANSWERS}}
"""The kinds that noise of one kind joins: D-SGD's is an answer, too."""
NODE = {"attacker": "node", "gradients": "view"}
PRIVATE = [kind for name, kind in vars(methods).items() if name in methods.__all__]


def new(base, terms, module="dpjax.plans.new"):
    """A class of a module, of the package by default, that states terms of its own."""
    return dataclass(frozen=True)(type("New", (base,), {"__module__": module, "terms": terms}))


def new_noise(payload, module="dpjax.plans.new"):
    """Noise for one kind of payload, and what its attacker asks for."""
    if payload == "links":
        return new(ZeroSum, ZeroSum.terms, module)(), NODE
    if payload == "models":
        terms = dataclasses.replace(SCHEDULED, payloads=(payload,))
        return new(ScheduledGaussian, terms, module)(0.9), {}
    terms = dataclasses.replace(OWN_KEYS, payloads=(payload,))
    return new(noise.OneStep, terms, module)(), {}


def check_joined(payload, kind, method):
    """Join new noise of a kind of payload to a method of the same kind, or of another."""
    part, attack = new_noise(payload)
    changes = {"noise": part, "method": method, **attack}
    if kind in JOINED[payload]:
        assert make_config(**changes).noise == part
    else:
        with pytest.raises(ValueError, match="does not join"):
            make_config(**changes)


@pytest.mark.parametrize("payload", METHODS)
def test_new_noise_of_package_joins_methods_by_its_class_alone(payload):
    for kind, method in METHODS.items():
        check_joined(payload, kind, method)


def test_new_noise_of_single_messages_runs_at_server():
    with pytest.raises(ValueError, match="noise is OneStep, which method Federated does not join"):
        make_config(noise=noise.OneStep(), method=Federated())
    part = new(noise.OneStep, TO_SERVER)(fraction=0.9)
    config = make_config(noise=part, method=Federated(), rounds=4)
    made = plan.make(config, COMPLETE)
    same = plan.make(dataclasses.replace(config, method=DSGD(), noise=noise.OneStep(0.9)), COMPLETE)
    assert made.guarantee.mu == same.guarantee.mu and made.guarantee.custom == ()


@pytest.mark.parametrize("kind", METHODS)
def test_new_method_of_package_joins_noise_by_its_class_alone(kind):
    base = type(METHODS[kind])
    method = new(base, base.terms, "dpjax.algorithms.new")
    values = {field.name: getattr(METHODS[kind], field.name) for field in dataclasses.fields(base)}
    for payload in METHODS:
        check_joined(payload, kind, method(**values))


@pytest.mark.mutant
@pytest.mark.parametrize("module", ["mine", "dpjax.contrib.mine"])
def test_terms_of_class_from_outside_promise_nothing(module):
    # Noise that all agents can subtract, which says that none can.
    part = new(noise.Whisper, TO_SERVER, module)()
    with pytest.raises(ValueError, match="attacker 'node'.*a seed that they share"):
        make_config(noise=part, attacker="node")
    with pytest.raises(ValueError, match="noise is New, which method Federated does not join"):
        make_config(noise=part, method=Federated())
    # Methods whose payload no such noise hides, which say that it is a gradient.
    for base, values in ((Federated, ()), (Tracking, (1.0,)), (ZipDL, ())):
        method = new(base, DSGD.terms, module)(*values)
        with pytest.raises(ValueError, match="noise is OneStep, which method New does not join"):
            make_config(noise=noise.OneStep(), method=method)
    # And no class of a user's own loses what its base joins.
    narrow = new(Federated, MethodTerms(payload="bare"), module)(Trusted())
    config = make_config(
        noise=SumShares(), method=narrow, attacker="aggregator", relation="zero_out_record"
    )
    assert plan.make(config, COMPLETE).guarantee.custom == ("New",)


def test_methods_of_registry_state_terms_or_have_their_base_s():
    kinds = [kind for kind in PRIVATE if isinstance(kind, type)]
    assert kinds and all(isinstance(kind.terms, MethodTerms) for kind in kinds)
    payloads = {kind.terms.payload for kind in kinds}
    assert payloads == {*METHODS, "bare"}
    # Every kind is one that some design joins, but for that of methods without noise.
    joined = {payload for design in noise.DESIGNS.values() for payload in design.terms.payloads}
    assert joined == {*METHODS} and {*ANSWERS} < joined


@dataclass(frozen=True)
class Titled:
    """A design of a user's own."""

    label: object

    def calibrate(self, target):
        raise AssertionError("its label comes first")


@pytest.mark.parametrize("label", ["whisper", "Whisper", "non_private", "a(b)", "", None, 3])
def test_label_of_ones_own_is_no_other_designs(label):
    with pytest.raises(ValueError, match="label is .* for Titled, a design of your own; give a"):
        plan.make(make_config(noise=Titled(label)), COMPLETE)


@pytest.mark.parametrize("design", ["whisper", noise.Whisper(), 3])
def test_design_that_is_none_is_refused(design):
    with pytest.raises(ValueError, match="design is .*; give one that dp.design or Design.load"):
        plan.make(make_config(), COMPLETE, design=design)


def test_designs_that_sites_release_are_not_called_simulations():
    """Sites quote the reason, and of theirs none is one."""
    for design in noise.DESIGNS.values():
        if design.terms.released:
            assert "simulation" not in design.terms.why, design
