"""Readers of committed records.

``reader`` reads one stream in the order of each key, ``transactions`` whole transactions in commit order, ``preview``
the records of open ones. ``consumer`` is confluent-kafka's Consumer on streams: ``group`` tracks the segments of one
member, ``commits`` its offsets and rebalances, ``settings`` its configuration. ``records`` holds the types that all of
them hand out.
"""
