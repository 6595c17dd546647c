"""Errors, ids, options, deadlines and records by schema, which every room uses. No I/O."""
