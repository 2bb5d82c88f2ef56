"""A trace in the Informal Trace Format, as Apalache writes and its viewers read it.

Format: https://apalache-mc.org/docs/adr/015adr-trace.html. Every integer is a `#bigint`, an indexed variable is a
`#map` from its instance, a machine is a record of its variables. An instance is text, `r0` or `none`, so that a
variable that may hold none has one type.
"""

from __future__ import annotations

import re
from typing import Any

from rlt_fsm.expr import BOOL
from rlt_fsm.ground import Flat
from verification.report.explain import State, is_budget, states, value
from verification.result import Result

_NAME = re.compile(r"(?P<base>[^\[.]+)(?:\[(?P<index>[\d,]+)\])?(?:\.(?P<field>.+))?")
BUDGETS = "budgets"


def itf(flat: Flat, result: Result) -> dict[str, Any]:
    """The trace of a result. Raises ValueError where it has none."""
    if result.trace is None:
        raise ValueError(f"'{result.name}' ({result.verdict}) has no trace to write")
    path = [_state(flat, at) for at in states(flat, result)]
    labels = ["", *(move.label for move in result.trace.moves)]
    loop, closing = result.trace.loop, ""
    if loop is not None and loop < len(path) - 1:
        closing = labels.pop()  # the last state is the one at `loop` again, which the format does not repeat
        path.pop()
    found: dict[str, Any] = {
        "#meta": {
            "format": "ITF",
            "format-description": "https://apalache-mc.org/docs/adr/015adr-trace.html",
            "source": flat.system.span.file,
            "status": "violation"
            if result.verdict == "refuted"
            else "not a run: a step that the induction cannot keep",
            "description": f"{result.name} ({result.kind}, {result.method}, {result.scope}): {result.why}",
        },
        "vars": sorted(path[0]),
        "states": [
            {"#meta": {"index": i, "step": label}, **at} for i, (label, at) in enumerate(zip(labels, path, strict=True))
        ],
    }
    if loop is not None:
        found["loop"] = loop
        found["#meta"]["loop-step"] = closing or "stutter"
    return found


def _state(flat: Flat, at: State) -> dict[str, Any]:
    """One state, the flat variables put together again under the names that the spec gives them."""
    out: dict[str, Any] = {}
    maps: dict[str, dict[tuple[int, ...], Any]] = {}
    for name, number in at.items():
        term = _term(flat, name, number)
        if is_budget(name):
            base = BUDGETS if BUDGETS not in flat.vars else BUDGETS + "_"
            out.setdefault(base, {})[name.split(":", 1)[1]] = term
            continue
        match = _NAME.fullmatch(name)
        assert match is not None, f"'{name}' is not the name of a flat variable"
        base, index, field = match["base"], match["index"], match["field"]
        if index is None:
            if field is None:
                out[base] = term
            else:
                out.setdefault(base, {})[field] = term
            continue
        key = tuple(int(i) for i in index.split(","))
        if field is None:
            maps.setdefault(base, {})[key] = term
        else:
            maps.setdefault(base, {}).setdefault(key, {})[field] = term
    for base, entries in maps.items():
        out[base] = {"#map": [[_key(key), term] for key, term in sorted(entries.items())]}
    return out


def _key(key: tuple[int, ...]) -> Any:
    numbers = [_integer(i) for i in key]
    return numbers[0] if len(numbers) == 1 else {"#tup": numbers}


def _integer(number: int) -> dict[str, str]:
    return {"#bigint": str(number)}


def _term(flat: Flat, name: str, number: int) -> Any:
    var = flat.vars[name]
    if var.type == BOOL:
        return bool(number)
    text = value(flat, name, number)
    return _integer(number) if text == str(number) else text
