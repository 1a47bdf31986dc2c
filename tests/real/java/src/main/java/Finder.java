// SPDX-License-Identifier: Apache-2.0

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Looks up what {@code Client send} wrote down, as any tool with RocketMQ's client in it does. It runs with the client
 * of 4.9 as well. {@code Finder check namesrv=HOST:PORT in=FILE [by-offset-id=true]}: are all of them found, by each key,
 * by their unique ids and by those that say where they are? {@code Finder bench one=HOST:PORT other=HOST:PORT in=FILE
 * rounds=N seconds=N threads=N}: queries by key, asked of two name servers in turn, and a line of figures for each
 * round. Both sign their requests where they have {@code access-key=} and {@code secret-key=}.
 */
public final class Finder {
    private static final int MANY = 64;
    private static final int TOLD = 5;

    private Finder() {
    }

    public static void main(String[] arguments) {
        PrintStream stdout = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        try {
            switch (arguments.length > 0 ? arguments[0] : "") {
                case "check" -> check(stdout,
                    new Options(arguments, "namesrv", "in", "by-offset-id", "access-key", "secret-key"));
                case "bench" -> bench(stdout, new Options(
                    arguments, "one", "other", "in", "rounds", "seconds", "threads", "access-key", "secret-key"));
                default -> throw new IllegalArgumentException("Finder check|bench ...");
            }
            System.exit(0);
        } catch (Throwable problem) { // the client's own threads must not keep the JVM
            problem.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    private static DefaultMQAdminExt admin(Options options, String namesrv) throws Exception {
        DefaultMQAdminExt admin = new DefaultMQAdminExt(options.signature(), 10_000);
        admin.setNamesrvAddr(namesrv);
        admin.setMqClientApiTimeout(20_000); // three seconds are little on a busy machine
        admin.setInstanceName(namesrv); // or the second one asks the first one's name server
        admin.start();
        return admin;
    }

    private static List<JSONObject> rows(Options options) throws IOException {
        return Files.readAllLines(Path.of(options.required("in"))).stream().map(JSON::parseObject).toList();
    }

    private static void check(PrintStream stdout, Options options) throws Exception {
        DefaultMQAdminExt admin = admin(options, options.required("namesrv"));
        List<String> missed = new ArrayList<>();
        long asked = 0;
        for (JSONObject row : rows(options)) {
            if (!row.getBooleanValue("committed")) {
                continue;
            }
            Map<String, Question> questions = new LinkedHashMap<>();
            String topic = row.getString("topic");
            for (String key : row.getString("keys").split(" ")) {
                questions.put(key, () -> admin.queryMessage(topic, key, MANY, 0, Long.MAX_VALUE).getMessageList());
            }
            questions.put(row.getString("msgId"), () -> List.of(admin.viewMessage(topic, row.getString("msgId"))));
            if (options.flag("by-offset-id") && row.getString("offsetMsgId") != null) {
                String id = row.getString("offsetMsgId");
                questions.put(id, () -> List.of(admin.viewMessage(topic, id)));
            }
            for (Map.Entry<String, Question> question : questions.entrySet()) {
                asked++;
                String why = ask(question.getValue(), row, question.getKey());
                if (why != null) {
                    missed.add(row.getString("kind") + " " + question.getKey() + ": " + why);
                }
            }
        }
        stdout.println(JSON.toJSONString(Map.of(
            "asked", asked, "missed", missed.size(), "first", missed.subList(0, Math.min(TOLD, missed.size())))));
    }

    /** Null when the message is among the answers; a key that many share has more than one answer holds. */
    private static String ask(Question question, JSONObject row, String key) {
        try {
            List<MessageExt> found = question.answer();
            boolean here = found.stream().anyMatch(message -> uniqueId(message).equals(row.getString("msgId")));
            return here || key.startsWith("user-") && found.size() == MANY ? null : found.size() + " others";
        } catch (Exception problem) {
            return problem.toString();
        }
    }

    private static String uniqueId(MessageExt message) {
        return message instanceof MessageClientExt known ? known.getMsgId() : message.getProperty("UNIQ_KEY");
    }

    private static void bench(PrintStream stdout, Options options) throws Exception {
        List<String[]> keys = rows(options).stream().filter(row -> row.getString("kind").equals("normal"))
            .map(row -> new String[] {row.getString("topic"), row.getString("keys").split(" ")[0]}).toList();
        Map<String, DefaultMQAdminExt> sides = new LinkedHashMap<>();
        for (String name : List.of("one", "other")) {
            sides.put(name, admin(options, options.required(name)));
        }
        for (int round = 0; round < options.small("rounds", 1); round++) {
            for (Map.Entry<String, DefaultMQAdminExt> side : sides.entrySet()) {
                Map<String, Object> figures = round(side.getValue(), keys, options);
                figures.put("asked", side.getKey());
                stdout.println(JSON.toJSONString(figures));
            }
        }
    }

    private static Map<String, Object> round(DefaultMQAdminExt admin, List<String[]> keys, Options options)
        throws InterruptedException {
        AtomicLong answers = new AtomicLong();
        AtomicLong errors = new AtomicLong();
        long began = System.nanoTime();
        long end = began + options.number("seconds", 10) * 1_000_000_000L;
        List<Thread> threads = new ArrayList<>();
        for (int i = 0; i < options.small("threads", 4); i++) {
            Random random = new Random(i);
            threads.add(new Thread(() -> {
                while (System.nanoTime() < end) {
                    String[] key = keys.get(random.nextInt(keys.size()));
                    try {
                        admin.queryMessage(key[0], key[1], 32, 0, Long.MAX_VALUE); // throws when there is no message
                        answers.incrementAndGet();
                    } catch (Exception problem) {
                        if (errors.getAndIncrement() == 0) {
                            problem.printStackTrace();
                        }
                    }
                }
            }));
        }
        threads.forEach(Thread::start);
        for (Thread thread : threads) {
            thread.join();
        }
        Map<String, Object> figures = new LinkedHashMap<>();
        figures.put("perSecond", answers.get() * 1e9 / (System.nanoTime() - began));
        figures.put("errors", errors.get());
        return figures;
    }

    /** One way to ask for a message. */
    private interface Question {
        List<MessageExt> answer() throws Exception;
    }
}
