"""The results of a run, a row per question and a cell per method; the page and the files are written from this.

The verdict of a cell is its worst one, and the verdict of a row the worst of its cells: a refutation by one method
is not outvoted, and an unknown is never hidden behind a proof. A question that no method was asked is `not asked`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlt_fsm.errors import Span
from rlt_fsm.ground import Flat
from rlt_fsm.model import Spec
from verification.result import Result
from verification.run import Report, base_name

WORST_FIRST = ("refuted", "unknown", "not asked", "proved")

# What a verdict of each method rests on, in plain words.
METHODS: dict[str, str] = {
    "explicit": "Every reachable state of each bounded scope. Nothing is claimed of larger sizes or constants.",
    "refinement": "Every edge of a small counted scope, with numbered partitions in every order. It rests on P using "
    "no number twice.",
    "smt": "Induction with z3: no bound on generations, storages, chunks, partitions, steps, cancels, duplicates, "
    "errors and deaths. Conditional on what the cell names, such as which constant counts the storages.",
    "cvc5": "The stored invariant, asked again of another solver. Conditional as the induction that it repeats.",
    "bmc": "Runs up to a depth, with free constants. It finds counterexamples; finding none proves nothing.",
    "ranking": "A measure that falls with every step that fairness does not end, so that fair runs are finite, for any "
    "number of generations and chunks. Conditional on what the cell names.",
    "spin": "The same flat model, exported and searched by SPIN: other code than the explicit search, the same bounds. "
    "Lemmas and liveness are not asked.",
}

# Questions that come with the tables themselves, not with a line under `properties`.
BUILT_IN: dict[str, tuple[str, str]] = {
    "handled": ("every event meets a row", "Whatever may come finds a row or an `ignore` in the state where it comes."),
    "in_order": (
        "every channel keeps its order",
        "A message is sent only while none of its rank or above is on the channel.",
    ),
    "bounds": ("no counter goes below zero", "A natural number stays one."),
    "refinement": (
        "coverage by ranges",
        "Counting partitions loses nothing: D takes a prompt for whole exactly when every range has landed.",
    ),
    "ranking": (
        "every fair run is finite",
        "For any number of requests and chunks: a measure falls with every step that fairness does not end.",
    ),
    "agreement": ("as many states as in SPIN", "Two searches that share no code stored the same number of states."),
    "induction": ("the solver gave answers", "Its process ended by itself and in time."),
}


@dataclass(slots=True)
class Cell:
    """What one method found for one question."""

    results: list[Result] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The worst verdict."""
        return worst(r.verdict for r in self.results)

    @property
    def scopes(self) -> list[str]:
        """Where it was asked, in the order of the run."""
        return list(dict.fromkeys(r.scope for r in self.results))

    def figure(self, name: str) -> float:
        """The sum of a figure over the scopes, each counted once."""
        found = {r.scope: r.figures[name] for r in self.results if name in r.figures}
        return sum(float(value) for value in found.values())


@dataclass(slots=True)
class Question:
    """One row: a property or lemma of the spec, or one of the built-in questions."""

    name: str
    kind: str
    doc: str
    answers: tuple[str, ...] = ()
    span: Span | None = None
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The worst verdict of its cells."""
        return worst(cell.verdict for cell in self.cells.values())

    @property
    def checks(self) -> int:
        """How many different results make up the row: more than one for each instance or message."""
        return len({r.name for cell in self.cells.values() for r in cell.results})


def worst(verdicts: Iterable[str]) -> str:
    """The worst of several verdicts."""
    found = set(verdicts)
    return next((v for v in WORST_FIRST if v in found), "not asked")


def questions(report: Report, spec: Spec) -> list[Question]:
    """A row for each property and lemma of the spec, asked or not, then the built-in questions that were asked."""
    rows: dict[str, Question] = {}
    for item in spec.need_system().properties:
        rows[item.name] = Question(item.name, item.kind, item.doc, item.answers, item.span)
    for result in report.results:
        key, kind = base_name(result.name), result.kind
        if kind in BUILT_IN:
            key = kind
            rows.setdefault(key, Question(BUILT_IN[kind][0], "built in", BUILT_IN[kind][1]))
        rows.setdefault(key, Question(result.name, kind, ""))
        rows[key].cells.setdefault(result.method, Cell()).results.append(result)
    return list(rows.values())


def methods(rows: Iterable[Question]) -> list[str]:
    """The methods that were used: the known ones in their order, then others."""
    used = dict.fromkeys(method for row in rows for method in row.cells)
    return [m for m in METHODS if m in used] + [m for m in used if m not in METHODS]


def span_of(result: Result, spec: Spec) -> Span:
    """The place in the spec that a result is about: its property, or the channel, action or system."""
    system = spec.need_system()
    for item in system.properties:
        if item.name == base_name(result.name):
            return item.span
    subject = result.name.split(":", 1)[-1].split(" ")[0].split(".")[0].split("[")[0]
    tables: tuple[Mapping[str, object], ...] = (system.channels, system.actions, system.world, system.machines)
    for table in tables:
        span = getattr(table.get(subject), "span", None)
        if isinstance(span, Span):
            return span
    for process in system.processes.values():
        if subject in process.shared:
            return process.shared[subject].span
    return system.span


def row_places(flat: Flat, step: int) -> list[Span]:
    """Where a step of a trace stands in the spec: the action or channel, then each row that fires."""
    item, system = flat.steps[step], flat.system
    action = system.actions.get(item.action)
    cause = action.span if action is not None else system.channels[item.action.split(".")[0]].span
    return [*(row.span for _, row in item.rows), cause]


def counterexamples(report: Report) -> list[tuple[str, Result, Flat | None]]:
    """(file-safe name, result, its spelled-out system if the run kept it), shortest trace first."""
    found = []
    for result in report.results:
        if result.trace is None or result.verdict == "proved":
            continue
        name = "".join(c if c.isalnum() or c in "_-." else "_" for c in f"{result.name}.{result.method}.{result.scope}")
        found.append((name, result, report.flats.get(result.scope)))
    found.sort(key=lambda item: (item[1].verdict != "refuted", item[1].kind == "lemma", length(item[1])))
    return found


def length(result: Result) -> int:
    """Steps of its trace."""
    return len(result.trace.moves) if result.trace is not None else 0
