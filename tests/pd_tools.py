"""What several P/D tests do: wait, keep messages back, and write into D's pages from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from engine.pd.engine import PDEngine, PDOutput
from engine.pd.nixl import NixlConnector

PATIENCE_S = 60.0


def until(engine: PDEngine, condition: Callable[[], bool]) -> list[PDOutput]:
    """Step until the condition holds; the outputs that ended meanwhile. Fails after a generous time."""
    outputs: list[PDOutput] = []
    end = time.monotonic() + PATIENCE_S
    while not condition():
        outputs += engine.step(0.005)
        assert time.monotonic() < end, "the engine did not get there"
    return outputs


def outputs_of(engine: PDEngine, count: int) -> list[PDOutput]:
    """Step until so many outputs have ended."""
    outputs: list[PDOutput] = []
    end = time.monotonic() + PATIENCE_S
    while len(outputs) < count:
        outputs += engine.step(0.005)
        assert time.monotonic() < end, f"{len(outputs)} of {count} outputs came"
    return outputs


class Hold:
    """Keeps messages of some kinds to a worker back, until they are let go."""

    def __init__(self, engine: PDEngine, role: str, *kinds: type) -> None:
        client = engine.clients[role]
        self.kept: list[Any] = []
        self._send = client.send

        def keep(message: Any) -> None:
            if isinstance(message, kinds):
                self.kept.append(message)
            else:
                self._send(message)

        client.send = keep  # type: ignore[method-assign]

    def let_go(self) -> None:
        """Send what was kept, in its order; later messages are kept again."""
        kept, self.kept = self.kept, []
        for message in kept:
            self._send(message)


class Stranger:
    """A writer that nobody asked: any process that knows D's metadata can write into its pools."""

    def __init__(self, engine: PDEngine) -> None:
        ready = engine.clients["decode"].ready
        assert ready is not None
        self.geometry = ready.geometry
        self.buffer = torch.zeros(self.geometry.block_bytes, dtype=torch.uint8)
        self.link = NixlConnector()
        self.link.register_tensor("page", self.buffer)
        self.peer = self.link.add_peer(ready.metadata)

    def write(self, pool: int, block: int, page: torch.Tensor, engine: PDEngine) -> None:
        """Put the bytes of one page [block_bytes] over a block of the pool at address `pool`."""
        size = self.geometry.block_bytes
        self.buffer.copy_(page)
        local = np.array([[self.buffer.data_ptr(), size, 0]], np.uint64)
        remote = np.array([[pool + block * size, size, 0]], np.uint64)
        write = self.link.post(self.peer, local, remote, msgspec.msgpack.encode(("nobody", 0)))
        end = time.monotonic() + PATIENCE_S
        while not write.poll():
            assert time.monotonic() < end
            time.sleep(0.0005)

    def zero(self, engine: PDEngine, tables: list[list[int]], page: int) -> None:
        """Zero one page of every plane, keys and values."""
        for pool in (self.geometry.key_ptr, self.geometry.value_ptr):
            for table in tables:
                self.write(pool, table[page], torch.zeros_like(self.buffer), engine)

    def close(self) -> None:
        """Nothing is in flight any more."""
        assert self.link.close()
