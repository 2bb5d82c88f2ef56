"""What a spec says, as frozen data: machines, systems and properties, each with its span."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlt_fsm.errors import NOWHERE, Span
from rlt_fsm.expr import Enum, Node, Type

Guard = Mapping[str, Node]  # conjunct label -> condition; all must hold


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a machine or of the world. `counter` is a natural number without upper bound."""

    name: str
    kind: str  # bool, counter, int, enum, seen, or the name of an instance sort (a value or none)
    type: Type
    init: Node
    doc: str = ""
    per: tuple[str, ...] = ()
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class State:
    """A named state; a final one has no way out."""

    name: str
    doc: str = ""
    initial: bool = False
    final: bool = False
    milestone: str = ""
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class Send:
    """One message put on the channel from this process to process `to`."""

    to: str
    message: str
    fields: Mapping[str, Node] = field(default_factory=dict)
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class Transition:
    """One row: in a state of `sources`, on `event`, if every conjunct of `when` holds, then the rest."""

    machine: str
    place: int  # its number in the machine's table, from 0
    event: str
    sources: tuple[str, ...]
    target: str | None  # None: the state stays
    when: Guard = field(default_factory=dict)
    set: Mapping[str, Node] = field(default_factory=dict)
    send: tuple[Send, ...] = ()
    do: tuple[str, ...] = ()
    doc: str = ""
    span: Span = NOWHERE

    @property
    def name(self) -> str:
        """How people refer to it: `Export.post`, or `Export.cancel#3` where the event has several rows."""
        return f"{self.machine}.{self.event}#{self.place}"


@dataclass(frozen=True, slots=True)
class Ignore:
    """An event that changes nothing in some states, with the reason."""

    event: str
    sources: tuple[str, ...]
    why: str
    when: Guard = field(default_factory=dict)
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class Machine:
    """One state machine: its own variables, its table, and which siblings it may read."""

    name: str
    doc: str
    states: Mapping[str, State]
    vars: Mapping[str, Variable]
    given: Mapping[str, Variable]  # fixed when an instance is made
    takes: Mapping[str, Mapping[str, Variable]]  # event -> fields that come with it
    reads: Mapping[str, str]  # name used in guards -> machine
    transitions: tuple[Transition, ...]
    ignores: tuple[Ignore, ...]
    per: str = ""
    source: str = ""
    span: Span = NOWHERE

    @property
    def initial(self) -> str:
        """The name of the one initial state."""
        return next(s.name for s in self.states.values() if s.initial)

    @property
    def state_type(self) -> Enum:
        """The states as an enumeration, in declared order."""
        return Enum(f"{self.name} state", tuple(self.states))

    def events(self) -> list[str]:
        """The alphabet: every event of the table, in order of first mention."""
        names: dict[str, None] = {}
        rows: tuple[Transition | Ignore, ...] = (*self.transitions, *self.ignores)
        for row in rows:
            names.setdefault(row.event, None)
        return list(names)

    def rows(self, event: str, state: str) -> list[Transition]:
        """The transitions that may fire on `event` in `state`, in table order: the first that holds does."""
        return [t for t in self.transitions if t.event == event and state in t.sources]

    def ignored(self, event: str, state: str) -> list[Ignore]:
        """The ignore rows for `event` in `state`."""
        return [i for i in self.ignores if i.event == event and state in i.sources]


# -- system -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shared:
    """A machine of which a process has one instance, not one per generation."""

    name: str
    machine: str
    given: Mapping[str, Node]
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class Process:
    """Machines that live in one process and move together on the events they share."""

    name: str
    machines: tuple[str, ...]  # one instance each per generation
    shared: Mapping[str, Shared]
    alive: Node | None  # over the world; None: cannot die
    given: Mapping[str, Node]
    doc: str = ""
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class Channel:
    """An ordered pipe between two processes; per generation, or one for the process.

    Held as a set of flags: exact as long as messages are sent in rising order of `messages`, which
    is an obligation at every send and is checked, not assumed.
    """

    name: str
    source: str
    target: str
    per: str
    messages: tuple[str, ...]
    to: str = ""  # the shared instance that receives, for a channel that is not per generation
    doc: str = ""
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class Assignment:
    """World variables set together, for every value of `over` (or for one chosen by the world)."""

    over: tuple[str, ...]
    when: Node
    set: tuple[tuple[Node, Node], ...]  # (Ref to the variable, new value)


@dataclass(frozen=True, slots=True)
class Effect:
    """What one `do` of a machine means in the world."""

    name: str
    choose: str  # an instance sort whose value the world picks, or ""
    needs: Node  # what must be true of the choice
    set: tuple[Assignment, ...]
    doc: str = ""
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class Action:
    """Something that may happen: a fact of the world, an internal event offered by a shell, or a fault."""

    name: str
    per: tuple[str, ...]
    when: Node
    set: tuple[Assignment, ...]
    process: str  # the process that gets `event`, or ""
    event: str
    to: str  # the shared instance addressed, or "" for the generation's machines
    fields: Mapping[str, tuple[str | Node, ...]]  # field -> the values the world may choose
    offered: bool  # happens only where the machines accept it
    budget: str  # a scope constant that bounds how often, or ""
    fair: str  # weak, strong, or "": may never happen
    doc: str = ""
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class Property:
    """A question: always, sometimes, leads_to, possible, rests, or lemma (an always that helps induction)."""

    name: str
    kind: str
    formula: Node
    target: Node | None = None
    doc: str = ""
    answers: tuple[str, ...] = ()
    per: str = ""  # instance sorts of a leads_to, comma separated
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class ScopeDef:
    """Bounds for the explicit checker: how many instances, and the value of each constant."""

    name: str
    sizes: Mapping[str, int]
    consts: Mapping[str, int]
    start: Mapping[str, str]  # shared instance -> the state it starts in
    suites: tuple[str, ...] = ("full",)
    asks: tuple[str, ...] = ()  # liveness properties to ask; empty: all
    symmetry: bool = False  # states up to the numbering of instances; no liveness then
    doc: str = ""
    span: Span = NOWHERE


@dataclass(frozen=True, slots=True)
class System:
    """The whole: processes, channels, world, what may happen, and what must hold."""

    name: str
    doc: str
    instances: Mapping[str, str]
    generation: str  # the sort that indexes generations
    consts: Mapping[str, str]
    processes: Mapping[str, Process]
    channels: Mapping[str, Channel]
    world: Mapping[str, Variable]
    effects: Mapping[str, Effect]
    actions: Mapping[str, Action]
    properties: tuple[Property, ...]
    scopes: Mapping[str, ScopeDef]
    machines: Mapping[str, Machine]
    standalone: tuple[str, ...] = ()
    span: Span = NOWHERE

    def alphabet(self, process: str, event: str) -> tuple[list[str], list[str]]:
        """The generation machines and the shared instances of `process` that move on `event`."""
        home = self.processes[process]
        own = [m for m in home.machines if event in self.machines[m].events()]
        joint = [s.name for s in home.shared.values() if event in self.machines[s.machine].events()]
        return own, joint

    def channel(self, source: str, target: str, message: str) -> Channel | None:
        """The channel that carries `message` from one process to another."""
        for channel in self.channels.values():
            if channel.source == source and channel.target == target and message in channel.messages:
                return channel
        return None


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything read from one set of files."""

    machines: Mapping[str, Machine]
    system: System | None
    sources: Mapping[str, str]  # file -> text
    digest: str  # SHA-256 over the files that define behaviour

    def need_system(self) -> System:
        """The system, or an error where the files hold machines only."""
        if self.system is None:
            raise LookupError(f"no system file among {', '.join(self.sources) or 'no files'}")
        return self.system


def find(items: Iterable[Property], name: str) -> Property:
    """The property called `name`; KeyError with the known names otherwise."""
    known = {p.name: p for p in items}
    if name not in known:
        raise KeyError(f"no property '{name}'; known: {', '.join(known)}")
    return known[name]
