"""SM partitions on a real GPU."""
