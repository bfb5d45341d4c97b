"""Record the reply that the app plays on its first launch.

``python record_first_look.py TARGET HEAD NAME``

It takes a target and a head that pays for it, lets it answer a few times, and writes the fastest of
the replies that were surely faster than plain, as a round log without folders and hashes. Run it on
a quiet machine: the times are real.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from specllama.engine.engine import Engine
from specllama.interface import Message
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.store.rounds import RoundLog, read_run
from specllama.told import Told

OUT = Path(__file__).parents[2] / "tui" / "recorded.jsonl"
QUESTION = "Tell me a short story about a llama."
REPLIES = 3
ROUNDED = 4  # digits after the point


def slim(value: object) -> object:
    """What is shown, without what takes room."""
    if isinstance(value, dict):
        return {k: slim(v) for k, v in value.items() if k not in ("sha256", "card")}
    if isinstance(value, list):
        return [slim(one) for one in value]
    return round(value, ROUNDED) if isinstance(value, float) else value


def main(target: str, head: str, name: str) -> None:
    params = GenerateParams(seed=7, max_tokens=96, proposer="eagle3")
    with tempfile.TemporaryDirectory() as logs:
        found = []
        with Engine.load(target, "none", EngineOptions(n_ctx=2048, heads=(head,))) as engine:
            engine.windows.profile.path = None
            engine.measure()
            plain = params.replace(speculate=False)
            alone = Told.of(engine.generate([Message("user", QUESTION)], plain)).end
            for _ in range(REPLIES):
                log = RoundLog(engine.info, params, command="demo", folder=Path(logs))
                for event in engine.generate([Message("user", QUESTION)], params):
                    log.write(event)
                log.close()
                turn = read_run(log.path).turns[0]
                assert turn.finished is not None
                verdict = turn.finished.verdict
                assert verdict is not None
                print(turn.finished.timings.decode_ms, verdict, file=sys.stderr)
                if verdict.answer == "faster" and turn.finished.token_ids == alone.token_ids:
                    found.append((turn.finished.timings.decode_ms, log.path))
        if not found:
            raise SystemExit("no reply was surely faster than plain, of the same tokens")
        lines = min(found)[1].read_text("utf-8").splitlines()
    with OUT.open("w", encoding="utf-8") as file:
        for line in lines:
            told = json.loads(line)
            if told["type"] == "run":
                told |= {"question": QUESTION, "what": name}
                told["target"]["path"] = Path(told["target"]["path"]).name
            file.write(json.dumps(slim(told), ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{OUT}: {OUT.stat().st_size / 1e3:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
