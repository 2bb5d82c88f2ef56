"""`rlt-spec`: what it says, where it says it, and its exit codes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from walks import scope_walk

from rlt_fsm import replay as replay_module
from rlt_fsm.cli import main
from rlt_fsm.load import load
from rlt_fsm.schema import spec_directory
from rlt_fsm.trace import save

BAD = Path(__file__).parent / "bad_specs"
FUSE = """\
machine: Fuse
doc: A fuse.
states:
  whole: {initial: true}
  blown: {final: true}
transitions:
  - {on: surge, from: whole, to: blown}
"""


def test_check_says_in_one_line_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: a clean spec costs one line. Method: the shipped spec, its counts and its digest."""
    assert main(["check"]) == 0

    out, err = capsys.readouterr()
    spec = load()
    assert err == ""
    assert out.count("\n") == 1
    assert f"{len(spec.machines)} machines" in out
    assert spec.digest.startswith(re.search(r"digest (\w+)", out).group(1))  # type: ignore[union-attr]


def test_check_takes_files_and_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: any spec can be checked. Method: a directory, a file, both; then a path that is not there."""
    (tmp_path / "fuse.yaml").write_text(FUSE)

    assert main(["check", str(tmp_path)]) == 0
    assert main(["check", str(tmp_path / "fuse.yaml"), str(spec_directory() / "retirement.yaml")]) == 0
    assert capsys.readouterr().out.startswith("ok: 1 machines, 2 states, 1 transitions; digest ")
    assert main(["check", str(tmp_path / "fues.yaml")]) == 2
    assert "fues.yaml:1:1: unreadable" in capsys.readouterr().err


def test_mistakes_go_to_stderr_with_place_caret_and_hint(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: a mistake can be mended from what is said. Method: the four parts of one message."""
    assert main(["check", str(BAD / "unknown_state.yaml")]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    head, row, caret, hint = err.splitlines()
    assert re.search(r"unknown_state\.yaml:12:33: unknown-state: 'runing' is not a state", head)
    assert row[caret.index("^") : caret.rindex("^") + 1] == "runing"
    assert hint == "  did you mean 'running'? known: idle, running, done"


def test_a_warning_counts_unless_it_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: what is unused is seen, and can be lived with. Method: one warning, with and without the flag."""
    path = str(BAD / "unused_effect.yaml")

    assert main(["check", path]) == 2
    assert "1 warning" in capsys.readouterr().err
    assert main(["check", "--warnings-ok", path]) == 0
    out, err = capsys.readouterr()
    assert "unused-effect" in err
    assert out.startswith("ok: ")
    assert main(["check", "--warnings-ok", str(BAD / "dead_end.yaml")]) == 2


@pytest.mark.parametrize("argv", [[], ["chek"], ["replay"], ["check", "--nope"], ["render", "extra"]])
def test_bad_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: usage mistakes are told apart from findings. Method: argparse's exit."""
    with pytest.raises(SystemExit) as stop:
        main(argv)

    assert stop.value.code == 2
    assert "usage: rlt-spec" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["check", "--help"], ["render", "--help"], ["replay", "--help"]])
def test_help_teaches(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the help shows how, not only what. Method: examples and exit codes in each page of it."""
    with pytest.raises(SystemExit) as stop:
        main(argv)

    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "examples:" in out
    assert "exit codes: 0" in out


def test_render_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: pages that the spec has left behind are named. Method: write, check, edit one, check."""
    (tmp_path / "fuse.yaml").write_text(FUSE)
    out = tmp_path / "pages"
    argv = ["render", "--spec", str(tmp_path / "fuse.yaml"), "--out", str(out)]

    assert main(argv) == 0
    assert (out / "Fuse.md").is_file()
    (out / "Fuse.dot").write_text("digraph {}\n")
    capsys.readouterr()
    assert main([*argv, "--check"]) == 1
    err = capsys.readouterr().err
    assert f"{out / 'Fuse.dot'}: not what the spec says now" in err
    assert "Fuse.md" not in err


def test_render_of_a_bad_spec_is_2(tmp_path: Path) -> None:
    """Goal: nothing is drawn of what cannot be read. Method: a bad spec; no page appears."""
    assert main(["render", "--spec", str(BAD / "unknown_state.yaml"), "--out", str(tmp_path / "pages")]) == 2
    assert not (tmp_path / "pages").exists()


@pytest.mark.parametrize(("kind", "code"), [("ok", 0), ("violation", 1), ("inconclusive", 3)])
def test_replay_gives_each_verdict_its_code(
    kind: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Goal: scripts can tell the verdicts apart. Method: a replay that answers with each."""
    asked: list[object] = []

    def judge(spec: object, traces: object, consts: object) -> SimpleNamespace:
        asked.append((traces, consts))
        return SimpleNamespace(kind=kind, show=lambda: f"{kind}: because")

    monkeypatch.setattr(replay_module, "replay", judge)

    assert main(["replay", "a.jsonl", "b.jsonl", "--const", "steps=2"]) == code
    assert asked == [([Path("a.jsonl"), Path("b.jsonl")], {"steps": 2})]
    assert capsys.readouterr().out == f"{kind}: because\n"


def test_replay_judges_a_real_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the command and the judge fit together. Method: a random run, saved; then one event of it renamed."""
    path = tmp_path / "run.jsonl"
    save(path, scope_walk(load(), "one_long", 3).run(60).trace())

    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.startswith("ok: ")
    path.write_text(path.read_text().replace('"event":"admit"', '"event":"retire"', 1))
    assert main(["replay", str(path)]) == 1
    assert capsys.readouterr().out.startswith("violation: ")


def test_an_unreadable_trace_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: no traceback for what is not a trace. Method: a missing file, a file of other text, a bad constant."""
    (tmp_path / "x.jsonl").write_text("hello\n")

    assert main(["replay", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "x.jsonl")]) == 2
    assert "x.jsonl" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "x.jsonl"), "--const", "stepz=1"]) == 2
    assert "--const stepz=1" in capsys.readouterr().err
