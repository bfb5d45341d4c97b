"""What a plan says of each device, beside what a load takes there: a program for the tests.

    python planned.py TARGET DRAFT|- '{"gpu_layers": "3", …}'

It prints bytes by device as one JSON line, then loads the pair, says so, and waits for a line.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

from specllama.cancel import Cancel
from specllama.engine.gguf_models import _load
from specllama.engine.gguf_pair import read_pair
from specllama.models.refs import resolve_pair
from specllama.settings.hardware import PlaceOptions
from specllama.settings.params import EngineOptions


def main() -> None:
    target, draft, given = sys.argv[1:]
    wanted = json.loads(given)
    place = PlaceOptions(**wanted.pop("place", {}))
    options = EngineOptions(place=place, check_memory=False, **wanted)
    pair = read_pair(*resolve_pair(target, None if draft == "-" else draft), options)
    assert pair.plan is not None
    parts = [part.bytes for part in (pair.plan.target, pair.plan.draft) if part is not None]
    print(json.dumps([sum(sizes) for sizes in zip(*parts, strict=True)]), flush=True)

    with ExitStack() as closing:
        _load(pair, None, Cancel(), closing)
        print("loaded", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
