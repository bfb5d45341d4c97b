"""A reply's passes once more, of the same widths and shapes over the same text, but with other
tokens wherever a guess was refused. Where its rows come out bit for bit, it owes nothing to what
was guessed and taken back: it can differ from plain decoding by the widths of its passes alone."""

from collections.abc import Sequence

from specllama.engine.engine import Engine
from specllama.settings.params import GenerateParams
from specllama.speculative.sampling import likeliest
from specllama.told import Told


def replayed(engine: Engine, prompt: Sequence[int], told: Told) -> list[tuple[float, float]]:
    """Of every token after the first, its logprob: as the reply told it (``chances=0``), and again.

    The reply was written cold, to the end of its length.
    """
    target, text = engine.target, [*prompt, *told.end.token_ids]
    engine.reset()
    first = Told.of(engine.generate(prompt, GenerateParams(proposer="none", max_tokens=1)))
    assert first.end.prompt_n == len(target.tokens) == len(prompt)
    pairs: list[tuple[float, float]] = []
    for done in told.rounds[1:]:
        path, kept = done.accepted_path, set(done.accepted_path)
        guesses = [
            token if node in kept else (token + 1 + node) % engine.vocab.n_tokens
            for node, token in enumerate(done.drafted)
        ]
        parents = None if done.is_chain else [-1, *(parent + 1 for parent in done.parents)]
        rows = target.forward([text[done.n_past], *guesses], outputs="all", parents=parents)
        for node, chance in zip((-1, *path), done.chances, strict=False):
            [(_, again)] = likeliest(rows[node + 1], chance.token, 0)
            pairs.append((chance.logprob, again))
        if parents is None:
            target.rollback(done.n_past + 1 + len(path))
        else:
            target.keep_path((0, *(node + 1 for node in path)))
    return pairs
