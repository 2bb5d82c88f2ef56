"""What one event costs: the compiled classes beside the library `transitions`, in the same run.

Each figure is the median of interleaved runs (one of each kind, again and again), so a slow moment of the machine
strikes all of them; the loop around the calls is in every figure. What matters is the ratio; absolute figures are this
machine's. `compiled` is the mean of two events of the prefill process: `post` moves two machines, with two guards and
three updates, `handle_done` one. One row without a guard is `step` of Import. The library runs the same tables through
`rlt_fsm/interop.py`, whose guards and updates are evaluated from the syntax tree.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import tracemalloc
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from rlt_fsm.compile import CompiledProcess, compile_machine, compile_process
from rlt_fsm.interop import to_transitions
from rlt_fsm.load import load
from rlt_fsm.trace import TraceRing

PLENTY = 1 << 40


def loop(calls: int, *events: Callable[[], object]) -> float:
    """ns per call of `events` in turn, with the loop around them (some 10 ns)."""
    rounds = max(1, calls // len(events))
    collecting = gc.isenabled()
    gc.disable()
    start = perf_counter_ns()
    for _ in range(rounds):
        for event in events:
            event()
    spent = perf_counter_ns() - start
    if collecting:
        gc.enable()
    return spent / (rounds * len(events))


def prefill_record(compiled: CompiledProcess, ring: TraceRing | None) -> Any:
    """A generation that computes, with no end of partitions to post."""
    record = compiled.make_record(compiled.make_shared({}, ring), "g1")
    record.prefill()
    record.launch(False)
    record.event_done(PLENTY)
    return record


def subjects(capacity: int) -> dict[str, tuple[int, list[Callable[[], object]]]]:
    """Name -> (one in so many calls is made, the events)."""
    spec = load()
    prefill = compile_process(spec.need_system(), "prefill")
    plain = prefill_record(prefill, None)
    traced = prefill_record(prefill, TraceRing(capacity))
    simple: Any = compile_machine(spec.machines["Import"])()
    active = list(spec.machines["Import"].states).index("active")
    simple.Import_state = active
    export = to_transitions(
        spec.machines["Export"], siblings={"SourceRetirement": {"handles": 0}, "domain": {"state": "clear"}}
    )
    model: Any = export.models[0]
    export.variables["ready"] = PLENTY
    model.state = "computing"
    slow = to_transitions(spec.machines["Import"], siblings={name: {} for name in spec.machines["Import"].reads})
    idle: Any = slow.models[0]
    idle.state = "active"
    return {
        "compiled": (1, [plain.post, plain.handle_done]),
        "compiled, traced": (1, [traced.post, traced.handle_done]),
        "compiled, asked with can_": (1, [plain.can_submitted, plain.can_settle_source]),
        "compiled, one row, no guard": (1, [simple.step]),
        "transitions, one row, no guard": (50, [idle.step]),
        "transitions, guards and updates": (50, [model.post]),
    }


def bytes_per_record(make: Callable[[int], object], count: int = 2000) -> float:
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


def sizes() -> dict[str, float]:
    """Bytes per generation in each process, per write handle, and per event of a ring."""
    spec = load()
    system = spec.need_system()
    out: dict[str, float] = {}
    for name, process in system.processes.items():
        compiled = compile_process(system, name)
        shared = compiled.make_shared({s.name: dict.fromkeys(s.given, 1) for s in process.shared.values()})
        out[f"record of {name}"] = bytes_per_record(lambda _, c=compiled, s=shared: c.make_record(s, "g"))  # type: ignore[misc]
    handle = compile_machine(spec.machines["WriteHandle"])
    out["write handle"] = bytes_per_record(lambda _: handle())
    ring = TraceRing(1 << 16)
    record = prefill_record(compile_process(system, "prefill"), ring)
    out["event in a trace ring"] = bytes_per_record(lambda _: record.post(), 20000)
    out["write handle as transitions.Machine"] = bytes_per_record(
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


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="interleaved runs of each kind (default: 15)")
    parser.add_argument("--calls", type=int, default=100_000, help="events per run (default: 100000)")
    parser.add_argument("--ring", type=int, default=1 << 16, help="events that the trace ring keeps (default: 65536)")
    args = parser.parse_args()
    if args.runs < 1 or args.calls < 100 or args.ring < 1:
        print("dispatch: --runs and --ring must be at least 1, --calls at least 100", file=sys.stderr)
        return 2
    kinds = subjects(args.ring)
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.runs):
        for name, (share, events) in kinds.items():
            found[name].append(loop(max(2, args.calls // share), *events))
    base = statistics.median(found["compiled"])
    print(machine())
    print(f"\n{'one event':<36}{'ns, median':>12}{'fastest':>10}{'ratio':>9}")
    for name, times in found.items():
        middle = statistics.median(times)
        print(f"{name:<36}{middle:>12.0f}{min(times):>10.0f}{middle / base:>9.1f}")
    print(f"\n{'memory':<36}{'bytes':>12}")
    for name, size in sizes().items():
        print(f"{name:<36}{size:>12.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
