"""``prove --against`` over HTTP: a right server, wrong ones, and what it says of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from law_servers import TableServer, noise, over_http
from servers import serving, table
from table_model import FakeTable

from specllama.cli import invoke

FIELDS = {"sharpness": 2.0, "eog_bias": 1.0}
TABLE = FakeTable(64, sharpness=2.0, eog_bias=1.0)


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """Arguments for few and short replies."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": s, "slice": s, "prompt": f"the rain in {s}"} for s in ("chat", "code", "rag")]
    path.write_text("\n".join(map(json.dumps, lines)))
    return ["--prompts", str(path), "--max-tokens", "16", "--tokens", "60", "--at-once", "2"]


@pytest.fixture
def plain() -> Iterator[str]:
    with over_http(TableServer(TABLE)) as url:
        yield url


def weights(tmp_path: Path) -> list[str]:
    path = tmp_path / "target.table"
    path.write_text(json.dumps(FIELDS))
    return ["-m", str(path)]


class Result(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


Prove = Callable[..., Result]


@pytest.fixture
def prove(capsys: pytest.CaptureFixture[str]) -> Prove:
    def run(*arguments: str) -> Result:
        capsys.readouterr()
        return Result(invoke(["prove", *arguments]), *capsys.readouterr())

    return run


def test_a_right_server_is_cleared(
    prove: Prove, asked: list[str], plain: str, tmp_path: Path
) -> None:
    with over_http(TableServer(TABLE, seed=5)) as url:
        result = prove("--against", url, "--plain", plain, *weights(tmp_path), *asked)
    assert result.exit_code == 0, result.output
    assert "No fault found" in result.stdout
    assert "3 of 3 greedy texts equal the plain ones, repeated at once" in result.stdout
    assert "60 tokens follow the law of our own engine over fake table" in result.stdout


def test_noise_is_found_though_greedy_texts_are_right(
    prove: Prove, asked: list[str], plain: str, tmp_path: Path
) -> None:
    with over_http(TableServer(TABLE, law=noise)) as url:
        result = prove("--against", url, "--plain", plain, *weights(tmp_path), *asked, "--json")
    assert result.exit_code == 1
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["type"] for line in lines[-3:]] == ["law", "law", "summary"]
    summary = lines[-1]
    assert summary["verdict"] == "not lossless"
    assert summary["finished"]
    assert {c["outcome"] for c in summary["texts"] if not c["temperature"]} == {"equal"}
    wrong, control = summary["laws"]
    assert wrong["found_at"] < 20
    assert control["arm"] == "plain"
    assert control["found_at"] is None


def test_without_weights_it_is_held_to_its_own_logprobs(
    prove: Prove, asked: list[str], plain: str
) -> None:
    with over_http(TableServer(TABLE, law=noise)) as url:
        result = prove("--against", url, "--plain", plain, *asked, "--temperature", "1")
    assert result.exit_code == 1
    assert "against the law of the logprobs that the server states itself" in result.stdout


def test_weights_alone_are_a_plain_arm(
    prove: Prove, asked: list[str], plain: str, tmp_path: Path
) -> None:
    result = prove("--against", plain, *weights(tmp_path), *asked)
    assert result.exit_code == 0, result.output
    assert "3 of 3 greedy texts equal the plain ones, the first time" in result.stdout


def test_our_own_server_is_switched_by_the_request(
    prove: Prove, asked: list[str], tmp_path: Path
) -> None:
    with serving(table(tmp_path, n_ctx=512)) as server:
        for _ in range(2):  # its replies are drawn without a seed: 1 in 100 may be a false alarm
            result = prove("--against", server.url, *asked, "-n", "2", "--tokens", "20")
            if result.exit_code == 0:
                break
    assert result.exit_code == 0, result.output
    assert "the same server, asked not to speculate" in result.output
    assert "2 of 2 texts at temperature 1 with the same seed equal the plain ones" in result.output


def test_nothing_to_compare_with_is_said(prove: Prove, asked: list[str], plain: str) -> None:
    result = prove("--against", plain, *asked)
    assert result.exit_code == 2
    assert "--plain URL; or its weights: -m FILE" in result.stderr


def test_a_server_that_goes_away_leaves_what_was_found(
    prove: Prove, asked: list[str], plain: str, tmp_path: Path
) -> None:
    with over_http(TableServer(TABLE)) as url:
        gone = url
    result = prove("--against", gone, "--plain", plain, *asked)
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    assert "no server answers" in result.output


@pytest.mark.parametrize("arguments", [["--plain", "http://x"], ["--remote-kind", "vllm"]])
def test_flags_of_another_server_need_one(prove: Prove, arguments: list[str]) -> None:
    result = prove(*arguments)
    assert result.exit_code == 2
    assert "add --against URL" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--proposer", "ngram"], ["--draft-max", "4"], ["--parallel", "2"]]
)
def test_flags_of_our_own_proof_are_refused(prove: Prove, arguments: list[str], plain: str) -> None:
    result = prove("--against", plain, *arguments)
    assert result.exit_code == 2
    assert "--at-once N" in result.stderr
