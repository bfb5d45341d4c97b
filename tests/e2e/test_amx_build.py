"""How ``make`` builds llama.cpp for a processor with AMX: tried with the compiler that is here."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"
PROBE = """#include <immintrin.h>
void f() { struct { unsigned char at[64]; } t = {}; t.at[48] = 119; _tile_loadconfig(&t); }
"""
FLAGS = "-fno-dse", "-fno-tree-dse"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64" or shutil.which("c++") is None,
    reason="needs Linux on x86-64 and a C++ compiler",
)


def stores(folder: Path, *command: str) -> bool:
    """True if a compiler keeps what the tile configuration reads."""
    source = folder / "ggml-cpu" / "amx" / "mmq.cpp"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(PROBE, "utf-8")
    words = [*command, "-O3", "-mamx-tile", "-S", str(source), "-o", "-"]
    return "$119" in subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_the_file_of_tiles_keeps_its_stores_and_no_other_is_touched(tmp_path: Path) -> None:
    if not stores(tmp_path, "c++", *FLAGS):
        pytest.skip("this compiler spells the store otherwise")
    assert stores(tmp_path, str(TOOLS / "amx_stores.sh"), "c++")
    said = [str(TOOLS / "amx_stores.sh"), "echo", "src/ggml-cpu/amx/amx.cpp"]
    assert subprocess.check_output(said, text=True) == "src/ggml-cpu/amx/amx.cpp\n"


@pytest.mark.parametrize("amx", [True, False])
def test_it_is_built_so_only_where_processor_and_compiler_ask_for_it(
    tmp_path: Path, amx: bool
) -> None:
    """The first wheel dies here, as one of pip's cache would: it is built again."""
    log = tmp_path / "log"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "[$CMAKE_ARGS] $*" >> "{log}"\ncase "$*" in\n'
        "*freeze*) echo llama_cpp_python==0.3.36 ;;\n"
        f'*trial*) test -e "{tmp_path}/lives" || {{ touch "{tmp_path}/lives"; exit 1; }} ;;\nesac\n'
    )
    python.chmod(0o755)
    cpus = tmp_path / "cpuinfo"
    cpus.write_text(
        "flags\t: fpu avx2 amx_bf16 amx_tile amx_int8\n" if amx else "flags : fpu avx2\n"
    )
    subprocess.run(
        ["sh", str(TOOLS / "install.sh"), str(python), "-e", ".[test]"],
        env={"PATH": "/usr/bin:/bin", "CPUINFO": str(cpus)},
        check=True,
        capture_output=True,
    )
    lines = [line for line in log.read_text("utf-8").splitlines() if line.startswith("[")]
    installs = [line for line in lines if " install " in line]
    assert installs[0].endswith("-m pip install -e .[test]")
    assert installs[1].endswith("--no-binary llama-cpp-python llama_cpp_python==0.3.36")
    assert sum("cache remove llama_cpp_python" in line for line in lines) == 1
    drops = stores(tmp_path, "c++", *FLAGS) and not stores(tmp_path, "c++")
    assert all(("amx_stores.sh" in line) is (amx and drops) for line in lines)
