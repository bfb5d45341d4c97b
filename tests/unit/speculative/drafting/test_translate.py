"""Draft models of another vocabulary: byte-exact, one text per seed, exact rejection, refusals."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from engines import FakeContext
from ggufs import bpe_tokens, write_llama, write_spm
from requests_made import asked, finish
from table_model import FakeTable
from toys import FULL, LETTERS, OURS, SAMPLERS, Setup, V, Words, is_eog

from specllama.engine.engine import Engine
from specllama.errors import ContextFull, EngineError, PairIncompatible
from specllama.events import Finished, RoundDone
from specllama.settings.params import EngineOptions, VerifyRule
from specllama.speculative.drafting import translate
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.draft_tree import TreeDrafter
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.translate import (
    RetokenizingDrafter,
    TokenMap,
    TranslatedContext,
    join_vocabularies,
)
from specllama.speculative.effects import run_alone
from specllama.speculative.round import Rounds
from specllama.speculative.rules import MATCH, RandomCoins
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Room
from specllama.text_history import History

ASCII = [chr(c) for c in (10, *range(32, 127))]
# the same letters in another order, and two tokens that the target does not have
THEIRS = Words([*reversed(LETTERS[: V - 1]), "ab", "xyz"][: V + 1])


def shared(setup: Setup, agreement: float, n_ctx: int = 256) -> TranslatedContext:
    """A draft that would agree with the target, but speaks of its tokens by other numbers."""
    mapped = TokenMap(OURS, THEIRS)
    table = FakeTable(V, seed=6, sharpness=1.5, of=setup.table, agreement=agreement)

    class Renamed(FakeTable):
        def row(self, tokens: Sequence[int]) -> np.ndarray:
            back = dict(zip(mapped.draft_ids.tolist(), mapped.target_ids.tolist(), strict=True))
            row = np.full(THEIRS.n_tokens, 1.0, np.float32)
            row[mapped.draft_ids] = table.row([back.get(t, 0) for t in tokens])[mapped.target_ids]
            return row

    return TranslatedContext(FakeContext(Renamed(THEIRS.n_tokens), n_ctx=n_ctx, n_batch=16), mapped)


def test_tokens_are_matched_by_their_text() -> None:
    mapped = TokenMap(OURS, THEIRS)
    for ours, theirs in zip(mapped.target_ids.tolist(), mapped.draft_ids.tolist(), strict=True):
        assert OURS.piece(ours) == THEIRS.piece(theirs)
    assert mapped.shared == pytest.approx(V / (V + 2))
    assert mapped.spell(0) == (0,)  # the end of a turn, by its special text
    back = TokenMap(THEIRS, OURS)
    assert b"".join(OURS.piece(t) for t in back.spell(V)) == THEIRS.piece(V)


def test_a_translated_cache_follows_every_rollback() -> None:
    setup = Setup()
    context = shared(setup, 1.0)
    context.forward([1, 2, 3, 4, 5], outputs="none")
    context.rollback(2)
    row = context.forward([6], outputs="last").copy()
    assert (context.tokens, context.n_past) == ([1, 2, 6], 3)
    other = shared(setup, 1.0)
    assert np.array_equal(row, other.forward([1, 2, 6], outputs="last"))
    assert row.shape == (1, OURS.n_tokens)
    for call in (
        lambda: context.forward([1, 2], outputs="all"),
        lambda: context.forward([1, 2], outputs="last", parents=[-1, -1]),
        lambda: context.keep_path([0]),
    ):
        with pytest.raises(EngineError):
            call()
    with pytest.raises(ValueError, match="roll back"):
        context.rollback(4)


def test_words_that_take_more_draft_tokens_fill_the_draft_context_earlier() -> None:
    target, draft = Words([*LETTERS, "abcdefgh"]), Words(LETTERS)
    context = TranslatedContext(
        FakeContext(FakeTable(draft.n_tokens), n_ctx=20), TokenMap(target, draft)
    )
    context.forward([27, 1], outputs="none")
    assert context.n_ctx == 20 - 7
    with pytest.raises(ContextFull):
        context.forward([27, 27], outputs="none")
    proposer = ChainDrafter(context, n_vocab=target.n_tokens)
    proposer.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=is_eog))
    tokens = [27, 27, 27, 1]  # 25 letters in a context of 20
    assert not len(run_alone(proposer.draft(tokens, SamplerChain(FULL, tokens=tokens), Room(4))))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shared_tokens_give_one_text(sampler: str, temperature: float) -> None:
    accepted = 0

    def count(loop: Rounds, done: RoundDone) -> None:
        nonlocal accepted
        accepted += len(done.accepted_path)

    for seed in range(3):
        setup = Setup(
            sampling=dataclasses.replace(SAMPLERS[sampler], temperature=temperature),
            seed=seed,
            draft_max=5,
        )
        for proposer in (
            ChainDrafter(shared(setup, 0.8), n_vocab=V),
            TreeDrafter(shared(setup, 0.8), n_vocab=V),
        ):
            assert setup.run(proposer, count) == setup.run()
    assert accepted > 20


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_shared_tokens_are_exact_under_sampling_rules(rule: VerifyRule) -> None:
    """q is the law of the token that is sent, restricted and renormalised: enumerated."""
    words = TokenMap(Words("ab"), Words(["b", "xy", "a"]))
    theirs = FakeTable(4, seed=3, sharpness=1.0)

    def make(target: FakeContext) -> Drafter:
        return ChainDrafter(TranslatedContext(FakeContext(theirs, n_ctx=32), words), n_vocab=3)

    table = FakeTable(3, seed=2, sharpness=1.0)
    assert Setup(seed=0, rule=rule, draft_max=2).off_by(make, table, [1, 2], 2) < 1e-9


# -- cut anew -----------------------------------------------------------------------------------


def test_cut_anew_gives_one_text_and_byte_exact_guesses() -> None:
    draft = Words([*LETTERS, "ab", "cd", "abc", " "])
    mapped = TokenMap(OURS, draft)
    for seed, temperature in ((1, 0.0), (2, 1.0)):
        setup = Setup(
            sampling=dataclasses.replace(FULL, temperature=temperature), seed=seed, draft_max=5
        )
        proposer = RetokenizingDrafter(
            FakeContext(FakeTable(draft.n_tokens, seed=4), n_ctx=256), OURS, draft, mapped
        )
        assert setup.run(proposer) == setup.run()
        assert b"".join(draft.piece(t) for t in proposer._ids) == bytes(proposer._text)


class Counted(Words):
    """A vocabulary that counts what it is asked: bytes to cut into tokens, and pieces."""

    asked = 0

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self.asked += len(text)
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        self.asked += 1
        return super().piece(token, special=special)


def test_a_further_draft_reads_only_what_is_new() -> None:
    target, draft = Counted(ASCII), Counted([*ASCII, "odel", " mod"])
    proposer = RetokenizingDrafter(
        FakeContext(FakeTable(draft.n_tokens), n_ctx=1024), target, draft, TokenMap(target, draft)
    )
    proposer.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=is_eog))
    text = History(target.tokenize("the model " * 80, add_special=False, parse_special=False))
    asked = []
    for _ in range(3):
        target.asked = draft.asked = 0
        run_alone(proposer.draft(text, SamplerChain(FULL, tokens=text), Room(2)))
        asked.append((target.asked, draft.asked))
        text += target.tokenize("the draft ", add_special=False, parse_special=False)
    assert min(asked[0]) > 400
    assert max(asked[1] + asked[2]) < 150


def test_a_guess_is_cut_as_the_target_would_cut_it() -> None:
    target, draft = Words([*ASCII, "the", " model", "el"]), Words([*ASCII, " mod"])
    proposer = RetokenizingDrafter(
        FakeContext(FakeTable(draft.n_tokens), n_ctx=64), target, draft, TokenMap(target, draft)
    )
    the, model = target.n_tokens - 3, target.n_tokens - 2
    assert proposer._cut([the], b" model") == [model]
    assert proposer._cut([the], b" mod\xc3") == target.tokenize(
        " mod", add_special=False, parse_special=False
    )
    assert proposer._cut([the], b"\xff") == []


def test_neither_way_is_refused() -> None:
    context = FakeContext(FakeTable(8))
    wide, other = Words(ASCII), Words([*ASCII[:60], *(f"word{i}" for i in range(40)), *ASCII[60:]])
    assert isinstance(join_vocabularies(context, wide, wide), TranslatedContext)
    assert isinstance(join_vocabularies(context, wide, other), RetokenizingDrafter)
    with pytest.raises(PairIncompatible, match="share"):
        join_vocabularies(context, wide, Words(["word", "another", "third"]))


# -- real files ---------------------------------------------------------------------------------


def texts(engine: Engine, proposer: str, temperature: float) -> Finished:
    engine.reset()
    params = asked(proposer, temperature, seed=3, draft_max=None)
    return finish(engine, "the model and the draft return", params)


@pytest.mark.parametrize("kind", ["shared", "byte-level draft", "sentencepiece draft"])
def test_real_files_with_other_tokenizers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target.gguf"
    if kind == "byte-level draft":
        write_spm(target, quant="Q8_0", blocks=1)
    else:
        write_llama(target, quant="Q8_0", blocks=1)
    if kind == "shared":
        tokens, types, merges = bpe_tokens()
        order = [0, 1, 2, *reversed(range(3, len(tokens)))]  # the same words, other numbers
        draft = write_llama(
            tmp_path / "draft.gguf",
            blocks=1,
            tokens=[tokens[i] for i in order],
            types=[types[i] for i in order],
            merges=merges,
        )
    elif kind == "byte-level draft":
        tokens, types, merges = bpe_tokens([f"{a}word{b}" for a in "abcde" for b in "uvwxyz"])
        draft = write_llama(
            tmp_path / "draft.gguf", blocks=1, tokens=tokens, types=types, merges=merges
        )
    else:
        draft = write_spm(tmp_path / "draft.gguf", blocks=1)
        monkeypatch.setattr(translate, "SHARED_MIN", 1.1)  # the byte tokens alone are 90 %
    with pytest.raises(PairIncompatible):
        Engine.load(target, draft, EngineOptions(n_ctx=256, threads=1))
    options = EngineOptions(
        n_ctx=256, threads=1, allow_other_vocab=True, flash_attn="on", check_memory=False
    )
    with Engine.load(target, draft, options) as engine:
        names = {m.name: m for m in engine.info.methods}
        assert names["draft"].available
        assert names["tree"].available == (kind == "shared")
        if kind != "shared":
            assert "another tokenizer" in names["tree"].reason
        proposer: Drafter = engine.drafters["draft"]
        assert isinstance(proposer, RetokenizingDrafter) == (kind != "shared")
        for temperature in (0.0, 0.9):
            plain = texts(engine, "none", temperature)
            for name in ("draft", "mixed", *(("tree",) if kind == "shared" else ())):
                drafted = texts(engine, name, temperature)
                assert drafted.token_ids == plain.token_ids
                assert drafted.draft_n > 0
