"""How fast a write is, beside torch's copy_ of the same bytes in the same run.

Two processes on this machine: this one writes, a spawned one polls without pause, as a busy target does. Each line
is the median of interleaved runs (a copy, a write, a copy, ...), so a slow moment of the machine strikes both.
`post` is the time inside NixlConnector.post, `done` from its start until poll() is True, `copy` is torch's copy_ of
the same pieces inside this process, on one thread. What matters is the ratio; absolute figures are this machine's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np
import torch
from machine import machine

from engine.pd import nixl
from engine.pd.nixl import NixlConnector
from engine.pd.segments import Ranges

MIB = 1 << 20


def target(pipe: Connection, size: int) -> None:
    """The other process: memory to write into, and polls until told to end."""
    connector = NixlConnector()
    pool = torch.zeros(size, dtype=torch.uint8)
    connector.register_tensor("pool", pool)
    pipe.send((connector.metadata(), pool.data_ptr()))
    while not pipe.poll():
        for _ in range(1000):
            connector.notifications()
    connector.close()


class Bench:
    """One writer with its memory, and where the target's memory lies."""

    def __init__(self, metadata: bytes, there: int, size: int, runs: int) -> None:
        self.connector = NixlConnector()
        self.pool = torch.ones(size, dtype=torch.uint8)
        self.scratch = torch.zeros(size, dtype=torch.uint8)
        self.connector.register_tensor("pool", self.pool)
        self.peer, self.there, self.runs = self.connector.add_peer(metadata), there, runs

    def ranges(self, base: int, count: int, size: int, gap: int) -> Ranges:
        starts = base + np.arange(count) * (size + gap)
        return np.stack([starts, np.full(count, size), np.zeros(count, np.int64)], axis=1).astype(np.uint64)

    def write(self, count: int, size: int, gap: int) -> tuple[float, float]:
        """Seconds in post, seconds until done."""
        local, remote = (self.ranges(base, count, size, gap) for base in (self.pool.data_ptr(), self.there))
        start = time.perf_counter()
        write = self.connector.post(self.peer, local, remote, b"benchmark")
        posted = time.perf_counter()
        while not write.poll():
            pass
        return posted - start, time.perf_counter() - start

    def copy(self, count: int, size: int, gap: int) -> float:
        """Seconds for one copy_ of the same pieces."""
        source, destination = (
            memory[: count * (size + gap)].view(count, size + gap)[:, :size] for memory in (self.pool, self.scratch)
        )
        start = time.perf_counter()
        destination.copy_(source)
        return time.perf_counter() - start

    def compare(self, count: int, size: int, gap: int) -> None:
        """Print one line: count pieces of size bytes, gap bytes apart."""
        timings = []
        for run in range(self.runs + 3):
            copied = self.copy(count, size, gap)
            posted, done = self.write(count, size, gap)
            if run >= 3:  # the first ones meet cold caches and open connections
                timings.append((copied, posted, done))
        copy, post, done = (statistics.median(values) for values in zip(*timings, strict=True))
        total = count * size
        print(
            f"{count:>6} x {size // 1024:>6} KiB | {post * 1e6:>10.1f} | {done * 1e6:>10.1f} | {copy * 1e6:>10.1f} | "
            f"{total / done / 1e9:>6.2f} | {total / copy / 1e9:>6.2f} | {copy / done:>6.3f}",
            flush=True,
        )

    def compare_builds(self, count: int, size: int) -> None:
        """Print one line: touching pieces, written from plain lists and from prepared ones."""
        plain: list[float] = []
        merged: list[float] = []
        for run in range(self.runs + 3):
            for threshold, values in ((count + 1, plain), (count, merged)):
                nixl.MERGE_FROM_DESCRIPTORS = threshold
                done = self.write(count, size, 0)[1]
                if run >= 3:
                    values.append(done)
        one, two = statistics.median(plain), statistics.median(merged)
        print(f"{count:>6} x {size // 1024:>6} KiB | {one * 1e6:>10.1f} | {two * 1e6:>10.1f} | {two / one:>6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=21, help="interleaved runs per line (default %(default)s)")
    parser.add_argument("--descriptors", type=int, nargs="+", default=[1, 64, 1024], metavar="N")
    parser.add_argument("--total-mib", type=int, default=64, help="bytes per write of the bandwidth lines, in MiB")
    parser.add_argument("--tls", default="", help="UCX_TLS of both processes, for example tcp (default: UCX chooses)")
    arguments = parser.parse_args()
    if arguments.tls:
        os.environ["UCX_TLS"] = arguments.tls
    torch.set_num_threads(1)
    gap = 4096
    counts: list[int] = arguments.descriptors
    total = arguments.total_mib * MIB
    if min(arguments.runs, arguments.total_mib, *counts) < 1 or any(total % count for count in counts):
        parser.error("--runs, --total-mib and --descriptors must be positive, and each N must divide the total")
    pool = max(total + max(counts) * gap, max(counts) * 2 * gap)

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(there, pool), daemon=True)
    process.start()
    metadata, address = here.recv()
    bench = Bench(metadata, address, pool, arguments.runs)
    print(f"{machine('torch', 'nixl')}; UCX_TLS={os.environ.get('UCX_TLS', 'default')}")
    print(f"medians of {arguments.runs} interleaved runs; ratio = copy / done, 1 would be as fast as copy_\n")
    print("pieces apart           |    post us |    done us |    copy us |   GB/s |   copy |  ratio")
    for count in counts:
        bench.compare(count, 4096, gap)
    for count in counts:
        bench.compare(count, total // count, gap)
    print("\npieces touching        |   plain us |  merged us |  ratio of merged (make_prepped_xfer) to plain")
    for count in (2, 8, 16, 64, 1024):
        bench.compare_builds(count, 4096)
    here.send("end")
    process.join()
    bench.connector.close()


if __name__ == "__main__":
    main()
