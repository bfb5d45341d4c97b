"""``make gpu-check`` before anything is installed: the GPU, what builds for it, the pack."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import gpu_build as build
import gpu_pack as pack
import pytest

SCRIPT = Path(build.__file__)
LIBRARY = "LLAMA_CPP_LIB_PATH"
Programs = Callable[..., None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Puts programs on an otherwise empty PATH: what each prints, by name."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)

    def put(**printed: str) -> None:
        for name, text in printed.items():
            path = folder / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\n")
            path.chmod(0o755)

    return put


def test_without_a_gpu_it_says_so_at_once_and_builds_nothing(tmp_path: Path) -> None:
    into = tmp_path / "into"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--into", into],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "building for" in done.stdout:
        pytest.skip("there is a GPU here")
    assert done.returncode == 1
    assert done.stderr.startswith("gpu-check: ")
    assert "Traceback" not in done.stderr
    assert not into.exists()


def test_a_card_without_a_toolkit_names_what_is_missing(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(nvidia_smi="8.9, A Card")
    monkeypatch.setattr(build, "program", lambda *names: None)
    with pytest.raises(build.Stop, match="A Card is here, but no CUDA toolkit"):
        build.find_backend()


def test_cuda_is_built_for_the_cards_that_are_here_and_no_other(programs: Programs) -> None:
    programs(nvidia_smi="9.0, A Card\n8.6, Another\n9.0, A Card", nvcc="")
    found = build.find_backend()
    assert found.name == "cuda"
    assert found.defines["CMAKE_CUDA_ARCHITECTURES"] == "86-real;90-real"
    assert found.defines["GGML_CUDA_NCCL"] == "OFF"


def test_a_toolkit_of_python_wheels_is_put_together(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "nvidia" / "cu13"
    for name in ("include/cublas_v2.h", "lib/libcublas.so.13", "lib/libcublasLt.so.13"):
        (wheels / name).parent.mkdir(parents=True, exist_ok=True)
        (wheels / name).touch()
    programs(nvidia_smi="9.0, A Card", nvcc=f"#$ TOP={tmp_path / 'cuda'}")
    monkeypatch.setattr(build, "wheel_folders", lambda: [wheels])
    monkeypatch.setattr(build, "SYSTEM", ())
    monkeypatch.setattr(build, "DEFAULT_CUDA", tmp_path / "none")
    defines = build.find_backend("cuda").defines
    assert defines["CUDA_cublas_LIBRARY"] == str(wheels / "lib/libcublas.so.13")
    assert defines["CMAKE_CUDA_FLAGS"] == f"-I{wheels / 'include'}"
    assert defines["CMAKE_BUILD_RPATH"] == str(wheels / "lib")
    assert "CUDA_CUDART" not in defines


def test_other_backends_can_be_asked_for(programs: Programs) -> None:
    assert build.find_backend("rpc").defines == {"GGML_RPC": "ON"}
    with pytest.raises(build.Stop, match="glslc"):
        build.find_backend("vulkan")
    programs(glslc="")
    assert build.find_backend("vulkan").defines == {"GGML_VULKAN": "ON"}
    with pytest.raises(build.Stop, match="no backend 'abacus'"):
        build.find_backend("abacus")


def test_a_step_that_fails_shows_its_last_words_and_one_that_takes_too_long_can_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = build.Work(tmp_path, 10, None)
    with pytest.raises(build.Stop, match="compiling: failed with status 3"):
        work.run("compiling", sys.executable, "-c", "print('no header'); raise SystemExit(3)")
    assert "no header" in capsys.readouterr().out
    late = build.Work(tmp_path, 0, None)
    with pytest.raises(build.Stop, match="call again to go on"):
        late.run("compiling", sys.executable, "-c", "import time; time.sleep(60)")
    work.run("linking", sys.executable, "-c", "")
    assert "linking, seconds" in (tmp_path / "build.json").read_text()


NEEDED = (
    "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE.md", "llama_cpp/llama_cpp.py",
    "vendor/llama.cpp/CMakeLists.txt", "vendor/llama.cpp/LICENSE",
    "vendor/llama.cpp/cmake/build-info.cmake", "vendor/llama.cpp/scripts/ui-assets.cmake",
    "vendor/llama.cpp/include/llama.h", "vendor/llama.cpp/src/llama.cpp",
    "vendor/llama.cpp/src/models/llama.cpp", "vendor/llama.cpp/common/build-info.cpp.in",
    "vendor/llama.cpp/ggml/src/ggml-cuda/template-instances/mmq-instance-q4_k.cu",
    "vendor/llama.cpp/ggml/src/ggml-metal/ggml-metal.metal",
    "vendor/llama.cpp/ggml/src/ggml-vulkan/vulkan-shaders/add.comp",
    "vendor/llama.cpp/ggml/src/ggml-vulkan/vulkan-shaders/types.glsl",
    "vendor/llama.cpp/tools/mtmd/models/llava.cpp", "vendor/llama.cpp/tools/server/server.cpp",
    "vendor/llama.cpp/tools/ui/CMakeLists.txt", "vendor/llama.cpp/tools/ui/ui.h.in",
    "vendor/llama.cpp/vendor/nlohmann/json.hpp", "vendor/llama.cpp/licenses/LICENSE-jsonhpp",
)  # fmt: skip
USELESS = (
    "docs/index.md", "examples/high_level_api/chat.py", "tests/test_llama.py", ".git/HEAD",
    "vendor/llama.cpp/models/ggml-vocab-llama-bpe.gguf", "vendor/llama.cpp/docs/build.md",
    "vendor/llama.cpp/tests/test-sampling.cpp", "vendor/llama.cpp/media/llama1-icon.png",
    "vendor/llama.cpp/tools/ui/src/app.html", "vendor/llama.cpp/tools/ui/package-lock.json",
    "vendor/llama.cpp/tools/server/tests/unit/test_chat.py", "vendor/llama.cpp/benches/x.md",
    "vendor/llama.cpp/tools/mtmd/test-1.jpeg", "vendor/llama.cpp/conversion/base.py",
)  # fmt: skip


def test_the_packed_source_has_what_builds_and_nothing_else(tmp_path: Path) -> None:
    sdist = tmp_path / "llama_cpp_python-0.0.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in (*NEEDED, *USELESS):
            data = b'[project]\ndependencies = ["numpy>=1.20.0"]\n'
            member = tarfile.TarInfo(f"llama_cpp_python-0.0.0/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    small = pack.repack(sdist, tmp_path)
    with tarfile.open(small) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names == set(NEEDED)
    assert pack.needs_of(sdist) == ["numpy>=1.20.0"]
    work = build.Work(tmp_path / "work", 1, None)
    assert work.unpack(tmp_path / small.name).name == "llama_cpp_python-0.0.0"
    assert work.unpack(tmp_path).joinpath("vendor/llama.cpp/src/llama.cpp").is_file()


def test_everything_but_the_binding_travels_as_a_wheel() -> None:
    wanted = list(pack.requirements())
    assert build.BINDING not in wanted
    assert {need for need in build.PROJECT["dependencies"] if need != build.BINDING} <= set(wanted)
    assert {*build.BUILDERS, build.SCALING} <= set(wanted)


def test_the_commit_is_that_of_the_pinned_binding() -> None:
    assert build.commit() == "0c1e57098"


def test_the_measuring_is_handed_to_the_script_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(
        build.subprocess, "call", lambda command, env: called.append([*command, env[LIBRARY]]) or 0
    )
    assert build.Work(tmp_path, 10, None).check(tmp_path / "lib", ["--only", "load"]) == 0
    ((python, script, *rest),) = called
    assert python == str(tmp_path / "env" / "bin" / "python")
    assert Path(script) == SCRIPT.with_name("gpu_command.py")
    assert Path(script).is_file()
    assert rest[-4:] == [str(tmp_path / "report"), "--only", "load", str(tmp_path / "lib")]
