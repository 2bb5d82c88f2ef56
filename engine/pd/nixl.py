"""Write memory of one process into memory of another with NIXL. The only module that imports NIXL.

A shell without judgement: it registers, posts, polls and reports. Which pages may be read, written or used
again is decided elsewhere, from what this module reports and from nothing it might suppose:

- `Write.poll() is True`, or a message in `notifications()` at the peer, proves that every byte of that write landed.
- Nothing here stops bytes. After a release, an error, `remove_peer` or `close`, bytes may go on landing.
- A peer that hangs is never reported: a write then stays unfinished, for ever. Deadlines are the caller's.
- A target must go on calling `notifications()`, or the writer's poll never becomes True, even when all bytes are there.

One thread owns a connector; a second one would corrupt memory inside NIXL. There is no progress thread: NIXL's
own one spins, a full core for each idle agent.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import uuid
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.pd.segments import Ranges

if TYPE_CHECKING:
    import torch

ENVIRONMENT = {
    "UCX_NET_DEVICES": "lo",  # otherwise UCX listens on every interface, without authentication
    "UCX_LOG_LEVEL": "fatal",  # UCX logs to stdout
    "UCX_DEBUG_SIGNO": "0",  # otherwise UCX takes SIGHUP over, which then no longer ends the process
    "NIXL_LOG_LEVEL": "FATAL",  # its details double what TransportError says, on stdout and stderr
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # bounds memory that stays pinned after its release
}
"""Defaults, read once by the libraries when they are loaded; what the environment already says wins."""

MERGE_FROM_DESCRIPTORS = 8
"""From here on a write is built from prepared lists: only those join ranges that touch, at about 5 us more per write.

benchmarks/transfer.py measures it: with touching ranges of 4 KiB, 8 break even over CMA and gain a third over TCP, 64
take less than half the time on both.
"""

QUIET_POLLS = 32
"""Polls in a row without anything unread that `drain` asks of a connection whose writer may live."""

QUIET_INTERVAL_SECONDS = 0.001
"""Pause between two polls of `drain`: lets the kernel hand over what it still holds for the connection."""


class TransportError(RuntimeError):
    """NIXL refused or lost something.

    peer: name of the other agent, or of this one where no peer takes part. cause: class and text of NIXL's exception,
    which is also the __cause__, or what was found wrong.
    posted: False proves that no byte of this operation was ever sent. True proves nothing about its bytes:
    they may have landed, or land later; and every other write to that peer is lost as well.
    """

    def __init__(self, peer: str, operation: str, cause: str, posted: bool = False) -> None:
        super().__init__(peer, operation, cause, posted)
        self.peer, self.operation, self.cause, self.posted = peer, operation, cause, posted

    def __str__(self) -> str:
        return f"{self.operation} failed with agent {self.peer}: {self.cause}"


class Region(NamedTuple):
    """One registration. address and size in bytes; descriptors: NIXL's own list; owner keeps the memory alive."""

    address: int
    size: int
    memory: str
    device: int
    descriptors: Any
    owner: object


class Write:
    """One posted write. The connector keeps it alive until it is done, failed or released."""

    __slots__ = ("_connector", "_failure", "_handle", "_released", "done", "peer")

    def __init__(self, connector: NixlConnector, peer: str, handle: Any) -> None:
        self._connector, self.peer, self._handle = connector, peer, handle
        self._failure = ""  # text, not the exception: its traceback would keep the callers' variables alive
        self._released = False
        self.done = False

    def poll(self) -> bool:
        """True when every byte has landed at the peer; False while that is unknown.

        Must be called again until it is True: the peer's notification leaves from this call. Once True, always
        True; once it raised TransportError it raises an equal one again. Raises RuntimeError after a release
        that came before the end, since the outcome can no longer be known.
        """
        self._connector._check_owner("poll")  # even where the answer is known: a second thread is a mistake
        if self.done:
            return True
        if self._failure:
            raise TransportError(self.peer, "write", self._failure, posted=True)
        if self._released:
            raise RuntimeError(f"the write to {self.peer} was released before its end; its outcome cannot be known")
        self._connector._check("poll", usable=False)
        self._connector._advance(self, first=False)
        return self.done

    def release(self) -> None:
        """Forget the handle, and never claim that the bytes stopped.

        A write that was not done goes on: it reads the source, as it is at that later moment, and lands at the
        peer, only the notification is never sent. Source and target pages stay in use, with nothing left that
        could end that use but the death of both processes or the drain after this one's death.
        """
        self._connector._check_owner("release")
        self._released = True
        self._connector._forget(self)


class NixlConnector:
    """One NIXL agent over UCX: the registrations, peers, writes and notifications of one process.

    Every call must come from the thread and process that made it (AssertionError), and before close (RuntimeError).
    It lives, with all registered memory, until `close`, even where nothing refers to it any more: peers know it.
    Raises TransportError where UCX cannot be had.
    """

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self._owner = (os.getpid(), threading.get_ident())
        self._peers: set[str] = set()
        self._regions: dict[str, Region] = {}
        self._open: set[Write] = set()
        self._unsettled = 0
        self._unusable = ""
        self._closed = False
        self._backlog: list[tuple[str, bytes]] = []
        api, self._errors = _load()
        refusals: tuple[type[Exception], ...] = (*self._errors, RuntimeError)
        try:
            self._agent = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        except refusals as error:
            raise TransportError(self.name, "create agent", _explain_create(error)) from error
        if "UCX" not in self._agent.backends:
            raise TransportError(
                self.name,
                "create agent",
                f"the UCX plugin is missing; NIXL found {sorted(self._agent.plugin_list)} "
                f"with NIXL_PLUGIN_DIR={os.environ.get('NIXL_PLUGIN_DIR', '')!r}",
            )
        _LIVE.add(self)

    def metadata(self) -> bytes:
        """What a writer needs to reach this agent and the regions registered so far; register first."""
        self._check("metadata")
        try:
            return bytes(self._agent.get_agent_metadata())
        except self._errors as error:
            raise TransportError(self.name, "metadata", _cause(error)) from error

    def register(self, name: str, address: int, size: int, memory: str, device: int, owner: object = None) -> None:
        """Make [address, address + size) readable for own writes and writable for every peer that knows it.

        name: of the region, once per connector. memory: "DRAM" or "VRAM". device: its index, 0 for DRAM.
        owner: whatever keeps the memory alive; held until a `close` that found nothing in flight, else for ever.
        Nothing proves here that the memory exists: unmapped addresses register well and fail, or kill, later.
        Raises ValueError, with nothing changed, where a region repeats or overlaps another or has no bytes.
        Raises TransportError where NIXL refuses; the agent's metadata may then be spoilt, so from there on
        metadata, register, add_peer and post raise it again, and a new connector must be made. Open writes and
        notifications go on.
        """
        self._check("register")
        if memory not in ("DRAM", "VRAM"):
            raise ValueError(f"memory of region {name!r} is {memory!r}, must be 'DRAM' or 'VRAM'")
        if address < 1 or size < 1:
            raise ValueError(f"region {name!r} is {size} bytes at {address}, must be at least 1 byte at least at 1")
        if device < 0 or (memory == "DRAM" and device):
            raise ValueError(f"device of region {name!r} is {device}, must be 0 for DRAM and not negative for VRAM")
        for other_name, other in self._regions.items():
            if name == other_name:
                raise ValueError(f"region {name!r} is already registered, {other.size} bytes at {other.address}")
            same_memory = (memory, device) == (other.memory, other.device)
            if same_memory and address < other.address + other.size and other.address < address + size:
                raise ValueError(
                    f"region {name!r}, {size} bytes at {address}, overlaps {other_name!r}, "
                    f"{other.size} bytes at {other.address}"
                )
        try:
            descriptors = self._agent.register_memory([(address, size, device, "")], memory)
        except self._errors as error:
            self._unusable = f"agent unusable: region {name!r} ({memory}:{device}) was refused: {_cause(error)}"
            raise TransportError(self.name, "register", self._unusable) from error
        self._regions[name] = Region(address, size, memory, device, descriptors, owner)

    def register_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Register a tensor's bytes and keep the tensor. Raises ValueError unless contiguous and not empty."""
        if not tensor.is_contiguous() or not tensor.numel():
            raise ValueError(f"tensor {name!r} of shape {tuple(tensor.shape)} must be contiguous and not empty")
        device = tensor.device
        memory = "DRAM" if device.type == "cpu" else "VRAM"
        size = tensor.numel() * tensor.element_size()
        self.register(name, tensor.data_ptr(), size, memory, max(0, tensor.get_device()), owner=tensor)

    def add_peer(self, metadata: bytes) -> str:
        """Connect to an agent whose `metadata()` this is; return its name.

        Needed by a writer only: a target gets notifications from writers it never added.
        Raises TransportError for bytes that are no metadata, for this agent's own, for an agent that cannot be
        reached, and for one that is known already under another address (`remove_peer` it first).
        """
        self._check("add_peer")
        try:
            added = self._agent.add_remote_agent(metadata)
        except self._errors as error:
            raise TransportError("of the given metadata", "add_peer", _cause(error)) from error
        name = added.decode() if isinstance(added, bytes) else str(added)
        self._peers.add(name)
        return name

    def remove_peer(self, name: str) -> None:
        """Forget an agent: its open writes fail at their next poll, but their bytes may still land.

        Needed, with `add_peer`, before a peer can be used again after any TransportError of a posted write.
        """
        self._check("remove_peer", usable=False)
        self._known("remove_peer", name)
        self._peers.discard(name)
        try:
            self._agent.remove_remote_agent(name)
        except self._errors as error:
            raise TransportError(name, "remove_peer", _cause(error)) from error

    def post(
        self,
        peer: str,
        local: Ranges,
        remote: Ranges,
        message: bytes,
        local_memory: str = "DRAM",
        remote_memory: str = "DRAM",
    ) -> Write:
        """Start writing local ranges over remote ones; `message` reaches the peer after the last byte.

        local, remote: [n, 3] uint64 rows (address, bytes, device), row i to row i, n >= 1, each inside one
        registered region of its side. message: not empty; the only name the write has at the peer, since
        notifications come in any order. The sources must be complete: NIXL knows no device streams.
        May block while this process copies (one host), so bound the bytes.
        Raises ValueError for malformed ranges. Raises TransportError with posted=False where nothing was sent
        (unknown peer, range outside a region), with posted=True where some bytes may land.
        """
        self._check("post")
        if not message:
            raise ValueError("a write without a message would land unnoticed")
        for memory in (local_memory, remote_memory):
            if memory not in ("DRAM", "VRAM"):
                raise ValueError(f"memory is {memory!r}, must be 'DRAM' or 'VRAM'")
        _check_ranges(local, remote)
        self._known("post", peer)
        try:
            handle = self._build(peer, local, remote, message, local_memory, remote_memory)
        except self._errors as error:
            raise TransportError(peer, "post", self._explain_ranges(local, local_memory, error)) from error
        write = Write(self, peer, handle)
        self._open.add(write)
        self._advance(write, first=True)
        return write

    def notifications(self) -> list[tuple[str, bytes]]:
        """Messages that arrived since the last call, as (sender's name, message); also lets writes progress.

        Their order says nothing. The name is what the sender says it is, not proved.
        """
        self._check("notifications", usable=False)
        try:
            arrived = self._agent.get_new_notifs()
        except self._errors as error:
            raise TransportError(self.name, "notifications", _cause(error)) from error
        taken, self._backlog = self._backlog, []
        return taken + [(sender, bytes(message)) for sender, messages in arrived.items() for message in messages]

    def drain(self, polls_max: int = 10_000) -> list[tuple[str, bytes]]:
        """Take in all that the kernel still holds from writers that are dead; return what was notified meanwhile.

        Call it at a target after a writer's process has ended (reaped, not merely signalled): over TCP bytes of
        a dead writer land at the next poll, however late that is. On return each TCP connection that this process
        had is closed, or its other end has closed it and everything was read, or its other end lives and nothing
        was unread in the last QUIET_POLLS polls. Bytes of living writers may land later.
        Raises TransportError after polls_max polls (about 1 ms each) without that: nothing is proved, keep the
        memory; what was notified comes with the next call.

        Other transports: a same-host copy (CMA) is made by the writer itself and ends with it. RDMA: not covered.
        """
        self._check("drain", usable=False)
        arrived: list[tuple[str, bytes]] = []
        calm: dict[int, int] = {}
        busy: list[int] = []
        for polls in range(1, polls_max + 1):
            arrived += self.notifications()
            open_here = {inode: link for inode, link in _connections().items() if not link.ended}
            calm = {inode: 0 if link.unread else calm.get(inode, 0) + 1 for inode, link in open_here.items()}
            busy = [inode for inode, link in open_here.items() if link.orphaned or calm[inode] < QUIET_POLLS]
            if polls >= QUIET_POLLS and not busy:
                return arrived
            time.sleep(QUIET_INTERVAL_SECONDS)
        self._backlog = arrived
        raise TransportError(
            self.name, "drain", f"{len(busy)} connections may still deliver something after {polls_max} polls"
        )

    def close(self) -> bool:
        """End the agent. True: all regions are deregistered and no longer kept here. Further calls do nothing.

        False: some write of this connector failed, was released early or is not done, so its memory may still be
        read; agent, registrations and owners are then kept until the process ends. Says nothing about writes *into*
        this memory: end the writers and `drain` first, for a target must outlive every writer that knows it.
        """
        self._check_owner("close")
        if self._closed:
            return not self._unsettled
        self._closed = True
        self._unsettled += len(self._open)
        if self._unsettled:
            return False
        for name, region in self._regions.items():
            try:
                self._agent.deregister_memory(region.descriptors)
            except self._errors as error:
                self._unsettled += 1
                raise TransportError(self.name, f"deregister region {name!r}", _cause(error)) from error
        self._regions.clear()
        del self._agent
        _LIVE.discard(self)
        return True

    def _build(
        self, peer: str, local: Ranges, remote: Ranges, message: bytes, local_memory: str, remote_memory: str
    ) -> Any:
        agent = self._agent
        if len(local) < MERGE_FROM_DESCRIPTORS:
            return agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(local, local_memory),
                agent.get_xfer_descs(remote, remote_memory),
                peer,
                message,
            )
        source = agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, local_memory)
        target = agent.prep_xfer_dlist(peer, remote, remote_memory)
        rows = np.arange(len(local), dtype=np.int32)
        handle = agent.make_prepped_xfer("WRITE", source, rows, target, rows, message)
        source.release()
        target.release()
        return handle

    def _advance(self, write: Write, first: bool) -> None:
        """Post or check one write, and settle it where that ends it."""
        agent, cause = self._agent, None
        try:
            state = agent.transfer(write._handle) if first else agent.check_xfer_state(write._handle)
        except self._errors as error:
            state, cause = _cause(error), error
        if state == "PROC":
            return
        write.done = state == "DONE"
        if not write.done:
            write._failure = state if cause is not None else f"NIXL state {state!r}"
        self._forget(write)
        if not write.done:
            raise TransportError(write.peer, "write", write._failure, posted=True) from cause

    def _forget(self, write: Write) -> None:
        if write not in self._open:
            return
        self._open.discard(write)
        self._unsettled += not write.done
        handle, write._handle = write._handle, None
        with suppress(*self._errors):  # it then frees itself later; nothing hangs on the release
            handle.release()

    def _known(self, operation: str, peer: str) -> None:
        if peer not in self._peers:
            raise TransportError(peer, operation, f"unknown peer; known: {sorted(self._peers) or 'none'}")

    def _explain_ranges(self, local: Ranges, memory: str, error: Exception) -> str:
        """Say which side NIXL could not find: its own message is a bare status name."""
        cause = _cause(error)
        inside = np.zeros(len(local), bool)
        for region in self._regions.values():
            inside |= (
                (memory == region.memory)
                & (local[:, 2] == region.device)
                & (local[:, 0] >= region.address)
                & (local[:, 0] + local[:, 1] <= region.address + region.size)
            )
        if inside.all():
            return f"{cause}; every local range is registered, so the peer is gone or has not published a remote range"
        address, size, device = local[~inside][0].tolist()
        return f"{cause}; local range of {size} bytes at {address} on {memory}:{device} lies in no single region"

    def _check_owner(self, operation: str) -> None:
        caller = (os.getpid(), threading.get_ident())
        if caller != self._owner:
            raise AssertionError(
                f"{operation} from (process, thread) {caller}; connector {self.name} belongs to {self._owner}"
            )

    def _check(self, operation: str, usable: bool = True) -> None:
        self._check_owner(operation)
        if self._closed:
            raise RuntimeError(f"{operation} on connector {self.name}, which is closed")
        if usable and self._unusable:
            raise TransportError(self.name, operation, self._unusable)


_LIVE: set[NixlConnector] = set()
"""Connectors that are not closed, or whose writes are unsettled: those stay until the process ends."""


def _load() -> tuple[ModuleType, tuple[type[Exception], ...]]:
    """NIXL's Python API and its exception classes, which have no common base.

    The builds are imported directly where possible, since the package `nixl` may import torch to choose one.
    """
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    builds = [f"nixl_cu{cuda.split('.')[0]}"] if cuda else []
    for build in (*builds, "nixl_cu13", "nixl_cu12", "nixl"):
        try:
            api = importlib.import_module(f"{build}._api")
        except ModuleNotFoundError as error:
            if error.name != build and not build == "nixl":
                raise
            continue
        bindings = api.nixlBind
        errors = [value for value in vars(bindings).values() if isinstance(value, type)]
        return api, tuple(value for value in errors if issubclass(value, Exception))
    raise ImportError("NIXL is not installed: none of nixl-cu13, nixl-cu12, nixl can be imported")


def _explain_create(error: Exception) -> str:
    names = ("UCX_TLS", "UCX_NET_DEVICES", "NIXL_PLUGIN_DIR")
    settings = {name: os.environ[name] for name in names if name in os.environ}
    return f"{_cause(error)}; UCX could not start with {settings}"


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _check_ranges(local: Ranges, remote: Ranges) -> None:
    for side, ranges in (("local", local), ("remote", remote)):
        if ranges.dtype != np.uint64 or ranges.ndim != 2 or ranges.shape[1] != 3 or not len(ranges):
            raise ValueError(f"{side} ranges are {ranges.dtype}{list(ranges.shape)}, must be uint64[n >= 1, 3]")
    if len(local) != len(remote):
        raise ValueError(f"{len(local)} local ranges, but {len(remote)} remote ones")
    wrong = np.flatnonzero((local[:, 1] != remote[:, 1]) | (local[:, 1] == 0))
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(f"range {row} has {local[row, 1]} bytes here and {remote[row, 1]} there; must be equal, not 0")


class _Connection(NamedTuple):
    """One TCP connection of this process. unread: bytes (and end mark) that nobody took in yet.

    ended: the other end has closed it and everything was read. orphaned: the other end, on this host, has no
    process any more, but its kernel may still hold bytes for us.
    """

    unread: int
    ended: bool
    orphaned: bool


def _connections() -> dict[int, _Connection]:
    """The TCP connections of this process by inode, as Linux tells them; listening sockets are left out."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the directory's own descriptor is closed by now
        if link.startswith("socket:["):
            own.add(int(link[len("socket:[") : -1]))
    rows = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if os.path.exists(table):
            with open(table) as lines:
                rows += [line.split() for line in lines][1:]
    ends = {(row[1], row[2]): (int(row[9]), row[3]) for row in rows}
    found = {}
    for row in rows:
        inode, state, unread = int(row[9]), row[3], int(row[4].split(":")[1], 16)
        if inode in own and state != _LISTEN:
            closed_there = state in _CLOSED_BY_PEER
            inode_there, state_there = ends.get((row[2], row[1]), (None, ""))
            orphaned = not closed_there and inode_there == 0 and state_there != _ESTABLISHED
            found[inode] = _Connection(unread, closed_there and not unread, orphaned)
    return found


_ESTABLISHED, _LISTEN = "01", "0A"
_CLOSED_BY_PEER = ("07", "08", "09", "0B")
"""Close, close-wait, last-ack, closing: the peer's end mark, or its reset, has arrived."""
