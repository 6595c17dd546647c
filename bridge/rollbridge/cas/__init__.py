"""Conditional writers: compare-and-set on the segments of a stream, by native transactions, without a coordinator."""
