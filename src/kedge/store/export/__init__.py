"""A recording for other programs: the wide table, as Parquet and in SQL."""
