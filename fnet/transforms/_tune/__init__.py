"""`tune`: rewrites a program with rules for the chip that runs it, and measures whether they help."""
