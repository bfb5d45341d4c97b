"""Run the real command line with a scripted engine, in a process of its own.

python tests/support/cli_driver.py '{"replies": [{"text": "Hello", "delay_s": 0.01}]}' run "Hi"
"""

import json
import sys

from fakes import Reply, ScriptedEngine

from specllama import cli
from specllama.cli import loading


def main() -> None:
    script = json.loads(sys.argv.pop(1))
    engine = ScriptedEngine([Reply(**reply) for reply in script["replies"]])
    loading.open_engine = lambda settings, *, quiet, measured=False: engine  # type: ignore[assignment]
    cli.main()


if __name__ == "__main__":
    main()
