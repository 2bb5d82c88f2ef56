"""Coverage of the tables: what the checker, walks and traces say ran, against plain interpreters."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_tools import RIGHT, hotel, shipped
from walks import Walk, rare_faults, scope_walk

from rlt_fsm.expr import BOOL, Const, evaluate
from rlt_fsm.ground import Flat, ground
from rlt_fsm.model import Spec, Transition
from verification.explicit import Graph, Search, search
from verification.report.coverage import Coverage, from_graph, from_trace, join, read, row_name, write


def searched(spec: Spec, scope: str) -> tuple[Search, Graph, Flat]:
    """A scope of a spec, to its end."""
    item = spec.need_system().scopes[scope]
    flat = ground(spec.need_system(), item.sizes, item.consts, item.start)
    found = search(flat, scope, edges=True)
    assert found.graph is not None
    return found, found.graph, flat


def plain_outcomes(spec: Spec, flat: Flat) -> set[tuple[str, str, bool]]:
    """The hotel's outcomes, written down by hand over all states that a plain search finds."""
    first = {n: v.init.value for n, v in flat.vars.items() if isinstance(v.init, Const)}
    names = list(first)
    todo, seen = [first], {tuple(first.values())}
    out: set[tuple[str, str, bool]] = set()
    while todo:
        state = todo.pop()

        def value(ref: object, state: dict[str, bool | int] = state) -> bool | int:
            name: str = ref.name  # type: ignore[attr-defined]
            return bool(state[name]) if flat.vars[name].type == BOOL else state[name]

        for r in (0, 1):
            if state[f"Room[{r}].state"] == 1:  # booked; `give` may come at any time
                out.add(("Room.give#1", "a_room_left", state["desk.rooms"] > 0))
            if state[f"Room[{r}].state"] == 2:  # let; `night` may come, since nights_max is 1
                out.add(("Room.night#2", "stays", state[f"Room[{r}].nights"] > 0))
                out.add(("Room.night~0", "paid", state[f"Room[{r}].nights"] == 0))
        for step in flat.steps:
            if evaluate(step.guard, value):
                after = state | {n: evaluate(node, value) for n, node in step.updates.items()}
                key = tuple(after[n] for n in names)
                if key not in seen:
                    seen.add(key)
                    todo.append(after)
    return out


def test_the_checkers_outcomes_are_those_of_a_plain_search() -> None:
    """Goal: no outcome is missed or made up. Method: the hotel's guards evaluated by hand in every reachable state."""
    spec = hotel(RIGHT)
    found, graph, flat = searched(spec, "small")

    coverage = from_graph(graph, found.fired, spec.digest)

    assert coverage.outcomes == plain_outcomes(spec, flat)
    assert len(coverage.outcomes) == 6
    assert coverage.fired == {"Guest": {0, 1, 2}, "Room": {0, 1, 2, 3}, "Desk": {0, 1}}
    assert coverage.ignored == {"Room": {0}}


def test_what_is_known_is_not_asked_again() -> None:
    """Goal: larger scopes cost only what is still open. Method: the same graph again, with and without what it had."""
    spec = hotel(RIGHT)
    found, graph, _ = searched(spec, "small")
    first = from_graph(graph, found.fired, spec.digest)

    again = from_graph(graph, found.fired, spec.digest, known=[first])

    assert again.outcomes == set() and again.fired == first.fired
    assert join(spec, [first, again]).outcomes("checker") == (6, 6)


@pytest.mark.parametrize("seed", range(3))
def test_a_trace_says_what_the_walk_did(seed: int) -> None:
    """Goal: traces of the engine and the simulator count right. Method: a walk knows its rows; its trace must say them.

    Every conjunct of a row that ran was true at some time.
    """
    spec = shipped()
    walk: Walk = scope_walk(spec, next(iter(spec.need_system().scopes)), seed).run(150, rare_faults)

    coverage = from_trace(spec, [walk.trace()], "walk")

    fired: dict[str, set[int]] = {}
    true: set[tuple[str, str, bool]] = set()
    ignored = set()
    for step in walk.steps:
        for instance, row in step.rows:
            machine = next(m for m in spec.machines.values() if row in m.transitions or row in m.ignores)
            assert instance
            true |= {(row_name(machine, row), label, True) for label in row.when}
            if isinstance(row, Transition):
                fired.setdefault(machine.name, set()).add(row.place)
            else:
                ignored.add(row_name(machine, row))
    assert fired and coverage.fired == fired
    assert {
        f"{name}.{spec.machines[name].ignores[i].event}~{i}" for name, at in coverage.ignored.items() for i in at
    } == (ignored)
    assert true <= coverage.outcomes


def test_the_checker_sees_all_that_a_walk_of_its_scope_sees() -> None:
    """Goal: both collectors mean the same by an outcome. Method: a small shipped scope, searched and walked."""
    spec = shipped()
    scopes = spec.need_system().scopes
    name = min(scopes, key=lambda n: (sum(scopes[n].sizes.values()), sum(scopes[n].consts.values())))
    item = scopes[name]
    assert sum(item.sizes.values()) <= 4, f"scope '{name}' became large; give this test a smaller one"
    found, graph, _ = searched(spec, name)

    checker = from_graph(graph, found.fired, spec.digest)

    for seed in range(4):
        walk = from_trace(spec, [scope_walk(spec, name, seed).run(120, rare_faults).trace()], "walk")
        for machine, places in walk.fired.items():
            assert places <= checker.fired[machine]
        assert walk.outcomes <= checker.outcomes


def test_a_file_holds_what_was_written(tmp_path: Path) -> None:
    """Goal: sources can be joined later, from files. Method: there and back; then files that are something else."""
    spec = hotel(RIGHT)
    found, graph, _ = searched(spec, "small")
    coverage = from_graph(graph, found.fired, spec.digest)
    file = tmp_path / "checker.json"

    write(coverage, file)

    assert read(file) == coverage
    text = file.read_text(encoding="utf-8")
    for wrong, said in (
        ("{}", "key 'format' is missing"),
        ("[]", "not a coverage file"),
        (text.replace('"version": 1', '"version": 2'), "rlt-coverage 2, not rlt-coverage 1"),
        (text.replace('"fired"', '"burnt"'), "key 'fired' is missing"),
    ):
        file.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=said) as error:
            read(file)
        assert str(file) in str(error.value)


def test_coverage_of_another_spec_is_refused() -> None:
    """Goal: places of another table are never counted. Method: a digest and a trace that are not this spec's."""
    spec = hotel(RIGHT)

    with pytest.raises(ValueError, match="coverage of 'old' is of spec 000000000000, not of"):
        join(spec, [Coverage("old", "0" * 64)])
    walk = scope_walk(shipped(), next(iter(shipped().need_system().scopes)), 0).run(5)
    with pytest.raises(ValueError, match="the trace of 'coordinator' ran spec"):
        from_trace(spec, [walk.trace()], "engine")


def test_a_trace_with_a_gap_is_refused() -> None:
    """Goal: what was lost is not taken for not seen. Method: a ring that is too small for its run."""
    spec = shipped()
    item = next(iter(spec.need_system().scopes.values()))
    walk = Walk(spec, dict(item.sizes), dict(item.consts), dict(item.start), 1, capacity=3).run(40)

    with pytest.raises(ValueError, match=r"lacks \d+ events"):
        from_trace(spec, [walk.trace()], "engine")


def test_the_join_says_by_whom_and_what_is_left() -> None:
    """Goal: gaps are what no source saw. Method: two sources with one row each, and one outcome."""
    spec = hotel(RIGHT)
    one = Coverage("engine", spec.digest, {"Guest": {0}}, outcomes={("Room.give#1", "a_room_left", True)})
    two = Coverage("walks", spec.digest, {"Guest": {0, 1}}, {"Room": {0}})

    joined = join(spec, [one, two])

    assert joined.count() == (3, 10)
    assert (joined.count("engine"), joined.count("walks")) == ((1, 10), (3, 10))
    assert joined.outcomes() == (1, 6)
    assert {row.name: row.ran for row in joined.rows if row.ran} == {
        "Guest.ask#0": ("engine", "walks"),
        "Guest.key#1": ("walks",),
        "Room.night~0": ("walks",),
    }
    assert len(joined.gaps()) == 7 + 5
    assert any("Room.give#1: 'a_room_left' was never seen to fail" in gap for gap in joined.gaps())
