"""The ingest role: requests in, exact tables of every model out; what can't be taken in goes to the dead-letter topic.

`ingest.Ingest` is the loop, `decoding` turns records into columns, `counting` counts them in memory, `tables` keeps the counts in Redis and
reads them again, `history` keeps closed hours as parquet, `users` hashes who asked. `docs/tables.md` describes every key. Covers no
forecasts and no plans.
"""
