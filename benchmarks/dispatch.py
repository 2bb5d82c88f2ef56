"""What one event costs: the compiled classes beside the library `transitions`, in the same run.

Four bars, each shown with its figure; exit code 1 where one is missed:
an event with guard, update and trace record takes at most 0.25 us; at least twenty times faster than `transitions`
on the same table; as fast with 100 states as with 2; at most 64 bytes an instance of two variables.

Each figure is the median of interleaved runs (one of each kind, again and again), so a slow moment of the machine
strikes all of them. A run calls one event on each of 200 generations that stand where it can happen, and puts them
back before the next round; the loop and the call are in the figure. Where this machine's speed wanders, the ratios
hold and the microseconds do not: `an empty method` says how fast it was.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from rlt_fsm.compile import compile_machine, compile_process
from rlt_fsm.errors import IllegalEvent
from rlt_fsm.interop import to_transitions
from rlt_fsm.load import load
from rlt_fsm.model import Spec
from rlt_fsm.trace import TraceRing

EVENT_NS_MAX = 250
FASTER_MIN = 20
INSTANCE_BYTES_MAX = 64
GROWTH_MAX = 1.25
"""How much longer an event may take with 100 states than with 2: seven comparisons of a small number, in theory."""

GENERATIONS = 200
STATES = (2, 10, 100)
LIVES = {
    "coordinator": ("submit", "admit", "reserved", "prefill_complete", "commit", "received", "activated", "finished"),
    "prefill": ("prefill", "launch", "event_done", "post", "handle_done", "staged", "post", "submitted", "ack"),
    "decode": ("reserve", "commit", "notified", "receive", "activate", "bound", "step", "step_done", "finish"),
}
"""One life of a generation in each process. A field is true, or 1; a sequence number is 0."""


class Event:
    """One event on many objects that stand where it can happen."""

    def __init__(self, event: str, made: Sequence[Any], shared: Any = None, fields: Sequence[int | bool] = ()) -> None:
        """made: objects of one class, each where `event` can happen; `shared`: what the event may move beside them."""
        self.fields = fields
        self.back = [(each, values(each)) for each in (*made, *([] if shared is None else [shared]))]
        self.calls = [getattr(each, event) for each in made]

    def run(self, calls: int) -> float:
        """ns per event."""
        spent, rounds = 0, max(1, calls // len(self.calls))
        for _ in range(rounds):
            for each, known in self.back:
                for name, value in known:
                    setattr(each, name, value)
            start = perf_counter_ns()
            if self.fields:
                (value,) = self.fields
                for call in self.calls:
                    call(value)
            else:
                for call in self.calls:
                    call()
            spent += perf_counter_ns() - start
        return spent / (rounds * len(self.calls))


class Empty:
    """What a call costs that does nothing."""

    __slots__ = ()

    def nothing(self) -> tuple[()]:
        """Nothing."""
        return ()


def values(each: Any) -> list[tuple[str, Any]]:
    """The variables of a compiled object, as they are."""
    left_alone = ("shared", "key", "trace")
    return [(name, getattr(each, name)) for name in type(each).__slots__ if name not in left_alone]


def life(spec: Spec, process: str, capacity: int) -> dict[str, Event]:
    """Every event in the life of a generation, with the ring traced into if capacity is not 0.

    Raises IllegalEvent where LIVES no longer fits the tables.
    """
    system = spec.need_system()
    compiled = compile_process(system, process)
    home = system.processes[process].shared.values()
    given = {item.name: dict.fromkeys(item.given, 10 * GENERATIONS) for item in home}
    serving = {item.name: "serving" for item in home if "serving" in system.machines[item.machine].states}
    shared = compiled.make_shared(given, TraceRing(capacity) if capacity else None, serving)
    records = [compiled.make_record(shared, f"g{i}") for i in range(GENERATIONS)]
    out: dict[str, Event] = {}
    for event in LIVES[process]:
        wanted = compiled.record_class.plan.events["", event].fields.items()
        fields = [True if var.kind == "bool" else int(var.kind != "index") for _, var in wanted]
        out.setdefault(event, Event(event, records, shared, fields))
        for record in records:
            getattr(record, event)(*fields)
    return out


def ring_of_states(states: int) -> Spec:
    """A machine with a row for `go` in each of so many states, guarded, with two updates; a system that runs it."""
    text = [
        "machine: Ring",
        "per: generation",
        "doc: States in a circle.",
        "vars:",
        f"  left: {{type: counter, init: '{GENERATIONS}', doc: What may still be done.}}",
        "  done: {type: counter, doc: What was done.}",
        "states:",
        *(f"  s{i}: {{{'initial: true' if i == 0 else ''}}}" for i in range(states)),
        "transitions:",
    ]
    for i in range(states):
        row = "when: {some_left: left > 0}, set: {left: left - 1, done: done + 1}"
        text.append(f"  - {{on: go, from: s{i}, to: s{(i + 1) % states}, {row}}}")
    text += ["---", "system: ring", "doc: One machine.", "instances: {r: {of: generation}}"]
    text += ["processes: {one: {machines: [Ring]}}"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ring.yaml").write_text("\n".join(text) + "\n", encoding="utf-8")
        return load([folder])


def ring_event(states: int, capacity: int) -> Event:
    """`go` in generations that stand in every state in turn."""
    compiled = compile_process(ring_of_states(states).need_system(), "one")
    shared = compiled.make_shared({}, TraceRing(capacity) if capacity else None)
    records = [compiled.make_record(shared, f"g{i}") for i in range(GENERATIONS)]
    for i, record in enumerate(records):
        for _ in range(i % states):
            record.go()
    return Event("go", records)


def ring_in_transitions(states: int) -> Callable[[int], float]:
    """The same `go` in the library, on one model."""
    machine = to_transitions(ring_of_states(states).machines["Ring"])
    model: Any = machine.models[0]

    def run(calls: int) -> float:
        machine.variables["left"] = calls
        start = perf_counter_ns()
        for _ in range(calls):
            model.go()
        return (perf_counter_ns() - start) / calls

    return run


def bytes_per_object(make: Callable[[int], object], count: int = 2000) -> float:
    """Bytes that one more object takes, by the allocator's own count."""
    make(0)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept: list[object] = [None] * count
    empty = tracemalloc.get_traced_memory()[0] - before
    kept[:] = [make(i) for i in range(count)]
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before - empty
    tracemalloc.stop()
    assert kept[-1] is not None
    return taken / count


def sizes(spec: Spec) -> dict[str, float]:
    """Bytes per instance: of a machine of two variables, of the shipped ones, and of an event in a ring."""
    system = spec.need_system()
    two = compile_machine(ring_of_states(2).machines["Ring"])
    handle = compile_machine(spec.machines["WriteHandle"])
    out = {
        "machine of two variables": bytes_per_object(lambda _: two()),
        "write handle": bytes_per_object(lambda _: handle()),
    }
    for name, process in system.processes.items():
        compiled = compile_process(system, name)
        shared = compiled.make_shared({s.name: dict.fromkeys(s.given, 1) for s in process.shared.values()})
        variables = len(values(compiled.make_record(shared, "g")))
        out[f"generation in {name}, {variables} values"] = bytes_per_object(
            lambda _, c=compiled, s=shared: c.make_record(s, "g")  # type: ignore[misc]
        )
    for event, name in (("post", "event in a trace ring"), ("event_done", "the same, with a field")):
        subject = life(spec, "prefill", 1 << 18)[event]
        out[name] = bytes_per_object(lambda _, s=subject: s.run(GENERATIONS), 200) / GENERATIONS  # type: ignore[misc]
    out["write handle as transitions.Machine"] = bytes_per_object(
        lambda _: to_transitions(spec.machines["WriteHandle"]), 50
    )
    return out


def machine() -> str:
    """What this runs on."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            row.partition(":")[2].strip() for row in info.read_text().splitlines() if row.startswith("model name")
        ]
        name = f"{len(models)} x {models[0]}" if models else name
    return f"{name}, Python {platform.python_version()}, transitions {version('transitions')}"


def measure(kinds: dict[str, Callable[[int], float]], runs: int, calls: int) -> dict[str, list[float]]:
    """ns per event of each kind, run after run; a garbage collection strikes none of them."""
    found: dict[str, list[float]] = {name: [] for name in kinds}
    collecting = gc.isenabled()
    gc.disable()
    for _ in range(runs):
        for name, run in kinds.items():
            found[name].append(run(calls if "transitions" not in name else max(1, calls // 50)))
        gc.collect()
    if collecting:
        gc.enable()
    return found


def subjects(spec: Spec, capacity: int) -> dict[str, Callable[[int], float]]:
    """Everything that is timed, by name."""
    out: dict[str, Callable[[int], float]] = {"an empty method": Event("nothing", [Empty()] * GENERATIONS).run}
    ring = TraceRing(capacity)
    out["beginning a turn: its clock is read"] = Event("turn", [ring] * GENERATIONS).run
    for states in STATES:
        out[f"{states} states"] = ring_event(states, 0).run
        out[f"{states} states, traced"] = ring_event(states, capacity).run
    for states in STATES:
        out[f"{states} states, transitions"] = ring_in_transitions(states)
    for process in LIVES:
        plain, traced = life(spec, process, 0), life(spec, process, capacity)
        for event in plain:
            out[f"{process}.{event}"] = plain[event].run
            out[f"{process}.{event}, traced"] = traced[event].run
    return out


def main() -> int:
    """Print the figures and the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=25, help="interleaved runs of each kind (default: 25)")
    parser.add_argument("--calls", type=int, default=4000, help="events per run (default: 4000)")
    parser.add_argument("--ring", type=int, default=1 << 16, help="events that a trace ring keeps (default: 65536)")
    args = parser.parse_args()
    if args.runs < 1 or args.calls < GENERATIONS or args.ring < 1:
        print(f"dispatch: --runs and --ring must be at least 1, --calls at least {GENERATIONS}", file=sys.stderr)
        return 2
    spec = load()
    try:
        kinds = subjects(spec, args.ring)
    except IllegalEvent as error:
        print(f"dispatch: LIVES in {__file__} no longer fits the spec: {error}", file=sys.stderr)
        return 2
    found = {name: statistics.median(times) for name, times in measure(kinds, args.runs, args.calls).items()}
    memory = sizes(spec)
    print(machine())
    print(f"\n{'one event, ns':<40}{'plain':>10}{'traced':>10}")
    for name, time in found.items():
        if not name.endswith(", traced"):
            traced = found.get(f"{name}, traced")
            print(f"{name:<40}{time:>10.0f}" + ("" if traced is None else f"{traced:>10.0f}"))
    print(f"\n{'memory':<40}{'bytes':>10}")
    for name, size in memory.items():
        print(f"{name:<40}{size:>10.0f}")
    few, many = (found[f"{n} states, traced"] for n in (STATES[0], STATES[-1]))
    slowest = max((found[name], name) for name in found if name.endswith(", traced"))
    faster = min(found[f"{n} states, transitions"] / found[f"{n} states, traced"] for n in STATES)
    typical = statistics.mean(found[f"{name}.{e}, traced"] for name, events in LIVES.items() for e in set(events))
    bars = [
        ("ns, guard, two updates and trace", few, EVENT_NS_MAX, few <= EVENT_NS_MAX),
        ("ns, mean of the shipped events, traced", typical, EVENT_NS_MAX, typical <= EVENT_NS_MAX),
        ("times faster than transitions, at least", faster, FASTER_MIN, faster >= FASTER_MIN),
        ("times slower with 100 states than with 2", many / few, GROWTH_MAX, many / few <= GROWTH_MAX),
        ("bytes, a machine of two variables", size_two := memory["machine of two variables"], 64, size_two <= 64),
    ]
    print(f"\n{'bar':<44}{'is':>8}{'bar':>8}")
    for name, is_, bar, holds in bars:
        print(f"{name:<44}{is_:>8.4g}{bar:>8.4g}  {'holds' if holds else 'MISSED'}")
    print(f"slowest event: {slowest[1]}, {slowest[0]:.0f} ns")
    return 0 if all(holds for *_, holds in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
