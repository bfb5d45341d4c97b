"""Fixtures of commands that measure: a fake pair behind ``Engine.load``, and two prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from engines import FakeContext, engine_over, fake_info
from table_model import FakeTable

from specllama.cli import loading
from specllama.engine.engine import Engine
from specllama.engine.profiles import Windows, open_profile
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """``loading.load`` gives a fake pair; what was asked for is noted."""
    asked: list[tuple[Any, Any]] = []

    def load(target: Any, draft: Any = None, options: Any = None, **more: Any) -> Engine:
        asked.append((target, draft))
        table = FakeTable(seed=3, order=1)
        model = FakeContext(FakeTable(seed=9, order=1, of=table, agreement=0.8), n_ctx=2048)
        info = fake_info(2048)
        drafts = ChainDrafter(model, n_vocab=64)
        return engine_over(
            FakeContext(table, n_ctx=2048),
            info=info,
            drafters={"draft": drafts, "mixed": MixedDrafter([NgramDrafter(), drafts])},
            make_window=Windows(open_profile(info), info),
        )

    monkeypatch.setattr(loading, "load", load)
    return asked


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": s, "slice": s, "prompt": f"the rain in {s}"} for s in ("chat", "code")]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path
