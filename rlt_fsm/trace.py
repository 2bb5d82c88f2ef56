"""One trace format for the engine, the simulator, every refutation and every test: JSON lines.

A file holds one header line per process, and after it one line per accepted event of that process, in its order:

    {"format":"rlt-trace","version":1,"spec":"<digest>","process":"prefill","incarnation":"..","given":{..},..}
    {"time":<ns>,"process":"prefill","tid":"g7","event":"event_done","fields":{"parts":1}}
    {"time":<ns>,"process":"coordinator","to":"prefill_worker","event":"is_ready"}
    {"time":<ns>,"process":"coordinator","tid":"g7","given":{"source_need":5,"destination_need":5}}
    {"time":<ns>,"event":"crash_prefill"}

`tid` is the generation, `to` the shared instance of an event that concerns no generation. A line with `given`
and no event opens a generation whose givens differ from `record_given`. A line with neither process nor tid is
the world's: a death, in the order of the process whose lines it stands among. `time` is when the turn began in which
the process took the event, by its own clock: it never decreases within a process, orders nothing, and is compared
with no other process's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec

FORMAT, VERSION = "rlt-trace", 1


class TraceError(ValueError):
    """A trace that cannot be read; says the file, the line and what is wrong there."""


class Header(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a file says about one process and its events."""

    format: str
    version: int
    process: str
    spec: str = ""  # digest of the spec that ran; "" where the writer did not know it
    incarnation: str = ""
    given: dict[str, dict[str, int]] = {}  # shared instance -> given -> number
    record_given: dict[str, int] = {}  # of every generation that has no opening line
    start: dict[str, str] = {}  # shared instance -> the state it started in, if not its initial one
    events: int | None = None  # lines of this process that follow; None: the writer did not know
    dropped: int = 0  # events that the ring had no room for, before the first line


class TraceEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line."""

    time: int = 0
    process: str = ""
    tid: str = ""
    to: str = ""
    event: str = ""
    fields: dict[str, int | bool] = {}
    given: dict[str, int] = {}


@dataclass(slots=True)
class Line:
    """An event with the place it stands at."""

    event: TraceEvent
    file: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.file or '<memory>'}:{self.number}"


@dataclass(slots=True)
class Trace:
    """Headers, and per process the lines in its own order. A world line stands in the order of its file."""

    headers: dict[str, Header] = field(default_factory=dict)
    streams: dict[str, list[Line]] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)  # process -> lines that its header promised in vain

    def __len__(self) -> int:
        return sum(len(stream) for stream in self.streams.values())

    def dropped(self) -> dict[str, int]:
        """Process -> events that are not here, by its ring's or its file's own count."""
        counts = {name: header.dropped + self.missing.get(name, 0) for name, header in self.headers.items()}
        return {name: number for name, number in counts.items() if number}

    def lines(self) -> Iterator[Line]:
        """Every line, process after process."""
        for stream in self.streams.values():
            yield from stream


class TraceRing:
    """The last events of one process, in memory. Compiled classes append to it without a call into Python.

    When it is full the oldest event goes, and is counted: such a trace can be looked at, but not judged.

    Time is of a turn, not of an event: a turn is what has come from outside and all that the process does about it
    at once. The shell begins one with `turn`; so do `make_record`, an event fired by name, and a line of the world.
    An event bears the time at which its turn began. What orders events is their place in the ring.
    """

    __slots__ = (
        "append",
        "capacity",
        "clock",
        "fields",
        "given",
        "items",
        "now",
        "process",
        "record_given",
        "spec",
        "start",
        "written",
    )

    def __init__(self, capacity: int, clock: Callable[[], int] = monotonic_ns) -> None:
        """capacity: events kept; each takes 24 bytes, more if it has fields. clock: in ns, real or virtual."""
        if capacity < 1:
            raise ValueError(f"a trace ring needs room for at least one event, not {capacity}")
        self.capacity = capacity
        self.clock = clock
        self.now = clock()  # when this turn began
        self.written = 0  # lines so far, whether or not they are still here
        # Three entries a line, so that an event makes no object that the garbage collector would have to visit:
        # its time, its tid (None: the world's), and (event, to, *values of its fields), which ends the line.
        self.items: deque[Any] = deque(maxlen=3 * capacity)
        self.append: Callable[[Any], None] = self.items.append
        self.process, self.spec = "", ""
        self.given: dict[str, dict[str, int]] = {}
        self.record_given: dict[str, int] = {}
        self.start: dict[str, str] = {}
        self.fields: dict[tuple[str, str], tuple[str, ...]] = {}

    def bind(
        self,
        process: str,
        spec: str,
        given: Mapping[str, Mapping[str, int]],
        record_given: Mapping[str, int],
        start: Mapping[str, str],
        fields: Mapping[tuple[str, str], tuple[str, ...]],
    ) -> None:
        """Note what the header says of the process that writes here. Raises ValueError where it has one already.

        fields: (to, event) -> the names of its fields, in the order in which their values are appended.
        """
        if self.process:
            raise ValueError(f"this ring belongs to process '{self.process}'; '{process}' needs its own")
        self.process, self.spec = process, spec
        self.given = {name: dict(values) for name, values in given.items()}
        self.record_given, self.start, self.fields = dict(record_given), dict(start), dict(fields)

    def turn(self) -> None:
        """Begin a turn: read the clock for the events from here on."""
        self.now = self.clock()

    def open(self, tid: str, given: Mapping[str, int]) -> None:
        """Write that a generation begins with these givens."""
        self.fields["", ""] = tuple(given)
        self._write(tid, ("", "", *given.values()))

    def world(self, action: str) -> None:
        """Write that the world did something that no process takes as an event, such as `crash_prefill`."""
        self.turn()
        self._write(None, (action, ""))

    def _write(self, tid: str | None, what: tuple[str | int, ...]) -> None:
        self.written += 1
        self.items.extend((self.now, tid, what))

    def _lines(self) -> Iterator[tuple[int, str | None, tuple[Any, ...]]]:
        """Each whole line. An interrupt can strike between two entries of one: what it left is passed over here."""
        line: list[Any] = []
        for entry in self.items:
            line.append(entry)
            if entry.__class__ is tuple:
                if len(line) >= 3:
                    yield line[-3], line[-2], entry
                line.clear()

    def __len__(self) -> int:
        return sum(1 for _ in self._lines())

    @property
    def dropped(self) -> int:
        """Events that are not here: they had to go because the ring was full, or an interrupt cut them short."""
        return self.written - len(self)

    def events(self) -> Iterator[TraceEvent]:
        """What is here, oldest first."""
        for time, tid, (event, to, *values) in self._lines():
            if tid is None:
                yield TraceEvent(time=time, event=event)
                continue
            named = dict(zip(self.fields.get((to, event), ()), values, strict=True))
            if event:
                yield TraceEvent(time=time, process=self.process, tid=tid, to=to, event=event, fields=named)
            else:
                yield TraceEvent(time=time, process=self.process, tid=tid, given=named)

    def header(self, process: str = "", incarnation: str = "", spec: str = "") -> Header:
        """The header line; `process` and `spec` as bound, unless said here."""
        return Header(
            format=FORMAT,
            version=VERSION,
            spec=spec or self.spec,
            process=process or self.process,
            incarnation=incarnation,
            given=self.given,
            record_given=self.record_given,
            start=self.start,
            events=len(self),
            dropped=self.dropped,
        )

    def trace(self, incarnation: str = "", spec: str = "") -> Trace:
        """What is here as a Trace, without a file."""
        lines = [Line(event, "", number + 2) for number, event in enumerate(self.events())]
        return Trace({self.process: self.header("", incarnation, spec)}, {self.process: lines})

    def write(self, path: str | Path, process: str = "", incarnation: str = "", spec: str = "") -> None:
        """Write a file: the header, then every event that is here."""
        write(path, chain([self.header(process, incarnation, spec)], self.events()))


def write(path: str | Path, items: Iterable[Header | TraceEvent]) -> None:
    """Write one file: header lines and event lines, as they come. Raises OSError."""
    encoder = msgspec.json.Encoder()
    with open(path, "wb") as file:
        for item in items:
            file.write(encoder.encode(item) + b"\n")


def save(path: str | Path, trace: Trace) -> None:
    """Write a Trace to one file, process after process."""
    items: list[Header | TraceEvent] = []
    for process, header in trace.headers.items():
        items += [header, *(line.event for line in trace.streams[process])]
    write(path, items)


def read(path: str | Path) -> Trace:
    """Read one file. Raises TraceError for what is not a trace of this version, OSError for no file."""
    name = str(path)
    header_decoder = msgspec.json.Decoder(Header)
    event_decoder = msgspec.json.Decoder(TraceEvent)
    trace = Trace()
    last = ""  # a line of the world belongs to the process of the line before it
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                if not trace.headers or (b'"format"' in text and "format" in msgspec.json.decode(text)):
                    last = _header(header_decoder.decode(text), trace, f"{name}:{number}")
                    continue
                event = event_decoder.decode(text)
            except msgspec.MsgspecError as error:
                raise TraceError(f"{name}:{number}: not a line of a trace: {error}") from error
            _check(event, trace, f"{name}:{number}")
            last = event.process or last
            trace.streams[last].append(Line(event, name, number))
    if not trace.headers:
        raise TraceError(f'{name}:1: no header line; a trace starts with {{"format":"{FORMAT}",...}}')
    for process, header in trace.headers.items():
        if header.events is not None and header.events != len(trace.streams[process]):
            trace.missing[process] = header.events - len(trace.streams[process])
    return trace


def _header(header: Header, trace: Trace, where: str) -> str:
    if header.format != FORMAT:
        raise TraceError(f"{where}: the format is '{header.format}', not '{FORMAT}'")
    if header.version != VERSION:
        raise TraceError(f"{where}: version {header.version}; this program reads version {VERSION}")
    if header.process in trace.headers:
        raise TraceError(f"{where}: process '{header.process}' has a header already; one incarnation per trace")
    trace.headers[header.process] = header
    trace.streams[header.process] = []
    return header.process


def _check(event: TraceEvent, trace: Trace, where: str) -> None:
    if event.process and event.process not in trace.headers:
        raise TraceError(f"{where}: process '{event.process}' has no header line before")
    if not event.event and not (event.tid and event.given):
        raise TraceError(f"{where}: neither an event nor the givens of a generation")
    if event.event and event.process and bool(event.tid) == bool(event.to):
        raise TraceError(f"{where}: an event has either a generation ('tid') or a shared instance ('to')")
    if not event.process and (event.tid or event.to or event.fields):
        raise TraceError(f"{where}: a line of the world has no generation, instance or fields")


def merge(traces: Iterable[str | Path | Trace]) -> Trace:
    """Several processes' traces as one. Raises TraceError where two of them are of one process."""
    out = Trace()
    for item in traces:
        trace = item if isinstance(item, Trace) else read(item)
        for process, header in trace.headers.items():
            if process in out.headers:
                both = f"incarnations '{out.headers[process].incarnation}' and '{header.incarnation}'"
                raise TraceError(f"two traces of process '{process}': {both}; judge one run at a time")
            out.headers[process] = header
            out.streams[process] = trace.streams[process]
        out.missing.update(trace.missing)
    return out


def as_dict(event: TraceEvent) -> dict[str, Any]:
    """The line as the mapping that its JSON stands for."""
    found: dict[str, Any] = msgspec.to_builtins(event)
    return found
