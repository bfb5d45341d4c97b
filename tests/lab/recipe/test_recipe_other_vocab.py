"""The second vocabulary of the recipe. Needs the `train` extra."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from specllama.models.gguf import read_header  # noqa: E402
from specllama.models.pairing import compare  # noqa: E402
from specllama.models.recipe import other_vocab  # noqa: E402
from specllama.models.recipe.export import export  # noqa: E402
from specllama.models.recipe.model import Tiny  # noqa: E402
from specllama.models.recipe.shape import DRAFT, OTHER  # noqa: E402
from specllama.models.recipe.tokenizer import SPECIAL, train_tokenizer  # noqa: E402
from specllama.models.recipe.train import Packer, save  # noqa: E402
from specllama.models.refs import resolve  # noqa: E402


@pytest.fixture(scope="module")
def other() -> tokenizers.Tokenizer:
    return other_vocab.train_other_tokenizer()


def test_marks_come_last_and_any_text_is_read(other: tokenizers.Tokenizer) -> None:
    vocab = other.get_vocab()
    assert sorted(vocab.values()) == list(range(OTHER.vocab))
    assert [vocab[t] for t in SPECIAL] == [OTHER.vocab - 3, OTHER.vocab - 2, OTHER.vocab - 1]
    for text in ("naïve — 日本語 🙂\n\n  x\t", 'it\'s {"a": 1234}'):
        assert other.decode(other.encode(text).ids) == text


def test_answers_are_found_by_its_own_marks(other: tokenizers.Tokenizer) -> None:
    ids, mask = Packer(other, "test").rows(2, 256)
    assert ids.max() < OTHER.vocab
    assert 0 < (mask > 0).mean() < 1


def test_the_file_says_what_is_different(other: tokenizers.Tokenizer, tmp_path: Path) -> None:
    other.save(str(tmp_path / "t.json"))
    none = {"step": 0, "tokens": 0, "minutes": 0.0}
    save(Tiny(OTHER), tmp_path / "m.pt", dict(none))
    out = tmp_path / "other.gguf"
    export(tmp_path / "m.pt", tmp_path / "t.json", out, "q8_0", "other", other_vocab.PRE)
    header = read_header(out)
    assert header.pre_tokenizer == other_vocab.PRE
    assert header.special_id("eos") == OTHER.vocab - 1
    assert header.n_params == OTHER.parameters
    report = compare(read_header(resolve("tiny-target")), header)
    assert {p.kind for p in report.problems} == {"vocabulary", "token"}
    assert 0.5 < report.common < 0.9  # too little for a mapping of tokens


def test_it_can_begin_as_the_draft_of_the_family(other: tokenizers.Tokenizer) -> None:
    family = train_tokenizer(samples=300)
    pieces = other_vocab.pieces(family, other)
    texts = {i: t for t, i in family.get_vocab().items()}
    for token in (0, 300, 1000, OTHER.vocab - 1):
        assert "".join(texts[i] for i in pieces[token]) == other.id_to_token(token)
    draft = Tiny(DRAFT)
    model = other_vocab.from_family(draft, family, other)
    one = next(t for t, p in enumerate(pieces) if len(p) == 1)
    assert torch.equal(model.token_embd.weight[one], draft.token_embd.weight[pieces[one][0]])
    rows = {tuple(row) for row in draft.blk[1].ffn_up.weight.tolist()}
    assert all(tuple(row) in rows for row in model.blk[1].ffn_up.weight.tolist())
