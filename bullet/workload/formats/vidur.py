"""Vidur and Sarathi-Serve: CSV, ``arrived_at`` in seconds (microsoft/vidur, data/processed_traces)."""

from bullet.workload.layout import Layout

TITLE = "Vidur"
COLUMNS = {"arrived_at": "arrived_at", "num_prefill_tokens": "num_prefill_tokens", "num_decode_tokens": "num_decode_tokens"}
LAYOUT = Layout("vidur", ("num_prefill_tokens",), "num_decode_tokens", "arrived_at", "s", totals=("num_total_tokens",))
