"""The live page: documents, admission, server, sources."""
