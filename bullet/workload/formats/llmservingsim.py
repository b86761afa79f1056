"""LLMServingSim's workloads: JSONL or CSV, ``arrival_time_ns`` (casys-kaist/LLMServingSim, workloads/)."""

from bullet.workload.layout import Layout

TITLE = "LLMServingSim"
COLUMNS = {"arrival_time_ns": "arrival_time_ns", "input_toks": "input_toks", "output_toks": "output_toks"}
LAYOUT = Layout("llmservingsim", ("input_toks",), "output_toks", "arrival_time_ns", "ns", "its name")
