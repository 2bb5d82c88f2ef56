"""Which rows of the tables ran, and which outcomes each guard conjunct had: by the checker, walks, simulator, engine.

A source writes one JSON file:

    {"format": "rlt-coverage", "version": 1, "source": "engine", "spec": "<digest>",
     "fired": {"Export": [0, 3]}, "ignored": {"Export": [1]}, "guards": {"Export.post#4": {"computed": [true, false]}}}

`fired` holds places in the machine's table, `ignored` places among its `ignore` rows. `guards` says of each conjunct
whether it was seen to hold and seen not to, while the machine stood in a source state of the row and the event came
or, in the checker, could have come. Coverage of another spec is refused: places mean nothing there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlt_fsm.compile import compile_process
from rlt_fsm.expr import (
    BOOL,
    FALSE,
    TRUE,
    Add,
    Const,
    Member,
    Node,
    Op,
    Ref,
    conj,
    disj,
    evaluate,
    neg,
    substitute,
)
from rlt_fsm.ground import Flat, Step, flat_name
from rlt_fsm.model import Ignore, Machine, Process, Spec, System, Transition
from rlt_fsm.trace import Trace, TraceEvent, merge
from verification.explicit import Graph

FORMAT, VERSION = "rlt-coverage", 1
Row = Transition | Ignore
Outcome = tuple[str, str, bool]  # row, label of the conjunct, whether it held


@dataclass(slots=True)
class Coverage:
    """What one source saw."""

    source: str
    spec: str
    fired: dict[str, set[int]] = field(default_factory=dict)
    ignored: dict[str, set[int]] = field(default_factory=dict)
    outcomes: set[Outcome] = field(default_factory=set)

    def fire(self, machine: Machine, row: Row) -> None:
        """Note that a row ran."""
        if isinstance(row, Transition):
            self.fired.setdefault(machine.name, set()).add(row.place)
        else:
            self.ignored.setdefault(machine.name, set()).add(machine.ignores.index(row))

    def as_json(self) -> dict[str, Any]:
        """The file's content; the same coverage gives the same text."""
        guards: dict[str, dict[str, list[bool]]] = {}
        for row, label, held in sorted(self.outcomes):
            guards.setdefault(row, {}).setdefault(label, [False, False])[0 if held else 1] = True
        return {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "spec": self.spec,
            "fired": {name: sorted(places) for name, places in sorted(self.fired.items())},
            "ignored": {name: sorted(places) for name, places in sorted(self.ignored.items())},
            "guards": guards,
        }


def write(coverage: Coverage, path: Path) -> None:
    """Write a coverage file. Raises OSError."""
    path.write_text(json.dumps(coverage.as_json(), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Coverage:
    """Read a coverage file. Raises ValueError, naming the file, for anything else; OSError for no file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {data['format']} {data['version']}, not {FORMAT} {VERSION}")
        found = Coverage(str(data["source"]), str(data["spec"]))
        for name in ("fired", "ignored"):
            places: dict[str, set[int]] = getattr(found, name)
            places.update({str(machine): {int(p) for p in rows} for machine, rows in data[name].items()})
        for row, labels in data["guards"].items():
            for label, (held, failed) in labels.items():
                found.outcomes |= {(row, label, truth) for truth, seen in ((True, held), (False, failed)) if seen}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: not a coverage file: {what}") from error
    return found


# -- several sources together -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowCoverage:
    """One row of a table: the sources that ran it, and for each conjunct those that saw it hold and not hold."""

    machine: str
    name: str
    row: Row
    ran: tuple[str, ...]
    conjuncts: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Joined:
    """Every row of every machine that the system runs."""

    sources: tuple[str, ...]
    rows: tuple[RowCoverage, ...]

    def count(self, source: str | None = None) -> tuple[int, int]:
        """(rows run, rows), by one source or any."""
        return sum(bool(r.ran) if source is None else source in r.ran for r in self.rows), len(self.rows)

    def outcomes(self, source: str | None = None) -> tuple[int, int]:
        """(outcomes of conjuncts seen, outcomes that there are), by one source or any."""
        sides = [side for row in self.rows for pair in row.conjuncts.values() for side in pair]
        return sum(bool(s) if source is None else source in s for s in sides), len(sides)

    def gaps(self) -> list[str]:
        """What no source saw, one line each."""
        out = []
        for row in self.rows:
            if not row.ran:
                out.append(f"{row.row.span}: {row.name}: never ran")
            for label, sides in row.conjuncts.items():
                for seen, word in zip(sides, ("hold", "fail"), strict=True):
                    if not seen:
                        out.append(f"{row.row.span}: {row.name}: '{label}' was never seen to {word}")
        return out


def join(spec: Spec, found: Iterable[Coverage]) -> Joined:
    """Put several sources together; those of one name count as one. Raises ValueError for another spec's coverage."""
    system = spec.need_system()
    sources: dict[str, list[Coverage]] = {}
    for item in found:
        if item.spec != spec.digest:
            raise ValueError(
                f"coverage of '{item.source}' is of spec {item.spec[:12]}, not of {spec.digest[:12]}; record it again"
            )
        sources.setdefault(item.source, []).append(item)

    def by(machine: Machine, row: Row) -> tuple[str, ...]:
        if isinstance(row, Transition):
            return tuple(
                s for s, items in sources.items() if any(row.place in i.fired.get(machine.name, ()) for i in items)
            )
        place = machine.ignores.index(row)
        return tuple(s for s, items in sources.items() if any(place in i.ignored.get(machine.name, ()) for i in items))

    def saw(outcome: Outcome) -> tuple[str, ...]:
        return tuple(s for s, items in sources.items() if any(outcome in item.outcomes for item in items))

    rows = []
    for machine in machines(system):
        for row in table(machine):
            name = row_name(machine, row)
            sides = {label: (saw((name, label, True)), saw((name, label, False))) for label in row.when}
            rows.append(RowCoverage(machine.name, name, row, by(machine, row), sides))
    return Joined(tuple(sources), tuple(rows))


def machines(system: System) -> list[Machine]:
    """The machines that some process runs."""
    used: dict[str, None] = {}
    for process in system.processes.values():
        used |= dict.fromkeys([*process.machines, *(s.machine for s in process.shared.values())])
    return [system.machines[name] for name in used]


def table(machine: Machine) -> tuple[Row, ...]:
    """Its rows, then its `ignore` rows."""
    return (*machine.transitions, *machine.ignores)


def row_name(machine: Machine, row: Row) -> str:
    """`Export.post#4`, and `Export.cancel~2` for an `ignore` row: its place among those."""
    return row.name if isinstance(row, Transition) else f"{machine.name}.{row.event}~{machine.ignores.index(row)}"


# -- from the explicit checker ------------------------------------------------------------------------


def from_graph(
    graph: Graph, fired: Iterable[int], digest: str, source: str = "checker", known: Iterable[Coverage] = ()
) -> Coverage:
    """What a finished search saw. fired: places in Flat.steps, as `Search.fired`.

    known: coverage of scopes before this one; what they have is not asked again, so the small scopes should come
    first. Without it, each conjunct of each row is evaluated twice over all states.
    """
    found = Coverage(source, digest)
    system = graph.flat.system
    for place in fired:
        for name, row in graph.flat.steps[place].rows:
            found.fire(system.machines[_machine(system, name)], row)
    seen = {outcome for item in known for outcome in item.outcomes}
    for base, machine, row, conditions in _occasions(graph.flat):
        for label, condition in conditions.items():
            for held, node in ((True, condition), (False, neg(condition))):
                outcome = (row_name(machine, row), label, held)
                if outcome not in seen and outcome not in found.outcomes:
                    asked = conj(base, node)
                    if asked != FALSE and bool(graph.evaluate(asked).any()):
                        found.outcomes.add(outcome)
    return found


def _machine(system: System, instance: str) -> str:
    """The machine of a flat instance: `Export[0]`, or a shared one by its name."""
    for process in system.processes.values():
        if instance in process.shared:
            return process.shared[instance].machine
    return instance.split("[")[0]


def _occasions(flat: Flat) -> Iterator[tuple[Node, Machine, Row, dict[str, Node]]]:
    """Each row where its event may come: (it may come and the machine stands there, machine, row, its conjuncts)."""
    system, asked = flat.system, set()
    for step in flat.steps:
        fields = tuple((k, v if isinstance(v, str) else str(v)) for k, v in step.fields.items())
        if not step.event or (step.action, step.index, fields) in asked:
            continue
        asked.add((step.action, step.index, fields))
        process = system.processes[step.process]
        comes = conj(_may_come(flat, step), TRUE if process.alive is None else flat.formula(process.alive))
        r = dict(step.index).get(system.generation)
        if step.to:
            homes = [(step.to, process.shared[step.to].machine)]
        else:
            own, joint = system.alphabet(step.process, step.event)
            homes = [(f"{name}[{r}]", name) for name in own] + [(n, process.shared[n].machine) for n in joint]
        for home, name in homes:
            machine = system.machines[name]
            state = Ref(f"{home}.state", (), "", machine.state_type)
            for row in table(machine):
                if row.event == step.event and row.when:
                    places = (Const(machine.state_type.names.index(s), machine.state_type) for s in row.sources)
                    stands = disj(*(Op("==", (state, place), BOOL) for place in places))
                    conditions = {
                        label: _here(flat, node, home, machine, process, r, step) for label, node in row.when.items()
                    }
                    yield conj(comes, stands), machine, row, conditions


def _may_come(flat: Flat, step: Step) -> Node:
    """That the world allows the action, or that the message is the next on its channel."""
    action = flat.system.actions.get(step.action)
    if action is not None:
        return flat.formula(action.when, dict(step.index))
    channel = flat.system.channels[step.action.split(".")[0]]
    index = [str(value) for _, value in step.index]
    flags = [Ref(flat_name(channel.name, index, m), (), "", BOOL) for m in channel.messages]
    rank = channel.messages.index(step.event)
    return conj(flags[rank], *(neg(flag) for flag in flags[:rank]))


def _here(flat: Flat, node: Node, home: str, machine: Machine, process: Process, r: int | None, step: Step) -> Node:
    """A conjunct of a machine's table over the flat variables, for one instance and one event."""
    shared = process.shared.get(home)
    given = process.given if shared is None else shared.given

    def replace(item: Ref | Member | Add) -> Node | None:
        if isinstance(item, Member):
            return TRUE if step.fields.get(item.item) == "repeat" else FALSE
        if not isinstance(item, Ref):
            return None
        if item.field:
            sibling = item.name if item.name in process.shared else f"{machine.reads[item.name]}[{r}]"
            name = f"{sibling}.{item.field}"
            return Ref(name, (), "", item.type) if name in flat.vars else flat.formula(process.given[item.field])
        if item.name == "state" or item.name in machine.vars:
            return Ref(f"{home}.{item.name}", (), "", item.type)
        if item.name in machine.given:
            return flat.formula(given[item.name])
        value = step.fields[item.name]
        assert not isinstance(value, str), f"'{item.name}' of {step.label} is only asked for being in a set"
        return value

    return substitute(node, replace)


# -- from traces --------------------------------------------------------------------------------------


def from_trace(spec: Spec, traces: Iterable[str | Path | Trace], source: str) -> Coverage:
    """What a run saw, from the traces of its processes: the engine's, a walk's, a simulation's or a counterexample's.

    Each process is run again by itself, as its own lines say; whether they fit together is `replay`'s question.
    Raises TraceError for what cannot be read, ValueError for another spec's trace or one with events dropped,
    IllegalEvent where a line is not one of these machines.
    """
    found = Coverage(source, spec.digest)
    trace = merge(traces)
    for process, header in trace.headers.items():
        if header.spec != spec.digest:
            raise ValueError(f"the trace of '{process}' ran spec {header.spec[:12]}, and this is {spec.digest[:12]}")
        if trace.dropped().get(process):
            raise ValueError(f"the trace of '{process}' lacks {trace.dropped()[process]} events: what they saw is lost")
        _Run(spec, trace, process, found).run()
    return found


class _Run:
    """One process, moved by its own lines."""

    def __init__(self, spec: Spec, trace: Trace, process: str, found: Coverage) -> None:
        self.system = spec.need_system()
        self.process, self.found, self.trace = process, found, trace
        self.header = trace.headers[process]
        self.compiled = compile_process(self.system, process)
        self.shared = self.compiled.make_shared(self.header.given, start=self.header.start)
        self.records: dict[str, Any] = {}
        self.given: dict[str, Mapping[str, int]] = {}
        self.rows: dict[tuple[str, str, str], list[tuple[str, Row]]] = {}

    def run(self) -> None:
        """Take every line of the process."""
        for line in self.trace.streams[self.process]:
            event = line.event
            if not event.process:
                continue
            if event.tid and event.tid not in self.records:
                usual = {k: v or 0 for k, v in self.compiled.record_defaults.items()} | self.header.record_given
                self.given[event.tid] = usual | event.given
                self.records[event.tid] = self.compiled.make_record(self.shared, event.tid, self.given[event.tid])
            if event.event:
                self.look(event)
                if event.to:
                    self.shared.fire(event.to, event.event, **event.fields)
                else:
                    self.records[event.tid].fire(event.event, **event.fields)

    def look(self, event: TraceEvent) -> None:
        """Note the outcomes of every conjunct that the event meets, and the row that will run."""
        own, joint = self.system.alphabet(self.process, event.event)
        shared = self.system.processes[self.process].shared
        for name in [event.to] if event.to else [*own, *joint]:
            machine = self.system.machines[shared[name].machine if name in shared else name]
            owner = self.shared if name in shared else self.records[event.tid]
            state = owner.state(name)
            for row in table(machine):
                if row.event == event.event and state in row.sources:
                    self.judge(machine, row, name, owner, event)

    def judge(self, machine: Machine, row: Row, name: str, owner: Any, event: TraceEvent) -> None:
        """One row that may run in this state."""

        def value(ref: Ref) -> Any:
            if ref.field:
                if ref.name in self.system.processes[self.process].shared:
                    return getattr(self.shared, f"{ref.name}_{ref.field}")
                sibling = machine.reads[ref.name]
                found = getattr(self.records[event.tid], f"{sibling}_{ref.field}", None)
                return self.given[event.tid][ref.field] if found is None else found
            if ref.name in event.fields:
                return event.fields[ref.name]
            if ref.name in machine.given:
                given = self.header.given.get(name) if owner is self.shared else self.given[event.tid]
                return (given or {})[ref.name]
            return getattr(owner, f"{name}_{ref.name}")

        ran = True
        for label, node in row.when.items():
            held = bool(evaluate(node, value))
            ran = ran and held
            self.found.outcomes.add((row_name(machine, row), label, held))
        if ran:
            self.found.fire(machine, row)
