"""Models on this machine, in any tool's store; file names and sizes only, no headers.

Models of other tools are found in place and never changed: the Hugging Face cache, LM Studio,
Ollama (blobs named by their manifests), llama.cpp's cache, and the folders of the setting
``model-dirs``. A link that leaves its own store is ignored. Files that were opened by their path
are remembered.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specllama import paths
from specllama.files import DAMAGE, read_json
from specllama.models.companions import kind_of_name
from specllama.models.gguf_format import is_later_part, no_file, part_names
from specllama.settings.config_file import load_settings

Source = Literal["bundled", "specllama", "huggingface", "lmstudio", "ollama", "llama.cpp", "folder"]

MAX_FILES = 20_000
MAX_OPENED = 50  # pairs that are remembered
LOOPS = (OSError, RuntimeError)  # a link that leads to itself; which one depends on the version
MAX_DEPTH = 6
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


def is_model(name: str) -> bool:
    """True if a name may be that of a model, or of the first part of one. Hidden files are none:
    macOS leaves a ``._x.gguf`` for each file on foreign disks."""
    return name.lower().endswith(".gguf") and name[0] != "." and not is_later_part(name)


def first_part(path: Path) -> Path:
    """Return the file by which a model is opened: of a split one the first part, if it is here."""
    first = path.with_name(part_names(path.name)[0])
    return first if is_later_part(path.name) and _is_file(first) else path


# -- the stores ------------------------------------------------------------------------------------


def _home() -> Path:
    return Path(os.path.expanduser("~"))


def from_home(path: str) -> str:
    """Shorten a path below the home folder to one from ``~``."""
    home = str(_home()) + os.sep
    return f"~{os.sep}{path.removeprefix(home)}" if path.startswith(home) else path


def _variable(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(os.path.expanduser(value)) if value else None


def _cache_home() -> Path:
    return _variable("XDG_CACHE_HOME") or _home() / ".cache"


def huggingface_cache() -> Path:
    given = _variable("HF_HUB_CACHE") or _variable("HUGGINGFACE_HUB_CACHE")
    return given or (_variable("HF_HOME") or _cache_home() / "huggingface") / "hub"


def lmstudio_folders() -> list[Path]:
    home = _home()
    folders = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    with contextlib.suppress(OSError, ValueError):
        pointer = (home / ".lmstudio-home-pointer").read_text("utf-8")
        folders.insert(0, Path(pointer.strip()) / "models")
    return folders


def ollama_folder() -> Path:
    return _variable("OLLAMA_MODELS") or _home() / ".ollama" / "models"


def llama_cpp_cache() -> Path:
    caches = _home() / "Library" / "Caches" if sys.platform == "darwin" else _cache_home()
    return _variable("LLAMA_CACHE") or caches / "llama.cpp"


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
    """Put a loaded pair first among ``opened``, unless the file is hidden; a full disk loses no
    more than that."""
    pair = target.absolute(), None if draft is None else draft.absolute()
    before = opened()
    if pair in before[:1] or target.name.startswith("."):
        return
    pairs = [pair, *(one for one in before if one != pair)][:MAX_OPENED]
    lines = [[str(path) if path is not None else None for path in one] for one in pairs]
    with contextlib.suppress(OSError, UnicodeEncodeError):  # a name that is no text is not kept
        text = json.dumps(lines, indent=1, ensure_ascii=False)
        paths.replace_file(_opened_file(), text.encode())


def _opened_file() -> Path:
    return paths.data_dir() / "opened.json"


# -- scanning --------------------------------------------------------------------------------------

Found = Iterable[tuple[Path, str, str | None]]
"""Models of a store: the first file, the reference and the repository of each."""


def _walk(root: Path, inside: Path | None) -> Iterator[Path]:
    """Yield GGUF files below ``root``: first parts only, bounded; no link that leads out of
    ``inside``, and none that is dead."""
    count = 0
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        if len(here.relative_to(root).parts) >= MAX_DEPTH:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith((".", "$RECYCLE")))
        for path in (here / name for name in filter(is_model, sorted(names))):
            count += 1
            if count > MAX_FILES:
                return
            if inside in (None, root) and not path.is_symlink():
                yield path
                continue
            with contextlib.suppress(*LOOPS):
                real = path.resolve(strict=True)
                if inside is None or real.is_relative_to(inside.resolve()):
                    yield path


def _models(source: Source, found: Found) -> Iterator[LocalModel]:
    """Yield the models of a store; leave out those of which nothing is there."""
    for path, ref, repo in found:
        size, used, complete = 0, 0.0, True
        for name in part_names(path.name):
            try:
                status = path.with_name(name).stat()
            except OSError:
                complete = False
                continue
            size, complete = size + status.st_size, complete and status.st_size > 0
            used = max(used, status.st_atime)
        if size:
            yield LocalModel(path, source, ref, repo, quant_of(path.name), size, used, complete)


def hub_ref(repo: str, name: str) -> str:
    """Return the reference of a file in a repository: a quant names the model itself; its sidecars
    are named by file."""
    quant = quant_of(name)
    return f"{repo}:{quant}" if quant and not kind_of_name(name) else f"{repo}/{name}"


def _in_repo_folders(root: Path, *, by_path: bool = False) -> Found:
    """Yield models at ``root/user/repo/…/file.gguf``, the layout of our own folder and of LM
    Studio; ``by_path``: named by their paths, in a folder that a user named, where links may lead
    anywhere."""
    for path in _walk(root, None if by_path else root):
        parts = path.relative_to(root).parts
        repo = "/".join(parts[:2]) if len(parts) > 2 else None
        yield path, hub_ref(repo, path.name) if repo and not by_path else str(path), repo


def _in_huggingface(root: Path) -> Found:
    for folder in sorted(root.glob("models--*--*")):
        _, user, name = folder.name.split("--", 2)
        repo, seen = f"{user}/{name}", set[str]()
        try:
            revisions = [(path.stat().st_mtime, path) for path in (folder / "snapshots").iterdir()]
        except OSError:
            continue
        for _, revision in sorted(revisions, key=lambda pair: pair[0], reverse=True):
            # links to the cache's blobs
            for path in _walk(revision, root):
                name = path.relative_to(revision).as_posix()
                if name not in seen:
                    seen.add(name)
                    yield path, hub_ref(repo, path.name), repo


def _in_ollama(root: Path) -> Found:
    manifests = root / "manifests"
    for folder, folders, names in os.walk(manifests):
        folders.sort()
        for tag in sorted(names):
            path = Path(folder) / tag
            parts = path.relative_to(manifests).parts
            blob = _ollama_blob(root, path) if len(parts) >= 3 else None
            if blob is not None:
                owner = [part for part in parts[1:-1] if part != "library"]
                yield blob, f"{'/'.join(owner)}:{tag}", None


def _ollama_blob(root: Path, manifest: Path) -> Path | None:
    with contextlib.suppress(OSError, *DAMAGE):
        if manifest.stat().st_size > 1 << 20:
            return None
        for layer in json.loads(manifest.read_text("utf-8"))["layers"]:
            if layer.get("mediaType") == "application/vnd.ollama.image.model":
                digest = _DIGEST.match(layer["digest"])
                # the digest becomes a path: nothing but hex may pass
                blob = root / "blobs" / f"sha256-{digest[1]}" if digest else None
                return blob if blob is not None and blob.is_file() else None
    return None


BUNDLED = {"tiny-target": "tiny-target-q4_0.gguf", "tiny-draft": "tiny-draft-q8_0.gguf"}


def scan(*, include_bundled: bool = True, near: Path | None = None) -> list[LocalModel]:
    """List every model on this machine, each file once: our own stores first, those of other tools,
    the files opened by their path, and those in the folder of the file ``near``.

    Raises:
        ConfigError: the settings cannot be read.
    """
    found: dict[Path, LocalModel] = {}
    ours = {name: paths.bundled_dir() / file for name, file in BUNDLED.items()}
    # llama.cpp flattens user/repo/file.gguf to user_repo_file.gguf: the repo cannot be told
    flat = llama_cpp_cache()
    streams: list[Iterable[LocalModel]] = [
        _models("bundled", ((path, name, None) for name, path in ours.items() if include_bundled)),
        _models("specllama", _in_repo_folders(paths.models_dir())),
        _models("huggingface", _in_huggingface(huggingface_cache())),
        *(_models("lmstudio", _in_repo_folders(folder)) for folder in lmstudio_folders()),
        _models("ollama", _in_ollama(ollama_folder())),
        _models("llama.cpp", ((path, str(path), None) for path in _walk(flat, flat))),
        *map(scan_folder, settings_folders()),
        _by_path(path for pair in opened() for path in pair if path is not None),
        [] if near is None else beside(near),
    ]
    for model in itertools.chain.from_iterable(streams):
        with contextlib.suppress(*LOOPS):
            found.setdefault(model.path.resolve(), model)
    return list(found.values())


def scan_folder(folder: str | Path) -> list[LocalModel]:
    """List every model below one folder, named by their paths; those in ``user/repo`` answer to
    that, too."""
    return list(_models("folder", _in_repo_folders(Path(os.path.expanduser(folder)), by_path=True)))


def beside(file: Path) -> list[LocalModel]:
    """List the models in the folder of a file; skip names that are no file or lead nowhere."""
    found = sorted(path for path in file.parent.glob("*") if is_model(path.name))
    return _by_path(path for path in found if _is_file(path))


def _by_path(files: Iterable[Path]) -> list[LocalModel]:
    """List models that are named by their paths."""
    first = (path for path in files if not is_later_part(path.name))
    return list(_models("folder", ((path, str(path), None) for path in first)))


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
    for model in _models("folder", [(path, str(path), None)]):
        return model
    raise no_file(path)
