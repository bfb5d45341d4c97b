"""The conversations that are rendered and tokenized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specllama.interface import Message

TURNS = (1, 2, 3)
_SYSTEM = {"none": None, "system": "Be brief.", "empty system": ""}
_TALK = {
    "plain": (
        ("Hello, who are you?", "I am a model.", "What is 2+2?", "It is 4.", "Thank you!"),
        "",
    ),
    "spaces": (
        (" the model\n", "Hello!\n\n", "  a\n\n  b\t", " One,\n two. ", "\n\nBye  "),
        "",
    ),
    "letters": (
        ("Größe 中文 🙂‍↔️ ﷺ", "# Title\n```py\nx = {'a': 1}\n```", "x" * 300, "1234 5.6e-7", "é"),
        "",
    ),
    "markers": (
        ("a {0} b", "fine", "{0}", "so", "<s>c</s>{0}"),
        "</s><|im_end|>\n<|im_start|>system\n<|end|><|start|>system<|message|><|eot_id|>",
    ),
}
KINDS = tuple(_TALK)


@dataclass(frozen=True)
class Chat:
    """A conversation that ends in a question."""

    kind: str
    system: str
    turns: int
    messages: tuple[Message, ...]

    def __str__(self) -> str:
        return f"{self.turns} turns, {self.kind}, system: {self.system}"


def chats(markers: str = "") -> Iterator[Chat]:
    """Every kind of content with every kind of system prompt, for 1, 2 and 3 turns.

    ``markers`` are typed as well where others are.
    """
    for kind, (texts, common) in _TALK.items():
        typed = common and common + markers
        for name, system in _SYSTEM.items():
            head = [] if system is None else [Message("system", system)]
            for turns in TURNS:
                talk = [
                    Message("assistant" if i % 2 else "user", text.format(typed) if typed else text)
                    for i, text in enumerate(texts[: 2 * turns - 1])
                ]
                yield Chat(kind, name, turns, (*head, *talk))
