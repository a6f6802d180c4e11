"""The text that a chat template puts around turns, so that a conversation can go on without being rendered anew."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

_MARK = "\0"  # in no template, and no template strips it


class Turns(NamedTuple):
    """The pieces of a template around the texts of users and assistant."""

    before: str  # the first user turn
    answer: str  # between a user turn and the answer to it, first turn
    between: str  # between an answer and the next user turn; begins by closing the answer
    next_answer: str  # between a later user turn and the answer to it


def read_turns(tokenizer: PreTrainedTokenizerBase, **template_options: Any) -> Turns:
    """The pieces of a tokenizer's chat template.

    Args:
        template_options: what the template takes besides the messages, such as `enable_thinking=False`.

    Raises:
        ValueError: the tokenizer has no chat template, or one that does not put each turn's text once.
    """
    if not tokenizer.chat_template:
        raise ValueError("The target's tokenizer has no chat template: use an instruction-tuned target.")

    def render(*roles: str) -> list[str]:
        messages = [{"role": role, "content": _MARK} for role in roles]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **template_options)
        if text.count(_MARK) != len(roles):
            raise ValueError("The target's chat template does not put each turn's text once, as it was given.")
        return text.split(_MARK)

    before, answer = render("user")
    _, _, between, next_answer = render("user", "assistant", "user")
    return Turns(before, answer, between, next_answer)


def next_turn_ids(tokenizer: PreTrainedTokenizerBase, ids: list[int], user: str, turns: Turns) -> list[int]:
    """Token ids of a conversation with one more user turn, up to where the assistant answers.

    What is there stays as it is, token by token, so that a cache of it can be used. An answer that was stopped before
    its end is closed.

    Args:
        ids: the conversation so far, an answer last; empty before the first turn.
    """
    if not ids:
        return tokenizer(turns.before + user + turns.answer, add_special_tokens=False)["input_ids"]
    return join(ids, tokenizer(turns.between + user + turns.next_answer, add_special_tokens=False)["input_ids"])


def join(ids: list[int], text: list[int]) -> list[int]:
    """`text` behind `ids`, without the token that ends a turn if `ids` have it already."""
    return ids + (text[1:] if text and text[0] == ids[-1] else text)
