"""Who may import whom: read from the source, so that a lazy import counts as well."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "specllama": ROOT / "specllama",
    "specllama.tui": ROOT / "tui",
    "specllama.models": ROOT / "models",
}


def ours(names: str) -> list[str]:
    """Modules of ours, whose names go without their first part in the tables below."""
    return [name if name == "specllama" else f"specllama.{name}" for name in names.split()]


# Third-party modules that only some of ours may import.
RESTRICTED = {
    "llama_cpp": (
        "backend.capture backend.devices backend.heads backend.llama "
        "backend.llama_cache backend.llama_log backend.llama_pool backend.llama_vocab "
        "backend.quantizer backend.symbols backend.trial backend.trying backend.watch kernels "
        "models.recipe"
    ),
    "llguidance": "grammar.guide",
    "huggingface_hub": "models.hub_client",
    "textual": "tui",
    "starlette": "server",
    "uvicorn": "server.server_process",
    "click": "cli",
    "torch": "models.checkpoint models.recipe training",
    "tokenizers": "models.recipe",
    "jinja2": "replies.template",
}

# Ours that must not see others of ours: the arrows of the design page, by what they exclude.
FORBIDDEN = {
    "speculative": "engine session store cli tui models backend.llama backend.symbols",
    # the policy knows no drafter and no drafter knows the policy: they meet in ``DraftJudge``
    "speculative.policy": "speculative.drafting settings",
    **{
        f"speculative.{name}": "speculative.policy"
        for name in ("drafting", "budget", "effects", "round", "rules", "tree", "types")
    },
    "backend": "speculative engine session store cli tui",
    "models": "engine session store cli tui speculative",
    "engine": "session bench cli tui",
    "session": "engine cli tui",
    "store": "engine session cli tui",
    "tui": "cli",
    "server": "backend cli tui session",
    "training": "cli tui session bench server remote backend.llama backend.llama_pool",
    "remote": "backend engine cli tui session server",
    "errors": "specllama",  # the root of everything imports nothing of ours
}
FIRST_PARTY_LIGHT = {
    "rates": "",
    "events": "rates",
    "settings.params": "errors settings.hardware settings.method_list settings.setting",
    "paths": "errors",
    "figures": "events rates verdict",
    "text": "",
}

# Circles that stand today: each goes from this list with the arrow that closes it.
CIRCLES: set[frozenset[str]] = set()
CIRCLES_OF_PACKAGES: set[frozenset[str]] = set()


def module_files() -> dict[str, Path]:
    """Every module of the package by name; development links inside specllama/ are skipped."""
    found: dict[str, Path] = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder).parts
            if package == "specllama" and inner[0] in ("tui", "models"):
                continue
            parts = [package, *inner[:-1]]
            if path.name != "__init__.py":
                parts.append(path.stem)
            found[".".join(parts)] = path
    return found


MODULES = module_files()


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules named by the import statements of a module, wherever they stand in it."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(_imports(ast.parse(path.read_text("utf-8")), package))


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base


def arrows() -> dict[str, frozenset[str]]:
    """What each module imports of the others."""
    return {module: imports_of(module) & set(MODULES) - {module} for module in MODULES}


def arrows_of_packages() -> dict[str, set[str]]:
    """What the modules of each folder import of other folders."""
    folders = {".".join(m.split(".")[:2]) for m in MODULES if m.count(".") > 1}
    shipped = [module for module in MODULES if not within(module, *ours("models.recipe"))]
    return {
        folder: {
            other
            for module in shipped
            if within(module, folder)
            for other in folders - {folder}
            if any(within(name, other) for name in imports_of(module))
        }
        for folder in folders
    }


def circles(graph: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """The strongly connected components of more than one node."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [*graph[start]]
        while ahead:
            node = ahead.pop()
            if node not in seen:
                seen.add(node)
                ahead += graph[node]
        return seen

    reach = {node: reached(node) for node in graph}
    return {frozenset(n for n in reach[node] if node in reach[n]) for node in graph} - {frozenset()}


def within(module: str, *parents: str) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


def test_the_scan_sees_the_package() -> None:
    assert {"specllama.engine.engine", "specllama.cli.run", "specllama.models.gguf"} <= set(MODULES)
    assert within("specllama.events", *imports_of("specllama.session"))


def test_the_scan_sees_late_imports_and_those_for_types() -> None:
    source = """
if TYPE_CHECKING:
    from specllama.engine.engine import Engine
def late():
    from . import refs
"""
    assert set(_imports(ast.parse(source), "specllama.models")) == {
        "specllama.engine.engine",
        "specllama.models.refs",
    }


def test_the_scan_sees_circles() -> None:
    graph = {"a": "b", "b": "cd", "c": "a", "d": "e", "e": "d", "f": "a"}
    assert circles(graph) == {frozenset("abc"), frozenset("de")}


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles(arrows()) == CIRCLES


def test_no_package_imports_itself_by_way_of_others() -> None:
    assert circles(arrows_of_packages()) == CIRCLES_OF_PACKAGES


@pytest.mark.parametrize("library", RESTRICTED)
def test_restricted_libraries(library: str) -> None:
    allowed = ours(RESTRICTED[library])
    guilty = [
        module
        for module in MODULES
        if not within(module, *allowed)
        and any(within(name, library) for name in imports_of(module))
    ]
    assert guilty == []


@pytest.mark.parametrize("package", FORBIDDEN)
def test_directions(package: str) -> None:
    [inner], others = ours(package), ours(FORBIDDEN[package])
    guilty = [
        f"{module} imports {name}"
        for module in MODULES
        if within(module, inner)
        for name in imports_of(module)
        if within(name, *others) and not within(name, inner)
    ]
    assert guilty == []


@pytest.mark.parametrize("module", FIRST_PARTY_LIGHT)
def test_the_ground_floor_imports_almost_nothing_of_ours(module: str) -> None:
    [light], allowed = ours(module), ours(FIRST_PARTY_LIGHT[module])
    found = {name for name in imports_of(light) if within(name, "specllama")}
    assert found <= {light, *allowed}


@pytest.mark.parametrize("module", [m for m, p in MODULES.items() if p.name != "__init__.py"])
def test_every_file_says_in_one_line_what_it_is(module: str) -> None:
    first = (ast.get_docstring(ast.parse(MODULES[module].read_text("utf-8"))) or "").partition(
        "\n"
    )[0]
    assert first.endswith("."), first


def test_nothing_imports_the_mapped_folders_by_their_bare_names() -> None:
    guilty = [
        module
        for module in MODULES
        if any(within(name, "tui", "models", "fakes") for name in imports_of(module))
    ]
    assert guilty == []


def test_no_file_of_tests_imports_another() -> None:
    """What several need is in ``tests/support``, on the path of all (``pythonpath``)."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    files = {path.stem for path in tests if path.stem.startswith("test_")} | {"conftest"}
    guilty = [
        (path.name, name)
        for path in tests
        for name in _imports(ast.parse(path.read_text("utf-8")), "")
        if name.split(".")[0] in files
    ]
    assert guilty == []


def test_the_library_imports_lightly() -> None:
    program = (
        "import sys\nimport specllama\n"
        "from specllama import EngineOptions, GenerateParams, SpecllamaError\n"
        "heavy = 'numpy llama_cpp textual huggingface_hub click jinja2 sqlite3'.split()\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
