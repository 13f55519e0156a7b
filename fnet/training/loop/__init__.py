"""`fit`: its loop, what it checks and prints, signals, and how a run ends and goes on."""
