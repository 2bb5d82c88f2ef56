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


def record(device: torch.device) -> DeviceEvent:
    """An event after all work enqueued so far on the device's current stream."""
    return _CudaEvent(device) if device.type == "cuda" else PAST
