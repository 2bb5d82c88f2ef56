"""A small spec about guests and beds, in which every kind of quantifier and pointer of the language has a use."""

from __future__ import annotations

from pathlib import Path

from rlt_fsm.load import load
from rlt_fsm.model import Spec

INN = """
machine: Guest
doc: Comes, stays and leaves.
per: generation
states:
  out: {{initial: true, doc: "Not here."}}
  in_: {{doc: "Has a bed."}}
transitions:
  - {{on: enter, from: out, to: in_, do: [take]}}
  - {{on: leave, from: in_, to: out, do: [give]}}
---
machine: Desk
doc: Counts beds.
given:
  places: {{doc: "Beds that there are."}}
vars:
  free: {{type: counter, init: places, doc: "Beds not promised."}}
states:
  open: {{initial: true, doc: "Always."}}
transitions:
  - {{on: enter, from: open, when: {{fits: free > 0}}, set: {{free: free - 1}}}}
  - {{on: leave, from: open, set: {{free: free + 1}}}}
---
system: inn
doc: Guests and beds.
instances:
  r: {{of: generation, doc: "One guest."}}
  b: {{of: bed, doc: "One bed."}}
consts:
  beds: Beds.
processes:
  inn:
    machines: [Guest]
    shared:
      desk: {{machine: Desk, given: {{places: beds}}}}
channels: {{}}
world:
  sleeper: {{per: b, type: r, doc: "Who sleeps in it."}}
  bed: {{per: r, type: b, doc: "Where they were put."}}
  rival: {{per: r, type: r, doc: "Whom they dislike."}}
  nights: {{per: r, type: counter, doc: "How often they slept."}}
  uneasy: {{type: bool, doc: "Somebody slept twice."}}
effects:
  take: {{choose: b, needs: 'sleeper[b] == none', set: {{'sleeper[b]': r, 'bed[r]': b{take}}}, doc: "Lie down."}}
  give: {{for: b, when: 'bed[r] == b', set: {{'sleeper[b]': none}}, doc: "Get up."}}
actions:
  enter: {{per: r, event: inn.enter, {enter} offered: true, doc: "A guest."}}
  leave: {{per: r, event: inn.leave, {offered} doc: "They go."{when}}}
  sleep: {{per: r, set: {{{sleep}}}, doc: "A night passes."}}
properties:
  asked: {{always: '{asked}', doc: "What is asked."}}
lemmas:
{lemmas}
scopes:
  one: {{sizes: {{r: 2, b: 2}}, consts: {{beds: 2}}, suites: [quick, full], doc: "Two."}}
"""

OWNED = "all(r: Guest[r].state == in_ implies any(b: sleeper[b] == r and bed[r] == b))"
OWNER = "all(r, b: sleeper[b] == r implies bed[r] == b and Guest[r].state == in_)"
PROMISED = "desk.free + count(r: Guest[r].state == in_) == beds"
SLEEP = "'nights[r]': 'nights[r] + 1'"
COUNTED = {"b": "beds"}


def inn(
    folder: Path,
    asked: str,
    lemmas: tuple[str, ...] = (),
    sleep: str = SLEEP,
    offered: str = "offered: true,",
    when: str = "",
    enter: str = "",
    take: str = "",
) -> Spec:
    """The inn, asked one thing."""
    rows = "\n".join(f"  lemma{n}: {{holds: '{text}', serves: asked}}" for n, text in enumerate(lemmas))
    text = INN.format(asked=asked, lemmas=rows, sleep=sleep, offered=offered, when=when, enter=enter, take=take)
    path = folder / "inn.yaml"
    path.write_text(text.replace("lemmas:\n\n", ""), encoding="utf-8")
    return load([path])
