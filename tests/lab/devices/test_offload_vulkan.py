"""A real GPU backend, computed by a driver in software: slow, and near-ties are to be expected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from machines import FOLDER, SOFTWARE_VULKAN, Machine

RUN = ("run", "-m", "tiny", "--temp", "0", "-n", "8", "Hi there", "--json")


@pytest.fixture(scope="module")
def vulkan(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if not list(Path(FOLDER or "nowhere").glob("*ggml-vulkan*")):
        pytest.skip("LLAMA_CPP_LIB is built without Vulkan")
    return Machine(tmp_path_factory.mktemp("home"), **SOFTWARE_VULKAN)


def test_doctor_finds_it(vulkan: Machine) -> None:
    ended = vulkan("doctor", "-m", "tiny", "--json")
    found = {check["name"]: check["found"] for check in reversed(ended.json[0]["checks"])}
    assert "free of" in found["device Vulkan0"]
    assert "on Vulkan0" in found["offload"]


@pytest.mark.parametrize("flags", ["", "-ngl 3", "-ngl 0", r"-ngl 0 -ot blk\.1\.ffn=Vulkan0"])
def test_offload(vulkan: Machine, flags: str) -> None:
    ended = vulkan(*RUN, *flags.split())
    assert ended.code == 0, ended.err
    assert ended.json[-1]["text"].startswith("Hello")


def test_prove(vulkan: Machine) -> None:
    ended = vulkan("prove", "-n", "1", "--max-tokens", "16", "--proposer", "draft")
    assert ended.code == 0, ended.out + ended.err
    assert re.search(r"\d+ of \d+ identical", ended.out)
