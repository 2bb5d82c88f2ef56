"""Work in a process of its own, ended by force when it takes too long: a solver's time-out is not always honoured."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """There is no answer; the text says why."""


class Apart(Generic[T]):
    """`work(*args)`, begun now in a process of its own. `work` must be importable, its arguments and answer plain."""

    def __init__(self, work: Callable[..., T], *args: Any, seconds_max: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.seconds_max = seconds_max
        self.deadline = time.monotonic() + seconds_max
        self.pipe, child = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(child, work, args), daemon=True)
        self.process.start()
        child.close()

    def wait(self) -> T:
        """Its answer. Raises Stopped if it failed, died, or had to be ended."""
        try:
            if not self.pipe.poll(max(0.0, self.deadline - time.monotonic())):
                raise Stopped(f"the solver was stopped after {self.seconds_max:g} s")
            done, answer = self.pipe.recv()
        except EOFError:
            raise Stopped("the solver's process died") from None
        finally:
            self.process.kill()
            self.process.join()
        if not done:
            raise Stopped(f"the solver's process failed: {answer}")
        found: T = answer
        return found


def _run(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, work(*args)))
    except Exception as error:  # whatever it was, it is told to whoever waits
        pipe.send((False, f"{type(error).__name__}: {error}"))
    pipe.close()
