"""Output ids to text, as they come: whole characters only, and nothing of or behind a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """One output's text. What may still become a stop text is held back until it is decided."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped = False  # a stop text has come; `text` ends before it
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._whole = ""  # all that was decoded
        self._shown = 0  # characters of it that were given out

    @property
    def text(self) -> str:
        """What was given out so far."""
        return self._whole[: self._shown]

    def push(self, token_id: int) -> str:
        """Take the next id; returns the text that is certain now, often none."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        return self._take(self._decoder.step(self._tokenizer, token_id) or "")

    def finish(self) -> str:
        """The output has ended: returns the rest, with a replacement character for bytes that make no character."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids)
        more = self._take(whole[len(self._whole) :] if whole.startswith(self._whole) else "")
        if self.stopped:
            return more
        rest = self._whole[self._shown :]
        self._shown = len(self._whole)
        return more + rest

    def _take(self, new: str) -> str:
        searched = max(0, len(self._whole) - max(map(len, self._stop), default=0) + 1)
        self._whole += new
        ends = [at for text in self._stop if (at := self._whole.find(text, searched)) >= 0]
        if ends:
            self.stopped = True
            self._whole = self._whole[: min(ends)]
            held = 0
        else:
            held = max((_overlap(self._whole, text) for text in self._stop), default=0)
        shown, self._shown = self._shown, max(self._shown, len(self._whole) - held)
        return self._whole[shown : self._shown]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
