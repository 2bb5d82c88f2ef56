"""Both sides of a transfer, where protocol, engine and transport meet: effects carried out, evidence brought in.

No decision is made here: what may be posted, activated or given back is asked of the compiled machines
(records.py). What is kept here is data: page tables, queued partitions, open handles, pending device events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.cache.geometry import PoolGeometry
from engine.execute.device import DeviceEvent
from engine.local import EngineCore, PrefillProgress
from engine.pd import messages as m
from engine.pd import protocol
from engine.pd.config import PDConfig
from engine.pd.nixl import NixlConnector, TransportError, Write
from engine.pd.records import Outputs, Records
from engine.pd.segments import Partition, partitions
from engine.schedule.request import FinishReason
from rlt_fsm.compile import Effect, Message

Say = Callable[[m.FromWorker], None]


class ProtocolError(RuntimeError):
    """A peer said something that the protocol excludes. The worker must stop: nothing is guessed."""


class PDStageConnector(ABC):
    """What both stages share: records, effects, device events, the peer, and what is still held."""

    machine = ""  # the retirement machine whose holds are reported

    def __init__(self, process: str, core: EngineCore, link: NixlConnector, config: PDConfig, say: Say) -> None:
        self.core, self.link, self.config, self.say = core, link, config, say
        given = {"slots": {"capacity": core.scheduler_config.max_num_seqs}} if process == "decode" else {}
        self.records = Records(process, given, config.trace_capacity)
        self.geometry = core.geometry()
        self.slots = deque(range(self.geometry.staging_slots))
        self.slot_of: dict[str, int] = {}
        self.unknown = 0  # messages and notifications for generations that are not, or no more
        self.metrics: dict[str, float] = {"transfers": 0, "bytes_sent": 0, "prefill_tokens": 0, "output_tokens": 0}

    # -- events ---------------------------------------------------------------------------------------

    @abstractmethod
    def on_message(self, message: m.RequestMessage) -> None:
        """Take one message of the coordinator. Raises IllegalEvent where the protocol does not allow it."""

    @abstractmethod
    def tick(self) -> bool:
        """Bring in evidence and do one piece of work. False when there was nothing to do."""

    @abstractmethod
    def connect(self, peer: m.Connect) -> None:
        """Learn of the peer."""

    @abstractmethod
    def waiting_for_peer(self) -> bool:
        """Whether something of the peer is awaited, so that the loop should look often."""

    def fire(self, tid: str, event: str, **fields: Any) -> None:
        """Move a generation, carry out what follows, and go on while its machines have more to do."""
        self._carry_out(tid, self.records.fire(tid, event, **fields))
        while (outputs := self.records.follow(tid)) is not None:
            self._carry_out(tid, outputs)

    def _carry_out(self, tid: str, outputs: Outputs) -> None:
        """Effects first, then messages: a message speaks of what has been done."""
        for item in outputs:
            if isinstance(item, Effect):
                self.effects(item)(tid)
        for item in outputs:
            if isinstance(item, Message):
                self.speak(tid, item)

    def effects(self, effect: Effect) -> Callable[[str], None]:
        """The method that carries an effect out: `do_` and its name."""
        method: Callable[[str], None] = getattr(self, f"do_{effect.name}")
        return method

    @abstractmethod
    def speak(self, tid: str, item: Message) -> None:
        """Send one protocol message, with the data that belongs to it."""

    def obligations(self) -> list[dict[str, Any]]:
        """Every generation with a hold that is not settled, with the names of its holds."""
        out = []
        for tid in self.records.of:
            state = self.records.state(tid, self.machine)
            if state not in ("free", "retired"):
                out.append({"tid": tid, "state": state, "holds": self.records.holds(tid, self.machine)})
        return out

    def take_slot(self, tid: str) -> int:
        """A staging slot. There are as many as requests can have pages, so a page credit implies one."""
        slot = self.slot_of[tid] = self.slots.popleft()
        return slot

    def give_slot(self, tid: str) -> None:
        """Return the generation's staging slot."""
        self.slots.append(self.slot_of.pop(tid))


# -- prefill --------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Posting:
    """One partition: its data, its own machine (WriteHandle), and its transport handle once posted."""

    partition: Partition
    handle: Any
    sequence: int = -1
    write: Write | None = None


@dataclass(slots=True)
class RequestTransfer:
    """P's data of one generation."""

    order: m.Prefill
    ready: deque[_Posting] = field(default_factory=deque)  # computed, not yet posted
    staged: _Posting | None = None  # waits for the copy of the hidden row
    open: list[_Posting] = field(default_factory=list)  # posted, not yet terminal
    sequence: int = 0
    bytes_posted: int = 0


@dataclass(slots=True)
class _DeviceWork:
    """Device work of one generation whose event is not yet seen done."""

    tid: str
    event: DeviceEvent
    progress: PrefillProgress | None = None
    kind: str = ""


class PrefillStageConnector(PDStageConnector):
    """P: computes prompts and writes their KV to D."""

    machine = "SourceRetirement"

    def __init__(self, core: EngineCore, link: NixlConnector, config: PDConfig, say: Say) -> None:
        super().__init__("prefill", core, link, config, say)
        self.transfers: dict[str, RequestTransfer] = {}
        self.turn: deque[str] = deque()  # generations with something to post, round robin
        self.work: list[_DeviceWork] = []
        self.inflight_bytes = 0
        self.peer = ""
        self.target: PoolGeometry | None = None
        self.error = ""
        self.handle_class = protocol.write_handle()

    def connect(self, peer: m.Connect) -> None:
        """Load the peer's metadata; its pools are the target of every write."""
        self.peer = self.link.add_peer(peer.metadata)
        self.target = peer.geometry

    def on_message(self, message: m.RequestMessage) -> None:
        if isinstance(message, m.Prefill):
            self.records.open(message.tid)
            self.transfers[message.tid] = RequestTransfer(message)
        if message.tid not in self.records.of:
            self.unknown += 1
            return
        self.fire(message.tid, m.EVENT_OF[type(message)])

    def tick(self) -> bool:
        worked = self._device_events()
        worked |= self._poll_handles()
        worked |= self._post()
        if self.core.has_runnable():
            self._run_batch()
            worked = True
        return worked or bool(self.work)

    def waiting_for_peer(self) -> bool:
        """Writes are in flight: polling them is all that is left to do."""
        return self.inflight_bytes > 0

    # -- evidence ---------------------------------------------------------------------------------------

    def _run_batch(self) -> None:
        """Enqueue one batch. The launch is recorded in the same turn, before any other event can come in."""
        for progress in self.core.step_prefill():
            self.fire(progress.request_id, "launch", final=progress.final)
            if progress.whole:
                self.metrics["prefill_tokens"] += progress.end - progress.start
            self.work.append(_DeviceWork(progress.request_id, progress.event, progress, "chunk"))
            if progress.staged_event is not None:
                self.work.append(_DeviceWork(progress.request_id, progress.staged_event, None, "staged"))

    def _device_events(self) -> bool:
        """Events that are done, in the order of the stream."""
        worked = False
        while self.work and self.work[0].event.done():
            work = self.work.pop(0)
            worked = True
            transfer = self.transfers[work.tid]
            if work.progress is not None:
                cut = self._cut(work.progress, transfer) if work.progress.whole else []
                self.fire(work.tid, "event_done", parts=len(cut))
                self._queue(work.tid, transfer, cut)
            else:
                last = transfer.staged
                transfer.staged = None
                self.fire(work.tid, "staged")
                if last is not None:
                    self._queue(work.tid, transfer, [last])
        return worked

    def _cut(self, progress: PrefillProgress, transfer: RequestTransfer) -> list[_Posting]:
        """The partitions of a chunk; the one that carries the hidden row is kept until the row is staged."""
        if self.records.state(progress.request_id, "Export") != "computing":
            return []  # over: its result is not sent
        assert self.target is not None
        order, tid = transfer.order, progress.request_id
        start = max(progress.start, order.cached_tokens)
        cut = [
            _Posting(p, self.handle_class())
            for p in partitions(
                self.geometry,
                self.core.block_tables(tid),
                self.target,
                order.tables,
                min(start, progress.end),
                progress.end,
                (self.slot_of[tid], order.slot) if progress.final else None,
                self.config.partition_bytes,
                self.config.partition_descriptors,
            )
        ]
        if progress.final:
            transfer.staged = cut.pop()
        return cut

    def _queue(self, tid: str, transfer: RequestTransfer, cut: list[_Posting]) -> None:
        if not cut or self.records.state(tid, "Export") != "computing":
            return
        if not transfer.ready:
            self.turn.append(tid)
        transfer.ready.extend(cut)

    def _post(self) -> bool:
        """Hand over a bounded number of partitions, one per generation in turn, within the bytes in flight."""
        posted = 0
        for _ in range(len(self.turn)):
            if posted >= self.config.posts_per_tick:
                break
            tid = self.turn[0]
            transfer = self.transfers.get(tid)
            if transfer is None or not transfer.ready:
                self.turn.popleft()
                continue
            size = transfer.ready[0].partition.bytes
            if self.inflight_bytes and self.inflight_bytes + size > self.config.inflight_bytes:
                break
            if not self.records.can(tid, "post"):
                self.turn.popleft()
                continue
            self.turn.rotate(-1)
            posted += 1
            self.fire(tid, "post")
        return posted > 0

    def _poll_handles(self) -> bool:
        worked = False
        for tid, transfer in list(self.transfers.items()):
            for posting in list(transfer.open):
                assert posting.write is not None
                try:
                    if not posting.write.poll():
                        continue
                except TransportError as error:
                    self._failed(tid, transfer, posting, error)
                    worked = True
                    continue
                self._done(tid, transfer, posting)
                worked = True
        return worked

    def _done(self, tid: str, transfer: RequestTransfer, posting: _Posting) -> None:
        """A handle is terminal: P's pages are no longer read, and its notification follows its bytes to D."""
        posting.handle.done()
        transfer.open.remove(posting)
        self.inflight_bytes -= posting.partition.bytes
        self.fire(tid, "handle_done")

    def _failed(self, tid: str, transfer: RequestTransfer, posting: _Posting, error: TransportError) -> None:
        """A handle failed. It leaves the list of polled handles, never the hold set."""
        self.error = self.error or str(error)
        posting.handle.error()
        transfer.open.remove(posting)
        self.inflight_bytes -= posting.partition.bytes
        self.fire(tid, "handle_error")

    # -- effects ------------------------------------------------------------------------------------------

    def do_lease_source(self, tid: str) -> None:
        order = self.transfers[tid].order
        self.core.add_request(tid, order.prompt_ids, order.params)
        self.core.set_staging_slot(tid, self.take_slot(tid))

    def do_launch_chunk(self, tid: str) -> None:
        """The batch that this records is already enqueued: see `_run_batch`."""

    def do_launch_final_chunk(self, tid: str) -> None:
        """As `do_launch_chunk`."""

    def do_post_partition(self, tid: str) -> None:
        transfer = self.transfers[tid]
        posting = transfer.ready.popleft()
        posting.sequence = transfer.sequence
        transfer.sequence += 1
        transfer.open.append(posting)
        transfer.bytes_posted += posting.partition.bytes
        self.inflight_bytes += posting.partition.bytes
        self.metrics["bytes_sent"] += posting.partition.bytes
        self.metrics["transfers"] += 1
        posting.handle.post()
        assert self.target is not None
        note = msgspec.msgpack.encode((tid, posting.sequence))
        local, remote = posting.partition.local, posting.partition.remote
        try:
            posting.write = self.link.post(self.peer, local, remote, note, self.geometry.memory, self.target.memory)
        except TransportError as error:
            self._failed(tid, transfer, posting, error)
            return
        if posting.write.done:  # its notification has left: this must be known before the pipe is read again
            self._done(tid, transfer, posting)

    def do_drop_unposted(self, tid: str) -> None:
        transfer = self.transfers[tid]
        for posting in (*transfer.ready, *([transfer.staged] if transfer.staged is not None else [])):
            posting.handle.drop()
        transfer.ready.clear()
        transfer.staged = None
        self.core.remove(tid)

    def do_free_source(self, tid: str) -> None:
        self.core.release(tid)
        self.give_slot(tid)

    def speak(self, tid: str, item: Message) -> None:
        if item.name == "fatal":
            self.say(m.Fatal(self.error))
            return
        kind = m.FROM_PREFILL[item.name]
        self.say(kind(tid, **item.fields))  # type: ignore[arg-type]

    def fire(self, tid: str, event: str, **fields: Any) -> None:
        before = self.records.state(tid, "Export")
        super().fire(tid, event, **fields)
        if tid not in self.records.of:
            return
        after = self.records.state(tid, "Export")
        if after != before and after == "drained":
            self.say(m.Progress(tid, "drained", self.transfers[tid].bytes_posted))
        if self.records.state(tid, self.machine) == "retired":
            del self.transfers[tid]
            self.records.close(tid)


# -- decode ---------------------------------------------------------------------------------------------


class DecodeStageConnector(PDStageConnector):
    """D: lends its pages to P's writes, then decodes from them."""

    machine = "DestinationRetirement"

    def __init__(self, core: EngineCore, link: NixlConnector, config: PDConfig, say: Say) -> None:
        super().__init__("decode", core, link, config, say)
        self.orders: dict[str, m.Reserve] = {}
        self.received: deque[str] = deque()  # in order of receipt; activation takes them in this order
        self.active: dict[str, None] = {}
        self.work: list[tuple[DeviceEvent, str, tuple[str, ...]]] = []
        self.reason: dict[str, str] = {}
        self.fences: list[str] = []

    def connect(self, peer: m.Connect) -> None:
        """D needs nothing of P: it is written to."""

    def on_message(self, message: m.RequestMessage) -> None:
        if isinstance(message, m.Reserve):
            self.records.open(message.tid)
            self.orders[message.tid] = message
        if message.tid not in self.records.of:
            self.unknown += 1
            return
        fields = {"count": message.count} if isinstance(message, m.CommitToDecode | m.CancelSafe) else {}
        self.fire(message.tid, m.EVENT_OF[type(message)], **fields)

    def tick(self) -> bool:
        worked = self._notifications(self.link.notifications())
        worked |= self._device_events()
        worked |= self._close_endpoints()
        worked |= self._activate()
        worked |= self._step()
        return worked or bool(self.work)

    def waiting_for_peer(self) -> bool:
        """A writer may need this process's progress: it must go on calling NIXL."""
        return len(self.orders) > len(self.active)

    # -- evidence -------------------------------------------------------------------------------------------

    def _notifications(self, arrived: list[tuple[str, bytes]]) -> bool:
        for sender, note in arrived:
            try:
                tid, sequence = msgspec.msgpack.decode(note, type=tuple[str, int])
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"agent {sender} sent a notification that is none: {note[:80]!r}") from error
            if tid not in self.records.of or sequence < 0:
                self.unknown += 1
                continue
            self.fire(tid, "notified", seq=sequence)
        return bool(arrived)

    def _device_events(self) -> bool:
        worked = False
        while self.work and self.work[0][0].done():
            _, event, tids = self.work.pop(0)
            for tid in tids:
                self.fire(tid, event)
            worked = True
        return worked

    def _activate(self) -> bool:
        worked = False
        for tid in list(self.received):
            if not self.records.can(tid, "activate"):
                break  # no slot: the rest waits behind it
            self.received.popleft()
            self.fire(tid, "activate")
            worked = True
        return worked

    def _step(self) -> bool:
        """One decode batch. Every active generation may be in it, so each holds its pages until the event.

        While a row that is being bound may not step, none does: its event is next.
        """
        self._device_events()
        stepping = tuple(self.active)
        if not self.core.has_runnable() or not all(self.records.can(tid, "step") for tid in stepping):
            return False
        for tid in stepping:
            self.fire(tid, "step")
        outputs = self.core.step_tokens()
        self.work.append((self.core.last_event(), "step_done", stepping))
        for output in outputs:
            self.metrics["output_tokens"] += 1
            stop = output.finish_reason is FinishReason.STOP
            top = output.top_logprobs
            self.say(m.Token(output.request_id, output.token_id, output.exit_depth, stop, output.logprob, top))
            if output.finished:
                self.reason[output.request_id] = str(output.finish_reason)
                self.fire(output.request_id, "finish")
        return True

    def _close_endpoints(self) -> bool:
        """The writer is dead and reaped: take in what its connection still holds, then nothing of it can land."""
        if not self.fences:
            return False
        waiting, self.fences = self.fences, []
        late = self.link.drain()
        self._notifications(late)
        for tid in waiting:
            if tid in self.records.of:  # else what came in settled it
                self.fire(tid, "fenced")
        return True

    # -- effects --------------------------------------------------------------------------------------------

    def do_lease_destination(self, tid: str) -> None:
        order = self.orders[tid]
        if not self.core.reserve(tid, order.prompt_ids, order.params, self.take_slot(tid)):
            raise ProtocolError(f"generation {tid} was promised pages that decode does not have")

    def do_bind_import(self, tid: str) -> None:
        self.work.append((self.core.activate(tid), "bound", (tid,)))
        self.active[tid] = None

    def do_launch_step(self, tid: str) -> None:
        """The batch that this precedes is enqueued in the same turn: see `_step`."""

    def do_remove_request(self, tid: str) -> None:
        self.active.pop(tid, None)
        if tid in self.received:
            self.received.remove(tid)
        self.core.remove(tid)

    def do_close_endpoint(self, tid: str) -> None:
        self.fences.append(tid)

    def do_free_destination(self, tid: str) -> None:
        self.core.release(tid)
        self.give_slot(tid)

    def speak(self, tid: str, item: Message) -> None:
        kind = m.FROM_DECODE[item.name]
        if kind is m.Reserved:
            self.say(m.Reserved(tid, self.core.block_tables(tid), self.slot_of[tid], 0))
        elif kind is m.Finished:
            self.say(m.Finished(tid, self.reason.pop(tid, "")))
        else:
            if kind is m.Received:
                self.received.append(tid)
            self.say(kind(tid))  # type: ignore[arg-type]

    def fire(self, tid: str, event: str, **fields: Any) -> None:
        super().fire(tid, event, **fields)
        if tid in self.records.of and self.records.state(tid, self.machine) == "retired":
            self.orders.pop(tid, None)
            self.reason.pop(tid, None)
            self.records.close(tid)
