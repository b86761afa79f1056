"""Models and GPUs by name and from files."""
