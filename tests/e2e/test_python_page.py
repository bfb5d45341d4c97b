"""What the page about Python shows runs as it stands there, and its rules of threads hold."""

import builtins
import re
import threading
from pathlib import Path

import pytest

import specllama
from specllama import Engine, GenerateParams
from specllama.errors import EngineError

PAGE = (Path(__file__).parents[2] / ".github" / "python.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_package_shows_every_name_and_has_it() -> None:
    assert set(specllama.__all__) <= set(dir(specllama))
    for name in specllama.__all__:
        assert getattr(specllama, name) is not None
    for line in re.findall(r"^from specllama import (.+)$", PAGE, re.M):
        assert set(line.split(", ")) <= set(specllama.__all__)


def test_the_chat_has_five_lines() -> None:
    assert EXAMPLES[0].partition("\n\n")[2].count("\n") == 5


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["What is a draft model?", "And a target model?", ""])
    monkeypatch.setattr(builtins, "input", lambda asked: next(typed))
    names: dict[str, object] = {}
    exec(compile(EXAMPLES[number], f"example {number}", "exec"), names)
    said = capsys.readouterr().out
    names["engine"].close()
    if number == 0:
        assert said.count("\n") >= 2
        assert next(typed, None) is None
    assert said.strip()
    assert ("cancelled" in said) == (number == len(EXAMPLES) - 1)


def test_three_threads_get_a_reply_or_a_clear_error(tiny: Engine) -> None:
    said: list[object] = []
    begin = threading.Barrier(3)

    def ask() -> None:
        begin.wait()
        try:
            *_, reply = tiny.generate("def add(", GenerateParams(seed=7, max_tokens=40))
            said.append(reply.text)
        except Exception as error:
            said.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    *_, alone = tiny.generate("def add(", GenerateParams(seed=7, max_tokens=40))
    texts = [one for one in said if isinstance(one, str)]
    assert texts
    assert set(texts) == {alone.text}
    assert all(isinstance(one, (str, EngineError)) for one in said), said


def test_two_engines_have_a_thread_each(tiny: Engine) -> None:
    def text(engine: Engine, into: list[str]) -> None:
        *_, reply = engine.generate("def add(", GenerateParams(seed=7, max_tokens=60))
        into.append(reply.text)

    said: list[str] = []
    with Engine.load("tiny") as other:
        threads = [threading.Thread(target=text, args=(one, said)) for one in (tiny, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(said) == 2
    assert said[0] == said[1]
