"""`rlt-spec`: check spec files, render their pages, replay traces against them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlt_fsm.check import check
from rlt_fsm.errors import Finding, SpecError
from rlt_fsm.load import load
from rlt_fsm.model import Spec
from rlt_fsm.render import drift, write
from rlt_fsm.schema import spec_directory

HOLDS, FAILS, BAD, UNKNOWN = 0, 1, 2, 3

CODES = "exit codes: 0 holds, 1 does not hold, 2 bad usage or bad spec, 3 unknown"

EPILOG = f"""\
examples:
  rlt-spec check                       the shipped spec
  rlt-spec check my_spec/              every .yaml file of a directory
  rlt-spec check spec/retirement.yaml  one file; what it reads is looked up beside it
  rlt-spec render                      write docs/machines: pages and diagrams
  rlt-spec render --check              say which of them the spec has left behind
  rlt-spec replay runs/demo/*.jsonl    is what happened a run of these machines?

{CODES}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Bad usage raises SystemExit(2), as argparse does."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except SpecError as error:
        print(error.show(), file=sys.stderr)
        return BAD
    return code


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="rlt-spec", description="Work with state machines that are data.", epilog=EPILOG, formatter_class=shape
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="check | render | replay")

    checks = commands.add_parser(
        "check",
        help="find mistakes in spec files",
        description="Read spec files and say what is wrong with them, each mistake at its line.",
        epilog="A warning is a declaration without use; it counts as a mistake unless --warnings-ok is given.\n"
        "Whether the machines are safe together is asked with rlt-verify.\n\n"
        "examples:\n  rlt-spec check\n  rlt-spec check spec/retirement.yaml\n\n" + CODES,
        formatter_class=shape,
    )
    checks.add_argument(
        "paths", nargs="*", metavar="PATH", help="spec files or directories of them (default: the shipped spec)"
    )
    checks.add_argument("--warnings-ok", action="store_true", help="show warnings, and exit 0 if nothing else is wrong")
    checks.set_defaults(run=_check)

    renders = commands.add_parser(
        "render",
        help="write the pages and diagrams of a spec",
        description="Write a Markdown page and a state diagram for every machine, and one for the system.\n"
        "Diagrams are written as DOT, and drawn as SVG where Graphviz is installed.",
        epilog="examples:\n  rlt-spec render\n  rlt-spec render --check\n"
        "  rlt-spec render --spec my_spec/ --out my_pages/\n\n" + CODES,
        formatter_class=shape,
    )
    renders.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 naming each file that is not up to date"
    )
    renders.add_argument("--out", metavar="DIR", type=Path, help="where the pages go (default: docs/machines)")
    renders.add_argument(
        "--spec", metavar="PATH", action="append", help="spec file or directory (default: the shipped spec)"
    )
    renders.set_defaults(run=_render)

    replays = commands.add_parser(
        "replay",
        help="judge traces of a run",
        description="Feed the traces of a run to the machines that should have made it, and say where they part.\n"
        "Give the files of all processes of one run together.",
        epilog="examples:\n  rlt-spec replay runs/demo/*.jsonl\n  rlt-spec replay trace.jsonl --const steps=2\n\n"
        "exit codes: 0 it is a run of the spec, 1 it is not, 2 bad usage, bad spec or unreadable trace,\n"
        "3 it cannot be told (events were dropped, or a process has no trace)",
        formatter_class=shape,
    )
    replays.add_argument("traces", nargs="+", metavar="TRACE", type=Path, help="trace files, JSON lines")
    replays.add_argument(
        "--spec", metavar="PATH", action="append", help="spec file or directory (default: the shipped spec)"
    )
    replays.add_argument(
        "--const",
        metavar="NAME=N",
        action="append",
        default=[],
        help="a constant of the system; one not given bounds nothing",
    )
    replays.set_defaults(run=_replay)
    return parser


def _check(args: argparse.Namespace) -> int:
    spec = load(args.paths or None)
    findings = check(spec)
    errors = [f for f in findings if f.severity == "error" or not args.warnings_ok]
    if findings:
        print(SpecError(findings, dict(spec.sources)).show(), file=sys.stderr)
    if errors:
        print(f"rlt-spec: {_count(findings)}", file=sys.stderr)
        return BAD
    print(_summary(spec))
    return HOLDS


def _count(findings: Sequence[Finding]) -> str:
    """`2 errors and 1 warning`."""
    parts = []
    for severity in ("error", "warning"):
        number = sum(f.severity == severity for f in findings)
        if number:
            parts.append(f"{number} {severity}{'s' if number > 1 else ''}")
    return " and ".join(parts)


def _summary(spec: Spec) -> str:
    """One line: what was read, and the digest that traces carry."""
    machines = spec.machines.values()
    parts = [
        f"{len(spec.machines)} machines",
        f"{sum(len(m.states) for m in machines)} states",
        f"{sum(len(m.transitions) for m in machines)} transitions",
    ]
    if spec.system is not None:
        lemmas = sum(p.kind == "lemma" for p in spec.system.properties)
        parts += [f"{len(spec.system.properties) - lemmas} properties", f"{lemmas} lemmas"]
    return f"ok: {', '.join(parts)}; digest {spec.digest[:16]}"


def _render(args: argparse.Namespace) -> int:
    spec = load(args.spec)
    out = args.out or _pages_directory()
    source = "" if args.spec else "../../spec/"
    if args.check:
        found = drift(spec, out, source)
        for line in found:
            print(line, file=sys.stderr)
        if found:
            print("rlt-spec: run `rlt-spec render` and commit the result", file=sys.stderr)
        return FAILS if found else HOLDS
    undone = write(spec, out, source)
    for line in undone:
        print(line, file=sys.stderr)
    print(f"{len(spec.machines)} machines written to {out}")
    return HOLDS


def _pages_directory() -> Path:
    """docs/machines of the checkout that this package runs from, else of the current directory."""
    docs = spec_directory().parent / "docs"
    path = (docs if docs.is_dir() else Path("docs")) / "machines"
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path


def _replay(args: argparse.Namespace) -> int:
    from rlt_fsm.replay import INCONCLUSIVE, OK, replay
    from rlt_fsm.trace import TraceError

    spec = load(args.spec)
    consts: dict[str, int] = {}
    known = spec.system.consts if spec.system is not None else {}
    for word in args.const:
        name, _, number = word.partition("=")
        if name not in known or not number.isdigit():
            print(f"rlt-spec: --const {word}: write NAME=N; names: {', '.join(known)}", file=sys.stderr)
            return BAD
        consts[name] = int(number)
    try:
        verdict = replay(spec, args.traces, consts)
    except (TraceError, OSError) as error:
        print(f"rlt-spec: {error}", file=sys.stderr)
        return BAD
    print(verdict.show())
    return {OK: HOLDS, INCONCLUSIVE: UNKNOWN}.get(verdict.kind, FAILS)


if __name__ == "__main__":
    sys.exit(main())
