"""Train the embedded model: `python -m engine.embedded.train --out DIR`.

Two stages. The trunk learns the lookup with the published loss (expected cross-entropy over exit depths, plus an
entropy bonus). Then it is frozen and the exit gate is fitted to leave where a later loop would not help. Steps are fixed
and everything random comes from one seed. The model card is written from what the script measures.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from engine.embedded import tasks
from engine.embedded.evaluate import Score, score
from engine.embedded.network import Network, Shape, describe
from engine.embedded.tasks import EOS, PAD, Problem, encode

STEPS = 1700
SEED = 15
BUCKETS = (6, 12, 24, 48, 80)  # entries + questions
TOKENS_PER_STEP = 4096
NEXT_BUCKET_AT = 0.97  # digit accuracy, smoothed
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)
LOSS_WITHIN = 0.05  # nats: a later loop that gains less does not help
POINTS_LOST_MAX = 0.5


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens [rows, length]; answer [rows, length - 1] marks the positions whose next token is asked for."""

    tokens: Tensor
    answer: Tensor
    digits: Tensor
    weight: Tensor


def make_batch(rng: random.Random, size: int) -> Batch:
    """Rows of one bucket, padded to its length; weights give every answer the root of its length."""
    length = 4 * size + 3
    rows = max(1, TOKENS_PER_STEP // length)
    tokens = torch.full((rows, length), PAD)
    answer = torch.zeros(rows, length - 1, dtype=torch.bool)
    digits = torch.zeros(rows, length - 1, dtype=torch.bool)
    weight = torch.zeros(rows, length - 1)
    for row in range(rows):
        item = tasks.draw(rng, size, held_out=False)
        ids = [*encode(item.prompt), *encode(item.answer), EOS]
        tokens[row, : len(ids)] = torch.tensor(ids)
        start = len(item.prompt) - 1
        end = len(ids) - 1
        answer[row, start:end] = True
        weight[row, start:end] = (end - start) ** -0.5
        for key in range(item.asked):
            digits[row, start + 3 * key + 1 : start + 3 * key + 3] = True
    return Batch(tokens, answer, digits, weight)


def losses(network: Network, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropies [loops, answers], exit probabilities [loops, answers], and hits of the last loop."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = network(batch.tokens[:, :-1])
    wanted = batch.tokens[:, 1:][batch.answer]
    picked = [h[batch.answer] for h in hidden]
    scores = [network.logits(h).float() for h in picked]
    entropy = torch.stack([functional.cross_entropy(s, wanted, reduction="none") for s in scores])
    hazards = torch.stack([torch.sigmoid(network.gate(h)) for h in picked])
    survive = torch.cumprod(1 - hazards[:-1], 0)
    exits = torch.cat([hazards[:1], hazards[1:-1] * survive[:-1], survive[-1:]])
    hits = (scores[-1].argmax(-1) == wanted)[batch.digits[batch.answer]]
    return entropy, exits, hits


def train_trunk(network: Network, steps: int, seed: int) -> None:
    """Fit everything but the exit gate's final form. Prints a line now and then."""
    rng = random.Random(seed)
    layer = [n for n in network.names if ".layers." in n and "norm" not in n]
    muon = torch.optim.Muon(
        [network.weight(n) for n in layer], lr=3e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(
        [network.weight(n) for n in network.names if n not in layer], lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0
    )
    top, accuracy = 0, 0.0
    started = last = time.monotonic()
    for step in range(steps):
        scale = min(1.0, (step + 1) / 100) * min(1.0, (steps - step) / (0.4 * steps))
        for optimiser in (muon, adam):
            for group in optimiser.param_groups:
                group["lr"] = 3e-3 * scale
        place = top if top == 0 or rng.random() < 0.45 else rng.randrange(top)
        batch = make_batch(rng, BUCKETS[place])
        entropy, exits, hits = losses(network, batch)
        weight = batch.weight[batch.answer]
        weight = weight / weight.sum()
        spread = -(exits.clamp_min(1e-9).log() * exits).sum(0)
        loss = ((0.8 * (exits * entropy).sum(0) + 0.2 * entropy.mean(0) - 0.1 * spread) * weight).sum()
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        muon.step()
        adam.step()
        if place == top:
            accuracy = 0.9 * accuracy + 0.1 * float(hits.float().mean())
            if accuracy > NEXT_BUCKET_AT and top + 1 < len(BUCKETS):
                top, accuracy = top + 1, 0.0
        now = time.monotonic()
        if now - last > 5 or step + 1 == steps:
            last = now
            left = (now - started) / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1}/{steps}  loss {loss.item():.3f}  bucket {BUCKETS[top]}  digits {accuracy:.3f}  "
                f"{left:.0f} s left",
                flush=True,
            )


def fit_gate(network: Network, seed: int, batches: int = 40) -> None:
    """Fit the exit gate on the frozen trunk: leave where no later loop is better by more than LOSS_WITHIN."""
    rng = random.Random(seed)
    states: list[Tensor] = []
    targets: list[Tensor] = []
    with torch.no_grad():
        for place in range(batches):
            batch = make_batch(rng, BUCKETS[-1 - place % 3])
            hidden = [h[batch.answer].float() for h in network(batch.tokens[:, :-1])]
            wanted = batch.tokens[:, 1:][batch.answer]
            entropy = torch.stack(
                [functional.cross_entropy(network.logits(h), wanted, reduction="none") for h in hidden]
            )
            for loop in range(network.shape.loops - 1):
                states.append(hidden[loop])
                targets.append((entropy[loop] <= entropy[loop + 1 :].min(0).values + LOSS_WITHIN).float())
    x, y = torch.cat(states), torch.cat(targets)
    weight = torch.zeros(1, network.shape.hidden, requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    adam = torch.optim.Adam([weight, bias], lr=0.05)
    generator = torch.Generator().manual_seed(seed)
    for step in range(600):
        for group in adam.param_groups:
            group["lr"] = 0.05 * (1 - step / 600)
        part = torch.randint(len(x), (8192,), generator=generator)
        logit = functional.linear(x[part], weight, bias).squeeze(-1)
        loss = functional.binary_cross_entropy_with_logits(logit, y[part], torch.where(y[part] > 0, 0.2, 1.0))
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        network.weight("model.early_exit_gate.weight").copy_(weight)
        network.weight("model.early_exit_gate.bias").copy_(bias)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the card reports."""

    full: Score
    gated: dict[float, Score]
    cells: dict[tuple[int, int], Score]
    spoiled: dict[int, Score]
    threshold: float
    seconds: float


def measure(network: Network, seed: int, per_shape: int, seconds: float) -> Measured:
    """Held-out figures over the shipped prompts' shapes; picks the exit threshold."""
    rng = random.Random(seed)
    shapes = [*tasks.SHIPPED, *((tasks.SHARED[0], k) for k in tasks.SHARED[1])]
    problems: list[Problem] = []
    cells: dict[tuple[int, int], Score] = {}
    for entries, asked in shapes:
        some: list[Problem] = []
        while len(some) < per_shape:
            found = tasks.problem(rng, entries, asked)
            if found.held_out:
                some.append(found)
        problems += some
        cells[entries, asked] = score(network, some, 1.0)
    full = Score(
        len(problems),
        sum(c.right for c in cells.values()),
        tuple(sum(c.depths[i] for c in cells.values()) for i in range(network.shape.loops)),
    )
    gated = {t: score(network, problems, t) for t in THRESHOLDS}
    allowed = [t for t, s in gated.items() if 100 * (full.exact - s.exact) <= POINTS_LOST_MAX]
    threshold = min(allowed, key=lambda t: gated[t].mean_depth) if allowed else 1.0
    many = [p for p in problems if p.asked >= 10 and len(p.prompt) >= 128][: 2 * per_shape]
    pages = range(8)
    return Measured(full, gated, cells, {p: score(network, many, 1.0, spoil_page=p) for p in pages}, threshold, seconds)


def card(network: Network, measured: Measured, steps: int, seed: int) -> str:
    """The model card."""
    s = network.shape
    count = sum(t.numel() for t in network.tensors().values())
    lines = [
        "# Embedded model",
        "",
        f"A looped transformer in Ouro's checkpoint format: {describe(s)}; {count:,} parameters. It looks keys up in the",
        "dictionary that fills its prompt: `a71 q03 b55 ?qb=` is answered `q03b55`. It is for checking an engine, not for use.",
        "",
        "## Recipe",
        "",
        f"`python -m engine.embedded.train --out DIR`, seed {seed}, {steps} steps of about {TOKENS_PER_STEP} tokens, one CPU",
        f"thread, bfloat16 autocast; {measured.seconds / 60:.0f} minutes on a shared 2-core machine. Muon for the layers'",
        "matrices, AdamW for the rest, learning rate 3e-3, warm-up 100 steps, linear decay over the last 40 %. Rows grow through",
        f"buckets of {', '.join(map(str, BUCKETS))} entries and questions; both numbers are random in every row, and 40 % of rows ask for 1 to 4",
        "keys. Loss on the answer only: expected cross-entropy over exit depths (0.8), mean over loops (0.2), entropy bonus 0.1.",
        "Then the trunk is frozen and the exit gate fitted to leave where no later loop is better by more than 0.05 nats.",
        "Problems whose prompt hashes (SHA-256) to 0 modulo 16 are held out of training; everything below is held out.",
        "",
        "## Held-out figures",
        "",
        f"{measured.full.problems} fresh problems over the shapes of the 40 shipped prompts (43 to 200 tokens), greedy, float32,",
        "LAST_EXITED KV. Exact match: every token right, end included. Depth: loops of the tokens after the first, which always",
        "runs at full depth. min_loops 1.",
        "",
        "| exit threshold | exact match % | mean depth | loop 1 / 2 / 3 / 4 |",
        "|---|--:|--:|---|",
        f"| 1.0 (full depth) | {100 * measured.full.exact:.2f} | {measured.full.mean_depth:.2f} | |",
    ]
    for threshold, found in measured.gated.items():
        total = sum(found.depths) or 1
        split = " / ".join(f"{n / total:.3f}" for n in found.depths)
        mark = " (shipped)" if threshold == measured.threshold else ""
        lines.append(f"| {threshold}{mark} | {100 * found.exact:.2f} | {found.mean_depth:.2f} | {split} |")
    lines += [
        "",
        "Full depth, per shape:",
        "",
        "| entries | asked | prompt tokens | exact match % |",
        "|--:|--:|--:|--:|",
    ]
    for (entries, asked), found in measured.cells.items():
        lines.append(f"| {entries} | {asked} | {tasks.prompt_tokens(entries, asked)} | {100 * found.exact:.1f} |")
    lines += [
        "",
        "## Does the text notice a wrong page?",
        "",
        "K and V of one page (16 positions) of the prompt zeroed in every plane after prefill, prompts of at least 128 tokens",
        f"with 10 or more keys, {next(iter(measured.spoiled.values())).problems} problems:",
        "",
        "| page | exact match % |",
        "|--:|--:|",
        *(f"| {page} | {100 * found.exact:.1f} |" for page, found in measured.spoiled.items()),
        "",
        "A question for one key reads one page, so most pages can be wrong unnoticed there. Text does not check every plane",
        "either: compare KV bytes or log-probabilities for that.",
        "",
        "## Limits",
        "",
        "One seed. Prompts start at position 0 with the dictionary; other layouts were not trained. More than 52 entries, or more",
        "than 28 questions, were not trained. Characters outside the vocabulary become <unk>.",
        "",
    ]
    return "\n".join(lines)


def tokenizer_json() -> dict[str, object]:
    """A character-level tokenizer in the `tokenizers` format; unknown characters become <unk>."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": place,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for place, content in enumerate(tasks.SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?s)."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": tasks.VOCAB, "unk_token": "<unk>"},
    }


def ship(network: Network, measured: Measured, out: Path, steps: int, seed: int) -> None:
    """Write everything that the engine and its tests need."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(network.tensors(), str(out / "model.safetensors"), {"format": "pt"})
    write = lambda name, value: (out / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")  # noqa: E731
    write("config.json", network.shape.config())
    write("generation_config.json", {"min_loops": 1, "exit_threshold": measured.threshold})
    write("tokenizer.json", tokenizer_json())
    rows = [
        {
            "id": f"lookup-{place:02d}",
            "prompt": item.prompt,
            "answer": item.answer,
            "max_tokens": 3 * item.asked + 2,
        }
        for place, item in enumerate(tasks.shipped_problems(seed))
    ]
    (out / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (out / "README.md").write_text(card(network, measured, steps, seed), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Entry point; 1 where the model is not good enough to ship (everything is written all the same)."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.embedded.train",
        description="Train the embedded model from a seed and write checkpoint, tokenizer, prompts and card.",
        epilog="On one core of a 2-core machine: 10 to 20 minutes. A smoke test: --steps 3 --per-shape 1.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of everything random (default: {SEED})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default: {STEPS})")
    parser.add_argument("--per-shape", type=int, default=25, help="held-out problems per prompt shape (default: 25)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    started = time.monotonic()
    network = Network(Shape(), args.seed)
    train_trunk(network, args.steps, args.seed)
    print("fitting the exit gate", flush=True)
    fit_gate(network, args.seed + 1)
    seconds = time.monotonic() - started
    print("measuring", flush=True)
    measured = measure(network, args.seed + 2, args.per_shape, seconds)
    ship(network, measured, args.out, args.steps, args.seed + 3)
    gated = measured.gated.get(measured.threshold, measured.full)
    good = measured.full.exact >= 0.99 and gated.mean_depth < 3.5
    print(
        f"exact match {100 * measured.full.exact:.2f} % at full depth, {100 * gated.exact:.2f} % at threshold "
        f"{measured.threshold} with mean depth {gated.mean_depth:.2f}; {seconds:.0f} s"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
