"""``specllama doctor --gpu``: ordinary commands, each with what it measures."""

from __future__ import annotations

import json
import shlex

import click
import pytest

from specllama.backend import devices
from specllama.backend.devices import Device
from specllama.cli import group, invoke
from specllama.cli.gpu_commands import DRAFT, FOLDER, TARGET, commands
from specllama.models.library import BUNDLED
from specllama.models.scale import DRAFT_FOR

CPU = Device("CPU", "cpu", "CPU", "a processor", 1, 2)
CARD = Device("CUDA0", "gpu", "CUDA", "a card", 3 << 30, 4 << 30)


def parsed(line: str) -> click.Context:
    """The context of a command line, parsed by the program but not run."""
    program, *words = shlex.split(line)
    assert program == "specllama"
    context = click.Context(group)
    found: click.Command = group
    while isinstance(found, click.Group):
        _, inner, words = found.resolve_command(context, words)
        assert inner is not None
        found = inner
    return found.make_context(found.name, list(words), parent=context)


@pytest.mark.parametrize("pair", [(None, None), ("a model.gguf", "d.gguf"), ("m.gguf", None)])
def test_every_command_is_one_that_the_program_takes(pair: tuple[str | None, str | None]) -> None:
    found = list(commands(*pair))
    assert len(found) >= 9
    for measures, line in found:
        assert measures
        parsed(line)
    assert any("bench scale" in line for _, line in found) == (pair[0] is None)


def test_without_a_pair_the_first_command_writes_the_one_that_the_others_name() -> None:
    (_, scale), (_, plan), *_ = commands(None, None)
    context = parsed(scale)
    assert str(context.params["out"]) == FOLDER
    target, draft = (BUNDLED[f"tiny-{role}"].removesuffix(".gguf") for role in ("target", "draft"))
    assert f"{target}-scaled-{context.params['to']}.gguf" == TARGET
    assert f"{draft}-scaled-{DRAFT_FOR[context.params['to']]}.gguf" == DRAFT
    assert parsed(plan).params["model"] == f"{FOLDER}/{TARGET}"


def test_they_are_printed_and_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "devices", lambda: [CPU, CARD])
    assert invoke(["doctor", "--gpu", "-m", "x.gguf"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    lines = told.out.splitlines()
    assert [(f"# {m}", c) for m, c in commands("x.gguf", None)] == list(
        zip(lines[::2], lines[1::2], strict=True)
    )
    assert invoke(["doctor", "--gpu", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["commands"]) == len(list(commands(None, None)))


@pytest.mark.parametrize(
    ("missing", "said"),
    [(None, "no GPU here"), (("NVIDIA GPU", "CMAKE_ARGS=x"), "build it with: CMAKE_ARGS=x")],
)
def test_without_a_gpu_it_says_what_the_commands_measure(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: tuple[str, str] | None,
    said: str,
) -> None:
    monkeypatch.setattr(devices, "devices", lambda: [CPU])
    monkeypatch.setattr(devices, "gpu_build_command", lambda found: missing)
    assert invoke(["doctor", "--gpu"]) == 0
    assert said in capsys.readouterr().err
