"""BLIS trace v2: CSV (inference-sim/inference-sim, sim/workload/tracev2.go).

``input_tokens`` follow a shared prefix of ``prefix_length``; ``server_input_tokens`` is what the engine counted, chat template
included, 0 where nobody asked it. ``status`` other than ok is a failed request.
"""

from bullet.workload.layout import Layout

TITLE = "BLIS"
COLUMNS = {"prefix_length": "prefix_length", "input_tokens": "input_tokens", "output_tokens": "output_tokens",
           "server_input_tokens": "server_input_tokens", "arrival_time_us": "arrival_time_us", "status": "status"}
LAYOUT = Layout("blis", ("prefix_length", "input_tokens"), "output_tokens", "arrival_time_us", "us", "its name",
                engine="server_input_tokens", status=("status",))
