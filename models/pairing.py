"""The test that a draft fits a target, made from the two headers; nothing is loaded.

A draft proposes token *ids*, so both models must mean the same text by the same id. The rule is
llama.cpp's (``common/speculative.cpp``): same tokenizer model, same BOS and EOS behaviour,
vocabulary sizes at most 128 apart, identical token texts from id 5 on. Ids that one of the two has
for padding only may differ: a guess is checked by its id, so they change no text. The report also
explains what does not forbid the pair but makes it slow or odd.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from specllama.errors import PairIncompatible
from specllama.models.running_state import rollback
from specllama.text import number_of

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

MAX_SIZE_DIFFERENCE = 128
FIRST_COMPARED_ID = 5
GOOD_RATIO = (1 / 30, 1 / 10)
UNUSED = 5  # a type of token; some files give padding another one, and name it so
HARDLY = 1 / 4  # a guess of a larger draft costs a third of a step or more, its widths included

_PADDING = re.compile(
    rb"[<\[|>]+_?(?:\w*_)?(?:pad|unused|reserved|dummy|placeholder|control|special)(?:_special_token)?"
    rb"(?:_token)?[_ -]?\d+[>\]|<]+",
    re.IGNORECASE,
)

ProblemKind = Literal["tokenizer", "bos", "eos", "vocabulary", "token"]

# llama-vocab.cpp: what a tokenizer adds when the file does not say
_ADDS_BOS = {"llama": True, "bert": True}
_ADDS_EOS = {"t5": True}
_PRE_ADDS_BOS = frozenset(
    {
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano", "tekken", "chameleon",
    }
)  # fmt: skip
_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2},
    "gpt2": {"bos": 11, "eos": 11},
    "bert": {"bos": 101},
    "t5": {"eos": 1},
    "plamo2": {"bos": 1, "eos": 2},
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why the pair cannot work; ``short`` is for tables."""

    kind: ProblemKind
    message: str
    short: str


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """An id that means different text to the two models."""

    id: int
    target: str
    draft: str

    def __str__(self) -> str:
        return f"token {self.id} is {self.target!r} in the target and {self.draft!r} in the draft"


@dataclass(frozen=True, slots=True)
class PairReport:
    """The findings about a pair.

    Attributes:
        problems: reasons against it; empty means that it fits.
        warnings: it works, but something is worth knowing.
        shared: fraction of all ids (of the larger vocabulary) with identical text.
        common: fraction of the draft's token texts that the target has under any id.
        differences: the first ids whose text differs, at most five.
        ratio: draft parameters over target parameters, both as active for one token.
        same_template: None when one of them has no chat template.
        target_rollback, draft_rollback: see ``running_state.rollback``.
    """

    target: str
    draft: str
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    target_vocab: int
    draft_vocab: int
    shared: float
    common: float
    differences: tuple[TokenDifference, ...]
    ratio: float
    same_template: bool | None
    target_context: int
    draft_context: int
    target_rollback: str
    draft_rollback: str

    @property
    def compatible(self) -> bool:
        return not self.problems

    @property
    def reason(self) -> str:
        """The first problem, or ""."""
        return self.problems[0].message if self.problems else ""

    @property
    def explanation(self) -> str:
        """The first problem, and the first token that differs, unless that is the problem."""
        token = next((p.message for p in self.problems if p.kind == "token"), None)
        return self.reason if token in (None, self.reason) else f"{self.reason}; {token}"

    @property
    def short(self) -> str:
        """The reasons in a few words each, for a table: what differs, and the first such token."""
        chosen = [p for i, p in enumerate(self.problems) if i == 0 or p.kind == "token"]
        return "; ".join(problem.short for problem in chosen)

    @property
    def good_size(self) -> bool:
        return GOOD_RATIO[0] <= self.ratio <= GOOD_RATIO[1]

    def to_dict(self) -> dict[str, Any]:
        problems = [{"kind": p.kind, "message": p.message} for p in self.problems]
        first = {"target": self.target, "draft": self.draft, "compatible": self.compatible}
        return {**first, **asdict(self), "problems": problems}


def adds_bos(header: GgufHeader) -> bool:
    """True if llama.cpp puts BOS in front of a prompt for this model."""
    if header.tokenizer_model == "gemma4" or header.pre_tokenizer == "gemma4":
        return True
    given = header.flag("tokenizer.ggml.add_bos_token")
    if given is not None:
        return given
    model = header.tokenizer_model or ""
    return _ADDS_BOS.get(model, model == "gpt2" and header.pre_tokenizer in _PRE_ADDS_BOS)


def adds_eos(header: GgufHeader) -> bool:
    given = header.flag("tokenizer.ggml.add_eos_token")
    return _ADDS_EOS.get(header.tokenizer_model or "", False) if given is None else given


def special_id(header: GgufHeader, name: str) -> int | None:
    """Return BOS or EOS as llama.cpp will see it: the file's, else the default of the tokenizer."""
    given = header.special_id(name)
    if given is not None:
        return given
    default = _DEFAULT_IDS.get(header.tokenizer_model or "", {}).get(name)
    return default if default is not None and default < header.vocab_size else None


def active_params(header: GgufHeader) -> int:
    """Count the parameters used for one token: of a mixture of experts, those routed to."""
    total, used = header.integer(header.own("expert_count")), header.experts_used
    if not total or not used:
        return header.n_params
    share = min(used / total, 1.0)
    return sum(int(t.n_elements * (share if t.is_expert else 1.0)) for t in header.tensors)


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return {chr(b) if b in plain else chr(next(spare)): b for b in range(256)}


def readable(header: GgufHeader, token: bytes) -> str:
    """Return a token as the text it stands for; bytes that are none are written <0xE2>."""
    text = token.decode("utf-8", "replace")
    if header.tokenizer_model != "gpt2":
        return text.replace("▁", " ")
    alphabet = _byte_alphabet()
    if not all(letter in alphabet for letter in text):
        return text
    raw = bytes(alphabet[letter] for letter in text)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in raw)


def unused(header: GgufHeader, ids: Iterable[int]) -> set[int]:
    """Return those of some ids that the model has for padding: by their type, or their text."""
    marked = set(header.tokens_of_type(UNUSED))
    return {i for i in ids if i in marked or _PADDING.fullmatch(header.token_text(i))}


def compare(target: GgufHeader, draft: GgufHeader) -> PairReport:
    """Compare two models as target and draft.

    Raises:
        BadGguf: a file changed since its header was read.
    """
    problems, said = [*_tokenizer_problems(target, draft)], list[str]()
    differing, common = _token_differences(target, draft)
    most = max(target.vocab_size, draft.vocab_size)
    shared = (min(target.vocab_size, draft.vocab_size) - len(differing)) / max(most, 1)
    padding = unused(target, differing) | unused(draft, differing)
    differing = [i for i in differing if i not in padding]
    differences = tuple(
        TokenDifference(
            i, readable(target, target.token_text(i)), readable(draft, draft.token_text(i))
        )
        for i in [i for i in differing if i >= FIRST_COMPARED_ID][:5]
    )
    if differences:
        problems.append(
            Problem(
                "token",
                f"{differences[0]} ({len(differing):,} of {most:,} ids mean another text)",
                f"token {differences[0].id}: {differences[0].target!r} ≠ {differences[0].draft!r}",
            )
        )
    elif padding:
        count = number_of(len(padding), "unused token", ",")
        said.append(f"only padding differs: {count}, the first is {min(padding)}")
    ratio = active_params(draft) / max(active_params(target), 1)
    templates = (target.chat_template, draft.chat_template)
    same_template = None if None in templates else templates[0] == templates[1]
    return PairReport(
        target=target.path.name, draft=draft.path.name, problems=tuple(problems),
        warnings=(*said, *_warnings(target, draft, ratio, same_template)),
        target_vocab=target.vocab_size, draft_vocab=draft.vocab_size, shared=shared,
        common=common, differences=differences, ratio=ratio, same_template=same_template,
        target_context=target.context_length, draft_context=draft.context_length,
        target_rollback=rollback(target), draft_rollback=rollback(draft),
    )  # fmt: skip


def _token_differences(target: GgufHeader, draft: GgufHeader) -> tuple[list[int], float]:
    """Return the ids that both have with different texts, and ``PairReport.common``."""
    if target.token_texts is not None and draft.token_texts is not None:
        ours, theirs = target.token_texts.data, draft.token_texts.data
        if len(theirs) <= len(ours) and (ours[: len(theirs)] == theirs).all():
            return [], 1.0
    a, b = target.token_bytes, draft.token_bytes
    known = set(a)
    common = sum(token in known for token in b) / max(len(b), 1)
    return [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y], common


def _tokenizer_problems(target: GgufHeader, draft: GgufHeader) -> Iterator[Problem]:
    if _kind(target) != _kind(draft):
        ours, its = target.tokenizer_model, draft.tokenizer_model
        yield Problem(
            "tokenizer",
            f"different tokenizers: the target's is {ours or 'missing'},"
            f" the draft's is {its or 'missing'}",
            f"{its or 'no'} tokenizer, not {ours}",
        )
    checks: tuple[tuple[ProblemKind, Callable[[GgufHeader], bool]], ...]
    checks = (("bos", adds_bos), ("eos", adds_eos))
    for kind, adds in checks:
        name, ids = kind.upper(), [special_id(one, kind) for one in (target, draft)]
        if adds(target) != adds(draft):
            text = f"only the {'target' if adds(target) else 'draft'} adds {name}"
            yield Problem(kind, f"{text} to a prompt", text)
        elif adds(target) and ids[0] != ids[1]:
            text = f"{name} is token {ids[0]} in the target and {ids[1]} in the draft"
            yield Problem(kind, text, f"{name} is a different token")
    smaller, larger = sorted((target, draft), key=lambda one: one.vocab_size)
    beyond = range(smaller.vocab_size, larger.vocab_size)
    if len(beyond) > MAX_SIZE_DIFFERENCE and len(unused(larger, beyond)) < len(beyond):
        yield Problem(
            "vocabulary",
            f"the target has {target.vocab_size:,} tokens, the draft {draft.vocab_size:,};"
            f" they may differ by at most {MAX_SIZE_DIFFERENCE} that are no padding",
            f"{draft.vocab_size:,} tokens, not {target.vocab_size:,}",
        )


def _kind(header: GgufHeader) -> str | None:
    """Return llama.cpp's vocabulary type: some tokenizer models share one."""
    model = header.tokenizer_model
    return "gpt2" if model in ("gemma4", "hybriddna", "whitespace") else model


def _warnings(
    target: GgufHeader, draft: GgufHeader, ratio: float, same_template: bool | None
) -> Iterator[str]:
    sized, (low, high) = bool(target.n_tensors and draft.n_tensors), GOOD_RATIO
    share = f"1/{1 / ratio:.0f} of the target (1/10 to 1/30 is good)" if ratio else ""
    if sized and high < ratio < 1:
        yield f"{'will hardly gain' if ratio > HARDLY else 'may gain little'}: {share}"
    if target.pre_tokenizer != draft.pre_tokenizer:
        yield (
            f"they split text differently before tokenizing ({target.pre_tokenizer or 'default'}"
            f" and {draft.pre_tokenizer or 'default'}): expect lower acceptance"
        )
    for name, word in (("eos", "end"), ("eot", "end-of-turn")):
        a, b = target.special_id(name), draft.special_id(name)
        if a is not None and b is not None and a != b:
            yield f"different {word} tokens ({a} and {b}): drafts near the end are lost"
    if 0 < (extra := target.vocab_size - draft.vocab_size) <= MAX_SIZE_DIFFERENCE:
        yield f"the draft lacks the target's last {extra} tokens"
    if same_template is False:
        yield "the draft was trained with another chat template; it may guess worse"
    if sized and ratio >= 1:
        yield "the draft is not smaller than the target, so it cannot pay"
    elif sized and ratio < low:
        yield f"may guess wrong too often: {share}"
    if 0 < draft.context_length < target.context_length:
        yield (
            f"the draft was trained for {draft.context_length:,} tokens, the target for"
            f" {target.context_length:,}: beyond that, speculation stops"
        )
    if rollback(target) == "checkpoint":
        yield (
            f"the target ({target.architecture}) keeps a running state: after a rejected token it"
            " returns to a checkpoint and reads again what was accepted, which costs a pass"
        )
    if rollback(draft) != "cells":
        yield (
            f"the draft ({draft.architecture}) keeps a running state: each round it returns to a"
            " checkpoint and reads again what was accepted"
        )


def require_pair(target: GgufHeader, draft: GgufHeader) -> PairReport:
    """Return the report of a pair that fits.

    Raises:
        PairIncompatible: it does not fit; the message names the first differing token if that is
            the reason.
    """
    report = compare(target, draft)
    for problem in report.problems:
        # a token that differs says more than the sizes it leads to
        token = next((p for p in report.problems if p.kind == "token"), problem)
        first = token if problem.kind == "vocabulary" else problem
        raise PairIncompatible(
            f"{report.draft} cannot draft for {report.target}: {first.message}",
            f"see which drafts fit: specllama pair {target.path}; or have its guesses translated:"
            " --allow-other-vocab",
        )
    return report
