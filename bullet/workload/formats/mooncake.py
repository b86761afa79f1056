"""Mooncake (FAST'25 traces): JSONL, ``timestamp`` in milliseconds, ``hash_ids`` one a block of 512 tokens, equal ids for equal
prefixes (kvcache-ai/Mooncake, FAST25-release).

Others write the same four keys in seconds (guidellm PR 948), so the keys alone do not state the unit: ``auto`` asks, and
``--format mooncake`` states it.
"""

from bullet.workload.layout import Layout

TITLE = "Mooncake"
COLUMNS = {"timestamp": "timestamp", "input_length": "input_length", "output_length": "output_length", "hash_ids": "hash_ids"}
LAYOUT = Layout("mooncake", ("input_length",), "output_length", "timestamp", "ms", ids="hash_ids", block_tokens=512)
UNIT_ASKED = "Mooncake's own files are in ms (--format mooncake), other writers of these keys use s"
"""Said where the keys were recognised and nobody named the format."""
