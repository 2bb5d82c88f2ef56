"""Put every question to a spec: explicit search per scope, liveness on its graph, induction beside them.

A property is proved when every method that was asked has proved it; refuted when one has a trace;
unknown otherwise. Rows of the tables that no scope of the run ever fires are reported as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rlt_fsm.ground import Flat, ground
from rlt_fsm.model import ScopeDef, Spec, Transition
from verification import liveness, refinement
from verification.explicit import search
from verification.report.coverage import Coverage, from_graph
from verification.result import Result
from verification.smt.apart import Apart, Stopped
from verification.spin import run as spin

SMT_SECONDS_MAX = 240.0  # hard stop: the solver's own time-out is not always honoured

BACKENDS = ("explicit", "refinement", "smt", "cvc5", "spin")
DEFAULT = ("explicit", "refinement", "smt")  # what needs nothing but the spec

SOLVERS = {"smt": "induction and ranking by z3", "cvc5": "the stored invariant again by cvc5"}
ENDINGS = "runs_end"  # as verification.smt.ranking.NAME; the solver itself is loaded only in its own process

Progress = Callable[[str], None]


@dataclass(slots=True)
class Report:
    """What a run found."""

    results: list[Result] = field(default_factory=list)
    figures: dict[str, dict[str, float | int | str]] = field(default_factory=dict)  # scope -> figures
    flats: dict[str, Flat] = field(default_factory=dict)  # scope -> what its traces number
    coverage: list[Coverage] = field(default_factory=list)  # of each scope that was searched with `cover`
    never_fired: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # scopes left out because an earlier one refuted
    seconds: float = 0.0

    @property
    def refuted(self) -> list[Result]:
        """The results with a counterexample, or a witness that is not there."""
        return [r for r in self.results if r.verdict == "refuted"]

    @property
    def unknown(self) -> list[Result]:
        """The results without an answer."""
        return [r for r in self.results if r.verdict == "unknown"]

    @property
    def exit_code(self) -> int:
        """0 holds, 1 does not hold, 3 unknown."""
        return 1 if self.refuted else 3 if self.unknown else 0


def run(
    spec: Spec,
    paths: list[str] | None,
    suite: str = "quick",
    only: str | None = None,
    backends: tuple[str, ...] = DEFAULT,
    progress: Progress | None = None,
    stop_early: bool = True,
    cover: bool = False,
) -> Report:
    """Ask everything of `suite` (quick, full, or the name of one scope).

    paths: where the spec was read from, for the solver's own process. stop_early: leave out the scopes
    after the first that refutes something. cover: keep which rows and guard outcomes the scopes explored.
    """
    started = time.perf_counter()
    system = spec.need_system()
    report = Report()
    say = progress or (lambda text: None)
    solvers = {
        name: Apart(work, paths, seconds_max=SMT_SECONDS_MAX)
        for name, work in (("smt", _prove), ("cvc5", _recheck))
        if name in backends and (only_is_safety(spec, only) or (only == ENDINGS and name == "smt"))
    }
    scopes = [s for s in system.scopes.values() if suite in s.suites or suite == s.name]
    if not scopes and set(backends) & {"explicit", "spin"}:
        raise LookupError(f"no scope or suite '{suite}'; suites: quick, full; scopes: {', '.join(system.scopes)}")
    if "explicit" in backends:
        _explore(spec, scopes, suite, report, progress, stop_early, cover)
    if "refinement" in backends and only in (None, refinement.NAME) and refinement.applies(system):
        say(f"refinement: {refinement.SCOPE}")
        report.results.append(refinement.check(system))
    if "spin" in backends and (only_is_safety(spec, only)):
        _ask_spin(spec, scopes, report, say)
    for name, solver in solvers.items():
        say(f"{SOLVERS[name]}: any number of generations, storages and chunks")
        report.results += _wait(name, solver)
    if only is not None:
        report.results = [r for r in report.results if base_name(r.name) == only or r.verdict == "refuted"]
        if not report.results:
            raise LookupError(f"no property '{only}'; known: {', '.join(p.name for p in system.properties)}")
    report.seconds = time.perf_counter() - started
    return report


def _explore(
    spec: Spec,
    scopes: list[ScopeDef],
    suite: str,
    report: Report,
    progress: Progress | None,
    stop_early: bool,
    cover: bool,
) -> None:
    """Search each scope, then ask liveness of its graph; witnesses and rows are asked of all scopes together."""
    system = spec.need_system()
    say = progress or (lambda text: None)
    witnessed: set[str] = set()
    fired: set[tuple[str, int]] = set()
    silent: list[str] = []  # why a scope answers no liveness, or less than all of its states
    cut = False
    for scope in scopes:
        if stop_early and report.refuted:
            report.skipped.append(scope.name)
            silent.append(f"'{scope.name}' was not run")
            continue
        flat = ground(system, scope.sizes, scope.consts, scope.start)
        report.flats[scope.name] = flat
        say(f"{scope.name}: {scope.doc}")
        options: dict[str, Any] = {
            "edges": not scope.symmetry,
            "symmetry": scope.symmetry,
            "progress": progress is not None,
        }
        found = search(flat, scope.name, **options)
        broken = [r for r in found.results if r.verdict == "refuted"]
        if broken and all(r.kind == "lemma" for r in broken):
            # a lemma is bookkeeping: look on for the promise about the world that falls with it
            say(f"{scope.name}: lemma '{broken[0].name}' does not hold; looking for a property that falls")
            found = search(flat, scope.name, **options, lemmas=False)
            found.results += broken
        report.figures[scope.name] = found.figures
        report.results += found.results
        witnessed |= found.witnessed
        for place in found.fired:
            for _, row in flat.steps[place].rows:
                if isinstance(row, Transition):
                    fired.add((row.machine, row.place))
        cut = cut or bool(found.stopped)
        if found.graph is None:
            silent.append(f"'{scope.name}': {found.stopped or 'it has symmetry'}")
            continue
        if cover:
            say(f"{scope.name}: rows and guard outcomes")
            report.coverage.append(from_graph(found.graph, found.fired, spec.digest, known=report.coverage))
        asked = liveness.check(found.graph, scope.name)
        report.results += [r for r in asked if not scope.asks or base_name(r.name) in scope.asks]
    whole_suite = any(suite in s.suites for s in scopes)
    answered = {base_name(r.name) for r in report.results}
    for prop in system.properties:
        owed = whole_suite or any(not s.symmetry and (not s.asks or prop.name in s.asks) for s in scopes)
        if prop.kind in liveness.KINDS and owed and prop.name not in answered:
            why = f"no scope of this run answers it: {'; '.join(silent) or 'none asks it'}"
            report.results.append(Result(prop.name, prop.kind, "explicit", suite, "unknown", why))
    if not whole_suite:
        return  # one scope need not show every witness, nor fire every row
    for prop in system.properties:
        if prop.kind == "sometimes":
            seen = prop.name in witnessed
            why = "" if seen else "no scope of this run has a state with it"
            verdict = "proved" if seen else "unknown" if report.skipped or cut else "refuted"
            report.results.append(Result(prop.name, "sometimes", "explicit", suite, verdict, why))
    if not report.skipped:
        used = {m for p in system.processes.values() for m in p.machines} | {
            s.machine for p in system.processes.values() for s in p.shared.values()
        }
        report.never_fired = [
            row.name for name in used for row in system.machines[name].transitions if (name, row.place) not in fired
        ]


def _ask_spin(spec: Spec, scopes: list[ScopeDef], report: Report, say: Progress) -> None:
    """Each scope again by SPIN, whose states must be as many as those of our own search."""
    system = spec.need_system()
    for scope in scopes:
        if scope.symmetry or scope.name in report.skipped:
            continue  # what SPIN would store without symmetry is not what our search stored
        say(f"{scope.name}: SPIN")
        flat = report.flats.setdefault(scope.name, ground(system, scope.sizes, scope.consts, scope.start))
        found = spin.check(flat, scope.name)
        report.results += found
        ours = report.figures.get(scope.name)
        if ours is not None and all(result.holds for result in found):
            mine, theirs = ours["states"], found[0].figures["states"]
            verdict, why = ("proved", "") if mine == theirs else ("refuted", f"{mine} states here, {theirs} in SPIN")
            report.results.append(Result("same_states", "agreement", "spin", scope.name, verdict, why))


def base_name(name: str) -> str:
    """The property's name without its instances."""
    return name.split("[")[0].split(" ")[0]


def only_is_safety(spec: Spec, only: str | None) -> bool:
    """False where just a liveness property or witness is asked: induction has nothing to say to it."""
    if only is None:
        return True
    return any(p.name == only and p.kind in ("always", "lemma") for p in spec.need_system().properties)


def _prove(paths: list[str] | None) -> list[Result]:
    """The induction and the ranking, in a process of their own."""
    from verification.smt.prove import prove_all

    return prove_all(paths)


def _recheck(paths: list[str] | None) -> list[Result]:
    """The stored invariant by the second solver, in a process of its own."""
    from verification.smt.stored import StoredError, check
    from verification.smt.window import Refused

    try:
        return [replace(result, method="cvc5") for result in check(paths)]
    except (StoredError, Refused) as error:
        return [_unanswered("cvc5", f"not asked: {error}")]


def _wait(name: str, solver: Apart[list[Result]]) -> list[Result]:
    """The solver's results; one Unknown if it died or had to be stopped."""
    try:
        return solver.wait()
    except Stopped as stopped:
        return [_unanswered(name, str(stopped))]


def _unanswered(method: str, why: str) -> Result:
    return Result("induction", "induction", method, "any number", "unknown", why)
