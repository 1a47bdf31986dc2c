// SPDX-License-Identifier: Apache-2.0

import com.alibaba.fastjson2.JSON;
import java.io.IOException;
import java.io.PrintWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.store.index.IndexService;

/**
 * Which keys of a log its index service finds: each key of each message is asked for, without bounds. What is indexed
 * of a message is decided here as IndexService does it.
 */
final class Findable {
    private static final int MANY = 20_000; // answers; more are an error

    private final IndexService index;
    private final boolean tags = Versions.indexesTags();
    private final Map<Long, List<String>> messages = new LinkedHashMap<>(); // topic#key by offset, in log order
    private final Map<String, List<Long>> answers = new HashMap<>();
    private final long begin;
    private long counted;

    Findable(DefaultMessageStore store) {
        index = Versions.index(store);
        begin = store.getCommitLog().getMinOffset();
        Stores.scan(store, this::take);
    }

    /**
     * A JSON line in out= for each message with keys that are not found: its phyOffset and those keys, lost. Figures:
     * messages, keys, lost keys; answers that name a message more often than it has a key of that hash (twice), those
     * that name what has none (astray), and a digest of all answers in their order. What has expired counts for nothing.
     */
    Map<String, Object> write(Path out) throws IOException {
        long keys = 0;
        long lost = 0;
        try (PrintWriter lines = new PrintWriter(Files.newBufferedWriter(out))) {
            for (Map.Entry<Long, List<String>> message : messages.entrySet()) {
                List<String> missing = new ArrayList<>(message.getValue());
                missing.removeIf(key -> answers.get(key).contains(message.getKey()));
                keys += message.getValue().size();
                lost += missing.size();
                if (!missing.isEmpty()) {
                    lines.println(JSON.toJSONString(Map.of("phyOffset", message.getKey(), "lost", missing)));
                }
            }
            if (lines.checkError()) {
                throw new IOException("cannot write " + out);
            }
        }
        Map<String, Object> figures = new LinkedHashMap<>();
        figures.put("messages", counted);
        figures.put("keyedMessages", messages.size());
        figures.put("keys", keys);
        figures.put("lost", lost);
        figures.put("twice", surplus(true));
        figures.put("astray", surplus(false));
        figures.put("answers", new TreeMap<>(answers).toString().hashCode());
        return figures;
    }

    private void take(long phyOffset, DispatchRequest request) {
        counted++;
        if (MessageSysFlag.getTransactionValue(request.getSysFlag()) == MessageSysFlag.TRANSACTION_ROLLBACK_TYPE) {
            return;
        }
        List<String> keys = new ArrayList<>();
        if (request.getUniqKey() != null) {
            keys.add(request.getUniqKey());
        }
        if (request.getKeys() != null) {
            keys.addAll(List.of(request.getKeys().split(" ")));
            keys.removeIf(String::isEmpty);
        }
        Map<String, String> properties = request.getPropertiesMap();
        String tag = tags && properties != null ? properties.get(MessageConst.PROPERTY_TAGS) : null;
        if (tag != null && !tag.isEmpty()) {
            keys.add("T#" + tag); // topic#T#tags, and no other text is hashed for it
        }
        keys.replaceAll(key -> request.getTopic() + "#" + key);
        keys.forEach(key -> answers.computeIfAbsent(key, text -> ask(request.getTopic(), text)));
        if (!keys.isEmpty()) {
            messages.put(phyOffset, keys);
        }
    }

    private List<Long> ask(String topic, String text) {
        String key = text.substring(topic.length() + 1);
        List<Long> found = index.queryOffset(topic, key, MANY, 0, Long.MAX_VALUE).getPhyOffsets();
        if (found.size() >= MANY) {
            throw new IllegalStateException(found.size() + " answers for " + text + ": say set.maxMsgsNumBatch");
        }
        return found.stream().filter(phyOffset -> phyOffset >= begin).toList();
    }

    /** Entries of one hash are answers for every key that has it, so one key of each hash is looked at. */
    private long surplus(boolean ofItsOwn) {
        long surplus = 0;
        Set<Integer> hashes = new HashSet<>();
        for (Map.Entry<String, List<Long>> answer : answers.entrySet()) {
            if (!hashes.add(hash(answer.getKey()))) {
                continue;
            }
            for (long phyOffset : new HashSet<>(answer.getValue())) {
                int rightly = alike(messages.getOrDefault(phyOffset, List.of()), answer.getKey());
                if (rightly > 0 == ofItsOwn) {
                    surplus += Math.max(0, Collections.frequency(answer.getValue(), phyOffset) - rightly);
                }
            }
        }
        return surplus;
    }

    /** How many of a message's keys have the hash of this one. */
    private static int alike(List<String> keys, String key) {
        return (int) keys.stream().filter(other -> hash(other) == hash(key)).count();
    }

    private static int hash(String key) {
        int hash = Math.abs(key.hashCode());
        return Math.max(hash, 0);
    }
}
