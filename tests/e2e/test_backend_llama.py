"""llama.cpp behind the Context protocol: caches, limits, grammars, text, and nothing on stderr."""

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggufs import write_llama, write_mamba, write_spm
from spelling import guide, guides

from specllama.arrays import Row
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_log import start
from specllama.backend.llama_pool import open_pool
from specllama.engine.engine import Engine
from specllama.errors import Cancelled, CannotLoad, ContextFull, EngineError, UsageError
from specllama.events import Finished, RoundDone
from specllama.models.recipe.runner import Runner
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

pytestmark = pytest.mark.usefixtures("nothing_on_stderr")

TEXT = [40, 71, 12, 9, 100, 33, 71, 12, 9, 5, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69]
JUNK = [200, 201, 202, 203, 204, 205]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    return folder


@pytest.fixture(scope="module")
def mamba(files: Path) -> Iterator[LlamaModel]:
    model = LlamaModel(write_mamba(files / "mamba.gguf"), pre="gpt-2")
    yield model
    model.close()


Opener = Callable[..., CellLane]


@pytest.fixture
def opener() -> Iterator[Opener]:
    opened: list[CellLane] = []

    def make(model: LlamaModel, n_ctx: int = 256, max_rows: int = 17, n_batch: int = 32) -> Any:
        opened.append(
            open_pool(
                model,
                n_ctx=n_ctx,
                max_rows=max_rows,
                threads=1,
                options=EngineOptions(n_batch=n_batch),
                flash="off",
            ).open()
        )
        return opened[-1]

    yield make
    for context in opened:
        context.pool.close()


def feed(context: CellLane, tokens: Sequence[int]) -> Row:
    """One token at a time, as plain decoding does; the row after the last."""
    for token in tokens:
        rows = context.forward([token], outputs="last")
    row: Row = rows[0].copy()
    return row


def check_cache(context: CellLane, tokens: Sequence[int]) -> None:
    assert context.tokens == list(tokens)
    assert context.n_past == len(tokens)


# -- passes and rollback -------------------------------------------------------------------------


def test_a_pass_is_as_many_single_steps(llama: LlamaModel, opener: Opener) -> None:
    """Bitwise: Q8_0 on CPU without flash attention, up to 7 rows."""
    single, wide = opener(llama), opener(llama)
    expected = [single.forward([t], outputs="all")[0].copy() for t in TEXT[:14]]
    rows = [row.copy() for i in (0, 7) for row in wide.forward(TEXT[i : i + 7], outputs="all")]
    np.testing.assert_array_equal(rows, expected)
    check_cache(wide, TEXT[:14])
    assert wide.forward([3, 4], outputs="last").shape == (1, llama.vocab.n_tokens)
    assert wide.forward([3, 4], outputs="none").shape == (0, llama.vocab.n_tokens)


def test_rows_do_not_alias_between_contexts(llama: LlamaModel, opener: Opener) -> None:
    """Two contexts of one model, interleaved: neither sees the other."""
    alone, one, other = opener(llama), opener(llama), opener(llama)
    expected = feed(alone, TEXT)
    for i, token in enumerate(TEXT):
        row = one.forward([token], outputs="last")[0]
        other.forward([JUNK[i % 6]], outputs="last")
    np.testing.assert_array_equal(row, expected)
    check_cache(one, TEXT)


@pytest.mark.parametrize("accepted", [0, 1, 3, 6])
def test_rows_after_a_rollback_are_those_of_a_fresh_context(
    llama: LlamaModel, opener: Opener, accepted: int
) -> None:
    """Full reject, partial, full accept: what was rolled back leaves no trace."""
    fresh, used = opener(llama), opener(llama)
    draft = [*TEXT[10 : 10 + accepted], *JUNK[accepted:]]
    feed(used, TEXT[:10])
    used.forward(draft, outputs="all")
    used.rollback(10 + accepted)
    check_cache(used, TEXT[: 10 + accepted])
    np.testing.assert_array_equal(feed(used, TEXT[10 + accepted :]), feed(fresh, TEXT))


def test_random_walks_of_passes_and_rollbacks(llama: LlamaModel, opener: Opener) -> None:
    rng = np.random.default_rng(5)
    used = opener(llama)
    text: list[int] = []
    for step in range(60):
        if text and rng.random() < 0.45:
            keep = int(rng.integers(0, len(text) + 1))
            used.rollback(keep)
            del text[keep:]
        else:
            new = rng.integers(3, 300, int(rng.integers(1, 8))).tolist()
            row = used.forward(new, outputs="all")[-1].copy()
            text += new
            if step % 10 == 9:
                np.testing.assert_array_equal(row, feed(opener(llama), text))
        check_cache(used, text)


def test_rollback_across_batches(llama: LlamaModel, opener: Opener) -> None:
    long = (TEXT * 6)[:100]
    used = opener(llama)
    for i in range(0, 100, 32):
        used.forward(long[i : i + 32], outputs="none")
    for keep in (97, 64, 33, 32, 31, 1):
        used.rollback(keep)
        check_cache(used, long[:keep])
    used.rollback(0)
    check_cache(used, [])
    np.testing.assert_array_equal(feed(used, TEXT), feed(opener(llama), TEXT))


def test_the_context_fills_to_the_last_cell(llama: LlamaModel, opener: Opener) -> None:
    context = opener(llama, n_ctx=256)
    assert context.n_ctx == 256
    for _ in range(8):
        context.forward([7] * 32, outputs="none")
    with pytest.raises(ContextFull) as caught:
        context.forward([7], outputs="last")
    assert "256" in caught.value.message
    check_cache(context, [7] * 256)
    context.rollback(250)
    with pytest.raises(ContextFull):
        context.forward([7] * 7, outputs="all")
    assert context.forward([7] * 6, outputs="all").shape[0] == 6


@pytest.mark.parametrize("asked", [8, 100, 256, 300])
def test_a_context_is_at_least_what_was_asked(
    llama: LlamaModel, opener: Opener, asked: int
) -> None:
    assert asked <= opener(llama, n_ctx=asked).n_ctx <= asked + 256


@pytest.mark.parametrize("bad", [-1, 10_000, 2**31, 2**40, -(2**40)])
def test_bad_ids_are_refused_before_the_call(llama: LlamaModel, opener: Opener, bad: int) -> None:
    context = opener(llama)
    context.forward(TEXT[:3], outputs="none")
    with pytest.raises(EngineError, match="outside the vocabulary"):
        context.forward([5, bad, 6], outputs="all")
    check_cache(context, TEXT[:3])
    np.testing.assert_array_equal(feed(context, TEXT[3:]), feed(opener(llama), TEXT))


def test_bad_passes_are_refused_before_the_call(llama: LlamaModel, opener: Opener) -> None:
    context = opener(llama, max_rows=4)
    for tokens, outputs in (([], "none"), ([5] * 33, "none"), ([5] * 5, "all")):
        with pytest.raises(ValueError):
            context.forward(tokens, outputs=outputs)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="tree"):
        context.forward([5, 6, 7], outputs="all", parents=[-1, 0, 0])
    with pytest.raises(EngineError, match="tree"):
        context.keep_path([0])
    for keep in (-1, 1):
        with pytest.raises(ValueError):
            context.rollback(keep)
    check_cache(context, [])


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_an_aborted_pass_changes_nothing(
    kind: str, opener: Opener, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    context = opener(model)
    feed(context, TEXT[:10])
    model.stop.set()
    with pytest.raises(Cancelled):
        context.forward(JUNK, outputs="all")
    model.stop.clear()
    check_cache(context, TEXT[:10])
    np.testing.assert_allclose(feed(context, TEXT[10:]), feed(opener(model), TEXT), atol=1e-4)


def test_abort_from_another_thread_stops_a_long_pass(files: Path, opener: Opener) -> None:
    model = LlamaModel(
        write_llama(files / "slow.gguf", width=256, blocks=8, hidden=2048, heads=4), pre="gpt-2"
    )
    context = opener(model, n_ctx=512, n_batch=512)
    threading.Timer(0.02, model.stop.set).start()

    def passes() -> None:
        for _ in range(50):
            context.forward([7] * 512, outputs="none")
            context.rollback(0)

    with pytest.raises(Cancelled):
        passes()
    check_cache(context, [])
    context.close()
    model.close()


# -- recurrent models ----------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [0, 2, 6])
def test_recurrent_rollback(mamba: LlamaModel, opener: Opener, accepted: int) -> None:
    assert not mamba.can_roll_back
    fresh, used = opener(mamba), opener(mamba)
    draft = [*TEXT[10 : 10 + accepted], *JUNK[accepted:]]
    feed(used, TEXT[:10])
    used.forward(draft, outputs="all")
    used.rollback(10 + accepted)
    check_cache(used, TEXT[: 10 + accepted])
    np.testing.assert_allclose(feed(used, TEXT[10 + accepted :]), feed(fresh, TEXT), atol=1e-4)


def test_a_recurrent_checkpoint_of_another_text_is_never_restored(
    mamba: LlamaModel, opener: Opener
) -> None:
    """Back to before the checkpoint, on with another text, back to behind its length."""
    used = opener(mamba)
    feed(used, TEXT[:10])
    used.forward(JUNK, outputs="all")  # checkpoint at 10
    used.rollback(4)
    other = [*TEXT[:4], 90, 91, 92, 93, 94, 95, 96, 97, 98]
    feed(used, other[4:])
    used.rollback(12)
    check_cache(used, other[:12])
    np.testing.assert_allclose(feed(used, [50]), feed(opener(mamba), [*other[:12], 50]), atol=1e-4)


def test_a_recurrent_checkpoint_does_not_survive_a_failed_replay(
    mamba: LlamaModel, opener: Opener
) -> None:
    used = opener(mamba)
    feed(used, TEXT[:10])
    used.forward(JUNK, outputs="all")  # checkpoint at 10
    mamba.stop.set()
    with pytest.raises(EngineError, match="cancelled"):
        used.rollback(12)  # back to the checkpoint, and the replay of two tokens is stopped
    mamba.stop.clear()
    check_cache(used, [])
    other = list(range(90, 104))
    feed(used, other)
    used.rollback(12)
    np.testing.assert_allclose(feed(used, [50]), feed(opener(mamba), [*other[:12], 50]), atol=1e-4)


def test_random_walks_of_a_recurrent_model(mamba: LlamaModel, opener: Opener) -> None:
    rng = np.random.default_rng(1)
    used = opener(mamba)
    text: list[int] = []
    for step in range(50):
        if text and rng.random() < 0.4:
            keep = int(rng.integers(max(0, len(text) - 8), len(text) + 1))
            used.rollback(keep)
            del text[keep:]
        else:
            new = rng.integers(3, 300, int(rng.integers(1, 6))).tolist()
            row = used.forward(new, outputs="all")[-1].copy()
            text += new
            if step % 5 == 4:
                np.testing.assert_allclose(row, feed(opener(mamba), text), atol=1e-3)
        check_cache(used, text)


# -- closing -------------------------------------------------------------------------------------


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(EngineError, match="closed"):
        call()


def test_everything_is_refused_after_close(llama_file: Path) -> None:
    """Use after free would be a crash of the process."""
    model = LlamaModel(llama_file, pre="gpt-2")
    options = EngineOptions(n_batch=32)
    context = open_pool(
        model, n_ctx=256, max_rows=4, threads=1, options=options, flash="off"
    ).open()
    context.forward([5, 6], outputs="all")
    context.close()
    context.close()
    refused(lambda: context.forward([5], outputs="last"))
    refused(lambda: context.rollback(1))
    refused(lambda: context.n_past)
    model.close()
    model.close()
    vocab = model.vocab
    refused(lambda: vocab.tokenize("a", add_special=False, parse_special=False))
    refused(lambda: vocab.piece(9))
    refused(lambda: vocab.is_eog(7))
    refused(lambda: vocab.bos_text)
    refused(lambda: guides(vocab))
    with pytest.raises(CannotLoad):
        open_pool(model, n_ctx=256, max_rows=4, threads=1, options=options, flash="off").open()


# -- grammars ------------------------------------------------------------------------------------


def test_a_forbidden_token_is_an_error_not_an_abort(llama: LlamaModel) -> None:
    grammar = guide("grammar", 'root ::= "a"', llama.vocab)
    for token in (5, 0, -1, 10_000):
        with pytest.raises(UsageError):
            grammar.accept(token)
    assert not grammar.allowed(np.array([3, -1, 99_999], np.int32)).any()


# -- text ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spm(files: Path) -> Iterator[LlamaModel]:
    model = LlamaModel(write_spm(files / "spm.gguf"))
    yield model
    model.close()


@pytest.mark.parametrize("kind", ["llama", "spm"])
def test_every_token_has_a_piece(kind: str, request: pytest.FixtureRequest) -> None:
    vocab = request.getfixturevalue(kind).vocab
    shown = [vocab.piece(t) for t in range(vocab.n_tokens)]
    special = [vocab.piece(t, special=True) for t in range(vocab.n_tokens)]
    assert {bytes([b]) for b in range(256)} <= set(special)
    assert all(special)
    assert all(a in (b, b"") for a, b in zip(shown, special, strict=True))
    eog = [t for t in range(vocab.n_tokens) if vocab.is_eog(t)]
    assert eog
    assert all(shown[t] == b"" for t in eog)
    for bad in (-1, vocab.n_tokens, 2**31):
        with pytest.raises(EngineError, match="outside"):
            vocab.piece(bad)
    assert not vocab.is_eog(-1)
    assert not vocab.is_eog(10**6)


def test_pieces_longer_than_any_buffer(files: Path) -> None:
    from ggufs import bpe_tokens

    tokens, types, merges = bpe_tokens()
    long = "x" * 500
    model = LlamaModel(
        write_llama(
            files / "long.gguf", tokens=[*tokens, long], types=[*types, 1], merges=merges, blocks=1
        ),
        pre="gpt-2",
    )
    assert model.vocab.piece(len(tokens)) == long.encode()
    model.close()


@pytest.mark.parametrize("kind", ["llama", "spm"])
@pytest.mark.parametrize(
    "text",
    ["hello the model", "ünïcödé ☃ 漢字 🙂", "a\0b\x1b[31m", "\ud800 lone", " \n\t ", "<|im_end|>"],
    ids=ascii,
)
def test_text_survives_the_trip_through_tokens(
    kind: str, text: str, request: pytest.FixtureRequest
) -> None:
    vocab = request.getfixturevalue(kind).vocab
    ids = vocab.tokenize(text, add_special=False, parse_special=False)
    back = b"".join(vocab.piece(t, special=True) for t in ids).decode("utf-8", "replace")
    expected = text.encode("utf-8", "replace").decode()
    assert back == expected or (kind == "spm" and back == " " + expected)


def test_control_tokens_are_parsed_only_where_asked(llama: LlamaModel) -> None:
    text = "<|im_end|>"
    assert llama.vocab.tokenize(text, add_special=False, parse_special=True) == [2]
    assert 2 not in llama.vocab.tokenize(text, add_special=False, parse_special=False)


def test_special_tokens_at_the_start(spm: LlamaModel, llama: LlamaModel) -> None:
    assert spm.vocab.tokenize("a", add_special=True, parse_special=False)[0] == 1
    assert spm.vocab.tokenize("", add_special=True, parse_special=False) == [1]
    assert llama.vocab.tokenize("", add_special=True, parse_special=False) == []
    assert (spm.vocab.adds_bos, llama.vocab.adds_bos) == (True, False)
    assert (llama.vocab.eos_text, spm.vocab.eos_text) == ("<|im_end|>", "</s>")


@pytest.mark.parametrize("pre", ["gpt-2", "tekken"])
@pytest.mark.parametrize("unit", ["the model, ", "a", " "])
def test_a_megabyte_is_tokenized(llama: LlamaModel, pre: str, unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    vocab = type(llama.vocab)(llama.handle, pre)
    ids = vocab.tokenize(text, add_special=False, parse_special=False)
    assert b"".join(vocab.piece(t) for t in ids) == text.encode()


def test_long_runs_do_not_overflow_the_stack(files: Path) -> None:
    """tekken splits with std::regex, which recurses once per character: in a process of its own."""
    path = write_llama(files / "tekken.gguf", keys={"tokenizer.ggml.pre": "tekken"}, blocks=1)
    code = (
        "from pathlib import Path\n"
        "from specllama.backend.llama import LlamaModel\n"
        f"vocab = LlamaModel(Path({str(path)!r}), pre='tekken').vocab\n"
        "for text in ('a' * 60_000, ' ' * 60_000, 'aB' * 30_000, '漢' * 30_000):\n"
        "    ids = vocab.tokenize(text, add_special=False, parse_special=False)\n"
        "    assert b''.join(map(vocab.piece, ids)) == text.encode()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# -- files ---------------------------------------------------------------------------------------


def test_a_failed_load_says_why_and_stays_quiet(
    llama_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama_file.read_bytes()[:-5000])
    with (
        caplog.at_level(logging.DEBUG, "specllama.llama"),
        pytest.raises(CannotLoad, match=r"corrupt|bounds|incomplete"),
    ):
        LlamaModel(path)
    assert caplog.records, "llama.cpp's log went to logging"
    with pytest.raises(CannotLoad):
        LlamaModel(tmp_path / "missing.gguf")


def test_the_runner_of_the_recipe_leaves_the_log_where_it_is(
    llama_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, nothing_on_stderr: None
) -> None:
    start()
    with Runner(llama_file, context=64):
        pass
    with caplog.at_level(logging.DEBUG, "specllama.llama"), pytest.raises(CannotLoad):
        LlamaModel(tmp_path / "missing.gguf")
    assert caplog.records


def test_a_quantized_value_cache_needs_flash_attention(llama: LlamaModel) -> None:
    options = EngineOptions(kv_type_v="q8_0", n_batch=32)
    with pytest.raises(UsageError, match="flash"):
        open_pool(llama, n_ctx=256, max_rows=4, threads=1, options=options, flash="off").open()
    context = open_pool(llama, n_ctx=256, max_rows=4, threads=1, options=options, flash="on").open()
    context.forward([5, 6], outputs="last")
    context.close()


# -- the whole engine on random models -----------------------------------------------------------


@pytest.fixture(scope="module")
def pair(files: Path) -> Iterator[Engine]:
    target = write_llama(files / "pair.gguf", quant="Q8_0", scale=0.4)
    draft = write_llama(files / "draft.gguf", quant="Q8_0", scale=0.4)  # the same weights
    with Engine.load(target, draft, EngineOptions(n_ctx=256, threads=1, n_batch=64)) as engine:
        yield engine


def run(engine: Engine, prompt: Any, **changes: Any) -> Finished:
    sampling = SamplingParams(**changes.pop("sampling", {"temperature": 1.0}))
    params = GenerateParams(
        sampling=sampling, **{"seed": 1, "max_tokens": 40, "window": "fixed", **changes}
    )
    engine.reset()
    events = list(engine.generate(prompt, params))
    finished = events[-1]
    emitted = tuple(t for e in events if isinstance(e, RoundDone) for t in e.emitted)
    assert finished.token_ids == emitted
    assert len(emitted) == finished.draft_n_accepted + finished.rounds - finished.cut
    if finished.reason != "context" and params.on_full == "stop":
        assert engine.target.n_past == finished.prompt_n + len(emitted) - 1
    assert engine.target.tokens == engine.target.tokens[: engine.target.n_past]
    return finished


def test_an_engine_that_is_closed_under_a_request(files: Path, pair: Engine) -> None:
    engine = Engine.load(files / "pair.gguf", None, EngineOptions(n_ctx=256, threads=1))
    stream = engine.generate("the model", GenerateParams(max_tokens=30))
    for _ in range(4):
        next(stream)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        list(stream)


def test_damaged_weights_are_an_error_not_a_token(files: Path) -> None:
    def damage(name: str, values: np.ndarray) -> np.ndarray:
        return np.full_like(values, np.nan) if name == "output_norm.weight" else values

    path = write_llama(files / "nan.gguf", weights=damage)
    with Engine.load(path, None, EngineOptions(n_ctx=256, threads=1)) as engine:
        for temperature in (0.0, 1.0):
            params = GenerateParams(sampling=SamplingParams(temperature=temperature))
            with pytest.raises(EngineError, match="cannot be sampled"):
                list(engine.generate("the model", params))


def test_a_damaged_draft_costs_speed_only(files: Path, pair: Engine) -> None:
    with Engine.load(
        files / "pair.gguf", files / "nan.gguf", EngineOptions(n_ctx=256, threads=1)
    ) as engine:
        options: dict[str, Any] = {"proposer": "draft", "ignore_eos": True}
        plain = run(pair, "the model", **{**options, "speculate": False})
        broken = run(engine, "the model", **options)
        assert broken.token_ids == plain.token_ids
        assert broken.draft_n == 0
