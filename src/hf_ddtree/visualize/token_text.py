"""Tokens as text: alone on a label, and one after the other as a text that reads right."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_REPLACEMENT = "\ufffd"  # what tokenizers give for bytes that are no whole character
_MOST_PARTIAL = 3  # bytes of a character that still lacks one
_BYTES = {char: byte for byte, char in bytes_to_unicode().items()}
_MARKS = {chr(code): chr(0x2400 + code) for code in range(32)} | {" ": "␣", "\n": "↵", "\t": "⇥", "\x7f": "␡"}
# What a page must not contain, or what turns the text around it: controls, bidi overrides, no characters at all.
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def token_text(token_id: int, tokenizer: PreTrainedTokenizerBase) -> str:
    r"""A token's text as it stands behind another one, where tokenizers do not drop its space.

    Bytes that are no whole character are written as `\xe4`, if the tokenizer's vocabulary tells them.
    """
    alone = tokenizer.decode([token_id])
    text = tokenizer.decode([token_id, token_id])[len(alone) :]
    if _REPLACEMENT not in text:
        return text
    token = tokenizer.convert_ids_to_tokens(token_id)
    if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token):  # byte fallback
        return bytes.fromhex(match[1]).decode(errors="backslashreplace")
    if all(char in _BYTES for char in token):  # byte-level
        return bytes(_BYTES[char] for char in token).decode(errors="backslashreplace")
    return text


def text_pieces(context: Sequence[int], token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds to the text behind `context`; together they are that text.

    A character made of several tokens comes with the last of them.
    """
    ids = [*context, *token_ids]
    pieces: list[str] = []
    # Decoded are the tokens since `start`: those before `read` are there only so that spaces come out as in the text.
    start, read = 0, len(context)
    shown = tokenizer.decode(ids[:read])
    for end in range(read + 1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end])
        partial = len(text) - len(text.rstrip(_REPLACEMENT))
        whole = len(text) - min(partial, _MOST_PARTIAL)
        if end == len(ids):
            whole = len(text)
        elif not text.startswith(shown):  # some decoders give up the characters in front of a partial one, too
            whole = len(shown)
        pieces.append(text[len(shown) : whole])
        shown += pieces[-1]
        if not partial:
            start, read = read, end
            shown = tokenizer.decode(ids[start:read])
    return pieces


def visible(text: str) -> str:
    """The text with a mark for every character that cannot be seen."""
    return "".join(_mark(char) for char in text)


def printable(text: str) -> str:
    """The text with a mark for every character that a page must not contain, or that hides or turns what is near."""
    return _UNPRINTABLE.sub(lambda match: _mark(match[0]), text)


def clipped(text: str, most: int) -> str:
    """The text, its end left out where it is more than `most` cells wide."""
    if cells(text) <= most:
        return text
    while cells(text) >= most:
        text = text[:-1]
    return text + "…"


def cells(text: str) -> int:
    """Width in a monospaced font: two cells for an East Asian character, none for a combining mark."""
    return sum(_cells(char) for char in text)


def _cells(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _mark(char: str) -> str:
    if char in _MARKS:
        return _MARKS[char]
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Zs") or char in "\ufffe\uffff":
        return f"[U+{ord(char):04X}]"
    return char
