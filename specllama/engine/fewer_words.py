"""Draft models of fewer words (``models/trimmed``) that are made by themselves, in the cache.

An engine makes a copy at rest, once it has heard enough replies to know which words they hold, and
times its steps beside those of the whole model. The pair is opened with it from the next time on if
they take less. Where replies begin to hold other words, the copy is made anew; where none pays or
works, nothing is looked for any more with this build. No text depends on any of that: guesses alone
do.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import msgspec
import numpy as np

from specllama.arrays import IntArray
from specllama.backend import verdicts
from specllama.backend.base import Vocab
from specllama.backend.cores import physical_cores
from specllama.backend.same_rows import Tried, compare
from specllama.cancel import Cancel
from specllama.errors import BadGguf, Cancelled, SpecllamaError, UnsupportedModel
from specllama.events import Measuring, Report
from specllama.models import memory, trimmed
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.words import SAYS, ranked
from specllama.paths import standing
from specllama.settings.params import EngineOptions
from specllama.text import size

logger = logging.getLogger("specllama.engine.fewer_words")

SCHEMA = "specllama.drafts.v2"
SIZES = (16384, 32768, 49152, 65536, 98304)  # words that are tried
LOST = 0.02  # of a reply's tokens that a copy may not know
TOKENS = 2048  # of replies, before words are chosen by them
PAYS = 0.9  # of a whole step
LOOKS = 2  # in vain, after which no copy is looked for
WHAT = "making a draft model that knows fewer words"
_REPLIES = 512  # that are remembered
_MOST_BYTES = 4 << 30  # of all copies; the newest stay
_TRIED = 4  # files' sizes of memory: of two, each perhaps once more in another layout
_SPARE = 2 << 30  # bytes of the disk that stay free


def chosen(whole: GgufHeader, options: EngineOptions, here: str = "") -> GgufHeader | None:
    """Return the copy that drafts instead of a whole model; None for the model itself.

    Args:
        here: see ``EngineInfo``; "" finds that out.
    """
    return _look(whole, options, here)[1]


def words(whole: GgufHeader, options: EngineOptions, here: str = "") -> str:
    """Describe what came of a copy of a model; "" if none was tried."""
    known, copy = _look(whole, options, here)
    if known is None or (copy is None and not known.why_not):
        return ""
    if copy is None:
        return f"the whole model drafts: {known.why_not}"
    return f"a copy of {copy.rows:,} words drafts: its step takes {known.share:.2f} of the time"


def brief(whole: GgufHeader, options: EngineOptions, here: str) -> str:
    """Name what drafts of a model, and its size, for a list: "398 MB, copy of 32,768 words"."""
    known, copy = _look(whole, options, here)
    if copy is not None:
        return f"{size(copy.file_bytes)}, copy of {copy.rows:,} words"
    return size(whole.file_bytes) + (", whole" if known and known.why_not else "")


def _look(
    whole: GgufHeader, options: EngineOptions, here: str
) -> tuple[Tried | None, GgufHeader | None]:
    """Return what came of a copy of a model, and the copy if it drafts."""
    known = _known(whole, options, here)
    copy = _made(whole) if known is not None and known.share <= PAYS else None
    return known, copy if copy and known and copy.rows == known.words else None


class DraftMaker:
    """A maker of the copy of a draft model that a later opening may draft with."""

    def __init__(self, whole: GgufHeader, options: EngineOptions, vocab: Vocab) -> None:
        self._whole, self._options, self._vocab = whole, options, vocab
        self._heard: deque[Sequence[int]] = deque(maxlen=_REPLIES)
        self._n = 0  # tokens that were heard
        sizes = [n for n in SIZES if 3 * n <= 2 * whole.vocab_size]
        self._sizes = [n for n in sizes if trimmed.work(whole, n) <= PAYS]
        self._next = 1 if self._sizes and self._looks() else math.inf

    def hear(self, reply: Sequence[int]) -> None:
        """Take the tokens of a reply into account."""
        self._heard.append(reply)
        self._n += len(reply)

    def _looks(self) -> bool:
        """True if it is worth looking for a copy."""
        if self._options.draft_tokens != "auto" or self._whole.rows:
            return False
        known = _known(self._whole, self._options)
        return known is None or known.looks < LOOKS

    @property
    def wanted(self) -> bool:
        """True if enough was heard since the last try."""
        return self._n >= self._next

    def make(self, report: Report, stop: Cancel) -> None:
        """Make the copy if it is time, and time it.

        Raises:
            Cancelled: ``stop`` was set; nothing is left of it.
        """
        from specllama.store.sessions import last_replies  # weights are read before it

        whole = self._whole
        whole.read_contents(stop.check)
        known, copy = _known(whole, self._options), _made(whole)
        counts = Counter(chain.from_iterable(self._heard))
        # one that was made is judged by what is written since
        for text in last_replies() if copy is None else ():
            stop.check()
            counts.update(self._vocab.tokenize(text, add_special=False, parse_special=False))
        if counts.total() >= TOKENS and not (copy and known and _knows(copy, counts)):
            n = smallest(trimmed.places(whole), counts, self._sizes)
            if known is not None and known.words == n and known.share > PAYS:
                found = msgspec.structs.replace(known, looks=known.looks + 1)
                verdicts.keep(SCHEMA, _key(whole, self._options), found)
            elif n and _has_room(whole):
                if report is not None:
                    report(Measuring(WHAT))
                _make(whole, n, counts, self._options, stop)
        self._next = 2 * self._n + 1 if self._looks() else math.inf


def smallest(places: IntArray, counts: Counter[int], sizes: Iterable[int]) -> int:
    """Return the least number of words that loses little of other replies, 0 if none does. Each
    token that was counted stands for one of another reply: it is known if the rest tell of it."""
    rest = {token: often - 1 for token, often in counts.items()}
    often = np.array([counts[token] for token in ranked(places, rest).tolist()])
    return next((n for n in sizes if often[n:].sum() <= LOST * often.sum()), 0)


def _knows(copy: GgufHeader, counts: Counter[int]) -> bool:
    says = copy.array(SAYS)
    return sum(counts[token] for token in says) >= (1 - 2 * LOST) * counts.total()


def _key(whole: GgufHeader, options: EngineOptions, here: str = "") -> dict[str, object]:
    layout, layers = options.own_kernels or options.repack, options.gpu_layers
    how = [options.threads, layout, layers, options.draft_gpu_layers]
    here = here or verdicts.name_of(verdicts.here())
    return {"file": whole.contents, "here": here, "how": how}


def _known(whole: GgufHeader, options: EngineOptions, here: str = "") -> Tried | None:
    """Return what came of a copy, if one may draft."""
    if options.draft_tokens != "auto" or whole.rows or not whole.contents:
        return None
    # the build is asked only where something may be known: it may not be fit for this processor
    if not verdicts.all_known(SCHEMA, {"file": whole.contents}, Tried):
        return None
    return verdicts.known(SCHEMA, _key(whole, options, here), Tried)


def _made(whole: GgufHeader) -> GgufHeader | None:
    """Return the copy that was made earlier; None if there is none, or it is damaged."""
    try:
        path = trimmed.place(whole)
        found = read_header(path) if whole.contents and path.is_file() else None
    except (BadGguf, OSError):
        return None
    return found if found is not None and found.rows else None


def _has_room(whole: GgufHeader) -> bool:
    """True if there is room for a copy: on the disk, and in memory while both are tried."""
    if 0 < memory.available_memory() < _TRIED * whole.file_bytes:
        return False
    return shutil.disk_usage(standing(trimmed.folder())).free > _SPARE + whole.file_bytes


def _make(
    whole: GgufHeader, n: int, counts: Mapping[int, int], options: EngineOptions, stop: Cancel
) -> None:
    """Make a copy, and keep how fast it is; or why there is none."""
    path, key, known = trimmed.place(whole), _key(whole, options), _known(whole, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        says = trimmed.choose(whole, n, counts)
        trimmed.write(whole, path, says, written=lambda _: stop.check())
        threads, kernels = options.threads or physical_cores(), options.own_kernels
        found = compare(whole.path, path, threads=threads, kernels=kernels, stop=stop)
        if found.share > PAYS:
            raise UnsupportedModel(f"with {n:,} words a step takes {found.share:.2f} of the time")
        trimmed.keep_within(_MOST_BYTES, path)
        verdicts.keep(SCHEMA, key, found)
    except (SpecllamaError, OSError) as error:  # it drafts with the whole model
        shutil.rmtree(path.parent, ignore_errors=True)
        if isinstance(error, Cancelled):
            raise
        logger.info("no draft model of fewer words: %s", error)
        if isinstance(error, (BadGguf, UnsupportedModel)):  # else the disk was full
            looks = 1 + (known.looks if known else 0)
            verdicts.keep(SCHEMA, key, Tried(n, why_not=error.message, looks=looks))
