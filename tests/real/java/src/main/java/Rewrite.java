// SPDX-License-Identifier: Apache-2.0

import com.alibaba.fastjson2.JSON;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.stream.Stream;
import org.apache.rocketmq.store.DefaultMessageStore;

/**
 * Lets RocketMQ's own code cut, clean and write stores, one after another: a line {@code MODE name=value ...} of
 * standard input for each, lines of figures on standard output.
 *
 * <p>{@code write} opens a store, and recovers it as its abort file says; with drop= the oldest segments, and
 * what points into them alone, go as the cleaning of expired ones takes them, and with clean=true what it left; with to= all messages from there on are cut off; then count= are
 * written. It stops the store and says its figures. With exit=open it stays open as long as this program runs, for
 * another write of it, too. exit=halt ends this program in place of stopping; haltAfter=BYTES does so in the middle of
 * writing, without a word; exit=busy says its figures and then goes on writing behind the scenes until that happens.
 * {@code stop} stops all stores that
 * are open, at once. {@code halt MILLISECONDS} ends this program after these, whatever it does then. {@code reindex} is that of {@link Store}.
 * {@code find} asks the index service for every key ({@link Findable}): that of a store which stays open, or else one
 * that is loaded for it, with nothing recovered and nothing written.
 */
public final class Rewrite {
    private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    private static final Map<String, DefaultMessageStore> OPEN = new HashMap<>();

    private Rewrite() {
    }

    public static void main(String[] arguments) {
        System.setOut(System.err);
        try (BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))) {
            for (String line = in.readLine(); line != null; line = in.readLine()) {
                String[] words = line.split(" ");
                switch (words[0]) {
                    case "write" -> write(options(words, "to", "drop", "count", "profile", "seed", "body", "topics",
                        "first", "exit", "haltAfter", "pauseMs", "clean"));
                    case "reindex" -> {
                        DefaultMessageStore store = Stores.logOnly(options(words));
                        Map<String, Object> figures = Stores.indexed(store);
                        Versions.index(store).shutdown();
                        OUT.println(JSON.toJSONString(figures));
                    }
                    case "find" -> find(options(words, "out"));
                    case "stop" -> stop();
                    case "halt" -> {
                        Thread.sleep(Long.parseLong(words[1]));
                        Runtime.getRuntime().halt(137);
                    }
                    default -> throw new IllegalArgumentException("write, reindex, find, stop or halt, not " + line);
                }
            }
            System.exit(0);
        } catch (Throwable problem) { // whatever it was, the threads that RocketMQ left must not keep the JVM
            problem.printStackTrace();
            Runtime.getRuntime().halt(1);
        }
    }

    private static Options options(String[] words, String... own) {
        return new Options(words, Stream.concat(Stream.of(Stores.NAMES), Stream.of(own)).toArray(String[]::new));
    }

    private static void write(Options options) throws Exception {
        DefaultMessageStore open = OPEN.remove(options.required("store"));
        DefaultMessageStore store = open != null ? open : Stores.started(Stores.config(options));
        Stores.settle(store);
        Map<String, Object> figures = new LinkedHashMap<>();
        figures.put("openedAt", store.getMaxPhyOffset());
        if (options.number("drop", 0) > 0) {
            // A segment that is just being flushed would stay.
            long segment = store.getMessageStoreConfig().getMappedFileSizeCommitLog();
            while (store.getCommitLog().getFlushedWhere() < store.getMaxPhyOffset() - segment) {
                Thread.sleep(1);
            }
            int dropped = store.getCommitLog().deleteExpiredFile(0, 0, 1000, true, options.small("drop", 0));
            Stores.clean(store);
            figures.put("dropped", dropped);
        }
        if (options.flag("clean")) {
            Stores.clean(store);
        }
        if (options.number("to", -1) >= 0) {
            Stores.cut(store, options.number("to", -1));
            figures.put("truncatedTo", store.getMaxPhyOffset());
        }
        if (options.number("haltAfter", 0) > 0) {
            haltAt(store, store.getMaxPhyOffset() + options.number("haltAfter", 0));
        }
        if (options.number("count", 0) > 0) {
            figures.putAll(Store.fill(store, options));
        }
        figures.put("minOffset", store.getMinPhyOffset());
        figures.put("maxOffset", store.getMaxPhyOffset());
        switch (options.text("exit", "clean")) {
            case "clean" -> store.shutdown();
            case "open" -> OPEN.put(options.required("store"), store);
            case "busy" -> busy(store, options);
            case "halt" -> store.getStoreCheckpoint().flush(); // its timer does so every second
            default -> throw new IllegalArgumentException("exit is clean, open, busy or halt");
        }
        OUT.println(JSON.toJSONString(figures));
        if (options.text("exit", "clean").equals("halt")) {
            Runtime.getRuntime().halt(137);
        }
    }

    private static void find(Options options) throws Exception {
        DefaultMessageStore open = OPEN.get(options.required("store"));
        DefaultMessageStore store = open != null ? open : Stores.logOnly(options);
        OUT.println(JSON.toJSONString(new Findable(store).write(Path.of(options.required("out")))));
    }

    /** Each takes three seconds, and they are spent asleep. */
    private static void stop() {
        OPEN.values().stream().map(store -> new Thread(store::shutdown)).peek(Thread::start).toList().forEach(thread -> {
            try {
                thread.join();
            } catch (InterruptedException end) {
                throw new IllegalStateException(end);
            }
        });
        OUT.println(JSON.toJSONString(Map.of("stopped", OPEN.size())));
        OPEN.clear();
    }

    /** Thirty messages, a pause, and so on: some stores at a time, and their index is never far behind. */
    private static void busy(DefaultMessageStore store, Options options) {
        Messages messages = new Messages(options);
        Thread writer = new Thread(() -> {
            try {
                for (long i = options.number("count", 0) + options.number("first", 0); ; i++) {
                    Store.put(store, messages.next(i, store.getMaxPhyOffset()));
                    if (i % 30 == 0) {
                        Thread.sleep(options.number("pauseMs", 100));
                    }
                }
            } catch (InterruptedException end) {
                Thread.currentThread().interrupt();
            }
        });
        writer.setDaemon(true);
        writer.start();
    }

    /** Ends everything as soon as the log is that long, wherever the thread that writes may be then. */
    private static void haltAt(DefaultMessageStore store, long maxOffset) {
        Thread watch = new Thread(() -> {
            while (store.getMaxPhyOffset() < maxOffset) {
                Thread.onSpinWait();
            }
            Runtime.getRuntime().halt(137);
        });
        watch.setDaemon(true);
        watch.start();
    }
}
