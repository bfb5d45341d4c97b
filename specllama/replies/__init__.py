"""The parts of a reply: chat templates, thoughts, calls of tools, attached files."""
