"""The task: look several keys up in a dictionary that fills the prompt.

`a71 q03 b55 ?qb=` is answered `q03b55`. Keys are letters in random order, values have two digits, and the
answer repeats each key before its value. An entry is 4 tokens, so a page of 16 tokens holds 4 entries, and a
question for many keys needs every page of the prompt. Only the task's definition makes the answers.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

KEYS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
PAD, EOS, UNK = 0, 1, 2
SPECIALS = ("<pad>", "<eos>", "<unk>")
ALPHABET = [chr(code) for code in range(32, 127)] + ["\n"]
VOCAB = {token: place for place, token in enumerate((*SPECIALS, *ALPHABET))}
VOCAB_SIZE = 104  # a little room, a multiple of 8
HELD_OUT_IN = 16


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and its only right answer."""

    prompt: str
    answer: str
    entries: int
    asked: int

    @property
    def held_out(self) -> bool:
        """One problem in 16, by a cryptographic hash of its prompt: never trained on."""
        return hashlib.sha256(self.prompt.encode()).digest()[0] % HELD_OUT_IN == 0


def encode(text: str) -> list[int]:
    """Token ids of a text; a character outside the vocabulary is <unk>, never dropped."""
    return [VOCAB.get(character, UNK) for character in text]


def prompt_tokens(entries: int, asked: int) -> int:
    """Length of a prompt: 4 per entry, the question mark, the keys, the equals sign."""
    return 4 * entries + asked + 2


def problem(rng: random.Random, entries: int, asked: int, table: list[tuple[str, int]] | None = None) -> Problem:
    """A random problem; with `table`, another question about the same dictionary."""
    if not 1 <= asked <= entries <= len(KEYS):
        raise ValueError(f"asked = {asked} and entries = {entries}: need 1 <= asked <= entries <= {len(KEYS)}")
    rows = table if table is not None else dictionary(rng, entries)
    keys = rng.sample([key for key, _ in rows], asked)
    values = dict(rows)
    body = "".join(f"{key}{value:02d} " for key, value in rows)
    return Problem(f"{body}?{''.join(keys)}=", "".join(f"{k}{values[k]:02d}" for k in keys), len(rows), asked)


def dictionary(rng: random.Random, entries: int) -> list[tuple[str, int]]:
    """Distinct keys in random order with random values."""
    return [(key, rng.randrange(100)) for key in rng.sample(KEYS, entries)]


def draw(rng: random.Random, size: int, held_out: bool) -> Problem:
    """A problem with entries + questions <= size, both random.

    Four in ten draws ask for 1 to 4 keys. Varying both numbers in every row is essential: a fixed sum trains a
    model that fails on any other.
    """
    while True:
        asked = rng.randint(1, min(4, size // 2)) if rng.random() < 0.4 else rng.randint(1, min(28, size // 2))
        high = min(len(KEYS), size - asked)
        found = problem(rng, rng.randint(min(high, max(asked, size // 4)), high), asked)
        if found.held_out == held_out:
            return found


SHIPPED = (  # (entries, asked): prompts of 43 to 200 tokens, around page borders, with short and long answers
    *((10, 1), (11, 2), (11, 3), (10, 5), (15, 1), (15, 2), (15, 3), (13, 10), (20, 4), (23, 1), (23, 2), (23, 3)),
    *((29, 10), (31, 1), (31, 2), (31, 3), (30, 6), (26, 20), (35, 8), (39, 2), (43, 4), (40, 14), (47, 2), (47, 10)),
    *((49, 1), (20, 14), (22, 12), (29, 12), (31, 16), (33, 11), (36, 10), (25, 18)),
)
SHARED = (38, (1, 2, 3, 4, 6, 8, 10, 12))  # one dictionary of 38 entries, asked eight times


def shipped_problems(seed: int) -> list[Problem]:
    """40 held-out problems of the shapes above; the last eight share their dictionary."""
    rng = random.Random(seed)
    out = []
    for entries, asked in SHIPPED:
        out.append(_held_out(rng, entries, asked, None))
    table = dictionary(rng, SHARED[0])
    return out + [_held_out(rng, SHARED[0], asked, table) for asked in SHARED[1]]


def _held_out(rng: random.Random, entries: int, asked: int, table: list[tuple[str, int]] | None) -> Problem:
    while True:
        found = problem(rng, entries, asked, table)
        if found.held_out:
            return found
