"""How near the window comes to the best that any could do, on logs of real replies.

    python tests/lab/window_figures.py record FOLDER [-m MODEL] [-d DRAFT] [--half tune|bench]
    python tests/lab/window_figures.py table FOLDER [--lessons FOLDER]

``record`` writes replies to the bundled prompts of one half (``tune``: to work on the policy;
``bench``: to report) with long drafts, as round logs with two further lines a reply: its prompt,
and how far each drafted token led. ``table`` replays them at the costs of a 1 B target: ``auto``,
cold and after the lessons, over a window that knows the costs and how good guesses are
(``tests/support/best_window.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from best_window import Known, Taken, Text, best, replayed
from replay import Spot, VirtualClock
from windows import Pair, booking

# plain steps of a pass of 0, 1, ... rows, two cores, a target of 1.0 B; then of a draft step (60 M)
COSTS: dict[str, tuple[list[float], float]] = {
    "Q4_0": (
        [0, 1, 1.5, 2.1, 2.1, 2.7, 3.5, 3.75, 4.0, 4.4, 4.8, 5.05, 5.3, 5.4, 5.5, 5.55, 5.6],
        0.12,
    ),
    "BF16": (
        [0, 1, 1.58, 1.7, 1.9, 2.0, 2.1, 2.25, 2.4, 2.55, 2.7, 2.8, 2.9, 3.05, 3.2, 3.3, 3.4],
        0.06,
    ),
}
TEMPERATURES = (0.0, 1.0)
LONGEST = 24  # so long drafts leave few places untested


def record(folder: Path, model: str, draft: str | None, half: str, count: int, tokens: int) -> None:
    from specllama.bench import prompts
    from specllama.engine.engine import Engine
    from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
    from specllama.speculative import round as rounds
    from specllama.speculative.types import DraftJudge
    from specllama.store.rounds import Logged

    leads: list[tuple[int | None, float | None]] = []

    class Told(DraftJudge):
        def take(self, confidence: float | None, lead: float | None, token: int | None) -> bool:
            leads.append((token, lead))
            return True

    vars(rounds)["DraftJudge"] = Told  # whom a window of fixed length asks
    engine = Engine.load(model, draft, EngineOptions(n_ctx=2048, threads=1))
    chosen = prompts.half(prompts.load_prompts(), half)  # type: ignore[arg-type]
    for temperature in TEMPERATURES:
        seen: dict[str, int] = {}
        for n, prompt in enumerate(chosen):
            seen[prompt.slice] = seen.get(prompt.slice, 0) + 1
            if seen[prompt.slice] > count:
                continue
            params = prompt.bound(
                GenerateParams(
                    sampling=SamplingParams(temperature=temperature), proposer="draft",
                    window="fixed", draft_max=LONGEST, max_tokens=tokens, seed=1 + n,
                    ignore_eos=True,
                )
            )  # fmt: skip
            logged = Logged(engine, folder=folder / f"{prompt.slice}-{temperature:g}")
            lines: list[dict[str, Any]] = []
            begin = 0
            leads.clear()
            for event in logged.generate(prompt.content, params):
                if type(event).__name__ == "RoundDone":
                    lines.append({"type": "leads", "lead": [lead for _, lead in leads[begin:]]})
                    begin = len(leads)
            assert logged.log is not None
            path = logged.log.path
            logged.close()
            told = {"type": "prompt", "tokens": list(map(int, engine.encode(prompt.content)[0]))}
            with path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in (told, *lines))
    engine.close()


def read(path: Path) -> Text:
    """The reply of a log; ``leads`` and the prompt are those of ``record``, where it wrote them."""
    prompt: int | list[int] = 0
    rounds: list[dict[str, Any]] = []
    leads: list[list[float | None]] = []
    for line in path.read_text("utf-8").splitlines():
        told = json.loads(line)
        if told["type"] == "start":
            prompt = prompt or told["prompt_n"]
        elif told["type"] == "prompt":
            prompt = told["tokens"]
        elif told["type"] == "round":
            rounds.append(told)
        elif told["type"] == "leads":
            leads.append(told["lead"])
    spots: list[Spot] = []
    last = Spot(False, 0.5)
    for n, done in enumerate(rounds):
        lead = leads[n] if n < len(leads) else []
        for i, truth in enumerate(done["emitted"]):
            if i < len(done["drafted"]) and i <= done["accepted"]:
                told_lead = lead[i] if i < len(lead) else None
                last = Spot(i < done["accepted"], done["confidence"][i], told_lead)
                guess = done["drafted"][i]
                spots.append(Spot(last.hit, last.confidence, last.lead, truth=truth, guess=guess))
            else:  # nothing was tested here
                guess = 0 if truth else 1
                spots.append(Spot(last.hit, last.confidence, last.lead, truth=truth, guess=guess))
    return Text(prompt, spots)


def texts(folder: Path) -> Iterator[tuple[str, list[Text]]]:
    for part in sorted(folder.iterdir()):
        yield part.name, [read(path) for path in sorted(part.glob("*.jsonl"))]


def copiers(text: Text) -> list[Any]:
    from specllama.speculative.drafting.copying import TextFollower
    from specllama.speculative.drafting.ngram import NgramDrafter
    from specllama.speculative.drafting.suffix import SuffixDrafter

    reader = TextFollower()
    return [SuffixDrafter(reader=reader), NgramDrafter(reader=reader)]


def auto(
    told: Sequence[Text], v: Sequence[float], step: float, pair: Pair, *, peek: bool = True
) -> Taken:
    """The window of a pair, reply after reply."""
    taken = Taken()
    for text in told:
        clock = VirtualClock()
        window = pair.window(clock, peek=peek, draft_max=16, tokens=len(text.spots))
        window.drafts_with(booking("mixed"))
        window.prefilled(text.start, text.start)
        taken.add(replayed(text, window, clock, v, step, peek, copiers(text)))
        window.finish()
    return taken


def table(folder: Path, lessons: Path | None, only: str) -> None:
    learnt = dict(texts(lessons)) if lessons else {}
    print(f"{'':16} {'costs':7} {'plain':>6} {'best':>6} {'foreseen':>8} {'cold':>6} {'warm':>6}")
    for name, told in texts(folder):
        known = Known.of(told, peek=True, copiers=copiers)
        for costs, (v, step) in COSTS.items():
            if only and costs not in only.split(","):
                continue
            top = best(told, known, v, step, copiers=copiers)
            ahead = best(told, known, v, step, copiers=copiers, foresees=True)
            pair = Pair()
            pair.costs.draft_share = step
            cold = auto(told, v, step, pair)
            pair = Pair().tuned(v, step)
            auto(learnt.get(name, told), v, step, pair)
            warm = auto(told, v, step, pair)
            shares = [taken.speed / top.speed for taken in (ahead, cold, warm)]
            print(
                f"{name:16} {costs:7} {1 / top.speed:6.3f} {top.speed:6.3f} {shares[0]:8.3f} "
                f"{shares[1]:6.3f} {shares[2]:6.3f}   tokens a round {top.tokens / top.rounds:.2f} "
                f"{cold.tokens / cold.rounds:.2f} {warm.tokens / warm.rounds:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writes = commands.add_parser("record")
    writes.add_argument("folder", type=Path)
    writes.add_argument("-m", "--model", default="tiny")
    writes.add_argument("-d", "--draft")
    writes.add_argument("--half", choices=("tune", "bench"), default="bench")
    writes.add_argument("--count", type=int, default=12)
    writes.add_argument("-n", "--tokens", type=int, default=160)
    shows = commands.add_parser("table")
    shows.add_argument("folder", type=Path)
    shows.add_argument("--lessons", type=Path)
    shows.add_argument("--costs", default="")
    given = parser.parse_args()
    if given.command == "record":
        half, count, tokens = given.half, given.count, given.tokens
        record(given.folder, given.model, given.draft, half, count, tokens)
    else:
        table(given.folder, given.lessons, given.costs)


if __name__ == "__main__":
    main()
