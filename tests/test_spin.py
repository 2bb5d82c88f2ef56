"""SPIN as a second opinion: the same states, the same verdicts, and never a proof that it did not give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from guard_deletions import EDITS, apply

from rlt_fsm.ground import Flat, ground
from rlt_fsm.load import load
from verification import explicit
from verification.cli import main
from verification.confirm import confirm
from verification.smt.reading import Z3
from verification.spin import run as spin
from verification.spin.promela import PROMELA, promela

QUICKLY_BUILT = "-O0"
installed = pytest.mark.skipif(bool(spin.missing()), reason=spin.missing() or "spin is here")


@pytest.fixture(autouse=True)
def build_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building takes longer than searching here."""
    real = spin.search
    monkeypatch.setattr(spin, "search", lambda model, seconds: real(model, seconds, flags=QUICKLY_BUILT))


def flat_of(scope: str, paths: list[Path] | None = None, **consts: int) -> Flat:
    """A scope of the shipped spec, or of a copy, with some constants changed."""
    system = load(paths).need_system()
    item = system.scopes[scope]
    return ground(system, item.sizes, {**item.consts, **consts}, item.start)


@installed
@pytest.mark.parametrize("scope", ["no_slot", "one_from_start", "one_long", "two_share"])
def test_spin_stores_the_same_states(scope: str) -> None:
    """Goal: two searches that share no code see one system. Method: verdicts, and the number of states, by both.
    In two_share, two states differ only in a variable that no guard and no `always` reads."""
    flat = flat_of(scope)
    ours = explicit.search(flat, scope, lemmas=False)
    theirs = spin.check(flat, scope)

    assert {r.verdict for r in theirs} == {"proved"}
    assert theirs[0].figures["states"] == ours.figures["states"]
    assert {r.name for r in theirs} <= {r.name for r in ours.results}


@installed
@pytest.mark.parametrize(
    ("name", "scope"),
    [("release_destination_with_a_writer", "no_slot"), ("release_source_with_posted_handles", "no_slot")],
)
def test_an_edit_is_refuted_by_spin_too(name: str, scope: str, tmp_path: Path) -> None:
    """Goal: a counterexample of SPIN's is a run of the spec. Method: two edits; its steps run again on the compiled
    classes, as many as in the explicit search's shortest one."""
    edit = next(e for e in EDITS if e.name == name)
    apply(edit, tmp_path)
    flat = flat_of(scope, [tmp_path], cancels=1)
    ours = next(r for r in explicit.search(flat, scope, lemmas=False).results if r.verdict == "refuted")
    theirs = next(r for r in spin.check(flat, scope) if r.verdict == "refuted")

    assert base(theirs.name) in edit.breaks and theirs.trace is not None and ours.trace is not None
    assert len(theirs.trace.moves) == len(ours.trace.moves)
    assert confirm(flat, theirs.trace, "", None).startswith("confirmed")


def base(name: str) -> str:
    """The property without its instances."""
    return name.split("[")[0]


@installed
def test_a_counter_that_does_not_fit_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a bound is an error and never a clamp. Method: counters of at most 1 where two chunks run."""
    monkeypatch.setattr("verification.spin.promela.COUNTER_MAX", 1)
    results = spin.check(flat_of("no_slot", chunks=2), "no_slot")

    assert not any(r.holds for r in results)
    assert "leaves its bounds" in results[0].why


def test_where_spin_is_missing_it_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: never silently green. Method: an empty PATH; verdicts, exit code and what to install."""
    monkeypatch.setenv("PATH", "")
    results = spin.check(flat_of("no_slot"), "no_slot")
    assert {r.verdict for r in results} == {"unknown"} and all("apt-get install spin gcc" in r.why for r in results)

    assert main(["run", "--quiet", "--scope", "no_slot", "--backend", "spin"]) == 3
    assert "apt-get install spin gcc" in capsys.readouterr().out


def test_a_search_cut_short_is_no_proof(tmp_path: Path) -> None:
    """Goal: what pan says of itself is believed. Method: its reports of a full memory, and of nothing at all."""
    report = "pan: reached -DMEMLIM bound\n 7 states, stored\n 9 transitions\n errors: 0\n"
    for said in (report, "Segmentation fault"):
        with pytest.raises(spin.NoAnswer):
            spin._read(said, tmp_path, [], 0.0)


def test_updates_read_the_state_before() -> None:
    """Goal: simultaneous updates stay so. Method: the text of each step of a scope, run as assignments one by one."""
    flat = flat_of("one_everything")
    model = promela(flat)
    names = dict(re.findall(r"(?:bit|byte) (v\d+) = \d+;  /\* (.*) \*/", model.text))
    lines = re.findall(r'STEP (\d+)\\n"\)(.*) \}  /\*', model.text)
    assert len(lines) > 50
    for place, rest in lines:
        written: set[str] = set()
        for part in filter(None, (p.strip() for p in rest.split(";"))):
            target, _, value = part.partition(" = ")
            assert not written & {names.get(v, v) for v in re.findall(r"\b[vt]\d+\b", value)} - {
                names.get(target, "")
            }, place
            written.add(names.get(target, target))


def test_every_operator_is_written() -> None:
    """Goal: the export knows the language. Method: its table beside z3's."""
    assert PROMELA.keys() == Z3.keys()
