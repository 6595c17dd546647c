"""Changes of streams: create, adopt, scale, retention, late records, error states."""
