"""Answer a file of prompts into a file of outputs; what is done stays done when it is stopped and started again.

A line of the prompts is a JSON object: `prompt` (a text) or `prompt_ids`, perhaps an `id`, and perhaps any field of
SamplingParams, which goes before the defaults of the run. A line of the outputs has the id, `text`, `token_ids`,
`exit_depths`, `finish_reason` and the log-probabilities that were asked for; or `error`, where this prompt cannot be
served. Lines are written as requests end, so their order is not that of the prompts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from engine.config import ConfigError, SamplingParams

IN_FLIGHT_MAX = 256
"""Requests that the engine holds at a time: enough to fill any batch, few enough for a file of any length."""

_FIELDS = {f.name for f in fields(SamplingParams)}


class Answer(Protocol):
    """What an engine says of a finished request."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def text(self) -> str | None: ...

    @property
    def exit_depths(self) -> list[int]: ...

    @property
    def logprobs(self) -> list[float | None]: ...

    @property
    def top_logprobs(self) -> list[list[tuple[int, float]]]: ...

    @property
    def finish_reason(self) -> str | None: ...


class Engine(Protocol):
    """LLMEngine or PDEngine."""

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None) -> str: ...

    def step(self) -> Sequence[Answer]: ...


@dataclass(frozen=True)
class Prompt:
    """One line of the file. error: why it cannot be asked; empty if it can."""

    id: str
    prompt: str | list[int]
    params: SamplingParams
    error: str = ""


@dataclass
class Tally:
    """What became of the prompts. skipped: answered by an earlier run."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0


def read_prompts(path: Path, defaults: SamplingParams) -> list[Prompt]:
    """Every line of the file. A line without an id gets `line-N`.

    Raises ConfigError where two lines have one id; a line that is wrong in any other way is a Prompt with its error.
    """
    prompts: list[Prompt] = []
    places: dict[str, int] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            prompt = _prompt(f"line-{number}", line, defaults)
            if prompt.id in places:
                raise ConfigError("id", prompt.id, f"{path} has it in lines {places[prompt.id]} and {number}; ids are unique")
            places[prompt.id] = number
            prompts.append(prompt)
    return prompts


def _prompt(name: str, line: str, defaults: SamplingParams) -> Prompt:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ConfigError("line", type(row).__name__, "give a JSON object")
        name = str(row.pop("id", name))
        text, ids = row.pop("prompt", None), row.pop("prompt_ids", None)
        if (text is None) == (ids is None):
            raise ConfigError("prompt", text, "give either prompt or prompt_ids")
        if text is not None and not isinstance(text, str):
            raise ConfigError("prompt", text, "give a text, or token ids as prompt_ids")
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise ConfigError("prompt_ids", ids, "give a list of token ids")
        params = replace(defaults, **{key: value for key, value in row.items() if key in _FIELDS})
    except (ValueError, TypeError) as error:
        return Prompt(name, "", defaults, f"{error}")
    return Prompt(name, text if text is not None else ids, params)


def answered(path: Path) -> set[str]:
    """The ids that an earlier run has written; a last line that was cut off is removed from the file."""
    done: set[str] = set()
    if not path.exists():
        return done
    whole = 0
    with path.open("rb") as file:
        for line in file:
            try:
                done.add(str(json.loads(line)["id"]))
            except (ValueError, KeyError, TypeError):
                if line.endswith(b"\n"):
                    raise ConfigError("out", str(path), "holds lines that are no outputs; name another file") from None
                break
            if not line.endswith(b"\n"):
                break
            whole += len(line)
    if whole < path.stat().st_size:
        os.truncate(path, whole)
        done = answered(path)
    return done


def answer_file(
    engine: Engine, prompts: Sequence[Prompt], out: Path, progress: Callable[[str], None] | None = None
) -> Tally:
    """Answer every prompt that `out` does not have yet, and append the answers to it.

    An error of one prompt is its output; an error of the engine ends the run, and loses only what was in flight.
    """
    done = answered(out)
    tally = Tally(skipped=sum(p.id in done for p in prompts))
    rest = (p for p in prompts if p.id not in done)
    total, started, shown = len(prompts) - tally.skipped, time.monotonic(), time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        flying: set[str] = set()
        for _ in _fill(engine, rest, flying, file, tally):
            for answer in engine.step():
                if answer.request_id in flying:
                    flying.discard(answer.request_id)
                    tally.answered += 1
                    tally.tokens += len(answer.token_ids)
                    _write(file, output_of(answer))
            now = time.monotonic()
            if progress is not None and now - shown > 2:
                shown = now
                ended, rate = tally.answered + tally.failed, tally.tokens / (now - started)
                progress(f"{ended} of {total} done, {len(flying)} in flight, {rate:,.0f} tokens/s")
    return tally


def output_of(answer: Answer) -> dict[str, Any]:
    """The line of one answer."""
    row: dict[str, Any] = {
        "id": answer.request_id,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "exit_depths": answer.exit_depths,
        "finish_reason": str(answer.finish_reason),
    }
    if any(value is not None for value in answer.logprobs):
        row["logprobs"] = answer.logprobs
    if any(answer.top_logprobs):
        row["top_logprobs"] = answer.top_logprobs
    return row


def _fill(engine: Engine, rest: Iterator[Prompt], flying: set[str], file: Any, tally: Tally) -> Iterator[None]:
    """Keep the engine supplied; yields once per step that it should make, until nothing is left."""
    more = True
    while True:
        while more and len(flying) < IN_FLIGHT_MAX:
            prompt = next(rest, None)
            if prompt is None:
                more = False
                break
            error = prompt.error
            if not error:
                try:
                    engine.add_request(prompt.prompt, prompt.params, prompt.id)
                    flying.add(prompt.id)
                    continue
                except ValueError as refused:
                    error = str(refused)
            tally.failed += 1
            _write(file, {"id": prompt.id, "error": error})
        if not flying:
            return
        yield


def _write(file: Any, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
