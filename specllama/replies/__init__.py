"""What a reply is made of: prompts and templates, thoughts, switches, attached files, figures."""
