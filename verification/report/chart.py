"""A trace as a message sequence chart in SVG: who did what, and which variables it changed.

A lane is a process, or what stands outside the processes. An event that a process may be offered and can decline is
its own step; one that it must take is an arrow from outside. The spec does not say who stands outside: the tables
below name it for the shipped spec, and an action that they do not name comes from the `world`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlt_fsm.ground import Flat
from verification.report.explain import is_budget, is_message, value
from verification.result import Move, Trace

WORLD = "world"
CAUSES = {  # action -> the lane that it comes from
    "submit": "client",
    "cancel": "client",
    "write_done": "NIC",
    "write_error": "NIC",
    "write_to_dead": "NIC",
    "hear": "NIC",
    "echo": "NIC",
    "endpoint_gone": "NIC",
}
REACHES = {"post_partition": "NIC"}  # effect -> the lane that it goes to
ORDER = ("client", "coordinator", "prefill", "NIC", "decode")
TITLES = {"prefill": "prefill (P)", "decode": "decode (D)"}

LANE, LEFT, TOP, LINE, PAD = 120, 78, 34, 15, 13  # pixels
CHARACTER = 6.7  # width of one, in the charts' font, pixels
CHANGES_WIDTH = 56  # characters


@dataclass(frozen=True, slots=True)
class ChartStep:
    """One step: an arrow from `source` to `target`, or a dot on `source` where there is no target."""

    source: str
    target: str | None
    text: str
    changes: tuple[str, ...]
    message: bool  # said by one process to another


def chart_steps(flat: Flat, trace: Trace) -> list[ChartStep]:
    """The steps of a trace with their lanes, and what each changed beside messages and budgets."""
    out = []
    for move in trace.moves:
        step = flat.steps[move.step]
        changes = tuple(changed(flat, move))
        generation = dict(step.index).get(flat.system.generation)
        suffix = "" if generation is None else f" {flat.system.generation}{generation}"
        action = flat.system.actions.get(step.action)
        if action is None:
            channel = flat.system.channels[step.action.split(".")[0]]
            out.append(ChartStep(channel.source, channel.target, step.event + suffix, changes, True))
            continue
        cause = CAUSES.get(step.action, WORLD)
        reached = next((REACHES[name] for name in step.effects if name in REACHES), None)
        if not step.process:
            out.append(ChartStep(cause, None, step.action + suffix, changes, False))
        elif reached is not None:
            out.append(ChartStep(step.process, reached, step.action + suffix, changes, False))
        elif action.offered and cause == WORLD:
            out.append(ChartStep(step.process, None, step.action + suffix, changes, False))
        else:
            out.append(ChartStep(cause, step.process, step.action + suffix, changes, False))
    return out


def changed(flat: Flat, move: Move) -> list[str]:
    """`flying[0] 1 → 0`, one for each variable."""
    return [
        f"{name} {value(flat, name, old)} → {value(flat, name, new)}"
        for name, (old, new) in move.changed.items()
        if not is_message(flat, name) and not is_budget(name)
    ]


def lanes(steps: Sequence[ChartStep]) -> list[str]:
    """The lanes that are used, in the usual order; the world comes last."""
    used = dict.fromkeys(name for step in steps for name in (step.source, step.target) if name is not None)
    others = [name for name in used if name not in ORDER and name != WORLD]
    return [n for n in ORDER if n in used] + others + [n for n in (WORLD,) if n in used]


def svg(flat: Flat, trace: Trace, title: str, key: str = "chart") -> str:
    """The chart; `key` makes its ids unique in a page.

    A lasso has a bracket at the left from its last step back to where it goes on.
    """
    steps = chart_steps(flat, trace)
    names = lanes(steps)
    at = {name: LEFT + LANE * place for place, name in enumerate(names)}
    edge = LEFT + LANE * (len(names) - 1) + 64
    wrapped = [fill(step.changes) for step in steps]
    heights = [max(len(rows), 2) * LINE + PAD for rows in wrapped]
    bottoms = [TOP + sum(heights[: number + 1]) for number in range(len(heights))]
    bottom = (bottoms[-1] if bottoms else TOP) + (20 if trace.loop is not None else 6)
    width = edge + int(CHANGES_WIDTH * CHARACTER)
    parts = [
        f'<svg class="chart" role="img" aria-label="{escape(title)}" viewBox="0 0 {width} {bottom}" '
        f'width="{width}" height="{bottom}">',
        f'<defs><marker id="{key}-tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    for name in names:
        parts.append(f'<line class="life" x1="{at[name]}" x2="{at[name]}" y1="{TOP - 10}" y2="{bottom}"/>')
        outside = " outside" if name not in flat.system.processes else ""
        parts.append(f'<text class="lane{outside}" x="{at[name]}" y="18">{escape(TITLES.get(name, name))}</text>')
    parts.append(f'<text class="lane side" x="{edge}" y="18">what it changed</text>')
    for number, (step, rows, height, end) in enumerate(zip(steps, wrapped, heights, bottoms, strict=True), 1):
        top = end - height
        y = top + height // 2 + 6
        parts.append(f'<line class="rule" x1="0" x2="{width}" y1="{top}" y2="{top}"/>')
        parts.append(f'<text class="number" x="30" y="{y + 4}">{number}</text>')
        parts += _step(step, at, names, y, key)
        first = top + (height - len(rows) * LINE) // 2 + 12
        for place, row in enumerate(rows):
            if row:
                parts.append(f'<text class="change" x="{edge}" y="{first + place * LINE}">{escape(row)}</text>')
    if trace.loop is not None:
        parts += _loop(trace.loop, heights, bottoms, key)
    return "\n".join([*parts, "</svg>"])


def _step(step: ChartStep, at: dict[str, int], names: list[str], y: int, key: str) -> list[str]:
    here = at[step.source]
    kind = "said" if step.message else "done"
    if step.target is None:
        last = step.source == names[-1] and len(names) > 1
        side = f'class="label end" x="{here - 9}"' if last else f'class="label" x="{here + 9}"'
        return [
            f'<circle class="dot" cx="{here}" cy="{y}" r="4"/>',
            f'<text {side} y="{y + 4}">{escape(step.text)}</text>',
        ]
    there = at[step.target]
    shorter = there - 2 if there > here else there + 2
    return [
        f'<line class="{kind}" x1="{here}" x2="{shorter}" y1="{y}" y2="{y}" marker-end="url(#{key}-tip)"/>',
        f'<text class="label mid" x="{(here + there) // 2}" y="{y - 5}">{escape(step.text)}</text>',
    ]


def _loop(start: int, heights: list[int], bottoms: list[int], key: str) -> list[str]:
    """The bracket of a lasso; one without steps stands still after the last one."""
    if start >= len(heights):
        y = bottoms[-1] if bottoms else TOP
        return [f'<text class="loop" x="8" y="{y + 14}">then, for ever, nothing that must happen</text>']
    top, bottom = bottoms[start] - heights[start] + 4, bottoms[-1] - 4
    return [
        f'<path class="bracket" d="M16 {bottom}H4V{top}H16" marker-end="url(#{key}-tip)"/>',
        f'<text class="loop" x="20" y="{top + 4}">for ever</text>',
    ]


def fill(changes: Sequence[str]) -> list[str]:
    """The changes in rows of at most `CHANGES_WIDTH` characters; a longer one has its values on a row of their own."""
    rows = [""]
    for text in changes:
        name, _, rest = text.partition(" ")
        for piece in [text] if len(text) <= CHANGES_WIDTH else [name, "  " + rest]:
            joined = f"{rows[-1]}, {piece}" if rows[-1] else piece
            if len(joined) <= CHANGES_WIDTH and piece is text:
                rows[-1] = joined
            else:
                rows.append(piece)
    return [row for row in rows if row] or [""]
