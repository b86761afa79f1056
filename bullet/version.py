"""The version, for what is below the package's own name."""

VERSION = "0.2.0"
