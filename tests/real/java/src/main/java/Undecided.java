// SPDX-License-Identifier: Apache-2.0

import com.alibaba.fastjson2.JSON;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * A producer that leaves its transactions open until the broker asks: {@code Undecided run namesrv=HOST:PORT topic=NAME
 * count=N seconds=N}. The last line has a row for each message, as {@code Client send} writes them.
 */
public final class Undecided {
    private Undecided() {
    }

    public static void main(String[] arguments) {
        PrintStream stdout = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        try {
            Options options = new Options(
                arguments, "namesrv", "topic", "count", "seconds", "access-key", "secret-key");
            stdout.println(JSON.toJSONString(run(options)));
            System.exit(0);
        } catch (Throwable problem) { // the client's own threads must not keep the JVM
            problem.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    private static List<Map<String, Object>> run(Options options) throws Exception {
        int count = options.small("count", 1);
        CountDownLatch open = new CountDownLatch(count);
        TransactionMQProducer producer = new TransactionMQProducer("test-undecided", options.signature());
        producer.setNamesrvAddr(options.required("namesrv"));
        producer.setMqClientApiTimeout(20_000); // three seconds are little on a busy machine
        producer.setSendMsgTimeout(20_000);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return LocalTransactionState.UNKNOW;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                open.countDown();
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.start();
        List<Map<String, Object>> rows = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            Message message = new Message(options.required("topic"), "TagU", "undecided-" + i, new byte[] {1});
            Map<String, Object> row = new LinkedHashMap<>();
            row.put("msgId", producer.sendMessageInTransaction(message, null).getMsgId());
            row.put("kind", "transaction");
            row.put("topic", message.getTopic());
            row.put("keys", message.getKeys());
            row.put("committed", true);
            rows.add(row);
        }
        if (!open.await(options.number("seconds", 60), TimeUnit.SECONDS)) {
            throw new IllegalStateException("the broker has not asked for " + open.getCount() + " transactions");
        }
        Thread.sleep(500); // its answer is one-way
        producer.shutdown();
        return rows;
    }
}
