"""docs/proof.md: its tables are the spec's, its hand-written rows name what exists, and drift is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from report_tools import hotel, shipped

from verification.report.document import blocks, drift, main, page

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "proof.md"


def test_the_page_is_up_to_date() -> None:
    """Goal: the page says what the spec says now. Method: the check that `make check` runs."""
    assert drift(shipped(), DOCUMENT) == []
    assert main(["--check"]) == 0


def test_every_test_that_it_names_exists() -> None:
    """Goal: an assumption is looked at where the page says so. Method: find each named test in its file."""
    text = DOCUMENT.read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", text)

    assert len(named) >= 10
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (DOCUMENT.parent / target).exists(), target


def test_every_fault_family_has_a_row_with_an_answer() -> None:
    """Goal: no family is passed over. Method: each has a proof, a test, or a place in the list of what is not here."""
    rows = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        match = re.match(r"^\| ([SL]\d+) ", line)
        if match is not None:
            rows[match[1]] = [cell.strip() for cell in line.strip("|").split("|")][1:]

    assert sorted(rows) == sorted([*(f"S{i}" for i in range(1, 15)), *(f"L{i}" for i in range(1, 8))])
    assert all(any(cells) for cells in rows.values())


def generated(tmp_path: Path) -> Path:
    """A page of the hotel with every block."""
    path = tmp_path / "proof.md"
    empty = "".join(f"<!-- generated: {name} spec= -->\n<!-- end of {name} -->\n\n" for name in blocks(hotel()))
    path.write_text(page(hotel(), "# By hand\n\n" + empty + "Also by hand.\n"), encoding="utf-8")
    return path


def test_generating_keeps_what_is_written_by_hand(tmp_path: Path) -> None:
    """Goal: only the blocks change, and only once. Method: generate twice; look at both kinds of text."""
    path = generated(tmp_path)
    text = path.read_text(encoding="utf-8")

    assert drift(hotel(), path) == []
    assert page(hotel(), text) == text
    assert text.startswith("# By hand\n") and text.endswith("Also by hand.\n")
    assert (
        "| `beds_are_counted` | always | Rooms are neither lost nor made. | explicit, induction, cvc5, spin | F103 |"
        in text
    )
    assert "| `the_desk_knows` | beds_are_counted. |" in text and "| F103 | `beds_are_counted` |" in text
    assert "| other | 1 r, 1 b | beds 1 |" in text
    assert "| none: states up to the numbering of instances | Three guests, two beds. |" in text


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("Rooms are neither lost nor made.", "Rooms are fine.", "block 'properties' is not what the spec says"),
        (f"scopes spec={hotel().digest}", "scopes spec=123", "block 'scopes' is of another spec"),
        ("<!-- end of lemmas -->", "", "block 'lemmas' stands 0 times"),
        ("generated: faults", "generated: fautls", "block 'faults' stands 0 times"),
        ("# By hand\n", "| S1 reuse | `beds_are_lost` | | |\n", "proof.md:1: 'beds_are_lost' is no property"),
    ],
)
def test_drift_is_found_at_its_line(before: str, after: str, said: str, tmp_path: Path) -> None:
    """Goal: a page that the spec has left behind fails the check. Method: one change of each kind."""
    path = generated(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf-8")

    found = drift(hotel(), path)

    assert len(found) == 1 and said in found[0] and found[0].startswith(str(path))


def test_a_missing_page_is_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: no page is no success. Method: check and write a page that is not there."""
    missing = tmp_path / "none.md"

    assert main(["--check", "--page", str(missing)]) == 1
    assert main(["--page", str(missing)]) == 2
    assert str(missing) in capsys.readouterr().err
