"""Files to the model: spans, YAML's traps, look-up beside a file, the digest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlt_fsm.errors import Finding, Span, SpecError
from rlt_fsm.expr import BOOL, INT, Enum, show
from rlt_fsm.load import load
from rlt_fsm.schema import schema, spec_directory

LAMP = """\
machine: Lamp
doc: A lamp.
reads: {fuse: Fuse}
vars:
  times: {type: counter, doc: "Times that it was lit."}
states:
  dark: {initial: true}
  lit:  {doc: "Gives light."}
  broken: {final: true}
transitions:
  - {on: press, from: dark, to: lit, when: {fuse_whole: fuse.state == whole}, set: {times: times + 1}}
  - {on: press, from: lit, to: dark}
  - {on: drop, from: [dark, lit], to: broken}
ignore:
  - {on: press, from: broken, why: "It is broken."}
"""
FUSE = """\
machine: Fuse
doc: A fuse.
states:
  whole: {initial: true}
  blown: {final: true}
transitions:
  - {on: surge, from: whole, to: blown}
"""


def put(folder: Path, **files: str) -> Path:
    """A directory with these spec files."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def refused(path: Path) -> tuple[Finding, ...]:
    """The findings of a spec that must not be read."""
    with pytest.raises(SpecError) as caught:
        load([path])
    return caught.value.findings


def test_a_machine_is_read_whole(tmp_path: Path) -> None:
    """Goal: nothing of a table is lost. Method: the model of a small machine, part by part."""
    lamp = load([put(tmp_path, lamp=LAMP, fuse=FUSE)]).machines["Lamp"]

    assert lamp.initial == "dark"
    assert list(lamp.states) == ["dark", "lit", "broken"]
    assert lamp.states["broken"].final
    assert lamp.vars["times"].type == INT
    assert lamp.events() == ["press", "drop"]
    first = lamp.rows("press", "dark")[0]
    assert (first.target, list(first.when), show(first.set["times"])) == ("lit", ["fuse_whole"], "times + 1")
    assert lamp.ignored("press", "broken")[0].why == "It is broken."
    assert lamp.rows("press", "broken") == []


def test_every_part_knows_its_place(tmp_path: Path) -> None:
    """Goal: anything can be shown where it stands. Method: the text under each span of a file."""
    spec = load([put(tmp_path, lamp=LAMP, fuse=FUSE)])
    lamp = spec.machines["Lamp"]
    rows = LAMP.splitlines()

    def under(span: Span) -> str:
        return rows[span.line - 1][span.column - 1 : span.column - 1 + span.length]

    assert under(lamp.span) == "Lamp"
    assert under(lamp.vars["times"].span) == "times"
    assert under(lamp.states["lit"].span) == "lit"
    assert under(lamp.transitions[1].span) == "{on: press, from: lit, to: dark}"
    assert under(lamp.ignores[0].span).startswith("{on: press, from: broken")


def test_a_mistake_points_into_the_expression(tmp_path: Path) -> None:
    """Goal: a caret under the word, not under the value. Method: a misspelt enumeral in plain and quoted text."""
    for value in ("fuse.state == hole", "'fuse.state == hole'", '"fuse.state == hole"'):
        (finding,) = refused(put(tmp_path, fuse=FUSE, lamp=LAMP.replace("fuse.state == whole", value)))

        line = next(r for r in LAMP.replace("fuse.state == whole", value).splitlines() if "hole" in r)
        assert finding.kind == "unknown-state"
        assert finding.span.line == 11
        assert line[finding.span.column - 1 :].startswith("hole")
        assert finding.span.length == 4


def test_a_mistake_in_a_long_expression_is_shown_on_its_own_line(tmp_path: Path) -> None:
    """Goal: folded text keeps its lines. Method: a mistake on the second line of `>-` and of plain text."""
    start = "  - {on: press, from: dark, to: lit, when: {fuse_whole: fuse.state == whole}, set: {times: times + 1}}\n"
    block = """\
  - on: press
    from: dark
    to: lit
    when:
      fuse_whole: MARK
        times > 3
        and fuse.state == hole
    set: {times: times + 1}
"""
    for mark in (">-", "|", ""):
        text = LAMP.replace(start, block.replace(" MARK", f" {mark}".rstrip()))
        (finding,) = refused(put(tmp_path, fuse=FUSE, lamp=text))

        row = text.splitlines()[finding.span.line - 1]
        assert row[finding.span.column - 1 :] == "hole", f"{mark or 'plain'}: {finding.span}"


def test_on_and_no_are_words(tmp_path: Path) -> None:
    """Goal: YAML's truth words do no harm. Method: `on` as a key, and machines with states `on`, `off`, `no`."""
    text = FUSE.replace("whole", "on").replace("blown", "off").replace("surge", "no")
    fuse = load([put(tmp_path, fuse=text)]).machines["Fuse"]

    assert list(fuse.states) == ["on", "off"]
    assert fuse.transitions[0].event == "no"
    assert fuse.transitions[0].sources == ("on",)


def test_numbers_and_dates_stay_words(tmp_path: Path) -> None:
    """Goal: no tag is resolved. Method: documents that YAML would read as a date, a float and null."""
    docs = ["2024-01-01", "1e3", "null", "~"]
    for doc in docs:
        assert load([put(tmp_path, fuse=FUSE.replace("A fuse.", doc))]).machines["Fuse"].doc == doc


def test_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    """Goal: nothing is overwritten in silence. Method: a second `doc` of a state."""
    (finding,) = refused(put(tmp_path, fuse=FUSE.replace("{final: true}", "{final: true, final: true}")))

    assert (finding.kind, finding.span.line) == ("duplicate-key", 5)
    assert "line 5" in finding.message


def test_what_a_file_reads_is_found_beside_it(tmp_path: Path) -> None:
    """Goal: a file can be looked at by itself. Method: a chain of three files, loading the first."""
    fuse = FUSE.replace("doc: A fuse.", "doc: A fuse.\nreads: {mains: Mains}")
    fuse = fuse.replace("to: blown", "to: blown, when: {live: mains.state == live}")
    mains = FUSE.replace("Fuse", "Mains").replace("whole", "live")
    put(tmp_path, lamp=LAMP, fuse=fuse, mains=mains, other=FUSE.replace("Fuse", "Unasked"), wrong="machine: [")

    spec = load([tmp_path / "lamp.yaml"])

    assert list(spec.machines) == ["Lamp", "Fuse", "Mains"]


def test_mistakes_beside_a_file_are_not_its_own(tmp_path: Path) -> None:
    """Goal: a neighbour's mistake stays with it. Method: a duplicate key in a file that is only looked into."""
    put(tmp_path, lamp=LAMP, fuse=FUSE, aside=FUSE.replace("Fuse", "Aside").replace("doc: A", "doc: A\ndoc: A", 1))

    assert "Fuse" in load([tmp_path / "lamp.yaml"]).machines


def test_a_missing_sibling_is_named(tmp_path: Path) -> None:
    """Goal: one finding, at the name. Method: no file beside has the machine."""
    (finding,) = refused(put(tmp_path, lamp=LAMP) / "lamp.yaml")

    assert (finding.kind, finding.span.line, finding.span.column) == ("unknown-machine", 3, 15)


def test_all_mistakes_are_shown_at_once(tmp_path: Path) -> None:
    """Goal: one run, one list. Method: mistakes in two files."""
    text = LAMP.replace("to: broken", "to: brokn").replace("times: times + 1", "tims: times + 1")
    found = refused(put(tmp_path, lamp=text, fuse=FUSE.replace("to: blown", "to: blwn")))

    assert sorted((f.kind, f.span.line) for f in found) == [
        ("unknown-state", 7),
        ("unknown-state", 13),
        ("unknown-variable", 11),
    ]


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    """Goal: a trace names the spec that ran. Method: same files elsewhere, other content, other name."""
    for name in ("one", "two", "three", "four"):
        (tmp_path / name).mkdir()
    one = load([put(tmp_path / "one", lamp=LAMP, fuse=FUSE)]).digest

    assert re.fullmatch("[0-9a-f]{64}", one)
    assert load([put(tmp_path / "two", lamp=LAMP, fuse=FUSE)]).digest == one
    assert load([put(tmp_path / "three", lamp=LAMP.replace("to: lit", "to: dark"), fuse=FUSE)]).digest != one
    assert load([put(tmp_path / "four", lamp=LAMP, wire=FUSE)]).digest != one


def test_an_empty_directory_is_no_spec(tmp_path: Path) -> None:
    """Goal: looking in the wrong place is said. Method: a directory without files."""
    (finding,) = refused(tmp_path)

    assert finding.kind == "no-spec"


def test_a_path_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Goal: no traceback for a misspelt path. Method: load it."""
    (finding,) = refused(tmp_path / "nothing.yaml")

    assert finding.kind == "unreadable"
    assert "nothing.yaml" in finding.span.file


def test_the_shipped_spec_is_read() -> None:
    """Goal: the protocol has its machines, processes and types. Method: names that the engine relies on."""
    spec = load()
    system = spec.need_system()

    assert set(system.processes) == {"coordinator", "prefill", "decode"}
    assert {"Coordinator", "Export", "Import", "SourceRetirement", "DestinationRetirement"} <= set(spec.machines)
    assert isinstance(spec.machines["Export"].state_type, Enum)
    assert spec.machines["Export"].takes["launch"]["final"].type == BOOL
    assert set(spec.sources) >= {"spec/system.yaml"} or any(s.endswith("system.yaml") for s in spec.sources)


def test_the_schema_explains_every_key() -> None:
    """Goal: each key says what it is for, and each kind that is named exists. Method: walk the schema."""
    plain = {"name", "text", "flag", "number", "expr", "names", "any", "field", "fields"}
    for kind, rules in schema().items():
        for key, rule in rules.items():
            assert rule.doc.endswith("."), f"{kind}.{key}"
            shape = rule.shape.removeprefix("list of ").removeprefix("map of ")
            assert shape in plain | set(schema()), f"{kind}.{key}"


def test_the_schema_is_not_a_spec() -> None:
    """Goal: a directory of specs may hold the schema. Method: it is skipped in `spec/`."""
    assert (spec_directory() / "schema.yaml").is_file()
    assert not any(name.endswith("schema.yaml") for name in load().sources)
