"""The EAGLE-3 recipe: how a new head is set, and what a step of training lowers."""

from __future__ import annotations

from typing import cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("gguf")

import torch.nn.functional as F  # noqa: E402

from specllama.models.recipe import eagle  # noqa: E402
from specllama.models.recipe.eagle_head import Lesson, empty_head, lesson  # noqa: E402
from specllama.models.recipe.model import Tiny  # noqa: E402
from specllama.models.recipe.scale import LlamaShape  # noqa: E402
from specllama.models.recipe.train import Packer  # noqa: E402
from specllama.training.eagle_head import EagleHead, rope_tables  # noqa: E402
from specllama.training.head_seed import seed_head  # noqa: E402

SMALL = LlamaShape(width=64, layers=5, hidden=64, heads=2, kv_heads=1, vocab=512, context=256)
N = eagle.WINDOW + 32


class Rows:
    """Random tokens, every one of an answer; the second half of a row repeats the first."""

    def rows(self, count: int, length: int) -> tuple[object, object]:
        ids = torch.randint(SMALL.vocab, (count, length // 2 + 1)).repeat(1, 2)[:, : length + 1]
        return ids.numpy(), torch.ones(count, length + 1).numpy()


@pytest.fixture
def given() -> tuple[Tiny, Lesson]:
    torch.manual_seed(0)
    target = Tiny(SMALL)
    assert target.output is not None
    torch.nn.init.normal_(target.output.weight, std=0.2)
    target.requires_grad_(False)
    return target, lesson(target, cast(Packer, Rows()), 8, N)


def new(target: Tiny) -> EagleHead:
    torch.manual_seed(1)
    return empty_head(target.s, 96)


def test_a_lesson_holds_what_the_target_says(given: tuple[Tiny, Lesson]) -> None:
    target, told = given
    ids = torch.cat((told.tokens[:, :1], told.tokens), 1)  # the first token is not kept
    assert told.features.shape == (8, N, 3 * SMALL.width)
    assert told.final.shape == (8, N + 1, SMALL.width)
    # blocks of a new model add nothing: its last state is the embedding of the token
    assert torch.allclose(
        told.final[:, 1:].float(), target.token_embd(ids[:, 1:]), rtol=0.02, atol=0.02
    )


def seed(head: EagleHead, target: Tiny, told: Lesson) -> None:
    embedded = target.token_embd(told.tokens)
    states = told.features.float(), told.final.float()
    with torch.no_grad():
        seed_head(head, target.token_embd.weight, embedded, *states, told.judged)


def test_a_new_head_sees_its_own_token_and_what_followed_it_earlier(
    given: tuple[Tiny, Lesson],
) -> None:
    target, told = given
    head = new(target)
    seed(head, target, told)
    with torch.no_grad():
        state = head.fc(told.features.float())
        token = head.attn_norm(target.token_embd(told.tokens))
        z = torch.cat((token, head.attn_norm_2(state)), -1)
        tables = rope_tables(SMALL.head_size, SMALL.rope_base, z.shape[1])
        brought = head.attend(z, *(t.to(z) for t in tables))[2].unflatten(-1, (2, SMALL.head_size))
        codes = head.attn_v.weight[: SMALL.head_size, : SMALL.width] @ token.transpose(1, 2)
    codes = codes.transpose(1, 2)
    late = torch.arange(N // 2 + 8, N - 1)  # all of these tokens occurred half a row earlier
    own = F.cosine_similarity(brought[:, late, 0], codes[:, late], dim=-1)
    following = F.cosine_similarity(brought[:, late, 1], codes[:, late + 1], dim=-1)
    assert own.mean() > 0.9
    assert following.mean() > 0.6


def test_setting_a_head_and_a_step_of_training_both_lower_the_loss(
    given: tuple[Tiny, Lesson],
) -> None:
    target, told = given
    head = new(target)
    before = eagle.first_step(head, target, told)
    seed(head, target, told)
    after = eagle.first_step(head, target, told)
    assert after < before
    parts, agreed = eagle.losses(head, target, told)
    assert len(parts) == len(agreed) == eagle.STEPS
    torch.stack(parts).sum().backward()
    assert all(p.grad is not None for p in head.parameters())
    with torch.no_grad():
        for p in head.parameters():
            p -= 0.02 * p.grad / (p.grad.norm() + 1e-9)
        assert eagle.first_step(head, target, told) < after
