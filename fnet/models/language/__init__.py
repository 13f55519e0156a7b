"""Models of text: encoders, decoders and recurrent networks."""
