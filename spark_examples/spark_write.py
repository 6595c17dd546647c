"""Write from Spark, exactly once: each micro-batch is a transaction whose outcome a restarted query finds."""

import tempfile

from pyspark.sql import SparkSession

import rollbridge

with rollbridge.connect() as b:
    b.admin.create_stream("sales/events", segments=2, exist_ok=True)
    cluster = {
        "kafka.bootstrap.servers": b.settings.bootstrap_servers,
        "zookeeper": b.settings.zookeeper,
        "zookeeper.root": b.settings.zookeeper_root,
    }

spark = SparkSession.builder.master("local[2]").getOrCreate()
events = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
query = (
    events.selectExpr("CAST(value % 10 AS STRING) AS key", "to_json(struct(*)) AS value")
    .writeStream.format("rollbridge")
    .options(**cluster, stream="sales/events")
    .option("checkpointLocation", tempfile.mkdtemp())  # a folder that stays, where a query is to be restarted
    .trigger(processingTime="1 second")
    .start()
)
while sum(progress["numInputRows"] for progress in query.recentProgress) == 0:
    query.awaitTermination(1)
query.stop()
spark.stop()
