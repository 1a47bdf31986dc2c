import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Random;
import java.util.StringJoiner;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Sends to a broker, and reads back what it holds. The first argument is the command, the second the bootstrap server.
 *
 * <pre>
 * send BOOTSTRAP TOPIC,COUNT,SEED[,name=value ...] ...   makes a topic of one partition with these configurations unless
 *                                                         it is there; in transactions when its name begins with tx
 * read BOOTSTRAP FROM TO STEP TOPIC ...                   one JSON object a topic: records, bytes, a hash over offsets,
 *                                                         timestamps and values, and the offsets that the broker finds
 *                                                         for the times FROM, FROM + STEP ... TO
 * </pre>
 */
public final class Traffic {
  private static final long BEGIN = 1_700_000_000_000L;
  private static final String[] CODECS = {"none", "gzip", "snappy", "lz4", "zstd"};

  private Traffic() {}

  public static void main(String[] args) throws Exception {
    switch (args[0]) {
      case "send" -> {
        for (String words : List.of(args).subList(2, args.length)) {
          String[] word = words.split(",");
          create(args[1], word);
          send(args[1], word[0], Integer.parseInt(word[1]), Long.parseLong(word[2]));
        }
      }
      case "read" -> {
        for (String topic : List.of(args).subList(5, args.length)) {
          read(args[1], topic, Long.parseLong(args[2]), Long.parseLong(args[3]), Long.parseLong(args[4]));
        }
      }
      default -> throw new IllegalArgumentException(args[0]);
    }
  }

  private static void create(String bootstrap, String[] word) throws Exception {
    Map<String, String> configs = new HashMap<>();
    for (int i = 3; i < word.length; i++) {
      String[] pair = word[i].split("=", 2);
      configs.put(pair[0], pair[1]);
    }
    try (Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap))) {
      if (!admin.listTopics().names().get(60, TimeUnit.SECONDS).contains(word[0])) {
        NewTopic topic = new NewTopic(word[0], 1, (short) 1).configs(configs);
        admin.createTopics(List.of(topic)).all().get(60, TimeUnit.SECONDS);
      }
    }
  }

  private static void send(String bootstrap, String topic, int count, long seed) throws Exception {
    Random random = new Random(seed);
    boolean transactional = topic.startsWith("tx");
    int sent = 0;
    while (sent < count) {
      // One producer a codec; its batch size and how long it waits vary, so that batches do.
      Properties properties = new Properties();
      properties.put("bootstrap.servers", bootstrap);
      properties.put("compression.type", CODECS[random.nextInt(CODECS.length)]);
      properties.put("batch.size", 1 << (10 + random.nextInt(6)));
      properties.put("linger.ms", random.nextInt(3));
      if (transactional) {
        properties.put("transactional.id", "tx-" + seed);
      }
      int some = Math.min(count - sent, 200 + random.nextInt(800));
      try (KafkaProducer<byte[], byte[]> producer =
          new KafkaProducer<>(properties, new ByteArraySerializer(), new ByteArraySerializer())) {
        if (transactional) {
          producer.initTransactions();
        }
        sendSome(producer, topic, sent, some, random, transactional);
      }
      sent += some;
    }
    System.out.println("{\"topic\":\"" + topic + "\",\"sent\":" + sent + "}");
  }

  private static void sendSome(
      KafkaProducer<byte[], byte[]> producer, String topic, int first, int count, Random random, boolean transactional)
      throws InterruptedException, ExecutionException {
    boolean open = false;
    for (int i = 0; i < count; i++) {
      if (transactional && !open) {
        producer.beginTransaction();
        open = true;
      }
      byte[] value = new byte[random.nextInt(20) == 0 ? random.nextInt(40_000) : random.nextInt(1_500)];
      random.nextBytes(value);
      long timestamp = BEGIN + (first + i) * 10L + random.nextInt(500) - 250;
      byte[] key = ("key-" + random.nextInt(300)).getBytes(java.nio.charset.StandardCharsets.UTF_8);
      producer.send(new ProducerRecord<>(topic, null, timestamp, key, value));
      if (open && (random.nextInt(40) == 0 || i == count - 1)) {
        if (random.nextInt(5) == 0) {
          producer.abortTransaction();
        } else {
          producer.commitTransaction();
        }
        open = false;
      }
    }
    producer.flush();
  }

  private static void read(String bootstrap, String topic, long from, long to, long step) {
    Properties properties = new Properties();
    properties.put("bootstrap.servers", bootstrap);
    TopicPartition partition = new TopicPartition(topic, 0);
    long records = 0;
    long bytes = 0;
    long hash = 17;
    StringJoiner times = new StringJoiner(",", "[", "]");
    try (KafkaConsumer<byte[], byte[]> consumer =
        new KafkaConsumer<>(properties, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
      consumer.assign(List.of(partition));
      consumer.seekToBeginning(List.of(partition));
      long end = consumer.endOffsets(List.of(partition)).get(partition);
      while (consumer.position(partition) < end) {
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofSeconds(5))) {
          records++;
          bytes += record.serializedValueSize();
          hash = hash * 31 + record.offset();
          hash = hash * 31 + record.timestamp();
          hash = hash * 31 + java.util.Arrays.hashCode(record.value());
        }
      }
      List<Long> asked = new ArrayList<>();
      for (long time = from; time <= to; time += step) {
        asked.add(time);
      }
      for (long time : asked) {
        OffsetAndTimestamp found = consumer.offsetsForTimes(Map.of(partition, time)).get(partition);
        times.add(found == null ? "null" : Long.toString(found.offset()));
      }
    }
    System.out.println(
        "{\"topic\":\"" + topic + "\",\"records\":" + records + ",\"bytes\":" + bytes + ",\"hash\":" + hash + ",\"times\":" + times + "}");
  }
}
