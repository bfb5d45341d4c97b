"""The Hugging Face hub: search, listings, metadata. The only importer of huggingface_hub.

Bytes are not fetched here (``download.py`` does that): the hub says what a repository holds, how
large each file is and which digest it must have. All of it is checked before it is used: a name
becomes a path only if it cannot leave its folder, and a digest must look like one.

``HF_ENDPOINT`` names another hub. A token from the environment goes to the configured endpoint; one
that was stored by ``hf auth login`` belongs to huggingface.co and goes nowhere else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from specllama.errors import ModelUnavailable, SpecllamaError, UsageError
from specllama.models import download, library
from specllama.models.catalog import HubRef
from specllama.models.companions import SIDECARS, kind_of_name
from specllama.models.download import (
    LONGEST_WAIT_S,
    MAX_ATTEMPTS,
    Digest,
    rate_limited,
    refused,
    require_safe_url,
    retry_after,
)
from specllama.models.gguf_format import is_later_part, part_names
from specllama.models.refs import DEFAULT_QUANTS

if TYPE_CHECKING:
    import httpx2

PUBLIC = "https://huggingface.co"
LISTING_TIMEOUT_S = 20.0
REACH_TIMEOUT_S = 4.0
MAX_FILES = 10_000
Answer = TypeVar("Answer")
_HEX = {40: "git", 64: "sha256"}
_REVISION = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,199}$")
_NAME = re.compile(r"^[^\\:*?\"<>|\x00-\x1f\x7f]{1,200}$")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One GGUF in a repository, with the size and digest that the hub gives."""

    name: str
    size: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model to pull as one: a file, or all parts of a split one."""

    files: tuple[RemoteFile, ...]
    complete: bool

    @property
    def name(self) -> str:
        return self.files[0].name

    @property
    def quant(self) -> str | None:
        return library.quant_of(self.name)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def sidecar(self) -> str:
        """The kind of sidecar by its name (``companions.SIDECARS``), "" for a model."""
        return kind_of_name(self.name)


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit.

    Attributes:
        refused: listed file names that must not become paths here.
    """

    repo: str
    commit: str
    models: tuple[RemoteModel, ...]
    refused: tuple[str, ...]
    gated: bool
    downloads: int | None
    licence: str | None


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One repository in a search result; ``params`` None where the hub does not know."""

    repo: str
    downloads: int
    params: int | None
    quants: tuple[str, ...]
    gated: bool


def offline() -> bool:
    """True if the environment forbids the network."""
    return any(
        os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
        for name in ("SPECLLAMA_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def safe_name(name: str) -> bool:
    """True if a listed file name may become a path below our folder."""
    if not _NAME.match(name) or name.startswith(("/", "-", "~")):
        return False
    return all(
        part not in ("", ".", "..") and not part.startswith("-") and part == part.strip()
        for part in name.split("/")
    )


class HubClient:
    """A connection to one endpoint.

    Args:
        waiting: called with a line with the reason and the length of the next wait.

    Raises:
        ModelUnavailable: offline, or the endpoint is not encrypted.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        insecure: bool = False,
        waiting: Callable[[str], None] | None = None,
    ) -> None:
        if offline():
            raise ModelUnavailable(
                "the network is switched off (HF_HUB_OFFLINE or SPECLLAMA_OFFLINE)",
                "unset it, or use a model that specllama hub ls shows",
            )
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or PUBLIC).rstrip("/")
        self.insecure = insecure
        self._waiting = waiting
        require_safe_url(self.endpoint, allow_http=insecure)
        # read by huggingface_hub when it is imported: no telemetry, no bars of its own
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from huggingface_hub.hf_api import HfApi

        self.token = self._token()
        self._api = HfApi(endpoint=self.endpoint, token=self.token or False)

    def _token(self) -> str | None:
        explicit = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
        if explicit:
            return explicit.strip()
        if self.endpoint != PUBLIC or os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
            return None
        from huggingface_hub.utils import get_token

        stored: str | None = get_token()
        return stored

    @property
    def headers(self) -> dict[str, str]:
        headers = {"user-agent": "specllama"}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        return headers

    @property
    def session(self) -> httpx2.Client:
        """The HTTP client that huggingface_hub set up (proxies, trust store)."""
        from huggingface_hub.utils import get_session

        client: httpx2.Client = get_session()
        return client

    def url(self, repo: str, file: str, commit: str) -> str:
        from huggingface_hub import hf_hub_url

        url: str = hf_hub_url(repo, file, revision=commit, endpoint=self.endpoint)
        return url

    def reach(self) -> None:
        """Check that the hub is reachable: an answer of any kind will do.

        Raises:
            ModelUnavailable: no answer within some seconds.
        """
        try:
            self.session.head(self.endpoint, timeout=REACH_TIMEOUT_S, follow_redirects=False)
        except Exception as error:
            raise _explain(error, "the hub") from None

    def search(self, text: str, *, limit: int = 20) -> list[SearchHit]:
        """Search GGUF repositories that match, most downloaded first.

        Raises:
            ModelUnavailable: the hub cannot be reached or refuses.
        """
        self.reach()  # where there is no answer, the library would try again for half a minute
        found = self._ask(
            lambda: list(
                self._api.list_models(
                    search=text,
                    filter="gguf",
                    sort="downloads",
                    limit=limit,
                    expand=["downloads", "gated", "gguf", "siblings"],
                )
            ),
            "the search",
        )
        return [_hit(info) for info in found]

    def _ask(self, call: Callable[[], Answer], what: str) -> Answer:
        """Send one request to the hub; wait if the hub asks for a short pause.

        Raises:
            ModelUnavailable, UsageError: it does not answer, or refuses.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return call()
            except Exception as error:
                wait = _short_wait(error)
                if wait is None or attempt == MAX_ATTEMPTS:
                    raise _explain(error, what) from None
            if self._waiting is not None:
                self._waiting(f"the hub is limiting requests; asking again in {wait:.0f} s")
            download.sleep(wait)
        raise AssertionError("unreachable")

    def listing(self, repo: str, revision: str = "main") -> Listing:
        """List the files of a repository.

        Raises:
            UsageError: a revision that may not become part of an address.
            ModelUnavailable: missing, gated, private, rate-limited or unreachable.
        """
        if not _REVISION.match(revision) or ".." in revision:
            raise UsageError(f"not a revision: {revision!r}", "use a branch, a tag or a commit")
        info = self._ask(
            lambda: self._api.model_info(
                repo, revision=revision, files_metadata=True, timeout=LISTING_TIMEOUT_S
            ),
            repo,
        )
        commit = str(info.sha or "")
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise ModelUnavailable(
                f"{self.endpoint} names no valid commit for {repo}", "check HF_ENDPOINT"
            )
        files, bad = _files(info.siblings or [])
        tags = [tag for tag in info.tags or () if isinstance(tag, str)]
        return Listing(
            repo=repo, commit=commit, models=_group(files), refused=tuple(bad),
            gated=bool(getattr(info, "gated", False)),
            downloads=getattr(info, "downloads", None),
            licence=next((tag[8:] for tag in tags if tag.startswith("license:")), None),
        )  # fmt: skip


def _files(siblings: list[Any]) -> tuple[list[RemoteFile], list[str]]:
    """Return the GGUF files of a listing, and the names of those that are refused."""
    files: list[RemoteFile] = []
    bad: list[str] = []
    for sibling in siblings[:MAX_FILES]:
        name = sibling.rfilename
        if not isinstance(name, str) or not name.lower().rstrip().endswith(".gguf"):
            continue
        lfs = getattr(sibling, "lfs", None)
        digest: Any = (lfs.sha256 if lfs is not None else None) or getattr(sibling, "blob_id", None)
        size = (lfs.size if lfs is not None else None) or getattr(sibling, "size", None)
        kind = ""
        if isinstance(digest, str) and re.fullmatch(r"[0-9a-f]+", digest):
            kind = _HEX.get(len(digest), "")
        if kind and isinstance(size, int) and 0 < size < 1 << 50 and safe_name(name):
            files.append(RemoteFile(name, size, Digest(kind, digest)))
        else:
            bad.append(name)
    return files, bad


def _group(files: list[RemoteFile]) -> tuple[RemoteModel, ...]:
    """Group the parts of each split model."""
    by_name = {file.name: file for file in files}
    models: list[RemoteModel] = []
    for file in sorted(files, key=lambda f: f.name):
        if is_later_part(file.name):
            continue
        names = part_names(file.name)
        present = tuple(by_name[name] for name in names if name in by_name)
        models.append(RemoteModel(present, complete=len(present) == len(names)))
    return tuple(sorted(models, key=lambda m: (m.sidecar, m.bytes, m.name)))


def select(listing: Listing, ref: HubRef) -> RemoteModel:
    """Choose the model of a repository that a reference means; a 4-bit one when no quant is named.

    Raises:
        ModelUnavailable: there is none; the message lists those that are there.
        UsageError: several fit.
    """
    if ref.file is not None:
        for model in listing.models:
            if ref.file in (file.name for file in model.files):
                return _whole(model, ref)
        raise ModelUnavailable(
            f"{ref.repo} has no file {ref.file}", f"see its files: specllama hub info {ref.repo}"
        )
    candidates = [model for model in listing.models if not model.sidecar]
    if not candidates and listing.models:
        other = listing.models[0]
        raise ModelUnavailable(
            f"{ref.repo} holds no model, but {SIDECARS[other.sidecar]}: {other.name}",
            f"get that with: specllama hub pull {ref.repo}/{other.name}",
        )
    if not candidates:
        hint = "find a repository with GGUF files: specllama hub search"
        raise ModelUnavailable(f"{ref.repo} holds no GGUF model", hint)
    wanted = [ref.quant.upper()] if ref.quant else list(DEFAULT_QUANTS)
    for quant in wanted:
        exact = [model for model in candidates if model.quant == quant]
        fitting = exact or [m for m in candidates if library.same_quant(m.quant, quant)]
        if len(fitting) > 1:
            names = ", ".join(PurePosixPath(model.name).name for model in fitting[:3])
            raise UsageError(
                f"{ref.repo} has {len(fitting)} models at {quant}: {names}",
                f"name one: specllama hub pull {ref.repo}/{fitting[0].name}",
            )
        if fitting:
            return _whole(fitting[0], ref)
    if ref.quant is None and len(candidates) == 1:
        return _whole(candidates[0], ref)
    there = ", ".join(dict.fromkeys(model.quant or model.name for model in candidates))
    raise ModelUnavailable(
        f"{ref.repo} has no {ref.quant or '4-bit or 8-bit file'} (it has: {there})",
        f"choose one: specllama hub pull {ref.repo}:{candidates[0].quant or candidates[0].name}",
    )


def _whole(model: RemoteModel, ref: HubRef) -> RemoteModel:
    if not model.complete:
        raise ModelUnavailable(f"{ref.repo} lacks parts of {model.name}", "choose another file")
    return model


def _hit(info: Any) -> SearchHit:
    gguf = getattr(info, "gguf", None) or {}
    params = gguf.get("total") if isinstance(gguf, dict) else None
    names = [getattr(one, "rfilename", "") for one in getattr(info, "siblings", None) or []]
    models = [name for name in names if name.lower().endswith(".gguf") and not kind_of_name(name)]
    quants = dict.fromkeys(quant for name in models if (quant := library.quant_of(name)))
    return SearchHit(
        repo=str(info.id),
        downloads=int(getattr(info, "downloads", None) or 0),
        params=params if isinstance(params, int) else None,
        quants=tuple(quants),
        gated=bool(getattr(info, "gated", False)),
    )


def _short_wait(error: Exception) -> float | None:
    """Return the seconds after which a hub that limits requests may be asked again, if that is
    soon."""
    response = getattr(error, "response", None)
    if response is None or response.status_code != 429:
        return None
    wait = retry_after(response.headers.get("retry-after"))
    return wait if wait is not None and wait <= LONGEST_WAIT_S else None


def _explain(error: Exception, what: str) -> SpecllamaError:
    """Convert an exception of huggingface_hub or its HTTP client to an error a person can act
    on."""
    if isinstance(error, SpecllamaError):
        return error
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return ModelUnavailable("the network is switched off (HF_HUB_OFFLINE)", "unset it")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelUnavailable(f"{what} has no such revision", "use a branch, a tag or a commit")
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"not a repository name: {what!r}", "write user/repo")
    response = getattr(error, "response", None)
    if response is not None:
        code = response.headers.get("x-error-code")
        if response.status_code == 429:
            return rate_limited(retry_after(response.headers.get("retry-after")))
        if isinstance(error, errors.GatedRepoError):
            code = "GatedRepo"
        return refused(response.status_code, code, what)
    if isinstance(error, (ValueError, KeyError, TypeError)):
        return ModelUnavailable(
            f"the answer about {what} is not that of a hub ({type(error).__name__})",
            "check HF_ENDPOINT",
        )
    host = urlsplit(os.environ.get("HF_ENDPOINT") or PUBLIC).netloc
    return ModelUnavailable(
        f"{host} cannot be reached ({type(error).__name__})",
        "check the connection; models on this machine work offline: specllama hub ls",
    )
