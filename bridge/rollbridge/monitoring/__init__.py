"""Alerts with their runbook, and a board: what Prometheus and Grafana are given. Pure, without a client of either."""
