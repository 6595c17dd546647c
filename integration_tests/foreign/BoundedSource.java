// A source connector for tests that says itself where its transactions end: of numbers, as far as a file allows it.
//
//   topic, gate          where to, and the file that says up to which number it may go
//   partitions           of the topic; a number goes to the partition of its remainder
//   transaction.records  so many to each transaction
//   poll.records         so many at most from each poll, the first ones of the next transaction never among them
//   aborted              which transactions it aborts, the first one being 0, with commas between
//
// The first transaction is ended with its last record, the second one with the batch, and so on.
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.config.ConfigDef;
import org.apache.kafka.connect.connector.Task;
import org.apache.kafka.connect.data.Schema;
import org.apache.kafka.connect.errors.ConnectException;
import org.apache.kafka.connect.source.ConnectorTransactionBoundaries;
import org.apache.kafka.connect.source.ExactlyOnceSupport;
import org.apache.kafka.connect.source.SourceConnector;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.source.SourceTask;

public class BoundedSource extends SourceConnector {
    private static final String NEXT = "next";
    private static final long PAUSE_MS = 20;

    private Map<String, String> settings;

    @Override
    public String version() {
        return "1";
    }

    @Override
    public void start(Map<String, String> given) {
        settings = given;
    }

    @Override
    public void stop() {}

    @Override
    public Class<? extends Task> taskClass() {
        return Numbers.class;
    }

    @Override
    public List<Map<String, String>> taskConfigs(int most) {
        return List.of(settings);
    }

    @Override
    public ConfigDef config() {
        return new ConfigDef();
    }

    @Override
    public ExactlyOnceSupport exactlyOnceSupport(Map<String, String> given) {
        return ExactlyOnceSupport.SUPPORTED;
    }

    @Override
    public ConnectorTransactionBoundaries canDefineTransactionBoundaries(Map<String, String> given) {
        return ConnectorTransactionBoundaries.SUPPORTED;
    }

    public static class Numbers extends SourceTask {
        private String topic;
        private Path gate;
        private long partitions;
        private long length;
        private long most;
        private List<String> aborted;
        private Map<String, String> place;
        private long next;

        @Override
        public String version() {
            return "1";
        }

        @Override
        public void start(Map<String, String> settings) {
            topic = settings.get("topic");
            gate = Path.of(settings.get("gate"));
            partitions = Long.parseLong(settings.get("partitions"));
            length = Long.parseLong(settings.get("transaction.records"));
            most = Long.parseLong(settings.get("poll.records"));
            aborted = List.of(settings.get("aborted").split(","));
            place = Map.of("topic", topic);
            Map<String, Object> before = context.offsetStorageReader().offset(place);
            next = before == null ? 0 : (Long) before.get(NEXT);
        }

        @Override
        public void stop() {}

        @Override
        public List<SourceRecord> poll() throws InterruptedException {
            long transaction = next / length;
            long end = Math.min(Math.min(allowed(), next + most), (transaction + 1) * length);
            if (next >= end) {
                Thread.sleep(PAUSE_MS);
                return null;
            }
            List<SourceRecord> records = new ArrayList<>();
            for (; next < end; next++) {
                records.add(record(next));
            }
            if (next == (transaction + 1) * length) {
                SourceRecord last = transaction % 2 == 0 ? records.get(records.size() - 1) : null;
                end(aborted.contains(Long.toString(transaction)), last);
            }
            return records;
        }

        private long allowed() {
            try {
                return Long.parseLong(Files.readString(gate).strip());
            } catch (IOException failure) {
                throw new ConnectException(failure);
            }
        }

        private SourceRecord record(long number) {
            int partition = (int) (number % partitions);
            Map<String, Long> behind = Map.of(NEXT, number + 1);
            return new SourceRecord(
                    place, behind, topic, partition, Schema.STRING_SCHEMA, "key", Schema.STRING_SCHEMA, topic + "-" + number);
        }

        private void end(boolean abort, SourceRecord last) {
            var transactions = context.transactionContext();
            if (abort && last != null) {
                transactions.abortTransaction(last);
            } else if (abort) {
                transactions.abortTransaction();
            } else if (last != null) {
                transactions.commitTransaction(last);
            } else {
                transactions.commitTransaction();
            }
        }
    }
}
