"""What ships: a package that is forgotten in pyproject.toml works here and fails in the wheel."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import build_kernels as build
import pytest
from shared_files import SHARE, files

import specllama
from specllama.models import catalog

ROOT = Path(__file__).parent.parent
FOLDERS = {"specllama": "specllama", "specllama.tui": "tui", "specllama.models": "models"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
MAX_WHEEL_BYTES = 20 * 10**6  # with the head of SmolLM2, as the source archive
MAX_SDIST_BYTES = 22 * 10**6
# What a checkout has at its top, and the source archive has, too.
TRACKED = (
    *("specllama", "tui", "models", "share", "tests", ".github", ".ci"),
    *("pyproject.toml", "MANIFEST.in", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"),
)
# What the checkout has for those who make the product, and the wheel has not.
WORKSHOP = ("specllama/models/recipe/",)


def sources() -> dict[str, Path]:
    """Every Python file that belongs into the wheel, by its path there."""
    found: dict[str, Path] = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder)
            if package == "specllama" and inner.parts[0] in ("tui", "models"):
                continue  # development links
            name = "/".join([*package.split("."), *inner.parts])
            if not name.startswith(WORKSHOP):
                found[name] = path
    return found


def test_the_package_list_is_complete() -> None:
    packages = {
        name.removesuffix("/__init__.py").replace("/", ".")
        for name in sources()
        if name.endswith("/__init__.py")
    }
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages)
    assert SETUPTOOLS["package-dir"] == FOLDERS


def test_every_module_is_in_a_package() -> None:
    for name in sources():
        assert name.rpartition("/")[0].replace("/", ".") in SETUPTOOLS["packages"], name


def test_versions_agree() -> None:
    assert PROJECT["project"]["version"] == specllama.__version__


def test_the_source_archive_has_what_the_readme_links_to() -> None:
    """setuptools brings the packages, README and LICENSE; MANIFEST.in the rest."""
    words = (ROOT / "MANIFEST.in").read_text("utf-8").split()
    brought = {*words, *FOLDERS.values(), "README.md", "LICENSE"}
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / "README.md").read_text("utf-8"))
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
        assert Path(link).parts[0] in brought, link
    assert "tests" in words


def test_the_page_of_the_package_names_who_and_where() -> None:
    project = PROJECT["project"]
    assert project["authors"]
    # what was tried and what was only read stands in install.md
    systems = {line for line in project["classifiers"] if line.startswith("Operating System ::")}
    assert systems == {"Operating System :: POSIX :: Linux"}


def test_an_index_can_follow_the_links_of_the_readme_once_the_project_has_an_address() -> None:
    """Without one, relative links are right: they work in a checkout, the one place there is."""
    links = re.findall(r"\]\((?!#)([^)]+)\)", (ROOT / "README.md").read_text("utf-8"))
    relative = [link for link in links if not link.startswith("https://")]
    assert bool(relative) != bool(PROJECT["project"].get("urls"))


def test_no_page_installs_what_a_stranger_could_register() -> None:
    """The name is registered with no index yet: ``pip install specllama`` is whoever takes it."""
    pages = [ROOT / "README.md", *(ROOT / ".github").glob("*.md"), *sources().values()]
    tools = r"(?:pip|pipx|uv|uvx)(?: tool| pip)?(?: install| run)?(?: -\S+)*"
    named = re.compile(rf"""\b{tools} ["'`]?specllama\b(?![-_/.]\S)""")
    assert named.search("uv tool install specllama")
    assert named.search('pip install -U "specllama[serve]"')
    found = {page.name: named.findall(page.read_text("utf-8")) for page in pages}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_what_ships_names_no_machine() -> None:
    for name, path in sources().items():
        text = path.read_text("utf-8")
        for word in ("/" + "work/", "/" + "opt/vdev", "index-url"):
            assert word not in text, (name, word)


def _can_build() -> bool:
    try:
        version = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        return False
    return int(version.split(".")[0]) >= 77


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the source archive unpacks to."""
    if not _can_build():
        pytest.skip("needs setuptools 77 or newer")
    # A copy, so that no build folder is left behind and development links play no part.
    tree = tmp_path_factory.mktemp("tree")
    junk = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", "*.egg-info")

    def ignored(path: str, names: list[str]) -> set[str]:
        linked = {"tui", "models"} if Path(path) == ROOT / "specllama" else set[str]()
        return set(junk(path, names)) | linked

    for name in TRACKED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    (tree / "specllama" / "junk.pyc").touch()
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, "out"], cwd=tree, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (archive,) = (tree / "out").glob("*.tar.gz")
    assert archive.stat().st_size < MAX_SDIST_BYTES
    with tarfile.open(archive) as file:
        file.extractall(tree / "unpacked", filter="data")
    (folder,) = (tree / "unpacked").iterdir()
    return folder


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the source archive, as those do whose platform finds no wheel."""
    tree = tmp_path_factory.mktemp("wheel") / "tree"
    shutil.copytree(sdist, tree)
    out = tree / "out"
    quick = tree.with_name("quick-compiler")  # nobody computes with this library
    quick.write_text(f'#!/bin/sh\nexec {" ".join(build.compiler() or [])} "$@" -O0\n')
    quick.chmod(0o755)
    env = dict(os.environ) if build.compiler() is None else {**os.environ, "CXX": str(quick)}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--no-index", "-w", str(out), str(tree)),
        ],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (file_,) = out.glob("*.whl")
    # for this platform, because of the kernels, and for every CPython 3
    tag = "py3-none-any" if build.compiler() is None else "py3-none-linux_*"
    assert fnmatch(file_.name, f"specllama-{specllama.__version__}-{tag}.whl")
    assert file_.stat().st_size < MAX_WHEEL_BYTES
    return zipfile.ZipFile(file_)


def test_the_source_archive_is_the_checkout(sdist: Path) -> None:
    """With tests and pages: who packages it for a system can try it."""

    def within(root: Path) -> set[Path]:
        paths = (path for name in TRACKED for path in [root / name, *(root / name).rglob("*")])
        found = {path.relative_to(root) for path in paths if path.is_file()}
        made = (".pyc", ".so")
        return {p for p in found if p.suffix not in made and not made_here & {*p.parents}}

    made_here = {Path("specllama/tui"), Path("specllama/models"), Path("specllama.egg-info")}
    assert within(ROOT) == within(sdist)
    made = {"PKG-INFO", "setup.cfg", "specllama.egg-info"}
    assert {path.name for path in sdist.iterdir()} - {*TRACKED} == made


def test_the_wheel_holds_everything_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    stem = f"specllama-{specllama.__version__}"
    tops = {name.split("/")[0] for name in names}
    assert tops == {"specllama", f"{stem}.dist-info", f"{stem}.data"}
    shared = {
        f"{stem}.data/data/{path.relative_to(ROOT)}"
        for path in (ROOT / "share").rglob("*")
        if path.is_file()
    }
    assert {name for name in names if name.startswith(f"{stem}.data/")} == shared
    code = {name for name in names if name.endswith(".py")}
    assert code == set(sources())
    wanted = {"specllama/py.typed", "specllama/models/catalog.toml"}
    if build.compiler() is not None:
        wanted.add(f"specllama/kernels/{build.NAME}")
    assert not [name for name in names if name.endswith((".cpp", ".h"))]
    for folder, pattern in (
        ("models/tiny", "*.gguf"),
        ("models/tiny", "README.md"),
        ("tui", "*.tcss"),
    ):
        found = list((ROOT / folder).glob(pattern))
        assert found, f"{folder}/{pattern}"
        wanted |= {f"specllama/{folder}/{path.name}" for path in found}
    assert wanted <= names


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("pair", "here", "pulls", "wanted"),
    [
        ("", False, True, ["hub path S", "hub pull S", "chat -m S"]),
        ("", True, True, ["hub path S", "chat -m S"]),
        ("", False, False, ["hub path S", "hub pull S", "chat -m tiny"]),
        ("tiny", True, True, ["hub path tiny", "chat -m tiny"]),
        ("qwen3-8b", False, True, ["hub path qwen3-8b", "hub pull qwen3-8b", "chat -m qwen3-8b"]),
    ],
)
def test_make_chat_opens_a_real_model_else_the_bundled_pair(
    pair: str, here: bool, pulls: bool, wanted: list[str], tmp_path: Path
) -> None:
    program, calls = tmp_path / "bin" / "specllama", tmp_path / "calls"
    program.parent.mkdir()
    (tmp_path / "bin" / "python").touch()
    results = f'case "$2" in path) exit {int(not here)};; pull) exit {int(not pulls)};; esac'
    program.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\n{results}\n')
    program.chmod(0o755)
    (tmp_path / ".installed").touch()
    command = ["make", "-C", str(ROOT), "chat", f"VENV={tmp_path}", f"PAIR={pair}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert calls.read_text().splitlines() == [one.replace("S", catalog.FIRST) for one in wanted]
    assert ("the bundled pair instead" in done.stdout) == (not pulls)


def test_what_is_shared_is_current() -> None:
    """The manual page and the completions; ``make share`` writes them again."""
    written = {path: path.read_text("utf-8") for path in SHARE.rglob("*") if path.is_file()}
    assert written == files()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_with_the_file_of_the_wheel(tmp_path: Path) -> None:
    program = tmp_path / "specllama"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m specllama "$@"\n')
    program.chmod(0o755)
    script = SHARE / "bash-completion" / "completions" / "specllama"
    words = f'source "{script}"; COMP_WORDS=(specllama hu); COMP_CWORD=1'
    done = subprocess.run(
        ["bash", "-c", f'{words}; _specllama_completion specllama; echo "${{COMPREPLY[@]}}"'],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.strip() == "hub", done.stderr


def test_the_workshop_stays_out_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    words = ("recipe", "corpus/", "screenshots", "recordings", "pictures", "gpu_check", "gpu_parts")
    assert [name for name in names if any(word in name for word in words)] == []
    assert [name for name in names if name.startswith("specllama/bench/gpu")] == []


def test_the_product_never_imports_the_workshop() -> None:
    for name, path in sources().items():
        assert "models.recipe" not in path.read_text("utf-8"), name


def test_the_wheel_has_the_command(wheel: zipfile.ZipFile) -> None:
    (entry,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert b"specllama = specllama.__main__:main" in wheel.read(entry)
    (licence,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert b"MIT" in wheel.read(licence)


def test_the_wheel_runs_from_outside_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import specllama.tui, specllama.models, specllama.paths, specllama.cli\n"
        "assert all(m.__file__.startswith(sys.argv[1]) for m in (specllama, specllama.tui))\n"
        "assert list(specllama.paths.bundled_dir().glob('*.gguf'))\n"
        "sys.exit(specllama.cli.invoke(['--help']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(tmp_path / "site")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Commands:" in done.stdout
