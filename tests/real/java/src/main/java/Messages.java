// SPDX-License-Identifier: Apache-2.0

import java.net.InetSocketAddress;
import java.util.Random;
import org.apache.rocketmq.common.TopicFilterType;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;

/** Messages as the broker hands them to its store: all alike (plain), of one size (even), half a transaction each (prepared), or of every kind (varied). */
final class Messages {
    private static final String UNIQUE_PREFIX = "7F00000100002A13";
    private static final char[] HEX = "0123456789ABCDEF".toCharArray();
    private static final InetSocketAddress V4 = new InetSocketAddress("10.1.2.3", 10911);
    private static final InetSocketAddress V6 = new InetSocketAddress("fd00::1", 10911);

    private final boolean varied;
    private final boolean prepared;
    private final String keysFormat;
    private final Random random;
    private final long seed;
    private final String[] topics;
    private final int body;
    private final byte[] noise = new byte[1 << 20];

    Messages(Options options) {
        String profile = options.text("profile", "plain");
        varied = profile.equals("varied");
        prepared = profile.equals("prepared");
        if (!varied && !prepared && !profile.equals("plain") && !profile.equals("even")) {
            throw new IllegalArgumentException("profile is plain, even, prepared or varied, not " + profile);
        }
        keysFormat = profile.equals("even") ? "order-%08d user-%06d" : "order-%d user-%d";
        seed = options.number("seed", 1);
        random = new Random(seed);
        // TopicA#4E1C<E= hashes to the one value that has no absolute value; 200 letters need the second frame format
        String all = varied ? "TopicTest,OrderPaid,TopicA,订单主题,L" + "x".repeat(199) : "TopicTest,OrderPaid";
        topics = options.text("topics", all).split(",");
        body = options.small("body", 100);
        random.nextBytes(noise);
    }

    /** The i-th message; commit and rollback messages point back behind {@code maxOffset}. */
    MessageExtBrokerInner next(long i, long maxOffset) {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        message.setTopic(topics[random.nextInt(topics.length)]);
        message.setQueueId(random.nextInt(4));
        message.setBornTimestamp(System.currentTimeMillis() - random.nextInt(5000));
        message.setStoreHost(V4);
        message.setBornHost(V4);
        if (varied) {
            vary(message, maxOffset);
        } else {
            message.setBody(body(body));
            message.setKeys(String.format(keysFormat, i, random.nextInt(1_000_000)));
            put(message, MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX, unique(seed << 40 ^ i));
            message.setTags("TagA");
            message.setSysFlag(prepared ? MessageSysFlag.TRANSACTION_PREPARED_TYPE : 0);
        }
        message.setTagsCode(MessageExtBrokerInner.tagsString2tagsCode(TopicFilterType.SINGLE_TAG, message.getTags()));
        message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
        return message;
    }

    private void vary(MessageExtBrokerInner message, long maxOffset) {
        message.setBody(body(random.nextInt(50) == 0 ? random.nextInt(20_000) : random.nextInt(400)));
        message.setFlag(random.nextInt());
        message.setReconsumeTimes(random.nextInt(3));
        if (random.nextInt(10) == 0) {
            message.setStoreHost(V6);
            message.setStoreHostAddressV6Flag();
        }
        if (random.nextInt(10) == 0) {
            message.setBornHost(V6);
            message.setBornHostV6Flag();
        }
        String keys = keys();
        if (!keys.isEmpty()) {
            put(message, MessageConst.PROPERTY_KEYS, keys);
        }
        if (random.nextInt(3) > 0) {
            put(message, MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX, unique(random.nextLong()));
        }
        if (random.nextInt(3) > 0) {
            message.setTags(random.nextInt(5) == 0 ? "标签" + random.nextInt(5) : "Tag" + random.nextInt(8));
        }
        if (random.nextInt(4) == 0) {
            put(message, "p" + random.nextInt(9), letters(random.nextInt(60)));
        }
        flags(message, maxOffset);
        if (random.nextInt(25) == 0) {
            schedule(message, 1 + random.nextInt(5));
        }
    }

    /** Transaction states and the compressed bit; the store takes them as they are. */
    private void flags(MessageExtBrokerInner message, long maxOffset) {
        int flag = switch (random.nextInt(20)) {
            case 0 -> MessageSysFlag.TRANSACTION_PREPARED_TYPE;
            case 1 -> MessageSysFlag.TRANSACTION_COMMIT_TYPE;
            case 2 -> MessageSysFlag.TRANSACTION_ROLLBACK_TYPE;
            case 3 -> MessageSysFlag.COMPRESSED_FLAG;
            default -> 0;
        };
        message.setSysFlag(message.getSysFlag() | flag);
        if (flag == MessageSysFlag.TRANSACTION_COMMIT_TYPE || flag == MessageSysFlag.TRANSACTION_ROLLBACK_TYPE) {
            message.setPreparedTransactionOffset(Math.max(0, maxOffset - 1000));
        }
    }

    /** A delayed message as the broker stores it before its time has come. */
    private static void schedule(MessageExtBrokerInner message, int level) {
        put(message, MessageConst.PROPERTY_REAL_TOPIC, message.getTopic());
        put(message, MessageConst.PROPERTY_REAL_QUEUE_ID, String.valueOf(message.getQueueId()));
        put(message, MessageConst.PROPERTY_DELAY_TIME_LEVEL, String.valueOf(level));
        message.setTopic("SCHEDULE_TOPIC_XXXX");
        message.setQueueId(level - 1);
    }

    /** Up to seven keys, some of them again, with the odd leading, doubled and trailing space; or none. */
    private String keys() {
        int count = random.nextInt(8);
        StringBuilder text = new StringBuilder();
        String last = null;
        for (int j = 0; j < count; j++) {
            if (j > 0) {
                text.append(random.nextInt(9) == 0 ? "  " : " ");
            } else if (random.nextInt(20) == 0) {
                text.append(' ');
            }
            last = last != null && random.nextInt(12) == 0 ? last : key();
            text.append(last);
        }
        if (count > 0 && random.nextInt(15) == 0) {
            text.append("   ");
        }
        return text.toString();
    }

    private String key() {
        return switch (random.nextInt(13)) {
            case 0 -> "订单" + random.nextInt(500);
            case 1 -> "é" + random.nextInt(500);
            case 2 -> new String(Character.toChars(0x1F600 + random.nextInt(60))) + random.nextInt(50);
            case 3 -> "polygenelubricants";
            case 4 -> (random.nextBoolean() ? "Ea" : "FB") + "#20231001" + random.nextInt(30); // they collide
            case 5 -> letters(200);
            case 6 -> "#" + random.nextInt(9);
            case 7 -> "4E1C<E=";
            case 8 -> "T#Tag" + random.nextInt(8); // reads like a tag's entry
            default -> "order-" + random.nextInt(3000);
        };
    }

    private byte[] body(int size) {
        byte[] bytes = new byte[size];
        System.arraycopy(noise, random.nextInt(noise.length - size), bytes, 0, size);
        return bytes;
    }

    private String letters(int count) {
        StringBuilder text = new StringBuilder(count);
        for (int i = 0; i < count; i++) {
            text.append((char) ('a' + random.nextInt(26)));
        }
        return text.toString();
    }

    private static String unique(long number) {
        StringBuilder text = new StringBuilder(32).append(UNIQUE_PREFIX);
        for (int shift = 60; shift >= 0; shift -= 4) {
            text.append(HEX[(int) (number >>> shift) & 15]);
        }
        return text.toString();
    }

    private static void put(MessageExtBrokerInner message, String name, String value) {
        MessageAccessor.putProperty(message, name, value);
    }
}
