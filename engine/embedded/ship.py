"""Write a trained model down as a folder that the engine loads: checkpoint, configs, tokenizer, prompts, model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from engine.embedded import recipe, tasks
from engine.embedded.measure import Measured, paragraph, report
from engine.embedded.network import Network, describe


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
    """The model card, whole: the recipe's own numbers and what was measured, nothing else."""
    parameters = sum(tensor.numel() for tensor in network.tensors().values())
    buckets = ", ".join(map(str, recipe.BUCKETS))
    parts = [
        "# Embedded model",
        paragraph(
            f"A looped transformer in Ouro's checkpoint format, {parameters:,} parameters in float32:",
            f"{describe(network.shape)}. It looks keys up in the dictionary that fills its prompt:",
            "`a71 q03 b55 ?qb=` is answered `q03b55`. A prompt has 4 tokens per entry, one character each, and starts",
            "at position 0 without a beginning token; the answer ends with `<eos>`. It is for checking an engine, not",
            "for use.",
        ),
        paragraph(
            f"Recommended: min_loops 1, exit threshold {measured.chosen} (generation_config.json). `prompts.jsonl` has",
            f"{len(tasks.SHAPES)} held-out prompts; their answers come from the task's definition, not from the model.",
            f"The last {len(tasks.SHARED_ASKED)} share a dictionary of {tasks.SHARED_ENTRIES} entries, so a prefix of",
            f"{tasks.ENTRY_TOKENS * tasks.SHARED_ENTRIES} tokens.",
        ),
        "## Recipe",
        paragraph(
            f"`python -m engine.embedded.train --out DIR --seed {run.seed} --steps {run.steps}`: steps of about",
            f"{recipe.TOKENS_PER_STEP} tokens on one CPU thread, bfloat16 autocast, {run.core_minutes:.0f} minutes of",
            "one core. Muon for the layers' matrices, AdamW for the rest; learning rate",
            f"{recipe.LEARNING_RATE}, warm-up {recipe.WARM_UP_STEPS} steps, linear decay over the last",
            f"{100 * recipe.DECAY_SHARE:.0f} %. Rows grow through buckets of {buckets} entries and keys asked, one",
            f"further when {100 * recipe.NEXT_BUCKET_AT:.0f} % of the answer's digits are right. Both numbers are",
            f"random in every row, and {100 * tasks.FEW_SHARE:.0f} % of rows ask for 1 to {tasks.ASKED_FEW} keys. Loss",
            f"on the answer only: expected cross-entropy over exit depths ({recipe.EXPECTED}), mean over",
            f"loops ({recipe.UNIFORM}), entropy bonus ({recipe.ENTROPY}). Then the trunk is frozen, and the gate",
            f"fitted in {recipe.GATE_STEPS} steps of about {recipe.GATE_TOKENS_PER_STEP} tokens to the expected",
            f"cross-entropy plus {recipe.LOOP_PRICE} nats per loop, under soft exits: deeper planes hold K and V",
            "mixed over the loops at which a token may have left, so that a token also learns to stay for the sake of",
            f"later ones. One problem in {tasks.HELD_OUT_IN}, by SHA-256 of its prompt, is held out of training;",
            "everything below is held out.",
        ),
        report(measured),
        paragraph(
            "The same problems again: `python -m engine.embedded.measure --model DIR",
            f"--seed {run.measure_seed} --per-shape {run.per_shape}`.",
        ),
        "## Limits",
        paragraph(
            "One seed of one recipe. Prompts start at position 0 with the dictionary; other layouts, prefixes and",
            f"tasks were not trained. Neither were more than {len(tasks.KEYS)} entries, {tasks.ASKED_MAX} keys in one",
            f"question or {recipe.BUCKETS[-1]} of both together, nor a key asked twice. Characters outside the",
            "vocabulary become `<unk>`. Exit depths come from a gate fitted to this task, and say nothing about other",
            "models.",
        ),
    ]
    return "\n\n".join(parts) + "\n"
