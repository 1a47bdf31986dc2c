// SPDX-License-Identifier: Apache-2.0

import com.alibaba.fastjson2.JSON;
import java.io.IOException;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * A real RocketMQ client: {@code Client send namesrv=HOST:PORT count=N out=FILE [seed=N] [access-key=NAME
 * secret-key=TEXT]}, which signs what it sends where it has a key;
 * {@code Client ask namesrv=HOST:PORT broker=NAME in=FILE out=FILE}, which asks the broker {@link Questions};
 * {@code Client retry namesrv=HOST:PORT broker=NAME topic=NAME}, a consumer that fails at the first messages.
 */
public final class Client {
    private static final int BATCH = 4;

    private final TransactionMQProducer producer;
    private final Random random;
    private final PrintWriter out;
    private int rows;

    private Client(TransactionMQProducer producer, Random random, PrintWriter out) {
        this.producer = producer;
        this.random = random;
        this.out = out;
    }

    public static void main(String[] arguments) {
        PrintStream stdout = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        try {
            long rows = switch (arguments.length > 0 ? arguments[0] : "") {
                case "send" -> send(
                    new Options(arguments, "namesrv", "count", "out", "seed", "access-key", "secret-key"));
                case "ask" -> ask(new Options(arguments, "namesrv", "broker", "in", "out"));
                case "retry" -> retry(new Options(arguments, "namesrv", "broker", "topic"));
                default -> throw new IllegalArgumentException("Client send|ask|retry namesrv=HOST:PORT ...");
            };
            stdout.println(JSON.toJSONString(Map.of("rows", rows)));
            System.exit(0);
        } catch (Throwable problem) { // the client's own threads must not keep the JVM
            problem.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    /** Sends count= times: mostly single messages, now and then a transaction, a delayed message or a batch. */
    private static int send(Options options) throws Exception {
        long seed = options.number("seed", 1);
        TransactionMQProducer producer = new TransactionMQProducer("test-producer", options.signature());
        producer.setNamesrvAddr(options.required("namesrv"));
        producer.setMqClientApiTimeout(20_000); // three seconds are little on a busy machine
        producer.setSendMsgTimeout(10_000);
        producer.setTransactionListener(new Decided());
        producer.start();
        try (PrintWriter out = new PrintWriter(Files.newBufferedWriter(Path.of(options.required("out"))))) {
            Client client = new Client(producer, new Random(seed), out);
            for (int i = 0; i < options.small("count", 1000); i++) {
                client.one("s" + seed + "-" + i);
            }
            if (out.checkError()) {
                throw new IOException("cannot write " + options.required("out"));
            }
            return client.rows;
        } finally {
            producer.shutdown();
        }
    }

    /** The broker puts what is sent back into the group's retry topic, after a second. */
    @SuppressWarnings("deprecation") // see ask
    private static long retry(Options options) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("test-consumer");
        consumer.setNamesrvAddr(options.required("namesrv"));
        consumer.setMqClientApiTimeout(20_000); // three seconds are little on a busy machine
        consumer.start();
        try {
            MessageQueue queue = new MessageQueue(options.required("topic"), options.required("broker"), 0);
            List<MessageExt> messages = consumer.pull(queue, "*", 0, BATCH).getMsgFoundList();
            for (MessageExt message : messages) {
                consumer.sendMessageBack(message, 1);
            }
            return messages.size();
        } finally {
            consumer.shutdown();
        }
    }

    @SuppressWarnings("deprecation") // the consumers that came after it do not say what the broker answered
    private static long ask(Options options) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("test-consumer");
        consumer.setNamesrvAddr(options.required("namesrv"));
        consumer.setMqClientApiTimeout(20_000); // three seconds are little on a busy machine
        DefaultMQAdminExt admin = new DefaultMQAdminExt();
        admin.setNamesrvAddr(options.required("namesrv"));
        admin.setMqClientApiTimeout(20_000); // three seconds are little on a busy machine
        consumer.start();
        admin.start();
        String broker = options.required("broker");
        try {
            return Questions.answer(options, new Questions.Answers() {
                @Override
                public Map<String, Object> byOffset(String topic, int queueId, long offset, int max) throws Exception {
                    PullResult found = consumer.pull(new MessageQueue(topic, broker, queueId), "*", offset, max);
                    List<MessageExt> messages = found.getMsgFoundList() == null ? List.of() : found.getMsgFoundList();
                    return Questions.row(String.valueOf(found.getPullStatus()), found.getNextBeginOffset(),
                        found.getMinOffset(), found.getMaxOffset(),
                        messages.stream().map(MessageExt::getCommitLogOffset).toList());
                }

                @Override
                public long byTime(String topic, int queueId, long timestamp, BoundaryType boundary) throws Exception {
                    MessageQueue queue = new MessageQueue(topic, broker, queueId);
                    return boundary == BoundaryType.LOWER
                        ? admin.searchLowerBoundaryOffset(queue, timestamp)
                        : admin.searchUpperBoundaryOffset(queue, timestamp);
                }
            });
        } finally {
            consumer.shutdown();
            admin.shutdown();
        }
    }

    private void one(String id) throws Exception {
        String topic = random.nextInt(3) == 0 ? "OrderPaid" : "TopicTest";
        String keys = "order-" + id + " user-" + random.nextInt(50);
        Message message = new Message(topic, "Tag" + random.nextInt(4), keys, body());
        switch (random.nextInt(12)) {
            case 0 -> {
                boolean commit = random.nextBoolean();
                record("transaction", message, producer.sendMessageInTransaction(message, commit), commit);
            }
            case 1 -> {
                message.setDelayTimeLevel(1);
                record("delay", message, producer.send(message), true);
            }
            case 2 -> {
                List<Message> batch = new ArrayList<>();
                for (int j = 0; j < BATCH; j++) {
                    byte[] body = ("b" + j).getBytes(StandardCharsets.UTF_8);
                    batch.add(new Message(topic, "TagB", "batch-" + id + "-" + j, body));
                }
                recordBatch(batch, producer.send(batch));
            }
            default -> record("normal", message, producer.send(message), true);
        }
    }

    /** Noise, or now and then text long enough for the client to compress it. */
    private byte[] body() {
        if (random.nextInt(10) == 0) {
            byte[] text = new byte[5000 + random.nextInt(5000)];
            Arrays.fill(text, (byte) 'a');
            return text;
        }
        byte[] noise = new byte[1 + random.nextInt(3000)];
        random.nextBytes(noise);
        return noise;
    }

    /** The answer to a batch joins the ids of its messages with commas. */
    private void recordBatch(List<Message> batch, SendResult result) {
        String[] ids = result.getMsgId().split(",");
        String[] offsetIds = result.getOffsetMsgId().split(",");
        for (int j = 0; j < batch.size(); j++) {
            row("batch", batch.get(j), result, ids[j], offsetIds[j], true);
        }
    }

    private void record(String kind, Message message, SendResult result, boolean committed) {
        row(kind, message, result, result.getMsgId(), result.getOffsetMsgId(), committed);
    }

    private void row(String kind, Message message, SendResult result, String id, String offsetId, boolean committed) {
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException("send: " + result);
        }
        Map<String, Object> row = new LinkedHashMap<>();
        row.put("kind", kind);
        row.put("topic", message.getTopic());
        row.put("keys", message.getKeys());
        row.put("tags", message.getTags());
        row.put("msgId", id);
        row.put("offsetMsgId", offsetId);
        row.put("committed", committed);
        out.println(JSON.toJSONString(row));
        rows++;
    }

    /** The sender decides with the argument it hands over; a broker that asks again learns nothing new. */
    private static final class Decided implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object commit) {
            return (Boolean) commit
                ? LocalTransactionState.COMMIT_MESSAGE
                : LocalTransactionState.ROLLBACK_MESSAGE;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.UNKNOW;
        }
    }
}
