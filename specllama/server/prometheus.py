"""``/metrics`` for Prometheus: vLLM's names, over what happens to requests."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from time import perf_counter

from specllama.events import Event, Finished, RoundDone
from specllama.figures import SECONDS, Histogram
from specllama.interface import EngineFigures
from specllama.rates import share, speed
from specllama.server.request_queue import QueuedReply, RequestQueue
from specllama.told import Told

PREFIX = "specllama:"
LLAMA_PREFIX = "llamacpp:"

Labels = tuple[tuple[str, str], ...]

_FIGURES = tomllib.loads(files("specllama.server").joinpath("metrics.toml").read_text("utf-8"))
COUNTERS: Mapping[str, str] = _FIGURES["counters"]
HISTOGRAMS: Mapping[str, str] = _FIGURES["histograms"]
_LLAMA: Mapping[str, str] = _FIGURES["llama"]


SLICES = 16  # labels that clients give
OTHER = "other"


class Metrics:
    """A ``Watcher`` that counts requests and their results."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[Labels, float]] = {
            name: defaultdict(float) for name in COUNTERS
        }
        self._spread: dict[str, dict[Labels, Histogram]] = {name: {} for name in HISTOGRAMS}
        self._first: dict[QueuedReply, float] = {}
        self._longest = 0  # tokens of a text
        self._slices: set[str] = set()

    def slice(self, label: str) -> str:
        """Return the label under which a request with this one is counted: clients choose the
        labels, so the first few are kept, and further ones are "other"."""
        if label and len(self._slices) < SLICES:
            self._slices.add(label)
        return label if label in self._slices or not label else OTHER

    # -- what happens --

    def sent(self, queued: QueuedReply) -> None:
        self._observe("request_queue_time_seconds", queued, queued.queue_ms / 1e3)

    def received(self, queued: QueuedReply, events: list[Event]) -> None:
        told = Told.of(events)
        for done in told.rounds:
            self._round(queued, done)
        if told.finished is not None:
            self._finished(queued, told.finished)

    def ended(self, queued: QueuedReply, error: BaseException | None) -> None:
        self._first.pop(queued, None)
        if error is not None:
            self._add("request_failure_total", queued, 1, error=type(error).__name__)

    def _round(self, queued: QueuedReply, done: RoundDone) -> None:
        if queued not in self._first:
            self._first[queued] = now = perf_counter()
            self._observe("time_to_first_token_seconds", queued, now - queued.arrived_s)
        add = self._add
        source = done.source or "none"
        add("rounds_total", queued, 1)
        add("generation_tokens_total", queued, len(done.emitted))
        add("verify_seconds_total", queued, done.verify_ms / 1e3)
        add("draft_seconds_total", queued, done.draft_ms / 1e3, source=source)
        add("own_seconds_total", queued, done.other_ms / 1e3)
        add("near_ties_total", queued, done.near_tie)
        if not done.drafted:
            return
        add("spec_decode_num_drafts_total", queued, 1, source=source)
        add("spec_decode_num_draft_tokens_total", queued, len(done.drafted), source=source)
        add("spec_decode_num_accepted_tokens_total", queued, done.accepted, source=source)
        for position in range(done.accepted):
            at = {"source": source, "position": str(position)}
            add("spec_decode_num_accepted_tokens_per_pos_total", queued, 1, **at)

    def _finished(self, queued: QueuedReply, end: Finished) -> None:
        self._add("prompt_tokens_total", queued, end.prompt_n)
        self._add("prompt_tokens_cached_total", queued, end.cached_n)
        self._add("prompt_seconds_total", queued, end.timings.prefill_ms / 1e3)
        self._add("generation_seconds_total", queued, end.timings.decode_ms / 1e3)
        self._longest = max(self._longest, end.prompt_n + len(end.token_ids))
        self._add("request_success_total", queued, 1, finished_reason=end.reason)
        self._observe("e2e_request_latency_seconds", queued, perf_counter() - queued.arrived_s)
        if (pace := speed(len(end.token_ids), end.timings.decode_ms / 1e3)) is not None:
            self._observe("time_per_output_token_seconds", queued, 1 / pace)

    def _labels(self, queued: QueuedReply, more: dict[str, str]) -> Labels:
        name, label = queued.place.queue.name, queued.label
        return tuple({"model_name": name, "slice": label, "arm": queued.arm, **more}.items())

    def _add(self, name: str, queued: QueuedReply, n: float, **more: str) -> None:
        self._counts[name][self._labels(queued, more)] += n

    def _observe(self, name: str, queued: QueuedReply, value: float) -> None:
        labels = self._labels(queued, {})
        self._spread[name].setdefault(labels, Histogram(SECONDS)).add(value)

    # -- what is shown --

    def text(
        self, engines: Mapping[str, EngineFigures | None], queues: Sequence[RequestQueue]
    ) -> str:
        """Write all figures in Prometheus's format.

        Unknown figures are left out: to its readers, a counter that falls to 0 means a restart.

        Args:
            engines: the figures of the loaded engines; None for one that cannot be asked.
        """
        known = {name: engine for name, engine in engines.items() if engine is not None}
        told = _engines(known) if known else ()
        passes = sum(engine.pass_rows.count for engine in known.values()) if known else None
        return "\n".join([*self._lines(queues), *told, *self._llama(passes, queues)]) + "\n"

    def _lines(self, queues: Sequence[RequestQueue]) -> Iterator[str]:
        for name, help_text in COUNTERS.items():
            yield from _family(name, "counter", help_text, self._counts[name].items())
        for name, help_text in HISTOGRAMS.items():
            yield from _family(name, "histogram", help_text, self._spread[name].items())
        for name, kind, help_text, value_of in _OF_QUEUES:
            samples = ((_of(queue.name), value_of(queue)) for queue in queues)
            yield from _family(name, kind, help_text, samples)

    def _llama(self, passes: int | None, queues: Sequence[RequestQueue]) -> Iterator[str]:
        """Yield the figures that llama-server has, under its names."""

        def sum_of(name: str) -> float:
            return sum(self._counts[name].values())

        cached = sum_of("prompt_tokens_cached_total")
        read, read_s = sum_of("prompt_tokens_total") - cached, sum_of("prompt_seconds_total")
        wrote, wrote_s = sum_of("generation_tokens_total"), sum_of("generation_seconds_total")
        shared = share(sum_of("rounds_total"), passes) if passes else passes
        values = {
            "prompt_tokens_total": read,
            "prompt_tokens_cached_total": cached,
            "prompt_seconds_total": read_s,
            "tokens_predicted_total": wrote,
            "tokens_predicted_seconds_total": wrote_s,
            "n_decode_total": passes,
            "n_tokens_max": self._longest,
            **{name: sum_of(name) for name in _LLAMA if name.startswith("spec_")},
            "prompt_tokens_seconds": share(read, read_s) or 0,
            "predicted_tokens_seconds": share(wrote, wrote_s) or 0,
            "requests_processing": sum(len(queue.running) for queue in queues),
            "requests_deferred": sum(queue.n_waiting for queue in queues),
            "n_busy_slots_per_decode": shared,
        }
        for name, value in values.items():
            if value is not None:
                kind = "counter" if name.endswith(("_total", "_max")) else "gauge"
                yield from _family(name, kind, _LLAMA[name], [((), value)], LLAMA_PREFIX)


_OF_QUEUES: tuple[tuple[str, str, str, Callable[[RequestQueue], float]], ...] = (
    ("num_requests_running", "gauge", "Requests that are being written.",
     lambda queue: len(queue.running)),
    ("num_requests_waiting", "gauge", "Requests that wait for a lane.",
     lambda queue: queue.n_waiting),
    ("engine_restarts_total", "counter", "Engines that were started again.",
     lambda queue: queue.restarts),
    ("model_loaded", "gauge", "Whether the model is loaded.", lambda queue: queue.loaded),
)  # fmt: skip


def _of(model: str) -> Labels:
    return (("model_name", model),)


def _engines(found: Mapping[str, EngineFigures]) -> Iterator[str]:
    """Yield the engines' own figures, by model."""
    cells = [
        ((*_of(model), ("state", state)), getattr(figures, state))
        for model, figures in found.items()
        for state in ("live", "dead", "free")
    ]
    yield from _family("kv_cells", "gauge", "Cells of the target's cache.", cells)
    for name, kind, help_text, field in (
        ("kv_compactions_total", "counter", "Compactions of it.", "compactions"),
        ("preemptions_total", "counter", "Requests parked for lack of cells.", "preemptions"),
        ("kv_parked_bytes", "gauge", "Memory of idle texts.", "parked_bytes"),
        ("pass_rows", "histogram", "Tokens of a pass of the target.", "pass_rows"),
        ("pass_seconds", "histogram", "Time of a pass of the target.", "pass_seconds"),
    ):
        samples = [(_of(model), getattr(figures, field)) for model, figures in found.items()]
        yield from _family(name, kind, help_text, samples)


def _family(
    name: str,
    kind: str,
    help_text: str,
    samples: Iterable[tuple[Labels, float | Histogram]],
    prefix: str = PREFIX,
) -> Iterator[str]:
    """Yield the lines of one figure."""
    yield f"# HELP {prefix}{name} {help_text}"
    yield f"# TYPE {prefix}{name} {kind}"
    for labels, value in samples:
        if isinstance(value, Histogram):
            for bound, count in value:
                yield _line(f"{prefix}{name}_bucket", (*labels, ("le", bound)), count)
            yield _line(f"{prefix}{name}_sum", labels, value.sum)
            yield _line(f"{prefix}{name}_count", labels, value.count)
        else:
            yield _line(f"{prefix}{name}", labels, value)


def _line(name: str, labels: Labels, value: float) -> str:
    told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    shown = repr(value) if isinstance(value, float) and value % 1 else str(int(value))
    return f"{name}{{{told}}} {shown}" if told else f"{name} {shown}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
