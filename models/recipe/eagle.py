"""Training of an EAGLE-3 head for a target of the family, for llama.cpp's `eagle3` format.

The head is one decoder layer. It reads the embedding of the next token and a state: three hidden
states of the target, fused by a matrix, where the text is known; beyond that, its own output. It
learns the target's law, not the text, and borrows the target's embedding and output matrices.

The head, its first weights and how it is unrolled are `specllama.training`'s. First it learns
its first step on whole rows, the cheapest way to see much text. Its output is also drawn towards
the target's last hidden state (Li et al. 2024, EAGLE), so that state and output stay of one kind.

Then it is unrolled for `STEPS` steps, in one window of each row at a time, against the keys of the
whole row.

The target reads generated text with its weights rounded as in its file. Its answers for a batch are
kept and used several times.

``python -m specllama.models.recipe.eagle runs/target.pt runs/tokenizer.json OUT.gguf --minutes 20``
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize
from tokenizers import Tokenizer
from torch import Tensor

from specllama.models.recipe.eagle_head import Lesson, empty_head, layers_read, lesson
from specllama.models.recipe.export import (
    AUTHOR,
    add_hyperparameters,
    add_tokenizer,
    load_checkpoint,
)
from specllama.models.recipe.model import Linear, Tiny, fake_q4_0
from specllama.models.recipe.scale import LlamaShape
from specllama.models.recipe.tokenizer import load_tokenizer
from specllama.models.recipe.train import Packer
from specllama.training.eagle_head import EagleHead
from specllama.training.head_seed import seed_head

STEPS = 5  # of the unrolled head
DISCOUNT = 0.9  # a step counts this much less than the one before it
ALIKE = 0.4  # weight of the distance to the target's last hidden state
WINDOW = 128  # places of a row that are unrolled


def first_step(head: EagleHead, target: Tiny, given: Lesson) -> Tensor:
    """Return the loss of the step whose states are all known: cross-entropy, and distance of hidden
    states."""
    judged = given.judged
    with torch.autocast("cpu", torch.bfloat16):
        embedded = target.token_embd(given.tokens)
        h = next(head.unroll(embedded, given.features.float(), judged, given.tokens, 1))[judged]
        wanted = given.final[:, 1:][judged].float()
        with torch.no_grad():
            laws = target.head(target.output_norm(wanted)).float().softmax(-1)
        logits = target.head(head.output_norm(h)).float()
    spread = wanted.std()
    return F.cross_entropy(logits, laws) + ALIKE * F.smooth_l1_loss(h / spread, wanted / spread)


def losses(
    head: EagleHead, target: Tiny, given: Lesson, steps: int = STEPS
) -> tuple[list[Tensor], list[float]]:
    """Return for each step the cross-entropy in nats, and the share of agreeing best tokens.

    One window of each row is judged, most of it within an answer.
    """
    batch, n = given.judged.shape
    weights = given.judged[:, STEPS : n - WINDOW + STEPS].float() + 1e-6
    first = torch.multinomial(weights, 1)
    places = first + torch.arange(WINDOW)
    row = torch.arange(batch)[:, None]
    judged = given.judged[row, places]
    judged[:, : STEPS - 1] = False  # every step has a place to come from
    found: list[Tensor] = []
    agreed: list[float] = []
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted = given.final[row, places + 1][judged].float()
            laws = target.head(target.output_norm(wanted)).float().softmax(-1)
        best = laws.argmax(-1)
        embedded, features = target.token_embd(given.tokens), given.features.float()
        asked = torch.zeros_like(given.judged)
        asked[row, places] = asked[row, places - 1] = True
        for k, h in enumerate(head.unroll(embedded, features, asked, places, steps)):
            x = head.output_norm((h if k else h[row, places])[judged])
            logits = target.head(x).float()
            found.append(F.cross_entropy(logits, laws))
            agreed.append(float((logits.detach().argmax(-1) == best).float().mean()))
    return found, agreed


@dataclass(frozen=True)
class Plan:
    """The time and the speed of a training."""

    minutes: float = 20.0
    rows: int = 8  # of text per batch
    visits: int = 4  # steps per new batch: one on it, the others on kept batches
    kept: int = 16  # batches
    short: float = 0.45  # share of the time in which the first step alone is learnt
    adam: float = 2e-3
    muon: float = 0.02
    seed: int = 1

    def rate(self, step: int, progress: float) -> float:
        """Return the learning-rate factor: a few steps up, a plateau, linearly down."""
        return min(1.0, (step + 1) / 8) * max(0.03, min(1.0, (1 - progress) / 0.7))


def new_head(target: Tiny, hidden: int, packer: Packer, rows: int = 16) -> EagleHead:
    """Make a head for `target`, fitted to `rows` rows of text."""
    head = empty_head(target.s, hidden)
    head.output_norm.load_state_dict(target.output_norm.state_dict())
    given = lesson(target, packer, rows)
    with torch.no_grad():
        embedded = target.token_embd(given.tokens)
        states = given.features.float(), given.final.float()
        seed_head(head, target.token_embd.weight, embedded, *states, given.judged)
    return head


def kept_head(target: Tiny, hidden: int, path: Path) -> EagleHead:
    """Load the head that an earlier run kept."""
    head = empty_head(target.s, hidden)
    head.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return head


def train(
    head: EagleHead, target: Tiny, tokenizer: Tokenizer, plan: Plan, keep: Path | None = None
) -> None:
    """Train `head` on the law of `target`; its weights are written to `keep` now and then."""
    target.requires_grad_(False)
    packer = Packer(tokenizer, f"eagle/{plan.seed}")
    check = lesson(target, Packer(tokenizer, "eagle/check"), 8)
    matrices = [p for p in head.parameters() if p.ndim == 2]
    vectors = [p for p in head.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, plan.muon, weight_decay=0.05)
    adam = torch.optim.AdamW(vectors, lr=plan.adam, betas=(0.9, 0.98), weight_decay=0.0)
    batches: deque[Lesson] = deque(maxlen=plan.kept)
    begin = time.monotonic()
    step = 0
    while True:
        progress = (time.monotonic() - begin) / (60 * plan.minutes)
        if step % 50 == 0 or progress >= 1:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # the same windows every time, so that figures compare
                parts, agreed = losses(head, target, check)
            shown = " ".join(f"{float(p):.2f}/{a:.2f}" for p, a in zip(parts, agreed, strict=True))
            print(f"step {step} {progress:4.0%} nats/agreement by depth: {shown}", flush=True)
            if keep is not None:
                torch.save(head.state_dict(), keep)
        if progress >= 1:
            return
        factor = plan.rate(step, progress)
        muon.param_groups[0]["lr"] = plan.muon * factor
        adam.param_groups[0]["lr"] = plan.adam * factor
        if step % plan.visits == 0:
            batches.append(lesson(target, packer, plan.rows))
            given = batches[-1]
        else:
            given = batches[int(torch.randint(len(batches), ()))]
        if progress < plan.short:
            first_step(head, target, given).backward()
        else:
            parts, _ = losses(head, target, given)
            torch.stack([DISCOUNT**k * part for k, part in enumerate(parts)]).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        muon.step()
        adam.step()
        for p in head.parameters():
            p.grad = None
        step += 1


def export(head: EagleHead, s: LlamaShape, tokenizer: Path, out: Path, name: str) -> None:
    """Write `out`, whole or not at all: Q8_0 matrices, and the target's vocabulary."""
    part = out.with_suffix(".part")
    w = gguf.GGUFWriter(part, "eagle3")
    w.add_name(name)
    w.add_author(AUTHOR)
    w.add_license("MIT")
    w.add_description("An EAGLE-3 head for the bundled tiny target")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_hyperparameters(w, replace(s, layers=1, hidden=head.s.hidden, kv_heads=s.heads))
    w.add_array("eagle3.target_layers", list(layers_read(s)))
    w.add_uint32("eagle3.target_hidden_size", s.width)
    add_tokenizer(w, tokenizer)
    for key, value in head.file_weights().items():
        outside = key.startswith(("fc", "output_norm"))
        data = value.numpy()
        full = key if outside else f"blk.0.{key}"
        if data.ndim == 1:
            w.add_tensor(full, np.ascontiguousarray(data))
        else:
            w.add_tensor(full, quantize(data, Q.Q8_0), raw_dtype=Q.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    part.replace(out)


def as_in_its_file(target: Tiny) -> None:
    """Round the matrices of the blocks for good: the head will run on the rounded target."""
    with torch.no_grad():
        for module in target.modules():
            if isinstance(module, Linear):
                module.weight.copy_(fake_q4_0(module.weight))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="of the target")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--short",
        type=float,
        default=Plan.short,
        help="share of the time in which the first step alone is learnt",
    )
    parser.add_argument("--hidden", type=int, default=448)
    parser.add_argument("--start", type=Path, help="go on from weights that --keep wrote")
    parser.add_argument("--keep", type=Path, help="write the weights unrounded as well")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    target, _ = load_checkpoint(a.checkpoint)
    as_in_its_file(target)
    tokenizer = load_tokenizer(a.tokenizer)
    if a.start is None:
        head = new_head(target, a.hidden, Packer(tokenizer, f"eagle/{a.seed}/new"))
    else:
        head = kept_head(target, a.hidden, a.start)
    train(head, target, tokenizer, Plan(a.minutes, short=a.short, seed=a.seed), a.keep)
    export(head, target.s, a.tokenizer, a.out, a.out.stem)
    size = sum(p.numel() for p in head.parameters())
    print(json.dumps({"parameters": size, "bytes": a.out.stat().st_size}))


if __name__ == "__main__":
    main()
