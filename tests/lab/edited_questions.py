"""What the noise of a reply's start gains where a question, or the system prompt, was edited.

The target alone answers a prompt, then the edited one, and copies from what it wrote before: with
another seed (copies alone) and with the seed of the former reply, whose noise is the same. Told are
the tokens a pass of the second reply, which no clock changes.

    python tests/lab/edited_questions.py --count 12
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.engine.engine import Engine
from specllama.interface import Message
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.told import Told

Edit = Callable[[str], str]


def _word(question: str) -> str:
    """Its first long word in other letters, as of a slip that was put right."""
    words = question.split(" ")
    at = next((i for i, word in enumerate(words) if len(word) > 3), 0)
    words[at] = words[at].swapcase()
    return " ".join(words)


EDITS: dict[str, Edit | None] = {
    "word": _word,
    "polite word": lambda question: f"Please: {question}",
    "sentence": lambda question: f"{question} Answer in a friendly tone.",
    "system": None,
}


def edited(messages: Sequence[Message], edit: Edit | None) -> list[Message]:
    """With another last question; None: with another system prompt."""
    if edit is None:
        system = Message("system", "You are a careful assistant who likes plain words.")
        return [system, *(message for message in messages if message.role != "system")]
    *before, last = messages
    return [*before, Message(last.role, edit(last.content))]


def tokens_a_pass(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    edit: str,
    temperature: float,
    seeds: Sequence[int],
) -> float:
    """Of the replies to edited prompts with ``seeds[1]``, each after one with ``seeds[0]``."""
    tokens = passes = 0
    base = GenerateParams(max_tokens=64, proposer="suffix", window="fixed", draft_max=8)
    base = base.choose("temperature", temperature)
    for prompt in prompts:
        engine.reset()
        for _ in engine.generate(prompt.messages, base.replace(seed=seeds[0])):
            pass
        asked = edited(prompt.messages, EDITS[edit])
        end = Told.of(engine.generate(asked, base.replace(seed=seeds[1]))).end
        tokens, passes = tokens + len(end.token_ids), passes + end.rounds
    return tokens / passes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    args = parser.parse_args()
    prompts = [prompt for prompt in load_prompts() if prompt.messages]
    prompts = random.Random(1).sample(prompts, args.count)
    with Engine.load(args.model, None, EngineOptions(threads=1)) as engine:
        for temperature in args.temperatures:
            for edit in EDITS:
                alone = tokens_a_pass(engine, prompts, edit, temperature, (1, 2))
                same = tokens_a_pass(engine, prompts, edit, temperature, (1, 1))
                print(
                    f"T {temperature:g}, {edit}: {alone:.2f} tokens a pass by copies alone, "
                    f"{same:.2f} with the same noise ({same / alone - 1:+.0%})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
