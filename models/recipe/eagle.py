"""Train an EAGLE-3 head for a target of the family, and write it in llama.cpp's `eagle3` format.

The head is one decoder layer. It reads the embedding of the next token beside a state: where the
text is known, three hidden states of the target fused by a matrix; beyond that, its own output. It
learns the target's law, not the text, and borrows the target's embedding and output matrices.

Training-time test (Li et al. 2025, EAGLE-3): the head is unrolled for `STEPS` steps from every
place at once. In step k the state at place j is the head's own output of step k - 1 at place
j - 1, and attention sees what it would see while drafting: fused states up to place j - k, then
one key of each step on the diagonal up to the place itself.

The target reads generated text with its weights rounded as in its file; one window of each row is
unrolled at a time, against the keys of the whole row.

``python -m specllama.models.recipe.eagle runs/target.pt runs/tokenizer.json OUT.gguf --minutes 20``
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize
from tokenizers import Tokenizer
from torch import Tensor, nn

from specllama.models.recipe.export import AUTHOR, add_tokenizer, load_checkpoint
from specllama.models.recipe.model import Linear, Tiny, fake_q4_0, rope_tables, rotate
from specllama.models.recipe.shape import Shape
from specllama.models.recipe.tokenizer import load_tokenizer
from specllama.models.recipe.train import Muon, Packer

STEPS = 5  # of the unrolled head
DISCOUNT = 0.8  # a step counts this much less than the one before it
LENGTH = 512  # of the rows of text
WINDOW = 128  # places of a row that are unrolled


def layers_read(target: Shape) -> tuple[int, int, int]:
    """The head reads what enters these layers: low, middle and high."""
    return 2, (target.layers + 1) // 2, target.layers - 1


class EagleHead(nn.Module):  # type: ignore[misc]
    """llama.cpp's `eagle3` graph; parameters are named as in the file."""

    def __init__(self, target: Shape, hidden: int) -> None:
        super().__init__()
        # the token comes in through keys and values alone: they are as wide as the stream
        s = self.s = replace(target, kv_heads=target.heads)
        self.hidden = hidden
        wide = 2 * s.width
        self.fc = nn.Linear(3 * s.width, s.width, bias=False)
        self.attn_norm = nn.RMSNorm(s.width, eps=s.eps)
        self.attn_norm_2 = nn.RMSNorm(s.width, eps=s.eps)
        self.attn_q = nn.Linear(wide, s.heads * s.head_size, bias=False)
        self.attn_k = nn.Linear(wide, s.kv_heads * s.head_size, bias=False)
        self.attn_v = nn.Linear(wide, s.kv_heads * s.head_size, bias=False)
        self.attn_output = nn.Linear(s.heads * s.head_size, s.width, bias=False)
        self.ffn_norm = nn.RMSNorm(s.width, eps=s.eps)
        self.ffn_gate = nn.Linear(s.width, hidden, bias=False)
        self.ffn_up = nn.Linear(s.width, hidden, bias=False)
        self.ffn_down = nn.Linear(hidden, s.width, bias=False)
        self.output_norm = nn.RMSNorm(s.width, eps=s.eps)
        with torch.no_grad():
            for matrix in (self.attn_q, self.attn_k, self.attn_v, self.ffn_gate, self.ffn_up):
                nn.init.normal_(matrix.weight, std=0.5 / matrix.weight.shape[1] ** 0.5)
            nn.init.zeros_(self.attn_output.weight)
            nn.init.zeros_(self.ffn_down.weight)
            # the state begins as what enters the target's last layer
            nn.init.zeros_(self.fc.weight)
            self.fc.weight[:, 2 * s.width :] = torch.eye(s.width)
        cos, sin = rope_tables(s, s.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def split(self, x: Tensor) -> Tensor:
        """[batch, heads, places, size]"""
        return x.unflatten(-1, (self.s.heads, self.s.head_size)).transpose(1, 2)

    def unroll(
        self, embedded: Tensor, features: Tensor, places: Tensor, steps: int
    ) -> list[Tensor]:
        """What the output matrix reads, for every step and each of `places`.

        Args:
            embedded: [batch, n, width] embedding of the token after each place.
            features: [batch, n, 3 * width] the target's states.
            places: [batch, window] neighbouring places to unroll from, ascending.
        """
        s, n = self.s, embedded.shape[1]
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        row = torch.arange(len(places))[:, None]
        token = self.attn_norm(embedded)
        state = self.fc(features).float()
        z = torch.cat((token, self.attn_norm_2(state)), -1)
        # what is known: keys of fused states, for every place
        known = rotate(self.split(self.attn_k(z)), cos[:n], sin[:n]).transpose(-1, -2)
        known_v = self.split(self.attn_v(z))
        token, state, z = token[row, places], state[row, places], z[row, places]
        cos, sin = cos[places][:, None], sin[places][:, None]
        keys: list[Tensor] = []  # of guessed states, by step
        values: list[Tensor] = []
        rows: list[Tensor] = []
        for k in range(steps):
            if k:
                z = torch.cat((token, self.attn_norm_2(state)), -1)
                keys.append(rotate(self.split(self.attn_k(z)), cos, sin))
                values.append(self.split(self.attn_v(z)))
            q = rotate(self.split(self.attn_q(z)), cos, sin)
            hidden = torch.arange(n) > places[..., None] - k  # [batch, window, n]
            scores = q @ known + hidden[:, None] * -1e4
            # one key of each guessed step: step i stands k - i places back
            own = [
                (q * shift(key, k - i)).sum(-1, keepdim=True) for i, key in enumerate(keys, start=1)
            ]
            weights = torch.cat((scores, *own), -1).float() / s.head_size**0.5
            weights = weights.softmax(-1).to(known_v.dtype)
            out = weights[..., :n] @ known_v
            for i, value in enumerate(values, start=1):
                out = out + weights[..., n + i - 1, None] * shift(value, k - i)
            h = state + self.attn_output(out.transpose(1, 2).flatten(-2)).float()
            x = self.ffn_norm(h)
            h = h + self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x)).float()
            rows.append(self.output_norm(h))
            state = shift(h, 1, dim=1)
        return rows


def shift(x: Tensor, by: int, dim: int = 2) -> Tensor:
    """Each place gets what stands `by` places before it; what comes from beyond the start is 0."""
    if by == 0:
        return x
    n = x.shape[dim]
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, by)), x.narrow(dim, 0, n - by)), dim)


class Lesson(NamedTuple):
    """What the target makes of rows of text; `judged` are the places that count."""

    embedded: Tensor  # [batch, n, width]
    features: Tensor  # [batch, n, 3 * width]
    final: (
        Tensor  # [batch, n, width] what the output matrix reads behind the token after each place
    )
    judged: Tensor  # [batch, n] bool


def lesson(target: Tiny, packer: Packer, rows: int) -> Lesson:
    """A batch. The target's weights are not touched."""
    ids, mask = packer.rows(rows, LENGTH + 1)
    tokens = torch.from_numpy(ids[:, : LENGTH + 1])
    judged = torch.from_numpy(mask[:, 2 : LENGTH + 2] > 0)
    kept = layers_read(target.s)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        n = tokens.shape[1]
        cos, sin = target.get_buffer("cos")[:n], target.get_buffer("sin")[:n]
        x = target.token_embd(tokens)
        embedded = x[:, 1:]
        states = []
        for i, layer in enumerate(target.blk):
            if i in kept:
                states.append(x[:, :-1])
            x = layer(x, cos, sin)
        final = target.output_norm(x)[:, 1:]
    return Lesson(embedded, torch.cat(states, -1).float(), final, judged)


def losses(
    head: EagleHead, target: Tiny, given: Lesson, steps: int = STEPS
) -> tuple[list[Tensor], list[float]]:
    """Of each step: cross-entropy in nats, and the share of agreeing best tokens.

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
            laws = target.head(given.final[row, places][judged]).float().softmax(-1)
        best = laws.argmax(-1)
        for x in head.unroll(given.embedded, given.features, places, steps):
            logits = target.head(x[judged]).float()
            found.append(F.cross_entropy(logits, laws))
            agreed.append(float((logits.detach().argmax(-1) == best).float().mean()))
    return found, agreed


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train."""

    minutes: float = 20.0
    rows: int = 4  # of text per batch
    windows: int = 3  # steps taken from a batch
    short: float = 0.4  # share of the time in which two steps are unrolled, not all
    adam: float = 2e-3
    muon: float = 0.02
    seed: int = 1


def new_head(target: Tiny, hidden: int, start: Path | None = None) -> EagleHead:
    """An untrained head for `target`, or what an earlier run kept."""
    head = EagleHead(target.s, hidden)
    head.output_norm.load_state_dict(target.output_norm.state_dict())
    if start is not None:
        head.load_state_dict(torch.load(start, map_location="cpu", weights_only=True))
    return head


def train(
    head: EagleHead, target: Tiny, tokenizer: Tokenizer, plan: Plan, keep: Path | None = None
) -> None:
    """Let `head` learn what `target` says; its weights are written to `keep` now and then."""
    target.requires_grad_(False)
    packer = Packer(tokenizer, f"eagle/{plan.seed}")
    check = lesson(target, Packer(tokenizer, "eagle/check"), 8)
    matrices = [p for p in head.parameters() if p.ndim == 2]
    vectors = [p for p in head.parameters() if p.ndim == 1]
    muon = Muon(matrices, plan.muon)
    adam = torch.optim.AdamW(vectors, lr=plan.adam, betas=(0.9, 0.98), weight_decay=0.0)
    begin = time.monotonic()
    step = 0
    while True:
        progress = (time.monotonic() - begin) / (60 * plan.minutes)
        if step % 50 == 0 or progress >= 1:
            with torch.no_grad():
                parts, agreed = losses(head, target, check)
            shown = " ".join(f"{float(p):.2f}/{a:.2f}" for p, a in zip(parts, agreed, strict=True))
            print(f"step {step} {progress:4.0%} nats/agreement by depth: {shown}", flush=True)
            if keep is not None:
                torch.save(head.state_dict(), keep)
        if progress >= 1:
            return
        for group, most in ((muon.param_groups[0], plan.muon), (adam.param_groups[0], plan.adam)):
            group["lr"] = most * min(1.0, (step + 1) / 30) * max(0.02, 1 - progress)
        if step % plan.windows == 0:
            given = lesson(target, packer, plan.rows)
        parts, _ = losses(head, target, given, 2 if progress < plan.short else STEPS)
        torch.stack([DISCOUNT**k * part for k, part in enumerate(parts)]).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        muon.step()
        adam.step()
        for p in head.parameters():
            p.grad = None
        step += 1


def export(head: EagleHead, tokenizer: Path, out: Path, name: str) -> None:
    """Write `out`, whole or not at all: Q8_0 matrices, the target's vocabulary beside them."""
    s = head.s
    part = out.with_suffix(".part")
    w = gguf.GGUFWriter(part, "eagle3")
    w.add_name(name)
    w.add_author(AUTHOR)
    w.add_license("MIT")
    w.add_description("An EAGLE-3 head for the bundled tiny target")
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_context_length(s.context)
    w.add_embedding_length(s.width)
    w.add_block_count(1)
    w.add_feed_forward_length(head.hidden)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv_heads)
    w.add_key_length(s.head_size)
    w.add_value_length(s.head_size)
    w.add_rope_dimension_count(s.head_size)
    w.add_rope_freq_base(s.rope_base)
    w.add_layer_norm_rms_eps(s.eps)
    w.add_vocab_size(s.vocab)
    w.add_array("eagle3.target_layers", list(layers_read(s)))
    w.add_uint32("eagle3.target_hidden_size", s.width)
    add_tokenizer(w, tokenizer)
    for key, value in head.state_dict().items():
        outside = key.startswith(("fc", "output_norm"))
        data = value.float().numpy()
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
    """Round the matrices of the blocks for good: the head meets the rounded target."""
    with torch.no_grad():
        for module in target.modules():
            if isinstance(module, Linear):
                module.weight.copy_(fake_q4_0(module.weight))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="of the target")
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=20.0)
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
    head = new_head(target, a.hidden, a.start)
    plan = Plan(a.minutes, seed=a.seed, short=Plan.short if a.start is None else 0.0)
    train(head, target, load_tokenizer(a.tokenizer), plan, a.keep)
    export(head, a.tokenizer, a.out, a.out.stem)
    size = sum(p.numel() for p in head.parameters())
    print(json.dumps({"parameters": size, "bytes": a.out.stat().st_size}))


if __name__ == "__main__":
    main()
