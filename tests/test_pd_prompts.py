"""The shipped prompts through the P/D pair: the same tokens as one process, and text that notices wrong pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pd_tools import Hold, Stranger, outputs_of, until

from engine.cli import recommended
from engine.config import CacheConfig, SamplingParams
from engine.embedded.files import directory
from engine.local import LLMEngine
from engine.pd import messages as m
from engine.pd.config import PDConfig
from engine.pd.engine import PDEngine

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (directory() / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
]
PAGE = 16


def params(row: dict[str, Any]) -> SamplingParams:
    """Greedy, with the checkpoint's own exit settings."""
    exits = recommended(directory())
    return SamplingParams(
        max_tokens=row["max_tokens"], min_loops=int(exits["min_loops"]), exit_threshold=exits["exit_threshold"]
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[PDEngine]:
    """One pair for the whole module."""
    with PDEngine(directory(), PDConfig(prefill_cache=CacheConfig(2048), decode_cache=CacheConfig(2048))) as pair:
        yield pair


def test_all_prompts_give_the_tokens_of_one_process_and_the_right_answers(engine: PDEngine) -> None:
    """Goal: the main job on real input. Method: the whole file, concurrently, against LLMEngine and the task."""
    prompts, each = [r["prompt"] for r in ROWS], [params(r) for r in ROWS]
    wanted = LLMEngine(directory(), CacheConfig(4096)).generate(prompts, each)

    outputs = engine.generate(prompts, each)

    assert len(ROWS) >= 32
    assert [o.token_ids for o in outputs] == [w.token_ids for w in wanted]
    assert [o.exit_depths for o in outputs] == [w.exit_depths for w in wanted]
    assert [o.text for o in outputs] == [r["answer"] for r in ROWS]
    assert engine.drain()
    assert engine.obligations() == []


def test_stop_texts_depths_and_logprobs_are_those_of_one_process(engine: PDEngine) -> None:
    """Goal: every way to end, exit and report goes through the handoff. Method: a stop text out of the middle of each
    answer, delayed exits, the depths of those run again as a trace, and top log-probabilities, against LLMEngine."""
    rows = sorted(ROWS, key=lambda r: -len(r["answer"]))[:6]
    prompts = [r["prompt"] for r in rows]
    stops = [replace(params(r), stop=(r["answer"][len(r["answer"]) // 2 :][:2],)) for r in rows]
    delayed = [replace(params(r), exit_mode="ouro_delayed", logprobs=True, top_logprobs=3) for r in rows]
    local = LLMEngine(directory(), CacheConfig(4096))
    first = local.generate(prompts, delayed)
    longest = max(r["max_tokens"] for r in rows)
    pad = (local.core.model.config.loops,) * longest
    traces = [
        SamplingParams(max_tokens=r["max_tokens"], min_loops=1, exit_trace=(*o.exit_depths, *pad))
        for r, o in zip(rows, first, strict=True)
    ]
    wanted = first + local.generate(prompts, stops) + local.generate(prompts, traces)

    outputs = engine.generate(prompts * 3, delayed + stops + traces)

    assert [o.token_ids for o in outputs] == [w.token_ids for w in wanted]
    assert [o.text for o in outputs] == [w.text for w in wanted]
    assert [o.finish_reason for o in outputs] == [str(w.finish_reason) for w in wanted]
    assert [o.exit_depths for o in outputs] == [w.exit_depths for w in wanted]
    for output, other in zip(outputs[: len(rows)], wanted, strict=False):
        for mine, theirs in zip(output.top_logprobs, other.top_logprobs, strict=True):
            assert [t for t, _ in mine] == [t for t, _ in theirs] and len(mine) == 3
    cut = outputs[len(rows) : 2 * len(rows)]
    for output, row in zip(cut, rows, strict=True):
        assert row["answer"].startswith(output.text) and len(output.text) < len(row["answer"])
    assert [o.exit_depths for o in outputs[2 * len(rows) :]] == [w.exit_depths for w in first]
    assert engine.drain()
    assert engine.obligations() == []


def _run(engine: PDEngine, row: dict[str, Any], commits: Hold, spoil: Any) -> str:
    """One request, spoiled when everything has landed and before D may activate it."""
    engine.add_request(row["prompt"], params(row))
    until(engine, lambda: bool(commits.kept))
    generation = engine.core.generations[commits.kept[0].tid]
    until(engine, lambda: "drained" in generation.timeline)
    assert generation.reservation is not None
    spoil(generation.reservation.tables)
    commits.let_go()
    (output,) = outputs_of(engine, 1)
    assert engine.drain()
    return output.text


def test_every_wrong_page_changes_the_answer(engine: PDEngine) -> None:
    """Goal: the comparison above can fail, for every page. Method: on a question that reads the whole prompt, a
    stranger zeroes one imported page after another, then puts another request's page in its place."""
    row = max((r for r in ROWS if len(r["prompt"]) >= 128), key=lambda r: len(r["answer"]) / len(r["prompt"]))
    other = next(r for r in ROWS if len(r["prompt"]) >= len(row["prompt"]) and r["prompt"][:8] != row["prompt"][:8])
    commits = Hold(engine, "decode", m.CommitToDecode)
    stranger = Stranger(engine)
    foreign: dict[str, Any] = {}

    def remember(tables: list[list[int]]) -> None:
        tid = commits.kept[0].tid
        foreign.update(engine.control("decode", "raw_pages", tid=tid, pages=len(other["prompt"]) // PAGE))

    assert _run(engine, row, commits, lambda tables: None) == row["answer"]
    assert _run(engine, other, commits, remember) == other["answer"]
    pages = len(row["prompt"]) // PAGE
    assert pages >= 8
    for page in range(pages):
        zeroed = _run(engine, row, commits, lambda tables, page=page: stranger.zero(engine, tables, page))
        assert zeroed != row["answer"], f"page {page} can be zero unnoticed"

        def swap(tables: list[list[int]], page: int = page) -> None:
            for pool, kind in ((stranger.geometry.key_ptr, 0), (stranger.geometry.value_ptr, 1)):
                for plane, table in enumerate(tables):
                    data = torch.frombuffer(bytearray(foreign["pages"][plane][page][kind]), dtype=torch.uint8)
                    stranger.write(pool, table[page], data, engine)

        assert _run(engine, row, commits, swap) != row["answer"], f"page {page} of another request goes unnoticed"
    stranger.close()
