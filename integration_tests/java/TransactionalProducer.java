// TransactionalProducer BOOTSTRAP TOPIC ID RECORDS commit|abort|halt|resume:PID:EPOCH [ROUNDS [COMPRESSION]]
// Writes ROUNDS transactions of RECORDS numbered records each, and ends them as it is told. What it prints, tests read.
import java.lang.reflect.Field;
import java.util.ArrayList;
import java.util.Properties;
import java.util.concurrent.Future;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class TransactionalProducer {
    static Field field(Object of, String name) throws Exception {
        var field = of.getClass().getDeclaredField(name);
        field.setAccessible(true);
        return field;
    }

    static void to(Object manager, String state) throws Exception {
        for (var kind : manager.getClass().getDeclaredClasses())
            if (kind.getSimpleName().equals("State"))
                for (var one : kind.getEnumConstants())
                    if (one.toString().equals(state)) {
                        var method = manager.getClass().getDeclaredMethod("transitionTo", kind);
                        method.setAccessible(true);
                        method.invoke(manager, one);
                    }
    }

    // As Flink's FlinkKafkaInternalProducer.resumeTransaction goes on with a transaction of a producer that is gone.
    static void resume(Object manager, long id, short epoch) throws Exception {
        to(manager, "INITIALIZING");
        var pair = field(manager, "producerIdAndEpoch");
        var made = pair.getType().getDeclaredConstructor(long.class, short.class);
        made.setAccessible(true);
        pair.set(manager, made.newInstance(id, epoch));
        to(manager, "READY");
        to(manager, "IN_TRANSACTION");
        field(manager, "transactionStarted").set(manager, true);
    }

    public static void main(String[] args) throws Exception {
        var settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("transactional.id", args[2]);
        settings.put("transaction.timeout.ms", Integer.toString(24 * 3600 * 1000));
        settings.put("compression.type", args.length > 6 ? args[6] : "none");
        settings.put("linger.ms", "5");
        settings.put("max.block.ms", "120000");
        settings.put("delivery.timeout.ms", "240000");
        int records = Integer.parseInt(args[3]);
        int rounds = args.length > 5 ? Integer.parseInt(args[5]) : 1;
        try (var producer =
                new KafkaProducer<byte[], byte[]>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            var manager = field(producer, "transactionManager").get(producer);
            if (args[4].startsWith("resume:")) {
                var named = args[4].split(":");
                resume(manager, Long.parseLong(named[1]), Short.parseShort(named[2]));
                producer.commitTransaction();
                System.out.println("committed");
                return;
            }
            producer.initTransactions();
            for (int round = 0; round < rounds; round++) {
                producer.beginTransaction();
                System.out.println("pair " + field(manager, "producerIdAndEpoch").get(manager));
                var futures = new ArrayList<Future<RecordMetadata>>();
                for (int i = 0; i < records; i++) {
                    futures.add(producer.send(new ProducerRecord<>(
                        args[1], null, ("key-" + i % 10).getBytes(), (args[2] + "-" + round + "-" + i).getBytes())));
                    if (i % 1000 == 999) {
                        System.out.println("sent " + i);
                        if (records > 20_000) Thread.sleep(20);
                    }
                }
                producer.flush();
                for (var future : futures) future.get();
                System.out.println("flushed");
                if (args[4].equals("halt")) {
                    System.out.flush();
                    Runtime.getRuntime().halt(9);
                }
                if (args[4].equals("commit")) producer.commitTransaction(); else producer.abortTransaction();
                System.out.println("ended " + field(manager, "producerIdAndEpoch").get(manager));
            }
        }
    }
}
