"""`rlt-verify`: prove the spec, or show why not."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict

from rlt_fsm.errors import SpecError
from rlt_fsm.load import load
from verification.confirm import confirm
from verification.result import Result
from verification.run import Report, base_name, run
from verification.show import counterexample

EPILOG = """\
examples:
  rlt-verify run                          the shipped spec, quick scopes, and the induction
  rlt-verify run --scope full             every scope
  rlt-verify run --scope one_everything   one scope
  rlt-verify run --only no_write_after_reuse
  rlt-verify run --spec my_copy/          a copy of the spec that you have edited

exit codes: 0 everything holds, 1 something does not (with a trace), 2 bad usage or bad spec, 3 unknown
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rlt-verify",
        description="Put every property to the spec that the engine runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="run")
    asks = commands.add_parser(
        "run", help="check every property", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asks.add_argument(
        "--spec", metavar="PATH", action="append", help="spec directory or file (default: the shipped spec)"
    )
    asks.add_argument("--scope", default="quick", help="quick, full, or the name of a scope (default: quick)")
    asks.add_argument("--only", metavar="NAME", help="one property")
    asks.add_argument("--backend", choices=("explicit", "smt"), help="one method only (default: both)")
    asks.add_argument("--quiet", action="store_true", help="no progress on stderr")
    args = parser.parse_args(argv)
    try:
        spec = load(args.spec)
    except SpecError as error:
        print(error.show(), file=sys.stderr)
        return 2
    backends = (args.backend,) if args.backend else ("explicit", "smt")
    progress = None if args.quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    try:
        report = run(spec, args.spec, args.scope, args.only, backends, progress)
    except LookupError as error:
        print(f"rlt-verify: {error.args[0]}", file=sys.stderr)
        return 2
    print(table(report))
    for result in report.refuted[:3]:
        print(refutation(report, result))
    return report.exit_code


def table(report: Report) -> str:
    """One line a property: verdict, methods, and where."""
    rows: dict[str, list[Result]] = defaultdict(list)
    for result in report.results:
        rows[base_name(result.name) if result.kind not in ("handled", "in_order") else f"({result.kind})"].append(
            result
        )
    lines = ["", f"{'property':44} {'kind':10} {'verdict':9} by"]
    for name, items in rows.items():
        kind = items[0].kind if not name.startswith("(") else f"{len({i.name for i in items})} checks"
        verdict = (
            "REFUTED"
            if any(i.verdict == "refuted" for i in items)
            else "unknown"
            if any(i.verdict == "unknown" for i in items)
            else "proved"
        )
        by: dict[str, None] = {}
        for item in items:
            by.setdefault("induction (any chunks)" if item.method == "smt" else item.scope, None)
        if any(i.kind == "lemma" for i in items):
            continue
        lines.append(f"{name:44} {kind:10} {verdict:9} {', '.join(by)}")
    lemmas = {base_name(r.name) for r in report.results if r.kind == "lemma"}
    if lemmas:
        bad = {base_name(r.name) for r in report.results if r.kind == "lemma" and not r.holds}
        lines.append(
            f"{f'({len(lemmas)} lemmas)':44} {'lemma':10} {'proved' if not bad else 'not: ' + ', '.join(sorted(bad))}"
        )
    lines.append("")
    for scope, figures in report.figures.items():
        lines.append(
            f"{scope:24} {figures['states']:>10,} states {figures['transitions']:>11,} transitions "
            f"depth {figures['depth']:>3}  {figures['seconds']:>7} s  {figures['memory_mb']} MB"
        )
    for scope in report.skipped:
        lines.append(f"{scope:24} not run: an earlier scope refuted a property")
    for result in report.results:
        if result.method == "smt" and result.figures:
            f = result.figures
            lines.append(
                f"{'induction':24} {f['steps']:>10,} steps  {f['conjuncts']:>11,} conjuncts        {f['seconds']:>12} s"
            )
            break
    if report.never_fired:
        lines.append(f"rows that no scope fires: {', '.join(report.never_fired)}")
    unknown = report.unknown
    for result in unknown[:5]:
        lines.append(f"unknown: {result.name}: {result.why}")
    lines.append(
        f"{len(report.refuted)} refuted, {len(unknown)} unknown, "
        f"{sum(r.holds for r in report.results)} proved in {report.seconds:.1f} s"
    )
    return "\n".join(lines)


def refutation(report: Report, result: Result) -> str:
    """A counterexample as people read it, after it was run again on the compiled classes."""
    head = f"\nREFUTED {result.name} in scope {result.scope}: {result.why}"
    if result.trace is None or not result.trace.moves:
        return head
    flat = report.flats[result.scope]
    return "\n".join([head, counterexample(flat, result.trace), confirm(flat, result.trace)])


if __name__ == "__main__":
    sys.exit(main())
