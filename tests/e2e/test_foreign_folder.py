"""A folder with modules named like Python's own must not stand in for them in child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
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
