"""The models that ``serve`` answers with: named ones, those of a folder, all that are here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specllama.engine.host import EngineHost, LoadEngine
from specllama.engine.serving import OnEvent
from specllama.errors import UsageError
from specllama.models import library
from specllama.models.refs import NO_DRAFT, existing, parse_hub
from specllama.models.summaries import loadable
from specllama.server.models import Models
from specllama.server.request_queue import RequestQueue
from specllama.server.served import ServedModel
from specllama.settings.duration import seconds
from specllama.settings.params import EngineOptions, GenerateParams

OWN_DRAFT = "auto"


@dataclass(frozen=True, slots=True)
class Serves:
    """The loading and asking of models as a command line sets it.

    Attributes:
        params: of requests that choose nothing else.
        waiting: most requests of one client that may wait for a model.
        idle_unload: how long a model stays loaded unused.
        on_event: receives loads.
    """

    options: EngineOptions
    params: GenerateParams
    waiting: int
    idle_unload: str
    on_event: OnEvent | None

    def made(self, ref: str, draft: str | None = None, alias: str | None = None) -> ServedModel:
        recipe = LoadEngine(ref, draft, self.options)
        queue = RequestQueue(
            EngineHost(recipe, on_event=self.on_event),
            alias or name_of(ref),
            lanes=self.options.parallel,
            most=self.waiting,
        )
        return ServedModel(
            queue,
            self.params,
            recipe,
            also=frozenset({ref, name_of(ref), Path(ref).name}),
            usual_s=seconds(self.idle_unload),
            on_event=self.on_event,
        )

    def opened(
        self,
        refs: Sequence[str],
        drafts: Sequence[str],
        aliases: Sequence[str],
        *,
        on_demand: bool,
        most: int,
    ) -> Models:
        """Return the models of a server.

        Raises:
            UsageError: drafts or names do not go with the models; a folder has no models.
        """
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
        chosen += [None] * (len(named) - len(chosen))
        names = [*aliases, *[None] * (len(named) - len(aliases))]
        served: dict[str, ServedModel] = {}
        for ref, draft, alias in zip(named, chosen, names, strict=True):
            model = self.made(ref, draft, alias)
            if model.name in served:  # files of one name in two folders
                model = self.made(ref, draft, ref)
            served[model.name] = model
        more = self._more(named) if on_demand else None
        return Models(list(served.values()), most=most, more=more)

    def _more(self, named: Sequence[str]) -> Callable[[], Iterator[ServedModel]]:
        def more() -> Iterator[ServedModel]:
            for model in loadable(library.scan()):
                if model.ref not in named and str(model.path) not in named:
                    yield self.made(model.ref)

        return more


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
