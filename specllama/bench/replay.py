"""Replay a trace through a window without a model: what it would have decided, and its loss.

A trace says, position by position, whether a drafted token would have been right, how sure the
draft was, and what a copy from the text would have guessed. Costs are in plain steps and the clock
is virtual, so a window is compared with plain decoding exactly, and within milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specllama.speculative.types import Draft, Guess
from specllama.speculative.window import Outcome, Window

_GUESS, _TRUTH = 1, 2  # token ids: a wrong guess and what the target wrote


@dataclass(frozen=True, slots=True)
class Spot:
    """One position of the output.

    ``copy`` is (match length, tokens offered, how many of them are right) of a copy that could
    start here, None without a match.
    """

    hit: bool
    confidence: float | None = None
    lead: float | None = None
    copy: tuple[int, int, int] | None = None


@dataclass(slots=True)
class Replay:
    """The result of a trace. Times are in plain steps; ``progress`` is (tokens, time) by round."""

    tokens: int = 0
    time: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    progress: list[tuple[int, float]] = field(default_factory=lambda: [(0, 0.0)])

    @property
    def speed(self) -> float:
        return self.tokens / self.time if self.time else 1.0

    def worst_loss(self, allowance: float) -> float:
        """Largest ``time - (1 + allowance) * tokens`` at any time."""
        return max(time - (1.0 + allowance) * tokens for tokens, time in self.progress)

    def slowest(self, tokens: int) -> float:
        """Lowest speed over any stretch of at least this many tokens."""
        points = self.progress
        slowest, start = float("inf"), 0
        for end in range(len(points)):
            while start + 1 < end and points[end][0] - points[start + 1][0] >= tokens:
                start += 1
            n = points[end][0] - points[start][0]
            if n >= tokens:
                slowest = min(slowest, n / (points[end][1] - points[start][1]))
        return slowest

    def add(self, emitted: int, time: float) -> None:
        self.tokens += emitted
        self.time += time
        self.rounds += 1
        self.progress.append((self.tokens, self.time))


class VirtualClock:
    """A clock that advances only when told to; one plain step is one millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def steps(self, n: float) -> None:
        self.now += n / 1e3


def replay(
    trace: Sequence[Spot],
    window: Window,
    clock: VirtualClock,
    *,
    verify: Sequence[float],
    draft: Sequence[float] | float,
    prompt: int = 0,
    peek: bool = True,
    use_model: bool = True,
) -> Replay:
    """Walk a trace with a window that was made with ``clock``.

    Args:
        verify: cost of a pass of n rows, ``verify[1] == 1``.
        draft: cost of a draft step, or of a draft pass by tokens.
        prompt: tokens that the draft has to read before its first guess.
        peek: whether the draft tells its drawn token (rule ``match``).
        use_model: False replays copies only.
    """
    table = None if isinstance(draft, (int, float)) else draft
    step = float(draft) if isinstance(draft, (int, float)) else draft[1]

    def reading(n: int) -> float:
        if table is None:
            return step * (1.0 + 0.35 * (n - 1))
        return table[n] if n < len(table) else table[-1] * n / (len(table) - 1)

    out = Replay()
    at, lag = 0, max(prompt, 1)
    last = len(trace) - 1
    while at < last:
        begin = clock.now
        plan = window.plan(min(last - at, len(verify) - 2))
        sent, source, right = 0, "none", 0
        confidences: list[float | None] = []
        room = plan.room
        copy = trace[at].copy
        if plan.draft_max and room is not None and copy is not None:
            length, offered, correct = copy
            guesses = [_TRUTH if i < correct else _GUESS for i in range(offered)]
            sent = room.pick((Guess("ngram", tuple(guesses), length),))[1]
            if sent:
                source, right = "ngram", min(correct, sent)
        if plan.draft_max and room is not None and not sent and use_model:
            read = room.begin("draft", lag)
            if read:
                clock.steps(reading(read))
                fed = 0  # guesses that the draft has read
                while True:
                    out.steps += 1
                    spot = trace[at + sent]
                    token = _TRUTH if spot.hit else _GUESS
                    if not room.include(
                        spot.confidence, spot.lead if peek else None, token if peek else None
                    ):
                        break
                    sent += 1
                    confidences.append(spot.confidence)
                    if sent >= plan.draft_max or not room.keep_going(sent, spot.confidence):
                        break
                    clock.steps(step)
                    fed += 1
                source = "draft" if sent else "none"
                while right < sent and trace[at + right].hit:
                    right += 1
                lag = right + 1 - min(right, fed)
            else:
                lag += 1
        elif plan.draft_max and room is None:  # a window that fixes its length beforehand
            sent = plan.draft_max
            source = "draft"
            clock.steps(reading(lag) + (sent - 1) * step)
            while right < sent and trace[at + right].hit:
                right += 1
            lag = 1 if right < sent else 2
        else:
            lag += right + 1
        reason = plan.reason
        if plan.explain is not None:
            reason = plan.explain(Draft.chain([0] * sent, source)).reason
        out.reasons[reason] = out.reasons.get(reason, 0) + 1
        drafted_at = clock.now
        clock.steps(verify[sent + 1])
        emitted = right + 1
        window.observe(
            Outcome(
                source=source,
                drafted=sent,
                accepted=right,
                emitted=emitted,
                confidence=tuple(confidences),
                draft_ms=(drafted_at - begin) * 1e3,
                verify_ms=(clock.now - drafted_at) * 1e3,
                round_ms=(clock.now - begin) * 1e3,
                tokens=(_TRUTH,) * emitted,
            )
        )
        out.drafted += sent
        out.accepted += right
        out.add(emitted, (clock.now - begin) * 1e3)
        at += emitted
    return out


def trace_of_rounds(rounds: Iterable[dict[str, Any]]) -> list[Spot]:
    """A trace from the ``round`` lines of a round log.

    Tested guesses are known; a position that no guess was tested on (a plain step, a bonus token)
    takes the outcome of the last tested one.
    """
    spots: list[Spot] = []
    last = Spot(False, 0.5)
    for done in rounds:
        accepted, drafted = int(done["accepted"]), len(done["drafted"])
        confidence = list(done.get("confidence") or [])
        for i in range(len(done["emitted"])):
            if i < drafted and i <= accepted:
                c = confidence[i] if i < len(confidence) else None
                last = Spot(i < accepted, c if c is None else float(c))
            spots.append(last)
    return spots


def trace_of_log(path: Path) -> list[Spot]:
    """A trace from a round log file; torn and foreign lines are skipped."""
    import msgspec

    rounds: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            data = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            continue
        if isinstance(data, dict) and "drafted" in data and "accepted" in data:
            rounds.append(data)
    return trace_of_rounds(rounds)
