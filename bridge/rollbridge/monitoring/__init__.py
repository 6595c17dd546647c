"""Alert rules for Prometheus, a board for Grafana, and the runbook of the alerts, as files of data."""
