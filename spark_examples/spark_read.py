"""Read a stream into Spark, each key's records in order across all scales."""

from pyspark.sql import SparkSession

import rollbridge

with rollbridge.connect() as b:
    b.admin.create_stream("sales/events", segments=2, exist_ok=True)
    with b.transaction("sales/events") as txn:
        for number in range(100):
            txn.write("sales/events", key=b"%d" % (number % 10), value=b"%d" % number)
    cluster = {
        "kafka.bootstrap.servers": b.settings.bootstrap_servers,
        "zookeeper": b.settings.zookeeper,
        "zookeeper.root": b.settings.zookeeper_root,
    }

spark = SparkSession.builder.master("local[2]").getOrCreate()
events = (
    spark.readStream.format("rollbridge")  # spark.read instead reads what is there now
    .options(**cluster, stream="sales/events")
    .option("startingOffsets", "earliest")
    .load()
)
counts = events.groupBy("key").count()
query = counts.writeStream.outputMode("complete").format("memory").queryName("counts").start()
query.processAllAvailable()
spark.table("counts").orderBy("key").show()
query.stop()
spark.stop()
