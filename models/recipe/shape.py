"""The sizes of the family's models, and the files that it ships as."""

from __future__ import annotations

from pathlib import Path

from specllama.models.recipe.scale import LlamaShape

BUNDLED = Path(__file__).resolve().parents[1] / "tiny"
TARGET_FILE = BUNDLED / "tiny-target-q4_0.gguf"
DRAFT_FILE = BUNDLED / "tiny-draft-q8_0.gguf"

TARGET = LlamaShape(width=256, layers=7, hidden=704, heads=4, kv_heads=2)
DRAFT = LlamaShape(width=128, layers=2, hidden=352, heads=2, kv_heads=1, tied=True)
# The draft that speaks a vocabulary of its own (`other_vocab`).
OTHER = LlamaShape(width=128, layers=2, hidden=256, heads=2, kv_heads=1, vocab=2048, tied=True)
SHAPES = {"target": TARGET, "draft": DRAFT, "other": OTHER}
