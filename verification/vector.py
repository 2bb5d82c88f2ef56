"""The NumPy reading: a flat system as code over columns, one array operation for a whole frontier.

States are rows of bytes; no variable straddles a byte, so that a column is one strided read. All
guards and properties of a system become one straight-line program in which every common
sub-expression is computed once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlt_fsm.expr import BOOL, INT, Const, Enum, Node, Op, Ref, children, read, refs
from rlt_fsm.ground import Flat, FlatVar, Step

Column = NDArray[Any]

NUMPY = {
    "implies": "~{0} | {1}",
    "or": "{0} | {1}",
    "and": "{0} & {1}",
    "not": "~{0}",
    "==": "{0} == {1}",
    "!=": "{0} != {1}",
    "<=": "{0} <= {1}",
    ">=": "{0} >= {1}",
    "<": "{0} < {1}",
    ">": "{0} > {1}",
    "+": "{0} + {1}",
    "-": "{0} - {1}",
    "ite": "where({0}, {1}, {2})",
}
WIDE = {"+": "add({0}, {1}, dtype=int64)", "-": "subtract({0}, {1}, dtype=int64)"}  # where int8 could wrap around


BITS_MAX = 7  # a column is int8


@dataclass(frozen=True, slots=True)
class Field:
    """Where a variable lies in a state: byte, bit, width; its value is the bits plus `lo`."""

    var: FlatVar
    byte: int
    shift: int
    width: int

    @property
    def top(self) -> int:
        """The largest value that it may hold: its type's, or what fits where the type has none."""
        return self.var.lo + (1 << self.width) - 1 if self.var.hi is None else self.var.hi


class Layout:
    """Every variable's field, and the size of a state in 64-bit words."""

    def __init__(self, variables: Iterable[FlatVar], counter_bits: int) -> None:
        self.fields: dict[str, Field] = {}
        used: list[int] = []
        sized = []
        for var in variables:
            width = counter_bits if var.hi is None else max(1, (var.hi - var.lo).bit_length())
            if width > BITS_MAX:
                raise ValueError(f"'{var.name}' needs {width} bits; a column holds {BITS_MAX}: lower counter_bits")
            sized.append((width, var))
        for width, var in sorted(sized, key=lambda item: -item[0]):
            byte = next((i for i, bits in enumerate(used) if bits + width <= 8), None)
            if byte is None:
                byte = len(used)
                used.append(0)
            self.fields[var.name] = Field(var, byte, used[byte], width)
            used[byte] += width
        self.bits = sum(used)
        self.words = max(1, (len(used) + 7) // 8)

    def pack(self, values: dict[str, int]) -> NDArray[np.uint64]:
        """One state from flat values, as a row of words [1, words]."""
        row = np.zeros(self.words * 8, np.uint8)
        for name, value in values.items():
            place = self.fields[name]
            row[place.byte] |= (int(value) - place.var.lo) << place.shift
        return row.view(np.uint64)[None, :]

    def unpack(self, row: NDArray[np.uint64]) -> dict[str, int]:
        """The flat values of one state."""
        data = row.view(np.uint8)
        return {name: (int(data[f.byte]) >> f.shift & (1 << f.width) - 1) + f.var.lo for name, f in self.fields.items()}

    def columns(self, rows: NDArray[np.uint64], names: Iterable[str] | None = None) -> dict[str, Column]:
        """The values of every variable, or of `names`, over `rows` [n, words]: bool, or int8."""
        data = np.ascontiguousarray(rows.view(np.uint8).T)  # a byte of all states is one run of memory
        out: dict[str, Column] = {}
        for name in self.fields if names is None else names:
            f = self.fields[name]
            if f.var.type == BOOL:
                bit = data[f.byte] & np.uint8(1 << f.shift)
                out[name] = bit.view(bool) if f.shift == 0 else bit != 0
                continue
            raw = data[f.byte] >> np.uint8(f.shift) if f.shift else data[f.byte]
            value = (raw & np.uint8((1 << f.width) - 1)).view(np.int8)
            out[name] = value + np.int8(f.var.lo) if f.var.lo else value
        return out


def extent(node: Node, fields: Mapping[str, Field]) -> tuple[int, int]:
    """The least and the largest value that a number can have, as far as the fields say."""
    if isinstance(node, Const):
        return int(node.value), int(node.value)
    if isinstance(node, Ref):
        return fields[node.name].var.lo, fields[node.name].top
    assert isinstance(node, Op)
    (low, high), (other_low, other_high) = (extent(a, fields) for a in node.args[-2:])
    if node.op == "+":
        return low + other_low, high + other_high
    if node.op == "-":
        return low - other_high, high - other_low
    return min(low, other_low), max(high, other_high)  # ite


def narrow(node: Node, fields: Mapping[str, Field]) -> bool:
    """Whether every number within `node` fits the columns' int8, so that none wraps around."""
    if node.type == INT:
        low, high = extent(node, fields)
        if not -128 <= low <= high <= 127:
            return False
    return all(narrow(child, fields) for child in children(node))


class Program:
    """Straight-line NumPy code for many expressions, each distinct sub-expression once."""

    def __init__(self, layout: Layout, roots: Sequence[Node]) -> None:
        self.fields = layout.fields
        self.index = {name: place for place, name in enumerate(layout.fields)}
        self.lines: list[str] = []
        self.known: dict[object, str] = {}
        outputs = [self.emit(root) for root in roots]
        body = "\n    ".join(self.lines) or "pass"
        source = f"def run(c, where):\n    {body}\n    return [{', '.join(outputs)}]\n"
        space: dict[str, Any] = {"int8": np.int8, "int64": np.int64, "add": np.add, "subtract": np.subtract}
        exec(compile(source, "<numpy reading>", "exec"), space)
        self.run_raw = space["run"]

    def emit(self, node: Node) -> str:
        if isinstance(node, Const):
            if node.type == BOOL:
                return repr(bool(node.value))
            return f"{'int8' if narrow(node, self.fields) else 'int64'}({int(node.value)})"
        if isinstance(node, Ref):
            return f"c[{self.index[node.name]}]"
        assert isinstance(node, Op)
        args = [self.emit(a) for a in node.args]
        if node.op in ("not", "implies") and args[0] in ("True", "False"):
            raise TypeError("a constant should have been folded away")
        wide = node.op in WIDE and not narrow(node, self.fields)
        text = (WIDE if wide else NUMPY)[node.op].format(*args)
        name = self.known.get(text)
        if name is None:
            name = f"t{len(self.lines)}"
            self.known[text] = name
            self.lines.append(f"{name} = {text}")
        return name

    def run(self, columns: Sequence[Column], n: int) -> list[Column]:
        """The value of every root over n states; constants are broadcast."""
        out = self.run_raw(columns, np.where)
        return [np.full(n, value) if isinstance(value, bool | np.generic) else value for value in out]


class Update:
    """What one step writes, over the rows in which it fires."""

    def __init__(self, layout: Layout, step: Step) -> None:
        self.layout = layout
        self.masks: dict[int, tuple[int, int]] = {}  # byte -> (bits to keep, constant bits to set)
        self.computed: list[tuple[Field, Node, tuple[str, ...]]] = []
        self.wide: set[str] = set()  # variables whose new value is computed in more than int8
        for name, value in step.updates.items():
            place = layout.fields.get(name)
            if place is None:
                continue  # never changes in this scope
            keep, put = self.masks.get(place.byte, (0xFF, 0))
            keep &= ~(((1 << place.width) - 1) << place.shift) & 0xFF
            if isinstance(value, Const) and place.var.lo <= value.value <= place.top:
                put |= (int(value.value) - place.var.lo) << place.shift
            elif isinstance(value, Ref) and value.name == name:
                continue
            else:
                self.computed.append((place, value, tuple({r.name for r in refs(value)})))
                if not narrow(value, layout.fields):
                    self.wide.add(name)
            self.masks[place.byte] = (keep, put)

    def apply(
        self, rows: NDArray[np.uint64], idx: NDArray[np.int64], columns: dict[str, Column]
    ) -> tuple[NDArray[np.uint64], str]:
        """The successors of the rows `idx`, and the name of a variable that left its range, or ''."""
        out = rows.take(idx, axis=0)
        data = out.view(np.uint8)
        wrong = ""
        late = []
        for place, value, names in self.computed:
            new = self.new(place, value, names, columns, idx)
            number = place.var.type != BOOL and not isinstance(place.var.type, Enum)
            if number and new.size and (int(new.min()) < place.var.lo or int(new.max()) > place.top):
                wrong = place.var.name
            late.append((place, new))
        for byte, (keep, put) in self.masks.items():
            data[:, byte] = data[:, byte] & np.uint8(keep) | np.uint8(put)
        for place, new in late:
            bits = (new.astype(np.int16) - place.var.lo).astype(np.uint8) & np.uint8((1 << place.width) - 1)
            data[:, place.byte] |= bits << np.uint8(place.shift)
        return out, wrong

    def new(
        self, place: Field, value: Node, names: Sequence[str], columns: dict[str, Column], idx: NDArray[np.int64]
    ) -> Column:
        """The exact value that one variable gets in the rows `idx`, whether or not it fits."""
        local = {name: columns[name].take(idx) for name in names}
        if place.var.name in self.wide:
            local = {name: c if c.dtype == bool else c.astype(np.int64) for name, c in local.items()}
        return evaluate_columns(value, local)


def _scalar(value: int) -> Any:
    """A number as the narrowest of the two column types."""
    return np.int8(value) if -128 <= value <= 127 else np.int64(value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "const": lambda value, type_: _scalar(int(value)) if type_ != BOOL else np.bool_(value),
    "implies": lambda a, b: ~a | b,
    "or": operator.or_,
    "and": operator.and_,
    "not": operator.invert,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "+": operator.add,
    "-": operator.sub,
    "ite": np.where,
}


def evaluate_columns(node: Node, columns: dict[str, Column]) -> Column:
    """One expression over columns, by walking the tree (updates are small)."""
    value: Column = read(node, FUNCTIONS, lambda ref: columns[ref.name])
    return value


def initial_values(flat: Flat) -> dict[str, int]:
    """The flat values of the initial state of a scope whose constants are numbers."""
    out: dict[str, int] = {}
    for name, var in flat.vars.items():
        assert isinstance(var.init, Const), name
        out[name] = int(var.init.value)
    return out
