"""The gateway: ordinary transactional Kafka producers, in any language, write rolling transactions.

It speaks Kafka's protocol. It carries out producers' transactions itself, on :func:`rollbridge.connect`; everything
else goes to the brokers as bytes. It stores nothing: sessions, labels, outcomes and savepoints are rollbridge's, so any
gateway may die at any instant, and any other continues.

Pure modules decide (``identity``, ``versions``, ``sequences``, ``producers``, ``cluster``, ``errors``, ``carrying``),
and the others carry it out. It is built on the client alone and never on the coordinator.
"""
