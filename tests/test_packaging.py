"""What ships: a package that is forgotten in pyproject.toml works here and fails in the wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import specllama

ROOT = Path(__file__).parent.parent
FOLDERS = {"specllama": "specllama", "specllama.tui": "tui", "specllama.models": "models"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
MAX_WHEEL_BYTES = 12 * 10**6
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
    assert any(line.startswith("Operating System ::") for line in project["classifiers"])


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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    if not _can_build():
        pytest.skip("needs setuptools 77 or newer")
    # A copy, so that no build folder is left behind and development links play no part.
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")
    for folder in ("tui", "models"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    shutil.copytree(
        ROOT / "specllama",
        tree / "specllama",
        ignore=lambda path, names: {
            *ignore(path, names),
            *(["tui", "models"] if Path(path) == ROOT / "specllama" else []),
        },
    )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree / file)
    out = tree / "out"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--no-index", "-w", str(out), str(tree)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    (file_,) = out.glob("*.whl")
    assert file_.stat().st_size < MAX_WHEEL_BYTES
    return zipfile.ZipFile(file_)


def test_the_wheel_holds_everything_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    assert {name.split("/")[0] for name in names} == {
        "specllama",
        f"specllama-{specllama.__version__}.dist-info",
    }
    code = {name for name in names if name.endswith(".py")}
    assert code == set(sources())
    wanted = {"specllama/py.typed", "specllama/models/catalog.toml"}
    for folder, pattern in (
        ("models/tiny", "*.gguf"),
        ("models/tiny", "README.md"),
        ("tui", "*.tcss"),
    ):
        found = list((ROOT / folder).glob(pattern))
        assert found, f"{folder}/{pattern}"
        wanted |= {f"specllama/{folder}/{path.name}" for path in found}
    assert wanted <= names


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
