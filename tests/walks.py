"""Random walks over a system spelled out, with the compiled classes alongside: traces that are right by construction.

At each step one of the enabled steps is taken, by a seeded choice; the compiled classes take the same event, and
every variable must then be equal on both sides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from rlt_fsm.compile import CompiledProcess, Effect, Message, compile_process
from rlt_fsm.expr import BOOL, Const, Enum, Node, Ref, evaluate, to_python
from rlt_fsm.ground import Flat, Step, ground
from rlt_fsm.model import Ignore, Spec
from rlt_fsm.trace import Trace, TraceRing, merge

_KNOWN: dict[object, Any] = {}
"""Spelled-out systems and compiled processes, by the digest of their spec: many walks share them."""


class Walk:
    """One run of the system in a scope, step by step."""

    def __init__(
        self,
        spec: Spec,
        sizes: dict[str, int],
        consts: dict[str, int],
        start: dict[str, str] | None = None,
        seed: int = 0,
        capacity: int = 1 << 20,
    ) -> None:
        """sizes, consts, start: as a scope gives them; a constant that is not given is 0."""
        self.spec, self.system = spec, spec.need_system()
        self.consts = dict.fromkeys(self.system.consts, 0) | consts
        self.flat, self.enabled = _spelled_out(spec, sizes, self.consts, start)
        self.random = random.Random(seed)
        self.seed = seed
        self.state: dict[str, int | bool] = {}
        for name, var in self.flat.vars.items():
            assert isinstance(var.init, Const)
            self.state[name] = var.init.value
        self.first = dict(self.state)
        self.rings = {name: TraceRing(capacity) for name in self.system.processes}
        self.compiled: dict[str, CompiledProcess] = {}
        self.shared: dict[str, Any] = {}
        for name, process in self.system.processes.items():
            given = {}
            for item in process.shared.values():
                given[item.name] = {k: self.number(v) for k, v in item.given.items()}
            begin = {k: v for k, v in (start or {}).items() if k in process.shared}
            self.compiled[name] = _compiled(spec, name)
            self.shared[name] = self.compiled[name].make_shared(given, self.rings[name], begin)
        self.records: dict[tuple[str, int], Any] = {}
        self.tids: dict[int, str] = {}
        self.came: dict[int, list[int]] = {}
        self.fresh = 0
        for r in range(sizes[self.system.generation]):
            self.begin(r)
        self.steps: list[Step] = []

    def number(self, node: Node) -> int:
        """The value of a given in this scope."""
        return int(evaluate(node, lambda ref: self.consts[ref.name]))

    def begin(self, r: int) -> None:
        """Put a new generation in place `r`: new records, and every variable with that index at its first value."""
        self.tids[r] = f"g{self.fresh}"
        self.fresh += 1
        self.came[r] = []
        for name, process in self.system.processes.items():
            own = {k: self.number(v) for k, v in process.given.items()}
            self.records[name, r] = self.compiled[name].make_record(self.shared[name], self.tids[r], own)
        for name in self.state:
            if f"[{r}]" in name and not name.startswith(("owner[", "source_owner[")):
                self.state[name] = self.first[name]

    def renew(self) -> None:
        """Give the place of every generation that is over, with nothing on its way, to a new one."""
        for r in list(self.tids):
            over = self.state_of("coordinator", r, "Coordinator") == "retired"
            quiet = not any(
                self.state[f"{c.name}[{r}].{m}"] for c in self.system.channels.values() if c.per for m in c.messages
            )
            settled = all(
                self.settled(process, r, machine)
                for process in ("prefill", "decode")
                for machine in self.system.processes[process].machines
            )
            if over and quiet and settled:
                self.begin(r)

    def settled(self, process: str, r: int, machine: str) -> bool:
        """Whether a machine is in a state in which it holds nothing."""
        state = self.system.machines[machine].states[self.state_of(process, r, machine)]
        return state.initial or state.final

    def state_of(self, process: str, r: int, machine: str) -> str:
        """The name of a machine's state, from the compiled record."""
        return str(self.records[process, r].state(machine))

    def step(self, weight: Callable[[Step], float] | None = None) -> Step | None:
        """Take one enabled step, and compare; None where there is none. `weight`: how likely each is, 1 by default."""
        choices = [self.flat.steps[i] for i in self.enabled(self.state)]
        choices = [s for s in choices if self.possible(s)]
        weights = [1.0 if weight is None else weight(s) for s in choices]
        if not any(weights):
            return None
        step = self.random.choices(choices, weights)[0]
        before = dict(self.state)
        for name, node in step.updates.items():
            self.state[name] = evaluate(node, lambda ref: before[ref.name])
        self.take(step, before)
        self.compare(step)
        self.steps.append(step)
        return step

    def possible(self, step: Step) -> bool:
        """Whether the step's fields can be given a number: only what came before can be repeated."""
        return "repeat" not in step.fields.values() or bool(self.came[dict(step.index)[self.system.generation]])

    def take(self, step: Step, before: dict[str, int | bool]) -> None:
        """Give the step's event to the compiled classes, and compare what comes out with what the step sends."""
        if not step.event:
            self.rings["coordinator"].world(step.action)
            return
        r = dict(step.index).get(self.system.generation)
        fields: dict[str, int | bool] = {}
        for name, value in step.fields.items():
            if isinstance(value, str):
                assert r is not None
                fields[name] = self.random.choice(self.came[r]) if value == "repeat" else len(self.came[r])
                if value == "fresh":
                    self.came[r].append(int(fields[name]))
            else:
                fields[name] = evaluate(value, lambda ref: before[ref.name])
        if step.to:
            shared = self.shared[step.process]
            moves = shared.can(step.to, step.event, **fields)
            outputs = shared.fire(step.to, step.event, **fields)
        else:
            record = self.records[step.process, r or 0]
            moves = getattr(record, f"can_{step.event}")(**fields)
            outputs = getattr(record, step.event)(**fields)
        assert moves == any(not isinstance(row, Ignore) for _, row in step.rows), step.label
        sent = []
        for item in step.sent:
            values = {k: evaluate(v, lambda ref: before[ref.name]) for k, v in item.fields.items()}
            sent.append((item.message, values))
        assert [(m.name, m.fields) for m in outputs if isinstance(m, Message)] == sent, step.label
        assert tuple(e.name for e in outputs if isinstance(e, Effect)) == step.effects, step.label

    def compare(self, step: Step) -> None:
        """Every machine variable is the same in the flat state and in the compiled objects."""
        found: dict[str, Any] = {}
        for shared in self.shared.values():
            found.update(shared.values())
        for (_, r), record in self.records.items():
            for name, value in record.values().items():
                machine, _, var = name.partition(".")
                found[f"{machine}[{r}].{var}"] = value
        for name, value in found.items():
            if name in self.state:
                kind = self.flat.vars[name].type
                want: Any = kind.names[self.state[name]] if isinstance(kind, Enum) else self.state[name]
                assert value == want and (kind != BOOL or isinstance(value, bool)), (
                    f"seed {self.seed}, step {len(self.steps)} ({step.label}): {name} is {value}, not {want}"
                )

    def run(self, steps: int, weight: Callable[[Step], float] | None = None, renew: bool = False) -> Walk:
        """Walk until there is no step, or `steps` were taken."""
        for _ in range(steps):
            if self.step(weight) is None:
                break
            if renew:
                self.renew()
        return self

    def trace(self) -> Trace:
        """What the processes wrote so far, as one trace. World lines stand in the coordinator's."""
        return merge(ring.trace("i0") for ring in self.rings.values())


def scope_walk(spec: Spec, scope: str, seed: int) -> Walk:
    """A walk in a scope of the system file."""
    item = spec.need_system().scopes[scope]
    return Walk(spec, dict(item.sizes), dict(item.consts), dict(item.start), seed)


def long_walk(spec: Spec, steps: int, seed: int) -> Walk:
    """A walk of many generations without deaths or failed writes: each place is used again and again."""
    start = {"prefill_worker": "serving", "decode_worker": "serving"}
    consts = {"chunks": 2, "parts": 1, "steps": 2, "decode_slots": 1, "compute_slots": 1, "source_storage": 1}
    consts |= {"destination_storage": 2, "echoes": 1 << 30, "cancels": 1 << 30}
    walk = Walk(spec, {"r": 2, "b": 2, "s": 1}, consts, start, seed)
    return walk.run(steps, lambda s: 0.05 if s.action in ("cancel", "echo") else 1.0, renew=True)


def _spelled_out(
    spec: Spec, sizes: dict[str, int], consts: dict[str, int], start: dict[str, str] | None
) -> tuple[Flat, Callable[[dict[str, int | bool]], list[int]]]:
    key = (spec.digest, str(sizes), str(consts), str(start))
    if key not in _KNOWN:
        flat = ground(spec.need_system(), sizes, consts, start)
        _KNOWN[key] = (flat, _chooser(flat))
    found: tuple[Flat, Callable[[dict[str, int | bool]], list[int]]] = _KNOWN[key]
    return found


def _compiled(spec: Spec, process: str) -> CompiledProcess:
    key = (spec.digest, process)
    if key not in _KNOWN:
        _KNOWN[key] = compile_process(spec.need_system(), process, spec.digest)
    found: CompiledProcess = _KNOWN[key]
    return found


def rare_faults(step: Step) -> float:
    """A weight for walks that shall get somewhere before something fails: faults one time in fifty."""
    return 0.02 if step.action.startswith(("crash", "break", "cancel", "drain_", "write_error", "echo")) else 1.0


def _chooser(flat: Flat) -> Callable[[dict[str, int | bool]], list[int]]:
    """A function from a state to the numbers of its enabled steps."""
    lines = ["def enabled(v):", "    out = []"]

    def name(ref: Ref) -> str:
        return f"v[{ref.name!r}]"

    for place, step in enumerate(flat.steps):
        lines += [f"    if {to_python(step.guard, name)}:", f"        out.append({place})"]
    lines.append("    return out")
    space: dict[str, Any] = {}
    exec(compile("\n".join(lines), "<walk>", "exec"), space)
    found: Callable[[dict[str, int | bool]], list[int]] = space["enabled"]
    return found
