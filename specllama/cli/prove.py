"""``specllama prove``: same seed, same text, shown on the user's own machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specllama.params import PROPOSERS, EngineOptions

if TYPE_CHECKING:
    from specllama.engine import Engine
    from specllama.proof import Case

EPILOG = """\b
Examples:
  specllama prove                              the bundled pair, 20 prompts
  specllama prove -m target.gguf -d draft.gguf
  specllama prove --prompts mine.txt -n 5 --draft-max 4 --draft-max 8
  specllama prove --json > proof.jsonl
"""


@click.command("prove", epilog=EPILOG)
@click.option("-m", "--model", "target", help="Target model (path, user/repo[:quant] or name).")
@click.option("-d", "--draft-model", "draft", help="Draft model.")
@click.option("--head", "heads", multiple=True, metavar="FILE", help="Drafting head of the target.")
@click.option("--prompts", type=click.Path(path_type=Path), help="Prompts, one a line, or .jsonl.")
@click.option("-n", "--count", default=20, show_default=True, help="How many prompts.")
@click.option("--max-tokens", default=64, show_default=True, help="Tokens per reply.")
@click.option(
    "--temperature", "temperatures", multiple=True, type=float, help="Default: 0, 0.7 and 1."
)
@click.option(
    "--proposer",
    "proposers",
    multiple=True,
    type=click.Choice([p for p in PROPOSERS if p not in ("auto", "none")]),
    help="Default: every one available.",
)
@click.option("--draft-max", "widths", multiple=True, type=int, help="Default: 4.")
@click.option("--seed", default=1, show_default=True)
@click.option("--exact", is_flag=True, help="Cut wide passes into bit-exact ones.")
@click.option("-c", "--ctx-size", type=int, help="Context length.")
@click.option("-ngl", "--gpu-layers", default="auto", show_default=True)
@click.option("-t", "--threads", type=int)
@click.option(
    "--flash-attn", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True
)
@click.option("--json", "as_json", is_flag=True, help="JSON Lines: cases, then a summary.")
def command(
    target: str | None,
    draft: str | None,
    heads: tuple[str, ...],
    prompts: Path | None,
    count: int,
    max_tokens: int,
    temperatures: tuple[float, ...],
    proposers: tuple[str, ...],
    widths: tuple[int, ...],
    seed: int,
    exact: bool,
    ctx_size: int | None,
    gpu_layers: str,
    threads: int | None,
    flash_attn: str,
    as_json: bool,
) -> None:
    """Prove that speculation does not change what the target writes.

    For every prompt, proposer and temperature the speculative output must equal plain decoding
    with the same seed, token by token. Where floating point flips a near-tie, the tie is shown with
    the gap of the two scores. Exit status 0 only if nothing is unexplained.
    """
    from specllama.engine import Engine
    from specllama.prompts import load_prompts
    from specllama.proof import prove

    if count < 1:
        raise click.BadParameter("give at least 1", param_hint="-n")
    chosen = load_prompts(prompts)[:count]
    options = EngineOptions(
        n_ctx=ctx_size,
        gpu_layers=gpu_layers,
        threads=threads,
        flash_attn=flash_attn,  # type: ignore[arg-type]
        heads=heads,
    )
    with Engine.load(target or "tiny", draft, options) as engine:
        names = proposers or tuple(
            # a draft cut out of the target is written to disk: only when it is asked for
            p
            for p in engine.proposers
            if p not in ("none", "self")
        )
        if not as_json:
            _say(_headline(engine, names, len(chosen)))
        cases: list[Case] = []
        for case in prove(
            engine,
            chosen,
            proposers=names,
            temperatures=temperatures or (0.0, 0.7, 1.0),
            draft_max=widths or (4,),
            max_tokens=max_tokens,
            seed=seed,
            exact=exact,
        ):
            cases.append(case)
            if as_json:
                print(json.dumps(case.to_dict(), ensure_ascii=False), flush=True)
            else:
                _progress(case, len(cases))
        bad = [c for c in cases if not c.ok]
        summary = {
            "type": "summary",
            "cases": len(cases),
            "identical": sum(c.identical for c in cases),
            "near_ties": sum(not c.identical and c.ok for c in cases),
            "unexplained": len(bad),
            "tokens": sum(c.tokens for c in cases),
            "drafted": sum(c.drafted for c in cases),
            "accepted": sum(c.accepted for c in cases),
            "exactness": engine.info.exactness,
        }
    if as_json:
        print(json.dumps(summary))
    else:
        _verdict(cases, summary)
    if bad:
        raise SystemExit(1)


def _headline(engine: Engine, proposers: tuple[str, ...], n: int) -> str:
    info = engine.info
    draft = f" + {info.draft.name} {info.draft.quantization}" if info.draft else ""
    return (
        f"{info.target.name} {info.target.quantization}{draft} on {info.device}, "
        f"{info.exactness}; {n} prompts, proposers {', '.join(proposers)}"
    )


def _say(line: str) -> None:
    from specllama.text import sanitize_line

    print(sanitize_line(line), file=sys.stderr)


def _progress(case: Case, n: int) -> None:
    if case.difference is not None:
        d = case.difference
        kind = "near-tie" if case.ok else "DIFFERENT"
        _say(
            f"{kind}: prompt {case.prompt} ({case.slice}), {case.proposer}, "
            f"temperature {case.temperature:g}, draft-max {case.draft_max}, token {d.position}: "
            f"{d.plain_text!r} or {d.spec_text!r}, gap {d.gap:.4f}"
        )
    if not case.law_holds:
        _say(f"COUNTERS: prompt {case.prompt}: emitted is not accepted + rounds - cut")
    if sys.stderr.isatty():
        print(f"\r{n} comparisons", end="", file=sys.stderr, flush=True)


def _verdict(cases: list[Case], summary: dict[str, object]) -> None:
    if sys.stderr.isatty():
        print("\r" + " " * 24 + "\r", end="", file=sys.stderr, flush=True)
    rows: dict[tuple[str, float], list[Case]] = {}
    for case in cases:
        rows.setdefault((case.proposer, case.temperature), []).append(case)
    print(f"{'proposer':<10} {'temperature':>11} {'identical':>12} {'tokens':>8} {'accepted':>9}")
    for (proposer, temperature), group in rows.items():
        same = f"{sum(c.identical for c in group)}/{len(group)}"
        drafted = sum(c.drafted for c in group)
        rate = f"{sum(c.accepted for c in group) / drafted:.0%}" if drafted else "–"
        tokens = sum(c.tokens for c in group)
        print(f"{proposer:<10} {temperature:>11g} {same:>12} {tokens:>8} {rate:>9}")
    if summary["unexplained"]:
        print(f"NOT lossless here: {summary['unexplained']} unexplained differences")
    elif summary["near_ties"]:
        print(f"lossless up to {summary['near_ties']} near-ties of the target's own arithmetic")
    else:
        print(f"lossless: {summary['identical']} of {summary['cases']} token for token identical")
