"""``specllama doctor``: the installation, the machine, and ways to make it faster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from specllama.cli.listing import Column, listing, note
from specllama.cli.options import (
    LOADING,
    GroupedCommand,
    grouped,
    parallel_option,
    resolve,
    settings_options,
)
from specllama.cli.output import examples
from specllama.paths import package_versions, pip_install
from specllama.settings.config_file import Settings
from specllama.settings.params import EngineOptions
from specllama.text import size

if TYPE_CHECKING:
    from specllama.engine.gguf_pair import Pair


@dataclass(frozen=True, slots=True)
class DoctorLine:
    """One line: status ("ok", "info", "warn" or "bad"), subject, finding and advice."""

    status: str
    name: str
    found: str
    advice: str = ""


ok, info, warn, bad = (partial(DoctorLine, status) for status in ("ok", "info", "warn", "bad"))


@click.command("doctor", cls=GroupedCommand, epilog=examples()["doctor"])
@settings_options("kv-ram", only=LOADING)
@parallel_option(1)
@grouped("--json", "as_json", is_flag=True, group="Output", help="Print one JSON object.")
def command(parallel: int, as_json: bool, **flags: Any) -> int:
    """Check the installation and the machine; with -m, say where a pair would go and why.

    No model is loaded and the network is not used. The exit status is 1 if something is broken.
    """

    settings = resolve(flags)
    native = _native(settings["rpc"])
    checks = [*_versions(), *native, *_machine(), *_stores(), *_network(), *_models()]
    works = all(check.status != "bad" for check in native)
    if works:
        checks.append(_recommended())
    if works and flags["model"] is not None:
        checks += _plan(settings, replace(settings.engine_options(), parallel=parallel))
    marks = {"ok": "✓", "warn": "!", "bad": "✗", "info": "·"}
    columns = [
        Column("", lambda check: marks[check.status]),
        Column("what", "name"),
        Column("found", "found", give=True),
    ]
    listing(as_json, "checks", checks, columns)
    for check in checks:
        if check.advice and not as_json:
            note(f"{check.name}: {check.advice}")
    return 1 if any(check.status == "bad" for check in checks) else 0


def _versions() -> list[DoctorLine]:
    from specllama import __version__

    (_, python), _, *found = package_versions("huggingface-hub", "textual").items()
    packages, words = ok, ", ".join(map(" ".join, found))
    if "not installed" in words:
        again = f"in specllama's folder: {pip_install('--force-reinstall .')}"
        packages = partial(bad, advice=again)
    return [ok("specllama", f"{__version__}, Python {python}"), packages("packages", words)]


def _native(workers: str) -> list[DoctorLine]:
    """Describe how llama.cpp was built, and the devices that it finds, those of workers among
    them."""
    from specllama.backend import devices, rpc, trial
    from specllama.errors import CannotLoad

    try:
        tried = trial.require(anew=True)
    except CannotLoad as error:
        return [bad("llama.cpp", error.message, error.hint or "")]
    checks, wheels = list[DoctorLine](), f"wheels that are ready: {devices.WHEELS_PAGE}"
    try:
        build = devices.build_info()
        try:
            rpc.use(workers)
        except CannotLoad as error:
            checks.append(bad("workers", error.message, error.hint or ""))
        found = devices.devices()
    except (ImportError, OSError, RuntimeError) as error:
        again = f"build it again: {devices.build_command()}; {wheels}"
        return [bad("llama.cpp", f"the native library does not load: {error}", again)]
    wanted = [f for f in build.features if f.startswith(("AVX", "NEON", "SVE", "AMX", "DOTPROD"))]
    wanted += [f for f in build.features if f == "REPACK"]
    sound = tried.said or "passes of 1 to 32 rows, every type of tensor, both layouts"
    trial_line = partial(warn, advice=trial.mend_each()) if tried.died else ok
    checks += [
        ok("llama.cpp", f"commit {build.llama_cpp}, backends {', '.join(build.backends)}"),
        ok("CPU features", ", ".join(wanted)),
        trial_line("a trial of it", sound),
        _kernels(),
    ]
    for device in found:
        memory = f"{size(device.free)} free of {size(device.total)}"
        memory = memory if device.total else "memory unknown"
        checks.append(ok(f"device {device.name}", f"{device.description}, {memory}"))
    advice = devices.gpu_build_command(found)
    if advice is not None:
        here = f"{advice[0]} here, but this build of llama.cpp cannot use it"
        checks.append(warn("GPU", here, f"build it with: {advice[1]}; {wheels}"))
    elif not devices.gpus(found):
        checks.append(info("GPU", "none found; everything runs on the CPU"))
    return checks


def _recommended() -> DoctorLine:
    """Name the largest pair of the catalog that is fast enough here."""
    from specllama.backend.this_machine import this_machine
    from specllama.models.judgement import FAST_ENOUGH

    machine = this_machine()
    pair = machine.recommended()
    if pair is None:
        words = f"no pair of the catalog would write {FAST_ENOUGH:.0f} tokens a second"
        return info("a real pair", f"{words} here: specllama hub pairs")
    words = f"{pair.name}: {size(pair.bytes)} to download, {machine.judge(pair).speed}"
    return info("a real pair", words, f"specllama hub pull {pair.name}")


def _machine() -> list[DoctorLine]:
    from specllama.backend.cores import physical_cores, system_load
    from specllama.backend.devices import cpu_name
    from specllama.models import memory
    from specllama.models.kernel_limits import processors

    cores, load = physical_cores(), system_load()
    ram = f"{size(memory.available_memory())} free of {size(memory.total_memory())}"
    checks = [ok("CPU", f"{cpu_name()}, {cores} cores for llama.cpp (-t {cores})"), ok("RAM", ram)]
    if share := processors():
        checks.append(info("CPU limit", f"the time of {share:.3g} cores (control group)"))
    for limit in memory.limits():
        if limit.source:
            words = f"{size(limit.total)}, {size(limit.free)} of them free: {limit.source}"
            checks.append(info("RAM limit", words))
    if load > cores * 0.75:
        busy = f"{load:.1f} on {cores} cores"
        checks.append(warn("load", busy, "other programs are using the CPU"))
    return checks


def _stores() -> list[DoctorLine]:
    import shutil

    from specllama import paths

    checks = []
    folders = {"models": paths.models_dir(), "data": paths.data_dir(), "cache": paths.cache_dir()}
    for name, folder in folders.items():
        if why := paths.barred(folder):
            advice = "set SPECLLAMA_HOME to a folder you can write to"
            checks.append(bad(name, f"{folder} is not writable: {why}", advice))
            continue
        here = paths.standing(folder)
        free = f", {size(shutil.disk_usage(here).free)} free" if name == "models" else ""
        checks.append(ok(name, f"{folder}{free}"))
    return checks


def _network() -> list[DoctorLine]:
    import os
    from urllib.parse import urlsplit

    from specllama.models import hub_client

    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or hub_client.PUBLIC)
    state = "switched off" if hub_client.offline() else "used only by hub search, info and pull"
    token = "with a token" if os.environ.get("HF_TOKEN") else "without a token from HF_TOKEN"
    return [info("network", f"{state}; {endpoint.hostname}, {token}")]


def _plan(settings: Settings, options: EngineOptions) -> list[DoctorLine]:
    """Show where the named pair would be placed.

    Raises:
        SpecllamaError: it could not be loaded for another reason than memory.
    """
    from specllama.engine.gguf_pair import read_pair
    from specllama.errors import DoesNotFit
    from specllama.models.refs import resolve_pair

    target, draft = resolve_pair(settings["model"], settings["draft-model"])
    pair = read_pair(target, draft, replace(options, check_memory=False))
    checks = []
    for line in [*pair.lines(), f"weights: {pair.layout}", f"exactness: {_exactness(pair)}"]:
        name, _, said = line.partition(": ")
        checks.append(info(name, said))
    checks += [info("faster", said) for said in _faster(pair)]
    checks += [warn("cache", options.coarse_cache)] if options.coarse_cache else []
    try:
        pair.require_fit(anyway=True)
        checks.append(ok("RAM needed", size(pair.need(pair.n_ctx).required)))
    except DoesNotFit as error:
        checks.append(warn("RAM needed", error.message, error.hint or ""))
    return checks


def _kernels() -> DoctorLine:
    from specllama.backend import trial

    found = trial.kernels()
    if found.name:
        return ok("CPU kernels", f"specllama's own ({found.name}), checked bit for bit")
    return warn("CPU kernels", f"llama.cpp's: {found.why}", "a pass of several rows costs more")


def _exactness(pair: Pair) -> str:
    """Describe the measurements of the target's passes here, with any settings."""
    from specllama.backend import verdicts
    from specllama.backend.exactness import SCHEMA, Exactness

    how = {"repack": pair.repacks, "kernels": pair.kernels}
    key = {**verdicts.circumstances(pair.target), **how}
    labels = [one.label for one in verdicts.all_known(SCHEMA, key, Exactness)]
    later = "not measured yet: that is done at rest, or now by: specllama tune -m FILE"
    return "; ".join(dict.fromkeys(labels)) or later


def _faster(pair: Pair) -> list[str]:
    """List what would make the pair faster here, by what was measured, and heads that are there."""
    from specllama.backend import verdicts
    from specllama.engine.profiles import remedies_of
    from specllama.engine.target_heads import fitting
    from specllama.interface import layout_words
    from specllama.models import library
    from specllama.verdict import remedy_words

    here, layout = verdicts.name_of(verdicts.here()), layout_words(pair.repacks, pair.kernels)
    found = remedies_of(here, pair.target, pair.draft, layout)
    heads = fitting(pair.target, library.scan()).values()
    lines = [*map(remedy_words, found or ()), *(f"--head {head}: was not tried" for head in heads)]
    if found is None:
        lines.append("not known yet: that is measured at rest, or now by: specllama tune -m FILE")
    return lines or ["nothing of what was measured here"]


def _models() -> list[DoctorLine]:
    from specllama.models import library

    models = library.scan()
    bundled = [model for model in models if model.source == "bundled"]
    checks = [bad("bundled pair", "missing", "reinstall specllama")]
    if len(bundled) == len(library.BUNDLED):
        checks = [ok("bundled pair", ", ".join(m.path.name for m in bundled))]
    stores: dict[str, list[Any]] = {}
    for model in models:
        stores.setdefault(model.source, []).append(model)
    for source, found in stores.items():
        if source != "bundled":
            total = size(sum(model.bytes for model in found))
            checks.append(ok(f"{source} models", f"{len(found)}, {total}"))
    return checks
