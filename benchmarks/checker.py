"""The explicit search beside SPIN on the same flat model: states per second, as a ratio of interleaved runs.

Both ask the same safety questions (no lemmas) of the same states, whose number must be equal. SPIN is tuned: an exact,
depth-first search, built once with -O3 for this machine, with a hash table that fits, no partial-order reduction (one
process: there is none) and no fairness; building is not counted. Of the explicit search everything is counted, its
Python included. Needs `spin` and `gcc`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

from machine import machine

from rlt_fsm.ground import ground
from rlt_fsm.load import load
from verification import explicit
from verification.spin import run as spin
from verification.spin.promela import promela

FLAGS = "-O3 -march=native"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scope", nargs="+", default=["two_queue", "r2_k2_b1", "two_apart"], help="default: %(default)s"
    )
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs of each (default %(default)s)")
    arguments = parser.parse_args()
    system = load().need_system()
    unknown = [name for name in arguments.scope if name not in system.scopes]
    if unknown:
        parser.error(f"no scope {unknown[0]!r}; known: {', '.join(system.scopes)}")
    if spin.missing():
        sys.exit(f"checker.py: {spin.missing()}")
    print(machine("numpy"))
    print(f"medians of {arguments.runs} interleaved runs; SPIN built with {FLAGS}\n")
    print("scope          |     states | explicit s |    SPIN s | explicit states/s |  SPIN states/s | ratio")
    for name in arguments.scope:
        item = system.scopes[name]
        flat = ground(system, item.sizes, item.consts, item.start)
        with tempfile.TemporaryDirectory() as folder:
            command = spin.build(promela(flat, name), Path(folder), spin.DEPTH_FIRST, FLAGS)
            ours: list[float] = []
            theirs: list[float] = []
            states = 0
            for _ in range(arguments.runs):
                started = time.perf_counter()
                found = explicit.search(flat, name, lemmas=False)
                ours.append(time.perf_counter() - started)
                states = int(found.figures["states"])
                if not all(result.holds for result in found.results):
                    sys.exit(f"checker.py: {name} does not hold: run rlt-verify run --scope {name}")
                table = f"-w{max(20, math.ceil(math.log2(states)) + 1)}"
                started = time.perf_counter()
                said = spin._run([*command, table], Path(folder), 3600)
                theirs.append(time.perf_counter() - started)
                stored = spin._read(said, Path(folder), command, 0.0).states
                if stored != states:
                    sys.exit(f"checker.py: {states:,} states here, {stored:,} in SPIN: they did not do the same")
        mine, spins = statistics.median(ours), statistics.median(theirs)
        ratio = statistics.median(t / o for o, t in zip(ours, theirs, strict=True))
        print(
            f"{name:14} | {states:>10,} | {mine:>10.2f} | {spins:>9.2f} | {states / mine:>17,.0f} | "
            f"{states / spins:>14,.0f} | {ratio:>5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
