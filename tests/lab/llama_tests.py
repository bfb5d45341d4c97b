"""llama.cpp's own tests of its server, run against ``specllama serve``.

    python tests/lab/llama_tests.py LLAMA_CPP [FILE …] [-k EXPRESSION] [--slow] [--json OUT]

They are copied into a temporary folder and changed there so that another model, another tokenizer
and another program can pass them; every change says why. ``llama_server.py`` stands in for their
binary. A test that passes shows that its requests and answers have llama-server's form: words and
counts of tokens, which are their model's, are not compared.

Needs specllama, pytest, requests, filelock, numpy, openai, wget and prometheus-client in the Python
that runs it; the server runs with the same one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent

# file, what is there, what takes its place, why
CHANGES: tuple[tuple[str, str, str, str], ...] = (
    ("utils.py", r"(def match_regex\(.*?-> bool:\n)", r"\1    return isinstance(text, str)\n",
     "words of their model, which is another"),
    ("utils.py", r"(def load_all\(\) -> None:\n)", r"\1        return\n",
     "their models cannot be had here"),
    ("utils.py", r"(def download_file\(.*?\) -> str:\n)", r"\1    return url\n",
     "their models cannot be had here"),
    ("utils.py", r"DEFAULT_HTTP_TIMEOUT = 60", "DEFAULT_HTTP_TIMEOUT = 300", "a busy machine"),
    ("unit/*.py", r"== n_(prompt|cache)\b", r">= min(n_\1, 1)",
     "token counts of their tokenizer"),
    ("unit/test_completion.py", r'"I believe the meaning of life is"\*32', '"I believe it " * 256',
     "token counts of their tokenizer"),
    ("unit/test_ctx_shift.py", r'"prompt": LONG_TEXT', '"prompt": LONG_TEXT * 4',
     "token counts of their tokenizer"),
    ("unit/test_chat_completion.py", r"total_batch_count == batch_count", "total_batch_count >= 2",
     "token counts of their tokenizer"),
    ("utils.py", r"dict\(response\.headers\)", "response.headers",
     "names of headers, whose case says nothing"),
    ("unit/test_metrics.py", r"timings\.items\(\)",
     "((k, v) for k, v in timings.items() if not isinstance(v, str | list))",
     "fields of ours that are no numbers"),
    ("utils.py", r"(response = requests\.post\(url, headers=headers, json=)data",
     r'\1{**data, "verbose": True} if self.debug else data',
     "their flag --verbose, which is a field of requests here"),
    ("unit/*.py", r"== 226\b", "> 100", "token counts of their tokenizer"),
    ("unit/*.py", r'(system_fingerprint(?:"\])?\.startswith\()"b"', r'\1"specllama-"',
     "their program's name"),
    ("unit/test_chat_completion.py", r'(\["content"\]|\.content) is None', r'\1 in (None, "")',
     "no text at first, which is an empty one as OpenAI writes it"),
    ("utils.py", r"assert len\(choice\['delta'\]\['content'\]\) > 0", "assert True",
     "no text at first, which is an empty one as OpenAI writes it"),
    ("unit/*.py", r"server\.n_ctx //? server\.n_slots", "server.n_ctx",
     "the context is shared, as with --kv-unified"),
    ("unit/test_completion.py", r'== "<s> " \+ prompt', " in (prompt, '<s> ' + prompt)",
     "their beginning of a text"),
    ("unit/test_completion.py", r"# assert match_regex\(re_content, res\.body\[\"content\"\]\)",
     'again = server.make_request("POST", "/completion", {"prompt": prompt, "seed": 42, '
     '"temperature": 1.0})\n        assert again.body["content"] == res.body["content"]',
     "their FIXME switched on: the same text alone"),
    ("unit/test_completion.py", r'("temperature", )\[0\.0\]\)\ndef', r"\1[0.0, 1.0])\ndef",
     "their TODO switched on: other batches at temperature 1"),
    ("unit/test_completion.py", r'@pytest\.mark\.skip\(reason="This test fails on [^\n]*\n', "",
     "switched on: with and without the cache"),
)  # fmt: skip

FILES = (
    "basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion",
    "ctx_shift", "ignore_eos", "infill", "metrics", "security", "template", "tokenize", "tool_call",
    "speculative", "stream", "kv_keep_only_active", "compat_gcp", "proxy",
)  # fmt: skip
"""What is run. The others are of parts that specllama has none of: embeddings, reranking, a router
of models, saved slots, adapters changed while running, images, MCP, built-in tools, sleeping. Of
the last five only the first is of a part that is here, drafting with the bundled pair: the others
want streams taken up again, tags in llama-server's own log, Google's routes, and a proxy."""


def prepared(llama: Path, to: Path) -> Path:
    """Their tests in ``to``, changed."""
    tests = to / "tools" / "server" / "tests"
    shutil.copytree(llama / "tools" / "server" / "tests", tests)
    (to / "models").symlink_to(llama / "models")
    for pattern, old, new, why in CHANGES:
        changed = 0
        for file in tests.glob(pattern):
            text, n = re.subn(old, new, file.read_text("utf-8"), flags=re.DOTALL)
            file.write_text(text, "utf-8")
            changed += n
        print(f"{changed:3} places changed: {why}")
    return tests


def ran(tests: Path, files: list[str], more: list[str], *, slow: bool) -> list[dict[str, str]]:
    """What became of every test."""
    report = tests / "report.xml"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, "LLAMA_SERVER_BIN_PATH": str(HERE / "llama_server.py"), "PATH": path}
    if slow:
        env["SLOW_TESTS"] = "1"
    chosen = [] if slow else ["-m", "not slow"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env["PORT"] = str(free.getsockname()[1])
    kept = tests / "kept"
    kept.mkdir()
    env["SHIM_KEEP"] = str(kept)
    names = [f"unit/test_{name}.py" for name in files]
    subprocess.run(
        [sys.executable, "-m", "pytest", *names, "-q", "--tb=short", "-p", "no:cacheprovider",
         f"--junitxml={report}", *chosen, *more],
        cwd=tests, env=env, check=False,
    )  # fmt: skip
    for server in kept.iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(server.read_text().split()[1]), signal.SIGTERM)
    out = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [found.tag for found in case if found.tag in ("failure", "error", "skipped")]
        said = next((found.get("message") or "" for found in case if found.tag in kinds), "")
        out.append(
            {
                "file": (case.get("classname") or "").rpartition("test_")[2],
                "test": case.get("name") or "",
                "outcome": kinds[0] if kinds else "passed",
                "said": said.splitlines()[0] if said else "",
            }
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama", type=Path, help="llama.cpp's source")
    parser.add_argument("files", nargs="*", default=list(FILES), help="such as completion")
    parser.add_argument("-k", default="", help="only tests with such names")
    parser.add_argument("--slow", action="store_true", help="also those that take long")
    parser.add_argument("--json", type=Path, help="write what became of every test")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tests = prepared(asked.llama.resolve(), Path(folder))
        found = ran(tests, asked.files, ["-k", asked.k] if asked.k else [], slow=asked.slow)
    for one in found:
        if one["outcome"] not in ("passed", "skipped"):
            print(f"{one['file']}::{one['test']}: {one['said'][:200]}")
    for file in sorted({one["file"] for one in found}):
        print(file, dict(Counter(one["outcome"] for one in found if one["file"] == file)))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
