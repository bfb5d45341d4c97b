"""Constraints on a reply, GBNF grammars and JSON schemas, which llguidance follows.

``source.source_of`` reads one, ``guide.Guides`` follows it over a vocabulary.
"""
