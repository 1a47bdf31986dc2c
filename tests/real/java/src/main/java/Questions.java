// SPDX-License-Identifier: Apache-2.0

import com.alibaba.fastjson2.JSON;
import java.io.IOException;
import java.io.PrintWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.common.BoundaryType;

/**
 * Questions about queues, a line each of in=, and their answers in out=, a JSON line each:
 * {@code offset TAB topic TAB queue TAB offset TAB max} and {@code time TAB topic TAB queue TAB ms TAB lower|upper}.
 */
final class Questions {
    interface Answers {
        Map<String, Object> byOffset(String topic, int queueId, long offset, int max) throws Exception;

        long byTime(String topic, int queueId, long timestamp, BoundaryType boundary) throws Exception;
    }

    private Questions() {
    }

    static long answer(Options options, Answers answers) throws Exception {
        long count = 0;
        try (PrintWriter out = new PrintWriter(Files.newBufferedWriter(Path.of(options.required("out"))))) {
            for (String line : Files.readAllLines(Path.of(options.required("in")))) {
                out.println(JSON.toJSONString(one(line.split("\t", -1), answers)));
                count++;
            }
            if (out.checkError()) {
                throw new IOException("cannot write " + options.required("out"));
            }
        }
        return count;
    }

    static Map<String, Object> row(String status, long next, long min, long max, List<Long> phyOffsets) {
        Map<String, Object> row = new LinkedHashMap<>();
        row.put("status", status);
        row.put("nextOffset", next);
        row.put("minOffset", min);
        row.put("maxOffset", max);
        row.put("phyOffsets", phyOffsets);
        return row;
    }

    private static Map<String, Object> one(String[] fields, Answers answers) throws Exception {
        int queueId = Integer.parseInt(fields[2]);
        long value = Long.parseLong(fields[3]);
        if (fields[0].equals("offset")) {
            return answers.byOffset(fields[1], queueId, value, Integer.parseInt(fields[4]));
        }
        BoundaryType boundary = BoundaryType.getType(fields[4]);
        return Map.of("queueOffset", answers.byTime(fields[1], queueId, value, boundary));
    }
}
