"""Drafting that pays, on any machine and without a download: a pair is made, raced and deleted.

The bundled pair is so small that no guess can pay. Scaled (``models/scale.py``), it is the same
model at the cost of a 1 B model: a step takes as long as with a real one. Light to import.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from filelock import FileLock, Timeout

from specllama.bench import outcome
from specllama.bench.experiment import DRAFTED, Run, ask_all, drafted, plain_and
from specllama.bench.outcome import LEAST, MOST, RaceBoard, SpeedModel, Way
from specllama.bench.prompts import half, load_prompts
from specllama.cancel import Cancel
from specllama.errors import SpecllamaError
from specllama.interface import EngineLike, Prompt
from specllama.models import memory
from specllama.paths import cache_dir
from specllama.settings.params import GenerateParams
from specllama.text import size

WHAT = "the bundled model at the cost of a 1 B model"
TARGET, DRAFT = "1b", "20m"  # presets of models/scale.py
TOKENS = 64  # most of a reply
GUESSES = 4  # a round of the trial
WORTH = 1.05  # over plain, from which a pair is raced before the next kind is tried
RACE_S = 60.0  # after which no further pair of runs begins
SPARE_BYTES = 512 << 20  # left free on the disk, and in memory beside the weights
_LOCK = "lock"

Pair = tuple[Path, Path]


@dataclass(frozen=True, slots=True)
class WeightKind:
    """A type of the target's weights.

    Attributes:
        packed: as ``scale_pair`` takes it. bytes: of both files, about.
    """

    name: str
    packed: str | None
    bytes: int


# Passes of Q8_0 are bit-exact on CPUs, so that the text is the same for sure. BF16 gains more, as
# its passes wait for memory most of all, but they round: now and then a near-tie flips.
KINDS = (
    WeightKind("Q8_0", "Q8_0", 1_070_000_000),
    WeightKind("BF16", "BF16", 2_000_000_000),
    WeightKind("Q4_0", None, 600_000_000),
)


def folder() -> Path:
    """Return the folder for the pairs of all demonstrations."""
    return cache_dir() / "demo"


def affordable() -> list[WeightKind]:
    """List the kinds that fit on disk and in memory.

    Raises:
        SpecllamaError: there is none, or there is no such folder.
    """
    where = folder()
    try:
        where.mkdir(parents=True, exist_ok=True)
        disk = shutil.disk_usage(where).free
    except OSError as error:
        why = error.strerror or str(error)
        raise SpecllamaError(
            f"the pair cannot be written to {where}: {why}",
            "SPECLLAMA_HOME=FOLDER specllama demo, a folder that you can write to",
        ) from None
    ram = memory.available_memory()
    fit = [k for k in KINDS if k.bytes + SPARE_BYTES <= disk and (not ram or _needs(k) <= ram)]
    if not fit:
        least = min(KINDS, key=lambda kind: kind.bytes)
        free = f"{size(disk)} of the disk and {size(ram)} of memory are free"
        raise SpecllamaError(
            f"the demonstration takes {size(least.bytes + SPARE_BYTES)} of the disk at "
            f"{where} and {size(_needs(least))} of memory for a minute; {free}",
            "free some, or name another disk: SPECLLAMA_HOME=FOLDER specllama demo",
        )
    return fit


def _needs(kind: WeightKind) -> float:
    """Return the bytes of memory; most types may be laid out anew, in a copy."""
    return kind.bytes * (1.0 if kind.name == "BF16" else 2.0) + SPARE_BYTES


@contextmanager
def workshop() -> Iterator[Path]:
    """Create a folder for one pair; delete it at the end of the block in any case. Also delete
    those of demonstrations that were killed."""
    folder().mkdir(parents=True, exist_ok=True)
    for old in folder().iterdir():
        _sweep(old)
    own = Path(tempfile.mkdtemp(dir=folder()))
    lock = FileLock(own / _LOCK)
    lock.acquire()
    try:
        yield own
    finally:
        lock.release()
        _sweep(own)


def discard(own: Path) -> None:
    """Delete the folder at once, as the process ends."""
    shutil.rmtree(own, ignore_errors=True)


def _sweep(old: Path) -> None:
    """Delete the folder of a demonstration that is over."""
    if not old.is_dir():
        return
    try:
        with FileLock(old / _LOCK, timeout=0):
            pass
    except (OSError, Timeout):
        return  # it is going on
    shutil.rmtree(old, ignore_errors=True)


def make(kind: WeightKind, own: Path, progress: Callable[[float], object] | None = None) -> Pair:
    """Write the pair.

    Raises:
        SpecllamaError: it cannot be written.
    """
    from specllama.models.refs import resolve_pair
    from specllama.models.scale import scale_pair

    target, draft = resolve_pair("tiny")
    assert draft is not None, "the bundled target brings its draft"
    return scale_pair(
        Path(target),
        Path(draft),
        own,
        to=TARGET,
        draft_to=DRAFT,
        kind=kind.packed,
        progress=progress,
    )


def trial(engine: EngineLike, board: RaceBoard, cancel: Cancel) -> SpeedModel | None:
    """Measure passes and guesses of this pair in a short reply; return None if it was cut."""
    params = GenerateParams(max_tokens=TOKENS // 4, ignore_eos=True)
    fixed = params.replace(window="fixed", draft_max=GUESSES, proposer="draft")
    runs = plain_and(_prompts()[-1], params, [(f"k = {GUESSES}", fixed)])
    board.runs["sweep"] = runs
    ask_all(engine, runs, cancel)
    return outcome.model(board)


def warm_up(engine: EngineLike, cancel: Cancel) -> None:
    """Write a reply that is not compared: the first one after a load is slower than the next."""
    params = GenerateParams(max_tokens=TOKENS)
    ask_all(engine, plain_and(_prompts()[-1], params, []), cancel)


def race(
    engine: EngineLike,
    board: RaceBoard,
    cancel: Cancel,
    told: Callable[[Way], object] = lambda way: None,
    seconds: float = RACE_S,
    *,
    to_the_end: bool = True,
) -> Way | None:
    """Race plain and drafted runs in pairs; each pair swaps the order and takes the next of some
    prompts. Stop when the answer is sure or time is up; return None if no pair was completed.

    Args:
        told: called after every pair.
        to_the_end: even where the model would end earlier.
    """
    prompts, began = _prompts(), perf_counter()
    params = drafted(GenerateParams(max_tokens=TOKENS, ignore_eos=to_the_end))

    def lap(n: int) -> list[Run]:
        return plain_and(prompts[n % len(prompts)], params, [(DRAFTED, params)], lap=n)

    def enough(way: Way) -> bool:
        told(way)
        late = perf_counter() - began > seconds
        each = way.pairs >= len(prompts)  # one kind may copy where another does not
        return (each and outcome.decided(way)) or (late and way.pairs >= LEAST)

    ask_all(engine, outcome.race(board, lap, MOST, enough), cancel)
    return next(iter(outcome.ways(board, "race")), None)


def _prompts() -> list[Prompt]:
    """Return one of each kind of the shipped prompts."""
    return [one.content for one in half(load_prompts(), "bench")[:4]]


def promises(costs: SpeedModel | None) -> bool:
    """True if drafting should pay, judged by the trial."""
    return costs is not None and costs.best(GUESSES)[1] >= WORTH


def why(board: RaceBoard, way: Way) -> str:
    """Explain the cost of a guess and how many are kept; always, if drafting does not pay here."""
    costs = outcome.model(board)
    if said := outcome.why(board, way):
        return said
    if costs is None or way.verdict.answer == "faster":
        return ""
    return (
        f"a guess costs {costs.c + costs.beta:.2f} of a plain step here, of which the further row "
        f"of the target's pass is {costs.beta:.2f}; {costs.alpha:.0%} of those checked were kept"
    )


def report(what: str, way: Way, because: str, kind: str, n_bytes: int) -> dict[str, object]:
    """Return the results for machines."""
    word, sentence = outcome.answer(way)
    return {
        "what": what,
        "answer": word,
        "words": sentence,
        "why": because,
        "ratio": way.verdict.ratio,
        "low": way.verdict.low,
        "high": way.verdict.high,
        "plain_tok_per_s": way.plain,
        "drafted_tok_per_s": way.speed,
        "pairs": way.pairs,
        "same_tokens": way.same,
        "tokens": way.of,
        "type": kind,
        "bytes": n_bytes,
    }
