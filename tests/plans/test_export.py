"""The file of a plan: read with NumPy alone, it holds what its guarantee needs; old ones load."""

import dataclasses

import numpy as np
import pytest

from dpjax.accounting import gdp
from dpjax.learning import samplers
from dpjax.mechanism import store
from dpjax.mechanism.design import Design
from dpjax.plans import calibration, noise, plan, protect
from dpjax.topology import graphs, mixing
from tests.support import diagonal, make_config

NAMES = ["Lyon", "Paris", "Brest", "Nice", "Metz", "Lille"]
PRIVATE = [name for name in noise.LABELS if name != "non_private"]
CYCLIC = {"relation": "replace_record", "participation": (4, 5)}


def read(path):
    """The entries of a file, without this package."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name][()] for name in file.files}


def mu_of(entries):
    """The exact loss of a loop that adds C^-1 (F Z), from the file alone, densely."""
    n = len(entries["labels"])
    rounds = int(entries["rounds"])
    times = 1 if entries["relation"] == "zero_out_record" else 2
    inverse = np.linalg.inv(entries.get("strategy", np.eye(rounds)))
    covariance = np.kron(inverse @ inverse.T, entries["factor"] @ entries["factor"].T)
    epochs, separation = entries.get("participation", (rounds, 1))
    worst = 0.0
    for start in range(rounds - (epochs - 1) * separation):
        taking = np.zeros(rounds)
        taking[start::separation] = times * entries["clip_norm"]
        for site in np.eye(n):
            shift = np.kron(taking, site)
            worst = max(worst, float(np.sqrt(shift @ np.linalg.solve(covariance, shift))))
    return worst


@pytest.mark.gate(5)
@pytest.mark.parametrize(
    ("name", "changes"), diagonal(PRIVATE, [{}, CYCLIC, {"relation": "zero_out_record"}])
)
def test_what_is_in_file_keeps_what_it_states(network, name, changes, tmp_path):
    training_plan = plan.make(make_config(design=name, **changes), network)
    entries = read(training_plan.save(tmp_path / "it", labels=NAMES))
    assert entries["labels"].tolist() == NAMES
    np.testing.assert_array_equal(entries["mixing"], network)
    for field in ("epsilon", "delta", "rounds", "clip_norm", "relation", "unit", "attacker"):
        assert entries[field] == getattr(training_plan.guarantee, field), field
    # Independently of the package's accounting but for the conversion; and tight.
    assert gdp.delta(mu_of(entries), entries["epsilon"]) <= entries["delta"] * (1 + 1e-9)
    broken = entries | {"factor": 0.99 * entries["factor"]}
    assert gdp.delta(mu_of(broken), entries["epsilon"]) > entries["delta"] * 1.01
    # A plan can be made of it again.
    assert ("strategy" in entries) == (training_plan.strategy is not None)
    design = Design.load(tmp_path / "it.npz")
    again = plan.make(training_plan.config, network, design=design, strategy=training_plan.strategy)
    assert again.fingerprint() == training_plan.fingerprint()


@pytest.mark.parametrize(
    ("changes", "groups", "text"),
    [
        ({"design": "independent"}, 6, "a secret of its own"),
        ({"design": "independent"}, 6, "Who has left knows its own."),
        ({"design": "mafalda"}, 6, "keep all"),
        ({"design": "whisper"}, 1, "NOT protected from each other"),
        ({"design": "whisper"}, 1, "Who has left knows that of its group."),
        (
            {"design": "independent", "attacker": "coalition", "nodes": (0,)},
            6,
            "Agent i is the site labels[i].",
        ),
        ({"subgroups": ((0, 3, 4), (1, 2, 5))}, 2, "NOT protected from each other"),
    ],
)
def test_who_shares_seed_is_said_and_is_all_that_is_shared(network, changes, groups, text):
    training_plan = plan.make(make_config(**changes), network)
    result = calibration.groups(training_plan.factor)
    assert len(set(result)) == groups
    if "subgroups" in changes:
        assert result[0] == result[3] == result[4] != result[1] == result[2] == result[5]
    assert text in training_plan.export().instructions()


def test_noise_of_other_groups_is_exactly_none(network, tmp_path):
    """Sites of one group cannot draw what another draws: their entries must not matter."""
    training_plan = plan.make(make_config(subgroups=((0, 3, 4), (1, 2, 5))), network)
    entries = read(training_plan.save(tmp_path / "it.npz"))
    apart = entries["seed_group"][:, None] != entries["seed_group"]
    assert apart.any() and not entries["factor"][apart].any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ("min(1, 0.5 / norm)", "nothing is divided", "t = 0, 1, ..., 19", "Stop then")),
        (
            CYCLIC,
            (
                "of every record",
                "min(1, c / norm), c = 0.5 * (1 - 2 * 4 / 2**24), and",
                "sums in float64",
                "divides u_i by the batch size 4, one",
                "r mod 5",
                "4 times",
            ),
        ),
        ({"design": "prefix_sum"}, ("strategy[t, s] V_s", "secret, until the last round")),
    ],
)
def test_instructions_are_of_plan(network, changes, words, tmp_path):
    training_plan = plan.make(make_config(**changes), network)
    text = str(read(training_plan.save(tmp_path / "it.npz"))["how_to_use"])
    statement = training_plan.guarantee.statement().partition(" NOT protected from whoever runs")[0]
    assert len(statement) > 100 and statement in text
    # The loop is the user's own: no process holds all agents.
    assert "runs this process" not in text and "Simulation" not in text
    for word in words:
        assert word in text, word


COUNTS = (10, 11, 12, 13, 14, 29)


@pytest.mark.parametrize(
    ("relation", "message", "unsaid"),
    [
        (
            "zero_out_record",
            "divides u_i by the batch size 29, the largest number of",
            "Batches are fixed",
        ),
        ("replace_agent", "nothing is divided", "divides u_i"),
    ],
)
def test_plan_of_full_batches_is_saved_and_says_what_is_divided_by(
    network, relation, message, unsaid, tmp_path
):
    config = make_config(relation=relation, sampler=samplers.Full())
    training_plan = plan.make(config, network, counts=COUNTS)
    entries = read(training_plan.save(tmp_path / "it.npz", labels=NAMES))
    text = " ".join(str(entries["how_to_use"]).split())
    assert message in text and unsaid not in text
    assert "The batch is all records that site i has, in every round." in text
    assert gdp.delta(mu_of(entries), entries["epsilon"]) <= entries["delta"] * (1 + 1e-9)
    design = Design.load(tmp_path / "it.npz")
    again = plan.make(training_plan.config, network, counts=COUNTS, design=design)
    assert again.fingerprint() == training_plan.fingerprint()


def test_file_says_where_messages_need_float64(network, tmp_path):
    """On the complete graph noise of thousands cancels, and float32 loses parts of a gradient."""
    complete = mixing.metropolis_hastings(graphs.complete(6))
    error = {}
    for matrix, messages in ((complete, "float64"), (network, "float32")):
        config = make_config(design="pairwise", epsilon=10.0, rounds=2000, clip_norm=1.0)
        training_plan = plan.make(config, matrix)
        entries = read(training_plan.save(tmp_path / f"{messages}.npz"))
        assert entries["messages"] == messages
        largest = np.linalg.norm(entries["factor"], axis=1).max()
        text = str(entries["how_to_use"])
        if messages == "float64":
            assert largest > 4000 and f"a deviation of {largest:,.4g}" in text
            assert np.spacing(np.float32(4 * largest)) > 1e-3
        assert ("Draw, add, send and average in float64" in text) == (messages == "float64")
        # What the average of all sites' messages loses where they are rounded to float32.
        normals = np.random.default_rng(0).normal(size=(6, 500))
        sent = entries["factor"] @ normals
        lost = (np.float32(sent).astype(np.float64) - sent).mean(axis=0)
        error[messages] = np.sqrt(np.mean(lost**2))
    assert error["float64"] > 30 * error["float32"]
    # Not the factor counts but the noise, from which a strategy's scale cancels.
    for scale in (1e-6, 1.0, 1e6):
        strategy = scale * (np.eye(20) - 0.5 * np.eye(20, k=-1))
        own = noise.Covariance(np.eye(6), "own", strategy=strategy)
        training_plan = plan.make(make_config(noise=own), network)
        assert training_plan.factor.max() > 1e6 or scale < 1e6
        assert training_plan.export().precision is None


@pytest.mark.slow
def test_plan_of_coin_flips_is_not_saved(network, tmp_path):
    config = make_config(relation="zero_out_record", sampler=samplers.Poisson(4, 8), rounds=3)
    training_plan = plan.make(config, network, counts=COUNTS)
    with pytest.raises(ValueError, match="secret batches .* a loop of your own would have to draw"):
        training_plan.save(tmp_path / "it.npz")


def test_plan_of_clients_is_not_saved(network, tmp_path):
    """A file cannot tell which records are a client's: another order would repeat clients."""
    turns = samplers.Clients(clients=4, examples=2, epochs=1)
    config = make_config(design="independent", relation="zero_out_client", sampler=turns, rounds=8)
    training_plan = plan.make(config, network)
    with pytest.raises(ValueError, match="Clients.*or clients a loop of your own would have to"):
        training_plan.save(tmp_path / "it.npz")
    assert not list(tmp_path.iterdir())


def test_files_of_bare_designs_still_load(network, tmp_path):
    """As they were written before files held terms: fields of the design and nothing else."""
    training_plan = plan.make(make_config(), network)
    content = {
        f.name: getattr(training_plan.design, f.name)
        for f in dataclasses.fields(training_plan.design)
    }
    arrays = {name: content.pop(name) for name in ("covariance", "multipliers", "precision_bound")}
    path = store.write_arrays(tmp_path / "old.npz", "design", arrays, content)
    assert set(read(path)) == {*arrays, "header", "digest"}
    again = plan.make(training_plan.config, network, design=Design.load(path))
    assert again.fingerprint() == training_plan.fingerprint()


def test_changed_term_is_noticed(network, tmp_path):
    training_plan = plan.make(make_config(), network)
    entries = read(training_plan.save(tmp_path / "it.npz", labels=NAMES))
    for change in ({"epsilon": 4.0}, {"labels": np.array(NAMES[::-1])}, {"rounds": 40}):
        np.savez(tmp_path / "other.npz", **(entries | change))
        with pytest.raises(ValueError, match="its content was changed"):
            Design.load(tmp_path / "other.npz")


def test_file_states_only_total_whose_last_phase_it_is(network, tmp_path):
    results, other = (plan.make(make_config(epsilon=e), network) for e in (2.0, 2.5))
    total = protect.Budget(4.0, 1e-5)
    invalid = (
        results.guarantee,
        other.guarantee.within(total),
        results.guarantee.within(total).followed_by(other.guarantee, planned=False),
    )
    for stated in invalid:
        with pytest.raises(ValueError, match="whose last phase is not this plan's; give plan.guar"):
            results.save(tmp_path / "it.npz", guarantee=stated)
    assert not list(tmp_path.iterdir())
    training_plan = plan.make(make_config(epsilon=(1.0, 2.0, 2.0, 2.0, 2.0, 1.5)), network)
    text = training_plan.export(training_plan.guarantee.within(total)).instructions()
    assert "Its own rounds cost epsilon = 1 to 2 by agent at delta" in text
    entries = read(other.save(tmp_path / "it.npz", guarantee=invalid[2]))
    assert entries["epsilon"] == 4.0 and entries["rounds"] == other.config.rounds
    assert gdp.epsilon(mu_of(entries), entries["delta"]) <= 2.5 * (1 + 1e-9)
    Design.load(tmp_path / "it.npz")


@pytest.mark.parametrize(
    ("changes", "labels", "message"),
    [
        ({"design": "non_private"}, None, "plan is non_private"),
        ({"release": True}, None, "plan is a release"),
        ({}, NAMES[:5], "for 6 sites"),
        ({}, [*NAMES[:5], "Lyon"], "give 6 different names"),
        # One name, whose letter is one of Unicode's or two.
        ({}, [*NAMES[:4], "Z\u00fcrich", "Zu\u0308rich"], "give 6 different names"),
    ],
)
def test_what_cannot_be_saved_is_refused(network, changes, labels, message, tmp_path):
    training_plan = plan.make(make_config(**changes), network)
    with pytest.raises(ValueError, match=message):
        training_plan.save(tmp_path / "it.npz", labels)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="entries has 'covariance'"):
        plan.make(make_config(), network).design.save(tmp_path / "x", entries={"covariance": 1})
