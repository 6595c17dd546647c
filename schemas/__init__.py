"""The Avro schemas of every record that rollbridge stores, and their codecs."""
