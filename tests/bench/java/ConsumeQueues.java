import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.HexFormat;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.store.ConsumeQueue;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.queue.CqUnit;
import org.apache.rocketmq.store.queue.ReferredIterator;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * How fast RocketMQ's own ConsumeQueue is read:
 * {@code java ConsumeQueues.java ROOT TOPIC QUEUE FILESIZE TARGETS ROUNDS}.
 *
 * <p>ROOT is a store's consumequeue directory, TARGETS a file of int64 numbers, big-endian: queue offsets. Each round
 * reads the whole queue in order, file by file, and then each unit of TARGETS; one line of JSON a round says the seconds,
 * the units read and the SHA-256 of the units as int64 numbers.
 */
public final class ConsumeQueues {
    private ConsumeQueues() {
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = System.out;
        System.setOut(System.err); // RocketMQ logs to it
        Path root = Path.of(arguments[0]);
        long[] targets = numbers(Path.of(arguments[4]));
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(root.getParent().resolve("rocketmq").toString());
        config.setStorePathCommitLog(config.getStorePathRootDir() + "/commitlog");
        config.setMappedFileSizeConsumeQueue(Integer.parseInt(arguments[3]));
        // Neither loaded nor started: it is there to be asked for its settings.
        DefaultMessageStore store = new DefaultMessageStore(config, new BrokerStatsManager("bench", false),
            (topic, queue, offset, tags, time, filter, properties) -> { }, new BrokerConfig(), new ConcurrentHashMap<>());
        ConsumeQueue queue = new ConsumeQueue(arguments[1], Integer.parseInt(arguments[2]), root.toString(),
            config.getMappedFileSizeConsumeQueue(), store);
        if (!queue.load()) {
            throw new IllegalStateException("the queue did not load");
        }
        queue.recover();
        for (int round = 0; round < Integer.parseInt(arguments[5]); round++) {
            long[] all = new long[Math.toIntExact(3 * queue.getMaxOffsetInQueue())];
            long begin = System.nanoTime();
            int units = inOrder(queue, all);
            double orderSeconds = (System.nanoTime() - begin) / 1e9;
            long[] some = new long[3 * targets.length];
            begin = System.nanoTime();
            single(queue, targets, some);
            double singleSeconds = (System.nanoTime() - begin) / 1e9;
            out.println("{\"round\": " + round + ", \"units\": " + units + ", \"order\": " + orderSeconds
                + ", \"single\": " + singleSeconds + ", \"orderAnswers\": \"" + sha(all) + "\", \"singleAnswers\": \""
                + sha(some) + "\"}");
        }
        out.flush();
        Runtime.getRuntime().halt(0); // its threads would keep the process, and shutting it down writes files
    }

    private static int inOrder(ConsumeQueue queue, long[] found) {
        int count = 0;
        while (true) {
            ReferredIterator<CqUnit> units = queue.iterateFrom(count);
            if (units == null) {
                return count;
            }
            try {
                while (units.hasNext()) {
                    keep(units.next(), found, count++);
                }
            } finally {
                units.release();
            }
        }
    }

    private static void single(ConsumeQueue queue, long[] targets, long[] found) {
        for (int i = 0; i < targets.length; i++) {
            keep(queue.get(targets[i]), found, i);
        }
    }

    private static void keep(CqUnit unit, long[] found, int row) {
        found[3 * row] = unit.getPos();
        found[3 * row + 1] = unit.getSize();
        found[3 * row + 2] = unit.getTagsCode();
    }

    private static long[] numbers(Path path) throws Exception {
        byte[] bytes = Files.readAllBytes(path);
        long[] numbers = new long[bytes.length / Long.BYTES];
        ByteBuffer.wrap(bytes).asLongBuffer().get(numbers);
        return numbers;
    }

    private static String sha(long[] numbers) throws Exception {
        byte[] bytes = new byte[numbers.length * Long.BYTES];
        ByteBuffer.wrap(bytes).asLongBuffer().put(numbers);
        return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(bytes));
    }
}
