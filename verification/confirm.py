"""Run a counterexample again on the compiled classes, and compare every value after every step.

A trace that the compiled runtime does not follow would be a fault of this checker or of the compiler,
and is reported as such instead of being shown as a fault of the spec.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlt_fsm import trace as trace_format
from rlt_fsm.compile import CompiledProcess, compile_process
from rlt_fsm.errors import IllegalEvent
from rlt_fsm.expr import BOOL, Const, Enum, Node, Ref, conjuncts, evaluate, show
from rlt_fsm.ground import Flat, Step
from rlt_fsm.trace import TraceRing
from verification.result import Trace


class Runtime:
    """The compiled processes of one scope, moved by the steps of a trace."""

    def __init__(self, flat: Flat, digest: str = "") -> None:
        self.flat = flat
        self.rings = {name: TraceRing(1 << 16) for name in flat.system.processes}
        self.compiled: dict[str, CompiledProcess] = {}
        self.shared: dict[str, Any] = {}
        self.records: dict[tuple[str, int], Any] = {}
        self.heard: dict[int, int] = {}
        for name, process in flat.system.processes.items():
            self.compiled[name] = compile_process(flat.system, name, digest)
            given = {
                s.name: {k: self.number(v) for k, v in s.given.items()} for s in process.shared.values() if s.given
            }
            starts = {s.name: self.first_state(s.name) for s in process.shared.values()}
            self.shared[name] = self.compiled[name].make_shared(given, self.rings[name], starts)
            own = {k: self.number(v) for k, v in process.given.items()}
            for r in range(flat.sizes[flat.system.generation]):
                self.records[name, r] = self.compiled[name].make_record(self.shared[name], f"r{r}", own)

    def number(self, node: Node) -> int:
        """The value of a given in this scope."""
        if isinstance(node, Ref):
            return self.flat.consts[node.name]
        assert isinstance(node, Const)
        return int(node.value)

    def first_state(self, shared: str) -> str:
        """The state in which the scope starts a shared instance."""
        var = self.flat.vars[f"{shared}.state"]
        assert isinstance(var.init, Const) and isinstance(var.type, Enum)
        return var.type.names[int(var.init.value)]

    def values(self) -> dict[str, object]:
        """Every machine variable, by its flat name."""
        out: dict[str, object] = {}
        for shared in self.shared.values():
            out.update(shared.values())
        for (_, r), record in self.records.items():
            for name, value in record.values().items():
                machine, _, field = name.partition(".")
                out[f"{machine}[{r}].{field}"] = value
        return out

    def take(self, step: Step, fields: dict[str, Any]) -> None:
        """Give the step's event to the compiled classes. Raises IllegalEvent where they refuse it."""
        r = dict(step.index).get(self.flat.system.generation)
        if step.to:
            self.shared[step.process].fire(step.to, step.event, **fields)
        else:
            assert r is not None
            getattr(self.records[step.process, r], step.event)(**fields)

    def concrete(self, step: Step, before: dict[str, int]) -> dict[str, Any]:
        """Field values: a fresh sequence number is the next one, a repeated one is the first."""
        out: dict[str, Any] = {}
        r = dict(step.index).get(self.flat.system.generation, 0)
        for name, value in step.fields.items():
            if value == "fresh":
                out[name] = self.heard.get(r, 0)
                self.heard[r] = out[name] + 1
            elif value == "repeat":
                out[name] = 0
                record = self.records[step.process, r]
                for slot in type(record).__slots__:
                    if slot.endswith("_seen") and not getattr(record, slot) & 1:
                        setattr(record, slot, getattr(record, slot) | 1)  # over before it came: any number repeats
            else:
                assert not isinstance(value, str)
                number = evaluate(value, lambda ref: before[ref.name])
                out[name] = bool(number) if value.type == BOOL else number
        return out


def confirm(flat: Flat, trace: Trace, digest: str = "", save: Path | None = None) -> str:
    """One line that says whether the compiled classes follow the trace to its end.

    save: a file for the run in the trace format of the engine, so that `rlt-spec replay` can judge it as well.
    """
    runtime = Runtime(flat, digest)
    state = {}
    seen: list[dict[str, int]] = []
    for name, var in flat.vars.items():
        assert isinstance(var.init, Const)
        state[name] = int(var.init.value)
    for number, move in enumerate(trace.moves):
        step = flat.steps[move.step]
        before = dict(state)
        seen.append(before)
        false = [show(part) for part in conjuncts(step.guard) if not evaluate(part, reader(flat, before))]
        if false:  # the classes do not know the world, nor what is on its way
            return f"NOT CONFIRMED at step {number + 1} ({move.label}): false there: {', '.join(false)}"
        for name, node in step.updates.items():
            state[name] = int(evaluate(node, reader(flat, before)))
        if not step.event:
            next(iter(runtime.rings.values())).world(step.action)
            continue
        try:
            runtime.take(step, runtime.concrete(step, before))
        except IllegalEvent as error:
            return f"NOT CONFIRMED at step {number + 1} ({move.label}): the compiled classes refuse it: {error}"
        for name, value in runtime.values().items():
            if name in state and plain(flat, name, value) != state[name]:
                return (
                    f"NOT CONFIRMED at step {number + 1} ({move.label}): '{name}' is {value} in the compiled "
                    f"classes and {state[name]} in the checker"
                )
    if trace.loop is not None and trace.loop < len(seen) and seen[trace.loop] != state:
        return f"NOT CONFIRMED: after its last step the run is not back where step {trace.loop + 1} began"
    if save is not None:
        traces = [ring.trace("counterexample") for ring in runtime.rings.values()]
        trace_format.save(save, trace_format.merge(traces))
    return f"confirmed: the compiled classes take all {len(trace.moves)} steps to the same values"


def reader(flat: Flat, values: dict[str, int]) -> Callable[[Ref], bool | int]:
    """Gives each variable's value in its type's Python form."""

    def value(ref: Ref) -> bool | int:
        return bool(values[ref.name]) if flat.vars[ref.name].type == BOOL else values[ref.name]

    return value


def plain(flat: Flat, name: str, value: object) -> int:
    """A compiled value as the checker's number."""
    kind = flat.vars[name].type
    if isinstance(kind, Enum) and isinstance(value, str):
        return kind.names.index(value)
    assert isinstance(value, bool | int)
    return int(value)
