"""Draft models of fewer words (``models/trimmed``) that are made by themselves, in the cache.

An engine makes a copy at rest, once it has heard enough replies to know which words they hold, and
times its steps beside those of the whole model. The pair is opened with it from the next time on if
they take less. Where replies begin to hold other words, the copy is made anew. No text depends on
any of that: guesses alone do.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from specllama.arrays import IntArray
from specllama.backend import verdicts
from specllama.backend.cores import physical_cores
from specllama.backend.same_rows import Tried, compare
from specllama.cancel import Cancel
from specllama.errors import BadGguf, Cancelled, SpecllamaError
from specllama.events import Measuring, Report
from specllama.models import memory, trimmed
from specllama.models.download import disk_error
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.words import SAYS, ranked
from specllama.settings.params import EngineOptions

logger = logging.getLogger("specllama.engine.fewer_words")

SCHEMA = "specllama.drafts.v1"
SIZES = (16384, 32768, 49152, 65536, 98304)  # words that are tried
LOST = 0.02  # of a reply's tokens that a copy may not know
TOKENS = 2048  # of replies, before words are chosen by them
PAYS = 0.9  # of a whole step
WHAT = "making a draft model that knows fewer words"
_REPLIES = 512  # that are remembered
_MOST_BYTES = 4 << 30  # of all copies; the newest stay
_TRIED = 4  # files' sizes of memory: of two, each perhaps once more in another layout
_SPARE = 2 << 30  # bytes of the disk that stay free
_AUTO = "auto"


def chosen(whole: GgufHeader, options: EngineOptions) -> GgufHeader | None:
    """Return the copy that drafts instead of a whole model; None for the model itself.

    Raises:
        UsageError: the number of words that was asked for cannot be had.
        UnsupportedModel: there is no such copy of the model.
        SpecllamaError: it cannot be written.
    """
    asked = options.draft_tokens
    if asked == "all" or whole.rows:
        return None
    if asked != _AUTO:
        return _made(whole, asked) or _make(whole, asked, int(asked), {}, options, Cancel())
    found, share = _known(whole, options)
    return found if share <= PAYS else None


def words(whole: GgufHeader, options: EngineOptions) -> str:
    """Describe the copy that was made of a model; "" if there is none."""
    found, share = _known(whole, options)
    if found is None or options.draft_tokens != _AUTO:
        return ""
    drafts = "drafts" if share <= PAYS else "saves too little to draft"
    return f"a copy of {found.rows:,} words {drafts}: its step takes {share:.2f} of the time"


class DraftMaker:
    """A maker of the copy that a later opening may draft with.

    Args:
        whole: the draft model. running: what drafts now, the same or a copy.
        stored: earlier replies, in its tokens.
    """

    def __init__(
        self,
        whole: GgufHeader,
        running: GgufHeader,
        options: EngineOptions,
        stored: Callable[[Cancel], list[list[int]]],
    ) -> None:
        self._whole, self._options, self._stored = whole, options, stored
        self._copied = running.rows > 0
        self._heard: deque[Sequence[int]] = deque(maxlen=_REPLIES)
        self._n = 0  # tokens that were heard
        sizes = [n for n in SIZES if 3 * n <= 2 * whole.vocab_size]
        self._sizes = [n for n in sizes if trimmed.work(whole, n) <= PAYS]
        self._next = 1 if self._sizes and options.draft_tokens == _AUTO else math.inf  # when to try

    def hear(self, reply: Sequence[int]) -> None:
        """Take the tokens of a reply into account."""
        self._heard.append(reply)
        self._n += len(reply)

    @property
    def wanted(self) -> bool:
        """True if enough was heard since the last try."""
        return self._n >= self._next

    def make(self, report: Report, stop: Cancel) -> None:
        """Make the copy if it is time, and time it.

        Raises:
            Cancelled: ``stop`` was set; nothing is left of it.
        """
        whole, options = self._whole, self._options
        replies = [*([] if self._copied else self._stored(stop)), *self._heard]
        if sum(map(len, replies)) >= TOKENS and not self._still_good(replies) and _has_room(whole):
            n = smallest(trimmed.places(whole), replies, self._sizes) or 0
            known = _tried(whole, options, n)
            if n and (known is None or self._copied or known.ms <= PAYS * known.whole_ms):
                if report is not None:
                    report(Measuring(WHAT))
                counts = Counter(chain.from_iterable(replies))
                try:
                    _make(whole, _AUTO, n, counts, options, stop)
                except Cancelled:
                    raise
                except SpecllamaError as error:  # it drafts with the whole model
                    logger.info("no draft model of fewer words: %s", error)
                    verdicts.keep(SCHEMA, _key(whole, options, n), Tried(0.0, 1.0, 1.0))
        self._next = 2 * self._n + 1

    def _still_good(self, replies: Sequence[Sequence[int]]) -> bool:
        """True if the copy that drafts, or was made meanwhile, knows the words of these replies."""
        copy = _made(self._whole, _AUTO)
        if copy is None or _tried(self._whole, self._options, copy.rows) is None:
            return False
        known = np.isin([*chain.from_iterable(replies)], copy.array(SAYS))
        return float(known.mean()) >= 1 - 2 * LOST


def smallest(
    places: IntArray, replies: Sequence[Sequence[int]], sizes: Iterable[int]
) -> int | None:
    """Return the least number of words that loses little of replies, if it was chosen by others:
    every second one, by the rest. None if none does."""
    halves = [[*chain.from_iterable(replies[i::2])] for i in (0, 1)]
    ranks = []
    for mine, others in (halves, halves[::-1]):
        rank = np.empty(len(places), np.int32)
        rank[ranked(places, Counter(others))] = np.arange(len(places))
        ranks.append(rank[mine])
    found = np.concatenate(ranks)
    return next((n for n in sizes if float((found >= n).mean()) <= LOST), None)


def _key(whole: GgufHeader, options: EngineOptions, n: int) -> dict[str, object]:
    how = [options.threads, options.repack, options.gpu_layers, options.draft_gpu_layers]
    return {**verdicts.circumstances(whole), "words": n, "how": how}


def _tried(whole: GgufHeader, options: EngineOptions, n: int) -> Tried | None:
    return verdicts.known(SCHEMA, _key(whole, options, n), Tried)


def _known(whole: GgufHeader, options: EngineOptions) -> tuple[GgufHeader | None, float]:
    """Return the copy that was made at rest, if there is one, and its step as a share of the
    whole model's."""
    found = _made(whole, _AUTO)
    known = found and _tried(whole, options, found.rows)
    return (found, known.ms / known.whole_ms) if known else (None, 1.0)


def _made(whole: GgufHeader, kind: str) -> GgufHeader | None:
    """Return the copy that was made earlier; None if there is none, or it is damaged."""
    try:
        there = trimmed.folder().is_dir() and trimmed.place(whole, kind).is_file()
        found = read_header(trimmed.place(whole, kind)) if there else None
    except (BadGguf, OSError):
        return None
    return found if found is not None and found.rows else None


def _has_room(whole: GgufHeader) -> bool:
    """True if there is room for a copy: on the disk, and in memory while both are tried."""
    free = memory.available_memory()
    if 0 < free < _TRIED * whole.file_bytes:
        return False
    there = next(place for place in trimmed.folder().parents if place.exists())
    try:
        return shutil.disk_usage(there).free > _SPARE + whole.file_bytes
    except OSError:
        return False


def _make(
    whole: GgufHeader,
    kind: str,
    n: int,
    counts: Mapping[int, int],
    options: EngineOptions,
    stop: Cancel,
) -> GgufHeader:
    """Make a copy; of one that was not asked for, keep how fast it is."""
    path = trimmed.place(whole, kind)
    try:
        trimmed.check_source(whole)
        says = trimmed.choose(whole, n, counts)
        path.parent.mkdir(parents=True, exist_ok=True)
        copy = trimmed.write(whole, path, says, alone=False, written=lambda _: stop.check())
        threads = options.threads or physical_cores()
        repack = options.repack != "off"
        found = compare(whole.path, path, threads=threads, repack=repack, stop=stop)
        if kind == _AUTO:
            verdicts.keep(SCHEMA, _key(whole, options, n), found)
    except OSError as error:
        raise disk_error(error, path) from None
    except BaseException:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise
    trimmed.keep_within(_MOST_BYTES, path)
    return copy
