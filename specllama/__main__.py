"""The console script."""

from specllama import signals


def main() -> None:
    """Run the command line; importing it takes a while, in which signals count already."""
    signals.end_at_once()
    from specllama.cli import invoke

    code = invoke()
    signals.end_at_once()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
