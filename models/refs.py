"""References: from the words that a user types to a file on disk, without the network.

A reference is, in this order: ``tiny`` (the bundled pair) · an existing path · a path in one of the
folders of ``model-dirs`` · a catalogue name · ``user/repo[:QUANT]`` or ``user/repo/file.gguf`` that
was pulled, that another tool brought or that such a folder holds · an Ollama ``name:tag``.
"""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from specllama import paths
from specllama.errors import ModelUnavailable, UsageError
from specllama.models import catalog, library
from specllama.models.catalog import HubRef
from specllama.models.companions import HEADS, kind_of_name
from specllama.models.gguf_format import no_file, part_names
from specllama.text import did_you_mean

DEFAULT_QUANTS = ("Q4_K_M", "Q4_0", "IQ4_NL", "Q4_K_S", "UD-Q4_K_XL", "MXFP4", "Q8_0")
NO_DRAFT = "none"
LISTED = "specllama hub ls shows the models on this machine"
TINY = {"tiny": "tiny-target", "tiny-target": "tiny-target", "tiny-draft": "tiny-draft"}

_REPO = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}$")
_QUANT = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,40}$")


_PREFIX = re.compile(
    r"^(hf://|hf:(?!//)|(https?://)?(www\.)?(huggingface\.co|hf\.co)/)", re.IGNORECASE
)
_PLACE = re.compile(r"^([^/]+/[^/]+)/(?:resolve|blob|raw|tree)/[^/]+(?:/(.*))?$")


def plain(ref: str) -> str:
    """Remove the additions of other tools and browsers from a reference.

    ``hf.co/user/repo:Q4_K_M`` is ``user/repo:Q4_K_M``, the address of a file's page is
    ``user/repo/file.gguf``. Anything else stays as it is.
    """
    rest = _PREFIX.sub("", ref)
    if rest == ref:
        return ref
    rest = rest.partition("?")[0].partition("#")[0].rstrip("/")
    if place := _PLACE.match(rest):
        return f"{place[1]}/{place[2]}" if place[2] else place[1]
    return rest


def parse_hub(ref: str) -> HubRef | None:
    """Parse ``user/repo[:quant]`` or ``user/repo/path/file.gguf``; None if it has another form.

    Raises:
        UsageError: it has the form, but a part of it may never become a path.
    """
    text = plain(ref)
    if text.startswith(("/", ".", "~")) or "\\" in text or text.count("/") < 1:
        return None
    pieces = text.split("/")
    if len(pieces) == 2:
        repo, _, quant = text.partition(":")
        if not _REPO.match(repo) or (quant and not _QUANT.match(quant)):
            return None
        if ".." in repo:
            raise UsageError(f"not a repository name: {repo!r}")
        return HubRef(repo, quant or None)
    repo, file = "/".join(pieces[:2]), "/".join(pieces[2:])
    if not _REPO.match(repo) or not file.lower().endswith(".gguf"):
        return None
    if any(piece in ("", ".", "..") for piece in pieces[2:]) or ":" in file or holds_controls(file):
        raise UsageError(f"not a file name inside a repository: {file!r}")
    return HubRef(repo, file=part_names(file)[0])


def holds_controls(name: str) -> bool:
    """True if a name holds control characters, or halves of characters. Spaces of every width,
    joiners and what else no keyboard has are parts of names as people have them."""
    return any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name)


def _in_settings(ref: str) -> Path | None:
    """Find the file with this path in one of the settings' folders."""
    if ref.startswith("."):  # it says which folder
        return None
    files = (folder / ref for folder in library.settings_folders())
    return next((file for file in files if file.is_file()), None)


def _looks_like_path(ref: str) -> bool:
    return (
        ref.startswith(("/", "./", "../", "~", ".\\", "..\\"))
        or (len(ref) > 1 and ref[1] == ":" and ref[0].isalpha())
        or (ref.lower().endswith(".gguf") and ref.count("/") != 2)
    )


def bundled(name: str) -> Path:
    """Return the file of ``tiny-target`` or ``tiny-draft``.

    Raises:
        ModelUnavailable: the installation lacks it.
    """
    path = paths.bundled_dir() / library.BUNDLED[TINY[name]]
    if not path.is_file():
        raise ModelUnavailable(
            f"the bundled model {path.name} is not in this installation",
            "reinstall specllama, or name another model with -m",
        )
    return path


def is_bundled(ref: str) -> bool:
    """True if a reference names a model that comes with specllama."""
    return ref in TINY or paths.bundled_dir() in Path(ref).parents


def is_reference(word: str) -> bool:
    """True if a word can only name a model: a path, or a name of the catalog."""
    return word in TINY or _looks_like_path(word) or catalog.find(word) is not None


def lasting(ref: str) -> str:
    """Return the reference in a form that means the same in every folder: a path becomes
    absolute."""
    path = None if ref in TINY else _on_disk(ref)
    return ref if path is None else os.path.abspath(path)


def existing(ref: str) -> Path | None:
    """Return the file or folder with this path."""
    path = Path(os.path.expanduser(ref))
    try:
        return path if path.exists() else None
    except OSError:  # a name that is too long; a folder that may not be looked into
        return None


def _on_disk(ref: str) -> Path | None:
    """Return the existing file; None for a folder if the reference may as well be a repository on
    the hub."""
    path = existing(ref)
    return None if path is not None and path.is_dir() and parse_hub(ref) is not None else path


def resolve(ref: str) -> Path:
    """Find the file that a reference means.

    Raises:
        ConfigError: the settings, which name more folders, cannot be read.
        ModelUnavailable: it is not on this machine; the hint is the command that brings it.
        UsageError: it is empty, or names something that cannot be a model.
    """
    if not ref:
        raise UsageError("the model reference is empty")
    there = existing(ref)
    if there is None and holds_controls(ref):
        raise UsageError(
            f"there is no file {ref!r}, and no other model has control characters in its name",
            LISTED,
        )
    ref = plain(ref)
    if ref in TINY:
        return bundled(ref)
    path = _on_disk(ref)
    if path is not None:
        return _in_folder(path) if path.is_dir() else library.first_part(path)
    if there is None and _looks_like_path(ref):
        if (file := _in_settings(ref)) is not None:
            return library.first_part(file)
        missing = Path(os.path.expanduser(ref))
        raise no_file(missing, _near_files(missing))
    pair = catalog.find(ref)
    if pair is not None:
        return _local(pair.target.hub, pull=pair.name)
    hub = parse_hub(ref)
    if hub is not None:
        try:
            return _local(hub, pull=str(hub))
        except ModelUnavailable:
            if there is None:
                raise
    if there is not None:
        return _in_folder(there)
    models = library.scan()
    for model in models:
        if model.ref == ref or (model.source == "ollama" and model.ref == f"{ref}:latest"):
            return model.path
    raise ModelUnavailable(f"no model is named {ref!r}", _near_names(ref, models))


def resolve_heads(ref: str) -> list[Path]:
    """Find the files that a reference to a drafting head means: for the name of a model the heads
    that ship for it, or that the catalog names; else the file itself.

    Raises:
        ModelUnavailable: it is not on this machine, or there is no head for that model.
        what ``resolve`` raises.
    """
    pair = catalog.find(ref)
    if (pair is None and ref not in TINY) or existing(ref) is not None:
        return [resolve(ref)]
    name = "tiny" if pair is None else pair.name
    patterns = [f"{kind}-{name}-*.gguf" for kind in HEADS] + [
        f"{name}-{kind}-*.gguf" for kind in HEADS
    ]
    shipped = [path for pattern in patterns for path in sorted(paths.bundled_dir().glob(pattern))]
    if pair is not None and not shipped:
        if not pair.head:
            raise ModelUnavailable(
                f"no drafting head for {ref} ships or is known",
                f"train one with: specllama train-draft {ref}",
            )
        return [resolve(pair.head)]
    return shipped


def resolve_pair(target_ref: str, draft_ref: str | None = None) -> tuple[Path, Path | None]:
    """Find target and draft. Without a draft reference: the draft that belongs to the target, if
    here; with ``none``: no draft.

    Raises:
        ModelUnavailable: the target, or a draft that was named, is not on this machine.
    """
    target_ref = plain(target_ref)
    if draft_ref == "tiny":
        draft_ref = "tiny-draft"
    target = resolve(target_ref)
    if draft_ref == NO_DRAFT:
        return target, None
    if draft_ref is not None:
        pair = catalog.find(draft_ref)
        if pair is not None and pair.draft is not None and pair is catalog.find(target_ref):
            draft_ref = pair.draft.ref
        return target, resolve(draft_ref)
    return target, _default_draft(target_ref, target)


def used_last() -> tuple[str, str | None] | None:
    """Return the pair that was loaded last, unless it is the bundled one; None if there is none."""
    for target, draft in library.opened():
        if not is_bundled(str(target)):
            return str(target), None if draft is None else str(draft)
    return None


def catalog_pair(ref: str) -> catalog.CatalogPair | None:
    """Return the catalog's pair with this name, or with this target."""
    hub = parse_hub(ref)
    return catalog.find(ref) or (catalog.find_target(hub.repo) if hub else None)


def _default_draft(target_ref: str, target: Path) -> Path | None:
    tiny = paths.bundled_dir()
    if target.name == library.BUNDLED["tiny-target"] and target.parent.resolve() == tiny.resolve():
        draft = tiny / library.BUNDLED["tiny-draft"]
        return draft if draft.is_file() else None
    if _looks_like_path(target_ref):
        return None
    pair = catalog_pair(target_ref)
    if pair is None or pair.draft is None:
        return None
    try:
        return _local(pair.draft.hub, pull=pair.name)
    except ModelUnavailable:
        return None


def matches(model: library.LocalModel, wanted: HubRef) -> bool:
    """True if a model on disk is (one of) the models that a hub reference means."""
    if model.repo is None or model.repo.casefold() != wanted.repo.casefold():
        return False
    if kind_of_name(model.path.name) and wanted.file is None:
        return False
    if wanted.file is not None:
        return model.path.as_posix().endswith("/" + wanted.file)
    return wanted.quant is None or library.same_quant(model.quant, wanted.quant)


def preferred(models: Sequence[library.LocalModel]) -> library.LocalModel:
    """Choose one of several quants if none was named: a 4-bit one first."""
    rank = {quant: i for i, quant in enumerate(DEFAULT_QUANTS)}
    return min(models, key=lambda m: (not m.complete, rank.get(m.quant or "", len(rank)), m.bytes))


def _local(wanted: HubRef, *, pull: str) -> Path:
    models = library.scan()
    found = [model for model in models if matches(model, wanted)]
    if wanted.file is None and len(found) > 1:
        found = _loadable(found) or found
    if found:
        return preferred(found).path
    same_repo = [m for m in models if m.repo and m.repo.casefold() == wanted.repo.casefold()]
    here = f" (here are: {', '.join(sorted(m.ref for m in same_repo)[:4])})" if same_repo else ""
    raise ModelUnavailable(
        f"{wanted} is not on this machine{here}", f"get it with: specllama hub pull {pull}"
    )


def _in_folder(folder: Path) -> Path:
    """Return the only model in a folder or below it, for which the folder stands."""
    found = [m for m in library.scan_folder(folder) if not kind_of_name(m.path.name)]
    if len(found) > 1:
        found = _loadable(found) or found
    if len(found) == 1:
        return found[0].path
    if not found:
        dead = next((path for path in sorted(folder.glob("*.gguf")) if path.is_symlink()), None)
        if dead is not None:
            raise no_file(dead)
        raise ModelUnavailable(f"{folder} is a folder without a GGUF model in it")
    raise UsageError(
        f"{folder} holds {len(found)} models", f"name one, for example: {found[0].path}"
    )


def _loadable(found: Sequence[library.LocalModel]) -> list[library.LocalModel]:
    from specllama.models.summaries import loadable

    return loadable(found)


def _near_files(path: Path) -> str:
    """Return what else may be meant: names are compared without case and kinds of spaces."""

    def plainly(name: str) -> str:
        return unicodedata.normalize("NFKC", name).casefold()

    try:
        # a link that leads nowhere is no suggestion
        near = {plainly(p.name): p for p in path.parent.iterdir() if library.is_model(p.name)}
        near = {name: p for name, p in near.items() if p.exists()}
    except OSError:
        return LISTED
    close = difflib.get_close_matches(plainly(path.name), near, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(str(near[name]) for name in close)}?" if close else LISTED


def _near_names(ref: str, models: Sequence[library.LocalModel]) -> str:
    names = dict.fromkeys([*TINY, *catalog.load(), *(model.ref for model in models)])
    other = "specllama hub ls shows what is here, specllama hub pairs what can be pulled"
    return did_you_mean(ref, names, other)
