"""Ask SPIN: export, build, search, and bring a counterexample back as steps of the spec.

The storage is exact and the search is breadth-first, so a counterexample is a shortest one. A search that was cut
short, by memory, depth or time, proves nothing. Where `spin` or a C compiler is not there the answer is Unknown, and
says what to install. Liveness is not asked: SPIN's own fairness is that of processes, and ours is that of actions.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rlt_fsm.expr import Const, evaluate
from rlt_fsm.ground import Flat
from verification.confirm import reader
from verification.result import Move, Result, Trace
from verification.spin.promela import Model, promela

METHOD = "spin"
MEMORY_MB = 4096
SECONDS_MAX = 300.0
INSTALL = "install them, for example `apt-get install spin gcc`"
BREADTH_FIRST, DEPTH_FIRST = ("-DBFS",), ()

_STEP = re.compile(r"STEP (\d+)")
_STORED = re.compile(r"^\s*(\d+) states, stored", re.MULTILINE)
_TRANSITIONS = re.compile(r"^\s*(\d+) transitions", re.MULTILINE)


class NoAnswer(Exception):
    """SPIN was not there, or did not go to the end; the text says why."""


@dataclass(frozen=True, slots=True)
class Searched:
    """What pan said. steps: of the counterexample, as places of Flat.steps; violated: what it printed at its end."""

    states: int
    transitions: int
    seconds: float
    steps: tuple[int, ...] = ()
    violated: str = ""


def missing() -> str:
    """What is not installed; empty where everything is."""
    absent = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found: {INSTALL}" if absent else ""


def check(flat: Flat, scope: str, lemmas: bool = False, seconds_max: float = SECONDS_MAX) -> list[Result]:
    """Every safety question of one scope. Nothing is raised: what could not be answered is Unknown."""
    model = promela(flat, scope, lemmas)
    names = [(q.name, q.kind) for q in model.questions] or [("safety", "always")]
    try:
        found = search(model, seconds_max)
    except NoAnswer as none:
        return [Result(name, kind, METHOD, scope, "unknown", str(none)) for name, kind in names]
    figures: dict[str, float | int | str] = {
        "states": found.states,
        "transitions": found.transitions,
        "seconds": round(found.seconds, 3),
    }
    if not found.violated:
        return [Result(name, kind, METHOD, scope, "proved", figures=figures) for name, kind in names]
    name, kind, why = _violation(model, found.violated)
    verdict = "unknown" if kind == "overflow" else "refuted"
    trace = trace_of(flat, found.steps)
    out = [Result(name, kind if verdict == "refuted" else "bounds", METHOD, scope, verdict, why, trace, figures)]
    rest = "the search stopped at another violation"
    return out + [Result(n, k, METHOD, scope, "unknown", rest, None, figures) for n, k in names if n != name]


def _violation(model: Model, printed: str) -> tuple[str, str, str]:
    """(name, kind, why) of what was violated."""
    word, *numbers = printed.split()
    if word == "VIOLATION":
        question = model.questions[int(numbers[0])]
        return question.name, question.kind, "does not hold in the last state"
    name, value = model.counters[int(numbers[0])], int(numbers[1])
    if value > 127:
        return f"bounds:{name}", "bounds", f"'{name}' goes below zero"
    return f"bounds:{name}", "overflow", f"'{name}' leaves its bounds"


def search(
    model: Model, seconds_max: float = SECONDS_MAX, options: tuple[str, ...] = BREADTH_FIRST, flags: str = "-O2"
) -> Searched:
    """Build and run. Raises NoAnswer."""
    absent = missing()
    if absent:
        raise NoAnswer(absent)
    with tempfile.TemporaryDirectory(prefix="spin-") as folder:
        built = build(model, Path(folder), options, flags)
        started = time.perf_counter()
        said = _run(built, Path(folder), seconds_max)
        return _read(said, Path(folder), built, time.perf_counter() - started)


def build(model: Model, folder: Path, options: tuple[str, ...], flags: str = "-O2") -> list[str]:
    """Export and compile in `folder`; returns the command that searches.

    -o2: SPIN would leave a variable that nothing reads out of the state. Ours has it: a `leads_to` may read it.
    """
    (folder / "model.pml").write_text(model.text, encoding="utf-8")
    for command in (
        ["spin", "-o2", "-a", "model.pml"],
        [
            "gcc",
            *flags.split(),
            "-w",
            "-DSAFETY",
            "-DNOREDUCE",
            "-DNOFAIR",
            f"-DMEMLIM={MEMORY_MB}",
            "-DVECTORSZ=2048",
            *options,
            "-o",
            "pan",
            "pan.c",
        ],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NoAnswer(f"`{command[0]}` refused the export: {(done.stderr or done.stdout).strip()[:300]}")
    return ["./pan", "-E", "-n", "-m10000000"]


def _run(command: list[str], folder: Path, seconds_max: float) -> str:
    """What it printed; it and all its children are ended when the time is up."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=seconds_max)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise NoAnswer(f"stopped after {seconds_max:g} s") from None
    return said


def _read(said: str, folder: Path, command: list[str], seconds: float) -> Searched:
    stored, transitions = _STORED.search(said), _TRANSITIONS.search(said)
    for bad in ("max search depth too small", "out of memory", "reached -DMEMLIM bound", "Search not completed"):
        if bad in said and "wrote model.pml.trail" not in said:
            raise NoAnswer(f"the search was cut short: {bad}")
    if stored is None or transitions is None:
        raise NoAnswer(f"it ended without figures: {said.strip()[-300:]}")
    states, moves = int(stored[1]), int(transitions[1])
    if "errors: 0" in said:
        return Searched(states, moves, seconds)
    replayed = _run(["./pan", "-r", "-n"], folder, SECONDS_MAX)
    steps = tuple(int(number) for number in _STEP.findall(replayed))
    last = re.findall(r"(VIOLATION \d+|OUTSIDE \d+ \d+)", replayed)
    if not last:
        raise NoAnswer(f"it found an error and did not say which: {replayed.strip()[-300:]}")
    return Searched(states, moves, seconds, steps, last[-1])


def trace_of(flat: Flat, steps: tuple[int, ...]) -> Trace:
    """The run that takes these steps, by the reference reading of the spec."""
    state: dict[str, int] = {}
    for name, var in flat.vars.items():
        assert isinstance(var.init, Const)
        state[name] = int(var.init.value)
    moves = []
    for place in steps:
        step, before = flat.steps[place], dict(state)
        for name, node in step.updates.items():
            state[name] = int(evaluate(node, reader(flat, before)))
        changed: dict[str, tuple[object, object]] = {
            name: (before[name], state[name]) for name in state if state[name] != before[name]
        }
        moves.append(Move(step.label, place, changed))
    return Trace(tuple(moves), None, dict(state))
