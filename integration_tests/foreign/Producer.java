// A transactional producer of Kafka's own client that does what its standard input says, a word and its arguments a
// line, and answers each line with one: "ok ...", or "error CLASS MESSAGE".
//
//   init | begin | commit | abort | flush | state | halt
//   send TOPIC FROM TO [PARTITION]        records "ID-n" with key "key-(n % 10)", in order; returns once all are queued
//   put TOPIC KEY VALUE                   one record; returns once it is queued
//   await                                 until all that were sent have been answered
//   forget                                ask no more what became of those that were sent
//   copy GROUP TOPIC PARTITION OFFSET TEXT [EPOCH]  the offset of a group, to be committed with the transaction
//   committed GROUP TOPIC PARTITION       the offset that the group has, its text, and its leader epoch if it has one
//   consume GROUP TOPIC TO                 copies records of a topic, with the consumer's own group metadata
//   resume PRODUCER EPOCH                 what Flink's FlinkKafkaInternalProducer.resumeTransaction does
//
// Arguments of the program: KEY=VALUE settings of the producer.
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Producer {
    private final Properties settings = new Properties();
    private final String id;
    private final KafkaProducer<byte[], byte[]> producer;
    private final List<Future<RecordMetadata>> sent = new ArrayList<>();

    private Producer(String[] arguments) {
        for (String argument : arguments) {
            int at = argument.indexOf('=');
            settings.put(argument.substring(0, at), argument.substring(at + 1));
        }
        id = settings.getProperty("transactional.id", settings.getProperty("client.id", "plain"));
        producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
    }

    public static void main(String[] arguments) throws Exception {
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        var writer = new Producer(arguments);
        System.out.println("ok");
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String answer;
            try {
                answer = "ok " + writer.obey(line.split(" "));
            } catch (Exception fault) {
                Throwable cause = fault instanceof ExecutionException ? fault.getCause() : fault;
                answer = "error " + cause.getClass().getSimpleName() + " " + cause.getMessage();
            }
            System.out.println(answer.replace('\n', ' '));
            System.out.flush();
        }
        writer.producer.close(Duration.ofSeconds(5));
    }

    private String obey(String[] words) throws Exception {
        switch (words[0]) {
            case "init" -> producer.initTransactions();
            case "begin" -> producer.beginTransaction();
            case "commit" -> producer.commitTransaction();
            case "abort" -> producer.abortTransaction();
            case "flush" -> producer.flush();
            case "send" -> send(words[1], Integer.parseInt(words[2]), Integer.parseInt(words[3]),
                words.length > 4 ? Integer.valueOf(words[4]) : null);
            case "put" -> sent.add(producer.send(new ProducerRecord<>(words[1], bytes(words[2]), bytes(words[3]))));
            case "forget" -> sent.clear();
            case "await" -> {
                return String.valueOf(await());
            }
            case "copy" -> producer.sendOffsetsToTransaction(
                Map.of(new TopicPartition(words[2], Integer.parseInt(words[3])),
                    new OffsetAndMetadata(Long.parseLong(words[4]),
                        words.length > 6 ? Optional.of(Integer.valueOf(words[6])) : Optional.empty(), words[5])),
                new ConsumerGroupMetadata(words[1]));
            case "committed" -> {
                var where = new TopicPartition(words[2], Integer.parseInt(words[3]));
                try (var consumer = consumer(words[1])) {
                    var found = consumer.committed(Set.of(where)).get(where);
                    return found == null ? "none" : found.offset() + " " + found.metadata()
                        + found.leaderEpoch().map(epoch -> " " + epoch).orElse("");
                }
            }
            case "consume" -> {
                return String.valueOf(consume(words[1], words[2], words[3]));
            }
            case "state" -> {
                Object pair = read(manager(), "producerIdAndEpoch");
                return read(pair, "producerId") + " " + read(pair, "epoch");
            }
            case "resume" -> resume(Long.parseLong(words[1]), Short.parseShort(words[2]));
            case "halt" -> Runtime.getRuntime().halt(9);
            default -> throw new IllegalArgumentException(words[0]);
        }
        return "";
    }

    private void send(String topic, int from, int to, Integer partition) {
        for (int number = from; number < to; number++) {
            var record = new ProducerRecord<>(topic, partition, bytes("key-" + number % 10), bytes(id + "-" + number));
            record.headers().add("source", bytes("java"));
            sent.add(producer.send(record));
        }
    }

    private int await() throws Exception {
        producer.flush();
        int count = sent.size();
        try {
            for (var one : sent) {
                one.get();
            }
        } finally {
            sent.clear();
        }
        return count;
    }

    /** Copies what a consumer group gets next into a topic; commits the group's offsets with the transaction. */
    private int consume(String group, String from, String to) {
        try (var consumer = consumer(group)) {
            consumer.subscribe(List.of(from));
            var some = consumer.poll(Duration.ofSeconds(30));
            var ends = new HashMap<TopicPartition, OffsetAndMetadata>();
            for (var record : some) {
                sent.add(producer.send(new ProducerRecord<>(to, record.key(), record.value())));
                ends.put(new TopicPartition(record.topic(), record.partition()),
                    new OffsetAndMetadata(record.offset() + 1, record.leaderEpoch(), "note"));
            }
            producer.sendOffsetsToTransaction(ends, consumer.groupMetadata());
            return some.count();
        }
    }

    private KafkaConsumer<byte[], byte[]> consumer(String group) {
        var reading = new Properties();
        reading.putAll(Map.of("bootstrap.servers", settings.get("bootstrap.servers"), "group.id", group,
            "auto.offset.reset", "earliest", "enable.auto.commit", "false", "isolation.level", "read_committed"));
        return new KafkaConsumer<>(reading, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    private Object manager() throws Exception {
        return read(producer, "transactionManager");
    }

    private void resume(long producerId, short epoch) throws Exception {
        Object manager = manager();
        move(manager, "INITIALIZING");
        var pair = manager.getClass().getDeclaredField("producerIdAndEpoch");
        var made = pair.getType().getDeclaredConstructor(long.class, short.class);
        made.setAccessible(true);
        pair.setAccessible(true);
        pair.set(manager, made.newInstance(producerId, epoch));
        move(manager, "READY");
        move(manager, "IN_TRANSACTION");
        var started = manager.getClass().getDeclaredField("transactionStarted");
        started.setAccessible(true);
        started.set(manager, true);
    }

    private static void move(Object manager, String state) throws Exception {
        for (var kind : manager.getClass().getDeclaredClasses()) {
            if (kind.getSimpleName().equals("State")) {
                for (var one : kind.getEnumConstants()) {
                    if (one.toString().equals(state)) {
                        var method = manager.getClass().getDeclaredMethod("transitionTo", kind);
                        method.setAccessible(true);
                        method.invoke(manager, one);
                    }
                }
            }
        }
    }

    private static Object read(Object of, String name) throws Exception {
        var field = of.getClass().getDeclaredField(name);
        field.setAccessible(true);
        return field.get(of);
    }

    private static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }
}
