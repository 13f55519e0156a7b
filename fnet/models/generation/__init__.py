"""Generation of text: sampling, beam search and streams."""
