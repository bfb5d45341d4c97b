"""The phases of a real training: a target that writes and is read, and a head that learns."""

from __future__ import annotations

import ctypes
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from specllama.models import trimmed
from specllama.models.gguf import GgufHeader
from specllama.training import questions as asking
from specllama.training.corpus import Corpus, Sample
from specllama.training.features import Teacher, read_again
from specllama.training.head_file import layers_read
from specllama.training.questions import PromptList
from specllama.training.shards import Shards
from specllama.training.training_card import METADATA, Milestone, TrainingCard
from specllama.training.training_folder import CHECKPOINT, started_from
from specllama.training.writing import Writer

TRIM_S = 5.0  # of training, after which freed memory goes back to the system
_FULL = 0.9  # of the room for features, above which a reply that is read pushes another one out


Over = Callable[[], bool]
"""True once a phase has to end: asked several times a second."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """The contents of a training folder.

    Attributes:
        written: tokens of replies. held_out: replies that are for judging.
        unread: replies whose features are gone, though there is room for them.
        read: tokens whose features are there. disk: their bytes.
        replies: to learn from, by kind.
    """

    written: int
    held_out: int
    read: int
    unread: int
    disk: int
    replies: dict[str, int]


class TargetPhases:
    """The phases over a folder. The target and the trainer are there only while they are used.

    Args:
        questions: that the target answers. disk: bytes of features, at most.
    """

    def __init__(
        self,
        target: GgufHeader,
        folder: Path,
        card: TrainingCard,
        questions: PromptList,
        disk: int,
        threads: int | None,
    ) -> None:
        self._target, self._folder, self._card = target, folder, card
        self._questions, self._threads = questions, threads
        self._corpus, self._shards = Corpus(folder), Shards(folder, disk)
        self._trainer: Any = None

    def amounts(self) -> Amounts:
        corpus, shards = self._corpus, self._shards
        gone = len(corpus) - len(shards.ids(False)) - len(shards.ids(True))
        return Amounts(
            written=corpus.tokens,
            held_out=corpus.count(True),
            unread=gone if shards.n_bytes < _FULL * shards.most_bytes else 0,
            read=corpus.tokens * (len(corpus) - gone) // max(len(corpus), 1),
            disk=shards.n_bytes,
            replies={kind: corpus.count(False, kind) for kind in self._questions.kinds},
        )

    def _teacher(self) -> Teacher:
        return Teacher.open(self._target, threads=self._threads)

    def write(self, over: Over) -> None:
        """Let the target answer the next questions; its passes give the features as well."""
        asked = self._questions.asked(self._card.seed, self._corpus)
        with self._teacher() as teacher:
            for sample, features in Writer(teacher).write(asked, over):
                self._corpus.append(sample)
                self._shards.add(features, sample.held_out)
        self._shards.flush()

    def read(self, over: Over) -> None:
        """Read replies again, those held out first, then the newest ones."""
        with self._teacher() as teacher:
            for held_out in (True, False):
                samples = [*self._corpus.samples(held_out, self._shards.ids(held_out))][::-1]
                with closing(read_again(teacher, samples)) as found:
                    for features in found:
                        self._shards.add(features, held_out)
                        if over() or self._shards.n_bytes >= _FULL * self._shards.most_bytes:
                            break
        self._shards.flush()

    def train(
        self, over: Over, report: Callable[[Milestone], None], ahead: Callable[[], float | None]
    ) -> None:
        """Train on until it is over or gains nothing; report each step, and figures in the end.

        Args:
            ahead: the share of the whole training that is ahead.
        """
        import torch

        from specllama.training.trainer import Trainer, TrainingPlan

        if not self._shards.ids(False):
            return
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        dice = random.Random(self._card.seed)
        counts = Counter(t for sample in self._corpus.samples(False) for t in sample.reply)
        trainer = self._trainer = Trainer(
            self._target, trimmed.choose(self._target, self._card.words, counts),
            layers_read(self._target), features=lambda: self._shards.read(False, dice),
            held_out=lambda: self._shards.read(True), kept=self._folder / CHECKPOINT,
            plan=TrainingPlan(seed=self._card.seed), start=started_from(self._folder),
        )  # fmt: skip

        if (best := self._card.best) is not None and self._card.own:
            found = trainer.judge_again()
            self._card.best = replace(best, right=found.right, per_pass=found.per_pass)

        trimmed_s = time.monotonic()

        def enough() -> bool:
            nonlocal trimmed_s
            if time.monotonic() - trimmed_s > TRIM_S:
                _give_memory_back()
                trimmed_s = time.monotonic()
            return over()

        try:
            trainer.train(enough, report, ahead)
        finally:
            self._trainer = None
            del trainer
            _give_memory_back()

    def export(self, path: Path, card: TrainingCard) -> None:
        """Write the best head of the training that goes on."""
        self._trainer.export(path, {METADATA: card.encoded().decode()})

    def held_out(self, n: int) -> Sequence[Sample]:
        """Return some replies that the head does not learn from."""
        return [*islice(self._corpus.samples(True), n)]


def _give_memory_back() -> None:
    """Return freed memory to the system: glibc keeps a gigabyte of a training."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def open_work(
    target: GgufHeader,
    folder: Path,
    card: TrainingCard,
    disk: int,
    threads: int | None,
    asked: Mapping[str, Any],
) -> tuple[TargetPhases, str]:
    """Open the phases of a training; also return, in words, which files of texts were left out.

    Args:
        asked: ``texts``, names of files and folders; ``from_chats``, the person's own are read.

    Raises:
        UsageError: there is no text in ``texts``.
        StoreError: the folder cannot be read or written.
    """
    without, lists, sources = "", list[PromptList](), list[str]()
    if asked["texts"]:
        found, without = asking.of_texts(asked["texts"])
        lists.append(found)
        sources.append(f"{len(found):,} questions about own texts")
    if asked["from_chats"]:
        lists.append(chats := asking.of_chats())
        sources.append(f"{len(chats):,} questions of own chats")
    questions = sum(lists, asking.shipped())
    shipped = f"{len(asking.shipped()):,} questions of the list that ships"
    card.sources = list(dict.fromkeys([shipped, *card.sources, *sources]))
    work = TargetPhases(target, folder, card, questions, disk, threads)
    return work, without
