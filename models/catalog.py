"""The curated pairs of ``catalog.toml``: each target with its draft and the memory it needs.

Every entry gives its source and whether it was checked on the hub. Light to import.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from specllama.errors import UsageError

FIRST = "smollm2-135m"  # the real model that the first minute offers


@dataclass(frozen=True, slots=True)
class HubRef:
    """A model on the hub: a repository and the choice of its file."""

    repo: str
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        if self.file:
            return f"{self.repo}/{self.file}"
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the Python index that holds a model's file, for where the hub is out of reach.

    Attributes:
        name: as pip takes it, with its version.
        file: the path in the wheel; ``bytes`` and ``sha256`` are the file's.
    """

    name: str
    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One model of a pair on the hub; ``bytes`` is an estimate of the file size at ``quant``,
    ``active`` the parameters that a token uses: fewer than all of a model with experts."""

    hub: HubRef
    params: float
    active: float
    bytes: int

    @property
    def repo(self) -> str:
        return self.hub.repo

    @property
    def ref(self) -> str:
        return str(self.hub)

    def to_dict(self) -> dict[str, Any]:
        sizes = {"params": self.params, "active": self.active, "bytes": self.bytes}
        return {"ref": self.ref, **sizes}


@dataclass(frozen=True, slots=True)
class CatalogPair:
    """A target and its drafter.

    Attributes:
        method: how to draft, a choice of ``--proposer``.
        head: the file of a drafting head on the hub, USER/REPO/FILE; "" for other methods.
        cannot: drafters that exist for the target and do not run here, and why.
        memory_gb: machine memory at which the pair is comfortable, in GB.
        package: what holds the target on the Python index.
        checked: whether these repositories were seen on the hub; ``date`` is when the entry was
            last reviewed, and ``source`` what it rests on.
    """

    name: str
    family: str
    target: CatalogModel
    draft: CatalogModel | None
    method: str
    licence: str
    why: str
    memory_gb: float
    source: str
    checked: bool
    date: str
    aliases: tuple[str, ...] = ()
    head: str = ""
    cannot: str = ""
    package: Package | None = None

    @property
    def models(self) -> tuple[CatalogModel, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def bytes(self) -> int:
        return sum(model.bytes for model in self.models)

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        del fields["aliases"]
        models = {role: fields[role] and fields[role].to_dict() for role in ("target", "draft")}
        package = self.package and self.package.name
        return {**fields, **models, "bytes": self.bytes, "package": package}


# bytes per parameter of whole files, embeddings and scales included
BYTES_PER_PARAM = {
    "Q4_0": 0.58, "Q4_1": 0.64, "IQ4_NL": 0.58, "Q4_K_M": 0.61, "Q4_K_S": 0.58, "Q5_K_M": 0.72,
    "Q6_K": 0.83, "Q8_0": 1.07, "F16": 2.01, "BF16": 2.01, "MXFP4": 0.58,
    "UD-Q4_K_M": 0.61, "UD-Q4_K_XL": 0.61,
}  # fmt: skip


def _model(table: dict[str, Any]) -> CatalogModel:
    params, quant = float(table["params"]), str(table["quant"])
    size = int(float(table.get("gb", params * BYTES_PER_PARAM[quant])) * 1e9)
    active = float(table.get("active", params))
    return CatalogModel(HubRef(str(table["repo"]), quant), params * 1e9, active * 1e9, size)


def _pair(name: str, table: dict[str, Any]) -> CatalogPair:
    draft, package = table.pop("draft", None), table.pop("package", None)
    read = {
        "target": _model(table.pop("target")),
        "draft": _model(draft) if draft else None,
        "package": Package(**package) if package else None,
        "method": table.pop("method", "draft" if draft else "ngram"),
        "memory_gb": float(table.pop("memory_gb")),
        "aliases": tuple(table.pop("aliases", ())),
    }
    return CatalogPair(name=name, **read, **table)


def parse(text: str) -> dict[str, CatalogPair]:
    """Read a catalogue.

    Raises:
        UsageError: the text is not TOML or an entry lacks a field.
    """
    import tomllib

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the catalog is not valid TOML: {error}") from None
    defaults = data.get("defaults", {})
    pairs: dict[str, CatalogPair] = {}
    for name, table in data.get("pairs", {}).items():
        try:
            pairs[name] = _pair(name, {**defaults, **table})
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"catalog entry {name!r}: {type(error).__name__} {error}") from None
    return pairs


@lru_cache(maxsize=1)
def load() -> dict[str, CatalogPair]:
    """Read the bundled catalog, by name."""
    return parse((files("specllama.models") / "catalog.toml").read_text("utf-8"))


def find(name: str) -> CatalogPair | None:
    """Find an entry by name or alias, ignoring case."""
    wanted = name.casefold()
    return next((p for p in load().values() if wanted in (p.name, *p.aliases)), None)


def find_target(repo: str) -> CatalogPair | None:
    """Find the entry whose target lives in this repository, ignoring case."""
    wanted = repo.casefold()
    return next((p for p in load().values() if p.target.repo.casefold() == wanted), None)
