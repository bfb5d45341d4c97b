"""Compare chat prompts with llama.cpp's own, for every template and vocabulary of a folder.

    python tests/lab/families FOLDER        (make families LLAMA_CPP=FOLDER)

FOLDER holds llama.cpp's source, say that of the binding's source distribution. Its templates are
rendered for chats of 1, 2 and 3 turns and compared with ``/apply-template`` of a built
``llama-server`` ($LLAMA_SERVER, or in FOLDER/build/bin); the prompts are tokenized with each of its
``ggml-vocab-*.gguf`` and compared with ``llama_tokenize`` of the same text. Where a content holds
markers the two must differ: the markers must be those of a harmless chat, and the text the same
("guarded"). Then replies with thoughts are written in the way of each template, and must be split
right however they arrive, and be continued as they were written. The exit status is 1 when
anything differs otherwise.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import ggufs
import llama_cpp as ll
from chats import KINDS, TURNS, Chat, chats
from llama_cpp_server import Refused, TemplateServer, find_server
from thinking import QUESTION, check, kept, replies
from thinking import vocabularies as vocabularies_of

from specllama.backend.base import SpecialToken
from specllama.backend.llama_vocab import LlamaVocab
from specllama.engine.prompting import Prompting
from specllama.interface import Message
from specllama.models.gguf import read_header
from specllama.replies.marks import derive, switch
from specllama.replies.segments import render


@dataclass
class Row:
    """What came of one template or vocabulary."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, list[str]] = field(default_factory=dict)

    def add(self, outcome: str, reason: str = "", where: object = "") -> None:
        self.counts[outcome] += 1
        if reason:
            self.reasons.setdefault(reason, []).append(str(where))


TYPED = 8  # of a vocabulary's own markers
# templates that llama.cpp treats in a way of its own
WHY = {
    "StepFun": "llama.cpp trims the contents, for this template alone",
    "deepseek-ai-DeepSeek-V4": "llama.cpp asks for earlier thoughts to be kept",
}
HISTORY = ("history kept", "history cut")
OUTCOMES = ("equal", "differs", "refused")


def first_difference(ours: str, theirs: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    at = min(len(ours), len(theirs)) if at is None else at
    cut = slice(max(at - 16, 0), at + 24)
    return f"ours {ours[cut]!r}, llama.cpp's {theirs[cut]!r}"


def compare_rendering(server: Path, model: Path, template: Path) -> Row:
    """Every chat, by the template itself and by llama.cpp's engine for templates."""
    row = Row(template.stem)
    source = template.read_text(encoding="utf-8")
    theirs: TemplateServer | None = None
    why = ""
    try:
        theirs = TemplateServer(server, model, template)
    except Refused as refused:
        why = str(refused)
    try:
        for chat in chats():
            rendered = render(source, chat.messages, bos="<s>", eos="</s>")
            expected = None
            if theirs is not None:
                try:
                    expected = theirs.render(chat.messages)
                except Refused as refused:
                    why = str(refused)
            if rendered.notice and expected is None:
                row.add("refused", f"by both: {why}", chat)
            elif rendered.notice:
                row.add("refused", f"by specllama: {rendered.notice}", chat)
            elif expected is None:
                row.add("refused", f"by llama.cpp: {why}", chat)
            elif rendered.text == expected:
                row.add("equal")
            else:
                row.add("differs", first_difference(rendered.text, expected), chat)
    finally:
        if theirs is not None:
            theirs.close()
    return row


@contextmanager
def vocabulary(path: Path) -> Iterator[LlamaVocab]:
    params = ll.llama_model_default_params()
    params.vocab_only = True
    model = ll.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise ValueError("llama.cpp cannot load it")
    try:
        yield LlamaVocab(model, read_header(path).pre_tokenizer or "")
    finally:
        ll.llama_model_free(model)


def marks(special: SpecialToken, source: str) -> bool:
    """Whether a token could begin or end a turn of this template."""
    text = special.text
    return special.control or (text.startswith("<|") and text.endswith("|>")) or text in source


def markers(vocab: LlamaVocab, ids: Sequence[int], source: str) -> list[int]:
    found = (vocab.special(t) for t in ids)
    return [s.id for s in found if s is not None and s.text.strip() and marks(s, source)]


def harmless(messages: Sequence[Message]) -> list[Message]:
    return [Message(m.role, "a" if m.content else "") for m in messages]


def written(vocab: LlamaVocab, ids: Sequence[int]) -> str:
    return b"".join(vocab.piece(t, special=True) for t in ids).decode("utf-8", "replace")


def compare_tokens(templates: dict[str, str], path: Path) -> Row:
    """Every template's prompts in one vocabulary."""
    row = Row(path.stem.removeprefix("ggml-vocab-"))
    with vocabulary(path) as vocab:
        bos, eos = vocab.bos_text, vocab.eos_text
        like_markers = [s.text for s in vocab.specials if s.text.startswith("<")]
        own = "".join(like_markers[:: len(like_markers) // TYPED + 1])
        for name, source in templates.items():
            encode = partial(one_chat, Prompting(vocab, source, bos, eos), vocab, source)
            for chat in chats(own):
                if chat.system == "none" or chat.kind == "plain":
                    outcome, reason = encode(chat)
                    row.add(outcome, reason, f"{name}, {chat}")
    return row


def compare_thoughts(name: str, source: str) -> Row:
    """Replies with thoughts, in vocabularies where the marks are tokens and where they are text."""
    row = Row(name)
    asked = render(source, QUESTION, bos="<s>", eos="</s>")
    if asked.notice:
        row.add("refused", asked.notice)
        return row
    for think in (True, False):
        variables, _ = switch(source, "on" if think else "off")
        state = render(source, QUESTION, bos="", eos="", variables=variables).state
        for vocab in vocabularies_of(derive(source)):
            for told in replies(derive(source), state):
                wrong = check(source, vocab, told, random.Random(0), 6, variables)
                row.add("differs" if wrong else "split", *wrong[:1])
    again, thought = kept(source)
    row.add(f"history {'kept' if again and thought else 'cut'}")
    return row


def one_chat(prompting: Prompting, vocab: LlamaVocab, source: str, chat: Chat) -> tuple[str, str]:
    ids, notice = prompting.encode(chat.messages)
    if notice:
        return "refused", notice
    text = render(source, chat.messages, bos=vocab.bos_text, eos=vocab.eos_text).text
    if vocab.adds_bos:
        text = text.removeprefix(vocab.bos_text)
    expected = vocab.tokenize(text, add_special=True, parse_special=True)
    if ids == expected:
        return "equal", ""
    if chat.kind == "markers":
        plain, _ = prompting.encode(harmless(chat.messages))
        same_text = bare(written(vocab, ids)) == bare(written(vocab, expected))
        same_markers = markers(vocab, ids, source) == markers(vocab, plain, source)
        if same_markers and same_text:
            return "guarded", ""
        return "differs", "a typed marker" + ("" if same_text else ", and the text")
    at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), -1)
    return "differs", first_difference(
        written(vocab, ids[max(at - 4, 0) :]), written(vocab, expected[max(at - 4, 0) :])
    )


def bare(text: str) -> str:
    """Without white space: some special tokens bring or swallow it."""
    return "".join(text.split())


def report(title: str, rows: Sequence[Row], outcomes: Sequence[str]) -> None:
    total = Counter[str]()
    print(f"\n## {title}\n")
    for row in rows:
        total += row.counts
        counts = " ".join(f"{row.counts[o]:>5} {o}" for o in outcomes)
        print(f"{row.name:52.52} {counts}")
        if row.counts["differs"]:
            for why in (text for name, text in WHY.items() if row.name.startswith(name)):
                print(f"    {why}:")
        for reason, where in row.reasons.items():
            print(f"    {len(where):>4} × {reason}   [{where[0]}]")
    n = sum(total.values())
    print(f"\n{len(rows)} in all, {n} chats: " + ", ".join(f"{total[o]} {o}" for o in outcomes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="llama.cpp's source")
    folder = parser.parse_args().folder
    templates = sorted(folder.rglob("*.jinja"))
    vocabularies = sorted(folder.rglob("ggml-vocab-*.gguf"))
    if not templates or not vocabularies:
        print(f"{folder} holds no chat templates or no vocabularies", file=sys.stderr)
        return 2
    print(f"{len(templates)} templates, {len(vocabularies)} vocabularies; chats of {TURNS} turns")
    print(f"contents: {', '.join(KINDS)}; tokens: the binding's llama_tokenize")
    server = find_server(folder)
    if server is None:
        print("no llama-server was built there ($LLAMA_SERVER names another): not rendered by it")
    else:
        print(f"rendering: /apply-template of {server.name}")
        with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as workers:
            keys = {"tokenizer.ggml.add_bos_token": False}
            model = ggufs.write_spm(Path(scratch, "random.gguf"), keys=keys)
            rows = list(workers.map(partial(compare_rendering, server, model), templates))
        report("Rendering, by template", rows, OUTCOMES)
    silent = ll.llama_log_callback(lambda *_: None)
    ll.llama_log_set(silent, ctypes.c_void_p())
    sources = {path.stem: path.read_text(encoding="utf-8") for path in templates}
    rows = [compare_tokens(sources, path) for path in vocabularies]
    report("Tokens, by vocabulary", rows, (*OUTCOMES, "guarded"))
    print("guarded: what people typed stayed text; all else as in llama.cpp")
    thoughts = [compare_thoughts(name, source) for name, source in sources.items()]
    report("Thoughts, by template", thoughts, ("split", "differs", "refused", *HISTORY))
    print("kept: a further turn reads only what is new; cut: the template drops earlier thoughts")
    return int(any(row.counts["differs"] for row in (*rows, *thoughts)))


if __name__ == "__main__":
    sys.exit(main())
