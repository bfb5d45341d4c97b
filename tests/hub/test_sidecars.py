"""Heads, projectors and matrices are never taken for the model; each is offered as what it is."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ggufs
import pytest
from fakehub import FakeHub, Fault
from ggufs_nextn import write_nextn

from specllama import paths
from specllama.cli import invoke
from specllama.engine.target_heads import survey
from specllama.errors import ModelUnavailable, PairIncompatible, UnsupportedModel, UsageError
from specllama.models.companions import kind_of, kind_of_name
from specllama.models.gguf import read_header
from specllama.models.hub_client import HubClient
from specllama.models.loadable import check_loadable
from specllama.models.refs import bundled, resolve

pytestmark = pytest.mark.usefixtures("nobody_else")

HEAD = paths.bundled_dir() / "tiny-eagle3-q8_0.gguf"
REPO = "maker/small-GGUF"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    model = ggufs.write_llama(tmp_path / "model.gguf", quant="Q4_0").read_bytes()
    with FakeHub() as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        head = HEAD.read_bytes()
        names = ("mtp-small-Q4_0", "eagle3-small-Q4_0", "dflash-small-Q4_0", "dspark-small-Q4_0")
        files = {f"{name}.gguf": head for name in (*names, "mmproj-small-F16", "imatrix")}
        fake.add(REPO, {"small-Q8_0.gguf": model, **files})
        fake.add("maker/head-GGUF", {"small-EAGLE3-Q8_0.gguf": head})
        yield fake


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mtp-Qwen3.6-27B-Q8_0.gguf", "mtp"),
        ("MTP/mtp-gemma-4-E4B-it-Q8_0.gguf", "gemma4-assistant"),
        ("gemma-4-12B-it-assistant-GGUF.gguf", "gemma4-assistant"),
        ("gemma-3-assistant-4b-Q8_0.gguf", ""),
        ("Qwen3.6-27B-MTP-Q4_K_M.gguf", ""),
        ("eagle3-gpt-oss-20b-Q8_0.gguf", "eagle3"),
        ("Qwen3-8B-EAGLE3.gguf", "eagle3"),
        ("dflash-draft-3.6-Q4_0.gguf", "dflash"),
        ("dspark-x.gguf", "dspark"),
        ("sub/gemma-mmproj-f16.gguf", "mmproj"),
        ("mmproj.gguf", "mmproj"),
        ("imatrix_unsloth.gguf", "imatrix"),
        ("model-imatrix-Q4_K_M.gguf", ""),
        ("Beagle3-7B-Q4_0.gguf", ""),
        ("Medusa-1.1-L2-7B.Q4_K_M.gguf", ""),
    ],
)
def test_names(name: str, kind: str) -> None:
    assert kind_of_name(name) == kind


def test_pull_takes_the_model_and_offers_its_head(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["hub", "pull", REPO]) == 0
    said = capsys.readouterr().err
    assert [p.name for p in (paths.models_dir() / REPO).glob("*.gguf")] == ["small-Q8_0.gguf"]
    assert f"an EAGLE-3 head: specllama hub pull {REPO}/eagle3-small-Q4_0.gguf" in said
    assert "mmproj" not in said


def test_a_head_that_is_pulled_is_named_as_one(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["hub", "pull", "maker/head-GGUF"]) == 3
    said = capsys.readouterr().err
    assert "holds no model, but an EAGLE-3 head" in said
    ref = "maker/head-GGUF/small-EAGLE3-Q8_0.gguf"
    assert f"specllama hub pull {ref}" in said
    assert invoke(["hub", "pull", ref]) == 0
    assert f"specllama chat -m TARGET --head {ref}" in capsys.readouterr().err
    assert resolve(ref).is_file()


def test_info_says_what_each_file_is(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["hub", "info", REPO, "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["repositories"][0]["models"]
    assert [m["files"] for m in models if m["sidecar"] is None] == [["small-Q8_0.gguf"]]
    assert {m["sidecar"] for m in models if m["sidecar"]} == {
        "mtp", "eagle3", "dflash", "dspark", "mmproj", "imatrix",
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target beside its head and a projector that hide behind a model's names."""
    folder = tmp_path / "set"
    folder.mkdir()
    shutil.copy(bundled("tiny-target"), folder / "target-Q4_0.gguf")
    shutil.copy(HEAD, folder / "another-Q8_0.gguf")
    ggufs.write_clip(folder / "third.gguf")
    return folder


def test_a_folder_with_sidecars_holds_one_model(folder: Path) -> None:
    assert resolve(str(folder)) == folder / "target-Q4_0.gguf"
    shutil.copy(bundled("tiny-draft"), folder / "draft.gguf")
    with pytest.raises(UsageError, match="holds 2 models"):
        resolve(str(folder))


def test_a_pulled_repository_with_a_hidden_head_means_its_model(folder: Path) -> None:
    home = paths.models_dir() / "maker" / "set-GGUF"
    shutil.copytree(folder, home)
    assert resolve("maker/set-GGUF") == home / "target-Q4_0.gguf"


def test_pair_and_ls_offer_the_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, head = folder / "target-Q4_0.gguf", folder / "another-Q8_0.gguf"
    assert invoke(["pair", str(target)]) == 0
    shown = capsys.readouterr()
    assert any(
        line.startswith("✓  eagle3") and line.endswith(f"with --head {head}")
        for line in shown.out.splitlines()
    )
    assert not any("another" in line and "eagle3" not in line for line in shown.out.splitlines()), (
        "a head is no draft model that fails to fit"
    )
    assert invoke(["hub", "ls", str(folder)]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "an EAGLE-3 head" in rows[str(head)]
    assert rows[str(head)].endswith("--head")
    assert "a vision projector" in rows[str(folder / "third.gguf")]
    assert invoke(["hub", "ls", str(folder), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["models"]
    assert sorted(entry["sidecar"] for entry in entries) == ["", "eagle3", "mmproj"]


def test_an_mtp_file_without_its_trunk_is_refused(tmp_path: Path) -> None:
    assert kind_of(read_header(write_nextn(tmp_path / "whole.gguf", blocks=1))) == ""
    head = read_header(write_nextn(tmp_path / "head.gguf", blocks=1, trunk=False))
    assert kind_of(head) == "mtp"
    with pytest.raises(UnsupportedModel, match="is an MTP head") as refused:
        check_loadable(head)
    assert "--head" in str(refused.value.hint)


def test_what_head_does_not_take_is_named(tmp_path: Path) -> None:
    target = read_header(bundled("tiny-target"))
    projector = ggufs.write_clip(tmp_path / "m.gguf")
    with pytest.raises(PairIncompatible, match="is a vision projector"):
        survey(target, [str(projector)])


# -- after a pull the network may be gone --


NAME = "small-Q4_0.gguf"

# a connection anywhere, even to this machine, ends the process with a traceback
BLOCKED = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError(f"network used: {args}")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = refuse
from specllama.cli import invoke
sys.exit(invoke(sys.argv[1:]))
"""


@pytest.fixture
def offline_hub(
    monkeypatch: pytest.MonkeyPatch, nobody_else: Path, tmp_path: Path
) -> Iterator[FakeHub]:
    with FakeHub() as fake:
        fake.add(REPO, {NAME: ggufs.write_llama(tmp_path / NAME, quant="Q4_0").read_bytes()})
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        yield fake


def run(*arguments: str, code: str = BLOCKED) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.e2e
def test_everything_works_without_a_network(
    offline_hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECLLAMA_THREADS", "1")
    online = "import sys\nfrom specllama.cli import invoke\nsys.exit(invoke(sys.argv[1:]))"
    pulled = run("hub", "pull", f"{REPO}:Q4_0", code=online)
    assert pulled.returncode == 0, pulled.stderr
    asked = len(offline_hub.requests)
    for arguments in (
        ("hub", "ls"),
        ("hub", "path", REPO),
        ("hub", "verify", REPO),
        ("hub", "pairs"),
        ("pair", REPO),
        ("doctor",),
    ):
        done = run(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    done = run("run", "-m", f"{REPO}:Q4_0", "--raw", "--max-tokens", "12", "--json", "hello there")
    assert done.returncode == 0, done.stderr
    finish = json.loads(done.stdout.splitlines()[-1])
    assert finish["type"] == "finish"
    assert len(finish["token_ids"]) > 0
    assert len(offline_hub.requests) == asked


def test_the_guard_guards(offline_hub: FakeHub) -> None:
    assert run("hub", "pull", f"{REPO}:Q4_0").returncode != 0
    assert not offline_hub.requests


def test_a_rate_limited_listing_says_when(offline_hub: FakeHub) -> None:
    offline_hub.faults["api"] = Fault(status=429, headers={"Retry-After": "120"})
    online = "import sys\nfrom specllama.cli import invoke\nsys.exit(invoke(sys.argv[1:]))"
    done = run("hub", "info", REPO, code=online)
    assert done.returncode == 3
    assert "is limiting requests" in done.stderr


def test_search_and_info(offline_hub: FakeHub) -> None:
    online = "import sys\nfrom specllama.cli import invoke\nsys.exit(invoke(sys.argv[1:]))"
    found = run("hub", "search", "small", code=online)
    assert found.returncode == 0, found.stderr
    assert REPO in found.stdout
    assert "Q4_0" in found.stdout
    (data,) = json.loads(run("hub", "info", REPO, "--json", code=online).stdout)["repositories"]
    assert data["licence"] == "apache-2.0"
    assert data["models"][0]["quant"] == "Q4_0"
    assert run("hub", "search", "nothing-like-it", code=online).stdout == ""


def test_a_search_without_a_network_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    client = HubClient("http://127.0.0.1:9", insecure=True)
    asked: list[object] = []
    monkeypatch.setattr(client._api, "list_models", lambda **more: asked.append(more) or [])
    with pytest.raises(ModelUnavailable, match="cannot be reached"):
        client.search("qwen")
    assert asked == []
