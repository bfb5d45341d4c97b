"""The comparison with llama.cpp's server, in whose place stands a small script: ours are tables."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from urllib.request import urlopen

import beside_arms
import beside_llama
import pytest
from beside_tables import AUTO, EIGHT, PLAIN, REPACKED, THEIRS, Beside, load_table
from peer_server import PeerServer
from servers import table

from specllama.bench.experiment import RunFigures, Task
from specllama.bench.prompts import BenchPrompt
from specllama.errors import EngineError
from specllama.interface import Message
from specllama.settings.params import SamplingParams

TASK = Task(BenchPrompt("a", "known", (Message("user", "the rain"),)), 1.0, 24, 5, True)
SERVER = """
import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def answer(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer({"status": "ok"})
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with open(sys.argv[0] + ".asked", "ab") as file:
            file.write(body + b"\\n")
        n = int(sys.argv[sys.argv.index("--spec-draft-n-max") + 1]) if "-md" in sys.argv else 0
        timings = {"prompt_ms": 40.0, "predicted_ms": 100.0 / (n + 1), "draft_n": n}
        self.answer({"tokens": [1, 2, 3], "tokens_predicted": 3, "timings": timings})
    def log_message(self, *args):
        pass
if "--version" in sys.argv:
    sys.exit("version: 7")
if "broken" in sys.argv:
    sys.exit("error: no model")
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "server"
    path.write_text(f"#!{sys.executable}\n{SERVER}")
    path.chmod(0o755)
    return path


def asked(program: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(f"{program}.asked").read_text().splitlines()]


def test_a_server_is_started_at_first_use_and_ended(program: Path) -> None:
    peer = PeerServer("peer", [str(program)], lambda task: [4, 5], SamplingParams())
    run = peer.run(TASK, 0)
    assert (run.token_ids, run.speed) == ((1, 2, 3), pytest.approx(20.0))
    peer.close()
    with pytest.raises(OSError):
        urlopen(peer.url)
    peer.run(TASK, 1)
    peer.close()
    [body, _] = asked(program)
    assert (body["prompt"], body["temperature"], body["n_predict"]) == ([4, 5], 1.0, 24)
    assert (body["ignore_eos"], body["cache_prompt"]) == (True, False)
    broken = PeerServer("peer", [str(program), "broken"], lambda task: [], SamplingParams())
    with pytest.raises(EngineError, match="ended at once: error: no model"):
        broken.run(TASK, 0)


KNOWS_TABLES = """
import sys
sys.path[:0] = [LAB, SUPPORT]
import beside_llama, table_model
sys.exit(beside_llama.main(sys.argv[1:]))
"""


def test_what_is_kept_is_not_asked_for_again(
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = table(tmp_path, parallel=1)
    script = tmp_path / "self.py"
    lab = Path(beside_llama.__file__).parent
    script.write_text(f"LAB, SUPPORT = {str(lab)!r}, {str(lab.parent / 'support')!r}{KNOWS_TABLES}")
    monkeypatch.setattr(beside_arms, "SELF", [sys.executable, str(script)])
    words = [str(tmp_path), "--llama-server", str(program), "--quick", "--out"]
    words += [str(tmp_path / "out.json"), "--tokens", "24", "--pair", f"{load.target},{load.draft}"]
    only = [PLAIN, AUTO, EIGHT, THEIRS, "draft 4"]
    assert beside_llama.main([*words, "--only", *only]) == 0
    first, n = capsys.readouterr().out, len(asked(program))
    assert n == 6  # two prompts and a shorter one, plainly and drafted
    assert "`auto` that are plain's: 2 of 2" in first
    assert "llama-server 7" in first
    assert re.search(r"^\| eight \| \d", first, re.M)
    assert beside_llama.main([*words, "--show"]) == 0
    assert capsys.readouterr().out == first
    assert beside_llama.main([*words, "--show", "--why"]) == 0
    assert "auto, T = 0\n\n|  | speed |" in capsys.readouterr().out
    assert beside_llama.main([*words, "--temperature", "1", "--show"]) == 1
    assert beside_llama.main([*words, "--only", THEIRS, REPACKED]) == 0
    assert len(asked(program)) == n
    assert beside_llama.main([*words, "--show", "--markdown"]) == 0
    assert "| `--repack on` |" in capsys.readouterr().out


def test_the_tables_follow_from_the_runs() -> None:
    speeds = {PLAIN: 10, AUTO: 12, THEIRS: 8, "ngram-mod": 15}
    runs = [
        RunFigures(arm, prompt, "known", 0.0, n, 101, 100 / (rate * more), 20.0, 1.0)
        for n in range(2)
        for prompt, more in (("edit", 1), ("tests", 2))
        for arm, rate in speeds.items()
    ]
    beside = Beside(runs, {"about": {"draft": None}, "costs auto": {"draft_ms": {}, "ids": {}}})
    assert beside.best("edit") == beside.mode() == "ngram-mod"
    assert beside.over_best(AUTO) == {p: pytest.approx(0.8) for p in ("edit", "tests")}
    assert beside.rate(PLAIN, ["edit", "tests"]) == pytest.approx(200**0.5)
    rows = {cells[1].strip(): cells[2:] for line in beside.readme() if (cells := line.split("|"))}
    assert [cell.strip() for cell in rows["`auto`"]][:2] == ["1.20", "1.20"]
    assert [cell.strip() for cell in rows["its n-grams, best way"]][:2] == ["1.50", "1.50"]


def test_clients_together_are_compared_with_the_better_of_theirs() -> None:
    rates = {PLAIN: 10.0, AUTO: 12.0, REPACKED: 24.0, THEIRS: 8.0, "draft 3": 16.0}
    rows = [{"arm": arm, "clients": 4, "tok_per_s": rate} for arm, rate in rates.items()]
    [*_, line] = load_table([rows])
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        "4 clients", "10.0", "1.20", "2.40", "0.80", "1.60", "0.75", "1.50",
    ]  # fmt: skip
