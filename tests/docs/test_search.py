"""The search of the built site: what users ask finds the page that answers."""

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def site() -> Path:
    """The built site, which `.ci/run` names."""
    folder = os.environ.get("DPJAX_SITE")
    if not folder:
        pytest.skip("DPJAX_SITE names no built site: python -m sphinx docs site")
    if not shutil.which("node"):
        pytest.skip("node is missing, which runs the search of the site")
    return Path(folder)


def first_hits(site: Path, queries: list[str]) -> list[list[str]]:
    """The pages of the first three hits of every query."""
    command = ["node", str(HERE / "search.js"), str(site)]
    answer = subprocess.run(
        command, input=json.dumps(queries), capture_output=True, text=True, check=True
    )
    return [[hit.partition("#")[0] for hit in hits[:3]] for hits in json.loads(answer.stdout)]


@pytest.mark.parametrize("name", ["questions", "more_questions", "newcomer_questions"])
def test_questions_find_their_page(site: Path, name: str) -> None:
    questions = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))
    assert len(questions) >= 20
    hits = dict(zip(questions, first_hits(site, list(questions)), strict=True))
    missed = {}
    for query, pages in questions.items():
        # One page answers, or each of several.
        answers = {pages} if isinstance(pages, str) else set(pages)
        if not answers & set(hits[query]):
            missed[query] = hits[query]
    assert not missed


def test_evidence_is_not_searched(site: Path) -> None:
    (hits,) = first_hits(site, ["reproduced the paper leaves it open"])
    assert not any(page.startswith("artifact/") for page in hits)
