"""The command line, run in this process; its help, in one of its own."""

import inspect
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpjax import cli
from dpjax.accounting import budget, gdp
from dpjax.commands import design, plot
from dpjax.data import canonical
from dpjax.engine.run import Result
from dpjax.mechanism import spatial
from dpjax.mechanism.design import Design
from dpjax.plans import noise, plan
from dpjax.topology import graphs, mixing
from tests.support import make_config

ROOT = Path(__file__).resolve().parents[1]
Capture = pytest.CaptureFixture[str]
NUMBERS = ["--epsilon", "10", "--delta", "1e-5", "--rounds", "100", "--clip-norm", "0.1"]
DESIGN = ["design", "--graph", "er:8:0.5", "--relation", "replace_agent", *NUMBERS]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Work in a folder of the test's, with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPJAX_DATA", str(tmp_path / "cache"))
    return tmp_path


def refused(arguments: list[str], capsys: Capture, match: str) -> None:
    """Expect exit status 2, one line of error and no traceback."""
    capsys.readouterr()
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert re.match(r"dpjax( \w+){0,2}: error: ", error) and "Traceback" not in error
    assert not re.search("[│╭╮]|is None", error), error
    assert re.search(match, error), error


def test_help_runs_as_module_and_loads_no_room() -> None:
    code = (
        "import sys; from dpjax import cli; status = cli.main(['--help']); "
        "print(sorted({'jax', 'scipy', 'networkx', 'pandas'} & set(sys.modules))); sys.exit(status)"
    )
    for command in (["-m", "dpjax", "--help"], ["-c", code]):
        done = subprocess.run(
            [sys.executable, "-W", "error", *command], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        assert all(name in done.stdout for name in ("design", "plot", "data"))
    assert done.stdout.strip().endswith("[]")


@pytest.mark.parametrize("command", ["design", "account", "plot", "data", "train"])
def test_every_command_has_help(command: str, capsys: Capture) -> None:
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: dpjax " + command in text and "{None" not in text
    assert "default: None" not in " ".join(text.split())
    # The words of each option come from its function.
    message = {"design": "replace_agent (all data of", "plot": "record file", "data": "$DPJAX_DATA"}
    message["account"] = "Noise multiplier"
    assert message.get(command, "The file of settings") in text


@pytest.mark.parametrize(("command", "summary"), cli._COMMANDS.items())
def test_overview_has_words_of_each_command(command: str, summary: str) -> None:
    assert (cli._command(command).__doc__ or "").startswith(summary.rstrip("."))


@pytest.mark.gate(1)
@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-"])
def test_closed_stream_changes_nothing_else(closed: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for words in ("design", "desing"):
        command = f"{sys.executable} -m dpjax {words} {closed}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
        assert done.returncode == 2 and not done.stdout, words
        assert ("--help" in done.stderr) == ("2>" not in closed), done.stderr


def test_nothing_to_do_shows_all_commands_on_one_screen(capsys: Capture) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        assert cli.main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 100
        text = "\n".join(lines)
        assert all(f"  {name} " in text for name in cli._COMMANDS) and "--version" in text
    assert cli.main(["--version"]) == 0 and "dpjax 0." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["desing"], "no command desing; did you mean design? If not, see dpjax --help"),
        (["--hlep"], "no command --hlep; see dpjax --help"),
        (["design", "--eps", "3"], "no option --eps; did you mean --epsilon?"),
        (["design", "--clip=1"], "no option --clip; did you mean --clip-norm?"),
        (["account", "--gossip_step", "3"], "did you mean --gossip-steps?"),
        (["secagg", "join", "--lenght", "3"], "did you mean --length?"),
        (["plot", "--steps", "3"], "no option --steps; see dpjax plot --help"),
        (["account", "--output", "3"], "no option --output; did you mean --out? If not, see"),
        (["account", "--steps", "3"], "did you mean --rounds? If not, see dpjax account --help"),
        (["plot", "--zzz"], "no option --zzz; see dpjax plot --help"),
        (["secagg", "sreve"], "no action sreve; did you mean serve? If not, see dpjax secagg"),
        (["data", "fetch", "digit"], "name is 'digit'; did you mean digits? If not, choose one of"),
        ([*DESIGN, "--kind", "wisper"], "kind is 'wisper'; did you mean whisper? If not, choose"),
        ([*DESIGN, "--graph", "rign:8"], "did you mean ring? If not, choose one of er, ring, "),
        (
            ["account", "--graph", "florentine", "--relation", "replace_agent", "--rounds", "1",
             "--sigma", "1", "--trust", "pndp", "--attackers", "Medicci"],
            "attackers is 'Medicci', which is no node; did you mean Medici? If not, give a label",
        ),
    ],
)  # fmt: skip
def test_what_there_is_not_names_nearest(arguments: list[str], match: str, capsys: Capture) -> None:
    refused(arguments, capsys, re.escape(match))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("train", "train: error: missing: path; see dpjax train --help"),
        ("init a b", "init: error: 'b' is one argument too many; see dpjax init --help"),
        ("train a --out", "train: error: --out has no value; see dpjax train --help"),
        (
            "account --sigma 1",
            "account: error: missing: --graph, --relation, --rounds; see dpjax account --help",
        ),
        (
            "account --graph ring:4 --relation replace_agents --rounds 1",
            "account: error: --relation is 'replace_agents'; did you mean replace_agent? If not, "
            "choose one of replace_agent, replace_record, zero_out_record; see dpjax account "
            "--help",
        ),
        (
            "account --graph ring:4 --relation replace_agent --rounds 1.5 --sigma 1",
            "account: error: --rounds is '1.5', which is no INT; see dpjax account --help",
        ),
        (
            "account --graph ring:4 --relation replace_agent --rounds 1 --sigma x",
            "account: error: --sigma is 'x', which is no FLOAT; see dpjax account --help",
        ),
        ("secagg", "secagg: error: missing: serve or join; see dpjax secagg --help"),
        (
            "secagg join --server a:1",
            "secagg join: error: missing: values, --clients, --length, --bound, --name, "
            "--certificate, --key, --certificates; see dpjax secagg join --help",
        ),
        (
            "data ftech",
            "data: error: task is 'ftech'; did you mean fetch? If not, choose one of list, fetch, "
            "path, check; see dpjax data --help",
        ),
        (
            "account --graph ring:4 --relation replace_agent --rounds 1",
            "account: error: sigma is missing and epsilon is missing; give one of the two",
        ),
        (
            "account --graph ring:4 --relation replace_record --rounds 4 --sigma 1 --epochs 2",
            "account: error: epochs is 2 and separation is missing; give both or neither",
        ),
        (
            "data fetch",
            "data: error: name is missing with fetch; give a data set to fetch, and to it alone",
        ),
        ("train study.toml", "train: error: study.toml is not there; dpjax init writes one"),
    ],
)
def test_errors_are_one_line_of_one_layout(arguments: str, line: str, capsys: Capture) -> None:
    """Also those that the parser finds, in the place of its boxes."""
    assert cli.main(arguments.split()) == 2
    assert capsys.readouterr() == ("", f"dpjax {line}\n")


def test_event_of_another_parser_keeps_its_box(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser's events are none of its public names."""
    monkeypatch.setattr(cli, "_FAULTS", {})
    assert cli.main(["train"]) == 2
    assert "Missing from dpjax train" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(cli, "_FAULTS", {"MissingArgs": "{event.gone}"})
    assert cli.main(["train"]) == 2
    assert "Missing from dpjax train" in capsys.readouterr().err


HELPS = ["train", "plot", "design", "account", "secagg serve", "secagg join"]
HELPS += ["site request", "site renew", "site authority", "site plan", "site run"]
"""Commands whose help has an example."""


@pytest.mark.parametrize("command", HELPS)
def test_example_of_help_is_one_line(
    command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds all that the command requires: only work is refused, as it is not done here."""
    assert cli.main([*command.split(), "--help"]) == 0
    (example,) = re.findall("^Example: dpjax (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert example.startswith(command)

    def done(**values: object) -> int:
        return 0

    words = cli._command(command)
    done.__signature__ = inspect.signature(words)  # type: ignore[attr-defined]
    done.__annotations__ = words.__annotations__
    monkeypatch.setattr(cli, "_command", lambda name: done)
    assert cli.main(shlex.split(example)) == 0


def test_list_of_actions_breaks_no_example(capsys: Capture) -> None:
    assert cli.main(["secagg", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("serve", "join"):
        summary = (cli._command(f"secagg {name}").__doc__ or "").partition("\n")[0]
        assert f"{name:<8}{summary}" in text and "Example" not in text


def test_file_of_settings_trains(capsys: Capture, elsewhere: Path) -> None:
    assert cli.main(["init"]) == 0
    refused(["init"], capsys, "path is 'dpjax.toml', which exists")
    file = elsewhere / "dpjax.toml"
    text = file.read_text().replace("rounds = 100", "rounds = 4")
    file.write_text(text.replace("seeds = [0, 1, 2]", "seeds = [1, 2]").replace("er:8", "er:4"))
    assert cli.main(["train", "dpjax.toml"]) == 0
    output = capsys.readouterr().out
    result = Result.load("run/result.npz")
    assert result.summary() in output and result.guarantees[0].caption() in output
    assert [term["label"] for term in result.terms] == ["independent", "whisper_horizon"]
    assert (result.rounds[-1], result.seeds, result.terms[0]["agents"]) == (4, (1, 2), 4)
    assert sorted(os.listdir("run")) == ["report.html", "result.npz", "rows.csv", "settings.toml"]
    assert Path("run/settings.toml").read_text() == file.read_text()
    refused(["train", "dpjax.toml"], capsys, "error: dpjax.toml, out is 'run', which exists")
    refused(["train", "dpjax.toml", "--out", "run"], capsys, "error: --out is 'run', which exists")


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        (
            "hidden =",
            "hiden =",
            r"\[model\] hiden is unknown; did you mean hidden\? If not, choose one of activation, ",
        ),
        ("hidden = ", "hidden = 32 #", r"\[model\] hidden is 32; give a list, \[32\]"),
        ('"Sgd"', '"Adam"', r"\[optimizer\] name is 'Adam'; choose one of Sgd$"),
        (
            '"Independent"',
            '"Independent"\nfoo = 3 #',
            r"\[\[noise\]\] foo is unknown; there are none: leave it out",
        ),
        ("clip_norm", "clipnorm", r"\[protect\] clipnorm is unknown; did you mean clip_norm\?"),
        ("step_size", "stepsize", r"\[optimizer\] stepsize is unknown; did you mean step_size\?"),
        ('"Whisper"', '"Wisper"', r"\[\[noise\]\] name is 'Wisper'; did you mean Whisper\? If not"),
        ('"Full"', '"FULL"', r"\[sampler\] name is 'FULL'; did you mean Full\? If not, choose one"),
        ('"MLP"', '"MPL"', r"\[model\] name is 'MPL'; did you mean MLP\? If not, choose one of M"),
        ('"MLP"', '"mine:Net"', r"\[model\] name is 'mine:Net', which cannot be imported"),
        ('"digits"', '"digit"', r"\[data\] name is 'digit'; did you mean digits\? If not, choose"),
        ('"er:8:0.5"', '"rign:8"', r"\[network\] graph is 'rign:8', .*; did you mean ring\?"),
        ('"er:8:0.5"', '"er:8"', r"\[network\] graph is 'er:8' with 1 number after 'er'; give 2"),
        ("[budget]", "[bugdet]", r"bugdet is unknown; did you mean budget\? If not, choose one of"),
        ("[[noise]]", "[[nosie]]", r"nosie is unknown; did you mean noise\? If not, choose one of"),
        ("seeds =", "seed =", r"seed is unknown; did you mean seeds\? If not, choose one of"),
        ("epsilon = 4.0", "epsilon = -1", r"\[budget\] epsilon is -1"),
        ("rounds = 100", "", "rounds is missing"),
        ('relation = "zero_out_record"', "", r"\[protect\] relation is missing; Protect needs it"),
        ('name = "digits"', "", r"\[data\] name is missing; give one data set's"),
        ('name = "Full"', "", r"\[sampler\] name is missing; choose one of"),
        ('name = "Independent"', "", r"\[\[noise\]\] name is missing; choose one of"),
        ("epsilon = 4.0", "", r"\[budget\] epsilon is missing; Budget needs it"),
        ("[budget]\nepsilon = 4.0", "", r"\[protect\] delta is unknown; choose one of attacker"),
        ('partition = "iid"', 'partition = "odd"', r"\[data\] partition is 'odd'; choose one of"),
        ("metrics = []", 'metrics = ["roc"]', r"\[model\] metrics is 'roc'"),
    ],
)
def test_settings_that_nothing_reads_are_refused_first(
    before: str, after: str, match: str, capsys: Capture, elsewhere: Path
) -> None:
    assert cli.main(["init"]) == 0
    file = elsewhere / "dpjax.toml"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    refused(["train", "dpjax.toml"], capsys, f"^dpjax train: error: dpjax.toml, {match}")
    assert os.listdir(elsewhere) == ["dpjax.toml"]


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        ("rounds = 100", "rounds = ", r"cannot be read \(Invalid value \(at line 5, .* mend the"),
        ("[[noise]]", "[noise]", "cannot be read .*noise"),
    ],
)
def test_file_that_is_no_toml_is_named(
    before: str, after: str, match: str, capsys: Capture
) -> None:
    assert cli.main(["init"]) == 0
    file = Path("dpjax.toml")
    file.write_text(file.read_text().replace(before, after))
    refused(["train", "dpjax.toml"], capsys, f"^dpjax train: error: dpjax.toml {match}")


SEVERAL = r"(?<![\d.,:])1 (runs|records|rounds|agents|seeds|plans|edges|files|parameters|times)\b"
"""What is said of one thing as if it were several."""


@pytest.mark.slow
def test_what_is_one_is_not_counted_as_several(
    capsys: Capture, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPJAX_DATA", str(elsewhere))
    x = np.array([[0.0], [1], [2]])
    y = np.array([-1, 1, -1])
    np.savez("one.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    np.savez("two.npz", x=x, y=y)
    assert cli.main(["data", "fetch", "one"]) == 0 and cli.main(["data", "check"]) == 0
    texts = [capsys.readouterr().out]
    assert "3 train and 1 test record," in texts[0] and "\n2 files, 0 bad" in texts[0]
    Path("one.npz").unlink()
    assert cli.main(["data", "check"]) == 0
    numbers = ["--epsilon", "1", "--delta", "1e-5", "--rounds", "1", "--clip-norm", "1"]
    numbers += ["--graph", "path:2", "--relation", "replace_agent", "--parameters", "1"]
    assert cli.main(["design", *numbers]) == 0
    once = ["--rounds", "5", "--epochs", "1", "--separation", "5", "--sigma", "1"]
    once += ["--graph", "path:2", "--relation", "zero_out_record", "--algorithm", "dsgd"]
    assert cli.main(["account", *once]) == 0
    settings = (
        'rounds = 1\nseeds = [0]\n[data]\nname = "two"\n[network]\ngraph = "path:2"\n[model]\n'
        'name = "Linear"\nloss = "logistic"\n[protect]\nrelation = "replace_agent"\n'
        "clip_norm = 1\n[budget]\nepsilon = 1\ndelta = 1e-5\n[[noise]]\n"
        'name = "Independent"\n[sampler]\nname = "Full"\n[optimizer]\nname = "Sgd"\n'
        "step_size = 1.0\n"
    )
    Path("one.toml").write_text(settings)
    assert cli.main(["train", "one.toml"]) == 0
    texts += capsys.readouterr()
    result = Result.load("run/result.npz")
    texts += [repr(result), result.guarantees[0].statement(), Path("run/report.html").read_text()]
    texts.append(str(np.load("dpjax-design.npz")["how_to_use"]))
    for text in texts:
        assert not re.search(SEVERAL, text), re.search(f".*{SEVERAL}.*", text)
    printed = "\n".join(texts)
    for name in ("1 file, 0 bad", "2 agents, 1 edge;", "over 1 round against", "in 1 round of 5",
                 "forecast for 1 parameter:", "1 plan, 1 seed, 1 round", "1 run:",
                 "two: 1 record held out", "at most 1 round ("):  # fmt: skip
        assert name in printed, name
    Path("one.toml").write_text(settings.replace('"path:2"', '"complete:3"'))
    refused(["train", "one.toml", "--out", "three"], capsys, "with at least 1 record each, but")


def test_design_prints_its_guarantee_and_writes_what_keeps_it(capsys: Capture) -> None:
    assert cli.main(DESIGN) == 0
    text = capsys.readouterr().out
    assert "relation: replace_agent (all data of one agent)\n" in text
    assert "(epsilon = 10, delta = 1e-05)-differentially private per agent" in text
    assert "over 100 rounds against an outsider" in text
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(8, 0.5, 0))
    saved = Design.load("dpjax-design.npz")
    terms = {"rounds": 100, "clip_norm": 0.1, "relation": "replace_agent"}
    saved.check(matrix, budget.precision_bound(10.0, 1e-5, **terms))  # type: ignore[arg-type]
    spent = budget.loss(saved.covariance, 1e-5, **terms)  # type: ignore[arg-type]
    assert saved.kind == "whisper_horizon" and saved.horizon == 100
    assert f"design: Whisper, whole run, [R^-1]_ii <= b = {saved.precision_bound:.6g}\n" in text
    assert spent.epsilon.max() <= 10
    figures = spatial.figures(saved.covariance, matrix)
    for key, name in design.FIGURES.items():
        (display,) = re.findall(rf"{re.escape(name)} +(\S+)", text)
        assert float(display) == pytest.approx(figures[key], rel=1e-5)
    (gap,) = re.findall(r"certified gap: .* (\S+)\n", text)
    assert float(gap) < 1e-7


def test_every_agent_of_small_network_has_line(capsys: Capture, elsewhere: Path) -> None:
    (elsewhere / "net.txt").write_text('"New York" b\nb c\nc d\nd "New York"\nb d\n')
    terms = ["--epsilon", "3", "--delta", "1e-5", "--rounds", "50", "--clip-norm", "0.2"]
    selection = ["--relation", "zero_out_record", "--kind", "whisper", "--batch-size", "8"]
    assert cli.main(["design", "--graph", "net.txt", *terms, *selection]) == 0
    text = capsys.readouterr().out
    covariance = Design.load("dpjax-design.npz").covariance
    # From the definition: mu_i = C sqrt(T [R^-1]_ii).
    mu = 0.2 * np.sqrt(50 * np.diag(np.linalg.inv(covariance)))
    for i, (name, links) in enumerate([("New York", 2), ("b", 3), ("c", 2), ("d", 3)]):
        (line,) = re.findall(rf"^{name} +(.*)$", text, re.MULTILINE)
        neighbours, deviation, epsilon = map(float, line.split())
        assert neighbours == links
        assert deviation == pytest.approx(np.sqrt(covariance[i, i]), rel=1e-3)
        exact = gdp.epsilon(mu[i], 1e-5)
        assert exact * (1 - 1e-9) <= epsilon <= exact * 1.001
    assert cli.main([*DESIGN, "--graph", "ring:25", "--kind", "independent"]) == 0
    assert "neighbours  " not in capsys.readouterr().out


def test_table_compares_designs_and_orders_them(capsys: Capture) -> None:
    assert cli.main(DESIGN) == 0
    text = capsys.readouterr().out
    rows = {}
    for name in (*(part.look.label for part in design.COMPARED.values()), "CDP (reference only)"):
        (numbers,) = re.findall(rf"^{re.escape(name)}  +(.*)", text, re.MULTILINE)
        rows[name] = [float(number) for number in numbers.split()[:2]]
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(8, 0.5, 0))
    bound = Design.load("dpjax-design.npz").precision_bound
    whisper = spatial.whisper(matrix, bound)
    energy = spatial.energy(whisper, matrix)
    all_ = spatial.energy(whisper, matrix, 100)
    assert rows["Whisper"][0] == pytest.approx(energy, rel=1e-4)
    assert rows["Whisper"][1] == pytest.approx(all_, rel=1e-4)
    order = ("CDP (reference only)", "Whisper", "pairwise", "independent")
    assert np.all(np.diff([rows[name][0] for name in order]) > 0)
    longer = ("CDP (reference only)", "Whisper, whole run", "Whisper", "pairwise", "independent")
    assert np.all(np.diff([rows[name][1] for name in longer]) > 0)
    assert "no such guarantee" in text


def test_of_many_agents_designs_that_take_minutes_are_left_out(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(design, "_MANY", 7)
    results = []
    make = design.design

    def counted(matrix: np.ndarray, kind: str, **terms: object) -> plan.Plan:
        results.append(kind)
        # Every design is said before the next one is begun.
        assert len(capsys.readouterr().err.splitlines()) == (len(results) > 1) + (kind == "whisper")
        return make(matrix, kind, **terms)  # type: ignore[arg-type]

    monkeypatch.setattr(design, "design", counted)
    assert cli.main([*DESIGN, "--kind", "pairwise"]) == 0
    assert results == ["independent", "pairwise"]
    out, err = capsys.readouterr()
    assert "left out: Whisper and Whisper, whole run, which take minutes" in out
    assert "--all-designs" in out and "\npolynomial " in out
    assert re.search("^polynomial: noise energy [0-9.]+ in one step$", err, re.MULTILINE)
    results.clear()
    assert cli.main([*DESIGN, "--kind", "whisper"]) == 0
    assert results == ["independent", "pairwise", "whisper"]
    assert "left out: Whisper, whole run, which" in capsys.readouterr().out
    monkeypatch.setattr(design, "_MANY", 8)
    monkeypatch.setattr(design, "design", make)
    assert cli.main([*DESIGN, "--kind", "pairwise"]) == 0
    out, err = capsys.readouterr()
    assert "left out" not in out and "\npolynomial " in out and not err


def test_all_designs_of_many_agents_are_compared_where_asked(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(design, "_MANY", 7)
    assert cli.main([*DESIGN, "--kind", "independent", "--all-designs"]) == 0
    out, err = capsys.readouterr()
    assert "left out" not in out
    assert all(f"\n{part.look.label} " in out for part in design.COMPARED.values())
    assert "Whisper takes minutes for 8 agents; --kind pairwise is quick\n" in err


def test_design_says_whom_it_does_not_protect(
    capsys: Capture,
) -> None:
    assert cli.main(DESIGN) == 0
    text = capsys.readouterr().out
    assert "NOT protected" in text and "--kind" in text
    bound = Design.load("dpjax-design.npz").precision_bound
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(8, 0.5, 0))
    single = spatial.figures(spatial.independent(matrix, bound), matrix)
    for key, name in design.FIGURES.items():
        (beside,) = re.findall(rf"{re.escape(name)} +\S+ +(\S+)", text)
        assert float(beside) == pytest.approx(single[key], rel=1e-5)
    assert cli.main([*DESIGN, "--kind", "independent"]) == 0
    text = capsys.readouterr().out
    assert "a secret of its own" in text and "NOT protected" not in text


def test_design_forecasts_model(capsys: Capture) -> None:
    assert cli.main([*DESIGN, "--parameters", "5000"]) == 0
    text = capsys.readouterr().out
    config = make_config(epsilon=10.0, rounds=100, clip_norm=0.1)
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(8, 0.5, 0))
    for kind, part in design.COMPARED.items():
        forecast = plan.make(config.using(part), matrix).forecast(5000)
        (line,) = re.findall(rf"^{re.escape(part.look.label)}  +(.*)", text, re.MULTILINE)
        assert float(line.split()[2]) == pytest.approx(forecast.ratio, rel=6e-3)
        assert float(line.split()[3].replace(",", "")) == forecast.affords()
        if kind == "whisper_horizon":
            assert forecast.statement() in text and forecast.level == "hopeless"
    # Without a model, the largest that each design affords.
    assert cli.main(DESIGN) == 0
    text = capsys.readouterr().out
    assert "largest model" in text and "hopeless" not in text and "forecast for" not in text
    records = ["--relation", "zero_out_record", "--parameters", "50", "--batch-size", "64"]
    assert cli.main([*DESIGN, *records]) == 0
    assert "batches of 64" in capsys.readouterr().out
    refused([*DESIGN, "--parameters", "0"], capsys, "parameters is 0")


def test_file_has_terms_names_and_instructions(capsys: Capture, elsewhere: Path) -> None:
    (elsewhere / "sites.txt").write_text("Lyon Paris\nParis Brest\nBrest Nice\nNice Lyon\n")
    arguments = ["design", "--graph", "sites.txt", "--relation", "replace_agent", *NUMBERS]
    assert cli.main([*arguments, "--out", "it.npz"]) == 0
    assert 'numpy.load("it.npz")["how_to_use"]' in capsys.readouterr().out
    with np.load("it.npz", allow_pickle=False) as file:
        entries = {name: file[name][()] for name in file.files}
    assert entries["labels"].tolist() == ["Lyon", "Paris", "Brest", "Nice"]
    reported = {
        name: entries[name] for name in ("epsilon", "delta", "rounds", "clip_norm", "relation")
    }
    assert reported == {
        "epsilon": 10, "delta": 1e-5, "rounds": 100, "clip_norm": 0.1, "relation": "replace_agent"
    }  # fmt: skip
    matrix = mixing.metropolis_hastings(graphs.from_edgelist("sites.txt"))
    np.testing.assert_array_equal(entries["mixing"], matrix)
    assert "In each round t = 0, 1, ..., 99" in str(entries["how_to_use"])


def test_noise_that_is_large_before_it_cancels_is_named(capsys: Capture, elsewhere: Path) -> None:
    terms = ["--epsilon", "10", "--delta", "1e-5", "--rounds", "2000", "--clip-norm", "1"]
    selection = ["--relation", "replace_agent", "--kind", "pairwise", "--out", "it.npz"]
    assert cli.main(["design", "--graph", "complete:6", *terms, *selection]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "noise.Whisper('run', max_variance=20)" in text
    assert "this command has no option for it" in text
    assert "NOTE: messages need float64: some noise has a deviation of" in text
    # What it advises is there, and bounds the noise.
    config = make_config(noise=noise.Whisper("run", max_variance=20), rounds=10)
    bounded = plan.make(config, mixing.metropolis_hastings(graphs.complete(6)))
    single = plan.make(config.using(noise.Independent()), bounded.mixing)
    assert bounded.covariance().max() <= 20.001 * single.covariance().max()


def test_existing_file_is_never_replaced(capsys: Capture, elsewhere: Path) -> None:
    first = elsewhere / "dpjax-design.npz"
    first.write_text("precious")
    assert cli.main(DESIGN) == 0
    assert "dpjax-design-2.npz" in capsys.readouterr().out
    assert first.read_text() == "precious"
    Design.load("dpjax-design-2.npz")
    refused([*DESIGN, "--out", str(first)], capsys, "out is .*which exists; name another file")
    refused([*DESIGN, "--out", "dpjax-design"], capsys, "which exists")
    assert first.read_text() == "precious"


@pytest.mark.slow
def test_letters_that_terminal_lacks_are_written_in_others(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    Path("sites.txt").write_text(
        "Z\u00fcrich Oslo\nOslo Rome\nRome Z\u00fcrich\n", encoding="utf-8"
    )
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    words = ["account", "--graph", "sites.txt", "--algorithm", "dsgd", "--rounds", "3"]
    words += ["--sigma", "2", "--relation", "replace_record"]
    assert cli.main(words) == 0
    sys.stdout.flush()
    text = raw.getvalue().decode("ascii")
    assert "Z\\xfcrich" in text and text.rstrip().endswith(".svg")


@pytest.mark.slow
def test_reader_that_stops_reading_costs_nothing(elsewhere: Path) -> None:
    command = f"{sys.executable} -m dpjax {' '.join(DESIGN)} | true"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    # Older versions of jaxlib print a warning when they read what another process compiled.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
    assert not done.stderr
    Design.load(elsewhere / "dpjax-design.npz")


@pytest.mark.slow
def test_help_may_be_cut_short_and_completion_is_written(elsewhere: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    for words in ("--help", "account --help", "--tyro-print-completion bash"):
        command = f"{sys.executable} -m dpjax {words} | true"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
        assert not done.stderr
    page = ROOT / "docs" / "start" / "install.md"
    assert "dpjax --tyro-write-completion bash" in page.read_text()
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["--tyro-write-completion", shell, str(elsewhere / shell)]) == 0
        text = (elsewhere / shell).read_text()
        assert all(option in text for option in ("attacker", "relation", "where"))


def test_place_that_cannot_be_written_is_one_line(capsys: Capture, elsewhere: Path) -> None:
    (elsewhere / "file").write_text("")
    refused([*DESIGN, "--out", "file/it.npz"], capsys, "'file/it.npz', which cannot be written")


def test_options_reach_design(capsys: Capture, elsewhere: Path) -> None:
    (elsewhere / "net.txt").write_text("a b\nb c\nc d\nd a\na c\n")
    arguments = ["design", "--graph", "net.txt", *NUMBERS, "--relation", "zero_out_record"]
    arguments += ["--mixing", "uniform", "--kind", "whisper_horizon", "--horizon", "7"]
    refused(arguments, capsys, "batch_size is missing under relation 'zero_out_record'.*give")
    arguments += ["--batch-size", "16"]
    refused([*arguments, "--out", "made/it.npz"], capsys, "whose folder does not exist")
    (elsewhere / "made").mkdir()
    assert cli.main([*arguments, "--accountant", "rdp", "--out", "made/it.npz"]) == 0
    text = capsys.readouterr().out
    assert "relation: zero_out_record (one record of one agent, against its absence)\n" in text
    assert "per record" in text and "Renyi" in text and "7 rounds" in text
    bound = budget.precision_bound(
        10.0, 1e-5, rounds=100, clip_norm=0.1, relation="zero_out_record", accountant="rdp"
    )
    matrix = mixing.uniform_neighbors(graphs.from_edgelist("net.txt"))
    assert Design.load("made/it.npz").check(matrix, bound).horizon == 7


def test_seed_chooses_graph(capsys: Capture) -> None:
    assert cli.main([*DESIGN, "--seed", "3", "--kind", "independent"]) == 0
    text = capsys.readouterr().out
    assert "seed 3" in text and re.search(r"certified gap: .*none known", text)
    matrix = mixing.metropolis_hastings(graphs.erdos_renyi(8, 0.5, 3))
    saved = Design.load("dpjax-design.npz")
    assert saved.mixing_fingerprint == mixing.fingerprint(matrix)


def test_paper_s_rule_is_refused_where_it_is_false(capsys: Capture) -> None:
    arguments = [*DESIGN, "--accountant", "paper", "--epsilon", "60"]
    refused(arguments, capsys, "its rule is false")
    assert cli.main([*arguments, "--allow-unsound"]) == 0
    assert "FALSE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (["--epsilon", "-1"], "epsilon is -1"),
        (["--epsilon", "nan"], "epsilon is nan"),
        (["--delta", "2"], "delta is 2"),
        (["--rounds", "0"], "rounds is 0"),
        (["--clip-norm", "0"], "clip_norm is 0"),
        (["--horizon", "0"], "horizon is 0"),
        (["--seed", "-1"], "seed is -1|er:8:0.5:-1"),
        # What nothing would read.
        (["--batch-size", "64"], "batch_size is 64 under relation 'replace_agent'.*leave it out"),
        (["--allow-unsound"], "allow_unsound is True with accountant 'gdp'.*leave it out"),
        (["--graph", "ring:8", "--seed", "3"], "seed is 3 for graph 'ring:8'.*leave it out"),
        (["--graph", "er:8:0.5:1", "--seed", "3"], "seed is 3 for graph 'er:8:0.5:1'"),
        (["--graph", "nowhere.txt"], "neither a file nor a known name"),
        (["--graph", "er:40:0.01"], "all disconnected"),
        (["--graph", "exponential:8"], "exponential|directed|graph"),
    ],
)
def test_bad_input_is_one_line(change: list[str], match: str, capsys: Capture) -> None:
    refused([*DESIGN, *change], capsys, match)
    assert not list(Path().glob("*.npz"))


@pytest.mark.parametrize("arguments", [["desing"], ["design"], [*DESIGN, "--rounds", "many"]])
def test_command_line_that_does_not_parse_is_status_2(
    arguments: list[str], capsys: Capture
) -> None:
    assert cli.main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_data_lists_what_is_here(capsys: Capture, elsewhere: Path) -> None:
    canonical.write_archive(
        elsewhere / "cache" / "own.npz", {"x": np.ones((2, 1)), "y": np.arange(2)}
    )
    assert cli.main(["data", "list"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"a9a +can be fetched", text) and re.search(r"own +here, ", text)
    assert re.search(r"digits +with scikit-learn", text)
    assert cli.main(["data"]) == 0
    assert capsys.readouterr().out == text
    assert cli.main(["data", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(elsewhere / "cache")


def test_data_that_is_not_whole_is_not_here(
    capsys: Capture, elsewhere: Path, real_data: Callable[[str], Path]
) -> None:
    """Other records, a cut file, an unpacked archive, and an edge list of another network."""
    folder = elsewhere / "cache"
    canonical.write_archive(folder / "a9a.npz", {"x": np.ones((2, 1)), "y": np.arange(2)})
    canonical.read_archive(folder / "a9a.npz")  # As a user's own file: whole, and noted so.
    (folder / "mnist.npz").write_bytes(b"PK")
    (folder / "housing.npz").mkdir()
    (folder / "facebook_ego.edgelist").write_text("a b\n")
    shutil.copy(real_data("w8a"), folder)
    for _ in range(2):
        assert cli.main(["data", "list"]) == 0
        text = capsys.readouterr().out
        for name in ("a9a", "mnist", "housing", "facebook_ego"):
            assert re.search(rf"^  {name} +BAD ", text, re.MULTILINE), text
        assert re.search(r"w8a +here, ", text) and "`dpjax data check` says what" in text
    refused(["data", "fetch", "facebook_ego"], capsys, "the ego network has 148 and 1692")


def test_data_check_finds_bad_file(capsys: Capture, elsewhere: Path) -> None:
    assert cli.main(["data", "check"]) == 0
    canonical.write_archive(
        elsewhere / "cache" / "own.npz", {"x": np.ones((2, 1)), "y": np.arange(2)}
    )
    assert cli.main(["data", "check"]) == 0
    assert "own: whole" in capsys.readouterr().out
    canonical.write_archive(
        elsewhere / "cache" / "a9a.npz", {"x": np.ones((2, 1)), "y": np.arange(2)}
    )
    (elsewhere / "cache" / "w8a.npz").write_bytes(b"PK")
    assert cli.main(["data", "check"]) == 1
    text = capsys.readouterr().out
    assert "a9a: BAD: " in text and "other train records" in text
    assert "w8a: BAD: " in text and "cannot be read" in text and "3 files, 2 bad" in text


def test_data_fetch(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, real_data: Callable[[str], Path]
) -> None:
    assert cli.main(["data", "fetch", "digits"]) == 0
    assert "no file is needed" in capsys.readouterr().out
    refused(["data", "fetch", "nothing"], capsys, "name is 'nothing'; choose one of")
    path = real_data("a9a")
    monkeypatch.setenv("DPJAX_DATA", str(path.parent))
    assert cli.main(["data", "fetch", "a9a"]) == 0
    text = capsys.readouterr().out
    assert "32,561 train and 16,281 test records" in text and str(path) in text


def test_plot_hands_over(capsys: Capture, monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    plots = pytest.importorskip("dpjax.results.plots")
    observed: dict[str, object] = {}

    def from_records(path: object, **options: object) -> Path:
        observed.update(options, path=path)
        return elsewhere / "figure.svg"

    monkeypatch.setattr(plots, "from_records", from_records)
    command = ["plot", "a.jsonl", "b.jsonl", "--x", "epsilon", "--out", "f.svg", "--log-y"]
    assert cli.main([*command, "--where", "graph=ring", "--where", "seed=1"]) == 0
    assert "figure.svg" in capsys.readouterr().out
    want: dict[str, object] = {
        "path": (Path("a.jsonl"), Path("b.jsonl")),
        "x": "epsilon",
        "y": None,
        "series": None,
    }
    want |= {"where": ("graph=ring", "seed=1"), "log_x": False, "log_y": True, "file": "*"}
    assert observed == want | {"out": Path("f.svg")}
    refused(["plot"], capsys, "path is missing")


def test_example_of_plot_s_help_is_drawn() -> None:
    """Of what the command before it writes: an installed user has no records of a checkout."""
    pytest.importorskip("pandas")
    words = "account --graph ring:4 --relation replace_record --rounds 5 --sigma 1"
    assert cli.main(words.split()) == 0
    example = (plot.plot_command.__doc__ or "").partition("Example: dpjax ")[2]
    example = example.partition("\n\n")[0]
    assert cli.main([*example.split(), "--out", "it.svg"]) == 0
    assert Path("it.svg").is_file()


def test_plot_of_no_file_is_one_line(capsys: Capture) -> None:
    pytest.importorskip("dpjax.results.plots")
    refused(["plot", "nowhere.jsonl"], capsys, "nowhere")


def test_console_script_is_this_main() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dpjax = "dpjax.cli:main"' in text
