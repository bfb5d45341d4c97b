"""Other engines over the bundled pair: how each is started, with and without its speculation.

    python tests/lab/engine_ways.py vllm-draft --port 9709      in the foreground
    python tests/lab/engine_ways.py                             which there are, which are here

An engine is here if a variable says where: LLAMA_SERVER names the program; MLX_LM, TRANSFORMERS and
VLLM name the folders of virtual environments. HF_PAIR names a folder for the exported pair.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from export_hf import export

from specllama.models.refs import resolve_pair

K = 4  # tokens drafted at once
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Place:
    """Where the models are: files for llama.cpp, folders for the others."""

    target: Path
    draft: Path
    folders: Path

    @staticmethod
    def make() -> Place:
        """The bundled pair, exported once."""
        target, draft = resolve_pair("tiny")
        assert draft is not None
        folders = Path(os.environ.get("HF_PAIR", "build/hf")).absolute()
        for name, file in (("target", target), ("draft", draft)):
            if not (folders / name / "tokenizer_config.json").is_file():
                export(file, folders / name)
        (folders / "cache").mkdir(exist_ok=True)  # without it mlx-lm and transformers list nothing
        return Place(target, draft, folders)

    def filled(self, text: str, port: int = 0) -> str:
        """``text`` with its {target}, {draft}, {hf} and {port} filled in; other braces stay."""
        names = {"target": self.target, "draft": self.draft, "hf": self.folders, "port": port}
        for name, value in names.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text


@dataclass(frozen=True, slots=True)
class Way:
    """One way to start an engine.

    Attributes:
        variable: names where the engine is; program: below that folder, "" for the program itself.
        arguments: see ``Place.filled``; so are the values of environment.
        drafts: whether it speculates; switched: only in requests that ask for it.
        wrong: what its speculation is known to do here, "" where it should be lossless.
    """

    name: str
    variable: str
    program: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    drafts: bool = False
    switched: bool = False
    wrong: str = ""

    @property
    def at(self) -> Path | None:
        """The program; None where it is not installed."""
        where = os.environ.get(self.variable)
        found = Path(where or "nowhere", self.program) if self.program else Path(where or "nowhere")
        return found.absolute() if found.is_file() else None

    def command(self, place: Place, port: int) -> list[str]:
        return [str(self.at), *(place.filled(argument, port) for argument in self.arguments)]

    def variables(self, place: Place) -> dict[str, str]:
        """Of its process: ours, and what this way adds."""
        own = {name: place.filled(value) for name, value in self.environment.items()}
        return {**os.environ, **own}


_LLAMA = ("-m", "{target}", "-c", str(CONTEXT), "-t", "1", "--metrics", "--alias", "tiny",
          "--host", "127.0.0.1", "--port", "{port}")  # fmt: skip
_DRAFT = ("-md", "{draft}", "--spec-type", "draft-simple", "--spec-draft-n-max", str(K))
_MLX = ("--model", "{hf}/target", "--host", "127.0.0.1", "--port", "{port}", "--temp", "0")
_MLX_DRAFT = ("--draft-model", "{hf}/draft", "--num-draft-tokens", str(K))
_VLLM = (
    "-m", "vllm.entrypoints.openai.api_server", "--model", "{hf}/target",
    "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "{port}", "--dtype", "float32",
    "--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", "4",
)  # fmt: skip
_EACH = ("--per-request-spec-decode-metrics", "detailed", "--speculative-config")
# a pair this small is slower on more threads than one, many times so beside other work
_HUB = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "{hf}/cache", "OMP_NUM_THREADS": "1"}
_VLLM_ENV = {
    **_HUB, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip

WAYS = (
    Way("llama-plain", "LLAMA_SERVER", "", (*_LLAMA, "-np", "1")),
    Way("llama-draft", "LLAMA_SERVER", "", (*_LLAMA, "-np", "1", *_DRAFT), drafts=True),
    Way("llama-slots", "LLAMA_SERVER", "", (*_LLAMA, "-np", "4", *_DRAFT), drafts=True,
        wrong="slots round differently"),
    Way("llama-synth", "LLAMA_SERVER", "", (*_LLAMA, "-np", "1", *_DRAFT, "--spec-synth-len", "3"),
        drafts=True, wrong="accepts by the dice, for timing only"),
    Way("mlx-plain", "MLX_LM", "bin/mlx_lm.server", _MLX, _HUB),
    Way("mlx-draft", "MLX_LM", "bin/mlx_lm.server", (*_MLX, *_MLX_DRAFT), _HUB, drafts=True,
        switched=True, wrong="wrong text once its prompt cache is hit"),
    Way("mlx-nocache", "MLX_LM", "bin/mlx_lm.server",
        (*_MLX, *_MLX_DRAFT, "--prompt-cache-size", "0"), _HUB, drafts=True, switched=True),
    Way("transformers", "TRANSFORMERS", "bin/transformers",
        ("serve", "{hf}/target", "--host", "127.0.0.1", "--port", "{port}", "--device", "cpu",
         "--dtype", "float32"), _HUB, switched=True),
    Way("vllm-plain", "VLLM", "bin/python", _VLLM, _VLLM_ENV),
    Way("vllm-ngram", "VLLM", "bin/python",
        (*_VLLM, *_EACH, json.dumps({"method": "ngram", "num_speculative_tokens": K,
                                "prompt_lookup_max": 4, "prompt_lookup_min": 2})),
        _VLLM_ENV, drafts=True),
    Way("vllm-draft", "VLLM", "bin/python",
        (*_VLLM, *_EACH, json.dumps({"method": "draft_model", "model": "{hf}/draft",
                                "num_speculative_tokens": K})),
        _VLLM_ENV, drafts=True, wrong="noise at temperature above 0 on CPUs"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("way", nargs="?", choices=[way.name for way in WAYS])
    parser.add_argument("--port", type=int, default=9700)
    asked = parser.parse_args()
    if asked.way is None:
        for way in WAYS:
            print(f"{way.name:13} {way.at or f'not here ({way.variable} says where)'}")
        return
    way = next(way for way in WAYS if way.name == asked.way)
    if way.at is None:
        parser.error(f"{way.name} is not here: {way.variable} says where")
    place = Place.make()
    command = way.command(place, asked.port)
    os.execve(command[0], command, way.variables(place))


if __name__ == "__main__":
    main()
