"""``specllama prove --against URL``: a proof that another server's speculation is lossless."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama.bench import against_report as report
from specllama.bench.against import PLAIN, SPECULATIVE, Score, Side, compare_texts, follow_law, pure
from specllama.bench.plain_law import OwnLaw, PlainLaw, StatedLaw, own_answer, spells
from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.cli import diagnostics, loading, output
from specllama.cli.listing import Column, show_table
from specllama.cli.options import server_address
from specllama.cli.progress import Redrawn
from specllama.errors import EngineDied, SpecllamaError, UsageError
from specllama.remote.foreign import ForeignEngine
from specllama.remote.remote_engine import open_remote
from specllama.settings.params import GenerateParams

if TYPE_CHECKING:
    from specllama.engine.engine import Engine
    from specllama.settings.config_file import Settings

_QUIET = ("ollama",)  # engines that do not draft while they list tokens
_LLAMA = ("specllama", "llama-server", "lmstudio", "ollama")  # those that llama.cpp computes for


def run(
    flags: dict[str, Any],
    settings: Settings,
    base: GenerateParams,
    temperatures: Sequence[float],
    path: Path | None,
    some: tuple[int, int],
    *,
    own_model: bool,
    as_json: bool,
) -> None:
    """Prove and show; exit with status 1 if a fault was found or the server went away.

    Args:
        flags: those of ``--against``.
        base: of every request.
        path: of prompts, whose unseeded replies are looked at. some: those whose texts are
            compared.
        own_model: a model was named: our own engine over it knows the law.
    """
    further = load_prompts(path)
    if not (prompts := further[slice(*some)]):
        raise click.BadParameter(f"there are {len(further)} prompts", param_hint="-n, --skip")
    kind, model, key = (flags[name] for name in ("remote_kind", "remote_model", "api_key_file"))
    with contextlib.ExitStack() as stack:

        def opened(url: str) -> ForeignEngine:
            return stack.enter_context(open_remote(server_address(url, kind, model, key)))

        server = opened(flags["against"])
        other = None if flags["plain"] is None else opened(flags["plain"])
        engine = None
        if own_model:
            engine = stack.enter_context(loading.open_engine(settings, quiet=as_json))
        notes: list[str] = []
        speculative, plain = _arms(server, other, engine, notes)
        law, score = _law(server, engine, settings, prompts, notes, stack)
        facts = [f"server: {server.name}, model {server.model.id or 'not named'}"]
        facts += [f"started with: {server.flags}"] if server.flags else []
        if other is not None and other.flags:
            facts.append(f"the plain one was started with: {other.flags}")
        proof = report.ServerProof(
            facts, speculative, plain, law.what, len(prompts), [], [], notes, finished=False
        )
        if not as_json:
            diagnostics.say(f"{speculative.what}; plain: {plain.what}")
        watch = Redrawn(hidden=as_json)
        wishes = [pure(base, t) for t in temperatures]
        try:
            for text in compare_texts(
                speculative, plain, prompts, wishes, at_once=flags["at_once"], score=score
            ):
                proof.texts.append(text)
                if as_json:
                    output.json_line(text.to_dict())
                equal = sum(case.same for case in proof.texts)
                watch.show(f"{len(proof.texts)} texts compared, {equal} equal")
            for asked in filter(lambda wish: wish.sampling.temperature, wishes):
                _follow(proof, further, asked, law, flags["tokens"], watch, as_json=as_json)
            proof = dataclasses.replace(proof, finished=True)
        except EngineDied as error:
            notes.append(f"the server went away: {error.message}")
        finally:
            watch.clear()
            _show(proof, as_json=as_json)
        if report.judge(proof).fault or not proof.finished:
            raise SystemExit(1)


def _follow(
    proof: report.ServerProof,
    prompts: Sequence[BenchPrompt],
    asked: GenerateParams,
    law: PlainLaw,
    most: int,
    watch: Redrawn,
    *,
    as_json: bool,
) -> None:
    """Add the findings on the law of a temperature; the plain arm is asked only whether it is of
    another law, too."""
    temperature, laws = asked.sampling.temperature, proof.laws
    if law.must not in (None, temperature):
        proof.notes.append(
            f"temperature {temperature:g} without seeds: {law.what} are the law at "
            f"temperature {law.must:g} only; name the weights with -m FILE"
        )
        return
    for arm in (proof.speculative, proof.plain):
        if arm.own:
            continue
        for case in follow_law(arm, law, prompts, asked, most=most):
            laws[:] = [*(one for one in laws if one.over), case]
            watch.show(
                f"{case.arm}, temperature {temperature:g}: {case.tokens} of {most} tokens, "
                f"evidence 10^{case.evidence:.1f}"
            )
        if as_json:
            output.json_line(laws[-1].to_dict())
        if not laws[-1].shown:
            return


def _arms(
    server: ForeignEngine, other: ForeignEngine | None, engine: Engine | None, notes: list[str]
) -> tuple[Side, Side]:
    """Return (speculative, plain).

    Raises:
        UsageError: there is nothing to compare with.
    """
    switched = server.kind.switches and other is None
    speculative = _side(SPECULATIVE, server, speculation=True if switched else None)
    if other is not None:
        return speculative, _side(PLAIN, other)
    if switched:
        plain = _side(PLAIN, server, speculation=False)
        return speculative, dataclasses.replace(
            plain, what="the same server, asked not to speculate"
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


def _side(name: str, server: ForeignEngine, *, speculation: bool | None = None) -> Side:
    return Side(
        name,
        f"{server.name} at {server.address.url}",
        lambda prompt, params: server.ask(prompt.content, params, speculation=speculation),
    )


def _law(
    server: ForeignEngine,
    engine: Engine | None,
    settings: Settings,
    prompts: Sequence[BenchPrompt],
    notes: list[str],
    stack: contextlib.ExitStack,
) -> tuple[PlainLaw, Score | None]:
    """Return the law that is known, and who scores differences. The draft, if one is named, is
    loaded as a target of its own: its law finds some faults sooner."""
    if engine is None:
        return StatedLaw(), None
    draft = None
    if settings["draft-model"] is not None:
        draft = stack.enter_context(
            loading.load(settings["draft-model"], None, settings.engine_options())
        )
    if why := _unlisted(server, prompts):
        notes.append(f"{why}: their texts are split into tokens again")
    own = OwnLaw(engine, draft, listed=not why, alike=server.kind.name in _LLAMA)
    return own, own.lead


def _unlisted(server: ForeignEngine, prompts: Sequence[BenchPrompt]) -> str:
    """Explain why the tokens of a drawn reply are not listed, or not the right ones, or without
    drafting; "" if they are."""
    if server.kind.name in _QUIET:
        return f"{server.kind.title} does not draft while it lists tokens"
    params = pure(GenerateParams(max_tokens=8), 1.0, chances=1)
    try:
        replies = [server.ask(prompt.content, params) for prompt in prompts[:3]]
    except EngineDied:
        raise
    except SpecllamaError:
        replies = []
    if replies and all(map(spells, replies)):
        return ""
    if any(reply.logprobs for reply in replies):
        return "the tokens that the server lists are not those of its replies"
    return "the server lists no tokens of its replies"


def _show(proof: report.ServerProof, *, as_json: bool) -> None:
    verdict = report.judge(proof)
    if as_json:
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
