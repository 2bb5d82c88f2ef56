"""A process with one NixlConnector, driven step by step from a test.

The test side is `Peer`; it never loads NIXL, so each process can have an environment of its own. Every step is a
call of one method of `Node` in that process; between steps the node polls for notifications and, at the very
instant one arrives, compares the memory that it announces with what should be there.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from engine.pd import nixl
from engine.pd.nixl import NixlConnector, TransportError, Write
from engine.pd.segments import Ranges

DEADLINE_SECONDS = 60.0
"""How long any wait may last. No test decides by time: reaching this is a failure."""


def pattern(seed: int, size: int) -> np.ndarray:
    """`size` bytes that differ between seeds and along the way, never 0, since fresh memory is 0."""
    return (((np.arange(size, dtype=np.uint32) * 31 + seed * 97) % 255) + 1).astype(np.uint8)


class Node:
    """What a test may ask of the process. Offsets are bytes inside its one block of memory."""

    def __init__(self) -> None:
        self.connector: Any = None
        self.listening = False
        self.expected: dict[bytes, list[tuple[int, int, int]]] = {}
        self.arrived: list[tuple[str, bytes, bool]] = []
        self.writes: dict[int, Write] = {}
        self.sockets: list[socket.socket] = []

    # Set-up

    def start(self, size: int, regions: list[tuple[int, int]] | None = None) -> tuple[str, bytes, int]:
        """A fresh agent and fresh memory of zeros; the former ones are closed. regions: (offset, bytes)."""
        if self.connector is not None:
            self.connector.close()
        self.__init__()  # type: ignore[misc]
        self.connector = NixlConnector()
        self.memory = np.zeros(size, np.uint8)
        for offset, length in regions if regions is not None else [(0, size)]:
            self.connector.register(f"region {offset}", self.address + offset, length, "DRAM", 0, owner=self.memory)
        self.listening = True
        return self.connector.name, self.connector.metadata(), self.address

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def listen(self, on: bool) -> None:
        self.listening = on

    def expect(self, message: bytes, pieces: list[tuple[int, int, int]]) -> None:
        """When message arrives, memory must hold pattern(seed, size) at offset, for each (offset, size, seed)."""
        self.expected[message] = pieces

    def fill(self, offset: int, size: int, seed: int) -> None:
        self.memory[offset : offset + size] = pattern(seed, size)

    def read(self, offset: int, size: int) -> bytes:
        return self.memory[offset : offset + size].tobytes()

    def store(self, offset: int, data: bytes) -> None:
        self.memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def count(self, offset: int, size: int, value: int) -> int:
        return int((self.memory[offset : offset + size] == value).sum())

    # Peers and writes

    def add_peer(self, metadata: bytes) -> str:
        return self.connector.add_peer(metadata)

    def remove_peer(self, name: str) -> None:
        self.connector.remove_peer(name)

    def post(self, number: int, peer: str, local: Ranges, remote: Ranges, message: bytes) -> None:
        self.writes[number] = self.connector.post(peer, local, remote, message)

    def poll(self, number: int, times: int = 1) -> bool:
        return [self.writes[number].poll() for _ in range(times)][-1]

    def finish(self, numbers: list[int]) -> None:
        """Poll the writes, in the given order over and over, until all are done or one raises."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        numbers = list(numbers)
        while numbers:
            numbers = [number for number in numbers if not self.writes[number].poll()]
            assert time.monotonic() < deadline, f"writes {numbers} are not done after {DEADLINE_SECONDS} s"
            if numbers:
                time.sleep(0.0001)

    def release(self, number: int) -> None:
        self.writes[number].release()

    def wait(self, count: int) -> list[tuple[str, bytes, bool]]:
        """All arrivals so far as (sender, message, memory was right), once there are at least `count`."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(self.arrived) < count:
            assert time.monotonic() < deadline, f"{len(self.arrived)} of {count} arrived in {DEADLINE_SECONDS} s"
            self.listen_once()
        return self.arrived

    def listen_once(self) -> None:
        self._note(self.connector.notifications())

    def drain(self, polls_max: int = 10_000) -> None:
        self._note(self.connector.drain(polls_max))

    def _note(self, arrivals: list[tuple[str, bytes]]) -> None:
        for sender, message in arrivals:
            pieces = self.expected.get(message, [])
            right = all(
                np.array_equal(self.memory[offset : offset + size], pattern(seed, size))
                for offset, size, seed in pieces
            )
            self.arrived.append((sender, message, right))

    # The connector itself

    def close(self) -> tuple[bool, bool]:
        """What close said, and whether the connector still keeps the memory."""
        memory = weakref.ref(self.memory)
        del self.memory
        self.listening = False
        closed = self.connector.close()
        assert self.connector.close() is closed, "a second close must say the same"
        return closed, memory() is not None

    def register(self, name: str, offset: int, size: int, memory: str = "DRAM", device: int = 0) -> None:
        self.connector.register(name, self.address + offset, size, memory, device)

    def metadata(self) -> bytes:
        return self.connector.metadata()

    def connections(self) -> list[tuple[int, bool, bool]]:
        return [(link.unread, link.ended, link.orphaned) for link in nixl._connections().values()]

    def listeners(self) -> list[str]:
        """Local addresses, as the kernel writes them, of the listening TCP sockets of this process."""
        paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        own = {os.stat(path).st_ino for path in paths if os.path.exists(path)}
        with open("/proc/self/net/tcp") as lines:
            rows = [line.split() for line in lines][1:]
        return [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[9]) in own]

    def tensors(self) -> tuple[list[int], list[str]]:
        """Write one tensor over another between two connectors; what arrived, and which tensors were refused."""
        import torch

        writer, target = NixlConnector(), NixlConnector()
        source, destination = torch.arange(600, dtype=torch.int16).view(2, 300), torch.zeros(900, dtype=torch.int16)
        writer.register_tensor("source", source)
        target.register_tensor("destination", destination)
        refused = []
        for tensor in (source.T, source[:, 0], source[:0]):
            try:
                writer.register_tensor("view", tensor)
            except ValueError as error:
                refused.append(str(error))
        peer = writer.add_peer(target.metadata())
        local = np.array([[source.data_ptr(), 1200, 0]], np.uint64)
        remote = np.array([[destination.data_ptr() + 200, 1200, 0]], np.uint64)
        write = writer.post(peer, local, remote, b"tensor")
        message: list[tuple[str, bytes]] = []
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (write.poll() and message):
            message += target.notifications()
            assert time.monotonic() < deadline
        assert message == [(writer.name, b"tensor")] and writer.close() and target.close()
        return destination.tolist(), refused

    def abandon(self, size: int) -> tuple[bool, bool]:
        """Whether memory outlives a connector that nobody refers to, and then one that was closed."""
        alive = []
        for closed in (False, True):
            connector, memory = NixlConnector(), np.zeros(size, np.uint8)
            connector.register("memory", memory.ctypes.data, size, "DRAM", 0, owner=memory)
            references = (weakref.ref(memory), weakref.ref(connector))
            if closed:
                connector.close()
            del connector, memory
            gc.collect()
            alive.append(any(reference() is not None for reference in references))
        return alive[0], alive[1]

    def hold_unread(self, on: bool) -> None:
        """Have a TCP connection with a byte in it that nobody reads; or end it."""
        if not on:
            for link in self.sockets:
                link.close()
            return
        server = socket.create_server(("127.0.0.1", 0))
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
        there.sendall(b"?")
        self.sockets = [server, there, here]

    def from_thread(self, operation: str) -> str:
        """Call an operation from a second thread; return what it raised."""
        raised: list[str] = []

        def call() -> None:
            try:
                getattr(self.connector, operation)()
            except BaseException as error:
                raised.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return raised[0] if raised else ""

    def from_fork(self) -> int:
        """Call from a forked child: 0 when it was refused as it should."""
        child = os.fork()
        if child == 0:
            try:
                self.connector.notifications()
            except AssertionError:
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def threads(self) -> tuple[int, list[str]]:
        """Number of threads in the process, and the NIXL and torch modules it has loaded."""
        return len(os.listdir("/proc/self/task")), [name for name in sys.modules if name in ("torch", "nixl")]


class RemoteError(Exception):
    """A step raised. kind: the class; text: its message; posted: of a TransportError, else None."""

    def __init__(self, kind: str, text: str, posted: bool | None, trace: str) -> None:
        super().__init__(kind, text, posted, trace)
        self.kind, self.text, self.posted, self.trace = kind, text, posted, trace

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} (posted={self.posted})\n{self.trace}"


class Peer:
    """One such process, seen from the test: `peer.method(...)` runs `Node.method` there. Use it in a `with`."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._pipe, theirs = Pipe()
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "NIXL_"))}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
            env=clean | environment,
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        theirs.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Node, name):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self._pipe.send((name, arguments))
            if not self._pipe.poll(DEADLINE_SECONDS + 30):
                raise TimeoutError(f"{name} gave no answer")
            try:
                error, value = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                raise AssertionError(f"the process died in {name}: {self.end()}") from None
            if error is not None:
                raise RemoteError(*error)
            return value

        return call

    def stop(self) -> None:
        """SIGSTOP, and wait until the kernel has stopped it."""
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            with open(f"/proc/{self.process.pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "T":
                    return
            assert time.monotonic() < deadline, "the process does not stop"
            time.sleep(0.001)

    def kill(self) -> None:
        """SIGKILL and reap: on return the kernel has closed all its connections."""
        self.process.kill()
        self.process.wait()

    def end(self) -> tuple[int, bytes, bytes]:
        """Ask it to leave, or kill it; its exit status and whatever it wrote to stdout and stderr."""
        self._pipe.close()
        try:
            output, errors = self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, errors = self.process.communicate()
        except ValueError:  # it was ended before
            return self.process.returncode, b"", b""
        return self.process.returncode, output, errors


def serve(pipe: Connection) -> None:
    """Carry out steps until the other end closes."""
    node = Node()
    while True:
        try:
            if not pipe.poll(0.0005):
                if node.listening:
                    node.listen_once()
                continue
            name, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[object, object] = (None, getattr(node, name)(*arguments))
        except Exception as error:
            posted = error.posted if isinstance(error, TransportError) else None
            answer = ((type(error).__name__, str(error), posted, traceback.format_exc()), None)
        pipe.send(answer)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: even a stopped node ends with the test
    if os.getppid() == int(sys.argv[2]):
        serve(Connection(int(sys.argv[1])))
