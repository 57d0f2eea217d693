"""Sites that add up among themselves: models, kills and absences."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dpjax as dp
from benchmarks._local_sites import LocalChannel, Network
from dpjax.algorithms.exchange import Trusted
from dpjax.sites import project, wire
from dpjax.sites.compute import SumRounds
from dpjax.sites.identity import Identity, Roster
from dpjax.sites.noise import SiteNoise
from dpjax.sites.site import Waits
from dpjax.sites.store import Audit
from dpjax.sites.sum_site import SumSite
from tests.sites import sum_world
from tests.sites.test_compute import FEATURES, problem_of
from tests.sites.test_project import NAMES, SCHEMA, SETTINGS, roster

SITES = 6
ROUNDS = 5


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    return sum_world.identities(tmp_path_factory.mktemp("identities"), SITES)


def plan_of_sums(rounds: int = ROUNDS, **changes: object) -> dp.Plan:
    protect = dp.Protect("zero_out_record", clip_norm=1.0, attacker="aggregator")
    options: dict[str, Any] = {
        "method": dp.methods.Federated(Trusted(dropouts=1)),
        "protect": protect,
        "sampler": dp.samplers.Random(8),
        "optimizer": dp.optimizers.Sgd(0.3),
        "noise": dp.noise.Discrete(size=FEATURES + 1, dropouts=1, colluders=1),
        "budget": dp.Budget(8.0, delta=1e-3, accountant="zcdp"),
        "rounds": rounds,
    }
    mixing = dp.mixing.metropolis_hastings(dp.graphs.complete(SITES))
    return dp.make_plan(dp.Config(**(options | changes)), mixing)


class Agreed:
    """A project, without its file."""

    seed = 3
    spoiled = 3
    phase = 0
    totals: dict[str, Any] = {}
    average_rounds = 0

    def __init__(self, plan: dp.Plan, identities: Mapping[str, Identity]) -> None:
        self.plan = plan
        self.names = tuple(identities)
        self.roster = Roster({name: identity.public_key for name, identity in identities.items()})
        self.digest = plan.fingerprint()

    def described(self) -> dict[str, Any]:
        return {}

    def terms(self) -> dict[str, str]:
        return {"plan": self.digest, "roster": self.roster.digest}


class Runner:
    """Sites in threads, each with a folder that outlasts it."""

    def __init__(self, plan: dp.Plan, identities: dict[str, Identity], folder: Path) -> None:
        self.agreed = Agreed(plan, identities)
        self.identities = identities
        self.folder = folder
        self.network = Network()
        self.results: dict[str, object] = {}
        self.threads: dict[str, threading.Thread] = {}
        for number, name in enumerate(identities):
            place = folder / name
            place.mkdir(parents=True, mode=0o700)
            (place / "nonce").write_bytes(bytes([number + 1] * 32))
            (place / "secret").write_bytes(bytes([number + 101] * 32))

    def site(self, name: str) -> SumSite:
        names = self.agreed.names
        channel = LocalChannel(self.network, name, set(names) - {name})
        return SumSite(
            self.agreed,
            problem_of(names.index(name)),
            self.identities[name],
            channel,
            self.folder / name,
            waits=Waits(late=5.0, linger=5.0, enrol=10.0, stage=10.0),
        )

    def start(self, name: str, rounds: int | None = None) -> None:
        """One life of a site, which ends after so many rounds."""

        def live() -> None:
            site = self.site(name)
            try:
                for progress in site.rounds():
                    if progress.round == rounds:
                        return
                state = site._state
                self.results[name] = jax.device_get(site.compute.released(state))
            except BaseException as error:
                self.results[name] = error
            finally:
                site.close()

        self.threads[name] = threading.Thread(target=live, daemon=True)
        self.threads[name].start()

    def finished(self, *names: str) -> list[np.ndarray]:
        for name in names:
            self.threads[name].join(120)
            assert not self.threads[name].is_alive(), f"{name} hangs"
        models = []
        for name in names:
            result = self.results[name]
            if isinstance(result, BaseException):
                raise AssertionError(name) from result
            models.append(np.concatenate([leaf[0].ravel() for leaf in jax.tree.leaves(result)]))
        return models

    def outcomes(self, name: str) -> list[wire.Opened]:
        return [
            wire.decoded((self.folder / name / "sums" / str(round)).read_bytes())
            for round in range(ROUNDS)
        ]


def in_one_process(runner: Runner, survivors: list[tuple[int, ...]]) -> tuple[list, np.ndarray]:
    """The sums and the model of a run whose vectors are added up by hand."""
    agreed = runner.agreed
    run = wire.decoded((runner.folder / agreed.names[0] / "run").read_bytes())
    name = wire.run_of({entry.name: entry for entry in run.presences}, agreed.digest)
    sites = []
    for number, holder in enumerate(agreed.names):
        rounds = SumRounds(agreed.plan, problem_of(number), number, seed=agreed.seed)
        rounds.begin([SiteNoise(bytes([number + 101] * 32), run=name, holder=holder)])
        sites.append(rounds)
    states = [site.init() for site in sites]
    totals = []
    for present in survivors:
        sent = [site.outgoing(state) for site, state in zip(sites, states, strict=True)]
        total = sum(sites[i].vector(states[i], sent[i]) for i in present)
        total = total % 2 ** sites[0].code.bits
        totals.append(total)
        for i, site in enumerate(sites):
            states[i] = site.incoming(states[i], sent[i], total, len(present))
    released = sites[0].released(states[0])
    return totals, np.concatenate([leaf[0].ravel() for leaf in jax.tree.leaves(released)])


def check_sums(runner: Runner, models: list[np.ndarray], name: str) -> None:
    """Opened sums are, to the bit, those of one process with the same missing clients."""
    outcomes = runner.outcomes(name)
    totals, model = in_one_process(runner, [outcome.survivors for outcome in outcomes])
    bits = runner.agreed.plan.noise.code.bits
    for outcome, total in zip(outcomes, totals, strict=True):
        opened = sum_world.primitives.unpacked_vector(outcome.total, len(total), bits)
        np.testing.assert_array_equal(opened, total)
    for trained in models:
        np.testing.assert_allclose(trained, model, atol=1e-6)


def test_sites_add_up_and_train(tmp_path: Path, identities: dict[str, Identity]) -> None:
    runner = Runner(plan_of_sums(), identities, tmp_path)
    for name in identities:
        runner.start(name)
    models = runner.finished(*identities)
    assert len({model.tobytes() for model in models}) == 1
    assert abs(models[0]).max() > 0.01
    check_sums(runner, models, "site-00")
    for outcome in runner.outcomes("site-03"):
        assert outcome.survivors == tuple(range(SITES))
    for name in identities:
        assert Audit.check(tmp_path / name / "audit.jsonl") == 1 + 2 * ROUNDS
        assert not (tmp_path / name / "secret").exists()


def test_a_site_that_is_away_comes_back(tmp_path: Path, identities: dict[str, Identity]) -> None:
    runner = Runner(plan_of_sums(), identities, tmp_path)
    for name in identities:
        runner.start(name, rounds=1 if name == "site-02" else None)
    others = [name for name in identities if name != "site-02"]
    runner.threads["site-02"].join(60)
    for name in others:
        while not (tmp_path / name / "sums" / "2").exists():
            runner.threads[name].join(0.05)
    runner.start("site-02")
    models = runner.finished(*identities)
    assert len({model.tobytes() for model in models}) == 1
    check_sums(runner, models, "site-02")
    assert any(2 not in outcome.survivors for outcome in runner.outcomes("site-00"))


@pytest.mark.mutant
def test_who_takes_no_answer_fills_no_memory(
    tmp_path: Path, identities: dict[str, Identity]
) -> None:
    """A sum is asked for many times by a session that has no room."""
    runner = Runner(plan_of_sums(), identities, tmp_path)
    site = runner.site("site-00")
    conversation = site._conversation
    peer = conversation.neighbours["site-01"]
    peer.live = True
    for _ in range(50):
        conversation._say("site-01", wire.At(1, 0))
        conversation._say("site-01", wire.At(2, 0))
    assert [wire.decoded(data) for data in peer.backlog] == [wire.At(1, 0), wire.At(2, 0)]
    site.close()


@pytest.mark.mutant
def test_hellos_show_keys(tmp_path: Path, identities: dict[str, Identity]) -> None:
    """A site leaves where another one has keys of it that its journal lacks."""
    runner = Runner(plan_of_sums(), identities, tmp_path)
    for name in identities:
        runner.start(name, rounds=1)
    for name in identities:
        runner.threads[name].join(60)
    first = runner.site("site-00")
    second = runner.site("site-01")
    hello = first._conversation.greeting("site-01")
    assert wire.decoded(hello).keys
    assert second._conversation.check("site-00", hello) is None
    second.close()
    (tmp_path / "site-01" / "journal").write_bytes(b"masked 0 0 -\n")
    second = runner.site("site-01")
    reason = second._conversation.check("site-00", hello)
    assert "restored from a backup" in str(reason)
    assert "restored from a backup" in str(second._conversation.doubt)
    first.close()
    second.close()


def test_the_guarantee_is_of_sums(tmp_path: Path, identities: dict[str, Identity]) -> None:
    runner = Runner(plan_of_sums(), identities, tmp_path)
    site = runner.site("site-00")
    assert site.guarantee.kind == "sites"
    assert "the one that adds up among them" in site.guarantee.statement()
    site.close()
    with pytest.raises(ValueError, match="colluders=1 at least"):
        noise = dp.noise.Discrete(size=FEATURES + 1, dropouts=1)
        Runner(plan_of_sums(noise=noise), identities, tmp_path / "none").site("site-00")


def test_a_plan_file_of_sums(tmp_path: Path) -> None:
    sums = {
        "noise": [{"name": "Discrete", "colluders": 1}],
        "protect": {"relation": "zero_out_record", "clip_norm": 1.0, "attacker": "aggregator"},
        "budget": {"epsilon": 3.0, "delta": 1e-5, "accountant": "zcdp"},
        "average_rounds": 0,
    }
    settings = {name: value for name, value in SETTINGS.items() if name != "network"} | sums
    study = project.write(settings, roster(*NAMES), SCHEMA, tmp_path / "plan.json")
    loaded = project.Project.load(tmp_path / "plan.json")
    assert loaded.digest == study.digest
    # All else follows from the noise: every site has links with all others, and a model's numbers.
    assert loaded.plan.noise.code.size == sum(leaf.size for leaf in jax.tree.leaves(study.shapes))
    assert loaded.plan.senders == ((1, 2), (0, 2), (0, 1))
    assert loaded.plan.guarantee.epsilon <= 3.0
    page = " ".join(loaded.document().split())
    assert "one vector under masks" in page and f"{loaded.plan.noise.code.padded} numbers" in page
    assert "the one that adds up among them" in page
    for changes, message in (
        ({"noise": [{"name": "Discrete"}]}, "colluders"),
        ({"noise": [{"name": "Discrete", "colluders": 1, "dropouts": 1}]}, "give fewer of them"),
        ({"network": SETTINGS["network"]}, "network"),
        ({"method": {"name": "DSGD"}}, "Federated"),
    ):
        with pytest.raises(ValueError, match=message):
            project.write(settings | changes, roster(*NAMES), SCHEMA, tmp_path / "other.json")
