"""A system and its sizes, spelled out: flat variables and guarded steps, nothing indexed any more.

Every reading of the system (explicit search, induction, walks, replay) starts from this form, so they
cannot disagree about what a message, an effect or a joint event means.

A step is one way in which one thing can happen: an action of the world or the delivery of a message,
for fixed instances, with one row chosen in the table of each machine that moves on the event.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlt_fsm.expr import (
    BOOL,
    FALSE,
    INT,
    TRUE,
    Add,
    Const,
    Enum,
    Member,
    Node,
    Op,
    Quant,
    Ref,
    Seen,
    Type,
    conj,
    conjuncts,
    disj,
    fold,
    ite,
    neg,
    refs,
    show,
)
from rlt_fsm.model import Action, Assignment, Channel, Ignore, Machine, Process, Property, System, Transition

Row = Transition | Ignore


@dataclass(frozen=True, slots=True)
class FlatVar:
    """One variable. `hi` None means no upper bound: a counter."""

    name: str
    type: Type
    lo: int
    hi: int | None
    init: Node
    world: bool


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that a step puts on a channel."""

    channel: str
    generation: int | None
    message: str
    fields: Mapping[str, Node]


@dataclass(frozen=True, slots=True)
class Step:
    """One guarded command. `updates` read the state before; `asserts` must hold where `guard` does."""

    label: str  # what people read: `post r0`, `to_decode.commit r0`
    action: str  # the action, or channel.message
    index: tuple[tuple[str, int], ...]
    process: str
    event: str
    to: str
    fields: Mapping[str, Node | str]
    rows: tuple[tuple[str, Row], ...]  # instance -> the row that fires
    guard: Node
    updates: Mapping[str, Node]
    asserts: tuple[tuple[str, Node], ...]
    sent: tuple[Sent, ...]
    effects: tuple[str, ...]
    group: str  # action and instances: the unit of fairness
    fair: str
    chosen: tuple[tuple[str, int], ...] = ()  # instances that the world picked for its effects


@dataclass(frozen=True, slots=True)
class Obligation:
    """Where `pending` holds, some step of `group` must be able to take it."""

    name: str
    pending: Node
    accepted: Node
    index: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class Flat:
    """The whole, spelled out for `sizes`. `symbols` are the constants that have no value here."""

    system: System
    sizes: dict[str, int]
    consts: dict[str, int]
    vars: dict[str, FlatVar] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    obligations: list[Obligation] = field(default_factory=list)
    symbols: dict[str, str] = field(default_factory=dict)  # rigid constants, with their meaning

    def formula(self, node: Node, binding: Mapping[str, int] | None = None) -> Node:
        """A property's formula over the flat variables."""
        return Grounder(self).expr(node, dict(binding or {}))

    def properties(self) -> Iterator[tuple[str, Property, Node, Node | None]]:
        """(name, property, formula, target): a leads_to gives one per instance."""
        for item in self.system.properties:
            sorts = [s for s in item.per.split(",") if s]
            for values in itertools.product(*(range(self.sizes[s]) for s in sorts)):
                binding = dict(zip(sorts, values, strict=True))
                name = item.name + "".join(f"[{s}{v}]" for s, v in binding.items())
                target = None if item.target is None else self.formula(item.target, binding)
                yield name, item, self.formula(item.formula, binding), target


def ground(
    system: System,
    sizes: Mapping[str, int],
    consts: Mapping[str, int] | None = None,
    start: Mapping[str, str] | None = None,
) -> Flat:
    """Spell the system out. A constant that `consts` does not give stays a symbol, and binds no budget."""
    flat = Flat(system, dict(sizes), dict(consts or {}))
    flat.symbols = {name: doc for name, doc in system.consts.items() if name not in flat.consts}
    Grounder(flat).build(dict(start or {}))
    return flat


class Grounder:
    """Spells one system out. The proof for any number of instances reads `quantified` and `exists` its own way."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self.system = flat.system

    # -- expressions --------------------------------------------------------------------------------

    def const(self, name: str) -> Node:
        if name not in self.flat.consts:
            return Ref(name, (), "", INT)
        return Const(self.flat.consts[name], INT)

    def expr(self, node: Node, binding: dict[str, int]) -> Node:
        """Ground an expression of the system document."""
        if isinstance(node, Const):
            return node
        if isinstance(node, Op):
            return fold(Op(node.op, tuple(self.expr(a, binding) for a in node.args), node.type))
        if isinstance(node, Quant):
            return self.quantified(node, binding)
        if isinstance(node, Ref):
            if not node.index and not node.field:
                if node.name in binding:
                    return Const(binding[node.name], INT)
                if node.name in self.system.consts:
                    return self.const(node.name)
            index = []
            for item in node.index:
                value = self.expr(item, binding)
                if not isinstance(value, Const):
                    raise TypeError(f"the index of {node} must be an instance")
                index.append(str(value.value))
            return self.ref(flat_name(node.name, index, node.field))
        raise TypeError(f"{node} cannot stand in a system expression")

    def quantified(self, node: Quant, binding: dict[str, int]) -> Node:
        """`all`, `any` or `sum`: one part for each choice of instances."""
        parts = []
        for values in itertools.product(*(range(self.flat.sizes[b]) for b in node.binders)):
            parts.append(self.expr(node.body, {**binding, **dict(zip(node.binders, values, strict=True))}))
        if node.kind == "all":
            return conj(*parts)
        if node.kind == "any":
            return disj(*parts)
        total: Node = Const(0, INT)
        for part in parts:
            total = part if total == Const(0, INT) else fold(Op("+", (total, part), INT))
        return total

    def exists(self, sort: str, value: int) -> Node:
        """That there is such an instance; here all that are spelled out exist."""
        return TRUE

    def ref(self, name: str) -> Ref:
        return Ref(name, (), "", self.flat.vars[name].type)

    def local(self, node: Node, home: _Instance, fields: Mapping[str, Node | str]) -> Node:
        """Ground an expression of a machine's table, for one instance and one event."""
        if isinstance(node, Const):
            return node
        if isinstance(node, Op):
            return fold(Op(node.op, tuple(self.local(a, home, fields) for a in node.args), node.type))
        if isinstance(node, Member):
            choice = fields.get(node.item)
            if choice not in ("fresh", "repeat"):
                raise TypeError(f"'{node.item}' of {home.name} must be given as fresh or repeat")
            return TRUE if choice == "repeat" else FALSE
        if isinstance(node, Ref):
            if node.field:
                name = f"{home.sibling(node.name)}.{node.field}"
                return self.ref(name) if name in self.flat.vars else self.expr(home.process.given[node.field], {})
            if node.name in home.machine.vars or node.name == "state":
                return self.ref(f"{home.name}.{node.name}")
            if node.name in home.machine.given:
                return self.expr(home.given[node.name], {})
            value = fields.get(node.name)
            if value is None or isinstance(value, str):
                raise TypeError(f"event field '{node.name}' is not given to {home.name}")
            return value
        raise TypeError(f"{node} cannot stand in a table")

    # -- variables ----------------------------------------------------------------------------------

    def build(self, start: dict[str, str]) -> None:
        flat, system = self.flat, self.system
        gens = range(flat.sizes[system.generation])

        def of_channel(channel: Channel) -> list[int | None]:
            """The generations that a channel is held for; [None] where it is one for the process."""
            return [*gens] if channel.per else [None]

        for process in system.processes.values():
            for name in process.machines:
                for r in gens:
                    self.machine_vars(f"{name}[{r}]", system.machines[name], {}, start)
            for shared in process.shared.values():
                self.machine_vars(shared.name, system.machines[shared.machine], shared.given, start)
        for channel in system.channels.values():
            for g in of_channel(channel):
                for message in channel.messages:
                    name = flat_name(channel.name, [] if g is None else [str(g)], message)
                    self.add(FlatVar(name, BOOL, 0, 1, FALSE, False))
                    for item in self.carried(channel.target, message):
                        self.add(FlatVar(f"{name}_{item}", INT, 0, None, Const(0, INT), False))
        for var in system.world.values():
            for values in itertools.product(*(range(flat.sizes[s]) for s in var.per)):
                name = flat_name(var.name, [str(v) for v in values])
                if var.kind in system.instances:
                    self.add(FlatVar(name, INT, -1, flat.sizes[var.kind] - 1, var.init, True))
                else:
                    hi = 1 if var.kind == "bool" else None
                    self.add(FlatVar(name, var.type, 0, hi, self.expr(var.init, {}), True))
        for action in system.actions.values():
            if action.budget in flat.consts:
                name = f"left:{action.budget}"
                flat.vars.setdefault(name, FlatVar(name, INT, 0, None, self.const(action.budget), False))
        for action in system.actions.values():
            for values in itertools.product(*(range(flat.sizes[s]) for s in action.per)):
                self.action_steps(action, dict(zip(action.per, values, strict=True)))
        for channel in system.channels.values():
            for g in of_channel(channel):
                for place, _ in enumerate(channel.messages):
                    self.delivery_steps(channel.name, g, place)

    def add(self, var: FlatVar) -> None:
        self.flat.vars[var.name] = var

    def machine_vars(self, name: str, machine: Machine, given: Mapping[str, Node], start: dict[str, str]) -> None:
        names = machine.state_type.names
        first = start.get(name, machine.initial)
        self.add(
            FlatVar(
                f"{name}.state",
                machine.state_type,
                0,
                len(names) - 1,
                Const(names.index(first), machine.state_type),
                False,
            )
        )
        for var in machine.vars.values():
            if isinstance(var.type, Seen):
                continue  # its only question is answered by the world: see `Member` above
            hi = {BOOL: 1, INT: None}.get(str(var.type), 0)
            if isinstance(var.type, Enum):
                hi = len(var.type.names) - 1
            init = var.init
            if isinstance(init, Ref):
                init = self.expr(given[init.name], {})
            self.add(FlatVar(f"{name}.{var.name}", var.type, 0, hi, init, False))

    def carried(self, process: str, message: str) -> list[str]:
        """The fields that `message` carries to `process`."""
        out: dict[str, None] = {}
        for name in self.system.processes[process].machines:
            for item in self.system.machines[name].takes.get(message, {}):
                out[item] = None
        return list(out)

    # -- steps --------------------------------------------------------------------------------------

    def action_steps(self, action: Action, binding: dict[str, int]) -> None:
        flat = self.flat
        if flat.consts.get(action.budget) == 0:
            return
        when = self.expr(action.when, binding)
        updates: dict[str, Node] = {}
        self.assign(action.set, binding, updates)
        if action.budget in flat.consts:
            left = self.ref(f"left:{action.budget}")
            when = conj(when, Op(">", (left, Const(0, INT)), BOOL))
            updates[left.name] = Op("-", (left, Const(1, INT)), INT)
        label = " ".join([action.name, *(f"{k}{v}" for k, v in binding.items())])
        if isinstance(when, Const) and when.value is False:
            return
        r = binding.get(self.system.generation)
        if not action.event:
            step = Step(
                label,
                action.name,
                tuple(binding.items()),
                "",
                "",
                "",
                {},
                (),
                when,
                updates,
                (),
                (),
                (),
                label,
                action.fair,
            )
            flat.steps.append(step)
            return
        names = list(action.fields)
        for values in itertools.product(*action.fields.values()):
            fields: dict[str, Node | str] = {
                k: v if isinstance(v, str) else self.expr(v, binding) for k, v in zip(names, values, strict=True)
            }
            guards = self.joint(
                label,
                action.name,
                binding,
                action.process,
                action.event,
                action.to,
                r,
                fields,
                when,
                updates,
                label,
                action.fair,
            )
            if not action.offered:  # the world may choose any of the values, so each must be taken
                pending = conj(when, self.alive(action.process))
                said = "".join(f" {k}={v if isinstance(v, str) else show(v)}" for k, v in fields.items())
                name = f"handled:{label}" + (said if any(len(v) > 1 for v in action.fields.values()) else "")
                flat.obligations.append(Obligation(name, pending, disj(*guards), tuple(binding.items())))

    def delivery_steps(self, name: str, r: int | None, place: int) -> None:
        channel = self.system.channels[name]
        index = [] if r is None else [str(r)]
        message = channel.messages[place]
        flag = self.ref(flat_name(name, index, message))
        earlier = [neg(self.ref(flat_name(name, index, m))) for m in channel.messages[:place]]
        when = conj(flag, *earlier)
        updates: dict[str, Node] = {flag.name: FALSE}
        fields: dict[str, Node | str] = {}
        for item in self.carried(channel.target, message):
            carried = self.ref(f"{flag.name}_{item}")
            fields[item] = carried
            updates[carried.name] = Const(0, INT)
        label = f"{name}.{message}" + ("" if r is None else f" {self.system.generation}{r}")
        binding = {} if r is None else {self.system.generation: r}
        guards = self.joint(
            label,
            f"{name}.{message}",
            binding,
            channel.target,
            message,
            channel.to,
            r,
            fields,
            when,
            updates,
            label,
            "weak",
        )
        pending = conj(when, self.alive(channel.target))
        self.flat.obligations.append(Obligation(f"handled:{label}", pending, disj(*guards), tuple(binding.items())))

    def alive(self, process: str) -> Node:
        node = self.system.processes[process].alive
        return TRUE if node is None else self.expr(node, {})

    def participants(self, process: Process, event: str, to: str, r: int | None) -> list[_Instance]:
        out = []
        if to:
            shared = process.shared[to]
            return [_Instance(to, self.system.machines[shared.machine], process, None, shared.given)]
        own, joint = self.system.alphabet(process.name, event)
        for name in own:
            out.append(_Instance(f"{name}[{r}]", self.system.machines[name], process, r, process.given))
        for name in joint:
            shared = process.shared[name]
            out.append(_Instance(name, self.system.machines[shared.machine], process, r, shared.given))
        return out

    def joint(
        self,
        label: str,
        action: str,
        binding: dict[str, int],
        process_name: str,
        event: str,
        to: str,
        r: int | None,
        fields: dict[str, Node | str],
        when: Node,
        base: dict[str, Node],
        group: str,
        fair: str,
    ) -> list[Node]:
        """Add the steps in which `process_name` takes `event`; return their guards."""
        process = self.system.processes[process_name]
        members = self.participants(process, event, to, r)
        alternatives: list[list[tuple[_Instance, Row, Node]]] = []
        for home in members:
            rows: list[tuple[_Instance, Row, Node]] = []
            table: tuple[Row, ...] = (*home.machine.transitions, *home.machine.ignores)
            for row in table:
                if row.event != event:
                    continue
                state = self.ref(f"{home.name}.state")
                here = disj(*(Op("==", (state, Const(home.place(s), state.type)), BOOL) for s in row.sources))
                test = conj(here, *(self.local(g, home, fields) for g in row.when.values()))
                if not (isinstance(test, Const) and test.value is False):
                    rows.append((home, row, test))
            alternatives.append(rows)
        out: list[Node] = []
        for combination in itertools.product(*alternatives):
            guard = conj(when, self.alive(process_name), *(test for _, _, test in combination))
            if contradictory(guard):
                continue
            out += self.combine(
                label, action, binding, process, event, to, r, fields, guard, base, combination, group, fair
            )
        return out

    def combine(
        self,
        label: str,
        action: str,
        binding: dict[str, int],
        process: Process,
        event: str,
        to: str,
        r: int | None,
        fields: dict[str, Node | str],
        guard: Node,
        base: dict[str, Node],
        rows: Sequence[tuple[_Instance, Row, Node]],
        group: str,
        fair: str,
    ) -> list[Node]:
        updates = dict(base)
        sent: list[Sent] = []
        asserts: list[tuple[str, Node]] = []
        effects: list[str] = []
        for home, row, _ in rows:
            if isinstance(row, Ignore):
                continue
            if row.target is not None:
                state = self.ref(f"{home.name}.state")
                updates[state.name] = Const(home.place(row.target), state.type)
            for var, value in row.set.items():
                if not isinstance(value, Add):
                    updates[f"{home.name}.{var}"] = self.local(value, home, fields)
            for send in row.send:
                channel = self.system.channel(process.name, send.to, send.message)
                if channel is None:
                    raise LookupError(f"no channel carries '{send.message}' from {process.name} to {send.to}")
                gen = r if channel.per else None
                payload = {k: self.local(v, home, fields) for k, v in send.fields.items()}
                self.send(channel.name, gen, send.message, payload, updates, asserts, sent)
            effects += row.do
        choices: list[tuple[str, list[int]]] = []
        for name in effects:
            choose = self.system.effects[name].choose
            choices.append((choose, list(range(self.flat.sizes[choose])) if choose else [0]))
        guards: list[Node] = []
        for picked in itertools.product(*(values for _, values in choices)):
            final, test = dict(updates), guard
            for name, (choose, _), choice in zip(effects, choices, picked, strict=True):
                effect = self.system.effects[name]
                scope = {**({} if r is None else {self.system.generation: r}), **({choose: choice} if choose else {})}
                there = self.exists(choose, choice) if choose else TRUE
                test = conj(test, there, self.expr(effect.needs, scope))
                self.assign(effect.set, scope, final)
            chosen = "".join(
                f" {c}{v}" for (c, values), v in zip(choices, picked, strict=True) if c and len(values) > 1
            )
            guards.append(test)
            self.flat.steps.append(
                Step(
                    label + chosen,
                    action,
                    tuple(binding.items()),
                    process.name,
                    event,
                    to,
                    fields,
                    tuple((home.name, row) for home, row, _ in rows),
                    test,
                    final,
                    tuple(asserts),
                    tuple(sent),
                    tuple(effects),
                    group,
                    fair,
                    tuple((c, v) for (c, _), v in zip(choices, picked, strict=True) if c),
                )
            )
        return guards

    def send(
        self,
        name: str,
        r: int | None,
        message: str,
        payload: dict[str, Node],
        updates: dict[str, Node],
        asserts: list[tuple[str, Node]],
        sent: list[Sent],
    ) -> None:
        """Set the message's flag; oblige that nothing of its rank or above is still on the channel."""
        channel = self.system.channels[name]
        index = [] if r is None else [str(r)]
        rank = channel.messages.index(message)
        pending = [self.ref(flat_name(name, index, m)) for m in channel.messages[rank:]]
        before = [s.message for s in sent if s.channel == name and s.generation == r]
        in_order = all(channel.messages.index(m) < rank for m in before)
        asserts.append((f"in_order:{name}.{message}", conj(*(neg(p) for p in pending)) if in_order else FALSE))
        flag = flat_name(name, index, message)
        updates[flag] = TRUE
        for key, value in payload.items():
            updates[f"{flag}_{key}"] = value
        sent.append(Sent(name, r, message, payload))

    def assign(self, sets: Sequence[Assignment], binding: dict[str, int], updates: dict[str, Node]) -> None:
        """Compose world assignments onto `updates`, each reading what the ones before it left."""
        for item in sets:
            for values in itertools.product(*(range(self.flat.sizes[s]) for s in item.over)):
                scope = {**binding, **dict(zip(item.over, values, strict=True))}
                test = self.after(self.expr(item.when, scope), updates)
                new: dict[str, Node] = {}
                for target, value in item.set:
                    name = self.expr(target, scope)
                    assert isinstance(name, Ref)
                    old = updates.get(name.name, name)
                    new[name.name] = ite(test, self.after(self.expr(value, scope), updates), old)
                updates.update(new)

    def after(self, node: Node, updates: Mapping[str, Node]) -> Node:
        """`node`, read in the state that `updates` lead to (world variables only)."""
        if isinstance(node, Ref):
            var = self.flat.vars.get(node.name)
            return updates.get(node.name, node) if var is not None and var.world else node
        if isinstance(node, Op):
            return fold(Op(node.op, tuple(self.after(a, updates) for a in node.args), node.type))
        return node


@dataclass(frozen=True, slots=True)
class _Instance:
    """A machine instance that takes part in an event."""

    name: str
    machine: Machine
    process: Process
    generation: int | None
    given: Mapping[str, Node]

    def place(self, state: str) -> int:
        return self.machine.state_type.names.index(state)

    def sibling(self, alias: str) -> str:
        """The flat name of the instance that a guard calls `alias`."""
        if alias in self.process.shared:
            return alias
        machine = self.machine.reads[alias]
        if machine not in self.process.machines:
            raise LookupError(f"{self.name} reads {machine}, which does not run in process '{self.process.name}'")
        return f"{machine}[{self.generation}]"


def contradictory(guard: Node) -> bool:
    """True where the conjuncts leave some variable no value: the rows can never fire together."""
    if isinstance(guard, Const):
        return guard.value is False
    allowed: dict[str, set[bool | int]] = {}
    for part in conjuncts(guard):
        found = _allowed(part)
        if found is not None:
            name, values = found
            allowed[name] = allowed[name] & values if name in allowed else values
            if not allowed[name]:
                return True
    return False


def _allowed(node: Node) -> tuple[str, set[bool | int]] | None:
    """(variable, its values) for a test of one enum or bool variable against constants."""
    if isinstance(node, Ref) and node.type == BOOL:
        return node.name, {True}
    if not isinstance(node, Op):
        return None
    if node.op == "not":
        inner = _allowed(node.args[0])
        if inner is None:
            return None
        kind = node.args[0]
        every: set[bool | int] = {True, False}
        for ref in refs(kind):
            if isinstance(ref.type, Enum):
                every = set(range(len(ref.type.names)))
        return inner[0], every - inner[1]
    if node.op in ("==", "!="):
        left, right = node.args
        if isinstance(left, Ref) and isinstance(right, Const) and isinstance(left.type, Enum):
            value = {int(right.value)}
            every = set(range(len(left.type.names)))
            return left.name, set(value) if node.op == "==" else every - value
        return None
    if node.op == "or":
        parts = [_allowed(a) for a in node.args]
        names = {p[0] for p in parts if p is not None}
        if None in parts or len(names) != 1:
            return None
        union: set[bool | int] = set()
        for item in parts:
            assert item is not None
            union |= item[1]
        return names.pop(), union
    return None


def flat_name(base: str, index: Sequence[str] = (), member: str = "") -> str:
    """`flying[0]`, `Import[1].heard`, `to_decode[0].commit`."""
    return base + (f"[{','.join(index)}]" if index else "") + (f".{member}" if member else "")
