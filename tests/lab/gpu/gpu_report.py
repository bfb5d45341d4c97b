"""A GPU check as Markdown: one table a step, and what failed with its last words.

It reads the state of ``gpu_check``: parts by name, each with its ``answer``, the documents that its
command printed. Whatever a part lacks leaves its cell empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from markdown_table import table_of

Found = Mapping[str, Any]
Rows = list[list[str]]


def to_markdown(state: Mapping[str, Any]) -> str:
    """The report of a check, as far as it has come."""
    parts: Mapping[str, Found] = state["parts"]
    lines = ["# GPU check", ""]
    lines += [f"- {name}: {_words(value)}" for name, value in state["facts"].items()]
    failed = {name: part for name, part in parts.items() if not part["ok"]}
    spent = sum(part["seconds"] for part in parts.values())
    lines += [
        "",
        f"{len(parts) - len(failed)} of {len(parts)} parts in {spent / 60:.0f} minutes.",
        "",
    ]
    for title, heads, rows in _TABLES:
        try:
            table = table_of(heads, found).splitlines() if (found := rows(parts)) else []
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            # a command of another version may say other things: the check goes on
            table = [f"These answers are not understood ({error!r}); they stand in the JSON."]
        if table:
            lines += [f"## {title}", "", *table, ""]
    if failed:
        lines += ["## What failed", ""]
        for name, part in failed.items():
            lines += [f"- {name} (`{part['command']}`):", "", "```text", *part["said"], "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_words, value))
    return str(value)


def _of(parts: Mapping[str, Found], step: str, word: str = "") -> Iterator[tuple[str, Found, Any]]:
    """Name, part and last document of what a step found."""
    for key, found in parts.items():
        name = key.removeprefix(f"{step}: ")
        if found["step"] == step and name.startswith(word) and found["answer"]:
            yield name, found, found["answer"][-1]


def _show(value: Any, form: str = "") -> str:
    return "" if value is None else format(value, form)


def _gib(found: Found) -> str:
    return _show(found["taken"] / 2**30, ".2f") if found.get("taken") else ""


def _loads(parts: Mapping[str, Found]) -> Rows:
    plans = {
        found["pair"]: "; ".join(
            f"{check['name']}: {check['found']}"
            for check in document.get("checks", ())
            if check["name"].startswith(("offload", "device", "RAM needed"))
        )
        for step in ("load", "bench")
        for _, found, document in _of(parts, step, "plan")
    }
    replies = {
        found["pair"]: (found, document) for _, found, document in _of(parts, "load", "first reply")
    }
    rows = []
    for pair, plan in plans.items():
        found, document = replies.get(pair, ({}, {}))
        times = document.get("timings", {})
        rows.append(
            [
                pair,
                plan,
                _gib(found),
                _show(times.get("load_ms"), ".0f"),
                _show(times.get("ttft_ms"), ".0f"),
                str(document.get("exactness", "")),
            ]
        )
    return rows


def _proofs(parts: Mapping[str, Found]) -> Rows:
    names = ("cases", "identical", "near_ties", "unexplained", "drafted", "accepted", "exactness")
    return [
        [name, *(str(d.get(n, "")) for n in names)]
        for step, word in (("prove", ""), ("bench", "prove, "))
        for name, _, d in _of(parts, step, word)
        if isinstance(d, dict) and d.get("type") == "summary"
    ]


def _own(parts: Mapping[str, Found]) -> Rows:
    rows = []
    for name, _, document in _of(parts, "own"):
        times, rounds = document.get("timings", {}), document.get("rounds")
        if rounds and times:
            other, whole = times["other_ms"], times["decode_ms"]
            share = f"{other / whole:.1%}" if whole else ""
            rows.append([name, str(rounds), f"{other * 1e3 / rounds:.0f}", share])
    return rows


def _passes(parts: Mapping[str, Found]) -> Rows:
    ours = next((d["costs"] for _, _, d in _of(parts, "costs", "v(n), specllama")), None)
    theirs = {
        row["n_prompt"]: row["avg_ns"] / 1e6
        for _, found, _ in _of(parts, "costs", "v(n), llama-bench")
        for row in found["answer"][0]
    }
    mine = {int(n): ms for n, ms in (ours or {}).get("target_ms", {}).items()}
    return [
        [
            str(n),
            _show(mine.get(n), ".2f"),
            _show(mine[n] / mine[1] if n in mine else None, ".2f"),
            _show(theirs.get(n), ".2f"),
            _show(theirs[n] / theirs[1] if n in theirs and 1 in theirs else None, ".2f"),
        ]
        for n in sorted({*mine, *theirs})
    ]


def _prompts(parts: Mapping[str, Found]) -> Rows:
    rows = []
    for name, _, document in _of(parts, "costs", "prompt of"):
        n = name.split()[2].rstrip(",")
        if "llama-bench" in name:
            steps = next(_of(parts, "costs", f"steps behind {n},"), None)
            behind = steps[2][0]["avg_ts"] if steps else None
            rows.append(
                ["llama-bench", n, _show(document[0]["avg_ts"], ".0f"), _show(behind, ".1f")]
            )
        elif "in turns" in name:
            for summary in document.get("summaries", ()):
                if summary["group"] == "all":
                    first = _show(summary["ttft_p50_s"] * 1e3, ".0f") + " ms to the first token"
                    speed = _show(summary["tok_per_s"], ".1f")
                    rows.append([f"{_arm(summary['arm'])}, in turns", n, first, speed])
        else:
            times, read = document.get("timings", {}), document.get("prompt_n")
            prefill = times.get("prefill_ms")
            speed = _show(read / prefill * 1e3 if read and prefill else None, ".0f")
            rows.append(["specllama", str(read), speed, _show(times.get("tok_per_s"), ".1f")])
    return rows


def _tunings(parts: Mapping[str, Found]) -> Rows:
    rows = []
    for step in ("tune", "bench"):
        for name, _, document in _of(parts, step, "" if step == "tune" else "tune"):
            costs, advice = document.get("costs", {}), document.get("advice", {})
            plain = _show(costs.get("target_ms", {}).get("1"), ".2f")
            draft = _show(costs.get("draft_step"), ".3f")
            rows.append([name, plain, draft, str(advice.get("words", ""))])
    return rows


def _arm(name: str) -> str:
    """A peer's arm without the flags that say where it computes."""
    return re.sub(r" -\S+ \S+", "", name)


def _speeds(parts: Mapping[str, Found]) -> Rows:
    rows = []
    for name, _, document in _of(parts, "bench"):
        summaries = document.get("summaries", ())
        best: dict[str, float] = {}
        for s in summaries:
            if s["arm"].startswith("llama-server") and s["tok_per_s"]:
                best[s["group"]] = max(best.get(s["group"], 0.0), s["tok_per_s"])
        for s in summaries:
            if s["group"] == "all":  # of all temperatures: they stand below, one by one
                continue
            reference = best.get(s["group"])
            rows.append(
                [
                    name,
                    _arm(s["arm"]),
                    s["group"],
                    _show(s["tok_per_s"], ".1f"),
                    _show(s["ratio"], ".2f"),
                    _show(
                        s["tok_per_s"] / reference if reference and s["tok_per_s"] else None, ".2f"
                    ),
                    _show(None if s["ttft_p50_s"] is None else s["ttft_p50_s"] * 1e3, ".0f"),
                    _show(s["acceptance_rate"], ".0%"),
                    _show(s["other_share"], ".1%"),
                    "" if s["equal"] is None else f"{s['equal']}/{s['compared']}",
                ]
            )
    return rows


_TABLES: tuple[tuple[str, Sequence[str], Callable[[Mapping[str, Found]], Rows]], ...] = (
    (
        "Where it goes, and what it takes there",
        ("pair", "plan", "taken, GiB", "load, ms", "first token, ms", "exactness"),
        _loads,
    ),
    (
        "The same text",
        ("part", "replies", "same", "near-ties", "unexplained", "drafted", "accepted", "exactness"),
        _proofs,
    ),
    ("Own time", ("pair", "rounds", "µs a round", "of the time"), _own),
    (
        "A pass of n rows",
        ("rows", "specllama, ms", "× one", "llama-bench, ms", "× one"),
        _passes,
    ),
    (
        "Reading a prompt, and steps behind it",
        ("what", "tokens", "read, tok/s", "steps, tok/s"),
        _prompts,
    ),
    ("Tuning", ("pair", "plain step, ms", "a draft step, in plain ones", "advice"), _tunings),
    (
        "Speed",
        ("part", "arm", "group", "tok/s", "over plain", "over llama-server's best", "TTFT, ms",
         "accepted", "own time", "same text"),
        _speeds,
    ),
)  # fmt: skip
