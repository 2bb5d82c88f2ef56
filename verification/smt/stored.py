"""Inductive invariants as files, checked again by a second solver against a transition relation built anew.

A file holds, in the spec's own language, every clause that the proof used, under the hash of the spec that
it was proved of and the conditions of the proof. `check` believes none of it: cvc5 is asked whether the
clauses of the file hold at the start, are kept by every step of the spec as it is now, and imply every
property, lemma and obligation that the spec states. z3, which found them inductive first, has no part in it.

    python -m verification.smt.stored           check the stored invariant of the shipped spec
    python -m verification.smt.stored --write   prove it, and store it
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlt_fsm.errors import Span, SpecError
from rlt_fsm.expr import BOOL, INT, Scope, Symbol, parse, show
from rlt_fsm.ground import Flat, Grounder
from rlt_fsm.load import load
from rlt_fsm.model import Spec, System
from verification.result import Result
from verification.smt.apart import Apart, Stopped
from verification.smt.parametric import Clause, Parametric
from verification.smt.prove import QUERY_SECONDS_MAX, counts
from verification.smt.reading import Cvc5Solver
from verification.smt.window import Refused

HEAD = "# Inductive invariant, for any number of instances. Written by `python -m verification.smt.stored --write`."
SECONDS_MAX = 240.0


class StoredError(Exception):
    """A stored invariant that cannot be used; the text names the file and line, and says what to do."""


def directory() -> Path:
    """Where invariants are stored."""
    return Path(__file__).parent.parent / "invariants"


def file_of(system: System) -> Path:
    """The file that holds the invariant of `system`."""
    return directory() / f"{system.name}.txt"


def write(spec: Spec, file: Path) -> list[Result]:
    """Prove the invariant that the spec states, and store it if it is inductive."""
    system = spec.need_system()
    proof = Parametric(system, counts(system), QUERY_SECONDS_MAX)
    results = proof.run()
    if all(result.holds for result in results):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text_of(spec, proof.clauses), encoding="utf-8")
    return results


def text_of(spec: Spec, clauses: list[Clause]) -> str:
    """One line a clause, grouped by the property or lemma that it belongs to."""
    system = spec.need_system()
    lines = [HEAD, f"spec {spec.digest}", *(f"count {sort} {const}" for sort, const in counts(system).items())]
    said = ""
    for clause in clauses:
        if clause.name != said:
            lines += ["", f"{clause.kind} {clause.name}"]
            said = clause.name
        prefix = f"for all {', '.join(clause.sorts)}: " if clause.sorts else ""
        lines.append(f"  {prefix}{show(clause.matrix)}")
    return "\n".join(lines) + "\n"


def read(spec: Spec, file: Path) -> list[Clause]:
    """The clauses of a file. Raises StoredError where it is of another spec, or cannot be read."""
    system = spec.need_system()
    anew = "; run `python -m verification.smt.stored --write` to prove and store it anew"
    if not file.exists():
        raise StoredError(f"{file}: no invariant is stored for system '{system.name}'{anew}")
    scope, out = scope_of(system), []
    counted: dict[str, str] = {}
    digest, kind, name = "", "", ""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if not line.startswith(" "):
            if words[0] == "spec" and len(words) == 2:
                digest = words[1]
                if digest != spec.digest:
                    why = f"it was proved of spec {digest[:12]}, and this is spec {spec.digest[:12]}"
                    raise StoredError(f"{file}:{number}: stale: {why}{anew}")
            elif words[0] == "count" and len(words) == 3:
                counted[words[1]] = words[2]
            elif words[0] in ("always", "lemma") and len(words) == 2:
                kind, name = words
            else:
                raise StoredError(f"{file}:{number}: cannot read '{line}'{anew}")
            continue
        sorts: tuple[str, ...] = ()
        body = line.strip()
        if body.startswith("for all "):
            head, _, body = body.removeprefix("for all ").partition(":")
            sorts = tuple(word.strip() for word in head.split(","))
        unknown = [sort for sort in sorts if sort not in system.instances]
        if unknown or not name:
            raise StoredError(f"{file}:{number}: '{line.strip()}' is not a clause of a property{anew}")
        at = Span(str(file), number, len(line) - len(body))
        bound = Scope({**scope.names, **{s: Symbol(INT) for s in sorts}}, scope.fields, scope.sorts)
        out.append(Clause(name, kind, sorts, parse(body.strip(), bound, at, BOOL), at))
    if not digest:
        raise StoredError(f"{file}:1: no line 'spec HASH' says what it was proved of{anew}")
    if counted != counts(system):
        raise StoredError(f"{file}:1: its conditions {counted} are not those of the proof, {counts(system)}{anew}")
    return out


def scope_of(system: System) -> Scope:
    """What a property of `system` may name."""
    names = {name: Symbol(INT) for name in system.consts}
    names |= {name: Symbol(var.type, var.per) for name, var in system.world.items()}
    fields: dict[str, tuple[tuple[str, ...], dict[str, Symbol]]] = {}
    for process in system.processes.values():
        shared = {s.name: (s.machine, ()) for s in process.shared.values()}
        for name, (machine, per) in {**{m: (m, (system.generation,)) for m in process.machines}, **shared}.items():
            known = system.machines[machine]
            members = {"state": Symbol(known.state_type), **{v: Symbol(x.type) for v, x in known.vars.items()}}
            fields[name] = (per, members)
    grounder = Grounder(Flat(system, {}, {}))
    for channel in system.channels.values():
        members = {m: Symbol(BOOL) for m in channel.messages}
        for message in channel.messages:
            members |= {f"{message}_{item}": Symbol(INT) for item in grounder.carried(channel.target, message)}
        fields[channel.name] = ((channel.per,) if channel.per else (), members)
    return Scope(names, fields, tuple(system.instances))


def check(paths: list[str] | None, file: str | None = None) -> list[Result]:
    """Ask cvc5 everything about the stored invariant of the spec under `paths`.

    Raises StoredError, SpecError, Refused.
    """
    spec = load([Path(p) for p in paths] if paths else None)
    system = spec.need_system()
    clauses = read(spec, Path(file) if file else file_of(system))
    return Parametric(system, counts(system), QUERY_SECONDS_MAX, Cvc5Solver, clauses).run()


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit code is 0 holds, 2 bad usage, spec or file, 3 not shown."""
    parser = argparse.ArgumentParser(prog="python -m verification.smt.stored", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="prove the invariant with z3 and store it")
    parser.add_argument("--file", metavar="FILE", help="the stored invariant (default: the one of the spec's system)")
    parser.add_argument("spec", metavar="PATH", nargs="*", help="spec files or directories (default: the shipped spec)")
    args = parser.parse_args(argv)
    try:
        spec = load(args.spec or None)
        file = Path(args.file) if args.file else file_of(spec.need_system())
        if args.write:
            results = write(spec, file)
        else:
            read(spec, file)  # a stale file is told at once
            results = Apart(check, args.spec or None, str(file), seconds_max=SECONDS_MAX).wait()
    except SpecError as error:
        print(error.show(), file=sys.stderr)
        return 2
    except (StoredError, Refused) as error:
        print(error, file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"{file}: not checked: {stopped}", file=sys.stderr)
        return 3
    for result in results:
        if not result.holds:
            print(f"{result.verdict}: {result.name}: {result.why}", file=sys.stderr)
    shown = sum(result.holds for result in results)
    done = "proved by z3 and stored" if args.write else "shown again by cvc5"
    print(f"{file}: {shown} of {len(results)} {done}")
    return 0 if shown == len(results) else 3


if __name__ == "__main__":
    sys.exit(main())
