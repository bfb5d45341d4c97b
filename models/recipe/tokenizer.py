"""The tokenizer of the family: byte-level BPE with GPT-2's pre-tokenizer and 4096 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specllama.models.recipe.corpus import chatml, stream

VOCAB_SIZE = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, IM_START, IM_END = range(3)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(samples: int = 40_000, seed: int = 11) -> Tokenizer:
    """Learn the merges on the training split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        # All 256 bytes, so that any text can be read.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for s in islice(stream(f"tokenizer/{seed}"), samples):
            yield from (m["content"] for m in s.messages)
        # Role names follow a marker and must be common words too.
        yield from ("system\n", "user\n", "assistant\n") * 2000

    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer at `path`; train and save it there first if it is missing."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer()
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


__all__ = [
    "BOS",
    "CHAT_TEMPLATE",
    "IM_END",
    "IM_START",
    "SPECIAL",
    "VOCAB_SIZE",
    "chatml",
    "load_tokenizer",
    "train_tokenizer",
]
