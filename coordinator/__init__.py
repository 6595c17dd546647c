"""The coordinator daemon: leads transaction groups, decides outcomes and merges committed records."""
