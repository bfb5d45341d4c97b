"""What was measured about a pair on this machine, kept between runs so that the next one is warm.

One JSON file per (target, draft, device, threads) under ``profiles_dir()``: the cost tables, what
the draft window learnt per rule and temperature band, and the latest advice of ``specllama tune``.
A file that is missing, damaged or of another version is ignored; a folder that cannot be written
to only means that nothing is kept.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from specllama.interface import EngineInfo, ModelInfo
from specllama.params import GenerateParams
from specllama.spec.adaptive import AdaptiveWindow
from specllama.spec.cost import CostTable
from specllama.spec.learned import CREDIT_FIRST, Balance, Costs, Learned
from specllama.spec.window import FixedWindow, Window

SCHEMA = "specllama.profile.v3"

# Upper ends of the temperature bands; sampling noise changes what a draft's confidence is worth.
_BANDS = ((0.0, "greedy"), (0.5, "cool"), (0.9, "warm"), (1.2, "hot"))


def band(params: GenerateParams) -> str:
    """The key under which a request's calibration is kept."""
    temperature = params.sampling.temperature
    name = next((name for top, name in _BANDS if temperature <= top), "wild")
    return name if name == "greedy" else f"{params.verify} {name}"


@dataclass(frozen=True, slots=True)
class PairKey:
    """What a profile belongs to. Sizes stand for the contents: hashing gigabytes would cost more
    than measuring again."""

    target: str
    draft: str
    device: str
    threads: int

    @staticmethod
    def of(info: EngineInfo) -> PairKey:
        return PairKey(
            target=_model_key(info.target),
            draft="none" if info.draft is None else _model_key(info.draft),
            device=f"{info.device}, flash attention {'on' if info.flash_attn else 'off'}",
            threads=info.threads,
        )

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def path(self, folder: Path) -> Path:
        text = "\n".join(str(v) for v in self.to_dict().values())
        return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _model_key(model: ModelInfo) -> str:
    return f"{model.name} {model.quantization} {model.n_params} {model.file_bytes}"


class Profile:
    """Costs, calibrations by band, the balance and the advice of one pair.

    ``balance`` is what all drafting of the pair together may still lose: every method, rule and
    temperature draws on it, and nothing but plain steps and gains fills it. ``path`` None keeps
    nothing.
    """

    def __init__(self, path: Path | None = None, key: PairKey | None = None) -> None:
        self.path = path
        self.key = key
        self.costs = Costs()
        self.balance = Balance()
        self._kept: Balance | None = None  # while practising
        self.advice: dict[str, Any] | None = None
        self._bands: dict[str, Learned] = {}
        self.warm = False
        if path is not None:
            self._load(path)

    def learned(self, name: str) -> Learned:
        found = self._bands.get(name)
        if found is None:
            found = self._bands[name] = Learned(self.costs, self.balance)
        return found

    @contextmanager
    def practice(self) -> Iterator[None]:
        """Texts that are written to measure: neither what they lose nor what they gain counts."""
        kept = self._kept = replace(self.balance)
        try:
            yield
        finally:
            self.forgive()
            self.balance.credit, self.balance.reserve = kept.credit, kept.reserve
            self.balance.aside, self._kept = kept.aside, None

    def forgive(self) -> None:
        """While practising, let every balance start anew."""
        mine = [a.own for learned in self._bands.values() for a in learned.accounts.values()]
        for balance in (self.balance, *mine):
            balance.credit = max(balance.credit, CREDIT_FIRST)

    def _load(self, path: Path) -> None:
        try:
            data = msgspec.json.decode(path.read_bytes())
            if data["schema"] != SCHEMA or (self.key and data["pair"] != self.key.to_dict()):
                return
            costs, bands = Costs(), {}
            costs.restore(data["costs"])
            balance = Balance.from_list(data["balance"])
            for name, saved in data["bands"].items():
                learned = Learned(costs, balance)
                learned.restore(saved)
                bands[str(name)] = learned
            advice = data.get("advice")
        except (OSError, msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError):
            return
        self.costs, self.balance, self._bands, self.warm = costs, balance, bands, True
        self.advice = advice if isinstance(advice, dict) else None

    def save(self) -> bool:
        """Write the file anew, whole or not at all. False where it cannot be written."""
        if self.path is None or self.costs.target.one is None:
            return False
        data = {
            "schema": SCHEMA,
            "pair": self.key.to_dict() if self.key else {},
            "costs": self.costs.to_dict(),
            "balance": (self._kept or self.balance).to_list(),
            "bands": {name: learned.to_dict() for name, learned in self._bands.items()},
            "advice": self.advice,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".profile-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(msgspec.json.encode(data))
                os.replace(name, self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError:
            return False
        return True


def open_profile(info: EngineInfo, folder: Path | None = None) -> Profile:
    """The profile of a loaded pair, warm if one was kept."""
    from specllama.paths import profiles_dir

    key = PairKey.of(info)
    return Profile(key.path(folder or profiles_dir()), key)


def measured_passes(info: EngineInfo, rows: int, folder: Path | None = None) -> list[float] | None:
    """Costs of the target's passes of 1 to ``rows`` rows from any profile of it on this machine.

    Index 0 is unused. None where no profile has timed most of these widths.
    """
    from specllama.paths import profiles_dir

    mine = PairKey.of(info).to_dict() | {"draft": None}
    best: tuple[int, list[float]] = (0, [])
    for path in sorted((folder or profiles_dir()).glob("*.json")):
        try:
            data = msgspec.json.decode(path.read_bytes())
            if data["schema"] != SCHEMA or data["pair"] | {"draft": None} != mine:
                continue
            table = CostTable.from_dict(data["costs"]["target"])
        except (OSError, msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError):
            continue
        timed = sum(table.seen(n) > 0 for n in range(2, rows + 1))
        if table.one and timed > max(rows // 2, best[0]):
            best = timed, table.upto(rows)
    return best[1] or None


class Windows:
    """The draft windows of an engine: adaptive ones that learn into ``profile``, or fixed ones."""

    def __init__(self, profile: Profile, info: EngineInfo) -> None:
        self.profile = profile
        self._info = info
        if info.draft is not None and info.target.file_bytes:
            profile.costs.draft_share = min(
                max(1.2 * info.draft.file_bytes / info.target.file_bytes, 0.01), 2.0
            )

    def __call__(self, params: GenerateParams) -> Window:
        """The window of one request."""
        info = self._info
        limit = params.reach(info.exact_rows)
        if params.window == "fixed":
            return FixedWindow(limit, params.draft_min)
        profile = self.profile
        if params.exact:  # a pass of more rows would be cut into several
            limit = min(limit, info.exact_rows - 1)
        learned = profile.learned(band(params))
        learned.paying = (
            "draft" if info.draft and params.proposer in ("auto", "mixed", "draft") else ""
        )
        return AdaptiveWindow(
            learned,
            draft_max=limit,
            draft_min=params.draft_min,
            peek=params.verify == "match" or params.sampling.temperature == 0.0,
            steps=profile.costs.steps(params.proposer),
            tokens=params.max_tokens,
            on_finish=profile.save,
        )
