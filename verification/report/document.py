"""The tables of docs/proof.md, generated from the spec between markers, and the check that they have not drifted.

A block stands between `<!-- generated: NAME spec=DIGEST -->` and `<!-- end of NAME -->`; the rest of the page is
written by hand and is left as it is. No proof is run: the tables say what is asked, not what was found.

    python -m verification.report.document            write the blocks
    python -m verification.report.document --check    exit 1, naming each place that is not what the spec says now
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlt_fsm.load import load
from rlt_fsm.model import Property, Spec
from rlt_fsm.schema import spec_directory
from verification.report.summary import BUILT_IN

# Kind of question -> the methods that have an answer to it. What a method's answer rests on is in `summary.METHODS`.
APPLIES: dict[str, tuple[str, ...]] = {
    "always": ("explicit", "induction", "cvc5", "spin"),
    "lemma": ("explicit", "induction", "cvc5"),
    "possible": ("explicit",),
    "leads_to": ("explicit",),
    "sometimes": ("explicit",),
    "refinement": ("refinement",),
    "rests": ("explicit",),
    "ranking": ("ranking",),
    "agreement": ("explicit", "spin"),
}
_BLOCK = re.compile(
    r"<!-- generated: (?P<name>\w+) spec=(?P<spec>\S*) -->\n(?P<body>.*?)<!-- end of (?P=name) -->", re.DOTALL
)
_FAMILY = re.compile(r"^\| [SL]\d+")  # a row of the hand-written table of fault families; its second cell: proved by
_WORD = re.compile(r"`([a-z][a-z0-9_]*)`")


def blocks(spec: Spec) -> dict[str, str]:
    """The text of every block, by its name."""
    items = spec.need_system().properties
    return {
        "properties": _properties(p for p in items if p.kind not in ("lemma", "sometimes")),
        "witnesses": _table(
            ["Witness", "What it shows to be possible"],
            [[f"`{p.name}`", p.doc.strip()] for p in items if p.kind == "sometimes"],
        ),
        "lemmas": _table(["Lemma", "Serves"], [[f"`{p.name}`", p.doc.strip()] for p in items if p.kind == "lemma"]),
        "scopes": _scopes(spec),
        "faults": _faults(items),
    }


def page(spec: Spec, text: str) -> str:
    """The page with every block as the spec says now. Raises ValueError for an unknown or a missing block."""
    wanted = blocks(spec)
    found = [match["name"] for match in _BLOCK.finditer(text)]
    for name in found:
        if name not in wanted:
            raise ValueError(f"no generated block is called '{name}'; known: {', '.join(wanted)}")
    for name in wanted:
        if found.count(name) != 1:
            raise ValueError(f"block '{name}' stands {found.count(name)} times; write '{_block(name, '', '')}' once")
    return _BLOCK.sub(lambda match: _block(match["name"], spec.digest, wanted[match["name"]]), text)


def drift(spec: Spec, path: Path) -> list[str]:
    """What in the page is not what the spec says now, one line each. Empty: all is up to date."""
    try:
        text = path.read_text(encoding="utf-8")
        new = page(spec, text)
    except (OSError, ValueError) as error:
        return [f"{path}: {error}"]
    out = []
    wanted = {match["name"]: match[0] for match in _BLOCK.finditer(new)}
    for match in _BLOCK.finditer(text):
        if match[0] != wanted[match["name"]]:
            line = text.count("\n", 0, match.start()) + 1
            which = "is of another spec" if match["spec"] != spec.digest else "is not what the spec says"
            out.append(f"{path}:{line}: generated block '{match['name']}' {which}")
    known = {p.name for p in spec.need_system().properties} | set(BUILT_IN)
    for number, row in enumerate(text.splitlines(), 1):
        if _FAMILY.match(row):
            proved_by = row.split("|")[2]
            wrong = [word for word in _WORD.findall(proved_by) if word not in known]
            out += [f"{path}:{number}: '{word}' is no property of the spec" for word in wrong]
    return out


def _block(name: str, digest: str, body: str) -> str:
    return f"<!-- generated: {name} spec={digest} -->\n{body}<!-- end of {name} -->"


def _properties(items: Iterable[Property]) -> str:
    rows = [[f"`{p.name}`", p.kind, p.doc.strip(), ", ".join(APPLIES[p.kind]), ", ".join(p.answers)] for p in items]
    for name, (title, doc) in BUILT_IN.items():
        if name != "induction":
            by = APPLIES.get(name, APPLIES["always"])
            rows.append([f"`{name}`: {title}", "built in", doc, ", ".join(by), ""])
    return _table(["Property", "Kind", "What it says", "Asked by", "Answers"], rows)


def _scopes(spec: Spec) -> str:
    rows = []
    for scope in spec.need_system().scopes.values():
        sizes = ", ".join(f"{v} {k}" for k, v in scope.sizes.items())
        consts = ", ".join(f"{k} {v}" for k, v in scope.consts.items() if v)
        asks = ", ".join(f"`{name}`" for name in scope.asks) or "all"
        if scope.symmetry:
            asks = "none: states up to the numbering of instances"
        rows.append([scope.name, sizes, consts, ", ".join(scope.suites), asks, scope.doc.strip()])
    return _table(["Scope", "Sizes", "Constants; others are 0", "Suites", "Liveness asked", "What it is for"], rows)


def _faults(items: Sequence[Property]) -> str:
    """Each fault that some property answers, with all that do."""
    found: dict[str, list[str]] = {}
    for item in items:
        for fault in item.answers:
            found.setdefault(fault, []).append(f"`{item.name}`")
    return _table(["Fault", "Answered by"], [[fault, ", ".join(found[fault])] for fault in sorted(found)])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    lines += ["| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the blocks, or check them. Exit codes: 0 up to date, 1 not, 2 the page cannot be generated."""
    parser = argparse.ArgumentParser(
        prog="python -m verification.report.document",
        description="Keep the generated tables of docs/proof.md equal to the spec.",
        epilog="exit codes: 0 up to date, 1 not up to date, 2 bad usage, bad spec or bad page",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 naming what is not up to date")
    default = spec_directory().parent / "docs" / "proof.md"
    parser.add_argument("--page", type=Path, default=default, help="the page (default: docs/proof.md)")
    args = parser.parse_args(argv)
    spec = load()
    if args.check:
        found = drift(spec, args.page)
        for line in found:
            print(line, file=sys.stderr)
        if found:
            print("run `python -m verification.report.document`, or mend the rows that are named", file=sys.stderr)
        return 1 if found else 0
    try:
        text = page(spec, args.page.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{args.page}: {error}", file=sys.stderr)
        return 2
    args.page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
