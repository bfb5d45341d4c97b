"""Block drafters of random weights beside the bundled target, from the command line to the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dflash_files import write_dflash

from specllama.bench.prompts import load_prompts
from specllama.bench.proof import prove
from specllama.cli import invoke
from specllama.engine.engine import Engine
from specllama.models.refs import resolve
from specllama.settings.params import EngineOptions

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=["dflash", "dflash2", "dspark"])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafter") / f"{request.param}.gguf"
    return write_dflash(path, resolve("tiny-target"), kind=request.param, layers=(2, 4, 6))


def test_the_text_is_that_of_plain_decoding(drafter: Path) -> None:
    options = EngineOptions(threads=1, heads=(str(drafter),))
    with Engine.load(resolve("tiny-target"), None, options) as engine:
        cases = list(
            prove(
                engine,
                load_prompts()[::40][:4],
                proposers=("dflash", "auto"),
                temperatures=(0.0, 0.8),
                draft_max=(4,),
                max_tokens=32,
            )
        )
    assert [case for case in cases if not (case.ok and case.identical and case.law_holds)] == []
    assert sum(case.drafted for case in cases) > 0


def test_it_is_drafted_with_from_the_command_line(
    drafter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(*more: str) -> dict[str, object]:
        argv = ["run", "-m", "tiny", "-t", "1", "--repack", "off", "--seed", "3", "-n", "24"]
        assert invoke([*argv, "--json", *more, "Write a story about a lighthouse"]) == 0
        done: dict[str, object] = json.loads(capfd.readouterr().out.splitlines()[-1])
        return done

    plain = run("--no-spec")
    drafted = run("--head", str(drafter), "--proposer", "dflash", "--window", "fixed")
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["proposer"] == "dflash"
    assert drafted["draft_n"]


def test_it_is_listed_where_heads_are(drafter: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pair", "tiny-target", "--head", str(drafter), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    way = next(way for way in report["methods"] if way["name"] == "dflash")
    assert way["available"]
    assert invoke(["run", "-m", str(drafter), "Hi"]) != 0
    assert "--head" in capfd.readouterr().err
