"""Train the embedded model: `python -m engine.embedded.train --out DIR`.

Two stages. The trunk learns the lookup with the published loss (expected cross-entropy over exit depths, plus an
entropy bonus). Then it is frozen and the exit gate is fitted (gate.py). Steps are fixed and everything random comes
from one seed, so a machine that rounds alike gets the same bytes. The model card is written from what measure.py finds.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from engine.embedded import recipe, tasks
from engine.embedded.batches import Batch, make_batch
from engine.embedded.gate import fit_gate
from engine.embedded.measure import measure
from engine.embedded.network import Network, Shape
from engine.embedded.ship import Run, ship


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


def train_trunk(network: Network, steps: int, seed: int, tokens_per_step: int = recipe.TOKENS_PER_STEP) -> None:
    """Fit everything, the gate for the time being; in place. Prints a line every few seconds."""
    rng = random.Random(seed)
    layer = [n for n in network.names if ".layers." in n and "norm" not in n]
    muon = torch.optim.Muon(
        [network.weight(n) for n in layer], lr=recipe.LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
    )
    rest = [network.weight(n) for n in network.names if n not in layer]
    adam = torch.optim.AdamW(rest, lr=recipe.LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    top, accuracy = 0, 0.0
    started = last = time.monotonic()
    for step in range(steps):
        scale = min(1.0, (step + 1) / recipe.WARM_UP_STEPS) * min(1.0, (steps - step) / (recipe.DECAY_SHARE * steps))
        for optimiser in (muon, adam):
            for group in optimiser.param_groups:
                group["lr"] = recipe.LEARNING_RATE * scale
        place = top if top == 0 or rng.random() < recipe.TOP_SHARE else rng.randrange(top)
        batch = make_batch(rng, recipe.BUCKETS[place], tokens_per_step)
        entropy, exits, hits = losses(network, batch)
        weight = batch.weight[batch.answer]
        weight = weight / weight.sum()
        spread = -(exits.clamp_min(1e-9).log() * exits).sum(0)
        parts = recipe.EXPECTED * (exits * entropy).sum(0) + recipe.UNIFORM * entropy.mean(0) - recipe.ENTROPY * spread
        loss = (parts * weight).sum()
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        muon.step()
        adam.step()
        if place == top:
            accuracy = 0.9 * accuracy + 0.1 * float(hits.float().mean())
            if accuracy > recipe.NEXT_BUCKET_AT and top + 1 < len(recipe.BUCKETS):
                top, accuracy = top + 1, 0.0
        now = time.monotonic()
        if now - last > 5 or step + 1 == steps:
            last = now
            left = (now - started) / (step + 1) * (steps - step - 1)
            print(
                f"step {step + 1}/{steps}  loss {loss.item():.3f}  bucket {recipe.BUCKETS[top]}  "
                f"digits {accuracy:.3f}  {left:.0f} s left",
                flush=True,
            )


def main(argv: list[str] | None = None) -> int:
    """Entry point; 1 where the model is not good enough to ship (everything is written all the same)."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.embedded.train",
        description="Train the embedded model from a seed on one CPU core; write checkpoint, tokenizer, prompts and "
        "a model card with measured figures.",
        epilog="About half an hour on one core. A smoke test of the whole path, in a minute or two: --steps 3 "
        "--per-shape 2; its model answers nothing, so the exit status is 1.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; files in it are replaced")
    parser.add_argument("--seed", type=int, default=recipe.SEED, help=f"of everything random (default: {recipe.SEED})")
    parser.add_argument("--steps", type=int, default=recipe.STEPS, help=f"steps of the trunk (default: {recipe.STEPS})")
    parser.add_argument(
        "--per-shape",
        type=int,
        default=recipe.PER_SHAPE,
        help=f"held-out problems measured per prompt shape, from 2; there are {len(tasks.SHAPES)} shapes "
        f"(default: {recipe.PER_SHAPE})",
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
    wanted = min(measured.full.exact, gated.exact) >= recipe.EXACT_MIN and gated.mean_depth < recipe.MEAN_DEPTH_MAX
    if not wanted:
        print(
            f"not good enough to ship: wanted {100 * recipe.EXACT_MIN:.0f} % exact match and a mean depth below "
            f"{recipe.MEAN_DEPTH_MAX}",
            file=sys.stderr,
        )
    return 0 if wanted else 1


if __name__ == "__main__":
    sys.exit(main())
