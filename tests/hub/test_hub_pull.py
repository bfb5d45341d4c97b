"""Pulling from a fake hub: what arrives, what is refused, what survives a kill."""

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import ggufs
import httpx2
import pytest
from click.testing import CliRunner, Result
from fakehub import FakeHub, Fault

from specllama import paths
from specllama.cli.hub import command
from specllama.errors import ModelUnavailable, SpecllamaError, UsageError
from specllama.models import download

REPO = "maker/small-GGUF"
NAME = "small-Q4_0.gguf"


@pytest.fixture(scope="session")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    return ggufs.write_llama(path, quant="F32").read_bytes()


@pytest.fixture
def hub(
    monkeypatch: pytest.MonkeyPatch, nobody_else: Path, model_bytes: bytes
) -> Iterator[FakeHub]:
    with FakeHub() as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        monkeypatch.setattr(download, "STALL_TIMEOUT_S", 0.5)
        monkeypatch.setattr(download, "sleep", lambda seconds: None)
        fake.add(REPO, {NAME: model_bytes})
        yield fake


def run(*args: str) -> Result:
    result = CliRunner().invoke(command, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def folder() -> Path:
    return paths.models_dir() / "maker" / "small-GGUF"


def leftovers() -> list[str]:
    return sorted(
        p.name for p in paths.models_dir().rglob("*") if p.is_file() and p.suffix != ".lock"
    )


def test_pull_brings_the_file_and_prints_the_next_command(hub: FakeHub, model_bytes: bytes) -> None:
    result = run("pull", f"{REPO}:Q4_0")
    assert (folder() / NAME).read_bytes() == model_bytes
    assert "specllama chat -m maker/small-GGUF:Q4_0" in result.stderr
    assert result.stdout == ""
    assert not list(folder().glob("*.part"))


def test_files_outside_lfs_are_checked_by_their_git_digest(
    hub: FakeHub, model_bytes: bytes
) -> None:
    entry = hub.entry(NAME, model_bytes)
    del entry["lfs"]
    header = b"blob %d\0" % len(model_bytes)
    entry["blobId"] = hashlib.sha1(header + model_bytes).hexdigest()
    hub.listed[REPO] = [entry]
    run("pull", REPO)
    assert (folder() / NAME).read_bytes() == model_bytes
    run("rm", "-y", f"{REPO}:Q4_0")
    hub.faults[NAME] = Fault(corrupt=True)
    with pytest.raises(ModelUnavailable, match="arrived damaged"):
        run("pull", REPO)
    assert leftovers() == []


def test_a_second_pull_transfers_nothing(hub: FakeHub) -> None:
    run("pull", REPO)
    before = len(hub.of(NAME))
    assert "already here" in run("pull", REPO).stderr
    assert len(hub.of(NAME)) == before


def test_what_the_hugging_face_cache_has_is_not_pulled_again(
    hub: FakeHub, model_bytes: bytes, tmp_path: Path
) -> None:
    cache = tmp_path / "user/.cache/huggingface/hub" / f"models--{REPO.replace('/', '--')}"
    blob = cache / "blobs" / hashlib.sha256(model_bytes).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.write_bytes(model_bytes)
    link = cache / "snapshots" / ("c" * 40) / NAME
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    assert f"already here, 474 kB: {link}" in run("pull", REPO).stderr
    assert hub.of(NAME) == []
    blob.write_bytes(model_bytes[:-1])
    run("pull", REPO)
    assert (folder() / NAME).read_bytes() == model_bytes


def test_an_interrupted_transfer_continues_where_it_stopped(
    hub: FakeHub, model_bytes: bytes
) -> None:
    cut = len(model_bytes) * 3 // 10
    hub.faults[NAME] = Fault(cut_after=cut, times=1)
    run("pull", REPO)
    assert [request.range for request in hub.of(NAME)] == [None, f"bytes={cut}-"]
    assert (folder() / NAME).read_bytes() == model_bytes


def test_kill_and_resume(hub: FakeHub, model_bytes: bytes) -> None:
    hub.faults[NAME] = Fault(bytes_per_s=len(model_bytes) // 4, times=1)
    code = "from specllama.cli.hub import command; command()"
    process = subprocess.Popen([sys.executable, "-c", code, "pull", REPO], stderr=subprocess.PIPE)
    assert process.stderr is not None
    deadline = time.monotonic() + 30
    wanted = len(model_bytes) * 3 // 10
    part = folder() / f"{NAME}.{hashlib.sha256(model_bytes).hexdigest()[:16]}.part"
    while time.monotonic() < deadline:
        if part.exists() and part.stat().st_size >= wanted:
            break
        time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    kept = part.stat().st_size
    assert wanted <= kept < len(model_bytes)
    assert leftovers() == [part.name]
    assert "continuing at" in run("pull", REPO).stderr
    assert hub.of(NAME)[-1].range == f"bytes={kept}-"
    assert (folder() / NAME).read_bytes() == model_bytes
    assert not part.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_at_once_and_keeps_what_came(
    hub: FakeHub, model_bytes: bytes, number: int
) -> None:
    hub.faults[NAME] = Fault(bytes_per_s=len(model_bytes) // 20, times=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "specllama", "hub", "pull", REPO],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    part = folder() / f"{NAME}.{hashlib.sha256(model_bytes).hexdigest()[:16]}.part"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (part.exists() and part.stat().st_size):
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert "run the same command again to resume" in err
    assert leftovers() == [part.name]


def test_a_corrupt_body_is_refused_and_leaves_nothing(hub: FakeHub) -> None:
    hub.faults[NAME] = Fault(corrupt=True)
    with pytest.raises(ModelUnavailable, match="arrived damaged"):
        run("pull", REPO)
    assert leftovers() == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(claim=123), "server announces 123"),
        (Fault(extra=b"more"), "sent more than"),
        (Fault(status=401), r"refuses access .*401"),
        (Fault(status=403, code="GatedRepo"), "gated"),
        (Fault(status=404, code="EntryNotFound"), "not on the hub"),
        (Fault(status=429, headers={"Retry-After": "3600"}), "is limiting requests"),
        (Fault(status=503), "answered 503, 5 times"),
        (Fault(cut_after=0), "5 times in a row"),
        (Fault(stall_s=1.5), "no data for"),
        (Fault(redirect="/nowhere"), "not on the hub"),
        (Fault(redirect="ftp://example.invalid/x"), "not encrypted"),
        (Fault(redirect="http://192.0.2.1/x"), "not encrypted"),
    ],
)
def test_refusals_name_the_cause(hub: FakeHub, fault: Fault, message: str) -> None:
    hub.faults[NAME] = fault
    with pytest.raises(ModelUnavailable, match=message) as caught:
        run("pull", REPO)
    assert caught.value.hint
    assert caught.value.exit_code == 3
    assert not (folder() / NAME).exists()
    kept = [path.stat().st_size for path in folder().glob("*.part")]
    assert all(kept), "a part without a byte is of no use"
    assert ("is here and kept" in caught.value.message) == bool(kept)


def test_a_short_rate_limit_is_waited_for(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(download, "sleep", waits.append)
    hub.faults[NAME] = Fault(status=429, headers={"Retry-After": "7"}, times=2)
    result = run("pull", REPO)
    assert waits == [7.0, 7.0]
    assert "is limiting requests" in result.stderr
    assert (folder() / NAME).exists()


def test_a_short_rate_limit_of_the_listing_is_waited_for(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(download, "sleep", waits.append)
    hub.faults["api"] = Fault(status=429, headers={"Retry-After": "3"}, times=2)
    result = run("pull", REPO)
    assert waits == [3.0, 3.0]
    assert "is limiting requests; asking again in 3 s" in result.stderr
    assert (folder() / NAME).exists()


@pytest.mark.parametrize(
    ("headers", "tries", "hint"),
    [
        ({"Retry-After": "120"}, 1, "try again in 120 s"),
        ({}, 1, "try again later"),
        ({"Retry-After": "1"}, 5, "try again in 1 s"),
    ],
)
def test_a_rate_limit_that_lasts_is_final(
    hub: FakeHub, headers: dict[str, str], tries: int, hint: str
) -> None:
    hub.faults["api"] = Fault(status=429, headers=headers)
    with pytest.raises(ModelUnavailable, match="is limiting requests") as caught:
        run("pull", REPO)
    assert len(hub.requests) == tries
    assert hint in str(caught.value.hint)


def test_a_server_that_ignores_ranges_is_read_from_the_start(
    hub: FakeHub, model_bytes: bytes
) -> None:
    hub.faults[NAME] = Fault(cut_after=1000, times=1)
    part = download.part_path(
        folder() / NAME, download.Digest("sha256", hashlib.sha256(model_bytes).hexdigest())
    )
    part.parent.mkdir(parents=True)
    part.write_bytes(model_bytes[:5000])
    hub.faults[NAME] = Fault(ignore_range=True)
    run("pull", REPO)
    assert (folder() / NAME).read_bytes() == model_bytes


def test_wrong_bytes_in_a_part_are_found_by_the_digest(hub: FakeHub, model_bytes: bytes) -> None:
    part = download.part_path(
        folder() / NAME, download.Digest("sha256", hashlib.sha256(model_bytes).hexdigest())
    )
    part.parent.mkdir(parents=True)
    part.write_bytes(b"\0" * 5000)
    with pytest.raises(ModelUnavailable, match="arrived damaged"):
        run("pull", REPO)
    assert leftovers() == []
    run("pull", REPO)
    assert (folder() / NAME).read_bytes() == model_bytes


def test_a_redirect_to_another_host_loses_the_token(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, model_bytes: bytes
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with FakeHub() as other:
        other.add(REPO, {NAME: model_bytes})
        hub.faults[NAME] = Fault(redirect=f"{other.url}/cdn/{REPO}/resolve/main/{NAME}")
        run("pull", REPO)
        assert hub.of(NAME)[0].authorization == "Bearer hf_secret"
        assert [request.authorization for request in other.requests] == [None]
    assert (folder() / NAME).read_bytes() == model_bytes


@pytest.mark.parametrize(
    "there",
    ["http://127.0.0.1:9/x", "http://127.0.0.2/x", "https://localhost/x", "http://[::1]/x",
     "http://169.254.169.254/latest", "https://box.localhost./x"],
)  # fmt: skip
def test_a_hub_elsewhere_asks_nothing_of_this_machine(there: str, tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(str(request.url))
        return httpx2.Response(302, headers={"location": there})

    with (
        httpx2.Client(transport=httpx2.MockTransport(answer)) as client,
        pytest.raises(ModelUnavailable, match=r"on to this machine|not encrypted"),
    ):
        download.download(
            client,
            "https://hub.example/x",
            tmp_path / "x",
            size=4,
            digest=download.Digest("sha256", "0" * 64),
            headers={},
            progress=Mock(),
            allow_http=True,
        )
    assert asked == ["https://hub.example/x"]


def test_a_stored_token_is_not_sent_to_another_endpoint(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.utils

    monkeypatch.setattr(huggingface_hub.utils, "get_token", lambda: "hf_stored")
    run("pull", REPO)
    assert all(request.authorization is None for request in hub.requests)


def test_an_unencrypted_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    with pytest.raises(ModelUnavailable, match="not encrypted"):
        run("pull", REPO)


@pytest.mark.parametrize(
    "name",
    ["../up.gguf", "/abs.gguf", "a/../../up.gguf", "C:\\x.gguf", "-rf.gguf", "a\nb.gguf", ".gguf/"],
)
def test_hostile_file_names_never_become_paths(
    hub: FakeHub, model_bytes: bytes, name: str, tmp_path: Path
) -> None:
    hub.listed[REPO].append(hub.entry(name, model_bytes))
    hub.repos[REPO][name] = model_bytes
    run("pull", f"{REPO}:Q4_0")
    assert {p.name for p in folder().rglob("*.gguf")} == {NAME}
    assert not (tmp_path / "up.gguf").exists()


def test_only_hostile_names_means_no_model(hub: FakeHub, model_bytes: bytes) -> None:
    hub.listed[REPO] = [hub.entry("../up-Q4_0.gguf", model_bytes)]
    with pytest.raises(ModelUnavailable, match="holds no GGUF model"):
        run("pull", REPO)


@pytest.mark.parametrize("digest", ["../../../x", "z" * 64, "", None])
def test_a_digest_that_is_none_is_refused(
    hub: FakeHub, model_bytes: bytes, digest: str | None
) -> None:
    entry = hub.entry(NAME, model_bytes)
    entry["lfs"]["sha256"] = digest or ""
    entry["blobId"] = "../../x"
    hub.listed[REPO] = [entry]
    with pytest.raises(ModelUnavailable):
        run("pull", REPO)
    assert leftovers() == []


@pytest.mark.parametrize("lie", [10, 10_000_000])
def test_a_listing_that_lies_about_the_size(hub: FakeHub, model_bytes: bytes, lie: int) -> None:
    hub.listed[REPO] = [hub.entry(NAME, model_bytes, size=lie)]
    with pytest.raises(ModelUnavailable, match="the hub lists"):
        run("pull", REPO)
    assert leftovers() == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(status=401), "401"),
        (Fault(status=404, code="RepoNotFound"), "not on the hub|404"),
        (Fault(status=403, code="GatedRepo"), "gated"),
    ],
)
def test_listing_errors(hub: FakeHub, fault: Fault, message: str) -> None:
    hub.faults["api"] = fault
    with pytest.raises(ModelUnavailable, match=message):
        run("pull", REPO)


def test_an_unknown_repository(hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        run("pull", "nobody/nothing")
    assert caught.value.exit_code == 3


def test_an_unknown_revision(hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailable, match="revision"):
        run("pull", REPO, "--revision", "v9")


def test_a_revision_with_dots_never_leaves(hub: FakeHub) -> None:
    with pytest.raises(UsageError, match="not a revision"):
        run("pull", REPO, "--revision", "../../etc")


def test_an_unknown_quant_lists_what_there_is(hub: FakeHub) -> None:
    with pytest.raises(ModelUnavailable, match="it has: Q4_0"):
        run("pull", f"{REPO}:Q8_0")


def test_large_downloads_ask_first(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import specllama.cli.hub as cli

    monkeypatch.setattr(cli, "CONFIRM_BYTES", 1000)
    with pytest.raises(UsageError, match="there is no terminal to ask on"):
        run("pull", REPO)
    run("pull", REPO, "-y")
    assert (folder() / NAME).exists()


def test_free_space_is_checked_before_the_first_byte(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(SpecllamaError, match="are needed"):
        run("pull", REPO)
    assert hub.of(NAME) == []


def test_a_full_disk_keeps_the_part(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, model_bytes: bytes
) -> None:
    write = download._Transfer.write

    def full(self: download._Transfer, chunk: bytes) -> None:
        write(self, chunk[:4000])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download._Transfer, "write", full)
    with pytest.raises(SpecllamaError, match="disk is full") as caught:
        run("pull", REPO)
    assert caught.value.exit_code == 1
    monkeypatch.setattr(download._Transfer, "write", write)
    run("pull", REPO)
    assert hub.of(NAME)[-1].range == "bytes=4000-"
    assert (folder() / NAME).read_bytes() == model_bytes


def test_split_models_come_whole(hub: FakeHub, tmp_path: Path) -> None:
    parts = ggufs.write_split(tmp_path / "big-Q4_0.gguf")
    hub.add("maker/big-GGUF", {part.name: part.read_bytes() for part in parts})
    run("pull", "maker/big-GGUF:Q4_0")
    here = paths.models_dir() / "maker" / "big-GGUF"
    assert sorted(p.name for p in here.glob("*.gguf")) == [part.name for part in parts]


def test_a_split_model_with_a_missing_part_is_refused(hub: FakeHub, tmp_path: Path) -> None:
    parts = ggufs.write_split(tmp_path / "big-Q4_0.gguf")
    hub.add("maker/big-GGUF", {part.name: part.read_bytes() for part in parts[:-1]})
    with pytest.raises(ModelUnavailable, match="lacks parts"):
        run("pull", "maker/big-GGUF:Q4_0")


def test_a_catalogue_name_pulls_target_and_draft(
    hub: FakeHub, model_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specllama.models import catalog

    pair = catalog.parse(
        """
        [pairs.demo]
        family = "Demo"
        target = { repo = "maker/small-GGUF", quant = "Q4_0", params = 1 }
        draft = { repo = "maker/draft-GGUF", quant = "Q8_0", params = 0.1 }
        licence = "MIT"
        why = "a test"
        memory_gb = 4
        source = "this test"
        checked = false
        date = "2026-11-21"
        """
    )
    monkeypatch.setattr(catalog, "load", lambda: pair)
    hub.add("maker/draft-GGUF", {"draft-Q8_0.gguf": model_bytes})
    assert "specllama chat -m demo" in run("pull", "demo").stderr
    assert (paths.models_dir() / "maker" / "draft-GGUF" / "draft-Q8_0.gguf").exists()

    from specllama.models.refs import resolve_pair

    target, draft = resolve_pair("demo")
    assert target.name == NAME
    assert draft.name == "draft-Q8_0.gguf"


def test_two_pulls_at_once_do_not_mix(hub: FakeHub, model_bytes: bytes) -> None:
    from filelock import FileLock

    locks = paths.models_dir() / ".locks"
    locks.mkdir(parents=True)
    with (
        FileLock(locks / "maker--small-GGUF.lock"),
        pytest.raises(SpecllamaError, match="another specllama is pulling"),
    ):
        run("pull", REPO)


def test_no_telemetry_and_no_other_route(hub: FakeHub) -> None:
    run("pull", REPO)
    assert {request.path for request in hub.requests} == {
        f"/api/models/{REPO}/revision/main",
        f"/{REPO}/resolve/{'c' * 40}/{NAME}",
    }


def test_offline_pull_only_says_what_is_here(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelUnavailable, match="network is switched off"):
        run("pull", REPO)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    run("pull", REPO)
    count = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "is already here" in run("pull", REPO).stderr
    assert len(hub.requests) == count


def test_an_unreachable_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelUnavailable, match="cannot be reached"):
        run("pull", REPO)
