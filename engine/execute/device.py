"""Know when enqueued device work is done. On a CPU work is done when its call returns; on CUDA an event tells."""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """A point in a device's order of work."""

    def done(self) -> bool:
        """Whether all work enqueued before the event has finished. Never blocks; once True, always True."""
        ...


class _Past:
    """An event of a synchronous device."""

    def done(self) -> bool:
        return True


class _CudaEvent:
    """An event on a CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def done(self) -> bool:
        return bool(self._event.query())


PAST: DeviceEvent = _Past()


class Readback:
    """A tensor on its way to the host, asked for now and read later. On a CPU it is there at once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """The tensor on the host; waits for the work that was enqueued before it, and for no other."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


def record(device: torch.device) -> DeviceEvent:
    """An event after all work enqueued so far on the device's current stream."""
    return _CudaEvent(device) if device.type == "cuda" else PAST
