"""Measure a checkpoint on fresh held-out problems, and say it as a model card: `python -m engine.embedded.measure`.

Every figure of the card comes from here. The exit threshold is chosen on one set of problems and reported on another.
"""

from __future__ import annotations

import argparse
import random
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.embedded import tasks
from engine.embedded.evaluate import PAGE_TOKENS, Fault, Score, answers, score, stale_page, zero_page, zero_plane
from engine.embedded.files import directory
from engine.embedded.network import Network, load_network
from engine.embedded.tasks import Problem

THRESHOLDS = (0.3, 0.5, 0.9)
POINTS_LOST_MAX = 0.5  # of exact match in per cent, that leaving early may cost
FEW_KEYS = ((31, 1), (49, 1))  # (entries, asked) of the page faults
MANY_KEYS = ((29, 10), (26, 20), (47, 10))
PAGE_KINDS = ("asked", "not asked", "tail")


@dataclass(frozen=True, slots=True)
class Measured:
    """Scores of the reporting set unless said otherwise. min_loops is 1 but in `forced`."""

    full: Score
    chosen: float  # the exit threshold, chosen on another set
    gated: dict[float, Score]  # by exit threshold
    forced: dict[int, Score]  # by the loop at which every token after the first leaves
    cells: dict[tuple[int, int], tuple[Score, Score]]  # by (entries, asked): full depth, chosen threshold
    scattered: tuple[Score, Score]  # random entries and asked: full depth, chosen threshold
    pages: dict[tuple[str, str, str], Score]  # by (fault, keys asked, kind of page)
    planes: dict[tuple[int, int], Score]  # by (loop from 1, layer from 0) zeroed


def page_kind(item: Problem, page: int) -> str:
    """What the page holds: an entry that is asked for, only other entries, or the question (`tail`)."""
    first = page * PAGE_TOKENS
    if first + PAGE_TOKENS > tasks.ENTRY_TOKENS * item.entries:
        return "tail"
    return (
        "asked" if set(item.prompt[first : first + PAGE_TOKENS : tasks.ENTRY_TOKENS]) & set(item.keys) else "not asked"
    )


def fresh(seed: int, shapes: Sequence[tuple[int, int]], per_shape: int) -> list[Problem]:
    """per_shape held-out problems of each (entries, asked), in that order."""
    rng = random.Random(seed)
    return [tasks.held_out(rng, *shape) for shape in shapes for _ in range(per_shape)]


def fresh_scattered(seed: int, count: int) -> list[Problem]:
    """Held-out problems with 8 to 50 entries, 1 to 28 keys asked and prompts of 40 to 200 tokens, all random."""
    rng = random.Random(seed)
    out: list[Problem] = []
    while len(out) < count:
        entries = rng.randint(8, 50)
        asked = rng.randint(1, min(28, entries))
        if 40 <= tasks.prompt_tokens(entries, asked) <= 200:
            out.append(tasks.held_out(rng, entries, asked))
    return out


def measure(network: Network, seed: int, per_shape: int, say: Callable[[str], None] = lambda _: None) -> Measured:
    """Everything the card reports. per_shape: problems of each shipped shape, at least 2; say: told of progress."""
    chosen = choose_threshold(network, fresh(seed, tasks.SHAPES, per_shape))
    say(f"exit threshold {chosen}; measuring every shape")
    cells: dict[tuple[int, int], tuple[Score, Score]] = {}
    problems = fresh(seed + 1, tasks.SHAPES, per_shape)
    for place, shape in enumerate(tasks.SHAPES):
        some = problems[place * per_shape : (place + 1) * per_shape]
        found = score(network, some), score(network, some, chosen)
        cells[shape] = (cells[shape][0] + found[0], cells[shape][1] + found[1]) if shape in cells else found
    full, at_chosen = (total([found[place] for found in cells.values()]) for place in range(2))
    gated = {t: at_chosen if t == chosen else score(network, problems, t) for t in THRESHOLDS}
    say("measuring forced exits and scattered shapes")
    forced = {loop: score(network, problems, 0.0, loop) for loop in range(1, network.shape.loops)}
    mixed = fresh_scattered(seed + 2, 12 * per_shape)
    scattered = score(network, mixed), score(network, mixed, chosen)
    say("measuring faults")
    pages = page_faults(network, seed + 3, per_shape)
    many = fresh(seed + 4, MANY_KEYS, per_shape)
    planes = {
        (loop, layer): score(network, many, fault=zero_plane(loop, layer))
        for loop in range(1, network.shape.loops + 1)
        for layer in range(network.shape.layers)
    }
    return Measured(full, chosen, gated, forced, cells, scattered, pages, planes)


def choose_threshold(network: Network, problems: Sequence[Problem]) -> float:
    """The threshold of least mean depth that costs at most POINTS_LOST_MAX; 1.0 where all cost more."""
    full = score(network, problems)
    gated = {t: score(network, problems, t) for t in THRESHOLDS}
    allowed = [t for t, found in gated.items() if 100 * (full.exact - found.exact) <= POINTS_LOST_MAX]
    return min(allowed, key=lambda t: gated[t].mean_depth, default=1.0)


def total(scores: Sequence[Score]) -> Score:
    """All problems of some scores, at least one, as one."""
    out = scores[0]
    for found in scores[1:]:
        out += found
    return out


def page_faults(network: Network, seed: int, per_shape: int) -> dict[tuple[str, str, str], Score]:
    """Exact match at full depth with one page zeroed or stale, by kind of page, over every page of every problem."""
    faults: dict[str, Callable[[int], Fault]] = {"zero": zero_page, "stale": stale_page}
    counts: dict[tuple[str, str, str], list[int]] = {}
    for keys, shapes in (("1 key", FEW_KEYS), ("10 or 20 keys", MANY_KEYS)):
        for shape in shapes:
            problems = fresh(seed, [shape], per_shape)
            for name, fault in faults.items():
                for page in range(-(-len(problems[0].prompt) // PAGE_TOKENS)):
                    outputs = answers(network, problems, fault=fault(page))
                    for item, output in zip(problems, outputs, strict=True):
                        count = counts.setdefault((name, keys, page_kind(item, page)), [0, 0])
                        count[0] += 1
                        count[1] += output.tokens == item.wanted
    return {key: Score(cases, right, (0,) * network.shape.loops) for key, (cases, right) in counts.items()}


def report(measured: Measured) -> str:
    """The figures as Markdown."""
    m = measured
    lengths = [tasks.prompt_tokens(*shape) for shape in m.cells]
    per_shape = next(iter(m.cells.values()))[0].problems
    lines = [
        "## Held-out figures",
        "",
        paragraph(
            f"{m.full.problems} fresh problems over the shapes of the shipped prompts ({min(lengths)} to",
            f"{max(lengths)} tokens); greedy, float32, LAST_EXITED KV. Exact match: every token right, end included.",
            "Depth: loops of the tokens after the first, which always runs at full depth. min_loops 1.",
        ),
        "",
        "| exit threshold | exact match % | mean depth | share of tokens that leave at loop 1 / 2 / 3 / 4 |",
        "|---|--:|--:|---|",
        f"| 1.0 (full depth) | {_percent(m.full)} | {m.full.mean_depth:.2f} | {_shares(m.full)} |",
    ]
    for threshold, found in m.gated.items():
        mark = " (recommended)" if threshold == m.chosen else ""
        lines.append(f"| {threshold}{mark} | {_percent(found)} | {found.mean_depth:.2f} | {_shares(found)} |")
    lines += [
        "",
        paragraph(
            f"The recommended threshold is that of least depth which lost at most {POINTS_LOST_MAX} points on another",
            "set of the same size. Every token after the first forced out at one loop:",
        ),
        "",
        "| loop | exact match % |",
        "|--:|--:|",
        *(f"| {loop} | {_percent(found)} |" for loop, found in m.forced.items()),
        "",
        paragraph(
            "Entries, keys and lengths at random (8 to 50 entries, 1 to 28 keys, prompts of 40 to 200 tokens),",
            f"{m.scattered[0].problems} problems: {_percent(m.scattered[0])} % at full depth,",
            f"{_percent(m.scattered[1])} % at threshold {m.chosen} with mean depth {m.scattered[1].mean_depth:.2f}.",
        ),
        "",
        f"Per shape, {per_shape} problems each:",
        "",
        f"| entries | asked | prompt tokens | full depth % | threshold {m.chosen} % | mean depth |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for length, (entries, asked) in sorted(zip(lengths, m.cells, strict=True)):
        full, gated = m.cells[entries, asked]
        shown = [f"{entries}", f"{asked}", f"{length}", _percent(full), _percent(gated), f"{gated.mean_depth:.2f}"]
        lines.append(f"| {' | '.join(shown)} |")
    lines += [
        "",
        "## Does the text notice wrong KV?",
        "",
        paragraph(
            f"K and V of one page ({PAGE_TOKENS} positions) of the prompt altered in every plane after prefill, full",
            "depth: zeroed, or replaced by the same page of another prompt (stale). Exact match %, with the number of",
            "cases. Pages: with an entry that is asked for, with other entries only, and the tail, which holds the",
            "question.",
        ),
        "",
        "| fault | question | page with an asked entry | without | tail |",
        "|---|---|--:|--:|--:|",
    ]
    for fault, keys in dict.fromkeys((fault, keys) for fault, keys, _ in m.pages):
        kinds = [m.pages.get((fault, keys, kind)) for kind in PAGE_KINDS]
        shown = [f"{_percent(one)} ({one.problems})" if one else "-" for one in kinds]
        lines.append(f"| {fault} | {keys} | {' | '.join(shown)} |")
    layers = sorted({layer for _, layer in m.planes})
    lines += [
        "",
        paragraph(
            "A question for one key reads one page: most pages can be wrong unnoticed there. Ask for many keys, so",
            "that every page holds one. The same with one plane of the whole prompt zeroed (10 or 20 keys,",
            f"{next(iter(m.planes.values())).problems} problems), exact match %:",
        ),
        "",
        f"| loop | {' | '.join(f'layer {layer}' for layer in layers)} |",
        f"|--:|{'--:|' * len(layers)}",
    ]
    for loop in sorted({loop for loop, _ in m.planes}):
        lines.append(f"| {loop} | {' | '.join(_percent(m.planes[loop, layer]) for layer in layers)} |")
    lines += [
        "",
        "Where that is high, text does not check the plane: compare KV bytes or log-probabilities with a cold run.",
    ]
    return "\n".join(lines)


def paragraph(*texts: str) -> str:
    """Texts as one paragraph of Markdown, wrapped."""
    return textwrap.fill(" ".join(texts), 120, break_long_words=False, break_on_hyphens=False)


def _percent(found: Score) -> str:
    return f"{100 * found.exact:.2f}"


def _shares(found: Score) -> str:
    whole = sum(found.depths) or 1
    return " / ".join(f"{count / whole:.3f}" for count in found.depths)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.embedded.measure",
        description="Measure a lookup checkpoint on fresh held-out problems and print the figures as Markdown.",
        epilog="A checkpoint's README.md names the seed of its figures. It takes minutes; --per-shape 2 looks quickly.",
    )
    parser.add_argument("--model", type=Path, default=directory(), help="its folder (default: the shipped one)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (default: 0)")
    parser.add_argument("--per-shape", type=int, default=25, help="problems per prompt shape, from 2 (default: 25)")
    args = parser.parse_args(argv)
    if args.per_shape < 2:
        parser.error(f"--per-shape {args.per_shape}: a stale page needs a second problem; give 2 or more")
    torch.set_num_threads(1)
    try:
        network = load_network(args.model)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {args.model}: {error}", file=sys.stderr)
        return 2
    print(report(measure(network, args.seed, args.per_shape, lambda text: print(text, file=sys.stderr, flush=True))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
