"""What drafts for one target only: head files that belong to it, and layers of its own file.

Each file says in ``general.architecture`` what it holds; the opener of that kind checks that it
belongs to the target. Heads that ship beside the bundled target are found
by themselves; one of those that does not fit is left out with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specllama.backend.base import Own
from specllama.errors import PairIncompatible, SpecllamaError
from specllama.models import sidecars
from specllama.speculative.drafting.method import NO_HEAD, Facts

if TYPE_CHECKING:
    from specllama.backend.loaded_target import LoadedTarget
    from specllama.interface import MethodInfo
    from specllama.models.gguf import GgufHeader
    from specllama.models.library import LocalModel

logger = logging.getLogger("specllama.engine.heads")

KINDS = sidecars.HEAD_KINDS


def open_own(target: LoadedTarget, files: Sequence[str]) -> Own:
    """Every head of a target and whatever its own file has to draft with.

    Args:
        files: references of head files, as the user gave them.

    Raises:
        ModelUnavailable: a file that was named is not there.
        PairIncompatible: it is not a head, belongs to another target, or two are of one kind.
        CannotLoad: it cannot be read.
    """
    from specllama.models import pruned
    from specllama.models.gguf import read_header
    from specllama.models.refs import resolve

    own = Own()

    def unasked(method: str, why: str, opener: Callable[[], object]) -> None:
        """Nobody asked for it: the target works without."""
        try:
            if not why:
                own.parts[method] = opener()
        except SpecllamaError as error:
            logger.warning("%s", error)
            why = error.message
        if why:
            own.reasons[method] = why

    for ref in files:
        head = read_header(resolve(ref))
        method = KINDS[_require_head(head)]
        if method in own.parts:
            raise PairIncompatible(f"two {method} heads were given", "give one of each kind")
        own.parts[method] = _open(head, target)
    for path in bundled_heads(target.header.path):
        head = read_header(path)
        kind = sidecars.kind_of(head)
        if kind in KINDS and KINDS[kind] not in own.parts:
            unasked(KINDS[kind], "", partial(_open, head, target))
    if "mtp" not in own.parts:
        unasked("mtp", _no_layers(target.header), partial(_open_nextn, target.header, target))
    unasked("self", pruned.why_not(target.header), partial(_own_layers, target))
    return own


def survey(
    target: GgufHeader, files: Sequence[str] = (), *, draft: bool = False
) -> tuple[MethodInfo, ...]:
    """Every way to draft for a target, told from headers alone: nothing is loaded.

    Args:
        files: head files to consider beside those that ship with the target.
        draft: whether a draft model of the same vocabulary is at hand.

    Raises:
        ModelUnavailable, PairIncompatible, CannotLoad: a file that was named is no head of it.
    """
    from specllama.engine.methods import methods
    from specllama.models import pruned
    from specllama.models.gguf import read_header
    from specllama.models.refs import resolve

    own = {"mtp": _no_layers(target), "self": pruned.why_not(target)}
    for path in bundled_heads(target.path):
        head = read_header(path)
        try:
            own[KINDS[_check(head, target)]] = ""
        except SpecllamaError as error:
            own[KINDS[sidecars.kind_of(head)]] = error.message
    for ref in files:
        head = read_header(resolve(ref))
        own[KINDS[_check(head, target)]] = ""
    trees = not (target.is_recurrent or target.is_hybrid)
    return methods(Facts(draft=draft, trees=trees, own=own))


def fitting(target: GgufHeader, models: Iterable[LocalModel]) -> dict[str, str]:
    """By method the reference of a head file among some models that belongs to a target."""
    from specllama.models.gguf import read_header
    from specllama.models.summaries import Summaries

    known = Summaries()
    found: dict[str, str] = {}
    for model in models:
        method = KINDS.get(known.get(model.path).sidecar)
        if method is None or method in found:
            continue
        try:
            _check(read_header(model.path), target)
        except SpecllamaError:  # of another target, or damaged
            continue
        found[method] = model.ref
    known.save()
    return found


def _no_layers(target: GgufHeader) -> str:
    """Why the target's own file has no layers that ``mtp`` could draft with, "" if it has."""
    from specllama.models.assistant_file import TARGET
    from specllama.models.nextn import why_not

    return NO_HEAD if target.architecture == TARGET else why_not(target)


def _check(head: GgufHeader, target: GgufHeader) -> str:
    """Which kind of head a file is; refuse one that is none, or of another target."""
    from specllama.models import assistant_file, dflash_file, eagle3_file, medusa_file, nextn_file
    from specllama.models.layer_inputs import check_target

    kind = _require_head(head)
    if kind == "medusa":
        medusa_file.check_target(medusa_file.read_facts(head), head, target)
    elif kind == "gemma4-assistant":
        assistant_file.check_target(head, target)
    elif kind == "mtp":
        nextn_file.check_target(head, target)
    else:
        file = eagle3_file if kind == "eagle3" else dflash_file
        check_target(file.read_facts(head), head, target)
    return kind


def _require_head(header: GgufHeader) -> str:
    kind = sidecars.kind_of(header)
    if kind and kind not in KINDS:
        raise PairIncompatible(
            f"{header.path.name} is {sidecars.SIDECARS[kind]}, which --head does not take",
            sidecars.advice(kind),
        )
    if kind not in KINDS:
        raise PairIncompatible(
            f"{header.path.name} is no drafting head but a model of the architecture "
            f"{header.architecture!r}",
            "give draft models with -d; --head takes EAGLE-3, Medusa, DFlash and MTP files",
        )
    return kind


def bundled_heads(target: Path) -> list[Path]:
    """Head files that ship beside the bundled target; none for any other target."""
    from specllama import paths
    from specllama.models.library import BUNDLED

    folder = paths.bundled_dir()
    if target.name != BUNDLED["tiny-target"] or target.parent.resolve() != folder.resolve():
        return []
    return [path for kind in KINDS for path in sorted(folder.glob(f"tiny-{kind}*.gguf"))]


def _open(head: GgufHeader, target: LoadedTarget) -> object:
    if head.architecture == "eagle3":
        from specllama.backend.heads.eagle3 import open_eagle3

        return open_eagle3(head, target)
    if head.architecture == "dflash":
        from specllama.backend.heads.dflash import open_dflash

        return open_dflash(head, target)
    if head.architecture == "gemma4-assistant":
        from specllama.backend.heads.assistant import open_assistant

        return open_assistant(head, target)
    if sidecars.kind_of(head) == "mtp":
        return _open_nextn(head, target)
    from specllama.engine.open_medusa import open_medusa

    return open_medusa(head, target)


def _open_nextn(holder: GgufHeader, target: LoadedTarget) -> object:
    from specllama.backend.heads.nextn import open_nextn

    return open_nextn(holder, target)


def _own_layers(target: LoadedTarget) -> object:
    from specllama.engine.self_draft import OwnLayers

    return OwnLayers(target)
