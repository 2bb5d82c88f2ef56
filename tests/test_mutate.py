"""The sweep over mutants: each gets the class that is true of it, reasons are needed, nothing is lost on the way."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from report_tools import TEXT, hotel, shipped

from rlt_fsm.model import Spec
from verification import cli
from verification.mutation.equivalents import EQUIVALENTS, matches
from verification.mutation.mutants import variants
from verification.mutation.sweep import Sweep, load_outcomes, mutate, show

NIGHTS = ("Guest.ask.send.house.book.count:*", "Room.book.set.nights:*", "Room.night@let/stays.*")
UNSEEN = dict.fromkeys(NIGHTS, "No property reads the nights.") | {"Room.night@let/paid.from.let:drop": "Nobody asks."}


def whole() -> str:
    """The hotel without its faults: a room is given when one is free, and beds and keys agree."""
    wrong = TEXT[TEXT.index("  nobody_sleeps_twice:") : TEXT.index("  everybody_sleeps:")]
    keys = (
        "  a_key_is_for_a_bed:\n"
        "    always: 'sum(r: 1 if Room[r].state == let else 0) == sum(b: 0 if sleeper[b] == none else 1)'\n"
        "    doc: As many beds are taken as keys are out.\n"
    )
    return TEXT.replace(wrong, keys).replace(
        "event: house.give, offered: true,", "event: house.give, offered: true, fair: strong,"
    )


def spec() -> Spec:
    """Read once."""
    return hotel(whole())


@cache
def swept() -> Sweep:
    """Every mutant of it, without any written reason."""
    return mutate(spec(), jobs=1, equivalents={})


@pytest.mark.parametrize(
    ("mutant", "verdict", "evidence", "by"),
    [
        ("Room.give.do.hand_over:drop", "refuted", "world", "a_key_is_for_a_bed"),  # a property over the world
        ("Room.give.from.booked:drop", "refuted", "world", "everybody_sleeps[r0]"),  # liveness
        ("Guest.key.to:stay", "refuted", "world", "all_can_leave"),  # what can be reached
        ("Guest.leave.to:stay", "refuted", "handled", "handled:to_house.back r0"),  # an event that nothing takes
        ("Desk.give.set.rooms:drop", "refuted", "machines", "beds_are_counted"),  # another machine's account
        ("Guest.ask.from.away:drop", "refuted", "witness", "sometimes somebody_sleeps"),  # nothing happens any more
        ("Room.night@let/paid[paid]:delete", "refuted", "reader", "two rows for 'night'"),
        ("Room.night@let/paid[paid]:nights <= 0", "redundant", "every reachable state", "no reachable state"),
        ("Room.book.set.nights:drop", "unclassified", "", "parts from the spec after ask r0, to_house.book r0"),
    ],
)
def test_each_class_has_its_mutant(mutant: str, verdict: str, evidence: str, by: str) -> None:
    """Goal: a class is what it says. Method: a system small enough to know of each mutant what must become of it."""
    found = {o.mutant.id: o for o in swept().outcomes}[mutant]

    assert (found.verdict, found.evidence) == (verdict, evidence) and found.by.startswith(by)


def test_a_hole_in_the_properties_is_seen() -> None:
    """Goal: mutants measure the properties. Method: without one of them, what only it refuted is refuted no more."""
    text = whole()
    start = text.index("  beds_are_counted:")
    less = hotel(text[:start] + text[text.index("  a_key_is_for_a_bed:") :])
    before = {o.mutant.id for o in swept().of("unclassified")}

    after = {o.mutant.id for o in mutate(less, "Desk.", jobs=1, equivalents={}).of("unclassified")}

    assert "Desk.back.set.rooms:rooms + 1 + 1" in after - before


def test_reasons_close_the_sweep_and_are_needed() -> None:
    """Goal: exit code 0 only where each mutant has a class and each reason its use. Method: with, without, more."""
    assert swept().exit_code == 1 and swept().of("unclassified")

    whole_sweep = mutate(spec(), jobs=2, equivalents=UNSEEN)
    assert whole_sweep.exit_code == 0 and not whole_sweep.stale
    assert {o.by for o in whole_sweep.of("equivalent")} == set(UNSEEN.values())
    assert [o.mutant.id for o in whole_sweep.outcomes] == [o.mutant.id for o in swept().outcomes]

    more = UNSEEN | {"Room.back.to:stay": "Not so.", "Room.none:drop": "No such."}
    stale = mutate(spec(), "Room.", jobs=1, equivalents=more).stale
    assert [text.split(":")[0] for text in stale] == ["Room.back.to", "Room.none"]
    assert "is refuted (a_key_is_for_a_bed)" in stale[0] and "there is no such mutant" in stale[1]


def test_the_counts_are_those_of_the_list() -> None:
    """Goal: what is printed is what was found. Method: count the outcomes, look for numbers and ids."""
    text = show(swept())
    verdicts = Counter(o.verdict for o in swept().outcomes)

    assert f"{verdicts['refuted']} refuted" in text and f"{verdicts['unclassified']} unclassified" in text
    assert all(o.mutant.id in text for o in swept().outcomes)


def test_outcomes_are_written_and_read(tmp_path: Path) -> None:
    """Goal: a report shows the sweep of its own spec or says why not. Method: a good, a changed, a broken file."""
    file = tmp_path / "m.json"
    file.write_text(swept().to_json(), encoding="utf-8")

    assert load_outcomes(file, spec().digest) == swept().outcomes
    with pytest.raises(LookupError, match=r"m\.json is about spec .*run `rlt-verify mutate --json` again"):
        load_outcomes(file, "0" * 16)
    file.write_text('{"outcomes": [1]}', encoding="utf-8")
    with pytest.raises(LookupError, match="not what `rlt-verify mutate --json` writes"):
        load_outcomes(file, spec().digest)
    with pytest.raises(LookupError, match="No such file"):
        load_outcomes(tmp_path / "none.json", spec().digest)


def test_a_spec_that_does_not_hold_is_not_mutated() -> None:
    """Goal: no sweep on sand. Method: the hotel with its faults; a part that no mutant has."""
    with pytest.raises(ValueError, match="run `rlt-verify run`"):
        mutate(hotel(), jobs=1)
    with pytest.raises(LookupError, match=r"no mutant 'Lobby\.\.\.'; ids look like Guest\."):
        mutate(spec(), "Lobby", jobs=1)


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Goal: one command, exit code and file. Method: one part of the shipped spec."""
    file = tmp_path / "m.json"

    code = cli.main(["mutate", "--only", "Export.ack", "--quiet", "--json", str(file)])

    said = capsys.readouterr()
    assert code == 0 and "0 unclassified, 0 stale" in said.out and said.err == ""
    assert [o.mutant.id for o in load_outcomes(file, shipped().digest)]


def test_every_mutant_of_the_shipped_spec_has_its_own_name() -> None:
    """Goal: an id means one mutant, and each reason some. Method: all ids; all patterns."""
    ids = [v.mutant.id for v in variants(shipped().need_system())]

    assert len(set(ids)) == len(ids) > 700
    assert all(any(matches(pattern, name) for name in ids) for pattern in EQUIVALENTS)
    assert all(reason.endswith(".") and len(reason.split()) >= 8 for reason in EQUIVALENTS.values())
