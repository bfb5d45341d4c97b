"""Self-speculation: the target drafts with some of its own layers."""

from __future__ import annotations

from specllama.speculative.drafting.method import Method, with_own

METHOD = Method(
    name="self",
    label="Self-speculative",
    short="layer skip",
    letter="k",
    blurb="The target drafts with some of its own layers. Pays when a few layers go a long way.",
    cost="own",
    why_not=with_own("self", "layers cannot be dropped from this architecture"),
    on_request=True,
)
