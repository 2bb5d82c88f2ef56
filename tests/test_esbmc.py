"""What is given to ESBMC: the same classes, an adversary that can find what it should, and answers read with care.

ESBMC itself is not needed here: what it reads is Python, and is run as such.
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_fsm.compile import compile_process
from rlt_fsm.errors import IllegalEvent
from rlt_fsm.expr import BOOL, Seen
from rlt_fsm.load import load
from rlt_fsm.model import System
from verification import esbmc

SYSTEM = load().need_system()


@cache
def plain_and_compiled(process: str) -> tuple[Any, Any]:
    """A record of the class that ESBMC reads, and one of the class that runs."""
    compiled = compile_process(SYSTEM, process)
    names: dict[str, Any] = {}
    exec(esbmc.plain_source(compiled), names)
    ones = {item.name: dict.fromkeys(item.given, 1) for item in SYSTEM.processes[process].shared.values()}
    return names["Record"](names["Shared"]()), compiled.make_record(compiled.make_shared(ones), "g")


@pytest.mark.parametrize("process", SYSTEM.processes)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_is_checked_is_what_runs(process: str, data: st.DataObject) -> None:
    """Goal: nothing is lost on the way to ESBMC. Method: both classes, any event: same move, same refusal."""
    plain, compiled = plain_and_compiled(process)
    both = ((plain, compiled), (plain.shared, compiled.shared))
    slots: list[tuple[int, str]] = []
    for place, kind in enumerate((type(compiled), type(compiled.shared))):
        for item in kind.plan.instances:
            slots += [(place, f"{item.name}_{name}") for name in ("state", *item.machine.given, *item.machine.vars)]
            drawn = {"state": data.draw(st.integers(0, len(item.machine.states) - 1), f"{item.name}.state")}
            for var in item.machine.vars.values():
                values = st.booleans() if var.type == BOOL else st.integers(0, 7 if isinstance(var.type, Seen) else 3)
                drawn[var.name] = data.draw(values, f"{item.name}.{var.name}")
            for name, value in drawn.items():
                for owner in both[place]:
                    setattr(owner, f"{item.name}_{name}", value)
    event = data.draw(st.sampled_from(list(type(compiled).plan.events.values())), "event")
    fields = [data.draw(st.booleans() if v.type == BOOL else st.integers(0, 3), k) for k, v in event.fields.items()]

    can = [getattr(one, f"can_{event.method}")(*fields) for one in (plain, compiled)]
    refused = [refuses(one, event.method, fields) for one in (plain, compiled)]

    assert can[0] == can[1] and refused[0] == refused[1]
    for place, slot in slots:
        assert getattr(both[place][0], slot) == getattr(both[place][1], slot), slot


def refuses(record: Any, method: str, fields: list[Any]) -> bool:
    """Whether the event is refused; it happens otherwise."""
    try:
        getattr(record, method)(*fields)
    except (IllegalEvent, ValueError):
        return True
    return False


def runs_until_an_assertion_fails(system: System, process: str, runs: int) -> int | None:
    """The seed of the first random run of the adversary that fails an assertion; None where none of so many does."""
    code = compile(esbmc.program(system, process, 40), f"<{process}>", "exec")
    for seed in range(runs):
        choice, bounds = random.Random(seed), itertools.cycle((17, 3))  # an event, and a number small enough to matter
        try:
            exec(code, {"nondet_int": lambda choice=choice, bounds=bounds: choice.randrange(next(bounds))})
        except AssertionError:
            return seed
    return None


@pytest.mark.parametrize("process", esbmc.DRIVERS)
def test_the_adversary_finds_each_deleted_guard(process: str) -> None:
    """Goal: the driver reaches what it asserts, nothing else fails. Method: random runs, whole and less each hold."""
    assert runs_until_an_assertion_fails(SYSTEM, process, 300) is None
    found = {label: runs_until_an_assertion_fails(s, process, 3000) for label, s in esbmc.deletions(SYSTEM, process)}

    assert len(found) >= 3 and None not in found.values(), found


PROVED = """
** 0 of 6 properties failed, 6 passed

VERIFICATION SUCCESSFUL
"""
REFUTED = """
  FAILED       [global.assertion.5]  line 526  assertion running == 0
** 1 of 6 properties failed, 1 passed, 4 not checked

VERIFICATION FAILED
"""


@pytest.mark.parametrize(
    ("said", "verdict", "why"),
    [
        (PROVED, "proved", ""),
        (REFUTED, "refuted", "line 526: assertion running == 0"),
        (PROVED.replace("0 of 6", "0 of 0"), "unknown", "VERIFICATION SUCCESSFUL"),
        (PROVED.replace("** 0 of 6 properties failed, 6 passed", ""), "unknown", "VERIFICATION SUCCESSFUL"),
        (REFUTED.replace("FAILED       [", "PASSED       ["), "unknown", "VERIFICATION FAILED"),
        (
            "ERROR: NameError: name '_refuse' is not defined\n",
            "unknown",
            "ERROR: NameError: name '_refuse' is not defined",
        ),
        ("", "unknown", "ESBMC said nothing"),
    ],
)
def test_only_a_plain_answer_is_an_answer(said: str, verdict: str, why: str) -> None:
    """Goal: success is said, never assumed. Method: what ESBMC 8.4 printed, whole and with a piece missing."""
    assert esbmc.judge(said) == (verdict, why)
