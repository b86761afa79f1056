"""BurstGPT: CSV, ``Timestamp`` in seconds; rows with 0 response tokens are failures (HPMLL/BurstGPT, README)."""

from bullet.workload.layout import Layout

TITLE = "BurstGPT"
COLUMNS = {"timestamp": "Timestamp", "model": "Model", "request_tokens": "Request tokens", "response_tokens": "Response tokens",
           "total_tokens": "Total tokens", "log_type": "Log Type"}
LAYOUT = Layout("burstgpt", ("request_tokens",), "response_tokens", "timestamp", "s", totals=("total_tokens",))
