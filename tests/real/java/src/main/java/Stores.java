// SPDX-License-Identifier: Apache-2.0

import java.nio.ByteBuffer;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.store.CommitLog;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.index.IndexService;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** How every mode opens a store, waits for it and walks its commitlog. */
final class Stores {
    /** The options that {@link #config} reads. */
    static final String[] NAMES = {
        "store", "segment", "queuefile", "slots", "entries", "maxmessage", "propcrc", "transientpool", "poolsize",
        "index-safe", "index",
    };

    private static final long STUCK_NANOSECONDS = 60_000_000_000L;
    private static final int TEN_YEARS_OF_HOURS = 24 * 3653;

    private Stores() {
    }

    /** Small files unless told otherwise; nothing expires, so that a mode never deletes what it was given. */
    static MessageStoreConfig config(Options options) {
        String store = options.required("store");
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(store);
        config.setStorePathCommitLog(store + "/commitlog");
        config.setMappedFileSizeCommitLog(options.small("segment", 1 << 20));
        config.setMappedFileSizeConsumeQueue(options.small("queuefile", 6000));
        config.setMaxHashSlotNum(options.small("slots", 1000));
        config.setMaxIndexNum(options.small("entries", 4000));
        config.setMaxMessageSize(options.small("maxmessage", 262144));
        config.setEnabledAppendPropCRC(options.flag("propcrc"));
        config.setTransientStorePoolEnable(options.flag("transientpool"));
        config.setTransientStorePoolSize(options.small("poolsize", poolSize(config.getMappedFileSizeCommitLog())));
        // without it 5.4.0 goes on without a buffer when the pool is empty, and its dispatch then stops there for ever
        config.setFastFailIfNoBufferInStorePool(true);
        config.setMessageIndexSafe(options.flag("index-safe"));
        config.setFlushDiskType(FlushDiskType.ASYNC_FLUSH);
        config.setHaListenPort(0);
        config.setTimerWheelEnable(false);
        config.setFileReservedTime(TEN_YEARS_OF_HOURS);
        config.setDiskMaxUsedSpaceRatio(95);
        config.setCleanFileForciblyEnable(false);
        Properties settings = new Properties();
        settings.putAll(options.settings());
        MixAll.properties2Object(settings, config);
        return config;
    }

    /** Buffers of a segment each, 256 MiB in all, but at least what RocketMQ itself takes, and not a thousand of them. */
    private static int poolSize(int segment) {
        return Math.max(5, Math.min(256, (256 << 20) / segment));
    }

    static DefaultMessageStore create(MessageStoreConfig config) throws Exception {
        BrokerConfig broker = new BrokerConfig();
        broker.setBrokerClusterName("TestCluster");
        broker.setBrokerName("test");
        return new DefaultMessageStore(config, new BrokerStatsManager("TestCluster", false),
            (topic, queue, offset, tags, time, filter, properties) -> { }, broker, new ConcurrentHashMap<>());
    }

    static DefaultMessageStore started(MessageStoreConfig config) throws Exception {
        DefaultMessageStore store = create(config);
        if (!store.load()) {
            throw new IllegalStateException("the store did not load");
        }
        store.start();
        return store;
    }

    /** Returns when RocketMQ's own dispatch (consume queues, index) has taken everything in the commitlog. */
    static void settle(DefaultMessageStore store) throws InterruptedException {
        long least = Long.MAX_VALUE;
        long moved = System.nanoTime();
        for (long behind = store.dispatchBehindBytes(); behind > 0; behind = store.dispatchBehindBytes()) {
            if (behind < least) {
                least = behind;
                moved = System.nanoTime();
            } else if (System.nanoTime() - moved > STUCK_NANOSECONDS) {
                throw new IllegalStateException("dispatch is stuck " + behind + " bytes behind");
            }
            Thread.sleep(1);
        }
    }

    /**
     * A store of which nothing but the commitlog and the index service is loaded: no recovery changes it, and no other
     * thread of it competes. {@code index=DIR} leaves its own index alone. Never shut it down: that would write a
     * checkpoint and delete files.
     */
    static DefaultMessageStore logOnly(Options options) throws Exception {
        MessageStoreConfig config = config(options);
        config.setMessageIndexEnable(false);
        config.setStorePathRootDir(options.text("index", options.required("store")));
        DefaultMessageStore store = create(config);
        Versions.closeLock(store);
        if (!store.getCommitLog().load() || !Versions.index(store).load(true)) {
            throw new IllegalStateException("the store did not load");
        }
        return store;
    }

    /**
     * Throws away what the index service has and gives it every message again, to the first thing that is no message,
     * which in a log that was cut is behind the cut.
     */
    static Map<String, Object> indexed(DefaultMessageStore store) {
        IndexService index = Versions.index(store);
        index.destroy();
        long[] count = new long[1];
        long begin = System.nanoTime();
        scan(store, (phyOffset, request) -> {
            count[0]++;
            index.buildIndex(request);
        });
        double taken = (System.nanoTime() - begin) / 1e9;
        Map<String, Object> figures = new LinkedHashMap<>();
        figures.put("messages", count[0]);
        figures.put("seconds", taken);
        figures.put("messagesPerSecond", Math.round(count[0] / taken));
        return figures;
    }

    /** Has RocketMQ cut the log at the last message start at or before an offset. */
    static void cut(DefaultMessageStore store, long wanted) throws Exception {
        long[] start = {store.getMinPhyOffset()};
        scan(store, (phyOffset, request) -> {
            if (phyOffset <= wanted) {
                start[0] = phyOffset;
            }
        });
        if (!store.truncateFiles(start[0])) {
            throw new IllegalStateException("RocketMQ refused to truncate to " + start[0]);
        }
    }

    /** What RocketMQ does every ten seconds: index and queue files that only point before the log's begin go. */
    static void clean(DefaultMessageStore store) {
        Versions.clean(store);
    }

    interface Sink {
        void take(long phyOffset, DispatchRequest request);
    }

    /**
     * Walks the commitlog as RocketMQ's tail loop does, without checksums and without reading bodies.
     *
     * @return where the walk ended
     */
    static long scan(DefaultMessageStore store, Sink sink) {
        CommitLog log = store.getCommitLog();
        long offset = log.getMinOffset();
        while (true) {
            SelectMappedBufferResult region = log.getData(offset);
            if (region == null) {
                return offset;
            }
            try {
                ByteBuffer buffer = region.getByteBuffer();
                offset = region.getStartOffset();
                for (int read = 0; read < region.getSize(); ) {
                    DispatchRequest request = log.checkMessageAndReturnSize(buffer, false, false, false);
                    if (!request.isSuccess()) {
                        return offset;
                    }
                    int size = request.getMsgSize();
                    if (size > 0) {
                        sink.take(offset, request);
                        offset += size;
                        read += size;
                    } else {
                        offset = log.rollNextFile(offset);
                        break;
                    }
                }
            } finally {
                region.release();
            }
        }
    }
}
