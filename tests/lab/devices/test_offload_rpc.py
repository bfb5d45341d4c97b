"""Offload that really happens: layers, experts and caches on one and on two workers of bounded
memory, through the ordinary command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ggufs
import pytest
from machines import Machine
from relay import Relay

from specllama.backend.planning import RESERVE_BYTES, USABLE
from specllama.engine.host import EngineHost, LoadEngine
from specllama.errors import EngineDied
from specllama.settings.params import EngineOptions, GenerateParams

GIB, MIB = 1 << 30, 1 << 20
RUN = ("run", "-m", "tiny", "-d", "tiny-draft", "--temp", "0", "-n", "16", "Hi there", "--json")

Make = Callable[..., list[Relay]]


def at(*relays: Relay) -> tuple[str, str]:
    return "--rpc", ",".join(f"127.0.0.1:{relay.port}" for relay in relays)


def usable(size: int) -> int:
    """What a device must have for a plan to put this much on it."""
    return int((size + RESERVE_BYTES) / USABLE) + 1


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 60 MiB."""
    path = tmp_path_factory.mktemp("models") / "wide.gguf"
    return ggufs.write_llama(path, blocks=12, width=512, hidden=2048, quant="Q8_0")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "experts.gguf"
    return ggufs.write_llama(path, blocks=4, width=256, hidden=256, experts=4)


# ------------------------------------------------------------------ where things go


@pytest.mark.parametrize(
    ("flags", "takes"),
    [
        ("", (True, False)),
        ("-ngl 3", (True, False)),
        ("-ngl 0 --draft-gpu-layers 0", (False, False)),
        ("--device none --set draft-device=none", (False, False)),
        ("--device RPC1", (False, True)),
        ("--device RPC1,RPC0 --set tensor-split=3,1", (True, True)),
        ("--set tensor-split=1,3", (True, True)),
        ("--set tensor-split=0,1", (True, True)),  # the draft goes where there is room
        ("--set tensor-split=0,1 --set draft-device=RPC1", (False, True)),
        ("--set draft-device=RPC1", (True, True)),
        ("--draft-gpu-layers 0", (True, False)),
        (r"-ngl 0 --draft-gpu-layers 0 -ot blk\.1\.ffn=RPC1", (False, True)),
        (r"-ngl 3 -ot blk\.0\.ffn=RPC1", (True, True)),
        (r"-ot \.ffn_down=CPU", (True, False)),
        ("--flash-attn off", (True, False)),
        ("--cache-type-k q8_0 --cache-type-v q8_0", (True, False)),
        ("--batch-size 128 -c 512", (True, False)),
        ("--proposer eagle3 --set tensor-split=1,1", (True, True)),
        ("--proposer self --device RPC1", (False, True)),
        ("--proposer tree --set tensor-split=1,1", (True, True)),
    ],
)
def test_every_way_to_place(
    machine: Machine, relays: Make, flags: str, takes: tuple[bool, bool]
) -> None:
    two = relays(8 * GIB, 8 * GIB)
    ended = machine(*RUN, *at(*two), *flags.split())
    assert ended.code == 0, ended.err
    assert ended.json[-1]["text"].startswith("Hello")
    assert tuple(relay.most > 0 for relay in two) == takes


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--device RPC2", "no device 'RPC2'"),
        ("--set tensor-split=1,2,3", "3 shares, there are 2"),
        ("--device RPC0 --set tensor-split=1,1", "2 shares, there are 1"),
        (r"-ot nothing=RPC0", "no tensor"),
        (r"-ot blk\.0\.=RPC5", "no device 'RPC5'"),
        (r"--device RPC0 -ot blk\.0\.=RPC1", "no device 'RPC1'"),
        ("--cpu-moe", "no experts"),
        ("--flash-attn off --cache-type-v q8_0", "flash"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    machine: Machine, relays: Make, flags: str, said: str
) -> None:
    ended = machine(*RUN, *at(*relays(8 * GIB, 8 * GIB)), *flags.split())
    assert ended.code in (2, 5), ended.err
    errors = [line for line in ended.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert said in errors[0]


@pytest.mark.parametrize("flags", ["--cpu-moe", "--n-cpu-moe 2", "--n-cpu-moe 2 -ngl 3"])
def test_experts_stay_in_ram(machine: Machine, relays: Make, experts: Path, flags: str) -> None:
    def run(*flags: str) -> tuple[list[int], int]:
        (relay,) = relays(8 * GIB)
        command = ("run", "-m", str(experts), "-n", "8", "--temp", "0", "--json", "Hi")
        ended = machine(*command, "--no-spec", *at(relay), *flags)
        assert ended.code == 0, ended.err
        return ended.json[-1]["token_ids"], relay.most

    whole, most = run()
    text, less = run(*flags.split())
    assert less < most
    assert text == whole, "of the CPU here and of the CPU there"


# ------------------------------------------------------------------ how much goes there


def loaded(
    machine: Machine, model: str, draft: str, relays: list[Relay], **options: Any
) -> tuple[list[int], list[int]]:
    """Bytes by device: of the plan, and of the load."""
    asked = json.dumps({"rpc": at(*relays)[1], "n_ctx": 2048, **options})
    program = Path(__file__).with_name("planned.py")
    process = subprocess.Popen(
        [sys.executable, str(program), model, draft, asked],
        env=machine.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first, second = process.stdout.readline(), process.stdout.readline()
    took = [relay.used for relay in relays]
    _, err = process.communicate("\n", timeout=60)
    assert second == "loaded\n", err
    return json.loads(first), took


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gpu_layers": "6"},
        {"n_ctx": 8192},
        {"flash_attn": "off"},
        {"kv_type_k": "q8_0", "kv_type_v": "q8_0"},
        {"parallel": 4},
        {"place": {"tensor_split": "1,1"}},
        {"place": {"tensor_split": "3,1"}, "n_ctx": 8192},
        {"place": {"overrides": [r"\.ffn_down=CPU"]}},
    ],
)
def test_a_plan_says_what_a_load_takes(
    machine: Machine, relays: Make, wide: Path, options: dict[str, Any]
) -> None:
    two = relays(8 * GIB, 8 * GIB)
    planned, took = loaded(machine, str(wide), "-", two, **options)
    for said, real in zip(planned, took, strict=True):
        assert said == pytest.approx(real, rel=0.05)


def test_a_small_device_takes_fewer_layers(machine: Machine, relays: Make, wide: Path) -> None:
    roomy = relays(8 * GIB)
    (whole,), _ = loaded(machine, str(wide), "-", roomy)
    (small,) = relays(usable(whole * 2 // 3))
    (planned,), (took,) = loaded(machine, str(wide), "-", [small])
    assert took <= whole * 2 // 3
    assert planned == pytest.approx(took, rel=0.05)
    assert not small.refused
    two = relays(usable(whole * 2 // 3), usable(whole * 2 // 3))
    planned_of_two, took_of_two = loaded(machine, str(wide), "-", two)
    assert min(took_of_two) > 0, "what one has no room for goes to the other"
    for said, real in zip(planned_of_two, took_of_two, strict=True):
        assert said == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("gives", [0.9, 0.5, 0.2, 0.01])
def test_a_plan_that_was_too_bold(machine: Machine, relays: Make, wide: Path, gives: float) -> None:
    """The worker says that it has room, and has not."""
    (whole,), _ = loaded(machine, str(wide), "-", relays(8 * GIB))
    (relay,) = relays(8 * GIB, gives=int(whole * gives))
    command = ("-v", "run", "-m", str(wide), "--no-spec", "-c", "2048", "-n", "4", "--temp", "0")
    ended = machine(*command, *at(relay), "Hi")
    assert ended.code == 0, ended.err
    assert relay.refused
    assert "trying with fewer layers" in ended.err
    assert relay.most <= whole * gives


# ------------------------------------------------------------------ what is written there


@pytest.mark.parametrize("devices", [1, 2])
def test_prove(machine: Machine, relays: Make, devices: int) -> None:
    lent = relays(*[8 * GIB] * devices)
    split = ("--set", "tensor-split=1,1") if devices == 2 else ()
    ended = machine("prove", "--proposer", "all", "-n", "2", *at(*lent), *split)
    assert ended.code == 0, ended.out + ended.err
    assert re.search(r"lossless: \d+ of \d+ identical", ended.out)


def test_prove_side_by_side(machine: Machine, relays: Make) -> None:
    ended = machine("prove", "--parallel", "4", "-n", "4", *at(*relays(8 * GIB)))
    assert ended.code == 0, ended.out + ended.err


def test_serve(machine: Machine, relays: Make) -> None:
    server = machine.start(
        "serve", "-m", "tiny", "--port", "0", "--parallel", "4", *at(*relays(8 * GIB))
    )
    assert server.stderr is not None
    try:
        seen = ""
        while "served at" not in seen:
            seen = server.stderr.readline()
            assert seen, "it ended"
        url = re.findall(r"http\S+", seen)[0]
        clients = [machine.start("run", "--server", url, "Hi", "--temp", "0") for _ in range(4)]
        texts = {client.communicate(timeout=60)[0] for client in clients}
        assert len(texts) == 1
        assert texts.pop().strip()
    finally:
        server.terminate()
        server.communicate(timeout=60)


def test_doctor(machine: Machine, relays: Make) -> None:
    ended = machine("doctor", "-m", "tiny", "--json", *at(*relays(8 * GIB, 3 * GIB)))
    checks = ended.json[0]["checks"]
    found = {check["name"]: check["found"] for check in reversed(checks)}
    assert "8.6 GB free of 8.6 GB" in found["device RPC0"]
    assert "3.2 GB free of 3.2 GB" in found["device RPC1"]
    assert "8 on RPC0" in found["offload"]
    assert "GPU" not in found


# ------------------------------------------------------------------ workers that come and go


def test_one_program_at_a_time(machine: Machine, relays: Make) -> None:
    (relay,) = relays(8 * GIB)
    other = machine.start(*RUN[:-2], "--ignore-eos", "-n", "1500", "Hi", *at(relay))
    while not relay.passes:
        time.sleep(0.05)
        assert other.poll() is None
    other.send_signal(signal.SIGSTOP)  # it would be done too soon
    ended = machine(*RUN, *at(relay))
    other.kill()
    other.communicate()
    assert ended.code == 5
    assert "does not answer" in ended.err


@pytest.fixture
def own_worker(machine: Machine) -> Any:
    """A worker that may be ended."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = machine.start("rpc-worker", "-p", str(port), "-t", "1")
    assert process.stdout is not None
    process.stdout.readline()
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield process, Relay(port, 8 * GIB, 8 * GIB)
    process.kill()
    process.communicate()


def test_a_worker_that_ends_while_a_command_runs(machine: Machine, own_worker: Any) -> None:
    process, relay = own_worker
    command = machine.start(*RUN[:-2], "--ignore-eos", "-n", "1500", "Hi", *at(relay))
    while not relay.passes:
        time.sleep(0.05)
        assert command.poll() is None
    process.kill()
    _, err = command.communicate(timeout=60)
    assert command.returncode == 134
    assert "error: a worker (--rpc) is gone: ggml-rpc.cpp" in err
    assert "Traceback" not in err
    assert "Aborted" not in err


def test_a_worker_that_ends_under_the_app(
    machine: Machine, own_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """App and server keep the engine in a process of its own."""
    process, relay = own_worker
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    options = EngineOptions(rpc=at(relay)[1])
    with EngineHost(LoadEngine("tiny", "tiny-draft", options)) as host:
        assert host.start().device == "GPU"
        params = GenerateParams(ignore_eos=True, max_tokens=1500)
        events = host.generate("Once", params)
        next(events)
        process.kill()
        with pytest.raises(EngineDied, match=r"a worker \(--rpc\) is gone"):
            list(events)
