"""Pages, diagrams and charts: up to date, the same each time, and fit to read."""

from __future__ import annotations

import re
from pathlib import Path

import pydot
import pytest

from rlt_fsm import render
from rlt_fsm.check import check
from rlt_fsm.errors import KINDS
from rlt_fsm.expr import OPERATORS
from rlt_fsm.load import load
from rlt_fsm.render import ChartLine, drift, machine_dot, pages, sequence_chart, sequence_mermaid, write
from rlt_fsm.schema import schema

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LAMP = """\
machine: Lamp
doc: A lamp | with a bar in its doc.
vars:
  times: {type: counter, doc: "Times lit."}
states:
  dark: {initial: true}
  lit:  {milestone: light, doc: "Gives light."}
  broken: {final: true}
transitions:
  - {on: press, from: dark, to: lit, when: {new: times == 0}, set: {times: times + 1}}
  - {on: press, from: dark, to: lit, when: {used: times > 0}}
  - {on: shine, from: lit, set: {times: times + 1}}
  - {on: drop, from: [dark, lit], to: broken}
ignore:
  - {on: press, from: broken, why: "It is broken."}
"""


def test_the_committed_pages_are_up_to_date() -> None:
    """Goal: docs/machines says what spec/ says. Method: render in memory and compare; drawings by their stamp.

    If this fails: `rlt-spec render` (with Graphviz installed), look at the difference, commit it.
    """
    assert drift(load(), DOCS / "machines") == []


def test_rendering_is_the_same_each_time() -> None:
    """Goal: no noise in a diff. Method: two renderings of two readings."""
    assert pages(load()) == pages(load())


def test_links_between_pages_lead_somewhere() -> None:
    """Goal: no dead link. Method: every relative link of the generated pages, against the files there are."""
    found = 0
    for name, text in pages(load()).items():
        for target in re.findall(r"\]\(([^)#]+)\)", text) if name.endswith(".md") else ():
            found += 1
            assert (DOCS / "machines" / target).exists(), f"{name}: {target}"
    assert found > 30


def test_tables_are_whole() -> None:
    """Goal: every table renders. Method: each row of a table has as many cells as its head."""
    for name, text in pages(load()).items():
        cells = 0
        for row in text.splitlines() if name.endswith(".md") else ():
            if not row.startswith("|"):
                cells = 0
                continue
            count = len(re.findall(r"(?<!\\)\|", row))
            assert cells in (0, count), f"{name}: {row}"
            cells = count


def test_a_page_holds_the_whole_machine(tmp_path: Path) -> None:
    """Goal: nothing of the table is left out. Method: the words of a small machine, on its page."""
    (tmp_path / "lamp.yaml").write_text(LAMP)
    page = pages(load([tmp_path]), source="")["Lamp.md"]

    for text in (
        "A lamp | with a bar",
        "| `dark` | initial |",
        "| `lit` |  | light | Gives light. |",
        "| `times` | counter | `0` | Times lit. |",
        "new: `times == 0`",
        "`times := times + 1`",
        "| `press` | `broken` | It is broken. |",
    ):
        assert text in page, text


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_a_diagram_merges_rows_and_marks_states(tmp_path: Path) -> None:
    """Goal: a diagram is readable. Method: read the DOT back and look at its nodes and edges."""
    (tmp_path / "lamp.yaml").write_text(LAMP)
    (graph,) = pydot.graph_from_dot_data(machine_dot(load([tmp_path]).machines["Lamp"]))

    nodes = {n.get_name().strip('"'): n for n in graph.get_nodes()}
    edges = {(e.get_source().strip('"'), e.get_destination().strip('"')): e.get_label() for e in graph.get_edges()}
    assert set(nodes) >= {"(start)", "dark", "lit", "broken"}
    assert nodes["broken"].get("peripheries") == '"2"'
    assert nodes["dark"].get("peripheries") == '"1"'
    assert nodes["lit"].get("fillcolor") != nodes["dark"].get("fillcolor")
    assert "shine" in nodes["lit"].get("label")
    assert set(edges) == {("(start)", "dark"), ("dark", "lit"), ("dark", "broken"), ("lit", "broken")}
    assert "press [new]" in edges["dark", "lit"]
    assert "press [used]" in edges["dark", "lit"]
    assert "times" not in edges["dark", "lit"]


def test_drift_names_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: whoever breaks it learns what to do. Method: change, remove and add files; without Graphviz."""
    (tmp_path / "lamp.yaml").write_text(LAMP)
    spec = load([tmp_path / "lamp.yaml"])
    out = tmp_path / "out"
    monkeypatch.setattr(render, "draw", lambda dot: None)
    assert [line.split(":")[0] for line in write(spec, out, "")] == [str(out / "Lamp.svg")]
    assert drift(spec, out, "") == [f"{out / 'Lamp.svg'}: missing"]

    monkeypatch.setattr(render, "draw", lambda dot: f"<!-- {render._stamp(dot)} --><svg/>")
    assert write(spec, out, "") == []
    assert drift(spec, out, "") == []

    (out / "Lamp.md").write_text("# Lamp\n")
    (out / "README.md").unlink()
    (out / "Lamp.svg").write_text("<svg/>")
    (out / "Gone.md").write_text(f"<!-- {render.MARK} -->\n")
    (out / "notes.md").write_text("written by hand\n")
    assert drift(spec, out, "") == [
        f"{out / 'README.md'}: missing",
        f"{out / 'Lamp.md'}: not what the spec says now",
        f"{out / 'Lamp.svg'}: drawn from another Lamp.dot",
        f"{out / 'Gone.md'}: belongs to nothing in the spec",
    ]
    assert write(spec, out, "") == []
    assert drift(spec, out, "") == []
    assert (out / "notes.md").exists()


def test_the_reference_is_whole() -> None:
    """Goal: no key, operator or finding is undocumented. Method: each name, on the generated page."""
    page = render.reference_page()

    for kind, rules in schema().items():
        assert f"### {kind}\n" in page
        assert all(f"| `{key}` |" in page for key in rules)
    assert all(f"| `{name}` |" in page for name in {*OPERATORS, *KINDS} - {"ite"})


def test_the_worked_example_of_the_guide_is_a_clean_spec(tmp_path: Path) -> None:
    """Goal: what people copy works. Method: the YAML blocks of the guide that stand as whole documents."""
    guide = (DOCS / "spec_language.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n((?:machine|system):.*?)```", guide, flags=re.DOTALL)
    (tmp_path / "example.yaml").write_text("---\n".join(blocks))

    spec = load([tmp_path])

    assert spec.system is not None
    assert check(spec) == []


STEPS = [
    ChartLine("coordinator", None, "submit r0"),
    ChartLine("coordinator", "decode", "reserve r0"),
    ChartLine("decode", "coordinator", "reserved r0"),
    ChartLine("coordinator", "prefill", "prefill r0"),
    ChartLine("world", None, "crash_prefill"),
]
CHART = """\
   coordinator         prefill     decode       world
        |                 |           |           |
1       o submit r0       |           |           |
2       |-------- reserve r0 -------->|           |
3       |<------- reserved r0 --------|           |
4       |-- prefill r0 -->|           |           |
5       |                 |           |           o crash_prefill"""


def test_a_chart_shows_who_said_what() -> None:
    """Goal: a refutation can be read. Method: a recorded chart of five steps."""
    assert sequence_chart(STEPS) == CHART


def test_a_chart_keeps_its_lifelines_straight() -> None:
    """Goal: long texts and many steps break no column. Method: each lifeline's column, in every line."""
    steps = [*STEPS, ChartLine("prefill", "decode", "a rather long message that needs room")] * 30
    lines = sequence_chart(steps).splitlines()
    columns = [place for place, mark in enumerate(lines[1]) if mark == "|"]

    assert len(columns) == 4
    assert len(lines) == len(steps) + 2
    place = dict(zip(("coordinator", "prefill", "decode", "world"), columns, strict=True))
    for number, (line, step) in enumerate(zip(lines[2:], steps, strict=True), 1):
        assert line.split()[0] == str(number)
        assert step.text in line
        ends = (place[step.source], place[step.target or step.source])
        assert all(line[c] == "|" for c in columns if not min(ends) <= c <= max(ends))
        if step.target is None:
            assert line[ends[0]] == "o"
        else:
            assert line[ends[0]] == line[ends[1]] == "|"
            assert line[ends[1] + (-1 if ends[0] < ends[1] else 1)] == (">" if ends[0] < ends[1] else "<")


def test_a_chart_takes_other_lifelines() -> None:
    """Goal: any system has charts. Method: names that the handoff does not know, and no step at all."""
    assert "client" in sequence_chart([ChartLine("client", "server", "question")]).splitlines()[0]
    assert sequence_chart([]) == "(no steps)"


def test_mermaid_text_says_the_same() -> None:
    """Goal: a chart for pages. Method: one line a step, with what Mermaid would misread escaped."""
    text = sequence_mermaid([*STEPS, ChartLine("world", None, "a; b # c")])

    assert text.splitlines()[:3] == ["sequenceDiagram", "    autonumber", "    participant coordinator"]
    assert "    coordinator->>decode: reserve r0" in text
    assert "    world->>world: a#59; b #35; c" in text
