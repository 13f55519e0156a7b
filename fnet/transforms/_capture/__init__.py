"""`capture`, `intervene` and `sites`: reads and replaces the named values of a program."""
