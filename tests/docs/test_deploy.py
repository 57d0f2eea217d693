"""The page of real sites: its keys, its messages, and every command that it shows."""

import ast
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from dpjax import cli
from dpjax.plans import noise
from dpjax.sites import data, project, relay, start
from dpjax.sites.identity import Authority, Renewal, Roster, request
from tests.sites.test_hospitals import ROOT, example  # noqa: F401
from tests.sites.test_project import EVEN, roster, written

PAGE = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples/hospitals"
(RENEW,) = re.findall("^dpjax site renew .*$", PAGE, re.MULTILINE)
RELAY = "dpjax site relay relay.toml"
OF_PLANS_IN_PYTHON = {"home", "certificates", "seed", "average_rounds", "spoiled"}


def blocks(language: str) -> list[str]:
    """Code of the page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def cells(heading: str) -> list[str]:
    """First cells of the table that follows a heading."""
    table = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)


def comments(file: str) -> dict[str, list[str]]:
    """Words of the lines of a table in an example's comments, by the first one."""
    text = (EXAMPLE / file).read_text(encoding="utf-8")
    lines = re.findall(r"^#   (\w+)(.*)$", text, re.MULTILINE)
    return {name: re.split(r"\s{2,}", rest.strip()) for name, rest in lines}


SECRETS = {
    "own": "each site its own",
    "links": "each pair of neighbours",
    "shared": "all sites",
    "group": "all sites, or a subgroup",
}


def test_example_lists_all_noise_that_sites_draw(tmp_path: Path) -> None:
    stated = comments("study.toml")
    kinds = {name: kind for name, kind in vars(noise).items() if name in noise.__all__}
    drawn = set()
    for name, kind in kinds.items():
        if not isinstance(kind, type):
            continue
        section = {"name": name}
        if name == "Whisper":
            section["subgroups"] = [[0, 1], [2]]
        try:
            made = written(tmp_path / name, **EVEN, noise=[section])
        except ValueError:
            continue
        drawn.add(name)
        *keys, holders = stated[name]
        assert " ".join(keys).split() == list(inspect.signature(kind).parameters), name
        assert holders == SECRETS[made.plan.guarantee.secrets], name
    assert set(stated) == drawn and len(drawn) > 10


def test_example_lists_all_keys_of_a_column() -> None:
    keys = {kind: set(section) for kind, section in data._KINDS.items()}
    stated = comments("schema.toml")
    assert {kind: set(words[0].split()) & keys[kind] for kind, words in stated.items()} == keys
    defaults = {key: value for section in data._KINDS.values() for key, value in section.items()}
    text = (EXAMPLE / "schema.toml").read_text(encoding="utf-8")
    for key in ("missing", "other"):
        assert f"{key} = {json.dumps(defaults[key])} by default" in text


def test_example_predicts_as_the_model_does(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    settings = tomllib.loads((EXAMPLE / "study.toml").read_text(encoding="utf-8"))
    schema = tomllib.loads((EXAMPLE / "schema.toml").read_text(encoding="utf-8"))
    made = project.write(settings, roster("lyon", "geneva", "turin"), schema, tmp_path / "p.json")
    rng = np.random.default_rng(0)
    model = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype("f4"), made.shapes)
    # As a site saves it.
    arrays = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(model)}
    np.savez(tmp_path / "model.npz", statement="", **made.described(), **arrays)
    header = "age,pressure,creatinine,sex,ward,readmitted\n"
    (tmp_path / "records.csv").write_text(f"{header}71,140,1.2,male,surgery,no\n")
    record = data.read({"file": "records.csv"}, made.schema, tmp_path)
    script = runpy.run_path(str(EXAMPLE / "predict.py"))
    assert set(script["RECORD"]) <= set(made.schema.features)
    script["main"](tmp_path / "model.npz")
    score = float(made.module.apply(model, record.x)[0])
    printed = capsys.readouterr().out
    assert printed.startswith(f"readmitted: {made.schema.classes[int(score > 0)]}, score ")
    assert float(printed.split()[-1]) == pytest.approx(score, rel=1e-4)


def test_table_has_all_keys_of_settings() -> None:
    names = {name for cell in cells("site.toml") for name in re.findall(r"`(\w+)`", cell)}
    assert names == start._KEYS - OF_PLANS_IN_PYTHON


def test_page_has_all_keys_of_a_relay(tmp_path: Path) -> None:
    section = PAGE.partition("\n## Without open ports: a relay\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section.partition("```")[0]))
    assert named == {*relay.NEEDED, *relay.OPTIONAL}
    (line,) = re.findall(r"`(relays = .*?)`", section)
    path = tmp_path / "site.toml"
    path.write_text(line, encoding="utf-8")
    ((name, address),) = start.settings_of(path)["relays"].items()
    assert relay.endpoint(name, address) == ("relay.example.org", 443)


def test_settings_of_page_are_read(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    path = tmp_path / "site.toml"
    path.write_text(text, encoding="utf-8")
    assert start.settings_of(path)["neighbours"] == {"lyon": "sites.lyon.example:7000"}
    # What the example's script writes differs in addresses alone.
    lines = (EXAMPLE / "run").read_text(encoding="utf-8").partition('SITE_TOML = """\\\n')[2]
    template = lines.partition('"""')[0].format(
        name="geneva",
        links='listen = "0.0.0.0:7000"\n\n[neighbours]\nlyon = "sites.lyon.example:7000"\n',
        data="",
    )
    assert text.startswith(template)


def phrases(message: str) -> list[str]:
    """What of a message stands in the package, between what it is about."""
    return [part.strip() for part in message.strip("`").split("...") if part.strip()]


def texts() -> str:
    """All texts of the package's sites and what they call."""
    paths = [*(ROOT / "dpjax/sites").glob("*.py"), ROOT / "dpjax/_validate.py"]
    values = []
    others = ("plans/settings.py", "engine/arguments.py")
    for path in [*paths, *(ROOT / "dpjax" / other for other in others)]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                values.append(node.value)
    return "\n".join(values)


def test_messages_of_page_are_those_of_package() -> None:
    # Some are put together of an argument's name and what is wrong with it.
    written = texts() + "\nlisten is missing\nis unknown; did you mean\n"
    for cell in cells("What goes wrong"):
        for phrase in phrases(cell):
            assert phrase.strip("; ") in written, phrase


@pytest.mark.mutant
def test_message_that_is_gone_is_caught() -> None:
    assert phrases("`sent three messages in round ...`")[0] not in texts()


@pytest.mark.slow
def test_commands_of_page_run_one_after_other(tmp_path: Path) -> None:
    for name in ("study.toml", "schema.toml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    study = (tmp_path / "study.toml").read_text(encoding="utf-8")
    study, count = re.subn(r"^edges = .*$", 'graph = "edges.txt"', study, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "study.toml").write_text(study, encoding="utf-8")
    (tmp_path / "edges.txt").write_text(blocks("text")[0], encoding="utf-8")
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("dpjax ")]
    # These need the others' processes, or an old key: the example runs them, and a test below.
    others = {"dpjax site run site.toml", "dpjax site status run", RENEW, RELAY}
    assert others < set(commands) and len(commands) == 9
    for command in commands:
        repeated = ["lyon", "geneva", "turin"] if " request " in command else ["lyon"]
        for name in repeated if command not in others else ():
            words = command.replace("lyon", name) if len(repeated) > 1 else command
            done = subprocess.run(
                [sys.executable, "-m", *words.split()], cwd=tmp_path, capture_output=True,
                encoding="utf-8", env=os.environ | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.npz").exists() and (tmp_path / "trial/lyon.pem").exists()


def test_new_key_of_page_is_accepted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    roots = ""
    for folder in ("old", "new"):
        key, demand = request("lyon", folder)
        # The one for trials gives a name to one key alone.
        authority = Authority(f"authority of {folder}")
        shutil.copy(authority.sign(demand), folder)
        roots += authority.certificate.read_text(encoding="utf-8")
    Path("authority_root.pem").write_text(roots, encoding="utf-8")
    _, demand = request("turin", "turin")
    roster = Roster.of_certificates(["old/lyon.pem", Authority("authority of old").sign(demand)])
    assert cli.main(RENEW.split()[1:]) == 0
    renewed = roster.renewed(Renewal.from_bytes(Path("lyon.renewal").read_bytes()))
    assert len(renewed.accepted("lyon")) == 2 and renewed.digest == roster.digest


@pytest.mark.slow
def test_loop_of_page_is_site_among_others(example, tmp_path: Path) -> None:  # noqa: F811
    hospitals = example.hospitals_of(tmp_path, 3, False)
    example.prepare(tmp_path, hospitals, example.edges_of([site.name for site in hospitals]))
    for hospital in hospitals[::2]:
        hospital.start()
    try:
        done = hospitals[1].call(sys.executable, "-c", blocks("python3")[0])
        assert done == ""
        example.wait_for(hospitals[::2], lambda: all(s.process.poll() == 0 for s in hospitals[::2]))
    finally:
        for hospital in hospitals[::2]:
            hospital.process.kill()
            hospital.process.wait()
    assert list((hospitals[1].folder / "board").iterdir())
    assert (hospitals[1].folder / "model.npz").exists()
    status = json.loads((hospitals[1].run / "status.json").read_text(encoding="utf-8"))
    assert status["doing"] == "is done"


def test_dockerfile_runs_what_is_there() -> None:
    text = (EXAMPLE / "Dockerfile").read_text(encoding="utf-8")
    version = re.search(r"^ARG VERSION=(\S+)$", text, re.MULTILINE)[1]
    assert version == tomllib.loads(f'v = "{start.__version__}"')["v"]
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert text.index("USER 10001") < text.index("ENTRYPOINT")
    entry = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)[1])
    check = json.loads(re.search(r"^HEALTHCHECK .*\n\s*CMD (\[.*\])$", text, re.MULTILINE)[1])
    assert entry == ["dpjax", "site", "run"] and check[:3] == ["dpjax", "site", "status"]
    volumes = json.loads(re.search(r"^VOLUME (\[.*\])$", text, re.MULTILINE)[1])
    assert volumes == ["/site", "/secrets"]
    for volume in volumes:
        assert f"`{volume}`" in PAGE
