"""``specllama bench load``: servers under load, side by side."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import click

from specllama.cli import diagnostics
from specllama.cli.listing import Column, json_option, listing
from specllama.cli.options import GroupedCommand, length_option, prompts_option, seed_option
from specllama.remote.address import KEY_VARIABLE

EPILOG = """\b
Examples:
  specllama bench load http://127.0.0.1:8484                   one and four clients
  specllama bench load http://127.0.0.1:8484#none http://127.0.0.1:8484
                                               with and without drafting
  specllama bench load http://127.0.0.1:8484 http://127.0.0.1:8080 --clients 8
                                               beside another server (llama-server, vLLM, ...)
"""


@click.command("load", cls=GroupedCommand, epilog=EPILOG)
@click.argument("servers", nargs=-1, required=True, metavar="URL[#METHOD]…")
@click.option(
    "--clients", multiple=True, type=click.IntRange(1, 256), metavar="N",
    help="Number of clients at the same time; repeatable. Default: 1 and 4.",
)  # fmt: skip
@prompts_option
@click.option("-n", "--count", default=16, show_default=True, help="Number of requests in a wave.")
@length_option(64, least=2)
@click.option("-r", "--repetitions", type=click.IntRange(1), default=3, show_default=True,
              help="Number of times that each wave is measured.")  # fmt: skip
@click.option("--alone", type=click.IntRange(0), default=8, show_default=True, metavar="N",
              help="Number of requests that the first server gets again, one by one.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True,
              help="Sampling temperature of the replies.")  # fmt: skip
@seed_option
@json_option
def command(
    servers: tuple[str, ...],
    clients: tuple[int, ...],
    prompts: Path | None,
    count: int,
    max_tokens: int,
    repetitions: int,
    alone: int,
    temperature: float,
    seed: int,
    as_json: bool,
) -> None:
    """Time running servers while several clients ask at once.

    The servers get the same requests, in turns, and each wave gets other requests while there are
    some. specllama recognises the engine. If a request can switch drafting, #none and #auto do so.

    \b
    ratio        tokens per second over those of the first server, with as many clients, and an
                 interval that holds the ratio 19 of 20 times, from how much repetitions differ
    CPU          processor time of a token, and how many times less than the first server's (only
                 servers on this machine, Linux)
    first token  time to the first token, for half and for 95 % of the requests; reply: to the end
    accepted     share of the drafted tokens, if the server reports it in its replies, or counts it
                 while it has no other requests
    pace         speed of the reply that fell furthest behind the first server's same reply
    same text    replies that equal what the first server writes for one client alone (--alone)
    """
    from specllama.bench.experiment import tasks_of
    from specllama.bench.load import ClientLoad, LoadRow, Wave
    from specllama.bench.prompts import load_prompts
    from specllama.bench.remote_arm import load_arm
    from specllama.settings.params import GenerateParams

    def ended(wave: Wave) -> None:
        if not as_json:
            speed = f"{wave.tok_per_s:.1f}" if wave.tok_per_s else "–"
            diagnostics.note(f"{wave.arm}, {wave.clients} clients: {speed} tok/s")

    tasks = tasks_of(load_prompts(prompts), (temperature,), max_tokens, seed)
    with ExitStack() as stack:
        arms = []
        for text in servers:
            arms.append(load_arm(text, GenerateParams(), os.environ.get(KEY_VARIABLE, "")))
            stack.callback(arms[-1].close)
        load = ClientLoad(arms, tasks, count)
        found = load.rows(clients or (1, 4), repetitions, alone=alone, wave_ended=ended)
    listing(as_json, "rows", found, columns(), to_dict=LoadRow.to_dict)


def columns() -> list[Column]:
    from specllama.bench.load import COLUMNS

    return [Column(head, cell, right=i > 0) for i, (head, cell) in enumerate(COLUMNS.items())]
