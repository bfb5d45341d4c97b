"""The making of the bundled `tiny` family: corpus, tokenizer, training, export, scaling."""
