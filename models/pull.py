"""Pulls from references to files in our own folder: plan, check space, transfer, publish.

    plan = make_plan(refs, client)      # listings only; nothing is written
    check_space(plan)
    for item in plan: fetch(item, client, progress)

A model is at ``<data>/models/user/repo/file.gguf``; a lock per repository keeps two pulls from
writing the same part.
"""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from specllama import paths
from specllama.errors import ModelUnavailable, SpecllamaError, UsageError
from specllama.models import catalog, contents, download, library, package_index, receipts, refs
from specllama.models.catalog import HubRef, Package
from specllama.models.download import Digest, Progress, disk_error
from specllama.models.gguf_format import part_names
from specllama.text import did_you_mean, size

if TYPE_CHECKING:
    from specllama.models.hub_client import HubClient, Listing, RemoteFile, RemoteModel

SPACE_MARGIN = 256 << 20
LOCK_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class PullItem:
    """One model to pull.

    Attributes:
        ref: how to name it afterwards.
        role: "target", "draft" or "model".
        missing: the files that are not complete on disk yet.
        elsewhere: the same model in another tool's store, used from there.
        origin: where it comes from, and why from there where that is not the hub.
        package: what holds it, where it does not come from the hub.
    """

    ref: str
    role: str
    listing: Listing
    model: RemoteModel
    folder: Path
    missing: tuple[RemoteFile, ...]
    elsewhere: Path | None = None
    origin: str = ""
    package: Package | None = None

    @property
    def path(self) -> Path:
        return self.elsewhere or self.folder / PurePosixPath(self.model.name)

    @property
    def bytes_missing(self) -> int:
        return sum(file.size - self.bytes_here(file) for file in self.missing)

    def bytes_here(self, file: RemoteFile) -> int:
        """Return how much of a file, or of the wheel that holds it, an interrupted pull left."""
        path, version = self.folder / file.name, file.digest.hex[:16]
        if self.package is not None:
            path, version = download.wheel_of(path), "*"
        return min(download.arrived(path, version), file.size)


def repo_folder(repo: str) -> Path:
    """Return the folder of a repository's files.

    Raises:
        UsageError: a name that would leave the folder.
    """
    user, _, name = repo.partition("/")
    if not user or not name or "/" in name or {user, name} & {".", ".."}:
        raise UsageError(f"not a repository name: {repo!r}")
    return paths.models_dir() / user / name


def expand(ref: str, *, with_draft: bool = True) -> list[tuple[str, HubRef]]:
    """Return (role, hub reference) of everything a reference stands for: a catalog name is a pair.

    Raises:
        UsageError: it is neither a catalogue name nor a hub reference.
    """
    if ref in refs.TINY:
        raise UsageError(f"{ref} ships with specllama: nothing to pull", "specllama chat -m tiny")
    pair = catalog.find(ref)
    if pair is not None:
        models = pair.models if with_draft else (pair.target,)
        return [(role, one.hub) for role, one in zip(("target", "draft"), models, strict=False)]
    hub = refs.parse_hub(ref)
    if hub is None:
        hint = did_you_mean(ref, catalog.load(), "see: specllama hub pairs")
        raise UsageError(f"{ref!r} is neither user/repo[:quant] nor a catalog name", hint)
    return [("model", hub)]


def local(hub: HubRef) -> library.LocalModel:
    """Find a complete copy of a reference's model that is already on this machine.

    Raises:
        ModelUnavailable: there is none.
    """
    found = [m for m in library.scan() if refs.matches(m, hub) and m.complete]
    if not found:
        raise ModelUnavailable(
            f"{hub} is not on this machine, and the network is switched off",
            "pull it once while online; specllama hub ls shows what is here",
        )
    return refs.preferred(found)


def is_here(hub: HubRef) -> bool:
    """True if a reference's model was pulled, and no byte of it has changed since."""
    try:
        model = local(hub)
        parts = [model.path.with_name(name) for name in part_names(model.path.name)]
        told = [(part, receipts.read_receipt(part)) for part in parts]
        return all(one and _present(part, _listed(one)) for part, one in told)
    except SpecllamaError:
        return False


def _listed(one: receipts.Receipt) -> RemoteFile:
    from specllama.models.hub_client import RemoteFile

    return RemoteFile(one.file, one.size, Digest(one.digest_kind, one.digest))


def packaged(hub: HubRef) -> Package | None:
    """Return the package that holds what a reference means; None for most."""
    pair = catalog.find_target(hub.repo)
    return pair.package if pair is not None and pair.target.hub == hub else None


def make_item(client: HubClient, role: str, hub: HubRef, revision: str = "main") -> PullItem:
    """Ask the hub for the files of a reference and those missing here. A model of the catalog that
    the hub does not give may be in a package.

    Raises:
        ModelUnavailable: it is not on the hub, or the hub does not answer.
        UsageError: ambiguous.
    """
    from specllama.models.hub_client import select

    pair, package = catalog.find_target(hub.repo), packaged(hub)
    origin = urlsplit(client.endpoint).netloc
    try:
        if package is not None:
            client.reach()  # a listing alone would be tried again for half a minute
        listing = client.listing(hub.repo, revision)
        model, package = select(listing, hub), None
    except ModelUnavailable as error:
        if pair is None or package is None:
            raise
        listing = _listing(pair, package)
        model = listing.models[0]
        origin = f"the Python index ({package.name}), as {error.message}"
    folder = repo_folder(hub.repo)
    missing = tuple(file for file in model.files if not _present(folder / file.name, file))
    named = f"{hub.repo}/{model.name}"
    ref = library.hub_ref(hub.repo, model.name) if hub.file is None else named
    elsewhere = _elsewhere(hub.repo, model) if missing else None
    if elsewhere is not None:
        missing = ()
    return PullItem(ref, role, listing, model, folder, missing, elsewhere, origin, package)


def _listing(pair: catalog.CatalogPair, package: Package) -> Listing:
    """Return the repository of a target as far as its package holds it."""
    from specllama.models.hub_client import Listing, RemoteFile, RemoteModel

    name, digest = PurePosixPath(package.file).name, Digest("sha256", package.sha256)
    model = RemoteModel((RemoteFile(name, package.bytes, digest),), complete=True)
    return Listing(pair.target.repo, "", (model,), (), False, None, pair.licence)


def _elsewhere(repo: str, model: RemoteModel) -> Path | None:
    """Find the same bytes in a store that names files by their digest (the Hugging Face cache)."""
    first = PurePosixPath(model.name).name
    for other in library.scan(include_bundled=False):
        if other.owned or other.repo != repo or other.path.name != first or not other.complete:
            continue
        files = [other.path.with_name(PurePosixPath(file.name).name) for file in model.files]
        if all(map(_present, files, model.files)):
            return other.path
    return None


def _present(path: Path, file: RemoteFile) -> bool:
    """True if exactly this file is here: of the same size, and known to be of the same digest. One
    of ours that was written to since it was hashed is hashed again."""
    stamp = contents.stamp_of(path)
    if stamp is None or stamp[1] != file.size or receipts.expected_digest(path) != file.digest:
        return False
    ours = file.digest.kind == "sha256" and receipts.read_receipt(path) is not None
    return not ours or contents.read([(path, stamp)]) == file.digest.hex


def check_space(items: list[PullItem]) -> None:
    """Refuse before the first byte if the disk cannot hold everything.

    Raises:
        SpecllamaError: not enough free space.
    """
    need = sum(item.bytes_missing for item in items)
    root = paths.models_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise disk_error(error, root / "model") from None
    if need and need + SPACE_MARGIN > free:
        raise SpecllamaError(
            f"{size(need)} are needed, only {size(free)} are free in {root}",
            "free some space, choose a smaller quant, or set SPECLLAMA_HOME to another disk",
        )


def unfinished() -> dict[str, int]:
    """List the parts of interrupted pulls: references of files, and how many bytes have arrived."""
    root, found = paths.models_dir(), dict[str, int]()
    for part in sorted(root.glob("*/*/**/*.part")):
        # name.gguf.DIGEST.part, or name.gguf.whl.DIGEST.part
        name = part.relative_to(root).as_posix().rsplit(".", 2)[0].removesuffix(".whl")
        if name.lower().endswith(".gguf"):
            found[name] = found.get(name, 0) + part.stat().st_size
    return found


def _locked(folder: Path) -> AbstractContextManager[object]:
    """Lock a folder until the end of a ``with``.

    Raises:
        SpecllamaError: another process has it, or the disk refuses.
    """
    from filelock import FileLock, Timeout

    lock_folder = paths.models_dir() / ".locks"
    try:
        lock_folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_folder / f"{folder.parent.name}--{folder.name}.lock")
        return lock.acquire(timeout=LOCK_WAIT_S)
    except Timeout:
        raise SpecllamaError(
            f"another specllama is pulling {folder.parent.name}/{folder.name}",
            "wait for it, or stop it; the download resumes where it stopped",
        ) from None
    except OSError as error:
        raise disk_error(error, lock_folder / "lock") from None


def fetch(item: PullItem, client: HubClient, progress: Progress, *, name: str) -> None:
    """Download one file of an item to its place; write its receipt last.

    Raises:
        ModelUnavailable: the transfer failed, or the content is wrong.
        SpecllamaError: the disk is full, or another pull is at work.
    """
    file = next(f for f in item.missing if f.name == name)
    destination = item.folder / PurePosixPath(file.name)
    if not destination.parent.resolve().is_relative_to(paths.models_dir().resolve()):
        raise UsageError(f"{file.name} would leave {paths.models_dir()}")
    with _locked(item.folder):
        if not _present(destination, file):
            if item.package is not None:
                package_index.fetch(item.package, destination, progress)
            else:
                download.download(
                    client.session,
                    client.url(item.listing.repo, file.name, item.listing.commit), destination,
                    size=file.size, digest=file.digest, headers=client.headers,
                    progress=progress, allow_http=client.insecure,
                )  # fmt: skip
            origin = item.listing.repo, file.name, item.listing.commit, file.size
            kind, digest = file.digest.kind, file.digest.hex
            if kind == "sha256":  # it was hashed as it arrived
                contents.keep(destination, contents.stamp_of(destination), digest)
            receipt = receipts.Receipt(*origin, kind, digest, time.time())
            receipts.write_receipt(destination, receipt)
            for part in download.parts_of(destination):  # of another version, or from elsewhere
                part.unlink(missing_ok=True)
