"""``specllama convert``: turn published draft heads into files that specllama loads."""

from __future__ import annotations

from pathlib import Path

import click

from specllama.cli import output

EPILOG = """\b
CHECKPOINT is a folder with medusa_lm_head.safetensors, or that file. A .pt file is a pickle; it
is read only if PyTorch can do so without running the code in it.

\b
Example:
  specllama convert medusa ./medusa-vicuna-7b vicuna-medusa.gguf --target vicuna-7b-q4_0.gguf
  specllama run -m vicuna-7b-q4_0.gguf --head vicuna-medusa.gguf --proposer medusa "Hello"
"""


@click.group("convert")
def command() -> None:
    """Turn published draft heads into files that specllama loads."""


@command.command("medusa", epilog=EPILOG)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("-m", "--target", required=True, help="The model that the heads were trained for.")
@click.option(
    "--type",
    "kind",
    type=click.Choice(["q8_0", "f16", "f32"]),
    default="q8_0",
    show_default=True,
    help="Type of the matrices.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object about the result.")
def medusa(checkpoint: Path, destination: Path, target: str, kind: str, as_json: bool) -> None:
    """Write the Medusa-1 heads of CHECKPOINT to the file DESTINATION."""
    from specllama.cli.listing import note, size
    from specllama.models.convert import convert_medusa
    from specllama.models.gguf import read_header
    from specllama.models.medusa_file import read_facts
    from specllama.models.refs import resolve

    convert_medusa(checkpoint, destination, read_header(resolve(target)), kind)
    header = read_header(destination)
    facts = read_facts(header)
    if as_json:
        output.document({**header.to_dict(), "heads": facts.heads, "source": str(checkpoint)})
    note(f"{destination}: {facts.heads} heads, {size(header.file_bytes)}, {header.quantization}")
    note(f"next: specllama run -m {target} --head {destination} --proposer medusa “Hello”")
