"""The compiled protocol: one class per process, made from the shipped spec when it is first asked for."""

from __future__ import annotations

from functools import cache

from rlt_fsm.compile import CompiledProcess, compile_machine, compile_process
from rlt_fsm.load import load
from rlt_fsm.model import Spec, System


@cache
def spec() -> Spec:
    """The shipped spec, as every process of the engine reads it."""
    return load()


def system() -> System:
    """Its system."""
    return spec().need_system()


@cache
def process(name: str) -> CompiledProcess:
    """The compiled machines of process `coordinator`, `prefill` or `decode`."""
    return compile_process(system(), name, spec().digest)


@cache
def write_handle() -> type:
    """The compiled machine of one posted partition."""
    return compile_machine(spec().machines["WriteHandle"])
