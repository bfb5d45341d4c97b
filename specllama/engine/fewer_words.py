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
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from specllama.arrays import IntArray
from specllama.backend import verdicts
from specllama.backend.base import Vocab
from specllama.backend.cores import physical_cores
from specllama.backend.same_rows import Tried, compare
from specllama.cancel import Cancel
from specllama.errors import BadGguf, Cancelled, SpecllamaError
from specllama.events import Measuring, Report
from specllama.models import memory, trimmed
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.words import SAYS, ranked
from specllama.paths import standing
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


def chosen(whole: GgufHeader, options: EngineOptions) -> GgufHeader | None:
    """Return the copy that drafts instead of a whole model; None for the model itself."""
    found, share = _known(whole, options)
    return found if share <= PAYS else None


def words(whole: GgufHeader, options: EngineOptions) -> str:
    """Describe the copy that was made of a model; "" if there is none."""
    found, share = _known(whole, options)
    if found is None:
        return ""
    drafts = "drafts" if share <= PAYS else "saves too little to draft"
    return f"a copy of {found.rows:,} words {drafts}: its step takes {share:.2f} of the time"


class DraftMaker:
    """A maker of the copy of a draft model that a later opening may draft with."""

    def __init__(self, whole: GgufHeader, options: EngineOptions, vocab: Vocab) -> None:
        self._whole, self._options, self._vocab = whole, options, vocab
        self._heard: deque[Sequence[int]] = deque(maxlen=_REPLIES)
        self._n = 0  # tokens that were heard
        sizes = [n for n in SIZES if 3 * n <= 2 * whole.vocab_size]
        self._sizes = [n for n in sizes if trimmed.work(whole, n) <= PAYS]
        self._next = 1 if self._sizes and options.draft_tokens == "auto" else math.inf

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
        from specllama.store.sessions import last_replies  # weights are read before it

        whole = self._whole
        known, copy = _tried(whole, self._options), _made(whole)
        counts = Counter(chain.from_iterable(self._heard))
        # one that was made is judged by what is written since
        for text in last_replies() if copy is None else ():
            stop.check()
            counts.update(self._vocab.tokenize(text, add_special=False, parse_special=False))
        if counts.total() >= TOKENS and not (copy and known and _knows(copy, counts)):
            n = smallest(trimmed.places(whole), counts, self._sizes)
            dear = known is not None and known.words == n and known.share > PAYS
            if n and not dear and _has_room(whole):
                if report is not None:
                    report(Measuring(WHAT))
                _make(whole, n, counts, self._options, stop)
        self._next = 2 * self._n + 1


def smallest(places: IntArray, counts: Counter[int], sizes: Iterable[int]) -> int:
    """Return the least number of words that loses little of other replies, 0 if none does. Each
    token that was counted stands for one of another reply: it is known if the rest tell of it."""
    rest = {token: often - 1 for token, often in counts.items()}
    often = np.array([counts[token] for token in ranked(places, rest).tolist()])
    return next((n for n in sizes if often[n:].sum() <= LOST * often.sum()), 0)


def _knows(copy: GgufHeader, counts: Counter[int]) -> bool:
    says = copy.array(SAYS)
    return sum(counts[token] for token in says) >= (1 - 2 * LOST) * counts.total()


def _key(whole: GgufHeader, options: EngineOptions) -> dict[str, object]:
    how = [options.threads, options.repack, options.gpu_layers, options.draft_gpu_layers]
    return {**verdicts.circumstances(whole), "how": how}


def _tried(whole: GgufHeader, options: EngineOptions) -> Tried | None:
    return verdicts.known(SCHEMA, _key(whole, options), Tried)


def _known(whole: GgufHeader, options: EngineOptions) -> tuple[GgufHeader | None, float]:
    """Return the copy that was made at rest, if there is one, and its step as a share of the
    whole model's."""
    found = _made(whole) if options.draft_tokens == "auto" and not whole.rows else None
    known = None if found is None else _tried(whole, options)
    if found is None or known is None or known.words != found.rows:
        return None, 1.0
    return found, known.share


def _made(whole: GgufHeader) -> GgufHeader | None:
    """Return the copy that was made earlier; None if there is none, or it is damaged."""
    try:
        path = trimmed.place(whole)
        found = read_header(path) if path.is_file() else None
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
    """Make a copy, and keep how fast it is."""
    path, found = trimmed.place(whole), Tried(n)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        says = trimmed.choose(whole, n, counts)
        trimmed.write(whole, path, says, written=lambda _: stop.check())
        threads, repack = options.threads or physical_cores(), options.repack != "off"
        found = compare(whole.path, path, threads=threads, repack=repack, stop=stop)
        trimmed.keep_within(_MOST_BYTES, path)
    except (SpecllamaError, OSError) as error:  # it drafts with the whole model
        shutil.rmtree(path.parent, ignore_errors=True)
        if isinstance(error, Cancelled):
            raise
        logger.info("no draft model of fewer words: %s", error)
    verdicts.keep(SCHEMA, _key(whole, options), found)
