"""Training of an EAGLE-3 head on a target's own texts: measured, kept in a file, open-ended.

A new head is initialised by least squares (`head_seed`). It learns its first step on whole texts,
the cheapest way to see much of them; then it is unrolled, in a window of each text; one that starts
from another head is unrolled at once, and learns at a tenth of the rates. It learns the target's
law, not the text. Learning rates rise, stay, and fall in the last part where an end is known; what
is measured and used is an average of the latest weights, which needs no falling rates.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specllama.arrays import IntArray
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_writer import Value
from specllama.training.eagle_head import EagleHead, law_loss
from specllama.training.head_file import head_shape, write_head
from specllama.training.head_seed import seed_head
from specllama.training.kept_training import fit_words, read_kept, take_weights, write_kept
from specllama.training.lessons import ChainCount, Lesson, TargetFacts
from specllama.training.training_card import Milestone

if TYPE_CHECKING:
    from specllama.training.features import Features

MEASURED_S, SAVED_S = 60.0, 45.0  # between two measurements, and two writings of the file
SHARE = 1 / 15  # of the time for measurements, at most
LEAST_GAIN = 0.002  # tokens a pass
AT_ONCE = 2048  # tokens of a batch that is measured
BEGIN = 8192  # tokens of replies to which a new head is fitted
DECAY = 0.05  # of the matrices
AGAIN = 0.1  # of the rates, for a head that was trained before: else it forgets more than it learns


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The settings of a training.

    Attributes:
        steps: guesses in a row that are learnt; each but the first reads the head's own state.
        batch: tokens of a minibatch. window: places of a text that are unrolled.
        short: tokens after which the head is unrolled.
        discount: a step counts this much less than the one before it.
        alike: weight of the distance to the target's last state, so that there is one kind.
        muon, adam, output: learning rates of matrices, of norms, and of the output matrix.
        warm: minibatches in which the rates rise. cooling: share of a training in which they fall.
        judged: tokens of held-out replies that are measured. patience: measurements without gain.
        held: bytes of texts that are mixed.
    """

    steps: int = 3
    batch: int = 4096
    window: int = 96
    short: int = 300_000
    discount: float = 0.8
    alike: float = 0.2
    muon: float = 0.02
    adam: float = 2e-3
    output: float = 2e-4
    warm: int = 10
    cooling: float = 0.3
    judged: int = 8192
    patience: int = 10
    held: int = 256 << 20
    seed: int = 1


class Trainer:
    """A head in training, kept in a file.

    Args:
        words: the tokens that the head may guess, ascending; others than before change its rows.
        layers: of the target, whose inputs are read.
        features, held_out: give all texts from the start; there may be more the next time.
        kept: the file of the training, which goes on where it was left.
        start: the file of a head of the same sizes, from which a new one starts.

    Raises:
        UnsupportedModel, CannotLoad: see ``TargetFacts``.
        SpecllamaError: the file is damaged, or of another target.
    """

    def __init__(
        self,
        header: GgufHeader,
        words: IntArray,
        layers: Sequence[int],
        features: Callable[[], Iterator[Features]],
        held_out: Callable[[], Iterator[Features]],
        kept: Path,
        plan: TrainingPlan | None = None,
        device: str = "",
        start: GgufHeader | None = None,
    ) -> None:
        self._start, self.kept = start, kept
        plan = self.plan = plan or TrainingPlan()
        self.device = torch.device(device or best_device())
        self.figures, self.best_per_pass, self.stalled = Milestone(), 0.0, False
        self.best: dict[str, Tensor] = {}
        self._features, self._held_out = features, held_out
        self._fitted = 0  # tokens
        found = read_kept(kept, header)
        self.layers = tuple(layers)
        self.target = TargetFacts(header, words)
        torch.manual_seed(self.plan.seed)
        self._dice = torch.Generator().manual_seed(self.plan.seed)
        self.head = EagleHead(head_shape(header, len(words), len(layers))).to(self.device)
        self.average = copy.deepcopy(self.head).requires_grad_(False)
        out = self.head.output.weight
        inner = [p for p in self.head.parameters() if p.ndim == 2 and p is not out]
        norms = [p for p in self.head.parameters() if p.ndim == 1]
        self._muon = torch.optim.Muon([{"params": inner, "base": plan.muon}], weight_decay=DECAY)
        groups = [{"params": norms, "base": plan.adam}, {"params": [out], "base": plan.output}]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0)
        self._half = found["half"] if found else half_pays(self.device)
        if found:
            fit_words(found, self.target)
            self._restore(found)

    # -- training ----------------------------------------------------------------------------------

    def train(
        self,
        until: Callable[[], bool],
        report: Callable[[Milestone], None],
        ahead: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Train until it is enough; ``stalled`` tells that nothing was gained any more.

        Args:
            until: asked after each minibatch.
            report: called after each minibatch and each measurement.
            ahead: the share of the whole training that is ahead; None without a known end.
        """
        texts, self.stalled, lean = self._minibatches(), False, 0
        if self._fitted < BEGIN:
            self._begin()
        measured = saved = -math.inf
        while True:
            now, enough = time.monotonic(), until()
            if enough or now >= measured:
                before = self.best_per_pass
                self._measure()
                lean = 0 if self.best_per_pass > before + LEAST_GAIN else lean + 1
                self.stalled = lean > self.plan.patience
                report(self.figures)
                measured = time.monotonic() + max(MEASURED_S, (time.monotonic() - now) / SHARE)
            enough = enough or self.stalled
            if enough or now >= saved:
                saved = time.monotonic() + SAVED_S
                self.save()
            if enough:
                return
            self._learn(next(texts), ahead())
            report(self.figures)

    def _learn(self, texts: Sequence[Features], ahead: float | None) -> None:
        """Learn from a minibatch."""
        plan, step, before = self.plan, self.figures.step, self.figures.loss
        factor = min(1.0, (step + 1) / plan.warm)
        if self._start is not None:
            factor *= AGAIN
        if ahead is not None:
            factor *= max(0.02, min(1.0, ahead / plan.cooling))
        for group in (*self._muon.param_groups, *self._adam.param_groups):
            group["lr"] = group["base"] * factor
        given = self.target.lesson(texts).to(self.device)
        # the first one as well: it shows how much memory the others will take
        unrolled = self._start is not None or not step or self.figures.tokens >= plan.short
        steps = plan.steps if unrolled else 1
        dice = torch.rand(len(given.judged), generator=self._dice).to(self.device)
        loss, first = self.losses(given, windows(given.judged, plan.window, dice), steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._muon.step()
        self._adam.step()
        self.head.zero_grad(set_to_none=True)
        with torch.no_grad():  # over about the last tenth of all steps
            for mean, p in zip(self.average.parameters(), self.head.parameters(), strict=True):
                mean.lerp_(p, 1 / (1 + step / 10))
        self.figures = replace(
            self.figures,
            step=step + 1,
            tokens=self.figures.tokens + sum(len(text.tokens) for text in texts),
            loss=first if before is None else 0.95 * before + 0.05 * first,
        )

    def losses(self, given: Lesson, places: Tensor, steps: int) -> tuple[Tensor, float]:
        """Return what a minibatch is to lower, and the cross-entropy of the first guess.

        The first step counts at all judged places, others at ``places`` (``EagleHead.unroll``).
        """
        total, firsts = torch.zeros((), device=self.device), 0.0
        wanted, dtype = given.states[:, 1:], torch.bfloat16 if self._half else torch.float32
        with self._numbers():
            for k, (h, at) in enumerate(judged_steps(self.head, given, places, steps)):
                if not len(h):
                    continue
                x, matrix = self.head.output_norm(h), self.head.output.weight
                loss = law_loss(x, matrix, given.index[at], given.p[at], dtype) / len(h)
                if k == 0:
                    firsts = float(loss.detach())
                loss = loss + self.plan.alike * F.smooth_l1_loss(h, wanted[at])
                total = total + self.plan.discount**k * loss
        return total, firsts

    def _minibatches(self) -> Iterator[list[Features]]:
        """Yield texts of about one length, from a mix of as many as are held; forever."""
        stream, room = self._features(), self.plan.held
        mix: list[Features] = []
        while True:
            while room > 0:
                text = next(stream, None)
                if text is None:
                    stream = self._features()
                    if mix:
                        break
                    text = next(stream)
                mix.append(text)
                room -= text.n_bytes
            mix.sort(key=lambda text: len(text.tokens))  # each is as long as the longest beside it
            end = 1 + int(torch.randint(len(mix), (), generator=self._dice))
            start = max(0, end - max(1, self.plan.batch // len(mix[end - 1].tokens)))
            while end < len(mix) and (end + 1 - start) * len(mix[end].tokens) <= self.plan.batch:
                end += 1
            some, mix[start:end] = mix[start:end], []
            room += sum(one.n_bytes for one in some)
            yield some

    # -- the head at the start, and how good it is -------------------------------------------------

    def _begin(self) -> None:
        """Fit a new head to some texts, again if there are twice as many as before; or take the
        weights of the one to start from, once."""
        texts, n = up_to(BEGIN, self._features())
        if n < 2 * self._fitted:
            return
        self._fitted = n if self._start is None else BEGIN
        torch.manual_seed(self.plan.seed)
        given, head = self.target.lesson(texts), EagleHead(self.head.s)
        with torch.no_grad():
            head.set_scale(given.features[given.judged])
            if self._start is not None:
                take_weights(head, self._start, self.target)
            else:
                head.output.weight.copy_(self.target.output())
                head.output_norm.weight.copy_(self.target.norm)
                words = self.target.embed(self.target.words)
                seed_head(head, words, *given[:4], self.plan.seed)
        for one in (self.head, self.average):
            one.load_state_dict(head.state_dict())

    def _measure(self) -> None:
        """Measure the average of the weights in held-out texts; keep it if it is the best."""
        found = self.measure(self.average)
        if found.per_pass > self.best_per_pass:
            self.best = {name: p.half().cpu() for name, p in self.average.state_dict().items()}
            self.best_per_pass = found.per_pass
        self.figures = replace(self.figures, right=found.right, per_pass=found.per_pass)

    def measure(self, head: EagleHead) -> ChainCount:
        """Count a head's right guesses in held-out texts."""
        found, (texts, _) = ChainCount(self.plan.steps), up_to(self.plan.judged, self._held_out())
        texts.sort(key=lambda text: len(text.tokens))  # each is as long as the longest beside it
        while texts:
            count = max(1, AT_ONCE // len(texts[-1].tokens))
            given = self.target.lesson(texts[-count:]).to(self.device)
            del texts[-count:]
            with torch.no_grad(), self._numbers():
                found.add(right_guesses(head, given, self.plan.steps), given.follows, given.judged)
        return found

    def _numbers(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._half)

    def judge_again(self) -> ChainCount:
        """Measure the best head so far in the held-out texts of now, which later ones must beat."""
        found = self.measure(self._chosen())
        if self.best:
            self.best_per_pass = found.per_pass
        return found

    def _chosen(self) -> EagleHead:
        """Return the best head so far."""
        head: EagleHead = copy.deepcopy(self.average)
        if self.best:
            head.load_state_dict(self.best)
        return head

    def export(self, path: Path, about: Mapping[str, Value] | None = None) -> None:
        """Write the best head so far, see ``write_head``.

        Raises:
            SpecllamaError: it cannot be written.
        """
        head = self._chosen()
        weights = {name: p.numpy() for name, p in head.file_weights().items()}
        target = self.target
        write_head(path, weights, head.s, target.header, target.words, self.layers, about)

    # -- the file ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the file, whole or not at all.

        Raises:
            SpecllamaError: it cannot be written.
        """
        state = {
            "target": self.target.header.fingerprint,
            "words": torch.from_numpy(self.target.words), "half": self._half,
            "fitted": self._fitted, "best_per_pass": self.best_per_pass,
            "figures": asdict(self.figures), "dice": self._dice.get_state(),
            "head": self.head.state_dict(), "average": self.average.state_dict(),
            "best": self.best, "muon": self._muon.state_dict(), "adam": self._adam.state_dict(),
        }  # fmt: skip
        write_kept(self.kept, state)

    def _restore(self, found: Mapping[str, Any]) -> None:
        self.head.load_state_dict(found["head"])
        self.average.load_state_dict(found["average"])
        self._muon.load_state_dict(found["muon"])
        self._adam.load_state_dict(found["adam"])
        self._dice.set_state(found["dice"])
        self.best, self.best_per_pass = found["best"], found["best_per_pass"]
        self._fitted = found.get("fitted", BEGIN)
        self.figures = Milestone(**found["figures"])


def up_to(tokens: int, texts: Iterable[Features]) -> tuple[list[Features], int]:
    """Return the first texts whose replies have more than ``tokens`` tokens, and that sum."""
    found, n = list["Features"](), 0
    for text in texts:
        found.append(text)
        n += len(text.tokens) - text.reply_from
        if n > tokens:
            break
    return found, n


def windows(judged: Tensor, size: int, dice: Tensor) -> Tensor:
    """Choose a window of each text, in its reply if that is long enough; ``dice`` [batch] of 0 to 1
    draw it."""
    size = min(size, judged.shape[1] - 1)
    start = judged.int().argmax(1) + 1 + (dice * (judged.sum(1) - size).clamp(min=1)).long()
    start = start.clamp(max=judged.shape[1] - size)
    return start[:, None] + torch.arange(size, device=judged.device)


def judged_steps(
    head: EagleHead, given: Lesson, places: Tensor, steps: int
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """Yield the outputs [n, width] of each step of ``EagleHead.unroll`` that count, and where in
    [batch, n] they stand."""
    judged, row = given.judged, torch.arange(len(places), device=places.device)[:, None]
    for k, h in enumerate(head.unroll(*given[:2], judged, places, steps)):
        if k == 0:
            yield h[judged], (judged,)
            continue
        # a chain begins in the window or just before it, at a judged place
        at = judged[row, places] & judged[row, (places - k).clamp(min=0)]
        at[:, : k - 1] = False
        yield h[at], (row.expand_as(places)[at], places[at])


def right_guesses(head: EagleHead, given: Lesson, steps: int) -> Tensor:
    """Return where the guess of each step is the likeliest token: [steps, batch, n]."""
    places = torch.arange(1, given.best.shape[1], device=given.best.device)
    places = places.expand(len(given.best), -1)
    right = torch.zeros(steps, *given.best.shape, dtype=torch.bool, device=given.best.device)
    for k, h in enumerate(head.unroll(*given[:2], given.judged, places, steps)):
        rest = slice(min(k, 1), None)  # only the first step is of whole rows
        at = given.judged[:, rest]
        guess = head.output(head.output_norm(h[at])).argmax(-1)
        right[k, :, rest][at] = guess == given.best[:, rest][at]
    return right


def best_device() -> str:
    """Return the name of the device to train on."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def half_pays(device: torch.device) -> bool:
    """Measure whether products are faster in bfloat16."""
    if device.type != "cpu":
        return bool(device.type == "cuda")
    took = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        a @ b
        begin = time.perf_counter()
        for _ in range(3):
            a @ b
        took.append(time.perf_counter() - begin)
    return bool(took[1] < 0.8 * took[0])
