"""All readings of the language agree, on small systems drawn at random.

The reference readings here are slow and obvious: states are dictionaries, sets of states are Python sets, and
liveness is its definition, with no strongly connected components in it. A failure prints the spec.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from small_systems import Drawn, graphs, specs

from rlt_fsm.check import check
from rlt_fsm.errors import IllegalEvent
from rlt_fsm.expr import BOOL, Const, Node, Op, Ref, conj, disj, evaluate, neg
from rlt_fsm.ground import Flat, Step, ground
from rlt_fsm.interop import SpecMachine, to_transitions
from rlt_fsm.load import load
from rlt_fsm.model import System
from verification import liveness
from verification.confirm import Runtime, plain
from verification.explicit import search
from verification.liveness import leads_to, possible
from verification.result import Result, Trace
from verification.smt.induction import Induction
from verification.smt.parametric import Parametric
from verification.smt.reading import SAT, Cvc5Solver, Solver, Z3Solver
from verification.smt.window import Refused

STATES_MAX = 200  # of a spec that is compared: the reference readings are slow

# -- liveness by definition -------------------------------------------------------------------------

Edge = tuple[int, str, int]


@dataclass(frozen=True)
class Plain:
    """A graph as sets. fair: group -> weak or strong, of those that have to happen."""

    edges: frozenset[Edge]
    fair: Mapping[str, str]

    def within(self, states: Set[int]) -> set[Edge]:
        """The edges that stay among `states`."""
        return {e for e in self.edges if e[0] in states and e[2] in states}

    def reach(self, start: Iterable[int], inside: Set[int]) -> set[int]:
        """What can be reached from `start` without leaving `inside`."""
        found, todo = set(start) & inside, list(set(start) & inside)
        while todo:
            source = todo.pop()
            for s, _, t in self.edges:
                if s == source and t in inside and t not in found:
                    found.add(t)
                    todo.append(t)
        return found

    def enabled(self, group: str) -> set[int]:
        """The states in which the group can happen."""
        return {s for s, g, _ in self.edges if g == group}

    def fair_through(self, states: Set[int], taken: Set[str]) -> bool:
        """Whether a run that visits just `states` for ever, and of the groups takes just `taken`, is fair."""
        for group, kind in self.fair.items():
            here = states & self.enabled(group)
            if group not in taken and (here if kind == "strong" else here == states):
                return False
        return True

    def fair_run(self, region: Set[int]) -> bool:
        """Whether a fair run can stay in `region`, by trying every set of states as those that it visits for ever."""
        for size in range(1, len(region) + 1):
            for chosen in itertools.combinations(sorted(region), size):
                states = set(chosen)
                fair = self.fair_through(states, {g for _, g, _ in self.within(states)})
                if fair and all(self.reach([s], states) == states for s in states):
                    return True
        return False


def plain_graph(drawn: Drawn) -> Plain:
    """The drawn graph as sets."""
    fair = {f"g{g}": kind for g, kind in enumerate(drawn.fair) if kind}
    return Plain(frozenset((s, f"g{g}", t) for s, g, t in drawn.edges), fair)


def walked(trace: Trace) -> list[int]:
    """The states that a trace of a drawn graph goes through."""
    states = [0]
    for move in trace.moves:
        states.append(int(str(move.changed["place"][1])) if "place" in move.changed else states[-1])
    return states


@settings(max_examples=400, deadline=None, derandomize=True)
@given(graphs())
def test_liveness_is_its_definition(drawn: Drawn) -> None:
    """Goal: no fair run is missed, none made up. Method: every set of states of a random graph, tried one by one."""
    plain = plain_graph(drawn)
    inside = set(range(drawn.states)) - drawn.goal
    region = plain.reach(drawn.start, inside)

    result = leads_to(drawn.graph(), "x", drawn.mask(drawn.start), drawn.mask(drawn.goal), "drawn")

    assert result.verdict == ("refuted" if plain.fair_run(region) else "proved"), str(drawn)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(graphs())
def test_a_liveness_counterexample_is_one(drawn: Drawn) -> None:
    """Goal: what is shown breaks the property by itself. Method: walk the lasso; judge its loop by the definition.

    It must have the obligation on its way, and from there on nothing that ends it; the loop must close, and be fair
    in what it visits and takes.
    """
    plain = plain_graph(drawn)
    result = leads_to(drawn.graph(), "x", drawn.mask(drawn.start), drawn.mask(drawn.goal), "drawn")
    if result.trace is None:
        return
    trace, states = result.trace, walked(result.trace)
    assert trace.loop is not None, str(drawn)
    taken = [(a, move.label, b) for a, move, b in zip(states, trace.moves, states[1:], strict=False)]
    loop = set(states[trace.loop :])

    assert set(taken) <= plain.edges, str(drawn)
    assert states[trace.loop] == states[-1], str(drawn)
    assert plain.fair_through(loop, {g for _, g, _ in taken[trace.loop :]}), f"{drawn}: unfair loop {taken}"
    last_goal = max((at for at, state in enumerate(states) if state in drawn.goal), default=-1)
    assert any(state in drawn.start for state in states[last_goal + 1 :]), f"{drawn}: no obligation in {states}"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(graphs())
def test_possible_is_its_definition(drawn: Drawn) -> None:
    """Goal: a stuck state is found, and the nearest. Method: what each state of a random graph reaches, one by one."""
    plain = plain_graph(drawn)
    every = set(range(drawn.states))
    stuck = {s for s in every if not plain.reach([s], every) & drawn.goal}
    graph = drawn.graph()

    result = possible(graph, "x", drawn.mask(drawn.goal), "drawn")

    assert result.verdict == ("refuted" if stuck else "proved"), str(drawn)
    if result.trace is not None:
        assert walked(result.trace)[-1] in stuck
        assert f"{len(stuck):,} reachable states have no way there" in result.why


# -- a spec, read slowly ----------------------------------------------------------------------------

State = tuple[int, ...]


@dataclass
class Slow:
    """Everything about a spelled-out system that can be found by trying it."""

    flat: Flat
    states: list[State] = field(default_factory=list)  # in the order of the search
    depth: dict[State, int] = field(default_factory=dict)
    came: dict[State, tuple[State, int]] = field(default_factory=dict)  # (state before, step)
    edges: list[tuple[State, int, State]] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)  # what must not be, and the least depth at which it is
    over: int | None = None  # the least depth at which a counter grows over what the checker keeps

    @property
    def whole(self) -> bool:
        """Whether nothing was cut off: no counter left its range, and the states are few enough."""
        cut = self.over is not None or any(name.startswith("bounds:") for name in self.broken)
        return not cut and len(self.states) <= STATES_MAX

    def value(self, node: Node, state: State) -> Any:
        """An expression in a state."""
        values = dict(zip(self.flat.vars, state, strict=True))
        return evaluate(node, lambda ref: bool(values[ref.name]) if ref.type == BOOL else values[ref.name])

    def next(self, step: Step, state: State) -> dict[str, int]:
        """What a step makes of a state."""
        values = dict(zip(self.flat.vars, state, strict=True))
        return values | {name: int(self.value(node, state)) for name, node in step.updates.items()}

    def way(self, state: State) -> list[int]:
        """The steps of a shortest run to `state`."""
        steps = []
        while state in self.came:
            state, step = self.came[state]
            steps.append(step)
        return steps[::-1]

    def holds(self, node: Node) -> set[State]:
        """The states with a truth."""
        return {s for s in self.states if self.value(node, s)}


def slow(flat: Flat) -> Slow:
    """Search `flat` breadth first, up to STATES_MAX states, past everything that is broken."""
    out = Slow(flat)
    must = [(n, f) for n, p, f, _ in flat.properties() if p.kind in ("always", "lemma")]
    must += [(o.name, neg(conj(o.pending, neg(o.accepted)))) for o in flat.obligations]
    must += [(name, neg(conj(step.guard, neg(test)))) for step in flat.steps for name, test in step.asserts]
    first = tuple(int(evaluate(var.init, lambda ref: flat.consts[ref.name])) for var in flat.vars.values())
    out.states, out.depth = [first], {first: 0}
    for state in out.states:
        if len(out.states) > STATES_MAX:
            break
        depth = out.depth[state]
        for name, node in must:
            if name not in out.broken and not out.value(node, state):
                out.broken[name] = depth
        for place, step in enumerate(flat.steps):
            if not out.value(step.guard, state):
                continue
            values = out.next(step, state)
            low = [n for n, v in values.items() if v < flat.vars[n].lo]
            high = [n for n, v in values.items() if flat.vars[n].hi is None and v > 7]  # what three bits hold
            for name in low:
                out.broken.setdefault(f"bounds:{name}", depth)
            if high and out.over is None:
                out.over = depth
            if low or high:
                continue
            after = tuple(values.values())
            out.edges.append((state, place, after))
            if after not in out.depth:
                out.depth[after] = depth + 1
                out.came[after] = (state, place)
                out.states.append(after)
    return out


def read_spec(text: str) -> tuple[System, Flat]:
    """The spec by the real reader, which must find nothing wrong with it; and its scope, spelled out."""
    note(text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.yaml"
        path.write_text(text, encoding="utf-8")
        spec = load([path])
    assert not [f for f in check(spec) if f.severity == "error"]
    system = spec.need_system()
    scope = system.scopes["one"]
    return system, ground(system, scope.sizes, scope.consts)


def tried(test: Callable[[str], None], examples: int) -> None:
    """Call `test` with the text of that many specs, always the same ones."""
    options = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    options(given(specs())(test))()


def replayed(known: Slow, trace: Trace) -> State:
    """The last state of a trace, every move of which is made again by the slow reading."""
    state = known.states[0]
    for move in trace.moves:
        step = known.flat.steps[move.step]
        assert known.value(step.guard, state), f"{move.label} cannot happen"
        values = known.next(step, state)
        changed = {n: (b, a) for (n, a), b in zip(values.items(), state, strict=True) if a != b}
        assert dict(move.changed) == changed, move.label
        state = tuple(values.values())
    return state


def test_the_search_says_what_a_slow_one_says() -> None:
    """Goal: verdicts, counts and shortest traces of the vectorised search. Method: a dictionary and `evaluate`.

    Every answer that the search can give must have been seen, or the comparison would be empty.
    """
    seen: Counter[str] = Counter()

    def each(text: str) -> None:
        _, flat = read_spec(text)
        known = slow(flat)
        if len(known.states) > STATES_MAX:
            seen["too large"] += 1
            return
        handled, in_order = {o.name for o in flat.obligations}, {n for step in flat.steps for n, _ in step.asserts}
        for only in (None, handled, in_order, set[str]()):  # what is found first hides the rest
            broken = {n: d for n, d in known.broken.items() if only is None or n in only or n.startswith("bounds:")}
            compare(known, broken, only)

    def compare(known: Slow, broken: dict[str, int], only: set[str] | None) -> None:
        flat = known.flat
        found = search(flat, "one", only=only)
        lengths = []
        for result in found.results:
            seen[f"{result.kind} {result.verdict}"] += 1
            if result.verdict == "refuted":
                assert result.trace is not None
                lengths.append(len(result.trace.moves))
                assert broken[result.name] == lengths[-1], f"{result.name}: not a shortest run to it"
                assert known.depth[replayed(known, result.trace)] == lengths[-1]
            elif result.verdict == "proved":
                assert result.name not in broken and known.over is None, result.name
        if broken and (known.over is None or known.over > min(broken.values())):
            assert min(lengths) == min(broken.values()), f"{broken} was missed"
        if not broken and known.over is None:
            seen["whole"] += 1
            assert all(r.holds for r in found.results)
            figures = tuple(found.figures[k] for k in ("states", "transitions", "depth"))
            assert figures == (len(known.states), len(known.edges), max(known.depth.values()))
            witnesses = {n for n, p, f, _ in flat.properties() if p.kind == "sometimes" and known.holds(f)}
            assert found.witnessed == witnesses
            assert found.fired == {place for _, place, _ in known.edges}

    tried(each, 75)
    kinds = ("always", "handled", "in_order")
    answers = [f"{kind} {verdict}" for kind in kinds for verdict in ("proved", "refuted", "unknown")]
    missed = [answer for answer in ("whole", "bounds refuted", *answers) if not seen[answer]]
    assert not missed, f"no random spec had {missed}; there were {dict(seen)}"


def test_each_value_that_the_world_may_choose_must_be_taken(tmp_path: Path) -> None:
    """Goal: no choice is dropped because another is handled. Method: a machine takes 0, the world says 1."""
    path = tmp_path / "taker.yaml"
    path.write_text(TAKER, encoding="utf-8")
    spec = load([path])
    flat = ground(spec.need_system(), {"r": 1}, {})

    explicit, solved = search(flat, "one").results, Induction(flat).run()

    (found,) = [r for r in explicit if r.verdict == "refuted"]
    assert found.kind == "handled" and found.trace is not None and found.trace.moves == ()
    assert not any(r.holds for r in solved)


TAKER = """
machine: Taker
doc: Takes only zero.
per: generation
takes:
  tell: {n: {type: counter}}
states:
  idle: {initial: true}
  done: {final: true}
transitions:
  - {on: tell, from: idle, to: done, when: {zero: n == 0}}
ignore:
  - {on: tell, from: done, why: "Over."}
---
system: taker
doc: A world that says 0 or 1.
instances:
  r: {of: generation}
processes:
  near: {machines: [Taker]}
actions:
  tell: {per: r, event: near.tell, with: {n: ['0', '1']}, doc: "The world says a number."}
"""


def smallest(flat: Flat, state: State) -> State:
    """The least of all states that differ from `state` in the numbering of instances only."""
    values = dict(zip(flat.vars, state, strict=True))
    sorts = list(flat.sizes)
    out = []
    for orders in itertools.product(*(itertools.permutations(range(flat.sizes[sort])) for sort in sorts)):
        new = dict(zip(sorts, orders, strict=True))
        moved = {}
        for name, value in values.items():
            base, _, index = name.partition("[")
            world = flat.system.world.get(base)
            number, _, member = index.partition("]")
            if index:
                name = f"{base}[{new[world.per[0] if world is not None else 'r'][int(number)]}]{member}"
            points = world is not None and world.kind in new and value >= 0
            moved[name] = new[world.kind][value] if points and world is not None else value
        out.append(tuple(moved[name] for name in flat.vars))
    return min(out)


def test_symmetry_changes_no_answer() -> None:
    """Goal: what is kept up to renumbering answers for the rest. Method: both searches of specs of two generations.

    One state of each orbit is kept: the orbits are counted by renumbering each state in every way.
    """
    seen: Counter[str] = Counter()

    def each(text: str) -> None:
        _, flat = read_spec(text)
        every = search(flat, "one", max_states=2_000, only=set())
        if flat.sizes["r"] < 2 or every.stopped:
            return
        fewer = search(flat, "one", symmetry=True, only=set())
        known = slow(flat)
        if known.whole:
            seen["orbits"] += 1
            assert fewer.figures["states"] == len({smallest(flat, state) for state in known.states})
        assert (every.figures["depth"], every.witnessed) == (fewer.figures["depth"], fewer.witnessed)
        seen["specs"] += 1
        seen["smaller"] += int(fewer.figures["states"]) < int(every.figures["states"])
        whole, kept = (search(flat, "one", symmetry=symmetry) for symmetry in (False, True))
        assert whole.stopped == kept.stopped
        for one, other in zip(whole.results, kept.results, strict=True):
            if one.kind != "always":
                continue  # an obligation of one instance may be found broken in another
            assert (one.name, one.verdict) == (other.name, other.verdict)
            if one.trace is not None and other.trace is not None:
                seen["traces"] += 1
                assert len(one.trace.moves) == len(other.trace.moves)
                replayed(slow(flat), other.trace)  # every move of it can be made

    tried(each, 60)
    assert all(seen[what] for what in ("specs", "orbits", "smaller", "traces")), seen


# -- liveness of specs ------------------------------------------------------------------------------


def fair_run(known: Slow, region: set[State]) -> bool:
    """Whether a fair run can stay in `region`: for some choice of the strong groups that it takes for ever.

    The others must then not be enabled, which leaves fewer states; among those, a part all of which reaches all of
    it must take each chosen group, and each weak one or have a state in which that is not enabled.
    """
    steps = known.flat.steps
    fair = {s.group: s.fair for s in steps if s.fair}
    strong = [g for g, kind in fair.items() if kind == "strong"]
    enabled: dict[str, set[State]] = defaultdict(set)
    for state, place, _ in known.edges:
        enabled[steps[place].group].add(state)
    strong = [g for g in strong if enabled[g] & region]
    for size in range(len(strong) + 1):
        for chosen in itertools.combinations(strong, size):
            states = {s for s in region if not any(s in enabled[g] for g in strong if g not in chosen)}
            reach = reaches(known, states)
            for state in states:
                part = {t for t in reach[state] if state in reach[t]}
                taken = {steps[p].group for s, p, t in known.edges if s in part and t in part}
                weak = all(g in taken or part - enabled[g] for g, kind in fair.items() if kind == "weak")
                if weak and set(chosen) <= taken:
                    return True
    return False


def reaches(known: Slow, states: set[State]) -> dict[State, set[State]]:
    """What each of `states` reaches through the others, itself included."""
    after: dict[State, set[State]] = defaultdict(set)
    for s, _, t in known.edges:
        if s in states and t in states:
            after[s].add(t)
    out = {}
    for state in states:
        found, todo = {state}, [state]
        while todo:
            new = after[todo.pop()] - found
            found |= new
            todo += new
        out[state] = found
    return out


def lasso(known: Slow, result: Result, start: Node, goal: Node) -> None:
    """The counterexample of a leads_to breaks it by itself: the obligation, no end of it, a fair loop."""
    trace = result.trace
    assert trace is not None and trace.loop is not None
    states = [replayed(known, Trace(trace.moves[:n])) for n in range(len(trace.moves) + 1)]
    steps = known.flat.steps
    assert states[trace.loop] == states[-1], "the loop does not close"
    last = max((n for n, s in enumerate(states) if known.value(goal, s)), default=-1)
    assert any(known.value(start, s) for s in states[last + 1 :]), "nothing is owed"
    taken = {steps[m.step].group for m in trace.moves[trace.loop :]}
    for group, kind in {s.group: s.fair for s in steps if s.fair}.items():
        on = [any(s.group == group and known.value(s.guard, state) for s in steps) for state in states[trace.loop :]]
        assert group in taken or not (any(on) if kind == "strong" else all(on)), f"the loop is unfair to {group}"


def test_liveness_of_specs_is_its_definition() -> None:
    """Goal: `possible` and `leads_to` from text to lasso. Method: fair runs by trying; every lasso walked."""
    seen: Counter[str] = Counter()

    def each(text: str) -> None:
        _, flat = read_spec(text)
        known = slow(flat)
        if not known.whole:
            return
        graph = search(flat, "one", edges=True, only=set()).graph
        assert graph is not None and graph.store.count == len(known.states)
        formulas = {n: (f, t) for n, _, f, t in flat.properties()}
        every = reaches(known, set(known.states))
        for result in liveness.check(graph, "one"):
            seen[f"{result.kind} {result.verdict}"] += 1
            start, goal = formulas[result.name]
            if goal is None:
                stuck = [s for s in known.states if not every[s] & known.holds(start)]
                assert result.verdict == ("refuted" if stuck else "proved"), result.name
                if result.trace is not None:
                    assert len(result.trace.moves) == min(known.depth[s] for s in stuck)
                    assert replayed(known, result.trace) in stuck
                continue
            inside = set(known.states) - known.holds(goal)
            within = reaches(known, inside)
            region = {t for s in known.holds(start) & inside for t in within[s]}
            assert result.verdict == ("refuted" if fair_run(known, region) else "proved"), result.name
            if result.trace is not None:
                lasso(known, result, start, goal)

    tried(each, 70)
    assert all(seen[f"{kind} {verdict}"] > 9 for kind in ("possible", "leads_to") for verdict in ("proved", "refuted"))


# -- solvers ----------------------------------------------------------------------------------------


def primed(name: str, kind: Any) -> Ref:
    """A variable after the step."""
    return Ref(f"{name}'", type=kind)


def relation(flat: Flat) -> Node:
    """The transition relation, as one expression over variables before and after."""
    steps = []
    for step in flat.steps:
        parts = [step.guard]
        for name, var in flat.vars.items():
            parts.append(Op("==", (primed(name, var.type), step.updates.get(name, Ref(name, type=var.type))), BOOL))
        steps.append(conj(*parts))
    return disj(*steps)


def literal(value: int, kind: Any) -> Node:
    """A value as an expression."""
    return Const(bool(value) if kind == BOOL else value, kind)


@pytest.mark.parametrize("solver", [Z3Solver, Cvc5Solver])
def test_a_solver_finds_the_same_next_states(solver: type[Solver]) -> None:
    """Goal: the solvers' reading of steps. Method: all models of the transition relation, for some reachable states."""
    seen = 0

    def each(text: str) -> None:
        nonlocal seen
        _, flat = read_spec(text)
        known = slow(flat)
        if not known.whole:
            return
        asks = solver(20.0)
        asks.add(relation(flat))
        kinds = {name: var.type for name, var in flat.vars.items()}
        for state in known.states[:: max(1, len(known.states) // 3)][:3]:
            asks.push()
            here = zip(kinds.items(), state, strict=True)
            asks.add(*(Op("==", (Ref(n, type=k), literal(v, k)), BOOL) for (n, k), v in here))
            found: set[State] = set()
            while asks.check() == SAT:
                after = tuple(int(asks.value(primed(name, kind))) for name, kind in kinds.items())
                assert after not in found
                found.add(after)
                model = zip(kinds.items(), after, strict=True)
                asks.any_false([Op("==", (primed(n, k), literal(v, k)), BOOL) for (n, k), v in model])
            assert not asks.why
            assert found == {t for s, _, t in known.edges if s == state}
            seen += len(found)
            asks.pop()

    tried(each, 25)
    assert seen > 50


def test_an_induction_proves_nothing_that_a_run_breaks() -> None:
    """Goal: no false proof. Method: what either induction proves, for all constants, against the slow search of one.

    One is over the instances of the scope, the other over any number of them.
    """
    seen: Counter[str] = Counter()

    def each(text: str) -> None:
        system, flat = read_spec(text)
        known = slow(flat)
        low = any(name.startswith("bounds:") for name in known.broken)
        for name in ("", "kept", "also"):  # one by one: what is not inductive spoils the proof of the others
            alone = replace(system, properties=tuple(p for p in system.properties if p.name == name))
            results = {"few": Induction(ground(alone, flat.sizes, {})).run()}
            try:
                results["many"] = Parametric(alone, {}, 20.0).run()
            except Refused:
                seen["refused"] += 1
            for how, found in results.items():
                for result in found:
                    seen[f"{how} {result.kind} {result.verdict}"] += 1
                    assert not (result.holds and result.name in known.broken), f"{how}: {result.name}"
                    assert not (result.holds and result.kind == "bounds" and low), f"{how}: {result.name}"

    tried(each, 30)
    assert seen["few always proved"] and seen["many always proved"], seen


# -- what runs --------------------------------------------------------------------------------------


def library(flat: Flat) -> dict[str, SpecMachine]:
    """Every machine instance of a scope, as the library `transitions` interprets it."""
    system, out = flat.system, {}
    for process in system.processes.values():
        own = {k: int(evaluate(v, lambda ref: flat.consts[ref.name])) for k, v in process.given.items()}
        homes = [(f"{m}[{r}]", m, own) for m in process.machines for r in range(flat.sizes[system.generation])]
        for shared in process.shared.values():
            given = {k: int(evaluate(v, lambda ref: flat.consts[ref.name])) for k, v in shared.given.items()}
            homes.append((shared.name, shared.machine, given))
        for name, kind, given in homes:
            machine = system.machines[kind]
            mine = {k: given[k] for k in machine.given}
            out[name] = to_transitions(machine, given=mine, siblings={alias: {} for alias in machine.reads})
    return out


def taken_by_library(flat: Flat, machines: dict[str, SpecMachine], step: Step, fields: dict[str, Any]) -> None:
    """All machines of the process that know the event move on it, each reading what the others were before."""
    system = flat.system
    r = dict(step.index).get(system.generation)
    own, joint = ([], [step.to]) if step.to else system.alphabet(step.process, step.event)
    members = [f"{name}[{r}]" for name in own] + joint
    before = {name: one.values() for name, one in machines.items()}
    for name in members:
        machine = machines[name]
        for alias, sibling in machine.spec.reads.items():
            other = alias if alias in system.processes[step.process].shared else f"{sibling}[{r}]"
            values = {k.partition(".")[2]: v for k, v in before[other].items()}
            assert isinstance(machine.siblings[alias], dict)
            machine.siblings[alias].update(values)  # type: ignore[attr-defined]
    for name in members:
        takes = machines[name].spec.takes.get(step.event, {})
        machines[name].fire(step.event, **{k: v for k, v in fields.items() if k in takes})


def machine_values(flat: Flat, machines: dict[str, SpecMachine]) -> dict[str, int]:
    """Every variable of the library's machines, by its flat name."""
    out = {}
    for name, one in machines.items():
        for key, value in one.values().items():
            flat_name = f"{name}.{key.partition('.')[2]}"
            out[flat_name] = plain(flat, flat_name, value)
    return out


def test_what_runs_takes_the_steps_that_are_checked() -> None:
    """Goal: checked and running machines are the same. Method: shortest runs, on compiled classes and on `transitions`.

    After each step of a run, and after every step that may follow its end, all variables are equal; an event that no
    step of the checker can take there is refused.
    """
    seen: Counter[str] = Counter()

    def each(text: str) -> None:
        _, flat = read_spec(text)
        known = slow(flat)
        ends = known.states[:STATES_MAX][:: max(1, len(known.states) // 3)]
        for end in ends:
            possible_there = [p for p, s in enumerate(flat.steps) if known.value(s.guard, end)]
            for more in (None, *possible_there):
                runtime, machines, state = Runtime(flat), library(flat), known.states[0]
                for place in known.way(end) + ([] if more is None else [more]):
                    step = flat.steps[place]
                    before = dict(zip(flat.vars, state, strict=True))
                    values = known.next(step, state)
                    state = tuple(values.values())
                    if not step.event:
                        continue
                    fields = runtime.concrete(step, before)
                    runtime.take(step, fields)
                    taken_by_library(flat, machines, step, fields)
                    seen["steps"] += 1
                    for name, value in runtime.values().items():
                        assert plain(flat, name, value) == values[name], f"{step.label}: {name}"
                    for name, number in machine_values(flat, machines).items():
                        assert number == values[name], f"{step.label}: {name}"
            for obligation in flat.obligations:
                if known.value(obligation.pending, end) and not known.value(obligation.accepted, end):
                    runtime = Runtime(flat)
                    refused(known, runtime, end, obligation.name.removeprefix("handled:"))
                    seen["refused"] += 1

    def refused(known: Slow, runtime: Runtime, end: State, label: str) -> None:
        """The compiled classes refuse what the checker says they do not handle."""
        state = known.states[0]
        for place in known.way(end):
            before = dict(zip(known.flat.vars, state, strict=True))
            step = known.flat.steps[place]
            if step.event:
                runtime.take(step, runtime.concrete(step, before))
            state = tuple(known.next(step, state).values())
        like = next((s for s in known.flat.steps if s.label.startswith(label)), None)
        if like is None or like.effects:
            return  # no row is for it at all, or the world is not ready for what it does
        with pytest.raises(IllegalEvent):
            runtime.take(like, runtime.concrete(like, dict(zip(known.flat.vars, state, strict=True))))

    tried(each, 40)
    assert seen["steps"] > 200 and seen["refused"], seen
