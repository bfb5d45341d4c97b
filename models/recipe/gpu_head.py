"""A head for a `llama` or `qwen2` model, from texts that it writes on a GPU, in some minutes.

`train-draft` takes what a head learns from out of llama.cpp's passes, which is right for any file
and slow. Here the target runs in PyTorch, with its weights as the file's numbers say, and writes
thousands of replies at once: half to the questions of the list that ships, half to questions that
it asks itself, as a chat model does after the words that begin a user's turn. The head is
`specllama.training`'s. With ``--small``, a draft model of two layers learns from the same
minibatches, for comparison.

    python -m specllama.models.recipe.gpu_head prompts TARGET.gguf prompts.npz
    python -m specllama.models.recipe.gpu_head train TARGET.gguf prompts.npz FOLDER --seconds 300
    python -m specllama.models.recipe.gpu_head export TARGET.gguf FOLDER OUT.gguf

Only the second one needs a GPU; it needs neither a network nor llama.cpp.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor, nn

from specllama.models.gguf import read_header
from specllama.training.eagle_head import EagleHead, rope_tables, rotate
from specllama.training.head_file import HeadShape, head_shape, layers_read
from specllama.training.head_seed import seed_head
from specllama.training.lessons import ChainCount, Lesson
from specllama.training.trainer import judged_steps, right_guesses, windows

WORDS = 8192  # that the head can guess, unless --words names others
LONGEST, QUESTION = 256, 64  # tokens of a reply, and of a question that the target asks
WARM, LEAST = 0.8, 0.05  # temperature, and share of the likeliest token's probability
GREEDY = 0.3
STEPS, DISCOUNT, ALIKE, WINDOW = 3, 0.8, 0.2, 128
BATCH = 24_576  # tokens of a minibatch
MUON, ADAM, OUTPUT, DECAY = 0.02, 2e-3, 4e-4, 0.05
WARM_UP, COOLING = 50, 0.5
AT_ONCE = 2048  # replies
MEASURED_S = 20.0


# -- the target --


class Target:
    """A file in PyTorch: matrices in 16 bits, the residual stream in 32.

    Attributes:
        layers: whose inputs a head reads, see ``layers_read``.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        reader, self.header = GGUFReader(path), read_header(path)

        def number(name: str) -> Any:
            return reader.fields[f"{architecture}.{name}"].contents()

        architecture = self.header.architecture

        self.half = torch.float16 if device.type == "cuda" else torch.float32
        self.device = device
        self.n_layers = int(number("block_count"))
        self.width, self.hidden = (
            int(number(f"{x}_length")) for x in ("embedding", "feed_forward")
        )
        self.heads, self.kv = (int(number(f"attention.head_count{x}")) for x in ("", "_kv"))
        self.head_size = self.width // self.heads
        self.eps = float(number("attention.layer_norm_rms_epsilon"))
        self.base = float(number("rope.freq_base"))
        self.layers = layers_read(self.header)
        self.w: dict[str, Tensor] = {}
        for one in reader.tensors:
            values = torch.from_numpy(dequantize(one.data, one.tensor_type).copy())
            if architecture == "qwen2" and one.name.split(".")[2:3] in (["attn_q"], ["attn_k"]):
                # it turns halves of a head against each other: side by side, they are neighbors
                values = values.unflatten(0, (-1, 2, self.head_size // 2)).transpose(1, 2)
                values = values.flatten(0, 2)
            self.w[one.name] = values.to(device, self.half if values.ndim == 2 else torch.float32)
        self.norm = self.w["output_norm.weight"]
        self.output = self.w.get("output.weight", self.w["token_embd.weight"])
        tables = rope_tables(self.head_size, self.base, 1024)
        self.cos, self.sin = (t.to(device, self.half) for t in tables)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.w["token_embd.weight"]).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.width,), weight, self.eps).to(self.half)

    def run(
        self, tokens: Tensor, at: int = 0, cache: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the state before the last norm, and the inputs of ``layers``.

        Args:
            tokens: [batch, n]. at: the place of the first of them.
            cache: [layers, 2, batch, kv heads, places, size], which takes their keys and values.
            mask: [batch, 1, n, places so far] that may be seen; None is causal.
        """
        n = tokens.shape[1]
        cos, sin = self.cos[at : at + n], self.sin[at : at + n]
        x, inputs = self.embed(tokens), []
        for layer in range(self.n_layers):
            if layer in self.layers:
                inputs.append(x)
            w = {k: self.w[f"blk.{layer}.{k}.weight"] for k in BLOCK}
            biases = [self.w.get(f"blk.{layer}.attn_{name}.bias") for name in "qkv"]
            h = self._norm(x, w["attn_norm"])
            q, k, v = (
                F.linear(h, w[f"attn_{name}"], None if bias is None else bias.to(h.dtype))
                .unflatten(-1, (-1, self.head_size))
                .transpose(1, 2)
                for name, bias in zip("qkv", biases, strict=True)
            )
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            if cache is not None:
                cache[layer, 0, :, :, at : at + n], cache[layer, 1, :, :, at : at + n] = k, v
                k, v = cache[layer, :, :, :, : at + n]
            if n == 1:  # the queries of a group read the same keys: a matrix of them
                q = q.reshape(len(q), self.kv, -1, self.head_size)
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                out = out.reshape(len(q), 1, -1)
            else:
                k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
                out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
                out = out.transpose(1, 2).flatten(-2)
            x = x + F.linear(out, w["attn_output"])
            h = self._norm(x, w["ffn_norm"])
            x = x + F.linear(
                F.silu(F.linear(h, w["ffn_gate"])) * F.linear(h, w["ffn_up"]), w["ffn_down"]
            )
        return x, inputs

    def last(self, state: Tensor) -> Tensor:
        """Return the state after the last norm."""
        return F.rms_norm(state, (self.width,), self.norm, self.eps)

    def logits(self, state: Tensor) -> Tensor:
        return F.linear(self._norm(state, self.norm), self.output)


BLOCK = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


# -- texts --


class Text(NamedTuple):
    """A prompt with its reply, as tokens."""

    tokens: Tensor
    reply_from: int


def write(
    target: Target, prompts: list[Tensor], temperatures: Tensor, ends: Tensor, most: int
) -> list[Text]:
    """Write the replies to some prompts, all at once."""
    device, b = target.device, len(prompts)
    longest = max(map(len, prompts))
    tokens = torch.zeros(b, longest + most, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) : longest] = prompt
    tokens = tokens.to(device)
    begin = torch.tensor([longest - len(p) for p in prompts], device=device)
    seen = torch.arange(longest + most, device=device) >= begin[:, None]
    size = (target.n_layers, 2, b, target.kv, longest + most, target.head_size)
    cache = torch.zeros(size, dtype=target.half, device=device)
    causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
    own = torch.eye(longest, dtype=torch.bool, device=device)
    mask = (causal & seen[:, None, :longest] | own)[:, None]
    states = [
        target.run(
            tokens[at : at + 256, :longest], 0, cache[:, :, at : at + 256], mask[at : at + 256]
        )[0][:, -1]
        for at in range(0, b, 256)
    ]
    state = torch.cat(states)
    temperature = temperatures.to(device)[:, None]
    length = torch.zeros(b, dtype=torch.long, device=device)
    over = torch.zeros(b, dtype=torch.bool, device=device)
    for n in range(most):
        logits = target.logits(state).float()
        low = logits < logits.amax(-1, keepdim=True) + np.log(LEAST)
        noise = -torch.empty_like(logits).exponential_().log_()
        token = (logits + temperature * noise).masked_fill_(low, -torch.inf).argmax(-1)
        tokens[:, longest + n] = token
        length += ~over
        over |= torch.isin(token, ends)
        if (n % 16 == 15 and over.all()) or n == most - 1:
            break
        at = longest + n
        state = target.run(token[:, None], at, cache, seen[:, None, None, : at + 1])[0][:, -1]
    tokens, kept = tokens.cpu(), length.tolist()
    return [
        Text(tokens[row, longest - len(p) : longest + kept[row]].int(), len(p))
        for row, p in enumerate(prompts)
    ]


def write_all(
    target: Target, given: dict[str, Any], seconds: float, seed: int = 1
) -> tuple[list[Text], list[Text]]:
    """Write replies for some seconds; also return those held out, at temperature 0."""
    torch.manual_seed(seed)
    dice = np.random.default_rng(seed)
    ends = torch.tensor(given["ends"]).to(target.device)
    listed = [torch.tensor(x) for x in given["trained"]]
    held_prompts = [torch.tensor(x) for x in given["held"]]
    held = write(target, held_prompts, torch.zeros(len(held_prompts)), ends, LONGEST)
    texts: list[Text] = []
    asked = set()
    begin, turn = time.monotonic(), 0
    order = sorted(range(len(listed)), key=lambda i: len(listed[i]))  # of about one length
    cuts = [order[i : i + AT_ONCE] for i in range(0, len(order), AT_ONCE)]
    while time.monotonic() - begin < seconds:
        if turn % 2 == 0:
            rounds, cut = divmod(turn // 2, len(cuts))
            prompts = [listed[i] for i in cuts[cut]]
            warm = torch.full((len(prompts),), WARM if rounds else 0.0)
        else:
            first = torch.tensor(given["question"][0])
            own = write(target, [first] * AT_ONCE, torch.ones(AT_ONCE), ends, QUESTION)
            prompts = []
            for one in own:
                question = one.tokens[len(first) :].tolist()
                if (
                    question[-1] in given["ends"]
                    and len(question) > 4
                    and tuple(question) not in asked
                ):
                    asked.add(tuple(question))
                    prompts.append(torch.tensor([*one.tokens.tolist(), *given["question"][1]]))
            warm = torch.tensor(dice.random(len(prompts)) > GREEDY) * WARM
        if prompts:
            texts += write(target, prompts, warm, ends, LONGEST)
        turn += 1
        if turn % 10 == 0:
            total = sum(len(x.tokens) - x.reply_from for x in texts)
            report(
                wrote=total, replies=len(texts), questions=len(asked), s=time.monotonic() - begin
            )
    return texts, held


def report(**what: Any) -> None:
    print(
        json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in what.items()}),
        flush=True,
    )


# -- lessons --


class Teacher:
    """A target that makes lessons of texts."""

    def __init__(self, target: Target, words: Tensor) -> None:
        self.target, self.words = target, words
        self.row = torch.full((len(target.output),), -1, dtype=torch.long, device=target.device)
        self.row[words] = torch.arange(len(words), device=target.device)

    def lesson(self, texts: list[Text]) -> Lesson:
        """Read texts side by side, each at the start of a row. Call it without gradients.

        ``p`` [judged places, words] are whole laws, and ``index`` [batch, n] is their row there.
        """
        target, device = self.target, self.target.device
        n = max(len(t.tokens) for t in texts)
        tokens = torch.zeros(len(texts), n, dtype=torch.long)
        judged = torch.zeros(len(texts), n - 1, dtype=torch.bool)
        first = torch.zeros(len(texts), 1, dtype=torch.long)  # token that the head sees
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens)] = text.tokens
            if not target.layers:  # states of the last row alone are not known of a prompt
                first[row] = text.reply_from - 1
            begin, end = text.reply_from - int(first[row]), len(text.tokens) - int(first[row])
            judged[row, max(begin - 2, 0) : end - 2] = True
        tokens, judged, first = tokens.to(device), judged.to(device), first.to(device)
        state, inputs = target.run(tokens)
        if not target.layers:
            at = (torch.arange(n, device=device) + first).clamp(max=n - 1)
            tokens, state = tokens.gather(1, at), state.gather(1, at[..., None].expand_as(state))
            inputs = [target.last(state)]
        ahead = state[:, 1:][judged]
        laws, best = [], torch.full(judged.shape, -1, dtype=torch.long, device=device)
        likeliest = []
        for part in ahead.split(8192):
            logits = target.logits(part).float()
            likeliest.append(logits.argmax(-1))
            laws.append((logits[:, self.words] - logits.logsumexp(-1, True)).exp().half())
        top = torch.cat(likeliest)
        best[judged] = self.row[top]
        next_but_one = F.pad(tokens[:, 2:], (0, 1))[judged]
        follows = torch.zeros_like(judged)
        follows[judged] = next_but_one == top
        final = F.rms_norm(state, (target.width,), None, target.eps)
        index = torch.full_like(best, -1)
        index[judged] = torch.arange(len(top), device=device)
        return Lesson(
            target.embed(tokens[:, 1:]),
            torch.cat([x[:, :-1] for x in inputs], -1),
            final,
            judged,
            index,
            torch.cat(laws),
            best,
            follows,
        )


def minibatches(texts: list[Text], dice: np.random.Generator) -> Iterator[list[Text]]:
    """Yield texts of about one length; forever."""
    while True:
        order = dice.permutation(len(texts))
        for some in np.array_split(order, max(1, len(order) // 8192)):
            mix = sorted(some.tolist(), key=lambda i: len(texts[i].tokens))
            batches, at = [], 0
            while at < len(mix):
                count = max(1, BATCH // len(texts[mix[min(at + 64, len(mix) - 1)]].tokens))
                batches.append([texts[i] for i in mix[at : at + count]])
                at += count
            for i in dice.permutation(len(batches)):
                yield batches[i]


# -- those who learn --


def law_loss(z: Tensor, p: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [n, words] with laws [n, words]."""
    z, p = z.float(), p.float()
    return (p.sum(-1) * z.logsumexp(-1) - (p * z).sum(-1)).mean()


def head_losses(head: EagleHead, given: Lesson, dice: torch.Generator) -> tuple[Tensor, float]:
    """Return what a minibatch is to lower, as ``Trainer.losses`` does; and the first step's."""
    device = given.judged.device
    drawn = torch.rand(len(given.judged), generator=dice, device=device)
    places = windows(given.judged, WINDOW, drawn)
    total, firsts = torch.zeros((), device=device), 0.0
    for k, (h, at) in enumerate(judged_steps(head, given, places, STEPS)):
        loss = law_loss(head.output(head.output_norm(h)), given.p[given.index[at]])
        if k == 0:
            firsts = float(loss.detach())
        alike = F.smooth_l1_loss(h.float(), given.states[:, 1:][at])
        total = total + DISCOUNT**k * (loss + ALIKE * alike)
    return total, firsts


class SmallDraft(nn.Module):  # type: ignore[misc]
    """A draft model of two layers, with the target's embeddings and as many words as the head."""

    def __init__(self, target: Target, words: Tensor, layers: int = 2) -> None:
        super().__init__()
        w, self.size = target.width, target.head_size
        self.base, self.eps = target.base, target.eps

        def matrix(inputs: int, outputs: int, zero: bool = False) -> nn.Linear:
            m = nn.Linear(inputs, outputs, bias=False)
            nn.init.normal_(m.weight, std=0.0 if zero else 0.5 / inputs**0.5)
            return m

        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "n1": nn.RMSNorm(w, eps=self.eps), "n2": nn.RMSNorm(w, eps=self.eps),
                "qkv": matrix(w, 3 * w), "o": matrix(w, w, True),
                "gate": matrix(w, target.hidden), "up": matrix(w, target.hidden),
                "down": matrix(target.hidden, w, True),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.RMSNorm(w, eps=self.eps)
        self.output = matrix(w, len(words))
        with torch.no_grad():
            self.output.weight.copy_(target.output[words])
            self.norm.weight.copy_(0.1 * target.norm)  # unsure at first

    def forward(self, embedded: Tensor) -> Tensor:
        """Return logits [judged, words] from embeddings [batch, n, width]."""
        tables = rope_tables(self.size, self.base, embedded.shape[1])
        cos, sin = (t.to(embedded) for t in tables)
        x = embedded / embedded.square().mean(-1, True).sqrt().clamp(min=1e-6)
        for one in self.blocks:
            q, k, v = (
                t.unflatten(-1, (-1, self.size)).transpose(1, 2)
                for t in one["qkv"](one["n1"](x)).chunk(3, -1)
            )
            out = F.scaled_dot_product_attention(
                rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
            )
            x = x + one["o"](out.transpose(1, 2).flatten(-2))
            h = one["n2"](x)
            x = x + one["down"](F.silu(one["gate"](h)) * one["up"](h))
        return x

    def losses(self, given: Lesson) -> Tensor:
        h = self(given.embedded)[given.judged]
        return law_loss(self.output(self.norm(h)), given.p)


class Learner:
    """A module with its optimizers and the average of its latest weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.average = module, copy.deepcopy(module).requires_grad_(False)
        out = module.output.weight
        inner = [p for p in module.parameters() if p.ndim == 2 and p is not out]
        norms = [p for p in module.parameters() if p.ndim == 1]
        self.muon = torch.optim.Muon([{"params": inner, "base": MUON}], weight_decay=DECAY)
        groups = [{"params": norms, "base": ADAM}, {"params": [out], "base": OUTPUT}]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0)
        self.step = 0

    def learn(self, loss: Tensor, ahead: float) -> None:
        """Take a step; ``ahead`` is the share of the training that is ahead."""
        factor = min(1.0, (self.step + 1) / WARM_UP) * max(0.01, min(1.0, ahead / COOLING))
        for group in (*self.muon.param_groups, *self.adam.param_groups):
            group["lr"] = group["base"] * factor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        self.module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for mean, p in zip(self.average.parameters(), self.module.parameters(), strict=True):
                mean.lerp_(p, 1 / (1 + self.step / 20))
        self.step += 1


# -- how good they are --


def measure(
    head: EagleHead, small: SmallDraft | None, teacher: Teacher, held: list[Text]
) -> tuple[ChainCount, ChainCount]:
    """Count the right guesses of both in held-out replies. Call it without gradients."""
    heads, smalls = ChainCount(STEPS), ChainCount(STEPS)
    for at in range(0, len(held), 64):
        given = teacher.lesson(held[at : at + 64])
        judged = given.judged
        with torch.autocast(judged.device.type, torch.bfloat16):
            heads.add(right_guesses(head, given, STEPS), given.follows, judged)
            if small is None:
                continue
            guess = small.output(small.norm(small(given.embedded)[judged])).argmax(-1)
        right = torch.zeros_like(judged)
        right[judged] = guess == given.best[judged]
        # a chain of it has read what it guessed, which is the text where it was right
        smalls.add(right.expand(STEPS, -1, -1), given.follows, judged)
    return heads, smalls


def figures(found: ChainCount) -> dict[str, Any]:
    return {"right": found.right, "per_pass": found.per_pass}


def likeliest(texts: list[Text], n_vocab: int, n: int) -> Tensor:
    """Return the tokens that the replies have most often, ascending."""
    counts = torch.zeros(n_vocab, dtype=torch.long)
    for text in texts:
        counts += torch.bincount(text.tokens[text.reply_from :].long(), minlength=n_vocab)
    return counts.topk(n).indices.sort().values


def begun(target: Target, teacher: Teacher, texts: list[Text]) -> EagleHead:
    """Return a head with its first weights, as ``Trainer`` fits them."""
    shape = head_shape(target.header, len(teacher.words), len(target.layers))
    with torch.no_grad():
        given = teacher.lesson(texts)
    embedded, features, states, judged = (
        x.cpu() for x in (given.embedded, given.features, given.states, given.judged)
    )
    head = EagleHead(shape)
    with torch.no_grad():
        head.set_scale(features[judged])
        head.output.weight.copy_(target.output[teacher.words].float())
        head.output_norm.weight.copy_(target.norm)
        words = target.embed(teacher.words).cpu()
        seed_head(head, words, embedded, features, states, judged, 1)
    head.to(target.device)
    return head


def train(
    path: Path,
    prompts: Path,
    out: Path,
    seconds: float,
    writing: float,
    n_words: int = WORDS,
    with_small: bool = False,
) -> None:
    """Write for some seconds, train for the others, and leave the weights in a folder."""
    begin = time.monotonic()
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    with np.load(prompts) as found:
        given = {
            name: split(found[name], found[f"{name}_n"]) for name in ("trained", "held", "question")
        }
        given["ends"] = found["ends"].tolist()
    with torch.no_grad():
        target = Target(path, device)
        report(loaded=time.monotonic() - begin)
        texts, held = write_all(target, given, writing)
    written = sum(len(x.tokens) - x.reply_from for x in texts)
    longest = max(len(x.tokens) for x in texts)
    report(
        written=written,
        replies=len(texts),
        held=len(held),
        longest=longest,
        s=time.monotonic() - begin,
    )
    words = likeliest(texts, len(target.output), n_words).to(device)
    teacher = Teacher(target, words)
    batches = minibatches(texts, np.random.default_rng(1))
    head = Learner(begun(target, teacher, next(batches)[:64]))
    small = Learner(SmallDraft(target, words).to(device)) if with_small else None
    dice = torch.Generator(device).manual_seed(1)
    course, seen, measured, training = [], 0, time.monotonic(), time.monotonic()
    whole = max(begin + seconds - training, 1.0)
    loss = small_loss = 0.0
    while True:
        now = time.monotonic()
        ahead = (begin + seconds - now) / whole
        if ahead <= 0 or now >= measured:
            with torch.no_grad():
                counts = measure(head.average, small.average if small else None, teacher, held)
            course.append(
                {
                    "minutes": (now - training) / 60,
                    "tokens": seen,
                    "step": head.step,
                    "loss": loss,
                    "head": figures(counts[0]),
                    "small_loss": small_loss,
                    "small": figures(counts[1]),
                }
            )
            report(**course[-1])
            about = {
                "shape": asdict(head.module.s),
                "layers": target.layers,
                "written": written,
                "replies": len(texts),
                "held": len(held),
                "seconds": seconds,
                "writing": writing,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "course": course,
            }
            keep(out, head.average, words, about)
            measured = time.monotonic() + MEASURED_S
        if ahead <= 0:
            break
        some = next(batches)
        with torch.no_grad():
            lesson = teacher.lesson(some)
        with torch.autocast(device.type, torch.bfloat16):
            total, loss = head_losses(head.module, lesson, dice)
            mine = small.module.losses(lesson) if small else None
        head.learn(total, ahead)
        if small and mine is not None:
            small.learn(mine, ahead)
            small_loss = float(mine.detach())
        seen += int(lesson.judged.sum())


def keep(folder: Path, head: EagleHead, words: Tensor, about: dict[str, Any]) -> None:
    """Write the weights in two files of about one size, and what led to them."""
    weights = {k: v.half().numpy() for k, v in head.file_weights().items()}
    np.savez(folder / "output.npz", **{"output.weight": weights.pop("output.weight")})
    np.savez(folder / "weights.npz", words=words.cpu().numpy(), **weights)
    (folder / "course.json").write_text(json.dumps(about))


def split(flat: Any, lengths: Any) -> list[Any]:
    """Cut a flat array into pieces of the given lengths."""
    return np.split(flat, np.cumsum(lengths)[:-1])


# -- before and after, where llama.cpp is --


def prompts_of(path: Path, out: Path) -> None:
    """Write the questions of the list that ships, as the target's template renders them."""
    from specllama.interface import Message
    from specllama.settings.params import GenerateParams
    from specllama.training.features import Teacher as FileTeacher
    from specllama.training.questions import shipped

    def ids(teacher: FileTeacher, text: str) -> list[int]:
        asked = (Message("user", text),)
        return teacher.prompting.prepare(asked, GenerateParams(), n_ctx=512).ids

    listed, found = shipped(), {}
    header = read_header(path)
    with FileTeacher.open(header) as teacher:
        for name, side in (("trained", listed.trained), ("held", listed.held)):
            chats = [chat for kind in listed.kinds for chat in side[kind]]
            found[name] = [ids(teacher, chat[-1].content) for chat in chats]
        a, b = (ids(teacher, text) for text in ("7", "Q"))
        before = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        after = next(i for i, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y)
        # the first token after a question is the one by which the target itself ends it
        found["question"] = [a[:before], a[len(a) - after + 1 :]]
        ends = [t for t in range(header.vocab_size) if teacher.vocab.is_eog(t)]
    arrays: dict[str, Any] = {"ends": np.array(ends)}
    for name, rows in found.items():
        arrays[name] = np.concatenate(rows).astype(np.int32)
        arrays[f"{name}_n"] = np.array([len(row) for row in rows])
    np.savez_compressed(out, **arrays)


def export(path: Path, folder: Path, out: Path) -> None:
    """Write the head as a file, with its card."""
    from specllama.training.head_file import write_head
    from specllama.training.training_card import METADATA, Milestone, TrainingCard, beside

    header, about = read_header(path), json.loads((folder / "course.json").read_text())
    with np.load(folder / "weights.npz") as some, np.load(folder / "output.npz") as more:
        weights = {name: some[name].astype(np.float32) for name in some if name != "words"}
        words = some["words"].astype(np.int32)
        weights["output.weight"] = more["output.weight"].astype(np.float32)
    course = [
        Milestone(
            minutes=about["writing"] / 60 + one["minutes"],
            tokens=one["tokens"],
            loss=one["loss"],
            right=tuple(one["head"]["right"]),
            per_pass=one["head"]["per_pass"],
            step=one["step"],
        )
        for one in about["course"]
    ]
    card = TrainingCard(
        target=path.name,
        fingerprint=header.fingerprint,
        seed=1,
        words=len(words),
        sources=["questions of the list that ships", "questions that the target asked itself"],
        replies={"all": about["replies"]},
        written=about["written"],
        held_out=about["held"],
        trained=course[-1].tokens,
        seconds={
            "write": about["writing"],
            "read": 0.0,
            "train": 60 * about["course"][-1]["minutes"],
        },
        course=course,
        best=course[-1],
        own=True,
        versions={"device": about["device"]},
    )
    metadata = {METADATA: card.encoded().decode()}
    write_head(out, weights, HeadShape(**about["shape"]), header, words, about["layers"], metadata)
    card.save(beside(out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sub = parser.add_subparsers(dest="what", required=True)
    one = sub.add_parser("prompts")
    one.add_argument("target", type=Path)
    one.add_argument("out", type=Path)
    one = sub.add_parser("train")
    one.add_argument("target", type=Path)
    one.add_argument("prompts", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--seconds", type=float, default=300)
    one.add_argument("--writing", type=float, default=90)
    one.add_argument("--words", type=int, default=WORDS)
    one.add_argument("--small", action="store_true")
    one = sub.add_parser("export")
    one.add_argument("target", type=Path)
    one.add_argument("folder", type=Path)
    one.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.what == "prompts":
        prompts_of(args.target, args.out)
    elif args.what == "train":
        given = (args.seconds, args.writing, args.words, args.small)
        train(args.target, args.prompts, args.out, *given)
    else:
        export(args.target, args.folder, args.out)


if __name__ == "__main__":
    main()
