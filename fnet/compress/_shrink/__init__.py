"""`shrink`: removes channels, heads and hidden units from any program."""
