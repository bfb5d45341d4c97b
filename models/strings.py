"""Lists of strings as GGUF stores them, looked through with NumPy: most vocabularies at one glance.

A string is its length in eight bytes and its text. Where texts are short and do not begin with a
NUL byte, lengths are found without walking: six zeros and no seventh. Each must lead to the next
one, which proves them; where one does not, the caller walks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MANY = 4096  # strings that NumPy is worth importing for
_USUAL = 24  # bytes of a string, with its length
WINDOW = 8 << 20  # bytes that are looked through at once: bounds the memory that it takes


def leap(buffer: bytes | bytearray, position: int, most: int) -> tuple[int, int]:
    """Skip strings of a list from ``position`` on, as far as that goes at a glance.

    Returns:
        How many, at most ``most``, and their bytes; (0, 0) where they have to be walked.
    """
    n = size = 0
    while most - n >= MANY:
        window = min(_USUAL * (most - n), WINDOW)
        starts, sizes = _chain(memoryview(buffer)[position + size :][:window])
        found = min(len(starts), most - n)
        if not found:
            break
        n, size = n + found, size + int(starts[found - 1] + sizes[found - 1])
    return n, size


def _chain(window: memoryview) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Find where texts begin, and their bytes, from the first on: as far as each leads to the next
    and lies whole in the window."""
    import numpy as np

    data = np.frombuffer(window, np.uint8)
    n = max(len(data) - 8, 0)
    zero = data == 0
    short = ~zero[8 : n + 8]
    for i in range(2, 8):
        short &= zero[i : n + i]
    at = np.flatnonzero(short)
    sizes = data[at].astype(np.int64) | data[at + 1].astype(np.int64) << 8
    ends = at + 8 + sizes
    linked = np.concatenate(([0], ends[:-1])) == at if len(at) else np.empty(0, np.bool_)
    whole = linked & (ends <= len(data))
    n = len(at) if whole.all() else int(whole.argmin())
    return at[:n] + 8, sizes[:n]


@dataclass(frozen=True)
class Texts:
    """The texts of a vocabulary in the bytes of its file; none is empty or holds a NUL byte.

    Attributes:
        data: of the whole list. starts, sizes: of each text in it.
    """

    data: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    @staticmethod
    def of(raw: bytes, count: int) -> Texts | None:
        """Find the texts; None if the list has other texts, or they are not found at a glance."""
        import numpy as np

        if len(raw) > WINDOW:
            return None
        starts, sizes = _chain(memoryview(raw))
        if len(starts) != count or not count or starts[-1] + sizes[-1] != len(raw):
            return None
        texts = Texts(np.frombuffer(raw, np.uint8), starts, sizes)
        if not sizes.all():
            return None
        # no length has a byte but its lowest two: all other zeros would be of texts
        low = np.count_nonzero(sizes & 255 == 0) + np.count_nonzero(sizes < 256)
        zeros = len(raw) - np.count_nonzero(texts.data)
        return texts if zeros == 6 * count + low else None

    def __getitem__(self, index: int) -> bytes:
        start = self.starts[index]
        return self.data[start : start + self.sizes[index]].tobytes()

    def of_bytes(self) -> set[bytes]:
        """Return the texts of one byte, and those that may name one: "<0x0A>"."""
        import numpy as np

        named = (self.sizes == 6) & (self.data[self.starts] == ord("<"))
        return {self[i] for i in np.flatnonzero(named | (self.sizes == 1)).tolist()}

    def differ(self) -> bool:
        """True if no text is there twice; False also if that is not known."""
        import numpy as np

        padded = np.append(self.data, np.zeros(8, np.uint8))
        words = np.ndarray((len(self.data),), "<u8", buffer=padded, strides=(1,))  # at each byte
        masks = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
        sums = self.sizes.astype(np.uint64)
        left, at = np.arange(len(sums)), 0
        while len(left):  # eight bytes of each text that has so many
            word = words[self.starts[left] + at] & masks[np.minimum(self.sizes[left] - at, 8)]
            mixed = (sums[left] ^ word) * np.uint64(0x9E3779B97F4A7C15)
            sums[left] = mixed ^ mixed >> np.uint64(29)
            at += 8
            left = left[self.sizes[left] > at]
        sums.sort()
        return not (sums[1:] == sums[:-1]).any()
