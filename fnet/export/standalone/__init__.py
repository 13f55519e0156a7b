"""The files that are copied into bundles. They load and run a bundle without fnet, so none of them
imports fnet."""
