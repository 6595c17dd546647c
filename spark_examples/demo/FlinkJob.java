// A Flink job whose sink is KafkaSink with DeliveryGuarantee.EXACTLY_ONCE: the numbers from 0 on, at a rate, each once.
//
//   FlinkJob KEY=VALUE...
//     bootstrap, topic, prefix             where it writes, and the prefix of its transactional ids
//     records, rate, parallelism           how much, how fast (records/s), with how many subtasks
//     strategy                             POOLING or INCREMENTING
//     checkpoints                          folder of its checkpoints, which are kept
//     interval_ms                          time between two of them
//     from                                 a checkpoint to go on from; optional
//     fail_at                              a number at which the job throws once; optional
//
// Prints a line for each checkpoint that is complete as far as the number source is told: "checkpoint N".
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.serialization.SimpleStringSchema;
import org.apache.flink.api.common.state.CheckpointListener;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.source.util.ratelimit.RateLimiterStrategy;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.sink.TransactionNamingStrategy;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

public class FlinkJob {
    private static final AtomicBoolean FAILED = new AtomicBoolean();

    public static void main(String[] arguments) throws Exception {
        Map<String, String> given = new HashMap<>();
        for (String argument : arguments) {
            int at = argument.indexOf('=');
            given.put(argument.substring(0, at), argument.substring(at + 1));
        }
        var settings = new Configuration();
        settings.setString("restart-strategy.type", "fixed-delay");
        settings.setString("restart-strategy.fixed-delay.attempts", "10");
        settings.setString("restart-strategy.fixed-delay.delay", "1 s");
        settings.setString("execution.checkpointing.storage", "filesystem");
        settings.setString("execution.checkpointing.dir", "file://" + given.get("checkpoints"));
        settings.setString("execution.checkpointing.externalized-checkpoint-retention", "RETAIN_ON_CANCELLATION");
        settings.setString("taskmanager.memory.network.fraction", "0.05");
        if (given.containsKey("from")) {
            settings.setString("execution.state-recovery.path", "file://" + given.get("from"));
        }
        int parallelism = Integer.parseInt(given.getOrDefault("parallelism", "1"));
        var flink = StreamExecutionEnvironment.createLocalEnvironment(parallelism, settings);
        flink.enableCheckpointing(Long.parseLong(given.getOrDefault("interval_ms", "1000")));
        long records = Long.parseLong(given.get("records"));
        long failAt = Long.parseLong(given.getOrDefault("fail_at", "-1"));
        var source = new DataGeneratorSource<>(number -> number, records,
            RateLimiterStrategy.perSecond(Double.parseDouble(given.get("rate"))), Types.LONG);
        var sink = KafkaSink.<String>builder()
            .setBootstrapServers(given.get("bootstrap"))
            .setDeliveryGuarantee(DeliveryGuarantee.EXACTLY_ONCE)
            .setTransactionalIdPrefix(given.get("prefix"))
            .setProperty("transaction.timeout.ms", given.getOrDefault("timeout_ms", "600000"))
            .setTransactionNamingStrategy(TransactionNamingStrategy.valueOf(given.getOrDefault("strategy", "POOLING")))
            .setRecordSerializer(KafkaRecordSerializationSchema.builder()
                .setTopic(given.get("topic"))
                .setKeySerializationSchema((String text) -> ("key-" + Math.abs(text.hashCode() % 50)).getBytes())
                .setValueSerializationSchema(new SimpleStringSchema())
                .build())
            .build();
        flink.fromSource(source, WatermarkStrategy.noWatermarks(), "numbers").uid("numbers")
            .map(new Named(given.get("prefix"), failAt)).returns(Types.STRING).uid("named")
            .sinkTo(sink).uid("sink");
        flink.execute("rollbridge");
        System.out.println("done");
    }

    /** Numbers as text; throws once at one of them, and tells of each complete checkpoint. */
    private static final class Named extends RichMapFunction<Long, String> implements CheckpointListener {
        private final String prefix;
        private final long failAt;

        Named(String prefix, long failAt) {
            this.prefix = prefix;
            this.failAt = failAt;
        }

        @Override
        public String map(Long number) {
            if (number == failAt && FAILED.compareAndSet(false, true)) {
                System.out.println("failed");
                throw new RuntimeException("on purpose");
            }
            return prefix + "-" + number;
        }

        @Override
        public void notifyCheckpointComplete(long checkpoint) {
            System.out.println("checkpoint " + checkpoint);
        }
    }
}
