"""Compare methods at several concurrencies: interleaved rounds, journal, tables, plots, report."""
