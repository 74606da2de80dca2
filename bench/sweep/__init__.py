"""Methods against concurrency: cells in interleaved rounds, a journal, tables, plots, a report."""
