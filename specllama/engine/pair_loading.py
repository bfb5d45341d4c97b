"""The parts that an engine and its slots run on, made from the opened files of a pair."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specllama.arrays import FloatArray, IntArray
from specllama.backend.base import Context, Maker, OpenedPair, Own, Pool, Vocab
from specllama.backend.exactness import Exactness
from specllama.cancel import Cancel
from specllama.engine.opening import OpeningPair
from specllama.engine.profiles import Windows, open_profile
from specllama.engine.prompting import Prompting, ThoughtLimit
from specllama.engine.shelf import Shelf, StateKeys
from specllama.engine.slot import Slot
from specllama.errors import Cancelled, SpecllamaError, UsageError
from specllama.events import Notice, Report
from specllama.grammar.guide import Guides
from specllama.grammar.source import source_of
from specllama.interface import EngineInfo
from specllama.models.contents import SHORT, Check
from specllama.replies.thoughts import Reader
from specllama.settings.params import BREAKERS_LIMIT, GenerateParams, disk_bytes
from specllama.speculative.drafting import method
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.text_library import Library
from specllama.speculative.drafting.translate import join_vocabularies
from specllama.speculative.filling import fillers
from specllama.speculative.sampling import Constraint, SamplerChain
from specllama.store.sessions import is_stored
from specllama.store.states import States
from specllama.store.texts import read_texts

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader


class SamplerChains:
    """A maker of chains; tables that depend on the vocabulary alone are made once."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._guides: Guides | None = None
        self._making = threading.Lock()
        self._breaking = lru_cache(4 * BREAKERS_LIMIT)(self._breaking_now)

    def chain(
        self,
        params: GenerateParams,
        seed: int,
        tokens: Sequence[int],
        position: int,
        limit: ThoughtLimit | None = None,
        reader: Reader | None = None,
    ) -> SamplerChain:
        """Return a sampler chain after ``tokens``, for the token at ``position`` of the noise.

        Args:
            limit: of the reply's thought. reader: of the reply; a grammar holds behind its thought.
        """
        sampling = params.sampling
        if params.ignore_eos:
            bias = {**self._all_eog, **sampling.logit_bias}
            sampling = replace(sampling, logit_bias=bias)
        breakers: frozenset[int] = frozenset()
        if sampling.dry_multiplier > 0:
            breakers = frozenset().union(*map(self._breaking, sampling.dry_sequence_breakers))
        constraint: Constraint | None = limit
        if params.constrained:
            constraint = self._guide(params, reader)
            if limit is not None:
                limit.guide, constraint = constraint, limit
        return SamplerChain(
            sampling, seed=seed, tokens=tokens, position=position, breakers=breakers,
            constraint=constraint, is_end=self._vocab.is_eog,
            fills=self._fills if sampling.infill else None,
        )  # fmt: skip

    def _fills(self, ids: IntArray, logits: FloatArray) -> tuple[IntArray, FloatArray]:
        vocab = self._vocab
        return fillers(ids, logits, vocab.piece, vocab.is_eog, lambda: min(self._all_eog))

    def read_vocabulary(self) -> None:
        """Read the vocabulary for grammars; this takes some 0.5 s in which no other thread runs."""
        with self._making:
            if self._guides is None:
                n, vocab = self._vocab.n_tokens, self._vocab
                self._guides = Guides(
                    [vocab.piece(t) for t in range(n)],
                    [t for t in range(n) if vocab.is_eog(t)],
                    partial(
                        vocab.tokenize, add_special=False, parse_special=False, after_text=True
                    ),
                )

    def _guide(self, params: GenerateParams, reader: Reader | None) -> Constraint:
        if params.json_schema is not None:
            source = source_of("schema", params.json_schema)
        elif params.regex is not None:
            source = source_of("regex", params.regex)
        else:
            source = source_of("grammar", params.grammar or "")
        self.read_vocabulary()
        assert self._guides is not None
        sources = [source]
        if params.calls:  # what of a tool's schema cannot be enforced is looked at later
            loose = (source.beside(params.calls, self._spelled, loose=one) for one in (False, True))
            sources = [*loose, source]
        if reader is not None:
            before = reader.spelling.marks.rules(reader.thinking, self._spelled)
            sources = [one.behind(before) for one in sources]
        for one in sources[:-1]:
            with suppress(UsageError):
                return self._guides.guide(one)
        return self._guides.guide(sources[-1])

    def _spelled(self, text: str) -> str:
        """Write a template's text in Lark: where it has tokens, these tokens alone are meant."""
        vocab, out = self._vocab, []
        ids = vocab.tokenize(text, add_special=False, parse_special=True, after_text=True)
        if b"".join(vocab.piece(t, special=True) for t in ids) != text.encode():
            return json.dumps(text)  # the vocabulary cannot say it
        for special, run in groupby(ids, lambda token: vocab.special(token) is not None):
            if special:
                out += [f"<[{token}]>" for token in run]
            else:
                out.append(json.dumps(b"".join(map(vocab.piece, run)).decode("utf-8", "replace")))
        return " ".join(out)

    def _breaking_now(self, text: str) -> frozenset[int]:
        """Return the tokens that contain a text."""
        wanted = text.encode("utf-8", "replace")
        return frozenset(t for t, piece in enumerate(self._pieces) if wanted in piece)

    @cached_property
    def _pieces(self) -> list[bytes]:
        return [self._vocab.piece(t) for t in range(self._vocab.n_tokens)]

    @cached_property
    def _all_eog(self) -> dict[int, float]:
        vocab = self._vocab
        return {t: float("-inf") for t in range(vocab.n_tokens) if vocab.is_eog(t)}


logger = logging.getLogger("specllama.engine.pair_loading")

GIVEN_TOKENS = 2**19  # of the texts that a user names: 6 MiB, sorted in a second or two


@dataclass(slots=True)
class Loaded:
    """The parts of an engine, from model files or from wherever a test takes them.

    Attributes:
        info: what to show people; replaced once more was measured.
        measured: measures what is not known yet, tells how far it is, and states it.
        maker: see ``OpenedPair``.
        slots: places for conversations, whose lanes are of one pool; at least one.
        prompting: prompts in the target's tokens.
        chains: the sampler chain of a request.
        windows: the draft window of a request.
        stop: what every pass looks at; the cancel of a request that runs alone sets it.
        kv_ram: bytes for parked texts.
        shelf: what is on disk; None keeps nothing there.
        close: frees the models.
    """

    info: EngineInfo
    slots: tuple[Slot, ...]
    prompting: Prompting
    chains: SamplerChains
    windows: Windows
    stop: Cancel = field(default_factory=Cancel)
    measured: Callable[[Report], EngineInfo] | None = None
    maker: Maker | None = None
    kv_ram: int = 0
    shelf: Shelf | None = None
    close: Callable[[], None] = lambda: None

    def at_rest(self, report: Report, cancel: Cancel) -> bool:
        """Make what the next opening may use; return False if ``cancel`` ended that."""
        try:
            if self.maker is not None and self.maker.wanted:
                self.maker.make(report, cancel)
        except Cancelled:
            return False
        except SpecllamaError as error:
            logger.info("what is done at rest is left out: %s", error)
        return True

    def measure(self, report: Report, cancel: Cancel) -> bool:
        """Measure what is unknown, and report it; return False if ``cancel`` ended that."""
        if self.measured is None:
            return False
        try:
            with self.stop.following(cancel):
                self.info = self.windows.info = self.measured(report)
        except Cancelled:
            return False
        for slot in self.slots:
            if self.info.is_exact(slot.target.max_rows, line=False):
                slot.held = slot.held.cut(0)  # its passes were exact before that was known
        return True


def load(opening: OpeningPair) -> Loaded:
    """Build the parts of an engine, once the files of its pair are open; see ``Engine.load``."""
    method.methods()  # imports them while weights are being read
    opened, options = opening.pair(), opening.options
    pool, vocab = opened.target.pool, opened.target.vocab
    try:
        pools = [pool] if opened.draft is None else [pool, opened.draft.pool]
        lanes = min(options.parallel, *(one.lanes for one in pools))
        given, said = _given(options.draft_from, vocab)
        if said and opening.on_progress is not None:
            opening.on_progress(Notice(said, topic="texts"))
        own = opened.own()
        drafters = _drafters(opened, own, lanes, given)
        slots = tuple(Slot(made.target, made.all()) for made in drafters)
    except BaseException:
        opened.close()
        raise
    chains = SamplerChains(vocab)
    if lanes > 1:  # later it would hold the others up
        chains.read_vocabulary()
    kernels = pool.kernels
    info = EngineInfo(
        target=opened.target.info, draft=None if opened.draft is None else opened.draft.info,
        **_exactness(opened.exactness, pool), device="CPU" if kernels.on_cpu else "GPU",
        threads=kernels.threads, flash_attn=kernels.flash != "off", here=opened.here,
        load_ms=(perf_counter() - opening.begun) * 1e3,
        has_chat_template=opened.template is not None, methods=method.menu(drafters[0].facts),
        lanes=lanes, reads_ahead=lanes == 1 and not pool.forgets,
    )  # fmt: skip
    idle = options.idle_bytes(info.n_bytes)
    kv_ram = idle if options.parallel > 1 or options.kv_ram is not None else 0
    info = replace(info, idle_bytes=kv_ram)
    windows = Windows(open_profile(info), info, pool.plan)

    def measured(report: Report) -> EngineInfo:
        return replace(info, **_exactness(opened.measure(report), pool))

    return Loaded(
        info=info,
        slots=slots,
        prompting=Prompting(vocab, opened.template, opened.bos, opened.eos),
        chains=chains,
        windows=windows,
        stop=opening.stop,
        measured=measured,
        maker=opened.maker,
        kv_ram=kv_ram,
        shelf=_shelf(opened, own, options.kv_disk, idle),
        close=opened.close,
    )


def _exactness(found: Exactness, pool: Pool) -> dict[str, Any]:
    """Return the fields of ``EngineInfo`` that report the exactness."""
    kernels = pool.kernels
    return {
        "exactness": found.label,
        "exact_rows": kernels.exact_rows,
        "exact_trees": kernels.exact_trees,
        "widths": kernels.widths,
        "measured": found.measured,
    }


def _shelf(opened: OpenedPair, own: Own, kv_disk: str, waiting: int) -> Shelf | None:
    """Open the folder for conversations on disk; None if they are not kept there. ``waiting``:
    bytes that may wait for the disk."""
    target, draft = opened.target, opened.draft
    if not target.key or kv_disk == "off":
        return None

    def there(check: Check | None) -> tuple[States, StateKeys] | None:
        def named(files: Sequence[GgufHeader], how: str) -> str:
            names = [one.contents if check is None else one.read_contents(check) for one in files]
            whole = hashlib.sha256(" ".join([*names, how]).encode()).hexdigest()[:SHORT]
            return "-".join([*(name[:SHORT] for name in names[:1]), whole]) if all(names) else ""

        beside = [(one.pool, named(one.files, one.key)) for one in (draft,) if one and one.key]
        heads = {method: named([file], "") for method, file in own.files.items()}
        keys = StateKeys(named(target.files, target.key), beside, heads)
        if not all((keys.target, *(key for _, key in beside), *heads.values())):
            return None
        return States(keys.target, most=disk_bytes(kv_disk)), keys

    return Shelf(there, is_stored, most=waiting)


def _drafters(
    opened: OpenedPair, own: Own, slots: int, given: Iterable[Sequence[int]]
) -> list[method.Kit]:
    """Make the drafters of each slot."""
    library = Library(given)

    def beside() -> Context | Drafter | None:
        if opened.draft is None:
            return None
        lane = opened.draft.pool.open()
        if opened.translated:
            return join_vocabularies(lane, opened.target.vocab, opened.draft.vocab)
        return lane

    return [
        method.Kit(opened.target.pool.open(), beside(), library, own.parts, own.reasons)
        for _ in range(slots)
    ]


def _given(names: Sequence[str], vocab: Vocab) -> tuple[list[list[int]], str]:
    """Return the user's texts, oldest first, as far as there is room; and a notice of the rest.

    Raises:
        UsageError: a name is neither a file nor a folder.
    """
    if not names:
        return [], ""
    texts, without = read_texts(names)
    found: list[list[int]] = []
    left = GIVEN_TOKENS
    for text in reversed(texts):
        ids = vocab.tokenize(text, add_special=False, parse_special=False)
        if len(ids) > left:
            break
        found.append(ids)
        left -= len(ids)
    said = f"drafting from {len(found)} of {len(texts)} texts, {GIVEN_TOKENS - left:,} tokens"
    return found[::-1], f"{said}; left out: {without}" if without else said
