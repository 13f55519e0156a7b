"""Writes programs as ONNX models."""
