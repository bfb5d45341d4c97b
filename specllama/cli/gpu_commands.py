"""``specllama doctor --gpu``: the ordinary commands that measure a GPU, and what each tells."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from specllama.cli import diagnostics, output
from specllama.settings.config import Settings

FOLDER = "gpu-pair"
TARGET, DRAFT = "tiny-target-q4_0-scaled-1b.gguf", "tiny-draft-q8_0-scaled-60m.gguf"
PROMPT = "Write a Python function that adds the numbers of a list, and explain it."
FIXED = ("--proposer", "draft", "--window", "fixed", "--draft-max", "4", "--ignore-eos")
METHODS = ("auto", "draft", "tree", "ngram", "suffix", "mixed", "lookahead")
SERVER = "llama-server llama-server -ngl 999 -ngld 999"


def show(settings: Settings, *, as_json: bool) -> int:
    """Print the commands for the pair of the settings, in the order to run them; returns 0."""
    found = list(commands(settings["model"], settings["draft-model"]))
    if as_json:
        output.document({"commands": [{"measures": m, "command": c} for m, c in found]})
        return 0
    _say_what_is_missing()
    for measures, command in found:
        output.line(f"# {measures}")
        output.line(command)
    return 0


def commands(target: str | None, draft: str | None) -> Iterator[tuple[str, str]]:
    """What each command measures, and the command as a shell takes it.

    Args:
        target, draft: the pair; without a target, the first command writes one.
    """
    if target is None:
        target, draft = f"{FOLDER}/{TARGET}", f"{FOLDER}/{DRAFT}"
        yield (
            "no figure: writes the bundled pair at the cost of a 1 B target (0.6 GB; also 3b, 7b)",
            _line("bench", "scale", FOLDER, "--to", "1b"),
        )
    pair = ("-m", target, *(("-d", draft) if draft else ()))
    reply = ("run", *pair, PROMPT, "--json")
    yield (
        "where the pair goes, and what it takes of the memory that is free",
        _line("doctor", *pair),
    )
    yield (
        "the first reply: time to load, to read the prompt and to write 64 tokens",
        _line(*reply, "--temperature", "0", "-n", "64"),
    )
    for exact, says in (((), ""), (("--exact",), ", in passes of one constant width")):
        yield (
            f"same seed, same text, over all methods{says}",
            _line("prove", *pair, "-n", "10", *exact),
        )
    yield (
        "specllama's own time in a round: other_ms of the last event, divided by its rounds",
        _line(*reply, *FIXED, "--seed", "7", "-n", "256"),
    )
    yield (
        "v(n): the cost of a pass of n rows, in steps of the target",
        _line("tune", *pair, "--quick", "--no-save", "--temperature", "0"),
    )
    yield ("the pair itself, which later runs then know", _line("tune", *pair))
    runs = ("bench", "run", *pair, "-n", "10", "-r", "2", "--max-tokens", "96")
    yield (
        "the speed of every method beside plain decoding",
        _line(*runs, *(word for name in METHODS for word in ("--proposer", name))),
    )
    yield (
        "the same beside llama-server of your PATH, which needs the same build",
        _line(*runs, "--proposer", "draft", "--against", SERVER),
    )


def _line(*words: str) -> str:
    return shlex.join(("specllama", *words))


def _say_what_is_missing() -> None:
    """On stderr, where this build of llama.cpp uses no GPU, and how to build one that does."""
    from specllama.backend import devices

    cards = devices.devices()
    if devices.gpus(cards):
        return
    if missing := devices.gpu_build_command(cards):
        diagnostics.note(
            f"{missing[0]} here, but this build of llama.cpp cannot use it; "
            f"build it with: {missing[1]}"
        )
    else:
        diagnostics.note("no GPU here that this build of llama.cpp can use: they measure the CPU")
