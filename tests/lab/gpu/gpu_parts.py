"""What ``make gpu-check`` measures, in order: each part is one command.

Parts are short, so that little is lost when one is stopped. Those that say ``more`` come behind
all others, as long as there is time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specllama.bench.prompts import load_prompts
from specllama.models.library import BUNDLED
from specllama.paths import bundled_dir

sys.path.append(str(Path(__file__).parents[1]))
from peer_server import server_command  # of the laboratory, which lies above

SCALE = Path(__file__).parents[3] / "models" / "recipe" / "scale.py"
SIZES = {"300m": "20m", "1b": "60m", "3b": "180m", "7b": "400m"}  # of a target: of its draft
KINDS = ("q4_k_m", "q8_0")
LENGTHS = (2, 4, 8)
DRAFTING = ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")  # of llama-server
N_CTX = 4096
CONTEXT = ("-c", str(N_CTX))
PROMPT = "Write a Python function that adds the numbers of a list, and explain it."
READ = (512, 2048)
CHARACTERS = 3  # of a token, about
ROWS = ",".join(str(n) for n in (1, 2, 3, 4, 5, 6, 8, 12, 16))


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft.

    Attributes:
        name: as the report calls it.
        target, draft: the files; ``draft`` None is a pair without one.
        makers: specllama commands, or a script, that write them, each with the file that it leaves.
        folder: where the makers work; it is removed behind the last part of the pair.
    """

    name: str
    target: str
    draft: str | None = None
    makers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    folder: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        return ("-m", self.target, "-d", self.draft or "none", *CONTEXT)


@dataclass(frozen=True, slots=True)
class Part:
    """One command.

    Attributes:
        argv: arguments of specllama, or those of a program of llama.cpp, ``tool``.
        peer: starts a server; specllama gets its address, too.
        more: it runs behind the parts of all steps, if there is time.
    """

    step: str
    name: str
    pair: Pair
    argv: tuple[str, ...]
    tool: str = ""
    peer: tuple[str, ...] = ()
    more: bool = False


def bundled() -> Pair:
    """The bundled pair as it is."""
    target, draft = (str(bundled_dir() / BUNDLED[f"tiny-{role}"]) for role in ("target", "draft"))
    return Pair("tiny", target, draft)


def scaled(folder: Path, size: str, kind: str) -> Pair:
    """The bundled pair at the cost of ``size``, quantized to ``kind``; made where it is used."""
    place, small, tiny = folder / f"{size}-{kind}", SIZES[size], bundled()
    target = str(place / f"{Path(tiny.target).stem}-scaled-{size}.gguf")
    draft = str(place / f"{Path(str(tiny.draft)).stem}-scaled-{small}.gguf")
    made = str(place / f"{size}-{kind}.gguf")
    makers = (
        (draft, (str(SCALE), str(place), "--to", size, "--draft-to", small)),
        (made, ("quantize", target, made, "--type", kind, "--requantize", "--json")),
    )
    return Pair(f"{size} {kind}", made, draft, makers, str(place))


def parts(
    pairs: Sequence[Pair],
    texts: dict[int, Path],
    tools: dict[str, Path],
    devices: str | None,
    count: int,
) -> Iterator[Part]:
    """All parts in the order in which they run.

    Args:
        pairs: what is measured; the first is the one that is looked at closely.
        texts: a file with one prompt of about so many tokens.
        tools: the programs of llama.cpp that are there.
        devices: those that llama.cpp's programs shall use, "none" for the CPU alone; None: all.
        count: prompts of a small measurement.
    """
    tiny, first = bundled(), pairs[0]
    n = str(count)
    for pair in (tiny, first):
        yield Part("load", f"plan, {pair.name}", pair, ("doctor", *pair.flags, "--json"))
        run = ("run", PROMPT, *pair.flags, "--json", "--no-log", "--temperature", "0", "-n", "64")
        yield Part("load", f"first reply, {pair.name}", pair, run)

    ways = {"": (), ", constant width": ("--exact",)}
    widths = ("--draft-max", "4", "--draft-max", "16", "--json")
    for pair in (tiny, first):
        for way, flags in ways.items():
            argv = ("prove", *pair.flags, *flags, "-n", n, *widths)
            yield Part("prove", f"{pair.name}{way}", pair, argv)
    for skip in range(count, 200, 20):
        for way, flags in ways.items():
            argv = ("prove", *tiny.flags, *flags, "-n", "20", "--skip", str(skip), "--json")
            yield Part("prove", f"tiny{way}, from {skip}", tiny, argv, more=True)

    fixed = ("--window", "fixed", "--draft-max", "4", "--proposer", "draft", "--ignore-eos")
    for pair in (tiny, first):
        for temperature in ("0", "1") if pair.draft else ():
            run = ("run", PROMPT, *pair.flags, "--json", "--no-log", "-n", "256", "--seed", "7")
            name = f"{pair.name}, temperature {temperature}"
            yield Part("own", name, pair, (*run, *fixed, "--temperature", temperature))

    yield from _costs(first, texts, tools, devices)

    yield Part("tune", first.name, first, ("tune", *first.flags, "--json"))

    for pair in pairs:
        more = not pair.name.endswith(KINDS[0]) and pair is not first
        if pair is not first:
            plan = ("doctor", *pair.flags, "--json")
            yield Part("bench", f"plan, {pair.name}", pair, plan, more=more)
            quick = ("tune", *pair.flags, "--quick", "--json")
            yield Part("bench", f"tune, {pair.name}", pair, quick, more=more)
            for way, flags in ways.items():
                argv = ("prove", *pair.flags, *flags, "-n", "4", "--json")
                yield Part("bench", f"prove, {pair.name}{way}", pair, argv, more=more)
        base = ("bench", "run", *pair.flags, "-n", n, "-r", "2", "--max-tokens", "96", "--json")
        lengths = tuple(word for k in LENGTHS for word in ("--length", str(k)))
        argv, peer = (*base, "--proposer", "draft", *lengths), _server(pair, tools, devices)
        if pair.draft:
            yield Part("bench", f"draft model, {pair.name}", pair, argv, peer=peer, more=more)
        drafts = ("draft", "tree") if pair.draft else ()
        methods = ("auto", *drafts, "ngram", "suffix", "mixed", "lookahead")
        argv = (*base, *(word for name in methods for word in ("--proposer", name)))
        yield Part("bench", f"methods, {pair.name}", pair, argv, more=pair is not first)


def _server(pair: Pair, tools: dict[str, Path], devices: str | None) -> tuple[str, ...]:
    """The command of llama-server for a pair, on the same devices; nothing if it is not here."""
    if "llama-server" not in tools:
        return ()
    layers = "0" if devices == "none" else "999"
    draft, chosen = ("-md", pair.draft or "", "-ngld", layers), ("-devd", devices or "")
    drafting = (*draft, *DRAFTING, *(chosen if devices else ())) if pair.draft else ()
    command = server_command(tools["llama-server"], pair.target, N_CTX)
    where = ("-fa", "on", "-ngl", layers, *(("-dev", devices) if devices else ()))
    return (*command, *where, *drafting)


def _costs(
    pair: Pair, texts: dict[int, Path], tools: dict[str, Path], devices: str | None
) -> Iterator[Part]:
    """Reading a prompt, plain decoding behind it, and passes of several rows: ours and theirs."""
    alone = ("-m", pair.target, "-d", "none", *CONTEXT)
    bench, server = tools.get("llama-bench"), _server(replace(pair, draft=None), tools, devices)
    costs = ("tune", *pair.flags, "--quick", "--no-save", "--json", "--temperature", "0")
    yield Part("costs", "v(n), specllama", pair, costs)
    chosen = () if devices is None else ("-dev", devices.replace(",", "/"))
    layers = "0" if devices == "none" else "999"
    shared = ("-m", pair.target, "-ngl", layers, *chosen, "-fa", "1", "-o", "json")
    if bench:
        passes = (*shared, "-p", ROWS, "-n", "0", "-r", "20", "-d", "512")
        yield Part("costs", "v(n), llama-bench", pair, passes, str(bench))
    for n in READ:
        argv = ("run", "-f", str(texts[n]), *alone, "--json", "--no-log", "--no-spec", "-n", "64")
        yield Part("costs", f"prompt of {n}, specllama", pair, (*argv, "--ignore-eos"))
        if bench:
            reads = (*shared, "-p", str(n), "-n", "0", "-r", "5")
            yield Part("costs", f"prompt of {n}, llama-bench", pair, reads, str(bench))
            steps = (*shared, "-p", "0", "-n", "64", "-d", str(n), "-r", "3")
            yield Part("costs", f"steps behind {n}, llama-bench", pair, steps, str(bench))
        if server:
            run = ("bench", "run", "--prompts", str(texts[n]), *alone, "-n", "1", "-r", "5")
            rest = ("--max-tokens", "64", "--temperature", "0", "--json", "--proposer", "ngram")
            name = f"prompt of {n}, llama-server in turns"
            yield Part("costs", name, pair, (*run, *rest), peer=server)


def write_texts(folder: Path) -> dict[int, Path]:
    """Prompts to read, one a file, by about how many tokens they have."""
    words = " ".join(
        " ".join((prompt.text, *(message.content for message in prompt.messages))).replace(
            "\n", " "
        )
        for prompt in load_prompts()
    )
    folder.mkdir(parents=True, exist_ok=True)
    files = {n: folder / f"prompt-{n}.txt" for n in READ}
    for n, file in files.items():
        file.write_text(words[: n * CHARACTERS], "utf-8")
    return files
