"""``specllama quantize``: make a smaller file from a larger one."""

from __future__ import annotations

from pathlib import Path

import click

from specllama.cli import output

EPILOG = """\b
Types: q4_0 is the INT4 type whose passes were bit-exact on every CPU tried; q4_k_m is a little
better and a little larger; q8_0 is the 8-bit type. GGUF has no FP8.

\b
Examples:
  specllama quantize model-f16.gguf model-q4_0.gguf --type q4_0
  specllama quantize model-f16.gguf draft.gguf --type q8_0 --prune-layers 8-23
"""


@click.command("quantize", epilog=EPILOG)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--type", "type_name", help="Type of the result: q4_0, q4_k_m, q8_0, q6_k, f16, …")
@click.option(
    "--prune-layers",
    "prune",
    metavar="LIST",
    help="Drop layers (4-11,20), for a draft cut out of its own target.",
)
@click.option("--pure", is_flag=True, help="Store every matrix as --type, without a mixture.")
@click.option(
    "--output-type",
    type=click.Choice(["f16", "q4_0", "q5_1", "q6_k", "q8_0"]),
    help="Type of the output matrix. Unset: chosen with --type.",
)
@click.option("--requantize", is_flag=True, help="Accept a source that is quantized already.")
@click.option(
    "-t",
    "--threads",
    default=0,
    type=click.IntRange(0, 1024),
    help="CPU threads; 0 uses all cores.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object about the result.")
def command(
    source: Path,
    destination: Path,
    type_name: str | None,
    prune: str | None,
    pure: bool,
    output_type: str | None,
    requantize: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Quantize the GGUF file SOURCE into DESTINATION with llama.cpp's own quantizer."""
    from specllama.cli.listing import note, size
    from specllama.cli.progress import Bar
    from specllama.models import quantize

    job = quantize.prepare(
        source,
        destination,
        type_name,
        prune=prune,
        threads=threads,
        pure=pure,
        requantize=requantize,
        output_type=output_type,
    )
    note(f"{source.name}: {size(job.header.file_bytes)} → about {size(job.expected)}")
    with Bar(destination.name, job.header.n_tensors, transfer=False) as bar:
        header = quantize.run(job, lambda done, of: bar.advanced(done))
    if as_json:
        output.document({**header.to_dict(), "source": str(source)})
    note(f"{destination}: {size(header.file_bytes)}, {header.quantization}")
    note(f'next: specllama run -m {destination} "Hello"')
