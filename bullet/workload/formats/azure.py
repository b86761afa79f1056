"""Azure LLM inference traces 2023 and 2024: CSV with dates (Azure/AzurePublicDataset, AzureLLMInferenceDataset2024.md)."""

from bullet.workload.layout import Layout

TITLE = "Azure"
COLUMNS = {"timestamp": "TIMESTAMP", "contexttokens": "ContextTokens", "generatedtokens": "GeneratedTokens"}
LAYOUT = Layout("azure", ("contexttokens",), "generatedtokens", "timestamp")
"""Published times are dates, which state their unit; numbers under these names do not."""
