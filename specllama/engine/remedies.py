"""The changes of a pair that would make it write faster here, ranked by their expected speed.

Every run of a pair leaves a profile: what passes cost in one layout of the weights, with one draft
model and one number of threads, and how many guesses were kept. A profile that differs from the
present one in one of these is a change that can be weighed. Nothing else is: what was never
measured on this processor, with this build, has no figure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from specllama.errors import SpecllamaError
from specllama.events import RoundDone
from specllama.interface import ModelInfo
from specllama.rates import LONGEST, Remedy, affordable_step, fixed_speeds, steady
from specllama.speculative.policy.costs import Costs
from specllama.speculative.policy.learned import Learned
from specllama.store import profile_file as store

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

LEAST = 1.08  # times the present speed: times of other minutes differ by less
BEST = 0.97  # an acceptance that no draft model keeps up for long
TESTED = 16  # guesses from which an acceptance is known
_DRAFT = "-d "


@dataclass(frozen=True, slots=True)
class Weighed:
    """The part of a profile that a change is weighed by; ``key`` is that of ``pair_key``."""

    key: Mapping[str, Any]
    costs: Costs = field(default_factory=Costs)
    bands: Mapping[str, Learned] = field(default_factory=dict)
    saved: store.Stamp = ()

    @property
    def known(self) -> bool:
        """True if plain steps and passes of several rows were timed."""
        target = self.costs.target
        return target.level is not None and target.known(1) and target.known(2)

    def acceptance(self, source: str, band: str) -> float | None:
        """Return how often a guess of the source is kept after a kept one; None if too few were
        tested. Without a lesson at this temperature, that with the most of them counts."""
        bands = [self.bands[band]] if band in self.bands else []
        for some in (bands, self.bands.values()):
            found = [one.sources[source] for one in some if source in one.sources]
            best = max(found, key=lambda one: one.labels, default=None)
            if best is not None and best.labels >= TESTED:
                return best.mean
        return None

    def gain(self, source: str, band: str) -> float:
        """Return the speed over plain decoding of the best length of its drafts, at least 1."""
        steps, kept = self.costs.own.get(source, self.costs.draft), self.acceptance(source, band)
        if kept is None or not steps.known(1):
            return 1.0
        late = min(max(steps.ms(2) - steps.ms(1), 0.0), steps.ms(1))
        rows = self.costs.target.upto(LONGEST + 1)
        return max(1.0, *fixed_speeds(steady(kept), steps.ms(1), rows, late).values())


def kept_in(folder: Path, schema: str, here: str) -> list[Weighed]:
    """Return the profiles that were measured on this processor with this build, oldest first."""
    found = (_kept(path, schema, store.stamp(path)) for path in folder.glob("*.json"))
    mine = [one for one in found if one is not None and one.key.get("here") == here]
    return sorted(mine, key=lambda one: one.saved[1])


@lru_cache(maxsize=256)
def _kept(path: Path, schema: str, stamp: store.Stamp) -> Weighed | None:
    try:
        data = store.read(path)
        if data is None or data["schema"] != schema:
            return None
        costs = msgspec.convert(data["costs"], Costs, str_keys=True)
        bands = msgspec.convert(data["bands"], dict[str, Learned], str_keys=True)
        return Weighed(data["pair"], costs, bands, stamp)
    except (OSError, *store.DAMAGE):
        return None


def ranked(
    mine: Weighed, others: Iterable[Weighed], band: str = "", rounds: Sequence[RoundDone] = ()
) -> tuple[Remedy, ...]:
    """Return the changes that would be faster than what is loaded, the fastest first, and in the
    end what would make a draft model pay.

    Args:
        band: of the temperature, see ``profiles.band``.
        rounds: of a reply that is to be as fast; without them a text is foretold.
    """
    if not mine.known:
        return ()
    found = {f"--proposer {name}": (mine.gain(name, band), "") for name in mine.costs.own}
    for other in others:
        change = _change(mine.key, other.key)
        if change and change not in found and other.known:
            then = "" if mine.key["target"] == other.key["target"] else "its texts are other ones"
            found[change] = _speed(mine, other, band, rounds), then
    least = LEAST * _speed(mine, mine, band, rounds)
    best = [Remedy(_typed(change), *what) for change, what in found.items() if what[0] >= least]
    best.sort(key=lambda one: one.speed or 0.0, reverse=True)
    return (*best, *_cheaper_draft(mine, band))


def _speed(mine: Weighed, other: Weighed, band: str, rounds: Sequence[RoundDone]) -> float:
    """Return the speed with the costs of ``other``, over plain decoding with those of ``mine``: the
    rounds that drafted are paid anew, the others draft as far as it pays."""
    rows, level = other.costs.target, mine.costs.target.ms(1)
    same = mine.key["draft"] == other.key["draft"]
    # how often a guess is kept does not depend on what it costs
    knows = replace(other, bands=mine.bands) if same else other
    step = rows.ms(1) / knows.gain("draft", band)
    drafted = [one for one in rounds if one.drafted]
    if not (same and drafted):
        return level / step
    tokens = sum(len(one.emitted) for one in rounds)
    took = sum(
        one.draft_ms + rows.ms(len(one.drafted) + 1) - step * len(one.emitted) for one in drafted
    )
    return max(level / step, tokens * level / (took + step * tokens))


def _change(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Name the one thing in which another profile differs, as it is typed; "" if it is no such
    change."""
    differ = {name for name in (*mine, *other) if mine.get(name) != other.get(name)}
    if differ == {"threads"}:
        return f"-t {other['threads']}"
    if "draft" in differ and differ <= {"draft", "layers", "cache"} and other["draft"] != "none":
        names = {one["draft"].rpartition(" (")[0] for one in (mine, other)}
        return f"{_DRAFT}{other['draft']}" if len(names) > 1 else ""  # a copy drafts by itself
    if "target" in differ and differ <= {"target", "layout"}:
        return f"this model as {other['target'].rpartition(' ')[0]}"
    return ""


def draft_key(draft: ModelInfo | GgufHeader) -> str:
    """Name a draft model; the name begins that of a loaded one in ``pair_key``."""
    return f"{draft.name} {draft.quantization} ({draft.n_params}, {draft.file_bytes}"


@lru_cache(maxsize=64)
def _typed(change: str) -> str:
    """Return a change as it can be typed: a draft model as what loads it, if it is here."""
    from specllama.models import library
    from specllama.models.gguf import read_header

    if not change.startswith(_DRAFT):
        return change
    draft = change.removeprefix(_DRAFT)
    with suppress(SpecllamaError, OSError):
        for one in library.scan():
            if f", {one.bytes}," in draft and draft.startswith(draft_key(read_header(one.path))):
                return f"{_DRAFT}{shlex.quote(one.ref)}"
    return f"the draft model {draft.rpartition(' (')[0]}"


def _cheaper_draft(mine: Weighed, band: str) -> list[Remedy]:
    """Return the most that a step of the draft model may cost, where it costs more."""
    steps, rows = mine.costs.draft, mine.costs.target.upto(LONGEST + 1)
    if mine.key["draft"] == "none" or not steps.known(1):
        return []
    kept = mine.acceptance("draft", band) or BEST
    most, now = (ms / rows[1] for ms in (affordable_step(steady(kept), rows), steps.ms(1)))
    if now <= most:
        return []
    if not most:
        return [Remedy("no draft model would pay", then="a further row of a pass costs too much")]
    pays = f"a step pays below {most:.2f} of a plain one, here it takes {now:.2f}"
    return [Remedy("a smaller or trimmed draft model (specllama quantize)", then=pays)]
