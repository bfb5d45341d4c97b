"""Draft models of fewer words (``models/trimmed``) that are made by themselves, in the cache.

An engine makes a copy at rest, and times its steps beside those of the whole model; the pair is
opened with it from the next time on if they take less. No text depends on that: guesses alone do.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping

from specllama.backend import verdicts
from specllama.backend.cores import physical_cores
from specllama.backend.same_rows import Tried, compare
from specllama.cancel import Cancel
from specllama.errors import BadGguf, Cancelled, SpecllamaError
from specllama.events import Measuring, Report
from specllama.models import memory, trimmed
from specllama.models.download import disk_error
from specllama.models.gguf import GgufHeader, read_header
from specllama.settings.params import EngineOptions

logger = logging.getLogger("specllama.engine.fewer_words")

SCHEMA = "specllama.drafts.v1"
WORDS = 32768
LEAST = 2 * WORDS  # words of a vocabulary that is worth it
MOST_BYTES = 4 << 30  # of all copies; the newest stay
PAYS = 0.9  # of a whole step
_TRIED = 4  # files' sizes of memory: of two, each perhaps once more in another layout
_SPARE = 2 << 30  # bytes of the disk that stay free
WHAT = "making a draft model that knows fewer words"


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
    if asked != "auto":
        n = int(asked)
        return _made(whole, n) or _make(whole, n, {}, options, Cancel())
    found, share = _tried(whole, options) if whole.vocab_size >= LEAST else (None, 1.0)
    return found if share <= PAYS else None


def words(whole: GgufHeader, options: EngineOptions) -> str:
    """Describe the copy that was made of a model; "" if there is none."""
    if options.draft_tokens != "auto" or whole.rows:
        return ""
    found, share = _tried(whole, options)
    if found is None:
        return ""
    drafts = "drafts" if share <= PAYS else "saves too little to draft"
    return f"a copy of {found.rows:,} words {drafts}: its step takes {share:.2f} of the time"


def _tried(whole: GgufHeader, options: EngineOptions) -> tuple[GgufHeader | None, float]:
    """Return the copy that was made at rest, if there is one, and its step as a share of the
    whole model's."""
    found = _made(whole, WORDS)
    known = found and verdicts.known(SCHEMA, _key(whole, options), Tried)
    return (found, known.ms / known.whole_ms) if known else (None, 1.0)


def wanted(whole: GgufHeader, options: EngineOptions) -> bool:
    """True if a copy should be tried at rest: it may pay, and it was not tried here yet."""
    if options.draft_tokens != "auto" or whole.rows or whole.vocab_size < LEAST:
        return False
    known = verdicts.known(SCHEMA, _key(whole, options), Tried)
    if known and (known.ms > PAYS * known.whole_ms or _made(whole, WORDS)):
        return False
    try:
        trimmed.check_source(whole)
    except SpecllamaError:
        return False
    return trimmed.work(whole, WORDS) <= PAYS and _has_room(whole)


def make_at_rest(
    whole: GgufHeader,
    options: EngineOptions,
    counts: Mapping[int, int],
    report: Report,
    stop: Cancel,
) -> None:
    """Make the copy, and time it.

    Raises:
        Cancelled: ``stop`` was set; nothing is left of it.
    """
    if report is not None:
        report(Measuring(WHAT))
    try:
        _make(whole, WORDS, counts, options, stop)
    except Cancelled:
        raise
    except SpecllamaError as error:  # it drafts with the whole model
        logger.info("no draft model of fewer words: %s", error)
        verdicts.keep(SCHEMA, _key(whole, options), Tried(0.0, 1.0, 1.0))


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


def _key(whole: GgufHeader, options: EngineOptions) -> dict[str, object]:
    how = [options.threads, options.repack, options.gpu_layers, options.draft_gpu_layers]
    return {**verdicts.circumstances(whole), "words": WORDS, "how": how}


def _made(whole: GgufHeader, n: int) -> GgufHeader | None:
    """Return the copy that was made earlier; None if there is none, or it is damaged."""
    try:
        there = trimmed.folder().is_dir() and trimmed.place(whole, n).is_file()
        found = read_header(trimmed.place(whole, n)) if there else None
    except (BadGguf, OSError):
        return None
    return found if found is not None and found.rows == n else None


def _make(
    whole: GgufHeader, n: int, counts: Mapping[int, int], options: EngineOptions, stop: Cancel
) -> GgufHeader:
    """Make a copy and keep how fast it is."""
    path = trimmed.place(whole, n)
    try:
        trimmed.check_source(whole)
        says = trimmed.choose(whole, n, counts)
        path.parent.mkdir(parents=True, exist_ok=True)
        copy = trimmed.write(whole, path, says, alone=False, written=lambda _: stop.check())
        threads = options.threads or physical_cores()
        found = compare(
            whole.path, path, threads=threads, repack=options.repack != "off", stop=stop
        )
        if n == WORDS:
            verdicts.keep(SCHEMA, _key(whole, options), found)
    except OSError as error:
        raise disk_error(error, path) from None
    except BaseException:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise
    trimmed.keep_within(MOST_BYTES, path)
    return copy
