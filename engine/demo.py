"""The whole path once, on real prompts: what `make demo` shows of the engine.

Answers every prompt concurrently over one prefill and one decode worker, asks some of them a second time
only to cancel them midway, and prints each answer beside the right one, with the times of its milestones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from engine.config import SamplingParams
from engine.pd.config import PDConfig
from engine.pd.coordinator import MILESTONES
from engine.pd.engine import PDEngine, PDOutput

CANCEL_EVERY = 5  # of the prompts, asked again and cancelled at a different point each
TOKENS_WIDE = 34


def run_demo(model: Any, rows: list[dict[str, Any]], config: PDConfig, params: Callable[[int], SamplingParams]) -> bool:
    """Print the run; True where every answer is right and nothing is still held at the end.

    rows: id, prompt, answer, max_tokens. params: the sampling parameters for a number of tokens.
    """
    print(
        f"starting 1 prefill worker ({config.prefill_device}) and 1 decode worker ({config.decode_device})", flush=True
    )
    with PDEngine(model, config) as engine:
        print(f"serving; answering {len(rows)} prompts, cancelling {len(rows[::CANCEL_EVERY])} more midway", flush=True)
        outputs, cancelled = _ask(engine, rows, params)
        settled = engine.drain()
        open_now = engine.obligations()
        moved = engine.bytes_moved
    ended_well = not engine.failure and all(client.stopped is not None for client in engine.clients.values())
    print(f"\n{'request':12} {'':5} {'answer':{TOKENS_WIDE}} {'depth':>5}  milestones, ms after submission")
    right = 0
    for row in rows:
        output = outputs[row["id"]]
        ok = output.text == row["answer"]
        right += ok
        print(_line(row["id"], "right" if ok else "WRONG", output))
        if not ok:
            print(f"{'':18} wanted {row['answer']!r}")
    for output in cancelled:
        print(_line(output.request_id, output.finish_reason, output))
    aborted = sum(o.finish_reason == "abort" for o in cancelled)
    print(f"\nanswers right: {right} of {len(rows)}; cancelled midway: {aborted} of {len(cancelled)}")
    print(f"bytes moved: {moved:,}")
    print(f"obligations open: {len(open_now)}")
    for item in open_now:
        print(f"  {item.request_id} {item.resource}: {item.holder}, {item.age_s:.1f} s")
    complete = all(set(MILESTONES) <= set(outputs[row["id"]].timeline) for row in rows)
    if not complete:
        print("some request did not pass all eight milestones")
    if not ended_well:
        print(f"the workers did not end in good order: {engine.failure or 'one did not say its last words'}")
    return right == len(rows) and settled and not open_now and complete and aborted > 0 and ended_well


def _ask(
    engine: PDEngine, rows: list[dict[str, Any]], params: Callable[[int], SamplingParams]
) -> tuple[dict[str, PDOutput], list[PDOutput]]:
    """Submit everything at once; cancel each extra request when it has reached its point."""
    points: dict[str, str] = {}
    for place, row in enumerate(rows):
        engine.add_request(row["prompt"], params(row["max_tokens"]), row["id"])
        if place % CANCEL_EVERY == 0:
            name = f"{row['id']}-cancel"
            engine.add_request(row["prompt"], params(row["max_tokens"]), name)
            points[name] = MILESTONES[len(points) % 6]
    outputs: dict[str, PDOutput] = {}
    cancelled: list[PDOutput] = []
    wanted = len(rows) + len(points)
    shown = 0
    while len(outputs) + len(cancelled) < wanted:
        for name in engine.reached(points):
            engine.abort(name)
            points.pop(name)
        for output in engine.step(0.002):
            if output.request_id.endswith("-cancel"):
                cancelled.append(output)
                points.pop(output.request_id, None)
            else:
                outputs[output.request_id] = output
        done = len(outputs) + len(cancelled)
        if done >= shown + 8:
            shown = done
            print(f"  {done} of {wanted} done", file=sys.stderr, flush=True)
    return outputs, cancelled


def _line(name: str, verdict: str, output: PDOutput) -> str:
    depths = output.exit_depths[1:]
    depth = f"{sum(depths) / len(depths):.2f}" if depths else "-"
    text = output.text if len(output.text) <= TOKENS_WIDE else output.text[: TOKENS_WIDE - 1] + "~"
    times = " ".join(f"{m} {output.timeline[m] * 1000:.0f}" for m in MILESTONES if m in output.timeline)
    return f"{name:12} {verdict:5} {text:{TOKENS_WIDE}} {depth:>5}  {times}"
