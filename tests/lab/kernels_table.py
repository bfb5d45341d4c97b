"""What rows of a pass cost with llama.cpp's two layouts and with our kernels, in one process:

    python tests/lab/kernels_table.py MODEL.gguf … [--turns 7] [--threads 2] [--read 32,256,2048]

Arms take turns; figures are medians. The rows of each width are compared with single steps.
"""

import argparse
import ctypes
import resource
import statistics
import time
from pathlib import Path

import llama_cpp as ll
import numpy as np

from specllama import kernels

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
BEFORE = 64  # cells that lie there already


@ll.llama_log_callback
def silent(level, text, user):
    pass


class Arm:
    """One layout of a model's weights, in a context of its own."""

    def __init__(self, name, path, threads, longest):
        self.name = name
        kernels.offer(name == "ours")
        params = ll.llama_model_default_params()
        params.use_extra_bufts = name != "stored"
        before, began = resident(), time.perf_counter()
        self.model = ll.llama_model_load_from_file(str(path).encode(), params)
        self.load_s = time.perf_counter() - began
        sizes = ll.llama_context_default_params()
        sizes.n_ctx = longest + 256
        sizes.n_batch, sizes.n_ubatch = 2048, 512
        sizes.n_threads = sizes.n_threads_batch = threads
        self.context = ll.llama_init_from_model(self.model, sizes)
        self.memory = ll.llama_get_memory(self.context)
        self.words = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.bytes = resident() - before
        self.times = {}

    def close(self):
        ll.llama_free(self.context)
        ll.llama_model_free(self.model)

    def run(self, at, n, first=0, every=True):
        """Compute n rows behind `at` cells; return (seconds, rows)."""
        batch = ll.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i in range(n):
            batch.token[i] = (1000 + 37 * (first + i)) % self.words
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = at + i, 1, 0
            batch.logits[i] = every or i == n - 1
        began = time.perf_counter()
        assert ll.llama_decode(self.context, batch) == 0
        ll.llama_synchronize(self.context)
        took = time.perf_counter() - began
        count = n if every else 1
        rows = np.ctypeslib.as_array(ll.llama_get_logits(self.context), (count, self.words)).copy()
        ll.llama_batch_free(batch)
        return took, rows

    def forget(self, at):
        ll.llama_memory_seq_rm(self.memory, 0, at, -1)

    def alike(self):
        """Return the widths whose rows are single steps', bit for bit, and the steps' rows."""
        self.forget(0)
        self.run(0, BEFORE)
        steps = np.concatenate([self.run(BEFORE + i, 1, i)[1] for i in range(max(WIDTHS))])
        found = []
        for n in WIDTHS:
            self.forget(BEFORE)
            if np.array_equal(self.run(BEFORE, n)[1], steps[:n]):
                found.append(n)
        self.forget(BEFORE)
        return found, steps

    def take_turn(self, reads):
        for n in WIDTHS:
            self.run(BEFORE, n)
            self.forget(BEFORE)
            self.times.setdefault(n, []).append(self.run(BEFORE, n)[0] * 1e3)
            self.forget(BEFORE)
        for n in reads:
            self.forget(0)
            self.times.setdefault(f"read {n}", []).append(self.run(0, n, every=False)[0] * 1e3)
        self.forget(0)
        self.run(0, BEFORE)


def resident():
    """Return the bytes of memory that are this process's own (anonymous)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(path, names, turns, threads, reads):
    arms = [Arm(name, path, threads, max(reads)) for name in names]
    first = None
    for arm in arms:
        widths, steps = arm.alike()
        first = steps if first is None else first
        far = np.abs(steps - first).max()
        print(
            f"{arm.name}: loaded in {arm.load_s:.2f} s, {arm.bytes / 1e6:.0f} MB; widths alike: "
            f"{widths}; furthest from {arms[0].name}: {far:.3f}",
            flush=True,
        )
    for turn in range(turns):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            arm.take_turn(reads)
    keys = list(arms[0].times)
    print(f"\n| ms | {' | '.join(map(str, keys))} |\n|---|{'---|' * len(keys)}")
    for arm in arms:
        cells = (f"{statistics.median(arm.times[key]):.1f}" for key in keys)
        print(f"| {arm.name} | {' | '.join(cells)} |")
    for arm in arms:
        one = statistics.median(arm.times[1])
        cells = (f"{statistics.median(arm.times[key]) / one:.2f}" for key in keys)
        print(f"| {arm.name} ÷ its step | {' | '.join(cells)} |")
    spread = {arm.name: max(arm.times[1]) / min(arm.times[1]) for arm in arms}
    print("spread of single steps, most ÷ least:", {k: round(v, 2) for k, v in spread.items()})
    for arm in arms:
        arm.close()


def main():
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("models", nargs="+", type=Path)
    ask.add_argument("--arms", default="stored,repacked,ours")
    ask.add_argument("--set", default="", help="instruction set of our kernels")
    ask.add_argument("--turns", type=int, default=7)
    ask.add_argument("--threads", type=int, default=2)
    ask.add_argument("--read", default="32,256,2048")
    asked = ask.parse_args()
    ll.llama_log_set(silent, ctypes.c_void_p(0))
    ll.llama_backend_init()
    print(kernels.install(asked.set))
    for path in asked.models:
        print(f"\n## {path.name}", flush=True)
        reads = [int(n) for n in asked.read.split(",")]
        table(path, asked.arms.split(","), asked.turns, asked.threads, reads)


if __name__ == "__main__":
    main()
