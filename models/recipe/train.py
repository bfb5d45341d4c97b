"""Training of a model of the family on the generated corpus (CPU is enough).

``python -m specllama.models.recipe.train target --minutes 70 --out runs`` writes checkpoints and
a log of held-out losses; the corpus is generated on the fly, so no sample is seen twice.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from specllama.models.recipe.corpus import SLICES, chatml, stream
from specllama.models.recipe.induction import seed_induction
from specllama.models.recipe.model import Tiny
from specllama.models.recipe.shape import SHAPES
from specllama.models.recipe.tokenizer import SPECIAL, load_tokenizer

# Answers from passages are the hardest to learn.
ANSWER_WEIGHT = {"rag": 2.2, "json": 1.3}


@dataclass(frozen=True)
class Plan:
    """The settings of a training; `minutes` (if positive) drives the schedule, else `steps`
    does."""

    steps: int = 1500
    minutes: float = 0.0
    tokens_per_step: int = 8192
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    embed_lr: float = 2e-2
    warmup: float = 0.02
    decay_from: float = 0.45
    final: float = 0.03
    # Weight of prompt tokens in the loss: much of a prompt is made up and cannot be learnt.
    prompt_weight: float = 0.15
    quantise_from: float = 2.0
    seed: int = 1


def length_at(progress: float, fresh: bool = True) -> int:
    """Return the sequence length: short first (unless training goes on), the whole context at the
    end."""
    for end, length in ((0.2, 256), (0.7, 512), (0.9, 1024)):
        if progress < end:
            return length if fresh else max(length, 512)
    return 2048


def encode(tokenizer: Tokenizer, text: str, header: list[int]) -> tuple[list[int], list[bool]]:
    """Return token ids and, for each, whether it belongs to an answer (its end mark included)."""
    ids: list[int] = tokenizer.encode(text).ids
    im_start, im_end = (tokenizer.token_to_id(mark) for mark in SPECIAL[1:])
    answer = [False] * len(ids)
    inside = False
    start = 0
    for i, token in enumerate(ids):
        if token == im_start:
            inside = ids[i + 1 : i + 1 + len(header)] == header
            start = i + 1 + len(header)
        answer[i] = inside and i >= start
        if token == im_end:
            inside = False
    return ids, answer


class Packer:
    """A source of rows filled with whole samples; a row always begins with a sample."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int | str,
        slice_: str | None = None,
        heldout: bool = False,
    ) -> None:
        self.samples = stream(seed, "heldout" if heldout else "train", slice_)
        self.tokenizer = tokenizer
        self.header: list[int] = tokenizer.encode("assistant\n").ids
        self.pool: list[tuple[list[int], list[float]]] = []

    def _fill_pool(self, limit: int) -> None:
        self.pool = [p for p in self.pool if len(p[0]) <= limit]
        while len(self.pool) < 48:
            sample = next(self.samples)
            ids, answer = encode(self.tokenizer, chatml(list(sample.messages)), self.header)
            if len(ids) <= limit:
                weight = ANSWER_WEIGHT.get(sample.slice, 1.0)
                self.pool.append((ids, [weight if a else 0.0 for a in answer]))

    def rows(self, count: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return `count` rows of `length` + 1 tokens, and their weights if they belong to an
        answer."""
        ids = np.zeros((count, length + 1), np.int64)
        mask = np.zeros((count, length + 1), np.float32)
        for row in range(count):
            at = 0
            while at <= length:
                self._fill_pool(length)
                room = length + 1 - at
                fits = [i for i, p in enumerate(self.pool[:40]) if len(p[0]) <= room]
                # The oldest sample that fits; when none does, the oldest is cut.
                tokens, answer = self.pool.pop(fits[0] if fits else 0)
                n = min(room, len(tokens))
                ids[row, at : at + n] = tokens[:n]
                mask[row, at : at + n] = answer[:n]
                at += n
        return ids, mask


def losses(
    model: Tiny,
    ids: Tensor,
    mask: Tensor,
    weight: float,
    hidden: Callable[[Tensor], Tensor] | None = None,
    teacher: Tiny | None = None,
) -> tuple[Tensor, float]:
    """Return the weighted training loss and the plain loss on answers.

    Rows without weight never meet the head, a fifth of the work when prompts do not count. With a
    `teacher` its laws are what is learnt, not the text: a draft is to guess like its target.
    """
    w = mask[:, 1:].flatten()
    answer = w > 0
    w = w + weight * ~answer
    rows = w.nonzero()[:, 0]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.head((hidden or model.hidden)(ids[:, :-1]).flatten(0, 1)[rows])
        if teacher is not None:
            with torch.no_grad():
                laws = teacher.head(teacher.hidden(ids[:, :-1]).flatten(0, 1)[rows])
    each = F.cross_entropy(logits.float(), ids[:, 1:].flatten()[rows], reduction="none")
    w, asked = w[rows], answer[rows].float()
    plain = float((each.detach() * asked).sum() / asked.sum().clamp(min=1))
    if teacher is not None:
        each = F.cross_entropy(logits.float(), laws.float().softmax(-1), reduction="none")
    return (each * w).sum() / w.sum(), plain


def rate(plan: Plan, progress: float) -> float:
    """Return the learning-rate factor: warm-up, plateau, linear decay."""
    if progress < plan.warmup:
        return (progress + 1e-3) / (plan.warmup + 1e-3)
    if progress < plan.decay_from:
        return 1.0
    left = (1 - progress) / (1 - plan.decay_from)
    return plan.final + (1 - plan.final) * max(0.0, left)


def heldout_losses(model: Tiny, tokenizer: Tokenizer, length: int = 1024) -> dict[str, float]:
    """Return the mean loss on held-out answers, per slice."""
    model.eval()
    out = {}
    with torch.no_grad():
        for name in SLICES:
            ids, mask = Packer(tokenizer, "eval", name, heldout=True).rows(8, length)
            out[name] = round(losses(model, torch.from_numpy(ids), torch.from_numpy(mask), 0)[1], 4)
    model.train()
    return out


def batches(packer: Packer, plan: Plan, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield micro-batches of at most 8192 tokens that make up one step."""
    left = plan.tokens_per_step
    while left > 0:
        n = max(1, min(left, 8192) // length)
        ids, mask = packer.rows(n, length)
        yield torch.from_numpy(ids), torch.from_numpy(mask)
        left -= n * length


def save(model: Tiny, path: Path, info: dict[str, object]) -> None:
    """Write weights and facts about the run, whole or not at all."""
    part = path.with_suffix(".part")
    torch.save({"shape": asdict(model.s), "weights": model.state_dict(), "info": info}, part)
    part.replace(path)


def train(
    name: str,
    plan: Plan,
    out: Path,
    threads: int = 2,
    start: Path | None = None,
    fuse: bool = False,
    teacher: Path | None = None,
) -> Tiny:
    """Train one of `SHAPES`; checkpoints go to ``out/NAME.pt``, the log next to it.

    `start` is a checkpoint whose weights (not whose optimiser state) the run begins with; `fuse`
    compiles the blocks, a third faster after a minute of compiling. `teacher` is the checkpoint
    of a target to imitate.
    """
    torch.manual_seed(plan.seed)
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(out / "tokenizer.json")
    model = Tiny(SHAPES[name])
    inner = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blk")]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and n.startswith("blk"))]
    # Embeddings start at one, everything else that Adam trains is small.
    groups = [
        {"params": [p], "base": plan.embed_lr if p is model.token_embd.weight else plan.adam_lr}
        for p in rest
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    muon = torch.optim.Muon(inner, plan.muon_lr, weight_decay=0.05)
    packer = Packer(tokenizer, f"train/{plan.seed}")
    hidden: Callable[[Tensor], Tensor] = torch.compile(model.hidden) if fuse else model.hidden
    started = saved = time.monotonic()
    before = {"step": 0, "tokens": 0, "minutes": 0.0}
    if start is None:
        seed_induction(model, plan.seed)
    else:
        data = torch.load(start, map_location="cpu", weights_only=True)
        model.load_state_dict(data["weights"])
        before = {key: data["info"][key] for key in before}
    guide = None
    if teacher is not None:
        guide = Tiny(SHAPES["target"]).eval()
        guide.load_state_dict(torch.load(teacher, map_location="cpu", weights_only=True)["weights"])
        guide.quantise_aware()
    step = tokens = 0
    smooth = 0.0
    log = (out / f"{name}.log").open("a", buffering=1)
    log.write(json.dumps({"model": name, "parameters": model.parameter_count(), **asdict(plan)}))
    log.write("\n")
    while True:
        now = time.monotonic()
        progress = (now - started) / 60 / plan.minutes if plan.minutes else step / plan.steps
        done = progress >= 1
        if done or now - saved > 240:
            saved = now
            info: dict[str, object] = {
                "step": int(before["step"]) + step,
                "tokens": int(before["tokens"]) + tokens,
                "minutes": round(before["minutes"] + (now - started) / 60, 1),
                "train_loss": round(smooth, 4),
                "progress": round(progress, 3),
                "heldout": heldout_losses(model, tokenizer),
            }
            log.write(json.dumps(info) + "\n")
            save(model, out / f"{name}.pt", info)
            if done:
                return model
        if progress >= plan.quantise_from:
            model.quantise_aware()
        factor = rate(plan, progress)
        for group in (*adam.param_groups, *muon.param_groups):
            group["lr"] = factor * group.get("base", plan.muon_lr)
        length = length_at(progress, fresh=start is None)
        parts = list(batches(packer, plan, length))
        for ids, mask in parts:
            loss, plain = losses(model, ids, mask, plan.prompt_weight, hidden, guide)
            (loss / len(parts)).backward()
            tokens += ids.numel() - len(ids)
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        adam.step()
        muon.step()
        model.zero_grad(set_to_none=True)
        smooth = plain if step == 0 else 0.97 * smooth + 0.03 * plain
        step += 1
        if step % 10 == 0:
            log.write(
                f"step {step} loss {smooth:.4f} tokens {tokens} length {length} "
                f"tok/s {tokens / (time.monotonic() - started):.0f}\n"
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(SHAPES))
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument(
        "--quantise-from",
        type=float,
        default=2.0,
        help="progress from which Q4_0 rounding is trained in",
    )
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument(
        "--decay-from", type=float, default=0.45, help="progress at which rates start to fall"
    )
    parser.add_argument("--embed-lr", type=float, default=2e-2)
    parser.add_argument("--prompt-weight", type=float, default=0.15)
    parser.add_argument("--start", type=Path, help="checkpoint to begin with")
    parser.add_argument("--teacher", type=Path, help="checkpoint of the target to imitate")
    parser.add_argument("--compile", action="store_true", help="fuse the blocks (C++ compiler)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    plan = Plan(
        steps=a.steps,
        minutes=a.minutes,
        tokens_per_step=a.tokens_per_step,
        quantise_from=a.quantise_from,
        muon_lr=a.muon_lr,
        adam_lr=a.adam_lr,
        embed_lr=a.embed_lr,
        decay_from=a.decay_from,
        seed=a.seed,
        prompt_weight=a.prompt_weight,
    )
    train(a.model, plan, a.out, a.threads, a.start, a.compile, a.teacher)


if __name__ == "__main__":
    main()
