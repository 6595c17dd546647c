// Debezium's connector for PostgreSQL, whose snapshot is one transaction: for transaction.boundary=connector.
//
// Debezium says which record of a snapshot is the last one. Until that, no transaction is ended; afterwards each batch
// of changes is one. What has to begin its snapshot anew, because PostgreSQL was away, aborts what it has written of it.
import io.debezium.config.Configuration;
import io.debezium.connector.postgresql.PostgresConnector;
import io.debezium.connector.postgresql.PostgresConnectorTask;
import io.debezium.connector.postgresql.PostgresOffsetContext;
import io.debezium.connector.postgresql.PostgresPartition;
import io.debezium.pipeline.ChangeEventSourceCoordinator;
import java.util.List;
import java.util.Map;
import org.apache.kafka.connect.connector.Task;
import org.apache.kafka.connect.source.ConnectorTransactionBoundaries;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.source.TransactionContext;

public class SnapshotInOneTransaction extends PostgresConnector {
    @Override
    public Class<? extends Task> taskClass() {
        return Snapshots.class;
    }

    @Override
    public ConnectorTransactionBoundaries canDefineTransactionBoundaries(Map<String, String> settings) {
        return ConnectorTransactionBoundaries.SUPPORTED;
    }

    public static class Snapshots extends PostgresConnectorTask {
        private boolean unfinished; // records of a snapshot are in the transaction, its last one is not
        private boolean anew;

        /** Called by Debezium whenever it starts, also after an error that it takes for one that passes. */
        @Override
        public ChangeEventSourceCoordinator<PostgresPartition, PostgresOffsetContext> start(Configuration settings) {
            anew = unfinished;
            return super.start(settings);
        }

        @Override
        public List<SourceRecord> doPoll() throws InterruptedException {
            TransactionContext transactions = context.transactionContext();
            if (transactions == null) { // transaction.boundary is another one
                return super.doPoll();
            }
            if (anew) {
                anew = unfinished = false;
                transactions.abortTransaction(); // with this batch, which is empty: before the new snapshot's first record
                return List.of();
            }
            List<SourceRecord> records = super.doPoll();
            for (int i = 0; i < records.size(); i++) {
                boolean before = unfinished;
                unfinished = inSnapshot(records.get(i));
                if (unfinished) {
                    records.set(i, new Row(records.get(i)));
                }
                if (before && !unfinished) { // the last one, whose offset says that the snapshot is complete
                    transactions.commitTransaction(records.get(i));
                } else if (!before && unfinished && i > 0) { // changes that came before a snapshot are not of it
                    transactions.commitTransaction(records.get(i - 1));
                }
            }
            if (!unfinished && !records.isEmpty()) {
                transactions.commitTransaction();
            }
            return records;
        }

        /** Whether who starts behind this record would begin the snapshot anew. */
        private static boolean inSnapshot(SourceRecord record) {
            Map<String, ?> offset = record.sourceOffset();
            return offset.containsKey("snapshot") && !Boolean.TRUE.equals(offset.get("last_snapshot_record"));
        }
    }

    /**
     * A record of a snapshot, equal to all others. Connect keeps a transaction's records until the commit, as keys of a
     * map, to tell the task of each then, which this one ignores; so it keeps one, however many rows there are. Records
     * that end transactions are looked up by equality, too, and are not of this class.
     */
    private static final class Row extends SourceRecord {
        Row(SourceRecord of) {
            super(
                    of.sourcePartition(),
                    of.sourceOffset(),
                    of.topic(),
                    of.kafkaPartition(),
                    of.keySchema(),
                    of.key(),
                    of.valueSchema(),
                    of.value(),
                    of.timestamp(),
                    of.headers());
        }

        @Override
        public boolean equals(Object other) {
            return other instanceof Row;
        }

        @Override
        public int hashCode() {
            return 1;
        }
    }
}
