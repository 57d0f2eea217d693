"""The Python that does what a command did, as the command prints it: whole, to be pasted."""

from collections.abc import Sequence

from dpjax.commands.victims import Setting

__all__: list[str] = []


def of_multiplier(
    setting: Setting,
    sets: Sequence[Sequence[int]],
    *,
    graph: str,
    epsilon: float,
    delta: float,
    clip: float,
    gradients: str,
    mixing: str,
) -> list[str]:
    """The program that finds a multiplier, tells every victim's loss and makes the noise.

    Args:
        setting: The algorithm.
        sets: The attackers that were tried.
        graph: What the network is called, its seed included.
        epsilon: Budget.
        delta: Delta.
        clip: Clip norm.
        gradients: "any" or "view".
        mixing: "metropolis" or "uniform".

    Returns:
        Lines that need no others, of public names; short, so that terminals leave them whole.
    """
    weights = "metropolis_hastings" if mixing == "metropolis" else "uniform_neighbors"
    when = setting.participation
    more = "" if setting.gossip_steps == 1 else f", gossip_steps={setting.gossip_steps}"
    tried = f"[{tuple(sets[0])}]" if len(sets) == 1 else "[(i,) for i in range(len(W))]"
    correlated = setting.algorithm not in ("decor", "zip_dl")
    lines = [
        *(["import jax", "import numpy", "import secrets"] if correlated else []),
        "from dpjax.commands import multiplier, victims",
        "from dpjax.mechanism.participation import Participation",
        "from dpjax.topology import graphs, mixing",
        *(["from dpjax.transforms import noise"] if correlated else []),
        "",
        f"W = mixing.{weights}(graphs.parse({graph!r}))",
        f"when = Participation({when.rounds}, {when.epochs}, {when.separation})",
        "setting = victims.Setting(",
        f"    {setting.algorithm!r}, W, when, {setting.relation!r}{more}",
        ")",
        f"attackers = {tried}",
        f"budget = dict(epsilon={epsilon!r}, delta={delta!r}, gradients={gradients!r})",
        "found = multiplier.least_multiplier(setting, attackers, **budget)",
        "sigma = found.sigma",
        "# Every victim of the worst attackers:",
        "rows = victims.rows(",
        f"    setting, 'pndp', attackers=found.attackers, sigma=sigma, delta={delta!r}",
        ")",
    ]
    if not correlated:
        return lines
    return [
        *lines,
        "# The noise of a simulation; every agent of a real network has a key of its own:",
        "key = jax.random.key(secrets.randbits(63), impl='threefry2x32')",
        f"factor = sigma * {clip!r} * numpy.eye(len(W))",
        "strategy = setting.make().strategy",
        f"add = noise.correlated(factor, key=key, rounds={when.rounds}, strategy=strategy)",
    ]
