"""Which drafts fit which targets, and what the report says."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ggufs
import pytest

from specllama.errors import PairIncompatible
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.pairing import active_params, compare, readable, require_pair

Write = Callable[..., GgufHeader]
TOKENS, TYPES, MERGES = ggufs.bpe_tokens()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    count = iter(range(100))

    def make(**options: Any) -> GgufHeader:
        return read_header(ggufs.write_llama(tmp_path / f"m{next(count)}.gguf", **options))

    return make


def test_a_model_fits_itself_and_a_smaller_sister(write: Write) -> None:
    report = require_pair(write(width=128, blocks=4), write(blocks=1))
    assert report.compatible
    assert report.shared == report.common == 1.0
    assert report.differences == ()
    assert report.same_template is True
    assert report.target_rollback == report.draft_rollback == "cells"
    assert 0 < report.ratio < 1


def test_the_first_different_token_is_named_with_both_texts(write: Write) -> None:
    other = list(TOKENS)
    other[300], other[301] = other[301], other[300]
    with pytest.raises(PairIncompatible) as caught:
        require_pair(write(), write(tokens=other, types=TYPES, merges=MERGES))
    assert caught.value.exit_code == 4
    first, second = (TOKENS[i].replace("Ġ", " ") for i in (300, 301))
    assert f"token 300 is {first!r} in the target and {second!r} in the draft" in str(caught.value)


def test_the_first_five_ids_may_differ(write: Write) -> None:
    other = ["<a>", "<b>", "<c>", *TOKENS[3:]]
    report = compare(write(), write(tokens=other, types=TYPES, merges=MERGES))
    assert report.compatible
    assert report.shared == pytest.approx(1 - 3 / len(TOKENS))


@pytest.mark.parametrize(("extra", "fits"), [(128, True), (129, False)])
def test_vocabulary_sizes_may_differ_by_128(write: Write, extra: int, fits: bool) -> None:
    longer = [*TOKENS, *(f"extra{i}" for i in range(extra))]
    report = compare(write(tokens=longer, types=[*TYPES, *[1] * extra], merges=MERGES), write())
    assert report.compatible is fits
    if fits:
        assert f"the draft lacks the target's last {extra} tokens" in report.warnings
    else:
        assert report.problems[0].kind == "vocabulary"


@pytest.mark.parametrize("of_target", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("[PAD300]", 1), ("<unused12>", 3), ("<|reserved_special_token_4|>", 3), ("anything", 5)],
)
def test_tokens_that_one_has_for_padding_may_differ(
    write: Write, name: str, kind: int, of_target: bool
) -> None:
    named, types = [*TOKENS], [*TYPES]
    named[300], types[300] = name, kind
    padded = write(tokens=named, types=types, merges=MERGES)
    pair = (padded, write()) if of_target else (write(), padded)
    report = require_pair(*pair)
    assert "only padding differs: 1 unused token, the first is 300" in report.warnings
    assert report.shared < 1
    named[301] = "another"
    with pytest.raises(PairIncompatible, match="token 301 is") as caught:
        require_pair(write(tokens=named, types=types, merges=MERGES), write())
    assert f"(1 of {len(TOKENS)} ids mean another text)" in str(caught.value)


@pytest.mark.parametrize("name", ["unused", "<pad>", "<|im_start|>", "<0x0A>", "[12]", "padding1"])
def test_a_token_that_is_no_padding_may_not_differ(write: Write, name: str) -> None:
    named = [*TOKENS]
    named[300] = name
    assert not compare(write(tokens=named, types=TYPES, merges=MERGES), write()).compatible


def test_padding_makes_a_vocabulary_longer_by_any_number(write: Write) -> None:
    longer = [*TOKENS, *(f"[PAD{i}]" for i in range(400))]
    padded = write(tokens=longer, types=[*TYPES, *[1] * 400], merges=MERGES)
    assert compare(padded, write()).compatible
    assert compare(write(), padded).compatible


@pytest.mark.parametrize(
    ("keys", "kind", "words"),
    [
        ({"tokenizer.ggml.add_bos_token": True}, "bos", "only the draft adds BOS"),
        ({"tokenizer.ggml.add_eos_token": True}, "eos", "only the draft adds EOS"),
    ],
)
def test_begin_and_end_tokens(write: Write, keys: dict[str, Any], kind: str, words: str) -> None:
    report = compare(write(), write(keys=keys))
    assert report.problems[0].kind == kind
    assert words in report.reason


def test_another_bos_id_matters_only_if_it_is_added(write: Write) -> None:
    moved = {"tokenizer.ggml.bos_token_id": 1}
    assert compare(write(), write(keys=moved)).compatible
    adds = {"tokenizer.ggml.add_bos_token": True}
    report = compare(write(keys=adds), write(keys={**adds, **moved}))
    assert "BOS is token 0 in the target and 1 in the draft" in report.reason


def test_another_tokenizer(write: Write, tmp_path: Path) -> None:
    spm = read_header(ggufs.write_spm(tmp_path / "spm.gguf"))
    report = compare(write(), spm)
    assert report.problems[0].kind == "tokenizer"
    assert "the target's is gpt2, the draft's is llama" in report.reason
    assert "token 5" in report.explanation


def test_what_does_not_forbid_is_a_warning(write: Write) -> None:
    target = write(keys={"llama.context_length": 4096})
    draft = write(
        template="{{ messages }}",
        keys={"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False},
    )
    report = compare(target, draft)
    assert report.compatible
    text = " ".join(report.warnings)
    for words in ("split text differently", "another chat template", "not smaller", "4,096"):
        assert words in text
    assert report.same_template is False
    assert compare(target, write(template=None)).same_template is None


@pytest.mark.parametrize("architecture", ["mamba2", "jamba", "qwen35", "lfm2", "deepseek4"])
def test_drafts_with_a_running_state_fit_and_say_what_it_costs(
    write: Write, architecture: str
) -> None:
    for target in (write(), write(architecture="mamba")):
        report = require_pair(target, write(architecture=architecture))
        assert report.draft_rollback != "cells"
        assert f"the draft ({architecture}) keeps a running state" in " ".join(report.warnings)


@pytest.mark.parametrize(
    ("architecture", "means"),
    [("mamba2", "checkpoint"), ("qwen3next", "checkpoint"), ("qwen35", "planes")],
)
def test_targets_with_a_running_state_fit_and_say_what_it_costs(
    write: Write, architecture: str, means: str
) -> None:
    report = require_pair(write(architecture=architecture), write(blocks=1))
    assert report.compatible
    assert report.target_rollback == means
    assert ("costs a pass" in " ".join(report.warnings)) is (means == "checkpoint")


def test_tokens_are_shown_as_text(write: Write) -> None:
    header = write()
    assert readable(header, "Ġthe".encode()) == " the"
    assert readable(header, "ÃĤ".encode()) == "Â"
    assert readable(header, "Ģ".encode()) == "<0x80>"
    assert readable(header, b"<|im_end|>") == "<|im_end|>"


def test_of_experts_only_the_routed_ones_count(write: Write) -> None:
    header = write(keys={"llama.expert_count": 8, "llama.expert_used_count": 2})
    assert active_params(header) == header.n_params  # no expert tensors in it
    renamed = tuple(
        dataclasses.replace(tensor, name=tensor.name.replace("ffn_up", "ffn_up_exps"))
        for tensor in header.tensors
    )
    experts = sum(t.n_elements for t in renamed if "_exps" in t.name)
    moe = dataclasses.replace(header, tensors=renamed)
    assert active_params(moe) == header.n_params - experts * 3 // 4


def test_the_report_is_json(write: Write) -> None:
    import json

    assert json.loads(json.dumps(compare(write(), write(blocks=1)).to_dict()))["compatible"] is True
