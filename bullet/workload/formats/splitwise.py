"""splitwise-sim's traces: CSV, ``arrival_timestamp`` in seconds (Mutinifni/splitwise-sim, generate_trace.py: gaps of mean
1 / rate); ``batch_size`` requests of one row are one there, so it must be 1."""

from bullet.workload.layout import Layout

TITLE = "Splitwise"
COLUMNS = {"request_id": "request_id", "request_type": "request_type", "arrival_timestamp": "arrival_timestamp",
           "batch_size": "batch_size", "prompt_size": "prompt_size", "token_size": "token_size"}
LAYOUT = Layout("splitwise", ("prompt_size",), "token_size", "arrival_timestamp", "s", ones=("batch_size",))
