"""A draft with a vocabulary of its own, for the drafts that are translated.

Its tokenizer learns half as many tokens from the same corpus, but splits text as Llama 3 does: a
bracket or quote sticks to the word after it, an end of line to what comes before it. So a good
tenth of its tokens are not in the family's vocabulary, and all have different numbers; the marks
come last.

The model does not start from nothing: a token starts with the mean of the embeddings that the
family's draft has for its text, and the blocks are that draft's, without the feed-forward units
that matter least.

``python -m specllama.models.recipe.other_vocab OUT.gguf --runs runs --minutes 60`` does it all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from specllama.models.recipe.corpus import stream
from specllama.models.recipe.export import export, load_checkpoint
from specllama.models.recipe.model import Tiny
from specllama.models.recipe.shape import OTHER
from specllama.models.recipe.tokenizer import SPECIAL
from specllama.models.recipe.train import Plan, save, train

PRE = "llama-bpe"  # llama.cpp's name for the split below
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_other_tokenizer(samples: int = 4000, seed: int = 12) -> Tokenizer:
    """Learn the merges on the training split; the marks get the last numbers."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=OTHER.vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for s in islice(stream(f"tokenizer/{seed}"), samples):
            yield from (m["content"] for m in s.messages)
        yield from ("system\n", "user\n", "assistant\n") * 200

    tokenizer.train_from_iterator(texts(), trainer)
    data = json.loads(tokenizer.to_str())
    marks = len(SPECIAL)
    vocab: dict[str, int] = data["model"]["vocab"]
    data["model"]["vocab"] = {t: (i - marks) % OTHER.vocab for t, i in vocab.items()}
    for mark in data["added_tokens"]:
        mark["id"] = (mark["id"] - marks) % OTHER.vocab
    return Tokenizer.from_str(json.dumps(data))


def pieces(family: Tokenizer, other: Tokenizer) -> list[list[int]]:
    """Return for each token of the other vocabulary the family's tokens of its text, never none."""
    known = family.get_vocab()
    found: list[list[int]] = []
    for token in range(other.get_vocab_size()):
        text = other.id_to_token(token)
        if text not in known:
            # the byte alphabet's spelling goes through the merges, not through the split
            ids = family.model.tokenize(text)
            found.append([t.id for t in ids])
        else:
            found.append([known[text]])
    return found


def _heaviest(block: dict[str, Tensor], keep: int) -> Tensor:
    """Return the numbers of the feed-forward units with the largest product of norms, in order."""
    weight = block["ffn_gate"].norm(dim=1) * block["ffn_up"].norm(dim=1)
    return (weight * block["ffn_down"].norm(dim=0)).topk(keep).indices.sort().values


def from_family(draft: Tiny, family: Tokenizer, other: Tokenizer) -> Tiny:
    """Make a model of shape `OTHER` that begins as the family's draft."""
    weights = {name: w.clone() for name, w in draft.state_dict().items()}
    embedded = weights["token_embd.weight"]
    weights["token_embd.weight"] = torch.stack([embedded[p].mean(0) for p in pieces(family, other)])
    for layer in range(OTHER.layers):
        names = {n: f"blk.{layer}.{n}.weight" for n in ("ffn_gate", "ffn_up", "ffn_down")}
        units = _heaviest({n: weights[full] for n, full in names.items()}, OTHER.hidden)
        for name in ("ffn_gate", "ffn_up"):
            weights[names[name]] = weights[names[name]][units]
        weights[names["ffn_down"]] = weights[names["ffn_down"]][:, units]
    model = Tiny(OTHER)
    model.load_state_dict(weights)
    return model


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="checkpoints, tokenizers")
    parser.add_argument("--family", type=Path, help="folder with draft.pt and tokenizer.json")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    folder = a.runs / "other"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer = train_other_tokenizer()
    tokenizer.save(str(path))
    start: Path | None = None
    if a.family is not None:
        draft, _ = load_checkpoint(a.family / "draft.pt")
        family = Tokenizer.from_file(str(a.family / "tokenizer.json"))
        start = folder / "start.pt"
        none = {"step": 0, "tokens": 0, "minutes": 0.0}
        save(from_family(draft, family, tokenizer), start, dict(none))
    plan = Plan(
        steps=a.steps,
        minutes=a.minutes,
        tokens_per_step=a.tokens_per_step,
        muon_lr=a.muon_lr,
        prompt_weight=0.05,
        decay_from=0.2,
        seed=a.seed,
    )
    train("other", plan, folder, a.threads, start)
    export(folder / "other.pt", path, a.out, "q8_0", a.out.stem, PRE)


if __name__ == "__main__":
    main()
