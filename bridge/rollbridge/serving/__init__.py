"""What coordinators and gateways serve over HTTP: within bounds, on threads of their own; metrics, and health."""
