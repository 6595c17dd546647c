"""Tests on containers: one test process takes all of them, so that they share one cluster."""
