"""Run folders, metrics, tables, plots, timeline, page."""
