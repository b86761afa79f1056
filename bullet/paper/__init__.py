"""The paper's figures and tables, ours beside its own: ``bullet-sim figures``; docs/reproduce-a-figure.md is the manual."""
