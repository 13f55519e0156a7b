"""`graph`: draws a program, in which each named scope is a box, as a page, SVG or DOT."""
