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
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** A real RocketMQ client: {@code Client send namesrv=HOST:PORT count=N out=FILE [seed=N]}. */
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
            if (arguments.length == 0 || !arguments[0].equals("send")) {
                throw new IllegalArgumentException("Client send namesrv=HOST:PORT count=N out=FILE [seed=N]");
            }
            int rows = send(new Options(arguments, "namesrv", "count", "out", "seed"));
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
        TransactionMQProducer producer = new TransactionMQProducer("test-producer");
        producer.setNamesrvAddr(options.required("namesrv"));
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
