"""Files of prompts: what is answered, what is refused, and what is left after a stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main
from engine.config import CacheConfig, ConfigError, SamplingParams
from engine.embedded.files import directory
from engine.local import LLMEngine
from engine.offline import answer_file, answered, read_prompts

DEFAULTS = SamplingParams(max_tokens=4, min_loops=1, exit_threshold=0.3)
GOOD = ["a71 q03 b55 k20 ?qb=", "a11 b22 ?ab=", "c05 d17 e40 ?ce="]


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    """The embedded model in one process."""
    return LLMEngine(directory(), CacheConfig(64))


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[Any]) -> Path:
    """A JSON-lines file of `rows`; a text goes in as it is."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def test_a_file_is_answered_as_generate_answers(engine: LLMEngine, tmp_path: Path) -> None:
    """Goal: the same answers, by id. Method: three prompts by file, one as token ids, and by `generate`."""
    ids = engine.tokenizer.encode(GOOD[2]).ids
    rows = [{"prompt": GOOD[0]}, {"id": "x", "prompt": GOOD[1], "max_tokens": 2}, {"prompt_ids": ids}]
    prompts = read_prompts(write(tmp_path / "in.jsonl", rows), DEFAULTS)

    tally = answer_file(engine, prompts, tmp_path / "deep" / "out.jsonl")

    found = {row["id"]: row for row in lines(tmp_path / "deep" / "out.jsonl")}
    expected = engine.generate(GOOD, [p.params for p in prompts])
    assert [found[name]["token_ids"] for name in ("line-1", "x", "line-3")] == [o.token_ids for o in expected]
    assert [found[name]["exit_depths"] for name in ("line-1", "x", "line-3")] == [o.exit_depths for o in expected]
    assert len(found["x"]["token_ids"]) <= 2 and (tally.answered, tally.failed, tally.skipped) == (3, 0, 0)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "Expecting"),
        ([1], "give a JSON object"),
        ({}, "give either prompt or prompt_ids"),
        ({"prompt": "a", "prompt_ids": [1]}, "give either prompt or prompt_ids"),
        ({"prompt": 3}, "give a text"),
        ({"prompt_ids": ["a"]}, "give a list of token ids"),
        ({"prompt": GOOD[0], "max_token": 3}, "max_token = 3: is no field of a prompt"),
        ({"prompt": GOOD[0], "max_tokens": 0}, "max_tokens = 0"),
        ({"prompt_ids": [10**6]}, "prompt"),
        ({"prompt": GOOD[0], "max_tokens": 400}, "pages"),
        ({"prompt": GOOD[0], "max_tokens": 5000}, "exceeds the model's 512 positions"),
    ],
)
def test_a_bad_prompt_is_its_own_error(engine: LLMEngine, row: Any, said: str, tmp_path: Path) -> None:
    """Goal: one bad line costs one line. Method: a bad line between two good ones."""
    prompts = read_prompts(write(tmp_path / "in.jsonl", [{"prompt": GOOD[0]}, row, {"prompt": GOOD[1]}]), DEFAULTS)

    tally = answer_file(engine, prompts, tmp_path / "out.jsonl")

    found = {r["id"]: r for r in lines(tmp_path / "out.jsonl")}
    assert (tally.answered, tally.failed) == (2, 1)
    assert said in found["line-2"]["error"] and "error" not in found["line-1"]


def test_a_stopped_run_goes_on_where_it_was(engine: LLMEngine, tmp_path: Path) -> None:
    """Goal: nothing is answered twice, nothing is lost. Method: an output file cut in the middle of its second line."""
    prompts = read_prompts(write(tmp_path / "in.jsonl", [{"prompt": text} for text in GOOD]), DEFAULTS)
    out = tmp_path / "out.jsonl"
    answer_file(engine, prompts, out)
    whole = {row["id"]: row for row in lines(out)}
    first, second, _ = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(first + second[:-7])

    tally = answer_file(engine, prompts, out)

    assert (tally.answered, tally.skipped) == (2, 1)
    assert {row["id"]: row for row in lines(out)} == whole and len(lines(out)) == 3


def test_a_file_of_something_else_is_not_touched(tmp_path: Path) -> None:
    """Goal: `--out` destroys nothing. Method: a file that holds no outputs; ids that are there twice."""
    out = tmp_path / "notes.txt"
    out.write_text("my notes\nmore\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds lines that are no outputs"):
        answered(out)
    assert out.read_text(encoding="utf-8") == "my notes\nmore\n"

    twice = write(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}])
    with pytest.raises(ConfigError, match="in lines 1 and 2"):
        read_prompts(twice, DEFAULTS)


def test_the_command_answers_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: the command as people use it. Method: a file with one bad line, then the same command again."""
    source = write(tmp_path / "in.jsonl", [{"prompt": GOOD[0]}, {"prompt": GOOD[1], "stop": ["z"]}, {"prompt": 1}])
    out = tmp_path / "out.jsonl"
    asked = ["generate", "--single", "--prompts", str(source), "--out", str(out), "--max-tokens", "4"]

    assert main(asked) == 1
    assert "2 answered, 1 refused, 0 there before" in capsys.readouterr().out
    assert main(asked) == 0
    assert "0 answered, 0 refused, 3 there before" in capsys.readouterr().out
    assert main(["generate", "--single", *GOOD[:2], "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        row["text"] for row in sorted(lines(out), key=lambda r: r["id"])[:2]
    ]
