"""What constrains a reply, GBNF grammars and JSON schemas: followed by llguidance.

``source.source_of`` reads one, ``guide.Guides`` follows it over a vocabulary.
"""
