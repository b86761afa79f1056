"""Qwen-Bailian usage traces: JSONL, ``timestamp`` in seconds, ``hash_ids`` one a block of 16 tokens
(alibaba-edu/qwen-bailian-usagetraces-anon, README)."""

from bullet.workload.layout import Layout

TITLE = "Qwen-Bailian"
COLUMNS = {"chat_id": "chat_id", "parent_chat_id": "parent_chat_id", "timestamp": "timestamp", "input_length": "input_length",
           "output_length": "output_length", "type": "type", "turn": "turn", "hash_ids": "hash_ids"}
LAYOUT = Layout("bailian", ("input_length",), "output_length", "timestamp", "s", ids="hash_ids", block_tokens=16)
