"""Small systems, drawn at random: graphs of a few states for liveness, and whole specs as text for every reading.

`graphs` draws what an explicit search leaves (states, edges, fair groups) without a spec around it, so that
thousands can be tried. `specs` draws YAML that the reader and `check` accept by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from hypothesis import strategies as st

from rlt_fsm.expr import INT, TRUE, Const
from rlt_fsm.ground import Flat, FlatVar, Step
from rlt_fsm.model import System
from verification.explicit import Graph
from verification.slicing import Sliced
from verification.store import StateStore
from verification.vector import Layout

# -- graphs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A graph whose state 0 is the first and whose other states can all be reached from it."""

    states: int
    fair: tuple[str, ...]  # of each group: "", weak, strong
    edges: tuple[tuple[int, int, int], ...]  # source, group, target
    start: frozenset[int]
    goal: frozenset[int]

    def __str__(self) -> str:
        groups = ", ".join(f"g{g} {fair or 'free'}" for g, fair in enumerate(self.fair))
        edges = ", ".join(f"{s}-g{g}->{t}" for s, g, t in self.edges)
        return f"{self.states} states; {groups}; {edges}; from {sorted(self.start)} to {sorted(self.goal)}"

    def graph(self) -> Graph:
        """What the search would have kept of it, with one variable `place`."""
        place = FlatVar("place", INT, 0, self.states, Const(0, INT), True)
        flat = Flat(cast(System, None), {}, {}, vars={"place": place})
        flat.steps = [_step(f"g{g}", fair) for g, fair in enumerate(self.fair)]
        layout = Layout([place], 3)
        store = StateStore(layout.words, 16)
        store.add(np.concatenate([layout.pack({"place": state}) for state in range(self.states)]))
        parent, via = np.full(self.states, -1, np.int32), np.full(self.states, -1, np.int16)
        frontier, seen = [0], {0}
        while frontier:
            here = frontier.pop(0)
            for s, g, t in self.edges:
                if s == here and t not in seen:
                    seen.add(t)
                    parent[t], via[t] = s, g
                    frontier.append(t)
        columns = np.array(self.edges, np.int64).reshape(-1, 3)
        sources, targets = columns[:, 0].astype(np.int32), columns[:, 2].astype(np.int32)
        sliced = Sliced(flat.vars, list(enumerate(flat.steps)), {})
        return Graph(flat, sliced, layout, store, parent, via, sources, targets, columns[:, 1].astype(np.int16))

    def mask(self, states: frozenset[int]) -> Any:
        """A set of states as the checker takes it."""
        return np.array([state in states for state in range(self.states)])


def _step(label: str, fair: str) -> Step:
    return Step(label, label, (), "", "", "", {}, (), TRUE, {}, (), (), (), label, fair)


@st.composite
def graphs(draw: st.DrawFn, states_max: int = 6, groups_max: int = 4) -> Drawn:
    """A graph of up to `states_max` states, in which every state is reached from the first."""
    states = draw(st.integers(1, states_max))
    fair = tuple(draw(st.lists(st.sampled_from(["", "weak", "strong"]), min_size=1, max_size=groups_max)))
    group, state = st.integers(0, len(fair) - 1), st.integers(0, states - 1)
    tree = [(draw(st.integers(0, t - 1)), draw(group), t) for t in range(1, states)]
    more = draw(st.lists(st.tuples(state, group, state), max_size=2 * states))
    edges = tuple(dict.fromkeys([*tree, *more]))
    start = frozenset(draw(st.lists(state, min_size=1, max_size=2)))
    return Drawn(states, fair, edges, start, frozenset(draw(st.lists(state, max_size=2))))


# -- specs ------------------------------------------------------------------------------------------

NEXT_COUNT = ["{v} + 1 if {v} < 2 else 0", "{v} - 1 if {v} > 0 else 0", "0", "1", "2 - {v} if {v} < 3 else 0"]
WILD_COUNT = ["{v} + 1", "{v} - 1"]  # may grow without end, or fall below zero


@dataclass
class _Event:
    """An event of one process: how it comes, and what it brings. field: its name and type."""

    name: str
    members: list[_Machine]
    single: bool = False  # addressed to one shared instance, for no generation
    field: tuple[str, str] | None = None


@dataclass
class _Machine:
    """One machine while its table is being drawn. Shared ones are called by `alias` in formulas."""

    name: str
    process: str
    shared: bool
    states: list[str]
    final: bool
    vars: dict[str, str]
    cap: bool  # whether it is given a number

    @property
    def alias(self) -> str:
        return self.name.lower() if self.shared else self.name

    def reach(self, text: str, r: str = "r") -> str:
        """One of its variables in a formula of the system."""
        return f"{self.alias}.{text}" if self.shared else f"{self.alias}[{r}].{text}"


class _Writer:
    """Draws one spec. Every choice keeps to what the reader and `check` ask for, so that none is thrown away."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.wild = self.chance(2)
        self.generations = draw(st.integers(1, 2))
        self.places = draw(st.integers(0, 2))
        self.processes = ["near", "far"][: draw(st.integers(1, 2))]
        self.machines: list[_Machine] = []
        count = max(len(self.processes), draw(st.integers(1, 3)))
        for number in range(count):
            self.machines.append(self.machine(number))
        self.world = self.draw(st.booleans())
        self.events: dict[str, list[_Event]] = {process: [] for process in self.processes}
        self.messages: dict[str, _Event] = {}
        self.alarm: _Event | None = None
        self.actions: list[str] = []
        self.sent: set[str] = set()
        self.make_events()

    # -- choices

    def chance(self, of: int) -> bool:
        return self.draw(st.integers(1, of)) == of

    def pick(self, items: list[Any]) -> Any:
        return self.draw(st.sampled_from(items))

    def some(self, items: list[Any]) -> list[Any]:
        """A part of `items` that is not empty, in order."""
        chosen = [item for item in items if self.pick([False, True])]
        return chosen or [self.pick(items)]

    # -- machines and events

    def machine(self, number: int) -> _Machine:
        process = self.processes[number] if number < len(self.processes) else self.pick(self.processes)
        kind = st.sampled_from(["bool", "counter", "counter", "enum"])
        kinds = self.draw(st.lists(kind, min_size=self.draw(st.integers(0, 1)), max_size=3 - self.generations))
        return _Machine(
            f"M{number}",
            process,
            number > 0 and self.chance(2),
            [f"s{k}" for k in range(self.draw(st.integers(2, 3)))],
            self.draw(st.booleans()),
            {f"v{number}{k}": kind for k, kind in enumerate(kinds)},
            self.chance(4),
        )

    def home(self, process: str) -> list[_Machine]:
        return [m for m in self.machines if m.process == process]

    def make_events(self) -> None:
        for process in self.processes:
            here = self.home(process)
            left = list(here)
            for number in range(self.draw(st.integers(1, 2))):
                members = self.some(here)
                left = [m for m in left if m not in members]
                self.add_event(process, f"go{number}_{process}", members)
            if left:
                self.add_event(process, f"rest_{process}", left)
        if len(self.processes) == 2:
            for number in range(self.draw(st.integers(0, 2))):
                event = _Event(f"m{number}", self.some(self.home("far")))
                records = [m for m in event.members if not m.shared]
                if records and self.chance(3):
                    event.field = ("n_" + event.name, "counter")
                self.messages[event.name] = event
                self.events["far"].append(event)
            desks = [m for m in self.home("far") if m.shared]
            if desks and self.pick([False, True]):
                self.alarm = _Event("alarm", [self.pick(desks)], single=True)
                self.events["far"].append(self.alarm)

    def add_event(self, process: str, name: str, members: list[_Machine]) -> None:
        event = _Event(name, members, single=len(members) == 1 and members[0].shared and self.draw(st.booleans()))
        if self.chance(3):
            event.field = ("n_" + name, self.pick(["counter", "bool"]))
        self.events[process].append(event)
        parts = [f"event: {process}.{name}"]
        if event.single:
            parts.append(f"to: {members[0].alias}")
        else:
            parts.append("per: r")
        if event.field is not None:
            values = {"counter": ["'0'", "'1'"], "bool": ["'false'", "'true'"]}[event.field[1]]
            chosen = self.some(values)
            parts.append(f"with: {{{event.field[0]}: [{', '.join(chosen)}]}}")
        if self.chance(3):
            parts.append(f"when: '{self.formula('' if event.single else 'r', 1)}'")
        offered = event.field is not None or not self.chance(5)  # the obligation of a choice is not asked one by one
        self.action(f"do_{name}", parts, offered)

    def action(self, name: str, parts: list[str], offered: bool) -> None:
        fair = self.pick(["", "fair: weak", "fair: strong"])
        parts += [p for p in (fair, "offered: true" if offered else "", "budget: tries" if self.chance(5) else "") if p]
        self.actions.append(f"  {name}: {{{', '.join(parts)}, doc: d}}")

    # -- tables

    def atom(self, machine: _Machine, event: _Event, of: set[str]) -> str:
        """A test that can be true and can be false, of one name that is not in `of` (and is put there)."""
        tests: list[tuple[str, str]] = []
        for var, kind in machine.vars.items():
            tests += [(var, text) for text in self.tests(var, kind)]
            if kind == "counter" and machine.cap:
                tests.append((var, f"{var} < cap"))
        if event.field is not None and self.takes(machine, event):
            tests += [(event.field[0], text) for text in self.tests(*event.field)]
        for other in self.siblings(machine):
            tests.append((other.alias, f"{other.alias}.state in {{{', '.join(self.some(other.states[:-1]))}}}"))
            for var, kind in other.vars.items():
                tests += [(f"{other.alias}.{var}", text) for text in self.tests(f"{other.alias}.{var}", kind)]
        tests = [t for t in tests if t[0] not in of]
        if not tests:
            return ""
        name, text = self.pick(tests)
        of.add(name)
        return str(text)

    def tests(self, name: str, kind: str) -> list[str]:
        if kind == "bool":
            return [name, f"not {name}"]
        if kind == "counter":
            return [f"{name} < 2", f"{name} > 0", f"{name} == 1", f"{name} != 0"]
        return [f"{name} == red", f"{name} not in {{green}}"]

    def takes(self, machine: _Machine, event: _Event) -> bool:
        """Fields of a message are brought to records only."""
        return event.name not in self.messages or not machine.shared

    def siblings(self, machine: _Machine) -> list[_Machine]:
        """Whom its guards may read: what its process shares, and the records, if it is of a record itself."""
        others = [m for m in self.home(machine.process) if m is not machine]
        return [m for m in others if m.shared or not machine.shared]

    def guard(self, machine: _Machine, event: _Event) -> list[str]:
        """Conjuncts that can be true together, and need not be."""
        used: set[str] = set()
        first = self.atom(machine, event, used)
        if not first:
            return []
        second = self.atom(machine, event, used) if self.chance(3) else ""
        if not second:
            return [first]
        shape = self.pick(["and", "or", "implies", "sum"])
        if shape == "and":
            return [first, second]
        if shape == "sum":
            return [f"(1 if {first} else 0) + (2 if {second} else 0) < 3"]
        return [f"({first}) {shape} ({second})"]

    def rows(self, machine: _Machine) -> tuple[list[str], list[str]]:
        """The table of a machine: transitions, and ignores."""
        events = [e for e in self.events[machine.process] if machine in e.members]
        steps: list[dict[str, str]] = []
        ignores: list[str] = []
        chain = {state: self.pick(events) for state in machine.states[:-1]}
        for event in events:
            known = False
            for place, state in enumerate(machine.states):
                last = place == len(machine.states) - 1
                onward = chain.get(state) is event
                if last and machine.final:
                    kind = self.pick(["none", "ignore", "ignore"])
                else:
                    kind = "row" if onward else self.pick(["none", "ignore", "ignore", "row"])
                if kind == "none" and not (last and not known):
                    continue
                known = True
                if kind != "row":
                    ignores.append(f"  - {{on: {event.name}, from: {state}, why: w}}")
                    continue
                target = machine.states[place + 1] if onward else self.pick(["", *machine.states])
                guard = self.guard(machine, event) if self.draw(st.booleans()) else []
                steps.append(self.row(machine, event, state, target, guard))
                if guard and self.chance(2):
                    other = [f"not ({' and '.join(f'({g})' for g in guard)})"]
                    if self.draw(st.booleans()):
                        steps.append(self.row(machine, event, state, self.pick(["", *machine.states]), other))
                    else:
                        ignores.append(f"  - {{on: {event.name}, from: {state}, {when(other)}, why: w}}")
        if not machine.final and not any(s["from"] == machine.states[-1] for s in steps):
            event = self.pick(events)
            steps.append(self.row(machine, event, machine.states[-1], machine.states[0], []))
            ignores = [i for i in ignores if f"on: {event.name}, from: {machine.states[-1]}," not in i]
        for var, kind in machine.vars.items():
            if not any(f"{var}: " in s["set"] for s in steps):
                row = self.pick(steps)
                row["set"] += ("; " if row["set"] else "") + f"{var}: '{self.value(machine, None, var, kind)}'"
        return [text_of(step) for step in steps], ignores

    def row(self, machine: _Machine, event: _Event, state: str, target: str, guard: list[str]) -> dict[str, str]:
        sets = []
        for var, kind in machine.vars.items():
            if self.draw(st.booleans()):
                sets.append(f"{var}: '{self.value(machine, event, var, kind)}'")
        row = {"on": event.name, "from": state, "to": target, "when": when(guard), "set": "; ".join(sets)}
        says: list[str] = []
        if machine.process == "near" and not event.single:
            for message in self.messages.values():
                if self.chance(2):
                    says.append(self.say(message))
        if self.alarm is not None and machine.process == "near" and self.chance(2):
            says.append(self.say(self.alarm))
        row["send"] = f"send: {{far: [{', '.join(says)}]}}" if says else ""
        effects = []
        if self.world:
            effects = [e for e in self.effects(event) if self.chance(3)]
        row["do"] = f"do: [{', '.join(effects)}]" if effects else ""
        return row

    def say(self, message: _Event) -> str:
        self.sent.add(message.name)
        if message.field is None:
            return message.name
        return f"{{{message.name}: {{{message.field[0]}: '{self.draw(st.integers(0, 1))}'}}}}"

    def effects(self, event: _Event) -> list[str]:
        every = ["count"] if event.single else ["count", "mark"]
        return every + (["grab", "free"] if self.places and not event.single else [])

    def value(self, machine: _Machine, event: _Event | None, var: str, kind: str) -> str:
        """A new value of a variable."""
        others = [v for v, k in machine.vars.items() if k == kind and v != var]
        test = self.atom(machine, event, {var}) if event is not None else ""
        if event is not None and event.field is not None and event.field[1] == kind and self.takes(machine, event):
            others.append(event.field[0])
        if kind == "bool":
            options = [f"not {var}", "true", "false", *others, *([test] if test else [])]
        elif kind == "counter":
            options = [t.format(v=var) for t in (WILD_COUNT if self.wild else NEXT_COUNT)] + others
            options += [f"1 if {test} else {var}"] if test else []
        else:
            options = ["red", "green", f"green if {var} == red else {var}"]
            options += [f"red if {test} else {var}"] if test else []
        return str(self.pick(options))

    # -- formulas

    def formula(self, r: str, depth: int) -> str:
        """A truth of the system; `r` is the bound generation, if one is."""
        if depth and self.chance(2):
            one, two = self.formula(r, depth - 1), self.formula(r, depth - 1)
            return f"({one}) {self.pick(['and', 'or', 'implies'])} ({two})"
        machine = self.pick(self.machines)
        bound = machine.shared or bool(r)
        options = [machine.reach(f"state == {self.pick(machine.states)}")]
        for var, kind in machine.vars.items():
            options += [machine.reach(f"{var} == 1")] if kind == "counter" else []
            options += [machine.reach(var)] if kind == "bool" else []
            options += [machine.reach(f"{var} == green")] if kind == "enum" else []
        test = str(self.pick(options))
        if not bound or (not machine.shared and self.chance(3)):
            test = self.pick([f"any(r: {test})", f"all(r: {test})", f"count(r: {test}) == 1", f"not any(r: {test})"])
        return f"not ({test})" if self.chance(4) else test

    def facts(self) -> str:
        """A truth of a property, which may speak of the world and of messages on their way."""
        options = []
        if self.world:
            options += [
                "any(r: marked[r])",
                "all(r: marked[r])",
                "seen < 2",
                "sum(r: 1 if marked[r] else 0) < seen + 1",
            ]
            options += ["any(b, r: owner[b] == r and marked[r])", "all(b: owner[b] != none)"] if self.places else []
        options += [f"any(r: pipe[r].{name})" for name in self.messages if name in self.sent]
        formula = self.formula("", 2)
        if options and self.chance(2):
            return f"({formula}) {self.pick(['and', 'or', 'implies'])} {self.pick(options)}"
        return formula

    # -- the text

    def text(self) -> str:
        """The whole spec."""
        tables = {m.name: self.rows(m) for m in self.home("near")}
        for event in [*self.messages.values(), *([self.alarm] if self.alarm is not None else [])]:
            if event.name not in self.sent:  # nobody waits for what nobody says
                self.events["far"].remove(event)
        tables |= {m.name: self.rows(m) for m in self.home("far")}
        documents = [self.machine_text(m, *tables[m.name]) for m in self.machines]
        return "---\n".join([*documents, self.system_text(documents)])

    def machine_text(self, machine: _Machine, steps: list[str], ignores: list[str]) -> str:
        lines = [f"machine: {machine.name}", "doc: d"]
        if not machine.shared:
            lines.append("per: generation")
        if machine.cap:
            lines.append("given: {cap: {doc: d}}")
        body = "\n".join([*steps, *ignores])
        reads = [m for m in self.siblings(machine) if f"{m.alias}." in body]
        if reads:
            lines.append("reads: {" + ", ".join(f"{m.alias}: {m.name}" for m in reads) + "}")
        takes = [
            f"  {e.name}: {{{e.field[0]}: {{type: {e.field[1]}}}}}"
            for e in self.events[machine.process]
            if e.field is not None and machine in e.members and self.takes(machine, e)
        ]
        lines += ["takes:", *takes] if takes else []
        if machine.vars:
            lines.append("vars:")
            for var, kind in machine.vars.items():
                values = ", values: [red, green]" if kind == "enum" else ""
                lines.append(f"  {var}: {{type: {kind}{values}, doc: d}}")
        lines.append("states:")
        for place, state in enumerate(machine.states):
            final = machine.final and place == len(machine.states) - 1
            lines.append(f"  {state}: {{{'final: true' if final else '' if place else 'initial: true'}}}")
        lines += ["transitions:", *steps]
        lines += ["ignore:", *ignores] if ignores else []
        return "\n".join(lines) + "\n"

    def system_text(self, documents: list[str]) -> str:
        lines = ["system: small", "doc: d", "instances:", "  r: {of: generation}"]
        lines += ["  b: {of: places}"] if self.places else []
        lines += ["consts: {tries: d, most: d}", "processes:"]
        mortal = self.world and self.chance(2)
        for process in self.processes:
            here = self.home(process)
            lines.append(f"  {process}:")
            records = [m.name for m in here if not m.shared]
            lines.append(f"    machines: [{', '.join(records)}]")
            if any(m.cap for m in here if not m.shared):
                lines.append("    given: {cap: most}")
            if mortal and process == self.processes[-1]:
                lines.append("    alive: not dead")
            desks = [m for m in here if m.shared]
            if desks:
                lines.append("    shared:")
                for m in desks:
                    lines.append(f"      {m.alias}: {{machine: {m.name}{', given: {cap: most}' if m.cap else ''}}}")
        messages = [name for name in self.messages if name in self.sent]
        alarm = self.alarm if self.alarm is not None and self.alarm.name in self.sent else None
        if messages or alarm is not None:
            lines.append("channels:")
        if messages:
            lines.append(f"  pipe: {{from: near, to: far, per: r, messages: [{', '.join(messages)}]}}")
        if alarm is not None:
            lines.append(f"  bell: {{from: near, to: far, deliver: {alarm.members[0].alias}, messages: [alarm]}}")
        if self.world:
            lines += self.world_text(documents, mortal)
        lines += ["actions:", *self.actions, "properties:"]
        several = range(self.draw(st.integers(1, 3)))
        never = " and ".join(f"({self.formula('', 0)})" for _ in several)
        lines.append(f"  kept: {{always: 'not ({never} and {self.facts()})', doc: d}}")
        never = " and ".join(f"({self.formula('r', 0)})" for _ in several)
        lines.append(f"  also: {{always: 'all(r: not ({never}))', doc: d}}")
        lines.append(f"  seen_once: {{sometimes: '{self.facts()}', doc: d}}")
        lines.append(f"  open: {{possible: '{self.facts()}', doc: d}}")
        lines.append(f"  comes: {{leads_to: {{from: '{self.facts()}', to: '{self.facts()}'}}, doc: d}}")
        one, two = self.formula("r", 1), self.formula("r", 1)
        lines.append(f"  each: {{leads_to: {{per: r, from: '{one}', to: '{two}'}}, doc: d}}")
        sizes = f"r: {self.generations}" + (f", b: {self.places}" if self.places else "")
        consts = f"tries: {self.draw(st.integers(1, 2))}, most: {self.draw(st.integers(1, 2))}"
        lines += ["scopes:", f"  one: {{sizes: {{{sizes}}}, consts: {{{consts}}}, suites: [quick, full], doc: d}}"]
        return "\n".join(lines) + "\n"

    def world_text(self, documents: list[str], mortal: bool) -> list[str]:
        lines = ["world:", "  marked: {per: r, type: bool, doc: d}", "  seen: {type: counter, doc: d}"]
        lines += ["  owner: {per: b, type: r, doc: d}"] if self.places else []
        lines += ["  dead: {type: bool, doc: d}"] if mortal else []
        effects = {
            "count": "set: {seen: 'seen + 1 if seen < 2 else seen'}",
            "mark": "set: {'marked[r]': 'true'}",
            "grab": "choose: b, needs: 'owner[b] == none', set: {'owner[b]': r}",
            "free": "for: b, when: 'owner[b] == r', set: {'owner[b]': none}",
        }
        used = {name: text for name, text in effects.items() if self.does(documents, name)}
        lines += ["effects:", *(f"  {name}: {{{text}, doc: d}}" for name, text in used.items())] if used else []
        self.action("unmark", ["per: r", "when: 'marked[r]'", "set: {'marked[r]': 'false'}"], False)
        self.action("forget", [f"when: '{self.pick(['seen > 0', 'seen == 2'])}'", "set: {seen: '0'}"], False)
        if self.places:
            self.action("clear", ["per: b", "when: 'owner[b] != none'", "set: {'owner[b]': none}"], False)
        if mortal:
            self.action("die", ["when: not dead", "set: {dead: 'true'}"], False)
        return lines

    def does(self, documents: list[str], effect: str) -> bool:
        rows = [row.partition("do: [")[2].partition("]")[0] for text in documents for row in text.split("\n")]
        return any(effect in row.split(", ") for row in rows)


def when(guard: list[str]) -> str:
    """The conjuncts of a row, with labels."""
    return f"when: {{{', '.join(f'g{k}: {chr(39)}{g}{chr(39)}' for k, g in enumerate(guard))}}}" if guard else ""


def text_of(row: dict[str, str]) -> str:
    """A transition as one line."""
    sets = f"set: {{{row['set'].replace('; ', ', ')}}}" if row["set"] else ""
    to = f"to: {row['to']}" if row["to"] else ""
    parts = [f"on: {row['on']}", f"from: {row['from']}", to, row["when"], sets, row["send"], row["do"]]
    return f"  - {{{', '.join(p for p in parts if p)}}}"


@st.composite
def specs(draw: st.DrawFn) -> str:
    """The text of a spec with one scope `one`: every part of the language, no finding of `check` that is an error."""
    return _Writer(draw).text()
