"""HTTP within bounds: metrics, health, and what the live page is served with."""
