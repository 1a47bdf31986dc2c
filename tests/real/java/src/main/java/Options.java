// SPDX-License-Identifier: Apache-2.0

import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.remoting.RPCHook;

/** {@code name=value} arguments; a name that the program does not know ends it, so that a typing error is seen. */
final class Options {
    private final Map<String, String> values = new LinkedHashMap<>();

    /** Reads the arguments behind the mode. Names that start with {@code set.} are free. */
    Options(String[] arguments, String... known) {
        List<String> names = Arrays.asList(known);
        for (String argument : Arrays.copyOfRange(arguments, 1, arguments.length)) {
            String[] pair = argument.split("=", 2);
            if (pair.length < 2 || !(pair[0].startsWith("set.") || names.contains(pair[0]))) {
                throw new IllegalArgumentException("unknown argument " + argument + "; known are " + names);
            }
            values.put(pair[0], pair[1]);
        }
    }

    String text(String name, String otherwise) {
        return values.getOrDefault(name, otherwise);
    }

    String required(String name) {
        if (!values.containsKey(name)) {
            throw new IllegalArgumentException(name + "= is missing");
        }
        return values.get(name);
    }

    long number(String name, long otherwise) {
        return values.containsKey(name) ? Long.parseLong(values.get(name)) : otherwise;
    }

    int small(String name, int otherwise) {
        return Math.toIntExact(number(name, otherwise));
    }

    boolean flag(String name) {
        return Boolean.parseBoolean(text(name, "false"));
    }

    /** What signs requests with {@code access-key=} and {@code secret-key=}; null without them. */
    RPCHook signature() {
        return values.containsKey("access-key")
            ? new AclClientRPCHook(new SessionCredentials(required("access-key"), required("secret-key")))
            : null;
    }

    /** The {@code set.NAME=value} arguments without their prefix: settings of RocketMQ's own MessageStoreConfig. */
    Map<String, String> settings() {
        Map<String, String> found = new LinkedHashMap<>();
        values.forEach((name, value) -> {
            if (name.startsWith("set.")) {
                found.put(name.substring(4), value);
            }
        });
        return found;
    }
}
