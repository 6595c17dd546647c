"""Demonstrations with real data and a stock Apache Spark; ``make demo`` runs :mod:`spark_examples.demo.rolling`."""
