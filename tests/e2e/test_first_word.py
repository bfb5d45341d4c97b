"""What is not done before the first word."""

import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from specllama import Engine, EngineOptions, GenerateParams, Message
from specllama.backend import llama_vocab

OPTIONS = EngineOptions(n_ctx=512, threads=1)


def test_the_vocabulary_is_not_looked_through_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Counter[int] = Counter()
    piece = llama_vocab.ll.llama_token_to_piece

    def counted(vocab: Any, token: int, *rest: Any) -> int:
        asked[token] += 1
        return int(piece(vocab, token, *rest))

    monkeypatch.setattr(llama_vocab.ll, "llama_token_to_piece", counted)
    with Engine.load("tiny-target", "none", OPTIONS) as engine:
        [*_] = engine.generate([Message("user", "hi")], GenerateParams(max_tokens=4, seed=1))
        assert len(asked) < 100
        vocab = engine.vocab
        longest = max(len(vocab.piece(t, special=True)) for t in range(vocab.n_tokens))
        # a letter of the byte alphabet takes up to two bytes in the file
        assert longest <= vocab.longest <= 2 * longest


def test_weights_are_read_before_what_does_not_need_them_is_imported() -> None:
    program = """
import sys
from specllama.engine.opening import OpeningPair
from specllama.settings.params import EngineOptions
late = ("specllama.engine.engine specllama.speculative specllama.store "
        "filelock email numpy.random specllama.remote").split()
with OpeningPair("tiny-target", "none", EngineOptions(n_ctx=512, threads=1)) as opening:
    print([name for name in late if name in sys.modules])
    opening.pair().close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_binding_has_all_of_its_package_for_who_asks() -> None:
    program = """
import sys
from specllama.backend.devices import build_info, devices
assert devices()
print("llama_cpp.llama" in sys.modules, build_info().binding)
import llama_cpp
low = llama_cpp.llama_decode
print(llama_cpp.Llama.__name__, llama_cpp.__version__, llama_cpp.llama_decode is low)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    version = metadata.version("llama-cpp-python")
    assert done.stdout == f"False {version}\nLlama {version} True\n", done.stderr


# -- a folder with modules named like Python's own --


NAMES = ("threading", "random", "json", "nt", "queue", "signal", "tempfile", "types")
HOST = """
from specllama.engine.host import EngineHost, LoadEngine
from specllama.settings.params import EngineOptions
if __name__ == "__main__":
    host = EngineHost(LoadEngine("tiny", None, EngineOptions(n_ctx=256)))
    print(host.start().target.n_ctx)
    host.close()
"""
QUANTIZE = """
from pathlib import Path
from specllama.models.quantization import prepare, run
from specllama.models.refs import bundled
run(prepare(bundled("tiny-draft"), Path("small.gguf"), "q4_0", requantize=True))
print(Path("small.gguf").exists())
"""


@pytest.mark.parametrize(
    ("script", "said"), [(HOST, "256"), (QUANTIZE, "True")], ids=["engine", "quantizer"]
)
def test_children_import_nothing_from_the_folder(tmp_path: Path, script: str, said: str) -> None:
    folder, scripts = tmp_path / "folder", tmp_path / "scripts"
    folder.mkdir()
    scripts.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name} of the folder')\n")
    program = scripts / "program_of_ours.py"
    program.write_text(script)
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split()[-1:] == [said], done.stderr
