"""The measurements of a pair on this machine, kept between runs so that the next one is warm.

One JSON file per pair and settings (processor, build, layout of the weights, device, layers on the
GPU, threads, KV types) under ``profiles_dir()``: the cost tables, what the draft window learnt per
rule and temperature band, the ledger of the pair, and the latest advice of ``specllama tune``.
Several processes may share it: see ``store/profile_file.py``. A file that is missing or of another
version is passed over, a damaged one begun anew with a word about it; a folder that cannot be
written to only means that nothing is kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from specllama.backend.pass_plan import PassPlan
from specllama.engine.remedies import Weighed, draft_key, kept_in, ranked
from specllama.events import RoundDone
from specllama.interface import EngineInfo, ModelInfo
from specllama.rates import Remedy
from specllama.settings import method_list
from specllama.settings.params import GenerateParams
from specllama.speculative.policy.baseline import Baseline, PlainSteps
from specllama.speculative.policy.costs import Costs
from specllama.speculative.policy.learned import Learned
from specllama.speculative.policy.ledger import Ledger
from specllama.speculative.policy.policy import Policy
from specllama.speculative.rules import rule_of
from specllama.speculative.window import Window
from specllama.store import profile_file as store

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

_T = TypeVar("_T")

SCHEMA = "specllama.profile.v8"

# Upper ends of the temperature bands; sampling noise changes what a draft's confidence is worth.
_BANDS = ((0.0, "greedy"), (0.5, "cool"), (0.9, "warm"), (1.2, "hot"))


def band(params: GenerateParams) -> str:
    """Return the key under which a request's calibration is kept."""
    temperature = params.sampling.temperature
    name = next((name for top, name in _BANDS if temperature <= top), "wild")
    return name if name == "greedy" else f"{params.verify} {name}"


def pair_key(info: EngineInfo) -> dict[str, Any]:
    """Name the pair that a profile belongs to, on this machine and with this build of llama.cpp.

    Sizes stand for the contents: hashing gigabytes would cost more than measuring again. Of two
    models, ``cache`` and ``layers`` name both. The context length is left out: nothing that is kept
    depends on it, so a server starts with the lessons of one chat.
    """
    target, draft = info.target, info.draft
    models = [target] if draft is None else [target, draft]
    return {
        "here": info.here,
        **_target_key(target),
        "layout": target.layout,
        "draft": "none" if draft is None else f"{draft_key(draft)}, {draft.layout})",
        "device": f"{info.device}, flash attention {'on' if info.flash_attn else 'off'}"
        + _padding(info.widths),
        "threads": info.threads,
        "layers": " ".join(str(model.gpu_layers) for model in models),
        "cache": " ".join(model.kv_types for model in models),
    }


def profile_path(key: Mapping[str, Any], folder: Path) -> Path:
    text = "\n".join(map(str, key.values()))
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _target_key(target: ModelInfo | GgufHeader) -> dict[str, str]:
    kind = target.quantization  # models are called as their files are
    name = re.sub(re.escape(kind), "", target.name, flags=re.IGNORECASE).rstrip("-._ ")
    return {"model": f"{name} {target.n_params}", "target": f"{kind} {target.file_bytes}"}


class Profile:
    """Costs, calibrations by band, the ledger and the advice of one pair.

    ``ledger`` is what all drafting of the pair together may still lose: every method, rule and
    temperature draws on it, and nothing but plain steps and gains fills it. ``path`` None keeps
    nothing.
    """

    def __init__(self, path: Path | None = None, key: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.key = key
        self.costs = Costs()
        self.ledger = Ledger()
        self._kept: Ledger | None = None  # while practising
        self.advice: dict[str, Any] | None = None
        self._bands: dict[str, Learned] = {}
        self.warm = False
        self.trouble = ""  # why a file that is there was not used or not written, for people
        self._barred = False  # it could not be written when it was last tried
        self._seen = self._data()  # what was last read or written
        self._stamp: store.Stamp = ()  # of the file at that time
        if path is not None:
            self.refresh()

    def copy(self) -> Profile:
        """Copy the knowledge into a profile that is not kept."""
        twin = Profile(key=self.key)
        if self.warm:
            twin._adopt(self._data())
            twin.warm = True
        return twin

    def kept(self, key: Mapping[str, Any]) -> Weighed:
        """Return the part of it that changes of its pair, of this key, are weighed by."""
        return Weighed(key, self.costs, self._bands)

    def learned(self, name: str) -> Learned:
        return self._bands.setdefault(name, Learned())

    @contextmanager
    def practice(self) -> Iterator[None]:
        """Ignore the losses and gains of the texts that the block writes to measure."""
        self._kept = Ledger()
        self._kept.become(self.ledger)
        try:
            yield
        finally:
            self.ledger.become(self._kept)
            self._kept = None

    def forgive(self) -> None:
        """Reset every balance, during ``practice``."""
        self.ledger.become(Ledger())

    def refresh(self) -> None:
        """Take over the lessons that other processes have saved since the file was last read."""
        path = self.path
        if path is None or (stamp := store.stamp(path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            theirs = self._read(path)
            if theirs is None:
                return
            self._adopt(store.merge(self._seen, self._data(), theirs))
        except (OSError, *store.DAMAGE) as error:
            why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            line = " ".join(why.split())[:120]
            self.trouble = (
                f"what was measured of this pair cannot be read ({path}: {line}); "
                "it is measured anew"
            )
        else:
            self._seen, self.warm = theirs, True

    def _read(self, path: Path) -> store.Data | None:
        """Read the file; return None if there is none of this version.

        Raises:
            OSError, one of ``store.DAMAGE``
        """
        data = store.read(path)
        if data is None:
            return None
        version = str(data["schema"])
        if version != SCHEMA:
            if version.startswith("specllama.profile."):
                return None
            raise ValueError("not a profile")
        if self.key is not None and data["pair"] != self.key:
            raise ValueError("it is of another pair")
        return data

    def _adopt(self, data: store.Data) -> None:
        """Replace the whole state with ``data``, or nothing.

        Raises:
            one of ``store.DAMAGE``
        """
        costs = _read(data["costs"], Costs)
        ledger = _read(data["ledger"], Ledger)
        bands = _read(data["bands"], dict[str, Learned])
        advice = data["advice"]
        (self._kept or self.ledger).become(ledger)
        # in place: conversations that go on hold these tables
        for name in ("target", "draft"):
            _become(getattr(self.costs, name), getattr(costs, name))
        known = {name: table for name, table in costs.own.items() if name in method_list.names()}
        _all_become(self.costs.own, known)
        for name, theirs in bands.items():
            band = self.learned(name)
            _all_become(band.sources, theirs.sources)
            _all_become(band.asked, theirs.asked)
            band.pace = theirs.pace
        self.advice = advice if isinstance(advice, dict) else None

    def _data(self) -> store.Data:
        data: store.Data = msgspec.to_builtins(
            {"costs": self.costs, "ledger": self._kept or self.ledger, "bands": self._bands},
            str_keys=True,
        )
        return {"schema": SCHEMA, "pair": self.key or {}, "advice": self.advice, **data}

    def save(self) -> bool:
        """Write the file anew, whole or not at all, with the lessons that others saved meanwhile.
        Return False if it cannot be written."""
        path = self.path
        if path is None or self.costs.target.level is None:
            return False

        data: store.Data = {}

        def change() -> store.Data:
            nonlocal data
            self.refresh()
            data = self._data()
            return data

        # taken before others may write: their file must never pass for this one
        stamp = store.update(path, change)
        if stamp:
            self._stamp, self._seen = stamp, data
        elif not self._barred:
            self.trouble = f"what was measured of this pair cannot be written to {path}"
        self._barred = not stamp
        return bool(stamp)


def _read(data: Any, kind: type[_T]) -> _T:
    """Convert the file's data to the kind of value that it stands for.

    Raises:
        msgspec.ValidationError: it is not that.
    """
    return msgspec.convert(data, kind, str_keys=True)


def _become(mine: Any, theirs: Any) -> None:
    """Give one object the values of another; an equal one stays as it is, with its knowledge of the
    text that is being written."""
    if msgspec.to_builtins(mine, str_keys=True) != msgspec.to_builtins(theirs, str_keys=True):
        vars(mine).update(vars(theirs))


def _all_become(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, one in theirs.items():
        _become(mine.setdefault(name, one), one)


def open_profile(info: EngineInfo, folder: Path | None = None) -> Profile:
    """Open the profile of a loaded pair, warm if one was kept."""
    from specllama.paths import profiles_dir

    key = pair_key(info)
    return Profile(profile_path(key, folder or profiles_dir()), key)


def profiles_of(target: GgufHeader) -> list[Path]:
    """List the files of a target's profiles, with every draft model and setting."""
    from specllama.paths import profiles_dir

    found = []
    for path in profiles_dir().glob("*.json"):
        with suppress(OSError, *store.DAMAGE):
            if _target_key(target).items() <= (store.read(path) or {})["pair"].items():
                found.append(path)
    return found


def remedies_of(
    here: str,
    target: ModelInfo | GgufHeader,
    draft: ModelInfo | GgufHeader | None,
    layout: str = "",
) -> tuple[Remedy, ...] | None:
    """Return the changes that would make a pair of files faster, by its newest profile; None if it
    was never measured.

    Args:
        here: see ``EngineInfo``. layout: of the target's weights, if it matters.
    """
    from specllama.paths import profiles_dir

    wanted = {"here": here, **_target_key(target), **({"layout": layout} if layout else {})}
    kept = kept_in(profiles_dir(), SCHEMA, here)
    key = "none" if draft is None else draft_key(draft)
    mine = [one for one in kept if one.known and wanted.items() <= one.key.items()]
    mine = [one for one in mine if one.key["draft"].startswith(key)]
    return ranked(mine[-1], kept) if mine else None


def _padding(widths: tuple[int, ...]) -> str:
    """Describe how passes are padded: that decides their cost."""
    filled = widths != tuple(range(1, len(widths) + 1))
    return f", passes of {' '.join(map(str, widths))}" if filled else ""


class Windows:
    """The draft windows of an engine: adaptive ones that learn into ``profile``, or fixed ones.

    Args:
        plan: of the target's passes.
    """

    def __init__(self, profile: Profile, info: EngineInfo, plan: PassPlan | None = None) -> None:
        self.info, self._plan = info, plan
        self.steps = PlainSteps()
        self.use(profile)

    def use(self, profile: Profile) -> None:
        """Learn into ``profile`` from now on."""
        self.profile = profile
        # kept profiles, as they were when first asked for
        self._others: list[Weighed] | None = None
        info = self.info
        if info.draft is not None and info.target.file_bytes:
            profile.costs.draft_share = min(
                max(1.2 * info.draft.file_bytes / info.target.file_bytes, 0.01), 2.0
            )

    def remedies(
        self, params: GenerateParams, rounds: Sequence[RoundDone] = ()
    ) -> tuple[Remedy, ...]:
        """Return the changes that would have written these rounds faster, see ``remedies``."""
        path = self.profile.path
        if self._others is None:
            self._others = [] if path is None else kept_in(path.parent, SCHEMA, self.info.here)
        mine = self.profile.kept(pair_key(self.info))
        return ranked(mine, self._others, band(params), rounds)

    def trouble(self) -> str:
        """Explain why a profile was not used, or not written; once, "" afterwards."""
        said, self.profile.trouble = self.profile.trouble, ""
        return said

    def __call__(self, params: GenerateParams) -> Window:
        """Return the window of one request."""
        info = self.info
        limit = params.draft_limit(info.exact_rows)
        if params.window == "fixed":
            return Window(limit, self.steps)
        profile, plan = self.profile, self._plan
        profile.refresh()
        if plan is not None:
            profile.costs.target.expect(plan.measured)
        return Policy(
            profile.learned(band(params)), profile.costs, profile.ledger, draft_max=limit,
            peek=rule_of(params.verify, greedy=params.sampling.temperature == 0.0).peek,
            tokens=params.max_tokens, steps=self.steps, on_finish=profile.save,
        )  # fmt: skip

    def baseline(self, depth: int) -> Baseline | None:
        """Return the time of a plain step after N tokens, None before one was timed."""
        return self.steps.typical(depth, self.profile.costs.target.deep_ms)
