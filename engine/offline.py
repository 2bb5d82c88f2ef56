"""Answer a file of prompts into a file of outputs; what is done stays done when it is stopped and started again.

A line of the prompts is a JSON object: `prompt` (a text) or `prompt_ids`, perhaps an `id`, and perhaps any field of
SamplingParams, which goes before the defaults of the run; other fields are refused by name. A line of the outputs has
the id, `text`, `token_ids`, `exit_depths`, `finish_reason` and the log-probabilities that were asked for; or `error`,
where this prompt cannot be served. Lines are written as requests end, so their order is not that of the prompts.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

from engine.config import ConfigError, SamplingParams
from engine.schedule.scheduler import SchedulerError

IN_FLIGHT_MAX = 256
"""Requests that the engine holds at a time: enough to fill any batch, few enough for a file of any length."""

PROGRESS_SECONDS = 2.0

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

    def add_request(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> str: ...

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
                raise ConfigError(
                    "id", prompt.id, f"{path} has it in lines {places[prompt.id]} and {number}; ids are unique"
                )
            places[prompt.id] = number
            prompts.append(prompt)
    return prompts


def _prompt(name: str, line: str, defaults: SamplingParams) -> Prompt:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ConfigError("line", type(row).__name__, "give a JSON object")
        name = str(row.pop("id", name))
        text: Any = row.pop("prompt", None)
        ids: Any = row.pop("prompt_ids", None)
        if (text is None) == (ids is None):
            raise ConfigError("prompt", text, "give either prompt or prompt_ids")
        if text is not None and not isinstance(text, str):
            raise ConfigError("prompt", text, "give a text, or token ids as prompt_ids")
        if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
            raise ConfigError("prompt_ids", ids, "give a list of token ids")
        strange = next((key for key in row if key not in _FIELDS), None)
        if strange is not None:
            raise ConfigError(strange, row[strange], f"is no field of a prompt; known: {', '.join(sorted(_FIELDS))}")
        params = replace(defaults, **row)
    except (ValueError, TypeError) as error:
        return Prompt(name, "", defaults, f"{error}")
    return Prompt(name, text if isinstance(text, str) else list(ids or ()), params)


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
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        tally = answer_all(engine, [p for p in prompts if p.id not in done], write, progress)
    return replace(tally, skipped=sum(p.id in done for p in prompts))


def answer_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    write: Callable[[dict[str, Any]], None],
    progress: Callable[[str], None] | None = None,
) -> Tally:
    """Answer every prompt; `write` gets the line of each as it ends."""
    tally, rest, flying = Tally(), deque(prompts), set[str]()
    started = shown = time.monotonic()
    while rest or flying:
        while rest and len(flying) < IN_FLIGHT_MAX:
            prompt = rest.popleft()
            error = prompt.error or _ask(engine, prompt)
            if error:
                tally.failed += 1
                write({"id": prompt.id, "error": error})
            else:
                flying.add(prompt.id)
        for answer in engine.step() if flying else ():
            if answer.request_id in flying:
                flying.discard(answer.request_id)
                tally.answered += 1
                tally.tokens += len(answer.token_ids)
                write(output_of(answer))
        now = time.monotonic()
        if progress is not None and now - shown > PROGRESS_SECONDS:
            shown = now
            ended, rate = tally.answered + tally.failed, tally.tokens / (now - started)
            progress(f"{ended} of {len(prompts)} done, {len(flying)} in flight, {rate:,.0f} tokens/s")
    return tally


def _ask(engine: Engine, prompt: Prompt) -> str:
    """Queue it; why it cannot be served, or "" where it can."""
    try:
        engine.add_request(prompt.prompt, prompt.params, prompt.id)
    except (ConfigError, SchedulerError) as refused:
        return str(refused)
    return ""


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
