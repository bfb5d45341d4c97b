"""``make gpu-check``: llama.cpp built for the GPU that is here, then everything is measured on it.

    python3 tests/lab/gpu/gpu_build.py [--wheels FOLDER --source FOLDER] [--minutes 10] [its flags]

Nothing but the standard library is needed: this runs before anything is installed. In a folder of
its own (``build/gpu-check``) it makes an environment, builds llama.cpp once with cmake (the
library first, then ``llama-bench`` and ``llama-server``, which share it), installs the binding as
plain Python over that library, and hands over to ``gpu_command.py``. Whatever is there
already is not made again, so the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
BINDING = next(d for d in PROJECT["dependencies"] if d.startswith("llama-cpp-python"))
BUILDERS = ("scikit-build-core>=0.11", "setuptools>=77", "ninja")
SCALING = "gguf>=0.17"
TOOLS = ("llama-bench", "llama-server")
COMMON = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "LLAMA_ALL_WARNINGS": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}


DEFAULT_CUDA = Path("/usr/local/cuda")
SYSTEM = tuple(map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")))


class Stop(Exception):
    """Why it cannot go on, and what to do, in a sentence."""


@dataclass(frozen=True)
class Backend:
    """What llama.cpp is built for: cmake's definitions, and what was found, in words."""

    name: str
    words: str
    defines: dict[str, str] = field(default_factory=dict)


# --- which GPU is here, and what builds for it ----------------------------------------------------


def find_backend(wanted: str = "") -> Backend:
    """The backend for this machine's GPU, or the one that was asked for.

    Raises:
        Stop: there is no GPU, or nothing here builds for it.
    """
    known = {"cuda": cuda, "metal": metal, "hip": hip, "vulkan": vulkan}
    if wanted in ("cpu", "rpc"):
        return Backend(wanted, wanted.upper(), {"GGML_RPC": "ON"} if wanted == "rpc" else {})
    if wanted:
        if wanted not in known:
            raise Stop(f"there is no backend {wanted!r}: cuda, metal, hip, vulkan, rpc or cpu")
        return known[wanted]()
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return metal()
    if shutil.which("nvidia-smi"):
        return cuda()
    if Path("/dev/kfd").exists():
        return hip() if shutil.which("hipconfig") else vulkan()
    if any(Path("/dev/dri").glob("renderD*")):
        return vulkan()
    raise Stop(
        "there is no GPU here: no NVIDIA driver (nvidia-smi), no AMD one (/dev/kfd), no other "
        "(/dev/dri/renderD*), and this is no Apple silicon. Nothing was built; BACKEND=cpu runs it "
        "all on the processor"
    )


def cuda() -> Backend:
    """CUDA for the compute capability of the cards that are here, and for no other."""
    cards = output("nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader")
    found = re.findall(r"^(\d+)\.(\d+), *(.+)$", cards, re.M)
    if not found:
        raise Stop(f"nvidia-smi names no card that can be used: {cards.strip()[-200:]}")
    nvcc = program("nvcc", "/usr/local/cuda/bin", "/opt/cuda/bin", os.environ.get("CUDA_HOME", ""))
    if nvcc is None:
        raise Stop(
            f"{found[0][2]} is here, but no CUDA toolkit: nvcc is neither on PATH nor in "
            "/usr/local/cuda. Install the CUDA toolkit (12.0 or newer), or use BACKEND=vulkan"
        )
    architectures = sorted({major + minor for major, minor, _ in found})
    defines = {
        "GGML_CUDA": "ON",
        "GGML_CUDA_NCCL": "OFF",
        "CMAKE_CUDA_COMPILER": str(nvcc),
        "CMAKE_CUDA_ARCHITECTURES": ";".join(f"{a}-real" for a in architectures),
    }
    return Backend("cuda", f"CUDA, {found[0][2]}", defines | toolkit_parts(nvcc))


def toolkit_parts(nvcc: Path) -> dict[str, str]:
    """Definitions for what cmake would not find: cuBLAS and the driver's library.

    A toolkit from Python wheels has its libraries without the name that linkers look for
    (libcublas.so), and cuBLAS in a folder of its own.
    """
    roots = [nvcc.resolve().parents[1], DEFAULT_CUDA, *wheel_folders()]
    roots += [Path(p) for p in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if p]
    told = re.search(r"^#\$ TOP=(.+)$", output(str(nvcc), "--dryrun", "x.cu"), re.M)
    if told:  # nvcc may be a script that calls another
        roots.insert(0, Path(os.path.normpath(told[1])))
    inside = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    places = [root / part for root in roots for part in inside]
    driver = [Path("/usr/local/nvidia/lib64"), Path("/usr/local/nvidia/lib"), *SYSTEM]
    driver += [place / "stubs" for place in places]
    driver += [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    defines: dict[str, str] = {}
    run_paths = []
    for name, variable in (
        ("cudart", "CUDA_CUDART"),
        ("cublas", "CUDA_cublas_LIBRARY"),
        ("cublasLt", "CUDA_cublasLt_LIBRARY"),
    ):
        if found := library_in([*places, *SYSTEM], name):
            defines[variable] = str(found)
            run_paths.append(str(found.parent))
    if headers := next((r for r in roots if (r / "include/cublas_v2.h").exists()), None):
        defines["CMAKE_CUDA_FLAGS"] = f"-I{headers / 'include'}"
    if found := library_in(driver, "cuda"):
        defines["CUDA_cuda_driver_LIBRARY"] = str(found)
    else:
        defines["GGML_CUDA_NO_VMM"] = "ON"
    if run_paths:
        defines["CMAKE_BUILD_RPATH"] = ";".join(dict.fromkeys(run_paths))
    return defines


def wheel_folders() -> list[Path]:
    """Where Python wheels keep parts of the CUDA toolkit."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return [path for place in places for path in sorted(Path(place).glob("cu[0-9]*"))]


def library_in(places: Sequence[Path], name: str) -> Path | None:
    for place in places:
        for path in (place / f"lib{name}.so", *sorted(place.glob(f"lib{name}.so.*"))):
            if path.exists():
                return path
    return None


def metal() -> Backend:
    if output("xcrun", "--find", "clang") == "":
        raise Stop("Apple's command line tools are missing: xcode-select --install")
    return Backend("metal", "Metal", {"GGML_METAL": "ON", "GGML_METAL_EMBED_LIBRARY": "ON"})


def hip() -> Backend:
    clang = output("hipconfig", "-l").strip()
    if not clang:
        raise Stop("an AMD GPU is here, but no ROCm (hipconfig); install ROCm, or BACKEND=vulkan")
    os.environ.setdefault("HIPCXX", f"{clang}/clang")
    os.environ.setdefault("HIP_PATH", output("hipconfig", "-R").strip())
    targets = sorted(set(re.findall(r"\bgfx[0-9a-f]+\b", output("rocminfo"))))
    defines = {"GGML_HIP": "ON"} | ({"GPU_TARGETS": ";".join(targets)} if targets else {})
    return Backend("hip", f"ROCm, {', '.join(targets) or 'any target'}", defines)


def vulkan() -> Backend:
    if shutil.which("glslc") is None:
        raise Stop(
            "a GPU is here, but nothing that builds for it: install Vulkan's compiler and headers "
            "(glslc, libvulkan-dev, spirv-headers), CUDA's toolkit or ROCm"
        )
    return Backend("vulkan", "Vulkan", {"GGML_VULKAN": "ON"})


def program(name: str, *folders: str) -> Path | None:
    for folder in ("", *(f for f in folders if f)):
        for place in (folder, f"{folder}/bin") if folder else (None,):
            if found := shutil.which(name, path=place):
                return Path(found)
    return None


def output(*command: str) -> str:
    """What a command says; "" where it is missing or fails to start."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 or "--dryrun" in command else ""


# --- building -------------------------------------------------------------------------------------


class Work:
    """A folder that is filled step by step, within so many minutes; what is done stays done."""

    def __init__(self, folder: Path, minutes: float, wheels: Path | None) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.begun = time.monotonic()
        self.deadline = self.begun + 60 * minutes
        self.python = self.folder / "env" / "bin" / "python"
        self.offline = ["--no-index", "--find-links", str(wheels.absolute())] if wheels else []
        self._facts = self.folder / "build.json"

    def facts(self) -> dict[str, Any]:
        """What the report will say of the build."""
        return json.loads(self._facts.read_text()) if self._facts.exists() else {}

    def note(self, **facts: object) -> None:
        self._facts.write_text(json.dumps({**self.facts(), **facts}, indent=1))

    def run(self, what: str, *command: str | Path) -> None:
        """Run a step of the build; the next call goes on where this one was stopped."""
        begin = time.monotonic()
        print(f"[{begin - self.begun:5.0f} s] {what}", flush=True)
        log = self.folder / "build.log"
        with log.open("wb") as said:
            process = subprocess.Popen([str(c) for c in command], stdout=said, stderr=said)
            try:
                status = process.wait(max(self.deadline - begin, 1))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait()
                raise Stop(f"{what}: not done in the minutes given; call again to go on") from None
        if status:
            print("\n".join(log.read_text("utf-8", "replace").splitlines()[-40:]))
            raise Stop(f"{what}: failed with status {status}; all it said is in {log}")
        took = time.monotonic() - begin + self.facts().get(f"{what}, seconds", 0.0)
        self.note(**{f"{what}, seconds": round(took, 1)})

    def environment(self, source: Path) -> None:
        """Python packages: the binding without its library, then specllama as it stands here."""
        if not self.python.exists():
            make = [sys.executable, "-m", "venv", self.python.parents[1]]
            if importlib.util.find_spec("ensurepip") is None:
                self.run("making an environment", *make, "--without-pip")
                pip = [sys.executable, "-m", "pip", "--python", self.python]
                self.run("pip", *pip, "install", "-q", *self.offline, "pip")
            else:
                self.run("making an environment", *make)
        pip = [self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        pip += self.offline
        marker = self.folder / "env" / "binding"
        if not marker.exists():
            self.run("tools that build", *pip, *BUILDERS)
            off = "-Ccmake.define.LLAMA_BUILD=OFF"
            self.run("installing the binding", *pip, off, source, SCALING)
            marker.touch()
        marker = self.folder / "env" / "specllama"
        changed = str(max(path.stat().st_mtime_ns for path in sources()))
        if not marker.exists() or marker.read_text() != changed:
            # again: the version number is the same
            again = ["--no-deps", "--force-reinstall"] if marker.exists() else []
            self.run("installing specllama", *pip, *again, ROOT)
            marker.write_text(changed)

    def unpack(self, source: Path | None) -> Path:
        """The folder of the binding's source; an archive is unpacked, or fetched and unpacked."""
        if source is not None and (source / "CMakeLists.txt").is_file():
            return source.absolute()
        if source is None:
            fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", self.folder]
            only = ["--no-binary", "llama-cpp-python", BINDING]
            if not list(self.folder.glob("llama_cpp_python-*.tar.*")):
                self.run("fetching the binding's source", *fetch, *only)
            source = self.folder
        archives = [source] if source.is_file() else sorted(source.glob("llama_cpp_python-*.tar.*"))
        if not archives:
            raise Stop(f"{source} holds no source of llama-cpp-python: neither unpacked nor packed")
        target = self.folder / "source"
        if not target.exists():
            part = target.with_name("source.part")
            shutil.rmtree(part, ignore_errors=True)
            with tarfile.open(archives[-1]) as archive:
                archive.extractall(part, filter="data")
            part.rename(target)
        return next(path.parent for path in sorted(target.glob("*/CMakeLists.txt")))

    def configure(self, backend: Backend, source: Path) -> Path:
        """cmake's folder for this backend; configured anew only if something changed."""
        native = self.folder / f"llama-{backend.name}"
        ninja = self.python.with_name("ninja")
        defines = {**COMMON, "LLAMA_BUILD_COMMIT": commit(), **backend.defines}
        command = ["cmake", "-S", str(source / "vendor" / "llama.cpp"), "-B", str(native)]
        command += [f"-D{name}={value}" for name, value in defines.items()]
        if ninja.exists():
            command += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        asked = native / "asked.json"
        if not asked.exists() or asked.read_text() != json.dumps(command):
            shutil.rmtree(native, ignore_errors=True)
            self.run("configuring llama.cpp", *command)
            asked.write_text(json.dumps(command))
        self.note(backend=backend.name, card=backend.words, defines=defines, **versions())
        return native

    def build(self, native: Path, targets: Sequence[str]) -> None:
        jobs = str(os.cpu_count() or 2)
        what = f"building {', '.join(targets)}"
        self.run(what, "cmake", "--build", native, "-j", jobs, "--target", *targets)

    def check(self, library: Path, arguments: Sequence[str]) -> int:
        """``gpu_command.py`` over the library, for the minutes that are left."""
        left = (self.deadline - time.monotonic()) / 60
        if left < 0.2:
            raise Stop("the minutes given are over; call again to go on")
        places = [self.folder / "report", *([os.environ["OUT"]] if os.environ.get("OUT") else [])]
        # beside the script, only its own modules are found: the specllama that was installed
        command = [self.python, Path(__file__).with_name("gpu_command.py")]
        command += ["--minutes", f"{left:.2f}"]
        for place in places:
            command += ["--out", place]
        environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(library)}
        return subprocess.call([str(c) for c in [*command, *arguments]], env=environment)


def sources() -> Iterator[Path]:
    yield ROOT / "pyproject.toml"
    for name in ("specllama", "tui", "models"):
        yield from (path for path in (ROOT / name).rglob("*") if path.suffix != ".pyc")


def commit() -> str:
    """The llama.cpp commit that the pinned binding vendors: its own build would ask git, and be
    told ours."""
    version = BINDING.partition("==")[2]
    text = (ROOT / "specllama/backend/devices.py").read_text("utf-8")
    found = re.search(rf'"{re.escape(version)}": "(\w+)"', text)
    return found[1] if found else "unknown"


def versions() -> dict[str, str]:
    """What built it, and the state of the checkout."""
    said = {
        "cmake": output("cmake", "--version").partition("\n")[0],
        "compiler": output("c++", "--version").partition("\n")[0],
        "nvcc": next((x for x in output("nvcc", "--version").splitlines() if "release" in x), ""),
        "commit": output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip(),
    }
    return {name: text for name, text in said.items() if text}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "gpu-check")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--backend", default="")
    parser.add_argument("--library", type=Path, help="libllama and its tools, built already")
    options, more = parser.parse_known_args(given)
    if sys.version_info < (3, 11):  # noqa: UP036  # of the python3 that make found
        raise Stop("Python 3.11 or newer is needed; PYTHON=python3.12 names another")
    if options.library is None:
        backend = find_backend(options.backend)
        if shutil.which("cmake") is None:
            raise Stop("cmake is missing (3.21 or newer): pip install cmake")
        print(f"building for {backend.words}", flush=True)
    else:
        backend = Backend(options.backend or "built", "a library that was built already")
    work = Work(options.into, options.minutes, options.wheels)
    source = work.unpack(options.source)
    work.environment(source)
    if backend.name == "cpu":
        more = ["--device", "none", *more]
    if options.library is not None:
        return work.check(options.library.absolute(), more)
    native = work.configure(backend, source)
    work.build(native, ["llama"])
    if not any(word.startswith(("--only", "--from")) for word in more):
        work.check(native / "bin", [*more, "--only", "load", "--only", "prove", "--no-more"])
    work.build(native, TOOLS)
    return work.check(native / "bin", more)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Stop as why:
        print(f"gpu-check: {why}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
