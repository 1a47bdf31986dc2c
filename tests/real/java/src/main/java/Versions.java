// SPDX-License-Identifier: Apache-2.0

import java.io.IOException;
import java.io.RandomAccessFile;
import java.util.stream.Stream;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.index.IndexService;

/** What 5.3.3 and 5.4.0 keep in different places. The programs are compiled against 5.4.0 and run with both. */
final class Versions {
    private Versions() {
    }

    /** 5.3.3 has the field and no way to ask for it. */
    static IndexService index(DefaultMessageStore store) {
        return (IndexService) field(store, "indexService");
    }

    /** Who has the lock file open looks like a broker that is loading. */
    static void closeLock(DefaultMessageStore store) throws IOException {
        ((RandomAccessFile) field(store, "lockFile")).close();
    }

    private static Object field(DefaultMessageStore store, String name) {
        try {
            var field = DefaultMessageStore.class.getDeclaredField(name);
            field.setAccessible(true);
            return field.get(store);
        } catch (ReflectiveOperationException problem) {
            throw new IllegalStateException(problem);
        }
    }

    /** What cleans queue and index files of expired log is a part of the queues' store from 5.4.0 on. */
    static void clean(DefaultMessageStore store) {
        Object[] owners = {store, store.getQueueStore()};
        try {
            for (Object owner : owners) {
                for (Class<?> inner : owner.getClass().getDeclaredClasses()) {
                    if (inner.getSimpleName().equals("CleanConsumeQueueService")) {
                        var constructor = inner.getDeclaredConstructor(owner.getClass());
                        constructor.setAccessible(true);
                        var run = inner.getMethod("run");
                        run.setAccessible(true);
                        run.invoke(constructor.newInstance(owner));
                        return;
                    }
                }
            }
        } catch (ReflectiveOperationException problem) {
            throw new IllegalStateException(problem);
        }
        throw new IllegalStateException("nothing cleans the queues");
    }

    /** Whether this version indexes tags: then it can be asked for them. */
    static boolean indexesTags() {
        return Stream.of(IndexService.class.getMethods())
            .anyMatch(method -> method.getName().equals("queryOffset") && method.getParameterCount() == 6);
    }
}
