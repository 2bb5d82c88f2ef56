"""Every small change of a spec, each as a system of its own: what a slip of the pen could make of it.

What is changed is the protocol: the guards, updates, targets, messages, effects and states of every row, and what a
shell asks before it offers an action. What is not: the world (world actions, what an effect does to the world,
`alive`, constants), the questions (properties, lemmas, scopes), and machines that no process of the system runs.

A conjunct of the `when` of an offered action is the protocol's where it reads neither the world nor a constant: a
process can know it, so it is a decision of that process (`drain_decode` waits until P is no longer serving). The rest
of such a `when` says what the world allows, and stands.

Order is changed where it means something: two messages of one row to the same process, two effects of one row, and
two machines of a process that both speak to one process, or both have effects, on one event. The order of rows means
nothing: `check` refuses two that can both hold. Where a mutant makes two rows hold at once either may fire, as in
every reading of the system.

An id says where and what, and stays the same while that part of the spec does: `Export.post[computed]:delete`,
`Coordinator.cancel@waiting.to:stay`. A row is named by its event, then by its source states, then by the labels of
its guard, as far as that is needed to tell it from the others of its machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlt_fsm.errors import Span
from rlt_fsm.expr import (
    BOOL,
    FALSE,
    INT,
    Add,
    Const,
    Enum,
    Member,
    Node,
    Op,
    Ref,
    conj,
    conjuncts,
    disj,
    refs,
    show,
)
from rlt_fsm.model import Ignore, Machine, Process, System, Transition

Row = Transition | Ignore
ONE = Const(1, INT)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change. `part` is the part of the spec that it changes; several mutants may share one."""

    id: str
    part: str
    kind: str  # guard, update, target, send, effect, source, order, shell
    what: str
    place: str  # file:line


@dataclass(frozen=True, slots=True)
class Variant:
    """A mutant and the system that it makes."""

    mutant: Mutant
    system: System


@dataclass(frozen=True, slots=True)
class _Edit:
    """A change of one row, or of one `when`: what follows the row's name in the id, and what comes of it."""

    part: str
    suffix: str
    kind: str
    what: str
    new: Any


def variants(system: System) -> Iterator[Variant]:
    """Every mutant of the system, in the order of the tables. Ids are unique."""
    for machine in placed(system):
        rows: tuple[Row, ...] = (*machine.transitions, *machine.ignores)
        for place, (row, name) in enumerate(zip(rows, row_names(machine), strict=True)):
            where = f"{machine.name}.{name}"
            for edit in row_edits(row, machine):
                changed = edit.new if isinstance(edit.new, Machine) else with_row(machine, place, edit.new)
                after = replace(system, machines={**system.machines, machine.name: changed})
                yield Variant(_mutant(where, edit, row.span), after)
    yield from _shell(system)
    yield from _joint_order(system)


def _mutant(where: str, edit: _Edit, span: Span) -> Mutant:
    return Mutant(
        f"{where}{edit.part}{edit.suffix}", where + edit.part, edit.kind, edit.what, f"{span.file}:{span.line}"
    )


def placed(system: System) -> list[Machine]:
    """The machines that some process runs, in the order of the processes."""
    names: dict[str, None] = {}
    for process in system.processes.values():
        names |= dict.fromkeys((*process.machines, *(s.machine for s in process.shared.values())))
    return [system.machines[name] for name in names]


def row_names(machine: Machine) -> list[str]:
    """A name for each row, transitions before ignores: as short as tells it from the machine's other rows."""
    rows: tuple[Row, ...] = (*machine.transitions, *machine.ignores)
    forms = [
        [row.event, f"{row.event}@{'+'.join(row.sources)}", f"{row.event}@{'+'.join(row.sources)}/{'+'.join(row.when)}"]
        for row in rows
    ]
    out = []
    for place, mine in enumerate(forms):
        unique = (form for level, form in enumerate(mine) if sum(other[level] == form for other in forms) == 1)
        out.append(next(unique, f"{mine[-1]}#{place}"))
    return out


def with_row(machine: Machine, place: int, row: Row | None) -> Machine:
    """The machine with another row at `place` (of transitions, then ignores), or with none there."""
    rows: list[Row | None] = [*machine.transitions, *machine.ignores]
    rows[place] = row
    return replace(
        machine,
        transitions=tuple(r for r in rows if isinstance(r, Transition)),
        ignores=tuple(r for r in rows if isinstance(r, Ignore)),
    )


# -- rows -------------------------------------------------------------------------------------------------


def row_edits(row: Row, machine: Machine) -> Iterator[_Edit]:
    """Every change of one row. Deleting a row is dropping its last source.

    A machine's last row for an event stays, and is never taken: the machine still knows the event, and refuses it.
    """
    rows: tuple[Row, ...] = (*machine.transitions, *machine.ignores)
    last = sum(other.event == row.event for other in rows) == 1
    for source in row.sources:
        left = tuple(s for s in row.sources if s != source)
        word = "ignored" if isinstance(row, Ignore) else "taken"
        new = replace(row, sources=left) if left else replace(row, when={"never": FALSE}) if last else None
        yield _Edit(f".from.{source}", ":drop", "source", f"the event is no longer {word} in '{source}'", new)
    for label, node in row.when.items():
        rest = {k: v for k, v in row.when.items() if k != label}
        yield _Edit(f"[{label}]", ":delete", "guard", f"`{show(node)}` is not asked", replace(row, when=rest))
        for suffix, altered in altered_guard(node):
            new = replace(row, when={**row.when, label: altered})
            yield _Edit(f"[{label}]", f":{suffix}", "guard", f"`{show(node)}` becomes `{show(altered)}`", new)
    if isinstance(row, Transition):
        if row.target is not None and row.sources != (row.target,):
            yield _Edit(
                ".to", ":stay", "target", f"it stays, instead of moving to '{row.target}'", replace(row, target=None)
            )
        yield from _update_edits(row, machine)
        yield from _send_edits(row)
        yield from _effect_edits(row)


def _update_edits(row: Transition, machine: Machine) -> Iterator[_Edit]:
    for name, value in row.set.items():
        rest = {k: v for k, v in row.set.items() if k != name}
        dropped: Transition | Machine = replace(row, set=rest)
        if isinstance(value, Add) and sum(_adds(t, value.of) for t in machine.transitions) == 1:
            # Nothing else fills the set, so nothing is ever found in it. Whether a number is in it is otherwise
            # the world's choice, which would not notice.
            dropped = _never_seen(machine, value.of)
        yield _Edit(f".set.{name}", ":drop", "update", f"`{name}` is not set to `{show(value)}`", dropped)
        for altered in altered_value(value, name):
            what = f"`{name}` is set to `{show(altered)}`, not to `{show(value)}`"
            new = replace(row, set={**row.set, name: altered})
            yield _Edit(f".set.{name}", f":{show(altered)}", "update", what, new)


def _adds(row: Transition, seen: Ref) -> bool:
    return any(isinstance(v, Add) and v.of.name == seen.name for v in row.set.values())


def _never_seen(machine: Machine, seen: Ref) -> Machine:
    """The machine in which no number is ever found in `seen`."""

    def without(node: Node) -> Node:
        if isinstance(node, Member) and node.of.name == seen.name:
            return FALSE
        if isinstance(node, Op):
            return replace(node, args=tuple(without(a) for a in node.args))
        return node

    def guard(row: Any) -> Any:
        return replace(row, when={label: without(node) for label, node in row.when.items()})

    return replace(
        machine,
        transitions=tuple(guard(t) for t in machine.transitions),
        ignores=tuple(guard(i) for i in machine.ignores),
    )


def _send_edits(row: Transition) -> Iterator[_Edit]:
    for place, send in enumerate(row.send):
        part = f".send.{send.to}.{send.message}"
        rest = (*row.send[:place], *row.send[place + 1 :])
        yield _Edit(part, ":drop", "send", f"'{send.message}' is not sent to {send.to}", replace(row, send=rest))
        for field, value in send.fields.items():
            for altered in altered_value(value, ""):
                other = replace(send, fields={**send.fields, field: altered})
                what = f"'{send.message}' says `{show(altered)}` as {field}, not `{show(value)}`"
                new = replace(row, send=(*row.send[:place], other, *row.send[place + 1 :]))
                yield _Edit(f"{part}.{field}", f":{show(altered)}", "send", what, new)
    for place, (first, second) in enumerate(zip(row.send, row.send[1:], strict=False)):
        if first.to == second.to:
            what = f"'{second.message}' is sent before '{first.message}'"
            new = replace(row, send=(*row.send[:place], second, first, *row.send[place + 2 :]))
            yield _Edit(f".send.{first.to}", f":swap {first.message}, {second.message}", "order", what, new)


def _effect_edits(row: Transition) -> Iterator[_Edit]:
    for place, name in enumerate(row.do):
        rest = (*row.do[:place], *row.do[place + 1 :])
        yield _Edit(f".do.{name}", ":drop", "effect", f"`{name}` is not carried out", replace(row, do=rest))
    for place, (first, second) in enumerate(zip(row.do, row.do[1:], strict=False)):
        new = replace(row, do=(*row.do[:place], second, first, *row.do[place + 2 :]))
        yield _Edit(".do", f":swap {first}, {second}", "order", f"`{second}` is carried out before `{first}`", new)


# -- expressions ------------------------------------------------------------------------------------------


def altered_guard(node: Node) -> Iterator[tuple[str, Node]]:
    """(suffix of the id, changed condition): parts dropped, comparisons relaxed, enumerations wider and narrower."""
    enumeration = _one_of(node)
    if enumeration is not None:
        subject, values = enumeration
        kind = values[0].type
        assert isinstance(kind, Enum)
        chosen = {int(v.value) for v in values}
        for place, name in enumerate(kind.names):
            if place not in chosen:
                yield f"{show(subject)}+{name}", _enumeration(subject, kind, chosen | {place})
            elif len(chosen) > 1:
                yield f"{show(subject)}-{name}", _enumeration(subject, kind, chosen - {place})
        return
    if not isinstance(node, Op):
        return
    if node.op == "not" and _one_of(node.args[0]) is not None:
        yield from ((suffix, Op("not", (inner,), BOOL)) for suffix, inner in altered_guard(node.args[0]))
    elif node.op in ("and", "or"):
        join = conj if node.op == "and" else disj
        parts = conjuncts(node) if node.op == "and" else _disjuncts(node)
        for place, part in enumerate(parts):
            yield f"without {show(part)}", join(*parts[:place], *parts[place + 1 :])
            for suffix, inner in altered_guard(part):
                yield suffix, join(*parts[:place], inner, *parts[place + 1 :])
    elif node.op in _RELAXED and all(a.type == INT for a in node.args):
        for op in _RELAXED[node.op]:
            altered = Op(op, node.args, BOOL)
            yield show(altered), altered
    elif node.op in (">=", "<="):
        low, high = node.args if node.op == "<=" else node.args[::-1]
        altered = Op("<=", (low, Op("+", (high, ONE), INT)), BOOL)
        yield show(altered), altered


_RELAXED = {"==": (">=", "<="), ">": (">=",), "<": ("<=",)}


def altered_value(node: Node, own: str) -> Iterator[Node]:
    """Other values that one might have written. `own`: the variable that is set, if it is one."""
    if isinstance(node, Const):
        if node.type == BOOL:
            yield Const(not node.value, BOOL)
        elif isinstance(node.type, Enum):
            yield from (Const(v, node.type) for v in range(len(node.type.names)) if v != node.value)
        else:
            yield Const(int(node.value) + 1, INT)
    elif isinstance(node, Ref) and node.type == BOOL:
        yield Op("not", (node,), BOOL)
    elif isinstance(node, Ref) and node.type == INT:
        yield Op("+", (node, ONE), INT)
    elif isinstance(node, Op) and node.op in ("+", "-"):
        yield Op(node.op, (node, node.args[1]), INT)
        if not (isinstance(node.args[0], Ref) and str(node.args[0]) == own):
            yield node.args[0]
    elif isinstance(node, Op) and node.op == "ite":
        yield from node.args[1:]
    elif isinstance(node, Op) and node.type == BOOL:
        yield Op("not", (node,), BOOL)


def _disjuncts(node: Node) -> list[Node]:
    if isinstance(node, Op) and node.op == "or":
        return [part for arg in node.args for part in _disjuncts(arg)]
    return [node]


def _one_of(node: Node) -> tuple[Node, list[Const]] | None:
    """(x, values) where the node says that `x` is one of some values of an enum."""
    tests = _disjuncts(node)
    values: list[Const] = []
    for test in tests:
        if not (isinstance(test, Op) and test.op == "==" and test.args[0] == _subject(tests[0])):
            return None
        value = test.args[1]
        if not (isinstance(value, Const) and isinstance(value.type, Enum)):
            return None
        values.append(value)
    return _subject(tests[0]), values


def _subject(test: Node) -> Node:
    return test.args[0] if isinstance(test, Op) else test


def _enumeration(subject: Node, kind: Enum, values: set[int]) -> Node:
    return disj(*(Op("==", (subject, Const(v, kind)), BOOL) for v in sorted(values)))


# -- the system -------------------------------------------------------------------------------------------


def _shell(system: System) -> Iterator[Variant]:
    """What a shell asks of its own knowledge before it offers an action."""
    for action in system.actions.values():
        if not action.offered:
            continue
        parts = conjuncts(action.when)
        for place, part in enumerate(parts):
            read = {ref.name for ref in refs(part)}
            if not read or read & (system.world.keys() | system.consts.keys()):
                continue
            changes = [("delete", f"`{show(part)}` is not asked", conj(*parts[:place], *parts[place + 1 :]))]
            for suffix, altered in altered_guard(part):
                what = f"`{show(part)}` becomes `{show(altered)}`"
                changes.append((suffix, what, conj(*parts[:place], altered, *parts[place + 1 :])))
            for suffix, what, when in changes:
                edit = _Edit(f"[{show(part)}]", f":{suffix}", "shell", what, None)
                after = replace(system, actions={**system.actions, action.name: replace(action, when=when)})
                yield Variant(_mutant(f"actions.{action.name}", edit, action.span), after)


def _joint_order(system: System) -> Iterator[Variant]:
    """Machines of a process in another order, where both act outwards on one event."""
    for process in system.processes.values():
        for place, (first, second) in enumerate(zip(process.machines, process.machines[1:], strict=False)):
            if not _both_act(system, first, second):
                continue
            order = (*process.machines[:place], second, first, *process.machines[place + 2 :])
            what = f"{second} acts before {first} on the events that both take"
            edit = _Edit(".machines", f":swap {first}, {second}", "order", what, None)
            other: Process = replace(process, machines=order)
            after = replace(system, processes={**system.processes, process.name: other})
            yield Variant(_mutant(process.name, edit, process.span), after)


def _both_act(system: System, first: str, second: str) -> bool:
    """Whether on some event both machines send to one process, or both have effects."""
    one, two = (_outward(system.machines[name]) for name in (first, second))
    return any(one[event] & two[event] for event in one.keys() & two.keys())


def _outward(machine: Machine) -> Mapping[str, set[str]]:
    """event -> the processes that its rows send to, and `do` if they have effects."""
    out: dict[str, set[str]] = {}
    for row in machine.transitions:
        out.setdefault(row.event, set()).update({s.to for s in row.send} | ({"do"} if row.do else set()))
    return out
