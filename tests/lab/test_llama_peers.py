"""llama.cpp's programs as arms of a comparison, in the place of which stand small scripts."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from engines import FakeContext, fake_info, loaded
from llama_peers import ProgramPeer, StartedServer, make_peers, read_speed
from table_model import FakeTable, FakeVocab

from specllama.bench.experiment import Task
from specllama.bench.prompts import BenchPrompt
from specllama.engine.engine import Engine
from specllama.errors import EngineError, UsageError
from specllama.interface import Message
from specllama.settings.params import SamplingParams

PROMPTS = [
    BenchPrompt("a", "chat", (Message("user", "the rain in spain"),)),
    BenchPrompt("b", "code", (), "def add(a, b): return a + b"),
]


@pytest.fixture
def engine() -> Engine:
    target = FakeContext(FakeTable(seed=3, sharpness=2.0))
    return Engine(loaded(target=target, vocab=FakeVocab(), info=fake_info()))


def tasks() -> list[Task]:
    return [Task(p, t, 24, seed=5, ignore_eos=True) for p in PROMPTS for t in (0.0, 1.0)]


SIMPLE = """encoded   20 tokens in    0.201 seconds, speed:   99.5 t/s
decoded   64 tokens in    2.000 seconds, speed:   32.0 t/s
n_draft   = 4
n_drafted = 90
n_accept  = 30
"""
CLI = """prompt eval time =     201.00 ms /    20 tokens (   10.05 ms per token)
       eval time =    1500.00 ms /    63 runs   (   23.81 ms per token)
"""


def program(path: Path, output: str, status: int = 0) -> Path:
    args = f"{path}.args"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nopen({args!r}, 'w').write(repr(sys.argv))\n"
        f"sys.stderr.write({output!r})\nsys.exit({status})\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_programs_are_timed_by_their_own_clock(engine: Engine, tmp_path: Path) -> None:
    simple = program(tmp_path / "simple", SIMPLE)
    (peer,) = make_peers(
        f"llama-speculative-simple {simple} --spec-draft-n-max 4", engine, SamplingParams()
    )
    run = peer.run(tasks()[0], 0)
    assert run.speed == pytest.approx(32.0)
    assert (run.drafted, run.accepted) == (90, 30)
    args = Path(f"{simple}.args").read_text()
    for word in ("'-md'", "'--spec-draft-n-max', '4'", "'--ignore-eos'", "'--temp', '0'"):
        assert word in args
    assert read_speed(CLI) == (63, 1.5)
    with pytest.raises(EngineError, match="no timing"):
        read_speed("nothing")
    broken = ProgramPeer(
        "llama-cli", program(tmp_path / "cli", "error: no model", 1), engine, SamplingParams()
    )
    with pytest.raises(EngineError, match="no model"):
        broken.run(tasks()[0], 0)


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
        pathlib.Path(sys.argv[0] + ".asked").write_bytes(body)
        n = int(sys.argv[sys.argv.index("--spec-draft-n-max") + 1])
        timings = {"prompt_ms": 40.0, "predicted_ms": 100.0, "draft_n": n, "draft_n_accepted": 1}
        self.answer({"tokens": [1, 2, 3], "tokens_predicted": 3, "timings": timings})
    def log_message(self, *args):
        pass
if "broken" in sys.argv:
    sys.exit("error: no model")
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_server_is_started_at_every_length_and_ended(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "server"
    path.write_text(f"#!{sys.executable}\n{SERVER}")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    peers = make_peers(f"llama-server {path}", engine, SamplingParams(), (1, 8))
    assert [p.name for p in peers] == ["llama-server 1", "llama-server 8"]
    try:
        runs = [p.run(tasks()[1], 0) for p in peers]
    finally:
        for peer in peers:
            peer.close()
    assert [run.drafted for run in runs] == [1, 8]
    assert [run.accepted for run in runs] == [1, 1]
    assert runs[0].speed == pytest.approx(20.0)
    body = json.loads(Path(f"{path}.asked").read_bytes())
    assert body["prompt"] == engine.encode(PROMPTS[0].content)[0]
    assert (body["temperature"], body["n_predict"], body["ignore_eos"]) == (1.0, 24, True)
    assert body["cache_prompt"] is False
    for peer in peers:
        assert isinstance(peer, StartedServer)
        with pytest.raises(OSError):
            urlopen(peer.url)
    (broken,) = make_peers(f"llama-server {path} broken", engine, SamplingParams())
    with pytest.raises(EngineError, match="exited at once: error: no model"):
        broken.run(tasks()[0], 0)
    broken.close()


def test_lengths_make_an_arm_each_where_they_can(engine: Engine, tmp_path: Path) -> None:
    def names(text: str) -> list[str]:
        return [p.name for p in make_peers(text, engine, SamplingParams(), (2, 4))]

    path = program(tmp_path / "simple", SIMPLE)
    simple = f"llama-speculative-simple {path}"
    assert names(simple) == ["llama-speculative-simple 2", "llama-speculative-simple 4"]
    assert len(names(f"{simple} --spec-draft-n-max 3")) == 1
    assert names(f"llama-cli {path}") == ["llama-cli"]
    last = make_peers(simple, engine, SamplingParams(), (2, 4))[1]
    last.run(tasks()[0], 0)
    assert "'--spec-draft-n-max', '4'" in Path(f"{path}.args").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "llama-cli 'x",
        "plain x",
        "llama-cli",
        "ollama http://x",
        "llama-cli /no/such/file",
        "llama-server http://127.0.0.1:9",
    ],
)
def test_unknown_peers_are_refused(engine: Engine, text: str) -> None:
    with pytest.raises(UsageError):
        make_peers(text, engine, SamplingParams())
