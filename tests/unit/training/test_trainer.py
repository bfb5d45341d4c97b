"""The trainer: reaches the optimum of a law that the head can hold, and goes on where it was."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from eagle_files import write_eagle3  # noqa: E402
from ggufs import write_llama  # noqa: E402

from specllama.arrays import FINAL  # noqa: E402
from specllama.errors import SpecllamaError  # noqa: E402
from specllama.models.eagle3_file import check  # noqa: E402
from specllama.models.gguf import GgufHeader, read_header  # noqa: E402
from specllama.models.tensors import read_tensor  # noqa: E402
from specllama.training.head_file import other_sizes  # noqa: E402
from specllama.training.lessons import ChainCount  # noqa: E402
from specllama.training.trainer import BEGIN, Trainer, TrainingPlan  # noqa: E402
from specllama.training.training_card import Milestone  # noqa: E402

LAYERS, WIDTH, LIKELIEST = (1, 2, 3), 64, 8


class Text(NamedTuple):
    """Features as a target's passes leave them."""

    tokens: Any
    reply_from: int
    inputs: Any
    final: Any
    top_ids: Any
    top_p: Any

    @property
    def n_bytes(self) -> int:
        return sum(part.nbytes for part in self if part is not self.reply_from)


class Table:
    """A target whose law depends on the last token and on a mood, of which only its states tell.

    A text has one mood. Each row of the table has one likeliest token, and some others.
    """

    def __init__(self, header: GgufHeader) -> None:
        dice = np.random.default_rng(3)
        self.vocab = header.vocab_size
        self.output = read_tensor(header, "output.weight")
        self.ids = np.stack(
            [dice.permutation(self.vocab)[:LIKELIEST] for _ in range(2 * self.vocab)]
        )
        self.p = np.array([0.9, 0.04, 0.02, *[0.008] * 5])
        self.mood = dice.normal(size=(2, 3 * WIDTH))
        self.known = dice.normal(size=(self.vocab, 3 * WIDTH))

    def text(self, dice: np.random.Generator, n: int = 48) -> Text:
        mood, tokens = int(dice.integers(2)), [int(dice.integers(self.vocab))]
        while len(tokens) < n:
            tokens.append(int(dice.choice(self.ids[2 * tokens[-1] + mood], p=self.p)))
        rows = [2 * token + mood for token in tokens]
        ids = self.ids[rows].astype(np.int32)
        return Text(
            np.array(tokens, np.int32),
            8,
            (self.mood[mood] + 0.3 * self.known[tokens]).astype(np.float16),
            (8 * self.output[ids[:, 0]]).astype(np.float16),
            ids,
            np.tile(self.p, (n, 1)).astype(np.float16),
        )


@pytest.fixture
def header(tmp_path: Path) -> GgufHeader:
    tokens = [f"t{i}" for i in range(96)]
    return read_header(
        write_llama(
            tmp_path / "target.gguf", blocks=4, tokens=tokens, types=[1] * 96, merges=["t 0"]
        )
    )


def texts(table: Table, seed: int, n: int) -> list[Text]:
    dice = np.random.default_rng(seed)
    return [table.text(dice) for _ in range(n)]


def trainer(
    header: GgufHeader,
    folder: Path,
    plan: TrainingPlan,
    words: Any = None,
    start: GgufHeader | None = None,
) -> Trainer:
    table = Table(header)
    train, held = texts(table, 1, 200), texts(table, 2, 24)
    words = np.arange(header.vocab_size, dtype=np.int32) if words is None else words
    return Trainer(
        header, words, LAYERS, lambda: iter(train), lambda: iter(held), folder / "head.pt", plan,
        "cpu", start,
    )  # fmt: skip


SHORT = TrainingPlan(
    batch=512, window=24, short=6000, warm=4, judged=2000, muon=0.04, output=5e-3, patience=2,
    held=1 << 20,
)  # fmt: skip


def after(steps: int) -> Any:
    """Enough, once so many minibatches were learnt from."""
    left = iter(range(steps))
    return lambda: next(left, None) is None


def figures(one: Trainer, steps: int) -> list[Milestone]:
    seen: list[Milestone] = []
    one.train(after(steps), seen.append)
    return seen


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_head_reaches_the_optimum_of_a_table_of_which_it_has_all_words_but_some(
    header: GgufHeader, tmp_path: Path
) -> None:
    """The likeliest token is known from the last one and the mood, if it has a row: the share of
    those is the optimum, in the first step and, by the head's own state, in the others."""
    words = np.arange(8, header.vocab_size, dtype=np.int32)
    one = trainer(header, tmp_path, SHORT, words)
    first = figures(one, 0)[-1]
    last = figures(one, 70)[-1]
    best = ChainCount(3)
    for text in texts(Table(header), 2, 24):
        n = len(text.tokens)
        likeliest = torch.tensor(text.top_ids[1:, 0])
        judged = torch.zeros(1, n - 1, dtype=torch.bool)
        judged[:, text.reply_from - 2 : n - 2] = True
        follows = torch.zeros_like(judged)
        follows[0, : n - 2] = likeliest[:-1] == torch.tensor(text.tokens[2:])
        best.add((likeliest >= 8).expand(3, 1, -1), follows, judged)
    assert 0.8 < best.right[0] < 0.97
    assert first.right[0] < best.right[0] - 0.1
    assert last.right == pytest.approx(best.right, abs=0.03)
    assert last.per_pass == pytest.approx(best.per_pass, abs=0.1)
    assert last.per_pass <= best.per_pass


def test_passes_are_counted_as_chains_are_accepted() -> None:
    found = ChainCount(3)
    judged = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    right = torch.tensor(
        [
            [[0, 1, 0, 1, 1, 1, 1, 0, 1]],  # of chains that begin here
            [[0, 1, 1, 1, 1, 0, 1, 1, 1]],  # one place before
            [[0, 0, 0, 1, 1, 1, 1, 1, 1]],
        ]
    ).bool()
    follows = torch.ones_like(judged)
    follows[0, 6] = False
    found.add(right, follows, judged)
    # from place 1: 1, 2, 3 right and a token more; from 5: 5, 6, but beyond 6 the text is another
    assert found.per_pass == pytest.approx(7 / 2)
    assert found.right == pytest.approx((5 / 7, 3 / 4, 2 / 2))


def test_a_head_that_was_fitted_to_few_texts_is_fitted_again_to_more(
    header: GgufHeader, tmp_path: Path
) -> None:
    (few := tmp_path / "few").mkdir()
    one, other = trainer(header, few, SHORT), trainer(header, tmp_path, SHORT)
    more, one._features = one._features, lambda: iter(texts(Table(header), 5, 3))
    figures(one, 60)
    assert one.figures.tokens > BEGIN
    again = trainer(header, few, SHORT)
    figures(again, 0)
    figures(other, 0)
    for name, weight in other.head.state_dict().items():
        assert (again.head.state_dict()[name] == weight).all(), name
    one._features = more
    assert again.figures.tokens == figures(one, 14)[-1].tokens - 14 * 480
    for trained in (one, again):
        trained._features = lambda: iter(texts(Table(header), 5, 3))
        before = trained.head.fc.weight.clone()
        figures(trained, 0)
        assert (trained.head.fc.weight == before).all()


def test_a_minibatch_is_no_larger_with_what_fills_its_rows(
    header: GgufHeader, tmp_path: Path
) -> None:
    dice, table = np.random.default_rng(1), Table(header)
    mixed = [table.text(dice, n) for n in [9] * 100 + [200] * 3 + [*range(12, 60)]]
    one = trainer(header, tmp_path, SHORT)
    one._features = lambda: iter(mixed)
    drawn = one._minibatches()
    sizes = []
    for _ in range(60):
        lengths = [len(text.tokens) for text in next(drawn)]
        assert len(lengths) * max(lengths) <= SHORT.batch or len(lengths) == 1
        sizes.append(sum(lengths))
    assert np.mean(sizes) > 0.7 * SHORT.batch


def test_a_training_goes_on_where_its_file_was_left(header: GgufHeader, tmp_path: Path) -> None:
    one = trainer(header, tmp_path, SHORT)
    figures(one, 14)
    again = trainer(header, tmp_path, SHORT)
    assert again.figures == one.figures
    assert again.figures.step == 14
    for name, weight in one.head.state_dict().items():
        assert (again.head.state_dict()[name] == weight).all(), name
    # with the weights, all that a step depends on was kept
    third = trainer(header, tmp_path, SHORT)
    for trained in (one, again, third):
        figures(trained, 6)
    for name, weight in one.head.state_dict().items():
        assert (again.head.state_dict()[name] == weight).all(), name
        assert (third.average.state_dict()[name] == one.average.state_dict()[name]).all(), name


def test_other_words_have_the_targets_rows_and_those_that_stay_their_own(
    header: GgufHeader, tmp_path: Path
) -> None:
    one = trainer(header, tmp_path, SHORT, np.arange(0, 80, dtype=np.int32))
    figures(one, 14)
    again = trainer(header, tmp_path, SHORT, np.arange(40, 96, dtype=np.int32))
    rows, kept = again.head.output.weight, one.head.output.weight
    assert (rows[:40] == kept[40:]).all()
    assert (rows[40:] == again.target.output()[40:]).all()
    assert (rows[:40] != again.target.output()[:40]).any()
    assert again.judge_again().right != one.figures.right
    assert figures(again, 3)[-1].step == 17


def exported(one: Trainer, steps: int, folder: Path) -> tuple[GgufHeader, Path]:
    """Train a head, and write it; also make a folder for a training that starts from it."""
    figures(one, steps)
    one.export(out := folder / "out.gguf")
    (tuned := folder / "tuned").mkdir()
    return read_header(out), tuned


def test_a_head_that_starts_from_an_exported_one_guesses_alike(
    header: GgufHeader, tmp_path: Path
) -> None:
    """The file has the scale of the states inside of ``fc``; the new training has its own."""
    one = trainer(header, tmp_path, SHORT, np.arange(4, 84, dtype=np.int32))
    start, folder = exported(one, 30, tmp_path)
    again = trainer(header, folder, SHORT, np.arange(4, 84, dtype=np.int32), start)
    again._features = lambda: iter(texts(Table(header), 11, 200))  # of other spread
    begun = figures(again, 0)[-1]
    assert begun.step == 0
    assert (again.average.get_buffer("scale") != one.average.get_buffer("scale")).any()
    assert begun.right == pytest.approx(one.measure(one._chosen()).right, abs=0.02)
    for name, weight in again.average.file_weights().items():
        inside = name if name.startswith(("fc", "output")) else f"blk.0.{name}"
        assert np.allclose(weight.numpy(), read_tensor(start, inside), rtol=1e-6), name
    # the guesses of the file's own weights, but for near-ties: products are rounded otherwise
    plain = trainer(header, folder, SHORT, np.arange(4, 84, dtype=np.int32), start)
    plain.head.load_state_dict(
        {**again.average.file_weights(), "scale": torch.ones(3 * WIDTH)}, strict=True
    )
    assert plain.measure(plain.head).right == pytest.approx(begun.right, abs=0.01)
    last = figures(again, 40)[-1]
    assert last.step == 40
    assert last.per_pass > begun.per_pass


def test_a_start_gives_its_words_their_rows_and_others_have_the_targets(
    header: GgufHeader, tmp_path: Path
) -> None:
    one = trainer(header, tmp_path, SHORT, np.arange(0, 80, dtype=np.int32))
    start, folder = exported(one, 14, tmp_path)
    again = trainer(header, folder, SHORT, np.arange(40, 96, dtype=np.int32), start)
    figures(again, 0)
    rows, kept = again.head.output.weight.detach(), read_tensor(start, "output.weight")
    assert (rows[:40].numpy() == kept[40:]).all()
    assert (rows[40:] == again.target.output()[40:]).all()
    assert (rows[:40] != again.target.output()[:40]).any()


def test_sizes_that_differ_are_named(header: GgufHeader, tmp_path: Path) -> None:
    one = trainer(header, tmp_path, SHORT)
    one.export(out := tmp_path / "out.gguf")
    assert other_sizes(read_header(out), header, LAYERS) == ""
    assert (
        other_sizes(read_header(out), header, (0, 1, 2))
        == "states read before layers 1, 2, 3 instead of before layers 0, 1, 2"
    )
    other = write_eagle3(
        tmp_path / "other.gguf", layers=LAYERS, tokens=[f"t{i}" for i in range(96)]
    )
    found = other_sizes(read_header(other), header, LAYERS)
    for words in (
        "hidden 96 instead of 64",
        "heads of keys 1 instead of 2",
        "output the target's instead of its own",
    ):
        assert words in found
    assert "width" not in found


def test_a_head_of_the_last_state_alone_fills_a_third_of_the_fusing_matrix(
    header: GgufHeader, tmp_path: Path
) -> None:
    def narrow(seed: int, n: int) -> list[Text]:
        return [one._replace(inputs=one.inputs[:, :0]) for one in texts(table, seed, n)]

    table, words = Table(header), np.arange(4, 84, dtype=np.int32)
    train, held = narrow(1, 200), narrow(2, 24)

    def of_last_state(folder: Path, start: GgufHeader | None = None) -> Trainer:
        sources: Any = lambda: iter(train), lambda: iter(held)
        return Trainer(header, words, (), *sources, folder / "head.pt", SHORT, "cpu", start)

    one = of_last_state(tmp_path)
    start, folder = exported(one, 30, tmp_path)
    assert one.figures.right[0] > 0.5
    assert check(start, header).layers == (FINAL,) * 3
    fusing = read_tensor(start, "fc.weight")
    assert fusing.shape == (WIDTH, 3 * WIDTH)
    assert fusing[:, :WIDTH].any()
    assert not fusing[:, WIDTH:].any()
    assert other_sizes(start, header, ()) == ""
    assert (
        other_sizes(start, header, LAYERS)
        == "states read the last one instead of before layers 1, 2, 3"
    )
    again = of_last_state(folder, start)
    begun = figures(again, 0)[-1]
    assert begun.right == pytest.approx(one.measure(one._chosen()).right, abs=0.02)


def test_a_damaged_file_and_one_of_another_target_are_refused(
    header: GgufHeader, tmp_path: Path
) -> None:
    figures(trainer(header, tmp_path, SHORT), 1)
    other = read_header(write_llama(tmp_path / "other.gguf", blocks=4, seed=9))
    with pytest.raises(SpecllamaError, match="another target"):
        trainer(other, tmp_path, SHORT)
    (tmp_path / "head.pt").write_bytes((tmp_path / "head.pt").read_bytes()[:5000])
    with pytest.raises(SpecllamaError, match="damaged"):
        trainer(header, tmp_path, SHORT)


def test_what_no_longer_gains_ends_and_the_best_head_is_exported(
    header: GgufHeader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specllama.training.trainer.MEASURED_S", 0.0)
    monkeypatch.setattr("specllama.training.trainer.SHARE", 1e9)
    plan = replace(SHORT, muon=0.0, adam=0.0, output=0.0)  # learns nothing
    one = trainer(header, tmp_path, plan)
    seen = figures(one, 1000)
    assert one.stalled
    assert seen[-1].step == SHORT.patience + 1
    one.export(out := tmp_path / "out.gguf", {"specllama.training": "here"})
    made = read_header(out)
    assert check(made, header).layers == LAYERS
    assert made.text("specllama.training") == "here"
    scale = one.average.get_buffer("scale").numpy()
    wanted = one.average.fc.weight.numpy() * scale
    assert np.allclose(read_tensor(made, "fc.weight"), wanted, atol=0.01 * np.abs(wanted).max())


def test_other_texts_judge_the_best_head_again(header: GgufHeader, tmp_path: Path) -> None:
    one = trainer(header, tmp_path, SHORT)
    figures(one, 20)
    before = one.best_per_pass
    one._held_out = lambda: iter(texts(Table(header), 7, 5))
    found = one.judge_again()
    assert one.best_per_pass == found.per_pass != before
    one._held_out = lambda: iter(texts(Table(header), 2, 24))
    assert one.judge_again().per_pass == before
