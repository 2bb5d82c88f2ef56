"""NixlConnector between real processes over real NIXL: same-host copies (the default, CMA with TCP) and TCP alone.

No test decides by time: a stopped or silent target holds a write open for as long as the test needs.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nixl_peer import Peer, RemoteError, pattern

from engine.cache.geometry import PoolGeometry
from engine.pd.nixl import MERGE_FROM_DESCRIPTORS, NixlConnector, TransportError, Write, _check_ranges, _connections
from engine.pd.segments import Partition, Ranges, partitions

MIB = 1 << 20
TRANSPORTS = {"default": {}, "tcp": {"UCX_TLS": "tcp"}}
STARTED: list[Peer] = []


def start(environment: dict[str, str]) -> Peer:
    STARTED.append(Peer(environment))
    return STARTED[-1]


class Pair:
    """Two processes, writer and target, that the tests of one transport share; agents and memory are new per test."""

    def __init__(self, transport: str, writer: Peer, target: Peer) -> None:
        self.transport, self.environment = transport, TRANSPORTS[transport]
        self.writer, self.target = writer, target

    def connect(self, size: int = MIB) -> None:
        self.name, _, self.here = self.writer.start(size)
        self.peer, metadata, self.there = self.target.start(size)
        assert self.writer.add_peer(metadata) == self.peer

    def rows(self, pieces: list[tuple[int, int]], base: int | None = None) -> Ranges:
        """(offset, bytes) pieces of the writer's memory, or of the memory at base, as ranges."""
        start = self.here if base is None else base
        return np.array([[start + offset, size, 0] for offset, size in pieces], np.uint64)

    def post(self, number: int, pieces: list[tuple[int, int]], message: bytes) -> None:
        """Write pieces of the writer's memory to the same offsets of the target's."""
        self.writer.post(number, self.peer, self.rows(pieces), self.rows(pieces, self.there), message)


@pytest.fixture(scope="module", params=TRANSPORTS)
def processes(request: pytest.FixtureRequest) -> Iterator[tuple[str, Peer, Peer]]:
    with start(TRANSPORTS[request.param]) as writer, start(TRANSPORTS[request.param]) as target:
        yield request.param, writer, target
        for peer in (writer, target):
            assert peer.end() == (0, b"", b""), "a connector wrote to stdout or stderr, or its process failed"


@pytest.fixture
def pair(processes: tuple[str, Peer, Peer]) -> Pair:
    return Pair(*processes)


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    """Goal: the tests leave no process. Method: after the last one, every process that was started is reaped."""
    yield
    assert STARTED
    for peer in STARTED:
        assert peer.process.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(peer.process.pid, 0)


def scattered(seed: int, count: int, size: int, space: int) -> list[tuple[int, int]]:
    """count pieces of size bytes, anywhere in space, in any order, not touching."""
    slots = np.random.default_rng(seed).choice(space // (2 * size), count, replace=False)
    return [(int(slot) * 2 * size, size) for slot in slots]


@pytest.mark.parametrize("pieces", [1, MERGE_FROM_DESCRIPTORS - 1, MERGE_FROM_DESCRIPTORS, 300])
def test_bytes_arrive_where_they_should_and_nowhere_else(pair: Pair, pieces: int) -> None:
    """Goal: equal bytes. Method: scattered ranges, then a run that touches, by both ways of building a write."""
    pair.connect()
    pair.writer.fill(0, MIB, 5)
    lists = [
        scattered(pieces, pieces, 256, MIB // 2),
        [(MIB // 2 + 128 * number, 128) for number in range(pieces)],
    ]
    for number, chosen in enumerate(lists):
        pair.post(number, chosen, b"write %d" % number)
        pair.writer.finish([number])
    assert [message for _, message, _ in pair.target.wait(2)] == [b"write 0", b"write 1"]

    sent, expected = pattern(5, MIB), np.zeros(MIB, np.uint8)
    for offset, size in lists[0] + lists[1]:
        expected[offset : offset + size] = sent[offset : offset + size]
    assert pair.target.read(0, MIB) == expected.tobytes()


def test_ranges_may_touch_across_two_registrations(pair: Pair) -> None:
    """Goal: joined ranges never cross a registration. Method: two adjacent regions, one write of touching ranges."""
    size, half = MIB, MIB // 2
    _, _, here = pair.writer.start(size, [(0, half), (half, half)])
    peer, metadata, there = pair.target.start(size, [(0, half), (half, half)])
    pair.writer.add_peer(metadata)
    pair.writer.fill(0, size, 3)
    step = size // 32
    rows = np.array([[here + step * number, step, 0] for number in range(32)], np.uint64)
    pair.writer.post(0, peer, rows, rows + np.array([there - here, 0, 0], np.int64).astype(np.uint64), b"both")
    pair.writer.finish([0])
    pair.target.wait(1)
    assert pair.target.read(0, size) == pattern(3, size).tobytes()


def test_a_notification_comes_after_the_whole_payload(pair: Pair) -> None:
    """Goal: notified means landed. Method: the same ranges again and again, all bytes compared on each arrival."""
    pair.connect(8 * MIB)
    pieces = scattered(1, 60, 65536, 8 * MIB)
    rounds = 12
    for number in range(rounds):
        message = b"round %d" % number
        for offset, size in pieces:
            pair.writer.fill(offset, size, number + offset // 65536)
        pair.target.expect(message, [(offset, size, number + offset // 65536) for offset, size in pieces])
        pair.post(number, pieces, message)
        pair.writer.finish([number])
        arrived = pair.target.wait(number + 1)
        assert arrived[-1] == (pair.name, message, True)
    assert len(arrived) == rounds


def test_many_writes_in_flight_complete_in_any_order(pair: Pair) -> None:
    """Goal: each write is notified once, after its own bytes. Method: 120 at once, polled last to first."""
    count, size = 120, 16384
    pair.connect(count * size)
    pair.target.listen(False)
    for number in range(count):
        pair.writer.fill(number * size, size, number)
        pair.target.expect(b"%d" % number, [(number * size, size, number)])
        middle = number * size + size // 2
        pair.post(number, [(number * size, size // 2 - 64), (middle - 64, size // 2 + 64)], b"%d" % number)
    assert not any(pair.writer.poll(number) for number in range(count)), "the target is silent: nothing can be done"
    pair.target.listen(True)
    pair.writer.finish(list(reversed(range(count))))

    arrived = pair.target.wait(count)
    assert sorted(int(message) for _, message, _ in arrived) == list(range(count))
    assert all(right for _, _, right in arrived)
    assert all(pair.writer.poll(number) for number in range(count)), "done stays done"


def test_a_silent_target_keeps_a_write_open(pair: Pair) -> None:
    """Goal: the target must call in for the writer to learn of the end. Method: stop listening, then listen."""
    pair.connect()
    pair.writer.fill(0, MIB, 1)
    pair.target.listen(False)
    pair.post(0, [(0, MIB)], b"late")
    assert pair.writer.poll(0, 500) is False
    pair.target.listen(True)
    pair.writer.finish([0])
    assert pair.target.wait(1) == [(pair.name, b"late", True)]


def test_a_killed_target_fails_every_write_to_it_and_no_other(pair: Pair) -> None:
    """Goal: the death of a target is an error at the writer, also after a restart. Method: stop, post, kill.

    A second target goes on; a restarted one is a new agent, reached under its new name.
    """
    pair.connect(4 * MIB)
    pair.writer.fill(0, 4 * MIB, 1)
    with start(pair.environment) as victim:
        name, metadata, there = victim.start(4 * MIB)
        pair.writer.add_peer(metadata)
        whole = pair.rows([(0, 4 * MIB)])
        pair.writer.post(0, name, whole, pair.rows([(0, 4 * MIB)], there), b"first")
        pair.writer.finish([0])
        victim.stop()
        for number in (1, 2):
            pair.writer.post(number, name, whole, pair.rows([(0, 4 * MIB)], there), b"%d" % number)
        assert not pair.writer.poll(1, 50) and not pair.writer.poll(2, 50)
        victim.kill()

    errors = []
    for number in (1, 2):
        with pytest.raises(RemoteError) as caught:
            pair.writer.finish([number])
        errors.append(caught.value)
        with pytest.raises(RemoteError) as again:
            pair.writer.poll(number)
        assert again.value.text == caught.value.text, "the end stays what it was"
    for error in errors:
        assert (error.kind, error.posted) == ("TransportError", True)
        assert name in error.text and "nixlRemoteDisconnectError" in error.text
    with pytest.raises(RemoteError) as caught:
        pair.writer.post(3, name, whole, pair.rows([(0, 4 * MIB)], there), b"3")
        pair.writer.finish([3])
    assert caught.value.kind == "TransportError"

    pair.post(4, [(0, 4 * MIB)], b"to the healthy one")
    pair.writer.finish([4])
    assert pair.target.wait(1)[-1][1] == b"to the healthy one"

    pair.writer.remove_peer(name)
    with start(pair.environment) as successor:
        fresh, metadata, there = successor.start(4 * MIB)
        assert fresh != name
        assert pair.writer.add_peer(metadata) == fresh
        successor.expect(b"again", [(0, 4 * MIB, 1)])
        pair.writer.post(5, fresh, whole, pair.rows([(0, 4 * MIB)], there), b"again")
        pair.writer.finish([5])
        assert successor.wait(1) == [(pair.name, b"again", True)]
        pair.writer.remove_peer(fresh)
    assert pair.writer.close() == (False, True), "writes that failed keep the memory"


def test_after_a_writer_died_a_drain_leaves_memory_stable(pair: Pair) -> None:
    """Goal: a target outlives its writer and can know when no byte of it can land. Method: kill it in flight.

    Over TCP bytes of the dead writer land at the first poll after its death, here inside the drain.
    """
    size = 32 * MIB
    pair.connect(size)
    pair.writer.fill(0, size, 9)
    with start(pair.environment) as victim:
        _, _, here = victim.start(size)
        victim.add_peer(pair.target.metadata())
        victim.fill(0, size, 7)
        victim.post(0, pair.peer, pair.rows([(0, 8)], here), pair.rows([(0, 8)], pair.there), b"hello")
        victim.finish([0])
        assert [message for _, message, _ in pair.target.wait(1)] == [b"hello"]
        pair.target.listen(False)
        victim.post(1, pair.peer, pair.rows([(0, size)], here), pair.rows([(0, size)], pair.there), b"never")
        assert victim.poll(1, 200) is False
        victim.kill()

    landed = [size - pair.target.count(0, size, 0)]
    orphaned = [link for link in pair.target.connections() if link[2]]
    pair.target.drain()
    landed.append(size - pair.target.count(0, size, 0))
    for _ in range(20):
        pair.target.listen_once()
        assert size - pair.target.count(0, size, 0) == landed[1]
    if pair.transport == "tcp":
        assert landed[0] == 8 < landed[1] < size, "bytes of a dead writer land when the target next polls"
        assert orphaned, "before the drain the dead end is seen to hold bytes"
    else:
        assert landed == [size, size], "the writer itself copied everything before it died"
    assert not any(ended or orphan for _, ended, orphan in pair.target.connections())
    assert [message for _, message, _ in pair.target.wait(0)] == [b"hello"], "no notification of the lost write"

    pair.target.listen(True)
    pair.target.expect(b"after", [(0, size, 9)])
    pair.post(0, [(0, size)], b"after")
    pair.writer.finish([0])
    assert pair.target.wait(2)[-1] == (pair.name, b"after", True)
    assert pair.target.close() == (True, False)


def test_release_does_not_stop_bytes(pair: Pair) -> None:
    """Goal: document that a released write goes on. Method: release it in flight, change the source, look.

    A small write behind it ends only after all earlier bytes of the same connection have landed.
    """
    size = 32 * MIB
    pair.connect(size + 64)
    pair.writer.fill(0, size, 2)
    pair.target.listen(False)
    pair.post(0, [(0, size)], b"released")
    assert pair.writer.poll(0) is False
    pair.writer.release(0)
    pair.writer.release(0)
    with pytest.raises(RemoteError, match="released before its end"):
        pair.writer.poll(0)
    pair.writer.fill(0, size, 200)
    landed = size - pair.target.count(0, size, 0)
    pair.target.listen(True)
    pair.post(1, [(size, 8)], b"behind it")
    pair.writer.finish([1])

    data = np.frombuffer(pair.target.read(0, size), np.uint8)
    assert (data != 0).all(), "the released write landed to the last byte"
    if pair.transport == "tcp":
        assert landed == 0, "all of it landed after the release"
        assert (data == pattern(200, size)).any() and (data != pattern(2, size)).any(), "as the source was later"
    assert [message for _, message, _ in pair.target.wait(1)] == [b"behind it"], "and was never notified"
    assert pair.writer.close() == (False, True), "a write released in flight keeps its source memory"


def test_page_tables_to_pages(pair: Pair) -> None:
    """Goal: segments and connector fit. Method: two chunks of a request from one pool to another, then the oracle.

    The second chunk adds no token: the hidden row alone is its only partition.
    """
    sides = []
    for peer, blocks in ((pair.writer, 12), (pair.target, 20)):
        pool_bytes = blocks * 3 * 4 * 32
        hidden = 2 * pool_bytes + 128
        regions = [(0, pool_bytes), (pool_bytes, pool_bytes), (hidden, 4 * 96)]
        name, metadata, address = peer.start(hidden + 4 * 96, regions)
        sides.append(
            PoolGeometry(
                key_ptr=address,
                value_ptr=address + pool_bytes,
                hidden_ptr=address + hidden,
                hidden_bytes=96,
                device=0,
                memory="DRAM",
                num_blocks=blocks,
                block_size=4,
                num_layers=3,
                planes=2,
                block_bytes=3 * 4 * 32,
                layer_bytes=4 * 32,
                token_bytes=32,
                staging_slots=4,
            )
        )
    source, target = sides
    pair.writer.add_peer(metadata)
    size_here, size_there = (side.hidden_ptr + 4 * 96 - side.key_ptr for side in sides)
    pair.writer.fill(0, size_here, 11)
    memory, expected = pattern(11, size_here), np.zeros(size_there, np.uint8)
    here, there = [[4, 5, 0, 9], [6, 2, 7, 8]], [[14, 15, 3, 1], [0, 2, 17, 18]]

    def move(number: int, start: int, end: int, hidden: tuple[int, int] | None) -> list[Partition]:
        parts = partitions(source, here, target, there, start, end, hidden, 1024, 7)
        for offset, part in enumerate(parts):
            pair.writer.post(number + offset, name, part.local, part.remote, b"%d" % (number + offset))
        pair.writer.finish(list(range(number, number + len(parts))))
        for part in parts:
            for (local, size, _), (remote, _, _) in zip(part.local.tolist(), part.remote.tolist(), strict=True):
                to, of = remote - target.key_ptr, local - source.key_ptr
                expected[to : to + size] = memory[of : of + size]
        return parts

    first = move(0, 1, 14, None)
    assert len(first) > 3
    assert pair.target.wait(len(first)) and pair.target.read(0, size_there) == expected.tobytes()
    position = there[1][3] * target.block_bytes + 2 * target.layer_bytes + 1 * target.token_bytes
    known = here[1][3] * source.block_bytes + 2 * source.layer_bytes + 1 * source.token_bytes
    value = target.value_ptr - target.key_ptr, source.value_ptr - source.key_ptr
    assert pair.target.read(value[0] + position, 32) == memory[value[1] + known : value[1] + known + 32].tobytes(), (
        "token 13, last layer, plane 1"
    )
    (last,) = move(len(first), 14, 14, (3, 1))
    assert last.bytes == 96 and len(last.local) == 1
    assert pair.target.wait(len(first) + 1) and pair.target.read(0, size_there) == expected.tobytes()
    row = target.hidden_ptr - target.key_ptr + 96
    assert pair.target.read(row, 96) == memory[size_here - 96 :].tobytes()


def test_metadata_that_leads_nowhere_is_refused(pair: Pair) -> None:
    """Goal: bad metadata is an error, and harms nothing. Method: garbage, cut, empty, own; then a good write."""
    pair.connect()
    metadata = pair.target.metadata()
    own = pair.writer.metadata()
    for bad in (b"garbage", b"", metadata[: len(metadata) // 2], own):
        with pytest.raises(RemoteError) as caught:
            pair.writer.add_peer(bad)
        assert (caught.value.kind, caught.value.posted) == ("TransportError", False)
        assert "add_peer failed" in caught.value.text
    pair.post(0, [(0, 64)], b"fine")
    pair.writer.finish([0])
    assert pair.target.wait(1) == [(pair.name, b"fine", True)]


def test_an_unknown_peer_is_refused(pair: Pair) -> None:
    """Goal: nothing goes to a peer that was never added or was removed. Method: each, with every peer call."""
    pair.connect()
    rows = pair.rows([(0, 64)])
    for name in ("nobody", pair.peer):
        if name == pair.peer:
            pair.writer.remove_peer(name)
        with pytest.raises(RemoteError, match="unknown peer") as caught:
            pair.writer.post(0, name, rows, pair.rows([(0, 64)], pair.there), b"lost")
        assert (caught.value.kind, caught.value.posted) == ("TransportError", False) and name in caught.value.text
        with pytest.raises(RemoteError, match="unknown peer"):
            pair.writer.remove_peer(name)
    pair.writer.add_peer(pair.target.metadata())
    pair.post(1, [(0, 64)], b"found")
    pair.writer.finish([1])
    assert [message for _, message, _ in pair.target.wait(1)] == [b"found"]


def test_removing_a_peer_ends_its_open_writes_with_an_error(pair: Pair) -> None:
    """Goal: an open write never stays silent. Method: remove the peer under it, poll; the memory stays kept."""
    pair.connect()
    pair.target.listen(False)
    pair.post(0, [(0, MIB)], b"open")
    assert pair.writer.poll(0) is False
    pair.writer.remove_peer(pair.peer)
    with pytest.raises(RemoteError) as caught:
        pair.writer.finish([0])
    assert (caught.value.kind, caught.value.posted) == ("TransportError", True)
    assert pair.writer.close() == (False, True)
    pair.target.drain()


@pytest.mark.parametrize(
    ("side", "piece"),
    [("local", (MIB - 8, 16)), ("local", (-8, 16)), ("remote", (MIB - 8, 16)), ("remote", (-8, 16))],
)
def test_a_range_outside_every_region_is_refused_before_anything_is_sent(
    pair: Pair, side: str, piece: tuple[int, int]
) -> None:
    """Goal: a wrong address never reaches memory. Method: one wrong range of three, both builds, both sides."""
    pair.connect()
    pair.writer.fill(0, MIB, 1)
    for number, fine in enumerate(([(0, 16), (64, 16)], scattered(3, 20, 16, MIB))):
        wrong, right = [*fine, piece], [*fine, (32, 16)]
        local, remote = (wrong, right) if side == "local" else (right, wrong)
        with pytest.raises(RemoteError) as caught:
            pair.writer.post(number, pair.peer, pair.rows(local), pair.rows(remote, pair.there), b"wild")
        assert (caught.value.kind, caught.value.posted) == ("TransportError", False)
        assert ("lies in no single region" in caught.value.text) == (side == "local")
        assert ("every local range is registered" in caught.value.text) == (side == "remote")
    pair.post(9, [(512, 8)], b"behind it")
    pair.writer.finish([9])
    assert [message for _, message, _ in pair.target.wait(1)] == [b"behind it"]
    assert MIB - pair.target.count(0, MIB, 0) == 8


def test_a_region_is_registered_once(pair: Pair) -> None:
    """Goal: each byte has one registration. Method: same name, same bytes, overlaps, nothing; then a real one."""
    pair.writer.start(MIB, [(0, 4096), (8192, 4096)])
    for name, offset, size, message in (
        ("region 0", 4096, 16, "already registered"),
        ("b", 0, 4096, "overlaps 'region 0'"),
        ("b", 4095, 2, "overlaps 'region 0'"),
        ("b", 4096, 4097, "overlaps 'region 8192'"),
        ("b", 4096, 0, "is 0 bytes"),
    ):
        with pytest.raises(RemoteError, match=re.escape(message)) as caught:
            pair.writer.register(name, offset, size)
        assert caught.value.kind == "ValueError"
    with pytest.raises(RemoteError, match="must be 0 for DRAM"):
        pair.writer.register("b", 4096, 16, "DRAM", 1)
    with pytest.raises(RemoteError, match="must be 'DRAM' or 'VRAM'"):
        pair.writer.register("b", 4096, 16, "FILE")
    pair.writer.register("between", 4096, 4096)
    assert pair.writer.close() == (True, False)
    pair.writer.start(MIB)
    pair.target.start(MIB)


def test_a_failed_registration_makes_the_agent_unusable_but_open_writes_end(pair: Pair) -> None:
    """Goal: no metadata that may be spoilt leaves. Method: memory of an accelerator that is not there."""
    pair.connect()
    pair.target.listen(False)
    pair.writer.fill(0, MIB, 4)
    pair.post(0, [(0, MIB // 2)], b"open")
    steps: list[Callable[[], Any]] = [
        lambda: pair.writer.register("accelerator", -4 * MIB, MIB, "VRAM", 99),
        lambda: pair.writer.metadata(),
        lambda: pair.writer.register("more", MIB, 16),
        lambda: pair.writer.add_peer(pair.target.metadata()),
        lambda: pair.post(1, [(0, 8)], b"no"),
    ]
    for step in steps:
        with pytest.raises(RemoteError, match="agent unusable: region 'accelerator'") as caught:
            step()
        assert caught.value.kind == "TransportError"
    pair.target.listen(True)
    pair.writer.finish([0])
    assert pair.target.wait(1) == [(pair.name, b"open", True)]
    assert pair.writer.close() == (True, False)


def test_close_keeps_memory_while_a_write_is_open_and_only_then(pair: Pair) -> None:
    """Goal: no source memory goes away under a write. Method: close with one open, and after it is done."""
    pair.connect()
    pair.target.listen(False)
    pair.post(0, [(0, MIB)], b"open")
    assert pair.writer.close() == (False, True)
    for step in (lambda: pair.writer.poll(0), lambda: pair.writer.metadata(), lambda: pair.writer.drain()):
        with pytest.raises(RemoteError, match="which is closed") as caught:
            step()
        assert caught.value.kind == "RuntimeError"
    pair.connect()
    pair.post(0, [(0, MIB)], b"done")
    pair.writer.finish([0])
    assert pair.writer.close() == (True, False)
    assert pair.writer.poll(0) is True, "done stays done"
    assert pair.target.close() == (True, False)


def test_one_thread_and_one_process_own_a_connector(pair: Pair) -> None:
    """Goal: a second thread or a forked child is refused, loudly. Method: call from each; then from the owner."""
    pair.connect()
    for operation in ("metadata", "notifications", "drain", "close"):
        assert pair.writer.from_thread(operation).startswith(f"AssertionError: {operation} from (process, thread)")
    assert pair.writer.from_fork() == 0
    pair.post(0, [(0, 64)], b"mine")
    pair.writer.finish([0])
    assert pair.target.wait(1) == [(pair.name, b"mine", True)]


def test_no_progress_thread_and_no_torch(pair: Pair) -> None:
    """Goal: an idle agent costs no core, and loading NIXL no torch. Method: count threads, list modules."""
    pair.connect()
    before = pair.writer.threads()
    pair.writer.start(MIB)
    assert pair.writer.threads() == before, "threads do not grow with agents"
    assert before[1] == []


def test_tensors_are_written_and_views_with_holes_refused() -> None:
    """Goal: register_tensor registers just its bytes. Method: one tensor into the middle of another; bad views."""
    with start({}) as peer:
        arrived, refused = peer.tensors()
    assert arrived == [0] * 100 + list(range(600)) + [0] * 200
    assert len(refused) == 3 and all("must be contiguous and not empty" in text for text in refused)


def test_memory_stays_until_close_even_where_the_connector_is_forgotten() -> None:
    """Goal: memory that peers know never goes away by accident. Method: drop a connector, unclosed and closed."""
    with start({}) as peer:
        assert peer.abandon(4096) == (True, False)


def test_the_environment_defaults_are_in_force() -> None:
    """Goal: no listener beyond this host, and SIGHUP keeps its meaning. Method: list listeners; send SIGHUP."""
    with start({}) as peer:
        peer.start(4096)
        listeners = peer.listeners()
        assert listeners and set(listeners) == {"0100007F"}
        peer.process.send_signal(signal.SIGHUP)
        assert peer.process.wait(timeout=60) == -signal.SIGHUP


@pytest.mark.parametrize(
    ("plugins", "environment", "message"),
    [
        (None, {"UCX_TLS": "posix,self"}, "UCX could not start with {'UCX_TLS': 'posix,self'"),
        ([], {}, "No plugins available for NIXL, cannot start transfers!; UCX could not start with"),
        (["POSIX"], {}, "the UCX plugin is missing; NIXL found ['POSIX'] with NIXL_PLUGIN_DIR="),
    ],
)
def test_without_ucx_there_is_a_clear_error(
    tmp_path: Path, plugins: list[str] | None, environment: dict[str, str], message: str
) -> None:
    """Goal: a missing transport is said at once and by name. Method: transports and plugin folders without it."""
    if plugins is not None:
        installed = sorted(Path(np.__file__).parent.parent.glob(".nixl_cu*.mesonpy.libs/plugins"))[-1]
        for plugin in plugins:
            (tmp_path / f"libplugin_{plugin}.so").symlink_to(installed / f"libplugin_{plugin}.so")
        environment = environment | {"NIXL_PLUGIN_DIR": str(tmp_path)}
    with start(environment) as peer:
        with pytest.raises(RemoteError, match=re.escape(message)) as caught:
            peer.start(4096)
        assert caught.value.kind == "TransportError"


def test_ranges_are_checked_before_nixl_sees_them() -> None:
    """Goal: malformed ranges are refused by name. Method: one fault at a time."""
    fine = np.array([[4096, 16, 0], [8192, 8, 0]], np.uint64)
    _check_ranges(fine, fine + np.uint64(0))
    other = fine.copy()
    other[1, 1] = 9
    empty = fine.copy()
    empty[0, 1] = 0
    for local, remote, message in (
        (fine.astype(np.int64), fine, "local ranges are int64[2, 3]"),
        (fine, fine[:, :2], "remote ranges are uint64[2, 2]"),
        (fine[:0], fine[:0], "local ranges are uint64[0, 3]"),
        (fine, fine[:1], "2 local ranges, but 1 remote"),
        (fine, other, "range 1 has 8 bytes here and 9 there"),
        (empty, empty, "range 0 has 0 bytes here and 0 there"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            _check_ranges(local, remote)


class FakeNixl:
    """Stands in where real NIXL never goes: it says "ERR" instead of raising."""

    def check_xfer_state(self, handle: object) -> str:
        return "ERR"


def test_the_word_err_is_an_error_too() -> None:
    """Goal: an error that is said, not raised, is a TransportError. Method: a stand-in agent that says "ERR"."""
    connector = object.__new__(NixlConnector)
    vars(connector).update(
        name="me",
        _owner=(os.getpid(), threading.get_ident()),
        _agent=FakeNixl(),
        _errors=(ZeroDivisionError,),
        _open=set(),
        _unsettled=0,
        _unusable="",
        _closed=False,
    )
    write = Write(connector, "them", type("Handle", (), {"release": lambda self: None})())
    connector._open.add(write)
    for _ in range(2):
        with pytest.raises(TransportError, match="write failed with agent them: NIXL state 'ERR'") as caught:
            write.poll()
        assert caught.value.posted
    assert connector._unsettled == 1 and not connector._open


def test_connections_tell_a_dead_end_from_a_living_one() -> None:
    """Goal: what `drain` trusts is true of TCP itself. Method: a plain socket whose other end writes, then dies."""
    before = _connections()
    script = (
        "import socket, sys\n"
        "link = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "link.setblocking(False)\n"
        "sent = 0\n"
        "try:\n"
        "    while True: sent += link.send(bytes(65536))\n"
        "except BlockingIOError: print(sent, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        child = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", script, str(server.getsockname()[1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        stack.callback(child.kill)
        here, _ = server.accept()
        stack.enter_context(here)
        inode = os.fstat(here.fileno()).st_ino
        waiting = stack.enter_context(socket.create_connection(server.getsockname()))
        assert not _connections()[os.fstat(waiting.fileno()).st_ino].orphaned, "not accepted yet, but alive"
        waiting.sendall(b"last words")
        waiting.close()
        late = stack.enter_context(server.accept()[0])
        assert not _connections()[os.fstat(late.fileno()).st_ino].ended, "closed there, but not read yet"
        assert child.stdout is not None
        sent = int(child.stdout.readline())

        living = _connections()[inode]
        assert living.unread > 0 and not living.ended and not living.orphaned
        child.kill()
        child.wait()
        dead = _connections()[inode]
        assert dead.unread > 0 and dead.orphaned and not dead.ended
        here.settimeout(30)
        received = 0
        while data := here.recv(65536):
            received += len(data)
        assert received == sent, "the kernel delivers what a dead process has sent"
        read = _connections()[inode]
        assert read.unread == 0 and read.ended and not read.orphaned
        assert os.fstat(server.fileno()).st_ino not in _connections(), "a listening socket delivers nothing"
    assert _connections().keys() == before.keys()


def test_drain_refuses_to_say_what_it_cannot_know(pair: Pair) -> None:
    """Goal: fail closed. Method: a connection that nobody reads stays unread; drain must not return."""
    pair.connect()
    pair.target.hold_unread(True)
    pair.target.listen(False)
    pair.post(0, [(0, 64)], b"meanwhile")
    while not pair.writer.poll(0):  # the message leaves with the poll that is True; nobody has taken it in then
        pair.target.listen_once()
    with pytest.raises(RemoteError, match="1 connections may still deliver something after 100 polls") as caught:
        pair.target.drain(100)
    assert caught.value.kind == "TransportError"
    pair.target.hold_unread(False)
    pair.target.drain()
    assert pair.target.wait(1) == [(pair.name, b"meanwhile", True)], "nothing notified is lost by a failed drain"
