"""The verification rules are exact: every path enumerated, every biased variant caught."""

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from oracle import Oracle, Tokens, Toy, ToyWalk, bias, dense, emitted, outcomes, sparse

from specllama.models.words import Spread
from specllama.settings.params import SamplingParams
from specllama.speculative import rules as verify
from specllama.speculative.rules import RandomCoins, verify_block, verify_match, verify_rejection
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Law, Verdict

EXACT = 1e-9
CAUGHT = 1e-3  # a biased variant must differ by more than this

Rule = Callable[[Draft, ToyWalk, Oracle, Callable[[int], bool]], Verdict]
Drafter = Callable[[Oracle, Toy, Tokens, int], Draft]


def match_with(
    draft: Draft, walk: ToyWalk, oracle: Oracle, is_stop: Callable[[int], bool]
) -> Verdict:
    """``verify_match`` with the common noise replaced by an enumerated draw."""

    def enumerated(law: Law, seed: int, position: int) -> tuple[int, float]:
        return oracle.pick(law.ids, law.probs), math.inf

    with mock.patch.object(verify, "draw", enumerated):
        return verify_match(draft, walk, 0, None, is_stop)


def coined(rule: Any) -> Rule:
    """A rule that throws coins and draws with no noise."""
    return lambda draft, walk, coins, is_stop: rule(draft, walk, 0, coins, is_stop)  # type: ignore[no-any-return]


RULES: dict[str, Rule] = {
    "match": match_with,
    "rejection": coined(verify_rejection),
    "block": coined(verify_block),
}


# -- drafters: how the tokens of a chain come about ----------------------------------------------


def chain(
    oracle: Oracle,
    toy: Toy,
    before: Tokens,
    k: int,
    *,
    law_at: Callable[[int, Law], Law | None] = lambda i, law: law,
    keep_going: Callable[[Law], bool] = lambda law: True,
    stops: bool = True,
) -> Draft:
    """Draft up to ``k`` tokens; ``law_at`` gives what token i is drawn from (None: its best)."""
    tokens: list[int] = []
    q: list[Law | None] = []
    for i in range(k):
        law = toy.law(before + tuple(tokens))
        if not keep_going(law):
            break
        used = law_at(i, law)
        token = (
            int(law.ids[np.argmax(law.probs)])
            if used is None
            else oracle.pick(used.ids, used.probs)
        )
        tokens.append(token)
        q.append(used)
        if stops and token == toy.eos:
            break
    return Draft.chain(tokens, "toy", q=q)


def sampled(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
    return chain(oracle, toy, before, k)


def greedy(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
    return chain(oracle, toy, before, k, law_at=lambda i, law: None)


def sharpened(law: Law) -> Law:
    w = law.probs**2
    return Law(law.ids, w / w.sum())


def mixed(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
    """Point mass, sharpened and plain laws by turns, chosen from the law alone."""

    def law_at(i: int, law: Law) -> Law | None:
        if law.probs.max() > 0.7:
            return None
        return sharpened(law) if i % 2 else law

    return chain(oracle, toy, before, k, law_at=law_at)


def confident(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
    """Stops at a law that is not sure of itself, before drawing from it: allowed everywhere."""
    return chain(oracle, toy, before, k, keep_going=lambda law: bool(law.probs.max() >= 0.6))


DRAFTERS: dict[str, Drafter] = {
    "sampled": sampled,
    "point mass": greedy,
    "mixed": mixed,
    "stopped before a draw": confident,
}


def one_round(
    rule: Rule, target: Toy, toy: Toy, drafter: Drafter, k: int
) -> Callable[[Oracle], Tokens]:
    """Draft up to ``k`` tokens from ``toy``, verify them, return what is emitted."""

    def program(oracle: Oracle) -> Tokens:
        draft = drafter(oracle, toy, (), k)
        verdict = rule(draft, ToyWalk(target, draft, ()), oracle, lambda t: t == target.eos)
        return emitted(draft, verdict)

    return program


def toys(v: int, kind: str, seed: int, eos: int | None = None) -> tuple[Toy, Toy]:
    """(target, draft) of a kind: dense, or with impossible tokens on either side."""
    zero_p = 0.4 if kind in ("sparse p", "sparse both") else 0.0
    zero_q = 0.4 if kind in ("sparse q", "sparse both") else 0.0
    return (Toy(v, seed, zero=zero_p, eos=eos), Toy(v, 1000 + seed, zero=zero_q, eos=eos))


KINDS = ("dense", "sparse p", "sparse q", "sparse both")
SIZES = [(v, k) for v in (2, 3, 4) for k in range(5) if v**k <= 32]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_chain_is_exact(rule: str, drafter: str, kind: str) -> None:
    for v, k in SIZES:
        for seed in range(2 if v**k <= 16 else 1):
            target, draft = toys(v, kind, seed)
            program = one_round(RULES[rule], target, draft, DRAFTERS[drafter], k)
            assert bias(program, target, k + 1).tv < EXACT, (v, k, seed)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("v", "k"), [(3, 4), (4, 3), (4, 4)])
def test_long_chain_is_exact(rule: str, v: int, k: int) -> None:
    target, draft = toys(v, "sparse both", 7)
    assert bias(one_round(RULES[rule], target, draft, sampled, k), target, k + 1).tv < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["sampled", "point mass", "mixed"])
@pytest.mark.parametrize("stops", [True, False])
def test_stop_token_inside_a_draft_absorbs(rule: str, drafter: str, stops: bool) -> None:
    """Whether the drafter ends at a stop token or rambles on behind it."""
    for seed in range(4):
        target, draft = toys(3, "dense" if seed % 2 else "sparse q", seed, eos=0)
        if not stops:
            draft.eos = None
        program = one_round(RULES[rule], target, draft, DRAFTERS[drafter], 3)
        assert bias(program, target, 4).tv < EXACT
        for _, tokens in outcomes(program):
            assert 0 not in tokens[:-1], "nothing is emitted behind a stop token"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["sampled", "mixed"])
@pytest.mark.parametrize("eos", [None, 1])
def test_several_rounds_and_a_cut_inside_an_accepted_run(
    rule: str, drafter: str, eos: int | None
) -> None:
    length = 4

    def program(oracle: Oracle) -> Tokens:
        out: Tokens = ()
        sizes = itertools.cycle((2, 1))
        while len(out) < length and (not out or out[-1] != eos):
            d = DRAFTERS[drafter](oracle, draft, out, next(sizes))
            verdict = RULES[rule](d, ToyWalk(target, d, out), oracle, lambda t: t == target.eos)
            out += emitted(d, verdict)
        return out[:length]

    for kind in ("dense", "sparse both"):
        target, draft = toys(2, kind, 5, eos)
        assert bias(program, target, length).tv < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_equal_laws_accept_everything(rule: str) -> None:
    """p == q, exactly and up to rounding noise: nothing odd where the residual vanishes."""
    for noise in (0.0, 1e-16, 1e-13, 1e-9):
        target = Toy(3, 11)
        near = Jittered(3, 11, noise=noise)
        result = bias(one_round(RULES[rule], target, near, sampled, 3), target, 4)
        assert result.tv < max(EXACT, 10 * noise)
        if rule != "match":
            assert result.mean_length == pytest.approx(4.0, abs=1e-6)


class Jittered(Toy):
    """The same laws, off by a relative rounding error."""

    def __init__(self, n_vocab: int, seed: int, *, noise: float) -> None:
        super().__init__(n_vocab, seed)
        self._noise = noise

    def law(self, prefix: Tokens) -> Law:
        law = super().law(prefix)
        rng = np.random.default_rng((99, *prefix))
        w = law.probs * (1 + self._noise * rng.standard_normal(len(law.ids)))
        return Law(law.ids, w / w.sum())


@pytest.mark.parametrize("rule", RULES)
def test_disjoint_laws_reject_everything(rule: str) -> None:
    target = Toy(4, 0, fixed=(0.25, 0.75, 0.0, 0.0))
    draft = Toy(4, 0, fixed=(0.0, 0.0, 0.5, 0.5))
    result = bias(one_round(RULES[rule], target, draft, sampled, 3), target, 4)
    assert result.tv < EXACT
    assert result.mean_length == 1.0


@pytest.mark.parametrize("rule", RULES)
def test_empty_draft_is_a_plain_step(rule: str) -> None:
    target = Toy(3, 2)
    assert bias(one_round(RULES[rule], target, target, sampled, 0), target, 1).tv < EXACT
    verdict = RULES[rule](Draft(), ToyWalk(target, Draft(), ()), Oracle(), lambda t: False)
    assert (verdict.path, verdict.kind, verdict.p) == ((), "plain", ())


# -- a draft model that knows fewer words (``models/trimmed``) -----------------------------------


class Trimmed(Toy):
    """The law of a toy whose logits are rows of some tokens only; ``whole``: of all of them."""

    says = np.array([0, 2], np.int32)
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)

    def law(self, prefix: Tokens) -> Law:
        row = np.log(self.dense(prefix)).astype(np.float32)
        wide = Spread(self.says, self.n_vocab)(row[self.says][None])[0]
        return SamplerChain(self.sampling).law(wide).kept()

    def whole(self, prefix: Tokens) -> Law:
        return super().law(prefix)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_of_fewer_words_are_exact(rule: str, drafter: str) -> None:
    for v, k in ((3, 3), (4, 2)):
        target, draft = Toy(v, 3, eos=2), Trimmed(v, 1003, eos=2)
        program = one_round(RULES[rule], target, draft, DRAFTERS[drafter], k)
        assert bias(program, target, k + 1).tv < EXACT
        assert {int(token) for token in draft.law(()).ids} == {0, 2}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_of_all_words_beside_fewer_is_caught(rule: str) -> None:
    """Negative control: drawn from the words that it has, judged by the law of all."""

    def told(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
        draft = sampled(oracle, toy, before, k)
        assert isinstance(toy, Trimmed)
        whole = tuple(toy.whole(draft.tokens[:i]) for i in range(len(draft)))
        return replace(draft, q=whole)

    target, draft = Toy(4, 3), Trimmed(4, 1003)
    assert bias(one_round(RULES[rule], target, draft, told, 2), target, 3).tv > CAUGHT


# -- trees --------------------------------------------------------------------------------------


def tree(oracle: Oracle, toy: Toy, before: Tokens, depth: int, width: int, mode: str) -> Draft:
    """A tree whose siblings carry the law each was drawn from given the ones before it."""
    tokens: list[int] = []
    parents: list[int] = []
    q: list[Law | None] = []

    def children(prefix: Tokens) -> list[tuple[int, Law | None]]:
        law = dense(toy.law(prefix), toy.n_vocab)
        best = [int(t) for t in np.argsort(-law, kind="stable")]
        out: list[tuple[int, Law | None]] = []

        def draw(weights: np.ndarray) -> int:
            given = sparse(weights / weights.sum())
            token = oracle.pick(given.ids, given.probs)
            out.append((token, given))
            return token

        if mode == "fixed":
            return [(t, None) for t in best[:width]]
        if mode == "with replacement":
            for _ in range(width):
                draw(law)
        elif mode == "without replacement":
            left = law.copy()
            for _ in range(width):
                if left.sum() > 0.0:
                    left[draw(left)] = 0.0
        elif mode == "sampled, then fixed":
            heads = best[: width - 1]
            outside = law.copy()
            outside[heads] = 0.0
            if outside.sum() > 0.0:
                draw(outside)
            out.extend((t, None) for t in heads)
        elif mode == "fixed, then sampled":
            out.append((best[0], None))
            draw(law)
        return out

    def grow(parent: int, prefix: Tokens, levels: int) -> None:
        if levels == 0 or (prefix and prefix[-1] == toy.eos):
            return
        for token, law in children(prefix):
            tokens.append(token)
            parents.append(parent)
            q.append(law)
            grow(len(tokens) - 1, (*prefix, token), levels - 1)

    grow(-1, before, depth)
    n = len(tokens)
    return Draft(tuple(tokens), tuple(parents), tuple(q), (None,) * n, ("toy",) * n)


def tree_of(mode: str, width: int) -> Drafter:
    """A drafter of trees; its ``k`` is the depth."""

    def drafter(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
        return tree(oracle, toy, before, k, width, mode)

    return drafter


MODES = (
    "fixed",
    "with replacement",
    "without replacement",
    "sampled, then fixed",
    "fixed, then sampled",
)


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_tree_is_exact(rule: str, mode: str, kind: str) -> None:
    for v, depth, width in ((3, 1, 2), (4, 1, 3), (2, 2, 2)):
        seed = v + depth
        target, draft = toys(v, kind, seed)
        program = one_round(RULES[rule], target, draft, tree_of(mode, width), depth)
        assert bias(program, target, depth + 1).tv < EXACT


@pytest.mark.parametrize("mode", ["without replacement", "sampled, then fixed"])
def test_deep_tree_is_exact(mode: str) -> None:
    target, draft = toys(3, "sparse q", 3, eos=2)
    program = one_round(RULES["rejection"], target, draft, tree_of(mode, 2), 2)
    assert bias(program, target, 3).tv < EXACT


def test_sampled_child_first_accepts_more_than_fixed_first() -> None:
    """The order of a hybrid's children matters for speed (never for exactness)."""
    gain = 0.0
    for seed in range(6):
        target, draft = toys(4, "dense", seed)
        first, last = (
            bias(one_round(RULES["rejection"], target, draft, tree_of(m, 2), 1), target, 2)
            for m in ("sampled, then fixed", "fixed, then sampled")
        )
        gain += first.mean_length - last.mean_length
    assert gain > 0.0


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_scouts_are_never_accepted(rule: str) -> None:
    target = Toy(2, 0, fixed=(0.5, 0.5))
    one = Draft(
        tokens=(0, 1, 1),
        parents=(-1, -1, 0),
        q=(None, None, None),
        confidence=(None,) * 3,
        sources=("toy",) * 3,
        scout=(False, True, True),
    )
    program = one_round(RULES[rule], target, target, lambda *_: one, 2)
    for _, tokens in outcomes(program):
        assert len(tokens) <= 2
    assert bias(program, target, 3).tv < EXACT


def test_match_takes_any_draft_whatsoever() -> None:
    """Trimmed after the fact or because of a sampled token, duplicated siblings: all exact."""
    target, other = toys(3, "sparse both", 9)

    for drafter in (drops_unlikely, trims_afterwards, tree_of("with replacement", 2)):
        assert bias(one_round(match_with, target, other, drafter, 2), target, 4).tv < EXACT


# -- constants from the papers ------------------------------------------------------------------


def test_block_paper_example() -> None:
    """Sun et al. 2025: p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 against 11/9 accepted."""
    target = Toy(2, 0, fixed=(1 / 3, 2 / 3))
    draft = Toy(2, 0, fixed=(2 / 3, 1 / 3))
    accepted = {
        name: bias(one_round(RULES[name], target, draft, sampled, 2), target, 3)
        for name in ("rejection", "block")
    }
    assert accepted["rejection"].mean_length - 1 == pytest.approx(10 / 9, abs=1e-12)
    assert accepted["block"].mean_length - 1 == pytest.approx(11 / 9, abs=1e-12)


def test_block_never_accepts_less_than_rejection() -> None:
    strictly = 0
    for seed in range(12):
        target, draft = toys(2 + seed % 2, KINDS[seed % 4], seed)
        token, block = (
            bias(one_round(RULES[n], target, draft, sampled, 3), target, 4).mean_length
            for n in ("rejection", "block")
        )
        assert block >= token - 1e-12
        strictly += block > token + 1e-6
    assert strictly >= 3


def test_point_mass_drafts_accept_alike_under_every_rule() -> None:
    """For a deterministic draft all rules accept the product of p (reference fact 2)."""
    for seed in range(6):
        target, draft = toys(3, "sparse p", seed)
        lengths = [
            bias(one_round(rule, target, draft, greedy, 3), target, 4).mean_length
            for rule in RULES.values()
        ]
        tokens = greedy(Oracle(), draft, (), 3).tokens
        expected, survive = 1.0, 1.0
        for i, token in enumerate(tokens):
            survive *= target.law(tokens[:i]).prob(token)
            expected += survive
        assert lengths == pytest.approx([expected] * 3, abs=1e-9)


def test_rejection_accepts_one_minus_tv() -> None:
    target, draft = toys(4, "dense", 3)
    p, q = target.dense(()), draft.dense(())
    result = bias(one_round(RULES["rejection"], target, draft, sampled, 1), target, 2)
    assert result.mean_length - 1 == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)


def test_hybrid_tree_acceptance_formula() -> None:
    """p(H) + sum over the rest of min(p, q / (1 - q(H))): optimal for this proposal."""
    for seed in range(5):
        target, draft = toys(4, "dense", seed)
        p, q = target.dense(()), draft.dense(())
        head = int(np.argmax(q))
        rest = np.arange(4) != head
        expected = p[head] + np.minimum(p[rest], q[rest] / (1 - q[head])).sum()
        result = bias(
            one_round(RULES["rejection"], target, draft, tree_of("sampled, then fixed", 2), 1),
            target,
            2,
        )
        assert result.mean_length - 1 == pytest.approx(expected, abs=1e-12)


# -- negative controls: the harness sees every classic mistake -----------------------------------


def worst_bias(rule: Rule, drafter: Drafter, v: int = 3, k: int = 3) -> float:
    return max(
        bias(one_round(rule, target, draft, drafter, k), target, k + 1).tv
        for target, draft in (toys(v, "dense", seed) for seed in range(4))
    )


def mutant(function: Callable[..., Any], *changes: tuple[str, str]) -> Any:
    """The rule as it is in the program, with a mistake put in."""
    source = inspect.getsource(function)
    for old, new in changes:
        assert source.count(old) == 1, f"{function.__name__} changed: update this control ({old})"
        source = source.replace(old, new)
    names = dict(vars(verify))
    exec(compile(source, f"<{function.__name__} with a mistake>", "exec"), names)
    return names[function.__name__]


def wrong_temperature(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
    """Drawn from a sharpened law, reported with the plain one."""
    d = chain(oracle, toy, before, k, law_at=lambda i, law: sharpened(law))
    return _claiming(d, toy, before)


def greedy_with_q(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
    """The best token, reported as if it had been drawn from the whole law."""
    return _claiming(greedy(oracle, toy, before, k), toy, before)


def top_2_with_full_q(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
    """Truncated before the draw, reported without the truncation."""

    def top(i: int, law: Law) -> Law:
        keep = np.sort(np.argsort(-law.probs, kind="stable")[:2])
        return Law(law.ids[keep], law.probs[keep] / law.probs[keep].sum())

    return _claiming(chain(oracle, toy, before, k, law_at=top), toy, before)


def _claiming(d: Draft, toy: Toy, before: Tokens) -> Draft:
    q = [toy.law(before + d.tokens[:i]) for i in range(len(d))]
    return Draft.chain(d.tokens, "toy", q=q)


def drops_unlikely(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
    """A p_min on the *sampled* token: looks harmless, is biased."""
    d = sampled(oracle, toy, before, k)
    keep = next(
        (i for i, t in enumerate(d.tokens) if toy.law(before + d.tokens[:i]).prob(t) < 0.35), len(d)
    )
    return Draft.chain(d.tokens[:keep], "toy", q=d.q[:keep])


def trims_afterwards(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
    """Keeps the length with the best running score of the tokens that were drawn."""
    d = sampled(oracle, toy, before, k)
    score, best, keep = 0.0, 0.0, 0
    for i, token in enumerate(d.tokens):
        score += toy.law(before + d.tokens[:i]).prob(token) - 0.4
        if score > best:
            best, keep = score, i + 1
    return Draft.chain(d.tokens[:keep], "toy", q=d.q[:keep])


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    "drafter",
    [wrong_temperature, greedy_with_q, top_2_with_full_q, drops_unlikely, trims_afterwards],
    ids=lambda f: f.__name__,
)
def test_control_dishonest_draft_is_caught(rule: str, drafter: Drafter) -> None:
    assert worst_bias(RULES[rule], drafter) > 0.02
    assert worst_bias(match_with, drafter, k=2) < EXACT, "match does not look at q"


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        pytest.param(
            verify_rejection, [("np.maximum(p - _on(ids, q, token), 0.0)", "p")], id="residual is p"
        ),
        pytest.param(
            verify_rejection,
            [("np.maximum(p - _on(ids, q, token), 0.0)", "np.where(ids == token, 0.0, p)")],
            id="residual only drops the token",
        ),
        pytest.param(
            verify_rejection, [("min(1.0, p_token / q_token)", "p_token")], id="q forgotten"
        ),
        pytest.param(
            verify_block,
            [("_excess(a[tau], law,", "_excess(1.0, law,")],
            id="block: token residual",
        ),
        pytest.param(
            verify_block,
            [("            tau = i\n", "            tau = i\n        else:\n            break\n")],
            id="block: stops at the first failure",
        ),
        pytest.param(
            verify_block, [("heads = a[i]", "heads = 1.0")], id="block: last coin always heads"
        ),
        pytest.param(
            verify_block, [("a[i] * p_token / q_token", "p_token / q_token")], id="block: no memory"
        ),
    ],
)
def test_control_wrong_rule_is_caught(rule: Any, changes: list[tuple[str, str]]) -> None:
    assert worst_bias(coined(rule), sampled) < EXACT
    assert worst_bias(coined(mutant(rule, *changes)), sampled) > CAUGHT


def test_control_siblings_need_their_conditional_law() -> None:
    """Without replacement, but each sibling reported with the full law."""

    def careless(oracle: Oracle, toy: Toy, before: Tokens, k: int) -> Draft:
        d = tree(oracle, toy, before, 1, 3, "without replacement")
        return Draft(d.tokens, d.parents, (toy.law(before),) * len(d), d.confidence, d.sources)

    assert worst_bias(RULES["rejection"], careless, v=4, k=1) > CAUGHT


def test_control_match_that_draws_twice_is_caught() -> None:
    """Another draw after a mismatch (the classic 'resample on rejection') is biased."""
    wrong = mutant(
        verify_match,
        (
            "return _verdict(draft, path, token, bool(children), p, gap)",
            "token = draw(law, seed, target.position)[0] if children else token\n"
            "            return _verdict(draft, path, token, bool(children), p, gap)",
        ),
    )

    def rule(
        draft: Draft, walk: ToyWalk, oracle: Oracle, is_stop: Callable[[int], bool]
    ) -> Verdict:
        wrong.__globals__["draw"] = lambda law, seed, at: (
            oracle.pick(law.ids, law.probs),
            math.inf,
        )
        verdict: Verdict = wrong(draft, walk, 0, is_stop)
        return verdict

    assert worst_bias(rule, sampled, k=2) > CAUGHT


# -- edges --------------------------------------------------------------------------------------


def chain_of(*tokens: int, q: Law | None = None) -> Draft:
    return Draft.chain(tokens, "toy", q=[q] * len(tokens))


@pytest.mark.parametrize("rule", [RULES["rejection"], RULES["block"]])
def test_impossible_token_is_rejected_even_by_a_zero_coin(rule: Any) -> None:
    """u == 0.0 must not accept a token that the target gives probability 0."""

    class Zero(RandomCoins):
        class _Rng:
            def random(self) -> float:
                return 0.0

        def __init__(self) -> None:
            self._rng = self._Rng()  # type: ignore[assignment]

    target = Toy(3, 0, fixed=(0.5, 0.5, 0.0))
    draft = chain_of(2, 0, q=Law(np.array([0, 2], np.int32), np.array([0.5, 0.5])))
    verdict = rule(draft, ToyWalk(target, draft, ()), Zero(), lambda t: False)
    assert verdict.path == ()
    assert verdict.target_token in (0, 1)


@pytest.mark.parametrize("rule", [RULES["rejection"], RULES["block"]])
def test_token_with_no_probability_under_its_own_law_is_an_error(rule: Any) -> None:
    target = Toy(3, 0, fixed=(0.5, 0.3, 0.2))
    draft = chain_of(1, q=Law(np.array([0, 2], np.int32), np.array([0.5, 0.5])))
    with pytest.raises(ValueError, match="probability 0 under its own q"):
        rule(draft, ToyWalk(target, draft, ()), RandomCoins(0), lambda t: False)


def test_block_refuses_a_tree() -> None:
    target = Toy(3, 0)
    draft = Draft((0, 1), (-1, -1), (None, None), (None, None), ("toy", "toy"))
    with pytest.raises(ValueError, match="chain"):
        verify_block(draft, ToyWalk(target, draft, ()), 0, RandomCoins(0))


@pytest.mark.parametrize("rule", RULES)
def test_the_first_draft_is_checked_against_the_row_before_it(rule: str) -> None:
    """A known bug elsewhere: draft[0] compared with the row after itself."""
    target = Toy(2, 0)
    target._laws[()] = Law.point(1)
    target._laws[(1,)] = Law.point(0)
    target._laws[(0,)] = Law.point(0)
    for token, path in ((1, (0,)), (0, ())):
        draft = chain_of(token)
        verdict = RULES[rule](draft, ToyWalk(target, draft, ()), Oracle(), lambda t: False)
        assert verdict.path == path


def test_verdict_reports_what_was_tested() -> None:
    target = Toy(2, 0)
    target._laws[()] = Law(np.array([0, 1], np.int32), np.array([0.25, 0.75]))
    draft = chain_of(0, 1)
    draw_1 = Oracle([1])  # the target draws token 1: the first draft is wrong
    verdict = match_with(draft, ToyWalk(target, draft, ()), draw_1, lambda t: False)
    assert (verdict.path, verdict.target_token, verdict.kind) == ((), 1, "recovered")
    assert verdict.p == (0.25, None), "the tail behind a rejection is not computed"


def test_random_coins_are_uniform_and_reproducible() -> None:
    coins, again = RandomCoins((7, 1)), RandomCoins((7, 1))
    ids = np.array([3, 5, 9], np.int32)
    weights = np.array([1.0, 2.0, 5.0])  # not normalised
    picks = [coins.pick(ids, weights) for _ in range(4000)]
    assert picks == [again.pick(ids, weights) for _ in range(4000)]
    share = [picks.count(t) / 4000 for t in (3, 5, 9)]
    assert share == pytest.approx([0.125, 0.25, 0.625], abs=0.04)
    assert not any(coins.bern(0.0) for _ in range(100))
    assert all(coins.bern(1.0) for _ in range(100))
