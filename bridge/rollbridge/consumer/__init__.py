"""Readers of committed records.

``reader`` reads one stream in the order of each key, ``transactions`` whole transactions in commit order, ``preview``
what is open, and ``group`` shares a stream among members. ``consumer`` is confluent-kafka's Consumer on streams, with
its ``settings``, ``places``, ``commits`` and ``message``; ``introduced`` asks it about what transactions commit for its
group. What they hand out is in ``records``, where they begin in ``start``.
"""
