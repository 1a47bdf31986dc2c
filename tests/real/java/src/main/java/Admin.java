// SPDX-License-Identifier: Apache-2.0

import com.alibaba.fastjson2.JSON;
import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.locks.LockSupport;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * mqadmin, for many commands: {@code Admin run in=FILE out=FILE}. A line of in= is the words of a command as a JSON
 * list; a line of out= is what it said, on both streams, and the body that it put into a file, which is removed.
 */
public final class Admin extends MQAdminStartup {
    private static final Pattern BODY = Pattern.compile("^Message Body Path: +(\\S+)$", Pattern.MULTILINE);

    private static final AtomicBoolean RUNNING = new AtomicBoolean();

    private Admin() {
    }

    public static void main(String[] arguments) {
        PrintStream stdout = System.out;
        PrintStream stderr = System.err;
        try {
            Options options = new Options(arguments, "in", "out", "access-key", "secret-key");
            hurry(Thread.currentThread());
            List<String> commands = Files.readAllLines(Path.of(options.required("in")));
            try (PrintStream out = new PrintStream(options.required("out"), StandardCharsets.UTF_8)) {
                for (String command : commands) {
                    out.println(JSON.toJSONString(answer(options, JSON.parseArray(command, String.class))));
                }
            }
            System.setOut(stdout);
            stdout.println(JSON.toJSONString(Map.of("commands", commands.size())));
            System.exit(0);
        } catch (Throwable problem) {
            problem.printStackTrace(stderr);
            Runtime.getRuntime().halt(1);
        }
    }

    /** A client that is shut down waits for a thread which looks up every three seconds only: not here. */
    private static void hurry(Thread commands) {
        Thread thread = new Thread(() -> {
            while (true) {
                synchronized (RUNNING) {
                    boolean waits = Arrays.stream(commands.getStackTrace()).anyMatch(
                        at -> at.getClassName().endsWith(".ServiceThread") && at.getMethodName().equals("shutdown"));
                    if (waits && RUNNING.get()) {
                        commands.interrupt();
                    }
                }
                LockSupport.parkNanos(20_000_000);
            }
        });
        thread.setDaemon(true);
        thread.start();
    }

    private static Map<String, Object> answer(Options options, List<String> words) throws Exception {
        ByteArrayOutputStream said = new ByteArrayOutputStream();
        PrintStream stream = new PrintStream(said, true, StandardCharsets.UTF_8);
        System.setOut(stream);
        System.setErr(stream);
        SUB_COMMANDS.clear(); // some of them keep a client that they have shut down
        RUNNING.set(true);
        main0(words.toArray(String[]::new), options.signature());
        synchronized (RUNNING) {
            RUNNING.set(false);
            Thread.interrupted();
        }
        Map<String, Object> row = new LinkedHashMap<>();
        String text = said.toString(StandardCharsets.UTF_8);
        row.put("said", text);
        Matcher body = BODY.matcher(text);
        if (body.find()) {
            Path path = Path.of(body.group(1));
            row.put("body", Files.readString(path, StandardCharsets.ISO_8859_1));
            Files.delete(path);
        }
        return row;
    }
}
