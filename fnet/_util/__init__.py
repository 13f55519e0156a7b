"""What several packages need and no user calls: units, text tables, timings, the cache, HTML pages."""
