"""Liveness on small systems whose answer is known, and on the shipped spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlt_fsm.ground import ground
from rlt_fsm.load import load
from verification.explicit import search
from verification.liveness import check

TOY = """
machine: Worker
doc: Idles, works, is done.
per: generation
states:
  idle: {{initial: true}}
  busy: {{}}
  done: {{final: true}}
transitions:
  - {{on: begin, from: idle, to: busy}}
  - {{on: pause, from: busy, to: idle}}
  - {{on: end, from: busy, to: done}}
---
system: toy
doc: One worker.
instances:
  r: {{of: generation}}
processes:
  p: {{machines: [Worker]}}
actions:
  begin: {{per: r, event: p.begin, offered: true, {begin} doc: b}}
  pause: {{per: r, event: p.pause, offered: true, {pause} doc: p}}
  end: {{per: r, event: p.end, offered: true, {end} doc: e}}
properties:
  ends: {{leads_to: {{per: r, from: 'Worker[r].state == busy', to: 'Worker[r].state == done'}}, doc: d}}
  can_end: {{possible: 'all(r: Worker[r].state == done)', doc: d}}
scopes:
  one: {{sizes: {{r: 1}}, doc: d}}
"""


def verdicts(tmp_path: Path, **fair: str) -> dict[str, str]:
    """Verdicts of the toy with the given fairness per action."""
    text = TOY.format(**{name: f"fair: {kind}," if kind else "" for name, kind in fair.items()})
    path = tmp_path / "toy.yaml"
    path.write_text(text, encoding="utf-8")
    flat = ground(load([path]).need_system(), {"r": 1}, {})
    graph = search(flat, "toy", edges=True).graph
    assert graph is not None
    return {r.name: r.verdict for r in check(graph, "toy")}


@pytest.mark.parametrize(
    ("fair", "ends"),
    [
        ({"begin": "", "pause": "", "end": ""}, "refuted"),  # nothing has to happen: standing still is a run
        ({"begin": "weak", "pause": "weak", "end": "weak"}, "refuted"),  # pause for ever: end is not always enabled
        ({"begin": "weak", "pause": "", "end": "weak"}, "refuted"),  # as above, by choice
        ({"begin": "weak", "pause": "", "end": "strong"}, "proved"),  # enabled again and again, so taken
        ({"begin": "", "pause": "", "end": "strong"}, "refuted"),  # paused once and never begun again
    ],
)
def test_fairness_means_what_it_says(tmp_path: Path, fair: dict[str, str], ends: str) -> None:
    """Goal: weak and strong fairness are told apart, and stuttering is no progress. Method: five known answers."""
    assert verdicts(tmp_path, **fair) == {"ends[r0]": ends, "can_end": "proved"}


@pytest.mark.parametrize("scope", ["one_everything", "one_from_start", "two_share_faults", "no_slot"])
def test_the_shipped_spec_ends_every_request(scope: str) -> None:
    """Goal: the other half of the name: eventual retirement. Method: fair components over the whole graph."""
    system = load().need_system()
    item = system.scopes[scope]
    graph = search(ground(system, item.sizes, item.consts, item.start), scope, edges=True).graph
    assert graph is not None

    asked = [r for r in check(graph, scope) if not item.asks or r.name.split("[")[0] in item.asks]

    assert asked
    assert not [(r.name, r.why) for r in asked if not r.holds]
