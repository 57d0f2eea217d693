"""What sites really lose, by record and replay: python benchmarks/audit_sites.py

Four sites (`dpjax.sites.site.Site`) run a plan with a canary record in one of them, and again with
its neighbour. Every site draws its secrets from the operating system, as it does when it is
deployed: no key is injected, and this script never sees the noise. The folders are copied before
anything is sent, so that both runs have the same secrets and names, hence the same noise: what they
sent differs by the canary alone. Recorded is what arrived, message by message, from the bytes of
each link. How far the two runs are apart, whitened by the covariance over many runs with secrets of
their own, is what the best linear test finds (`dpjax.contrib.replay`).

- ``outsider``: the messages of all links. With constant gradients, as here, all other sites
  together know no more: whoever knows a site's records computes its noise from messages.
- ``neighbour``: what the canary's neighbour received and sent. Nobody states less for it.
- ``ratio`` is measured over stated mu, with a 95 % interval; ``tested`` what one event on fresh
  runs shows over stated, a lower bound at 95 %. ``finding``: the interval is above the statement.
- ``fault`` names a broken copy that the audit must find, and ``flagged`` says whether it did.

``--carrier grpc`` records from sessions with certificates over loopback, which takes longer than
queues between threads. Folders are in memory where the system has such a place.
"""

from _audit_sites import CASES, memory, rows
from _timing import Bench


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    bench = Bench(__file__, __doc__)
    bench.parser.add_argument("--runs", type=int, default=1024, help="of a case")
    bench.parser.add_argument("--carrier", choices=("queues", "grpc"), default="queues")
    designs = list(dict.fromkeys(case.noise for case in CASES))
    bench.parser.add_argument("--noise", nargs="+", choices=designs, default=designs)
    options = bench.parse(argv)
    for case in CASES:
        if case.noise in options.noise:
            for row in rows(case, options.runs, memory(), options.carrier):
                bench.row(**row)
    missed = [row for row in bench.rows if row.get("finding") or row.get("flagged") is False]
    print(f"{len(bench.rows)} audits, {len(missed)} of them findings")
    return bench.finish() or bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
