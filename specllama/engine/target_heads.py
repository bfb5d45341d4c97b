"""Heads that draft for one target only: head files that belong to it, and layers of its own file.

Each kind of head says what it recognises, checks and opens (``models.companions``). Heads that are
named after their target, and those that ship with the bundled one, are found by themselves; one
that does not fit is left out with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specllama.backend.base import Own
from specllama.backend.threads import ThreadChoice
from specllama.errors import PairIncompatible, SpecllamaError
from specllama.models import memory, pruned
from specllama.models.companions import (
    HEADS,
    find,
    function,
    kind_of,
    own_heads,
    require_head,
    trained_for,
)
from specllama.speculative.drafting.method import NO_HEAD, Facts, menu

if TYPE_CHECKING:
    from specllama.backend.base import Lane, Pool
    from specllama.backend.llama_pool import LoadedModel
    from specllama.interface import MethodInfo
    from specllama.models.gguf import GgufHeader
    from specllama.models.library import LocalModel

logger = logging.getLogger("specllama.engine.target_heads")

MUCH = 0.5  # of a target step; a draft that costs more hardly ever pays


def _named(files: Sequence[str]) -> Iterator[GgufHeader]:
    """Yield the heads that a user named."""
    from specllama.models.gguf import read_header
    from specllama.models.refs import resolve_heads

    return (read_header(path) for ref in files for path in resolve_heads(ref))


def open_own(target: LoadedModel, files: Sequence[str]) -> Own:
    """Open every head of a target, and the drafting layers of its own file.

    Args:
        files: references of head files, as the user gave them.

    Raises:
        ModelUnavailable: a file that was named is not there.
        PairIncompatible: it is not a head, belongs to another target, or two are of one kind.
        CannotLoad: it cannot be read.
    """
    own = Own()

    def unasked(method: str, why: str, opener: Callable[[], object]) -> None:
        """Open an optional part: the target works without it."""
        try:
            if not why:
                own.parts[method] = opener()
        except SpecllamaError as error:
            logger.warning("%s", error)
            why = error.message
        if why:
            own.reasons[method] = why

    for head in _named(files):
        method = HEADS[require_head(head)].method
        if method in own.parts:
            raise PairIncompatible(f"two {method} heads were given", "give one of each kind")
        own.parts[method] = _open(head, target)
        own.files[method] = head
    for head in known_heads(target.header):
        method = HEADS[kind_of(head)].method
        if method not in own.parts:
            unasked(method, _outdated(head, target.header), partial(_open, head, target))
            own.files[method] = head
    if "mtp" not in own.parts:
        layers = partial(_open_checked, "mtp", target.header, target, None)
        unasked("mtp", _no_layers(target.header), layers)
        own.files["mtp"] = target.header
    unasked("self", pruned.why_not(target.header), partial(OwnLayers, target))
    return own


def survey(
    target: GgufHeader, files: Sequence[str] = (), *, draft: bool = False
) -> tuple[MethodInfo, ...]:
    """List every way to draft for a target, from headers alone: nothing is loaded.

    Args:
        files: head files to consider beside those that ship with the target.
        draft: whether a draft model of the same vocabulary is at hand.

    Raises:
        ModelUnavailable, PairIncompatible, CannotLoad: a file that was named is no head of it.
    """
    found, reasons = read_heads(target, files)
    own = {"mtp": _no_layers(target), "self": pruned.why_not(target), **reasons}
    own |= dict.fromkeys(found, "")
    trees = not (target.is_recurrent or target.is_hybrid)
    return menu(Facts(draft=draft, trees=trees, own=own))


def read_heads(
    target: GgufHeader, files: Sequence[str]
) -> tuple[dict[str, GgufHeader], dict[str, str]]:
    """Read the heads that a run would load, by method, and why others that ship with the target
    are left out.

    Raises:
        ModelUnavailable, PairIncompatible, CannotLoad: a file that was named is no head of it.
    """
    found: dict[str, GgufHeader] = {}
    reasons: dict[str, str] = {}
    for head in known_heads(target):
        try:
            if why := _outdated(head, target):
                raise PairIncompatible(why)
            found.setdefault(_check(head, target), head)
        except SpecllamaError as error:
            reasons[HEADS[kind_of(head)].method] = error.message
    for head in _named(files):
        found[_check(head, target)] = head
    return found, reasons


def fitting(target: GgufHeader, models: Iterable[LocalModel]) -> dict[str, str]:
    """Map each method to a head file, among some models, that belongs to a target."""
    from specllama.models.gguf import read_header
    from specllama.models.summaries import Summaries

    known = Summaries()
    found: dict[str, str] = {}
    for model in models:
        kind = HEADS.get(known.get(model.path).sidecar)
        if kind is None or kind.method in found:
            continue
        with suppress(SpecllamaError):  # of another target, or damaged
            _check(read_header(model.path), target)
            found[kind.method] = model.ref
    known.save()
    return found


def _no_layers(target: GgufHeader) -> str:
    """Explain why the target's own file has no layers for ``mtp``, "" if it has."""
    from specllama.models.assistant_file import TARGET
    from specllama.models.nextn_blocks import why_not

    return NO_HEAD if target.architecture == TARGET else why_not(target)


def _check(head: GgufHeader, target: GgufHeader) -> str:
    """Return the method of a head file; refuse one that is none, or of another target."""
    kind = require_head(head)
    find(kind).check(head, target)
    return HEADS[kind].method


def known_heads(target: GgufHeader) -> Iterator[GgufHeader]:
    """Yield the heads that are named after a target, then those that ship with it; leave out what
    cannot be read."""
    from specllama.models.gguf import read_header

    for path in (*own_heads(target), *bundled_heads(target)):
        try:
            head = read_header(path)
        except SpecllamaError as error:
            logger.warning("%s", error)
            continue
        if kind_of(head) in HEADS:
            yield head


def _outdated(head: GgufHeader, target: GgufHeader) -> str:
    """Explain why a head that is named after a target is not its any more, "" if it is."""
    if trained_for(head) in ("", target.fingerprint):
        return ""
    return (
        f"{head.path.name} was trained for another file than {target.path.name} is now; "
        "specllama train-draft makes a new one, --head takes it all the same"
    )


def bundled_heads(target: GgufHeader) -> list[Path]:
    """List the head files that ship for a target: the bundled one's, or those whose names end in
    the fingerprint of the file, wherever it lies."""
    from specllama import paths
    from specllama.models.library import BUNDLED

    folder, path = paths.bundled_dir(), target.path
    if path.name == BUNDLED["tiny-target"] and path.parent.resolve() == folder.resolve():
        return [head for kind in HEADS for head in sorted(folder.glob(f"tiny-{kind}*.gguf"))]
    return sorted(folder.glob(f"*-{target.fingerprint}.gguf"))


def _open(head: GgufHeader, target: LoadedModel) -> object:
    kind = require_head(head)
    return _open_checked(kind, head, target, find(kind).check(head, target.header))


def _open_checked(kind: str, head: GgufHeader, target: LoadedModel, facts: object) -> object:
    pool = function(find(kind).open)(head, target, facts)
    target.on_close.callback(pool.close)
    if target.options.threads is None and hasattr(pool, "threads"):
        pool.threads.choice = ThreadChoice(pool.threads.most)
    return pool


class OwnLayers:
    """The opener of the draft of ``--proposer self``: the target without the middle half of its
    layers, with the target's settings.

    It is a separate file, cut out of the target's (``models.pruned``), so that every model whose
    layers can be dropped works without a special pass. It is made and loaded when its first lane is
    needed: merely having the choice costs nothing. It is freed before the target.
    """

    def __init__(self, target: LoadedModel) -> None:
        self._target = target
        self._pool: Pool | None = None
        self._said = ""

    def open(self) -> tuple[Lane, str]:
        """Open a lane of the draft, and describe it and its cost; make its file if there is none.

        Raises:
            DoesNotFit, CannotLoad: no memory for a second model.
            SpecllamaError: the file cannot be written.
        """
        if self._pool is None:
            self._pool = self._load()
        return self._pool.open(), self._said

    def _load(self) -> Pool:
        from specllama.backend.llama_pool import open_pool

        target = self._target
        options = target.options
        drop = pruned.middle_half(target.header.block_count)
        self._said = _advice(drop, pruned.draft_work(target.header, drop))
        check = target.model.stop.check
        header = pruned.make_draft(target.header, drop, threads=target.threads, check=check)
        if options.check_memory and not target.model.gpu_layers:
            memory.require_fit(
                memory.estimate_model(
                    header,
                    n_ctx=target.pool.n_ctx,
                    type_k=options.kv_type_k,
                    type_v=options.kv_type_v,
                    n_ubatch=target.pool.n_batch,
                    n_outputs=1,
                )
            )
        model = target.load(header, use_mlock=options.use_mlock)
        pool = open_pool(
            model, lanes=options.parallel, n_ctx=target.pool.n_ctx, max_rows=1,
            threads=target.threads, options=options, any_width=False,
        )  # fmt: skip
        if options.threads is None:
            pool.choose_threads()
        return pool


def _advice(drop: Sequence[int], work: float) -> str:
    said = (
        f"the draft is the target without layers {pruned.names(drop)}: "
        f"one of its steps reads {work:.0%} of the bytes of the target's"
    )
    return f"{said}, which hardly ever pays" if work > MUCH else said
