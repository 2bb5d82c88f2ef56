"""A small system whose properties fail in every way, and its runs: what the tests of the report look at."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from rlt_fsm.load import load
from rlt_fsm.model import Spec
from verification.run import Report, run

TEXT = """\
machine: Guest
doc: Asks for a room & leaves.
per: generation
takes:
  ask: {nights: {type: counter, doc: "Nights <to stay>."}}
states:
  away:    {initial: true}
  waiting: {doc: "Asked."}
  inside:  {doc: "Has a room."}
  gone:    {final: true}
transitions:
  - {on: ask, from: away, to: waiting, send: {house: {book: {count: nights}}}}
  - {on: key, from: waiting, to: inside}
  - {on: leave, from: inside, to: gone, send: {house: back}}
---
machine: Room
doc: One guest's room, as the house knows it.
per: generation
reads: {desk: Desk}
takes:
  book: {count: {type: counter, doc: "Nights."}}
vars:
  nights: {type: counter, doc: "Nights still to stay."}
states:
  free:   {initial: true}
  booked: {doc: "Asked for."}
  let:    {doc: "Given out."}
  over:   {final: true}
transitions:
  - {on: book, from: free, to: booked, set: {nights: count}}
  - on: give
    from: booked
    to: let
    when: {a_room_left: desk.rooms > 0}
    send: {street: key}
    do: [hand_over]
  - {on: night, from: let, when: {stays: nights > 0}, set: {nights: nights - 1}}
  - {on: back, from: let, to: over, do: [take_back]}
ignore:
  - {on: night, from: let, when: {paid: nights == 0}, why: "The last one is over."}
---
machine: Desk
doc: Rooms left.
given: {size: {doc: "Rooms that there are."}}
vars: {rooms: {type: counter, init: size, doc: "Not given out."}}
states:
  open: {initial: true}
transitions:
  - {on: give, from: open, set: {rooms: rooms - 1}}
  - {on: back, from: open, set: {rooms: rooms + 1}}
---
system: hotel
doc: Guests and one house.
instances:
  r: {of: generation, doc: "One guest."}
  b: {of: bed, doc: "A bed."}
consts: {beds: "Beds.", nights_max: "Nights at most."}
processes:
  street: {machines: [Guest]}
  house:
    machines: [Room]
    shared: {desk: {machine: Desk, given: {size: beds}}}
channels:
  to_house:  {from: street, to: house, per: r, messages: [book, back]}
  to_street: {from: house, to: street, per: r, messages: [key]}
world:
  sleeper: {per: b, type: r, doc: "Who sleeps there."}
  slept:   {per: r, type: bool, doc: "Has slept."}
  dark:    {type: bool, doc: "It is night."}
effects:
  hand_over:
    doc: A key for a bed.
    choose: b
    needs: sleeper[b] == none
    set: {'sleeper[b]': r, 'slept[r]': 'true'}
  take_back:
    doc: The bed is free.
    for: b
    when: sleeper[b] == r
    set: {'sleeper[b]': none}
actions:
  ask:   {per: r, event: street.ask, with: {nights: ['0', '1']}, offered: true, doc: "A guest comes."}
  give:  {per: r, event: house.give, offered: true, doc: "Nobody must."}
  leave: {per: r, event: street.leave, offered: true, fair: weak, doc: "Home."}
  night: {per: r, event: house.night, offered: true, when: 'nights_max > 0', doc: "A night passes."}
  dusk:  {when: not dark, set: {dark: 'true'}, fair: weak, doc: "Evening comes."}
  dawn:  {when: dark, set: {dark: 'false'}, fair: weak, doc: "Morning comes."}
properties:
  beds_are_counted:
    always: 'desk.rooms + sum(r: 1 if Room[r].state == let else 0) == beds'
    doc: Rooms are neither lost nor made.
    answers: [F103]
  nobody_sleeps_twice:
    always: 'all(r, b: sleeper[b] == r and Room[r].nights > 0 implies Guest[r].state != inside)'
    doc: Wrong, so that there is something to see; `inside` is reached.
  everybody_sleeps:
    leads_to: {per: r, from: 'Guest[r].state == waiting', to: 'slept[r]'}
    doc: Nobody must give a room, so this is wrong too.
  all_can_leave:
    possible: 'all(r: Guest[r].state in {away, gone})'
    doc: Nobody is kept.
  somebody_sleeps:
    sometimes: 'any(r: slept[r])'
    doc: It is not empty.
lemmas:
  the_desk_knows:
    holds: 'all(r: Room[r].state == over implies slept[r])'
    serves: beds_are_counted.
scopes:
  small: {doc: "Two guests, one bed.", sizes: {r: 2, b: 1}, consts: {beds: 1, nights_max: 1}, suites: [quick, full]}
  other: {doc: "One guest.", sizes: {r: 1, b: 1}, consts: {beds: 1}, suites: [quick, full]}
  large: {doc: "Three guests, two beds.", sizes: {r: 3, b: 2}, consts: {beds: 2}, symmetry: true}
"""


@cache
def shipped() -> Spec:
    """The shipped spec, read once."""
    return load()


@cache
def hotel(text: str = TEXT) -> Spec:
    """The spec, read from a file of its own."""
    path = Path(mkdtemp(prefix="report-")) / "hotel.yaml"
    path.write_text(text, encoding="utf-8")
    return load([path])


@cache
def hotel_run(text: str = TEXT, stop_early: bool = True) -> Report:
    """Every question to it, by the explicit checker."""
    return run(hotel(text), None, "quick", backends=("explicit",), stop_early=stop_early)


def without(*names: str) -> str:
    """The text without some of its properties."""
    lines = TEXT.splitlines(keepends=True)
    out, skipping = [], False
    for line in lines:
        if line.startswith("  ") and not line.startswith("   "):
            skipping = line.strip().rstrip(":") in names
        elif not line.startswith(" "):
            skipping = False
        if not skipping:
            out.append(line)
    return "".join(out)


RIGHT = without("nobody_sleeps_twice", "everybody_sleeps")
LASSO = without("nobody_sleeps_twice")
