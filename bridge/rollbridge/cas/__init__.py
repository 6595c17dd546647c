"""Conditional writers: compare-and-set on a stream's segments by native transactions, without a coordinator."""
