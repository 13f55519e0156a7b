"""Models of images and texts together."""
