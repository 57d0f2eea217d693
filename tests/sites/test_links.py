"""Sites whose links have noise: keys of both ends, the same normals, and no third who has them.

Also noise by schedule at sites, which needs no more than a secret of the site's own.
"""

import dataclasses
import functools
import stat
from pathlib import Path

import jax
import numpy as np
import pytest

import dpjax as dp
from dpjax.accounting import finite
from dpjax.plans.links import PairKeys
from dpjax.plans.scheduled import ScheduledGaussian
from dpjax.secagg.primitives import key_pair
from dpjax.sites import wire
from dpjax.sites.compute import SiteRounds
from dpjax.sites.identity import Identity
from dpjax.sites.noise import SiteNoise, of_pair
from dpjax.sites.store import Audit, MustLeave
from dpjax.topology.links import link_pairs
from tests.sites import test_site
from tests.sites.test_compute import (
    RUN,
    SITES,
    Replayed,
    check_restored,
    plan_of,
    trained,
    with_sources,
)
from tests.sites.test_site import NAMES, Agreed, Killed, Runner, equal_models, killing, sent_by

ROUNDS = 12
identities = test_site.identities
"""Certificates of all sites."""
DESIGNS = {"links": PairKeys(2.0), "schedule": ScheduledGaussian(0.8)}
PRIVATE = [bytes([site + 51] * 32) for site in range(SITES)]


def own_source(site: int) -> SiteNoise:
    return SiteNoise(bytes([site + 1] * 32), run=RUN, holder=NAMES[site])


def link_source(site: int, other: int) -> SiteNoise:
    ends = {NAMES[end]: key_pair(PRIVATE[end]).public for end in (site, other)}
    return of_pair(PRIVATE[site], ends, NAMES[other], run=RUN)


def site_of(plan: dp.Plan, site: int) -> SiteRounds:
    """With its own noise, then that of its links by the other ends' numbers."""
    sources = [own_source(site)]
    if plan.guarantee.secrets == "links":
        sources += [link_source(site, other) for other in plan.senders[site]]
    return with_sources(plan, site, [(source, 1) for source in sources])


@functools.cache
def planned(name: str, rounds: int = ROUNDS) -> dp.Plan:
    return plan_of(DESIGNS[name], rounds)


@pytest.mark.parametrize("name", DESIGNS)
def test_sites_train_the_models_of_one_loop_with_their_normals(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All normals in one process, which a release refuses: the refusal is taken away here."""
    plan = planned(name)
    pairs = link_pairs(plan.mixing) if name == "links" else []
    own = [own_source(site) for site in range(SITES)]
    sources = [*own, *(link_source(int(i), int(j)) for i, j in pairs)]
    design = type(plan.config.noise)
    terms = dataclasses.replace(design.terms, one_process=True)
    monkeypatch.setattr(design, "terms", terms)
    together = Replayed(plan, [(source, 1) for source in sources], monkeypatch, tmp_path)
    together.check(trained({i: site_of(plan, i) for i in range(SITES)}, ROUNDS))
    assert site_of(plan, 0).guarantee == together.guarantee


@pytest.mark.parametrize("name", DESIGNS)
def test_a_restored_state_sends_the_same_bits(name: str) -> None:
    check_restored(lambda site: site_of(planned(name), site), 0, 3)


class _Silent:
    """A source of zeros, in place of a link's."""

    def normals(self, *, round: int, group: int, rows: int, entries: int) -> np.ndarray:
        return np.zeros((rows, entries))


def test_noise_of_links_cancels_in_the_sum_to_the_grid() -> None:
    plan = planned("links")
    assert plan.grid is not None
    messages = []
    for silent in (False, True):
        vectors = []
        for i in range(SITES):
            site = site_of(plan, i)
            if silent:
                site.begin([own_source(i), *(_Silent() for _ in plan.senders[i])])
            leaves = jax.tree.leaves(site.outgoing(site.init()).message)
            vectors.append(np.concatenate([np.ravel(leaf) for leaf in leaves]))
        messages.append(np.array(vectors, np.float64))
    # A model moves by the step over the number of records for one unit of the noisy sum.
    noise = (messages[0] - messages[1]) * 30 / 0.3
    scale = float(plan.noise.scale) * 2.0**0.5
    assert 0.5 * scale < np.abs(noise).mean() < 2 * scale
    # What float32 models round comes on top.
    assert np.abs(noise.sum(axis=0)).max() <= SITES * plan.grid.spacing + 1e-3


def test_both_ends_of_a_link_draw_alike_and_nobody_else() -> None:
    address = {"round": 3, "group": 0, "rows": 1, "entries": 50}
    drawn = link_source(0, 1).normals(**address)
    np.testing.assert_array_equal(link_source(1, 0).normals(**address), drawn)
    public = {name: key_pair(private).public for name, private in zip(NAMES, PRIVATE, strict=True)}
    ends = {name: public[name] for name in NAMES[:2]}
    others = [
        # A third site, with its own key against each end's, under both names.
        of_pair(PRIVATE[2], ends, NAMES[0], run=RUN),
        of_pair(PRIVATE[2], ends, NAMES[1], run=RUN),
        # A third that shows the first one's public key as its own, so that both agree on the same.
        of_pair(PRIVATE[1], {NAMES[1]: public[NAMES[1]], NAMES[2]: public[NAMES[0]]}, NAMES[2],
                run=RUN),
        # Other runs, phases, and the other links of both ends.
        of_pair(PRIVATE[0], ends, NAMES[1], run=bytes(range(2, 34))),
        of_pair(PRIVATE[0], ends, NAMES[1], run=RUN, phase=1),
        link_source(0, 3),
        link_source(1, 2),
    ]  # fmt: skip
    for other in others:
        assert not np.isclose(other.normals(**address), drawn).any()


def test_released_factor_of_a_site_is_its_row_with_a_sign() -> None:
    plan = planned("links")
    scale = float(plan.noise.scale)
    for i in range(SITES):
        site = site_of(plan, i)
        (row,) = np.asarray(site._part.instance.arrays["factor"])
        signs = [1 if i < other else -1 for other in plan.senders[i]]
        expected = [scale, *(sign * scale * 2.0**0.5 for sign in signs)]
        np.testing.assert_allclose(row, expected, rtol=1e-7)
    assert plan.grid == finite.release_grid(plan.factor, ROUNDS)


# The loop.


def linked(runner_or: Agreed, folder: Path, identities: dict[str, Identity]) -> Runner:
    """A runner whose folders have secrets of these numbers, as if sites had drawn them."""
    runner = Runner(runner_or, identities, folder)
    runner.prepare()
    for number, name in enumerate(NAMES):
        (folder / name / "secret").write_bytes(bytes([number + 101] * 32))
        if runner_or.plan.guarantee.secrets == "links":
            (folder / name / "exchange").write_bytes(PRIVATE[number])
    return runner


@pytest.fixture(scope="module")
def undisturbed(identities: dict[str, Identity], tmp_path_factory) -> dict[str, dict]:
    models = {}
    for name in DESIGNS:
        agreed = Agreed(planned(name, 3), identities, 2)
        runner = linked(agreed, tmp_path_factory.mktemp("run"), identities)
        for site in NAMES:
            runner.start(site)
        models[name] = runner.finished()
        for site in NAMES:
            folder = runner.folder / site
            assert Audit.check(folder / "audit.jsonl") > 1
            assert not (folder / "secret").exists() and not (folder / "exchange").exists()
    return models


@pytest.mark.parametrize(
    ("name", "step", "after"),
    [("links", 21, False), ("links", 30, True), ("links", 47, False), ("schedule", 27, False)],
)
def test_a_kill_changes_no_bit_of_any_model(
    name: str, step: int, after: bool, identities, undisturbed, tmp_path: Path
) -> None:
    runner = linked(Agreed(planned(name, 3), identities, 2), tmp_path, identities)
    for site in NAMES[1:]:
        runner.start(site)
    runner.start(NAMES[0], killing(step, after))
    runner.threads[NAMES[0]].join(60)
    assert isinstance(runner.results[NAMES[0]], Killed)
    runner.start(NAMES[0])
    assert equal_models(runner.finished(), undisturbed[name])
    payloads = sent_by(runner.network)
    assert len(payloads) == SITES * 5 and all(len(data) == 1 for data in payloads.values())


@pytest.fixture
def runner(identities: dict[str, Identity], tmp_path: Path) -> Runner:
    return Runner(Agreed(planned("links", 3), identities), identities, tmp_path)


def greeted(runner: Runner, site, name: str, exchange: bytes) -> str | None:
    """Why a neighbour's hello is refused."""
    terms = site.agreement.terms()
    presence = wire.signed_presence(runner.identities[name], bytes([9] * 32), terms, exchange)
    return site._conversation.check(name, wire.encoded(wire.Greeting(presence, b"", ())))


def test_keys_for_links_that_are_none_or_of_low_order_are_refused_by_name(runner: Runner) -> None:
    site = runner.site("geneva")
    # Points of order 1, 2, 4 and 8, and one above the field's prime.
    low = [
        bytes(32),
        bytes([1, *bytes(31)]),
        bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
        bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
        bytes.fromhex("ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
        bytes.fromhex("edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f"),
    ]
    for exchange in (*low, b"x", bytes(range(33))):
        reason = greeted(runner, site, "lyon", exchange)
        assert reason is not None and reason.startswith("lyon shows a key for links")
    assert greeted(runner, site, "lyon", b"") == (
        "lyon differs in whether it shows a key for links"
    )
    assert greeted(runner, site, "lyon", key_pair().public) is None
    site.close()


def test_a_key_for_links_is_refused_where_the_plan_has_none(
    identities: dict[str, Identity], tmp_path: Path
) -> None:
    runner = Runner(Agreed(planned("schedule", 3), identities), identities, tmp_path)
    site = runner.site("geneva")
    assert site._conversation.presences["geneva"].exchange == b""
    reason = greeted(runner, site, "lyon", key_pair().public)
    assert reason == "lyon differs in whether it shows a key for links"
    assert not (tmp_path / "geneva" / "exchange").exists()
    site.close()


def begun(runner: Runner):
    """A site whose run has a name; others' private keys are those above."""
    site = runner.site("geneva")
    for number, name in enumerate(NAMES[1:], 1):
        presence = wire.signed_presence(
            runner.identities[name],
            bytes([number] * 32),
            site.agreement.terms(),
            key_pair(PRIVATE[number]).public,
        )
        test_site.hear(site, NAMES[1], wire.Presences((presence,)))
    assert len(site._conversation.run) == 32
    site._draw()
    return site


def test_a_private_key_is_on_disk_before_its_public_key_and_nowhere_else(runner: Runner) -> None:
    site = begun(runner)
    folder = runner.folder / "geneva"
    private = (folder / "exchange").read_bytes()
    assert stat.S_IMODE((folder / "exchange").stat().st_mode) == 0o600
    presence = site._conversation.presences["geneva"]
    assert presence.exchange == key_pair(private).public
    # Signed: another key under the same signature is refused.
    forged = presence._replace(exchange=key_pair().public)
    with pytest.raises(wire.Refused, match="not signed by the site"):
        wire.check_presence(forged, site.agreement.roster)
    # The link's secret is derived, and kept in memory alone.
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "exchange":
            content = path.read_bytes()
            assert private not in content and private.hex().encode() not in content
    assert private not in wire.encoded(wire.Presences((presence,)))
    assert "Site" in repr(site) and private.hex() not in repr(vars(site))
    # Its sources are its own and those of both neighbours, as the neighbours draw them.
    sources = site.compute._sources
    address = {"round": 0, "group": 0, "rows": 1, "entries": 8}
    for place, other in enumerate((1, 3), 1):
        ends = {
            name: site._conversation.presences[name].exchange for name in ("geneva", NAMES[other])
        }
        theirs = of_pair(PRIVATE[other], ends, "geneva", run=site._conversation.run)
        np.testing.assert_array_equal(sources[place].normals(**address), theirs.normals(**address))
    site.close()


def test_the_name_of_a_run_follows_from_the_keys_of_its_links(runner: Runner) -> None:
    site = begun(runner)
    presences = dict(site._conversation.presences)
    assert wire.run_of(presences, site.agreement.digest) == site._conversation.run
    presences["nice"] = presences["nice"]._replace(exchange=key_pair().public)
    assert wire.run_of(presences, site.agreement.digest) != site._conversation.run
    site.close()


@pytest.mark.parametrize("name", ["secret", "exchange"])
def test_a_site_that_lost_a_secret_draws_no_other(runner: Runner, name: str) -> None:
    begun(runner).close()
    (runner.folder / "geneva" / name).unlink()
    with pytest.raises(MustLeave, match=f"{name} is gone"):
        runner.site("geneva")
    assert not (runner.folder / "geneva" / name).exists()


def test_a_site_with_another_private_key_leaves(runner: Runner) -> None:
    begun(runner).close()
    (runner.folder / "geneva" / "exchange").write_bytes(PRIVATE[2])
    with pytest.raises(MustLeave, match="exchange is another key"):
        runner.site("geneva")


def test_secrets_that_a_kill_left_at_the_end_are_deleted_at_the_restart(
    identities: dict[str, Identity], tmp_path: Path
) -> None:
    runner = linked(Agreed(planned("links", 3), identities), tmp_path, identities)
    for name in NAMES:
        runner.start(name)
    runner.finished()
    for name in ("secret", "exchange"):
        (tmp_path / "geneva" / name).write_bytes(bytes([7] * 32))
    site = runner.site("geneva")
    assert not (tmp_path / "geneva" / "secret").exists()
    assert not (tmp_path / "geneva" / "exchange").exists()
    assert site.compute._sources == ()
    site.close()


def test_the_guarantee_of_a_site_is_against_a_node_that_sees_every_message(
    runner: Runner,
) -> None:
    config = dataclasses.replace(
        planned("links", 3).config,
        protect=dp.Protect("zero_out_record", clip_norm=1.0, attacker="node"),
    )
    mixing = planned("links", 3).mixing
    runner.agreed.plan = dp.make_plan(config, mixing, counts=planned("links", 3).counts)
    site = runner.site("geneva")
    guarantee = site.guarantee
    assert (guarantee.kind, guarantee.attacker, guarantee.secrets) == ("sites", "node", "links")
    assert guarantee.epsilon == 8.0 and guarantee.added_epsilon > 0 < guarantee.added_delta
    site.close()
