"""``specllama convert``: turn a published draft head into a file that specllama loads."""

from __future__ import annotations

from pathlib import Path

import click

from specllama.cli import output
from specllama.cli.output import examples
from specllama.text import size


@click.command("convert", epilog=examples()["convert"])
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("-m", "--target", required=True, help="The model that the head was trained for.")
@click.option(
    "--type",
    "kind",
    type=click.Choice(["q8_0", "f16", "f32"]),
    default="q8_0",
    show_default=True,
    help="Type of the head's matrices.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object about the result.")
def command(checkpoint: Path, destination: Path, target: str, kind: str, as_json: bool) -> None:
    """Turn the published draft head in CHECKPOINT into the file DESTINATION."""
    from specllama.cli.listing import note
    from specllama.models.companions import HEADS, SIDECARS, kind_of
    from specllama.models.conversion import convert
    from specllama.models.gguf import read_header
    from specllama.models.refs import resolve

    convert(checkpoint, destination, read_header(resolve(target)), kind)
    header = read_header(destination)
    held = kind_of(header)
    if as_json:
        output.json_line({**header.to_dict(), "head": held, "source": str(checkpoint)})
    note(f"{destination}: {SIDECARS[held]}, {size(header.file_bytes)}, {header.quantization}")
    method = HEADS[held].method
    note(f'next: specllama run -m {target} --head {destination} --proposer {method} "Hello"')
