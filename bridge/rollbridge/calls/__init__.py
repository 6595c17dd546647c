"""What calls of an application have in common: time-outs, futures, code of its own that we run, and forks."""
