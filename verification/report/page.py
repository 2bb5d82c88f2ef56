"""One self-contained HTML page of a run: what holds, what does not, what is unknown, and why.

No script, no font and nothing else comes from elsewhere. Whatever the run did not ask is said to be not asked: a page
without mutants or coverage names them as not part of this run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from rlt_fsm.ground import Flat
from rlt_fsm.model import Spec
from verification.report.chart import chart_steps, svg
from verification.report.coverage import Joined
from verification.report.explain import objections
from verification.report.style import CSS
from verification.report.summary import METHODS, Cell, Question, counterexamples, length, methods, questions, worst
from verification.result import Result
from verification.run import Report

CLASSES = ("refuted", "redundant", "equivalent")  # of mutants; any other word needs a look
NAMES_MAX = 6  # in a sentence
CHARTS_MAX = 12  # more would hide the first ones; the rest is listed by name


@dataclass(frozen=True, slots=True)
class About:
    """What the caller knows of a run: when it was (ISO 8601), on what machine, by what command."""

    date: str
    machine: str
    command: str


class Mutant(Protocol):
    """One changed part of the spec."""

    @property
    def id(self) -> str:
        """Its stable name."""

    @property
    def place(self) -> str:
        """`file:line` of what was changed."""

    @property
    def what(self) -> str:
        """The change, in words."""


class Outcome(Protocol):
    """What became of a mutant."""

    @property
    def mutant(self) -> Mutant:
        """Which one."""

    @property
    def verdict(self) -> str:
        """refuted, redundant, equivalent; any other word is shown first, as what needs a look."""

    @property
    def by(self) -> str:
        """The property that refutes it, or the reason."""

    @property
    def scope(self) -> str:
        """Where."""

    @property
    def trace_length(self) -> int | None:
        """Steps of the counterexample, if there is one."""


def html(
    report: Report,
    spec: Spec,
    about: About,
    mutants: Sequence[Outcome] | None = None,
    coverage: Joined | None = None,
) -> str:
    """The page."""
    rows = questions(report, spec)
    used = methods(rows)
    system = spec.need_system()
    verdict = {0: "holds", 1: "does not hold", 3: "is not decided"}[report.exit_code]
    if report.exit_code == 0 and any(not row.cells for row in rows):
        verdict = "holds, as far as it was asked"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(system.name)} {verdict}</title>",
        f"<style>{CSS}</style></head><body>",
        '<a class="skip" href="#properties">Skip to the properties</a>',
        f'<header><p class="kicker">rlt-verify</p><h1>{escape(system.name)} {verdict}</h1>',
        f'<p class="lead">{_headline(report, rows, mutants)}</p>',
        _about(spec, about, report),
        _contents(report, mutants, coverage),
        "</header><main>",
        _counterexamples(report),
        _properties(rows, used),
        _methods(used),
        _scopes(report, spec),
        _lemmas(rows, used),
        _mutants(mutants),
        _coverage(coverage),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _doc(text: str) -> str:
    """A sentence of the spec, with what stands between backticks as code."""
    pieces = escape(text.strip()).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))


# -- the head -----------------------------------------------------------------------------------------


def _headline(report: Report, rows: Sequence[Question], mutants: Sequence[Outcome] | None) -> str:
    """What holds, what does not, what is unknown, in that order of weight."""
    named = {v: [r.name for r in rows if r.kind != "lemma" and r.verdict == v] for v in ("refuted", "unknown")}
    asked = [r for r in rows if r.kind != "lemma" and r.cells]
    lemmas = [r for r in rows if r.kind == "lemma" and r.cells]
    holding = sum(r.verdict == "proved" for r in asked)
    text = []
    if named["refuted"]:
        text.append(f"Refuted: {_names(named['refuted'])}.")
    if named["unknown"]:
        text.append(f"Unknown: {_names(named['unknown'])}.")
    text.append(f"{holding} of {len(asked)} questions that were asked hold")
    text[-1] += f", and {sum(r.verdict == 'proved' for r in lemmas)} of {len(lemmas)} lemmas." if lemmas else "."
    missing = sum(r.kind != "lemma" and not r.cells for r in rows)
    if missing:
        text.append(f"{missing} were not asked in this run.")
    if report.skipped:
        text.append(f"Scopes not run, since an earlier one refuted a property: {_names(report.skipped)}.")
    if report.never_fired:
        text.append(f"Rows that no scope fires: {_names(report.never_fired)}.")
    loose = sum(o.verdict not in CLASSES for o in mutants or ())
    if loose:
        text.append(f"{loose} change{'s' if loose > 1 else ''} of the spec fit{'' if loose > 1 else 's'} no class.")
    return " ".join(text)


def _names(names: Iterable[str]) -> str:
    """The first of them, and how many more; the tables have all."""
    listed = list(names)
    text = ", ".join(f"<code>{escape(name)}</code>" for name in listed[:NAMES_MAX])
    return text + (f" and {len(listed) - NAMES_MAX} more" if len(listed) > NAMES_MAX else "")


def _name(text: str) -> str:
    """A name that may be broken after an underscore or a dot."""
    return escape(text).replace("_", "_<wbr>").replace(".", ".<wbr>")


def _about(spec: Spec, about: About, report: Report) -> str:
    facts = {
        "Spec": f'{escape(", ".join(spec.sources))}<br><code class="hash">{spec.digest}</code>',
        "When": escape(about.date),
        "Took": f"{report.seconds:.1f} s",
        "Machine": escape(about.machine),
        "Command": f"<code>{escape(about.command)}</code>",
    }
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in facts.items()) + "</dl>"


def _contents(report: Report, mutants: object, coverage: object) -> str:
    found = counterexamples(report)
    links = [("#counterexamples", "Counterexamples")] if found else []
    links += [("#properties", "Properties"), ("#methods", "What a verdict means"), ("#scopes", "Scopes")]
    links += [("#lemmas", "Lemmas"), ("#mutants", "Mutants"), ("#coverage", "Coverage")]
    return "<nav><ul>" + "".join(f'<li><a href="{at}">{name}</a></li>' for at, name in links) + "</ul></nav>"


# -- counterexamples ----------------------------------------------------------------------------------


def _counterexamples(report: Report) -> str:
    found = counterexamples(report)
    if not found:
        return ""
    parts = ['<section id="counterexamples"><h2>Counterexamples</h2>']
    for number, (name, result, flat) in enumerate(found[:CHARTS_MAX]):
        parts.append(_counterexample(name, result, flat, opened=number == 0 and result.verdict == "refuted"))
    if len(found) > CHARTS_MAX:
        rest = _names(result.name for _, result, _ in found[CHARTS_MAX:])
        parts.append(f"<p>And, in the files beside this page: {rest}.</p>")
    return "\n".join([*parts, "</section>"])


def _counterexample(name: str, result: Result, flat: Flat | None, opened: bool) -> str:
    assert result.trace is not None
    steps = length(result)
    real = result.verdict == "refuted"
    what = f"{steps} step{'' if steps == 1 else 's'}" if real else "a step that is not kept"
    parts = [
        f'<details class="case"{" open" if opened else ""}><summary>{_badge(result.verdict)} '
        f"<strong>{escape(result.name)}</strong> <span>{escape(result.kind)}, {escape(result.method)}, "
        f"{escape(result.scope)}: {what}</span></summary>",
        f"<p>{escape(result.why)}</p>",
    ]
    if not real:
        parts.append("<p>This is no run: the state before the step is one that the invariant does not exclude.</p>")
    if flat is not None:
        parts.append(_objections(flat, result))
        if steps:
            title = f"Message sequence chart of {result.name}, {what}; the same steps stand in the table below"
            chart = svg(flat, result.trace, title, name)
            parts.append(f'<div class="scroll" tabindex="0" role="region" aria-label="Chart">{chart}</div>')
            parts.append(_steps(flat, result))
    elif steps:
        items = "".join(
            f"<li><code>{escape(move.label)}</code>: "
            + escape(", ".join(f"{k} {old} → {new}" for k, (old, new) in move.changed.items()))
            + "</li>"
            for move in result.trace.moves
        )
        parts.append(f"<ol>{items}</ol>")
    return "\n".join([*parts, "</details>"])


def _objections(flat: Flat, result: Result) -> str:
    """The false conjunct, its parts, and since which step each value is what it is."""
    parts = []
    for objection in objections(flat, result):
        rows = [
            [
                "holds" if part.holds else '<strong class="false">false</strong>',
                f"<code>{escape(part.text)}</code>",
                "<br>".join(
                    f"<code>{escape(v.name)} is {escape(v.text)}</code>"
                    + (f" <small>since step {v.since}</small>" if v.since else " <small>from the start</small>")
                    for v in part.values
                ),
            ]
            for part in objection.parts
        ]
        parts.append('<div class="objection"><h3>What is false at the end</h3>')
        parts.append(f"<p><code>{escape(objection.text)}</code></p>")
        parts.append(_table(["", "Part", "Values"], rows, "The parts of the false conjunct") + "</div>")
    return "\n".join(parts)


def _steps(flat: Flat, result: Result) -> str:
    assert result.trace is not None
    rows = []
    for number, step in enumerate(chart_steps(flat, result.trace), 1):
        who = step.source if step.target is None else f"{step.source} → {step.target}"
        loop = " <small>from here on, for ever</small>" if result.trace.loop == number - 1 else ""
        rows.append([str(number), escape(who), escape(step.text) + loop, "<br>".join(map(escape, step.changes))])
    table = _table(["Step", "Who", "What", "Changed"], rows, f"Steps of {result.name}", "steps")
    return f"<details><summary>The steps as a table</summary>{table}</details>"


# -- tables -------------------------------------------------------------------------------------------


def _properties(rows: Sequence[Question], used: Sequence[str]) -> str:
    body = []
    for row in rows:
        if row.kind == "lemma":
            continue
        number = f"{row.checks} checks" if row.checks > 1 else ""
        notes = [n for n in (row.kind, number, _place(row)) if n]
        name = f"<strong>{_name(row.name)}</strong><br><small>{', '.join(notes)}</small>"
        answers = f'<p class="answers">Answers {escape(", ".join(row.answers))}</p>' if row.answers else ""
        body.append([name, _doc(row.doc) + answers, *(_cell(row.cells.get(m), row.kind) for m in used)])
    table = _table(["Property", "What it says", *used], body, "Properties and methods", "wide", header=True)
    return f'<section id="properties"><h2>Properties</h2>{table}</section>'


def _place(row: Question) -> str:
    return escape(f"{row.span.file}:{row.span.line}") if row.span is not None else ""


def _cell(cell: Cell | None, kind: str) -> str:
    """A verdict, and on what: scopes, states, seconds; or the reason."""
    if cell is None:
        return '<span class="none">not asked</span>'
    scopes = cell.scopes
    facts = [f"{len(scopes)} scopes" if len(scopes) > 2 else ", ".join(escape(s) for s in scopes)]
    states = cell.figure("states")
    if states:
        facts.append(f"{states:,.0f} states")
    seconds = cell.figure("seconds")
    if seconds:
        facts.append(f"{seconds:.1f} s")
    text = f"{_badge(cell.verdict)}<br><small>{' · '.join(facts)}</small>"
    if cell.verdict != "proved":
        whys = dict.fromkeys(r.why for r in cell.results if r.verdict == cell.verdict and r.why)
        text += "".join(f"<br><small>{escape(_short(why))}</small>" for why in list(whys)[:2])
    elif kind == "sometimes":
        text += "<br><small>a reachable state has it</small>"
    return text


def _short(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _methods(used: Sequence[str]) -> str:
    items = "".join(
        f"<dt>{escape(m)}</dt><dd>{escape(METHODS.get(m, 'A method that this page has no words for.'))}</dd>"
        for m in used
    )
    return (
        '<section id="methods"><h2>What a verdict means</h2>'
        "<p>The worst verdict of a cell is shown. <em>Unknown</em> is no success. Seconds of a cell are those of "
        "the whole search or induction, which answers all its questions at once.</p>"
        f"<dl>{items}</dl>"
        "<p>All of it is conditional on the world that the spec describes being the world: see "
        "<code>docs/proof.md</code>.</p></section>"
    )


def _scopes(report: Report, spec: Spec) -> str:
    body = []
    for scope in spec.need_system().scopes.values():
        figures = report.figures.get(scope.name)
        if figures is None and scope.name not in report.skipped:
            continue
        sizes = ", ".join(f"{v} {k}" for k, v in scope.sizes.items())
        consts = ", ".join(f"{k} {v}" for k, v in scope.consts.items() if v)
        note = " States up to the numbering of instances; safety only." if scope.symmetry else ""
        name = f"<strong>{_name(scope.name)}</strong><br><small>{_doc(scope.doc)}{note}</small>"
        if figures is None:
            body.append([name, sizes, escape(consts), "not run", "", "", "", ""])
            continue
        states, seconds = float(figures.get("states", 0)), float(figures.get("seconds", 0))
        rate = f"{states / seconds:,.0f}" if seconds else ""
        edges, depth = f"{float(figures.get('transitions', 0)):,.0f}", str(figures.get("depth", ""))
        body.append([name, sizes, escape(consts), f"{states:,.0f}", edges, depth, f"{seconds:.2f}", rate])
    if not body:
        return '<section id="scopes"><h2>Scopes</h2><p>No bounded scope was searched in this run.</p></section>'
    heads = ["Scope", "Sizes", "Constants", "States", "Edges", "Depth", "Seconds", "States/s"]
    table = _table(heads, body, "Bounded scopes", "wide figures", header=True)
    return (
        '<section id="scopes"><h2>Scopes</h2><p>Bounds of the explicit search. A constant that is not named is 0: '
        f"what it bounds does not happen there.</p>{table}</section>"
    )


def _lemmas(rows: Sequence[Question], used: Sequence[str]) -> str:
    lemmas = [row for row in rows if row.kind == "lemma"]
    if not lemmas:
        return '<section id="lemmas"><h2>Lemmas</h2><p>The spec has none.</p></section>'
    body = []
    for row in lemmas:
        found = {m: row.cells[m].verdict for m in used if m in row.cells}
        same = len(set(found.values())) == 1
        verdicts = ", ".join(found if same else (f"{m} {verdict}" for m, verdict in found.items()))
        name = f"<strong>{_name(row.name)}</strong><br><small>{_place(row)}</small>"
        body.append([name, _doc(row.doc), _badge(row.verdict) + f"<br><small>{escape(verdicts)}</small>"])
    table = _table(["Lemma", "Serves", "Verdict"], body, "Lemmas", header=True)
    state = worst(row.verdict for row in lemmas)
    return (
        f'<section id="lemmas"><h2>Lemmas</h2><p>Invariants that carry the induction; each is itself proved, '
        f"or takes what it serves with it.</p><details><summary>{len(lemmas)} lemmas: {_badge(state)}</summary>{table}"
        "</details></section>"
    )


def _mutants(outcomes: Sequence[Outcome] | None) -> str:
    head = '<section id="mutants"><h2>Mutants</h2>'
    if outcomes is None:
        return (
            head + "<p>Not part of this run: <code>rlt-verify mutate</code> changes each part of the spec in turn.</p>"
            "</section>"
        )
    classes = [*sorted({o.verdict for o in outcomes} - set(CLASSES)), *CLASSES]
    parts = [head, f"<p>{len(outcomes)} changes of the spec, each put to the same properties.</p>"]
    for name in classes:
        chosen = [o for o in outcomes if o.verdict == name]
        if not chosen:
            continue
        body = [
            [
                f"<code>{_name(o.mutant.id)}</code><br><small>{escape(o.mutant.place)}</small>",
                _doc(o.mutant.what),
                _doc(o.by),
                escape(o.scope),
                "" if o.trace_length is None else str(o.trace_length),
            ]
            for o in chosen
        ]
        table = _table(["Mutant", "Change", "By", "Scope", "Steps"], body, f"Mutants: {name}", "wide", header=True)
        opened = "" if name in CLASSES else " open"
        mark = "" if name in CLASSES else _badge("unknown") + " "
        parts.append(f"<details{opened}><summary>{mark}{len(chosen)} {escape(name)}</summary>{table}</details>")
    return "\n".join([*parts, "</section>"])


def _coverage(joined: Joined | None) -> str:
    head = '<section id="coverage"><h2>Coverage of the tables</h2>'
    if joined is None:
        return head + "<p>Not recorded in this run.</p></section>"
    body = []
    for source in (None, *joined.sources):
        (ran, rows), (seen, outcomes) = joined.count(source), joined.outcomes(source)
        name = "<strong>all together</strong>" if source is None else escape(source)
        body.append([name, f"{ran} of {rows}", f"{seen} of {outcomes}"])
    table = _table(["Source", "Rows that ran", "Guard outcomes seen"], body, "Coverage by source", header=True)
    parts = [
        head,
        "<p>A guard conjunct has two outcomes: seen to hold and seen not to, where its event comes.</p>",
        table,
    ]
    gaps = joined.gaps()
    if gaps:
        items = "".join(f"<li><code>{escape(gap)}</code></li>" for gap in gaps)
        parts.append(f"<details open><summary>{len(gaps)} that no source saw</summary><ul>{items}</ul></details>")
    for machine in dict.fromkeys(row.machine for row in joined.rows):
        body = []
        for row in joined.rows:
            if row.machine == machine:
                guards = "<br>".join(
                    f"<code>{escape(label)}</code> holds: {_seen(sides[0])}; fails: {_seen(sides[1])}"
                    for label, sides in row.conjuncts.items()
                )
                name = f"<code>{_name(row.name)}</code><br><small>{escape(str(row.row.span))}</small>"
                body.append([name, ", ".join(row.row.sources), _seen(row.ran), guards])
        table = _table(["Row", "From", "Ran in", "Guards"], body, f"Rows of {machine}", "wide", header=True)
        parts.append(f"<details><summary>{escape(machine)}</summary>{table}</details>")
    return "\n".join([*parts, "</section>"])


def _seen(sources: Sequence[str]) -> str:
    return ", ".join(map(escape, sources)) if sources else '<strong class="false">never</strong>'


def _badge(verdict: str) -> str:
    return f'<span class="badge {escape(verdict.replace(" ", "-"))}">{escape(verdict)}</span>'


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str, kind: str = "", header: bool = False
) -> str:
    """A table whose cells are HTML. header: the first cell of a row names it. Each cell knows its column's name."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    body = []
    for row in rows:
        cells = []
        for place, (name, text) in enumerate(zip(heads, row, strict=True)):
            label = f' data-head="{escape(name)}"' if name else ""
            cells.append(f'<th scope="row"{label}>{text}</th>' if header and place == 0 else f"<td{label}>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{kind}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )
