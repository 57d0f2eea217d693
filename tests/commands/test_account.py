"""`dpjax account`, run in this process, and `dpjax.account`."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg

from dpjax import cli
from dpjax.accounting import gdp
from dpjax.accounting.parties import ANOTHER
from dpjax.accounting.rounding import up
from dpjax.commands import account as account_
from dpjax.commands.account import account
from dpjax.mechanism import temporal
from dpjax.mechanism.participation import Participation
from dpjax.results import records
from dpjax.topology import graphs, mixing

Capture = pytest.CaptureFixture[str]
ACCOUNT = ["account", "--graph", "path:5", "--algorithm", "dsgd", "--rounds", "4", "--sigma", "2",
           "--relation", "replace_record"]  # fmt: skip
PNDP = [*ACCOUNT, "--trust", "pndp", "--attackers", "0"]
BUDGET = [*(word for word in ACCOUNT if word not in ("--sigma", "2")), "--epsilon", "3"]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Work in a folder of the test's."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(arguments: list[str], capsys: Capture, match: str) -> None:
    """Expect exit status 2, one line of error, no traceback and nothing written."""
    capsys.readouterr()
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert re.match(r"dpjax \w+: error: ", error) and error.count("\n") == 1
    assert re.search(match, error), error
    assert not list(Path().glob("dpjax-*"))


def losses(
    matrix: np.ndarray,
    rounds: int,
    attackers: tuple[int, ...],
    patterns: list[list[int]],
    inverse: np.ndarray | None = None,
) -> np.ndarray:
    """Mu of every agent at noise 1, zero-out, by pseudo-inverse of simulated messages."""
    n = len(matrix)
    senders = [j for j in range(n) if any(matrix[a, j] != 0 for a in attackers)]

    def received(inflow: np.ndarray) -> np.ndarray:
        x = np.zeros(n)
        out = []
        for t in range(rounds):
            x = x + inflow[t]
            out.append(x[senders])
            x = matrix @ x
        return np.concatenate(out)

    inverse = np.eye(rounds) if inverse is None else inverse
    moved = {}
    noise = []
    for t, i in itertools.product(range(rounds), range(n)):
        unit = np.zeros((rounds, n))
        unit[t, i] = 1
        moved[t, i] = received(unit)
        if i not in attackers:
            noise.append(received(inverse @ unit))
    b = np.array(noise).T
    precision = np.linalg.pinv(b @ b.T, rcond=1e-11, hermitian=True)
    mu = np.full(n, np.nan)
    for u in set(range(n)) - set(attackers):
        sums = [
            sum(abs(moved[s, u] @ precision @ moved[t, u]) for s in p for t in p) for p in patterns
        ]
        mu[u] = np.sqrt(max(sums))
    return mu


def stored(name: str = "dpjax-account.jsonl") -> dict[str, np.ndarray]:
    """Mu by agent of both kinds of gradients, from the record file."""
    frame = records.read(name)
    results = {}
    for gradients, part in frame.groupby("gradients"):
        results[str(gradients)] = np.full(5, np.nan)
        results[str(gradients)][part["victim"]] = part["mu"]
    return results


def test_account_tells_and_records_what_simulation_gives(capsys: Capture) -> None:
    fields = ["--epochs", "2", "--separation", "2", "--relation", "replace_record"]
    assert cli.main([*PNDP, *fields, "--delta", "1e-5"]) == 0
    text = capsys.readouterr().out
    matrix = mixing.metropolis_hastings(graphs.path(5))
    patterns = [[0, 2], [1, 3]]
    # Clip 1: a replaced gradient moves by 2; sigma = 2.
    want = losses(matrix, 4, (0,), patterns) * 2 / 2
    result = stored()
    np.testing.assert_allclose(result["view"], want, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(result["any"][1:], np.sqrt(2), rtol=1e-8)
    assert (result["view"][1:] >= want[1:] * (1 - 1e-12)).all()
    # The test can fail: other weights, other patterns.
    for other in (
        losses((np.eye(5) + matrix) / 2, 4, (0,), patterns),
        losses(matrix, 4, (0,), [[0, 1, 2, 3]]),
    ):
        assert np.nanmax(np.abs(other / result["view"] - 1)) > 1e-3
    # Printed: one line for each distance and kind of gradients, rounded up.
    by_distance = text.partition("\nagent ")[0]
    for distance in range(1, 5):
        lines = re.findall(rf"^{distance} +1 +(.*)$", by_distance, re.MULTILINE)
        for kind, line in zip(("any", "view"), lines, strict=True):
            mean, _, _, epsilon = map(float, line.split())
            value = result[kind][distance]
            assert value <= mean <= value * 1.002 + 1e-12
            assert epsilon == pytest.approx(gdp.epsilon(value, 1e-5), rel=2e-3)
    assert "relation: replace_record (one record of one agent, against another)\n" in text
    assert "2 rounds of 4, 2 apart" in text and "agent 0, seeing what arrives" in text
    assert re.search("gradients: view: holds only if", text)
    assert Path("dpjax-account.svg").exists()
    metadata = records.read_metadata("dpjax-account.jsonl")
    again = metadata["command"].split()
    assert again[:2] == ["dpjax", "account"] and cli.main(again[1:]) == 0
    np.testing.assert_array_equal(stored("dpjax-account-2.jsonl")["view"], result["view"])


@pytest.mark.parametrize("command", [ACCOUNT, BUDGET])
def test_no_command_has_relation_by_default(command: list[str], capsys: Capture) -> None:
    where = command.index("--relation")
    assert cli.main(command[:where] + command[where + 2 :]) == 2
    assert "--relation" in capsys.readouterr().err and not list(Path().iterdir())


def test_relation_is_said_aloud_and_doubles(capsys: Capture) -> None:
    assert cli.main([*PNDP, "--out", "two"]) == 0
    text = capsys.readouterr().out
    assert "relation: replace_record (" in text
    assert "a record in every round of 4" in text
    assert cli.main([*PNDP, "--relation", "zero_out_record", "--out", "one.jsonl"]) == 0
    second = stored("two.jsonl")
    first = stored("one.jsonl")
    for gradients in ("any", "view"):
        np.testing.assert_allclose(second[gradients], 2 * first[gradients], rtol=1e-12)
    assert cli.main([*PNDP, "--relation", "replace_agent"]) == 0
    assert "an agent in every round" in capsys.readouterr().out
    np.testing.assert_array_equal(stored()["view"], second["view"])


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param("anti_pgd", marks=pytest.mark.slow),
        "mafalda",
        pytest.param("prefix_sum", marks=pytest.mark.slow),
    ],
)
def test_strategies_are_scaled_to_sensitivity_one(algorithm: str, capsys: Capture) -> None:
    fields = ["--algorithm", algorithm, "--epochs", "2", "--separation", "2"]
    fields += ["--relation", "zero_out_record"]
    assert cli.main([*ACCOUNT, *fields, "--out", "ldp.jsonl"]) == 0
    np.testing.assert_allclose(stored("ldp.jsonl")["any"], 1 / 2, rtol=1e-8)
    np.testing.assert_allclose(stored("ldp.jsonl")["view"], 1 / 2, rtol=1e-8)
    assert re.search(r"^all +5 ", capsys.readouterr().out, re.MULTILINE)
    assert cli.main([*PNDP, *fields]) == 0
    matrix = mixing.metropolis_hastings(graphs.path(5))
    when = Participation(4, 2, 2)
    strategy = {
        "anti_pgd": temporal.anti_pgd(4),
        "mafalda": temporal.mafalda(matrix, when),
        "prefix_sum": temporal.prefix_sum(when),
    }[algorithm]
    strategy = strategy / temporal.sensitivity(strategy, when)
    want = losses(matrix, 4, (0,), [[0, 2], [1, 3]], np.linalg.inv(strategy)) / 2
    # The least of this and what all messages would tell.
    np.testing.assert_allclose(stored()["view"], np.minimum(want, 1 / 2), rtol=1e-6)


@pytest.mark.slow
def test_other_algorithms_and_attackers(capsys: Capture) -> None:
    pair = [*ACCOUNT, "--trust", "pndp", "--attackers", "0", "4"]
    assert cli.main([*pair, "--algorithm", "muffliato", "--gossip-steps", "3"]) == 0
    text = capsys.readouterr().out
    assert "agent 0 and agent 4, who collude" in text and "muffliato, 3 gossip steps" in text
    frame = records.read("dpjax-account.jsonl")
    assert set(frame["victim"]) == {1, 2, 3} and set(frame["distance"]) == {1, 2}
    secret = [*ACCOUNT, "--algorithm", "decor", "--shared", "3"]
    assert cli.main([*secret, "--trust", "secldp", "--protected", "1", "2", "--out", "a"]) == 0
    assert "but those among agent 1, agent 2" in capsys.readouterr().out
    assert cli.main([*secret, "--out", "b"]) == 0
    hidden = stored("a.jsonl")["any"]
    eavesdropper = stored("b.jsonl")["any"]
    # Agents without a protected secret have their own noise alone: 2 sqrt(4) / 2.
    np.testing.assert_allclose(hidden[[0, 3, 4]], 2, rtol=1e-8)
    # Two agents with one secret of variance 3 between them: [(I + 3 L)^-1]_11 = 4 / 7.
    np.testing.assert_allclose(hidden[[1, 2]], 2 * np.sqrt(4 / 7), rtol=1e-8)
    assert (eavesdropper <= hidden).all() and eavesdropper.max() < 2
    zipped = [*ACCOUNT, "--algorithm", "zip_dl"]
    assert cli.main([*zipped, "--trust", "pndp", "--attackers", "0", "--out", "c"]) == 0
    assert "no guarantee for agent 1: the loss is infinite" in capsys.readouterr().out
    result = stored("c.jsonl")
    assert np.isinf(result["any"][1:]).all() and np.isfinite(result["view"][1:]).all()
    assert cli.main([*zipped, "--zero-sum", "messages", "--out", "d"]) == 0
    assert np.isinf(stored("d.jsonl")["view"]).any()


@pytest.mark.slow
def test_every_gossip_step_of_decor_is_accounted() -> None:
    matrix = mixing.metropolis_hastings(graphs.path(5))
    messages = [
        account(matrix, "decor", relation="zero_out_record", rounds=3, sigma=1.0, trust="pndp",
                gossip_steps=steps)
        for steps in (1, 3)
    ]  # fmt: skip
    single, three = (
        np.array([row["mu"] for row in item.rows if row["gradients"] == "view"])
        for item in messages
    )
    # Later steps carry news of agents further away.
    assert (three >= single * (1 - 1e-8)).all() and (three > 1.1 * single).any()


def test_upper_bounds_are_named(capsys: Capture) -> None:
    rows = [
        {"gradients": gradients, "attackers": (0,), "victim": u, "distance": u, "mu": 1.0,
         "epsilon": 3.0, "upper_bound": gradients == "view" and u == 2}
        for gradients in ("any", "view")
        for u in (1, 2)
    ]  # fmt: skip
    matrix = mixing.metropolis_hastings(graphs.path(3))
    spent = account(matrix, relation="zero_out_record", rounds=2, sigma=1.0, trust="pndp",
                    attackers=[[0]])._replace(rows=rows)  # fmt: skip
    terms = {"algorithm": "dsgd", "relation": "zero_out_record", "gradients": "view"}
    terms |= {"gossip_steps": 1, "delta": 1e-5}
    text = "\n".join(account_._lines(spent, terms, "012"))
    assert (
        re.search(r"^2 .*<= \(1\)$", text, re.MULTILINE) and "<= (1): upper bounds, which" in text
    )
    # A neighbour's plain bound, 3.3 on the Florentine graph, gives way to all messages' sqrt 10.
    florentine = mixing.uniform_neighbors(graphs.florentine())
    spent = account(florentine, relation="zero_out_record", rounds=10, sigma=1.0, trust="pndp",
                    attackers=[[0]])  # fmt: skip
    (near,) = [r for r in spent.rows if r["gradients"] == "view" and r["distance"] == 1]
    assert near["upper_bound"] and near["mu"] == pytest.approx(np.sqrt(10), rel=1e-8)


def named_network() -> None:
    """A path 3 - 1 - 2 - 4, whose labels are not the indices 0 - 1 - 2 - 3."""
    Path("net.txt").write_text("3 1\n1 2\n2 4\n")


def test_attacker_is_label_and_never_guess(capsys: Capture) -> None:
    named_network()
    command = [*ACCOUNT, "--graph", "net.txt", "--trust", "pndp", "--attackers"]
    refused([*command, "3"], capsys, r"may be agent 3 \(index 0\) or agent 4 \(index 3\); write")
    refused([*command, "0"], capsys, "a number that is no label")
    assert cli.main([*command, "label:3", "--out", "label"]) == 0
    text = capsys.readouterr().out
    assert "attacker: PNDP: agent 3 (index 0), seeing" in text
    assert cli.main([*command, "index:3", "--out", "index"]) == 0
    assert "attacker: PNDP: agent 4 (index 3), seeing" in capsys.readouterr().out
    label = records.read("label.jsonl")
    index = records.read("index.jsonl")
    near = label[(label["distance"] == 1) & (label["gradients"] == "any")].iloc[0]
    assert (near["victim"], near["victim_label"], near["attackers"]) == (1, "1", "0")
    assert set(label["attacker_labels"]) == {"3"} and set(index["attacker_labels"]) == {"4"}
    assert records.read_metadata("label.jsonl")["labels"] == ["3", "1", "2", "4"]
    assert "<!-- distance -->" in Path("label.svg").read_text()
    # Every agent has a line, by its name: 2 is two links away from 3.
    line, _ = re.findall(r"^2 +2 +(.*)$", text.partition("\nagent ")[2], re.MULTILINE)
    (row,) = label[(label["victim_label"] == "2") & (label["gradients"] == "any")].to_dict(
        "records"
    )
    assert float(line.split()[0]) == pytest.approx(row["mu"], rel=2e-3)
    secret = [*ACCOUNT, "--graph", "net.txt", "--algorithm", "decor", "--trust", "secldp"]
    refused([*secret, "--protected", "3", "4"], capsys, "protected is '3', which may be")
    assert cli.main([*secret, "--protected", "4", "index:0"]) == 0
    assert "among agent 4 (index 3), agent 3 (index 0)" in capsys.readouterr().out


@pytest.mark.slow
def test_all_attackers_are_every_one_alone(capsys: Capture) -> None:
    assert cli.main([*ACCOUNT, "--trust", "pndp", "--attackers", "all", "--out", "all"]) == 0
    text = capsys.readouterr().out
    assert "PNDP: any single agent, seeing" in text
    assert cli.main([*ACCOUNT, "--trust", "pndp", "--out", "default"]) == 0
    assert capsys.readouterr().out.replace("default.", "all.") == text
    frame = records.read("all.jsonl")
    assert len(frame) == 2 * 5 * 4
    results = {}
    for attacker in range(5):
        assert cli.main([*ACCOUNT, "--trust", "pndp", "--attackers", str(attacker),
                         "--out", f"{attacker}"]) == 0  # fmt: skip
        single = stored(f"{attacker}.jsonl")
        part = frame[frame["attackers"] == str(attacker)]
        for gradients, rows in part.groupby("gradients"):
            np.testing.assert_array_equal(single[str(gradients)][rows["victim"]], rows["mu"])
        results[attacker] = single["view"]
    # The line of each agent holds its largest loss, and to whom.
    worst = np.array([results[a] for a in range(5)])
    for victim in range(5):
        lines = re.findall(rf"^{victim}  +(.*)$", text.partition("\nagent ")[2], re.MULTILINE)
        _, line = lines
        mu, epsilon, to = line.split()[-3:]
        assert float(epsilon) == pytest.approx(gdp.epsilon(float(mu), 1e-5), rel=2e-3)
        assert float(mu) == pytest.approx(np.nanmax(worst[:, victim]), rel=2e-3)
        assert worst[int(to), victim] == pytest.approx(np.nanmax(worst[:, victim]), rel=1e-9)
    assert re.search("the worst is agent . against agent .[.]", text)


@pytest.mark.slow
def test_other_parties_have_sentence_each(capsys: Capture) -> None:
    """An outsider sees every message of four rounds: replaced, at sigma 2, mu is 2 sqrt(4) / 2."""
    outside = f"(epsilon = {up(float(gdp.epsilon(2.0, 1e-5)))}, delta = 1e-05)"
    assert cli.main([*ACCOUNT, "--out", "ldp"]) == 0
    text = capsys.readouterr().out
    assert f"2 records cost at most epsilon = {up(float(gdp.epsilon(4.0, 1e-5)))}" in text
    assert "from an outsider" not in text and f"Protected from {ANOTHER} {outside}: every" in text
    assert cli.main([*ACCOUNT, "--trust", "pndp", "--out", "pndp"]) == 0
    text = capsys.readouterr().out
    assert f"Protected from an outsider {outside}" in text and ANOTHER not in text
    decor = [*ACCOUNT, "--algorithm", "decor"]
    assert cli.main([*decor, "--out", "decor"]) == 0
    assert f"NOT protected from {ANOTHER}: it knows the secrets of its links" in (
        capsys.readouterr().out
    )
    assert cli.main([*PNDP, "--algorithm", "zip_dl", "--out", "zip"]) == 0
    assert "NOT protected from an outsider: the loss is infinite" in capsys.readouterr().out


@pytest.mark.slow
def test_delta_above_one_over_agents_protects_nobody(capsys: Capture) -> None:
    for trust in ("ldp", "pndp"):
        assert cli.main([*ACCOUNT, "--delta", "0.3", "--trust", trust, "--out", trust]) == 0
        text = capsys.readouterr().out
        assert "NOTE: delta is 0.3 for at least 5 records" in text
        assert "\nProtected from" not in text and "several records" not in text
        assert "NOT protected from" in text and "above one over the number of agents." in text
    design = ["design", "--graph", "path:5", "--epsilon", "3", "--rounds", "4"]
    design += ["--clip-norm", "0.5", "--relation", "replace_record", "--batch-size", "10"]
    design += ["--delta"]
    assert cli.main([*design, "0.03"]) == 0
    assert "NOTE: delta is 0.03 for at least 50 records" in capsys.readouterr().out
    assert cli.main([*design, "0.02"]) == 0
    assert "NOTE: delta" not in capsys.readouterr().out


def test_delta_above_one_over_agents_is_noted(capsys: Capture) -> None:
    agents = ["--relation", "replace_agent", "--delta"]
    assert cli.main([*ACCOUNT, *agents, "0.3"]) == 0
    printed = capsys.readouterr()
    assert "NOTE: delta is 0.3 for 5 agents" in printed.out and "delta is" not in printed.err
    assert cli.main([*ACCOUNT, *agents, "0.1"]) == 0
    assert "NOTE: delta" not in capsys.readouterr().out


def test_large_network_has_no_line_for_each_agent(capsys: Capture) -> None:
    assert cli.main([*PNDP, "--graph", "path:30", "--rounds", "1"]) == 0
    assert "\nagent " not in capsys.readouterr().out


def test_families_keep_their_names(capsys: Capture) -> None:
    families = ["--graph", "florentine", "--rounds", "1"]
    refused([*PNDP, *families, "--attackers", "Borgia"], capsys, "a label .Acciaiuoli, Medici")
    assert cli.main([*ACCOUNT, *families, "--trust", "pndp", "--attackers", "Medici"]) == 0
    text = capsys.readouterr().out
    assert "PNDP: agent Medici (index 1)" in text and re.search("^Guadagni +2 ", text, re.MULTILINE)


@pytest.mark.parametrize("attackers", [3, [0, 1], (0,), [None], [], {0: 1}])
def test_attackers_are_sets_of_nodes(attackers: Any) -> None:
    matrix = mixing.metropolis_hastings(graphs.ring(4))
    options: dict[str, Any] = dict(relation="replace_record", rounds=2, sigma=1.0, trust="pndp")
    with pytest.raises(ValueError, match=r"attackers is .*; give sets of nodes, as in \[\[0\]"):
        account(matrix, attackers=attackers, **options)
    with pytest.raises(ValueError, match="protected is 3 with trust 'pndp'"):
        account(matrix, protected=3, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shared is 'x'; give a finite number above 0"):
        account(matrix, "decor", shared="x", **options)  # type: ignore[arg-type]


def test_distances_follow_messages() -> None:
    with pytest.raises(ValueError, match=r"attackers is 3; give a list, \[3\]"):
        account_.distances(np.eye(4), 3)  # type: ignore[arg-type]
    matrix = mixing.uniform_neighbors(graphs.florentine())
    assert np.bincount(account_.distances(matrix, [0])).tolist() == [1, 1, 5, 5, 3]
    # Directed: 1 sends to 0, 2 to 1, and nobody hears 3 but 2.
    chain = np.array([[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5], [0, 0, 0, 1.0]])
    assert account_.distances(chain, [0]).tolist() == [0, 1, 2, 3]
    assert account_.distances(chain, [3]).tolist() == [-1, -1, -1, 0]
    assert account_.distances(chain, [0, 2]).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (["--attackers", "0"], "attackers is .*with trust 'ldp'"),
        (["--attackers", "all"], "attackers is .*with trust 'ldp'"),
        (["--trust", "pndp", "--attackers", "9"], "attackers is '9', which is no node; give 0"),
        (["--trust", "pndp", "--attackers", "all", "1"], "attackers is 'all', which is no node"),
        (["--trust", "pndp", "--attackers", "0", "1", "2", "3", "4"], "all 5 agents"),
        (["--trust", "secldp"], "pairwise secrets"),
        (["--algorithm", "zip_dl", "--trust", "secldp"], "pairwise secrets"),
        (["--algorithm", "zip_dl", "--gossip-steps", "2"], "gossip_steps is 2 with zip_dl"),
        (["--protected", "1"], "protected is .* with trust .*; leave it out, or take secldp"),
        (["--algorithm", "decor", "--trust", "secldp", "--attackers", "0", "--protected", "0"],
         "protected holds the attackers"),
        (["--shared", "2"], "shared is 2.0 with dsgd"),
        (["--zero-sum", "messages"], "zero_sum is messages with dsgd"),
        (["--epochs", "2"], "give both or neither"),
        (["--epochs", "3", "--separation", "2"], "participation is"),
        (["--algorithm", "mafalda", "--epochs", "3", "--separation", "1"], "participation is"),
        (["--epochs", "2", "--separation", "2", "--relation", "replace_agent"], "every round"),
        (["--sigma", "0"], "sigma is 0"),
        (["--epsilon", "3"], "sigma is 2.0 and epsilon is 3.0; give one"),
        (["--delta", "1"], "delta is 1"),
        (["--rounds", "0"], "rounds is 0"),
        (["--out", "nowhere/it.jsonl"], "folder does not exist"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_one_line(
    change: list[str], match: str, capsys: Capture
) -> None:
    refused([*ACCOUNT, *change], capsys, match)


def test_figure_is_never_replaced(capsys: Capture) -> None:
    Path("it.svg").write_text("precious")
    refused([*PNDP, "--out", "it.jsonl"], capsys, "whose figure 'it.svg' exists")
    assert Path("it.svg").read_text() == "precious" and not Path("it.jsonl").exists()


@pytest.mark.gate(1)
@pytest.mark.parametrize("gradients", ["any", "view"])
def test_inverse_gives_budget_back(gradients: str, capsys: Capture) -> None:
    fields = ["--epochs", "2", "--separation", "2", "--trust", "pndp"]
    assert cli.main([*BUDGET, *fields, "--gradients", gradients]) == 0
    text = capsys.readouterr().out
    (sigma,) = re.findall(r"; sigma = (\S+)$", text, re.MULTILINE)
    matrix = mixing.metropolis_hastings(graphs.path(5))
    each = [losses(matrix, 4, (a,), [[0, 2], [1, 3]]) for a in range(5)]
    worst = np.nanmax(each) if gradients == "view" else np.sqrt(2)
    worst = min(worst, np.sqrt(2))  # what all messages tell
    spent = gdp.epsilon(2 * worst / float(sigma), 1e-5)
    assert spent <= 3 and spent == pytest.approx(3, rel=2e-3)
    # The test can fail: zero-out, or one round alone, would take less noise.
    assert gdp.epsilon(worst / float(sigma), 1e-5) < 1.5
    # Every agent's line keeps the budget, and the worst one uses it up.
    table = text.partition("\nagent ")[2] if gradients == "any" else text.rpartition("\nagent ")[2]
    lines = [line.split() for line in table.splitlines()[2:7]]
    assert [line[0] for line in lines] == list("01234")
    assert max(float(line[2]) for line in lines) == pytest.approx(3, rel=2e-3)
    assert re.search(r"dsgd against .* every message: sigma = \S+, \S+ times this", text)


@pytest.mark.slow
def test_worst_attacker_and_victim_are_named(capsys: Capture) -> None:
    # A long tail: with one round, only neighbours learn anything; with colluders, theirs.
    matrix = mixing.uniform_neighbors(graphs.path(5))
    each = np.array([losses(matrix, 4, (a,), [[0], [1], [2], [3]]) for a in range(5)])
    budget: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-6, "gradients": "view", "rounds": 4}
    budget |= {"epochs": 1, "separation": 1, "relation": "zero_out_record"}
    spent = account(matrix, trust="pndp", **budget)
    worst = spent.worst("view")
    assert each[worst["attackers"][0], worst["victim"]] == pytest.approx(np.nanmax(each), rel=1e-9)
    assert spent.sigma == pytest.approx(np.nanmax(each) / gdp.mu(2.0, 1e-6), rel=1e-8)
    assert worst["epsilon"] <= 2.0
    single = account(matrix, trust="pndp", attackers=[(4,)], **budget).worst("view")
    assert single["attackers"] == (4,) and single["victim"] == int(np.nanargmax(each[4]))
    assert account(matrix, **budget).sigma == pytest.approx(1 / gdp.mu(2.0, 1e-6), rel=1e-8)
    command = [*BUDGET, "--graph", "florentine", "--attackers", "0", "3", "--trust", "pndp"]
    assert cli.main([*command, "--algorithm", "decor"]) == 0
    text = capsys.readouterr().out
    assert "agent Acciaiuoli (index 0) and agent Peruzzi (index 3), who collude" in text
    (times,) = re.findall(r"independent noise .* (\S+) times this", text)
    assert float(times) > 1.2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (["--trust", "pndp", "--algorithm", "zip_dl"], "infinite under zip_dl"),
        (["--trust", "pndp", "--epsilon", "0"], "epsilon is 0"),
        (["--sigma", "1"], "give one of the two"),
    ],
)
def test_bad_budgets_are_one_line(change: list[str], match: str, capsys: Capture) -> None:
    refused([*BUDGET, *change], capsys, match)


def test_help_defines_sigma(capsys: Capture) -> None:
    assert cli.main(["account", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "sensitivity 1" in text and "mu = 1 / sigma" in text and "noise multiplier" in text
    for name in account_.ALGORITHMS:
        assert name in text


@pytest.mark.parametrize("gradients", ["veiw", None, 3])
def test_another_word_for_gradients_is_refused(gradients: Any) -> None:
    terms: dict[str, Any] = {"relation": "replace_agent", "rounds": 5}
    matrix = mixing.metropolis_hastings(graphs.ring(4))
    for name in ("sigma", "epsilon"):
        with pytest.raises(ValueError, match=r"gradients is .*choose one of any, view"):
            account(matrix, gradients=gradients, **{**terms, name: 1.0})
    with pytest.raises(ValueError, match=r"gradients is .*choose one of any, view"):
        account(matrix, sigma=1.0, **terms).worst(gradients)


@pytest.mark.slow
def test_one_agent_alone(capsys: Capture) -> None:
    single = [*BUDGET, "--graph", "complete:1"]
    assert cli.main([*single, "--out", "own"]) == 0
    text = capsys.readouterr().out
    assert "1 agent, 0 edges;" in text
    assert "participant" not in text and "other agents" not in text and "gradients" not in text
    assert "times this" not in text and text.count("0.719118  3") == 1
    assert "guarantee: the agent is 0.719118-Gaussian-DP, (epsilon = 3, delta = 1e-05)-DP" in text
    refused([*single, "--trust", "pndp"], capsys, "one agent alone has outsiders as its attackers")
    # Of other algorithms and attackers each stands beside independent noise once.
    compared = [
        (["--algorithm", "muffliato"], ["independent noise (dsgd)"]),
        (["--trust", "pndp"], ["dsgd"]),
        (["--algorithm", "decor", "--trust", "pndp"], ["decor", "independent noise (dsgd)"]),
        ([], []),
    ]
    for number, (options, names) in enumerate(compared):
        assert cli.main([*BUDGET, *options, "--out", str(number)]) == 0
        text = capsys.readouterr().out
        assert re.findall("(.*) against an eavesdropper of every message: ", text) == names


@pytest.mark.parametrize(
    ("algorithm", "lags", "alike"),
    [
        # The columns of its C have norm 1, all of them.
        ("one_step", [1, -0.8, 0, 0, 0, 0], True),
        # The series of sqrt(1 - x), whose square takes the last round's noise away.
        ("banded_inverse", [1, -1 / 2, -1 / 8, -1 / 16, -5 / 128, -7 / 256], False),
    ],
)
def test_designs_of_few_rounds_cost_what_their_messages_show(
    algorithm: str, lags: list[float], alike: bool
) -> None:
    n = 4
    rounds = 6
    matrix = mixing.metropolis_hastings(graphs.path(n))
    inverse = scipy.linalg.toeplitz(lags, [1, *[0] * (rounds - 1)])
    # A record takes part once, at most in the round of C's largest column.
    norms = np.linalg.norm(np.linalg.inv(inverse), axis=0)
    inverse *= norms[:, None] if alike else norms.max()
    # Noise and gradients [T n] in the messages [T, n] before gossip.
    shape = (rounds, n, rounds * n)
    gradients = np.eye(rounds * n).reshape(shape)
    noise = np.kron(inverse, np.eye(n)).reshape(shape)
    messages = [np.zeros(shape), np.zeros(shape)]
    for sent, added in zip(messages, (gradients, noise), strict=True):
        models = np.zeros(shape[1:])
        for t in range(rounds):
            sent[t] = models - added[t]
            models = matrix @ sent[t]
    # Agent 0 hears agent 1 alone, and takes its own gradients and noise out of what it hears.
    others = np.arange(rounds * n) % n != 0
    shown, hidden = (sent[:, 1][:, others] for sent in messages)
    energies = np.diag(shown.T @ np.linalg.pinv(hidden @ hidden.T) @ shown)
    terms: dict[str, Any] = {"relation": "zero_out_record", "rounds": rounds, "sigma": 1.0}
    once = {"epochs": 1, "separation": rounds}
    for trust, attackers, expected in (
        ("pndp", [[0]], np.sqrt(energies.reshape(rounds, n - 1).max(axis=0))),
        ("ldp", None, np.ones(n)),
    ):
        cost = account(matrix, algorithm, trust=trust, attackers=attackers, **terms, **once)
        losses = [row["mu"] for row in cost.rows if row["gradients"] == "view"]
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
