"""Writes programs as LiteRT models."""
