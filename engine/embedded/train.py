"""Train the embedded model: `python -m engine.embedded.train --out DIR`.

Two stages. The trunk learns the lookup with the published loss (expected cross-entropy over exit depths, plus an
entropy bonus). Then it is frozen and the exit gate is fitted to leave where a later loop would not help. Steps are
fixed and everything random comes from one seed, so a machine that rounds alike gets the same bytes. The model card is
written from what measure.py finds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from engine.embedded import tasks
from engine.embedded.measure import POINTS_LOST_MAX, Measured, measure, report
from engine.embedded.network import Network, Shape, describe
from engine.embedded.tasks import PAD, encode

SEED = 15
STEPS = 1700
TOKENS_PER_STEP = 4096
PER_SHAPE = 25
BUCKETS = (6, 12, 24, 48, 80)  # entries + keys asked, at most
TOP_SHARE = 0.45  # of steps, from the largest bucket reached; the rest from smaller ones
NEXT_BUCKET_AT = 0.97  # share of answer digits right, smoothed over the largest bucket's steps
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 100
DECAY_SHARE = 0.4  # of the steps, the last ones
EXPECTED, UNIFORM, ENTROPY = 0.8, 0.2, 0.1  # weights of the loss's parts

GATE_STEPS = 600
GATE_BATCHES = 40
GATE_LEARNING_RATE = 0.05
GATE_SAMPLES = 8192
LOSS_WITHIN = 0.05  # nats: a later loop that gains less does not help
LEAVE_WEIGHT = 0.2  # of a token that should leave, against 1 for one that should stay: leaving wrongly costs answers

EXACT_MIN = 0.99  # to ship
MEAN_DEPTH_MAX = 3.5


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rows. answer, digits and weight are about the next token of each position but the last.

    tokens: [rows, length] int64. answer [rows, length - 1]: the next token belongs to the answer or ends it; digits
    [same]: it is a digit of the answer. weight [same]: 1 / sqrt(answer tokens of the row) where answer is set.
    """

    tokens: Tensor
    answer: Tensor
    digits: Tensor
    weight: Tensor


def make_batch(rng: random.Random, size: int, tokens_per_step: int = TOKENS_PER_STEP) -> Batch:
    """As many problems of at most `size` entries and keys as fit into tokens_per_step, none held out."""
    length = 4 * size + 3
    rows = max(1, tokens_per_step // length)
    tokens = torch.full((rows, length), PAD)
    answer = torch.zeros(rows, length - 1, dtype=torch.bool)
    digits = torch.zeros(rows, length - 1, dtype=torch.bool)
    weight = torch.zeros(rows, length - 1)
    for row in range(rows):
        item = tasks.draw(rng, size, held_out=False)
        ids = [*encode(item.prompt), *item.wanted]
        tokens[row, : len(ids)] = torch.tensor(ids)
        start, end = len(item.prompt) - 1, len(ids) - 1
        answer[row, start:end] = True
        weight[row, start:end] = (end - start) ** -0.5
        for key in range(item.asked):
            digits[row, start + 3 * key + 1 : start + 3 * key + 3] = True
    return Batch(tokens, answer, digits, weight)


def losses(network: Network, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropies and exit probabilities, [loops, answer tokens] each, and hits of the last loop on the digits."""
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


def train_trunk(network: Network, steps: int, seed: int, tokens_per_step: int = TOKENS_PER_STEP) -> None:
    """Fit everything, the gate for the time being; in place. Prints a line every few seconds."""
    rng = random.Random(seed)
    layer = [n for n in network.names if ".layers." in n and "norm" not in n]
    muon = torch.optim.Muon(
        [network.weight(n) for n in layer], lr=LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
    )
    rest = [network.weight(n) for n in network.names if n not in layer]
    adam = torch.optim.AdamW(rest, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    top, accuracy = 0, 0.0
    started = last = time.monotonic()
    for step in range(steps):
        scale = min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (steps - step) / (DECAY_SHARE * steps))
        for optimiser in (muon, adam):
            for group in optimiser.param_groups:
                group["lr"] = LEARNING_RATE * scale
        place = top if top == 0 or rng.random() < TOP_SHARE else rng.randrange(top)
        batch = make_batch(rng, BUCKETS[place], tokens_per_step)
        entropy, exits, hits = losses(network, batch)
        weight = batch.weight[batch.answer]
        weight = weight / weight.sum()
        spread = -(exits.clamp_min(1e-9).log() * exits).sum(0)
        parts = EXPECTED * (exits * entropy).sum(0) + UNIFORM * entropy.mean(0) - ENTROPY * spread
        loss = (parts * weight).sum()
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


def fit_gate(network: Network, seed: int, batches: int = GATE_BATCHES) -> None:
    """Fit the exit gate on the frozen trunk: leave where no later loop is better by more than LOSS_WITHIN. In place."""
    states, targets = gate_samples(network, seed, batches)
    weight = torch.zeros(1, network.shape.hidden, requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    adam = torch.optim.Adam([weight, bias], lr=GATE_LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    for step in range(GATE_STEPS):
        for group in adam.param_groups:
            group["lr"] = GATE_LEARNING_RATE * (1 - step / GATE_STEPS)
        part = torch.randint(len(states), (GATE_SAMPLES,), generator=generator)
        logit = functional.linear(states[part], weight, bias).squeeze(-1)
        importance = torch.where(targets[part] > 0, LEAVE_WEIGHT, 1.0)
        loss = functional.binary_cross_entropy_with_logits(logit, targets[part], importance)
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        network.weight("model.early_exit_gate.weight").copy_(weight)
        network.weight("model.early_exit_gate.bias").copy_(bias)


@torch.no_grad()
def gate_samples(network: Network, seed: int, batches: int) -> tuple[Tensor, Tensor]:
    """States [samples, hidden] of answer tokens after every loop but the last, and whether to leave there, 0 or 1."""
    rng = random.Random(seed)
    states: list[Tensor] = []
    targets: list[Tensor] = []
    for place in range(batches):
        batch = make_batch(rng, BUCKETS[-1 - place % 3])
        hidden = [h[batch.answer] for h in network(batch.tokens[:, :-1])]
        wanted = batch.tokens[:, 1:][batch.answer]
        entropy = torch.stack([functional.cross_entropy(network.logits(h), wanted, reduction="none") for h in hidden])
        for loop in range(network.shape.loops - 1):
            states.append(hidden[loop])
            targets.append((entropy[loop] <= entropy[loop + 1 :].min(0).values + LOSS_WITHIN).float())
    return torch.cat(states), torch.cat(targets)


@dataclass(frozen=True, slots=True)
class Run:
    """What was asked for, and what it took. core_minutes: processor time of both training stages."""

    seed: int
    steps: int
    per_shape: int
    core_minutes: float

    @property
    def gate_seed(self) -> int:
        return self.seed + 1

    @property
    def measure_seed(self) -> int:
        return self.seed + 2

    @property
    def prompts_seed(self) -> int:
        return self.seed + 100


def ship(network: Network, measured: Measured, run: Run, out: Path) -> None:
    """Write checkpoint, configs, tokenizer, prompts and card into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "model.safetensors"
    save_file(network.tensors(), checkpoint, {"format": "pt"})
    checkpoint.chmod(0o644)
    files: dict[str, Mapping[str, object]] = {
        "config.json": network.shape.config(),
        "generation_config.json": {"min_loops": 1, "exit_threshold": measured.chosen},
        "tokenizer.json": tasks.tokenizer_json(),
    }
    for name, value in files.items():
        (out / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    rows = "".join(json.dumps(row) + "\n" for row in prompt_rows(run.prompts_seed))
    (out / "prompts.jsonl").write_text(rows, encoding="utf-8")
    (out / "README.md").write_text(card(network, measured, run), encoding="utf-8")


def prompt_rows(seed: int) -> list[dict[str, object]]:
    """The lines of prompts.jsonl. max_tokens leaves room for one token too many, so an endless answer is seen."""
    return [
        {"id": f"lookup-{place:02d}", "prompt": item.prompt, "answer": item.answer, "max_tokens": len(item.wanted) + 1}
        for place, item in enumerate(tasks.shipped_problems(seed))
    ]


def card(network: Network, measured: Measured, run: Run) -> str:
    """The model card, whole."""
    parameters = sum(tensor.numel() for tensor in network.tensors().values())
    return f"""# Embedded model

A looped transformer in Ouro's checkpoint format, {parameters:,} parameters in float32: {describe(network.shape)}.
It looks keys up in the dictionary that fills its prompt: `a71 q03 b55 ?qb=` is answered `q03b55`. Prompts have 4 tokens
per entry, one character each, and start at position 0 without a beginning token; the answer ends with `<eos>`. It is
for checking an engine, not for use.

Recommended: min_loops 1, exit threshold {measured.chosen} (generation_config.json). `prompts.jsonl` has {len(tasks.SHAPES)}
held-out prompts; their answers come from the task's definition, not from the model. The last {len(tasks.SHARED_ASKED)} share a dictionary of
{tasks.SHARED_ENTRIES} entries, so a prefix of {tasks.ENTRY_TOKENS * tasks.SHARED_ENTRIES} tokens.

## Recipe

`python -m engine.embedded.train --out DIR --seed {run.seed} --steps {run.steps}`: steps of about {TOKENS_PER_STEP} tokens on one CPU thread, bfloat16
autocast, {run.core_minutes:.0f} minutes of one core. Muon for the layers' matrices, AdamW for the rest; learning rate {LEARNING_RATE}, warm-up
{WARM_UP_STEPS} steps, linear decay over the last {100 * DECAY_SHARE:.0f} %. Rows grow through buckets of {", ".join(map(str, BUCKETS))} entries and keys asked, one
further when {100 * NEXT_BUCKET_AT:.0f} % of the answer's digits are right. Both numbers are random in every row, and {100 * tasks.FEW_SHARE:.0f} % of rows ask for
1 to {tasks.ASKED_FEW} keys. Loss on the answer only: expected cross-entropy over exit depths ({EXPECTED}), mean over loops ({UNIFORM}),
entropy bonus ({ENTROPY}). Then the trunk is frozen, and the gate fitted to leave where no later loop is better by more than
{LOSS_WITHIN} nats. One problem in {tasks.HELD_OUT_IN}, by SHA-256 of its prompt, is held out of training; everything below is held out.

{report(measured)}

The figures again: `python -m engine.embedded.measure --seed {run.measure_seed} --per-shape {run.per_shape}`.

## Limits

One seed of one recipe. Prompts start at position 0 with the dictionary; other layouts, prefixes and tasks were not
trained. Neither were more than {len(tasks.KEYS)} entries, {tasks.ASKED_MAX} keys in one question or {BUCKETS[-1]} of both together. Accuracy falls where
many keys meet a long prompt. Keys asked twice were not trained. Characters outside the vocabulary become `<unk>`.
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; 1 where the model is not good enough to ship (everything is written all the same)."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.embedded.train",
        description="Train the embedded model from a seed on one CPU core; write checkpoint, tokenizer, prompts and "
        "a model card with measured figures.",
        epilog="Half an hour or less on one core. A smoke test of the whole path, in a minute or two: --steps 3 "
        "--per-shape 2; its model answers nothing, so the exit status is 1.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; files in it are replaced")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of everything random (default: {SEED})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of the trunk (default: {STEPS})")
    parser.add_argument(
        "--per-shape",
        type=int,
        default=PER_SHAPE,
        help=f"held-out problems measured per prompt shape, from 2; there are {len(tasks.SHAPES)} shapes "
        f"(default: {PER_SHAPE})",
    )
    args = parser.parse_args(argv)
    if args.steps < 1 or args.per_shape < 2:
        parser.error(f"--steps {args.steps} must be at least 1 and --per-shape {args.per_shape} at least 2")
    torch.set_num_threads(1)
    network = Network(Shape(), args.seed)
    run = Run(args.seed, args.steps, args.per_shape, 0.0)
    train_trunk(network, args.steps, args.seed)
    print("fitting the exit gate", flush=True)
    fit_gate(network, run.gate_seed)
    run = Run(args.seed, args.steps, args.per_shape, time.process_time() / 60)
    print("choosing the exit threshold", flush=True)
    measured = measure(network, run.measure_seed, args.per_shape, lambda text: print(text, flush=True))
    ship(network, measured, run, args.out)
    gated = measured.gated.get(measured.chosen, measured.full)
    print(
        f"exact match {100 * measured.full.exact:.2f} % at full depth, {100 * gated.exact:.2f} % at threshold "
        f"{measured.chosen} with mean depth {gated.mean_depth:.2f}; {run.core_minutes:.0f} core-minutes; see {args.out}"
    )
    wanted = min(measured.full.exact, gated.exact) >= EXACT_MIN and gated.mean_depth < MEAN_DEPTH_MAX
    if not wanted:
        print(
            f"not good enough to ship: wanted {100 * EXACT_MIN:.0f} % and a mean depth below {MEAN_DEPTH_MAX}",
            file=sys.stderr,
        )
    return 0 if wanted else 1


if __name__ == "__main__":
    sys.exit(main())
