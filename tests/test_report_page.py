"""The page of a run: it says what was found, shows why, and needs nothing from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from html.parser import HTMLParser

import pytest
from report_tools import LASSO, RIGHT, TEXT, hotel, hotel_run, shipped

from rlt_fsm.ground import ground
from rlt_fsm.model import Spec
from verification.report import chart
from verification.report.coverage import Coverage, join
from verification.report.explain import objections, states
from verification.report.page import About, html
from verification.report.summary import questions, span_of
from verification.result import Move, Result, Trace
from verification.run import Report

ABOUT = About("2026-11-30T12:00:00+00:00", "a machine", "rlt-verify run --report <x>.html")
VOID = {"meta", "br", "wbr", "circle", "line", "path", "rect"}


class Page(HTMLParser):
    """A page taken apart: tags that do not close, ids, links, everything it would load, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.faults: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.headless = 0
        self.tables: list[int] = []
        self.text = ""
        self.feed(text)
        self.close()
        self.faults += [f"<{tag}> is left open" for tag in self.stack]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what matters of a tag."""
        known = dict(attrs)
        if tag not in VOID:
            self.stack.append(tag)
        if known.get("id"):
            self.ids.append(str(known["id"]))
        if tag == "a":
            self.links.append(str(known["href"]))
        self.loads += [str(value) for name, value in attrs if name in ("src", "xlink:href", "data")]
        if tag in ("link", "script", "img", "iframe", "object"):
            self.loads.append(tag)
        if tag == "th" and known.get("scope") not in ("col", "row"):
            self.headless += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A tag of SVG that closes itself."""
        if tag not in VOID:
            self.faults.append(f"<{tag}/> closes itself")

    def handle_endtag(self, tag: str) -> None:
        """A tag closes the last one that is open."""
        if not self.stack or self.stack.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        """Text, but not the style sheet."""
        if self.stack[-1:] != ["style"]:
            self.text += data


def page_of(text: str = TEXT, report: Report | None = None) -> Page:
    """The page of a run of the hotel."""
    return Page(html(report or hotel_run(text), hotel(text), ABOUT))


@pytest.mark.parametrize("text", [TEXT, RIGHT, LASSO], ids=["refuted", "holds", "lasso"])
def test_a_page_is_whole_and_loads_nothing(text: str) -> None:
    """Goal: one file, readable offline and by a screen reader. Method: parse it, balance tags, list what it names."""
    raw = html(hotel_run(text), hotel(text), ABOUT)
    page = Page(raw)

    assert not page.faults
    assert not page.loads
    assert (
        "http" not in raw.replace("http-equiv", "") and "@import" not in raw and "url(#" not in raw.split("</style>")[0]
    )
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert page.headless == 0
    assert hotel(text).digest in page.text and ABOUT.command in page.text and ABOUT.date in page.text


def test_the_head_says_what_was_found() -> None:
    """Goal: the first line is the answer. Method: a run that holds, one that does not, one that was asked less."""
    assert "hotel holds" in page_of(RIGHT).text and "5 of 5" not in page_of(TEXT).text
    assert "hotel does not hold" in page_of(TEXT).text
    assert "Refuted: nobody_sleeps_twice." in page_of(TEXT).text
    assert "Scopes not run, since an earlier one refuted a property: other." in page_of(TEXT).text
    part = Report([r for r in hotel_run(RIGHT).results if r.name != "all_can_leave"])
    assert "hotel holds, as far as it was asked" in page_of(RIGHT, part).text
    unknown = Report([Result("all_can_leave", "possible", "explicit", "small", "unknown", "it took too long")])
    said = page_of(RIGHT, unknown).text
    assert "hotel is not decided" in said and "Unknown: all_can_leave." in said and "it took too long" in said


def test_the_worst_verdict_is_shown() -> None:
    """Goal: no proof hides an unknown or a refutation. Method: one property, three methods, three verdicts."""
    answers = [("explicit", "proved"), ("smt", "unknown"), ("spin", "refuted")]
    results = [Result("beds_are_counted", "always", m, "small", v) for m, v in answers]

    def row(found: list[Result]) -> str:
        rows = questions(Report(found), hotel())
        return next(r.verdict for r in rows if r.name == "beds_are_counted")

    assert [row(results[:n]) for n in (0, 1, 2, 3)] == ["not asked", "proved", "unknown", "refuted"]


def test_text_of_the_spec_is_no_markup() -> None:
    """Goal: a doc cannot break the page. Method: a property whose doc holds a script, an id with quotes."""
    text = RIGHT.replace("doc: Nobody is kept.", 'doc: "<script>alert(1)</script> & \\"more\\"."')
    raw = html(hotel_run(text), hotel(text), ABOUT)

    assert "<script" not in raw
    assert '<script>alert(1)</script> & "more".' in Page(raw).text


def test_the_false_conjunct_is_named_with_its_values() -> None:
    """Goal: a refutation that explains itself. Method: a property that is wrong when a guest has the key."""
    report = hotel_run(TEXT)
    result = report.refuted[0]
    flat = report.flats[result.scope]

    found = objections(flat, result)

    # `nights` is 0 or 1 by the world's choice, and the shortest trace has the one that breaks the property
    (objection,) = found
    last = states(flat, result)[-1]
    broken = next(r for r in (0, 1) if last[f"Guest[{r}].state"] == 2)
    assert [p.holds for p in objection.parts] == [True, True, False]
    assert objection.parts[-1].text == f"Guest[{broken}].state != inside"
    assert objection.parts[-1].values[0].text == "inside" and objection.parts[-1].values[0].since == 4
    assert objection.parts[0].values[0].text == f"r{broken}"
    said = page_of(TEXT).text
    assert "What is false at the end" in said and f"Guest[{broken}].state is inside since step 4" in said


def test_a_lasso_is_false_where_it_goes_round() -> None:
    """Goal: a liveness refutation says what never comes. Method: the goal's conjunct, and a mark where it goes on."""
    report = hotel_run(LASSO)
    result = report.refuted[0]
    assert result.trace is not None and result.trace.loop is not None
    assert result.trace.loop < len(result.trace.moves)

    found = objections(report.flats[result.scope], result)

    assert [o.text for o in found] == ["slept[0]"]
    raw = html(report, hotel(LASSO), ABOUT)
    assert raw.count('class="bracket"') == len(report.refuted) and "from here on, for ever" in raw
    path = states(report.flats[result.scope], result)
    assert path[-1] == path[result.trace.loop]


def test_an_event_that_no_row_takes_shows_what_the_rows_wanted() -> None:
    """Goal: `handled` explains itself. Method: a guest who leaves before there is a room gives it back all the same."""
    text = RIGHT.replace("{on: leave, from: inside, to: gone", "{on: leave, from: [inside, waiting], to: gone")
    report = hotel_run(text)
    result = next(r for r in report.refuted if r.kind == "handled")

    found = objections(report.flats[result.scope], result)

    assert result.name == "handled:to_house.back r0"
    assert [o.text for o in found] == ["Room[0].state == let"]
    assert found[0].parts[0].values[0].text == "booked"
    assert span_of(result, hotel(text)) == hotel(text).need_system().channels["to_house"].span


def test_messages_out_of_order_and_counters_below_zero_are_named() -> None:
    """Goal: the other built-in questions explain themselves. Method: book after `back`; rooms that are not there."""
    twice = RIGHT.replace("send: {house: back}", "send: {house: [back, {book: {count: '0'}}]}")
    below = RIGHT.replace("when: {a_room_left: desk.rooms > 0}", "when: {a_room_left: desk.rooms >= 0}").replace(
        "needs: sleeper[b] == none\n    ", ""
    )
    order = next(r for r in hotel_run(twice).refuted if r.kind == "in_order")
    bound = next(r for r in hotel_run(below).refuted if r.kind == "bounds")

    assert [o.text for o in objections(hotel_run(twice).flats[order.scope], order)] == ["false"]
    assert [o.text for o in objections(hotel_run(below).flats[bound.scope], bound)] == ["desk.rooms - 1 >= 0"]


def test_a_chart_has_each_step_on_its_lanes() -> None:
    """Goal: who did what. Method: the steps of a counterexample, their lanes, and one mark each in the drawing."""
    report = hotel_run(TEXT)
    result = report.refuted[0]
    assert result.trace is not None
    flat = report.flats[result.scope]

    steps = chart.chart_steps(flat, result.trace)
    drawn = chart.svg(flat, result.trace, "t", "k")

    assert [(s.source, s.target, s.message) for s in steps] == [
        ("street", None, False),
        ("street", "house", True),
        ("house", None, False),
        ("house", "street", True),
    ]
    assert drawn.count('class="dot"') == 2 and drawn.count('class="said"') == 2
    assert "desk.rooms 1 → 0" in steps[2].changes and "sleeper[0] none → r" in " ".join(steps[2].changes)
    assert not any("to_house" in c or "left:" in c for s in steps for c in s.changes)


def test_changes_are_never_cut() -> None:
    """Goal: a narrow column loses nothing. Method: names that fit, that fill and that do not fit."""
    long = "a" * chart.CHANGES_WIDTH + " 0 → 1"
    changes = ["x 0 → 1", "y 1 → 2", long, "z 0 → 1"]

    rows = chart.fill(changes)

    assert rows == ["x 0 → 1, y 1 → 2", "a" * chart.CHANGES_WIDTH, "  0 → 1, z 0 → 1"]
    assert all(len(row) <= chart.CHANGES_WIDTH for row in rows)


def test_the_lanes_of_the_shipped_spec_name_what_it_has() -> None:
    """Goal: the one table that knows the shipped spec does not go stale. Method: look each name up."""
    system = shipped().need_system()

    assert set(chart.CAUSES) <= set(system.actions)
    assert set(chart.REACHES) <= set(system.effects)
    assert set(chart.TITLES) <= set(system.processes)


def test_a_step_of_the_induction_is_not_shown_as_a_run() -> None:
    """Goal: what need not be reachable is said to be so. Method: an unknown result whose trace is one step."""
    spec = hotel()
    flat = ground(spec.need_system(), {"r": 1, "b": 1}, {"beds": 1, "nights_max": 1})
    place = next(i for i, s in enumerate(flat.steps) if s.action == "leave")
    before = dict.fromkeys(flat.vars, 0) | {"Guest[0].state": 2, "sleeper[0]": -1}
    trace = Trace((Move("leave r0", place, {"Guest[0].state": (2, 3)}),), None, before)
    result = Result("beds_are_counted", "always", "smt", "any chunks", "unknown", "not kept", trace)

    assert [s["Guest[0].state"] for s in states(flat, result)] == [2, 3]
    for flats in ({}, {"any chunks": flat}):
        page = page_of(TEXT, Report([result], flats=flats))
        assert "This is no run" in page.text and "a step that is not kept" in page.text
        assert "leave r0" in page.text


@dataclass
class FakeMutant:
    """As the sweep gives it."""

    id: str
    place: str
    what: str


@dataclass
class FakeOutcome:
    """As the sweep gives it."""

    mutant: FakeMutant
    verdict: str
    by: str
    scope: str
    trace_length: int | None


def test_mutants_without_a_class_come_first() -> None:
    """Goal: what needs a look is not hidden. Method: one outcome of each class, and one of none."""
    outcomes = [
        FakeOutcome(FakeMutant(f"Room.give:{v}", "hotel.yaml:30", "a guard is gone"), v, "why_it_is", "small", 3)
        for v in ("refuted", "redundant", "equivalent", "unclassified")
    ]
    page = Page(html(hotel_run(RIGHT), hotel(RIGHT), ABOUT, outcomes))

    places = [page.text.index(f"1 {v}") for v in ("unclassified", "refuted", "redundant", "equivalent")]
    assert places == sorted(places)
    assert "1 change of the spec fits no class" in page.text
    assert page.text.count("hotel.yaml:30") == 4
    assert not page.faults


def test_coverage_names_what_nobody_saw() -> None:
    """Goal: gaps are listed, by name and line. Method: a source that saw one row alone."""
    spec: Spec = hotel(RIGHT)
    page = Page(html(hotel_run(RIGHT), spec, ABOUT, None, join(spec, [Coverage("test", spec.digest, {"Guest": {0}})])))

    assert "1 of 10" in page.text
    row = spec.machines["Room"].transitions[1]
    assert f"{row.span}: Room.give#1: never ran" in page.text
    assert "'a_room_left' was never seen to fail" in page.text
    assert not page.faults
