"""Reduces a program that fails to the few equations that make it fail."""
