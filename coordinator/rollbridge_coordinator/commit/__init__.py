"""Commits and aborts: plan, merge, roll, large merges, outcomes, refusals, expiry."""
