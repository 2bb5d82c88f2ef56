"""Incremental text: the same as decoding at once, and nothing of a stop text gets out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.text import TextStream


def byte_tokenizer() -> Tokenizer:
    """One id per byte, as in a byte-level BPE without merges: characters arrive in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()
TEXTS = st.text(alphabet=st.sampled_from("ab€é😀 "), max_size=12)


@given(TEXTS, st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), max_size=3))
def test_a_stream_says_what_decoding_at_once_says(text: str, stop: list[str]) -> None:
    """Goal: no piece is lost, doubled or shown too early. Method: byte by byte, against str.find on the whole."""
    stream = TextStream(TOKENIZER, stop)
    shown = ""
    for token_id in TOKENIZER.encode(text).ids:
        piece = stream.push(token_id)
        assert "�" not in piece
        shown += piece
        if stream.stopped:
            break
    shown += stream.finish()

    # the stop text that is completed first ends the output, before its own beginning
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    begins = [at for s in stop if (at := text.find(s)) >= 0 and at + len(s) == min(ends)]
    assert shown == stream.text == (text[: min(begins)] if ends else text)
    assert stream.stopped == bool(ends)


def test_what_may_become_a_stop_text_is_held_back() -> None:
    """Goal: a client never sees the beginning of a stop text. Method: 'END' in three pieces, then a false alarm."""
    stream = TextStream(TOKENIZER, ["END"])
    pieces = [stream.push(i) for i in TOKENIZER.encode("aENbEND").ids]

    assert pieces == ["a", "", "", "ENb", "", "", ""]
    assert stream.stopped
    assert stream.push(TOKENIZER.encode("c").ids[0]) == stream.finish() == ""
    assert stream.text == "aENb"


def test_bytes_that_make_no_character_are_shown_at_the_end() -> None:
    """Goal: an output cut inside a character is not lost. Method: the first two bytes of a euro sign."""
    ids = TOKENIZER.encode("a€").ids[:3]
    stream = TextStream(TOKENIZER)
    assert [stream.push(i) for i in ids] == ["a", "", ""]
    assert stream.finish() == TOKENIZER.decode(ids)[1:]


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_an_empty_output(stop: tuple[str, ...]) -> None:
    """Goal: no token is no text. Method: finish at once."""
    stream = TextStream(TOKENIZER, stop)
    assert stream.finish() == stream.text == ""
