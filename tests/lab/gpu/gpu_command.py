"""``make gpu-check``, the command: everything that only a GPU can tell, measured and written down.

    python tests/lab/gpu/gpu_command.py [-m TARGET -d DRAFT] [--minutes 10] [--out DIR] …

It needs an installed specllama and its checkout's folder ``tests/lab/gpu``. Models are loaded, on
the GPU, and measured in the order of the steps. What a step found is kept when it is stopped, and
the same command goes on. Without ``-m``, pairs are made at the cost of large ones, some gigabytes
that are removed again.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import gpu_check
import gpu_parts

from specllama import signals
from specllama.backend import devices
from specllama.cli import diagnostics, output
from specllama.cli.options import LOADING, GroupedCommand, grouped, resolve, settings_options
from specllama.errors import SpecllamaError
from specllama.models.refs import resolve_pair
from specllama.paths import package_versions
from specllama.settings.config_file import Settings
from specllama.settings.setting import variable_of

GROUP = "GPU check"
TOOLS = ("llama-bench", "llama-server")
STEPS = ("load", "prove", "own", "costs", "tune", "bench")
SIZES = ("300m", "1b", "3b", "7b")


def check(
    settings: Settings,
    *,
    out: Sequence[Path],
    minutes: float,
    only: Sequence[str],
    begin: str,
    sizes: Sequence[str],
    count: int,
    more: bool,
    as_json: bool,
) -> int:
    """Run the check, or go on with it; 0 if every part passed, 1 if one failed or is left.

    Raises:
        SpecllamaError: no GPU is there that this build of llama.cpp can use.
    """
    deadline = time.monotonic() + 60 * minutes
    cpu = settings["device"] == "none"
    cards = devices.gpus(devices.devices())  # no workers: they answer one program at a time
    if not (cards or cpu or settings["rpc"]):
        seen, command = devices.gpu_build_command(cards) or ("no GPU", "")
        raise SpecllamaError(
            f"{seen} here that this build of llama.cpp can use",
            f"build it with: {command}" if command else "--device none measures on the CPU",
        )
    folder = out[0].absolute()
    tools = _tools()
    steps = only or STEPS[STEPS.index(begin) :]
    pairs = _pairs(settings, folder, sizes)
    texts = gpu_parts.write_texts(folder)
    wanted = [
        part
        for part in gpu_parts.parts(pairs, texts, tools, settings["device"] or None, count)
        if part.step in steps and (more or not part.more)
    ]
    environment = _environment(settings, folder)
    work = gpu_check.Check(
        [folder, *out[1:]],
        _facts([] if cpu else cards, settings["rpc"], folder, tools),
        run=partial(gpu_check.run, environment=environment),
        free=_free,
        say=diagnostics.say,
    )
    for name in TOOLS:
        if name not in tools:
            diagnostics.note(f"{name} of the same build is not here, so nothing is beside ours")
    try:
        finished = work.go(wanted, deadline)
    finally:
        written = work.write()
    failed = [name for name, found in work.state["parts"].items() if not found["ok"]]
    if as_json:
        output.json_line(work.state)
    else:
        output.write(written[1].read_text("utf-8"))
    for path in written:
        diagnostics.note(f"wrote {path}")
    return 0 if finished and not failed else 1


def _free() -> int:
    return sum(card.free for card in devices.gpus(devices.devices()))


def _tools() -> dict[str, Path]:
    """Programs of llama.cpp beside the library that is used: they are of the same source."""
    folder = devices.library_folder()
    places = {name: shutil.which(name, path=folder) for name in TOOLS} if folder else {}
    return {name: Path(place) for name, place in places.items() if place}


def _pairs(settings: Settings, folder: Path, sizes: Sequence[str]) -> list[gpu_parts.Pair]:
    """The pair that was named; else the bundled one at the cost of large ones."""
    if settings["model"] is not None:
        target, draft = resolve_pair(settings["model"], settings["draft-model"])
        named = None if draft is None else str(draft)
        return [gpu_parts.Pair(Path(target).stem, str(target), named)]
    models = folder / "models"
    return [gpu_parts.scaled(models, size, kind) for kind in gpu_parts.KINDS for size in sizes]


def _environment(settings: Settings, folder: Path) -> dict[str, str]:
    """What was set, but the pair, for the commands that are run; what they learn stays here."""
    environment = {"SPECLLAMA_HOME": str(folder / "home"), "NO_COLOR": "1"}
    for setting, value in settings:
        if value.origin != "default" and setting.name not in ("model", "draft-model"):
            given = value.value
            environment[variable_of(setting.name)] = (
                json.dumps(given) if setting.kind == "texts" else _text(given)
            )
    return environment


def _text(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _facts(
    cards: Sequence[devices.Device], workers: str, folder: Path, tools: Mapping[str, Path]
) -> dict[str, Any]:
    """Provenance: device, driver, build, commit, versions."""
    build = devices.build_info()
    remote = [f"workers at {workers}"] if workers else []
    facts: dict[str, Any] = {
        "devices": [f"{d.name}: {d.description}, {d.total / 2**30:.1f} GiB" for d in cards] + remote
        or ["the CPU"],
        "driver": _driver(),
        "build": {
            "llama.cpp": build.llama_cpp,
            "backends": list(build.backends),
            "features": list(build.features),
            "devices": [d.description for d in cards] + remote,
        },
        "machine": f"{devices.cpu_name()}, {os.cpu_count()} cores, {platform.platform()}",
        "versions": package_versions(),
        "tools": sorted(tools),
    }
    made = folder.parent / "build.json"
    if made.is_file():
        facts["made"] = json.loads(made.read_text("utf-8"))
    return facts


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return ", ".join(dict.fromkeys(done.stdout.split("\n")[:-1])) or "unknown"


@click.command("gpu-check", cls=GroupedCommand)
@settings_options(only=LOADING)
@grouped(
    "--out",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    default=(Path("gpu-check"),),
    show_default=True,
    group=GROUP,
    metavar="DIR",
    help="Where the report goes, and a check goes on; repeatable.",
)
@grouped(
    "--minutes",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    group=GROUP,
    help="Stop after N minutes; the same command goes on.",
)
@grouped(
    "--only",
    multiple=True,
    type=click.Choice(STEPS),
    group=GROUP,
    help="Only this step; repeatable.",
)
@grouped(
    "--from",
    "begin",
    type=click.Choice(STEPS),
    default=STEPS[0],
    group=GROUP,
    help="Begin with this step.",
)
@grouped(
    "--size",
    "sizes",
    multiple=True,
    type=click.Choice(SIZES),
    group=GROUP,
    default=SIZES[1:],
    show_default=True,
    help="Cost of a scaled pair; repeatable. With -m: that pair instead.",
)
@grouped(
    "--count",
    type=click.IntRange(1, 100),
    default=10,
    show_default=True,
    group=GROUP,
    help="Prompts of a measurement.",
)
@grouped(
    "--more/--no-more",
    default=True,
    show_default=True,
    group=GROUP,
    help="With time left, prove and compare more.",
)
@grouped("--json", "as_json", is_flag=True, group="Output", help="One JSON object.")
def command(
    out: Sequence[Path],
    minutes: float,
    only: Sequence[str],
    begin: str,
    sizes: Sequence[str],
    count: int,
    more: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Measure what only a GPU can tell, and write a report."""
    return check(resolve(flags), out=out, minutes=minutes, only=only, begin=begin, sizes=sizes,
                 count=count, more=more, as_json=as_json)  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; errors are told as specllama tells them."""
    signals.install()
    output.prepare()
    arguments = None if given is None else list(given)
    try:
        done: int = command.main(arguments, prog_name="gpu-check", standalone_mode=False)
        return done
    except (Exception, KeyboardInterrupt) as error:
        return diagnostics.report(error)


if __name__ == "__main__":
    sys.exit(main())
