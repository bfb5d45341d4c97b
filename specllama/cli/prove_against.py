"""``specllama prove --against URL``: a proof that another server's speculation is lossless."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specllama.bench import against_report as report
from specllama.bench.against import PLAIN, SPECULATIVE, Score, Side, TextCase, compare_texts, pure
from specllama.bench.law_proof import LawCase, follow_law
from specllama.bench.plain_law import OwnLaw, PlainLaw, StatedLaw, own_answer, spells
from specllama.bench.prompts import BenchPrompt
from specllama.cli import diagnostics, loading, output
from specllama.cli.listing import Column, show_table
from specllama.cli.options import server_address
from specllama.cli.progress import Redrawn
from specllama.errors import EngineDied, SpecllamaError, UsageError
from specllama.remote.engine import open_remote
from specllama.remote.foreign import ForeignEngine
from specllama.settings.params import GenerateParams

if TYPE_CHECKING:
    from specllama.engine.engine import Engine
    from specllama.settings.config import Settings

_QUIET = ("ollama",)  # engines that do not draft while they list tokens
_LLAMA = ("specllama", "llama-server", "lmstudio", "ollama")  # those that llama.cpp computes for


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """The request of the command line.

    Attributes:
        plain: address of the same server without speculation.
        own_model: a model was named: our own engine over it knows the law.
        max_tokens: of a reply. at_once: requests at the same time.
        most: tokens of unseeded replies to look at. report: a page to write.
    """

    against: str
    plain: str | None
    kind: str
    model: str
    key_file: Path | None
    own_model: bool
    max_tokens: int
    temperatures: Sequence[float]
    seed: int
    at_once: int
    most: int
    report: Path | None
    as_json: bool


def run(
    wish: Wish,
    settings: Settings,
    prompts: Sequence[BenchPrompt],
    further: Sequence[BenchPrompt],
) -> None:
    """Prove and show; exit with status 1 if a fault was found or the server went away.

    Args:
        prompts: whose texts are compared. further: whose unseeded replies are looked at.
    """
    base = GenerateParams(max_tokens=wish.max_tokens, seed=wish.seed)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_open(wish.against, wish))
        other = None if wish.plain is None else stack.enter_context(_open(wish.plain, wish))
        engine = None
        if wish.own_model:
            engine = stack.enter_context(loading.open_engine(settings, quiet=wish.as_json))
        notes: list[str] = []
        speculative, plain = _arms(server, other, engine, notes)
        own = None
        if engine is not None:
            drafts = _drafts(settings, stack)
            listed = _lists(server, prompts, notes)
            own = OwnLaw(engine, drafts, listed=listed, alike=server.kind.name in _LLAMA)
        law: PlainLaw = own or StatedLaw()
        proof = report.ServerProof(
            _facts(server, other), speculative, plain, law.what, len(prompts), [], [], notes,
            finished=False,
        )  # fmt: skip
        if not wish.as_json:
            diagnostics.say(f"{speculative.what}; plain: {plain.what}")
        watch = _Watch(quiet=wish.as_json)
        ended = False
        try:
            wishes = [pure(base, t) for t in wish.temperatures]
            _texts(proof, prompts, wishes, own, wish, watch)
            _laws(proof, further, wishes, law, wish, watch)
            proof = dataclasses.replace(proof, finished=True)
        except EngineDied as error:
            ended = True
            notes.append(f"the server went away: {error.message}")
        finally:
            watch.clear()
            _show(proof, wish)
        if report.judge(proof).fault or ended:
            raise SystemExit(1)


def _open(url: str, wish: Wish) -> ForeignEngine:
    return open_remote(server_address(url, wish.kind, wish.model, wish.key_file))


def _texts(
    proof: report.ServerProof,
    prompts: Sequence[BenchPrompt],
    wishes: Sequence[GenerateParams],
    own: OwnLaw | None,
    wish: Wish,
    watch: _Watch,
) -> None:
    """Add every comparison of texts to the proof as it is made."""
    score: Score | None = None if own is None else own.lead
    for case in compare_texts(
        proof.speculative, proof.plain, prompts, wishes, at_once=wish.at_once, score=score
    ):
        proof.texts.append(case)
        if wish.as_json:
            output.json_line(case.to_dict())
        watch.text(proof.texts)


def _laws(
    proof: report.ServerProof,
    prompts: Sequence[BenchPrompt],
    wishes: Sequence[GenerateParams],
    law: PlainLaw,
    wish: Wish,
    watch: _Watch,
) -> None:
    """Add the findings on the law of each temperature."""
    for asked in wishes:
        temperature = asked.sampling.temperature
        if not temperature:
            continue
        if law.must not in (None, temperature):
            proof.notes.append(
                f"temperature {temperature:g} without seeds: {law.what} are the law at "
                f"temperature {law.must:g} only; name the weights with -m FILE"
            )
            continue
        for arm in (proof.speculative, proof.plain):
            if arm.own:
                continue
            for case in follow_law(arm, law, prompts, asked, most=wish.most):
                if proof.laws and not proof.laws[-1].over:
                    proof.laws.pop()
                proof.laws.append(case)
                watch.law(case, wish.most)
            if wish.as_json:
                output.json_line(proof.laws[-1].to_dict())
            if not proof.laws[-1].shown:
                break  # the plain arm is asked only whether it is of another law, too


def _arms(
    server: ForeignEngine, other: ForeignEngine | None, engine: Engine | None, notes: list[str]
) -> tuple[Side, Side]:
    """Return (speculative, plain).

    Raises:
        UsageError: there is nothing to compare with.
    """
    switched = server.switches and other is None
    speculative = Side(
        SPECULATIVE,
        f"{server.name} at {server.address.url}",
        lambda prompt, params: server.ask(
            prompt.content, params, speculation=True if switched else None
        ),
    )
    if other is not None:
        what = f"{other.name} at {other.address.url}"
        return speculative, Side(PLAIN, what, lambda prompt, p: other.ask(prompt.content, p))
    if switched:
        return speculative, Side(
            PLAIN,
            "the same server, asked not to speculate",
            lambda prompt, params: server.ask(prompt.content, params, speculation=False),
        )
    if engine is not None:
        notes.append("the plain texts are another engine's: rounding may part them at near-ties")
        return speculative, Side(
            PLAIN,
            f"our own engine over {engine.info.target.label}",
            lambda prompt, params: own_answer(engine, prompt, params),
            own=True,
        )
    raise UsageError(
        f"{server.name} cannot be asked to switch its speculation off",
        "name the same server without speculation: --plain URL; or its weights: -m FILE",
    )


def _lists(server: ForeignEngine, prompts: Sequence[BenchPrompt], notes: list[str]) -> bool:
    """True if it lists the tokens of a drawn reply, the right ones, and still drafts."""
    why = "the server lists no tokens of its replies"
    if server.kind.name in _QUIET:
        why = f"{server.kind.title} does not draft while it lists tokens"
    else:
        params = pure(GenerateParams(max_tokens=8), 1.0, chances=1)
        try:
            replies = [server.ask(prompt.content, params) for prompt in prompts[:3]]
            if all(map(spells, replies)):
                return True
            if any(reply.logprobs for reply in replies):
                why = "the tokens that the server lists are not those of its replies"
        except EngineDied:
            raise
        except SpecllamaError:
            pass
    notes.append(f"{why}: their texts are split into tokens again")
    return False


def _drafts(settings: Settings, stack: contextlib.ExitStack) -> Engine | None:
    """Load the draft as a target of its own, if one is named: its law finds some faults sooner."""
    if settings["draft-model"] is None:
        return None
    return stack.enter_context(
        loading.load(settings["draft-model"], None, settings.engine_options())
    )


def _facts(server: ForeignEngine, other: ForeignEngine | None) -> list[str]:
    facts = [f"server: {server.name}, model {server.model.id or 'not named'}"]
    if server.flags:
        facts.append(f"started with: {server.flags}")
    if other is not None and other.flags:
        facts.append(f"the plain one was started with: {other.flags}")
    return facts


class _Watch(Redrawn):
    """One line of progress on a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__()
        self._shown = not quiet and sys.stderr.isatty()

    def text(self, cases: Sequence[TextCase]) -> None:
        if self._shown:
            equal = sum(case.same for case in cases)
            self.show(f"{len(cases)} texts compared, {equal} equal")

    def law(self, case: LawCase, most: int) -> None:
        if self._shown:
            self.show(
                f"{case.arm}, temperature {case.temperature:g}: {case.tokens} of {most} tokens, "
                f"evidence 10^{case.evidence:.1f}"
            )


def _show(proof: report.ServerProof, wish: Wish) -> None:
    verdict = report.judge(proof)
    if wish.report is not None:
        try:
            wish.report.write_text(report.document(proof), "utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {wish.report}: {error.strerror}") from None
    if wish.as_json:
        output.json_line({"type": "summary", **report.to_json(proof)})
        return
    for heads, rows in (report.text_table(proof), report.law_table(proof)):
        if rows:
            show_table(rows, [Column(head) for head in heads])
    output.line(f"{verdict.words}{'' if proof.finished else ' (ended early)'}.")
    for reason in verdict.reasons:
        output.line(f"- {reason}")
    for note in proof.notes:
        diagnostics.note(note)
    if wish.report is not None:
        diagnostics.note(f"written: {wish.report}")
