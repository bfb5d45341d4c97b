"""JSON schemas as grammars for llama.cpp's sampler (GBNF); pure Python.

``convert.schema_to_gbnf`` is the way in.
"""
