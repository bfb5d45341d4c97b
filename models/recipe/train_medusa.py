"""Training of Medusa heads for a target of the family: heads that guess tokens after the next.

Head d reads the target's final hidden state (behind the last norm) and predicts the token that
follows d places behind the target's own (Cai et al. 2024, Medusa-1: the target is frozen). A head
is a few residual blocks ``x + SiLU(W x + b)`` and a square matrix in front of the target's own
output matrix, which all heads share: a full output matrix each would be larger than the target.

What is learnt is the target's law at the place in question, given the text up to there, not the
text itself. The target is run with its weights rounded as in its file.

``python -m specllama.models.recipe.train_medusa runs/target.pt runs/tokenizer.json OUT.gguf
--target TARGET.gguf`` trains and exports.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from specllama.models.gguf import GgufHeader, read_header
from specllama.models.medusa_file import read_facts, vocabulary_digest, write_heads
from specllama.models.recipe.export import AUTHOR, load_checkpoint
from specllama.models.recipe.model import Tiny
from specllama.models.recipe.shape import TARGET_FILE
from specllama.models.recipe.tokenizer import load_tokenizer
from specllama.models.recipe.train import Packer
from specllama.models.tensors import read_tensor

DEPTHS = 3
LENGTH = 512  # of the rows of text that the target reads
SEGMENT = 128  # neighbouring places that are learnt from together, so that laws are shared
PARTS = ("weight", "bias")


class Head(nn.Module):  # type: ignore[misc]
    """A head from a hidden state to the one that the output matrix would have wanted; identity
    first."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.proj = nn.Linear(width, width, bias=False)
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        nn.init.eye_(self.proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Convert rows to rows."""
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.proj(x)


@dataclass(frozen=True)
class Plan:
    """The time to gather hidden states and to train on them."""

    minutes: float = 12.0
    gather: float = 0.45  # share of the time
    segments: int = 12  # per step
    rate: float = 2e-3
    discount: float = 0.8  # a head counts this much less than the one before it
    blocks: int = 2
    seed: int = 1


@dataclass(frozen=True)
class States:
    """The final hidden states of answers, one after the other, and the answer of each.

    ``run`` numbers the answers: places d apart with the same number are d tokens apart.
    """

    hidden: Tensor  # [n, width] float16
    run: Tensor  # [n]

    def together(self, rows: Tensor, d: int) -> Tensor:
        """True where ``rows + d`` lie in the same answers."""
        return self.run[rows] == self.run[rows + d]


def gather(
    model: Tiny, tokenizer: Tokenizer, seed: str, *, seconds: float = 0.0, steps: int = 0
) -> States:
    """Let the target read generated text for some seconds, or for some steps."""
    packer = Packer(tokenizer, seed)
    hidden: list[Tensor] = []
    run: list[Tensor] = []
    count = 0
    end = time.monotonic() + seconds
    while steps > 0 or time.monotonic() < end:
        steps -= 1
        ids, mask = packer.rows(8, LENGTH)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            h = model.hidden(torch.from_numpy(ids[:, :-1]))
        inside = torch.from_numpy(mask[:, 1:] > 0)
        begins = inside.clone()
        begins[:, 1:] &= ~inside[:, :-1]
        number = count + begins.flatten().cumsum(0)
        count = int(number[-1])
        kept = inside.flatten()
        hidden.append(h.flatten(0, 1)[kept].half())
        run.append(number[kept])
    return States(torch.cat(hidden), torch.cat(run))


def losses(model: Tiny, heads: nn.ModuleList, states: States, starts: Tensor) -> list[Tensor]:
    """Return the cross-entropy of each head against the target's law, in nats a token."""
    rows = (starts[:, None] + torch.arange(SEGMENT + DEPTHS)).clamp(max=len(states.run) - 1)
    h = states.hidden[rows].float()  # [segments, SEGMENT + DEPTHS, width]
    here = h[:, :SEGMENT]
    run = states.run[rows]
    found = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        laws = F.softmax(model.head(h[:, 1:]).float(), -1)
    for d, head in enumerate(heads, start=1):
        same = run[:, :SEGMENT] == run[:, d : d + SEGMENT]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.head(head(here[same]))
        law = laws[:, d - 1 : d - 1 + SEGMENT][same]
        found.append(F.cross_entropy(logits.float(), law))
    return found


def load_heads(path: Path) -> nn.ModuleList:
    """Load the heads of a file that this recipe wrote."""
    header = read_header(path)
    facts = read_facts(header)
    heads = nn.ModuleList(Head(facts.width, facts.blocks) for _ in range(facts.heads))
    for h, head in enumerate(heads):
        names = {f"blocks.{b}.{p}": f"block.{b}.{p}" for b in range(facts.blocks) for p in PARTS}
        names["proj.weight"] = "proj.weight"
        head.load_state_dict(
            {
                to: torch.tensor(read_tensor(header, f"head.{h}.{name}"))
                for to, name in names.items()
            }
        )
    return heads


def train(
    model: Tiny, tokenizer: Tokenizer, plan: Plan, heads: nn.ModuleList | None = None
) -> nn.ModuleList:
    """Train heads for `model`, whose weights are not touched; `heads` to continue with, or new
    ones."""
    torch.manual_seed(plan.seed)
    model.requires_grad_(False)
    total = plan.minutes * 60
    start = time.monotonic()
    states = gather(model, tokenizer, f"medusa/{plan.seed}", seconds=plan.gather * total)
    check = gather(model, tokenizer, "medusa/check", steps=4)
    print(f"{len(states.run)} places to learn from", flush=True)
    if heads is None:
        heads = nn.ModuleList(Head(model.s.width, plan.blocks) for _ in range(DEPTHS))
    adam = torch.optim.AdamW(heads.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.01)
    begun = time.monotonic()
    left = max(total - (begun - start), 1.0)
    step = 0
    while True:
        progress = (time.monotonic() - begun) / left
        if step % 200 == 0 or progress >= 1:
            print(
                f"step {step} {progress:4.0%} top-1 {accuracies(model, heads, check)}", flush=True
            )
        if progress >= 1:
            return heads
        for group in adam.param_groups:
            group["lr"] = plan.rate * min(1.0, (step + 1) / 50) * max(0.02, 1 - progress)
        starts = torch.randint(len(states.run) - SEGMENT - DEPTHS, (plan.segments,))
        parts = losses(model, heads, states, starts)
        torch.stack([plan.discount**d * part for d, part in enumerate(parts)]).sum().backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        step += 1


def accuracies(model: Tiny, heads: nn.ModuleList, states: States) -> list[float]:
    """Return how often each head's best token is the target's best token there."""
    found = []
    for d, head in enumerate(heads, start=1):
        rows = torch.arange(len(states.run) - d)
        rows = rows[states.together(rows, d)]
        with torch.no_grad():
            said = model.head(head(states.hidden[rows].float())).argmax(-1)
            wanted = model.head(states.hidden[rows + d].float()).argmax(-1)
        found.append(round(float((said == wanted).float().mean()), 3))
    return found


def export(heads: nn.ModuleList, out: Path, header: GgufHeader, name: str) -> None:
    """Write the head file: Q8_0 matrices, the target's output matrix shared."""
    arrays: dict[str, NDArray[Any]] = {}
    for h, head in enumerate(heads):
        for b, block in enumerate(head.blocks):
            arrays[f"head.{h}.block.{b}.weight"] = block.weight.detach().numpy()
            arrays[f"head.{h}.block.{b}.bias"] = block.bias.detach().numpy()
        arrays[f"head.{h}.proj.weight"] = head.proj.weight.detach().numpy()
    write_heads(
        out,
        arrays,
        name=name,
        heads=len(heads),
        blocks=len(heads[0].blocks),
        width=header.embedding_length,
        vocab=header.vocab_size,
        vocabulary=vocabulary_digest(header),
        metadata={
            "general.author": AUTHOR,
            "general.license": "MIT",
            "general.description": f"Medusa heads for {header.name}",
        },
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path, default=TARGET_FILE, help="the same target as GGUF")
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--gather", type=float, default=Plan.gather, help="share of the time")
    parser.add_argument("--blocks", type=int, default=Plan.blocks)
    parser.add_argument("--rate", type=float, default=Plan.rate)
    parser.add_argument("--start", type=Path, help="head file to begin with")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    model, _ = load_checkpoint(a.checkpoint)
    model.quantise_aware()
    tokenizer = load_tokenizer(a.tokenizer)
    plan = Plan(minutes=a.minutes, gather=a.gather, rate=a.rate, blocks=a.blocks, seed=a.seed)
    heads = train(model, tokenizer, plan, load_heads(a.start) if a.start else None)
    header = read_header(a.target)
    export(heads, a.out, header, a.out.stem)


if __name__ == "__main__":
    main()
