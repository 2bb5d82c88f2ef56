"""`rlt-verify`: prove the spec, or show why not."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import defaultdict
from pathlib import Path

from rlt_fsm import trace as trace_format
from rlt_fsm.errors import SpecError
from rlt_fsm.load import load
from rlt_fsm.model import Spec
from verification.confirm import confirm
from verification.mutation.sweep import load_outcomes, mutate, show
from verification.report.coverage import join
from verification.report.files import here, write
from verification.report.scenario import record
from verification.result import Result
from verification.run import BACKENDS, DEFAULT, Report, base_name, run
from verification.show import counterexample

EPILOG = """\
examples:
  rlt-verify run                          the shipped spec, quick scopes, and the induction
  rlt-verify run --scope full             every scope
  rlt-verify run --scope one_everything   one scope
  rlt-verify run --only no_write_after_reuse
  rlt-verify run --backend all            also a second solver, and SPIN: neither believes anything of the first
  rlt-verify run --spec my_copy/          a copy of the spec that you have edited
  rlt-verify hunt --scope r1_k3           bounded model checking: shortest counterexample, no proof
  rlt-verify run --report proof.html      one page of everything, and JUnit, SARIF and ITF files beside it
  rlt-verify mutate --json mutants.json   break the spec in every small way: does each break show?
  rlt-verify run --report proof.html --mutants mutants.json

exit codes: 0 everything holds, 1 something does not (with a trace), 2 bad usage or bad spec, 3 unknown
"""


KEEPS = {
    False: "the shipped spec refuses this run; put it into tests/scenarios, and it will have to for ever",
    True: "the shipped spec allows this run",
}


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rlt-verify",
        description="Put every property to the spec that the engine runs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asks = commands.add_parser(
        "run", help="check every property", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asks.add_argument(
        "--spec", metavar="PATH", action="append", help="spec directory or file (default: the shipped spec)"
    )
    asks.add_argument("--scope", default="quick", help="quick, full, or the name of a scope (default: quick)")
    asks.add_argument("--only", metavar="NAME", help="one property")
    asks.add_argument(
        "--backend",
        choices=(*BACKENDS, "all"),
        action="append",
        help=f"one method only, or all; may be given again (default: {', '.join(DEFAULT)})",
    )
    asks.add_argument(
        "--save",
        metavar="DIR",
        type=Path,
        help="write each counterexample there: as a trace for rlt-spec replay, and as a scenario for tests/scenarios",
    )
    asks.add_argument(
        "--report",
        metavar="FILE.html",
        type=Path,
        help="write the run as a page: properties by method, lemmas, coverage, counterexamples as charts",
    )
    asks.add_argument(
        "--mutants", metavar="FILE.json", type=Path, help="what `rlt-verify mutate --json` wrote, for the --report"
    )
    asks.add_argument("--quiet", action="store_true", help="no progress on stderr")
    mutates = commands.add_parser(
        "mutate",
        help="change the spec in every small way, and see that each change shows",
        description="Delete or weaken each guard conjunct, update, target, send, effect and source state, one at a "
        "time, and swap what has an order. Each mutant is refuted (by a property of the world, an unhandled event, a "
        "property of other machines, an order, or a lost witness), or proved redundant, or equivalent for a reason "
        "that is written down and printed. Anything else is a hole in the properties: exit code 1.",
    )
    mutates.add_argument(
        "--spec", metavar="PATH", action="append", help="spec directory or file (default: the shipped spec)"
    )
    mutates.add_argument("--only", metavar="PREFIX", default="", help="mutants whose id begins so, e.g. Export.post")
    mutates.add_argument("--jobs", type=int, metavar="N", help="processes (default: one for each processor)")
    mutates.add_argument("--json", metavar="FILE", type=Path, help="write every outcome there")
    mutates.add_argument("--quiet", action="store_true", help="no progress on stderr")
    hunts = commands.add_parser("hunt", help="look for a counterexample with a solver: free constants, no budgets")
    hunts.add_argument(
        "--spec", metavar="PATH", action="append", help="spec directory or file (default: the shipped spec)"
    )
    hunts.add_argument("--scope", required=True, help="the scope whose sizes, constants and start are taken")
    hunts.add_argument("--depth", type=int, default=12, metavar="N", help="longest run (default: %(default)s steps)")
    hunts.add_argument("--only", metavar="NAME", action="append", default=[], help="one property; may be given again")
    hunts.add_argument("--free", metavar="CONST", action="append", default=[], help="leave a constant to the solver")
    hunts.add_argument("--seconds", type=float, default=60.0, help="hard stop (default: %(default)g)")
    args = parser.parse_args(argv)
    try:
        spec = load(args.spec)
    except SpecError as error:
        print(error.show(), file=sys.stderr)
        return 2
    if args.command == "hunt":
        return _hunt(spec, args)
    if args.command == "mutate":
        return _mutate(spec, args)
    backends = BACKENDS if "all" in (args.backend or ()) else tuple(args.backend or DEFAULT)
    progress = None if args.quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    try:
        if args.report is not None and args.report.suffix != ".html":
            raise LookupError(f"--report {args.report}: a page's name must end in .html")
        if args.mutants is not None and args.report is None:
            raise LookupError("--mutants goes into a page: give --report too")
        mutants = load_outcomes(args.mutants, spec.digest) if args.mutants is not None else None
        report = run(spec, args.spec, args.scope, args.only, backends, progress, cover=args.report is not None)
    except LookupError as error:
        print(f"rlt-verify: {error.args[0]}", file=sys.stderr)
        return 2
    print(table(report))
    for result in report.refuted[:3]:
        print(refutation(report, result, spec.digest, args.save))
    if args.report is not None:
        given = shlex.join(["rlt-verify", *(sys.argv[1:] if argv is None else argv)])
        try:
            files = write(report, spec, args.report, here(given), mutants, join(spec, report.coverage))
        except OSError as error:
            print(f"rlt-verify: --report {args.report}: {error.strerror}", file=sys.stderr)
            return 2
        print("\n".join(f"wrote {file}" for file in files))
    return report.exit_code


def _mutate(spec: Spec, args: argparse.Namespace) -> int:
    """Every mutant judged. Exit code: 1 where one has no class, or a written reason is stale."""
    if args.jobs is not None and args.jobs < 1:
        print(f"rlt-verify mutate: --jobs {args.jobs}: at least 1", file=sys.stderr)
        return 2
    progress = None if args.quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    try:
        sweep = mutate(spec, args.only, args.jobs, progress)
        if spec.digest != load(None).digest:
            sweep.stale = []  # the reasons were written for the shipped spec
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(sweep.to_json(), encoding="utf-8")
    except (LookupError, ValueError) as error:
        print(f"rlt-verify mutate: {error.args[0]}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"rlt-verify mutate: --json {args.json}: {error.strerror}", file=sys.stderr)
        return 2
    print(show(sweep))
    return sweep.exit_code


def _hunt(spec: Spec, args: argparse.Namespace) -> int:
    """Bounded model checking of one scope. Exit code: 1 found something, 3 found nothing, which proves nothing."""
    from verification.smt.bmc import hunt

    system = spec.need_system()
    scope = system.scopes.get(args.scope)
    names = {p.name for p in system.properties}
    unknown = next((n for n in args.only if n not in names), None) or next(
        (n for n in args.free if n not in system.consts), None
    )
    if scope is None or unknown is not None:
        what, known = ("scope", system.scopes) if scope is None else ("property or constant", names | {*system.consts})
        given = args.scope if scope is None else unknown
        print(f"rlt-verify hunt: no {what} '{given}'; known: {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    consts = {name: value for name, value in scope.consts.items() if name not in args.free}
    found = hunt(system, scope.sizes, args.depth, consts, scope.start, args.only, args.seconds)
    result = found.result
    if result.verdict != "refuted" or result.trace is None:
        print(f"nothing found in {scope.name}: {result.why}")
        return 3
    print(f"REFUTED {result.name} in {result.scope}: {result.why}")
    print(counterexample(found.flat, result.trace))
    print(confirm(found.flat, result.trace, spec.digest, None))
    return 1


def table(report: Report) -> str:
    """One line a property: verdict, and by what."""
    rows: dict[str, list[Result]] = defaultdict(list)
    for result in report.results:
        grouped = {"handled": "(every message meets a row)", "in_order": "(every channel keeps its order)"}
        rows[grouped.get(result.kind, "(lemmas)" if result.kind == "lemma" else base_name(result.name))].append(result)
    lines = ["", f"{'property':50} {'kind':10} {'verdict':9} by"]
    for name, items in rows.items():
        number = len({i.name for i in items})
        kind = f"{number} checks" if name.startswith("(") else items[0].kind
        lines.append(f"{name:50} {kind:10} {verdict_of(items):9} {methods(items)}")
    lines.append("")
    for scope, f in report.figures.items():
        lines.append(
            f"{scope:22} {f['states']:>10,} states {f['transitions']:>11,} transitions  depth {f['depth']:>3} "
            f"{f['seconds']:>8} s {f['memory_mb']:>7} MB"
        )
    for scope in report.skipped:
        lines.append(f"{scope:22} not run: an earlier scope refuted a property")
    for method, name in (("smt", "induction, z3"), ("cvc5", "induction, cvc5")):
        solved = next((r.figures for r in report.results if r.method == method and r.figures), None)
        if solved is not None:
            counted = f"{solved['steps']:>10,} steps  {solved['conjuncts']:>11,} conjuncts"
            lines.append(f"{name:22} {counted} {solved['seconds']:>21} s")
    for why in dict.fromkeys(r.why for r in report.results if r.holds and r.kind == "ranking" and r.why):
        lines.append(f"runs_end is proved {why}")
    if report.never_fired:
        lines.append(f"rows that no scope fires: {', '.join(report.never_fired)}")
    if not report.refuted:
        for result in report.unknown[:5]:
            lines.append(f"unknown: {result.name}: {result.why}")
            if result.trace is not None and result.trace.moves:
                lines.append(f"  {result.trace.moves[0].label}: from {dict(result.trace.final)}")
    proved = sum(r.holds for r in report.results)
    lines.append(
        f"{len(report.refuted)} refuted, {len(report.unknown)} unknown, {proved} proved in {report.seconds:.1f} s"
    )
    return "\n".join(lines)


def verdict_of(items: list[Result]) -> str:
    """One verdict for several answers: the worst."""
    found = {i.verdict for i in items}
    return "REFUTED" if "refuted" in found else "unknown" if "unknown" in found else "proved"


def methods(items: list[Result]) -> str:
    """`8 scopes, induction`: where it was asked."""
    if items[0].kind == "sometimes":
        return "a reachable state" if items[0].holds else items[0].why
    scopes = {i.scope for i in items if i.method == "explicit"}
    parts = [f"{len(scopes)} scope{'s' if len(scopes) > 1 else ''}"] if scopes else []
    spun = {i.scope for i in items if i.method == "spin"}
    if spun:
        parts.append(f"SPIN in {len(spun)}")
    if any(i.method == "refinement" for i in items):
        parts.append("numbered partitions")
    solvers = [name for method, name in (("smt", "z3"), ("cvc5", "cvc5")) if any(i.method == method for i in items)]
    if solvers:
        parts.append(f"induction for any number of requests ({', '.join(solvers)})")
    if any(i.method == "ranking" for i in items):
        parts.append("a measure that falls, for any number of requests")
    return ", ".join(parts)


def refutation(report: Report, result: Result, digest: str = "", save: Path | None = None) -> str:
    """A counterexample as people read it, after it was run again on the compiled classes."""
    head = f"\nREFUTED {result.name} in scope {result.scope}: {result.why}"
    if result.trace is None or not result.trace.moves:
        return head
    flat = report.flats[result.scope]
    file = None
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        file = save / f"{base_name(result.name).replace(':', '_')}.jsonl"
    lines = [head, counterexample(flat, result.trace), confirm(flat, result.trace, digest, file)]
    if file is not None:
        scenario = file.with_suffix(".json")
        doc = f"A counterexample to {result.name}, found in scope {result.scope}."
        kept = record(load(None), trace_format.read(file), scenario, doc)
        lines.append(f"saved: {file}, for rlt-spec replay --spec")
        lines.append(f"saved: {scenario}, a scenario: {KEEPS[kept.kind == 'ok']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
