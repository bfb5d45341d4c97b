"""How the bundled `tiny` family was made: corpus, tokenizer, training, export, scaling."""
