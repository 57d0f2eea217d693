"""What sums among sites really lose, by record and replay: python benchmarks/audit_sums.py

Five sites add up one round by the protocol that they are deployed with, over queues of bytes: a
canary record is in one of them, and again it is not. Every site draws its secret from the operating
system, and both runs have the same secrets, so that they differ by the canary alone.

The attacker is the site that adds up, together with those that it knows all noise of. It takes the
sum from its own part of the protocol, and subtracts the vectors of those it knows. The plan counts
on one site that may be missing and one that colludes; nobody is missing here, so the attacker is
given the noise of one more, which hides as little as the share of a site that is not there. It
does not attack the masks: vectors under masks have a proof, not an audit.

- ``measured`` is the loss mu of the best linear test (`dpjax.contrib.replay`), and ``ratio`` that
  over the mu whose zCDP is the stated one, with a 95 % interval; ``tested`` is a lower bound from
  one event on fresh runs. ``epsilon`` is that of the measured mu, below ``stated_epsilon``.
- ``fault`` names a broken copy that the audit must find, and ``flagged`` says whether it did.
"""

from _audit_sites import memory
from _audit_sums import rows
from _timing import Bench


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--runs", type=int, default=512, help="of each copy")
    options = bench.parse(argv)
    for row in rows(options.runs, memory()):
        bench.row(**row)
    missed = [row for row in bench.rows if row.get("finding") or row.get("flagged") is False]
    print(f"{len(bench.rows)} audits, {len(missed)} of them findings")
    return bench.finish() or bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
