import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.LongBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.HexFormat;
import java.util.function.BiConsumer;
import org.apache.kafka.storage.internals.log.OffsetIndex;
import org.apache.kafka.storage.internals.log.OffsetPosition;
import org.apache.kafka.storage.internals.log.TimeIndex;
import org.apache.kafka.storage.internals.log.TimestampOffset;

/**
 * How fast Kafka's own OffsetIndex and TimeIndex are: {@code java KafkaIndexes.java offset|time DIR BASE SIZE ROUNDS}.
 *
 * <p>DIR holds int64 numbers, big-endian: {@code entries} in pairs, {@code random} and {@code end} as targets. Each round
 * appends all entries to a new index of SIZE bytes and looks all targets up; one line of JSON a round says the seconds
 * of each, and the SHA-256 of the file and of the answers. One kind a process: the compiler then knows the class.
 */
public final class KafkaIndexes {
    private static final String[] TARGETS = {"random", "end"};

    private KafkaIndexes() {
    }

    public static void main(String[] arguments) throws Exception {
        boolean ofTimes = arguments[0].equals("time");
        Path directory = Path.of(arguments[1]);
        long base = Long.parseLong(arguments[2]);
        int size = Integer.parseInt(arguments[3]);
        int rounds = Integer.parseInt(arguments[4]);
        long[] entries = numbers(directory.resolve("entries"));
        long[][] targets = {numbers(directory.resolve(TARGETS[0])), numbers(directory.resolve(TARGETS[1]))};
        Path file = directory.resolve("kafka");
        for (int round = 0; round < rounds; round++) {
            StringBuilder said = new StringBuilder("{\"round\": " + round);
            if (ofTimes) {
                try (TimeIndex index = new TimeIndex(file.toFile(), base, size, true)) {
                    measure(() -> append(index, entries), (some, found) -> lookUp(index, some, found), targets, said);
                }
            } else {
                try (OffsetIndex index = new OffsetIndex(file.toFile(), base, size, true)) {
                    measure(() -> append(index, entries), (some, found) -> lookUp(index, some, found), targets, said);
                }
            }
            System.out.println(said.append(", \"file\": \"" + sha(Files.readAllBytes(file)) + "\"}"));
            Files.delete(file);
        }
    }

    private static void measure(Runnable append, BiConsumer<long[], long[]> lookUp, long[][] targets,
            StringBuilder said) throws Exception {
        long begin = System.nanoTime();
        append.run();
        note(said, "append", begin);
        for (int i = 0; i < TARGETS.length; i++) {
            long[] found = new long[2 * targets[i].length];
            begin = System.nanoTime();
            lookUp.accept(targets[i], found);
            note(said, TARGETS[i], begin);
            said.append(", \"" + TARGETS[i] + "Answers\": \"" + sha(bytes(found)) + "\"");
        }
    }

    private static void append(OffsetIndex index, long[] entries) {
        for (int i = 0; i < entries.length; i += 2) {
            index.append(entries[i], (int) entries[i + 1]);
        }
    }

    private static void append(TimeIndex index, long[] entries) {
        for (int i = 0; i < entries.length; i += 2) {
            index.maybeAppend(entries[i], entries[i + 1]);
        }
    }

    private static void lookUp(OffsetIndex index, long[] targets, long[] found) {
        for (int i = 0; i < targets.length; i++) {
            OffsetPosition entry = index.lookup(targets[i]);
            found[2 * i] = entry.offset;
            found[2 * i + 1] = entry.position;
        }
    }

    private static void lookUp(TimeIndex index, long[] targets, long[] found) {
        for (int i = 0; i < targets.length; i++) {
            TimestampOffset entry = index.lookup(targets[i]);
            found[2 * i] = entry.timestamp;
            found[2 * i + 1] = entry.offset;
        }
    }

    private static void note(StringBuilder said, String name, long begin) {
        said.append(", \"" + name + "\": " + (System.nanoTime() - begin) / 1e9);
    }

    private static long[] numbers(Path path) throws IOException {
        LongBuffer buffer = ByteBuffer.wrap(Files.readAllBytes(path)).asLongBuffer();
        long[] numbers = new long[buffer.remaining()];
        buffer.get(numbers);
        return numbers;
    }

    private static byte[] bytes(long[] numbers) {
        byte[] bytes = new byte[numbers.length * Long.BYTES];
        ByteBuffer.wrap(bytes).asLongBuffer().put(numbers);
        return bytes;
    }

    private static String sha(byte[] bytes) throws Exception {
        return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(bytes));
    }
}
