"""Models on this machine, in any tool's store; file names and sizes only, no headers.

Models of other tools are found in place and never changed: the Hugging Face cache, LM Studio,
Ollama (blobs named by their manifests), llama.cpp's cache, and the folders of the setting
``model-dirs``. A link that leaves its own store is ignored. Files that were opened by their path
are remembered.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from specllama import paths
from specllama.files import DAMAGE, read_json
from specllama.models.gguf_format import no_file
from specllama.models.sidecars import kind_of_name
from specllama.settings.config import load_settings

Source = Literal["bundled", "specllama", "huggingface", "lmstudio", "ollama", "llama.cpp", "folder"]

MAX_FILES = 20_000
MAX_OPENED = 50  # pairs that are remembered
LOOPS = (OSError, RuntimeError)  # a link that leads to itself; which one depends on the version
MAX_DEPTH = 6
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|FP16|MXFP4(?:_MOE)?|NVFP4))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_DIGEST = re.compile(r"^sha256[:-]([0-9a-f]{64})$")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model on disk: its first file, all its files, and the name to use it by.

    Attributes:
        ref: what to type: a catalogue name, "user/repo:QUANT", an Ollama "name:tag", or a path.
        bytes: of all parts that are here; ``complete`` is False if one is missing.
        owned: whether it is in specllama's own folder, so that ``hub rm`` may delete it.
    """

    path: Path
    source: Source
    ref: str
    repo: str | None
    quant: str | None
    bytes: int
    modified: float
    used: float
    complete: bool = True

    @property
    def owned(self) -> bool:
        return self.source == "specllama"


def quant_of(file_name: str) -> str | None:
    """Return the quantization label in a file name ("Q4_K_M"), the last one if there are
    several."""
    found = _QUANT.findall(Path(file_name).name.removesuffix(".gguf"))
    return found[-1].upper().replace("FP16", "F16") if found else None


def same_quant(have: str | None, wanted: str) -> bool:
    """True if a file's quantization is the one asked for; its "UD-" may be left out."""
    upper = wanted.upper()
    return have is not None and (have == upper or have.removeprefix("UD-") == upper)


def is_later_part(name: str) -> bool:
    """True if a file is part 2 or later of a split model."""
    part = _PART.search(name)
    return part is not None and int(part[1]) != 1


def is_model(name: str) -> bool:
    """True if a name may be that of a model, or of the first part of one. Hidden files are none:
    macOS leaves a ``._x.gguf`` for each file on foreign disks."""
    return name.lower().endswith(".gguf") and name[0] != "." and not is_later_part(name)


def first_part(path: Path) -> Path:
    """Return the file by which a model is opened: of a split one the first part, if it is here."""
    first = path.with_name(part_names(path.name)[0])
    return first if is_later_part(path.name) and _is_file(first) else path


def part_names(name: str) -> list[str]:
    """Return all file names of a (split) model, given its first one."""
    part = _PART.search(name)
    if part is None:
        return [name]
    count, prefix = int(part[2]), name[: part.start()]
    return [f"{prefix}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


# -- the stores ------------------------------------------------------------------------------------


def _home() -> Path:
    return Path(os.path.expanduser("~"))


def _variable(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(os.path.expanduser(value)) if value else None


def _cache_home() -> Path:
    return _variable("XDG_CACHE_HOME") or _home() / ".cache"


def huggingface_cache() -> Path:
    return (
        _variable("HF_HUB_CACHE")
        or _variable("HUGGINGFACE_HUB_CACHE")
        or (
            _variable("HF_HOME")
            or (_variable("XDG_CACHE_HOME") or _home() / ".cache") / "huggingface"
        )
        / "hub"
    )


def lmstudio_folders() -> list[Path]:
    home = _home()
    pointer = home / ".lmstudio-home-pointer"
    folders = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    try:
        folders.insert(0, Path(pointer.read_text("utf-8").strip()) / "models")
    except (OSError, ValueError):
        pass
    return folders


def ollama_folder() -> Path:
    return _variable("OLLAMA_MODELS") or _home() / ".ollama" / "models"


def llama_cpp_cache() -> Path:
    given = _variable("LLAMA_CACHE")
    if given is not None:
        return given
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "llama.cpp"
    if os.name == "nt":
        return (_variable("LOCALAPPDATA") or _home()) / "llama.cpp"
    return _cache_home() / "llama.cpp"


def settings_folders() -> list[Path]:
    """Return the folders of the setting ``model-dirs``.

    Raises:
        ConfigError: the settings cannot be read.
    """
    return [Path(os.path.expanduser(folder)) for folder in load_settings()["model-dirs"]]


# -- what was opened ------------------------------------------------------------------------------


def opened() -> list[tuple[Path, Path | None]]:
    """List the pairs that were loaded on this machine, newest first, if their files are still
    there."""
    try:
        found = read_json(_opened_file(), list[tuple[str, str | None]]) or []
    except (OSError, *DAMAGE):
        return []
    pairs = [(Path(target), None if draft is None else Path(draft)) for target, draft in found]
    return [pair for pair in pairs if all(_is_file(path) for path in pair if path is not None)]


def remember(target: Path, draft: Path | None) -> None:
    """Put a loaded pair first among ``opened``; a full disk loses no more than that."""
    pair = target.absolute(), None if draft is None else draft.absolute()
    before = opened()
    if pair in before[:1]:
        return
    pairs = [pair, *(one for one in before if one != pair)][:MAX_OPENED]
    lines = [[str(path) if path is not None else None for path in one] for one in pairs]
    with contextlib.suppress(OSError, UnicodeEncodeError):  # a name that is no text is not kept
        text = json.dumps(lines, indent=1, ensure_ascii=False)
        paths.replace_file(_opened_file(), text.encode())


def _opened_file() -> Path:
    return paths.data_dir() / "opened.json"


# -- scanning --------------------------------------------------------------------------------------


def _walk(root: Path, *, named: bool = False) -> Iterator[Path]:
    """Yield GGUF files below ``root``: first parts only, bounded; no link that leads outside,
    unless a user ``named`` the folder."""
    try:
        inside = root.resolve()
    except LOOPS:
        return
    count = 0
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        if len(here.relative_to(root).parts) >= MAX_DEPTH:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith((".", "$RECYCLE")))
        for name in filter(is_model, sorted(names)):
            path = here / name
            count += 1
            if count > MAX_FILES:
                return
            if path.is_symlink():
                try:
                    if not (path.resolve(strict=True).is_relative_to(inside) or named):
                        continue
                except LOOPS:
                    continue
            yield path


def _model(path: Path, source: Source, ref: str, repo: str | None) -> LocalModel | None:
    size, modified, used, complete = 0, 0.0, 0.0, True
    for name in part_names(path.name):
        try:
            status = path.with_name(name).stat()
        except OSError:
            complete = False
            continue
        size, complete = size + status.st_size, complete and status.st_size > 0
        modified, used = max(modified, status.st_mtime), max(used, status.st_atime)
    if size == 0:
        return None
    return LocalModel(path, source, ref, repo, quant_of(path.name), size, modified, used, complete)


def _hub_ref(repo: str, path: Path) -> str:
    quant = quant_of(path.name)
    # a quant names the model itself; its sidecars are named by file
    return f"{repo}:{quant}" if quant and not kind_of_name(path.name) else f"{repo}/{path.name}"


def _in_repo_folders(root: Path, source: Source) -> Iterator[LocalModel]:
    """Yield models at ``root/user/repo/…/file.gguf``, the layout of our own folder and of LM
    Studio."""
    for path in _walk(root, named=source == "folder"):
        parts = path.relative_to(root).parts
        repo = "/".join(parts[:2]) if len(parts) > 2 else None
        ref = _hub_ref(repo, path) if repo else str(path)
        model = _model(path, source, ref, repo)
        if model is not None:
            yield model


def _in_huggingface(root: Path) -> Iterator[LocalModel]:
    try:
        repos = sorted(p for p in root.iterdir() if p.name.startswith("models--"))
    except OSError:
        return
    try:
        inside = root.resolve()
    except LOOPS:
        return
    for folder in repos:
        pieces = folder.name.split("--")
        if len(pieces) < 3:
            continue
        repo = f"{pieces[1]}/{'--'.join(pieces[2:])}"
        snapshots = folder / "snapshots"
        try:
            revisions = sorted(snapshots.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True)
        except OSError:
            continue
        seen: set[str] = set()
        for revision in revisions:
            for path in _walk_links(revision, inside):
                name = path.relative_to(revision).as_posix()
                if name in seen:
                    continue
                seen.add(name)
                model = _model(path, "huggingface", _hub_ref(repo, path), repo)
                if model is not None:
                    yield model


def _walk_links(root: Path, inside: Path) -> Iterator[Path]:
    """Yield GGUF files of a snapshot: links to the cache's blobs, none that leads out of the
    cache."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in filter(is_model, sorted(names)):
            path = Path(folder) / name
            try:
                if path.resolve(strict=True).is_relative_to(inside):
                    yield path
            except LOOPS:
                continue


def _in_ollama(root: Path) -> Iterator[LocalModel]:
    manifests = root / "manifests"
    for folder, folders, names in os.walk(manifests):
        folders.sort()
        for tag in sorted(names):
            path = Path(folder) / tag
            parts = path.relative_to(manifests).parts
            if len(parts) < 3:
                continue
            blob = _ollama_blob(root, path)
            if blob is None:
                continue
            owner = [part for part in parts[1:-1] if part != "library"]
            ref = f"{'/'.join(owner)}:{tag}"
            model = _model(blob, "ollama", ref, None)
            if model is not None:
                yield model


def _ollama_blob(root: Path, manifest: Path) -> Path | None:
    try:
        if manifest.stat().st_size > 1 << 20:
            return None
        layers = json.loads(manifest.read_text("utf-8"))["layers"]
        for layer in layers:
            if layer.get("mediaType") == "application/vnd.ollama.image.model":
                digest = _DIGEST.match(layer["digest"])
                # the digest becomes a path: nothing but hex may pass
                blob = root / "blobs" / f"sha256-{digest[1]}" if digest else None
                return blob if blob is not None and blob.is_file() else None
    except (OSError, *DAMAGE):
        return None
    return None


def _in_llama_cpp(root: Path) -> Iterator[LocalModel]:
    for path in _walk(root):
        # llama.cpp flattens user/repo/file.gguf to user_repo_file.gguf: the repo cannot be told
        model = _model(path, "llama.cpp", str(path), None)
        if model is not None:
            yield model


def bundled() -> list[LocalModel]:
    """List the tiny family that ships with the package."""
    out = []
    for name, file in BUNDLED.items():
        model = _model(paths.bundled_dir() / file, "bundled", name, None)
        if model is not None:
            out.append(model)
    return out


BUNDLED = {"tiny-target": "tiny-target-q4_0.gguf", "tiny-draft": "tiny-draft-q8_0.gguf"}


def scan(*, include_bundled: bool = True, near: Path | None = None) -> list[LocalModel]:
    """List every model on this machine, each file once: our own stores first, those of other tools,
    the files opened by their path, and those in the folder of the file ``near``.

    Raises:
        ConfigError: the settings cannot be read.
    """
    found: dict[Path, LocalModel] = {}
    streams: list[Iterable[LocalModel]] = [
        bundled() if include_bundled else [],
        _in_repo_folders(paths.models_dir(), "specllama"),
        _in_huggingface(huggingface_cache()),
        *(_in_repo_folders(folder, "lmstudio") for folder in lmstudio_folders()),
        _in_ollama(ollama_folder()),
        _in_llama_cpp(llama_cpp_cache()),
        *(_in_folder(folder) for folder in settings_folders()),
        _by_path(path for pair in opened() for path in pair if path is not None),
        [] if near is None else beside(near),
    ]
    for stream in streams:
        for model in stream:
            try:
                key = model.path.resolve()
            except LOOPS:
                continue
            found.setdefault(key, model)
    return list(found.values())


def scan_folder(folder: str | Path) -> list[LocalModel]:
    """List every model below one folder."""
    return list(_in_folder(Path(os.path.expanduser(folder))))


def beside(file: Path) -> list[LocalModel]:
    """List the models in the folder of a file; skip names that are no file or lead nowhere."""
    found = sorted(path for path in file.parent.glob("*") if is_model(path.name))
    return _by_path(path for path in found if _is_file(path))


def _by_path(files: Iterable[Path]) -> list[LocalModel]:
    """List models that are named by their paths."""
    return [
        model
        for path in files
        if not is_later_part(path.name) and (model := _model(path, "folder", str(path), None))
    ]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except LOOPS:
        return False


def single(path: Path) -> LocalModel:
    """Return one file that no store holds, as a model.

    Raises:
        ModelUnavailable: it is not there.
    """
    model = _model(path, "folder", str(path), None)
    if model is None:
        raise no_file(path)
    return model


def _in_folder(root: Path) -> Iterator[LocalModel]:
    """Yield models that are named by their paths; those in ``user/repo`` answer to that, too."""
    return (replace(model, ref=str(model.path)) for model in _in_repo_folders(root, "folder"))
