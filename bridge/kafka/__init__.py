"""The adapter to Kafka: everything in this project that speaks to a broker goes through these modules.

Native transactions: ``appender`` (what callers use) with its ``states``, on ``pipeline`` (to leaders), ``coordination``
and ``group_offsets`` (to coordinators), ``codes`` (what answers mean), ``metadata`` (who leads what), ``wire`` and
``security`` (one connection), ``offsets`` (ends of partitions) and ``describe`` (one answer that kio cannot read).
Plain idempotent writes: ``idempotent``, with the same pipeline's requests. Record batches as values: ``batches``, with
``inflate``. Topics: ``topics`` and ``seal``. librdkafka: ``clients`` for its settings, ``translate`` for its errors.
What can go wrong is in ``errors``.
"""
