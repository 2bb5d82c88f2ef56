"""The task: look several keys up in a dictionary that fills the prompt. Pure: only the task makes the answers.

`a71 q03 b55 ?qb=` is answered `q03b55`. Keys are letters in random order, values have two digits, and the answer
repeats each key before its value. An entry is 4 tokens, so a page of 16 tokens holds 4 entries, and a question for
many keys needs every page of the prompt. One character is one token.
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

ENTRY_TOKENS = 4
ASKED_MAX = 28  # keys that a training question asks for, at most
ASKED_FEW = 4
FEW_SHARE = 0.4  # of training rows, which ask for at most ASKED_FEW keys
DRAWS_MAX = 1000  # of questions about one dictionary, before another dictionary is drawn


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and its only right answer. entries: of the dictionary; asked: keys in the question."""

    prompt: str
    answer: str
    entries: int
    asked: int

    @property
    def held_out(self) -> bool:
        """One problem in HELD_OUT_IN, by a cryptographic hash of its prompt: never trained on."""
        return hashlib.sha256(self.prompt.encode()).digest()[0] % HELD_OUT_IN == 0

    @property
    def wanted(self) -> list[int]:
        """Token ids of the right output, end included."""
        return [*encode(self.answer), EOS]

    @property
    def keys(self) -> str:
        """The keys asked for, in order."""
        return self.answer[::3]


def encode(text: str) -> list[int]:
    """Token ids of a text; a character outside the vocabulary is <unk>, never dropped."""
    return [VOCAB.get(character, UNK) for character in text]


def tokenizer_json() -> dict[str, object]:
    """A character-level tokenizer in the format of the `tokenizers` library; unknown characters become <unk>.

    <unk> is no special token there: decoding shows it, so a character that was lost is seen to be lost.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": VOCAB[content], "content": content, **flags} for content in ("<pad>", "<eos>")],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": VOCAB, "unk_token": "<unk>"},
    }


def prompt_tokens(entries: int, asked: int) -> int:
    """Length of a prompt: 4 per entry, the question mark, the keys, the equals sign."""
    return ENTRY_TOKENS * entries + asked + 2


def problem(rng: random.Random, entries: int, asked: int, table: list[tuple[str, int]] | None = None) -> Problem:
    """A random problem; with `table`, of that many entries, another question about that dictionary.

    Raises ValueError where there are not that many keys.
    """
    if not 1 <= asked <= entries <= len(KEYS):
        raise ValueError(f"asked = {asked} and entries = {entries}: need 1 <= asked <= entries <= {len(KEYS)}")
    rows = table if table is not None else dictionary(rng, entries)
    keys = rng.sample([key for key, _ in rows], asked)
    values = dict(rows)
    body = "".join(f"{key}{value:02d} " for key, value in rows)
    return Problem(f"{body}?{''.join(keys)}=", "".join(f"{k}{values[k]:02d}" for k in keys), len(rows), asked)


def dictionary(rng: random.Random, entries: int) -> list[tuple[str, int]]:
    """Distinct keys in random order with random values, 0 to 99."""
    return [(key, rng.randrange(100)) for key in rng.sample(KEYS, entries)]


def draw(rng: random.Random, size: int, held_out: bool) -> Problem:
    """A problem with entries + asked <= size, both random; size is at least 2.

    Four in ten draws ask for few keys. Varying both numbers in every row is essential: a fixed sum trains a model
    that fails on any other.
    """
    while True:
        asked = rng.randint(1, min(ASKED_FEW if rng.random() < FEW_SHARE else ASKED_MAX, size // 2))
        high = min(len(KEYS), size - asked)
        found = problem(rng, rng.randint(min(high, max(asked, size // 4)), high), asked)
        if found.held_out == held_out:
            return found


def held_out(rng: random.Random, entries: int, asked: int) -> Problem:
    """A held-out problem of this shape."""
    while True:
        found = problem(rng, entries, asked)
        if found.held_out:
            return found


SHIPPED = (  # (entries, asked): prompts of 43 to 200 tokens, around page borders, with short and long answers
    *((10, 1), (11, 2), (11, 3), (10, 5), (15, 1), (15, 2), (15, 3), (13, 10), (20, 4), (23, 1), (23, 2), (23, 3)),
    *((29, 10), (31, 1), (31, 2), (31, 3), (30, 6), (26, 20), (35, 8), (39, 2), (43, 4), (40, 14), (47, 2), (47, 10)),
    *((49, 1), (20, 14), (22, 12), (29, 12), (31, 16), (33, 11), (36, 10), (25, 18)),
)
SHARED_ENTRIES = 38
SHARED_ASKED = (1, 2, 3, 4, 6, 8, 10, 12)  # one dictionary, asked eight times
SHAPES = (*SHIPPED, *((SHARED_ENTRIES, asked) for asked in SHARED_ASKED))


def shipped_problems(seed: int) -> list[Problem]:
    """40 held-out problems of SHAPES, in that order; the last eight share their dictionary."""
    rng = random.Random(seed)
    alone = [held_out(rng, entries, asked) for entries, asked in SHIPPED]
    while True:
        shared = _about_one_dictionary(rng)
        if len(shared) == len(SHARED_ASKED):
            return alone + shared


def _about_one_dictionary(rng: random.Random) -> list[Problem]:
    """Held-out questions about a random dictionary; fewer than wanted where it has none: a key alone asks few."""
    table = dictionary(rng, SHARED_ENTRIES)
    out = []
    for asked in SHARED_ASKED:
        tries = (problem(rng, SHARED_ENTRIES, asked, table) for _ in range(DRAWS_MAX))
        found = next((one for one in tries if one.held_out), None)
        if found is not None:
            out.append(found)
    return out
