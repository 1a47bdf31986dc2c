// SPDX-License-Identifier: Apache-2.0

import com.alibaba.fastjson2.JSON;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;

/**
 * A consumer that is pushed messages: {@code Consumer run namesrv=HOST:PORT topics=NAME,NAME count=N seconds=N}. It ends
 * when it has had count= messages and was given back the first, at which it fails once. Signs with access-key=.
 */
public final class Consumer {
    private Consumer() {
    }

    public static void main(String[] arguments) {
        PrintStream stdout = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        try {
            Options options = new Options(
                arguments, "namesrv", "topics", "count", "seconds", "access-key", "secret-key");
            stdout.println(JSON.toJSONString(run(options)));
            System.exit(0);
        } catch (Throwable problem) { // the client's own threads must not keep the JVM
            problem.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    private static Map<String, Object> run(Options options) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
            "test-push", options.signature(), new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(options.required("namesrv"));
        consumer.setMqClientApiTimeout(20_000); // three seconds are little on a busy machine
        consumer.setPollNameServerInterval(1000); // it learns of its retry topic so
        System.setProperty("rocketmq.client.rebalance.waitInterval", "1000");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        for (String topic : options.required("topics").split(",")) {
            consumer.subscribe(topic, "*");
        }
        Set<String> had = ConcurrentHashMap.newKeySet();
        AtomicInteger failures = new AtomicInteger();
        AtomicInteger again = new AtomicInteger();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            again.addAndGet((int) messages.stream().filter(message -> message.getReconsumeTimes() > 0).count());
            if (failures.getAndIncrement() == 0) {
                context.setDelayLevelWhenNextConsume(1);
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            messages.forEach(message -> had.add(message.getMsgId()));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        long end = System.nanoTime() + options.number("seconds", 60) * 1_000_000_000L;
        while ((had.size() < options.number("count", 1) || again.get() == 0) && System.nanoTime() < end) {
            Thread.sleep(20);
        }
        consumer.shutdown();
        return Map.of("msgIds", had, "again", again.get());
    }
}
