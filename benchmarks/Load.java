// Kafka's own client as a load: does what its standard input says, a word and its arguments a line, and answers each
// line with the seconds that it took.
//
//   transaction TOPIC COUNT BYTES      one transaction of so many records, from its begin to its commit
//   singly TOPIC PRODUCERS COUNT       so many producers at a time, each sends COUNT records, a request for each
//   read TOPIC COUNT                   read_committed, from the beginning of all partitions
//
// Arguments of the program: KEY=VALUE settings of producers and consumers.
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Properties;
import java.util.UUID;
import java.util.concurrent.Callable;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Load {
    private static final int KEYS = 10_000;
    private final Properties settings = new Properties();
    private final byte[][] keys = new byte[KEYS][];
    private final ArrayList<KafkaProducer<byte[], byte[]>> producers = new ArrayList<>();

    private Load(String[] arguments) {
        for (String argument : arguments) {
            int at = argument.indexOf('=');
            settings.put(argument.substring(0, at), argument.substring(at + 1));
        }
        for (int number = 0; number < KEYS; number++) {
            keys[number] = String.format("key-%05d", number).getBytes(StandardCharsets.UTF_8);
        }
    }

    public static void main(String[] arguments) throws Exception {
        var load = new Load(arguments);
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ");
            int number = Integer.parseInt(words[2]);
            double seconds = switch (words[0]) {
                case "transaction" -> load.transaction(words[1], number, Integer.parseInt(words[3]));
                case "singly" -> load.singly(words[1], number, Integer.parseInt(words[3]));
                case "read" -> load.read(words[1], number);
                default -> throw new IllegalArgumentException(words[0]);
            };
            System.out.println(seconds);
            System.out.flush();
        }
        System.exit(0);
    }

    private double transaction(String topic, int count, int bytes) throws Exception {
        var producer = producers(1).get(0);
        var value = new byte[bytes];
        var fault = new AtomicReference<Exception>();
        long started = System.nanoTime();
        producer.beginTransaction();
        for (int number = 0; number < count; number++) {
            producer.send(new ProducerRecord<>(topic, keys[number % KEYS], value), (metadata, refused) -> {
                if (refused != null) {
                    fault.set(refused);
                }
            });
        }
        producer.commitTransaction();
        if (fault.get() != null) {
            throw fault.get();
        }
        return since(started);
    }

    private double singly(String topic, int many, int count) throws Exception {
        var tasks = new ArrayList<Callable<Void>>();
        for (var producer : producers(many)) {
            producer.beginTransaction();
            tasks.add(() -> {
                for (int number = 0; number < count; number++) {
                    producer.send(new ProducerRecord<>(topic, keys[number % KEYS], new byte[100])).get();
                }
                return null;
            });
        }
        var threads = Executors.newFixedThreadPool(many);
        long started = System.nanoTime();
        for (var done : threads.invokeAll(tasks)) {
            done.get();
        }
        double seconds = since(started);
        threads.shutdown();
        for (var producer : producers) {
            producer.commitTransaction();
        }
        return seconds;
    }

    private double read(String topic, int count) {
        var reading = new Properties();
        reading.putAll(settings);
        reading.put("isolation.level", "read_committed");
        reading.put("auto.offset.reset", "earliest");
        try (var consumer = new KafkaConsumer<>(reading, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            var places = consumer.partitionsFor(topic).stream().map(at -> new TopicPartition(topic, at.partition()));
            consumer.assign(places.toList());
            long started = System.nanoTime();
            for (int got = 0; got < count; ) {
                got += consumer.poll(Duration.ofSeconds(10)).count();
            }
            return since(started);
        }
    }

    private ArrayList<KafkaProducer<byte[], byte[]>> producers(int many) {
        while (producers.size() < many) {
            var own = new Properties();
            own.putAll(settings);
            own.put("transactional.id", "load-" + UUID.randomUUID());
            var producer = new KafkaProducer<>(own, new ByteArraySerializer(), new ByteArraySerializer());
            producer.initTransactions();
            producers.add(producer);
        }
        return producers;
    }

    private static double since(long started) {
        return (System.nanoTime() - started) / 1e9;
    }
}
