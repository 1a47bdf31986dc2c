// SPDX-License-Identifier: Apache-2.0

import com.alibaba.fastjson2.JSON;
import java.io.IOException;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Stream;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.PutMessageStatus;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.index.IndexService;
import org.apache.rocketmq.store.index.QueryOffsetResult;

/**
 * Drives RocketMQ's own DefaultMessageStore: {@code Store MODE name=value ...}.
 *
 * <p>Standard output carries what the modes below say and nothing else; whatever RocketMQ prints goes to standard
 * error. Opening a store changes it (abort, checkpoint, recovery): give every mode but reindex a store of its own.
 */
public final class Store {
    private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    private static final int GIVE_UP_MS = 30_000;

    private Store() {
    }

    public static void main(String[] arguments) {
        System.setOut(System.err);
        try {
            switch (arguments.length > 0 ? arguments[0] : "") {
                case "write" -> write(options(arguments, "count", "seconds", "profile", "seed", "body", "topics",
                    "first", "pauseEvery", "pauseMs", "hold", "exit"));
                case "reindex" -> reindex(options(arguments, "rounds"));
                case "query" -> query(options(arguments, "in", "out"));
                case "recover" -> recover(options(arguments, "in", "out"));
                case "ask" -> ask(options(arguments, "in", "out"));
                case "truncate" -> truncate(options(arguments, "to", "count", "profile", "seed", "body", "topics"));
                default -> throw new IllegalArgumentException("Store write|reindex|query|recover|ask|truncate ...");
            }
            System.exit(0);
        } catch (Throwable problem) { // whatever it was, the threads that RocketMQ left must not keep the JVM
            problem.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    private static Options options(String[] arguments, String... own) {
        return new Options(arguments, Stream.concat(Stream.of(Stores.NAMES), Stream.of(own)).toArray(String[]::new));
    }

    /** Fills a store: {@code ready}, then one line of figures once dispatch has caught up. */
    private static void write(Options options) throws Exception {
        DefaultMessageStore store = Stores.started(Stores.config(options));
        OUT.println("ready");
        Map<String, Object> figures = fill(store, options);
        say(figures);
        if (options.flag("hold")) {
            while (System.in.read() >= ' ') { // a line, or the end of the input
            }
        }
        if (options.text("exit", "clean").equals("halt")) {
            store.getStoreCheckpoint().flush(); // its timer does so every second
            Runtime.getRuntime().halt(137);
        }
        store.shutdown();
    }

    /** Puts count= messages, or as many as go into seconds=, numbered from first= on, and waits for dispatch. */
    static Map<String, Object> fill(DefaultMessageStore store, Options options) throws Exception {
        Messages messages = new Messages(options);
        long first = options.number("first", 0);
        long seconds = options.number("seconds", 0);
        long count = options.number("count", seconds > 0 ? Long.MAX_VALUE : 10_000);
        long pauseEvery = options.number("pauseEvery", 0);
        long pauseMs = options.number("pauseMs", 1200);
        long begin = System.nanoTime();
        long end = seconds > 0 ? begin + seconds * 1_000_000_000L : Long.MAX_VALUE;
        long done = 0;
        while (done < count && System.nanoTime() < end) {
            put(store, messages.next(first + done, store.getMaxPhyOffset()));
            done++;
            if (pauseEvery > 0 && done % pauseEvery == 0) {
                Thread.sleep(pauseMs);
            }
        }
        double taken = (System.nanoTime() - begin) / 1e9;
        Stores.settle(store);
        Map<String, Object> figures = figures(done, taken);
        figures.put("maxOffset", store.getMaxPhyOffset());
        figures.put("dispatchSeconds", (System.nanoTime() - begin) / 1e9);
        return figures;
    }

    /** A busy page cache or a file that is not there yet passes; every other refusal is an error of the caller. */
    static void put(DefaultMessageStore store, MessageExtBrokerInner message) throws InterruptedException {
        long begin = System.currentTimeMillis();
        while (true) {
            PutMessageStatus status = store.putMessage(message).getPutMessageStatus();
            if (status == PutMessageStatus.PUT_OK) {
                return;
            }
            boolean passes = status == PutMessageStatus.OS_PAGE_CACHE_BUSY
                || status == PutMessageStatus.CREATE_MAPPED_FILE_FAILED;
            if (!passes || System.currentTimeMillis() - begin > GIVE_UP_MS) {
                throw new IllegalStateException("put: " + status);
            }
            Thread.sleep(1);
        }
    }

    /** Builds the index again with the real IndexService, one line of figures a round. */
    private static void reindex(Options options) throws Exception {
        DefaultMessageStore store = Stores.logOnly(options);
        long rounds = options.number("rounds", 1);
        for (int round = 0; round < rounds; round++) {
            Map<String, Object> figures = new LinkedHashMap<>();
            figures.put("round", round);
            figures.putAll(Stores.indexed(store));
            say(figures);
        }
        Versions.index(store).shutdown();
        Runtime.getRuntime().halt(0); // shutting the store down would write a checkpoint and delete files
    }

    /** Answers lines {@code topic TAB key TAB max TAB begin TAB end [TAB indexType]} of in=, one JSON line each in out=. */
    private static void query(Options options) throws Exception {
        DefaultMessageStore store = Stores.started(Stores.config(options));
        Stores.settle(store);
        answerAll(store, options);
        store.shutdown();
    }

    private static void answerAll(DefaultMessageStore store, Options options) throws IOException {
        long count = 0;
        try (PrintWriter out = new PrintWriter(Files.newBufferedWriter(Path.of(options.required("out"))))) {
            for (String line : Files.readAllLines(Path.of(options.required("in")))) {
                out.println(JSON.toJSONString(answer(Versions.index(store), line.split("\t", -1))));
                count++;
            }
            if (out.checkError()) {
                throw new IOException("cannot write " + options.required("out"));
            }
        }
        say(Map.of("queries", count));
    }

    private static Map<String, Object> answer(IndexService index, String[] fields) {
        int max = Integer.parseInt(fields[2]);
        long begin = Long.parseLong(fields[3]);
        long end = Long.parseLong(fields[4]);
        String type = fields.length > 5 ? fields[5] : "";
        QueryOffsetResult found = type.isEmpty()
            ? index.queryOffset(fields[0], fields[1], max, begin, end)
            : index.queryOffset(fields[0], fields[1], max, begin, end, type);
        Map<String, Object> row = new LinkedHashMap<>();
        row.put("topic", fields[0]);
        row.put("key", fields[1]);
        row.put("max", max);
        row.put("begin", begin);
        row.put("end", end);
        if (!type.isEmpty()) {
            row.put("indexType", type);
        }
        row.put("phyOffsets", found.getPhyOffsets());
        row.put("indexLastUpdateTimestamp", found.getIndexLastUpdateTimestamp());
        row.put("indexLastUpdatePhyoffset", found.getIndexLastUpdatePhyoffset());
        return row;
    }

    /**
     * Starts on what is there, as a broker would, and says how long loading (with recovery) and catching up took; with
     * in= and out= it then answers as query does.
     */
    private static void recover(Options options) throws Exception {
        MessageStoreConfig config = Stores.config(options);
        DefaultMessageStore store = Stores.create(config);
        long begin = System.nanoTime();
        if (!store.load()) {
            throw new IllegalStateException("the store did not load");
        }
        double load = (System.nanoTime() - begin) / 1e9;
        store.start();
        Stores.settle(store);
        Map<String, Object> figures = new LinkedHashMap<>();
        figures.put("loadSeconds", load);
        figures.put("readySeconds", (System.nanoTime() - begin) / 1e9);
        figures.put("maxOffset", store.getMaxPhyOffset());
        say(figures);
        if (!options.text("in", "").isEmpty()) {
            answerAll(store, options);
        }
        store.shutdown();
    }

    /** Answers Questions about queues; what has expired is corrected first, as a broker does it after its start. */
    private static void ask(Options options) throws Exception {
        DefaultMessageStore store = Stores.started(Stores.config(options));
        Stores.settle(store);
        Stores.clean(store);
        long count = Questions.answer(options, new Questions.Answers() {
            @Override
            public Map<String, Object> byOffset(String topic, int queueId, long offset, int max) {
                return found(store.getMessage("asking", topic, queueId, offset, max, null));
            }

            @Override
            public long byTime(String topic, int queueId, long timestamp, BoundaryType boundary) {
                return store.getOffsetInQueueByTime(topic, queueId, timestamp, boundary);
            }
        });
        say(Map.of("questions", count));
        store.shutdown();
    }

    private static Map<String, Object> found(GetMessageResult result) {
        List<Long> phyOffsets = new ArrayList<>();
        for (ByteBuffer message : result.getMessageBufferList()) {
            phyOffsets.add(message.getLong(MessageDecoder.MESSAGE_PHYSIC_OFFSET_POSITION));
        }
        Map<String, Object> row = Questions.row(String.valueOf(result.getStatus()), result.getNextBeginOffset(),
            result.getMinOffset(), result.getMaxOffset(), phyOffsets);
        result.release();
        return row;
    }

    /** Cuts the log at the last message start at or before to=, then writes count= more (none unless told). */
    private static void truncate(Options options) throws Exception {
        DefaultMessageStore store = Stores.started(Stores.config(options));
        Stores.settle(store);
        Stores.cut(store, Long.parseLong(options.required("to")));
        Map<String, Object> figures = new LinkedHashMap<>();
        figures.put("truncatedTo", store.getMaxPhyOffset());
        if (options.number("count", 0) > 0) {
            figures.putAll(fill(store, options));
        }
        say(figures);
        store.shutdown();
    }

    private static Map<String, Object> figures(long count, double seconds) {
        Map<String, Object> figures = new LinkedHashMap<>();
        figures.put("count", count);
        figures.put("seconds", seconds);
        figures.put("messagesPerSecond", Math.round(count / seconds));
        return figures;
    }

    private static void say(Map<String, Object> figures) {
        OUT.println(JSON.toJSONString(figures));
    }
}
