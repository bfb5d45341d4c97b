"""The models that ``serve`` answers with: named ones, those of a folder, all that are here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from specllama.engine.host import EngineHost, LoadEngine
from specllama.engine.serving import OnEvent
from specllama.errors import UsageError
from specllama.models import library
from specllama.models.refs import NO_DRAFT, existing, parse_hub
from specllama.models.summaries import loadable
from specllama.server.loaded_models import Models
from specllama.server.request_queue import RequestQueue
from specllama.server.served import ServedModel
from specllama.settings.params import EngineOptions, GenerateParams

OWN_DRAFT = "auto"


def served_models(
    refs: Sequence[str],
    drafts: Sequence[str],
    aliases: Sequence[str],
    options: EngineOptions,
    params: GenerateParams,
    *,
    on_demand: bool = False,
    most: int = 0,
    waiting: int = 64,
    idle_s: float = math.inf,
    on_event: OnEvent | None = None,
) -> Models:
    """Return the models of a server.

    Args:
        params: of requests that choose nothing else.
        on_demand: answer with every other model here, too. most: loaded at once; 0 sets no bound.
        waiting: most requests of one client that may wait for a model.
        idle_s: how long a model stays loaded unused.
        on_event: receives loads.

    Raises:
        UsageError: drafts or names do not go with the models; a folder has no models.
    """

    def made(ref: str, draft: str | None = None, alias: str | None = None) -> ServedModel:
        recipe = LoadEngine(ref, draft, options)
        host = EngineHost(recipe, on_event=on_event)
        queue = RequestQueue(host, alias or name_of(ref), lanes=options.parallel, most=waiting)
        also = frozenset({ref, name_of(ref), Path(ref).name})
        return ServedModel(queue, params, recipe, also=also, usual_s=idle_s, on_event=on_event)

    def more() -> Iterator[ServedModel]:
        for model in loadable(library.scan()):
            if model.ref not in named and str(model.path) not in named:
                yield made(model.ref)

    named = list(_unfolded(refs))
    for flag, given in (("--draft-model", drafts), ("--alias", aliases)):
        if len(given) > len(named) or (len(given) not in (0, 1) and len(given) != len(named)):
            raise UsageError(
                f"{flag} is given {len(given)} times, for {len(named)} models",
                f"give one for each, in the order of --model; {OWN_DRAFT} and {NO_DRAFT} are "
                "drafts, too"
                if flag == "--draft-model"
                else None,
            )
    chosen = [None if draft == OWN_DRAFT else draft for draft in drafts]
    served: dict[str, ServedModel] = {}
    for ref, draft, alias in zip_longest(named, chosen, aliases):
        model = made(ref, draft, alias)
        if model.name in served:  # files of one name in two folders
            model = made(ref, draft, ref)
        served[model.name] = model
    return Models(list(served.values()), most=most, more=more if on_demand else None)


def _unfolded(refs: Sequence[str]) -> Iterator[str]:
    """Yield the references; replace a folder by the models in it.

    Raises:
        UsageError: there are none in a folder.
    """
    for ref in refs:
        folder = existing(ref)
        if parse_hub(ref) is not None or folder is None or not folder.is_dir():
            yield ref
            continue
        found = [str(model.path) for model in loadable(library.scan_folder(folder))]
        if not found:
            raise UsageError(f"{folder} is a folder without a GGUF model in it")
        yield from sorted(found)


def name_of(ref: str) -> str:
    """Return the name that clients use for a reference: without a folder or an ending."""
    path = Path(ref)
    return path.stem if path.suffix.lower() == ".gguf" else ref
