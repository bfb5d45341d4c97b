"""What only POSIX systems have is used where that was thought of."""

from __future__ import annotations

import ast

from house_table import House

# What Windows lacks, and the modules that use it where it is there.
LACKING = {
    "fcntl": (),
    "grp": (),
    "pty": (),
    "pwd": (),
    "readline": ("specllama.cli.lines",),
    "resource": ("specllama.server.running",),
    "select": (),
    "termios": (),
    "tty": (),
    "os.fork": (),
    "os.getloadavg": ("specllama.cli.doctor",),
    "os.getuid": (),
    "os.kill": (),
    "os.killpg": (),
    "os.mkfifo": (),
    "os.sched_getaffinity": ("specllama.backend.cores", "specllama.bench.provenance"),
    "os.setsid": (),
    "os.sysconf": ("specllama.bench.processes", "specllama.models.memory"),
    "signal.SIGHUP": (),
    "signal.SIGKILL": (),
    "signal.pthread_sigmask": (),
}


def used(tree: ast.AST) -> set[str]:
    """What a module imports, and the attributes that it takes of modules, by their names there."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found


def test_what_windows_lacks_is_used_only_where_that_is_known() -> None:
    found: dict[str, list[str]] = {name: [] for name in LACKING}
    for module in House().shipped:
        for name in used(ast.parse(module.text)) & LACKING.keys():
            found[name].append(module.name)
    assert {name: tuple(sorted(modules)) for name, modules in found.items()} == LACKING
