"""fnet beside its peers. Each table is one command; figures that were measured stand in RESULTS.md."""
