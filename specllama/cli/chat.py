"""``specllama chat``: the terminal app, or plain lines where it cannot or should not draw."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from specllama.cli import completion, diagnostics, loading, output
from specllama.cli.history import stored
from specllama.cli.options import (
    GroupedCommand,
    grouped,
    quiet_option,
    remote_options,
    resolve,
    settings_options,
)
from specllama.cli.output import examples
from specllama.errors import UsageError
from specllama.settings.config_file import Settings
from specllama.settings.duration import seconds
from specllama.store.sessions import SessionStore

if TYPE_CHECKING:
    from specllama.remote.address import Address

USUAL = ("model", "draft_model", "ctx_size", "gpu_layers", "threads", "temperature", "seed",
         "system", "think", "speculate", "resume", "plain", "unstored", "remote",
         "set")  # fmt: skip


@click.command("chat", cls=GroupedCommand, epilog=examples()["chat"], usual=USUAL)
@settings_options("read-ahead", "idle-unload", "kv-disk")
@remote_options
@grouped(
    "--plain", is_flag=True, group="Output", help="Chat line by line, without the terminal app."
)
@grouped("--resume", is_flag=False, flag_value="last", default=None, metavar="[ID]",
         shell_complete=completion.conversations, group="Output",
         help="Continue a stored conversation. Without ID, the last one.")  # fmt: skip
@grouped("--unstored", is_flag=True, group="Output",
         help="Keep no conversation, log or typed line. Implies --plain.")  # fmt: skip
@quiet_option("Show no statistics after a reply.")
def command(
    plain: bool,
    resume: str | None,
    unstored: bool,
    quiet: bool,
    server: Address | None,
    **flags: Any,
) -> int:
    """Chat with a model.

    Conversations are stored and can be resumed, even after a crash. --unstored keeps nothing;
    specllama history deletes what was kept.
    """
    settings = resolve(flags, quiet=quiet)
    if unstored:
        if resume is not None:
            raise UsageError(
                "--unstored keeps nothing, so there is nothing for --resume to continue"
            )
        settings = settings.with_flags({"log": False, "kv-disk": "off"})
    params = settings.generate_params()
    if not (plain or unstored) and _can_draw():
        return _terminal_app(settings, resume, server)
    from specllama.cli.lines import open_lines
    from specllama.cli.repl import COMMANDS, Repl
    from specllama.session import Session

    with (
        loading.opened(settings, server, quiet=quiet) as engine,
        SessionStore.unstored() if unstored else SessionStore.open() as store,
    ):
        session = Session(
            engine,
            store,
            params=params,
            system=settings["system"] or "",
            log_rounds=settings["log"],
        )
        try:
            if resume is not None:
                session.load(resume)
            lines = open_lines([f"/{name}" for name in COMMANDS], keep=not unstored)
            thoughts = settings["thoughts"]
            return Repl(session, store, lines=lines, quiet=quiet, thoughts=thoughts).run()
        finally:
            session.close()


def _can_draw() -> bool:
    return output.all_terminals() and os.environ.get("TERM") != "dumb"


def _terminal_app(settings: Settings, resume: str | None, server: Address | None) -> int:
    from specllama.engine.host import EngineHost, LoadEngine
    from specllama.models import refs
    from specllama.tui.state import Preferences

    session_id = None
    for ref in (settings["model"], settings["draft-model"]):
        if ref and ref.endswith(".gguf"):
            refs.resolve(ref)  # one that is not there is refused before the app opens
    if resume is not None:
        with stored() as store:
            session_id = store.find(resume)
    model, draft, prefs = settings["model"], settings["draft-model"], Preferences.load()
    if prefs.notice:
        diagnostics.warn(prefs.notice)
    if model is None and server is None and not prefs.last_target:
        model, draft = loading.pair_of(settings, quiet=False)
    options = settings.engine_options()
    pair = (model, draft) if model else (prefs.last_target, draft or prefs.last_draft or None)
    recipe = LoadEngine(refs.lasting(pair[0]), pair[1] and refs.lasting(pair[1]), options)
    with nullcontext() if server is not None else EngineHost(recipe) as ahead:
        if ahead is not None:
            ahead.begin()  # another process: it loads while this one imports what draws
        gc.disable()  # until the first frame is drawn
        from specllama.tui.app import SpecllamaApp, run

        app = SpecllamaApp(
            target=model,
            draft=draft,
            options=options,
            params=settings.generate_params(),
            session_id=session_id,
            system=settings["system"] or None,
            log_rounds=settings["log"],
            server=server,
            read_ahead=settings["read-ahead"],
            idle_s=seconds(settings["idle-unload"]),
            ahead=ahead,
        )
        return run(app)
