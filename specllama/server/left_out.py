"""Lines that clients put into a system prompt for another service, and that cost the cache.

Such a line changes with each request, so nothing behind it would be found again. It has no meaning
for a model. ``steady-prompts`` keeps it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from specllama.interface import Message
from specllama.server.dialect import Job

LEFT_OUT = {
    "Claude Code names itself and a checksum of the request to its vendor's billing":
    r"^x-anthropic-[a-z-]+:(?:[ \t]*(?:[^\s;]+;|[\w.-]+=[^\s;]*))*[ \t]*[\r\n]*",
}  # fmt: skip
"""By the reason. What stands behind such a line, or on it behind its last semicolon, stays."""
_PATTERN = re.compile("|".join(LEFT_OUT.values()), re.MULTILINE | re.IGNORECASE)


def steadied(job: Job) -> Job:
    """Leave these lines out of a job's system messages, and messages that held nothing else."""
    prompt, *others = job.prompts
    if isinstance(prompt, str) or not job.params.steady_prompts:
        return job
    found = tuple(part for part in map(_steadied, prompt) if part is not None)
    return replace(job, prompts=(found or prompt, *others))


def _steadied(part: Any) -> Any:
    if not isinstance(part, Message) or part.role != "system":
        return part
    text = _PATTERN.sub("", part.content)
    return replace(part, content=text) if text.strip() or not part.content else None
