"""A day of an agent: how many tokens a server reads, turn after turn.

    python tests/lab/agent_day.py --url http://127.0.0.1:8484 --model NAME [--api chat]

30 turns grow to some 12,000 tokens. The first line of the system prompt differs in each request,
as Claude Code's does; after turns 10 and 20 comes a side request with a prompt of its own, as
agents ask for a title. Any server that answers ``/v1/messages`` or ``/v1/chat/completions`` will
do; ``--no-head`` leaves the changing line out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any
from urllib.request import Request, urlopen

HEAD = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={:05x};"
WORDS = sorted({*(__doc__ or "").split()})
SIDES = (10, 20)


def prose(words: int, seed: int) -> str:
    """Make up a text, the same for the same seed."""
    drawn = random.Random(seed)
    return " ".join(drawn.choices(WORDS, k=words)) + "."


def asked(api: str, head: str, system: str, turns: list[dict[str, str]]) -> dict[str, Any]:
    """Make the body of a request."""
    body: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "stream": False}
    if api == "messages":
        blocks = [{"type": "text", "text": text} for text in (head, system) if text]
        return {**body, "system": blocks, "messages": turns}
    said = "\n".join(filter(None, (head, system)))
    return {**body, "messages": [{"role": "system", "content": said}, *turns]}


def read_of(told: dict[str, Any]) -> tuple[int, int]:
    """Find how many tokens of a prompt were read, and how many were there already."""
    usage = told["usage"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage.get("cache_read_input_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return usage["prompt_tokens"] - cached, cached


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8484")
    parser.add_argument("--api", choices=("messages", "chat"), default="messages")
    parser.add_argument("--model", default="default")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--words", type=int, default=160, help="of each turn")
    parser.add_argument("--no-head", action="store_true")
    options = parser.parse_args()
    path = {"messages": "/v1/messages", "chat": "/v1/chat/completions"}[options.api]
    drawn = random.Random(1)
    total = 0

    def ask(name: str, system: str, turns: list[dict[str, str]]) -> str:
        nonlocal total
        head = "" if options.no_head else HEAD.format(drawn.randrange(16**5))
        body = {"model": options.model, **asked(options.api, head, system, turns)}
        sent = Request(
            options.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "x-api-key": "none"},
        )
        begun = time.monotonic()
        with urlopen(sent, timeout=600) as answer:
            told = json.load(answer)
        read, cached = read_of(told)
        total += read
        print(
            f"{name:>6} {read + cached:>7} {read:>7} {time.monotonic() - begun:>7.1f} s", flush=True
        )
        if options.api == "chat":
            return str(told["choices"][0]["message"]["content"])
        return "".join(block.get("text", "") for block in told["content"])

    print(f"{'turn':>6} {'prompt':>7} {'read':>7} {'took':>9}")
    system, turns = prose(600, 0), []
    for turn in range(1, options.turns + 1):
        turns.append({"role": "user", "content": prose(options.words, turn)})
        turns.append({"role": "assistant", "content": ask(str(turn), system, turns) or "Done."})
        if turn in SIDES:
            ask("side", "Write a title.", [{"role": "user", "content": prose(300, -turn)}])
    print(f"{total} tokens were read in all")


if __name__ == "__main__":
    main()
