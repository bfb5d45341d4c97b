"""The parts of a reply: prompts and templates, thoughts, switches, attached files, figures."""
