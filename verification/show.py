"""A counterexample as a message sequence chart, with what each step changed."""

from __future__ import annotations

from rlt_fsm.expr import BOOL, Enum
from rlt_fsm.ground import Flat
from rlt_fsm.render import ChartLine, sequence_chart
from verification.result import Move, Trace


def value_text(flat: Flat, name: str, value: object) -> str:
    """A flat value by the name that the spec gives it."""
    kind = flat.vars[name].type
    if isinstance(kind, Enum) and isinstance(value, int):
        return kind.names[value]
    if kind == BOOL:
        return "yes" if value else "no"
    if isinstance(value, int) and value < 0:
        return "none"
    return str(value)


def changes(flat: Flat, move: Move) -> str:
    """`Export[0].state computing -> over, flying[0] 1 -> 0`."""
    hidden = ("to_", "from_", "left:")
    parts = [
        f"{name} {value_text(flat, name, old)} -> {value_text(flat, name, new)}"
        for name, (old, new) in move.changed.items()
        if not name.startswith(hidden)
    ]
    return ", ".join(parts)


def counterexample(flat: Flat, trace: Trace) -> str:
    """The chart, then the changes step by step; a loop is marked where it begins."""
    lines: list[ChartLine] = []
    details: list[str] = []
    for number, move in enumerate(trace.moves):
        step = flat.steps[move.step]
        generation = dict(step.index).get(flat.system.generation)
        suffix = "" if generation is None else f" {flat.system.generation}{generation}"
        if trace.loop == number:
            details.append("     -- from here on, for ever --")
        if step.action in flat.system.actions:
            where = step.process or "world"
            lines.append(ChartLine(where, None, step.action + suffix))
        else:
            channel = flat.system.channels[step.action.split(".")[0]]
            lines.append(ChartLine(channel.source, channel.target, step.event + suffix))
        details.append(f"{number + 1:>4} {move.label:32} {changes(flat, move)}")
    return sequence_chart(lines) + "\n\n" + "\n".join(details)
