"""Held-out scores of the family: answers, losses, and acceptance of the draft per slice.

``python -m specllama.models.recipe.evaluate`` prints JSON for the bundled pair.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specllama.models.recipe.corpus import SLICES, chatml, check_answer, heldout_prompts
from specllama.models.recipe.runner import Runner, choose, log_softmax
from specllama.models.recipe.shape import DRAFT_FILE, TARGET_FILE


def answer_loss(runner: Runner, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Sum of the negative log probabilities of `answer` after `prompt`."""
    runner.rollback(0)
    tokens = [*prompt, *answer]
    rows = log_softmax(runner.forward(tokens[:-1], every=True)[len(prompt) - 1 :])
    return float(-sum(row[t] for row, t in zip(rows, answer, strict=True)))


def score(path: Path, n: int, seed: int, *, examples: int = 0) -> dict[str, Any]:
    """Check greedy answers to `n` held-out prompts per slice; add losses per token."""
    result: dict[str, Any] = {}
    with Runner(path) as runner:
        for name in SLICES:
            passed = exact = tokens = 0
            loss = 0.0
            prompts = heldout_prompts(name, n, seed)
            for i, (messages, check, reference) in enumerate(prompts):
                prompt = runner.tokenize(chatml(messages, open_reply=True))
                wanted = runner.tokenize(reference + "<|im_end|>")
                if len(prompt) + len(wanted) > runner.context:
                    raise ValueError("a held-out prompt does not fit the context")
                answer = runner.text(runner.generate(prompt))
                passed += check_answer(check, answer)
                exact += answer == reference
                loss += answer_loss(runner, prompt, wanted)
                tokens += len(wanted)
                if i < examples:
                    print(
                        f"--- {name}: {messages[-1]['content'][-300:]}\n>>> {answer}\n"
                        f"=== {reference}",
                        file=sys.stderr,
                    )
            result[name] = {
                "passed": round(100 * passed / n, 1),
                "exact": round(100 * exact / n, 1),
                "loss": round(loss / tokens, 4),
            }
    return result


def spans(path: Path, n: int, seed: int) -> dict[str, float]:
    """Return the share of `n` greedy answers that contain every asked span, in percent, by passages
    given."""
    found = {}
    with Runner(path) as runner:
        for size in ("one", "two", "medium"):
            passed = 0
            for messages, check, _ in heldout_prompts("rag", n, seed, size=size):
                prompt = runner.tokenize(chatml(messages, open_reply=True))
                passed += check_answer(check, runner.text(runner.generate(prompt)))
            found[size] = round(100 * passed / n, 1)
    return found


def acceptance(
    target: Path, draft: Path, n: int, seed: int, temperature: float, window: int = 4
) -> dict[str, Any]:
    """Measure acceptance per slice over held-out prompts with a fixed window.

    The draft proposes `window` tokens a round, drawn with the same noise as the target's; counted
    are drafted and accepted tokens, and the mean number of tokens a round.
    """
    result: dict[str, Any] = {}
    with Runner(target) as t, Runner(draft) as d:
        for name in SLICES:
            drafted = accepted = rounds = first = 0
            for i, (messages, _, _) in enumerate(heldout_prompts(name, n, seed)):
                noise_seed = seed * 1000 + i
                prompt = t.tokenize(chatml(messages, open_reply=True))
                # The target writes the same text with any draft: replay it.
                said = t.generate(prompt, 200, temperature, noise_seed)
                text = [*prompt, *said]
                at = len(prompt)
                d.rollback(0)
                while at < len(text):
                    d.rollback(min(d.length, at - 1))
                    row = d.forward(text[d.length : at])[0]
                    k = min(window, len(text) - at)
                    hits = 0
                    for j in range(k):
                        guess = choose(row, temperature, noise_seed, at + j)
                        if guess != text[at + j]:
                            break
                        hits += 1
                        if j + 1 < k:
                            row = d.forward([guess])[0]
                    drafted += k
                    accepted += hits
                    first += hits > 0
                    rounds += 1
                    at += hits + 1
            result[name] = {
                "acceptance": round(accepted / max(1, drafted), 3),
                "first": round(first / max(1, rounds), 3),
                "mean_length": round(1 + accepted / max(1, rounds), 2),
            }
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=TARGET_FILE)
    parser.add_argument("--draft", type=Path, default=DRAFT_FILE)
    parser.add_argument("-n", type=int, default=100, help="prompts per slice")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--examples", type=int, default=0)
    parser.add_argument("--no-acceptance", action="store_true")
    a = parser.parse_args()
    report: dict[str, Any] = {
        "target": score(a.target, a.n, a.seed, examples=a.examples),
        "target, spans by passages": spans(a.target, a.n, a.seed),
    }
    if not a.no_acceptance:
        report["draft"] = score(a.draft, a.n, a.seed)
        for temperature in (0.0, 1.0):
            report[f"acceptance at T={temperature:g}"] = acceptance(
                a.target, a.draft, a.n, a.seed, temperature
            )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
