"""The adapter to Kafka: everything in this project that speaks to a broker goes through these modules.

``wire`` (one connection), ``metadata`` (who leads what), ``batches`` (record batches as values), ``pipeline`` and
``appender`` (native transactions), ``topics`` and ``seal`` (administration), ``clients`` (librdkafka settings).
"""
