"""``specllama quantize``: a smaller file made from a larger one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specllama.cli import output
from specllama.cli.output import examples
from specllama.errors import UsageError
from specllama.text import size

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader


@click.command("quantize", epilog=examples()["quantize"])
@click.argument("source")
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--type", "type_name", help="Type of the result: q4_0, q4_k_m, q8_0, q6_k, f16, …")
@click.option("--draft-tokens", metavar="N", type=click.IntRange(1),
              help="Write a draft model that guesses only the N likeliest tokens: its steps take "
              "less time. Of a file with NextN layers, these alone, for --head.")  # fmt: skip
@click.option("--likely-in", metavar="FILE|FOLDER", multiple=True,
              help="Texts that tell which tokens are likely; repeatable. Unset: the vocabulary's "
              "order.")  # fmt: skip
@click.option("--pure", is_flag=True, help="Store every matrix as --type, without a mixture.")
@click.option("--output-type", type=click.Choice(["f16", "q4_0", "q5_1", "q6_k", "q8_0"]),
              help="Type of the output matrix. Unset: chosen with --type.")  # fmt: skip
@click.option("--imatrix", type=click.Path(path_type=Path), metavar="FILE",
              help="Importance matrix, a GGUF file of llama-imatrix: the weights that matter "
              "lose least.")  # fmt: skip
@click.option("--requantize", is_flag=True, help="Accept a source that is quantized already.")
@click.option("-t", "--threads", default=0, type=click.IntRange(0, 1024),
              help="CPU threads; 0 uses all cores.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object about the result.")
def command(
    source: str,
    destination: Path,
    draft_tokens: int | None,
    likely_in: tuple[str, ...],
    as_json: bool,
    **asked: Any,
) -> None:
    """Quantize the GGUF file SOURCE into DESTINATION with llama.cpp's own quantizer."""
    from specllama.backend import trial
    from specllama.cli.listing import note
    from specllama.cli.progress import Bar
    from specllama.models import quantization, refs

    trial.require()
    if likely_in and draft_tokens is None:
        raise UsageError(
            "--likely-in tells which tokens a draft keeps", "say how many: --draft-tokens 32768"
        )
    file = refs.resolve(source)
    if draft_tokens is not None:
        if any(value for name, value in asked.items() if name != "threads"):
            raise UsageError("--draft-tokens copies weights as they are", "give it without --type")
        header, flag = _write_fewer(file, destination, draft_tokens, likely_in)
        if as_json:
            output.json_line({**header.to_dict(), "source": source})
        n = header.rows or header.vocab_size
        note(f"{destination}: {size(header.file_bytes)}, {n:,} tokens")
        of = source if flag == "--head" else "TARGET"
        note(f'next: specllama run -m {of} {flag} {destination} "Hello"')
        return
    job = quantization.prepare(file, destination, **asked)
    note(f"{file.name}: {size(job.header.file_bytes)} → about {size(job.expected)}")
    with Bar(destination.name, job.header.n_tensors) as bar:
        header = quantization.run(job, bar.advanced)
    if as_json:
        output.json_line({**header.to_dict(), "source": source})
    note(f"{destination}: {size(header.file_bytes)}, {header.quantization}")
    if (more := header.file_bytes - job.header.file_bytes) > 0:
        note(f"that is {size(more)} more than {file.name}, and no better: it holds what that held")
    note(f'next: specllama run -m {destination} "Hello"')


def _write_fewer(
    source: Path, destination: Path, n: int, texts: tuple[str, ...]
) -> tuple[GgufHeader, str]:
    """Write a draft model, or the NextN layers of a model as a head, of ``n`` tokens; its header,
    and the flag that takes it."""
    from specllama.backend import same_rows
    from specllama.cli.listing import note
    from specllama.models import nextn_file, quantization, trimmed, words
    from specllama.models.gguf import read_header
    from specllama.models.nextn_blocks import nextn_blocks

    quantization.check_destination(destination)
    model = read_header(source)
    is_head = nextn_blocks(model) > 0
    (nextn_file if is_head else trimmed).check_source(model)
    counts: dict[int, int] = {}
    if texts:
        from specllama.backend.llama_vocab import count_tokens
        from specllama.store.texts import read_texts

        counts = count_tokens(source, model.pre_tokenizer or "", read_texts(texts)[0])
    if is_head:
        says = words.likeliest(model, n, counts, nextn_file.places(model))
        nextn_file.write_head(model, destination, says)
    else:
        says = trimmed.choose(model, n, counts)
        trimmed.write(model, destination, says)
        same_rows.compare(source, destination)
        note(
            f"a step of it reads {trimmed.work(model, n):.0%} of what a step of {source.name} does"
        )
    if counts:
        seen = sum(counts.get(int(token), 0) for token in says) / max(sum(counts.values()), 1)
        note(f"{seen:.1%} of the tokens of these texts are among them")
    return read_header(destination), "--head" if is_head else "-d"
