"""The head in torch: gradients, unrolled as it drafts, and the same guesses in llama.cpp."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ggufs import write_llama  # noqa: E402
from head_lanes import begin_at, encode, feed, texts  # noqa: E402

from specllama.backend.heads.llama_heads import eagle_pool  # noqa: E402
from specllama.backend.lane import CellLane  # noqa: E402
from specllama.backend.llama import LlamaModel  # noqa: E402
from specllama.backend.llama_pool import open_pool  # noqa: E402
from specllama.models.eagle3_file import read_facts  # noqa: E402
from specllama.models.gguf import read_header  # noqa: E402
from specllama.models.tensors import read_tensor  # noqa: E402
from specllama.settings.params import EngineOptions  # noqa: E402
from specllama.training.eagle_head import (  # noqa: E402
    EagleHead,
    law_loss,
    rope_tables,
    rotate,
)
from specllama.training.head_file import HeadShape, write_head  # noqa: E402
from specllama.training.lessons import TargetFacts  # noqa: E402

SMALL = HeadShape(width=12, heads=2, head_size=4, hidden=8, fused=18, rows=11)
LAYERS = (1, 2, 3)
Tensor = torch.Tensor


def random_head(shape: HeadShape, seed: int = 0) -> EagleHead:
    """A head whose every weight matters."""
    torch.manual_seed(seed)
    head = EagleHead(shape)
    with torch.no_grad():
        for p in head.parameters():
            p.normal_(std=p.shape[-1] ** -0.5) if p.ndim == 2 else p.uniform_(0.5, 1.5)
        head.get_buffer("scale").uniform_(0.5, 2.0)
    return head


def given(shape: HeadShape, batch: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, states, and places that are asked, random."""
    asked = torch.ones(batch, n, dtype=torch.bool)
    return torch.randn(batch, n, shape.width), torch.randn(batch, n, shape.fused), asked


def test_the_loss_is_the_cross_entropy_of_what_has_a_row() -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(300, 12), torch.randn(11, 12)
    index, p = torch.randint(11, (300, 3)), torch.rand(300, 3)
    found = law_loss(x, matrix, index, p, torch.float32)
    logits = x @ matrix.T
    wanted = -(p * logits.log_softmax(-1).gather(1, index)).sum()
    assert torch.allclose(found, wanted, rtol=1e-4)


def test_gradients_are_those_of_finite_differences() -> None:
    """Of every weight, through three unrolled steps and the loss, in 64 bits."""
    head = random_head(SMALL).double()
    embedded, features, asked = given(SMALL, 2, 7)
    embedded, features = embedded.double(), features.double()
    asked[0, :2] = False
    places = torch.tensor([[3, 4, 5], [1, 2, 3]])
    index, p = torch.randint(11, (2, 7, 3)), torch.rand(2, 7, 3, dtype=torch.float64)
    row = torch.arange(2)[:, None]

    def loss() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for k, h in enumerate(head.unroll(embedded, features, asked, places, 3)):
            at = asked if k == 0 else torch.ones_like(places, dtype=torch.bool)
            where = (slice(None),) if k == 0 else (row, places)
            x, i, law = head.output_norm(h[at]), index[where][at], p[where][at]
            total = total + law_loss(x, head.output.weight, i, law, torch.float64)
        return total

    loss().backward()
    for name, weight in head.named_parameters():
        for _ in range(2):
            at = tuple(int(torch.randint(size, ())) for size in weight.shape)
            with torch.no_grad():
                kept, values = weight[at].item(), []
                for by in (1e-5, -1e-5):
                    weight[at] = kept + by
                    values.append(float(loss()))
                weight[at] = kept
            slope = (values[0] - values[1]) / 2e-5
            assert float(weight.grad[at]) == pytest.approx(slope, rel=1e-4, abs=1e-6), name


class Drafting:
    """The head as it drafts: one pair at a time, with a cache of keys and values."""

    def __init__(self, head: EagleHead, n: int) -> None:
        self.head, self.keys, self.values = head, [], []
        self.cos, self.sin = (t.float() for t in rope_tables(head.s.head_size, head.s.rope_base, n))

    def step(self, embedded: Tensor, state: Tensor) -> Tensor:
        head, at = self.head, len(self.keys)
        z = head.pair(head.attn_norm(embedded), state)
        q, k, v = (
            m(z).view(head.s.heads, head.s.head_size)
            for m in (head.attn_q, head.attn_k, head.attn_v)
        )
        q, k = (rotate(one, self.cos[at], self.sin[at]) for one in (q, k))
        self.keys.append(k)
        self.values.append(v)
        keys, values = torch.stack(self.keys, 1), torch.stack(self.values, 1)
        weights = ((keys @ q[..., None])[..., 0] / head.s.head_size**0.5).softmax(-1)
        return head.finish(state, (weights[:, None] @ values).flatten())


@torch.no_grad()
def test_an_unrolled_step_is_that_of_drafting_with_a_cache() -> None:
    head, n, steps = random_head(SMALL), 9, 4
    embedded, features, asked = given(SMALL, 2, n)
    places = torch.arange(1, n).expand(2, -1)
    found = list(head.unroll(embedded, features, asked, places, steps))
    fused = head.fc(features * head.get_buffer("scale"))
    for row in range(2):
        for start in range(n - steps + 1):
            drafting = Drafting(head, n)
            for place in range(start):
                drafting.step(embedded[row, place], fused[row, place])
            state = fused[row, start]
            for k in range(steps):
                state = drafting.step(embedded[row, start + k], state)
                unrolled = found[k][row, start + k - min(k, 1)]
                assert torch.allclose(unrolled, state, atol=1e-5), (start, k)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[tuple[CellLane, Path]]:
    path = write_llama(tmp_path / "target.gguf", blocks=4)
    options = EngineOptions(threads=1, check_memory=False).resolved(on_gpu=False)
    given = {"n_ctx": 256, "max_rows": 32, "threads": 1, "max_leaves": 8}
    model = LlamaModel(path)
    yield open_pool(model, options=options, flash=options.flash_attn, **given).open(), path
    model.close()


@torch.no_grad()
def test_a_written_head_guesses_in_llama_cpp_as_it_does_here(
    target: tuple[CellLane, Path], tmp_path: Path
) -> None:
    lane, path = target
    header = read_header(path)
    words = np.arange(3, header.vocab_size, 2, dtype=np.int32)
    shape = HeadShape(64, 2, 32, 96, 192, len(words), rope_base=5000.0)
    head = random_head(shape)
    # as they are in the file
    for p in head.parameters():
        if p.ndim == 2:
            scale = p.view(len(p), -1, 32).abs().amax(-1, True) / 127
            p.copy_(((p.view(len(p), -1, 32) / scale).round() * scale).view(p.shape))
    head.get_buffer("scale").fill_(2.0)
    weights = {name: p.numpy() for name, p in head.file_weights().items()}
    write_head(out := tmp_path / "head.gguf", weights, shape, header, words, LAYERS)

    made = read_header(out)
    facts = read_facts(made)
    assert (facts.layers, facts.draft_vocab) == (LAYERS, len(words))
    assert np.allclose(read_tensor(made, "fc.weight"), weights["fc.weight"], atol=2e-2)
    lane.capture(LAYERS)
    pool = eagle_pool(LlamaModel(out, head=True), lane.pool, facts, threads=1)
    drafting = pool.open()
    text = texts(1, 40)
    lane.forward(text[:-1], outputs="none")
    features = lane.hidden.rows(0, 39)
    assert features is not None
    begin_at(drafting, 1)
    row, state = feed(drafting, text[1:], encode(drafting, features))

    facts_of = TargetFacts(header, words)
    here = Drafting(head, 64)
    states = head.fc(torch.from_numpy(features.copy()) * head.get_buffer("scale"))
    embedded = facts_of.embed(np.array(text, np.int32))
    for place in range(39):
        own = here.step(embedded[place + 1], states[place])
    agreed = 0
    for _ in range(5):
        logits = head.output(head.output_norm(own)).numpy()
        assert np.isneginf(np.delete(row, words)).all()
        assert np.abs(row[words] - logits).max() < 0.1 < 0.2 * logits.std()
        agreed += int(words[logits.argmax()]) == int(row.argmax())
        guess = int(row.argmax())
        row, state = feed(drafting, [guess], state[None])
        own = here.step(facts_of.embed(np.array([guess], np.int32))[0], own)
    assert agreed == 5
    pool.close()
